from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from atom.errors import CheckpointError, UnsupportedError
from atom.graph import Cat, Full, RopeFreqs, Share, Slice, Type, W
from atom.weights.incremental import load_incremental

Q, K, UP = (W(name, Type("fp32", (rows, 4))) for name, rows in (("q", 6), ("k", 2), ("up", 8)))
STORED = {"q": torch.arange(24.0).view(6, 4), "k": -torch.arange(8.0).view(2, 4), "up": torch.rand(8, 4)}


def given(
    names: str, stored: dict[str, Tensor] = STORED, asked: list[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Tensors in one buffer that is used again, and the names of those that were asked for."""
    for name in names.split():
        if asked is not None:
            asked.append(name)
        buffer = stored[name].clone()
        yield name, buffer
        if buffer.is_floating_point():
            buffer.fill_(torch.nan)


def test_recipes_are_made_as_soon_as_their_tensors_are_there():
    asked: list[str] = []
    joined, part = Cat((Q, K)), Slice(UP, 2, 4)
    loads = load_incremental([joined, UP, part, RopeFreqs(4, 100.0)], given("q up k", asked=asked), {}, "cpu")
    made = [(recipe, tensor, list(asked)) for recipe, tensor in loads]
    assert [(recipe, seen) for recipe, _, seen in made] == [
        (RopeFreqs(4, 100.0), []), (UP, ["q", "up"]), (part, ["q", "up"]), (joined, ["q", "up", "k"]),
    ]  # fmt: skip
    tensors = {recipe: tensor for recipe, tensor, _ in made}
    assert torch.equal(tensors[joined], torch.cat((STORED["q"], STORED["k"])))
    assert torch.equal(tensors[UP], STORED["up"]) and torch.equal(tensors[part], STORED["up"][2:4])


def test_a_rank_makes_its_own_parts():
    shared, whole = Share(Q, "tensor", 2), Full(3, Type("fp32", (1,)))
    for rank in range(2):
        made = dict(load_incremental([shared, whole], given("q"), {}, "cpu", {"tensor": rank}))
        assert torch.equal(made[shared], STORED["q"][3 * rank : 3 * rank + 3]) and made[whole].tolist() == [3]


def test_a_stacked_tensor_arrives_as_its_parts():
    stacked = {"l.{layer}.up": ["l.{layer}.{expert}.up"]}
    parts = [W(f"l.0.{expert}.up", Type("fp32", (4, 4))) for expert in range(2)]
    made = dict(load_incremental(parts, given("l.0.up", {"l.0.up": torch.arange(32.0).view(2, 4, 4)}), stacked, "cpu"))
    assert [made[part][0, 0].item() for part in parts] == [0, 16]


@pytest.mark.parametrize(
    ("names", "stored", "message"),
    [
        ("q", STORED, r"the checkpoint has no tensor k; is it whole"),
        ("q k up", STORED, r"the model does not use tensor up; name it in model\.ignore"),
        ("q k", {**STORED, "k": torch.zeros(2, 5)}, r"tensor k is \[2, 5\], the model expects \[2, 4\]"),
    ],
)
def test_what_does_not_fit_is_one_line(names: str, stored: dict[str, Tensor], message: str):
    with pytest.raises(CheckpointError, match=f"^{message}"):
        list(load_incremental([Cat((Q, K))], given(names, stored), {}, "cpu"))
    assert len(dict(load_incremental([Q], given("q up"), {}, "cpu", ignore=["u*"]))) == 1


def test_a_dtype_that_no_text_has_is_refused():
    with pytest.raises(UnsupportedError, match=r"^tensor q is torch\.complex64"):
        list(load_incremental([Q], [("q", torch.zeros(6, 4, dtype=torch.complex64))], {}, "cpu"))
