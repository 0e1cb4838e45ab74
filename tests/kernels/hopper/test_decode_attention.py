"""Decode attention on Hopper: when the kernel is chosen, that it compiles, and on such a GPU what it computes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from kernels.checks import relative_error
from kernels.compiling import compile_for_hopper
from kernels.hopper import emulated
from kernels.hopper.emulated import WarpGroups, emulate
from kernels.hopper.ptx import run_inline
from kernels.paged import KIND, Case, change, make_case, move, reference, widen
from kernels.triton.attention.test_norm_rope_attention import make_case as make_newest

from atom.graph import ops
from atom.kernels.hopper import decode_attention
from atom.kernels.hopper.attention import NormRopeAttention, PagedAttention
from atom.kernels.hopper.decode_attention import suits
from atom.kernels.triton.attention import common, rope
from atom.kernels.triton.gpu import Gpu

FP8 = torch.float8_e4m3fn
H200 = Gpu(132, 227 << 10, (9, 0))


def is_chosen(dtype: torch.dtype = torch.bfloat16, cache_dtype: torch.dtype = FP8, dim: int = 128,
              heads: int = 8, sequences: int = 1, queries: int = 1, block_size: int = 16,
              offset: int = 0) -> bool:  # fmt: skip
    shape = torch.Size((3, block_size, 2, 2, dim))
    cache = torch.zeros(shape.numel() + offset, dtype=cache_dtype)[offset:].view(shape)
    return suits(torch.zeros(1, heads, dim, dtype=dtype), cache, sequences, queries)


PLAIN: dict[str, Any] = {"cache_dtype": torch.bfloat16, "heads": 16}


@pytest.mark.parametrize(
    "given",
    [
        {}, {"heads": 2}, {"heads": 64}, {"heads": 16, "queries": 4}, {"block_size": 256}, {"block_size": 48},
        PLAIN, PLAIN | {"sequences": 512}, PLAIN | {"dim": 256, "sequences": 64}, PLAIN | {"heads": 8, "queries": 2}, PLAIN | {"dtype": torch.float16, "cache_dtype": torch.float16},
    ],
)  # fmt: skip
def test_it_takes(given: dict[str, Any]):
    assert is_chosen(**given)


@pytest.mark.parametrize(
    "given",
    [
        {"dtype": torch.float16},
        {"dtype": torch.float32, "cache_dtype": torch.float32}, {"cache_dtype": torch.float16}, {"dim": 64},
        {"dim": 256}, PLAIN | {"dim": 256, "sequences": 65}, PLAIN | {"dim": 64}, {"heads": 66}, {"heads": 16, "queries": 5}, {"block_size": 24},
        {"offset": 8}, PLAIN | {"heads": 14},
    ],
)  # fmt: skip
def test_it_leaves_to_the_other_kernel(given: dict[str, Any]):
    assert not is_chosen(**given)


COMPILE = """
import torch, triton
from kernels.compiling import use_hopper
from atom.kernels.hopper import decode_attention as decode_hopper
from atom.kernels.hopper.attention import PagedAttention
from atom.kernels.triton.attention import decode
from kernels.hopper.test_decode_attention import FP8, H200

class Compile:
    def __init__(self, kernel):
        self.kernel = kernel
    def __getitem__(self, grid):
        def compile(*args, **options):
            made = self.kernel.warmup(*args, grid=grid, **options)
            ptx = made.asm["ptx"]
            assert ptx.count("wgmma.mma_async") == dim // 8 and ".local" not in ptx
            assert options["maxnreg"] * 256 * tiling.programs_per_unit <= 65536
            assert queries > 1 or (made.metadata.shared + 1024) * tiling.programs_per_unit <= 228 << 10
            if dtype == FP8:
                assert ptx.count("ld.shared.v4.b32") >= 4, "a thread reads 16 bytes of a key at once"
            print("compiled")
        return compile

use_hopper()
decode.find_gpu = decode_hopper.find_gpu = lambda device: H200
decode_hopper._decode = Compile(decode_hopper._decode)
numbers, angle, scale = torch.zeros(64, 64, dtype=torch.int32), torch.zeros(4, 32), torch.ones(1)
bf16 = torch.bfloat16
for dtype, dim, queries, window, sinks, num in (
    (FP8, 128, 1, None, None, 4), (FP8, 128, 4, 100, scale, 4), (FP8, 128, 1, None, None, 64), (bf16, 128, 1, 100, scale, 4),
    (bf16, 128, 4, None, None, 4), (bf16, 256, 1, None, None, 4), (bf16, 256, 4, 100, scale, 4),
):
    heads = 32 if num >= decode_hopper.PAIRED else 64
    q, cache = torch.zeros(num * queries, heads, dim, dtype=bf16), torch.zeros(4, 16, 2, 8, dim).to(dtype)
    scales = (scale, scale) if dtype == FP8 else (None, None)
    newest = None
    if queries == 1 and dtype != FP8:
        newest = decode.Newest(q[:, :8], q[:, :8], angle, angle, q[0, 0], q[0, 0], numbers[0].long(), 1e-6, False)
    tiling = decode_hopper.choose(cache.element_size(), dim, num, 8 * queries)
    args = q, cache, numbers, numbers[0], num, sinks, *scales, torch.empty_like(q), 0.1, window, None, newest, queries, None, False, None
    PagedAttention()._attend_decodes(*args)
"""


@pytest.mark.slow
def test_it_compiles_for_such_a_gpu():
    done = compile_for_hopper(COMPILE)
    assert done.stdout.split() == ["compiled"] * 7
    assert "serialized" not in done.stderr, "of wgmma: ptxas warns where products would wait for each other"


def run_asm(asm: str, constraints: str, args: list[torch.Tensor], dtype: Any, is_pure: bool, pack: int) -> Any:
    """`run_inline` of a tile [positions, columns], of which a thread has 4 neighbours, or 4 in each of two rows."""
    (tile,) = args
    if pack == 4:
        return run_inline(asm, constraints, args, dtype, is_pure, pack)
    rows, columns = tile.shape
    own = tile.view(rows // 2, 2, columns // 4, 4).transpose(1, 2).reshape(-1, 8)
    made = run_inline(asm, constraints, [own], dtype, is_pure, pack)
    return made.view(rows // 2, columns // 4, 2, 4).transpose(1, 2).reshape(rows, columns)


class Panels(emulated.Memory):
    """Rows of 16 bits as the tensor cores find them: 64 columns of all, then the next 64."""

    def __init__(self, panels: torch.Tensor, dims: tuple[int, ...] | None = None) -> None:
        self.panels, self.dims = panels, dims

    @property
    def tensor(self) -> torch.Tensor:  # type: ignore[override]
        """As it is when it is read."""
        rows = self.panels.transpose(-3, -2).flatten(-2)
        return rows if self.dims is None else rows.permute(self.dims)

    def permute(self, dims: tuple[int, ...]) -> Panels:
        return Panels(self.panels, dims)

    def index(self, slot: Any) -> Panels:
        return Panels(self.panels[int(slot)])

    def store(self, x: torch.Tensor) -> None:
        self.panels.copy_(x.unflatten(-1, (-1, 64)).transpose(-3, -2))


def reinterpret(memory: emulated.Memory, dtype: Any, shape: list[int], layout: Any) -> emulated.Memory:
    if dtype == torch.uint8:
        return memory.reinterpret(dtype, shape, layout)
    stages, positions, dim = shape
    return Panels(memory.tensor.view(stages, dim // 64, positions, 64))


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The module as plain Python, on a GPU of 5 multiprocessors, with heads in pairs from 16 sequences on; its warps that load and that attend are threads."""
    shared, turning = emulate(common), emulate(rope)
    names = ["NOTHING", "LOG2E", "cap_scores", "find_owner", "find_run", "score_factor"]
    made = emulate(
        decode_attention, **WarpGroups().names, **{name: getattr(shared, name) for name in names},
        rotate_heads=turning.rotate_heads, inline_asm_elementwise=run_asm, reinterpret=reinterpret,
        find_gpu=lambda _: Gpu(5, 227 << 10, (9, 0)),
    )  # fmt: skip
    made.decode.__globals__["PAIRED"] = 16
    return made


class Entries(NamedTuple):
    """Of a cache."""

    dim: int  # of a head
    scales: torch.Tensor | None  # of keys and values in fp8


LENGTHS = [1, 15, 16, 17, 63, 64, 65, 129, 300]


def launch(module: Any, case: Case, scales: torch.Tensor | None, newest: Any = None, query_len: int = 1, *,
           scale: float = 0.1, window: int | None = None, softcap: float | None = None) -> torch.Tensor:  # fmt: skip
    """`decode` of the module. After it tickets are zero, and of whole sequences some were cut up."""
    cache, kept = case.cache.blocks, {}
    if scales is not None:
        cache = (cache / scales.view(2, 1, 1)).to(FP8)
    num, dim = len(case.batch.lengths), cache.shape[4]

    def find_memory(kv_heads: int, rows: int, dim: int, programs: int) -> tuple[torch.Tensor, ...]:
        shape = (kv_heads, programs, 2, rows)
        kept.update(stats=torch.zeros(*shape, 2), tickets=torch.zeros(kv_heads, programs, dtype=torch.int32))
        return torch.full((*shape, dim), torch.nan), kept["stats"], kept["tickets"]

    pair, out = (None, None) if scales is None else scales.split(1), torch.empty_like(case.q)
    module.decode(case.q, cache, case.batch.tables[KIND], case.batch.lengths, num, case.sinks, *pair, out, scale, window,
                  softcap, newest, query_len, find_memory)  # fmt: skip
    assert not kept["tickets"].any() and (window is not None or dim == 256 or kept["stats"].any())
    return out


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("is_fp8", "dim", "group", "repeats"),
    [(False, 128, 8, 1), (False, 256, 9, 1), (True, 128, 3, 1), (True, 128, 3, 2), (True, 128, 8, 2)],
)
@pytest.mark.parametrize(("window", "softcap", "has_sinks"), [(None, None, False), (70, 2.0, True), (1, None, False)])
def test_tiles_by_a_loading_warp_give_the_softmax(on_cpu, is_fp8, dim, group, repeats, window, softcap, has_sinks):
    """Of 16 sequences and more in fp8, here, a tile has two kv heads, if they have 8 queries or fewer."""
    case = make_case(LENGTHS * repeats, kv_heads=2, heads=2 * group, dim=dim, window=window, dtype=torch.bfloat16,
                     has_sinks=has_sinks)  # fmt: skip
    scales = torch.tensor([0.7, 1.3]) if is_fp8 else None
    out = launch(on_cpu, case, scales, window=window, softcap=softcap)
    truth = expected(case, scales, scale=0.1, window=window, softcap=softcap)
    assert relative_error(out, truth) < 0.004


def test_queries_beyond_the_range_of_fp16_are_scaled(on_cpu):
    """By powers of 2, so that what is given back by `scale` leaves every bit as it is."""
    case, scales = make_case(LENGTHS, kv_heads=2, heads=8, dim=128, dtype=torch.bfloat16), torch.ones(2)
    outs = [launch(on_cpu, change_queries(case, 2.0**by), scales, scale=2.0**-by / 8) for by in (0, 100, -100)]
    assert torch.equal(outs[1], outs[0]) and torch.equal(outs[2], outs[0])
    assert relative_error(outs[0], expected(case, scales, scale=1 / 8)) < 0.004


def change_queries(case: Case, factor: float) -> Case:
    return case._replace(q=case.q * factor)


IS_HOPPER = torch.cuda.is_available() and torch.version.hip is None and torch.cuda.get_device_capability() == (9, 0)


def run(case: Case, query_len: int = 1, scales: torch.Tensor | None = None, **attributes: Any) -> torch.Tensor:
    """Decodes only, three times with the same memory; scales: of keys and values, if entries are in fp8."""
    blocks = case.cache.blocks if scales is None else (case.cache.blocks / scales.view(2, 1, 1)).to(FP8)
    case = change(case, blocks, num_decodes=len(case.batch.lengths), query_len=query_len)
    attend, pair = PagedAttention(), (None, None) if scales is None else scales.split(1)
    outs = [attend(*case, *pair, **attributes) for _ in range(3)]
    assert all(torch.equal(out, outs[0]) for out in outs)
    return outs[0].cpu()


def expected(case: Case, scales: torch.Tensor | None = None, **attributes: Any) -> torch.Tensor:
    """In float32 over the numbers that the cache holds."""
    if scales is None:
        return reference(case, wide=True, **attributes)
    by = scales.cpu().view(2, 1, 1)
    return reference(
        change(case, (case.cache.blocks.nan_to_num().float() / by).to(FP8).float() * by), wide=True, **attributes
    )


@pytest.mark.gpu
@pytest.mark.skipif(not IS_HOPPER, reason="there is no Hopper GPU here")
class TestOnHopper:
    @pytest.fixture(params=[(FP8, 128), (torch.bfloat16, 128), (torch.bfloat16, 256)], ids=str)
    def entries(self, request: pytest.FixtureRequest) -> Entries:
        dtype, dim = request.param
        return Entries(dim, torch.tensor([0.7, 1.3], device="cuda") if dtype == FP8 else None)

    @pytest.mark.parametrize(("kv_heads", "group", "block_size"), [(2, 4, 48), (3, 9, 32), (1, 32, 16)])
    @pytest.mark.parametrize("window", [None, 1, 100])
    @pytest.mark.parametrize("softcap", [None, 2.0])
    @pytest.mark.parametrize("has_sinks", [False, True])
    def test_lengths_around_the_ends_of_tiles(
        self, entries, kv_heads, group, block_size, window, softcap, has_sinks, monkeypatch
    ):
        from atom.kernels.hopper import decode_attention as decode_hopper

        calls, launch = [], decode_hopper.decode
        monkeypatch.setattr(decode_hopper, "decode", lambda *args: (calls.append(args), launch(*args)))
        lengths = [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 500, 2000]
        dim, scales = entries
        group = group if scales is not None else max(group, 8)
        case = make_case(lengths, kv_heads=kv_heads, heads=kv_heads * group, dim=dim, block_size=block_size,
                         window=window, dtype=torch.bfloat16, has_sinks=has_sinks)  # fmt: skip
        attributes = {"scale": 0.1, "window": window, "softcap": softcap}
        out = run(move(case, "cuda"), scales=scales, **attributes)
        assert len(calls) == 3
        assert relative_error(out, expected(case, scales, **attributes)) < 0.004

    @pytest.mark.parametrize("window", [None, 70])
    @pytest.mark.parametrize("queries", [2, 4, 8])
    def test_several_queries_see_what_is_before_each(self, entries, queries, window):
        """A sequence of several queries is what a chunk of a prompt is."""
        prefills = [(queries, length) for length in (queries, 64, 66, 129, 700, 3000)]
        dim, scales = entries
        case = make_case((), prefills, kv_heads=2, heads=8, dim=dim, window=window, dtype=torch.bfloat16)
        out = run(move(case, "cuda"), queries, scales, scale=0.1, window=window)
        assert relative_error(out, expected(case, scales, scale=0.1, window=window)) < 0.004

    @pytest.mark.parametrize("lengths", [[40000], [30000, 5, 1], [1] * 300, [900] * 129])
    def test_long_ones_and_many_are_cut_up(self, entries, lengths):
        dim, scales = entries
        case = make_case(lengths, kv_heads=2, heads=16, dim=dim, dtype=torch.bfloat16)
        assert relative_error(run(move(case, "cuda"), 1, scales, scale=0.1), expected(case, scales, scale=0.1)) < 0.004

    @pytest.mark.parametrize("window", [None, 70])
    def test_two_kv_heads_share_a_tile(self, window):
        case = make_case([1, 31, 32, 33, 300] * 13, kv_heads=4, heads=12, dim=128, dtype=torch.bfloat16, window=window,
                         has_sinks=True)  # fmt: skip
        scales = torch.tensor([0.7, 1.3], device="cuda")
        assert len(case.batch.lengths) >= decode_attention.PAIRED
        out = run(move(case, "cuda"), 1, scales, scale=0.1, window=window)
        assert relative_error(out, expected(case, scales, scale=0.1, window=window)) < 0.004

    def test_a_sequence_of_no_positions_gives_zeros(self, entries):
        dim, scales = entries
        case = make_case([70, 9, 200], kv_heads=2, heads=16, dim=dim, dtype=torch.bfloat16)
        case.batch.lengths[1] = 0
        out = run(move(case, "cuda"), 1, scales, scale=0.1)
        assert not out[1].any() and out[0].any() and out.isfinite().all()

    @pytest.mark.parametrize("dim", [128, 256])
    @pytest.mark.parametrize(("kv_heads", "group", "turned"), [(2, 8, 128), (1, 9, 64), (3, 8, 0), (1, 32, 128)])
    @pytest.mark.parametrize(("window", "has_sinks", "has_norm"), [(None, False, True), (70, True, False)])
    @pytest.mark.parametrize("interleaved", [False, True])
    def test_the_newest_is_written_and_attended_to(
        self, dim, kv_heads, group, turned, window, has_sinks, has_norm, interleaved
    ):
        lengths = [1, 2, 16, 17, 64, 65, 66, 129, 2000]
        case = make_newest(lengths, kv_heads=kv_heads, heads=kv_heads * group, dim=dim, turned=turned, window=window,
                           has_norm=has_norm, has_sinks=has_sinks, dtype=torch.bfloat16)  # fmt: skip
        attributes = {"scale": 0.1, "window": window, "eps": 1e-6, "interleaved": interleaved}
        wide = widen(case)
        truth = ops.norm_rope_attention.body(*wide, **attributes)
        slots = case.batch.slot_mappings[KIND]
        for _ in range(2):
            own = move(change(case, case.cache.blocks.clone()), "cuda")
            out = NormRopeAttention()(*own, **attributes)
            assert relative_error(out.cpu(), truth) < 0.01
            after, before = own.cache.blocks.cpu().flatten(0, 1), case.cache.blocks.flatten(0, 1).clone()
            assert relative_error(after[slots], wide.cache.blocks.flatten(0, 1)[slots]) < 0.004
            after[slots] = before[slots] = 0
            assert torch.equal(after.nan_to_num(7), before.nan_to_num(7))
