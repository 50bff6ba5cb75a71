"""The tool that counts the time to the first improved picture, on small repositories; CONTRIBUTING has the command for this one."""

import importlib.util
import subprocess
import textwrap
from pathlib import Path

import pytest
from run_report import MetricsWriter

ROOT = Path(__file__).resolve().parent.parent
spec = importlib.util.spec_from_file_location("first_picture", ROOT / "tools" / "first_picture.py")
first_picture = importlib.util.module_from_spec(spec)
spec.loader.exec_module(first_picture)


def test_the_command_is_the_readme_s_first():
    assert first_picture.first_command(ROOT / "README.md") == "pip install uv && uv run apps/flowgrpo"


def test_a_validation_is_read_from_what_a_run_writes(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.append(0, {"val/reward_mean": 0.5, "val/failed": 0})
        writer.append(1, {"reward/mean": 0.9})
        writer.append(2, {"reward/mean": 0.9, "val/reward_mean": 0.75})
    assert first_picture.validations(tmp_path) == [(0, 0.5), (2, 0.75)]
    assert first_picture.validations(tmp_path / "nothing") == []
    assert first_picture.improved([(0, 0.5), (1, 0.4), (2, 0.6), (3, 0.7)]) == (2, 0.6)
    assert first_picture.improved([(0, 0.5), (1, 0.5)]) is None
    assert first_picture.improved([]) is None


def repository(folder, rewards, last):
    """A repository whose first command looks at its environment, writes validations with these rewards, then does `last`."""
    folder.mkdir()
    (folder / "README.md").write_text("# It\n\n```\npython run.py\n```\n")
    lines = [{"step": step, "val/reward_mean": reward} for step, reward in enumerate(rewards)]
    (folder / "run.py").write_text(
        textwrap.dedent(f"""
        import json, os, pathlib, sys, time
        assert not [p for p in pathlib.Path(os.environ["HOME"]).iterdir() if p.name != "python"]
        assert "VIRTUAL_ENV" not in os.environ and sys.prefix.startswith(os.environ["HOME"])
        run = pathlib.Path("runs/one")
        run.mkdir(parents=True)
        with (run / "metrics.jsonl").open("w") as file:
            for row in {lines}:
                print(json.dumps(row), file=file, flush=True)
            file.write('{{"step": 9, "val/rew')
            file.flush()
            {last}
        """)
    )
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(folder)]
    for arguments in (["init", "--quiet"], ["add", "-A"], ["commit", "--quiet", "-m", "it"]):
        subprocess.run([*git, *arguments], check=True)
    return str(folder)


def test_an_improved_picture_is_found_and_the_run_is_stopped(tmp_path, capfd):
    waiting = (
        "exec(\"try:\\n time.sleep(250)\\nexcept KeyboardInterrupt:\\n pathlib.Path('stopped').touch()\\n raise\")"
    )
    source = repository(tmp_path / "source", [0.5, 0.4, 0.75], waiting)
    assert first_picture.main([source, "--keep", str(tmp_path / "place")]) == 0
    assert (tmp_path / "place" / "checkout" / "stopped").exists()
    said = capfd.readouterr().out
    assert "typing: python run.py" in said
    assert "val/reward_mean 0.500 before, 0.750 after step 2" in said
    assert "first improved picture after" in said


@pytest.mark.parametrize(("limit", "last"), [("250", "sys.exit(3)"), ("0", "time.sleep(250)")])
def test_none_is_a_failure(tmp_path, capfd, monkeypatch, limit, last):
    create = first_picture.venv.create
    monkeypatch.setattr(
        first_picture.venv, "create", lambda place, with_pip: create(place)
    )  # pip takes longer than the rest
    source = repository(tmp_path / "source", [0.5, 0.5], last)
    assert first_picture.main([source, "--limit-s", limit]) == 1
    said = capfd.readouterr().out
    assert ("ended with 3" if limit == "250" else "the time is over") in said
    assert "no improved picture after" in said
