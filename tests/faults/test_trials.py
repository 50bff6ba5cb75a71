"""60 kills of whole runs: no step lost beyond the last checkpoint, no other row, no hung run, no process left.

Both programs, by steps and ahead. What was tried before is not tried again: `FAULTS_FOLDER` (runs/faults) has `trials.json`.
"""

import fcntl
import importlib.util
import json
import os
import random
import shutil
import signal
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness import MICRO, Cluster, Fault, Run, Service, find_secret, rows_of

DRIVER = "ray_trainer.trainer:RayDiffusionTrainer"
WORKER = "ray_trainer.workers:ActorRolloutRefWorker"
POINTS = {
    "first step": (f"{DRIVER}.generate_sequence", 1),
    "draw": ("omni_rollout.diffusers_backend:DiffusersBackend.generate", 2),
    "collective": ("fsdp_diffusers_engine.engine:DiffusersFSDPEngine.optimizer_step", 3),
    "sync": (f"{DRIVER}.sync", 3),
    "validation": ("run_report.gallery:save_validation", 2),
    "checkpoint": ("fsdp_diffusers_engine.checkpoint:write_record", 2),
    "rename": ("ray_trainer.checkpoint:_write", 4),
    "end": (f"{WORKER}.export", 1),
}
"""Where a run is held while a process of it is killed: a function, and which of its calls in one process."""
TWO, REPLICAS = ("trainer.num_workers=2",), ("rollout.num_replicas=2",)
ENGINE = ("rollout.backend=vllm_omni",)
RANDOM = "random"
SURVIVES = ("reward", "replica", "engine", "scorer")
"""Whose death a run mends."""
DEADLINE_S = 300
FOLDER = Path(os.environ.get("FAULTS_FOLDER", "runs/faults"))
STEPS, SAVED_EVERY = 6, 2


@dataclass(frozen=True)
class Trial:
    """One kill.

    Args:
        app, ahead: program, and `trainer.staleness`.
        victim: "driver", "worker", "reward", "replica", "engine", "scorer", "gcs", or "node", the raylet of a second node.
        point: of `POINTS`, or "random": some moment after some step.
        keys: config keys.
        chance: which moment, of several at random.
    """

    app: str
    ahead: int
    victim: str
    point: str
    keys: tuple[str, ...] = ()
    chance: int = 0

    def __str__(self):
        return "-".join([self.app, "ahead" if self.ahead else "steps", self.victim, self.point.replace(" ", "_")]) + (
            f"-{self.chance}" if self.chance else ""
        )

    @property
    def mode(self):
        """All keys."""
        return (*self.keys, f"trainer.staleness={self.ahead}")

    @property
    def fault(self):
        """None where the moment is a random one."""
        return (
            None
            if self.point == RANDOM
            else Fault(*POINTS[self.point][:1], "hold", POINTS[self.point][1], seconds=DEADLINE_S)
        )


def trials_of(app, ahead):
    """15 of a program in a mode."""
    kills = [("driver", point) for point in ("first step", "sync", "validation", "rename", "end", RANDOM)]
    kills += [("worker", "collective", TWO), ("worker", "checkpoint"), ("worker", RANDOM)]
    kills += [
        ("replica", "draw", REPLICAS),
        ("engine", RANDOM, ENGINE) if app == "flowgrpo" else ("replica", RANDOM, REPLICAS),
    ]
    kills += [("reward", RANDOM), ("scorer", RANDOM), ("gcs", RANDOM), ("node", RANDOM)]
    return [Trial(app, ahead, *kill) for kill in kills]


TRIALS = [trial for app in ("flowgrpo", "dpo-online") for ahead in (0, 1) for trial in trials_of(app, ahead)]


# ---- what was seen, in one file that several processes share ---------------------------------------------------------------


@contextmanager
def locked(name):
    """Only one process at a time."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def seen():
    """What each trial has shown, by its name."""
    file = FOLDER / "trials.json"
    return json.loads(file.read_text()) if file.exists() else {}


def note(trial, **facts):
    """Keep what a trial has shown."""
    with locked("trials"):
        every = seen() | {str(trial): facts}
        scratch = FOLDER / "trials.tmp"
        scratch.write_text(json.dumps(every, indent=1))
        scratch.replace(FOLDER / "trials.json")


def undisturbed(start, trial):
    """Rows of the run that nobody kills."""
    keys = trial.mode if trial.victim not in ("scorer", "node") else (f"trainer.staleness={trial.ahead}",)
    name = "-".join([trial.app, *keys])
    with locked(name):
        place = FOLDER / name
        if not (place / "whole").exists():
            shutil.rmtree(place, ignore_errors=True)
            done = Run(start, place, keys, app=trial.app).program.wait(DEADLINE_S)
            assert done.code == 0, done.err[-3000:]
            (place / "whole").touch()
    return rows_of(place / "run")


# ---- a trial ---------------------------------------------------------------------------------------------------------------


def raw(run):
    """Lines of the metrics by step."""
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return {json.loads(line)["step"]: line for line in lines if line.endswith("\n")}


def checkpoint(run):
    """Step of the newest one."""
    latest = run / "checkpoints" / "latest.json"
    return json.loads(latest.read_text())["step"] if latest.exists() else 0


def come_to(run, trial):
    """Wait for the trial's moment."""
    if trial.fault:
        run.reached(DEADLINE_S)
        return
    chance = random.Random(str(trial))
    # A worker asks about once a second whether its raylet lives: one that dies at the end is not missed.
    step = chance.randrange(STEPS - 3 if trial.victim == "node" else STEPS - 1)
    run.program.until(lambda: step in raw(run.run), DEADLINE_S)
    time.sleep(chance.uniform(0, 0.3))


def kill(run, trial, scorer, cluster):
    """kill -9 of the victim. A scorer is started again."""
    if trial.victim == "scorer":
        scorer.stop()
        scorer.start()
    elif trial.victim == "node":
        run.program.watch()
        cluster.kill_node()
    else:
        run.kill(trial.victim)


def differing(rows, wanted, keys):
    """Step and metric of each number that is another one: to the bit, but for replicas and engines. One that comes back meets
    other batches, which add up otherwise; and a sync that met none alive has no receipt to tell of."""
    returns = bool(set(keys) & {*REPLICAS, *ENGINE})
    room = {"rel": 1e-3, "abs": 1e-5} if returns else {"rel": 0, "abs": 0}
    return [
        f"{step}: {name} {rows.get(step, {}).get(name)} for {value}"
        for step, row in wanted.items()
        for name, value in row.items()
        if not (returns and name.startswith("sync/"))
        and rows.get(step, {}).get(name) != pytest.approx(value, **room, nan_ok=True)
    ]


def asks(scorer):
    """Keys of a run that asks a scorer service."""
    return ["reward.name=http", f"reward.options={{url: 'http://127.0.0.1:{scorer.port}/score', max_retries: 20}}"]


def attempt(start, trial, place):
    """The trial in a folder; what was seen. A run that hangs fails at its deadline."""
    wanted = undisturbed(start, trial)
    keys, env, scorer, cluster = list(trial.mode), None, None, None
    try:
        if trial.victim == "scorer":
            scorer = Service("jpeg_compressibility")
            keys += asks(scorer)
        if trial.victim == "node":
            cluster = Cluster()
            keys, env = [*keys, f"ray.address={cluster.address}"], cluster.environment
        run = Run(start, place, keys, trial.fault, trial.app, env)
        come_to(run, trial)
        kill(run, trial, scorer, cluster)
        killed = time.monotonic()
        run.go()
        ended = run.program.wait(DEADLINE_S)
        seconds = time.monotonic() - killed
        assert ended.left_over == []
        rows, kept = raw(run.run), checkpoint(run.run)
        assert kept >= (max([1, *rows]) - 1) // SAVED_EVERY * SAVED_EVERY, f"rows to {max(rows)}, checkpoint of {kept}"
        if trial.victim in SURVIVES:
            assert ended.code == 0, ended.err[-3000:]
        else:
            assert ended.code == (-signal.SIGKILL if trial.victim == "driver" else 1), (ended.code, ended.err[-3000:])
            if cluster:
                cluster.join()
            resumed = Run(start, place, keys, None, trial.app, env).program.wait(DEADLINE_S)
            assert resumed.code == 0, resumed.err[-3000:]
            assert resumed.left_over == []
            again = raw(run.run)
            assert {step: again[step] for step in rows if step <= kept} == {s: rows[s] for s in rows if s <= kept}
        assert sorted(run.rows()) == list(range(STEPS + 1))
        assert differing(run.rows(), wanted, keys) == []
        assert find_secret(place) == []
        return {
            "code": ended.code,
            "checkpoint": kept,
            "rows": max(rows, default=0),
            "ended_after_s": round(seconds, 1),
        }
    finally:
        if scorer:
            scorer.stop()
        if cluster:
            assert cluster.stop() == []


@pytest.mark.nightly
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("trial", TRIALS, ids=str)
def test_a_kill_anywhere_loses_no_step_and_leaves_nothing(start, trial):
    if seen().get(str(trial), {}).get("held"):
        pytest.skip(f"held before; remove {FOLDER} to begin anew")
    if trial.victim == "engine" and not importlib.util.find_spec("vllm_omni"):
        pytest.skip("vLLM-Omni is not installed")
    place, began = FOLDER / str(trial), time.monotonic()
    shutil.rmtree(place, ignore_errors=True)
    try:
        told = attempt(start, trial, place)
    except BaseException as error:
        note(trial, held=False, why=str(error)[:2000], seconds=round(time.monotonic() - began, 1))
        raise
    note(trial, held=True, **told, seconds=round(time.monotonic() - began, 1))
    shutil.rmtree(place)


@pytest.mark.timeout(600)
def test_five_kills_of_one_run(start_forked, hosted, tmp_path):
    """Three processes whose death a run mends, at once; then worker and raylet. Steps done twice are the same twice.

    With every change, `test_flowgrpo_end_to_end.py` kills a driver.
    """
    scorer = Service("jpeg_compressibility")
    try:
        keys = [*REPLICAS, "trainer.total_steps=14", "trainer.val_every=0", *asks(scorer)]
        run = Run(
            start_forked, tmp_path, keys, Fault(f"{DRIVER}.generate_sequence", "hold", call=3, seconds=DEADLINE_S)
        )
        run.reached()
        run.kill("reward")
        run.kill("replica")
        scorer.stop()
        scorer.start()
        run.go()
        run.program.until(lambda: 5 in raw(run.run))
        rows = {}
        for victim in ("worker", "raylet"):
            if victim == "raylet":
                run = Run(start_forked, tmp_path, keys, Fault(f"{DRIVER}.sync", "hold", call=3, seconds=DEADLINE_S))
                run.reached()
            kept, before = checkpoint(run.run), raw(run.run)
            run.kill(victim)
            run.go()
            done = run.program.wait()
            assert (done.code, done.left_over) == (1, []), done.err[-3000:]
            assert kept >= (max(before) - 1) // SAVED_EVERY * SAVED_EVERY
            assert {step: line for step, line in raw(run.run).items() if step <= kept}.items() <= before.items()
            assert differing(run.rows() | {s: row for s, row in rows.items() if s not in run.rows()}, rows, keys) == []
            rows |= run.rows()
        done = hosted("flowgrpo", *MICRO, *keys, "trainer.on_existing=resume", f"trainer.run_dir={run.run}")
        assert (done.code, done.left_over) == (0, []), done.err[-3000:]
        assert sorted(run.rows()) == list(range(15))
        assert differing(run.rows(), rows, keys) == []
    finally:
        scorer.stop()
