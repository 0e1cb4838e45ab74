"""The process of a rank beside the one that drives.

`build.start_ranks` starts it, or on another host a supervisor does (`runtime.remote_ranks`). It opens the model that
the driver has compiled, with its own parts of the weights, and takes the driver's steps.
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
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

import msgspec
import torch

from atom.build import (
    RankOpening,
    compare_ranks,
    compile_with,
    describe_rank,
    digest_of,
    gather_kv_scales,
    load_weights,
    open_checked,
    open_runner,
    set_kv_scales,
)
from atom.checkpoint import SilentProgress
from atom.compiler import mesh_of
from atom.errors import ArtifactError, AtomError, ConfigError, RequestError
from atom.gc_utils import no_collection, settle
from atom.kernels import Rendezvous, connect_rank
from atom.runtime.driver import WAIT
from atom.runtime.kv_scales import KVScales, ScalePlan
from atom.runtime.profiler import Profiler
from atom.runtime.ranks import RankLink
from atom.runtime.runner import Pending, Runner
from atom.runtime.step_input import StepInput
from atom.runtime.types import BlockCopies, Profile

DECODER = msgspec.msgpack.Decoder(StepInput | BlockCopies | Profile)


def main(link: RankLink) -> None:
    """Serve as a rank, until the driver ends."""
    try:
        runner, is_leader, profiler = open_rank(link)
        link.done()
        pending: deque[Pending] = deque()
        running: list[Pending] = []
        started: queue.SimpleQueue[Pending] = queue.SimpleQueue()
        if is_leader:
            threading.Thread(target=answer, args=(link, started), name="answer", daemon=True).start()
        while True:  # ahead of the device, as the driver is
            step = take(link.receive(), runner, pending, profiler)
            if step is not None:
                running = [*find_running(running), step]
            if is_leader and step is not None:
                started.put(step)
    except Exception as error:
        fail(link, error)


def find_running(steps: Iterable[Pending]) -> list[Pending]:
    """Those that a device is not through with.

    They are to be held until then: it writes log probabilities into memory of the host that they own.
    """
    return [step for step in steps if not step.is_over]


def answer(link: RankLink, started: queue.SimpleQueue[Pending]) -> None:
    """Tell the driver what steps sample, one after the other."""
    try:
        while True:
            link.answer(msgspec.msgpack.encode(started.get().wait()))
    except Exception as error:
        fail(link, error)


def fail(link: RankLink, error: Exception) -> NoReturn:
    """Tell the driver of an error, and end this process, whatever a device waits for."""
    if not isinstance(error, AtomError):
        traceback.print_exc()
    link.fail(error)
    sys.stderr.flush()
    os._exit(1)


def take(body: bytes, runner: Runner, pending: deque[Pending], profiler: Profiler) -> Pending | None:
    """Do what the driver tells: take a step or copies, finish the oldest step, or start or stop the profiler.

    Gives the step that was started to its end.

    pending: steps that were not
    """
    told = None if body == WAIT else DECODER.decode(body)
    if isinstance(told, BlockCopies):
        runner.copy(told)
        return None
    if isinstance(told, Profile):
        profile(profiler, told)
        return None
    if told is not None:
        pending.append(runner.execute(told))
    return pending.popleft().finished() if runner.model.defers_logits == (body == WAIT) else None


def profile(profiler: Profiler, told: Profile) -> None:
    """Start or stop the profiler; a trace that cannot be written, on a host of its own, ends no engine."""
    try:
        profiler.start() if told.starts else profiler.stop()
    except (ConfigError, RequestError) as error:
        print(f"atom-run: a rank has no trace: {error}", file=sys.stderr)


@no_collection()
def open_rank(link: RankLink) -> tuple[Runner, bool, Profiler]:
    """Open the model of the opening that the driver sends, and connect to the other ranks.

    Gives the runner, whether the driver needs what it samples, as that of a data group beside its own, and a profiler.
    """
    opening = msgspec.msgpack.decode(link.receive(), type=RankOpening)
    config, progress, mesh = opening.config, SilentProgress(), mesh_of(opening.config)
    if opening.num_threads is not None:
        torch.set_num_threads(opening.num_threads)
    with ExitStack() as opened, contextlib.redirect_stderr(io.StringIO()):  # the driver has said the same
        checkpoint = open_checked(config, progress, opened)
        compiled = compile_with(config, progress, checkpoint, mesh.stage(opening.rank))
        if digest_of(compiled.graph) != opening.text:
            raise ArtifactError(
                "it has compiled another text than the process that drives: are their versions the same?"
            )
        tensors = load_weights(compiled.graph, checkpoint, config, progress, opening.rank)
    if num_compiled := compiled.report.compiled:
        print(
            f"atom-run: rank {opening.rank} has compiled {num_compiled} pieces, which {config.cache} did not have",
            file=sys.stderr,
        )
    kinds_of = compare_ranks(link.exchange(describe_rank(compiled.graph, tensors)), mesh)
    plan, *_ = link.exchange(b"")
    folder = link.receive().decode()
    shared = Path(folder) if folder else None
    rendezvous = Rendezvous(opening.rank, mesh, opening.host, link.exchange, shared, config.parallel.collectives)
    communicator = connect_rank(config.device, rendezvous)
    scales = KVScales(compiled.graph, tensors)
    measure = set_kv_scales(scales, msgspec.msgpack.decode(plan, type=ScalePlan), mesh, communicator)
    with contextlib.redirect_stderr(io.StringIO()):  # likewise
        runner, _ = open_runner(compiled, tensors, config, progress, measure, communicator, kinds_of, link.exchange)
    gather_kv_scales(scales, link.exchange)
    settle()
    serve = config.serve
    profiler = Profiler(serve.torch_profiler_dir, rank=opening.rank, is_detailed=serve.profiler_more)
    return runner, opening.rank in mesh.leaders, profiler
