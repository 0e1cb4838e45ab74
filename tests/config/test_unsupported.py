"""What atom says of architectures that it does not run: conf/unsupported.yaml."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from served_models import SGLANG, VLLM, VLLM_ONCE
from transformers.models.auto import modeling_auto

from atom.config.load import load
from atom.config.model_files import model_files
from atom.config.unsupported import missing_block, unsupported
from atom.errors import UnsupportedError

LISTED = {name for file in model_files() for name in file.spec.get("architectures") or ()}


def names_of(mapping: dict[str, str | tuple[str, ...]]) -> set[str]:
    """The architectures of a mapping of transformers."""
    return {name for entry in mapping.values() for name in ([entry] if isinstance(entry, str) else entry)}


TRANSFORMERS = names_of(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) | names_of(
    modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
)


def test_no_architecture_is_both_in_a_model_file_and_said_to_be_missing():
    assert not LISTED & unsupported().keys()


def test_every_architecture_is_one_of_transformers_vllm_or_sglang():
    assert not unsupported().keys() - TRANSFORMERS - VLLM - SGLANG - VLLM_ONCE


def test_what_is_missing_fits_in_a_line_and_ends_a_sentence():
    for name, missing in unsupported().items():
        line = f"{name} needs {missing}, which atom does not have"
        assert isinstance(missing, str) and len(line) <= 160 and not missing.endswith("."), line


@pytest.fixture
def refused(tmp_path: Path):
    def refuse(**config: object) -> str:
        (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64, **config}))
        with pytest.raises(UnsupportedError) as error:
            load([f"checkpoint={tmp_path}"])
        return str(error.value).removeprefix(str(tmp_path))

    return refuse


def test_an_architecture_of_the_table_is_refused_with_what_it_needs(refused):
    assert missing_block("DeepseekV41ForCausalLM") == "decoder replay"
    assert refused(architectures=["DeepseekV41ForCausalLM"]) == (
        ": DeepseekV41ForCausalLM needs decoder replay, which atom does not have; docs/models.md lists what runs, "
        "job=port drafts the rest"
    )


ROPE = {"main": {"rope_theta": 1e4, "rope_type": "default"}, "compress": {"rope_theta": 1.6e5, "rope_type": "default"}}


def test_the_architecture_is_refused_before_its_rope(refused):
    assert refused(architectures=["DeepseekV41ForCausalLM"], rope_parameters=ROPE).startswith(": DeepseekV41ForCausal")
    assert " has the architecture XForCausalLM; " in refused(architectures=["XForCausalLM"], rope_parameters=ROPE)
    assert refused(architectures=["LlamaForCausalLM"], rope_parameters={"near": ROPE["main"]}) == (
        "rope_parameters in config.json has near and no full_attention"
    )
