"""`trainer.staleness=1` in whole programs: killed at any moment, with a real engine, with a slow reward."""

import json
import os
import platform
import random
import signal
import sys
import time

import pytest

VICTIMS = {"driver": "", "worker": "ray::ActorRolloutRefWorker", "replica": "ray::HostedDiffusersBackend"}
LONG = ["trainer.total_steps=6", "data.prompts_per_step=3", "actor.ppo_mini_batch_size=9", "rollout.n=3"]


def killed_and_resumed(start, metric_rows, folder, arguments, victim, moment):
    """Kill -9 of a process of a run, `moment` (rows, then seconds) after its start; then the run is resumed to its end."""
    program = start("flowgrpo", *arguments, f"trainer.run_dir={folder}")
    rows, seconds = moment
    program.until(lambda: not rows or ((folder / "metrics.jsonl").exists() and len(metric_rows(folder)) >= rows))
    time.sleep(seconds)
    program.watch()
    names = [process for process in program.seen if process.is_running() and VICTIMS[victim] in process.name()]
    if victim == "driver":
        program.signal(signal.SIGKILL)
    elif names:
        names[0].kill()
    program.wait()
    done = start("flowgrpo", *arguments, f"trainer.run_dir={folder}", "trainer.on_existing=resume").wait()
    assert done.code == 0, (victim, moment, done.err[-3000:])
    return metric_rows(folder)


def without_counters(rows):
    """Rows without what tells of a replica that was started again."""
    told = ("rollout/retried", "rollout/errors", "rollout/deaths", "rollout/restarts", "rollout/queued_s", "forwards/")
    return [{key: value for key, value in row.items() if not key.startswith(told)} for row in rows]


@pytest.fixture(scope="module")
def whole(start, metric_rows, micro, tmp_path_factory):
    """`whole(*mode)`: the keys of a run that nobody kills, and its rows; made once for each mode."""
    made = {}

    def whole(*mode):
        if mode not in made:
            folder = tmp_path_factory.mktemp("whole")
            assert start("flowgrpo", *micro, *LONG, *mode, f"trainer.run_dir={folder}").wait().code == 0
            made[mode] = without_counters(metric_rows(folder))
        return [*micro, *LONG, *mode], made[mode]

    return whole


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(20))
def test_a_run_killed_at_any_moment_goes_on_with_the_same_rows(whole, start, metric_rows, tmp_path, number):
    """In both modes; driver, worker and replica as victims. With every change, `test_flowgrpo_end_to_end.py` kills a driver."""
    chance = random.Random(f"{os.environ.get('KILL_SEED', '0')}/{number}")
    victim = chance.choice([*VICTIMS])
    arguments, rows = whole(
        f"trainer.staleness={number % 2}", *(["rollout.num_replicas=2"] if victim == "replica" else [])
    )
    moment = chance.randrange(0, 4), chance.uniform(0, 0.4)
    found = killed_and_resumed(start, metric_rows, tmp_path / "killed", arguments, victim, moment)
    assert without_counters(found) == rows, (victim, moment)


QUIET = """def quiet(latents):
    return -float(abs(latents).mean())
"""
NO_ENGINE = (sys.platform, platform.machine()) != ("linux", "x86_64")


@pytest.mark.nightly  # an engine's start takes longer than these steps
@pytest.mark.timeout(900)  # three programs
@pytest.mark.skipif(NO_ENGINE, reason="vLLM-Omni has wheels for Linux x86-64 only")
def test_a_real_engine_draws_ahead_what_the_trainers_own_weights_draw(start, metric_rows, micro, rewound, tmp_path):
    """Also after a resume. The reward reads latents, so that it sees every difference."""
    (tmp_path / "quiet_reward_of_a_test.py").write_text(QUIET)
    arguments = [*micro, "trainer.staleness=1", "reward.name=./quiet_reward_of_a_test.py:quiet"]

    def rows(folder, *more):
        done = start(
            "flowgrpo", "recipe=tiny_flow_grpo", *arguments, *more, f"trainer.run_dir={tmp_path / folder}", cwd=tmp_path
        ).wait(290)
        assert done.code == 0, done.err[-4000:]
        assert done.left_over == []
        return metric_rows(tmp_path / folder)

    engine = "rollout.backend=vllm_omni"
    own, theirs = rows("own"), rows("engine", engine)
    rewound(tmp_path / "engine", tmp_path / "killed", 2)
    again = rows("killed", engine, "trainer.on_existing=resume")
    assert [row["rollout/staleness_mean"] for row in theirs] == [0, 1, 1, 1]
    assert {(row["rollout/refilled"], row["rollout/failed"], row["reward/failed"]) for row in theirs} == {(0, 0, 0)}
    assert theirs[0]["actor/rollout_log_prob_diff_max"] <= 1e-6
    assert all(row["actor/grad_norm"] > 0 and row["sync/tensors_bound"] == 96 for row in theirs)
    for other in (theirs, again):
        for mine, his in zip(own, other, strict=True):
            assert his["reward/mean"] == pytest.approx(mine["reward/mean"], rel=1e-4 if mine["step"] <= 2 else 1e-2)
            assert his["reward/std"] > 0


SLOW = """import time

def slow(image, prompt):
    time.sleep(1)
    return float(image.std())
"""


@pytest.mark.nightly  # depends on the clock
def test_with_a_reward_of_a_second_a_sample_a_step_takes_two_thirds_at_most(start, micro, tmp_path):
    """Two reward processes and 8 samples: four seconds of rewards, and an update that takes about as long (epochs make it so)."""
    (tmp_path / "slow_reward_of_a_test.py").write_text(SLOW)
    epochs = os.environ.get("EPOCHS", "20")
    arguments = [*micro, "rollout.n=4", "actor.ppo_mini_batch_size=8", "reward.name=./slow_reward_of_a_test.py:slow"]
    arguments += ["reward.num_workers=2", "reward.batch_size=1", f"actor.ppo_epochs={epochs}", "trainer.save_every=0"]
    seconds = {}
    for staleness in (0, 1):
        folder = tmp_path / f"run{staleness}"
        done = start(
            "flowgrpo", *arguments, f"trainer.staleness={staleness}", f"trainer.run_dir={folder}", cwd=tmp_path
        ).wait()
        assert done.code == 0, done.err[-3000:]
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        seconds[staleness] = sum(row["time/step"] - row.get("time/validate", 0) for row in rows[1:])
        print(staleness, [round(row["time/step"], 2) for row in rows], [round(row["time/update"], 2) for row in rows])
    assert seconds[0] / seconds[1] >= 1.5, seconds
