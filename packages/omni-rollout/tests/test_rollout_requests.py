"""Requests, outputs, batching and the errors' way through pickle."""

import pickle

import pytest
import torch
from omni_rollout import errors
from omni_rollout.batching import plan_batches
from omni_rollout.errors import RolloutConfigError
from omni_rollout.types import DiffusionOutput


def test_request_normalises_and_survives_pickle(make_request):
    request = make_request(kind="sde", window=[0, 1])
    assert (request.kind, request.window) == ("flow_sde", (0, 1))
    assert pickle.loads(pickle.dumps(request)) == request


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"window": (0, 6)}, "must be distinct and in 0"),
        ({"window": (1, 0)}, "ascending"),
        ({"window": (1, 1)}, "distinct"),
        ({"kind": "ode"}, "no noise to train on"),
        ({"noise_level": 0.0}, "no noise to train on"),
        ({"solver": "heun"}, "solver='heun'"),
        ({"tail_ratio": 1.5}, "tail_ratio=1.5"),
        ({"true_cfg_scale": 4.0}, "negative_prompt"),
        ({"start_step": 2, "window": (2,)}, "belong together"),
    ],
)
def test_impossible_requests_are_refused(make_request, changes, words):
    with pytest.raises(RolloutConfigError, match=words):
        make_request(**changes)


def test_the_tail_begins_behind_the_window(make_request):
    assert make_request(window=(1, 3)).window_end == 4
    assert make_request(kind="ode", window=()).window_end == 0


def test_outputs_below_fp32_are_refused():
    with pytest.raises(RolloutConfigError, match="latents has dtype torch"):
        DiffusionOutput(None, extra_fields={"latents": torch.zeros(2, dtype=torch.bfloat16)}).check()
    with pytest.raises(RolloutConfigError, match="must hold a picture"):
        DiffusionOutput(None, stop_reason="completed").check()


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
