"""Write a GGUF file of LFM2-350M's shape with random weights in Q8_0.

    write(Path("lfm2.gguf"))       # 377 MB

Its vocabulary is of 65,536 made-up words, so that llama.cpp opens it; prompts are token ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np

HIDDEN, WIDTH, VOCAB, HEADS, KV_HEADS, TAPS = 1024, 4608, 65536, 16, 8, 3
WITH_ATTENTION = {2, 5, 8, 10, 12, 14}  # of 16 layers
NUM_LAYERS = 16


def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """The names and shapes of all tensors."""
    yield "token_embd.weight", (VOCAB, HIDDEN)
    yield "token_embd_norm.weight", (HIDDEN,)
    for layer in range(NUM_LAYERS):
        own: dict[str, tuple[int, ...]] = {"attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,)}
        own |= {"ffn_gate": (WIDTH, HIDDEN), "ffn_up": (WIDTH, HIDDEN), "ffn_down": (HIDDEN, WIDTH)}
        if layer in WITH_ATTENTION:
            dim = HIDDEN // HEADS
            own |= {"attn_q": (HIDDEN, HIDDEN), "attn_output": (HIDDEN, HIDDEN)}
            own |= {"attn_k": (KV_HEADS * dim, HIDDEN), "attn_v": (KV_HEADS * dim, HIDDEN)}
            own |= {"attn_q_norm": (dim,), "attn_k_norm": (dim,)}
        else:
            own |= {"shortconv.in_proj": (3 * HIDDEN, HIDDEN), "shortconv.conv": (HIDDEN, TAPS)}
            own |= {"shortconv.out_proj": (HIDDEN, HIDDEN)}
        yield from ((f"blk.{layer}.{name}.weight", shape) for name, shape in own.items())


def write(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "lfm2")
    writer.add_block_count(NUM_LAYERS)
    writer.add_context_length(128000)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv([KV_HEADS if layer in WITH_ATTENTION else 0 for layer in range(NUM_LAYERS)])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e6)
    writer.add_vocab_size(VOCAB)
    writer.add_shortconv_l_cache(TAPS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("lfm2")
    words = ["a", "b", "ab", *(f"w{index}" for index in range(3, VOCAB))]
    writer.add_token_list(words)
    writer.add_token_types([gguf.TokenType.NORMAL] * VOCAB)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(7)
    random = np.random.default_rng(0)
    for name, shape in shapes():
        is_norm, is_matrix = "norm" in name, len(shape) == 2 and "conv.conv" not in name
        numbers = random.normal(1 if is_norm else 0, 0.02, shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q8_0 if is_matrix else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(numbers, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
