from __future__ import annotations

import pytest
import torch
from passes.cases import random_weight, text_of

from atom.graph import Graph, interpret, ops, parse, verify
from atom.passes.sink_into_head import sink_into_head

BEFORE = """\
def body(x: fp32[T, 4], q: fp32[T, 1, 4], cos: fp32[T, 2], sin: fp32[T, 2]):
    k = rope(q, cos, sin)
    a = attention(q, k, k, KV("0", fp32[2, 1, 4]), scale=0.5)
    a_1 = merge_heads(a)
    x_1 = add(x, a_1)
    h = rms_norm(x_1, W("norm", fp32[4]), eps=1e-06)
    q_1 = split_heads(h, heads=1)
    a_2 = attention(q_1, k, k, KV("1", fp32[2, 1, 4]), scale=0.5)
    a_3 = merge_heads(a_2)
    o = linear(a_3, W("o", fp32[4, 4]))
    x_2 = add(x_1, o)
    hidden, x_3 = add_rms_norm(x_2, h, W("final", fp32[4]), eps=1e-06)
    return hidden

def head(hidden: fp32[R, 4]):
    logits = linear(hidden, W("head", fp32[7, 4]))
    return logits"""

AFTER = """\
def body(x: fp32[T, 4], q: fp32[T, 1, 4], cos: fp32[T, 2], sin: fp32[T, 2]):
    k = rope(q, cos, sin)
    a = attention(q, k, k, KV("0", fp32[2, 1, 4]), scale=0.5)
    a_1 = merge_heads(a)
    x_1 = add(x, a_1)
    h = rms_norm(x_1, W("norm", fp32[4]), eps=1e-06)
    q_1 = split_heads(h, heads=1)
    a_2 = attention(q_1, k, k, KV("1", fp32[2, 1, 4]), scale=0.5)
    return x_1, h, a_2

def head(x_1: fp32[R, 4], h: fp32[R, 4], a_2: fp32[R, 1, 4]):
    a_3 = merge_heads(a_2)
    o = linear(a_3, W("o", fp32[4, 4]))
    x_2 = add(x_1, o)
    hidden, x_3 = add_rms_norm(x_2, h, W("final", fp32[4]), eps=1e-06)
    logits = linear(hidden, W("head", fp32[7, 4]))
    return logits"""


def sink(text: str) -> Graph:
    graph = sink_into_head(parse(text))
    verify(graph, ops.SEMANTIC)
    return graph


def test_what_follows_the_last_attention_belongs_to_the_head():
    graph = sink(BEFORE)
    assert text_of(graph).strip() == AFTER
    assert graph.num_rewrites == 1


POOL = "\n\ndef pool(hidden: fp32[R, 4]):\n    return hidden"


def test_what_makes_embeddings_gets_a_copy_of_what_the_head_takes():
    body, head, pool = text_of(sink(BEFORE + POOL)).strip().split("\n\n")
    assert f"{body}\n\n{head}" == AFTER
    assert pool.splitlines()[1:-1] == head.splitlines()[1:-2] and pool.endswith("return hidden")


READ = "\n\ndef draft_in(aux_0: fp32[T, 4], aux_1: fp32[T, 4]):\n    aux = join(aux_0, aux_1)\n    return aux"
STATES = BEFORE.replace("return hidden", "return hidden, x, x_1") + READ


def test_what_a_draft_reads_of_each_token_stays_after_that():
    graph = sink(STATES)
    assert text_of(graph).strip() == AFTER.replace("return x_1, h, a_2", "return x_1, h, a_2, x, x_1") + READ
    assert graph.num_rewrites == 1
    after = STATES.replace("return hidden, x, x_1", "return hidden, x, x_2")  # which the last attention is part of
    body, head, _ = text_of(sink(after)).strip().split("\n\n")
    assert body.endswith("x_2 = add(x_1, o)\n    return h, x_2, x, x_2")
    assert head.splitlines()[1].strip().startswith("hidden, x_3 = add_rms_norm(x_2, h, ")


def test_a_model_that_drafts_is_a_body_and_a_head_too():
    rename = {"def body": "def draft", "def head": "def draft_head"}
    text, expected = BEFORE, AFTER
    for old, new in rename.items():
        text, expected = text.replace(old, new), expected.replace(old, new)
    assert text_of(sink(text)).strip() == expected
    carried = text.replace("hidden, x_3", "x_4, x_3").replace("return hidden", "return x_4")
    carried = carried.replace("sin: fp32[T, 2])", "sin: fp32[T, 2], hidden: fp32[T, 4])")
    graph = sink(carried)
    expected = expected.replace("hidden, x_3", "x_4, x_3").replace("linear(hidden", "linear(x_4")
    expected = expected.replace("sin: fp32[T, 2])", "sin: fp32[T, 2], hidden: fp32[T, 4])")
    expected = expected.replace("return logits", "return logits, x_4")
    assert text_of(graph).strip() == expected, "what it gives is what a further draft takes"
    assert text_of(sink_into_head(graph)).strip() == expected


def test_it_is_done_once():
    graph = sink(AFTER)
    assert text_of(graph).strip() == AFTER
    assert graph.num_rewrites == 0


CLASH = BEFORE.replace("x_1", "hidden").replace("hidden, x_3", "out, x_3").replace("return hidden", "return out")
CLASH = CLASH.replace("a_3", "logits")  # names that the head has for its own


@pytest.mark.parametrize("text", [BEFORE, CLASH])
def test_chosen_rows_have_the_logits_that_all_had(text: str):
    random = torch.Generator().manual_seed(0)
    shapes = {"x": (5, 4), "q": (5, 1, 4), "cos": (5, 2), "sin": (5, 2)}
    inputs = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
    rows = torch.tensor([1, 4])

    before, after = parse(text), sink(text)
    hidden = interpret(before, "body", inputs, random_weight)
    expected = interpret(before, "head", {"hidden": hidden}, random_weight)[rows]
    given = interpret(after, "body", inputs, random_weight)
    chosen = {node.name: each[rows] for node, each in zip(after.programs["head"].inputs, given, strict=True)}
    torch.testing.assert_close(interpret(after, "head", chosen, random_weight), expected)


def test_what_was_put_after_the_last_attention_later_is_sunk_too():
    text = AFTER.replace("    return x_1, h, a_2", "    x_2 = merge_heads(a_2)\n    return x_1, h, x_2")
    text = text.replace("a_2: fp32[R, 1, 4])", "a_2: fp32[R, 4])").replace(
        "a_3 = merge_heads(a_2)", "a_3 = add(a_2, h)"
    )
    graph = sink(text)
    assert [node.name for node in graph.programs["body"].results] == ["x_1", "h", "a_2"]
    assert graph.num_rewrites == 1


NO_ATTENTION = BEFORE.replace('attention(q, k, k, KV("0", fp32[2, 1, 4]), scale=0.5)', "rope(q, cos, sin)").replace(
    'attention(q_1, k, k, KV("1", fp32[2, 1, 4]), scale=0.5)', "rope(q_1, cos, sin)"
)
NOT_OF_A_TOKEN = BEFORE.replace("sin: fp32[T, 2])", "sin: fp32[T, 2], bias: fp32[4])").replace(
    'W("o", fp32[4, 4]))', 'W("o", fp32[4, 4]), bias)'
)
NO_HEAD = BEFORE.replace("def head", "def tail")
OTHER_HEAD = BEFORE.replace("def head(hidden: fp32[R, 4])", "def head(hidden: fp32[R, 8])").replace(
    'W("head", fp32[7, 4])', 'W("head", fp32[7, 8])'
)

SENT = BEFORE.replace("return hidden\n", 'x_4 = send(hidden, axis="pipeline", to=1)\n    return x_4\n').replace(
    'linear(hidden, W("head", fp32[7, 4]))', 'receive(hidden, axis="pipeline", source=1, columns=7, dtype="fp32")'
)  # the next stage needs each token's row
DRAFTS = f"{BEFORE}\n\ndef draft_in(hidden: fp32[T, 4]):\n    return hidden"  # of each token


@pytest.mark.parametrize("text", [NO_ATTENTION, NOT_OF_A_TOKEN, NO_HEAD, OTHER_HEAD, SENT, DRAFTS])
def test_it_declines(text: str):
    assert text != BEFORE
    graph = sink_into_head(parse(text))
    assert graph.num_rewrites == 0
    assert text_of(graph).strip() == text
