"""An engine's weights in host memory: copied once in the background, put away without a copy, and never used when they changed."""

import ctypes
from types import SimpleNamespace

import pytest
import torch
from omni_rollout.vllm_omni.host_copy import HostCopy


class Device:
    """Allocations as vLLM's allocator lists them, in memory of this process."""

    def __init__(self, **tensors):
        self.tensors = tensors
        self.pointer_to_data = {
            tensor.data_ptr(): SimpleNamespace(
                handle=(0, tensor.nbytes, tensor.data_ptr()),
                tag=name.split("_")[0],
                cpu_backup_tensor=None,
                is_asleep=False,
            )
            for name, tensor in tensors.items()
        }
        self.copied = self.released = 0

    def copy(self, to, source, size):
        self.copied += size
        ctypes.memmove(to, source, size)

    def release(self, handle):
        self.released += handle[1]

    def wake_up(self):
        for data in self.pointer_to_data.values():
            data.is_asleep, data.cpu_backup_tensor = False, None


@pytest.fixture
def device():
    return Device(weights_a=torch.arange(64.0), weights_b=torch.ones(8), cache_c=torch.zeros(16))


def test_weights_are_copied_once_for_many_sleeps(device):
    copy = HostCopy(device, device.copy, device.release)
    copy.begin()
    weights = device.tensors["weights_a"].nbytes + device.tensors["weights_b"].nbytes
    for sleeps in (1, 2, 3):
        assert copy.put_away() == weights
        assert (device.copied, device.released) == (weights, sleeps * weights)
        kept = device.pointer_to_data[device.tensors["weights_a"].data_ptr()]
        assert torch.equal(kept.cpu_backup_tensor.view(torch.float32), torch.arange(64.0))
        assert not device.pointer_to_data[
            device.tensors["cache_c"].data_ptr()
        ].is_asleep  # the engine's own sleep drops it
        assert copy.put_away() == 0  # asleep already
        device.wake_up()


def test_changed_weights_are_left_to_the_engine(device):
    copy = HostCopy(device, device.copy, device.release)
    assert copy.put_away() == 0
    copy.begin()
    copy.forget()
    assert copy.put_away() == 0
    assert device.released == 0


def test_a_copy_that_fails_is_heard_of(device):
    def full(*_):
        raise RuntimeError("out of host memory")

    copy = HostCopy(device, full, device.release)
    copy.begin()
    with pytest.raises(RuntimeError, match="out of host memory"):
        copy.put_away()
