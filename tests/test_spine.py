"""CONTRIBUTING's table of one step's files is the real chain of calls, in its order, without a file that it does not name."""

import re
import runpy
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import flowgrpo.cli
import pytest
import ray_trainer.scoring
import ray_trainer.trainer as loop
import torch
from omni_rollout.remote import Remote
from ray_trainer.group import WorkerGroup
from ray_trainer.workers import ActorRolloutRefWorker as Worker

ROOT = Path(__file__).resolve().parent.parent
ROW = re.compile(r"^\| (\d+) \| `([^`]+)` \| `([^`]+)` \|", re.M)


class Here:
    """An actor of this process: its methods run where they are called."""

    def __init__(self, actor):
        self._actor = actor

    def __getattr__(self, name):
        method = getattr(self._actor, name)

        def remote(*arguments):
            answer = method(*arguments)
            return [Answer(one) for one in answer] if name == "generate" else Answer(answer)

        return SimpleNamespace(remote=remote, options=lambda **_: SimpleNamespace(remote=remote))


class Answer:
    """What such a method returned, as Ray's reference to it."""

    def __init__(self, value):
        self.value = value

    def __await__(self):
        return self.value
        yield


class Ray:
    def get(self, answers, timeout=None):
        return [answer.value for answer in answers]

    def kill(self, actor):
        pass


class Rewards:
    def __init__(self, *_, **__):
        pass

    async def score_all(self, samples):
        return [SimpleNamespace(score=float(sample.index), components={}, error=None) for sample in samples]

    def shutdown(self):
        pass


def picture(stored):
    return torch.from_numpy(stored.reference.value[stored.row])


@pytest.fixture
def one_process(monkeypatch):
    """The program without Ray: one worker, and rewards that are numbers."""

    def group(config):
        made = WorkerGroup.__new__(WorkerGroup)
        made.config, made._ray, made.gang = config, Ray(), SimpleNamespace(release=lambda: None)
        made.workers = [Remote(Here(Worker(config)), "worker-0")]
        made.placement = SimpleNamespace(lines=[])
        made.call(Worker.init_model)
        return made

    monkeypatch.setattr("ray_trainer.cli.ray_session", lambda config: nullcontext())
    monkeypatch.setattr(loop, "WorkerGroup", group)
    monkeypatch.setattr(
        loop, "fetched", lambda pictures: torch.stack([torch.from_numpy(p.reference.value[p.row]) for p in pictures])
    )
    monkeypatch.setattr(ray_trainer.scoring, "RewardLoopManager", Rewards)


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
