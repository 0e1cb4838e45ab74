"""The process of a rank beside the one that drives.

`build.start_ranks` starts it. It opens the model that the driver has compiled, with its own parts of the weights, and
takes the driver's steps.
"""

from __future__ import annotations

import contextlib
import io
from contextlib import ExitStack
from pathlib import Path

import msgspec

from atom.build import (
    RankOpening,
    compile_with,
    load_weights,
    open_checked,
    open_runner,
    share_cores,
)
from atom.checkpoint import SilentProgress
from atom.compiler import mesh_of
from atom.gc_utils import no_collection, settle
from atom.kernels import connect_rank
from atom.runtime.ranks import RankLink
from atom.runtime.runner import Runner
from atom.runtime.step_input import StepInput


def main(link: RankLink) -> None:
    """Serve as a rank, until the driver ends."""
    try:
        runner = open_rank(link)
        link.done()
        decoder = msgspec.msgpack.Decoder(StepInput)
        while True:
            runner.execute(decoder.decode(link.receive())).wait()
    except Exception as error:
        link.fail(error)
        raise


@no_collection()
def open_rank(link: RankLink) -> Runner:
    """Open the model of the opening that the driver sends, and connect to the other ranks."""
    opening = msgspec.msgpack.decode(link.receive(), type=RankOpening)
    config, progress, num_ranks = opening.config, SilentProgress(), mesh_of(opening.config).num_ranks
    share_cores(num_ranks)
    with ExitStack() as opened, contextlib.redirect_stderr(io.StringIO()):  # the driver has said the same
        checkpoint = open_checked(config, progress, opened)
        compiled = compile_with(config, progress, checkpoint)
        tensors = load_weights(compiled.graph, checkpoint, config, progress, opening.rank)
    link.done()
    communicator = connect_rank(config.device, opening.rank, num_ranks, Path(link.receive().decode()))
    link.done()
    runner, _ = open_runner(compiled, tensors, config, progress, communicator=communicator)
    settle()
    return runner
