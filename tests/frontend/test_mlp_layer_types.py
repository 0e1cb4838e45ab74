"""mlp_layer_types of config.json says which layers have experts, whatever their number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
from probe import assert_logits

from atom import LLMEngine
from atom.config.load import load
from atom.errors import AtomError

TYPES = ["sparse", "dense", "sparse"]


@pytest.mark.parametrize("variant", ["exaone_moe", "glm4_moe_lite", "mellum"])
def test_layers_have_the_mlps_that_a_checkpoint_lists(variant: str, tmp_path: Path) -> None:
    folder, tokens = tmp_path / "checkpoint", tiny.prompt(40)
    tiny.save_changed(variant, folder, mlp_layer_types=TYPES)
    config = json.loads((folder / "config.json").read_text())
    config.pop("first_k_dense_replace", None)  # glm4_moe_lite has none
    (folder / "config.json").write_text(json.dumps(config))
    engine = LLMEngine(model=str(folder), level=0, dtype="fp32", kv_cache_memory=1 << 22)
    assert_logits(engine, tokens, tiny.reference(folder))
    engine.close()


@pytest.mark.parametrize(
    ("variant", "types", "message"),
    [
        ("mellum", ["sparse"], "model.mlp_layer_types names only 1 layers, the model has 3"),
        (
            "mellum",
            ["hash"] * 3,
            "model.mlp_layer_types: hash is not supported for this model (supported: dense, sparse)",
        ),
        ("llama", TYPES, "model.mlp_layer_types: sparse is not supported for this model (supported: dense)"),
        ("llama", "sparse", "model.mlp_layer_types=sparse is not a list of texts"),
    ],
)
def test_types_that_a_model_has_not_are_one_line(variant: str, types: object, message: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    tiny.save_changed(variant, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"mlp_layer_types": types}))
    with pytest.raises(AtomError) as error:
        load([f"checkpoint={folder}"])
    assert str(error.value) == message
