"""serve.draft_model: another checkpoint's configuration next to the model's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import eagle3
import pytest
import tiny

from atom.config.draft import find_aux_layers
from atom.config.load import load
from atom.config.schema import Eagle3Config
from atom.errors import AtomError, CheckpointError, ConfigError, UnsupportedError

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes the config.json of a draft of EAGLE-3, for a model with a hidden size of 48."""

    def make(**more: Any) -> Path:
        eagle3.write_config(tmp_path, tiny.config("qwen3").to_dict(), **{"draft_vocab_size": 31, **more})
        return tmp_path

    return make


@pytest.fixture
def model(checkpoints: Callable[[str], Path]) -> list[str]:
    return [f"checkpoint={checkpoints('qwen3')}", "device=cpu"]


def drafting(model: list[str], draft: Path | str, method: str = "eagle3") -> list[str]:
    return [*model, f"serve.method={method}", f"serve.draft_model={draft}"]


def test_a_draft_of_eagle3_is_read_from_its_config_only(model: list[str], write: Write):
    config = load(drafting(model, write(rms_norm_eps=1e-3)))
    draft = config.draft
    assert draft is not None and draft.eagle3 is not None
    assert (draft.name, draft.layers, draft.hidden, draft.eagle3.vocab, draft.norm.eps) == ("eagle3", 1, 48, 31, 1e-3)
    assert "embedding" not in draft.weights and draft.weights["d2t"] == "d2t"
    assert config.serve.num_speculative_tokens == 3 and load(model).draft is None
    other = load(drafting(model, write(draft_vocab_size=101, target_hidden_size=48, hidden_size=40))).draft
    assert other is not None and "embedding" in other.weights and "d2t" not in other.weights


def test_the_names_in_a_header_say_what_a_draft_brings(model: list[str], checkpoints: Any, tmp_path: Path):
    folder = eagle3.save(checkpoints("qwen3"), tmp_path / "all", has_embedding=True, draft_vocab=9)
    draft = load(drafting(model, folder)).draft
    assert draft is not None and {"embedding", "d2t"} <= draft.weights.keys()
    draft = load(drafting(model, eagle3.save(checkpoints("qwen3"), tmp_path / "little"))).draft
    assert draft is not None and not {"embedding", "d2t"} & draft.weights.keys()


def test_a_draft_of_speculators_states_its_layer_in_an_object(model: list[str], write: Write):
    folder = write()
    flat = json.loads((folder / "config.json").read_text())
    outer = {"speculators_model_type": "eagle3", "architectures": ["Eagle3DraftModel"], "draft_vocab_size": 31,
             "norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": [0, 1]}  # fmt: skip
    (folder / "config.json").write_text(json.dumps({**outer, "transformer_layer_config": flat}))
    draft = load(drafting(model, folder)).draft
    assert draft is not None and draft.eagle3 is not None
    assert (draft.hidden, draft.eagle3.input_of, draft.eagle3.norm_before_residual) == (48, [0, 1], True)


def test_any_model_file_reads_a_model_that_drafts(model: list[str], checkpoints: Any):
    draft = load(drafting(model, checkpoints("gemma2"), "draft")).draft
    assert draft is not None and (draft.name, draft.eagle3) == ("gemma2", None)


@pytest.mark.parametrize(
    ("eagle3_config", "layers"),
    [
        (Eagle3Config(), [2, 18, 33]),
        (Eagle3Config(input_of=[]), [2, 18, 33]),
        (Eagle3Config(input_of=[30, 2, 17]), [2, 17, 30]),
        (Eagle3Config(output_of=[1, 17, 32]), [2, 18, 33]),
    ],
)
def test_the_layers_that_a_draft_reads(eagle3_config: Eagle3Config, layers: list[int]):
    """Of 36: vLLM counts them by their input, SGLang by their output, and both have one default."""
    assert find_aux_layers(eagle3_config, 36) == layers


@pytest.mark.parametrize(
    ("more", "error", "reason"),
    [
        ({"architectures": ["MedusaModel"], "draft_vocab_size": None}, UnsupportedError, "not a draft of EAGLE-3: its config.json has the architecture MedusaModel and no draft_vocab_size; serve.method=draft takes models, and EAGLE-1, Medusa"),
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": None}, UnsupportedError, "has the architecture LlamaForCausalLM and no draft_vocab_size"),
        ({"hidden_size": 40}, ConfigError, "it drafts for a model with a hidden size of 40, not 48; take another one"),
        ({"target_hidden_size": 64}, ConfigError, "it drafts for a model with a hidden size of 64, not 48"),
        ({"num_hidden_layers": 2}, UnsupportedError, r"num_hidden_layers=2 in its config.json is not supported \(supported: 1"),
        ({"kv_lora_rank": 512}, UnsupportedError, "kv_lora_rank=512 in its config.json is not supported"),
        ({"norm_output": True}, UnsupportedError, r"norm_output=true in its config.json is not supported \(supported: false"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 4]}, ConfigError, "it reads the input of layer 4 of the model, which has 3 layers"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, UnsupportedError, r"model.eagle3.use_aux_hidden_state=false is not supported \(supported: true"),
    ],
)  # fmt: skip
def test_what_is_no_draft_for_the_model_is_refused(
    more: dict[str, Any], error: type[AtomError], reason: str, model: list[str], write: Write
):
    with pytest.raises(error, match=f"^serve.draft_model: .*{reason}"):
        load(drafting(model, write(**more)))


def test_a_draft_of_one_stream_is_not_for_a_model_of_several(write: Write, checkpoints: Any):
    model = [f"checkpoint={checkpoints('gemma3n')}", "device=cpu", "dtype=fp32"]
    with pytest.raises(
        UnsupportedError, match=r"^serve.draft_model: .*it reads hidden states of one stream, the model"
    ):
        load(drafting(model, write()))


def test_a_draft_and_a_model_take_their_own_methods(model: list[str], write: Write, checkpoints: Any):
    with pytest.raises(ConfigError, match=r"^serve.method=eagle3 drafts with another checkpoint; name it in serve.dr"):
        load([*model, "serve.method=eagle3"])
    with pytest.raises(
        ConfigError, match=r"^serve.draft_model=x is not read by serve.method=ngram; set serve.method=e"
    ):
        load([*model, "serve.method=ngram", "serve.draft_model=x"])
    with pytest.raises(ConfigError, match=r"^serve.draft_model=x drafts nothing by itself; set serve.method=eagle3 or"):
        load([*model, "serve.draft_model=x"])
    with pytest.raises(ConfigError, match=r"is a draft of EAGLE-3; set serve.method=eagle3$"):
        load(drafting(model, write(), "draft"))
    with pytest.raises(UnsupportedError, match=r"^serve.draft_model: .* has the architecture MedusaModel; .*lists all"):
        load(drafting(model, write(architectures=["MedusaModel"], draft_vocab_size=None), "draft"))
    with pytest.raises(CheckpointError, match=r"^serve.draft_model: no checkpoint './nowhere'"):
        load(drafting(model, "./nowhere", "draft"))
    with pytest.raises(ConfigError, match=r"^model=eagle3 drafts for a model; name its checkpoint in serve.draft_mode"):
        load([f"checkpoint={write()}", "model=eagle3", "device=cpu"])
    with pytest.raises(UnsupportedError, match=r"^serve.draft_model: parallel.tensor=2 does not divide 3 heads"):
        load([*drafting(model, checkpoints("qwen3_window"), "draft"), "parallel=tp2"])
    with pytest.raises(ConfigError, match=r"^draft is the model of serve.draft_model and cannot be set; set that$"):
        load([*model, "draft.layers=2"])
