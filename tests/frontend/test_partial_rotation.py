"""A part of a head is rotated where the family's code in transformers does so, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
from probe import assert_logits

from atom import LLMEngine

ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
UNREAD = (
    "rope_parameters.partial_rotary_factor=0.5 of config.json is not applied by model={}, as in most families of "
    "transformers; model.attention.rope.partial=0.5 applies it\n"
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("variant", "is_read"),
    [("llama", False), ("qwen3", False), ("olmo2", False), ("glm", True), ("phi3", True), ("minimax_m2", True)],
)
def test_a_partial_rotary_factor_counts_where_transformers_reads_it(
    variant: str, is_read: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, tokens = tmp_path / "checkpoint", tiny.prompt(40)
    tiny.save_changed(variant, folder, hidden_size=64, head_dim=16, rope_parameters=ROPE, rotary_dim=8)
    engine = LLMEngine(model=str(folder), level=0, dtype="fp32", kv_cache_memory=1 << 22)
    assert_logits(engine, tokens, tiny.reference(folder))
    engine.close()
    printed = capsys.readouterr().err
    assert (UNREAD.format(variant) in printed, "partial_rotary_factor" in printed) == (not is_read, not is_read)
