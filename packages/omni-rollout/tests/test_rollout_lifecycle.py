"""The state machine: what is allowed, what is refused, and what a failed sync leaves behind."""

import pytest
from omni_rollout.errors import LifecycleError
from omni_rollout.lifecycle import Lifecycle, State


@pytest.fixture
def ready():
    life = Lifecycle()
    life.load()
    life.loaded()
    return life


def test_generation_is_refused_until_the_first_full_sync():
    life = Lifecycle(needs_sync=True)
    with pytest.raises(LifecycleError, match="the backend is cold"), life.generating():
        pass
    life.load()
    life.loaded()
    with pytest.raises(LifecycleError, match="no weights were synced"), life.generating():
        pass
    with life.syncing(1, lora=True):
        pass
    with pytest.raises(LifecycleError, match="no weights were synced"), life.generating():
        pass  # a LoRA on top of start-up weights is not a policy
    with life.syncing(2, full=True):
        pass
    with life.generating():
        assert life.in_flight == 1
    assert (life.in_flight, life.policy_version, life.lora_layers) == (0, 2, True)


def test_asleep_refuses_generation_and_weights(ready):
    ready.sleep()
    with pytest.raises(LifecycleError, match="asleep"), ready.generating():
        pass
    with pytest.raises(LifecycleError, match="weight update is refused: the backend is asleep"), ready.syncing(1):
        pass
    ready.wake_up()
    assert ready.state is State.READY
    with pytest.raises(LifecycleError, match="must be asleep"):
        ready.wake_up()


def test_wake_returns_to_where_sleep_came_from(ready):
    ready.pause()
    ready.sleep()
    ready.wake_up()
    assert ready.state is State.PAUSED
    with pytest.raises(LifecycleError, match="paused"), ready.generating():
        pass
    ready.resume()
    with ready.generating():
        pass


def test_level_two_and_anything_under_way_are_refused(ready):
    with pytest.raises(LifecycleError, match="level=1"):
        ready.sleep(level=2)
    with ready.generating(3):
        with pytest.raises(LifecycleError, match="3 samples are in flight"):
            ready.sleep()
        with pytest.raises(LifecycleError, match="3 samples are in flight"), ready.syncing(1):
            pass
        ready.pause()  # allowed: samples in flight finish
    assert ready.state is State.PAUSED


def test_versions_only_grow_and_failed_syncs_do_not_count(ready):
    with ready.syncing(5, full=True):
        assert ready.state is State.SYNCING
        with pytest.raises(LifecycleError, match="syncing"), ready.generating():
            pass
    with pytest.raises(LifecycleError, match="version 4 is older than 5"), ready.syncing(4):
        pass
    with pytest.raises(ZeroDivisionError), ready.syncing(6, full=True):
        _ = 1 / 0
    assert ready.policy_version == 5
    with pytest.raises(LifecycleError, match="no weights were synced"), ready.generating():
        pass  # half of the tensors may be new


def test_a_failed_backend_says_why(ready):
    ready.fail("engine process died")
    with pytest.raises(LifecycleError, match="failed \\(engine process died\\)"), ready.generating():
        pass
