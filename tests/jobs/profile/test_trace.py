"""Where the time of a trace went, of traces written by hand, whose times are known."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

import atom
from atom.errors import ConfigError
from atom.jobs.profile.trace import kind_of, summarize


def event(cat: str, name: str, start: float, duration: float, tid: int = 1, **others: Any) -> dict[str, Any]:
    """Times in µs."""
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": duration, "pid": 0, "tid": tid, **others}


def test_a_device_is_busy_with_kernels_and_copies_and_has_gaps_between_them():
    trace = {"traceEvents": [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 1},
        event("cpu_op", "aten::mm", 0, 5000),
        event("cuda_runtime", "cudaGraphLaunch", 10, 20),
        event("gpu_user_annotation", "step", 1000, 400, tid=7),
        event("kernel", "_vector_kernel", 1000, 100, tid=7),
        event("kernel", "_merge", 1090, 30, tid=8),                # overlaps the one before it by 10
        event("kernel", "_vector_kernel", 1120, 60, tid=7),        # follows at once
        event("gpu_memcpy", "Memcpy DtoH", 1200, 5, tid=7),        # 20 later
        event("gpu_memset", "Memset", 1210, 5, tid=7),             # 5 later
        event("kernel", "decode_kernel", 1300, 100, tid=7),        # 85 later
    ]}  # fmt: skip
    summary = summarize(trace)
    assert summary.timeline == "device"
    assert summary.seconds == pytest.approx(400e-6)
    assert (summary.num_gaps, summary.gap_seconds) == (3, pytest.approx(110e-6))
    rows = {row.name: (row.kind, row.calls, round(row.seconds * 1e6)) for row in summary.rows}
    assert rows == {
        "_vector_kernel": ("matrix", 2, 160),
        "decode_kernel": ("attention", 1, 100),
        "_merge": (None, 1, 30),
        "Memcpy DtoH": ("copy", 1, 5),
        "Memset": ("copy", 1, 5),
    }
    assert [row.name for row in summary.rows][:3] == ["_vector_kernel", "decode_kernel", "_merge"], "longest first"


def test_the_librarys_gemm_of_a_router_is_no_matrix_of_the_model():
    gemm = "nvjet_tst_128x64_64x8_1x2_h_bz_TNT"
    names = [gemm, "_choose_kernel", "_group_kernel", gemm, "_combine_kernel", "_logits_kernel", "_choose_kernel", gemm]
    summary = summarize({"traceEvents": [event("kernel", name, 10 * at, 5) for at, name in enumerate(names)][::-1]})
    rows = {row.name: (row.kind, row.calls) for row in summary.rows}
    assert rows[gemm] == ("matrix", 2) and rows["logits of a router"] == ("routing", 1) and len(summary.matmuls) == 2


def test_a_host_counts_what_is_inside_a_call_under_the_call():
    trace = {"traceEvents": [
        event("user_annotation", "PagedAttention", 100, 50),
        event("cpu_op", "aten::bmm", 110, 20),
        event("cpu_op", "aten::linear", 135, 10),                  # in what is attention already
        event("user_annotation", "piece 0", 160, 100),
        event("cpu_op", "atom::packed_linear", 170, 60),           # a matmul in what is none
        event("cpu_op", "mkldnn::_linear_pointwise", 175, 50),
        event("cpu_op", "aten::empty", 180, 5),
        event("cpu_op", "aten::argmax", 300, 10),
        event("cpu_op", "aten::mm", 0, 4000, tid=2),               # a thread that does less
    ]}  # fmt: skip
    summary = summarize(trace)
    assert summary.timeline == "host"
    assert summary.seconds == pytest.approx(210e-6)
    assert (summary.num_gaps, summary.gap_seconds) == (2, pytest.approx(50e-6))
    assert [(row.name, row.kind, row.calls, round(row.seconds * 1e6)) for row in summary.rows] == [
        ("atom::packed_linear", "matrix", 1, 60),
        ("PagedAttention", "attention", 1, 50),
        ("piece 0", None, 1, 40),
        ("aten::argmax", None, 1, 10),
    ]


def test_events_that_touch_are_not_inside_each_other():
    summary = summarize({"traceEvents": [event("cpu_op", "a", 0, 10), event("cpu_op", "b", 10, 5)]})
    assert [(row.name, round(row.seconds * 1e6)) for row in summary.rows] == [("a", 10), ("b", 5)]
    assert (summary.num_gaps, summary.gap_seconds) == (0, 0.0)


def test_a_trace_without_events_is_an_error():
    with pytest.raises(ConfigError, match="the trace has no events"):
        summarize({"traceEvents": [{"ph": "M", "name": "process_name"}]})


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("_vector_kernel", "matrix"),
        ("_grouped_linear_kernel", "matrix"),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "matrix"),
        ("void gemvNSP_kernel<__nv_bfloat16, float>", "matrix"),
        ("Cijk_Alik_Bljk_BBS_BH_MT128x128x64", "matrix"),
        ("triton_tem_fused_mm_3", "matrix"),
        ("aten::addmm", "matrix"),
        ("aten::bmm", None),
        ("triton_red_fused_add_mean_mul_0", "elementwise"),
        ("_norm_kernel", "elementwise"),
        ("void at::native::elementwise_kernel<128>", "elementwise"),
        ("decode_kernel", "attention"),
        ("_gated_delta", "recurrent"),
        ("_gated_delta_net", "recurrent"),
        ("cpp.batched_ssd", "recurrent"),
        ("_causal_conv", "recurrent"),
        ("paged_mla_attention", "attention"),
        ("reference.router", "routing"),
        ("torch.combine", "routing"),
        ("torch.add_norm_linear", "matrix"),
        ("torch.add_rms_norm", "elementwise"),
        ("torch.sum_squares", None),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "collective"),
        ("void cutlass::device_kernel<flash::enable_sm90<...>>", "attention"),
    ],
)
def test_names_of_kernels_by_kind_of_work(name: str, kind: str | None):
    assert kind_of(name) == kind


FOLDERS = {  # of kernels: the kinds that they have
    "attention": {"attention"}, "recurrent": {"recurrent"}, "experts": {"matrix", "routing"},
    "linear": {"matrix", "elementwise"}, "step": {"step", "copy"}, "peers": {"collective"},
    "hopper": {"attention", "matrix", "recurrent", "routing"}, "aiter": {"routing"}, "triton": {"elementwise"},
}  # fmt: skip


def test_every_kernel_that_we_launch_has_a_kind_of_its_folder():
    found = dict[tuple[str, str], str | None]()
    for path in (Path(atom.__file__).parent / "kernels").rglob("*.py"):
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        launched = {
            each.value.id for each in nodes if isinstance(each, ast.Subscript) and isinstance(each.value, ast.Name)
        }
        functions = [each for each in nodes if isinstance(each, ast.FunctionDef) and each.name in launched]
        for each in functions:
            if any("jit" in ast.unparse(decorator) for decorator in each.decorator_list):
                found[path.parent.name, each.name] = kind_of(each.name)
    assert len(found) > 70
    assert {key: kind for key, kind in found.items() if kind not in FOLDERS[key[0]]} == {}
