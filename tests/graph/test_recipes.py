"""Recipes as values: their text, what `cat` and `narrow` make of them, and the bytes that they hold."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MistralLarge4TextConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.mistral_large4.modeling_mistral_large4 import MistralLarge4TextRotaryEmbedding

from atom.checkpoint import Checkpoint, SilentProgress, StoredTensor
from atom.graph import (
    KV,
    TORCH_DTYPES,
    Apply,
    Cat,
    Dequantize,
    Graph,
    LearnedFreqs,
    Recipe,
    RopeFreqs,
    Shift,
    Shuffle,
    Slice,
    Stack,
    Transpose,
    Type,
    W,
    ops,
    parse,
    show,
)
from atom.graph.recipe_contents import held_by_format, held_bytes
from atom.graph.recipe_ranges import cat, narrow
from atom.graph.recipes import leaves
from atom.weights import load


def stored(name: str, *shape: int, fmt: str | None = None) -> W:
    return W(name, Type("fp32", shape, fmt))


FP8 = stored("w", 300, 200, fmt="fp8[128, 128]")
FP8_BYTES = 300 * 200 + 3 * 2 * 4
MXFP4 = stored("w", 4, 96, 64, fmt="mxfp4")


class Memory(Checkpoint):
    """Tensors in memory, and the names of those that were read."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        names = {dtype: name for name, dtype in TORCH_DTYPES.items()}
        self.values = tensors
        self.tensors = {name: StoredTensor(names[value.dtype], tuple(value.shape)) for name, value in tensors.items()}
        self.was_read: set[str] = set()

    def read(self, name: str) -> memoryview:
        self.was_read.add(name)
        return memoryview(self.values[name].view(torch.uint8).numpy().tobytes())

    def tokenizer(self, **_: Any) -> None:
        return None

    def close(self) -> None:
        pass


def evaluate(recipe: Recipe, checkpoint: Memory) -> Tensor:
    checkpoint.was_read.clear()
    return load([recipe], checkpoint, SilentProgress())[recipe]


# the text


def equal_slices(
    start: int, stop: int, every: int, count: int, *, dim: int = 0, rows: int = 9, columns: int = 8
) -> Cat:
    whole = stored("qkv", rows, columns)
    return Cat(tuple(Slice(whole, start + n * every, stop + n * every, dim) for n in range(count)), dim)


RECIPES: list[tuple[Recipe, str]] = [
    (Stack(stored("e.{expert}.up", 6, 8), 2, 5), 'stack(W("e.{expert}.up", fp32[6, 8]), 2, 5)'),
    (Slice(stored("qkv", 9, 8), 3, 6), 'slice(W("qkv", fp32[9, 8]), 3, 6)'),
    (Slice(stored("up", 6, 16), 1, 16, 1, 2), 'slice(W("up", fp32[6, 16]), 1, 16, dim=1, step=2)'),
    (equal_slices(1, 2, 3, 3), 'slices(W("qkv", fp32[9, 8]), 1, 2, 3, 3)'),
    (equal_slices(0, 2, 2, 4), 'slices(W("qkv", fp32[9, 8]), 0, 2, 2, 4)'),
    (equal_slices(2, 4, 3, 4, dim=1, rows=6, columns=13), 'slices(W("qkv", fp32[6, 13]), 2, 4, 3, 4, dim=1)'),
    (equal_slices(0, 1, 4, 2), 'cat([slice(W("qkv", fp32[9, 8]), 0, 1), slice(W("qkv", fp32[9, 8]), 4, 5)])'),
    (
        Cat((*equal_slices(0, 1, 2, 2).parts, Slice(stored("qkv", 9, 8), 5, 6))),
        "cat([" + ", ".join(f'slice(W("qkv", fp32[9, 8]), {n}, {n + 1})' for n in (0, 2, 5)) + "])",
    ),
    (Transpose(stored("up", 8, 6)), 'transpose(W("up", fp32[8, 6]))'),
    (Shift(stored("up", 6, 8), 1.5), 'shift(W("up", fp32[6, 8]), 1.5)'),
    (Apply(stored("up", 6, 8), "abs", 1.5), 'apply(W("up", fp32[6, 8]), "abs", factor=1.5)'),
    (Dequantize(stored("up", 6, 8, fmt="int4z")), 'dequantize(W("up", fp32[6, 8], fmt="int4z"))'),
    (Shuffle(stored("up", 6, 8), "onednn"), 'shuffle(W("up", fp32[6, 8]), "onednn")'),
    (Cat((stored("a", 6, 3), stored("b", 6, 5)), 1), 'cat([W("a", fp32[6, 3]), W("b", fp32[6, 5])], dim=1)'),
    (
        Stack(Cat((Transpose(stored("{expert}.a", 8, 2)), Slice(stored("{expert}.b", 9, 8), 0, 3))), 0, 4),
        'stack(cat([transpose(W("{expert}.a", fp32[8, 2])), slice(W("{expert}.b", fp32[9, 8]), 0, 3)]), 0, 4)',
    ),
]


@pytest.mark.parametrize(("recipe", "text"), RECIPES, ids=[text for _, text in RECIPES])
def test_a_recipe_is_shown_and_read_back(recipe: Recipe, text: str):
    graph = Graph()
    program = graph.program("body")
    x, ends = program.input("x", Type("fp32", ("T", 8))), program.input("ends", Type("i64", (recipe.type.shape[0],)))
    is_stack = len(recipe.type.shape) == 3
    program.output(program.call(ops.grouped_linear if is_stack else ops.linear, x, recipe, *[ends] * is_stack))
    shown = show(graph)
    assert f"(x, {text}" in shown
    assert show(parse(shown)) == shown
    assert parse(shown).recipes() == [recipe]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Cat(()), "cat takes a list of at least one tensor"),
        (lambda: Slice(stored("w", 4, 8), 0, 0), "slice: 0 to 0 is no range of the 4 in dim 0"),
        (lambda: Slice(stored("w", 4, 8), 0, 9, 1), "slice: 0 to 9 is no range of the 8 in dim 1"),
        (lambda: Stack(stored("w", 4, 8), 2, 2), "stack: 2 to 2 is no range of experts"),
        (lambda: Transpose(stored("w", 4)), r"transpose: fp32\[4\] has no two dims to swap"),
        (lambda: Dequantize(stored("w", 4, 8)), "dequantize takes a stored tensor with a format"),
        (
            lambda: Cat((FP8, stored("b", 1, 200))),
            r'^cat: w and b are stored in different formats, fp32\[300, 200, "fp8\[128, 128\]"\] and fp32\[1, 200\]$',
        ),
        (lambda: Transpose(MXFP4, -3), "has blocks in its last dims"),
        (lambda: KV("0", Type("bf16", (2, 1, 4), "fp8")), "0: a cache is stored plain, not as fp8"),
        (lambda: KV("0", Type("bf16", (8,)), 4, 4), "0: only entries of single tokens have a window"),
        (lambda: KV("0", Type("bf16", (8,)), every=12).block(8), "8 tokens is neither a multiple nor a divisor of 12"),
        (lambda: RopeFreqs(4, 1e4, "yarn", 2.0), "kind yarn needs an original_max_position from 1, not None"),
    ],
)
def test_a_recipe_of_no_tensor_is_refused_when_it_is_made(make: Callable[[], Recipe], reason: str):
    with pytest.raises(ValueError, match=reason):
        make()


# narrow


def tensors_of(recipe: Recipe) -> dict[str, Tensor]:
    """A tensor for each name, element by element: a thousand times its place in the order of names, and a count."""
    return {
        leaf.name: (1000 * place + torch.arange(leaf.type.num_elements, dtype=torch.float32)).view(leaf.type.shape)
        for place, leaf in enumerate(leaves(recipe))
    }


def ranges(size: int) -> Iterator[tuple[int, int]]:
    return ((start, stop) for start in range(size) for stop in range(start + 1, size + 1))


WIDE = stored("wide", 4, 12)
EXPERTS = stored("experts", 3, 4, 10)
NARROWED: dict[str, Recipe] = {
    "a tensor": WIDE,
    "rows of two tensors": Cat((stored("a", 3, 4), stored("b", 5, 4), stored("c", 1, 4))),
    "columns of two tensors": Cat((stored("a", 4, 2), stored("b", 4, 5)), 1),
    "rows of joined columns": Cat((Cat((stored("a", 4, 2), stored("b", 4, 3)), 1), stored("c", 2, 5))),
    "a slice": Slice(WIDE, 3, 9, 1),
    "every second column": Slice(WIDE, 1, 12, 1, 2),
    "every third column": Slice(WIDE, 1, 12, 1, 3),
    "in turns": Cat((Slice(EXPERTS, 0, 10, 2, 2), Slice(EXPERTS, 1, 10, 2, 2)), 2),
    "every second of a slice": Slice(Slice(WIDE, 2, 11, 1), 1, 9, 1, 2),
    "transposed": Transpose(stored("a", 3, 5)),
    "transposed experts": Transpose(EXPERTS),
    "transposed and joined": Cat((Transpose(stored("a", 3, 5)), stored("b", 2, 3))),
    "shifted": Cat((Shift(stored("a", 3, 4), 0.5), Shift(Slice(WIDE, 2, 6, 1), 0.25))),
    "functions of elements": Cat((Apply(stored("a", 3, 4), "abs"), Apply(Slice(WIDE, 2, 6, 1), "scale"))),
    "experts": Stack(stored("e.{expert}", 3, 4), 1, 5),
    "experts of two tensors": Stack(Cat((stored("{expert}.gate", 2, 4), stored("{expert}.up", 2, 4))), 0, 3),
    "experts, transposed": Stack(Transpose(stored("e.{expert}", 4, 3)), 0, 3),
    "experts, in turns": Stack(
        Cat((Slice(stored("e.{expert}", 6, 3), 0, 6, 0, 2), Slice(stored("e.{expert}", 6, 3), 1, 6, 0, 2))), 0, 3
    ),
    "experts, stored as one, transposed and in turns": Cat(
        (Slice(Transpose(EXPERTS), 0, 10, 1, 2), Slice(Transpose(EXPERTS), 1, 10, 1, 2)), 1
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("recipe", NARROWED.values(), ids=NARROWED)
def test_a_narrowed_recipe_is_a_range_of_the_tensor_and_reads_nothing_else(recipe: Recipe):
    checkpoint = Memory(tensors_of(recipe))
    names = list(dict.fromkeys(leaf.name for leaf in leaves(recipe)))
    place = {name: int(value.flatten()[0]) // 1000 for name, value in checkpoint.values.items()}
    whole = evaluate(recipe, checkpoint)
    assert checkpoint.was_read == set(names)
    assert tuple(whole.shape) == recipe.type.shape
    for dim, size in enumerate(whole.shape):
        for start, stop in ranges(size):
            part = narrow(recipe, start, stop, dim)
            expected = whole.narrow(dim, start, stop - start)
            assert part.type == Type("fp32", tuple(expected.shape))
            assert torch.equal(evaluate(part, checkpoint), expected)
            needed = {int(value) // 1000 for value in expected.flatten()}
            assert {place[name] for name in checkpoint.was_read} == needed
            assert checkpoint.was_read == {leaf.name for leaf in leaves(part)}


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("scale", [-6.0, 1.0]),
        ("square", [36.0, 1.0]),
        ("abs", [6.0, 1.0]),
        ("rest_of_abs", [-5.0, 0.0]),
        ("sigmoid", [0.00247262316, 0.73105857863]),  # 1 / (1 + e^6), 1 / (1 + 1/e)
        ("rest_of_sigmoid", [0.99999694306, 0.68231470350]),  # the root of 1 less the square of that
    ],
)
def test_a_function_is_of_each_element_times_a_number(function: str, expected: list[float]):
    recipe = Apply(W("a", Type("fp32", (2,))), function, 0.5)
    checkpoint = Memory({"a": torch.tensor([-12.0, 2.0])})
    assert evaluate(recipe, checkpoint).tolist() == pytest.approx(expected, rel=1e-6)
    with pytest.raises(ValueError, match="apply: there is no function 'root'; functions: scale, square"):
        Apply(recipe.part, "root")


def test_learned_frequencies_are_times_e_to_the_power_of_what_is_stored():
    """As the rotary embedding of Mistral Large 4 has them in transformers 5.24."""
    parameters = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, "original_max_position_embeddings": 16}
    config = MistralLarge4TextConfig(qk_rope_head_dim=8, rope_parameters=parameters)
    rotary = MistralLarge4TextRotaryEmbedding(config)
    rotary.alpha.data = torch.tensor([-1.5, 0.0, 0.25, 2.0])
    freqs = RopeFreqs(8, 100.0, "yarn", 8.0, 16)
    made = evaluate(LearnedFreqs(W("alpha", Type("fp32", (4,))), freqs), Memory({"alpha": rotary.alpha.data}))
    cos, _ = rotary(torch.zeros(1), torch.arange(50)[None])
    expected = (torch.arange(50)[:, None] * made).cos() * rotary.attention_scaling
    assert torch.allclose(expected, cos[0, :, :4], atol=1e-6)
    call = 'rotary(positions, learned_freqs(W("alpha", fp32[2]), rope_freqs(4, 100.0)))'
    shown = show(parse(f"def body(positions: i64[T]):\n    cos, sin = {call}\n    return cos, sin\n"))
    assert call in shown and show(parse(shown)) == shown
    with pytest.raises(ValueError, match=r"learned_freqs: fp32\[3\] of frequencies fp32\[4\]"):
        LearnedFreqs(W("alpha", Type("fp32", (3,))), freqs)


def test_a_range_of_a_range_counts_from_its_beginning():
    rows, expert = W("rows", Type("fp32", (12, 4))), W("{expert}.up", Type("fp32", (2, 4)))
    assert narrow(Slice(rows, 3, 9), 1, 4) == Slice(rows, 4, 7)
    assert narrow(Slice(rows, 1, 11, 0, 2), 1, 3) == Slice(rows, 3, 7, 0, 2)  # rows 1, 3, 5, 7, 9, of which 3 and 5
    assert narrow(Stack(expert, 2, 6), 1, 3) == Stack(expert, 3, 5)


def test_narrowing_twice_is_narrowing_once():
    for recipe in NARROWED.values():
        for dim, size in enumerate(recipe.type.shape):
            for start, stop in ranges(int(size)):
                if (start, stop) != (0, size):
                    once = narrow(recipe, start, stop, dim)
                    assert narrow(once, 0, 1, dim) == narrow(recipe, start, start + 1, dim)
                    assert narrow(once, 0, stop - start, dim) is once


@pytest.mark.parametrize("interleaved", [False, True])
def test_what_is_unpacked_can_be_narrowed_too(interleaved: bool):
    whole: Recipe = Dequantize(stored("w", 3, 4, 64, fmt="mxfp4"))
    if interleaved:
        whole = Cat((Slice(whole, 0, 4, 1, 2), Slice(whole, 1, 4, 1, 2)), 1)
    torch.manual_seed(0)
    blocks, scales = torch.randint(0, 256, (3, 4, 2, 16)), torch.randint(120, 130, (3, 4, 2))
    checkpoint = Memory({"w_blocks": blocks.to(torch.uint8), "w_scales": scales.to(torch.uint8)})
    values = evaluate(whole, checkpoint)
    for dim, edges in ((0, (0, 1, 3)), (1, (0, 1, 3, 4)), (2, (0, 5, 32, 64))):
        for start, stop in itertools.combinations(edges, 2):
            part = narrow(whole, start, stop, dim)
            assert torch.equal(evaluate(part, checkpoint), values.narrow(dim, start, stop - start))


def test_narrowing_goes_below_a_kernels_layout():
    assert narrow(Shuffle(WIDE, "onednn"), 1, 3) == Shuffle(Slice(WIDE, 1, 3), "onednn")


# cat


def test_neighbouring_slices_are_the_whole():
    rows = (Slice(WIDE, 0, 1), Slice(WIDE, 1, 3), Slice(WIDE, 3, 4))
    assert cat(rows) == WIDE
    assert cat((Slice(WIDE, 0, 5, 1), Slice(WIDE, 5, 12, 1)), 1) == WIDE
    assert cat((WIDE,)) is WIDE
    turned = Transpose(WIDE)
    assert cat((narrow(turned, 0, 5), narrow(turned, 5, 12))) == Cat(
        (Transpose(Slice(WIDE, 0, 5, 1)), Transpose(Slice(WIDE, 5, 12, 1)))
    )


@pytest.mark.parametrize(
    "parts",
    [
        (Slice(WIDE, 0, 1), Slice(WIDE, 1, 3)),  # the last row is missing
        (Slice(WIDE, 1, 3), Slice(WIDE, 3, 4)),  # the first
        (Slice(WIDE, 0, 2), Slice(WIDE, 3, 4)),  # one between
        (Slice(WIDE, 2, 4), Slice(WIDE, 0, 2)),  # in another order
        (Slice(WIDE, 0, 2), Slice(WIDE, 0, 2), Slice(WIDE, 2, 4)),  # one twice
        (Slice(WIDE, 0, 2), Slice(stored("other", 4, 12), 2, 4)),
        (Slice(WIDE, 0, 2), stored("other", 2, 12)),
        (Slice(WIDE, 0, 3, 0, 2), Slice(WIDE, 3, 4, 0, 2)),
    ],
)
def test_other_parts_stay_joined(parts: tuple[Recipe, ...]):
    checkpoint = Memory(tensors_of(Cat(parts)))
    assert cat(parts) == Cat(parts)
    assert torch.equal(evaluate(cat(parts), checkpoint), torch.cat([evaluate(part, checkpoint) for part in parts]))


# formats


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (stored("w", 300, 200), {"fp32": 300 * 200 * 4}),
        (W("w", Type("bf16", (300, 200))), {"bf16": 300 * 200 * 2}),
        (FP8, {"fp8[128, 128]": FP8_BYTES}),
        (Shuffle(Transpose(FP8), "onednn"), {"fp8[128, 128]": FP8_BYTES}),
        (Cat((FP8, stored("b", 100, 200, fmt="fp8[128, 128]"))), {"fp8[128, 128]": FP8_BYTES + 100 * 200 + 2 * 4}),
        (Cat((Dequantize(FP8), stored("b", 1, 200))), {"fp8[128, 128]": 300 * 200 * 4, "fp32": 200 * 4}),
        (Stack(stored("{expert}", 300, 200, fmt="fp8[128, 128]"), 3, 8), {"fp8[128, 128]": 5 * FP8_BYTES}),
        (Slice(FP8, 0, 150), {"fp8[128, 128]": 150 * 200 + 2 * 2 * 4}),
        (Transpose(stored("w", 300, 200, fmt="fp8[1, *]")), {"fp8[1, *]": 300 * 200 + 300 * 4}),
        (Slice(FP8, 0, 300, 0, 3), {"fp8[128, 128]": FP8_BYTES // 3}),
        (MXFP4, {"mxfp4": 4 * 96 * 2 * 17}),
        (Dequantize(MXFP4), {"mxfp4": 4 * 96 * 64 * 4}),
        (Slice(Dequantize(MXFP4), 0, 96, 1, 2), {"mxfp4": 4 * 48 * 64 * 4}),
        (RopeFreqs(64, 1e4), {"fp32": 32 * 4}),
    ],
    ids=str,
)
def test_bytes_in_memory_by_format(recipe: Recipe, expected: dict[str, int]):
    assert held_by_format(recipe) == expected
    assert held_bytes(recipe) == sum(expected.values())


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (Shuffle(Cat((Transpose(FP8), Transpose(Slice(FP8, 0, 2))), 1), "onednn"), 'fp32[200, 302, "fp8[128, 128]"]'),
        (Stack(stored("e.{expert}", 2, 2, fmt="fp8"), 3, 8), 'fp32[5, 2, 2, "fp8"]'),
        (Transpose(MXFP4), 'fp32[4, 64, 96, "mxfp4[32, 1]"]'),
        (Transpose(Transpose(MXFP4)), 'fp32[4, 96, 64, "mxfp4"]'),
        (Transpose(stored("w", 8, 6, fmt="int8")), 'fp32[6, 8, "int8[*, 1]"]'),
        (Dequantize(Cat((MXFP4, Slice(MXFP4, 0, 32, 2)), 2)), "fp32[4, 96, 96]"),
    ],
    ids=str,
)
def test_the_type_of_a_recipe_has_its_format(recipe: Recipe, expected: str):
    assert str(recipe.type) == expected


def mxfp4(scales: Tensor) -> Memory:
    """A row of all 256 bytes for each scale, in 16 blocks."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(len(scales), 1, 1)
    return Memory({"w_blocks": blocks.unsqueeze(0), "w_scales": scales.view(1, -1, 1).expand(1, -1, 16).contiguous()})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_is_unpacked_as_transformers_does(dtype: torch.dtype):
    """Every byte under every scale but 255, which is no number: 2 ** -127 to 2 ** 127, and both zeros."""
    checkpoint = mxfp4(torch.arange(255, dtype=torch.uint8))
    name = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    ours = evaluate(Dequantize(W("w", Type(name, (1, 255, 512), "mxfp4"))), checkpoint)
    theirs = convert_moe_packed_tensors(*checkpoint.values.values(), dtype=dtype).mT
    assert torch.equal(ours, theirs)
    assert torch.equal(ours.signbit(), theirs.signbit()) and (ours.signbit() & (ours == 0)).any()
    assert ours[0, 0, 1 * 32 + 2] != 0, "the smallest numbers are not lost"
    assert ours[0, 254].isinf().any() and ours[0, 253].abs().max() == 6 * 2.0**126


def test_a_block_has_the_entries_of_its_tokens_or_one_of_more_tokens():
    entry = Type("bf16", (8,))
    assert KV("0", entry).block(16).shape == (16, 8)
    assert KV("0", entry, every=4).block(16).shape == (4, 8)
    assert KV("0", entry, every=128).block(16).shape == (1, 8)
    assert [KV("0", entry, every=every).stride(16) for every in (4, 16, 128)] == [1, 1, 8]
