"""Write the merger of a tower: hidden states of patches -> rows for tokens.

    rows = write_merger(writer, vision, x, "merge")                 # x [P, H] -> [M, rows of the body]
    deep = write_merger(writer, vision, x, "deepstack", index=0)    # of a deeper layer (DeepStack, Meng et al. 2024)

Roles, each after `merge_` or `deepstack_`: `norm`, `in` (of the linear that folds a square), `up`, `gate`, `down`, or
in its place `matrix`, stored [in, out] without `.weight` or a bias, and `proj` and `proj_norm` ahead of a gated mlp.
`merge_scale` and `merge_bias` standardize a mean.
"""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Node

from atom.config import MergerConfig, NormConfig, VisionConfig
from atom.frontend.writer import Writer, required
from atom.graph import Apply, Cat, Slice, Transpose, Type, W, ops

NORMS = {  # by norm_kind of a merger; eps are those of the tower unless it has its own
    "layer": NormConfig(kind="layer", bias=True),
    "rms_offset": NormConfig(offset=1.0),
    "rms_plain": NormConfig(weight=False),
}
PROJ_NORM = NormConfig(kind="layer", eps=1e-5, bias=True)  # ahead of a gated mlp, as GLM-4.1V has it


def write_merger(writer: Writer, vision: VisionConfig, x: Node, role: str, index: int | None = None) -> Node:
    """x [P, H] -> [M, rows of the body]: the patches of a square become one row, and pass linears

    role: merge, or deepstack, which always joins the patches of a square ahead of its norm
    index: among those of deepstack; None: of merge
    """
    merger = vision.merger if role == "merge" else replace(vision.merger, pool="join", norm="row")
    eps = vision.eps if merger.norm_eps is None else merger.norm_eps
    normed = writer
    if merger.norm_kind != "tower":
        normed = replace(writer, model=replace(writer.model, norm=NORMS[merger.norm_kind]))
    if merger.norm == "patch":
        x = normed.norm(x, f"{role}_norm", index, eps=eps)
    h = pool_squares(writer, merger, x)
    if merger.norm == "row":
        h = normed.norm(h, f"{role}_norm", index, eps=eps)
    if merger.fold != "none":
        h = fold_squares(writer, vision, h, f"{role}_in", index)
    return write_linears(writer, vision, h, role, index)


def pool_squares(writer: Writer, merger: MergerConfig, x: Node) -> Node:
    """x [P, H] -> [M, H * patches of a square], or their mean [M, H]"""
    if merger.pool == "join":
        joined: Node = writer.call(ops.fold_rows, x, rows=merger.side**2, name="h")
        return joined
    mean = writer.call(ops.mean_rows, x, rows=merger.side**2, name="h")
    return standardize(writer, mean, merger.scale or 1.0) if merger.standardize else writer.scale(mean, merger.scale)


def standardize(writer: Writer, x: Node, scale: float) -> Node:
    """x [M, H] times a number, less stored numbers, times other ones, by channel"""
    type = Type("fp32", x.meta["type"].shape[-1:])
    stored = (W(writer.name(f"merge_{part}"), type) for part in ("scale", "bias"))
    by, less = (Apply(each, "scale", factor) for each, factor in zip(stored, (scale, -1 / scale), strict=True))
    made: Node = writer.call(ops.affine, x, by, less, name=x.name)
    return made


def fold_squares(writer: Writer, vision: VisionConfig, h: Node, role: str, index: int | None) -> Node:
    """h [M, H * patches of a square] -> [M, H], or a row of the body, by a linear that is stored channel by channel"""
    merger, num = vision.merger, vision.merger.side**2
    rows, columns = vision.hidden if merger.fold == "patch" else required(vision.out), num * vision.hidden
    stored = writer.matrix(role, (rows, columns), index)
    by_patch = Cat(tuple(Slice(stored, patch, columns, 1, num) for patch in range(num)), 1)
    bias = [writer.weight(role, (rows,), index, "bias")] if merger.fold_bias else []
    return writer.multiply(h, by_patch, *bias, role=role, layer=index)


def write_linears(writer: Writer, vision: VisionConfig, h: Node, role: str, index: int | None) -> Node:
    """h [M, I] -> [M, rows of the body], by the linears of `merger.mlp`"""
    merger, out = vision.merger, required(vision.out)
    width = merger.width or merger.side**2 * vision.hidden
    if merger.mlp == "gated":
        h = gate_rows(writer, vision, h, role, width, index)
    elif merger.mlp == "plain":
        h = writer.linear(h, f"{role}_up", width, merger.bias, index)
        h = writer.call(ops.activate, h, kind=merger.activation, name="active")
    if f"{role}_matrix" not in vision.weights:
        return writer.linear(h, f"{role}_down", out, merger.bias, index)
    stored = W(writer.name(f"{role}_matrix", index), Type(writer.dtype, (h.meta["type"].shape[1], out)))
    return writer.multiply(h, Transpose(stored), role=f"{role}_matrix", layer=index, name="rows")


def gate_rows(writer: Writer, vision: VisionConfig, h: Node, role: str, width: int, index: int | None) -> Node:
    """h [M, I] -> [M, width]: act(gate) * up of gelu(norm(linear)), as GLM-4.1V has it"""
    merger = vision.merger
    h = writer.linear(h, f"{role}_proj", required(vision.out), merger.bias, index)
    h = replace(writer, model=replace(writer.model, norm=PROJ_NORM)).norm(h, f"{role}_proj_norm", index)
    h = writer.call(ops.activate, h, kind="gelu", name="h")
    gate, up = writer.linears(h, {f"{role}_gate": width, f"{role}_up": width}, merger.bias, index)
    active = writer.call(ops.activate, gate, kind=merger.activation, name="active")
    m: Node = writer.call(ops.mul, active, up, name="m")
    return m
