"""What a person sees while a run goes on: the line, what takes long, and how little `--quiet` leaves."""

import io
import math
import threading

from ray_trainer.progress import Progress
from ray_trainer.trainer import RayDiffusionTrainer
from run_report import LiveLine, working


def test_the_line_has_reward_with_error_phases_memory_and_faults():
    progress = Progress()
    row = {
        "reward/mean": 0.55,
        "reward/stderr": 0.031,
        "actor/kl_loss": 0.002,
        "time/rollout": 1.26,
        "time/update": 0.94,
    }
    row |= {"perf/max_memory_gb": 41.26, "reward/failed": 2.0, "rollout/retried": 1.0, "val/reward_mean": 0.6}
    with LiveLine(100, stream=(stream := io.StringIO())) as live:
        live.update(3, progress.shown(row))
    line = stream.getvalue()
    for part in (
        "step   3/100",
        "reward 0.550 ± 0.031",
        "val 0.600",
        "kl 0.002",
        "rollout 1.3 s",
        "update 0.9 s",
        "memory 41.3 GB",
    ):
        assert part in line
    assert "faults 3" in line
    assert progress.shown({"actor/skipped_steps": 1.0})["faults"] == "4"
    assert "faults" not in Progress().shown({"reward/failed": 0.0, "reward/mean": math.nan})


def test_on_a_terminal_the_phase_is_beside_the_line():
    with LiveLine(10, stream=io.StringIO(), plain=False) as live:
        live.update(1, {"reward": 0.5})
        live.busy("update")
        (task,) = live._progress.tasks
        assert "reward 0.500" in task.description
        assert task.description.endswith("update …")


def test_what_takes_long_says_that_it_goes_on_and_is_done():
    said, twice = [], threading.Event()

    def say(text):
        said.append(text)
        if len(said) >= 3:
            twice.set()

    with working("starting the engine", say, every_s=0.01):
        assert twice.wait(30)
    assert said[0] == "starting the engine …"
    assert said[1] == "starting the engine: 0s so far"
    assert said[-1].startswith("starting the engine: done in ")
    brief = []
    with working("loading", brief.append):
        pass
    assert brief == ["loading …"]


class Silent(RayDiffusionTrainer):
    def __init__(self):
        self.said, self.quiet = [], True
        self.echo = self.said.append

    def prepare_update(self, batch, step):
        raise NotImplementedError


def test_quiet_leaves_warnings():
    trainer = Silent()
    trainer.say("loading …")
    trainer._note("resuming")
    trainer._note("warning: the clip cuts noise")
    assert trainer.said == ["warning: the clip cuts noise"]
