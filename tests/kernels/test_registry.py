from __future__ import annotations

import inspect
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from atom.errors import UnsupportedError
from atom.graph import LatestState, Type, ops
from atom.kernels import (
    Backend,
    Kernel,
    LoadContext,
    Target,
    backends_of,
    candidates,
    find_backend,
    find_kernel,
    find_target,
    find_versions,
    generated,
    hopper,
    registry,
)
from atom.kernels import triton as backend
from atom.kernels.reference import COMPILED
from atom.kernels.registry import BACKENDS, MODULES, ORDER

GPUS = [Target("cuda", frozenset({"nvidia", "sm_90"})), Target("cuda", frozenset({"amd", "gfx942"}))]
BY_TRITON = [kernel.op for kernel in backend.KERNELS]
NVIDIA_ONLY = {ops.linear_activate}


def test_kernels_come_in_the_order_of_the_backends_and_the_reference_where_it_is_named():
    found = candidates(ops.linear, tuple(map(find_backend, ("triton", "reference", "torch"))))
    assert [kernel.backend for kernel in found] == ["triton", "reference", "torch"]
    assert [kernel.backend for kernel in candidates(ops.rotary, backends_of("cuda", 1))] == ["reference"]


def test_a_backend_or_a_kernel_that_is_not_there_is_named():
    with pytest.raises(
        UnsupportedError,
        match="there is no kernel backend 'cutlass'; backends: inductor, cpp, int8, torch, widened, gloo, reference, aiter, hopper, triton, "
        "generated",
    ):
        find_kernel(ops.linear, "cutlass")
    with pytest.raises(UnsupportedError, match=r"there is no kernel triton\.rotary"):
        find_kernel(ops.rotary, "triton")


LINEARS = (ops.linear, ops.gated_linear, ops.norm_linear, ops.add_norm_linear)


@pytest.mark.parametrize("op", [op for op in BY_TRITON if op not in NVIDIA_ONLY], ids=lambda op: op.name)
def test_an_op_has_one_kernel_in_triton_which_gpus_of_any_vendor_take_and_a_cpu_refuses(op: ops.Op):
    assert BY_TRITON.count(op) == 1
    kernel = find_kernel(op, "triton")
    types: list[Any] = [Type("bf16", ("T", 64) if op in LINEARS else ("T", 8, 64))] * (5 if op is ops.experts else 8)
    if op in (ops.gated_delta_net, ops.OPS["batched_causal_conv"], ops.OPS["batched_ngrams"]):
        types[1:6] = [LatestState("0", Type("fp32", (8, 64, 64)))] * 5
    more: dict[str, Any] = {
        ops.lora: {"sizes": [64]},
        ops.expand_lora: {"sizes": [64]},
        ops.experts: {"kind": "silu"},
        ops.linear_by_head: {"heads": 2},
    }.get(op, {})
    assert [kernel.accepts(target, *types, **more) for target in GPUS] == [None, None]
    assert kernel.accepts(Target("cpu"), *types, **more) == "runs on cuda, not on cpu"
    assert kernel.trace is None, "it runs between pieces"


@pytest.mark.parametrize("op", LINEARS, ids=lambda op: op.name)
def test_linears_take_rows_in_two_dims_and_the_gates_that_they_have(op: ops.Op):
    accepts, row = find_kernel(op, "triton").accepts, Type("bf16", ("T", 64))
    assert accepts(GPUS[0], Type("bf16", ("T", 8, 64)), row) == "takes rows in two dims"
    assert accepts(GPUS[0], row, row, kind="swigluoai") == "has no swigluoai gate"
    assert accepts(GPUS[0], row, row, kind="silu") is None


def test_an_epilogue_takes_gelu_by_tanh_in_half_precision_on_nvidia():
    accepts, row = find_kernel(ops.linear_activate, "triton").accepts, Type("bf16", ("M", 64))
    asked = [accepts(target, row, row, row, kind="gelu_tanh") for target in (*GPUS, Target("cpu"))]
    assert asked == [None, "calls a library of NVIDIA's", "runs on cuda, not on cpu"]
    assert accepts(GPUS[0], row, row, row, kind="gelu") == "has no epilogue with gelu in bf16"
    wide = Type("fp32", ("M", 64))
    assert accepts(GPUS[0], wide, wide, wide, kind="gelu_tanh") == "has no epilogue with gelu_tanh in fp32"
    packed = Type("bf16", (64, 64), "int8z")
    assert accepts(GPUS[0], row, packed, row, kind="gelu_tanh") == "its weight is stored as int8z"
    assert accepts(GPUS[0], Type("fp16", ("M", 8, 64)), row, kind="gelu_tanh") == "takes rows in two dims"


def test_latent_attention_takes_entries_of_up_to_1024_and_64_dims():
    accepts = find_kernel(ops.paged_mla_attention, "triton").accepts

    def asked(rank: int, rotated: int, dtype: str = "bf16") -> str | None:
        head, rope = (Type(dtype, ("T", 8, dims)) for dims in (128, rotated))
        return accepts(GPUS[0], head, rope, Type(dtype, (2048, rank)))

    assert asked(1024, 64) is asked(18, 6) is asked(512, 64, "fp32") is None
    assert asked(1028, 64) == "entries have 1028 + 64 dims, more than 1024 + 64"
    assert asked(516, 64, "fp32") == "entries have 516 + 64 dims, more than 512 + 64"
    assert asked(512, 66) == "entries have 512 + 66 dims, more than 1024 + 64"


@pytest.mark.parametrize("target", GPUS, ids=["nvidia", "amd"])
@pytest.mark.parametrize("op", [ops.paged_attention, ops.norm_rope_write, ops.norm_rope_attention])
def test_attention_takes_heads_of_up_to_512_dims_on_a_gpu_of_any_vendor(op: ops.Op, target: Target):
    accepts = find_kernel(op, "triton").accepts
    for dim in (4, 20, 64, 512):
        assert accepts(target, Type("bf16", ("T", 8, dim))) is None
    assert accepts(target, Type("bf16", ("T", 8, 516))) == "heads have 516 dims, more than 512"


@pytest.mark.parametrize(
    "kernel", [*backend.KERNELS, *hopper.KERNELS], ids=lambda kernel: f"{kernel.backend}.{kernel.op.name}"
)
def test_every_kernel_of_a_gpu_is_called_as_its_op(kernel: Kernel):
    pytest.importorskip("triton")
    ours, theirs = dict(inspect.signature(kernel.load(LoadContext())).parameters), kernel.op.signature.parameters
    cut_up = ours.pop("parameters", None)  # by what is measured, where the caller does not say it
    assert cut_up is None or (cut_up.kind == cut_up.KEYWORD_ONLY and cut_up.default is not cut_up.empty)
    assert [(each.name, each.kind, each.default) for each in ours.values()] == [
        (each.name, each.kind, each.default) for each in theirs.values()
    ]


def test_generated_kernels_are_of_rows_of_a_fixed_size_and_of_no_linear():
    accepts = {kernel.op: kernel.accepts for kernel in generated.KERNELS}
    of_ranks = {ops.local_tokens, ops.mask_rows, ops.sum_squares, ops.scale_by_rms, ops.sum_moments}
    by_hand = {ops.stream_logits, ops.stream_gate, ops.sinkhorn, ops.attend_residuals, ops.run_tokens}
    assert set(accepts) == COMPILED - {ops.linear, ops.join} - of_ranks - by_hand  # join: only of drafts
    gpu, row = GPUS[0], Type("bf16", ("T", 64))
    assert accepts[ops.add](gpu, row, row) is None
    assert accepts[ops.add](Target("cpu"), row, row) == "runs on cuda, not on cpu"
    assert accepts[ops.add](gpu, Type("bf16", ("T", "N"))) == "bf16[T, N] is not of rows of a fixed size"
    assert accepts[ops.rms_norm](gpu, Type("bf16", ("T", 1 << 16)), Type("bf16", (1 << 16,)), eps=0.1) is None
    wide = Type("bf16", ("T", (1 << 16) + 1))
    assert "is not of rows of up to 65536 elements" in accepts[ops.rms_norm](gpu, wide, wide, eps=0.1)


def test_no_backend_imports_triton_before_a_kernel_is_loaded():
    names = ", ".join(f"atom.kernels.{MODULES.get(name, name)}" for name in BACKENDS)
    program = f"import sys, {names}; print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_without_a_gpu_the_target_of_one_is_an_error_with_what_to_do(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(
        UnsupportedError, match=r"device=cuda: torch finds no GPU here; take device=cpu, or job=explain job\.gpu="
    ):
        find_target("cuda")


def test_an_order_names_backends_that_are_there_once_and_ends_with_the_reference():
    for device, levels in ORDER.items():
        for level, names in enumerate(levels):
            assert [backend.name for backend in backends_of(device, level)] == list(names)
            assert len(set(names)) == len(names) and names[-1] == "reference"
    assert {backend.name for name in BACKENDS if (backend := find_backend(name))} == set(BACKENDS)
    assert {kernel.backend for name in BACKENDS for kernel in find_backend(name).kernels} == set(BACKENDS)


def test_pieces_of_a_device_have_one_compiler():
    for device in ORDER:
        assert sum(backend.piece_compiler is not None for backend in backends_of(device)) == 1
        assert all(backend.piece_compiler is None for backend in backends_of(device, 1)), "they begin at level 2"


STAGES = {ops.send, ops.receive}
COLLECTIVES = {ops.all_reduce, ops.all_gather, ops.gather_tokens, ops.reduce_scatter, ops.dispatch, ops.collect}


def test_collectives_are_those_of_the_communicator():
    class Parameters:
        def __getattr__(self, name: str) -> str:
            return name

    for op in COLLECTIVES:
        kernel = find_kernel(op, "gloo")
        assert kernel.accepts(Target("cpu"), Type("fp32", ("T", 8))) is None
        assert kernel.load(LoadContext(Parameters())) == op.name  # type: ignore[arg-type]
        with pytest.raises(UnsupportedError, match=f"{op.name} is for several ranks, and this is one"):
            kernel.load(LoadContext())


def test_stages_have_the_communicators_calls():
    for op in STAGES:
        assert find_kernel(op, "gloo").accepts(Target("cpu"), Type("fp32", ("T", 8))) is None
        with pytest.raises(UnsupportedError, match="is for several ranks, and this is one"):
            find_kernel(op, "gloo").load(LoadContext())


@pytest.mark.parametrize(
    "op", [op for op in ops.OPS.values() if op not in COLLECTIVES | STAGES], ids=lambda op: op.name
)
def test_the_reference_takes_every_other_op(op: ops.Op):
    assert find_kernel(op, "reference").accepts(Target("nowhere")) is None
    assert find_kernel(op, "reference").load(LoadContext()) is op.body


def test_what_kernels_of_a_program_share_is_made_once():
    context = LoadContext()
    attend, fused = (find_kernel(op, "torch").load(context) for op in (ops.paged_attention, ops.paged_mla_attention))
    assert find_kernel(ops.paged_attention, "torch").load(context) is attend is not fused
    assert find_kernel(ops.paged_attention, "torch").load(LoadContext()) is not attend


def test_code_for_a_device_depends_on_the_libraries_of_its_backends():
    assert list(find_versions("cpu")) == ["torch", "instruction set", "libraries"]
    pytest.importorskip("triton")
    assert list(find_versions("cuda")) == ["torch", "triton"]


def test_the_first_backend_that_tunes_a_table_does_so_for_those_after_it(monkeypatch: pytest.MonkeyPatch):
    """As hopper's, which tunes triton's kernels too."""
    ours, theirs, others = (
        SimpleNamespace(table=table, of=at) for at, table in enumerate(("linear", "linear", "experts"))
    )
    backends = (
        Backend("one", (), find_tuners=lambda _: [ours]),
        Backend("two", (), find_tuners=lambda _: [theirs, others]),
    )
    monkeypatch.setattr(registry, "backends_of", lambda _: backends)
    assert registry.find_tuners("cuda", torch.device("cpu")) == [ours, others]
