"""Collectives over peer memory under Triton's interpreter, in processes that each are a rank."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu import replaying
from kernels.peers.peer_processes import FileMemory, Nobody, run_ranks
from torch import Tensor

from atom.errors import EngineDeadError, UnsupportedError
from atom.graph import Mesh
from atom.kernels import fixed
from atom.kernels.peers import collectives, communicator, tiles
from atom.kernels.peers.communicator import PeerCommunicator

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, not interpreted")

SHAPES = [(1, 2), (3, 98), (2, 1024), (5, 1026)]


def of(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * seed + rank)).to(dtype)


def exact_sum(ranks: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.stack([of(rank, shape, dtype).double() for rank in range(ranks)]).sum(0)


@pytest.mark.parametrize(
    ("shots", "ranks"),
    [
        ("two shots", 3),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("one shot", 2),
                ("tiles", 2),
                ("one shot", 3),
                ("one shot", 4),
                ("two shots", 2),
                ("two shots", 4),
                ("tiles", 3),
                ("tiles", 4),
            )
        ),
    ],
)
def test_a_sum_is_rounded_once_and_the_same_on_each_rank(shots: str, ranks: int, tmp_path: Path,
                                                         monkeypatch: pytest.MonkeyPatch):  # fmt: skip
    if shots != "one shot":
        monkeypatch.setattr(communicator, "ONE_SHOT_BYTES", dict.fromkeys(range(2, 9), 0))
    if shots == "tiles":
        monkeypatch.setattr(communicator, "TWO_SHOT_BYTES", 0)
        monkeypatch.setattr(tiles, "SLOT_WORDS", 128)  # several tiles of a program
    calls = [(shape, dtype) for shape in SHAPES for dtype in (torch.bfloat16, torch.float16, torch.float32)]

    def work(rank: int, made: PeerCommunicator) -> list[Tensor]:
        return [made.all_reduce(of(rank, shape, dtype), axis="tensor") for shape, dtype in calls]

    found = run_ranks(Mesh(ranks), tmp_path, work)
    for number, (shape, dtype) in enumerate(calls):
        first, *others = (sums[number] for sums in found)
        assert first.shape == shape and first.dtype == dtype
        assert all(torch.equal(first, each) for each in others)
        exact, unit = exact_sum(ranks, shape, dtype), torch.finfo(dtype).eps
        rounded = unit if dtype == torch.bfloat16 else unit / 2  # the interpreter cuts bits off for bf16
        bound = exact.abs() * rounded + ranks * 2**-21 + (2**-25 if dtype == torch.float16 else 0)
        assert bool(((first.double() - exact).abs() <= bound).all()), (shape, dtype)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ranks", [2, 3])
def test_parts_are_side_by_side_without_padding_and_tokens_below_each_other(ranks: int, tmp_path: Path):
    shapes = [(1, 2, 3), (3, 258, 511), (2, 2500, 5000)]  # rows, columns of a rank, columns of all

    def work(rank: int, made: PeerCommunicator) -> list[Any]:
        found: list[Any] = []
        for rows, columns, size in shapes:
            whole = made.all_gather(of(rank, (rows, columns), torch.float32), axis="tensor", size=size)
            halves = made.all_gather(of(rank, (rows, columns), torch.bfloat16), axis="tensor", size=2 * (size // 2))
            weights, ids = torch.full((rows, 3), rank / 2), torch.arange(3 * rows).view(rows, 3) + (rank << 40)
            x = of(rank, (rows, columns), torch.bfloat16)
            tokens = made.gather_tokens(x, weights, ids, axis="tensor", ranks=ranks)
            sent = made.dispatch(x, weights, ids, ids[0, :1], axis="tensor", ranks=ranks, experts=1)
            assert all(map(torch.equal, tokens, sent)), "what is small is pushed to all"
            found.append((whole, halves, tokens))
        return found

    for gathered in run_ranks(Mesh(ranks), tmp_path, work):
        for (rows, columns, size), (whole, halves, (x, weights, ids)) in zip(shapes, gathered, strict=True):
            parts = [of(rank, (rows, columns), torch.float32) for rank in range(ranks)]
            assert torch.equal(whole, torch.hstack(parts)[:, :size])
            assert torch.equal(halves, torch.hstack(parts).bfloat16()[:, : 2 * (size // 2)])
            assert torch.equal(x, torch.vstack(parts).bfloat16())
            assert torch.equal(weights, torch.arange(ranks).repeat_interleave(rows)[:, None].expand(-1, 3) / 2)
            expected = [torch.arange(3 * rows).view(rows, 3) + (rank << 40) for rank in range(ranks)]
            assert torch.equal(ids, torch.cat(expected))


def test_a_sum_in_a_fixed_order_adds_what_the_ranks_push_and_gathers_no_more(tmp_path: Path):
    shapes = [(1, 2), (5, 98)]

    def work(rank: int, made: PeerCommunicator) -> list[Tensor]:
        return [fixed.all_reduce(made, of(rank, shape, torch.bfloat16), axis="tensor") for shape in shapes]

    for sums in run_ranks(Mesh(3), tmp_path, work):
        for shape, total in zip(shapes, sums, strict=True):
            first, second, third = (of(rank, shape, torch.bfloat16) for rank in range(3))
            assert torch.equal(total, first + second + third) and total.is_contiguous()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_of_a_sum_go_to_their_rank(ranks: int, tmp_path: Path):
    shapes = [(1, 2), (3, 98), (2, 3000)]

    def work(rank: int, made: PeerCommunicator) -> list[Tensor]:
        every = [of(rank, (ranks * rows, columns), torch.float32) for rows, columns in shapes]
        found = [made.reduce_scatter(x, axis="tensor", ranks=ranks) for x in every]
        ids = [torch.zeros(len(x), 1, dtype=torch.int64) for x in every]
        sums = [
            made.collect(x, of, of[0], axis="tensor", ranks=ranks, experts=1) for x, of in zip(every, ids, strict=True)
        ]
        assert all(map(torch.equal, found, sums))
        return found

    found = run_ranks(Mesh(ranks), tmp_path, work)
    for number, (rows, columns) in enumerate(shapes):
        whole = torch.cat([parts[number] for parts in found])
        assert torch.allclose(whole.double(), exact_sum(ranks, (ranks * rows, columns), torch.float32), atol=1e-5)


def calls_of(made: PeerCommunicator, rank: int, ranks: int, seed: int, num_calls: int, kinds: int = 5) -> int:
    """Make mixed calls whose right results follow from their numbers; how many were wrong. The last kind sends tiles."""
    same, own, wrong, arena = random.Random(seed), random.Random(rank), 0, made.arenas["tensor"]
    for number in range(num_calls):
        if own.random() < 0.02:
            time.sleep(own.random() / 50)
        columns = same.choice([2, 30, 514, 1100, 1800])
        x = torch.full((ranks, columns), float(number * ranks + rank))
        first = number * ranks
        total = ranks * first + sum(range(ranks))
        match same.randrange(kinds):
            case 0:
                result, expected = collectives.all_reduce(x, arena), torch.tensor(float(total))
            case 1:
                result, expected = collectives.all_reduce_in_parts(x, arena), torch.tensor(float(total))
            case 2:
                result, expected = made.reduce_scatter(x, axis="tensor", ranks=ranks), torch.tensor(float(total))
            case 3:
                result = made.all_gather(x, axis="tensor", size=ranks * columns).view(ranks, ranks, columns)
                expected = (torch.arange(ranks) + first).float()[None, :, None]
            case _:
                result, expected = tiles.all_reduce(x, arena), torch.tensor(float(total))
        wrong += not torch.equal(result, expected.expand_as(result))
    return wrong


@pytest.mark.slow
@pytest.mark.timeout(600)  # on a busy machine: ranks wait for each other
@pytest.mark.parametrize(("ranks", "num_calls"), [(3, 40), (2, 500), (3, 500), (4, 500)])
def test_mixed_calls_of_ranks_that_come_early_and_late_never_take_another_call_s_words(
    ranks: int, num_calls: int, tmp_path: Path
):
    found = run_ranks(Mesh(ranks), tmp_path, lambda rank, made: calls_of(made, rank, ranks, 7, num_calls), seconds=500)
    assert found == [0] * ranks


class Faulty:
    """A communicator whose sums of 30 numbers are changed."""

    def __init__(self, made: PeerCommunicator, change: Callable[[Tensor], Tensor]) -> None:
        self._made, self._change = made, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._made, name)

    def all_reduce(self, x: Tensor, *, axis: str) -> Tensor:
        total = self._made.all_reduce(x, axis=axis)
        return self._change(total) if total.shape == (1, 30) else total


def change_bit(total: Tensor) -> Tensor:
    total.view(torch.int32)[0, 7] ^= 1  # of float32; within what rounding may give
    return total


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", ["bit", *(pytest.param(fault, marks=pytest.mark.slow) for fault in ("none", "number"))]
)
def test_replays_find_numbers_that_are_wrong_and_bits_that_differ_between_ranks(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What `scripts/soak-gpu --replays` does on GPUs."""
    monkeypatch.setattr(replaying, "LATE", 0.5)
    monkeypatch.setattr(communicator, "ONE_SHOT_BYTES", {3: 1000})
    monkeypatch.setattr(communicator, "TWO_SHOT_BYTES", 5000)
    mixes, change = (((2, 6), (1, 30)), ((3, 258), (1, 1500))), {"bit": change_bit, "number": lambda total: total * 1.1}

    def work(rank: int, made: Any) -> replaying.Replayed:
        if rank == 1 and fault != "none":
            made = Faulty(made, change[fault])
        return replaying.replay(made, rank, 3, 6, mixes, "cpu")

    found = run_ranks(Mesh(3), tmp_path, work)
    assert [each.wrong > 0 for each in found] == [False, fault == "number", False]
    assert found[0].checksum == found[2].checksum != 0 and (found[0].checksum == found[1].checksum) == (fault == "none")
    assert sum(each.num_late for each in found) > 0


def test_epochs_come_around_without_two_of_the_same_parity_in_a_row(tmp_path: Path):
    def work(rank: int, made: PeerCommunicator) -> tuple[int, list[list[int]]]:
        epochs, seen, wrong = made.arenas["tensor"].epochs.fill_(-4), [], 0
        for _ in range(6):
            seen.append(epochs.tolist())
            wrong += calls_of(made, rank, 2, 3, 1, kinds=4)
        return wrong, seen

    for wrong, seen in run_ranks(Mesh(2), tmp_path, work):
        assert wrong == 0
        assert [first for first, _ in seen] == [-4, -3, -2, -1, 2, 3]


@pytest.mark.slow
def test_numbers_of_tiles_come_around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tiles, "SLOT_WORDS", 32)

    def work(rank: int, made: PeerCommunicator) -> tuple[bool, int]:
        arena = made.arenas["tensor"]
        arena.counts.fill_(2**31 - 3)
        found = [tiles.all_reduce(torch.full((2, 200), 10.0**rank + call), arena) for call in range(3)]
        return all(bool((each == 11 + 2 * call).all()) for call, each in enumerate(found)), int(arena.counts[0])

    assert run_ranks(Mesh(2), tmp_path, work) == [(True, -(2**31) + 3 * 7 - 3)] * 2


def test_ranks_meet_along_each_axis_of_their_mesh(tmp_path: Path):
    def work(rank: int, made: PeerCommunicator) -> tuple[float, float]:
        x = torch.full((3, 10), 10.0**rank)
        along = [made.all_reduce(x, axis=axis).unique() for axis in ("tensor", "data")]
        return along[0].item(), along[1].item()

    found = run_ranks(Mesh(tensor=2, data=2), tmp_path, work)
    assert found == [(11, 101), (11, 1010), (1100, 101), (1100, 1010)]


class Recorder(Nobody):
    """Records what is not pushed."""

    def __getattribute__(self, name: str) -> Any:
        return lambda *tensors, **_: (name, *(tuple(each.shape) for each in tensors))


def test_sums_beyond_those_in_tiles_are_not_pushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("ONE_SHOT_BYTES", "TILED_BYTES"):
        monkeypatch.setattr(communicator, name, {2: 64})
    monkeypatch.setattr(communicator, "TWO_SHOT_BYTES", 0)

    def work(_: int, made: PeerCommunicator) -> list[Any]:
        return [made.all_reduce(torch.zeros(1, columns), axis="tensor") for columns in (16, 17)]

    pushed, other = run_ranks(Mesh(2), tmp_path, work, Recorder())[0]
    assert torch.equal(pushed, torch.zeros(1, 16)) and other == ("all_reduce", (1, 17))


def test_what_is_large_or_of_no_whole_words_is_not_pushed(tmp_path: Path):
    room = 2 * 8192 * 4  # bytes: 2 programs under the interpreter

    def work(_: int, made: PeerCommunicator) -> list[Any]:
        halves, whole = torch.zeros(3, 5, dtype=torch.bfloat16), torch.zeros(1, room // 4 + 1)
        ids = torch.zeros(3, 1, dtype=torch.int64)
        return [
            made.all_reduce(halves, axis="tensor"),
            made.all_reduce(halves.flatten()[1:3], axis="tensor"),
            made.all_reduce(ids, axis="tensor"),
            made.all_reduce(halves[:0], axis="tensor"),
            made.all_gather(halves[:2], axis="tensor", size=10),
            made.all_gather(torch.zeros(2, 4, dtype=torch.bfloat16), axis="tensor", size=7),
            made.all_gather(whole, axis="tensor", size=9),
            made.gather_tokens(halves, whole[:, :3].view(3, 1), ids, axis="tensor", ranks=2),
            made.reduce_scatter(halves[:2, :3], axis="tensor", ranks=2),
            made.dispatch(halves, whole[:, :3].view(3, 1), ids, ids[0], axis="tensor", ranks=2, experts=1),
            made.collect(halves[:2, :3], ids[:2], ids[0], axis="tensor", ranks=2, experts=1),
            made.send(halves, axis="pipeline", to=1),
        ]

    assert run_ranks(Mesh(2), tmp_path, work, Recorder())[0] == [
        ("all_reduce", (3, 5)),
        ("all_reduce", (2,)),
        ("all_reduce", (3, 1)),
        ("all_reduce", (0, 5)),
        ("all_gather", (2, 5)),
        ("all_gather", (2, 4)),
        ("all_gather", (1, room // 4 + 1)),
        ("gather_tokens", (3, 5), (3, 1), (3, 1)),
        ("reduce_scatter", (2, 3)),
        ("dispatch", (3, 5), (3, 1), (3, 1), (1,)),
        ("collect", (2, 3), (2, 1), (1,)),
        ("send", (3, 5)),
    ]


def test_a_rank_that_waits_for_one_that_is_gone_can_be_stopped(tmp_path: Path):
    def work(rank: int, made: PeerCommunicator) -> float:
        if rank == 1:
            return 0
        threading.Timer(0.5, made.abort).start()
        begin = time.monotonic()
        made.all_reduce(torch.ones(3), axis="tensor")
        waited = time.monotonic() - begin
        with pytest.raises(EngineDeadError):
            made.all_reduce(torch.ones(3), axis="tensor")
        return waited

    assert run_ranks(Mesh(2), tmp_path, work)[0] > 0.4


def test_all_ranks_are_refused_where_one_has_no_memory_to_share(tmp_path: Path):
    def memory(size: int) -> FileMemory:
        try:
            (tmp_path / "first").touch(exist_ok=False)
        except FileExistsError:
            return FileMemory(size, tmp_path / "second")
        raise UnsupportedError("GPUs cannot open each other's memory")

    found = run_ranks(Mesh(2), tmp_path, lambda *_: None, memory=memory)
    assert [(type(each), str(each)) for each in found] == 2 * [
        (UnsupportedError, "GPUs cannot open each other's memory")
    ]
