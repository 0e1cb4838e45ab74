"""Kernels compile for AMD's GPUs, and fit into what they have; for NVIDIA's, scripts/check-kernels compiles them."""

from __future__ import annotations

from pathlib import Path

import pytest
from kernels.compiling import run_program

COMPILE = """
import collections, itertools, sys, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from atom.kernels.aiter import mxfp4
from atom.kernels.triton.experts import few_experts, grouped_linear, grouping, moe, router
from atom.kernels.triton import streams
from atom.kernels.triton.linear import lora
from atom.kernels.triton.step import sampling, speculation
from atom.kernels.triton.activations import Gate
from atom.kernels.triton.attention import paged
from atom.kernels.triton.attention import decode
from atom.kernels.triton.step import prepare_inputs
from atom.kernels.triton.linear import linear, matrix, packed, quantized, row_kernels, split_blocks, tiles, vector
from atom.kernels.triton.linear import kquant_gemv
from atom.kernels.triton.attention import compressed, index_scores, latent, prefill, top_k
from atom.kernels.triton.attention import residuals, rope, segments, shared_prefix
from atom.kernels.triton.recurrent import causal_conv, chunks, delta_net, gated_delta, ssd
from atom.graph import Batch, PackedWeight, PagedCache, Type
from atom.graph.batch import SharedPrefixes
from atom.kernels.step import Inputs
from atom.kernels.triton.gpu import Gpu
from atom.runtime.step.request_state import RequestState
from atom.runtime.step.input import PackedRows
from atom.weights.quantize import quantize

TARGETS = {
    "gfx942": (GPUTarget("hip", "gfx942", 64), Gpu(304, 64 << 10, (0, 0))),
    "gfx950": (GPUTarget("hip", "gfx950", 64), Gpu(256, 160 << 10, (0, 0))),
}
target, gpu = TARGETS[sys.argv[1]]
TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64", torch.int32: "*i32", torch.int64: "*i64",
         torch.float16: "*fp16", torch.int8: "*i8", torch.uint8: "*u8", torch.float8_e4m3fn: "*fp8e4nv", int: "i32",
         float: "fp32"}

class Compile:
    def __init__(self, kernel):
        self.kernel = kernel
    def __getitem__(self, grid):
        return self
    def __call__(self, *args, **options):
        kernel = self.kernel
        given = dict(zip(kernel.arg_names, args)) | {name: options.pop(name) for name in kernel.arg_names if name in options}
        constant = {p.name: p.is_constexpr or given[p.name] is None for p in kernel.params}
        signature = {p.name: "constexpr" if constant[p.name] else TYPES[getattr(given[p.name], "dtype", type(given[p.name]))]
                     for p in kernel.params}
        constants = {name: given[name] for name in signature if constant[name]}
        aligned = {(i,): [["tt.divisibility", 16]] for i, type in enumerate(signature.values()) if type[0] == "*"}
        made = triton.compile(ASTSource(kernel, signature, constants, aligned), target, options)
        assert made.metadata.shared <= gpu.shared_memory, (kernel.__name__, made.metadata.shared)
        print(kernel.__name__)

for module in (decode, few_experts, grouped_linear, grouping, prepare_inputs, linear, lora, matrix, packed, quantized,
               row_kernels, moe, mxfp4, router, prefill, rope, sampling, speculation, vector, kquant_gemv, causal_conv,
               chunks, compressed, delta_net, gated_delta, index_scores, latent, ssd, segments, shared_prefix, residuals,
               streams, top_k):
    if hasattr(module, "find_gpu"):
        module.find_gpu = lambda device: gpu
    for name in NAMES.get(module.__name__.rpartition(".")[2], "").split():
        setattr(module, name, Compile(getattr(module, name)))


def bf16(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16)

norm, weight = bf16(1024), bf16(2048, 1024)
for rows in (1, 5, 30):
    x = bf16(rows, 1024)
    linear.Linears().linear(x, weight)
    linear.Linears().add_norm_linear(x, x, norm, weight, eps=1e-6, kind="silu")
x = bf16(100, 1024)
for parameters in (tiles.Matrix(128, 64, 8, 3), tiles.Matrix(64, 64, 4, 3, splits=2, block_rows=32),
                   tiles.Matrix(16, 64, 4, 4, groups=4, block_rows=8)):
    matrix.multiply_matrix(x, weight, None, "silu", matrix.make_counters(x.device), parameters)
linear.activate_gates(bf16(100, 2048), "silu")
formats = ("fp8[1, *]", "fp8[128, 128]", "int8[1, *]", "int4[1, 128]", "awq_int4[1, 32]", "mxfp4", "ct_nvfp4", "q4_1")
stored = {fmt: PackedWeight(Type("bf16", (2048, 1024), fmt), quantize(fmt, torch.ones(2048, 1024))) for fmt in formats}
for fmt, size in {"q6_k": 210, "q4_k": 144, "q5_k": 176}.items():
    blocks = {"values": torch.zeros(2048, 4, size, dtype=torch.uint8)}
    stored[fmt] = split_blocks.split_blocks(PackedWeight(Type("bf16", (2048, 1024), fmt), blocks))
formats = tuple(stored)
for fmt, rows in itertools.product(formats, (1, 16, 32, 60)):
    x = bf16(rows, 1024)
    linear.Linears().add_norm_linear(x, x, bf16(1024), stored[fmt], eps=1e-6, kind="silu")
for fmt in formats:
    vector.multiply_vector(bf16(1, 1024), None, None, stored[fmt], None, 0.0, None, tiles.Vector(8, 4, 3, 1))
    packed.unpack(stored[fmt], torch.bfloat16)
row_kernels.quantize_rows(bf16(9, 1024), 1024, torch.int8)
for bias in (None, bf16(2048)):
    quantized._scale_kernel[(2, 9)](torch.zeros(32, 2048).int(), torch.ones(32), torch.ones(2048), bias, bf16(9, 2048), 2048, 1024, **gpu.options)
q, k, cache = bf16(9, 8, 128), bf16(9, 2, 128), PagedCache(bf16(4, 16, 2, 2, 128), "full")
angle = torch.zeros(9, 64)
slots = torch.arange(9)
table, starts = torch.zeros(4, 4, dtype=torch.int32), torch.tensor([0, 1, 2, 3, 9], dtype=torch.int32)
batch = Batch({"full": table}, {"full": slots}, starts, torch.full((4,), 9, dtype=torch.int32), 3)
rope.norm_rope_write(q, k, k, angle, angle, bf16(128), bf16(128), cache, batch, eps=1e-6)
rope.norm_rope(q, k, angle, angle, bf16(128), bf16(128), eps=1e-6)
paged.PagedAttention()(q, cache, batch, scale=0.1)
paged.PagedAttention()(q, cache, batch._replace(query_len=3), scale=0.1, window=8)
grouped = batch._replace(prefixes=SharedPrefixes("full", starts[:3], starts[:3], torch.zeros(17, dtype=torch.int32)))
for query_len in (1, 3):
    paged.PagedAttention()(q, cache, grouped._replace(query_len=query_len), scale=0.1)
for query_len in (1, 3):
    paged.PagedAttention()(q, cache, batch._replace(query_len=query_len), slopes=torch.ones(8), scale=0.1, window=8, chunked=True)
for norm, turning in ((bf16(128), angle), (None, None)):
    paged.NormRopeAttention()(q, k, k, turning, turning, norm, norm, cache, batch, eps=1e-6, scale=0.1)
fp8, scale = PagedCache(cache.blocks.to(torch.float8_e4m3fn), "full"), torch.ones(1)
for scales in ((None, None), (scale, scale)):
    rope.norm_rope_write(q, k, k, angle, angle, bf16(128), bf16(128), fp8, batch, *scales, eps=1e-6)
    for each in (batch, grouped):
        paged.PagedAttention()(q, fp8, each, None, *scales, scale=0.1)
    paged.NormRopeAttention()(q, k, k, angle, angle, bf16(128), bf16(128), fp8, batch, None, *scales, eps=1e-6, scale=0.1)
large, kept = bf16(9, 8, 512), PagedCache(bf16(4, 16, 2, 1, 512), "full")
half, normed = torch.zeros(9, 256), bf16(512)
paged.PagedAttention()(large, kept, batch, scale=0.1)
paged.NormRopeAttention()(large, large[:, :1], large[:, :1], half, half, normed, normed, kept, batch, eps=1e-6, scale=0.1)
for dim in (72, 128):
    segments.segment_attention(*bf16(900, 3, 16, dim).unbind(1), starts, scale=0.1)
    segments.segment_attention(*bf16(900, 3, 16, dim).unbind(1), starts.repeat(9), scale=0.1)
residuals.attend_residuals(bf16(7168), bf16(1, 7168), *bf16(3, 9, 7168), eps=1e-5)
runs = batch._replace(tables={"full": table, "every_4": table}, block_size=16)
kept, entries = PagedCache(bf16(4, 16, 512), "full"), PagedCache(bf16(4, 4, 512), "every_4")
compressed.paged_compress(bf16(9, 1024), bf16(9, 1024), torch.zeros(4, 1024), PagedCache(bf16(4, 16, 2, 1024), "full"), runs, overlaps=True)
for heads in (8, 64):
    q, chosen = bf16(9, heads, 512), torch.zeros(9, 1, 512, dtype=torch.int32)
    compressed.paged_mqa_attention(q, kept, runs, bf16(heads), None, entries, chosen, scale=0.1, window=128, every=4)
    compressed.paged_mqa_attention(q, kept, runs, bf16(heads), scale=0.1, window=128)
keys = PagedCache(bf16(4, 4, 128), "every_4")
top_k.paged_index_topk(bf16(9, 64, 128), bf16(9, 64), keys, runs, top_k=4, every=4)
q = bf16(9, 8, 128)
in_slots = batch._replace(slots=starts[:4])
causal_conv.batched_causal_conv(bf16(9, 1024), bf16(5, 4, 3, 1024), in_slots, bf16(1024, 4), bf16(1024), kind="silu")
states = torch.zeros(5, 4, 8, 128, 128)
for decay in (torch.zeros(9, 8), torch.zeros(9, 8, 128)):
    gated_delta.batched_gated_delta(q, q, q, decay, q[..., 0], states, in_slots, scale=0.1, normalize=True)
qkv, in_slots = bf16(9, 4 * 1024 + 16), in_slots._replace(num_decodes=2)
delta_net.gated_delta_net(
    qkv[:, :3072], qkv[:, 3072:4096], qkv[:, 4096:4104], qkv[:, 4104:], bf16(5, 4, 3, 3072), states, in_slots, bf16(3072, 4),
    torch.zeros(8), torch.zeros(8), bf16(128), key_heads=8, scale=0.1, eps=1e-6,
)
ssd.batched_ssd(q, torch.zeros(9, 8), k, k, states, in_slots, torch.zeros(8), torch.zeros(8))
rows, tables = torch.zeros(3, dtype=torch.int32), torch.zeros(1, 4, 4, dtype=torch.int32)
state = RequestState(3, 500, "cpu")
inputs = Inputs(slots, slots, batch._replace(lengths=rows), slots[None], torch.zeros(1, 3, 4, dtype=torch.int32))
prepare_inputs.decode_inputs(rows, state, tables, 16, inputs)
drafting = RequestState(3, 500, "cpu", 3, 100)
room = Inputs(torch.zeros(12).long(), torch.zeros(12).long(), inputs.batch, torch.zeros(1, 12).long(), inputs.tables)
prepare_inputs.decode_inputs(rows, drafting, tables, 16, room, rows)
speculation.find_ngrams(rows, drafting, 2, 4)
keys, *rest = speculation.draw_noise(rows, drafting, 3)
for offsets in (None, torch.zeros(500).long()):
    speculation.gumbel_argmax(bf16(3, 500), keys[0], *rest, offsets)
for rates in (None, torch.ones(3)):
    speculation.accept(torch.zeros(4, 3).long(), rows.repeat(4, 1), rows, drafting, 1, rates)
    speculation.finish_drafts(torch.zeros(4, 3).long(), rows.repeat(4, 1), rows, drafting, rates is not None)
speculation.keep_rows(bf16(4, 8, 128), rows, bf16(9, 8, 128), slots)
prepare_inputs.draft_inputs(rows, None, drafting, room._replace(batch=room.batch._replace(query_len=4)))
sampling.sample(bf16(3, 500), rows, drafting, "filtered", torch.zeros(3, dtype=torch.int64))
split = PackedRows(rows, starts, rows, rows, rows, slots.int(), slots.int(), rows)
prepare_inputs.mixed_inputs(split, state, tables, 16, inputs)
prepare_inputs.draft_inputs(rows, split, drafting, inputs)
prepare_inputs.extend_tables(tables, torch.zeros(2, 3, dtype=torch.int32))
for kind in ("greedy", "random", "filtered"):
    sampling.sample(bf16(3, 500), rows, state, kind, torch.zeros(3, dtype=torch.int64))
sampling.score_drawn(bf16(3, 500), slots, slots, torch.zeros(3), torch.zeros(3), rows)
for rows in (5, 300):
    lora.expand_lora(bf16(rows, 2048 + 384), bf16(2048, 128), torch.zeros(rows).long(), rank=16, sizes=[1024, 512, 512])
    lora.expand_lora(bf16(rows, 2048 + 512), bf16(2048, 256), torch.zeros(rows).long(), rank=64, sizes=[1024, 1024], kind="silu")
x, experts = bf16(7, 256), bf16(8, 64, 256)
for rows in (7, 20):
    weights, ids = router.Router().router(bf16(rows, 256), bf16(8, 256), top_k=2)
    router.Router().add_norm_router(bf16(rows, 256), bf16(rows, 256), bf16(256), bf16(8, 256), eps=0.1, top_k=2)
    router.Router().router(bf16(rows, 256), bf16(9, 256), top_k=2, shared=1, gated=True)
router.Router().router(bf16(20_000, 256), bf16(128, 256), top_k=2)
weights, ids = router.Router().router(x, bf16(8, 256), top_k=2)
grouped, order, ends = grouping.group(x, ids, ids.new_empty(1), experts=8)
many = torch.zeros(1100, 2, dtype=torch.int64)
grouping.group(bf16(1100, 256), many, many[0, :1], experts=8)
grouped, order, ends = grouping.group(x, ids, experts=8)
streams.sinkhorn(torch.zeros(3, 16), streams=4, rounds=20, eps=1e-6)
for rows in (3, 300):
    streams.stream_logits(bf16(rows, 4096), torch.zeros(24, 4096), torch.zeros(24), torch.zeros(24), eps=1e-6)
mxfp4.number_tiles(collections.defaultdict(lambda: lambda *args: None), ends, 100)
moe.Experts().grouped_linear(grouped, experts, ends)
moe.Experts().multiply(grouped, experts, ends, bf16(8, 64), Gate("swigluoai", 7.0, 1.7))
moe.Experts().multiply(grouped, experts, ends, bf16(8, 64), Gate("situ", 25.0, 4.0))
grouping.combine(bf16(14, 256), weights, order)
grouping.combine(bf16(2200, 256), torch.zeros(1100, 2), torch.arange(2200))
for tokens in (1, 7):
    few_experts.multiply_few(x[:tokens], weights[:tokens], ids[:tokens], experts, bf16(8, 256, 32), Gate("silu"))
formats = ("mxfp4", "ct_nvfp4", "fp8[128, 128]", "int8[1, *]", "int4[1, 32]", "awq_int4", "q4_1")
for fmt, rows in itertools.product(formats, (14, 200, 1000)):
    moe.Experts().grouped_linear(bf16(rows, 256), PackedWeight(Type("bf16", (8, 64, 256), fmt), quantize(fmt, experts)), ends)
"""
NAMES = {
    "decode": "_decode",
    "compressed": "_pool_runs _attend_kernel",
    "latent": "_merge_kernel",
    "index_scores": "_score_kernel",
    "top_k": "_select_kernel",
    "prepare_inputs": "_prepare _prepare_draft _extend",
    "matrix": "_matrix_kernel",
    "vector": "_vector_kernel",
    "kquant_gemv": "_kquant_gemv_kernel",
    "lora": "_expand_kernel",
    "packed": "_unpack_kernel",
    "quantized": "_scale_kernel",
    "row_kernels": "_norm_kernel _gate_kernel _quantize_kernel",
    "router": "_logits_kernel _choose_kernel _route_few_kernel",
    "grouping": "_group_kernel _count_kernel _place_kernel _combine_kernel _sum_rows_kernel",
    "mxfp4": "_number_kernel",
    "streams": "_sum_parts_kernel _finish_logits_kernel _sinkhorn_kernel",
    "grouped_linear": "_grouped_linear_kernel _packed_grouped_linear_kernel",
    "few_experts": "_few_gated_linear_kernel _few_down_linear_kernel",
    "prefill": "_prefill",
    "rope": "_norm_rope_write",
    "shared_prefix": "_attend_prefixes",
    "speculation": "_find _repeat _accept _finish _keep _draw_noise _largest_of_part _best_of_part _best_of_row",
    "causal_conv": "_causal_conv",
    "gated_delta": "_gated_delta",
    "chunks": "_score_chunks_by_dim _solve_chunks _solve_chunks_by_dim _pass_state",
    "delta_net": "_gated_delta_gates _gated_delta_norm",
    "ssd": "_ssd",
    "segments": "_segment_attention",
    "residuals": "_attend_residuals",
    "sampling": "_summarize _limit _gather _draw _score",
}


@pytest.mark.slow
@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
def test_kernels_compile_for(target: str, tmp_path: Path):
    done = run_program(f"NAMES = {NAMES!r}\n{COMPILE}", target, TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == set(" ".join(NAMES.values()).split())
