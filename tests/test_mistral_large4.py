"""Mistral Large 4: latents that later layers read, an indexer of hidden states, learned scales and frequencies."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import mistral_large4
import pytest
import tiny
import torch
from frontend.test_sparse_attention import hidden_of
from greedy import assert_greedy, opened
from law import assert_same_logits
from passes.test_shard import logits_of_ranks
from probe import assert_logits
from safetensors.torch import load_file, save_file
from semantic import assert_same_as_transformers

from atom.assemble.kv_blocks import state_kinds
from atom.compiler import compile_graph, semantic_graph
from atom.config.load import load
from atom.errors import AtomError
from atom.graph import KV, Mesh, ops
from atom.graph.graph import node_leaves

__all__ = ["opened"]

CONFIG = Path(__file__).parent / "configs" / "mistral_large_4.json"
Saved = tuple[Path, Any]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("mistral_large4")
    return folder, mistral_large4.save(folder)


@pytest.mark.parametrize("as_stacked", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_text_gives_the_logits_of_the_whole(as_stacked: bool, tmp_path: Path):
    model = mistral_large4.save(tmp_path, as_stacked=as_stacked)
    stored = load_file(tmp_path / "model.safetensors")
    if not as_stacked:  # as the hub's, whose drafts nobody reads
        save_file(stored | {"mtp_dspark.norm.weight": torch.ones(48)}, tmp_path / "model.safetensors", {"format": "pt"})
    assert_same_as_transformers(load([f"checkpoint={tmp_path}", "dtype=fp32"]), model)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [
    {**mistral_large4.FEW, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.7}, {"index_topk": 1, "first_k_dense_replace": 3},
    {"kv_source_layers": None, "indexer_types": None, "no_rope_layers": None}, {**mistral_large4.FEW, "no_rope_layers": [0, 1, 1]},
    {**mistral_large4.FEW, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}, "n_shared_experts": 2},
], ids=str)  # fmt: skip
def test_other_values_give_the_logits_of_the_whole(changes: dict[str, Any], tmp_path: Path):
    model = mistral_large4.save(tmp_path, **changes)
    assert_same_as_transformers(load([f"checkpoint={tmp_path}", "dtype=fp32"]), model)


@pytest.mark.parametrize(
    ("fields", "full", "roped"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 4, 5, 6]),
        ({"index_topk_freq": 2, "no_rope_layer_interval": 2}, [0, 1, 3, 5], [0, 2, 4, 6]),
        ({"index_topk_pattern": "FSFSSFS"}, [0, 2, 5], [0, 1, 2, 4, 5, 6]),
    ],
)
def test_a_config_that_lists_no_layers_has_the_pattern_of_transformers(
    fields: dict[str, Any], full: list[int], roped: list[int], saved: Saved, tmp_path: Path
):
    """As MistralLarge4TextConfig.__post_init__ of transformers 5.24 makes it of these fields."""
    shutil.copy(saved[0] / "config.json", tmp_path)
    mistral_large4.edit_text(
        tmp_path, ("indexer_types", "no_rope_layers", "kv_source_layers", "rope_parameters"), **fields
    )
    model = load([f"checkpoint={tmp_path}"]).model
    rope = model.attention.rope
    assert (rope.kind, rope.factor, rope.original_max_position, rope.attention_factor) == ("yarn", 2048, 512, 1)
    assert [layer for layer in range(7) if model.attention.has_index(layer)] == full
    assert [layer for layer in range(7) if model.attention.has_rope(layer)] == roped
    assert [model.kv_layer(layer) for layer in range(7)] == [*range(7)]


def test_a_layer_that_reads_latents_of_another_still_keeps_keys_of_its_indexer(saved: Saved):
    graph = semantic_graph(load([f"checkpoint={saved[0]}", "dtype=fp32"]))
    caches = {leaf for node in graph.find(ops.mla_attention) for leaf in node_leaves(node) if isinstance(leaf, KV)}
    assert {(cache.name, cache.type.shape) for cache in caches} == {
        ("layers.0", (26,)), ("layers.1", (26,)), ("layers.3", (18,)), ("layers.4", (26,)),
    }  # fmt: skip
    assert [node.args[3].name for node in graph.find(ops.index_topk)] == [f"layers.{n}" for n in (0, 1, 2, 4, 6)]
    config = load([f"checkpoint={saved[0]}", "dtype=fp32", "parallel.pipeline=2"])
    assert [layer for layer in range(7) if config.model.keeps_state(layer)] == [0, 1, 2, 3, 4, 6]
    lowered = compile_graph(load([f"checkpoint={saved[0]}", "dtype=fp32", "device=cpu"]))
    assert len(lowered.find(ops.norm_rope_write_latent)) == 4 and len(lowered.find(ops.paged_mla_attention)) == 7


@pytest.mark.parametrize(("level", "chunk"), [(1, 16), pytest.param(0, 5, marks=pytest.mark.slow)])
def test_chunks_and_batches_change_nothing(level: int, chunk: int, saved: Saved, opened: Any):
    engine = opened(level=level, max_num_batched_tokens=chunk)
    assert_logits(engine, tiny.prompt(70), saved[1])
    assert_greedy(engine, [tiny.prompt(length, seed=length) for length in (1, 15, 16, 17, 40)], saved[1], 40)
    assert engine.metrics.scheduler.num_chunks > 0


def test_the_choice_is_seen_from_where_a_query_may_not_choose_all(saved: Saved):
    chosen, dense = (hidden_of(saved[0], *way) for way in ((), ("model.attention.index.top_k=40",)))
    difference, top_k = (chosen - dense).abs().amax(-1) / dense.abs().amax(), tiny.INDEX["index_topk"]
    assert (difference[:top_k] < 1e-5).all()
    assert (difference[top_k:] > 1e-3).sum() > 20


def test_prefix_hits_change_nothing(saved: Saved, opened: Any):
    engine, first = opened(block_size=4, max_num_batched_tokens=22), tiny.prompt(43)
    for prompt in (first, first, [*first[:27], *tiny.prompt(9, seed=1)]):
        assert_greedy(engine, [prompt], saved[1])
    assert engine.metrics.scheduler.num_prefix_hit_tokens == 40 + 24


@pytest.mark.slow
def test_preemptions_change_nothing(saved: Saved, opened: Any):
    engine = opened(num_kvcache_blocks=22, block_size=4, max_model_len=76, max_num_batched_tokens=16)
    assert_greedy(engine, [tiny.prompt(length, seed=length) for length in (20, 37, 30, 44)], saved[1])
    assert engine.metrics.scheduler.num_preemptions > 1


@pytest.mark.parametrize("mesh", [Mesh(2), pytest.param(Mesh(2, data=2, experts=4), marks=pytest.mark.slow)], ids=str)
def test_ranks_give_the_logits_of_the_whole(mesh: Mesh, saved: Saved):
    tokens = tiny.prompt(37)
    made = logits_of_ranks([f"checkpoint={saved[0]}", "dtype=fp32"], tokens, mesh)
    assert_same_logits(made[0], tiny.logits(saved[1], tokens))


def test_index_queries_are_whole_on_each_rank(saved: Saved):
    graph = compile_graph(load([f"checkpoint={saved[0]}", "dtype=fp32", "device=cpu", "parallel.tensor=2"]))
    assert [int(node.args[0].meta["type"].shape[1]) for node in graph.find(ops.paged_index_topk)] == [24] * 5
    assert len(graph.find(ops.all_gather)) == 1, "that of the logits"


@pytest.mark.parametrize(
    ("fields", "overrides", "message"),
    [
        ({"attention_bias": True}, [], "attention_bias=true in its config.json is not supported"),
        ({"q_lora_rank": 20}, [], "q_lora_rank=20 in its config.json is not supported"),
        ({"kv_source_layers": [0, 1, 1]}, [], "model.kv_layers names only 3 layers, the model has 7"),
        ({"kv_source_layers": [0, 0, 1, 3, 4, 5, 6]}, [], "model.kv_layers: layer 2 reads the KV of layer 1, which is no earlier layer with KV of its own"),
        ({"kv_source_layers": [0, 2, 2, 3, 4, 5, 6]}, [], "model.kv_layers: layer 1 reads the KV of layer 2, which is no earlier layer"),
        ({"kv_source_layers": [0, 1, 2, 0, 4, 5, 6]}, [], "model.attention: layer 3 reads the KV of layer 0, and only one of them has a rope"),
        ({"indexer_types": ["shared"] * 7}, [], "model.attention.index.layers: the first layer shares what no layer before it chose"),
        ({}, ["model.kv_shared_from=3"], "model.kv_layers: model.kv_shared_from=3 says it, too"),
        ({}, ["model.attention.index.reads=latent"], "set model.attention.q_rank, or model.attention.index.reads=hidden"),
        ({}, ["model.attention.kind=gqa", "model.attention.index=null"], "model.attention.ssmax=true is not supported for kind gqa"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_line(
    fields: dict[str, Any], overrides: list[str], message: str, saved: Saved, tmp_path: Path
):
    shutil.copy(saved[0] / "config.json", tmp_path)
    mistral_large4.edit_text(tmp_path, **fields)
    with pytest.raises(AtomError, match=message) as error:
        load([f"checkpoint={tmp_path}", *overrides])
    assert "\n" not in str(error.value)


def test_the_kv_of_mistral_large_4(tmp_path: Path):
    """A token has 72 times 512 numbers of a latent and 128 of an index key, and 54 times 64 of a rotated key.

    The config is what MistralLarge4Config of transformers 5.24 has by default, of mistralai/Mistral-Large-4-1T-A52B.
    """
    shutil.copy(CONFIG, tmp_path / "config.json")
    kinds = {kind.name: kind for kind in state_kinds(semantic_graph(load([f"checkpoint={tmp_path}"])), 16)}
    assert {name: kind.bytes_per_token for name, kind in kinds.items()} == {"full": (72 * (512 + 128) + 54 * 64) * 2}
