"""Tables that stay in host memory: the text before and after, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from passes.cases import context_of, run, text_of

from atom.errors import UnsupportedError
from atom.graph import Graph, parse
from atom.kernels import Target
from atom.passes.offload_tables import offload_tables

CONTEXT = replace(
    context_of(Target("cuda", frozenset({"nvidia", "sm_90"})), "triton", "reference"),
    cpu_offload_params=("embed", "layers.table"),
)

BEFORE = """\
def f(tokens: i64[T]):
    x = embedding(tokens, W("model.embed.weight", fp32[9, 4]))
    e = embedding(tokens, W("model.layers.table.weight", fp32[9, 4]))
    z = add(x, e)
    return z"""

AFTER = """\
def f(tokens: i64[T]):
    x = embedding(tokens, host(W("model.embed.weight", fp32[9, 4])))
    e = embedding(tokens, host(W("model.layers.table.weight", fp32[9, 4])))
    z = add(x, e)
    return z"""


def done(text: str, names: tuple[str, ...] = CONTEXT.cpu_offload_params) -> Graph:
    return offload_tables(parse(text), replace(CONTEXT, cpu_offload_params=names))


def test_tables_that_are_named_are_marked():
    graph = done(BEFORE)
    assert text_of(graph).strip() == AFTER
    assert graph.num_rewrites == 2
    assert text_of(parse(AFTER)).strip() == AFTER, "the text is read again"
    assert done(AFTER).num_rewrites == 0
    tokens = torch.tensor([3, 0, 8])
    assert torch.equal(run(BEFORE, tokens=tokens), run(AFTER, tokens=tokens))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (BEFORE, ()),
        (BEFORE, ("emb", "model.weight", "table.layers")),  # no whole parts of names in their order
        (BEFORE.replace("add(x, e)", 'linear(x, W("model.embed.weight", fp32[9, 4]))'), ("embed",)),  # the head's, too
        ('def f(x: fp32[T, 4]):\n    y = linear(x, W("embed", fp32[9, 4]))\n    return y', ("embed",)),
    ],
)
def test_it_declines(text: str, names: tuple[str, ...]):
    graph = done(text, names)
    assert text_of(graph) == text_of(parse(text))
    assert graph.num_rewrites == 0


def test_a_table_that_stays_packed_is_refused():
    text = BEFORE.replace("fp32[9, 4]", 'fp32[9, 32], fmt="q8_0"')
    with pytest.raises(UnsupportedError, match=r"cpu_offload_params: x looks up fp32\[9, 32.*, which stays packed"):
        done(text)
