"""CONTRIBUTING's table of one step's files is the real chain of calls, in its order, without a file that it does not name."""

import re
import runpy
import sys
from pathlib import Path

import flowgrpo.cli
import pytest

ROOT = Path(__file__).resolve().parent.parent
ROW = re.compile(r"^\| (\d+) \| `([^`]+)` \| `([^`]+)` \|", re.M)


def project_file(frame):
    """The file of a frame inside this repository's code; None elsewhere."""
    path = frame.f_code.co_filename
    return path if path.startswith(str(ROOT)) and "/tests/" not in path and ".venv" not in path else None


def test_the_table_names_the_files_of_one_step_in_order(one_process, monkeypatch, tmp_path):
    rows = ROW.findall((ROOT / "CONTRIBUTING.md").read_text())
    assert [int(number) for number, _, _ in rows] == list(range(1, len(rows) + 1))
    assert 8 <= len(rows) <= 12
    files = {str(ROOT / file): name for _, file, name in rows}
    assert len(files) == len(rows)
    entered, callers = [], {}

    def note(frame, event, _):
        path = frame.f_code.co_filename
        if event != "call" or path not in files or frame.f_code.co_qualname != files[path] or path in callers:
            return
        entered.append(path)
        above = frame.f_back
        while above is not None and project_file(above) in (None, path):
            above = above.f_back
        callers[path] = above and project_file(above)

    small = [
        "trainer.total_steps=1",
        "trainer.val_before_train=false",
        "data.val_max_prompts=2",
        "rollout.val_kwargs.n=1",
    ]
    small += [
        "data.prompts_per_step=2",
        "rollout.n=4",
        "actor.ppo_mini_batch_size=8",
        f"trainer.run_dir={tmp_path / 'run'}",
    ]
    monkeypatch.setattr(sys, "argv", ["flowgrpo", *small])
    sys.setprofile(note)
    try:
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(ROOT / "apps" / "flowgrpo"), run_name="__main__")
    finally:
        sys.setprofile(None)
    assert end.value.code == 0
    assert [str(Path(path).relative_to(ROOT)) for path in entered] == [file for _, file, _ in rows]
    for path, caller in list(callers.items())[1:]:
        assert caller in files, f"{path} is reached through {caller}, which the table does not name"
    assert flowgrpo.cli.APP.name == "flowgrpo"
