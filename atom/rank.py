"""The process of a rank beside the one that drives.

`build.start_ranks` starts it, or on another host a supervisor does (`runtime.remote_ranks`). It opens the model that
the driver has compiled, with its own parts of the weights, and takes the driver's steps.
"""

from __future__ import annotations

import contextlib
import io
import sys
import traceback
from contextlib import ExitStack
from pathlib import Path

import msgspec
import torch

from atom.build import (
    RankOpening,
    check_same_weights,
    compile_with,
    digest_of,
    load_weights,
    open_checked,
    open_runner,
    sample_weights,
    set_kv_scales,
)
from atom.checkpoint import SilentProgress
from atom.compiler import mesh_of
from atom.errors import ArtifactError, AtomError
from atom.gc_utils import no_collection, settle
from atom.kernels import Rendezvous, connect_rank
from atom.runtime.kv_scales import KVScales, ScalePlan
from atom.runtime.ranks import RankLink
from atom.runtime.runner import Runner
from atom.runtime.step_input import StepInput
from atom.runtime.types import BlockCopies


def main(link: RankLink) -> None:
    """Serve as a rank, until the driver ends."""
    try:
        runner, is_leader = open_rank(link)
        link.done()
        decoder = msgspec.msgpack.Decoder(StepInput | BlockCopies)
        while True:
            told = decoder.decode(link.receive())
            if isinstance(told, BlockCopies):
                runner.copy(told)
                continue
            sampled = runner.execute(told).wait()
            if is_leader:
                link.answer(msgspec.msgpack.encode(sampled))
    except Exception as error:
        if not isinstance(error, AtomError):
            traceback.print_exc()
        link.fail(error)
        sys.exit(1)


@no_collection()
def open_rank(link: RankLink) -> tuple[Runner, bool]:
    """Open the model of the opening that the driver sends, and connect to the other ranks.

    Gives the runner, and whether the driver needs what it samples: that of a data group beside its own.
    """
    opening = msgspec.msgpack.decode(link.receive(), type=RankOpening)
    config, progress, mesh = opening.config, SilentProgress(), mesh_of(opening.config)
    if opening.num_threads is not None:
        torch.set_num_threads(opening.num_threads)
    with ExitStack() as opened, contextlib.redirect_stderr(io.StringIO()):  # the driver has said the same
        checkpoint = open_checked(config, progress, opened)
        compiled = compile_with(config, progress, checkpoint)
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
    check_same_weights(link.exchange(sample_weights(tensors)))
    plan, *_ = link.exchange(b"")
    folder = link.receive().decode()
    rendezvous = Rendezvous(opening.rank, mesh, opening.host, link.exchange, Path(folder) if folder else None)
    communicator = connect_rank(config.device, rendezvous)
    scales = KVScales(compiled.graph, tensors)
    measure = set_kv_scales(scales, msgspec.msgpack.decode(plan, type=ScalePlan), mesh, communicator)
    runner, _ = open_runner(compiled, tensors, config, progress, measure, communicator)
    settle()
    return runner, opening.rank in mesh.leaders
