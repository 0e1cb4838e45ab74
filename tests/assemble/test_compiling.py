"""What is refused before anything is compiled, and the digest by which ranks compare their texts."""

from __future__ import annotations

import pytest

from atom.assemble.compiling import digest_of, left_plain, refuse_act
from atom.config import Config, QuantConfig
from atom.errors import UnsupportedError
from atom.graph import parse

TEXT = 'def f(x: fp32[T, 4]):\n    y = linear(x, W("w", fp32[4, 4]){act})\n    return y\n'


def test_comments_are_no_part_of_a_digest():
    graph, noted = parse(TEXT.format(act="")), parse(TEXT.format(act=""))
    next(node for node in noted.programs["f"].nodes if node.name == "y").meta["notes"] = ["triton: no GPU"]
    assert digest_of(graph) == digest_of(noted)
    assert digest_of(graph) != digest_of(parse(TEXT.format(act="").replace('"w"', '"other"')))


def test_activations_that_no_kernel_multiplies_are_refused_with_its_reasons():
    graph = parse(TEXT.format(act=', act="int8[1, *]"'))
    config = Config(quant=QuantConfig(act="int8"))
    node = next(node for node in graph.programs["f"].nodes if "act" in node.kwargs)
    node.meta["kernel"] = "cpp"
    refuse_act(graph, config)
    node.meta.update(kernel="reference", notes=["int8: no VNNI", "int8: no VNNI"])
    with pytest.raises(UnsupportedError, match=r"^quant\.act=int8: int8: no VNNI; leave quant\.act out$"):
        refuse_act(graph, config)
    refuse_act(graph, Config(quant=QuantConfig(act="int8"), level=0))  # the reference is what was set
    assert left_plain(graph, Config()) == []
