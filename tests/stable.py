"""A driver's memory that is played on a CPU: what is given up is overwritten.

memory = play(monkeypatch)      # of `StableMemory` from now on
memory.num_there                # bytes that are taken
"""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from atom.kernels import stable_memory

GRANULARITY = 1 << 12
GARBAGE = 0xA5


class Driver:
    def __init__(self) -> None:
        self.max_bytes = 1 << 40  # bytes that it has
        self.taken: dict[int, int] = {}  # bytes by handle
        self.mapped: dict[int, int] = {}  # handle by address
        self.readable: set[int] = set()  # addresses
        self._reserved: dict[int, Any] = {}

    @property
    def num_there(self) -> int:
        return sum(self.taken.values())

    def cuMemGetAllocationGranularity(self, size: Any, prop: Any, option: int) -> int:
        size._obj.value = GRANULARITY
        return 0

    def cuMemAddressReserve(self, address: Any, size: Any, alignment: Any, wish: Any, flags: Any) -> int:
        assert size.value % GRANULARITY == 0
        buffer = ctypes.create_string_buffer(size.value + GRANULARITY)
        address._obj.value = -(-ctypes.addressof(buffer) // GRANULARITY) * GRANULARITY
        self._reserved[address._obj.value] = buffer
        return 0

    def cuMemCreate(self, handle: Any, size: Any, prop: Any, flags: Any) -> int:
        assert size.value % GRANULARITY == 0 and prop._obj.type == 1 and prop._obj.location.type == 1
        if self.num_there + size.value > self.max_bytes:
            return 2
        handle._obj.value = len(self.taken) + 1 + max(self.taken, default=0)
        self.taken[handle._obj.value] = size.value
        return 0

    def cuMemMap(self, address: Any, size: Any, offset: Any, handle: Any, flags: Any) -> int:
        assert address.value not in self.mapped and self.taken[handle.value] == size.value
        self.mapped[address.value] = handle.value
        return 0

    def cuMemSetAccess(self, address: Any, size: Any, access: Any, count: Any) -> int:
        assert self.taken[self.mapped[address.value]] == size.value and access._obj.flags == 3
        self.readable.add(address.value)
        return 0

    def cuMemUnmap(self, address: Any, size: Any) -> int:
        assert self.taken[self.mapped.pop(address.value)] == size.value
        self.readable.discard(address.value)
        ctypes.memset(address.value, GARBAGE, size.value)
        return 0

    def cuMemRelease(self, handle: Any) -> int:
        del self.taken[handle.value]
        return 0

    def cuMemAddressFree(self, address: Any, size: Any) -> int:
        first = address.value
        assert not any(first <= each < first + size.value for each in self.mapped)
        del self._reserved[address.value]
        return 0


def play(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(stable_memory, "open_driver", lambda: driver)
    monkeypatch.setattr(stable_memory, "find_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(stable_memory, "CHUNK", 1 << 16)
    return driver
