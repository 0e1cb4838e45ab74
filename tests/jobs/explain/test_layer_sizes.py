"""Where bytes and work are, against the header of a safetensors file and the arithmetic of a config."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from atom.compiler import compile_graph
from atom.config.load import load, load_gpu
from atom.graph import Graph
from atom.jobs.explain.layer_sizes import KV, STATE, divide_sizes, group_layers
from atom.jobs.explain.picture import draw_model
from atom.kernels import Target

CONFIGS = Path(__file__).parents[2] / "configs"


def graph_of(checkpoint: Path, *fields: str) -> Graph:
    return compile_graph(load([f"checkpoint={checkpoint}", "dtype=fp32", "serve.kv_cache_memory=4194304", *fields]))


@pytest.mark.parametrize("level", [0, 1])
def test_every_tensor_of_a_file_is_counted_once_and_in_its_layer(level: int, checkpoints: Any):
    header: Counter[tuple[int, str, str]] = Counter()
    others = 0
    with safe_open(checkpoints("qwen3_next") / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118
            num_bytes = 4 * file.get_tensor(name).numel()
            if not name.startswith("model.layers."):
                others += num_bytes
                continue
            number, part, row, *_ = [*name.removeprefix("model.layers.").split("."), ""]
            header[int(number), part, "" if row in ("weight", "bias") else row] += num_bytes
    found: Counter[tuple[int, str, str]] = Counter()
    entries = divide_sizes(graph_of(checkpoints("qwen3_next"), f"level={level}"))
    for entry in entries:
        if entry.place.stack:
            assert entry.place.stack == "model.layers"
            found[entry.place[2:]] += entry.num_bytes
    assert {place: round(size) for place, size in found.items() if size} == header
    outside = [entry for entry in entries if not entry.place.stack and entry.place.part != "constants"]
    assert round(sum(entry.num_bytes for entry in outside)) == others


def test_layers_are_of_one_kind_if_they_have_the_same_tensors_and_states(checkpoints: Any):
    graph = graph_of(checkpoints("qwen3_next"), "level=1")
    config = json.loads((checkpoints("qwen3_next") / "config.json").read_text())
    kinds = group_layers(graph, divide_sizes(graph))
    numbers = {  # in transformers' config
        kind: [at for at, each in enumerate(config["layer_types"]) if each == kind]
        for kind in ("linear_attention", "full_attention")
    }
    assert [kind.layers for kind in kinds] == list(numbers.values())
    assert [kind.experts for kind in kinds] == [(2, 6), (2, 6)]
    rows = [{entry.place.row for entry in kind.entries} & {KV, STATE} for kind in kinds]
    assert rows == [{STATE}, {KV}]
    heads, dim = config["num_key_value_heads"], config["head_dim"]
    assert sum(state.type.num_bytes for state in kinds[1].states) == 2 * heads * dim * 4


def test_a_decode_reads_weights_once_and_the_keys_and_values_of_its_sequence(checkpoints: Any):
    path = checkpoints("llama")
    config = json.loads((path / "config.json").read_text())
    with safe_open(path / "model.safetensors", "pt") as file:
        sizes = {name: 4 * file.get_tensor(name).numel() for name in file.keys()}  # noqa: SIM118
    entries = divide_sizes(graph_of(path, "level=1"))
    kept = [entry for entry in entries if entry.place.row == KV]
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    layers, entry_bytes = config["num_hidden_layers"], 2 * config["num_key_value_heads"] * head_dim * 4
    assert sum(entry.decode_bytes for entry in kept) == layers * 1024 * entry_bytes
    read = sum(size for name, size in sizes.items() if name != "model.embed_tokens.weight")
    weights = [entry for entry in entries if entry.place.row != KV and entry.place.part != "constants"]
    assert sum(entry.decode_bytes for entry in weights) == pytest.approx(read)
    down = sum(size for name, size in sizes.items() if "down_proj" in name and ".0." in name)
    assert sum(e.decode_bytes for e in weights if e.place[2:] == (0, "mlp", "down_proj")) == pytest.approx(down)


def test_of_experts_a_token_reads_those_that_it_chose_and_of_shared_ones_all(tmp_path: Path):
    (tmp_path / "config.json").write_text((CONFIGS / "deepseek_v3.json").read_text())
    config = load([f"checkpoint={tmp_path}", "device=cuda", "model.layers=5", "level=1"])
    entries = divide_sizes(compile_graph(config, target=Target("cuda", frozenset(load_gpu("h200").features))))
    rows = {row: [entry for entry in entries if entry.place.row == row] for row in ("experts", "shared_experts")}
    held, read = ({row: sum(e[at] for e in each) for row, each in rows.items()} for at in (2, 3))
    blocks = (7168 // 128) * (2048 // 128)  # of 128 by 128, each with a scale in fp32
    assert held["experts"] == pytest.approx(2 * 256 * 3 * (7168 * 2048 + 4 * blocks))
    assert held["shared_experts"] == pytest.approx(held["experts"] / 256)
    assert read["experts"] == pytest.approx(held["experts"] * 8 / 256)
    assert read["shared_experts"] == pytest.approx(held["shared_experts"]), "one call multiplies by both"


def test_a_layer_that_reads_the_cache_of_another_keeps_nothing(checkpoints: Any):
    graph = graph_of(checkpoints("gemma4_shared"), "level=1")  # the last 2 of 6 layers do so
    kinds = group_layers(graph, divide_sizes(graph))
    sharing = [kind for kind in kinds if not kind.states]
    assert sorted(number for kind in sharing for number in kind.layers) == [4, 5]
    assert all({f"{KV} of an earlier layer"} <= {e.place.row for e in kind.entries} for kind in sharing)


def test_a_head_that_is_the_embedding_counts_once(checkpoints: Any):
    path = checkpoints("gemma4_shared")
    with safe_open(path / "model.safetensors", "pt") as file:
        size = 4 * file.get_tensor("model.embed_tokens.weight").numel()
    entries = divide_sizes(graph_of(path, "level=1"))
    tied = [entry for entry in entries if entry.place.part == "model.embed_tokens"]
    assert {entry.call.partition(" ")[0] for entry in tied} == {"embedding", "linear"}
    assert sum(entry.num_bytes for entry in tied) == sum(entry.decode_bytes for entry in tied) == size


def test_formats_are_named_by_module_if_they_differ(checkpoints: Any):
    formats = (
        'quant.formats={"re:model.layers.[02]..*": "int4[1, 16]", "model.layers.1.mlp": "int8", '
        '"model.layers.1.self_attn": "plain"}'
    )
    drawn = draw_model(graph_of(checkpoints("llama"), "level=1", "quant=int8", formats))
    found = dict(re.findall(r"<td>(\w+(?:<wbr>\w+)*)<small>[^<]*</small><small>([^<]*)</small>", drawn))
    shown = {name.replace("<wbr>", ""): text for name, text in found.items()}
    assert shown == dict.fromkeys(
        ("q_proj", "k_proj", "v_proj", "o_proj"), "fp32 in layer 1; int4[1, 16] in layers 0, 2"
    ) | (dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "int4[1, 16] in layers 0, 2; int8[1, *] in layer 1"))
    alike = draw_model(graph_of(checkpoints("llama"), "level=1"))
    assert "fp32" not in alike, "of one format, nothing is said"
