"""What an engine is made of, and what distinguishes the KV of one from that of another."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from atom.assemble.adapters import open_adapters, open_loras
from atom.assemble.engine import identify_kv, open_engine
from atom.assemble.loading import has_own_heads
from atom.assemble.sleep import open_sleeper, stable_memories
from atom.checkpoint import SilentProgress
from atom.config import Config, ModelConfig, ServeConfig
from atom.config.load import load
from atom.errors import CheckpointError
from atom.graph import Graph, Mesh, parse

TEXT = """\
def f(q: fp32[T, 1, 4], k: fp32[T, 1, 4]):
    a = attention(q, k, k, KV("layers.0", fp32[2, 1, 4]), scale=1.0)
    return a
"""


@pytest.mark.parametrize(
    "other",
    [
        {"graph": parse(TEXT.replace("scale=1.0", "scale=0.5"))},
        {"stored": ["model.safetensors 10 2"]},
        {"scales": {"k": 0.5}},
        {"block_size": 32},
        {"window": 4},
    ],
    ids=["text", "weights", "scales", "block size", "window of a tower"],
)
def test_kv_is_another_s_if_text_weights_scales_blocks_or_windows_differ(other: dict[str, Any]):
    known: dict[str, Any] = {"graph": parse(TEXT), "stored": ["model.safetensors 10 1"], "scales": {}, "block_size": 16}
    assert identify_kv(**known) == identify_kv(**{**known, "graph": parse(TEXT)})
    assert identify_kv(**known) != identify_kv(**{**known, **other})


def test_an_engine_without_adapters_and_sleep_makes_no_room_for_them():
    runner: Any = None
    assert open_adapters(Graph(), {}, ServeConfig(), Mesh()) is None
    assert open_loras(None, [], None, None, {}) is None
    assert stable_memories(Config()) == (None, None)
    assert open_sleeper(runner, Graph(), {}, Config(), {}, None, None) is None


def test_a_wrong_folder_of_an_adapter_is_refused_before_anything_is_compiled(
    checkpoints: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("atom.assemble.engine.compile_with", lambda *args: pytest.fail("it compiles"))
    config = load([f"checkpoint={checkpoints('qwen3')}", "device=cpu", f"serve.lora_modules={{sql: {tmp_path}}}"])
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        open_engine(config, SilentProgress())


def test_a_model_and_its_draft_have_heads_of_their_own_unless_tied():
    assert has_own_heads(Config(model=ModelConfig(tied=True))) == [False]
    assert has_own_heads(Config(model=ModelConfig(tied=True), draft=ModelConfig())) == [False, True]


def test_replicas_draw_by_seeds_of_their_own(checkpoints: Any):
    fields = ["device=cpu", "dtype=fp32", "level=0", "serve.kv_cache_memory=4MiB", "seed=5"]
    config = load([f"checkpoint={checkpoints('qwen3')}", *fields])
    seeds = []
    for replica in (0, 1):
        engine = open_engine(config, SilentProgress(), replica=replica)
        seeds.append(engine._seeds.getrandbits(63))
        engine.close()
    assert seeds == [random.Random(5).getrandbits(63), random.Random(6).getrandbits(63)]
