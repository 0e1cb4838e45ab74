"""What of NCCL's backend needs no GPU: which stages send to which, and what a machine without the library is told."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

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
    monkeypatch.setattr(communicator, "_send_beside", lambda x, rank: sent.append((rank, x.tolist())))
    for is_capturing in (False, True):
        monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda found=is_capturing: found)
        communicator.send(x := torch.tensor([1.0, 2.0]), axis=ops.STAGES, to=1)
        assert sent == [(5, [1.0, 2.0])]
    (held,) = communicator.take_held()
    assert held.x is x and communicator.take_held() == []
    held.send(held.x * 2)  # what the next replay computes there
    assert sent[1:] == [(5, [2.0, 4.0])]


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


def test_without_the_library_that_torch_brings_ranks_on_gpus_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(backend, "LIBRARIES", ("libnowhere.so.1",))
    with pytest.raises(
        UnsupportedError, match=r"ranks on GPUs need one of libnowhere.so.1, which torch brings; install torch"
    ):
        Library(is_one_host=True)
