from __future__ import annotations

import html
import re

from atom.jobs.explain.changes import Change, changes, draw_changes, folded_lines, mark

BEFORE = """\
def body(x):
    q = linear(x, W("layers.0.q"))    # bf16[T, 8]
    k = linear(x, W("layers.0.k"))    # bf16[T, 4]
    a = attention(q, k)    # bf16[T, 8]
    q_1 = linear(a, W("layers.1.q"))    # bf16[T, 8]
    k_1 = linear(a, W("layers.1.k"))    # bf16[T, 4]
    a_1 = attention(q_1, k_1)    # bf16[T, 8]
    return a_1
"""
AFTER = """\
def body(x):
    qk = linear(x, cat([W("layers.0.q"), W("layers.0.k")]))    # bf16[T, 12]
    q, k = split(qk)    # bf16[T, 8], bf16[T, 4]
    a = attention(q, k)    # bf16[T, 8]
    qk_1 = linear(a, cat([W("layers.1.q"), W("layers.1.k")]))    # bf16[T, 12]
    q_1, k_1 = split(qk_1)    # bf16[T, 8], bf16[T, 4]
    a_1 = attention(q_1, k_1)    # bf16[T, 8]
    return a_1
"""


def test_old_and_new_lines_stand_side_by_side_and_those_of_equal_layers_once():
    first, second, *rest = changes(BEFORE.replace("linear(a,", "linear(x,"), AFTER.replace("linear(a,", "linear(x,"))
    assert first == Change(
        '    q = linear(x, W("layers.0.q"))', '    qk = linear(x, cat([W("layers.0.q"), W("layers.0.k")]))', 2
    )
    assert second == Change('    k = linear(x, W("layers.0.k"))', "    q, k = split(qk)", 2)
    assert not rest


def test_lines_that_assign_the_same_names_are_a_pair_wherever_they_stand():
    before = "a = f(x)\nb = g(a)\nc = h(b)\n"
    after = "new = f(x)\nc = triton.h(b)\n"
    assert changes(before, after) == [Change("a = f(x)", "new = f(x)"), Change("b = g(a)", None), Change("c = h(b)", "c = triton.h(b)")]  # fmt: skip


def test_a_text_has_the_lines_of_equal_layers_once():
    assert list(folded_lines(BEFORE.replace("linear(a,", "linear(x,").replace("    #", "  #"))) == [
        "def body(x):",
        '    q = linear(x, W("layers.0.q"))  # bf16[T, 8]',
        '    k = linear(x, W("layers.0.k"))  # bf16[T, 4]',
        "    a = attention(q, k)  # bf16[T, 8]",
        "    … 3 lines like those above",
        "    return a_1",
    ]


def test_what_differs_within_a_line_is_marked():
    old, new = mark('o = linear(a, W("x<y"))', 'o = triton.linear(a, W("x<y"))')
    assert old == "o = <mark>linear</mark>(a, W(&quot;x&lt;y&quot;))"
    assert new == "o = <mark>triton.linear</mark>(a, W(&quot;x&lt;y&quot;))"
    assert "mark" not in "".join(mark("one two three", "x = y + z"))


def test_the_lines_of_changes_are_all_there_as_text():
    drawn = draw_changes(changes(BEFORE, AFTER))
    texts = [html.unescape(re.sub(r"<[^>]+>", "", each)) for each in re.findall(r"<ins>(.*?)</ins>", drawn)]
    assert 'qk = linear(x, cat([W("layers.0.q"), W("layers.0.k")]))' in texts and "q, k = split(qk)" in texts
