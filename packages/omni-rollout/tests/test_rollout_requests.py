"""Requests, samples, batching and the errors' way through pickle."""

import pickle

import pytest
import torch
from omni_rollout import errors
from omni_rollout.batching import plan_batches
from omni_rollout.errors import RolloutConfigError, RolloutError
from omni_rollout.samples import in_order, stacked


def test_a_request_survives_pickle(make_request):
    request = make_request(window=[0, 1])
    assert request.settings.window == (0, 1)
    assert pickle.loads(pickle.dumps(request)) == request


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"true_cfg_scale": 4.0}, "negative_prompt"),
        ({"start_step": 2, "window": (2,)}, "belong together"),
    ],
)
def test_impossible_requests_are_refused(make_request, changes, words):
    with pytest.raises(RolloutConfigError, match=words):
        make_request(**changes)


def rows(count, width=3, **extra):
    return [
        {
            "responses": torch.zeros(3, 2, 2),
            "prompt_embeds": torch.ones(width + i, 5),
            "index": torch.tensor(i),
            **extra,
        }
        for i in range(count)
    ]


def test_samples_below_fp32_are_refused():
    with pytest.raises(RolloutConfigError, match="latents has dtype torch"):
        stacked(rows(2, latents=torch.zeros(2, dtype=torch.bfloat16)))


def test_samples_with_other_keys_do_not_mix():
    odd = rows(2)
    del odd[1]["prompt_embeds"]
    with pytest.raises(RolloutError, match="'prompt_embeds' came back for 1 of 2"):
        stacked(odd)
    with pytest.raises(RolloutConfigError, match="do not hold the same keys"):
        in_order([([0, 1], stacked(rows(2))), ([2, 3], stacked(rows(2, std=torch.ones(2))))])


def test_chunks_come_together_in_the_order_of_their_requests():
    chunks = [([2, 3], stacked(rows(2, width=5))), ([1, 0], stacked(rows(2)))]
    batch = in_order(chunks)
    assert batch["index"].tolist() == [1, 0, 0, 1]
    assert batch["prompt_embeds"].sum((1, 2)).tolist() == [20, 15, 25, 30]
    assert batch["prompt_embeds"].shape == (4, 6, 5)


def test_batches_are_stable_compatible_and_bounded(make_request):
    requests = [make_request(i, noise_level=0.7 if i % 2 else 0.3) for i in range(10)]
    requests.append(make_request(10, window=(0, 1, 2)))
    requests.append(make_request(11, window=(3, 4), noise_level=0.3))  # another window of the same length may join
    assert plan_batches(requests, 4) == [[0, 2, 4, 6], [8, 11], [1, 3, 5, 7], [9], [10]]
    bound = [make_request(i, solver="dpm2", window=(i % 2,)) for i in range(4)]  # a shared history, so a shared window
    bound += [make_request(i, tail_ratio=0.5, window=(i % 2,)) for i in range(4, 8)]  # a table that begins at its end
    bound += [make_request(i, shared_noise=True, window=(i % 2,)) for i in range(8, 10)]  # only another start
    assert plan_batches(bound, 9) == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 9]]
    with pytest.raises(RolloutConfigError, match="occurs twice"):
        plan_batches([requests[0], requests[0]], 4)


def test_errors_survive_pickle_and_are_standard_errors():
    for cls, standard in [
        (errors.RolloutConfigError, ValueError), (errors.DeadlineError, TimeoutError), (errors.SyncError, RuntimeError),
        (errors.ReplicaDeadError, ConnectionError), (errors.MissingExtraError, ImportError),
    ]:  # fmt: skip
        error = pickle.loads(pickle.dumps(cls("what happened")))
        assert isinstance(error, standard)
        assert isinstance(error, errors.RolloutError)
        assert str(error) == "what happened"
