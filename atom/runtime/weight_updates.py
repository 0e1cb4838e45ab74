"""Update the weights of a running engine, on all its ranks, between two steps.

    updates = WeightUpdates(RankWeights(…), find_recipes, rename)
    updates.start()                              # no step may run from now on
    updates.add(UpdateInfo.read(update_info))    # or tensors of this process; RequestError: nothing has changed
    updates.finish()
    updates.num_updates, updates.fault           # 1, ""

An update is opened on all ranks before one of them writes. If it fails after that, on any of them, the weights are a
mixture: `fault` says so, and no request is served until updates have brought all tensors that the failed one named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cached_property
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from atom.checkpoint import Checkpoint, StoredTensor
from atom.errors import AtomError, CheckpointError, RequestError, UnsupportedError, WeightsIncompleteError, first_line
from atom.graph import Recipe, Type
from atom.graph.parts import stored_tensors
from atom.kernels.broadcast import BroadcastGroup, join
from atom.runtime.types import ChangeWeights
from atom.weights.arrived import Naming, packed_leaves
from atom.weights.checks import check_tensor
from atom.weights.evaluate import Loaded
from atom.weights.shared_file import describe_tensors, write_shared
from atom.weights.transfers import InitInfo, Kept, LocalTransfer, Transfer, UpdateInfo, open_transfer
from atom.weights.update import LiveWeights, Update

SKIPPED = "\0"  # begins the name of a tensor that nothing reads
Named = Sequence[tuple[str, Tensor]]


@dataclass
class RankWeights:
    """The weights of one rank, and what is under way to them."""

    recipes: Sequence[Recipe]
    tensors: Mapping[Recipe, Loaded]
    device: str
    stacked: Mapping[str, Sequence[str]]  # see `unstack`
    open_stored: Callable[[], Checkpoint] | None  # opens the files; None: weights are random
    check_values: Callable[[], None]  # raises CheckpointError for values that cannot be served
    rank: int = 0
    coordinates: Mapping[str, int] | None = None  # None: there is one rank
    alike: Sequence[tuple[str, str]] = ()  # see `Update`
    replaced: set[str] = field(default_factory=set)  # stored tensors whose files are out of date
    _live: LiveWeights | None = None  # cut when it is first needed
    _init: InitInfo = field(default_factory=InitInfo)
    _group: BroadcastGroup | None = None
    _kept: Kept = field(default_factory=Kept)
    _update: Update | None = None
    _transfer: Transfer | None = None

    @cached_property
    def naming(self) -> Naming:
        """Of tensors that arrive."""
        return Naming(self.stacked, packed_leaves(self.recipes))

    def init(self, info: InitInfo) -> None:
        """Prepare for a trainer; join its group, if it will send by NCCL."""
        if self._group is not None:
            self._group.close()
        self._init, self._group, self._kept = info, None, Kept()
        if not info.uses_nccl:
            return
        if self.device == "cpu":
            raise RequestError("init_info: NCCL is between GPUs, and this engine is on a CPU: send shared_memory")
        rank, size = info.rank_offset + self.rank, info.world_size or 0
        address, port = info.master_address or "", info.master_port or 0
        self._group = join(rank, size, id=info.unique_id(), address=address, port=port, timeout=info.timeout)

    def open(self, info: UpdateInfo, names: set[str], tensors: Named | None = None, *, is_whole: bool) -> None:
        """Open a part of an update, and check it; nothing is written. RequestError says why it cannot be taken.

        names: of its tensors as they are stored
        tensors: of this process; None: the info says where they are
        is_whole: it is the only part
        """
        if self._live is None:
            self._live = LiveWeights(self.recipes, self.tensors, self.device, self.coordinates)
        if self._update is None:
            self._update = Update(self._live, self.naming, self.open_stored, self.replaced, self.alike)
        if is_whole:
            self._update.expect(names)
        if tensors is not None:
            self._transfer = LocalTransfer(tensors)
        else:
            self._transfer = open_transfer(info, self.device, self._group, self._init, self._kept)

    def apply(self, names: set[str], *, is_whole: bool) -> None:
        """Write what was opened. If it raises, weights are a mixture, unless `has_written` is False.

        names: of all tensors of the part
        """
        assert self._update is not None and self._transfer is not None, "it is opened"
        before = self.replaced.copy()
        self.replaced |= names
        transfer, self._transfer = self._transfer, None
        try:
            if self.device != "cpu":
                torch.cuda.synchronize()  # steps that were started have read the old weights
            with transfer:
                for part in transfer.parts():
                    read = [(name, tensor) for name, tensor in part if not name.startswith(SKIPPED)]
                    self._update.add(read, keeps=not (is_whole and transfer.is_kept))
                if is_whole:
                    self._finish(self._update)
        except BaseException:
            if not self.has_written:
                self.replaced = before
            raise
        if is_whole:
            self.close()

    @property
    def has_written(self) -> bool:
        """Whether the update under way has changed anything."""
        return self._update is not None and self._update.num_written > 0

    def finish(self) -> None:
        """Finish an update of several parts."""
        if self._update is not None:
            self._finish(self._update)
        self.close()

    def _finish(self, update: Update) -> None:
        update.finish()
        self.check_values()
        if self.device != "cpu":
            torch.cuda.synchronize()

    def close(self) -> None:
        """End what is under way, as it is."""
        if self._transfer is not None:
            self._transfer.close()
        if self._update is not None:
            self._update.close()
            if self.device != "cpu":
                torch.cuda.empty_cache()  # the KV pool has what is left of the GPU
        self._update = self._transfer = None

    def reload(self) -> None:
        """Forget what was updated: all has been read from the files again, maybe to another place."""
        self._live = None
        self.replaced.clear()

    def take(self, message: ChangeWeights) -> str:
        """Do what the driver says; why it failed, or nothing."""
        try:
            match message.action:
                case "init":
                    self.init(msgspec.msgpack.decode(message.info, type=InitInfo))
                case "open":
                    info = UpdateInfo.decode(message.info)
                    self.open(info, names_of(info, self.naming), is_whole=message.is_whole)
                case "apply":
                    names = msgspec.msgpack.decode(message.info, type=set[str])
                    self.apply(names, is_whole=message.is_whole)
                case "finish":
                    self.finish()
                case "close":
                    self.close()
        except Exception as error:  # any: the driver decides what becomes of the engine
            return first_line(error)
        return ""


class Others(Protocol):
    """The other ranks of an engine."""

    def change_weights(self, message: ChangeWeights, own: Callable[[], None]) -> list[str]:
        """Have the others do what `own` does here, at the same time; why some have not."""


class WeightUpdates:
    """Drives updates; its methods are called between two steps."""

    def __init__(
        self,
        own: RankWeights,
        find_recipes: Callable[[], Sequence[Recipe]],
        rename: Callable[[str], str | None],
        ignored: Sequence[str] = (),
        others: Others | None = None,
        obstacle: str = "",
        *,
        is_one_host: bool = True,
    ) -> None:
        """
        own: of this rank
        find_recipes: those of the model, of all ranks; called at the first update
        rename: the name that a checkpoint's tensor has in them; see `Checkpoint.name_of`
        ignored: patterns of names that nothing reads
        others: the other ranks; None: there are none
        obstacle: why these weights cannot be updated; "": they can
        is_one_host: whether the other ranks can map a file of this host
        """
        self.num_updates = 0  # that have ended well
        self.is_open = False  # whether an update of several parts is under way
        self._own, self._find_recipes, self._rename, self._ignored = own, find_recipes, rename, ignored
        self._others, self._obstacle, self._is_one_host = others, obstacle, is_one_host
        self._missing: set[str] = set()  # tensors that a failed update has named, and none has brought since
        self._why = ""  # they are
        self._given: set[str] = set()  # tensors of the update under way
        # the last header that fitted, its tensors' names here, and those of all that are stored
        self._matched: tuple[Any, list[str], set[str]] = None, [], set()

    @cached_property
    def _expected(self) -> Mapping[str, Type]:
        """The stored tensors that the model reads, on all ranks."""
        return {leaf.name: leaf.type for recipe in self._find_recipes() for leaf in stored_tensors(recipe)}

    @cached_property
    def _naming(self) -> Naming:
        """Of tensors that arrive, of the weights of all ranks."""
        return Naming(self._own.stacked, packed_leaves(self._find_recipes()))

    @property
    def fault(self) -> str:
        """Why nothing is served; "": the weights are whole."""
        if not self._missing:
            return ""
        more = f" and {len(self._missing) - 1} more" if len(self._missing) > 1 else ""
        return f"the weights are incomplete ({self._why}): update {min(self._missing)}{more}"

    def init(self, info: Mapping[str, Any]) -> None:
        """Prepare for a trainer, see `InitInfo`. RequestError if it does not come, or cannot be served."""
        self._need()
        init = InitInfo.read(info)
        message = ChangeWeights("init", msgspec.msgpack.encode(init))
        if failed := self._on_all(message, lambda: self._own.init(init)):
            raise RequestError(join_reasons(failed))

    def start(self) -> None:
        """Begin an update of several parts. RequestError if one is under way."""
        self._need()
        if self.is_open:
            raise RequestError("an update of the weights is under way: finish it first")
        self.is_open, self._given = True, set()

    def add(self, update: UpdateInfo | Named) -> None:
        """Take a part of the update that was started, or one that is whole by itself.

        RequestError: nothing has changed. WeightsIncompleteError: it has failed half-way.
        """
        self._need()
        is_whole = not self.is_open
        tensors = None if isinstance(update, UpdateInfo) else update
        info, names = self._match(update if isinstance(update, UpdateInfo) else describe_tensors(update))
        if tensors is not None:
            tensors = [(name, tensor) for name, (_, tensor) in zip(info.names, tensors, strict=True)]
        if again := self._given & names:
            raise RequestError(f"tensor {min(again)} has come before in this update")
        with ExitStack() as opened:
            body = b"" if self._others is None else opened.enter_context(self._share(info, tensors)).encode()
            message = ChangeWeights("open", body, is_whole)
            if failed := self._on_all(message, lambda: self._own.open(info, names, tensors, is_whole=is_whole)):
                if is_whole:
                    self._close()
                raise RequestError(join_reasons(failed))
            message = ChangeWeights("apply", msgspec.msgpack.encode(names), is_whole)
            failed = self._on_all(message, lambda: self._own.apply(names, is_whole=is_whole))
        if failed and self._others is None and not self._own.has_written:
            self._close()
            self.is_open, self._given = False, set()
            ended = "" if is_whole else "; the update has ended, nothing has changed"
            raise RequestError(join_reasons(failed) + ended)
        self._given |= names
        if failed:
            self._fail(failed)
        if is_whole:
            self._end()

    def finish(self) -> None:
        """Finish an update of several parts. WeightsIncompleteError if a tensor is missing."""
        self._need()
        if not self.is_open:
            raise RequestError("no update of the weights is under way: start_weight_update begins one")
        if failed := self._on_all(ChangeWeights("finish"), self._own.finish):
            self._fail(failed)
        self._end()

    def reload(self) -> None:
        """All weights have been read from the files again, so that those of updates are missing."""
        if self._own.replaced:
            self._missing |= self._own.replaced
            self._why = "sleep with level=2 has dropped them"
        self._own.reload()

    def _end(self) -> None:
        self.num_updates += 1
        self._missing -= self._given
        self.is_open, self._given = False, set()

    def _fail(self, failed: Sequence[str]) -> None:
        """Leave the weights as they are, a mixture."""
        self._close()
        self._why = join_reasons(failed)
        self._missing |= self._given
        self.is_open, self._given = False, set()
        raise WeightsIncompleteError(self.fault)

    def _close(self) -> None:
        with suppress(AtomError):  # of a rank that has ended, which the next step reports
            self._on_all(ChangeWeights("close"), self._own.close)

    def _need(self) -> None:
        if self._obstacle:
            raise UnsupportedError(self._obstacle)

    def _match(self, info: UpdateInfo) -> tuple[UpdateInfo, set[str]]:
        """The same with the names of the model's files, and those of all stored tensors that it brings.

        RequestError names a tensor that does not fit.
        """
        if not info.names:
            raise RequestError("an update has to have tensors")
        header = (info.names, info.dtype_names, info.shapes)
        if header == self._matched[0]:  # as of a trainer that sends all of its tensors each time
            return msgspec.structs.replace(info, names=self._matched[1]), self._matched[2]
        names: list[str] = []
        seen: set[str] = set()
        self._naming.announce(info.names)
        unread = {other for _, other in self._own.alike}  # but compared
        for name, stored in info.stored().items():
            parts = self._find(name, stored)
            ours = name if parts.keys() & (self._expected.keys() | unread) else self._rename(name) or name
            parts = parts if ours == name else self._find(ours, stored)
            if ours in seen:
                raise RequestError(f"tensor {ours} is there twice")
            seen.add(ours)
            if ours not in unread and not parts.keys() & self._expected.keys() and self._is_ignored(ours):
                names.append(f"{SKIPPED}{ours}")
                continue
            names.append(ours)
            for part, cut in parts.items():
                if part in unread:
                    continue
                if part not in self._expected:
                    raise RequestError(f"the model does not read tensor {part}")
                with refusing():
                    check_tensor(part, cut, self._expected[part])
        info = msgspec.structs.replace(info, names=names)
        self._matched = header, names, names_of(info, self._naming)
        return info, self._matched[2]

    def _find(self, name: str, stored: StoredTensor) -> dict[str, StoredTensor]:
        with refusing():
            return self._naming.find(name, stored)

    def _is_ignored(self, name: str) -> bool:
        return any(fnmatch(name, pattern) for pattern in self._ignored)

    def _share(self, info: UpdateInfo, tensors: Named | None) -> AbstractContextManager[UpdateInfo]:
        """The info by which the other ranks find the tensors."""
        if tensors is not None and not self._is_one_host:
            raise RequestError("ranks on other hosts cannot read the tensors of this process: send them by NCCL")
        return write_shared(info, tensors)

    def _on_all(self, message: ChangeWeights, own: Callable[[], None]) -> list[str]:
        """Do this on all ranks at the same time; why some have not."""
        errors: list[str] = []

        def attempt() -> None:
            try:
                own()
            except Exception as error:  # any: the others have to be waited for
                errors.append(first_line(error))

        if self._others is None:
            attempt()
            return errors
        return self._others.change_weights(message, attempt) + errors


def names_of(info: UpdateInfo, naming: Naming) -> set[str]:
    """The stored tensors that an update brings, those of parts by their own names."""
    naming.announce(info.names)
    arriving = ((name, stored) for name, stored in info.stored().items() if not name.startswith(SKIPPED))
    return {part for name, stored in arriving for part in naming.find(name, stored)}


@contextmanager
def refusing() -> Iterator[None]:
    """Raise a RequestError in place of a CheckpointError: a request has brought the tensor."""
    try:
        yield
    except CheckpointError as error:
        raise RequestError(str(error)) from None


def join_reasons(reasons: Sequence[str]) -> str:
    return "; ".join(dict.fromkeys(reasons))
