"""Send weights from a training process to an engine that runs.

    from atom.trainer import IpcWeights, NcclSender, SharedWeights

    with SharedWeights(model.state_dict()) as shared:      # through the host's memory, to any engine on this host
        post("/update_weights", json={"update_info": shared.update_info})
    with IpcWeights(model.state_dict()) as handles:        # to an engine on the same GPU, which reads them in place
        engine.update_weights(handles.update_info)         # in another process: post handles.json_update_info

    sender = NcclSender("10.0.0.1", 29600, world_size=3)   # to the 2 GPUs of an engine
    # while /init_weight_transfer_engine of sender.init_info runs
    sender.connect()
    # while /update_weights of sender.update_info(tensors) runs
    sender.send(tensors)

Tensors are named as transformers names them, `model.layers.0.mlp.up_proj.weight`: those of a `state_dict`, or some. An
engine takes what vLLM's takes, so that vLLM's own trainer classes can send to it too.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from atom.errors import RequestError
from atom.kernels.broadcast import BroadcastGroup, join
from atom.process.pickles import write_pickle
from atom.weights.shared_file import describe_tensors, write_shared
from atom.weights.transfers import BUFFER_BYTES, UpdateInfo, cut_buffers

Tensors = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


class SharedWeights:
    """Tensors in shared memory, from when the context is entered until it is left."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors, self._opened = pairs_of(tensors), ExitStack()
        self.update_info: dict[str, Any] = {}

    def __enter__(self) -> SharedWeights:
        info = self._opened.enter_context(write_shared(describe_tensors(self._tensors), self._tensors))
        self.update_info = plain(info)
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()


class IpcWeights:
    """CUDA IPC handles of tensors on one GPU, which stay where they are until the context is left.

    Several updates may be sent in one context, of parameters that an optimizer changes in place: an engine that was
    sent {"init_info": {"keep_open": True}} opens their memory only once.
    """

    def __init__(self, tensors: Tensors) -> None:
        """Raises RequestError for a tensor that is not on a GPU, or not contiguous."""
        self._tensors = [(name, tensor.detach()) for name, tensor in pairs_of(tensors)]
        if outside := next((name for name, tensor in self._tensors if not tensor.is_cuda), None):
            raise RequestError(f"tensor {outside} is not on a GPU: send SharedWeights")
        if loose := next((name for name, tensor in self._tensors if not tensor.is_contiguous()), None):
            raise RequestError(f"tensor {loose} is not contiguous: send a copy that is")
        self._info: dict[str, Any] = {}
        self._handles: list[Any] = []
        self._pickled = ""

    def __enter__(self) -> IpcWeights:
        self._info = plain(describe_tensors(self._tensors))
        self._handles = [
            {uuid_of(tensor): reduce_tensor(tensor)[1]}  # type: ignore[no-untyped-call]
            for _, tensor in self._tensors
        ]
        self._pickled = base64.b64encode(write_pickle(self._handles)).decode()
        return self

    @property
    def update_info(self) -> dict[str, Any]:
        """For a function call, or Ray; returned once all that has been launched on this GPU has written its results."""
        torch.cuda.synchronize()
        return {**self._info, "ipc_handles": self._handles}

    @property
    def json_update_info(self) -> dict[str, Any]:
        """The same for HTTP."""
        torch.cuda.synchronize()
        return {**self._info, "ipc_handles_pickled": self._pickled}

    def __exit__(self, *_: object) -> None:
        self._tensors, self._handles, self._info, self._pickled = [], [], {}, ""


class NcclSender:
    """Rank 0 of an NCCL group, whose other ranks are those of engines."""

    def __init__(
        self,
        address: str,
        port: int,
        world_size: int,
        *,
        packed: bool = True,
        buffer_bytes: int = BUFFER_BYTES,
        timeout: float = 300.0,
    ) -> None:
        """
        address, port: of this process, where the ranks meet
        world_size: the ranks of all engines, and this one
        packed: send tensors together in buffers of about `buffer_bytes`
        timeout: seconds without progress after which an engine counts as dead
        """
        self._size, self._timeout = world_size, timeout
        self._group: BroadcastGroup | None = None
        self._limit = buffer_bytes if packed else 0
        self.init_info: dict[str, Any] = {
            "master_address": address,
            "master_port": port,
            "rank_offset": 1,
            "world_size": world_size,
            "packed": packed,
            "packed_buffer_size_bytes": buffer_bytes,
        }

    def update_info(self, tensors: Tensors) -> dict[str, Any]:
        """What engines are sent ahead of these tensors."""
        return plain(describe_tensors(pairs_of(tensors)))

    def connect(self) -> None:
        """Meet the engines, which have been sent `init_info` and wait. RequestError if they do not come."""
        address, port = self.init_info["master_address"], self.init_info["master_port"]
        self._group = join(0, self._size, address=address, port=port, timeout=self._timeout)

    def send(self, tensors: Tensors) -> None:
        """Broadcast tensors on this GPU, while engines that have been sent their `update_info` take them.

        TimeoutError if an engine has died.
        """
        if self._group is None:
            raise RequestError("connect first")
        every = [tensor.detach().contiguous() for _, tensor in pairs_of(tensors)]
        for places in cut_buffers([tensor.nbytes for tensor in every], self._limit):
            contents = [every[at].view(-1).view(torch.uint8) for at in places]
            self._group.send(contents[0] if len(contents) == 1 else torch.cat(contents))
        self._group.synchronize()

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()


def pairs_of(tensors: Tensors) -> list[tuple[str, Tensor]]:
    return list(tensors.items() if isinstance(tensors, Mapping) else tensors)


def plain(info: UpdateInfo) -> dict[str, Any]:
    """What JSON can hold of an update's info."""
    made: dict[str, Any] = msgspec.to_builtins(info)
    return made


def uuid_of(tensor: Tensor) -> str:
    """The GPU that a tensor is on, whatever its number is in another process."""
    return str(torch.cuda.get_device_properties(tensor.device).uuid)
