"""Which pass, kernel or layers make two sides part."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from atom.jobs.compare.bisect import smallest

PASSES = """
from atom.graph import Graph, ops


def double_eps(graph: Graph) -> Graph:
    for norm in graph.find(ops.rms_norm)[2:3]:
        norm.kwargs = {**norm.kwargs, "eps": 1e-2}
    return graph


def halve_eps(graph: Graph) -> Graph:
    for norm in graph.find(ops.rms_norm)[4:5]:
        norm.kwargs = {**norm.kwargs, "eps": 1e-2}
    return graph
"""


@pytest.fixture
def wrong_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wrong_passes.py").write_text(PASSES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wrong_passes", raising=False)


@pytest.mark.usefixtures("wrong_passes")
def test_a_wrong_pass_is_named(checkpoints: Any, compared: Any):
    wrong = "passes.extra=[wrong_passes:double_eps@fuse_norm_residual]"
    result = compared(checkpoints("llama"), f"job.b='level=1 {wrong}'", "job.bisect=passes")
    assert result["findings"][0]["passes"] == ["double_eps", "fuse_norm_residual"]
    assert result["bisect"]["changes"] == ["double_eps"]
    assert result["bisect"]["line"] == "without double_eps they agree"


@pytest.mark.slow
@pytest.mark.usefixtures("wrong_passes")
def test_two_wrong_passes_are_named_together(checkpoints: Any, compared: Any):
    wrong = "passes.extra=[wrong_passes:double_eps@lower_attention,wrong_passes:halve_eps@lower_attention]"
    result = compared(checkpoints("llama"), f"job.b='{wrong}'", "job.bisect=passes")
    assert result["bisect"]["line"] == "without double_eps and halve_eps they agree"


def test_a_wrong_kernel_is_named_with_the_one_in_its_place(checkpoints: Any, compared: Any, rounding: None):
    result = compared(checkpoints("llama"), "job.b=level=1", "job.bisect=kernels")
    assert result["bisect"]["changes"] == ["torch.rms_norm"]
    assert result["bisect"]["line"] == "with reference.rms_norm in place of torch they agree"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["passes", "kernels"])
def test_where_nothing_helps_the_line_says_so(checkpoints: Any, compared: Any, kind: str):
    wrong = "level=1 model.norm.eps=1e-2"
    result = compared(checkpoints("llama"), f"job.b='{wrong}'", f"job.bisect={kind}")
    assert result["bisect"]["changes"] is None
    assert result["bisect"]["line"] == f"no other choice of {kind} makes the sides agree"


def test_sides_that_agree_need_no_change(checkpoints: Any, compared: Any):
    result = compared(checkpoints("llama"), "job.b=level=1", "job.bisect=passes")
    assert result["bisect"]["line"] == "the sides agree as they are"


@pytest.mark.usefixtures("wrong_passes")
def test_the_layers_that_part_are_named(checkpoints: Any, compared: Any):
    wrong = "passes.extra=[wrong_passes:double_eps]"
    result = compared(checkpoints("llama"), f"job.b={wrong}", "job.bisect=layers")
    assert result["bisect"]["changes"] == ["layer 1"]
    assert result["bisect"]["line"].startswith(
        "with the reference's values in layer 1 they agree; the logits are off by "
    )
    assert result["bisect"]["logits"] < 1e-4 < result["outputs"]["error"]


@pytest.mark.parametrize(
    ("needed", "found"), [({3}, [3]), ({1, 4}, [1, 4]), (set(), [0]), ({9}, None), ({0, 1, 2, 3, 4}, [0, 1, 2, 3, 4])]
)
def test_the_smallest_set_is_found(needed: set[int], found: list[int] | None):
    assert smallest(range(5), lambda some: needed <= {*some}) == found
