"""The programs of a layer that predicts further tokens, against a double of it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import drafts
import glm5_next
import mtp
import mtp_streams
import pytest
import tiny
import torch
from law import assert_same_logits
from safetensors.torch import load_file
from test_quantized import LAYOUTS, pack
from torch import Tensor

from atom import weights
from atom.assemble import mtp_patterns, state_kinds
from atom.assemble.checks import check_weights
from atom.cache import Cache, key_of
from atom.checkpoint import SilentProgress
from atom.compiler import compile_graph, pieces_of, semantic_graph
from atom.compiler.artifact import explain_miss, launch_ingredients, publish_artifact, read_artifact, recipe_of
from atom.config import Config
from atom.config.checkpoint import open_for
from atom.config.load import load
from atom.config.stored_names import find_modules, stacked_parts
from atom.errors import CheckpointError, ConfigError
from atom.graph import TORCH_DTYPES, Batch, Graph, Mesh, interpret_ranks, ops, parse, show, verify
from atom.jobs.explain.job import sizes
from atom.kernels import Target, find_target
from atom.passes.context import PassContext
from atom.passes.shard import shard
from atom.runtime.step.program import Bindings, Executable

PROMPT = torch.tensor(tiny.prompt(39))

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("deepseek_v3", {}),
    ("deepseek_v3", {"first_k_dense_replace": 4}),  # the layer is dense
    ("deepseek_v3_plain_q_odd", {}),
    ("deepseek_v3_stacked", {}),
    ("kimi_k2", {}),
    ("deepseek_v32", {}),  # an indexer of its own, and its keys
    ("glm_moe_dsa", {}),  # the last layer of the model has none
    ("glm4_moe", {}),
    ("glm4_moe", {"first_k_dense_replace": 4}),
    ("glm4_moe_plain", {"hidden_size": 36, "tie_word_embeddings": True}),
    ("exaone_moe", {}),
    ("qwen3_5", {}),  # a layer with attention, after those with recurrent state
    ("axk2", {}),  # norms with gates
]


class Case(NamedTuple):
    """A checkpoint, and what its double gives of PROMPT."""

    folder: Path
    hidden: Tensor  # [39, H]
    drafted: Tensor  # [39, H], of a draft by each hidden state; the last draft is a further one, by the one before
    logits: Tensor  # [39, V], of drafted
    further: Tensor  # i64[1], the token that the last draft reads


@torch.inference_mode()
def case_from(folder: Path, double: mtp.Double | glm5_next.Double | mtp_streams.Double) -> Case:
    hidden = double.hidden(PROMPT)
    first = double.draft(PROMPT[1:], hidden[:-1])
    further = double.logits(first[-1:]).argmax(-1)
    drafted = double.draft(torch.cat([PROMPT[1:], further]), torch.cat([hidden[:-1], first[-1:]]))
    torch.testing.assert_close(drafted[:-1], first)
    return Case(folder, hidden, drafted, double.logits(drafted), further)


def save_double(name: str, folder: Path, **changes: Any) -> mtp.Double | glm5_next.Double | mtp_streams.Double:
    if name == "glm5_next":
        return glm5_next.Double(folder, glm5_next.save(folder, drafts=True))
    if name == "streams":
        return mtp_streams.Double(mtp_streams.save(folder))
    return mtp.Double(mtp.save(name, folder, **changes))


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Case]:
    made: dict[str, Case] = {}

    def get(name: str, **changes: Any) -> Case:
        key = f"{name} {changes}"
        if key not in made:
            folder = tmp_path_factory.mktemp("mtp")
            made[key] = case_from(folder, save_double(name, folder, **changes))
        return made[key]

    return get


def config_of(folder: Path, *overrides: str) -> Config:
    return load([f"checkpoint={folder}", "dtype=fp32", "device=cpu", "serve.method=mtp", *overrides])


def load_all(graph: Graph, config: Config, coordinates: dict[str, int] | None = None) -> dict[Any, Any]:
    checkpoint = open_for(config, SilentProgress())
    check_weights(graph, checkpoint, config)
    return weights.load(graph.recipes(), checkpoint, SilentProgress(), coordinates=coordinates)


@torch.inference_mode()
def assert_drafts(graph: Graph, config: Config, case: Case, mesh: Mesh) -> None:
    """The text of some ranks gives what the double gives, with a second draft after the first one."""
    ranks = range(mesh.num_ranks)
    tensors = [load_all(graph, config, mesh.coordinates(rank) if mesh.num_ranks > 1 else None) for rank in ranks]

    def run(program: str, **inputs: Tensor) -> Tensor:
        results = interpret_ranks([graph], program, [inputs] * mesh.num_ranks, [t.__getitem__ for t in tensors], mesh)
        results = [each[-1] if isinstance(each, tuple) else each for each in results]  # the streams of a body
        assert all(torch.equal(results[0], other) for other in results[1:])
        result: Tensor = results[0]
        return result

    length = len(PROMPT)
    hidden = run("draft_in", hidden=run("body", tokens=PROMPT, positions=torch.arange(length)))
    assert_same_logits(hidden, case.hidden)
    first = run("draft", tokens=PROMPT[1:], positions=torch.arange(length - 1), hidden=hidden[:-1])
    assert_same_logits(first, case.drafted[:-1])
    tokens, chained = torch.cat([PROMPT[1:], case.further]), torch.cat([hidden[:-1], first[-1:]])
    drafted = run("draft", tokens=tokens, positions=torch.arange(length), hidden=chained)
    assert_same_logits(drafted, case.drafted)
    assert torch.equal(run("draft_head", hidden=drafted, **drafts.cold(length)), case.logits.argmax(-1))


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("name", "changes", "has_copies"),
    [(*each, copies) for each in VARIANTS for copies in (False, True) if not (copies and each[0] in mtp.KINDS)],
)
def test_the_semantic_text_drafts_as_the_double(
    name: str, changes: dict[str, Any], has_copies: bool, case_of: Callable[..., Case]
):
    case = case_of(name, has_copies=has_copies, **changes)
    config = config_of(case.folder)
    graph = semantic_graph(config)
    verify(graph, ops.SEMANTIC)
    assert show(parse(show(graph))) == show(graph)
    assert_drafts(graph, config, case, Mesh())


@pytest.mark.parametrize("name", ["glm5_next", pytest.param("streams", marks=pytest.mark.slow)])
def test_a_layer_of_one_stream_or_all_drafts_for_a_model_of_several(name: str, case_of: Callable[..., Case]):
    case = case_of(name)
    config = config_of(case.folder)
    assert_drafts(semantic_graph(config), config, case, Mesh())


@pytest.mark.sampled(24)
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        *((name, Mesh(4, experts=2)) for name in ("deepseek_v3", "glm4_moe", "streams")),
        *(
            (name, mesh)
            for name in ("deepseek_v3", "glm4_moe", "glm_moe_dsa", "glm5_next", "streams")
            for mesh in (Mesh(2), Mesh(data=2, experts=2))
        ),
    ],
)
def test_the_text_of_several_ranks_drafts_as_the_double(name: str, mesh: Mesh, case_of: Callable[..., Case]):
    case = case_of(name)
    config = config_of(case.folder)
    graph = shard(semantic_graph(config), PassContext.of(Target("cpu"), 0, mesh))
    verify(graph, ops.SEMANTIC)
    assert_drafts(graph, config, case, mesh)


class Steps:
    """The programs of a lowered text on this CPU, of one sequence whose blocks are apart."""

    def __init__(self, graph: Graph, config: Config) -> None:
        caches = {kv: torch.full((9, 16, *kv.type.shape), torch.nan, dtype=TORCH_DTYPES[kv.type.dtype])
                  for kv in graph.states()}  # fmt: skip
        bindings = Bindings(load_all(graph, config), caches=caches)
        self.programs = {name: Executable(program, bindings) for name, program in graph.programs.items()}
        self.table = torch.tensor([[4, 7, 2]], dtype=torch.int32)
        self.kinds = {kv.kind for kv in graph.states()}

    def run(self, program: str, start: int, *, tokens: Tensor, **inputs: Tensor) -> tuple[Tensor, ...]:
        """Run a program of tokens from a position on."""
        positions = torch.arange(start, start + len(tokens))
        slots = self.table[0].long()[positions // 16] * 16 + positions % 16
        starts, lengths = torch.tensor([0, len(tokens)]).int(), torch.tensor([start + len(tokens)]).int()
        tables, mappings = (dict.fromkeys(self.kinds, each) for each in (self.table, slots))
        batch = Batch(tables, mappings, starts, lengths, num_decodes=int(len(tokens) == 1))
        return self.programs[program]({"tokens": tokens, "positions": positions, "batch": batch, **inputs})


@torch.inference_mode()
def assert_steps_draft(graph: Graph, config: Config, case: Case) -> None:
    """Two chunks of the prompt, the second of which begins within a block, and a further draft of one token."""
    steps, drafted, tokens = Steps(graph, config), list[Tensor](), list[Tensor]()

    def run(start: int, **inputs: Tensor) -> None:
        given, head = steps.run("draft", start, **inputs), graph.programs["draft_head"]
        noise = drafts.cold(len(given[0]))
        names = [node.name for node in head.inputs if node.name not in noise]
        found = steps.programs["draft_head"](dict(zip(names, given, strict=True)) | noise)
        tokens.append(found[0])
        drafted.append(found[-1] if len(found) > 1 else given[0])

    for start, stop in ((0, 20), (20, 38)):
        given = steps.run("body", start, tokens=PROMPT[start:stop])
        taken = {node.name: each for node, each in zip(graph.programs["draft_in"].inputs, given, strict=True)}
        (hidden,) = steps.programs["draft_in"](taken)
        assert_same_logits(hidden, case.hidden[start:stop])
        run(start, tokens=PROMPT[start + 1 : stop + 1], hidden=hidden)
    run(38, tokens=case.further, hidden=drafted[-1][-1:])
    assert_same_logits(torch.cat(drafted), case.drafted)
    assert torch.equal(torch.cat(tokens), case.logits.argmax(-1))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize(("name", "changes"), [each for each in VARIANTS if each[0] not in tiny.RECURRENT])
def test_the_lowered_text_drafts_as_the_double(
    name: str, changes: dict[str, Any], level: int, case_of: Callable[..., Case]
):
    case = case_of(name, has_copies=False, **changes)
    config = config_of(case.folder, f"level={level}")
    graph = compile_graph(config)
    assert list(graph.programs) == ["body", "head", "draft_in", "draft", "draft_head"]
    assert_steps_draft(graph, config, case)


@pytest.mark.sampled(24)
@pytest.mark.parametrize("left_plain", [None, "proj", "layer"])
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("deepseek_v3", "deepseek"),
        ("glm4_moe", "FP8_DYNAMIC"),
        ("glm4_moe", "W4A16"),
        ("glm4_moe", "gptq"),
        ("exaone_moe", "FP8_DYNAMIC"),
    ],
)
def test_a_layer_that_is_stored_packed_or_plain_next_to_packed_ones(
    name: str, layout: str, left_plain: str | None, tmp_path: Path
):
    plain = mtp.save(name, tmp_path / "plain")
    named = left_plain and getattr(mtp.NAMES[name in mtp.KINDS], left_plain)
    packed = pack(plain, LAYOUTS[layout], tmp_path / "packed", left_plain=named)
    config = config_of(packed, "level=1")
    assert_steps_draft(compile_graph(config), config, case_from(plain, mtp.Double(plain)))


def test_what_is_packed_while_it_loads_includes_the_layer(case_of: Callable[..., Case]):
    text = show(semantic_graph(config_of(case_of("glm4_moe").folder, "quant=fp8")))
    assert (
        'h_1 = linear(h, quantize(slice(W("model.layers.3.eh_proj.weight", fp32[48, 96]), 48, 96, dim=1), "fp8[' in text
    )
    assert 'quantize(W("model.layers.3.self_attn.q_proj.weight"' in text


def test_artifacts_with_and_without_drafts_are_two(case_of: Callable[..., Case], tmp_path: Path):
    drafting = config_of(case_of("glm4_moe").folder, "level=2")
    plain = replace(drafting, serve=replace(drafting.serve, method=None))
    cache, target = Cache(tmp_path), find_target("cpu")
    ours, theirs = (launch_ingredients(config, target) for config in (drafting, plain))
    publish_artifact(cache, plain, theirs, compile_graph(plain), [])
    assert explain_miss(drafting, ours, cache).startswith("draft differs from the nearest artifact, ")
    graph = compile_graph(drafting)
    publish_artifact(cache, drafting, ours, graph, [])
    found = read_artifact(cache, key_of(ours))
    assert found is not None and list(found.programs) == list(graph.programs)
    assert [piece.text for piece in pieces_of(found)] == [piece.text for piece in pieces_of(graph)]
    assert "serve.method='mtp'" in recipe_of(drafting)
    assert not any("serve.method" in override for override in recipe_of(plain))


def test_the_cache_of_the_layer_lies_in_the_same_pools(case_of: Callable[..., Case]):
    config = config_of(case_of("deepseek_v3").folder)
    plain, drafting = ([*compile_graph(replace(config, serve=replace(config.serve, method=method))).states()]
                       for method in (None, "mtp"))  # fmt: skip
    assert [kv.name for kv in plain] == ["model.layers.0", "model.layers.1", "model.layers.2"]
    assert [kv.name for kv in drafting] == [*(kv.name for kv in plain), "model.layers.3"]
    (kind,) = state_kinds(compile_graph(config), 16)
    assert (kind.name, kind.bytes_per_token) == ("full", 4 * 26 * 4)


def test_the_layer_keeps_index_keys_of_its_own(case_of: Callable[..., Case]):
    states = compile_graph(config_of(case_of("glm_moe_dsa").folder)).states()
    keys = [state.name for state in states if state.part == "index"]
    assert keys == ["model.layers.0", "model.layers.3"], "the two between them read what the first chose"


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_sizes_count_the_tensors_of_the_layer(name: str, case_of: Callable[..., Case]):
    drafting = config_of(case_of(name).folder, "level=1")
    plain = replace(drafting, serve=replace(drafting.serve, method=None))
    counted = [sizes(compile_graph(config), config)["parameters"] for config in (drafting, plain)]
    stored = load_file(case_of(name).folder / "model.safetensors")
    assert counted[0] - counted[1] == sum(each.numel() for key, each in stored.items() if key.startswith(mtp.AT)) > 0


def test_tensors_of_the_layer_are_left_out_only_where_nothing_reads_them(case_of: Callable[..., Case]):
    config = config_of(case_of("glm4_moe").folder)
    assert mtp_patterns(replace(config, serve=replace(config.serve, method=None))) == ["model.layers.3.*"]
    assert mtp_patterns(config) == ["model.layers.3.embed_tokens.*", "model.layers.3.shared_head.head.*"]
    more = replace(config, model=replace(config.model, mtp_layers=2))
    assert mtp_patterns(more)[2:] == ["model.layers.4.*"]
    graph, stored = semantic_graph(config), dict(open_for(config, SilentProgress()).tensors)
    with pytest.raises(CheckpointError, match=r"does not use tensor model\.layers\.3\.fnorm\.weight"):
        weights.check(
            graph, stored | {"model.layers.3.fnorm.weight": stored["model.norm.weight"]}, mtp_patterns(config)
        )
    del stored["model.layers.3.eh_proj.weight"]
    with pytest.raises(CheckpointError, match=r"has no tensor model\.layers\.3\.eh_proj\.weight; is it whole"):
        weights.check(graph, stored, mtp_patterns(config))


def test_a_layer_with_names_of_its_own_is_left_out_with_what_stands_next_to_it(case_of: Callable[..., Case]):
    config = config_of(case_of("exaone_moe").folder)
    plain = replace(config, serve=replace(config.serve, method=None))
    others = [f"{name}.*" for name in mtp.OWN[1:]]
    assert mtp_patterns(plain) == ["mtp.layers.0.*", *others]
    assert mtp_patterns(config) == []
    two = replace(config.model, mtp_layers=2)
    assert mtp_patterns(replace(config, model=two)) == ["mtp.layers.1.*"]
    assert mtp_patterns(replace(plain, model=two)) == ["mtp.layers.0.*", "mtp.layers.1.*", *others]
    stored = dict(open_for(config, SilentProgress()).tensors)
    weights.check(semantic_graph(plain), stored, mtp_patterns(plain))
    graph = semantic_graph(config)
    with pytest.raises(CheckpointError, match=r"does not use tensor mtp\.other\.weight"):
        weights.check(graph, stored | {"mtp.other.weight": stored["mtp.norm.weight"]}, mtp_patterns(config))
    for name in (*mtp.OWN[1:], "mtp.layers.0.self_attn.q_proj"):
        left = {key: tensor for key, tensor in stored.items() if key != f"{name}.weight"}
        with pytest.raises(CheckpointError, match=rf"has no tensor {re.escape(name)}\.weight; is it whole"):
            weights.check(graph, left, mtp_patterns(config))


def test_its_tensors_are_ignored_where_the_configuration_does_not_count_it(
    case_of: Callable[..., Case], tmp_path: Path
):
    shutil.copytree(case_of("exaone_moe").folder, tmp_path, dirs_exist_ok=True)
    written = json.loads((tmp_path / "config.json").read_text())
    del written["num_nextn_predict_layers"]
    (tmp_path / "config.json").write_text(json.dumps(written))
    config = load([f"checkpoint={tmp_path}", "dtype=fp32", "device=cpu"])
    load_all(semantic_graph(config), config)
    with pytest.raises(ConfigError, match=r"serve\.method=mtp: the model has no layer that predicts further tokens"):
        semantic_graph(config_of(tmp_path))


def test_a_layer_with_names_of_its_own_may_have_experts(case_of: Callable[..., Case]):
    config = config_of(case_of("exaone_moe").folder, "model.mtp_like=1")
    text = show(semantic_graph(config))
    assert 'W("mtp.layers.0.mlp.experts.{expert}.down_proj.weight"' in text
    assert 'W("mtp.layers.0.mlp.e_score_correction_bias"' in text
    assert 'KV("mtp.layers.0", fp32[2, 2, 16])' in text, "without a window"
    assert stacked_parts(config.model)["mtp.layers.{layer}.mlp.experts.down_proj"] == [
        "mtp.layers.{layer}.mlp.experts.{expert}.down_proj.weight"
    ]
    names = {"mtp.layers.0.mlp.gate", "mtp.fc", "model.layers.2.mlp.gate"}
    assert find_modules(config.model, {*names, "mtp.gate"}, "router", "mtp_embedding_proj") == names
    with pytest.raises(ConfigError, match=r"model\.mtp_like=3 is no layer of the body, which has 3; set at most 2"):
        config_of(case_of("exaone_moe").folder, "model.mtp_like=3")


def test_a_model_without_such_a_layer_drafts_nothing(checkpoints: Callable[[str], Path]):
    with pytest.raises(ConfigError, match=r"serve\.method=mtp: the model has no layer that predicts further tokens"):
        semantic_graph(config_of(checkpoints("llama")))
    with pytest.raises(ConfigError, match=r"nothing says what the checkpoint calls 'mtp_embedding_proj'"):
        semantic_graph(config_of(checkpoints("llama"), "model.mtp_layers=1"))
