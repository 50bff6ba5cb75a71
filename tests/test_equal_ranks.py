"""The number of training processes leaves the algorithm as it is: the real program with 1, 2 and 3 of them, gloo on the CPU."""

import json
import os
import subprocess
import sys

import pytest

# One Ray for all runs of a program: they follow each other in it, and each starts its workers alone.
RUNS = """
import importlib, json, sys
from ray_trainer.cluster import prepare_environment, ray_session
from ray_trainer.cli import parse, run
app, jobs = importlib.import_module(sys.argv[1]).APP, json.loads(sys.argv[2])
prepare_environment()
with ray_session(parse(app, jobs[0])[0].ray):
    sys.exit(max(run(app, job) for job in jobs))
"""
SIZES = [
    "trainer.total_steps=2", "trainer.val_every=2", "data.val_max_prompts=3", "rollout.val_kwargs.n=2", "data.prompts_per_step=3",
    "rollout.n=8", "reward.num_workers=1", "rollout.pipeline.num_inference_steps=4",
    "rollout.val_kwargs.pipeline.num_inference_steps=4", "ray.worker_threads=1",
]  # fmt: skip
WAYS = {
    "one": [],
    "two copies": ["trainer.num_workers=2", "actor.fsdp_config.sharding=replicate"],
    "two shards": ["trainer.num_workers=2", "actor.fsdp_config.sharding=shard"],
    "two for a sample": ["trainer.num_workers=2", "actor.fsdp_config.ulysses_sequence_parallel_size=2"],
    "three copies": ["trainer.num_workers=3", "actor.fsdp_config.sharding=replicate"],
    "three shards": ["trainer.num_workers=3", "actor.fsdp_config.sharding=shard"],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, metric_rows):
    """`runs(program, keys, ways)`: the rows of metrics.jsonl by way."""

    def runs(program, keys, ways):
        folder = tmp_path_factory.mktemp(program)
        jobs = [[*SIZES, *keys, *WAYS[way], f"trainer.run_dir={folder / way.replace(' ', '_')}"] for way in ways]
        command = [sys.executable, "-c", RUNS, f"{program}.cli", json.dumps(jobs)]
        done = subprocess.run(
            command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=800, check=False
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return {way: metric_rows(folder / way.replace(" ", "_")) for way in ways}

    return runs


@pytest.mark.timeout(900)  # nine programs' starts; on an idle machine two minutes
@pytest.mark.parametrize(
    ("program", "keys", "ways"),
    [
        ("flowgrpo", ["actor.ppo_mini_batch_size=12"], list(WAYS)),
        ("dpo_online", ["actor.ppo_mini_batch_size=3"], ["one", "three shards"]),
    ],
)
def test_metrics_do_not_depend_on_the_number_of_processes(runs, program, keys, ways):
    """Two steps of two updates each. Rows of a batch that is forwarded together differ in number, and with them the last bits.
    `actor/dpo_margin` alone is held to 2e-6: a difference of two nearly equal errors, times beta."""
    found = runs(program, keys, ways)
    single = found["one"]
    assert [row["step"] for row in single] == [0, 1, 2]
    for way in ways[1:]:
        rows = found[way]
        assert rows[0] == single[0], way  # the untrained policy draws the same pictures
        for ours, theirs in zip(rows[1:], single[1:], strict=True):
            assert ours.keys() == theirs.keys()
            ours, theirs = ({k: v for k, v in row.items() if k != "rollout/batch_rows"} for row in (ours, theirs))
            margins = [row.pop("actor/dpo_margin", 0.0) for row in (ours, theirs)]
            assert margins[0] == pytest.approx(margins[1], rel=1e-5, abs=2e-6), way
            assert ours == pytest.approx(theirs, rel=1e-5, abs=5e-7, nan_ok=True), way
