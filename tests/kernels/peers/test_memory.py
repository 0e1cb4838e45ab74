"""Memory that ranks share on AMD's GPUs, by a compiled double of HIP's runtime: signatures, flags, errors, what is given back."""

from __future__ import annotations

import ctypes
import gc
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernels.peers.peer_processes import run_ranks

from atom.errors import UnsupportedError
from atom.graph import Mesh
from atom.kernels import Rendezvous, nccl
from atom.kernels.peers import memory
from atom.kernels.peers.memory import Handle, IpcMemory, find_hip

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the double is of a machine without a GPU")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled double. Its name is the runtime's, so that it is found as that is where torch has loaded it."""
    file = tmp_path_factory.mktemp("hip") / "libamdhip64.so.6"
    source = Path(__file__).with_name("hip_double.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", file, source], check=True)
    return file


@pytest.fixture
def hip(library: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The double, on a machine whose torch is ROCm's and has loaded it."""
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    properties = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)
    monkeypatch.setattr(IpcMemory, "device", torch.device("cpu"))
    loaded = ctypes.CDLL(str(library))
    assert find_hip() == str(library)
    return loaded


def bytes_at(address: int, size: int) -> bytearray:
    return (ctypes.c_ubyte * size).from_address(address)  # type: ignore[return-value]


def test_a_handle_has_the_size_of_the_header_s():
    assert ctypes.sizeof(Handle) == 64, "HIP_IPC_HANDLE_SIZE, and CU_IPC_HANDLE_SIZE"


def test_memory_is_cleared_shared_and_given_back(hip: Any):
    held = hip.num_held()
    ours = IpcMemory(5000)
    assert bytes(bytes_at(ours.address, 5000)) == bytes(5000) and len(ours.handle) == 64
    opened = ours.open(ours.handle)
    assert opened != ours.address and hip.num_held() == held + 2
    bytes_at(opened, 5000)[4999] = 7
    assert bytes_at(ours.address, 5000)[4999] == 7
    del ours
    gc.collect()
    assert hip.num_held() == held


def test_errors_are_reported_in_the_runtime_s_words(hip: Any):
    with pytest.raises(UnsupportedError, match="other's memory: hipExtMallocWithFlags: out of memory"):
        IpcMemory(1 << 50)
    ours = IpcMemory(100)
    with pytest.raises(UnsupportedError, match="other's memory: hipIpcOpenMemHandle: invalid argument"):
        ours.open(bytes(64))


def test_gpus_that_keep_peers_writes_from_a_running_kernel_are_refused(hip: Any, monkeypatch: pytest.MonkeyPatch):
    older = SimpleNamespace(gcnArchName="gfx90a:sramecc+")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: older)
    with pytest.raises(
        UnsupportedError, match="of AMD's GPUs gfx942 and gfx950 push into each other's memory, not gfx90a"
    ):
        IpcMemory(100)


def test_ranks_add_in_memory_that_hip_shares(hip: Any, tmp_path: Path):
    def work(rank: int, made: Any) -> Any:
        x = torch.arange(600, dtype=torch.float32).view(2, 300) * 10**rank
        return [made.all_reduce(x, axis="tensor"), made.all_gather(x, axis="tensor", size=600)]

    x = torch.arange(600, dtype=torch.float32).view(2, 300)
    for total, gathered in run_ranks(Mesh(2), tmp_path, work, memory=IpcMemory):
        assert torch.equal(total, 11 * x) and torch.equal(gathered, torch.hstack([x, 10 * x]))


@pytest.mark.parametrize(("collectives", "pushes"), [("auto", False), ("peers", True), ("nccl", False)])
def test_ranks_on_amd_push_where_they_are_asked_to(
    collectives: str, pushes: bool, hip: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    whole, peers = object(), object()
    monkeypatch.setattr(nccl, "NcclCommunicator", lambda rendezvous: whole)
    monkeypatch.setattr(nccl.peers, "connect", lambda rendezvous, large: peers)
    rendezvous = Rendezvous(0, Mesh(2), "127.0.0.1", lambda own: [own], None, collectives)
    assert nccl.connect(rendezvous) is (peers if pushes else whole)
    has_said = "use only RCCL; parallel.collectives=peers pushes" in capfd.readouterr().err
    assert has_said == (collectives == "auto")


def test_on_nvidia_s_gpus_the_calls_are_cuda_s():
    assert memory.find_functions() is memory.CUDA
