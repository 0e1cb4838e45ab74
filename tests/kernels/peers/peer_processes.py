"""Ranks as processes whose memory is a file of each: Triton's interpreter runs one kernel of a process at a time.

found = run_ranks(3, tmp_path, lambda rank, communicator: …)     # what each gives, in order
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch

from atom.graph import Mesh
from atom.kernels import Rendezvous
from atom.kernels.backend import Communicator
from atom.kernels.peers.communicator import PeerCommunicator


class FileMemory:
    """Memory in a file that other processes open by its path."""

    device = torch.device("cpu")

    def __init__(self, size: int, path: Path) -> None:
        path.touch(0o600)
        os.truncate(path, size)
        self.handle, self._kept = str(path).encode(), []
        self.address = self.open(self.handle)

    def open(self, handle: bytes) -> int:
        with open(handle, "r+b") as file:
            self._kept.append(torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8))
        return self._kept[-1].data_ptr()


class Nobody(Communicator):
    """What takes the tensors that are not pushed: here, none."""

    def abort(self) -> None:
        pass


def run_ranks(
    mesh: Mesh,
    folder: Path,
    work: Callable[[int, Any], Any],
    large: Communicator | None = None,
    *,
    memory: Any = None,
    seconds: float = 100,
) -> list[Any]:
    """Run a function on each rank, of its number and communicator, in processes; what each gives, or what it raises"""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(mesh.num_ranks, timeout=seconds)

    def run(rank: int, connection: Any) -> None:
        turns = count()

        def exchange(own: bytes) -> list[bytes]:
            turn = next(turns)
            (folder / f"{turn}-{rank}").write_bytes(own)
            barrier.wait()
            return [(folder / f"{turn}-{each}").read_bytes() for each in range(mesh.num_ranks)]

        try:
            numbers = count()
            make = memory or (lambda size: FileMemory(size, folder / f"memory-{rank}-{next(numbers)}"))
            rendezvous = Rendezvous(rank, mesh, "127.0.0.1", exchange, folder)
            result = work(rank, PeerCommunicator(rendezvous, large or Nobody(), make))
        except Exception as error:
            traceback.print_exc()
            result = error
        connection.send_bytes(pickle.dumps(result))
        barrier.wait()  # what others still read stays

    pipes = [context.Pipe(False) for _ in range(mesh.num_ranks)]
    processes = [context.Process(target=run, args=(rank, end)) for rank, (_, end) in enumerate(pipes)]
    for process in processes:
        process.start()
    try:
        for receiver, _ in pipes:
            assert receiver.poll(seconds), "a rank gives nothing"
        found = [pickle.loads(receiver.recv_bytes()) for receiver, _ in pipes]
    finally:
        for process in processes:
            process.join(5)
            process.kill()
    for each in found:
        if isinstance(each, AssertionError):
            raise each
    return found
