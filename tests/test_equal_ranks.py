"""The number of training processes leaves the algorithm as it is: the real program with 1, 2 and 3 of them, gloo on the CPU."""

import pytest

SIZES = [
    "trainer.total_steps=2", "trainer.val_every=2", "data.val_max_prompts=3", "rollout.val_kwargs.n=2", "data.prompts_per_step=3",
    "rollout.n=8", "reward.num_workers=1", "rollout.pipeline.num_inference_steps=4",
    "rollout.val_kwargs.pipeline.num_inference_steps=4", "ray.worker_threads=1",
]  # fmt: skip
BATCH = {"flowgrpo": 12, "dpo-online": 3}
WAYS = {
    "one": [],
    "two copies": ["trainer.num_workers=2", "actor.fsdp_config.sharding=replicate"],
    "two shards": ["trainer.num_workers=2", "actor.fsdp_config.sharding=shard"],
    "two for a sample": ["trainer.num_workers=2", "actor.fsdp_config.ulysses_sequence_parallel_size=2"],
    "three copies": ["trainer.num_workers=3", "actor.fsdp_config.sharding=replicate"],
    "three shards": ["trainer.num_workers=3", "actor.fsdp_config.sharding=shard"],
}


@pytest.fixture(scope="module")
def rows(hosted, metric_rows, tmp_path_factory):
    """`rows(program, way)` of metrics.jsonl; each run is made once."""
    made = {}

    def rows(program, way):
        if (program, way) not in made:
            folder = tmp_path_factory.mktemp("run")
            keys = [
                f"actor.ppo_mini_batch_size={BATCH[program]}",
                *SIZES,
                *WAYS[way],
                f"trainer.run_dir={folder / 'run'}",
            ]
            done = hosted(program, *keys)
            assert done.code == 0, done.err[-4000:]
            assert done.left_over == []
            made[program, way] = metric_rows(folder / "run")
        return made[program, way]

    return rows


@pytest.mark.parametrize(
    ("program", "way"),
    [
        ("flowgrpo", "two shards"),
        ("flowgrpo", "three copies"),
        *(
            pytest.param(*one, marks=pytest.mark.nightly)
            for one in [
                ("flowgrpo", "two copies"),
                ("flowgrpo", "two for a sample"),
                ("flowgrpo", "three shards"),
                ("dpo-online", "three shards"),
            ]
        ),
    ],
)
def test_metrics_do_not_depend_on_the_number_of_processes(rows, program, way):
    """Two steps of two updates each. Rows of a batch that is forwarded together differ in number, and with them the last bits.
    `actor/dpo_margin` alone is held to 2e-6: a difference of two nearly equal errors, times beta. And `actor/on_policy`, which
    counts ratios that are 1 to the bit, may miss one in ten."""
    single, found = rows(program, "one"), rows(program, way)
    assert [row["step"] for row in single] == [0, 1, 2]
    assert found[0] == single[0]  # the untrained policy draws the same pictures
    for ours, theirs in zip(found[1:], single[1:], strict=True):
        assert ours.keys() == theirs.keys()
        ours, theirs = ({k: v for k, v in row.items() if k != "rollout/batch_rows"} for row in (ours, theirs))
        for key, room in {"actor/dpo_margin": 2e-6, "actor/on_policy": 0.1}.items():
            one, other = (row.pop(key, 0.0) for row in (ours, theirs))
            assert one == pytest.approx(other, rel=1e-5, abs=room), key
        assert ours == pytest.approx(theirs, rel=1e-5, abs=5e-7, nan_ok=True)
