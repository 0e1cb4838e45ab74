"""What is particular to a mixture of experts: its weights, its errors, and which of them are read."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from probe import assert_logits
from safetensors.torch import load_file, save_file

from atom import LLMEngine, SamplingParams
from atom.checkpoint import hub
from atom.config.load import load
from atom.errors import AtomError, CheckpointError, ConfigError, UnsupportedError

Checkpoints = Callable[[str], Path]


def changed(folder: Path, target: Path, tensors: Callable[[dict[str, Any]], Any] = dict, **config: Any) -> Path:
    """A copy of a checkpoint with other tensors or other values in its config.json."""
    shutil.copytree(folder, target)
    written = json.loads((target / "config.json").read_text()) | config
    (target / "config.json").write_text(json.dumps(written))
    stored = load_file(target / "model.safetensors")
    save_file(tensors(stored), target / "model.safetensors", {"format": "pt"})
    return target


def opened(folder: Path, **fields: Any) -> LLMEngine:
    return LLMEngine(model=str(folder), **{"dtype": "fp32", "level": 1, "kv_cache_memory": 1 << 22, **fields})


@pytest.mark.parametrize("level", [0, 1])
def test_experts_that_no_token_chose_are_not_read(
    checkpoints: Checkpoints, references: Any, tmp_path: Path, level: int
):
    """The correction keeps experts 10 and up from being chosen; NaN in them must change nothing."""
    folder = changed(
        checkpoints("kimi_k2"),
        tmp_path / "barred",
        lambda stored: (
            stored
            | {name: torch.tensor([0.0] * 10 + [-9.0] * 14) for name in stored if name.endswith("correction_bias")}
        ),
    )
    numbers = {f".experts.{expert}." for expert in range(10, 24)}

    def spoil(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        spoiled = [name for name in stored if any(number in name for number in numbers)]
        assert len(spoiled) == 2 * 14 * 3
        return stored | {name: torch.full_like(stored[name], math.nan) for name in spoiled}

    tokens = tiny.prompt(40)
    engine = opened(changed(folder, tmp_path / "spoiled", spoil), level=level)
    assert_logits(engine, tokens, tiny.reference(folder))
    (answer,) = engine.generate([tokens], SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
    tiny.assert_greedy(answer, tokens, tiny.reference(folder))
    engine.close()


def test_the_layer_that_predicts_further_tokens_is_known_and_left_out(
    checkpoints: Checkpoints, references: Any, tmp_path: Path
):
    def add(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return stored | {
            "model.layers.3.eh_proj.weight": torch.zeros(48, 96),
            "model.layers.3.mlp.gate.weight": torch.zeros(2),
        }

    tokens = tiny.prompt(20)
    engine = opened(changed(checkpoints("deepseek_v3"), tmp_path / "mtp", add))
    assert_logits(engine, tokens, references("deepseek_v3"))
    engine.close()
    with pytest.raises(CheckpointError, match=r"does not use tensor model\.layers\.3\.eh_proj\.weight \(and 1 more\)"):
        opened(changed(checkpoints("deepseek_v3"), tmp_path / "none", add, num_nextn_predict_layers=0))


def without(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda stored: {key: tensor for key, tensor in stored.items() if key != name}


EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.mark.parametrize(
    ("tensors", "error"),
    [
        (without(EXPERT), rf"has no tensor {EXPERT}; is it whole"),
        (lambda stored: stored | {EXPERT.replace(".3.", ".99."): torch.zeros(1)}, r"does not use tensor .*experts\.99\.up_proj"),
        (lambda stored: stored | {EXPERT: torch.zeros(24, 47)}, rf"tensor {EXPERT} is \[24, 47\], the model expects \[24, 48\]"),
    ],
)  # fmt: skip
def test_a_wrong_expert_weight_is_named(checkpoints: Checkpoints, tmp_path: Path, tensors: Any, error: str):
    with pytest.raises(CheckpointError, match=error):
        opened(changed(checkpoints("qwen3_moe"), tmp_path / "wrong", tensors))


@pytest.mark.parametrize(
    ("config", "kind", "error"),
    [
        ({"topk_method": "coin_toss"}, UnsupportedError, r"model\.mlp\.0\.router\.method=coin_toss is not supported \(supported: greedy, group_limited_greedy, noaux_tc"),
        ({"scoring_func": "tanh"}, UnsupportedError, r"model\.mlp\.0\.router\.score=tanh is not supported \(supported: null, softmax, sigmoid"),
        ({"n_group": 3}, ConfigError, r"model\.mlp\.0\.router\.groups=3: 16 experts do not divide into them"),
        ({"topk_group": 5}, ConfigError, r"model\.mlp\.0\.router\.top_groups=5 is more than its groups=4"),
        ({"num_experts_per_tok": 9}, ConfigError, r"model\.mlp\.0\.top_k=9 is more than the 8 experts that a token may choose from"),
        ({"num_experts_per_tok": None}, CheckpointError, r"config\.json has null for num_experts_per_tok; .* needs a value for model\.mlp\[0\]\.top_k"),
        ({"kv_lora_rank": None}, CheckpointError, r"config\.json has null for kv_lora_rank"),
        ({"qk_rope_head_dim": 7}, ConfigError, r"model\.attention\.rope: 7 dims of 7 would be rotated, an odd number or none"),
    ],
)  # fmt: skip
def test_a_rule_that_cannot_be_is_one_line(
    checkpoints: Checkpoints, tmp_path: Path, config: dict[str, Any], kind: type[AtomError], error: str
):
    folder = changed(checkpoints("deepseek_v3"), tmp_path / "wrong", **config)
    with pytest.raises(kind, match=error) as caught:
        load([f"checkpoint={folder}"])
    assert "\n" not in str(caught.value)


GROWTH = """
import sys
from pathlib import Path
from atom import LLMEngine

def anonymous():
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024

LLMEngine(model=sys.argv[1], load_dummy=True, dtype="fp32", level=1, kv_cache_memory=1 << 20, **{{"model.layers": 1}}).close()
before = anonymous()
engine = LLMEngine(model=sys.argv[2], dtype="fp32", level=1, kv_cache_memory=1 << 20)
print(anonymous() - before)
"""


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", ["experts", "stacked"])
def test_experts_are_in_memory_once(form: str, tmp_path: Path, checkpoints: Checkpoints):
    config = transformers.Qwen3MoeConfig(**{**tiny.SIZES, **SIZES})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path, save_original_format=form == "experts")
    weights = sum(parameter.nbytes for parameter in model.parameters())
    command = [sys.executable, "-c", GROWTH.format(), str(checkpoints("llama")), str(tmp_path)]
    grown = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert 0.98 * weights < grown < 1.15 * weights  # what was free before may be used


SIZES = {"hidden_size": 512, "num_hidden_layers": 2, "num_experts": 24, "num_experts_per_tok": 2, "moe_intermediate_size": 768,
         "head_dim": 64}  # fmt: skip


def test_what_cannot_run_is_refused_before_its_weights_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    published = Path(__file__).parent / "configs" / "deepseek_v3.json"
    shutil.copy(published, tmp_path / "config.json")
    asked: list[bool] = []

    def download(_location: str, *, weights: bool, **_: Any) -> Path:
        asked.append(weights)
        return tmp_path

    monkeypatch.setattr(hub, "download", download)
    monkeypatch.setattr(hub, "tensor_names", lambda _name, _revision: ())
    with pytest.raises(UnsupportedError, match=r"q_a_proj\.weight is stored as int4z: a format without parts"):
        LLMEngine(model="owner/name", kv_cache_memory=1 << 34, **{"model.fmt": "int4z"})
    assert asked == [False], "config.json was read, and nothing else"
