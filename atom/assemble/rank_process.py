"""The process of a rank other than the driver.

`assemble.ranks.start_ranks` starts it, or on another host a supervisor does (`runtime.ranks.remote`). It opens the
model that the driver has compiled, with its own parts of the weights, and takes the driver's steps.
"""

from __future__ import annotations

import contextlib
import io
import os
import queue
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import msgspec
import torch

from atom.assemble import (
    RankOpening,
    compare_ranks,
    compile_with,
    describe_rank,
    digest_of,
    gather_kv_scales,
    load_weights,
    open_adapters,
    open_checked,
    open_rank_weights,
    open_runner,
    set_kv_scales,
)
from atom.checkpoint import SilentProgress
from atom.compiler import mesh_of
from atom.errors import ArtifactError, AtomError, ConfigError, RequestError
from atom.kernels import Rendezvous, connect_rank
from atom.process.gc_utils import no_collection, settle
from atom.process.messages import say
from atom.runtime.kv.scales import KVScales, ScalePlan
from atom.runtime.profiler import Profiler
from atom.runtime.ranks.driver import WAIT
from atom.runtime.ranks.links import RankLink
from atom.runtime.step.input import StepInput
from atom.runtime.step.runner import Pending, Runner
from atom.runtime.types import BlockCopies, ChangeWeights, LoadAdapter, Profile
from atom.runtime.weight_updates import RankWeights
from atom.weights.lora import LoraWeights

DECODER = msgspec.msgpack.Decoder(StepInput | BlockCopies | ChangeWeights | LoadAdapter | Profile)


def main(link: RankLink) -> None:
    """Serve as a rank, until the driver ends."""
    try:
        rank, reports = open_rank(link)
        link.done()
        running: list[Pending] = []
        started: queue.SimpleQueue[Pending] = queue.SimpleQueue()
        if reports:
            threading.Thread(target=answer, args=(link, started), name="answer", daemon=True).start()
        while True:  # ahead of the device, as the driver is
            step = rank.take(link.receive())
            if step is not None:
                running = [*find_running(running), step]
            if reports and step is not None:
                started.put(step)
    except Exception as error:
        fail(link, error)


def find_running(steps: Iterable[Pending]) -> list[Pending]:
    """The steps that the device has not ended.

    They own memory of the host that the device writes log probabilities to, so they are kept until then.
    """
    return [step for step in steps if not step.is_over]


def answer(link: RankLink, started: queue.SimpleQueue[Pending]) -> None:
    """Send the driver what steps sample, one after the other."""
    try:
        while True:
            link.answer(msgspec.msgpack.encode(started.get().wait()))
    except Exception as error:
        fail(link, error)


def fail(link: RankLink, error: Exception) -> NoReturn:
    """Report an error to the driver, and end this process, whatever a device waits for."""
    if not isinstance(error, AtomError):
        traceback.print_exc()
    link.fail(error)
    sys.stderr.flush()
    os._exit(1)


@dataclass
class Rank:
    """Runs a rank's part of an engine for the driver."""

    runner: Runner
    profiler: Profiler
    adapters: LoraWeights | None  # None: the model is served without any
    weights: RankWeights
    done: Callable[[str], object]  # answers what the driver waits for: why it was refused, or nothing
    pending: deque[Pending] = field(default_factory=deque)  # steps that were not started to their end

    def take(self, body: bytes) -> Pending | None:
        """Handle a message of the driver: a step, copies, a wait, a profiler's start or stop, an adapter, or weights.

        Returns the step that was started to its end, if any.
        """
        match None if body == WAIT else DECODER.decode(body):
            case BlockCopies() as copies:
                self.runner.copy(copies)
                return None
            case Profile() as message:
                profile(self.profiler, message)
                return None
            case LoadAdapter() as message:
                self.done(self._load(message))
                return None
            case ChangeWeights() as message:
                self.done(self.weights.take(message))
                return None
            case StepInput() as step:
                self.pending.append(self.runner.execute(step))
        return self.pending.popleft().finished() if self.runner.model.defers_logits == (body == WAIT) else None

    def _load(self, message: LoadAdapter) -> str:
        """Load an adapter; why it is refused, if it is. The driver has checked what its files say."""
        assert self.adapters is not None, "the driver has adapters"
        try:
            files = self.adapters.read(message.path)
            files.hash()
        except AtomError as error:
            return str(error)
        if files.digest != message.digest:
            return f"{message.path} has other files than on the host that drives; copy the same ones to all hosts"
        self.adapters.write(message.number, files)
        return ""


def profile(profiler: Profiler, message: Profile) -> None:
    """Start or stop the profiler; a trace that cannot be written, on a host of its own, ends no engine."""
    try:
        profiler.start() if message.starts else profiler.stop()
    except (ConfigError, RequestError) as error:
        say(f"a rank has no trace: {error}")


@no_collection()
def open_rank(link: RankLink) -> tuple[Rank, bool]:
    """Open the model that the driver's opening describes, and connect to the other ranks.

    Also gives whether the driver reads what this rank reports, see `Mesh.reporters`.
    """
    opening = msgspec.msgpack.decode(link.receive(), type=RankOpening)
    config, progress, mesh = opening.config, SilentProgress(), mesh_of(opening.config)
    if opening.num_threads is not None:
        torch.set_num_threads(opening.num_threads)
    with ExitStack() as opened, contextlib.redirect_stderr(io.StringIO()):  # the driver has printed the same
        checkpoint = open_checked(config, progress, opened)
        compiled = compile_with(config, progress, checkpoint, mesh.stage(opening.rank))
        if digest_of(compiled.graph) != opening.text:
            raise ArtifactError(
                "it has compiled another text than the process that drives: are their versions the same?"
            )
        tensors = load_weights(compiled.graph, checkpoint, config, progress, opening.rank)
    if num_compiled := compiled.report.compiled:
        say(f"rank {opening.rank} has compiled {num_compiled} pieces, which {config.cache} did not have")
    adapters = open_adapters(compiled.graph, tensors, config.serve, mesh, opening.rank)
    described = describe_rank(compiled.graph, tensors, adapters, config.serve.block_size)
    stages = compare_ranks(link.exchange(described), mesh)
    kinds_of = [stage.kinds for stage in stages]
    plan, *_ = link.exchange(b"")
    folder = link.receive().decode()
    shared = Path(folder) if folder else None
    rendezvous = Rendezvous(opening.rank, mesh, opening.host, link.exchange, shared, config.parallel.collectives)
    communicator = connect_rank(config.device, rendezvous)
    scales = KVScales(compiled.graph, tensors)
    measure = set_kv_scales(scales, msgspec.msgpack.decode(plan, type=ScalePlan), mesh, communicator)
    with contextlib.redirect_stderr(io.StringIO()):  # the driver has printed the same
        runner, _ = open_runner(compiled, tensors, config, progress, measure, communicator, kinds_of, link.exchange)
    gather_kv_scales(scales, link.exchange)
    settle()
    serve = config.serve
    profiler = Profiler(serve.torch_profiler_dir, rank=opening.rank, is_detailed=serve.profiler_more)
    weights = open_rank_weights(compiled.graph, tensors, config, opening.rank)
    return Rank(runner, profiler, adapters, weights, link.done), opening.rank in mesh.reporters(
        has_taps=runner.model.num_taps > 0
    )
