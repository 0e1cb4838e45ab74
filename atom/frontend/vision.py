"""Write the program `vision`: patches of images -> rows for tokens.

    write_vision(graph.program("vision"), model.vision, dtype="bf16")

Its layers are those of a decoder, written by the same blocks, but for attention, in which each patch sees all of its
image, or of a window, and which keeps nothing. Roles, besides those of layers and of `merger.py`: `patch`, `class`, and
`positions`, or `position_table` of a table that is stored without `.weight`.

Inputs, P patches of any number of images, those that become one row side by side:

    patches u8[P, F]            pixels, channel by channel
    places i64[P, 4]            row, column, height and width of a patch in its image, counted in patches
    starts i32[S + 1]           where images begin, and P
    window_starts i32[W + 1]    where windows do, of which some layers are; patches come window by window
    class_rows i32[N]           0 for the first state of each segment, if that is no patch; -1 for patches
    patch_rows i64[P]           the numbers of the others; of the inputs above, all but starts have N rows then

The result is rows [M, H], or [M, H * parts] with parts of deeper layers after the first (DeepStack, Meng et al. 2024).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.fx import Node

from atom.config import (
    AttentionConfig,
    MLPConfig,
    ModelConfig,
    NormConfig,
    QuantConfig,
    ResidualGateConfig,
    RopeConfig,
    VisionConfig,
)
from atom.frontend.decoder import write_layer
from atom.frontend.merger import write_merger
from atom.frontend.rope import Rotary, rope_freqs
from atom.frontend.writer import Segments, Writer, required
from atom.graph import VISION, Cat, Program, Recipe, Slice, Type, W, ops
from atom.graph.ops.base import multiply
from atom.graph.ops.vision import PLACE
from atom.graph.recipe_ranges import narrow

LEVELS = 255.0  # of a pixel
AS_STORED = QuantConfig()  # quant= is of the text; a tower has a few percent of the weights


def write_vision(program: Program, vision: VisionConfig, dtype: str) -> None:
    """dtype: of rows and of what is computed"""
    num_patches = multiply("M", vision.merger.side**2)
    num = "N" if vision.class_token else num_patches
    patches = program.input("patches", Type("u8", (num, vision.patch_size)))
    has_places = any(each is not None for each in (vision.table_side, vision.table_length, vision.rope_theta))
    places = program.input("places", Type("i64", (num, PLACE))) if has_places else None
    starts = program.input("starts", Type("i32", ("S",)))
    has_windows = "sliding_attention" in (vision.layer_types or ())
    window_starts = program.input("window_starts", Type("i32", ("W",))) if has_windows else None
    tower, segments = tower_of(vision), Segments(starts, window_starts)
    writer = Writer(tower, program, dtype, dtype, AS_STORED, segments=segments)
    in_layers = replace(writer, clips=vision.clips)
    x = embed_patches(writer, vision, patches, places)
    patch_rows = program.input("patch_rows", Type("i64", (num_patches,))) if vision.class_token else None
    rotary = rotary_of(writer, vision, required(places)) if vision.rope_theta is not None else None
    parts: list[Node] = []

    def without_class(x: Node) -> Node:
        return x if patch_rows is None else writer.call(ops.take_rows, x, patch_rows, name="x")

    for layer in range(vision.layers):
        x, _ = write_layer(in_layers, x, rotary, layer)
        if layer in vision.deepstack:
            index = vision.deepstack.index(layer)
            parts.append(write_merger(writer, vision, without_class(x), "deepstack", index))
    if vision.final_norm:
        x = writer.norm(x, "final_norm", name="x")
    rows = [write_merger(writer, vision, without_class(x), "merge"), *parts]
    program.output(rows[0] if len(rows) == 1 else writer.call(ops.join, *rows, name="rows"))


def tower_of(vision: VisionConfig) -> ModelConfig:
    """A model that has the tower's layers, and no embedding, head or cache."""
    heads, dim, theta = vision.heads, vision.hidden // vision.heads, vision.rope_theta
    rope = RopeConfig(kind="none", dims=dim)
    if theta is not None:
        rope = RopeConfig(theta=theta, dims=dim, interleaved=vision.rope_order == "interleaved")
    return ModelConfig(
        name=VISION,
        hidden=vision.hidden,
        layers=vision.layers,
        layer_types=vision.layer_types,
        norm=NormConfig(kind=vision.norm, eps=vision.eps, bias=vision.norm == "layer", after=vision.after_norms),
        attention=AttentionConfig(
            heads=heads,
            kv_heads=heads,
            head_dim=dim,
            bias=vision.bias,
            o_bias=vision.o_bias,
            qk_norm=vision.qk_norm,
            v_norm=vision.v_norm,
            scale=dim**-0.5 if vision.scale is None else vision.scale,
            rope=rope,
        ),
        mlp=[MLPConfig(kind=vision.mlp, width=vision.width, activation=vision.activation, bias=vision.mlp_bias)],
        residual_gate=ResidualGateConfig(kind="given" if vision.layer_scale else "none"),
        weights=vision.weights,
        fmt=None,
    )


def embed_patches(writer: Writer, vision: VisionConfig, patches: Node, places: Node | None) -> Node:
    """patches u8[P, F] -> [P, H], with learned positions if there are any"""
    scaled: dict[str, Any] = {name: [LEVELS * each for each in getattr(vision, name)] for name in ("mean", "std")}
    pixels = writer.call(ops.normalize_pixels, patches, **scaled, dtype=writer.dtype, name="pixels")
    x = embed_pixels(writer, vision, pixels)
    if vision.patch_norm:
        x = writer.norm(x, "patch_norm")
    if vision.table_length is not None:
        tables = W(writer.name("positions"), Type(writer.dtype, (2, vision.table_length, vision.hidden)))
        x = writer.call(ops.add, x, writer.call(ops.axis_tables, tables, places, name="p"), name="x")
    if vision.table_side is None:
        return put_class(writer, vision, x)
    num_class = int(vision.class_token)
    shape = num_class + vision.table_side**2, vision.hidden
    if "position_table" in vision.weights:
        stored = W(writer.name("position_table"), Type(writer.dtype, shape))
    else:
        stored = writer.weight("positions", shape)
    learned = sample_table(writer, vision, narrow(stored, num_class, shape[0]), required(places))
    x = writer.call(ops.add, x, learned, name="x")
    return put_class(writer, vision, x, narrow(stored, 0, 1))


def sample_table(writer: Writer, vision: VisionConfig, table: Recipe, places: Node) -> Node:
    """table [side * side, H] -> [P, H], the learned position of each patch"""
    side, mode = vision.table_side, vision.table_mode
    if mode == "antialias":
        resampled: Node = writer.call(ops.resample_table, table, places, side=side, name="p")
        return resampled
    given = {} if mode == "bilinear" else {"mode": mode}
    interpolated: Node = writer.call(ops.interpolate_table, table, places, side=side, **given, name="p")
    return interpolated


def put_class(writer: Writer, vision: VisionConfig, x: Node, position: Recipe | None = None) -> Node:
    """x [N, H] with the learned state in place of the first one of each segment, if the tower has one

    position: [1, H], that is added to it
    """
    if not vision.class_token:
        return x
    rows = writer.program.input("class_rows", Type("i32", x.meta["type"].shape[:1]))
    state = W(writer.name("class"), Type(writer.dtype, (1, vision.hidden)))
    x = writer.call(ops.place_rows, x, rows, state, name="x")
    return x if position is None else writer.call(ops.place_rows, x, rows, position, adds=True, name="x")


def embed_pixels(writer: Writer, vision: VisionConfig, pixels: Node) -> Node:
    """pixels [P, F], channel by channel -> [P, H], by a linear, whose columns may be stored pixel by pixel"""
    if vision.patch_order == "channel":
        return writer.linear(pixels, "patch", vision.hidden, vision.patch_bias)
    stored = writer.matrix("patch", (vision.hidden, vision.patch_size))
    channels = [Slice(stored, channel, vision.patch_size, 1, vision.channels) for channel in range(vision.channels)]
    bias = [writer.weight("patch", (vision.hidden,), part="bias")] if vision.patch_bias else []
    embedded: Node = writer.multiply(pixels, Cat(tuple(channels), 1), *bias, role="patch", layer=None)
    return embedded


def rotary_of(writer: Writer, vision: VisionConfig, places: Node) -> Rotary:
    """Half of the pairs of dims turn by the row, half by the column.

    halves: one half after the other, by the same frequencies (Qwen2-VL)
    alternating: so too, but rows have every second frequency, and columns those between (Pixtral)
    interleaved: column and row take turns, by the same frequencies, and the dims of a pair are neighbours (MoonViT)
    apart: columns turn the first half of the dims, rows the second half, each by itself (Gemma 4)
    """
    rope = writer.model.attention.rope
    pairs = required(rope.dims) // 4
    dims = pairs * 2
    half = replace(rope, dims=dims)
    freqs = rope_freqs(half)
    if vision.rope_order == "apart":
        of_columns, of_rows = (
            writer.call(ops.rotary_sections, places, freqs, sections=[pairs], axes=[axis], name=("cos", "sin"))
            for axis in (1, 0)
        )
        return Rotary(of_columns, of_columns, rope.interleaved, of_rows)
    if vision.rope_order == "interleaved":
        turns = {"sections": [pairs, pairs], "interleaved": True, "axes": [1, 0]}
        pair = writer.call(ops.rotary_sections, places, freqs, **turns, name=("cos", "sin"))
        return Rotary(pair, pair, rope.interleaved)
    if vision.rope_order == "halves":
        pair = writer.call(ops.rotary_sections, places, freqs, sections=[pairs, pairs], name=("cos", "sin"))
        return Rotary(pair, pair, rope.interleaved)
    between = rope_freqs(replace(half, kind="linear", factor=rope.theta ** (1 / dims)))
    by_row = writer.call(ops.rotary_sections, places, freqs, sections=[pairs], name=("cos", "sin"))
    by_column = writer.call(ops.rotary_sections, places, between, sections=[pairs], axes=[1], name=("cos", "sin"))
    pair = tuple(writer.call(ops.join, *both, name=both[0].name) for both in zip(by_row, by_column, strict=True))
    return Rotary(pair, pair, rope.interleaved)
