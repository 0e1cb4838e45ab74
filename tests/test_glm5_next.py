"""GLM-5.3-Flash: latent attention to runs whose keys are pooled, without positions, next to KDA, on several streams."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import glm5_next
import pytest
import tiny
from greedy import assert_greedy, opened
from law import assert_same_logits
from passes.test_shard import logits_of_ranks
from probe import assert_logits
from rank_checks import EVENTFUL, assert_tokens_of_groups
from semantic import assert_same_as_transformers
from test_fp8_kv import assert_same
from thread_ranks import ThreadRanks, thread_ranks

from atom.assemble.kv_blocks import state_kinds
from atom.compiler import semantic_graph
from atom.config.load import load
from atom.errors import AtomError
from atom.graph import Mesh

__all__ = ["opened", "thread_ranks"]

CONFIG = Path(__file__).parent / "configs" / "glm_5_3_flash.json"
Saved = tuple[Path, Any]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("glm5_next")
    return folder, glm5_next.save(folder)


@pytest.mark.parametrize(
    "form", ["hub", *(pytest.param(form, marks=pytest.mark.slow) for form in ("saved", "stacked"))]
)
def test_the_text_gives_the_logits_of_the_whole(form: str, tmp_path: Path):
    model = glm5_next.save(tmp_path, as_stacked=form == "stacked")
    if form == "hub":
        glm5_next.write_as_hub(tmp_path)
    assert_same_as_transformers(load([f"checkpoint={tmp_path}", "dtype=fp32"]), model)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [
    {"linear_lower_bound": None, "linear_conv_kernel_dim": 3}, {"index_kpool": 3, "index_topk": 15, "n_group": 2, "topk_group": 1}, {"layer_types": None},
    {"layer_types": [glm5_next.INDEXED] * 4, "indexer_types": ["full", "shared"] * 2, "tie_word_embeddings": True},
], ids=str)  # fmt: skip
def test_other_values_give_the_logits_of_the_whole(changes: dict[str, Any], tmp_path: Path):
    model = glm5_next.save(tmp_path, **changes)
    assert_same_as_transformers(load([f"checkpoint={tmp_path}", "dtype=fp32"]), model)


@pytest.mark.parametrize(("level", "chunk"), [(1, 16), pytest.param(0, 5, marks=pytest.mark.slow)])
def test_chunks_and_batches_change_nothing(level: int, chunk: int, saved: Saved, opened: Any):
    engine = opened(level=level, max_num_batched_tokens=chunk)
    assert_logits(engine, tiny.prompt(70), saved[1])
    assert_greedy(engine, [tiny.prompt(length, seed=length) for length in (1, 3, 4, 5, 40, 17)], saved[1], 64)
    assert engine.metrics.scheduler.num_chunks > 0


def test_a_hit_may_end_amid_a_run(saved: Saved, opened: Any):
    engine, first = opened(block_size=2, max_num_batched_tokens=22), tiny.prompt(43)
    for prompt in (first, first, [*first[:27], *tiny.prompt(9, seed=1)], [*first[:27], *tiny.prompt(9, seed=2)]):
        assert_greedy(engine, [prompt], saved[1])
    assert engine.metrics.scheduler.num_prefix_hit_tokens == 42 + 22 + 26, "42, 22 and 26 end amid a run"


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


@pytest.mark.slow
@pytest.mark.parametrize("divided", [{"tensor_parallel_size": 2}, {"parallel.data": 2, "parallel.experts": 2}], ids=str)
def test_ranks_and_groups_give_the_tokens_of_one(
    divided: dict[str, Any], saved: Saved, opened: Any, thread_ranks: list[ThreadRanks]
):
    engine = opened(**EVENTFUL, state_memory=1 << 16, **divided)
    assert_tokens_of_groups(engine, saved[1])
    assert thread_ranks[0].meeting.num_collectives > 2 * engine.metrics.scheduler.num_steps


@pytest.mark.parametrize("level", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_latents_and_keys_of_runs_in_fp8_are_those_of_a_cache_that_rounds(level: int, saved: Saved, opened: Any):
    engine = opened(level=level, kv_cache_dtype="fp8", max_num_batched_tokens=32)
    assert_same(engine, saved[1])
    assert engine.metrics.scheduler.num_chunks > 0


def test_drafts_that_are_rejected_amid_runs_change_nothing(tmp_path: Path, opened: Any):
    model = glm5_next.save(tmp_path, drafts=True)
    engine = opened(tmp_path, method="mtp", num_speculative_tokens=3, max_num_seqs=2)
    assert_greedy(engine, [tiny.prompt(23), tiny.prompt(14, seed=1)], model, 40)
    assert engine.metrics.scheduler.num_draft_tokens > 60


@pytest.mark.parametrize(
    ("fields", "overrides", "message"),
    [
        ({"index_kpool_always_select_tail": False}, [], "index_kpool_always_select_tail=false in its config.json is not supported"),
        ({"qk_rope_head_dim": 8}, [], "qk_rope_head_dim=8 in its config.json is not supported"),
        ({"indexer_types": ["full", "shared", "full", "full"]}, [], "model.attention.index.layers: the first layer shares what no layer before it chose"),
        ({"layer_types": ["linear_attention", "mamba"] * 2}, [], "mamba in .* is no type of layers"),
        ({}, ["model.attention.rope.kind=default", "model.attention.index=null"], "model.attention.rope: 0 dims of 0 would be rotated, an odd number or none"),
        ({}, ["model.attention.rope_dim=8", "model.attention.rope.kind=default"], "model.attention.index.every=4: keys of runs are of layers without positions"),
        ({}, ["model.attention.rope_dim=null"], "model.attention.rope_dim has no value; kind mla needs it"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_line(
    fields: dict[str, Any], overrides: list[str], message: str, saved: Saved, tmp_path: Path
):
    shutil.copy(saved[0] / "config.json", tmp_path)
    glm5_next.edit_text(tmp_path, **fields)
    with pytest.raises(AtomError, match=message) as error:
        load([f"checkpoint={tmp_path}", *overrides])
    assert "\n" not in str(error.value)


def test_the_kv_and_states_of_glm_5_3_flash(tmp_path: Path):
    """A token has 11 times 512 numbers of a latent and a fourth of 128 of a key; a sequence 34 states, 4 MiB each.

    The config's values are those of zai-org/GLM-5.3-Flash that transformers' defaults and vLLM's and SGLang's code
    quote, put together without its formats.
    """
    shutil.copy(CONFIG, tmp_path / "config.json")
    kinds = {kind.name: kind for kind in state_kinds(semantic_graph(load([f"checkpoint={tmp_path}"])), 16)}
    (states,) = (kind for kind in kinds.values() if kind.rule.in_slot)
    assert states.block_bytes == 34 * (64 * 128 * 128 * 4 + 3 * 3 * 64 * 128 * 2)
    assert {name: kind.bytes_per_token for name, kind in kinds.items() if not kind.rule.in_slot} == {
        "full": 11 * 512 * 2, "every_4": 11 * 128 // 4 * 2, "window_4": 11 * 2 * 128 * 2,
    }  # fmt: skip
