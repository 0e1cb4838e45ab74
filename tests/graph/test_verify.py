from __future__ import annotations

import pytest

from atom.errors import PassError
from atom.graph import parse
from atom.graph.verify import verify

TEXT = """\
def body(x: bf16[T, 8]):
    a = add(x, x)    # bf16[T, 8]
    b = add(a, x)    # bf16[T, 8]
    return b
"""


@pytest.mark.parametrize("name", ["a", "x"])
def test_a_name_that_a_pass_set_twice_is_refused(name: str):
    graph = parse(TEXT)
    verify(graph, "semantic")
    (*_, last) = (node for node in graph.programs["body"].nodes if node.name == "b")
    last.name = name
    with pytest.raises(PassError, match=f"^body: {name} is set twice$"):
        verify(graph, "semantic")
