"""Tiny checkpoints with a tokenizer of the words w0 to w100, and texts of these words.

folder = worded.copy(tiny.save("llama", tmp_path), tmp_path / "worded")
(tmp_path / "prose").write_text(worded.spell([3, 1, 4]))        # "w3 w1 w4"
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, processors

# of job=eval: quick, and in float32
FAST = ["dtype=fp32", "level=0", "serve.kv_cache_memory=4194304", "job.num_prompts=1", "job.input_len=4"]
FAST += ["job.output_len=2", "job.num_warmups=0"]


def copy(folder: Path, target: Path, bos: int | None = None) -> Path:
    """A copy of a checkpoint with that tokenizer. bos: the token that begins every text"""
    shutil.copytree(folder, target)
    tokenizer = Tokenizer(models.WordLevel({f"w{token}": token for token in range(101)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(f"w{bos} $A", special_tokens=[(f"w{bos}", bos)])
    tokenizer.save(str(target / "tokenizer.json"))
    return target


def spell(tokens: Iterable[int]) -> str:
    return " ".join(f"w{token}" for token in tokens)
