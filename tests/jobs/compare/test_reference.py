"""Where the values of a text are found in transformers' model."""

from __future__ import annotations

import functools
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from atom.graph import parse
from atom.jobs.compare.reference import Calls, Place, group, hook, keep, places_of

TEXT = """\
def body(x: fp32[T, 4]):
    h = linear(x, W("a.weight", fp32[4, 4]))
    y = linear(h, W("a.weight", fp32[4, 4]))
    z = linear(y, W("b.weight", fp32[4, 4]), full(1.0, fp32[4]))
    return z
"""


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(self.a(x)))


def test_each_call_of_a_module_is_the_call_of_its_weight_in_that_order():
    places = places_of(parse(TEXT))
    assert {name: (place.module, place.part, place.call) for name, place in places.items()} == {
        "x": ("a", "input", 0),
        "h": ("a", "output", 0),
        "y": ("a", "output", 1),
    }, "the first place of a value counts, and z has a sum that b does not give"
    model, found, calls = Twice(), dict[str, Tensor](), Calls()
    with ExitStack() as hooks, torch.inference_mode():
        for place, names in group(places).items():
            hook(model, place, hooks, functools.partial(keep, found, names, place, calls))
        for x in torch.randn(2, 3, 4):
            found.clear()
            calls.clear()
            model(x)
            h = model.a.weight @ x.T
            expected = {"x": x, "h": h.T, "y": (model.a.weight @ h).T}
            assert found.keys() == expected.keys()
            assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in expected)
    assert group(places)[Place("a", "output", call=1)] == ["y"]
