"""`job=eval` of SmolLM2 on a real text, against transformers with the same tensors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from atom.checkpoint import SILENT
from atom.config.checkpoint import open_for
from atom.config.load import load
from atom.graph import TORCH_DTYPES
from atom.jobs.eval.job import evaluate
from atom.jobs.start import load_job

pytestmark = pytest.mark.slow
TEXT = Path(__file__).parents[3] / "LICENSE"
FIELDS = ["job=eval", f"job.texts=[{TEXT}]", "level=1", "job.num_prompts=1", "job.output_len=2", "job.num_warmups=0"]
FIELDS += ["serve.kv_cache_memory=268435456", "serve.max_model_len=1024", "job.context_len=128", "job.stride=64"]


def test_the_perplexity_of_a_real_text_is_that_of_transformers(embedded_gguf: Any):
    checkpoint = open_for(config := load([]), SILENT)
    model = LlamaForCausalLM(LlamaConfig(**config.hf)).eval()
    state = {
        name: torch.frombuffer(bytearray(checkpoint.read(name)), dtype=TORCH_DTYPES[stored.dtype]).view(stored.shape)
        for name, stored in checkpoint.tensors.items()
    }
    model.load_state_dict(state, strict=False)
    tokens = checkpoint.tokenizer().encode(TEXT.read_text())
    total, num = 0.0, 0
    for start in (0, 64, 128, 192):
        first = 1 if start == 0 else 64
        window = torch.tensor([tokens[start : start + 128]])
        labels = window.clone()
        labels[:, :first] = -100
        with torch.no_grad():
            total += float(model(window, labels=labels).loss) * (128 - first)
        num += 128 - first
    result = evaluate(load_job([*FIELDS, "dtype=fp32", f"job.num_tokens={num}", "job.reference=transformers"]))["all"]
    assert result["scored_tokens"] == num == 319
    assert result["perplexity"] == pytest.approx(math.exp(total / num), rel=1e-4)
    assert result["kl"] < 1e-6 and result["agreement"] == 1.0, "transformers reads the same GGUF file"


def test_formats_lose_about_what_the_page_says(embedded_gguf: Any):
    """Ratios of docs/quantization.md, on other texts: int8 1.003, an fp8 cache 1.01."""
    for own, ratio, kl in (("quant=int8", 1.02, 0.01), ("quant.kv=fp8", 1.03, 0.04)):
        fields = ["dtype=bf16", own, "job.num_tokens=900", "job.reference=quant=none quant.kv=auto"]
        result = evaluate(load_job([*FIELDS, *fields]))["all"]
        assert result["perplexity_ratio"] < ratio and 0 < result["kl"] < kl and result["agreement"] > 0.9
