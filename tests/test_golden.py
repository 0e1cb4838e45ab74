"""The texts of a 2-layer version of each model file, as they were when somebody last looked at them.

Each family has its semantic text; the lowered ones have those of LOWERED.

`scripts/test --update-golden` writes them anew; look at the diff before it is committed.
"""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import tiny

from atom.compiler import compile_graph, semantic_graph
from atom.config import Config
from atom.config.load import load
from atom.graph import Mesh, show
from atom.kernels import Target

GOLDEN = Path(__file__).parent / "golden"
MODEL_FILES = sorted(path.stem for path in (GOLDEN.parents[1] / "conf" / "model").glob("*.yaml"))
ABSTRACT = {"auto", "decoder", "eagle3"}  # no models by themselves
TEXTS = {
    "cosmos3_edge",
    "ernie4_5_vl_moe",
    "glm4v",
    "glm4v_moe",
    "glm5_next",
    "glm_ocr",
    "kimi_k25",
    "kimi_vl",
    "llava",
    "llava_mistral",
    "mistral4",
    "mistral_large4",
    "mllama",
    "molmo2",
    "muse_glimmer",
    "muse_spark",
    "paddleocr_vl",
    "paligemma",
    "paligemma2",
    "qwen2_audio",
    "step3p5",
    "voxtral",
}  # of models that read images or hear
BY_NAME = {
    "alice_ai", "baichuan", "bailing_moe", "chatglm", "deepseek", "internlm2", "kimi_k3", "mimo", "minicpm", "orion", "ouro", "pangu_embedded", "param2moe",
}  # fmt: skip  # which transformers has no class of
OTHERS = ABSTRACT | TEXTS | BY_NAME | {"nemotron_h_moe"} | tiny.COMBINED.keys()  # whose blocks the texts of others have
CONFIG_OF = {"qwen3_vl_moe": "qwen3_moe"}  # the text_config of the first has the fields of the second
NUM_LAYERS = {"gemma3n": 4, "gemma4": 4}  # the last one reads KV of another
TARGET = Target("cpu", frozenset({"onednn_bf16", "onednn_fp32", "blocks_bf16", "blocks_fp32"}))


LOWERED = {
    "apertus": "one projection up, xIELU, q and k normalized by head, llama3's angles",
    "cohere": "attention and MLP in parallel, layer norm without bias, interleaved rope",
    "deepseek_v3": "latent attention, groups of experts, a shared expert, a first dense layer",
    "gemma2": "softcaps, windows, norms before and after",
    "gemma3": "norms with an offset, q and k normalized by head, two ropes",
    "gemma4": "KV that layers share, values that are keys, inputs by layer, experts beside the mlp",
    "gpt_oss": "sinks, windows, biases of experts, interleaved gate and up",
    "ministral3": "queries that grow with their position",
    "mixtral": "separate experts that are stacked, and blocks of them",
    "phi": "formats of the embedded GGUF, attention and MLP in parallel, layer norm with bias",
    "qwen2_moe": "a gated shared expert, biases of q, k and v",
}  # what is lowered in another way; all that other families add is in their semantic text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("golden")


@functools.cache
def load_once(*overrides: str) -> Config:
    return load(list(overrides))


RANKS = {
    "llama": Mesh(2),
    "deepseek_v3": Mesh(2, experts=2, data=2),
    "gpt_oss": Mesh(4, experts=2),
    "olmo2": Mesh(2),
    "qwen3_moe": Mesh(4, experts=4),
    "gemma2": Mesh(2),
    "qwen3_5": Mesh(2),
}


@pytest.mark.parametrize("name", RANKS)
def test_the_text_of_ranks_is_the_golden_one(name: str, folder: Path, request: pytest.FixtureRequest):
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "config.json").write_text(json.dumps(tiny.config(name).to_dict()))
    config = load_once(f"model={name}", "model.layers=2", f"checkpoint={folder / name}", "dtype=bf16", "device=cpu",
                       *(f"parallel.{axis}={size}" for axis, size in asdict(RANKS[name]).items() if size > 1))  # fmt: skip
    text = show(compile_graph(replace(config, level=1), target=TARGET))
    golden = GOLDEN / f"{name}.ranks.py"
    if request.config.getoption("--update-golden"):
        golden.write_text(text)
    assert text == golden.read_text()


TEXTS_OF = [(name, "semantic") for name in MODEL_FILES if name not in OTHERS] + [
    (name, stage) for name in LOWERED for stage in ("level_0", "level_1")
]


def test_no_golden_text_is_left_of_another_name():
    read = {f"{name}.{stage}.py" for name, stage in [*TEXTS_OF, *((name, "ranks") for name in RANKS)]}
    assert {path.name for path in GOLDEN.glob("*.py")} == read


@pytest.mark.parametrize(("name", "stage"), TEXTS_OF)
def test_the_text_is_the_golden_one(name: str, stage: str, folder: Path, request: pytest.FixtureRequest):
    overrides = [f"model={name}", f"model.layers={NUM_LAYERS.get(name, 2)}"]
    if (variant := CONFIG_OF.get(name, name)) in tiny.VARIANTS | tiny.RECURRENT:
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(tiny.config(variant).to_dict()))
        overrides += [f"checkpoint={folder / name}", "dtype=bf16"]
    config = load_once(*overrides)
    if stage == "semantic":
        text = show(semantic_graph(config))
    else:
        text = show(compile_graph(replace(config, level=int(stage[-1])), target=TARGET))
    golden = GOLDEN / f"{name}.{stage}.py"
    if request.config.getoption("--update-golden"):
        golden.write_text(text)
    assert text == golden.read_text()
