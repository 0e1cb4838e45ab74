"""What a configuration says of layers and experts, held against a checkpoint's header before a text is written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import atom.compiler.compile
from atom import LLMEngine
from atom.assemble import compiling
from atom.config import Config
from atom.config.load import load
from atom.errors import CheckpointError, ConfigError
from atom.weights import check_counts

Vary = Callable[..., str]


@pytest.fixture
def vary(checkpoints: Callable[[str], Path], tmp_path: Path) -> Vary:
    """A copy of a tiny checkpoint whose config.json says something else."""

    def make(name: str, **changes: Any) -> str:
        shutil.copytree(checkpoints(name), tmp_path / name)
        path = tmp_path / name / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
        return str(tmp_path / name)

    return make


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"num_hidden_layers": 400}, "has 3 layers, its configuration says 400"),
        ("llama", {"num_hidden_layers": 4}, "has 3 layers, its configuration says 4"),
        ("qwen3_moe", {"num_experts": 10_000}, "has 16 experts, its configuration says 10000"),
        ("qwen3_moe_dense_step_stacked", {"num_experts": 7}, "has 6 experts, its configuration says 7"),
    ],
)
def test_more_than_is_stored_is_refused_before_a_text_is_written(
    vary: Vary, monkeypatch: pytest.MonkeyPatch, name: str, changes: dict[str, Any], message: str
) -> None:
    def write(*_: Any) -> None:
        pytest.fail("a text is written")

    monkeypatch.setattr(compiling, "compile_model", write)
    with pytest.raises(CheckpointError, match=message):
        LLMEngine(vary(name, **changes), device="cpu")


def test_a_folder_without_weights_is_distinguished_from_one_with_too_few(vary: Vary, tmp_path: Path) -> None:
    folder = vary("llama")
    (tmp_path / "llama" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="the checkpoint has no weights; download it again, or take load_dummy"):
        LLMEngine(folder, device="cpu")


def test_a_gguf_that_states_more_layers_than_it_holds_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from gguf import GGUFWriter

    path = tmp_path / "tiny.gguf"
    writer = GGUFWriter(path, "llama")
    numbers = {"embedding_length": 8, "block_count": 500, "attention.head_count": 1, "feed_forward_length": 8}
    for key, value in (numbers | {"context_length": 16, "vocab_size": 4}).items():
        writer.add_uint32(f"llama.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="the checkpoint has no weights; download it again"):
        LLMEngine(str(path), device="cpu")


def test_as_many_as_are_stored_are_taken(checkpoints: Callable[[str], Path]) -> None:
    for name in ("llama", "qwen3_moe_dense_list", "gpt_oss", "deepseek_v3"):
        config = load([f"checkpoint={checkpoints(name)}"])
        check_counts(config.model, open_stored(config))


def test_a_number_of_layers_that_no_number_has_is_counted_like_others(checkpoints: Callable[[str], Path]) -> None:
    config = load([f"checkpoint={checkpoints('llama')}"])
    stored = open_stored(config)
    tensor = next(iter(stored.values()))
    with pytest.raises(CheckpointError, match="has 1 layers"):
        check_counts(config.model, {f"model.layers.{'9' * 5000}.input_layernorm.weight": tensor})


def open_stored(config: Config) -> dict[str, Any]:
    from atom.checkpoint import SILENT
    from atom.config.checkpoint import open_for

    return dict(open_for(config, SILENT).tensors)


@pytest.mark.parametrize("layers", [30_000, 10**6, 2**31])
def test_explain_has_a_bound_for_layers_which_it_names(vary: Vary, layers: int) -> None:
    with pytest.raises(ConfigError, match=f"model.layers={layers} must be a whole number from 1 to 512"):
        load([f"checkpoint={vary('llama', num_hidden_layers=layers)}", "job=explain"])


def test_explain_has_a_bound_for_the_experts_of_all_layers(vary: Vary) -> None:
    folder = vary("qwen3_moe", num_experts=2**31)
    with pytest.raises(ConfigError, match="experts=2147483648 must be a whole number from 1 to 131072"):
        load([f"checkpoint={folder}", "job=explain"])
    with pytest.raises(ConfigError, match=r"model\.layers=3 of model\.mlp\.\*\.experts are more than 131072 in all"):
        load([f"checkpoint={folder}", "job=explain", "model.mlp.0.experts=100000"])


def test_a_width_that_no_tensor_has_is_refused_before_anything_is_compiled(
    vary: Vary, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = vary("llama", hidden_size=2**30, head_dim=12)

    def compile_anyway(*_: Any) -> None:
        pytest.fail("pieces are compiled")

    monkeypatch.setattr(atom.compiler.compile, "compile_pieces", compile_anyway)
    with pytest.raises(CheckpointError, match=r"the model expects \[101, 1073741824\]"):
        LLMEngine(folder, device="cpu")
