"""Collectives on a CPU, in threads that each are a rank, through shared memory and through gloo."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from atom.errors import EngineDeadError
from atom.graph import TORCH_DTYPES, Mesh
from atom.kernels import Rendezvous, gloo
from atom.kernels.gloo import SHARED_BYTES, GlooCommunicator

FITS = SHARED_BYTES // 4  # elements of float32
Run = Callable[[Callable[[int, GlooCommunicator], Any]], list[Any]]


def connect_all(mesh: Mesh, folder: Path | None, pool: ThreadPoolExecutor) -> list[GlooCommunicator]:
    """The communicators of all ranks; without a folder each is on a host of its own."""
    shown, barrier = [b""] * mesh.num_ranks, threading.Barrier(mesh.num_ranks, timeout=60)

    def connect(rank: int) -> GlooCommunicator:
        def exchange(own: bytes) -> list[bytes]:
            shown[rank] = own
            barrier.wait()
            every = list(shown)
            barrier.wait()
            return every

        return GlooCommunicator(Rendezvous(rank, mesh, f"127.0.0.{1 if folder else rank + 1}", exchange, folder))

    return list(pool.map(connect, range(mesh.num_ranks)))


@pytest.fixture(params=[(2, True), (3, True), (3, False)], ids=["2", "3", "3 hosts"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Runs a function on each rank, of its number and communicator; what each gives."""
    num_ranks, is_one_host = request.param
    with ThreadPoolExecutor(num_ranks) as pool:
        made = connect_all(Mesh(num_ranks), tmp_path if is_one_host else None, pool)
        yield lambda work: list(pool.map(work, range(num_ranks), made))


def of(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * seed + rank)).to(dtype)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (1, FITS), (1, FITS + 1), (0, 5), (513, 577)])
def test_a_sum_is_that_of_all_ranks_and_the_same_on_each(shape: tuple[int, ...], dtype: torch.dtype, run: Run):
    sums = run(lambda rank, communicator: communicator.all_reduce(of(rank, shape, dtype), axis="tensor"))
    exact = torch.stack([of(rank, shape, dtype).double() for rank in range(len(sums))]).sum(0)
    assert all(torch.equal(each, sums[0]) for each in sums[1:])
    assert sums[0].dtype == dtype and sums[0].shape == shape
    assert torch.allclose(sums[0].double(), exact, rtol=3 * torch.finfo(dtype).eps, atol=6 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("columns", [1, 5, FITS // 2 + 1])
def test_parts_are_side_by_side_without_padding(columns: int, run: Run):
    def work(rank: int, communicator: GlooCommunicator) -> Tensor:
        return communicator.all_gather(of(rank, (2, columns), torch.float32), axis="tensor", size=columns + 1)

    whole = run(work)
    expected = torch.hstack([of(rank, (2, columns), torch.float32) for rank in range(len(whole))])[:, : columns + 1]
    assert all(torch.equal(each, expected) and each.is_contiguous() for each in whole)


def test_ranks_that_come_early_and_late_never_read_another_s_next_tensor(run: Run):
    def work(rank: int, communicator: GlooCommunicator) -> list[float]:
        delays, totals = random.Random(rank), []
        for number in range(300):
            if delays.random() < 0.05:
                time.sleep(0.002)
            x = torch.full((1 + number % 7,), float(number * (rank + 1)))
            totals.append(communicator.all_reduce(x, axis="tensor").unique().item())
        return totals

    found = run(work)
    factor = sum(range(1, len(found) + 1))
    assert all(totals == [number * factor for number in range(300)] for totals in found)


def test_a_rank_that_waits_learns_of_one_that_is_gone(run: Run):
    def work(rank: int, communicator: GlooCommunicator) -> str:
        def check() -> None:
            raise EngineDeadError("rank 1 has ended")

        if rank == 1:
            return "gone"
        communicator.watch(check)
        with pytest.raises(EngineDeadError, match="rank 1 has ended"):
            communicator.all_reduce(torch.ones(3), axis="tensor")
        return "sent"

    assert set(run(work)) == {"gone", "sent"}


@pytest.mark.parametrize(
    ("columns", "is_one_host"), [(3, True), (FITS // 2, True), (3, False)], ids=["memory", "gloo", "hosts"]
)
def test_ranks_meet_along_each_axis_of_their_mesh(columns: int, is_one_host: bool, tmp_path: Path):
    mesh, ids = Mesh(tensor=2, data=2), torch.arange(6).view(3, 2)

    def work(rank: int, communicator: GlooCommunicator) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
        x = torch.full((3, columns), 10.0**rank)
        total = communicator.all_reduce(x, axis="tensor")
        tokens = communicator.gather_tokens(x.bfloat16(), x[:, :2], ids + rank, axis="data", ranks=2)
        return total, tokens, communicator.reduce_scatter(x.repeat(2, 1), axis="data", ranks=2)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(work, range(4), connect_all(mesh, tmp_path if is_one_host else None, pool)))
    assert [total.unique().tolist() for total, *_ in found] == [[11], [11], [1100], [1100]]
    for rank, (_, (x, weights, rows), scattered) in enumerate(found):
        pair = rank % 2, rank % 2 + 2
        halves = [(3 * [[10.0**each]]) for each in pair]
        assert x.dtype == torch.bfloat16 and torch.equal(
            x, torch.tensor(halves).view(6, 1).bfloat16().expand(6, columns)
        )
        assert torch.equal(weights, torch.tensor(halves).view(6, 1).expand(6, 2))
        assert torch.equal(rows, torch.cat([ids + each for each in pair]))
        assert scattered.shape == (3, columns) and scattered.unique().tolist() == [sum(10.0**each for each in pair)]


CHOSEN = {  # the experts of each rank's tokens, of which two are on each rank
    "one token": [[[0, 2]], [[1, 0]], [[5, 4]]],
    "all to one rank": [[[2, 3]] * 4] * 3,
    "none to one rank": [[[0, 1], [4, 0]], [[5, 4], [0, 0]], [[1, 1], [5, 1]]],
    "to others alone": [[[2, 5], [4, 3]], [[0, 4], [5, 0]], [[0, 3], [2, 1]]],
}


@pytest.mark.parametrize("is_one_host", [True, False])
@pytest.mark.parametrize("chosen", CHOSEN.values(), ids=CHOSEN.keys())
def test_rows_are_sent_only_to_the_ranks_that_have_experts_for_them(
    chosen: list[Any], is_one_host: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(gloo, "COUNTED_BYTES", 0)
    every, num, num_sent = torch.tensor(chosen), len(chosen[0]), [0] * 3
    xs = torch.stack([of(rank, (num, 5), torch.bfloat16) for rank in range(3)])

    def work(rank: int, communicator: GlooCommunicator) -> tuple[Tensor, ...]:
        peers, first = communicator._along["data"], torch.tensor([2 * rank])
        exchange = peers.exchange

        def counted(rows: Tensor, sent: list[int], taken: list[int]) -> Tensor:
            num_sent[rank] += sum(sent) - sent[rank]
            return exchange(rows, sent, taken)

        peers.exchange = counted  # type: ignore[method-assign]
        meeting: dict[str, Any] = {"axis": "data", "ranks": 3, "experts": 2}
        x, weights, ids = communicator.dispatch(xs[rank], xs[rank, :, :2].float(), every[rank], first, **meeting)
        return x, weights, ids, communicator.collect(x + 10**rank, ids, first, **meeting)

    with ThreadPoolExecutor(3) as pool:
        made = connect_all(Mesh(data=3, experts=3), tmp_path if is_one_host else None, pool)
        found = list(pool.map(work, range(3), made))
    has = torch.stack([(every // 2 == rank).any(-1) for rank in range(3)])  # [owner, source, token]
    for rank, (x, weights, ids, _) in enumerate(found):
        assert torch.equal(x, torch.where(has[rank].unsqueeze(-1), xs, 0).view(-1, 5))
        assert torch.equal(weights, xs[..., :2].float().view(-1, 2)) and torch.equal(ids, every.view(-1, 2))
    for source, (*_, total) in enumerate(found):
        expected = torch.zeros(num, 5, dtype=torch.bfloat16)
        for owner in range(3):
            expected += torch.where(has[owner, source, :, None], xs[source] + 10**owner, 0)
        assert torch.equal(total, expected)
    others = [int(has[owner].sum() - has[owner, owner].sum()) for owner in range(3)]
    assert sum(num_sent) == 2 * sum(others), "there and back"


def test_few_rows_are_gathered(tmp_path: Path):
    x, ids = torch.ones(1, 4), torch.tensor([[1]])

    def work(rank: int, communicator: GlooCommunicator) -> list[Any]:
        first, meeting = torch.tensor([rank]), {"axis": "data", "ranks": 2, "experts": 1}
        rows, _, chosen = communicator.dispatch(x, x, ids, first, **meeting)
        return [rows.tolist(), communicator.collect(rows * rank, chosen, first, **meeting).tolist()]

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(work, range(2), connect_all(Mesh(data=2, experts=2), tmp_path, pool)))
    assert found == 2 * [[2 * [[1.0] * 4], [[1.0] * 4]]], "the first rank, too, which has no expert for them"


@pytest.mark.parametrize("is_one_host", [True, False])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_stages_send_to_the_ranks_of_their_place(dtype: str, is_one_host: bool, tmp_path: Path):
    mesh, sizes = Mesh(tensor=2, pipeline=3), [(1, 5), (7, 3), (3, FITS)]

    def work(rank: int, communicator: GlooCommunicator) -> list[Tensor]:
        stage, got = mesh.stage(rank), []
        for number, shape in enumerate(sizes):
            x = of(rank % 2, shape, TORCH_DTYPES[dtype], number)
            if stage:
                like, columns = torch.zeros(shape[0], dtype=torch.int64), shape[1]
                x = communicator.receive(like, axis="pipeline", source=stage - 1, columns=columns, dtype=dtype) + 1
                got.append(x)
            if stage < 2:
                sent = communicator.send(x.T.contiguous().T, axis="pipeline", to=stage + 1)
                assert torch.equal(sent, x)
        return got

    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(work, range(6), connect_all(mesh, tmp_path if is_one_host else None, pool)))
    assert found[:2] == [[], []]
    for rank in range(2, 6):
        for number, (got, shape) in enumerate(zip(found[rank], sizes, strict=True)):
            expected = of(rank % 2, shape, TORCH_DTYPES[dtype], number)
            for _ in range(mesh.stage(rank)):
                expected = expected + 1
            assert torch.equal(got, expected)


def test_a_stage_that_waits_learns_of_one_that_is_gone(tmp_path: Path):
    def check() -> None:
        raise EngineDeadError("rank 1 has ended")

    with ThreadPoolExecutor(2) as pool:
        communicator, other = connect_all(Mesh(pipeline=2), tmp_path, pool)
        communicator.watch(check)
        with pytest.raises(EngineDeadError, match="rank 1 has ended"):
            communicator.receive(torch.ones(3), axis="pipeline", source=1, columns=2, dtype="fp32")
        del other
