"""Tables that stay in host memory, on a CPU, where the check that refuses them there is left out; tests/gpu has a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf_files
import pytest
import tiny
import torch
from safetensors.torch import load_file

from atom import LLMEngine, SamplingParams, weights
from atom.compiler import compile_graph
from atom.compiler.artifact import launch_ingredients, recipe_of
from atom.config.load import engine_overrides, load
from atom.errors import ConfigError, UnsupportedError
from atom.graph import Dequantize, Graph, Host, Type, W
from atom.kernels import Target
from atom.kernels.host_memory import HostTensor

Open = Callable[..., LLMEngine]

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [tiny.prompt(length, seed=length) for length in (3, 17, 30)]
TABLE = "embed_tokens_per_layer"
NVIDIA = Target("cuda", frozenset({"nvidia", "sm_90"}))


def graph_of(folder: Path, names: list[str], target: Target = NVIDIA, **fields: Any) -> Graph:
    given = {"dtype": "bf16", "device": "cuda", "cpu_offload_params": names, **fields}
    return compile_graph(load(engine_overrides(str(folder), given)), target=target)


def hosted(graph: Graph) -> list[str]:
    return [str(recipe.part.name) for recipe in graph.recipes() if isinstance(recipe, Host)]


@pytest.mark.parametrize("level", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_tokens_are_those_of_transformers(
    level: int,
    open_engine: Open,
    references: Any,
    checkpoints: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr("atom.config.resolve.check_offload", lambda config, device: None)
    engine = open_engine("gemma4", level=level, cpu_offload_params=[TABLE], enable_sleep_mode=True)
    assert re.search(r"tables in pinned host memory: 1\.28e-05 GiB$", capsys.readouterr().err, re.MULTILINE)
    held = engine._engine.runner.model._bindings.weights
    ((recipe, table),) = ((recipe, value) for recipe, value in held.items() if isinstance(value, HostTensor))
    assert isinstance(recipe, Host)
    stored = load_file(checkpoints("gemma4") / "model.safetensors")
    assert torch.equal(table.on_host, next(value for name, value in stored.items() if TABLE in name))
    for level_of_sleep in (None, 1, 2):
        if level_of_sleep:
            engine.sleep(level_of_sleep)
            engine.wake_up()
        for answer, prompt in zip(engine.generate(PROMPTS, GREEDY), PROMPTS, strict=True):
            tiny.assert_greedy(answer, prompt, references("gemma4"))


def test_the_device_holds_fewer_bytes(checkpoints: Any):
    graphs = [graph_of(checkpoints("gemma4"), names) for names in ([], [TABLE])]
    assert [hosted(graph) for graph in graphs] == [[], [f"model.{TABLE}.weight"]]
    without, less = map(weights.num_bytes, graphs)
    assert without - less == 107 * 4 * 8 * 2, "rows, layers, inputs of a layer, bytes"


def test_an_artifact_is_of_its_tables(checkpoints: Any):
    given = engine_overrides(str(checkpoints("gemma4")), {"device": "cuda", "level": 2, "cpu_offload_params": [TABLE]})
    plain, offloaded = load(given[:-1]), load(given)
    ingredients = [launch_ingredients(config, NVIDIA) for config in (plain, offloaded)]
    assert ingredients[1] == ingredients[0] | {"in host memory": TABLE} and "in host memory" not in ingredients[0]
    assert load(recipe_of(offloaded)).serve.cpu_offload_params == [TABLE]


def test_a_table_of_blocks_is_unpacked_there(tmp_path: Path):
    widths = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "hidden_size_per_layer_input": 32,
    }
    tiny.save_changed("gemma4", tmp_path / "checkpoint", **widths)
    path = gguf_files.convert(tmp_path / "checkpoint", tmp_path / "tiny.gguf", rounded="Q8_0", packed=True)
    tables = [recipe for recipe in graph_of(path, [TABLE]).recipes() if isinstance(recipe, Host)]
    assert tables == [Host(Dequantize(W(f"model.{TABLE}.weight", Type("bf16", (107, 128), "q8_0"))))]


@pytest.mark.parametrize("parallel", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_ranks_have_the_whole_table(parallel: dict[str, int], checkpoints: Any):
    assert hosted(graph_of(checkpoints("gemma4"), [TABLE], job={"kind": "explain"}, **parallel)) == [
        f"model.{TABLE}.weight"
    ]


def test_what_is_no_table_is_refused(checkpoints: Any):
    only = "only tables of which a token reads a row may stay in host memory"
    for name, what in {"layers.0": "is read by more than an embedding", "experts_of": "names no tensor"}.items():
        message = f"serve.cpu_offload_params: {name} {what}; {only} (of this model: model.{TABLE}.weight)"
        with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
            graph_of(checkpoints("gemma4"), [TABLE, name])
    message = f"serve.cpu_offload_params: embed_tokens is read by more than an embedding; {only} (this model has none)"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        graph_of(checkpoints("llama_tied"), ["embed_tokens"])


def test_a_device_that_cannot_is_refused(checkpoints: Any):
    with pytest.raises(UnsupportedError, match=r"^serve\.cpu_offload_params is for NVIDIA's GPUs; leave it out$"):
        graph_of(checkpoints("gemma4"), [TABLE], Target("cuda", frozenset({"amd", "gfx942"})))
    message = (
        "serve.cpu_offload_params=[embed_tokens_per_layer] is for GPUs: on device=cpu all weights are in host memory"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}; leave it out$"):
        graph_of(checkpoints("gemma4"), [TABLE], device="cpu")
