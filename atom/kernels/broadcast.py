"""Receive what another process broadcasts by NCCL, and send it.

    group = join(3, 4, address="10.0.0.1", port=29600)     # rank 3 of 4; returns once all have joined
    arriving = group.receive(1 << 20)                      # bytes; of rank 0
    buffer = arriving.wait()                               # u8[1 << 20], for the current stream

The ranks meet as those of vLLM's `StatelessProcessGroup` do: rank 0 opens a TCPStore and puts the pickled id of the
communicator there, and all add up one number. Broadcasts run on a stream of their own. If the sender dies, the wait
ends with an error after a time, and the communicator is aborted.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atom.errors import RequestError
from atom.kernels.nccl import BYTES, DTYPES, SUM, Library, UniqueId
from atom.process.pickles import read_pickle, write_pickle

ID_KEY = "broadcast_from/0/0"  # of the store
ID_BYTES = len(bytes(UniqueId()))
LOOK_SECONDS = 0.0002  # between looks at a broadcast under way


class Arriving(NamedTuple):
    """A broadcast that has been started."""

    content: Tensor
    arrived: torch.cuda.Event
    group: BroadcastGroup

    def wait(self) -> Tensor:
        """Wait for the bytes, which the current stream may read then. TimeoutError if the sender has died."""
        self.group.wait(self.arrived)
        torch.cuda.current_stream().wait_event(self.arrived)
        self.content.record_stream(torch.cuda.current_stream())
        return self.content


class BroadcastGroup:
    """The ranks that receive from rank 0."""

    def __init__(self, id: bytes, rank: int, size: int, timeout: float) -> None:
        """timeout: seconds without progress after which rank 0 counts as dead"""
        self._nccl, self._timeout = Library(is_one_host=False), timeout
        self._handle = self._nccl.connect(id, rank, size)
        self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._is_open = True
        one = torch.zeros(1, device="cuda")
        self._stream.wait_stream(torch.cuda.current_stream())
        self._nccl.all_reduce(
            one.data_ptr(), one.data_ptr(), 1, DTYPES[one.dtype], SUM, self._handle, self._stream.cuda_stream
        )
        self.synchronize()

    def receive(self, num_bytes: int) -> Arriving:
        """Start to receive; the buffer is allocated here."""
        with torch.cuda.stream(self._stream):
            content = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
            self._broadcast(content)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(self._stream)
        return Arriving(content, arrived, self)

    def send(self, content: Tensor) -> None:
        """Start to send u8[bytes], as rank 0, once the current stream has made them."""
        self._stream.wait_stream(torch.cuda.current_stream())
        self._broadcast(content)
        content.record_stream(self._stream)

    def synchronize(self) -> None:
        """Wait for all broadcasts so far."""
        ended = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ended.record(self._stream)
        self.wait(ended)

    def wait(self, event: torch.cuda.Event) -> None:
        """Wait for an event of the broadcasts' stream. TimeoutError, and the group is closed, if it does not come."""
        end = time.monotonic() + self._timeout
        while not event.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > end:
                self.close()
                raise TimeoutError(f"no tensor has come from the trainer for {self._timeout:g} seconds")
            time.sleep(LOOK_SECONDS)

    def close(self) -> None:
        """Abort the communicator, in a thread: NCCL may wait there."""
        if self._is_open:
            self._is_open = False
            threading.Thread(target=self._nccl.abort, args=(self._handle,), daemon=True).start()

    def _broadcast(self, content: Tensor) -> None:
        if not self._is_open:
            raise RequestError("the NCCL group of the trainer is closed: call init_weight_transfer_engine again")
        place, stream = content.data_ptr(), self._stream.cuda_stream
        self._nccl.broadcast(place, place, content.numel(), BYTES, 0, self._handle, stream)


def join(
    rank: int, size: int, *, id: bytes | None = None, address: str = "", port: int = 0, timeout: float = 300.0
) -> BroadcastGroup:
    """Join a group; returns once all its ranks have. RequestError if they do not meet.

    id: of the communicator; None: rank 0 shares it by a TCPStore at this address and port
    """
    if id is not None:
        return BroadcastGroup(id, rank, size, timeout)
    limit = timedelta(seconds=timeout)
    try:
        store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
            address, port, size, is_master=rank == 0, timeout=limit, use_libuv=False
        )
        if rank == 0:
            store.set(ID_KEY, write_pickle(Library(is_one_host=False).make_id()))  # type: ignore[arg-type]
        id = read_id(store.get(ID_KEY))
    except RuntimeError as error:  # torch's
        raise RequestError(f"the ranks of {address}:{port} do not meet: {error}") from None
    return BroadcastGroup(id, rank, size, timeout)  # rank 0 keeps the store until all have read it


def read_id(content: bytes) -> bytes:
    """The id of a communicator, as bytes or as vLLM's `ncclUniqueId`, pickled. RequestError if it is anything else."""
    try:
        made = read_pickle(content, _find_id)
    except ValueError as error:
        raise RequestError(f"the id of an NCCL communicator cannot be read: {error}") from None
    if not isinstance(made, bytes) or len(made) != ID_BYTES:
        raise RequestError(f"the id of an NCCL communicator is {made!r:.80}, not {ID_BYTES} bytes")
    return made


def _find_id(module: str, name: str) -> Any:
    """The bytes of a ctypes structure in place of it, whose class is not imported."""
    if (module, name) == ("_ctypes", "_unpickle"):
        return lambda _, state: state[-1]
    return UniqueId if name == "ncclUniqueId" else None
