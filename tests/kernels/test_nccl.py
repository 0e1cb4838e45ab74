"""What of NCCL's backend needs no GPU: which stages send to which, and the error on a machine without the library."""

from __future__ import annotations

import ctypes
import itertools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from atom.errors import UnsupportedError
from atom.graph import Type, ops
from atom.kernels import LoadContext, Target, compile_launches, find_kernel
from atom.kernels import nccl as backend
from atom.kernels.nccl import Library, directions


def test_stages_send_hidden_states_to_the_next_one_and_logits_to_all():
    assert directions([3]) == []
    assert directions([0, 2]) == [(0, 2), (2, 0)]
    assert directions([0, 1, 2]) == [(0, 1), (1, 2), (2, 0), (2, 1)]


def test_what_a_graph_computes_is_held_back_and_sent_later(monkeypatch: pytest.MonkeyPatch):
    sent: list[tuple[int, list[float]]] = []
    communicator = object.__new__(backend.NcclCommunicator)
    communicator._is_dead, communicator._held, communicator._stages = threading.Event(), [], (2, 5)
    monkeypatch.setattr(communicator, "_send_on_own_stream", lambda x, rank: sent.append((rank, x.tolist())))
    for is_capturing in (False, True):
        monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda found=is_capturing: found)
        communicator.send(x := torch.tensor([1.0, 2.0]), axis=ops.STAGES, to=1)
        assert sent == [(5, [1.0, 2.0])]
    (held,) = communicator.take_held()
    assert held.x is x and communicator.take_held() == []
    held.send(held.x * 2)  # what the next replay computes there
    assert sent[1:] == [(5, [2.0, 4.0])]


class MemoryLibrary:
    """NCCL's calls of one rank, as a thread, by the memory of the process; the names of those that were made."""

    def __init__(self, rank: int, num: int, mail: dict[tuple[int, int], queue.SimpleQueue[bytes]]) -> None:
        self.rank, self.num, self.mail, self.called, self.num_sent = rank, num, mail, list[str](), 0
        self.waiting: list[Callable[[], object]] = []

    def group_start(self) -> None:
        assert not self.waiting

    def group_end(self) -> None:
        for receive in self.waiting:
            receive()
        self.waiting = []

    def send(self, x: int, size: int, dtype: int, to: int, *_: Any) -> None:
        assert dtype == backend.BYTES
        self.called.append("send")
        self.num_sent += size if to != self.rank else 0
        self.mail[self.rank, to].put(ctypes.string_at(x, size))

    def receive(self, x: int, size: int, dtype: int, source: int, *_: Any) -> None:
        self.waiting.append(lambda: ctypes.memmove(x, self.mail[source, self.rank].get(timeout=60), size))

    def all_gather(self, x: int, out: int, size: int, dtype: int, *_: Any) -> None:
        self.called.append("all_gather")
        for rank in range(self.num):
            self.mail[self.rank, rank].put(ctypes.string_at(x, size))
            self.receive(out + rank * size, size, dtype, rank)

    def reduce_scatter(self, *_: Any) -> None:
        self.called.append("reduce_scatter")


@pytest.mark.parametrize(("has_counted", "is_capturing"), [(True, False), (False, False), (True, True)])
def test_rows_are_counted_where_they_are_many_and_no_graph_has_to_hold_them(
    has_counted: bool, is_capturing: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(backend, "COUNTED_BYTES", 0 if has_counted else 1 << 20)
    monkeypatch.setattr(backend, "_stream", lambda: 0)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: is_capturing)
    mail: Any = {pair: queue.SimpleQueue() for pair in itertools.product(range(3), repeat=2)}
    x = [torch.full((2, 3), float(rank + 1)) for rank in range(3)]
    ids = [torch.tensor(each) for each in ([[0, 1], [0, 3]], [[2, 3], [2, 2]], [[3, 5], [1, 4]])]

    def work(rank: int) -> tuple[list[Any], MemoryLibrary]:
        communicator = object.__new__(backend.NcclCommunicator)
        library = communicator._nccl = MemoryLibrary(rank, 3, mail)  # type: ignore[assignment]
        communicator._is_dead = threading.Event()
        communicator._groups = {"data": backend._Group(0, rank, (0, 1, 2))}
        first, meeting = torch.tensor([2 * rank]), {"axis": "data", "ranks": 3, "experts": 2}
        rows, _, chosen = communicator.dispatch(x[rank], x[rank][:, :2], ids[rank], first, **meeting)
        total = communicator.collect(rows * 10**rank, chosen, first, **meeting)
        return [rows[:, 0].tolist(), chosen.tolist(), total[:, 0].tolist()], library

    with ThreadPoolExecutor(3) as pool:
        found, libraries = zip(*pool.map(work, range(3)), strict=True)
    assert [each[1] for each in found] == [torch.cat(ids).tolist()] * 3
    if has_counted and not is_capturing:
        assert [each[0] for each in found] == [[1, 1, 0, 0, 0, 3], [0, 1, 2, 2, 3, 0], [0, 0, 0, 0, 3, 3]]
        assert [each[2] for each in found] == [[1, 11], [20, 20], [330, 303]]
        rows_there_and_back = [1 + 1, 0 + 2, 2 + 0]
        assert [each.num_sent for each in libraries] == [12 * num for num in rows_there_and_back]
    else:
        assert [each[0] for each in found] == [[1, 1, 2, 2, 3, 3]] * 3
        assert all(each.called == [*3 * ["all_gather"], "reduce_scatter"] for each in libraries)


def test_each_collective_has_a_kernel_for_gpus_which_needs_several_ranks():
    assert {kernel.op for kernel in backend.BACKEND.kernels} == {op for op in ops.OPS.values() if op.is_collective}
    kernel = find_kernel(ops.all_reduce, "nccl")
    assert kernel.accepts(Target("cuda", frozenset({"amd"})), Type("bf16", ("T", 64)), axis="tensor") is None
    assert kernel.accepts(Target("cpu"), Type("bf16", ("T", 64)), axis="tensor") == "runs on cuda, not on cpu"
    with pytest.raises(UnsupportedError, match="all_reduce is for several ranks, and this is one: set parallel"):
        kernel.load(LoadContext())


def test_a_step_whose_kernels_are_compiled_launches_no_collective():
    assert not backend.is_walking.get()
    with ThreadPoolExecutor(1) as pool, backend.compile_launches(pool):
        assert backend.is_walking.get()
        assert not pool.submit(backend.is_walking.get).result(), "it is of one thread"
    assert not backend.is_walking.get()
    with ThreadPoolExecutor(1) as pool, compile_launches("cuda", pool):
        assert backend.is_walking.get(), "as of each backend of a GPU"


def test_multicast_is_off_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch):
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    monkeypatch.setattr(backend, "_open_library", MagicMock)
    for name, value in (("NCCL_NVLS_ENABLE", "1"), ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0")):
        monkeypatch.setenv(name, value)
    Library(is_one_host=True)
    assert (getenv(b"NCCL_NVLS_ENABLE"), getenv(b"TORCH_SYMM_MEM_DISABLE_MULTICAST")) == (b"0", b"1")


def test_without_the_library_that_torch_brings_ranks_on_gpus_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(backend, "LIBRARIES", ("libnowhere.so.1",))
    with pytest.raises(
        UnsupportedError, match=r"ranks on GPUs need one of libnowhere.so.1, which torch brings; install torch"
    ):
        Library(is_one_host=True)
