"""The expert that all tokens share as some of the experts, where a kernel computes them in one call."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from law import assert_same_logits
from passes.cases import context_of, run, text_of
from passes.test_shard import logits_of_ranks
from safetensors.torch import save_file
from semantic import assert_same_as_transformers

from atom import weights
from atom.checkpoint import SILENT, Checkpoint, open_checkpoint
from atom.config.load import load
from atom.graph import Graph, PackedWeight, interpret, ops, parse
from atom.graph.mesh import Mesh
from atom.graph.parts import parts_of
from atom.graph.recipes import leaves
from atom.kernels import Target
from atom.passes.context import PassContext
from atom.passes.fuse_gate_up import fuse_gate_up
from atom.passes.fuse_shared_experts import fuse_shared_experts
from atom.passes.quantize import quantize as quantize_pass
from atom.weights.quantize import quantize

GPU = context_of(Target("cuda", frozenset({"nvidia", "sm_90"})), "triton", "reference")

BEFORE = """\
def f(h: fp32[T, 8]):
    weights, ids = router(h, W("gate", fp32[4, 8]), None, None, top_k=2)
    y = experts(h, weights, ids, W("gate_up", fp32[4, 6, 8]), W("down", fp32[4, 8, 3]), kind="silu")
    gate_up = linear(h, cat([W("g", fp32[6, 8]), W("u", fp32[6, 8])]))
    m = gated_activate(gate_up, kind="silu")
    down = linear(m, W("d", fp32[8, 6]))
    y_1 = add(y, down)
    return y_1"""

GATE_UPS = [
    f'stack(cat([slice(W("g", fp32[6, 8]), {at}), slice(W("u", fp32[6, 8]), {at})]), 0, 1)' for at in ("0, 3", "3, 6")
]
DOWNS = [f'stack(slice(W("d", fp32[8, 6]), {at}, dim=1), 0, 1)' for at in ("0, 3", "3, 6")]
AFTER = f"""\
def f(h: fp32[T, 8]):
    weights, ids = router(h, W("gate", fp32[4, 8]), None, None, top_k=2, shared=2)
    y = experts(h, weights, ids, cat([W("gate_up", fp32[4, 6, 8]), {", ".join(GATE_UPS)}]), \
cat([W("down", fp32[4, 8, 3]), {", ".join(DOWNS)}]), kind="silu")
    return y"""


GATED = BEFORE.replace(
    "    y_1 = add(y, down)",
    """\
    share = linear(h, W("share", fp32[1, 8]))
    share_1 = activate(share, kind="sigmoid")
    shared = mul(down, share_1)
    y_1 = add(y, shared)""",
)
GATED_AFTER = AFTER.replace('W("gate", fp32[4, 8])', 'cat([W("gate", fp32[4, 8]), W("share", fp32[1, 8])])').replace(
    "shared=2", "shared=2, gated=True"
)


def assert_stays(text: str, context: PassContext = GPU) -> None:
    graph = fuse_shared_experts(parse(text), context)
    assert text_of(graph) == text_of(parse(text))
    assert graph.num_rewrites == 0


def fused(text: str = BEFORE) -> Graph:
    return fuse_shared_experts(parse(text), GPU)


@pytest.mark.parametrize(("before", "after"), [(BEFORE, AFTER), (GATED, GATED_AFTER)], ids=["plain", "gated"])
def test_a_shared_expert_becomes_two_of_the_experts(before: str, after: str):
    text = text_of(fused(before)).strip()
    names = {"weights_1": "weights", "ids_1": "ids", "y_1": "y"}
    for name, plain in names.items():
        text = text.replace(name, plain)
    assert text == after
    assert_stays(after)


def test_a_sum_the_other_way_round_is_one_too():
    assert "shared=2" in text_of(fuse_shared_experts(parse(BEFORE.replace("add(y, down)", "add(down, y)")), GPU))


@pytest.mark.parametrize("text", [BEFORE, GATED], ids=["plain", "gated"])
def test_numbers_are_equal(text: str):
    h = torch.randn(9, 8)
    torch.testing.assert_close(run(text_of(fused(text)), h=h), run(text, h=h))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('kind="sigmoid"', 'kind="gelu"'),
        ("share = linear(h,", "x = add(h, h)\n    share = linear(x,"),  # not what the router reads
        ('W("share", fp32[1, 8])', 'W("share", fp32[8, 8])'),  # of each column
        ('W("share", fp32[1, 8])', 'W("share", fp32[1, 8]), W("b", fp32[1])'),
        ('W("share", fp32[1, 8])', 'W("share", fp32[1, 8], fmt="fp8[1, *]")'),
        ("return y_1", "return y_1, shared"),
        ("return y_1", "return y_1, share_1"),
        ("return y_1", "return y_1, share"),
    ],
)  # fmt: skip
def test_another_form_of_a_gate_stays(old: str, new: str):
    assert_stays(GATED.replace(old, new))


def test_a_gate_stays_without_a_router_that_takes_it(monkeypatch: pytest.MonkeyPatch):
    takes = PassContext.takes
    monkeypatch.setattr(
        PassContext, "takes", lambda own, op, *types, **rule: "gated" not in rule and takes(own, op, *types, **rule)
    )
    assert_stays(GATED)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("linear(m, ", "linear(h, "),
        ('W("d", fp32[8, 6])', 'W("d", fp32[8, 6], fmt="fp8[1, *]")'),
        ('W("d", fp32[8, 6])', 'W("d", fp32[8, 6]), W("b", fp32[8])'),
        ("gated_activate(gate_up, kind=\"silu\")", "gated_activate(gate_up, kind=\"gelu\")"),
        ("return y_1", "return y_1, down"),
        ("return y_1", "return y_1, y"),
        ("add(y, down)", 'add(y, W("b", fp32[8]))'),
        ("[4, 6, 8]", "[4, 8, 8]"),
        ("gate_up = linear(h, ", "x = add(h, h)\n    gate_up = linear(x, "),
    ],
)  # fmt: skip
def test_another_form_stays(old: str, new: str):
    text = BEFORE.replace(old, new)
    if new == "linear(h, ":
        text = text.replace("fp32[8, 6]))", "fp32[8, 8]))")
    if new == "[4, 8, 8]":
        text = text.replace("[4, 8, 3]", "[4, 8, 4]")
    assert_stays(text)


def test_among_ranks_with_experts_of_their_own_and_without_such_a_kernel_it_stays():
    for mesh in (Mesh(tensor=2, experts=2), Mesh(data=2)):
        assert_stays(BEFORE, PassContext(GPU.target, GPU.backends, mesh))
    assert_stays(BEFORE, context_of(Target("cpu"), "torch", "reference"))


@pytest.mark.parametrize(
    ("name", "width", "is_fused"),
    [("qwen2_moe", 48, True), ("qwen2_moe", 40, False), ("qwen3_next", 24, True), ("qwen3_5_moe", 24, True)],
)  # width: of the shared expert; others have 24
def test_a_gated_shared_expert_among_the_others_gives_the_logits_of_transformers(
    name: str, width: int, is_fused: bool, tmp_path: Path
):
    model = tiny.save_changed(name, tmp_path / name, shared_expert_intermediate_size=width)

    def rewrite(graph: Graph) -> Graph:
        made = fuse_shared_experts(fuse_gate_up(graph), GPU)
        routers = made.find(ops.router)
        assert routers and all(("gated" in router.kwargs) == is_fused for router in routers)
        return made

    assert_same_as_transformers(load([f"checkpoint={tmp_path / name}", "dtype=fp32"]), model.eval(), rewrite)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen3_next", {"shared_expert_intermediate_size": 24}),
        pytest.param("glm4_moe", {}, marks=pytest.mark.slow),
    ],
)
def test_ranks_that_divide_all_experts_take_their_part_of_the_shared_one(
    name: str, changes: dict[str, int], tmp_path: Path
):
    model = tiny.save_changed(name, tmp_path / name, **changes)

    def rewrite(graph: Graph) -> Graph:
        made = fuse_shared_experts(fuse_gate_up(graph), replace(GPU, mesh=Mesh(2)))
        routers = made.find(ops.router)
        assert routers and all("shared" in router.kwargs for router in routers)
        return made

    tokens = tiny.prompt(33)
    made = logits_of_ranks([f"checkpoint={tmp_path / name}", "dtype=fp32"], tokens, Mesh(2), rewrite)
    assert_same_logits(made[0], tiny.logits(model.eval(), tokens))
    assert torch.equal(*made)


def packed_text(
    width: int, stored: str | None = None, made: str | None = None, act: str = "", linear_act: str = ""
) -> str:
    """Four experts of width 32 and one of `width`, whose weights a file has packed, or which are packed as they load."""

    def tensor(name: str, rows: int, columns: int) -> str:
        return f'W("{name}", fp32[{rows}, {columns}]' + (")" if stored is None else f', fmt="{stored}")')

    def pair(end: str, rows: int) -> str:
        return f"cat([{tensor(f'g{end}', rows, 64)}, {tensor(f'u{end}', rows, 64)}])"

    def weight(recipe: str) -> str:
        return recipe if made is None else f'quantize({recipe}, "{made}")'

    own, of_linear = (f', act="{each}"' if each else "" for each in (act, linear_act or act))
    gate_up, down = (
        weight(f"stack({pair('.{expert}', 32)}, 0, 4)"),
        weight(f"stack({tensor('d.{expert}', 64, 32)}, 0, 4)"),
    )
    return f"""\
def f(h: fp32[T, 64]):
    weights, ids = router(h, W("gate", fp32[4, 64]), None, None, top_k=2)
    y = experts(h, weights, ids, {gate_up}, {down}, kind="silu"{own})
    gate_up = linear(h, {weight(pair("", width))}{of_linear})
    m = gated_activate(gate_up, kind="silu")
    down = linear(m, {weight(tensor("d", 64, width))}{of_linear})
    y_1 = add(y, down)
    return y_1"""


def save(folder: Path, graph: Graph) -> Checkpoint:
    """A checkpoint with random numbers, in the formats of the graph."""
    tensors = {}
    for leaf in {leaf for recipe in graph.recipes() for leaf in leaves(recipe)}:
        plain = torch.randn(leaf.type.shape, generator=torch.Generator().manual_seed(sum(map(ord, leaf.name)))) / 8
        parts = {"values": plain} if leaf.type.fmt is None else quantize(leaf.type.fmt, plain)
        for name, part in parts_of(leaf).items():
            tensors[part.name] = parts[name].contiguous()
    (folder / "config.json").write_text("{}")
    save_file(tensors, folder / "model.safetensors")
    return open_checkpoint(str(folder))


def run_packed(graph: Graph, checkpoint: Checkpoint, h: torch.Tensor) -> torch.Tensor:
    loaded = weights.load(graph.recipes(), checkpoint, SILENT)
    return interpret(graph, "f", {"h": h}, loaded.__getitem__)


@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize(
    ("stored", "made"),
    [
        ("fp8[16, 32]", None), ("fp8[1, *]", None), ("fp8", None), ("mxfp4", None), (None, "fp8[16, 32]"),
        (None, "int4[1, 32]"), (None, "mxfp4"),
    ],
)  # fmt: skip
def test_packed_experts_take_in_one_of_their_format(stored: str | None, made: str | None, width: int, tmp_path: Path):
    text = packed_text(width, stored, made)
    apart, joined = (quantize_pass(graph, GPU) for graph in (parse(text), fuse_shared_experts(parse(text), GPU)))
    checkpoint, h = save(tmp_path, parse(text)), torch.randn(9, 64)
    assert f"shared={width // 32}" in text_of(joined)
    (experts,) = joined.find(ops.experts)
    for place in (3, 4):  # no kernel has to take it unpacked
        loaded = weights.load([experts.args[place]], checkpoint, SILENT)[experts.args[place]]
        assert isinstance(loaded, PackedWeight) and len(loaded.parts["values"]) == 4 + width // 32
    torch.testing.assert_close(run_packed(joined, checkpoint, h), run_packed(apart, checkpoint, h))


@pytest.mark.parametrize(
    "text",
    [
        packed_text(64, "fp8[64, 64]"),  # half of the down projection's columns cuts blocks
        packed_text(32, "ct_nvfp4"),  # whose tensors have a number each
        packed_text(32, "fp8[1, *]").replace('"d", fp32[64, 32], fmt="fp8[1, *]"', '"d", fp32[64, 32], fmt="mxfp4"'),
        packed_text(32, "mxfp4").replace(
            'W("d", fp32[64, 32], fmt="mxfp4")', 'quantize(W("d", fp32[64, 32]), "mxfp4")'
        ),
    ],
)
def test_packed_experts_that_are_no_more_of_them_stay(text: str):
    assert_stays(text)


@pytest.mark.parametrize(("act", "linear_act"), [("", "fp8[1, *]"), ("fp8[1, 32]", "")])
def test_activations_are_in_the_routed_experts_format_unless_another_was_asked_for(act: str, linear_act: str):
    text = packed_text(32, "fp8[16, 32]" if act else "fp8[1, *]", None, act, linear_act)
    made = text_of(fuse_shared_experts(parse(text), GPU))
    assert "shared=1" in made and made.count("act=") == (1 if act else 0)
    assert_stays(text, replace(GPU, keeps_act=True))


@pytest.mark.parametrize("act", ["", "fp8[1, *]"])
def test_gemms_in_fp8_are_not_given_up_for_those_that_unpack(act: str):
    """On Hopper a linear takes activations with a scale of each row, and experts do not."""
    hopper = Target("cuda", frozenset({"nvidia", "sm_90", "gluon"}))
    text = packed_text(128, "fp8[1, *]", None, act).replace("fp32[", "bf16[")
    made = text_of(fuse_shared_experts(parse(text), context_of(hopper, "hopper", "triton", "torch", "reference")))
    assert ("shared=4" in made) == (not act)
