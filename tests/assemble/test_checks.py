"""What a checkpoint's weights are checked for beyond names and shapes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from atom.assemble.checks import check_draft_tokens, check_kv_scales, check_same_tokens, left_out
from atom.config import Config, ModelConfig
from atom.errors import CheckpointError
from atom.graph import Type, W

SCALE = W("model.layers.1.attn.k_scale", Type("fp32", (1,)))
MODEL = ModelConfig(
    layers=2,
    vocab=10,
    ignore=["*.inv_freq"],
    weights={"layer": "model.layers.{layer}", "k_scale": "model.layers.{layer}.attn.k_scale"},
)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_of_keys_that_is_no_number_above_0_is_refused(value: float):
    config = Config(model=MODEL)
    check_kv_scales({SCALE: torch.tensor([0.5])}, config)
    with pytest.raises(CheckpointError, match=rf"^tensor {SCALE.name} is {value:g}; a scale is a number above 0$"):
        check_kv_scales({SCALE: torch.tensor([value])}, config)


def test_what_nothing_reads_of_a_draft_model_has_its_prefix():
    config = Config(model=MODEL, draft=replace(MODEL, ignore=["*.rotary"]))
    assert left_out(config) == ["*.inv_freq", "draft:*.rotary"]


def test_a_draft_whose_tokens_are_not_the_model_s_is_refused():
    draft = ModelConfig(weights={"d2t": "d2t"})
    config, name = Config(model=MODEL, draft=draft), W("draft:d2t", Type("i64", (3,)))
    check_draft_tokens({name: torch.tensor([0, 3, 7])}, config)  # tokens 0, 4 and 9 of 10
    with pytest.raises(CheckpointError, match=r"^tensor draft:d2t maps to tokens that the model does not have, of 10"):
        check_draft_tokens({name: torch.tensor([0, 3, 8])}, config)
    with pytest.raises(CheckpointError, match="tokens that the model does not have"):
        check_draft_tokens({name: torch.tensor([-1, 3, 7])}, config)


def test_vocabularies_are_compared_only_if_a_whole_model_drafts():
    other: Any = object()  # which would raise if it were read
    check_same_tokens(other, other, Config())
    check_same_tokens(None, other, Config())
