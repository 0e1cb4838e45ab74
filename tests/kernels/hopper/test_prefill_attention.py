"""Attention of prompts on Hopper: when it is chosen, that it compiles and is kept, and on such a GPU what it computes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels.checks import relative_error
from kernels.compiling import compile_for_hopper
from kernels.paged import KIND, Case, change, make_case, move, reference
from kernels.triton.compile.test_binary_cache import PTXAS
from triton import knobs

from atom.kernels.hopper.attention import PagedAttention
from atom.kernels.hopper.prefill_attention import suits
from atom.kernels.triton.attention.context import Context
from atom.kernels.triton.gpu import Gpu

H200 = Gpu(132, 227 << 10, (9, 0))


def is_chosen(tokens: int = 600, num_decodes: int = 0, num_prompts: int = 1, heads: int = 8, kv_heads: int = 2, dim: int = 128,
              block_size: int = 16, dtype: torch.dtype = torch.bfloat16, cache_dtype: torch.dtype | None = None,
              offset: int = 0, window: int | None = None) -> bool:  # fmt: skip
    shape = (3, block_size, 2, kv_heads, dim)
    cache = torch.zeros(math.prod(shape) + offset, dtype=cache_dtype or dtype)[offset:].view(shape)
    return suits(torch.zeros(tokens, heads, dim, dtype=dtype), cache, num_decodes, num_prompts, window)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"tokens": 513},
        {"dtype": torch.float16},
        {"dim": 64},
        {"kv_heads": 8},
        {"heads": 128},
        {"block_size": 48},
        {"cache_dtype": torch.float8_e4m3fn},
        {"window": 4096},
        {"dim": 256, "tokens": 2048},
        {"dim": 256, "tokens": 4096, "window": 1024},
        {"dim": 256, "tokens": 4096, "num_prompts": 4},
        {"num_prompts": 600},
    ],
)
def test_it_takes_many_tokens_of_prompts(given: dict[str, Any]):
    assert is_chosen(**given)


@pytest.mark.parametrize(
    "given",
    [
        {"tokens": 512}, {"tokens": 520, "num_decodes": 8}, {"dtype": torch.float32}, {"cache_dtype": torch.float16},
        {"cache_dtype": torch.float8_e4m3fn, "window": 512}, {"dim": 96}, {"dim": 256}, {"dim": 256, "tokens": 2050, "num_decodes": 3}, {"dim": 256, "tokens": 4096, "window": 512},
        {"dim": 256, "tokens": 4095, "num_prompts": 4},
        {"dim": 256, "tokens": 4096, "cache_dtype": torch.float8_e4m3fn}, {"window": 128}, {"heads": 6}, {"heads": 256}, {"block_size": 8}, {"block_size": 40}, {"offset": 4},
    ],
)  # fmt: skip
def test_it_leaves_to_the_other_kernel(given: dict[str, Any]):
    assert not is_chosen(**given)


COMPILE = """
import sys
from pathlib import Path
import torch, triton
from kernels.compiling import use_hopper
from atom.cache import Cache
from atom.graph import Batch, PagedCache
from atom.kernels.triton.compile.binary_cache import keep_in

class Compile:
    def __init__(self, kernel):
        self.kernel = kernel
    def __getitem__(self, grid):
        return lambda *args, **options: print(self.kernel.warmup(*args, grid=grid, **options).metadata.shared)

binaries = keep_in(Cache(Path(sys.argv[1])))
use_hopper()
assert "atom.kernels.hopper.prefill_attention" not in sys.modules and "triton.experimental.gluon" not in sys.modules
from atom.kernels.hopper import prefill_attention as prefill_hopper
from atom.kernels.hopper.attention import PagedAttention
prefill_hopper._prefill = Compile(prefill_hopper._prefill)
prefill_hopper.suits = lambda *args: True  # whatever it takes
for dtype, heads, dim, sinks, window, softcap in (
    (torch.bfloat16, 32, 128, None, None, None), (torch.float16, 64, 64, torch.zeros(64).half(), 128, None),
    (torch.bfloat16, 32, 128, None, 4096, 50.0), (torch.bfloat16, 16, 256, None, 1024, None),
):
    q, cache = torch.zeros(600, heads, dim, dtype=dtype), torch.zeros(4, 16, 2, 8, dim, dtype=dtype)
    numbers = torch.zeros(9, 9, dtype=torch.int32)
    batch = Batch({"full": numbers}, {}, numbers[0], numbers[0], num_decodes=0)
    PagedAttention()(q, PagedCache(cache, "full"), batch, sinks, scale=0.1, window=window, softcap=softcap)
q, cache = torch.zeros(600, 16, 192).bfloat16(), torch.zeros(4, 16, 16, 320).bfloat16()
places, ends = torch.zeros(9, 9, dtype=torch.int32), torch.zeros(9, dtype=torch.int32)
prefill_hopper.prefill_expanded(q[..., :128], q[..., 128:], cache, places, ends, ends, ends[1:], 0, q[..., :128].clone(),
                                0.1, ends)
print(binaries.num_compiled)
"""


@pytest.mark.slow
def test_it_compiles_once_and_a_folder_that_has_it_needs_no_compiler(tmp_path: Path):
    """In processes of their own, without the interpreter; the second one's ptxas only reports its version."""
    tool = tmp_path / "ptxas"
    tool.write_text(PTXAS.format(knobs.nvidia.ptxas.path))
    tool.chmod(0o755)

    def compiled(**variables: str) -> list[int]:
        """The bytes of shared memory that each binary takes, and how many were made."""
        done = compile_for_hopper(COMPILE, str(tmp_path / "cache"), **variables)
        return [int(line) for line in done.stdout.split()]

    *shared, num_compiled = compiled()
    assert num_compiled == len(shared) == 5
    assert max(shared) <= H200.shared_memory
    assert compiled(TRITON_PTXAS_PATH=str(tool)) == [*shared, 0]


IS_HOPPER = torch.cuda.is_available() and torch.version.hip is None and torch.cuda.get_device_capability() == (9, 0)


def make(*args: Any, dtype: torch.dtype = torch.bfloat16, **kwargs: Any) -> Case:
    """A case on the GPU."""
    return move(make_case(*args, dtype=dtype, **kwargs), "cuda")  # type: ignore[no-any-return]


def run(case: Case, scale: float = 0.1, window: int | None = None, softcap: float | None = None) -> torch.Tensor:
    """What the kernel gives, whether it would be chosen or not; NaN where it gives nothing. It leaves no ticket."""
    from atom.kernels.hopper import prefill_attention as prefill_hopper

    q, cache, batch, sinks = case
    out = torch.full_like(q, math.nan, memory_format=torch.contiguous_format)
    tickets = torch.zeros(2, dtype=torch.int32, device=q.device)
    table, (starts, lengths, num_decodes) = batch.tables[KIND], batch[2:5]
    prefill_hopper.prefill(q, cache.blocks, table, starts, lengths, num_decodes, sinks, None, None, out, scale, window,
                           softcap, tickets)  # fmt: skip
    assert not tickets.any()
    return out


def assert_right(out: torch.Tensor, case: Case, scale: float = 0.1, **attributes: Any) -> None:
    truth, plain = (
        reference(case, wide=wide, scale=scale, **attributes)[case.batch.num_decodes :] for wide in (True, False)
    )
    out = out[case.batch.num_decodes :]
    assert out.isfinite().all()
    assert relative_error(out, truth) <= 2 * relative_error(plain, truth)
    assert (out.float() - truth).abs().max() <= 0.02 * truth.abs().max()


@pytest.mark.gpu
@pytest.mark.skipif(not IS_HOPPER, reason="there is no Hopper GPU here")
class TestOnHopper:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize(
        ("dim", "kv_heads", "group", "block_size"),
        [(128, 3, 1, 16), (128, 2, 2, 32), (128, 8, 4, 16), (128, 1, 8, 48), (64, 2, 4, 256), (64, 3, 8, 16),
         (128, 1, 64, 16), (256, 4, 2, 16), (256, 1, 8, 32)],
    )  # fmt: skip
    @pytest.mark.parametrize("has_sinks", [False, True])
    def test_queries_around_the_ends_of_tiles_equal_the_reference(
        self, dtype, dim, kv_heads, group, block_size, has_sinks
    ):
        prefills = [(1, 1), (15, 15), (16, 17), (127, 127), (128, 128), (129, 129), (513, 513), (1, 257), (33, 550)]
        prefills += [(128, 256), (127, 256), (129, 383), (300, 301)]
        case = make(
            (), prefills, kv_heads=kv_heads, heads=kv_heads * group, dim=dim, block_size=block_size, dtype=dtype,
            has_sinks=has_sinks,
        )  # fmt: skip
        out = run(case)
        assert_right(out, case)
        for _ in range(3):
            assert torch.equal(run(case), out)

    @pytest.mark.parametrize(
        ("dim", "kv_heads", "group", "block_size"), [(64, 2, 8, 16), (128, 2, 4, 32), (128, 1, 1, 64), (256, 2, 2, 16)]
    )
    @pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 127, 128, 129, 200, 511, 5000])
    @pytest.mark.parametrize("has_sinks", [False, True])
    def test_windows_equal_the_reference(self, dim, kv_heads, group, block_size, window, has_sinks):
        prefills = [(1, 1), (16, 17), (127, 127), (129, 129), (513, 513), (1, 257), (33, 550), (300, 301), (130, 1999)]
        case = make(
            (), prefills, kv_heads=kv_heads, heads=kv_heads * group, dim=dim, block_size=block_size, window=window,
            has_sinks=has_sinks,
        )  # fmt: skip
        out = run(case, window=window)
        assert_right(out, case, window=window)
        assert torch.equal(run(case, window=window), out)

    @pytest.mark.parametrize("window", [None, 100])
    def test_capped_scores_equal_the_reference(self, window):
        case = make((), [(513, 513), (33, 550)], kv_heads=2, heads=8, dim=128, window=window)
        assert_right(run(case, 0.5, window, 20.0), case, 0.5, window=window, softcap=20.0)

    @pytest.mark.parametrize("kv_heads", [1, 2, 3, 8])
    def test_long_sequences_are_taken_some_heads_at_a_time(self, kv_heads):
        case = make((), [(4500, 4500), (4000, 5100)], kv_heads=kv_heads, heads=kv_heads * 2, dim=128)
        assert_right(run(case), case)

    @pytest.mark.parametrize("prefills", [[(513, 513)], [(700, 2011)], [(1, 1)] * 600, [(2, 3), (511, 640), (31, 31)]])
    def test_the_attention_op_takes_it_with_decodes_ahead(self, prefills, monkeypatch):
        from atom.kernels.hopper import prefill_attention as prefill_hopper

        calls, launch = [], prefill_hopper.prefill
        monkeypatch.setattr(prefill_hopper, "prefill", lambda *args: (calls.append(args), launch(*args)))
        case = make([1, 17, 300], prefills, kv_heads=2, heads=8, dim=128)
        out = PagedAttention()(*case, scale=0.1)
        assert len(calls) == 1
        assert_right(out, change(case, num_decodes=0))

    @pytest.mark.parametrize("room", [1000, 140, 1])  # positions that are unpacked
    @pytest.mark.parametrize("num_spare", [0, 9])
    def test_over_fp8_it_takes_what_is_unpacked_and_the_other_kernel_the_rest(self, room, num_spare):
        case = make([3, 40], [(127, 130), (500, 700), (2, 40)], kv_heads=2, heads=8, dim=128, has_sinks=True)
        scales = torch.tensor([0.7, 1.3], device="cuda")
        entries = (case.cache.blocks / scales.view(2, 1, 1)).to(torch.float8_e4m3fn)
        q = torch.cat((case.q, case.q[:1].expand(num_spare, -1, -1)))
        attend = PagedAttention(Context(room * 2 * 2 * 128 * 2))
        out = attend(*change(case, entries, q=q), *scales.split(1), scale=0.1)
        truth = reference(change(case, entries.float() * scales.view(2, 1, 1)), wide=True, scale=0.1)
        assert relative_error(out[: len(case.q)], truth) < 0.004
        assert not out[len(case.q) :].any()

    def test_the_rows_of_decodes_are_left_unchanged(self):
        assert run(make([5, 40], [(20, 20)], heads=4, dim=128))[:2].isnan().all()

    @pytest.mark.parametrize("foreign", [math.nan, math.inf, -math.inf])
    def test_what_lies_past_the_end_changes_nothing(self, foreign):
        prefills = [(length, length) for length in (1, 15, 17, 31, 33, 100, 127, 129, 200)] + [(3, 250), (40, 143)]

        def attended(foreign: float) -> torch.Tensor:
            return run(make((), prefills, kv_heads=2, heads=8, dim=128, block_size=64, foreign=foreign))

        assert torch.equal(attended(foreign), attended(0.0))
        assert attended(foreign).isfinite().all()

    def test_a_sink_takes_from_nothing_to_all(self):
        case = make((), [(200, 230)], kv_heads=2, heads=4, dim=128)
        without, sinks = run(case), torch.tensor([-math.inf, -200.0, 200.0, math.inf], device="cuda").bfloat16()
        out = run(change(case, sinks=sinks))
        assert torch.equal(out[:, :2], without[:, :2])
        assert not out[:, 2:].any()

    @pytest.mark.parametrize("has_sinks", [False, True])
    @pytest.mark.parametrize("num_spare", [1, 31, 300])
    def test_a_sequence_without_positions_and_a_token_without_sequence_give_zeros(self, num_spare, has_sinks):
        case = make((), [(50, 90), (70, 70), (5, 9)], kv_heads=2, heads=8, dim=128, has_sinks=has_sinks)
        padded = change(case, q=torch.cat((case.q, case.q[:1].expand(num_spare, -1, -1))))
        padded.batch.lengths[1] = 0
        out = run(padded)
        assert not out[50:120].any()
        assert not out[125:].any()
        case.batch.lengths[1] = 70
        assert torch.equal(out[:50], run(case)[:50])
        assert torch.equal(out[120:125], run(case)[120:])

    def test_rows_of_padding_without_tokens_change_nothing(self):
        case = make((), [(300, 300), (40, 50)], kv_heads=2, heads=8, dim=128)
        padded = change(
            case,
            starts=torch.nn.functional.pad(case.batch.starts, (0, 9), value=len(case.q)),
            lengths=torch.nn.functional.pad(case.batch.lengths, (0, 9)),
            table=torch.nn.functional.pad(case.batch.tables[KIND], (0, 3, 0, 9)),
        )
        assert torch.equal(run(padded), run(case))

    def test_blocks_beyond_two_to_the_31_elements_are_found(self):
        case = make((), [(200, 250), (77, 77)], kv_heads=8, heads=16, dim=128)
        num_far = 2**31 // case.cache.blocks[0].numel() + 1
        cache = torch.full(
            (num_far + len(case.cache.blocks), *case.cache.blocks.shape[1:]), math.nan, device="cuda"
        ).bfloat16()
        cache[num_far:] = case.cache.blocks
        assert torch.equal(run(change(case, blocks=cache, table=case.batch.tables[KIND] + num_far)), run(case))

    @pytest.mark.parametrize("num_ahead", [0, 1])
    def test_rows_of_queries_may_lie_apart_and_begin_anywhere(self, num_ahead):
        case = make((), [(300, 300)], kv_heads=2, heads=4, dim=128)
        rows = torch.nn.functional.pad(case.q.flatten(1), (num_ahead, 128 + num_ahead))
        apart = rows[:, num_ahead:][:, :512].unflatten(1, (4, 128))
        assert torch.equal(run(change(case, q=apart)), run(case))
