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
    with life.syncing(1):
        pass
    with pytest.raises(LifecycleError, match="no weights were synced"), life.generating():
        pass  # a LoRA on top of start-up weights is not a policy
    with life.syncing(2, full=True):
        pass
    with life.generating():
        assert life.in_flight == 1
    assert (life.in_flight, life.policy_version) == (0, 2)


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


def test_anything_under_way_is_not_disturbed(ready):
    with ready.generating(3):
        with pytest.raises(LifecycleError, match="3 samples are in flight"):
            ready.sleep()
        with pytest.raises(LifecycleError, match="3 samples are in flight"), ready.syncing(1):
            pass
    ready.sleep()
    assert ready.state is State.ASLEEP


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
