from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from graph.ops.checked import checked
from torch._subclasses.fake_tensor import FakeTensorMode

from atom.errors import PassError
from atom.graph import Graph, Type, ops, parse, show


def test_pixels_are_normalized_by_channel():
    patches = torch.tensor([[0, 255, 100, 100, 30, 40]], dtype=torch.uint8)
    made = checked(ops.normalize_pixels, patches, mean=[127.5, 100.0, 30.0], std=[127.5, 50.0, 20.0], dtype="fp32")
    assert made.tolist() == [[-1.0, 1.0, 0.0, 0.0, 0.0, 0.5]]


def test_bodies_that_are_compiled_make_no_tensor_of_their_own():
    """A compiler traces them with tensors that have no numbers, which do not mix with such."""
    with FakeTensorMode():
        patches, places = torch.empty(4, 6, dtype=torch.uint8), torch.empty(4, 4, dtype=torch.int64)
        table, freqs = torch.empty(9, 5), torch.empty(4)
    made = ops.normalize_pixels.body(patches, mean=[1.0, 2.0], std=[3.0, 4.0], dtype="bf16")
    assert (made.shape, made.dtype) == ((4, 6), torch.bfloat16)
    for mode in ("bilinear", "bicubic"):
        assert ops.interpolate_table.body(table, places, side=3, mode=mode).shape == (4, 5)
    assert ops.rotary_sections.body(places, freqs, sections=[2, 2])[0].shape == (4, 4)


def test_a_patch_attends_its_segment():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 12, 2, 6).unbind()
    starts = torch.tensor([0, 5, 6, 12, 12, 12], dtype=torch.int32)
    whole = checked(ops.segment_attention, q, k, v, starts, scale=0.3)
    for first, last in ((0, 5), (5, 6), (6, 12)):
        own = (each[first:last].transpose(0, 1) for each in (q, k, v))
        expected = F.scaled_dot_product_attention(*own, scale=0.3).transpose(0, 1)
        assert torch.allclose(whole[first:last], expected, atol=1e-6)


@pytest.mark.parametrize(("mode", "aligned"), [("bilinear", True), ("bicubic", False)])
def test_a_table_is_interpolated_to_each_segment(mode: str, aligned: bool):
    torch.manual_seed(0)
    table, grids = torch.randn(16, 5), ((1, 1), (4, 4), (3, 7), (9, 2))
    places = torch.tensor([[y, x, h, w] for h, w in grids for y in range(h) for x in range(w)])
    image = table.view(1, 4, 4, 5).permute(0, 3, 1, 2)
    scaled = (F.interpolate(image, grid, mode=mode, align_corners=aligned) for grid in grids)
    expected = torch.cat([each[0].flatten(1).t() for each in scaled])
    assert torch.allclose(checked(ops.interpolate_table, table, places, side=4, mode=mode), expected, atol=1e-6)


def test_a_table_is_resampled_to_each_segment():
    torch.manual_seed(0)
    table, grids = torch.randn(36, 5), ((1, 1), (6, 6), (3, 11), (9, 2), (4, 5))
    places = torch.tensor([[y, x, h, w] for h, w in grids for y in range(h) for x in range(w)])
    image = table.view(1, 6, 6, 5).permute(0, 3, 1, 2)
    scaled = (F.interpolate(image, grid, mode="bilinear", antialias=True) for grid in grids)
    expected = torch.cat([each[0].flatten(1).t() for each in scaled])
    assert torch.allclose(checked(ops.resample_table, table, places, side=6), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("interleaved", "axes"), [(False, [0, 0, 0, 1, 1, 2, 2]), (True, [0, 1, 2, 0, 1, 2, 0])], ids=["apart", "in turns"]
)
def test_sections_of_frequencies_turn_by_their_own_position(interleaved: bool, axes: list[int]):
    positions = torch.tensor([[3, 5, 9, 100], [4, 4, 4, 100]])
    freqs = torch.tensor([1.0, 0.5, 0.25, 0.2, 0.1, 0.05, 0.01])
    cos, sin = checked(
        ops.rotary_sections, positions, freqs, sections=[3, 2, 2], interleaved=interleaved, scale=2.0
    )  # fmt: skip
    angles = torch.stack([positions[:, axis] * freq for axis, freq in zip(axes, freqs, strict=True)], 1)
    assert torch.allclose(cos, 2 * angles.cos()) and torch.allclose(sin, 2 * angles.sin())


def test_sections_may_share_frequencies():
    places, freqs = torch.tensor([[3, 5, 9, 9], [4, 0, 9, 9]]), torch.tensor([1.0, 0.5])
    cos, _ = checked(ops.rotary_sections, places, freqs, sections=[2, 2])
    assert torch.allclose(cos, torch.tensor([[3, 1.5, 5, 2.5], [4, 2, 0, 0]]).cos())
    cos, _ = checked(ops.rotary_sections, places, freqs, sections=[2, 2], interleaved=True, axes=[1, 0])
    assert torch.allclose(cos, torch.tensor([[5, 3, 2.5, 1.5], [0, 4, 0, 2]]).cos())


def test_rows_take_the_place_of_tokens():
    x, encoded = torch.zeros(3, 2), torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8]])
    rows = torch.tensor([1, -1, 0], dtype=torch.int32)
    assert checked(ops.place_rows, x, rows, encoded).tolist() == [[5, 6], [0, 0], [1, 2]]
    assert checked(ops.place_rows, x + 1, rows, encoded, part=1, adds=True).tolist() == [[8, 9], [1, 1], [4, 5]]


def test_rows_are_taken_in_any_order():
    x = torch.arange(6.0).view(3, 2)
    assert checked(ops.take_rows, x, torch.tensor([2, 0, 2, 1])).tolist() == [[4, 5], [0, 1], [4, 5], [2, 3]]


def test_neighbours_become_one_row_of_a_text():
    text = "def vision(patches: u8[4*M, 6]):\n    return patches\n"
    program = parse(text).program("vision")
    folded = program.call(ops.fold_rows, program.inputs[0], rows=4)
    assert folded.meta["type"] == Type("u8", ("M", 24)) and show(parse(text)) == text
    assert checked(ops.fold_rows, torch.arange(8).view(4, 2), rows=2).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert checked(ops.mean_rows, torch.arange(8.0).view(4, 2), rows=2).tolist() == [[1, 2], [5, 6]]


def test_a_position_is_that_of_a_column_plus_that_of_a_row():
    tables = torch.tensor([[[1.0], [2], [3]], [[10], [20], [30]]])
    places = torch.tensor([[0, 0, 2, 3], [1, 2, 2, 3]])
    assert checked(ops.axis_tables, tables, places).tolist() == [[11], [23]]


def test_a_part_beyond_the_encoded_rows_is_refused():
    body = Graph().program("body")
    x, rows, encoded = (
        body.input(name, type)
        for name, type in (
            ("x", Type("fp32", ("T", 8))),
            ("rows", Type("i32", ("T",))),
            ("encoded", Type("fp32", ("N", 16))),
        )
    )
    with pytest.raises(PassError, match="part 2 of"):
        body.call(ops.place_rows, x, rows, encoded, part=2)
