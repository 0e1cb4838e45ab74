"""Memory that is given up and taken again at the same addresses; the driver is played."""

from __future__ import annotations

import gc

import pytest
import stable
import torch

from atom.kernels.stable_memory import StableMemory


def test_tensors_keep_their_addresses(monkeypatch: pytest.MonkeyPatch):
    driver = stable.play(monkeypatch)
    memory = StableMemory(1 << 20)
    assert driver.num_there == 0
    one, other = memory.tensor((3, 5), torch.float32), memory.zeros((100_000,), torch.bfloat16)
    one.fill_(2.0)
    addresses = one.data_ptr(), other.data_ptr()
    assert all(address % 512 == 0 for address in addresses) and addresses[1] >= addresses[0] + one.nbytes
    assert other.nbytes <= driver.num_there < 1 << 19 and driver.readable == set(driver.mapped)
    kept, num_there = memory.content().clone(), driver.num_there
    memory.release()
    assert driver.num_there == 0 and not memory.is_there
    assert one.flatten().view(torch.uint8).tolist() == [stable.GARBAGE] * 60, "nothing is kept"
    memory.take()
    memory.take()  # it is there
    assert driver.num_there == num_there and memory.is_there
    memory.content().copy_(kept)
    assert (one.data_ptr(), other.data_ptr()) == addresses
    assert one.tolist() == [[2.0] * 5] * 3 and other.sum().item() == 0
    memory.clear()
    assert driver.num_there == 0
    assert memory.tensor((3,), torch.int64).data_ptr() == addresses[0]


def test_a_gpu_without_room_leaves_nothing_taken(monkeypatch: pytest.MonkeyPatch):
    driver = stable.play(monkeypatch)
    memory = StableMemory(1 << 20)
    for _ in range(3):
        memory.tensor((1 << 16,), torch.uint8)
    memory.release()
    driver.max_bytes = 1 << 17
    with pytest.raises(torch.OutOfMemoryError, match="cuMemCreate"):
        memory.take()
    assert driver.num_there == 0
    driver.max_bytes = 3 << 16
    memory.take()
    with pytest.raises(torch.OutOfMemoryError):
        memory.tensor((1,), torch.uint8)
    assert memory.is_there and driver.num_there == 3 << 16


@pytest.mark.parametrize("name", ["cuMemMap", "cuMemSetAccess"])
def test_memory_that_cannot_be_used_is_given_back(name: str, monkeypatch: pytest.MonkeyPatch):
    driver = stable.play(monkeypatch)
    memory = StableMemory(1 << 20)
    with monkeypatch.context() as patched:
        patched.setattr(driver, name, lambda *_: 2)
        with pytest.raises(torch.OutOfMemoryError, match=name):
            memory.tensor((9,), torch.uint8)
    assert driver.num_there == 0 and not driver.mapped and memory.is_there
    assert memory.zeros((9,), torch.uint8).sum() == 0


def test_it_ends_with_its_owner(monkeypatch: pytest.MonkeyPatch):
    driver = stable.play(monkeypatch)
    memory = StableMemory(1 << 20)
    memory.tensor((9,), torch.uint8)
    assert driver.num_there
    del memory
    gc.collect()
    assert not driver.num_there and not driver._reserved
