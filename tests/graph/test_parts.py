"""The parts of packed weights, as recipes: their tensors, and that slices commute with them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph.test_recipes import Memory, evaluate
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from atom.errors import UnsupportedError
from atom.graph import TORCH_DTYPES, Cat, Dequantize, Recipe, Regroup, Repack, Shift, Slice, Stack, Transpose, Type, W
from atom.graph.parts import has_parts, parts_of, stored_tensors
from atom.graph.recipe_ranges import narrow
from atom.graph.recipes import Share, leaves


def packed(name: str, *shape: int) -> W:
    return W(name, Type("fp32", shape, "mxfp4"))


UP, EXPERTS = packed("up", 3, 96), packed("experts", 2, 4, 64)
UP_PARTS = {"values": W("up_blocks", Type("u8", (3, 3, 16))), "scales": W("up_scales", Type("u8", (3, 3)))}


def test_the_parts_of_a_stored_tensor_hold_its_bytes():
    assert parts_of(UP) == UP_PARTS
    assert sum(part.type.num_bytes for part in UP_PARTS.values()) == UP.type.num_bytes == 3 * 96 * 17 // 32
    plain = W("up", Type("fp32", (3, 96)))
    assert parts_of(plain) == {"values": plain}


def test_what_is_made_of_tensors_is_made_of_their_parts():
    values, scales = UP_PARTS.values()
    assert parts_of(Cat((Slice(UP, 0, 3, 0, 2), UP))) == {
        "values": Cat((Slice(values, 0, 3, 0, 2), values)),
        "scales": Cat((Slice(scales, 0, 3, 0, 2), scales)),
    }
    assert parts_of(Slice(Transpose(UP), 32, 96)) == {
        "values": Slice(Transpose(values, -3), 1, 3),
        "scales": Slice(Transpose(scales), 1, 3),
    }
    (blocks, _) = parts_of(Stack(packed("e.{expert}", 3, 96), 2, 4)).values()
    assert blocks == Stack(W("e.{expert}_blocks", Type("u8", (3, 3, 16))), 2, 4)


def test_parts_are_computed_once_and_those_of_a_share_leave_those_of_its_whole():
    whole = W("up", Type("bf16", (256, 384), "fp8[128, 128]"))
    parts = parts_of(whole)
    shared = parts_of(Share(whole, "tensor", 2))
    assert parts_of(whole) is parts
    assert parts == {
        "values": W("up", Type("fp8_e4m3", (256, 384))),
        "scales": W("up_scale_inv", Type("fp32", (2, 3))),
    }
    assert shared == {name: Share(part, "tensor", 2) for name, part in parts.items()}
    assert parts_of(W("up", Type("bf16", (256, 384), "fp8[128, 128]"))) == parts, "an equal recipe has equal ones"


def test_a_slice_to_the_end_has_the_scale_of_a_last_block_that_is_not_full():
    weight = W("w", Type("bf16", (576, 320), "fp8[128, 128]"))
    values, scales = W("w", Type("fp8_e4m3", (576, 320))), W("w_scale_inv", Type("fp32", (5, 3)))
    assert parts_of(weight) == {"values": values, "scales": scales}
    assert parts_of(narrow(weight, 512, 576)) == {"values": Slice(values, 512, 576), "scales": Slice(scales, 4, 5)}
    assert parts_of(narrow(weight, 128, 576)) == {"values": Slice(values, 128, 576), "scales": Slice(scales, 1, 5)}
    assert parts_of(narrow(weight, 256, 320, 1)) == {
        "values": Slice(values, 256, 320, 1),
        "scales": Slice(scales, 2, 3, 1),
    }


def test_smaller_blocks_have_the_scale_of_the_one_that_they_were_part_of():
    scales = W("w_scale_inv", Type("fp32", (3, 2)))  # of 320 rows and 256 columns
    made = Regroup(W("w", Type("bf16", (320, 256), "fp8[128, 128]")), "fp8[64, 128]")
    assert parts_of(made)["scales"].type == Type("fp32", (5, 2))
    stored = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    made_scales = evaluate(parts_of(made)["scales"], Memory({scales.name: stored}))
    assert made_scales.tolist() == [[1, 2], [1, 2], [3, 4], [3, 4], [5, 6]]


MADE: dict[str, Recipe] = {
    "a tensor": UP,
    "rows of two tensors": Cat((UP, packed("gate", 2, 96))),
    "columns of two tensors": Cat((UP, packed("gate", 3, 32)), 1),
    "rows": Slice(UP, 1, 3),
    "every second row": Slice(UP, 0, 3, 0, 2),
    "columns": Slice(UP, 32, 96, 1),
    "transposed": Transpose(UP),
    "rows of a transposed": Slice(Transpose(UP), 32, 96),
    "transposed twice and joined": Cat((Transpose(Transpose(UP)), packed("gate", 1, 96))),
    "experts": Stack(Cat((packed("{expert}.gate", 2, 64), packed("{expert}.up", 2, 64))), 1, 4),
    "experts, stored as one and in turns": Cat((Slice(EXPERTS, 0, 4, 1, 2), Slice(EXPERTS, 1, 4, 1, 2)), 1),
}


def stored(recipe: Recipe) -> tuple[Memory, Callable[[W], Tensor]]:
    """What a checkpoint holds for a recipe, drawn at random, and each of its tensors as transformers unpacks it."""
    torch.manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for leaf in leaves(recipe):
        *others, columns = (int(dim) for dim in leaf.type.shape)
        tensors[f"{leaf.name}_blocks"] = torch.randint(0, 256, (*others, columns // 32, 16), dtype=torch.uint8)
        tensors[f"{leaf.name}_scales"] = torch.randint(120, 130, (*others, columns // 32), dtype=torch.uint8)

    def plain(leaf: W) -> Tensor:
        blocks, scales = (tensors[f"{leaf.name}_{part}"] for part in ("blocks", "scales"))
        experts = blocks.reshape(-1, *blocks.shape[-3:]), scales.reshape(-1, *scales.shape[-2:])
        unpacked: Tensor = convert_moe_packed_tensors(*experts, dtype=torch.float32)
        return unpacked.mT.reshape([int(dim) for dim in leaf.type.shape])

    return Memory(tensors), plain


def compute(recipe: Recipe, plain: Callable[[W], Tensor]) -> Tensor:
    """A recipe of tensors that are unpacked first."""
    match recipe:
        case W():
            return plain(recipe)
        case Cat(parts, dim):
            return torch.cat([compute(part, plain) for part in parts], dim)
        case Stack(_, start, stop):
            return torch.stack([compute(recipe.of(expert), plain) for expert in range(start, stop)])
        case Slice(part, start, stop, dim, step):
            return compute(part, plain).transpose(0, dim)[start:stop:step].transpose(0, dim)
        case Transpose(part):
            return compute(part, plain).mT
    raise AssertionError(recipe)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("recipe", MADE.values(), ids=MADE)
def test_slices_at_all_offsets_are_those_of_what_is_unpacked(recipe: Recipe):
    checkpoint, plain = stored(recipe)
    expected = compute(recipe, plain)
    assert torch.equal(evaluate(Dequantize(recipe), checkpoint), expected)
    assert checkpoint.was_read == set(checkpoint.tensors) == {leaf.name for leaf in stored_tensors(recipe)}
    blocks = [1] * len(expected.shape)
    blocks[{"mxfp4": -1, "mxfp4[32, 1]": -2}[str(recipe.type.fmt)]] = 32
    for dim, size in enumerate(expected.shape):
        for start, stop in itertools.combinations(range(size + 1), 2):
            if (start, stop) == (0, size):
                continue
            part = narrow(Dequantize(recipe), start, stop, dim)
            if start % blocks[dim] or stop % blocks[dim]:
                if start % 13 or stop % 17:  # what is cut is read whole first: some of it will do
                    continue
            else:
                assert part == Dequantize(narrow(recipe, start, stop, dim))
                edges = start // blocks[dim], stop // blocks[dim]
                narrowed = {name: narrow(each, *edges, dim) for name, each in parts_of(recipe).items()}
                assert parts_of(narrow(recipe, start, stop, dim)) == narrowed
            assert torch.equal(evaluate(part, checkpoint), expected.narrow(dim, start, stop - start))


OTHERS = ("fp8[16, 32]", "fp8[1, *]", "ct_fp8[*, *]", "ct_int8[1, *]", "ct_packed_int8[1, *]", "ct_packed_int4[1, 8]", "ct_packed_int4z[1, 8]",
          "awq_int4[1, 32]", "gptq_int4[1, 8]", "gptq_v2_int8[1, *]", "gptq_int4_ordered[1, 8]", "ct_packed_int4z_ordered[1, 8]",
          "ct_mxfp4", "quark_mxfp4", "ds_mxfp4", "ds_fp8[16, 32]", "ct_nvfp4", "modelopt_nvfp4")  # fmt: skip


@pytest.mark.sampled(36)
@pytest.mark.parametrize("fmt", OTHERS)
@pytest.mark.parametrize(
    "make",
    [
        lambda w: w("up"),
        lambda w: Cat((w("gate"), w("up"))),
        lambda w: Cat((w("gate"), Slice(w("up"), 16, 40))),
        lambda w: Slice(w("up"), 0, 40, 0, 2),
        lambda w: Transpose(w("up")),
        lambda w: Stack(Cat((w("{expert}.gate"), w("{expert}.up"))), 1, 3),
    ],
    ids=["a tensor", "two", "rows of another", "every second row", "transposed", "experts"],
)
def test_slices_of_every_format_are_those_of_what_is_unpacked(fmt: str, make: Callable[[Any], Recipe]):
    recipe, generator = make(weight_of(fmt)), torch.Generator().manual_seed(0)
    if isinstance(recipe, Transpose) and "ordered" in fmt:
        return  # refused by name, below
    tensors: dict[str, Tensor] = {}
    for leaf in stored_tensors(recipe):
        shape, dtype = [int(dim) for dim in leaf.type.shape], TORCH_DTYPES[leaf.type.dtype]
        if dtype.is_floating_point:
            tensors[leaf.name] = torch.randn(shape, generator=generator).to(dtype)
        elif leaf.name.endswith("g_idx"):
            tensors[leaf.name] = torch.randint(0, 8, shape, generator=generator, dtype=dtype)
        else:
            low, high = (100, 140) if leaf.type.dtype == "u8" else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
            tensors[leaf.name] = torch.randint(low, high, shape, generator=generator, dtype=dtype)
    checkpoint = Memory(tensors)
    plain = {leaf: evaluate(Dequantize(leaf), checkpoint) for leaf in leaves(recipe)}
    expected = compute(recipe, plain.__getitem__)
    assert expected.isfinite().all()
    assert torch.equal(evaluate(Dequantize(recipe), checkpoint), expected)
    for dim, size in enumerate(expected.shape):
        for start, stop in itertools.islice(itertools.combinations(range(0, size + 1, 2), 2), 0, None, 7):
            part = narrow(Dequantize(recipe), start, stop, dim)
            assert torch.equal(evaluate(part, checkpoint), expected.narrow(dim, start, stop - start)), (
                dim,
                start,
                stop,
            )


@pytest.mark.parametrize(
    ("words", "stored", "rows", "expected"),
    [
        ("columns", (40, 8), (3, 8), Slice(W("w", Type("i32", (40, 8))), 3, 8)),
        ("awq", (64, 5), (8, 24), Slice(W("w", Type("i32", (64, 5))), 1, 3, 1)),
        ("awq", (64, 5), (4, 24), None),
        ("gptq", (8, 40), (3, 8), Slice(W("w", Type("i32", (8, 40))), 3, 8, 1)),
    ],
)
def test_rows_of_repacked_values_are_of_those_words_only(
    words: str, stored: tuple[int, ...], rows: tuple[int, int], expected: Recipe | None
):
    whole = Repack(W("w", Type("i32", stored)), words, 4, Type("u8", (40, 2, 16)))
    part = narrow(whole, *rows)
    assert (
        part == Slice(whole, *rows)
        if expected is None
        else Repack(expected, words, 4, Type("u8", (rows[1] - rows[0], 2, 16)))
    )


def test_zero_points_are_cut_between_words_only():
    whole = Repack(W("z", Type("i32", (5, 8))), "rows", 4, Type("u8", (40, 8)))
    assert narrow(whole, 8, 40) == Repack(Slice(whole.part, 1, 5), "rows", 4, Type("u8", (32, 8)))
    assert narrow(whole, 3, 40) == Slice(whole, 3, 40)


def weight_of(fmt: str) -> Callable[[str], W]:
    return lambda name: W(f"{name}.weight", Type("fp32", (40, 64), fmt))


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        (Slice(UP, 5, 64, 1), r'slice: 5 to 64 of dim 1 cuts the blocks of fp32\[3, 96, "mxfp4"\]'),
        (Slice(UP, 0, 33, 1), "slice: 0 to 33 of dim 1 cuts"),
        (Slice(UP, 0, 96, 1, 2), "slice: 0 to 96 of dim 1 cuts"),
        (Slice(Transpose(UP), 32, 60), r'slice: 32 to 60 of dim 0 cuts the blocks of fp32\[96, 3, "mxfp4\[32, 1\]"\]'),
        (Transpose(W("w", Type("fp32", (8, 64), "gptq_int4_ordered[1, 8]"))), "transpose: the columns of a block of"),
        (Cat((W("w", Type("fp32", (8, 64), "ct_nvfp4")),) * 2, 1), "cat: each tensor of .* has one divisor"),
        (Cat((W("w", Type("fp32", (8, 64), "gptq_int4_ordered[1, 8]")),) * 2), "cat: each tensor of .* has an order"),
        (Cat((W("w", Type("fp32", (8, 64), "ct_fp8[*, *]")),) * 2), "cat: .* ends within a block along dim 0"),
        (Shift(UP, 1.0), r"a weight stored as mxfp4 cannot be read as shift\(…\)"),
        (W("w", Type("fp32", (4, 8), "int4z")), "the tensors of a weight stored as int4z are not supported"),
    ],
    ids=str,
)
def test_what_has_no_parts_is_refused_by_name(recipe: Recipe, reason: str):
    with pytest.raises(UnsupportedError, match=f"^{reason}"):
        parts_of(recipe)


def test_which_formats_have_parts():
    assert has_parts(Stack(Transpose(packed("e.{expert}", 3, 32)), 0, 2))
    assert not any(
        map(has_parts, (Dequantize(UP), W("w", Type("fp32", (4, 8))), W("w", Type("fp32", (4, 8), "int4z"))))
    )
