"""Two and three gloo ranks: FSDP2 gathers every element from the right shard, broadcasts arrive or fail by name.

One set of three processes does everything (starting them is what takes time); each test reads its part of the results.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

WORLD = 3


@pytest.fixture(scope="module")
def results(tmp_path_factory, forked) -> list[dict]:
    folder = tmp_path_factory.mktemp("ranks")
    worker = Path(__file__).with_name("ranks_worker.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        forked([worker, rank, WORLD, folder / "store", folder / f"{rank}.json"], env=environment)
        for rank in range(WORLD)
    ]
    try:
        said = [process.communicate(timeout=200) for process in processes]
    finally:
        for process in processes:
            process.kill()
    outputs = []
    for rank in range(WORLD):
        file = folder / f"{rank}.json"
        assert file.exists(), said[rank][1][-4000:]
        outputs.append(json.loads(file.read_text()))
    return outputs


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_element_comes_from_the_right_shard_and_the_base_stays_sharded(results, ranks):
    assert [result[f"fill {ranks}"] for result in results[:ranks]] == [True] * ranks


@pytest.mark.parametrize("ranks", [2, 3])
def test_adapters_binding_and_merging_are_exact_under_fsdp2(results, ranks):
    for result in results[:ranks]:
        checks = result[f"adapters {ranks}"]
        assert len(checks) >= 12
        assert all(checks.values()), checks


def test_broadcast_carries_payloads_and_buckets_and_names_its_faults(results):
    for result in results:
        assert all(result["broadcast"].values()), result["broadcast"]
    assert set(results[1]["broadcast"]) == {"payload", "buckets", "corrupt", "timeout", "broken", "own group"}


def test_a_rank_that_dies_in_the_middle_is_a_named_error(results):
    assert results[0]["dead receiver"] is True
