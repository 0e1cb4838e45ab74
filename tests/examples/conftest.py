from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

# as templates that can think have it: what is not asked for is closed at once
TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}[assistant]"
    "{% if not enable_thinking %}<think></think>{% endif %}"
)
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 80,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}


@pytest.fixture
def talker(tmp_path: Path) -> Path:
    """A folder for --load_dummy: a tiny config, a tokenizer of bytes, a chat template."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=256, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([], trainer)
    folder = tmp_path / "talker"
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture
def flags(talker: Path) -> list[str]:
    """The flags that run it quickly."""
    return ["--model", str(talker), "--load_dummy", "--level", "1", "--set", "serve.kv_cache_memory=8388608"]
