"""Collectives of two ranks on two GPUs: the tests' process is the first one, a child of it the second.

with two_ranks("ops") as run:
    ours, theirs = run()          # what the function `ops` of this module gives on each rank
found = push_among(4)             # what each of four ranks gets of the others, however many GPUs there are
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atom.graph import Mesh
from atom.kernels import Communicator, Rendezvous, connect_rank, fixed
from atom.kernels.peers import collectives, tiles
from atom.kernels.peers.communicator import PeerCommunicator
from atom.runtime.ranks.links import RankLink, RankProcess, Ranks

MESH = Mesh(tensor=2, experts=2)
TESTS = Path(__file__).parents[1]
CODE = f"import sys; sys.path.insert(0, {str(TESTS)!r}); from gpu.collectives import be_second; be_second(link)"
SHAPES = [(1, 1), (1, 4096), (7, 4096), (513, 577), (2048, 5120)]
PUSHED = [(1, 2), (1, 576), (7, 5120), (3, 4098), (64, 8192)]
EXPERTS = 50  # of each rank, of those that tokens choose
SIZES = [(1, 5120), (32, 5120), (300, 5120)]  # of the sums in a graph


def of(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * seed + rank)).to(dtype)


def inputs_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor]:
    ids = torch.randint(0, 99, (shape[0], 2), generator=torch.Generator().manual_seed(rank))
    return {
        "x": of(rank, shape, dtype),
        "rows": of(rank, (2 * shape[0], shape[1]), dtype, seed=1),
        "weights": of(rank, (shape[0], 2), torch.float32, seed=2),
        "ids": ids,
    }


def ops(communicator: Communicator, rank: int) -> list[list[Tensor]]:
    """What each collective gives, by shape and dtype."""
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for shape in SHAPES:
            given = {name: x.cuda() for name, x in inputs_of(rank, shape, dtype).items()}
            results = [
                communicator.all_reduce(given["x"], axis="tensor"),
                communicator.all_gather(given["x"], axis="tensor", size=2 * shape[1] - 1),
                communicator.reduce_scatter(given["rows"], axis="tensor", ranks=2),
                *communicator.gather_tokens(given["x"], given["weights"], given["ids"], axis="tensor", ranks=2),
            ]
            results += sent_to_experts(communicator, rank, given)
            found.append([each.cpu() for each in results])
    return found


def sent_to_experts(communicator: Communicator, rank: int, given: dict[str, Tensor]) -> list[Tensor]:
    """The rows that a rank needs of both ranks' tokens; the sums of such rows, which come back."""
    first, meeting = torch.tensor([rank * EXPERTS]).cuda(), {"axis": "tensor", "ranks": 2, "experts": EXPERTS}
    x, _, ids = communicator.dispatch(given["x"], given["weights"], given["ids"], first, **meeting)
    is_needed = (ids // EXPERTS == rank).any(-1, keepdim=True)
    return [x.where(is_needed, 0), communicator.collect(given["rows"].where(is_needed, 0), ids, first, **meeting)]


def replays(communicator: Communicator, rank: int) -> list[list[Tensor]]:
    """Sums of several sizes, and parts, in graphs that are replayed in an order of chance, one rank late at times."""
    graphs, stream = [], torch.cuda.Stream()  # type: ignore[no-untyped-call]
    for seed, size in enumerate(SIZES):
        x = of(rank, size, torch.bfloat16, seed).cuda()

        def run(x: Tensor = x) -> tuple[Tensor, Tensor, Tensor]:
            total = communicator.all_reduce(x, axis="tensor")
            twice = communicator.all_reduce(total, axis="tensor")
            return total, twice, communicator.all_gather(x, axis="tensor", size=2 * x.shape[1])

        run()
        graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            results = run()
            graph.capture_end()
        graphs.append((graph, results, x))
    order, late = random.Random(0), random.Random(rank)
    for number in range(20_000):
        graph, _, x = graphs[order.randrange(len(graphs))]
        if late.random() < 0.002:
            torch.cuda._sleep(1_000_000)
        graph.replay()
        if number % 100 == 0:
            communicator.all_reduce(x, axis="tensor")  # between graphs
    torch.cuda.synchronize()
    return [[each.cpu() for each in results] for _, results, _ in graphs]


def shots(communicator: Communicator, rank: int) -> list[list[Tensor]]:
    """Sums by pushing whole tensors, parts and tiles, and NCCL's, by shape and dtype."""
    assert isinstance(communicator, PeerCommunicator), "the GPUs open each other's memory"
    arena, found = communicator.arenas["tensor"], []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for shape in PUSHED:
            x = of(rank, shape, dtype).cuda()
            results = [collectives.all_reduce(x, arena), collectives.all_reduce_in_parts(x, arena)]
            results += [tiles.all_reduce(x, arena), communicator.large.all_reduce(x, axis="tensor")]
            found.append([each.cpu() for each in results])
    return found


def in_order(communicator: Communicator, rank: int) -> list[Tensor]:
    """Sums of what the ranks gather, by shape and dtype."""
    given = [of(rank, shape, dtype).cuda() for dtype in (torch.float32, torch.bfloat16) for shape in SHAPES]
    return [fixed.all_reduce(communicator, x, axis="tensor").cpu() for x in given]


WORK: dict[str, Callable[[Communicator, int], Any]] = {
    "ops": ops,
    "replays": replays,
    "shots": shots,
    "in_order": in_order,
}


@contextmanager
def two_ranks() -> Iterator[tuple[Communicator, Ranks, Callable[[str], tuple[Any, Any]]]]:
    """The communicator here, the other rank, and what runs a function of `WORK` on both."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = Ranks([RankProcess(CODE, "1")], [folder.encode()])
        try:
            communicator = connect_rank("cuda", Rendezvous(0, MESH, "127.0.0.1", ranks.exchange, Path(folder)))
            ranks.watch(lambda _: communicator.abort())
            ranks.at_close.append(communicator.abort)

            def run(name: str) -> tuple[Any, Any]:
                ranks.send([name.encode()])
                ours = WORK[name](communicator, 0)
                ranks.wait()
                return ours, torch.load(Path(folder) / name)

            yield communicator, ranks, run
        finally:
            ranks.close()


def be_second(link: RankLink) -> None:
    """Be the second rank, in a process that sees only its GPU."""
    folder = Path(link.receive().decode())
    communicator = connect_rank("cuda", Rendezvous(1, MESH, "127.0.0.1", link.exchange, folder))
    while True:
        name = link.receive().decode()
        torch.save(WORK[name](communicator, 1), folder / name)
        link.done()


def push_among(num: int) -> list[list[Tensor]]:
    """What `pushes` gives on each of so many ranks, of which several may share a GPU; NCCL would refuse that."""
    code = CODE.replace("be_second", "push_as_one")
    with tempfile.TemporaryDirectory() as folder:
        channels = [RankProcess(code, str(rank % torch.cuda.device_count())) for rank in range(1, num)]
        ranks = Ranks(channels, [f"{rank} {num} {folder}".encode() for rank in range(1, num)])
        try:
            ours = pushes(0, num, ranks.exchange, Path(folder))
            ranks.wait()
            return [ours, *(torch.load(Path(folder) / str(rank)) for rank in range(1, num))]
        finally:
            ranks.close()


def push_as_one(link: RankLink) -> None:
    """Be a rank of `push_among`."""
    rank, num, folder = link.receive().decode().split(" ", 2)
    torch.save(pushes(int(rank), int(num), link.exchange, Path(folder)), Path(folder) / rank)
    link.done()
    link.receive()


def pushes(rank: int, num: int, exchange: Callable[[bytes], list[bytes]], folder: Path) -> list[Tensor]:
    """What each pushed collective gives, by dtype and shape."""
    nobody: Any = None  # takes what is not pushed
    found: list[Tensor] = []
    rendezvous = Rendezvous(rank, Mesh(tensor=num), "127.0.0.1", exchange, folder)
    communicator = PeerCommunicator(rendezvous, nobody)
    arena = communicator.arenas["tensor"]
    for dtype in (torch.float32, torch.bfloat16):
        for shape in PUSHED:
            x, rows = of(rank, shape, dtype).cuda(), of(rank, (num * shape[0], shape[1]), dtype, seed=1).cuda()
            found += [collectives.all_reduce(x, arena), collectives.all_reduce_in_parts(x, arena)]
            found.append(tiles.all_reduce(x, arena))
            found += [collectives.reduce_scatter(rows, arena), collectives.all_gather(x, num * shape[1], arena)]
    torch.cuda.synchronize()
    exchange(b"")  # others write into its memory until then
    return [each.cpu() for each in found]
