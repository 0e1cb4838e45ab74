from __future__ import annotations

import pytest

from atom.errors import ConfigError
from atom.graph import KV, Cat, Graph, RopeFreqs, Type, W, ops, parse, show

TEXT = """\
def body(tokens: i64[T], positions: i64[T], num_decodes: i64):
    x = embedding(tokens, W("embed", bf16[100, 64]))    # bf16[T, 64]
    qkv = linear(x, cat([W("q", bf16[32, 64]), W("k", bf16[16, 64])]), cat([W("b", bf16[32]), W("c", bf16[16])]))    # bf16[T, 48]
    q, k = split(qkv, sizes=[32, 16])    # bf16[T, 32], bf16[T, 16]
    cos, sin = rotary(positions, rope_freqs(16, 10000.0, kind="linear", factor=2.0), scale=0.5)    # fp32[T, 8], fp32[T, 8]
    q_1 = split_heads(q, heads=2)    # bf16[T, 2, 16]
    q_2 = torch.rope(q_1, cos, sin)    # bf16[T, 2, 16]
    return q_2, k

def head(hidden: bf16[R, 64]):
    logits = linear(hidden, W("embed", bf16[100, 64]))    # bf16[R, 100]
    return logits
"""


def test_a_text_reads_back_as_itself():
    assert show(parse(TEXT)) == TEXT


def test_comments_and_layout_do_not_matter():
    bare = "\n".join(line.split("    #")[0].replace(", ", " ,  ") for line in TEXT.splitlines())
    assert show(parse(bare)) == TEXT


def test_a_built_graph_shows_what_was_built():
    graph = Graph()
    body = graph.program("body")
    positions = body.input("positions", Type("i64", ("T",)))
    cos, sin = body.call(ops.rotary, positions, RopeFreqs(4, 1e4, "factors", factors=(1.0, 2.5)), name=("cos", "sin"))
    body.output(body.call(ops.add, cos, sin, name="total"))
    assert show(graph) == (
        "def body(positions: i64[T]):\n"
        '    cos, sin = rotary(positions, rope_freqs(4, 10000.0, kind="factors", factors=[1.0, 2.5]))    # fp32[T, 2], fp32[T, 2]\n'
        "    total = add(cos, sin)    # fp32[T, 2]\n"
        "    return total\n"
    )


def test_recipes_and_caches_read_back_as_equal_values():
    text = 'def f(x: bf16[T, 8]):\n    y = linear(x, cat([W("a", bf16[2, 8]), W("b", bf16[3, 8], fmt="q")]))\n    return y\n'
    (recipe,) = parse(text).recipes()
    assert recipe == Cat((W("a", Type("bf16", (2, 8))), W("b", Type("bf16", (3, 8)), "q")), 0)
    kv = 'def f(q: bf16[T, 2, 8], k: bf16[T, 1, 8]):\n    a = attention(q, k, k, KV("0", bf16[2, 1, 8], window=4), scale=1.0, window=4)\n    return a\n'
    assert parse(kv).caches() == [KV("0", Type("bf16", (2, 1, 8)), window=4)]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("y = no_such_op(x)", "there is no op 'no_such_op'"),
        ("y = rms_norm(z, x, eps=1e-6)", "nothing is named z"),
        ('y = linear(x, W("w", bf16[4, 7]))', "x has 8 columns, the weight 7"),
        ('y = linear(x, W("w", fp32[4, 8]))', "x is bf16, the weight fp32"),
        ("x = add(x, x)", "x is set twice"),
        ("y, z = add(x, x)", "add has 1 results, not 2"),
        ("y = add(x)", "missing a required argument"),
        ("y = add(x, x, z=1)", "got an unexpected keyword argument"),
        ('y = linear(x, W("w", int[4, 8]))', "int[4, 8] is no type"),
        ("y = activate(x, kind=__import__('os'))", "is no value that a graph knows"),
        ("y = x", "a line is"),
        ("import os", "a line is"),
        ("y = (", "was never closed"),
    ],
)
def test_a_bad_line_is_an_error_that_names_it(line: str, reason: str):
    with pytest.raises(ConfigError, match=r"^mine\.py:2: ") as raised:
        parse(f"def f(x: bf16[T, 8]):\n    {line}\n    return x\n", "mine.py")
    assert reason in str(raised.value)


def test_a_function_without_result_or_type_is_an_error():
    with pytest.raises(ConfigError, match="f returns nothing"):
        parse("def f(x: bf16[T]):\n    y = add(x, x)\n")
    with pytest.raises(ConfigError, match="x has no type"):
        parse("def f(x):\n    return x\n")
