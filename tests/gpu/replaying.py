"""Replay collectives of mixed sizes with one rank late at times, and hold each against float64 and the other ranks.

found = replay_among(4, count=100_000)          # Replayed of each of four ranks, on a GPU each
found = replay(communicator, rank, 4, 100)      # this rank's; all call it at the same time, on a CPU too

A replay's numbers follow from its number and the rank, so a rank knows what the others have. All checks are made in the
graph.
"""

from __future__ import annotations

import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atom.graph import Mesh
from atom.kernels import Communicator, Rendezvous, connect_rank
from atom.kernels.peers.communicator import PeerCommunicator
from atom.runtime.ranks.links import RankLink, RankProcess, Ranks

DTYPES = (torch.bfloat16, torch.float32, torch.float16)
# rows and columns of the tensors in each graph: summed whole, in parts and in tiles; what is done with the largest is
# NCCL's, its sums among more than two ranks too: those are in float32, since NCCL rounds each step of others
MIXES = (
    ((1, 576), (1, 5120), (32, 5120)),
    ((2, 2), (3, 4098), (150, 5120)),
    ((1, 5120), (7, 5120), (1, 576), (64, 8192)),
    ((400, 5120), (850, 5120)),
)
FEW = tuple(tuple(shape for shape in mix if math.prod(shape) < 10_000) for mix in MIXES)  # for what is slow
LATE = 0.01  # of the replays begin with a rank held up
LATE_SECONDS = 0.001  # at most
CYCLES = 1.5e9  # of a GPU in a second, about
TESTS = Path(__file__).parents[1]
CODE = f"import sys; sys.path.insert(0, {str(TESTS)!r}); from gpu.replaying import replay_as_one; replay_as_one(link)"

Exchange = Callable[[bytes], list[bytes]]


class Replayed(NamedTuple):
    wrong: int  # numbers that are not what float64 adds, rounded
    checksum: int  # of the bits of all sums and gathers, in their order: the same on each rank
    num_late: int  # times that this rank was held up


def numbers_of(number: Tensor, rank: int, place: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """What a rank has in a replay: of a few bits more than its dtype holds, so that it is rounded"""
    index = torch.arange(math.prod(shape), device=number.device)
    mixed = index * 7919 + number * 104729 + rank * 1299709 + place * 15485863
    return ((mixed % 2003 - 1001).double() / 7).to(dtype).view(shape)


class Checks:
    """What a rank has seen, in tensors that a graph adds to."""

    def __init__(self, device: str) -> None:
        self.wrong, self.checksum = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))

    def check_sum(self, total: Tensor, parts: Sequence[Tensor]) -> None:
        """Hold a sum against that in float64: added in float32, and rounded once."""
        exact, size = sum(each.double() for each in parts), sum(each.double().abs() for each in parts)
        assert isinstance(exact, Tensor) and isinstance(size, Tensor), "there are parts"
        is_cut = total.dtype == torch.bfloat16 and total.device.type == "cpu"  # as Triton's interpreter does
        rounded = torch.finfo(total.dtype).eps * (1.01 if is_cut else 0.505)
        bound = exact.abs() * rounded + size * len(parts) * 2**-24 + 2**-25
        self.wrong.add_(((total.double() - exact).abs() > bound).sum())

    def check_copy(self, x: Tensor, expected: Tensor) -> None:
        self.wrong.add_((x != expected).sum())

    def add_bits(self, x: Tensor) -> None:
        """Add the bits of what all ranks should have."""
        words = x.view(-1).view(torch.int16 if x.itemsize == 2 else torch.int32).long()
        weights = 2 * torch.arange(len(words), device=x.device) + 1
        self.checksum.mul_(1000003).add_((words * weights).sum())


def replay(
    communicator: Communicator,
    rank: int,
    num: int,
    count: int,
    mixes: Sequence[Sequence[tuple[int, int]]] = MIXES,
    device: str = "cuda",
    on_done: Callable[[int], object] = lambda turn: None,
) -> Replayed:
    """Replay so many graphs, in an order of chance. on_done: is called with the number of each replay that was waited for"""
    checks, number = Checks(device), torch.zeros(1, dtype=torch.int64, device=device)

    def run(mix: Sequence[tuple[int, int]]) -> None:
        number.add_(1)
        for place, shape in enumerate(mix):
            dtype, (rows, columns) = DTYPES[place % len(DTYPES)], shape
            parts = [numbers_of(number, each, place, shape, dtype) for each in range(num)]
            total = communicator.all_reduce(parts[rank], axis="tensor")
            gathered = communicator.all_gather(parts[rank], axis="tensor", size=num * columns)
            checks.check_sum(total, parts)
            checks.check_copy(gathered, torch.hstack(parts))
            checks.add_bits(total)
            checks.add_bits(gathered)
            if num * math.prod(shape) < 1 << 19:
                wide = [numbers_of(number, each, place, (num * rows, columns), dtype) for each in range(num)]
                own = communicator.reduce_scatter(wide[rank], axis="tensor", ranks=num)
                checks.check_sum(own, [each[rank * rows : (rank + 1) * rows] for each in wide])

    graphs = [capture(lambda mix=mix: run(mix)) if device == "cuda" else (lambda mix=mix: run(mix)) for mix in mixes]
    order, num_late = random.Random(0), 0  # the same on each rank
    for turn in range(count):
        graph = order.choice(graphs)
        is_late, late, seconds = order.random() < LATE, order.randrange(num), order.random() * LATE_SECONDS
        if is_late and late == rank:
            num_late += 1
            torch.cuda._sleep(int(seconds * CYCLES)) if device == "cuda" else time.sleep(seconds)
        graph()
        if order.random() < 0.01:
            total = communicator.all_reduce(torch.full((3, 514), float(rank + turn % 99), device=device), axis="tensor")
            checks.check_copy(total, torch.full_like(total, num * (turn % 99) + num * (num - 1) / 2))
        if turn % 200 == 199 and device == "cuda":
            torch.cuda.synchronize()  # so that ranks come at other times
            on_done(turn + 1)
    assert int(number) == count + len(mixes) * (device == "cuda"), "each graph has run before it was captured"
    return Replayed(int(checks.wrong), int(checks.checksum), num_late)


def capture(run: Callable[[], None]) -> Callable[[], None]:
    """Run once, and capture a graph of it."""
    run()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        run()
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph.replay


def replay_among(num: int, count: int, on_done: Callable[[int], object] = lambda turn: None) -> list[Replayed]:
    """What `replay` gives on each of so many ranks, which have a GPU each if there are as many, and else share one:
    then ranks take turns, NCCL would refuse them, and tensors are small."""
    is_shared = torch.cuda.device_count() < num
    with tempfile.TemporaryDirectory() as folder:
        channels = [RankProcess(CODE, "0" if is_shared else str(rank)) for rank in range(1, num)]
        ranks = Ranks(channels, [json.dumps([rank, num, count, is_shared, folder]).encode() for rank in range(1, num)])
        try:
            communicator = open_rank(ranks.exchange, 0, num, is_shared, folder)
            ranks.watch(lambda _: communicator.abort())
            found = replay(communicator, 0, num, count, FEW if is_shared else MIXES, on_done=on_done)
            return share(ranks.exchange, found)
        finally:
            ranks.close()


def replay_as_one(link: RankLink) -> None:
    """Be another rank of `replay_among`."""
    try:
        rank, num, count, is_shared, folder = json.loads(link.receive())
        communicator = open_rank(link.exchange, rank, num, is_shared, folder)
        share(link.exchange, replay(communicator, rank, num, count, FEW if is_shared else MIXES))
    except Exception as error:
        link.fail(error)
        sys.exit(1)
    link.receive()  # which ends this process, once the first rank does


def open_rank(exchange: Exchange, rank: int, num: int, is_shared: bool, folder: str) -> Communicator:
    rendezvous = Rendezvous(rank, Mesh(tensor=num), "127.0.0.1", exchange, Path(folder), "peers")
    nobody: Any = None  # takes what is not pushed
    return PeerCommunicator(rendezvous, nobody) if is_shared else connect_rank("cuda", rendezvous)


def share(exchange: Exchange, found: Replayed) -> list[Replayed]:
    """What all ranks have found, none of which is gone before: others write into its memory."""
    return [Replayed(*json.loads(each)) for each in exchange(json.dumps(found).encode())]
