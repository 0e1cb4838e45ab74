"""A saved text continues after the stage that it names, and what was edited in it stays."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atom.cli import main
from atom.compiler import compile_graph, pieces_of
from atom.compiler.artifact import semantic_graph
from atom.compiler.saved_graph import show_saved
from atom.config import Config
from atom.config.load import load
from atom.errors import ConfigError
from atom.graph import Graph, ops, show
from atom.graph.graph import results_of
from atom.kernels import Target
from atom.passes.pipeline import PIPELINE

TARGETS = {
    "cpu": Target("cpu", frozenset({"onednn_fp32", "onednn_bf16"})),
    "triton": Target("cuda", frozenset({"nvidia", "sm_90"})),
}
Configure = Callable[..., Config]


@pytest.fixture
def configure(checkpoints: Callable[[str], Path], tmp_path: Path) -> Configure:
    """A configuration of a tiny variant at a level; with a text, of its file."""

    def make(name: str, level: int, text: str | None = None) -> Config:
        given = [f"checkpoint={checkpoints(name)}", f"level={level}", "device=cpu", "dtype=bf16"]
        if text is not None:
            (tmp_path / "mine.py").write_text(text)
            given.append(f"job.graph={tmp_path}/mine.py")
        return load(given)

    return make


def texts_by_stage(config: Config, target: Target) -> tuple[dict[str, str], Graph]:
    """What every stage of the passes is saved as, and the graph after all of them."""
    texts = {"semantic": show(semantic_graph(config))}
    graph = compile_graph(config, lambda report: texts.update({report.name: show(report.graph)}), target)
    return texts, graph


def renamed(graph: Graph) -> str:
    """The text without comments, its names numbered in their order: their numbers depend on what a pass has removed."""
    shown = []
    texts = re.split(r"^def \w+\(", show(graph), flags=re.MULTILINE)[1:]
    for program, text in zip(graph.programs.values(), texts, strict=True):
        nodes = [*program.inputs, *(result for node in program.nodes for result in results_of(node))]
        places = {node.name: f"v{place}" for place, node in enumerate(nodes)}
        bare = "\n".join(line.split("    # ")[0] for line in text.splitlines())
        shown.append(re.sub(r"\b[a-z]\w*\b", lambda word, places=places: places.get(word[0], word[0]), bare))  # type: ignore[misc]
    return "\n".join(shown)


def counts(graph: Graph, *found: ops.Op) -> list[int]:
    return [len(graph.find(op)) for op in found]


@pytest.mark.sampled(18)
@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("name", ["llama", "qwen3", "deepseek_v3"])
def test_a_text_of_any_stage_becomes_what_the_whole_pipeline_makes(
    name: str, kind: str, level: int, configure: Configure
):
    texts, whole = texts_by_stage(configure(name, level), TARGETS[kind])
    assert list(texts) == ["semantic", *(each.__name__ for each, from_level, _ in PIPELINE if level >= from_level)]
    pieces = [piece.text for piece in pieces_of(whole)]
    assert bool(pieces) == (level == 2)
    for stage, text in texts.items():
        graph = compile_graph(configure(name, level, show_saved(stage, text)), target=TARGETS[kind])
        assert renamed(graph) == renamed(whole), stage
        assert [piece.text for piece in pieces_of(graph)] == pieces, stage


def test_a_text_that_explain_saved_names_its_stage(checkpoints: Any, capsys: Any, configure: Configure):
    given = [f"checkpoint={checkpoints('llama')}", "level=1", "device=cpu", "dtype=bf16"]
    assert main(["job=explain", *given, "job.stage=lower_attention"]) == 0
    saved = capsys.readouterr().out
    assert saved.startswith("# job.stage=lower_attention\ndef body(tokens: ")
    whole = compile_graph(configure("llama", 1), target=TARGETS["triton"])
    assert all(counts(whole, ops.add_norm_linear, ops.norm_rope_attention)), "Triton has kernels for them"
    for text in (saved, saved.partition("\n")[2]):  # and where that line is gone
        graph = compile_graph(configure("llama", 1, text), target=TARGETS["triton"])
        assert renamed(graph) == renamed(whole)


def test_passes_before_the_stage_leave_what_was_edited_as_it_is(configure: Configure):
    """Here the gates were taken apart again, as they were before fuse_gate_up; a later pass fuses only the linears."""
    texts, whole = texts_by_stage(configure("llama", 1), TARGETS["cpu"])
    linears, gates = counts(whole, ops.linear, ops.gated_activate)
    edited = show_saved("fuse_gate_up", texts["fuse_qkv"])
    graph = compile_graph(configure("llama", 1, edited), target=TARGETS["cpu"])
    assert gates and counts(graph, ops.linear, ops.gated_activate, ops.activate) == [linears, 0, gates]
    assert renamed(compile_graph(configure("llama", 1, texts["fuse_qkv"]), target=TARGETS["cpu"])) == renamed(whole)


@pytest.mark.parametrize(
    ("stage", "kept", "reason"),
    [
        (
            "nope",
            "semantic",
            r"mine.py:1: there is no stage 'nope'; stages: semantic, split_stages, shard, sink_into_head, .*split_pieces$",
        ),
        ("lower_attention", "fuse_qkv", r"mine.py: body: a attention is not legal in a lowered graph$"),
    ],
)
def test_a_stage_that_is_none_or_not_the_text_s_is_refused(stage: str, kept: str, reason: str, configure: Configure):
    texts, _ = texts_by_stage(configure("llama", 1), TARGETS["cpu"])
    with pytest.raises(ConfigError, match=reason):
        compile_graph(configure("llama", 1, show_saved(stage, texts[kept])), target=TARGETS["cpu"])


def of_ranks(config: Config, tensor: int) -> Config:
    return replace(config, parallel=replace(config.parallel, tensor=tensor))


@pytest.mark.slow
def test_a_text_of_ranks_runs_on_as_many(configure: Configure):
    texts, whole = texts_by_stage(of_ranks(configure("llama", 1), 2), TARGETS["cpu"])
    assert "all_reduce" in texts["shard"]
    for stage in ("semantic", "shard", "lower_attention", "select_kernels"):
        saved = of_ranks(configure("llama", 1, show_saved(stage, texts[stage])), 2)
        assert renamed(compile_graph(saved, target=TARGETS["cpu"])) == renamed(whole)
    saved = configure("llama", 1, show_saved("shard", texts["shard"]))
    for tensor in (1, 4):
        with pytest.raises(
            ConfigError, match=r"mine.py is of other ranks, 2 along tensor: set parallel as it was saved"
        ):
            compile_graph(of_ranks(saved, tensor), target=TARGETS["cpu"])
    single, _ = texts_by_stage(configure("llama", 1), TARGETS["cpu"])
    with pytest.raises(ConfigError, match=r"mine.py is of one rank, and parallel.tensor=2: save it with that"):
        compile_graph(
            of_ranks(configure("llama", 1, show_saved("fuse_qkv", single["fuse_qkv"])), 2), target=TARGETS["cpu"]
        )


def of_stages(config: Config, num_stages: int) -> Config:
    return replace(config, parallel=replace(config.parallel, pipeline=num_stages))


def test_each_stage_takes_its_layers_of_a_text_of_all(configure: Configure):
    text = texts_by_stage(configure("llama", 1), TARGETS["cpu"])[0]["semantic"]
    edited = show_saved("semantic", text.replace('kind="silu"', 'kind="relu"', 1))  # in the first of three layers
    for saved, num_edited in ((show_saved("semantic", text), [0, 0]), (edited, [1, 0])):
        config = of_stages(configure("llama", 1, saved), 2)
        stages = [compile_graph(config, target=TARGETS["cpu"], stage=stage) for stage in range(2)]
        assert [show(each).count('kind="relu"') for each in stages] == num_edited
        if not any(num_edited):
            plain = of_stages(configure("llama", 1), 2)
            made = [compile_graph(plain, target=TARGETS["cpu"], stage=stage) for stage in range(2)]
            assert list(map(renamed, stages)) == list(map(renamed, made))


def test_a_text_of_one_stage_and_one_after_the_split_are_refused(configure: Configure):
    staged, single = (
        texts_by_stage(each, TARGETS["cpu"])[0]["split_stages"]
        for each in (of_stages(configure("llama", 1), 2), configure("llama", 1))
    )
    instead = "save the text of all stages with job.stage=semantic, of which each stage takes its layers"
    for text, num_stages, what in (
        (staged, 2, "one pipeline stage"),
        (staged, 1, "one pipeline stage"),
        (single, 2, "a model without stages"),
    ):
        config = of_stages(configure("llama", 1, show_saved("split_stages", text)), num_stages)
        with pytest.raises(ConfigError, match=f"mine.py is of {what}; {instead}"):
            compile_graph(config, target=TARGETS["cpu"])


def drafting(config: Config) -> Config:
    return replace(config, serve=replace(config.serve, method="mtp"), model=replace(config.model, mtp_layers=1))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("target", TARGETS)
def test_a_text_that_drafts_runs_from_any_stage(target: str, configure: Configure):
    texts, whole = texts_by_stage(drafting(configure("deepseek_v3", 2)), TARGETS[target])
    assert list(whole.programs) == ["body", "head", "draft_in", "draft", "draft_head"]
    for stage in texts:
        saved = configure("deepseek_v3", 2, show_saved(stage, texts[stage]))
        assert renamed(compile_graph(saved, target=TARGETS[target])) == renamed(whole)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("written", "edited", "reason"),
    [
        ("def draft_head(", "def more(", r"mine.py: it has no function draft_head$"),
        ("def draft(tokens", "def draft(tokens: i64[T], types", r"draft has an input types, which is not one of: batch, hidden, "),
        ("def draft_in(hidden: bf16[T, 48])", "def draft_in(hidden: bf16[T, 40])", r"draft_in takes rows of bf16\[40\] where body returns rows of bf16\[48\]"),
        ("    return tokens, drafted", "    return tokens", r"draft_head returns no row of bf16\[48\] after its tokens, with which a further "),
    ],
)  # fmt: skip
def test_programs_of_a_draft_that_do_not_fit_are_refused(written: str, edited: str, reason: str, configure: Configure):
    text = texts_by_stage(drafting(configure("deepseek_v3", 1)), TARGETS["cpu"])[0]["lower_attention"]
    assert written in text
    with pytest.raises(ConfigError, match=reason):
        compile_graph(configure("deepseek_v3", 1, text.replace(written, edited)), target=TARGETS["cpu"])


def test_a_text_without_a_draft_is_refused_where_the_run_needs_one(configure: Configure):
    text = texts_by_stage(configure("deepseek_v3", 1), TARGETS["cpu"])[0]["lower_attention"]
    with pytest.raises(ConfigError, match=r"mine.py: it has no function draft, draft_head$"):
        compile_graph(drafting(configure("deepseek_v3", 1, text)), target=TARGETS["cpu"])


def tapping(config: Config, *layers: str) -> Config:
    return replace(config, passes=replace(config.passes, taps=list(layers)))


def test_a_text_that_is_tapped_runs_with_the_same_taps(configure: Configure):
    config = tapping(configure("llama", 1), "model.layers.0", "model.layers.2")
    texts, whole = texts_by_stage(config, TARGETS["cpu"])
    for stage in ("semantic", "sink_into_head", "select_kernels"):
        saved = configure("llama", 1, show_saved(stage, texts[stage]))
        graph = compile_graph(tapping(saved, *config.passes.taps), target=TARGETS["cpu"])
        assert renamed(graph) == renamed(whole)
    with pytest.raises(ConfigError, match=r"its body returns what 2 layers give, passes.taps names 0"):
        compile_graph(saved, target=TARGETS["cpu"])
    plain = configure("llama", 1, show(semantic_graph(configure("llama", 1))))
    with pytest.raises(ConfigError, match=r"its body returns what 0 layers give, passes.taps names 1"):
        compile_graph(tapping(plain, "model.layers.1"), target=TARGETS["cpu"])
