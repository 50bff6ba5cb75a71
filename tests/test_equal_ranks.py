"""The number of training processes leaves the algorithm as it is: the real program with 1, 2 and 3 of them, gloo on the CPU."""

import pytest

SIZES = [
    "trainer.total_steps=2", "trainer.val_every=2", "data.val_max_prompts=3", "rollout.val_kwargs.n=2", "data.prompts_per_step=3",
    "rollout.n=8", "reward.num_workers=1", "rollout.pipeline.num_inference_steps=4",
    "rollout.val_kwargs.pipeline.num_inference_steps=4", "ray.worker_threads=1",
]  # fmt: skip
AHEAD = ["trainer.staleness=1", "trainer.total_steps=3"]
NFT = ["recipe=tiny_nft", "algorithm.old_policy={decay_rate: 0.5, decay_max: 0.5}", "actor.ppo_mini_batch_size=12"]
AWM = ["recipe=tiny_awm", "actor.ppo_mini_batch_size=24"]
FULL = ["model.lora_rank=0", "actor.optim.lr=1e-4"]
PROGRAMS = {
    "flowgrpo": ("flowgrpo", ["rollout.n=4", "actor.ppo_mini_batch_size=6"]),
    "dpo-online": ("dpo-online", ["actor.ppo_mini_batch_size=3"]),
    "nft ahead": ("dpo-online", [*NFT, *AHEAD]),
    "nft ahead, all weights": (
        "dpo-online",
        [*NFT, *FULL, "model.policy_state_adapters=[default,old,reference]", *AHEAD],
    ),
    "awm ahead": ("dpo-online", [*AWM, *AHEAD]),
    "awm ahead, all weights": ("dpo-online", [*AWM, *FULL, "model.policy_state_adapters=[default,reference]", *AHEAD]),
}
WAYS = {
    "one": [],
    "two copies": ["trainer.num_workers=2", "actor.fsdp_config.sharding=replicate"],
    "two shards": ["trainer.num_workers=2", "actor.fsdp_config.sharding=shard"],
    "two for a sample": ["trainer.num_workers=2", "actor.fsdp_config.ulysses_sequence_parallel_size=2"],
    "three copies": ["trainer.num_workers=3", "actor.fsdp_config.sharding=replicate"],
    "three shards": ["trainer.num_workers=3", "actor.fsdp_config.sharding=shard"],
    "two shards, two replicas": [
        *("trainer.num_workers=2", "actor.fsdp_config.sharding=shard", "rollout.num_replicas=2"),
        "rollout.router.restart=false",
    ],
}

MARGIN = 2e-6
"""Of `actor/dpo_margin`: beta / 2, here 50, times a difference of four errors. Those are 0.14 to 0.51 for this policy, and another
number of rows forwarded together moves each by 4e-8 to 8e-8 (root of the mean square). So one pair's margin moves by about 6e-6,
and a mean over three pairs, four levels and two updates by about 1e-6: 1e-7 of the terms, and no digit of a true difference."""
PIXEL = 1.01 / 64**2
"""Of `reward/off_mean`, the share of pixels that are far from every colour: one pixel of all pictures of a step may lie so near the
limit that the last bits of its colour decide."""


@pytest.fixture(scope="module")
def rows(hosted, metric_rows, tmp_path_factory):
    """`rows(program, way)` of metrics.jsonl; each run is made once."""
    made = {}

    def rows(program, way):
        if (program, way) not in made:
            folder = tmp_path_factory.mktemp("run")
            app, keys = PROGRAMS[program]
            done = hosted(app, *SIZES, *keys, *WAYS[way], f"trainer.run_dir={folder / 'run'}")
            assert done.code == 0, done.err[-4000:]
            assert done.left_over == []
            made[program, way] = metric_rows(folder / "run")
        return made[program, way]

    return rows


@pytest.mark.parametrize(
    ("program", "way"),
    [
        ("flowgrpo", "two shards"),
        *(
            pytest.param(*one, marks=pytest.mark.nightly)
            for one in [
                ("flowgrpo", "two copies"),  # with every change, copies are held to one process in test_engine_ranks.py
                ("flowgrpo", "three copies"),
                ("flowgrpo", "two for a sample"),
                ("flowgrpo", "three shards"),
                ("dpo-online", "three shards"),
                ("nft ahead", "two copies"),
                ("nft ahead", "three shards"),
                ("nft ahead", "two shards, two replicas"),
                ("nft ahead, all weights", "two copies"),
                ("nft ahead, all weights", "two shards"),
                ("awm ahead", "two shards, two replicas"),
                ("awm ahead, all weights", "two shards, two replicas"),
            ]
        ),
    ],
)
def test_metrics_do_not_depend_on_the_number_of_processes(rows, program, way):
    """Two steps of two updates each, and three where a loss compares with the policy that drew ahead. Rows of a batch that is
    forwarded together differ in number, and with them the last bits."""
    single, found = rows(program, "one"), rows(program, way)
    pictures = 12 if program == "flowgrpo" else 24
    assert [row["step"] for row in single] == list(range(len(found)))
    assert found[0] == single[0]  # the untrained policy draws the same pictures
    for ours, theirs in zip(found[1:], single[1:], strict=True):
        counters = {key: ours.pop(key) for key in ours.keys() - theirs.keys()}  # of replicas, where there are any
        assert all(key.startswith("rollout/") and "replicas" in way for key in counters)
        assert not any(value for key, value in counters.items() if key != "rollout/queued_s")  # nothing failed
        assert ours.keys() == theirs.keys()
        ours, theirs = ({k: v for k, v in row.items() if k != "rollout/batch_rows"} for row in (ours, theirs))
        for key, room in (("actor/dpo_margin", MARGIN), ("reward/off_mean", PIXEL / pictures)):
            one, other = (row.pop(key, 0.0) for row in (ours, theirs))
            assert one == pytest.approx(other, rel=1e-5, abs=room)
        assert ours == pytest.approx(theirs, rel=1e-5, abs=5e-7, nan_ok=True)
