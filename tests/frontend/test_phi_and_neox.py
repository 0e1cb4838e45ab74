"""Phi-2, whose head has a bias, and GPT-NeoX, whose q, k and v are stored head by head, give transformers' logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from probe import assert_logits

from atom import LLMEngine

SIZES = {**tiny.SIZES, "hidden_size": 64}
CASES = [
    ("Phi", {"num_key_value_heads": 4}),
    ("Phi", {"num_key_value_heads": 2, "partial_rotary_factor": 0.25}),
    ("GPTNeoX", {}),
    ("GPTNeoX", {"use_parallel_residual": False, "attention_bias": False}),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize(("family", "changes"), CASES)
def test_the_logits_are_those_of_transformers(family: str, changes: dict[str, Any], level: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    fields = {**SIZES, **changes}
    if family == "GPTNeoX":
        del fields["num_key_value_heads"]
    config = getattr(transformers, f"{family}Config")(**fields, attn_implementation="eager")
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.2
    model.save_pretrained(tmp_path)
    engine = LLMEngine(model=str(tmp_path), level=level, dtype="fp32", kv_cache_memory=1 << 22)
    tokens = tiny.prompt(30)
    assert_logits(engine, tokens, model)
    engine.close()
