"""The programs of drafts of another checkpoint, against doubles of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import drafts
import eagle3
import pytest
import tiny
import torch
from law import assert_same_logits
from safetensors.torch import load_file, save_file

from atom import LLMEngine, SamplingParams, weights
from atom.assemble import load_weights, open_engine
from atom.assemble.checks import check_weights
from atom.cache import Cache, key_of
from atom.checkpoint import SilentProgress
from atom.compiler import compile_graph, semantic_graph
from atom.compiler.artifact import explain_miss, launch_ingredients, publish_artifact, read_artifact, recipe_of
from atom.config import Config
from atom.config.checkpoint import open_with_draft
from atom.config.load import load
from atom.errors import CheckpointError, ConfigError
from atom.graph import PackedWeight, Quantize, interpret, ops, parse, show, verify
from atom.jobs.explain.job import describe, sizes
from atom.kernels import find_target

PROMPT = torch.tensor(tiny.prompt(39))
VARIANTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("qwen3", {"num_hidden_layers": 7}, {}),
    ("llama", {}, {"draft_vocab": 31, "layer": "layers.0"}),
    ("gemma2", {"num_hidden_layers": 4}, {"has_embedding": True, "hidden": 40, "target_hidden_size": 48,
                                          "norm_before_residual": True}),
    ("gpt_oss", {"num_hidden_layers": 5}, {"draft_vocab": 101}),
]  # fmt: skip


def config_of(model: Path, draft: Path, *overrides: str, method: str = "eagle3") -> Config:
    texts = [f"serve.method={method}", f"serve.draft_model={draft}", "dtype=fp32", "device=cpu", "level=1"]
    return load([f"checkpoint={model}", *texts, *overrides])


@pytest.fixture
def case(checkpoints: Callable[[str], Path], tmp_path: Path) -> Config:
    """A model and a draft of fewer tokens."""
    return config_of(checkpoints("qwen3"), eagle3.save(checkpoints("qwen3"), tmp_path / "draft", draft_vocab=31))


@pytest.mark.sampled(4)
@torch.inference_mode()
@pytest.mark.parametrize(("name", "changes", "values"), VARIANTS)
def test_the_semantic_text_drafts_as_the_double(
    name: str, changes: dict[str, Any], values: dict[str, Any], tmp_path: Path
):
    tiny.save_changed(name, tmp_path / "model", **changes)
    folder = eagle3.save(tmp_path / "model", tmp_path / "draft", **values)
    config, double = config_of(tmp_path / "model", folder), eagle3.Double(tmp_path / "model", folder)
    graph = semantic_graph(config)
    verify(graph, ops.SEMANTIC)
    assert show(parse(show(graph))) == show(graph)
    tensors = load_weights(graph, open_with_draft(config, SilentProgress()), config, SilentProgress())

    def run(program: str, **inputs: torch.Tensor) -> Any:
        return interpret(graph, program, inputs, tensors.__getitem__)

    length = len(PROMPT)
    _, *states = run("body", tokens=PROMPT, positions=torch.arange(length))
    hidden = run("draft_in", **{f"aux_{number}": state for number, state in enumerate(states)})
    assert_same_logits(hidden, double.hidden(PROMPT))
    drafted = run("draft", tokens=PROMPT[1:], positions=torch.arange(length - 1), hidden=hidden[:-1])
    expected = double.draft(PROMPT[1:], double.hidden(PROMPT)[:-1])
    assert_same_logits(drafted, expected)
    assert torch.equal(run("draft_head", hidden=drafted, **drafts.cold(len(drafted))), double.tokens(expected))


def test_what_a_draft_reads_stays_after_what_is_sunk_into_the_head(case: Config):
    graph = compile_graph(case)
    body, head, draft_in = (graph.programs[name] for name in ("body", "head", "draft_in"))
    assert [node.name for node in head.inputs] == [node.name for node in body.results[:2]], "the last attention's"
    assert [node.meta["type"].row for node in body.results[2:]] == [node.meta["type"].row for node in draft_in.inputs]
    assert not any("layers.2.mlp" in line for line in show(graph).partition("def head")[0].splitlines())
    assert [kv.name for kv in graph.states()][-1] == "draft:midlayer"


def test_of_a_model_that_drafts_only_sampled_rows_go_through_the_end(checkpoints: Callable[[str], Path]):
    config = config_of(checkpoints("qwen3"), checkpoints("llama"), method="draft")
    graph = compile_graph(config)
    assert list(graph.programs) == ["body", "head", "draft", "draft_head"]
    draft, draft_head = (graph.programs[name] for name in ("draft", "draft_head"))
    taken, results = ([node.meta["type"].row for node in nodes] for nodes in (draft_head.inputs, draft.results))
    assert taken[:-3] == results and len(results) == 2
    whole = semantic_graph(config)
    tensors = load_weights(whole, open_with_draft(config, SilentProgress()), config, SilentProgress())
    inputs = {"tokens": PROMPT, "positions": torch.arange(len(PROMPT))}
    hidden = interpret(whole, "draft", inputs, tensors.__getitem__)
    expected = [drafts.ModelDouble(checkpoints("llama"), 101).drafts(PROMPT[:length], 1)[0] for length in (1, 7, 39)]
    found = interpret(whole, "draft_head", {"hidden": hidden, **drafts.cold(len(hidden))}, tensors.__getitem__)
    assert found[[0, 6, 38]].tolist() == expected


def test_tensors_of_a_draft_are_checked_by_name_and_shape(case: Config):
    graph = semantic_graph(case)
    checkpoint = open_with_draft(case, SilentProgress())
    check_weights(graph, checkpoint, case)
    folder = Path(str(case.serve.draft_model))
    stored = load_file(folder / "model.safetensors")
    for changed, reason in (
        ({**stored, "fc.weight": stored["fc.weight"][:, :96].contiguous()}, r"tensor draft:fc.weight is \[48, 96\], the"),
        ({**stored, "fc.bias": stored["norm.weight"].clone()}, r"the model does not use tensor draft:fc.bias"),
        ({key: each for key, each in stored.items() if key != "norm.weight"}, r"has no tensor draft:norm.weight; is it"),
        ({**stored, "d2t": stored["d2t"] + 90}, r"tensor draft:d2t maps to tokens that the model does not have, of 101"),
    ):  # fmt: skip
        save_file(changed, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=reason):
            open_engine(case, SilentProgress())


@pytest.mark.slow
def test_weights_of_a_draft_may_be_random(checkpoints: Callable[[str], Path], tmp_path: Path):
    """Only from its config.json; its vocabulary is mapped to the first of the model's tokens."""
    eagle3.write_config(tmp_path, tiny.config("qwen3").to_dict(), draft_vocab_size=31)
    fields = {"method": "eagle3", "draft_model": str(tmp_path), "acceptance_length": 2.5, "load_dummy": True}
    engine = LLMEngine(str(checkpoints("qwen3")), dtype="fp32", device="cpu", level=1, **fields)
    engine.generate([tiny.prompt(9)], SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
    stats = engine.metrics.scheduler
    assert 1 + stats.num_accepted_tokens / stats.num_drafts == pytest.approx(2.5, rel=0.1)
    engine.close()


def test_a_draft_is_packed_while_it_loads_and_kept(case: Config, tmp_path: Path):
    config = config_of(Path(str(case.checkpoint)), Path(str(case.serve.draft_model)), "quant=int8", f"cache={tmp_path}")
    graph = semantic_graph(config)
    first, again = (
        weights.load(
            graph.recipes(), open_with_draft(config, SilentProgress()), SilentProgress(), cache=Cache(tmp_path)
        )
        for _ in range(2)
    )
    packed = [recipe for recipe in first if "draft:" in repr(recipe) and isinstance(recipe, Quantize)]
    assert len(packed) >= 4
    for recipe in packed:
        made, kept = first[recipe], again[recipe]
        assert isinstance(made, PackedWeight) and isinstance(kept, PackedWeight)
        assert all(torch.equal(part, kept.parts[name]) for name, part in made.parts.items())


def test_artifacts_of_two_drafts_are_two(case: Config, checkpoints: Callable[[str], Path], tmp_path: Path):
    other = config_of(checkpoints("qwen3"), checkpoints("llama"), method="draft")
    cache, target = Cache(tmp_path / "cache"), find_target("cpu")
    ours, theirs = (launch_ingredients(config, target) for config in (case, other))
    publish_artifact(cache, other, theirs, compile_graph(other), [])
    assert explain_miss(case, ours, cache).startswith("model and draft differ from the nearest artifact, ")
    publish_artifact(cache, case, ours, compile_graph(case), [])
    found = read_artifact(cache, key_of(ours))
    assert found is not None and list(found.programs) == ["body", "head", "draft_in", "draft", "draft_head"]
    assert {f"serve.draft_model='{case.serve.draft_model}'", "serve.method='eagle3'"} <= {*recipe_of(case)}


def test_sizes_show_what_a_draft_reads(case: Config):
    plain = replace(case, draft=None, serve=replace(case.serve, method=None, draft_model=None))
    found, before = (sizes(compile_graph(config), config) for config in (case, plain))
    stored = load_file(Path(str(case.serve.draft_model)) / "model.safetensors")
    num = sum(tensor.numel() for name, tensor in stored.items() if name != "t2d")
    assert found["parameters"] - before["parameters"] == num
    read = sum(tensor.nbytes for name, tensor in stored.items() if name not in ("t2d", "fc.weight"))
    freqs = eagle3.HEAD_DIM // 2 * 4  # which no file has
    assert found["draft_bytes"] == read + freqs and "draft_bytes" not in before
    assert ("drafts", "83.3 KiB of weights are read for a token of a sequence") in list(describe(found, case))


def test_another_vocabulary_is_refused(checkpoints: Callable[[str], Path], tmp_path: Path):
    tokenizers = pytest.importorskip("tokenizers")

    def with_tokens(name: str, words: list[str]) -> Path:
        tiny.save_changed("llama", tmp_path / name)
        backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: id for id, word in enumerate(words)}, "a"))
        backend.add_special_tokens([f"<{name}>"])
        backend.save(str(tmp_path / name / "tokenizer.json"))
        return tmp_path / name

    model, same, other = (with_tokens(*each) for each in (("model", [*"abc"]), ("same", [*"abc"]), ("other", [*"acb"])))
    open_engine(config_of(model, same, method="draft"), SilentProgress())
    with pytest.raises(
        ConfigError, match=r"^serve.draft_model=.*other has another vocabulary: token 1 is not the model"
    ):
        open_engine(config_of(model, other, method="draft"), SilentProgress())


def test_a_draft_states_no_more_than_json(case: Config):
    """What was derived from a draft's files goes to the engine's process with the rest."""
    import msgspec

    assert msgspec.msgpack.decode(msgspec.msgpack.encode(case), type=Config) == case
    assert json.loads(json.dumps(case.hf)) == case.hf
