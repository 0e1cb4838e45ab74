from __future__ import annotations

import pytest

from atom.errors import ConfigError
from atom.graph import KV, Cat, Graph, RopeFreqs, Type, W, ops, parse, show

TEXT = """\
def body(tokens: i64[T], positions: i64[T], batch: Batch):
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


def test_a_number_is_a_tensor_without_dims():
    text = 'def body(x: bf16[T, 4]):\n    y = clip(x, W("low", bf16), W("high", bf16))    # bf16[T, 4]\n    return y\n'
    assert show(parse(text)) == text


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
    text = 'def f(x: bf16[T, 8]):\n    y = linear(x, cat([W("a", bf16[2, 8]), W("b", bf16[3, 8])]))\n    return y\n'
    (recipe,) = parse(text).recipes()
    assert recipe == Cat((W("a", Type("bf16", (2, 8))), W("b", Type("bf16", (3, 8)))), 0)
    kv = 'def f(q: bf16[T, 2, 8], k: bf16[T, 1, 8]):\n    a = attention(q, k, k, KV("0", bf16[2, 1, 8], window=4), scale=1.0, window=4)\n    return a\n'
    assert parse(kv).states() == [KV("0", Type("bf16", (2, 1, 8)), window=4)]


def test_a_stored_format_is_part_of_a_type():
    text = """\
def f(x: bf16[T, 8], w: bf16[4, 8, "int8[1, *]"]):
    y = linear(x, w)    # bf16[T, 4]
    z = linear(x, W("z", bf16[4, 8], fmt="q"))    # bf16[T, 4]
    return y, z
"""
    graph = parse(text)
    assert show(graph) == text
    assert graph.programs["f"].inputs[1].meta["type"] == Type("bf16", (4, 8), "int8[1, *]")
    assert graph.recipes() == [W("z", Type("bf16", (4, 8), "q"))]
    assert show(parse(text.replace('bf16[4, 8], fmt="q"', 'bf16[4, 8, "q"]'))) == text


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('y = rms_norm(x, W("w", bf16[8], fmt="q"), eps=1e-6)', "weight cannot be stored as q: only a matrix of weights can"),
        ('y = linear(x, W("w", bf16[4, 8]), W("b", bf16[4], fmt="q"))', "bias cannot be stored as q: only a matrix"),
        ('y = linear(x, W("w", bf16[4, 8], fmt=1))', "w: a format is a string, not 1"),
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
        ("y = linear(x, cat([]))", "cat takes a list of at least one tensor"),
        ('y = linear(x, cat(W("w", bf16[4, 8])))', "cat takes a list of at least one tensor"),
        ('y = linear(x, cat([W("w", bf16[4, 8]), 3]))', "cat takes a tensor, not 3"),
        ('y = linear(x, cat([W("v", bf16[4, 8]), W("w", bf16[4, 7])]))', "bf16[4, 8] and bf16[4, 7] cannot be joined along dim 0"),
        ('y = linear(x, cat([W("w", bf16[4, 8])], dim=2))', "cat: bf16[4, 8] has no dim 2"),
        ('y = linear(x, slice(W("w", bf16[4, 8]), 0, 4, step=0))', "slice: step=0 is no whole number from 1"),
        ('y = linear(x, slice(W("w", bf16[4, 8]), 0, 4, dim=7))', "slice: bf16[4, 8] has no dim 7"),
        ('y = linear(x, slice(W("w", bf16[4, 8]), 0, 5))', "slice: 0 to 5 is no range of the 4 in dim 0"),
        ('y = linear(x, slice(W("w", bf16[4, 8]), -1, 4))', "slice: -1 to 4 is no range of the 4 in dim 0"),
        ('y = linear(x, slices(W("w", bf16[4, 8]), 0, 1, 2, 3))', "slices: 3 ranges 0 to 1, 2 apart, are not within bf16[4, 8]"),
        ('y = linear(x, slices(W("w", bf16[4, 8]), 0, 2, 1, 3))', "slices: 3 ranges 0 to 2, 1 apart, are not within bf16[4, 8]"),
        ('y = linear(x, slices(W("w", bf16[4, 8]), 0, 1, 0, 3))', "slices: every=0 is no whole number from 1"),
        ('y = linear(x, slices(W("w", bf16[4, 8]), 0, 1, 1, True))', "slices: count=True is no whole number from 1"),
        ('y = linear(x, slices(W("w", bf16[4, 8]), 0, 5, 5, 1))', "slice: 0 to 5 is no range of the 4 in dim 0"),
        ('y = linear(x, transpose(W("w", bf16[8])))', "transpose: bf16[8] has no two dims to swap"),
        ("y = linear(x, stack(3, 0, 1))", "stack takes a tensor, not 3"),
        ('y = linear(x, stack(W("w", bf16[4, 8]), 3, 1))', "stack: 3 to 1 is no range of experts"),
        ('y = linear(x, shift(W("w", bf16[4, 8]), "1"))', "shift: '1' is no number"),
        ('y = linear(x, shuffle(W("w", bf16[4, 8]), 1))', "shuffle: a layout is a string, not 1"),
        ('y = linear(x, dequantize(W("w", bf16[4, 8])))', "dequantize takes a stored tensor with a format"),
        ('y = linear(x, dequantize(W("w", bf16[4, 8], fmt="mxfp4")))', "w: bf16[4, 8] has 8 columns, mxfp4 stores multiples of 32"),
        ('y = linear(x, W("w", bf16[T, 8]))', "w: bf16[T, 8] is no type of a tensor whose dims are numbers"),
        ('y = linear(x, W(3, bf16[4, 8]))', "a tensor's name is a string, not 3"),
        ('y = linear(x, W("w", bf16[-4, 8]))', "bf16[-4, 8] is no type"),
        ('y = linear(x, W("w", 4))', "w: 4 is no type of a tensor"),
        ('cos, sin = rotary(x, rope_freqs(4, 1e4, kind="yarn"))', "rope_freqs: kind yarn needs an original_max_position from 1"),
        ('cos, sin = rotary(x, rope_freqs(4, 1e4, kind="llama3"))', "rope_freqs: kind llama3 needs an original_max_position"),
        ('cos, sin = rotary(x, rope_freqs(4, 1e4, kind="yrn"))', "rope_freqs: there is no kind 'yrn'; kinds: default, linear,"),
        ('cos, sin = rotary(x, rope_freqs(5, 1e4))', "rope_freqs: dim=5 is no even number from 2"),
        ('cos, sin = rotary(x, rope_freqs(4, 0))', "rope_freqs: theta=0 is no number above 0"),
        ('cos, sin = rotary(x, rope_freqs(4, 1e4, kind="factors"))', "rope_freqs: kind factors needs a list of 2 numbers"),
        ('cos, sin = rotary(x, rope_freqs(4, 1e4, kind="proportional", partial=0))', "rope_freqs: partial=0 is no share"),
        ('y = attention(x, x, x, KV("0", bf16[2, 1, 8], window=0), scale=1.0)', "0: window=0 is no whole number from 1"),
        ('y = attention(x, x, x, KV("0", bf16[2, 1, 8], every=0), scale=1.0)', "0: every=0 is no whole number from 1"),
        ('y = attention(x, x, x, KV("0", bf16[2, 1, 8], every=4), scale=1.0)', "the cache keeps an entry for 4 tokens"),
        ("y, z = split(x, sizes=8)", "sizes=8 is no list of whole numbers"),
        ("y, z = split(x, sizes=[-1, 9])", "sizes=(-1, 9) is no list of whole numbers"),
        ("y = split_heads(x, heads=0)", "0 is no number of parts from 1"),
        ("y = merge_heads(x)", "merge_heads: its arguments do not fit"),
        ("y = scale(x, by={[]: 1})", "is no value that a graph knows"),
        ('y = paged_attention(x, KV("0", bf16[2, 1, 8]), x, scale=1.0)', "bf16[T, 8] is no Batch"),
        ('y = linear(x, W("w", Batch))', "nothing is named Batch"),
    ],
)  # fmt: skip
def test_a_bad_line_is_an_error_that_names_it(line: str, reason: str):
    with pytest.raises(ConfigError, match=r"^mine\.py:2: ") as raised:
        parse(f"def f(x: bf16[T, 8]):\n    {line}\n    return x\n", "mine.py")
    assert reason in str(raised.value)


def test_a_function_without_result_or_type_is_an_error():
    with pytest.raises(ConfigError, match="f returns nothing"):
        parse("def f(x: bf16[T]):\n    y = add(x, x)\n")
    with pytest.raises(ConfigError, match="x has no type"):
        parse("def f(x):\n    return x\n")


def test_a_batch_is_one_input_whatever_kinds_of_cache_there_are():
    text = """\
def body(q: bf16[T, 2, 8], batch: Batch):
    a = paged_attention(q, KV("0", bf16[2, 1, 8]), batch, scale=1.0)    # bf16[T, 2, 8]
    b = paged_attention(a, KV("1", bf16[2, 1, 8], window=4), batch, scale=1.0, window=4)    # bf16[T, 2, 8]
    return b
"""
    graph = parse(text)
    assert [str(node.meta["type"]) for node in graph.program("body").inputs] == ["bf16[T, 2, 8]", "Batch"]
    assert show(graph) == text
    with pytest.raises(ConfigError, match=r"graph:2: add\(Batch, Batch\): no op makes a Batch"):
        parse("def f(batch: Batch):\n    x = add(batch, batch)\n    return x\n")


def test_latent_attention_to_all_tokens_needs_a_cache_of_them():
    text = """\
def body(q: bf16[T, 2, 8], r: bf16[T, 2, 4], latent: bf16[T, 16], k: bf16[T, 1, 4]):
    a = mla_attention(q, r, latent, k, W("kv_b", bf16[32, 16]), KV("0", bf16[20]%s), scale=1.0)
    return a
"""
    (cache,) = parse(text % "").states()
    assert cache.kind == "full"
    with pytest.raises(ConfigError, match=r"graph:2: .*a query sees all tokens, the cache keeps 4"):
        parse(text % ", window=4")
