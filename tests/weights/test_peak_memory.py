"""Packing while loading takes the packed model and one plain tensor for each reader, whatever the plain model takes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from atom.assemble import load_weights
from atom.checkpoint import SILENT, open_checkpoint
from atom.compiler import compile_graph
from atom.config.load import load
from atom.weights.evaluate import tensors_in

HIDDEN, WIDTH = 512, 2048
ROWS = {"self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (HIDDEN, HIDDEN), "self_attn.v_proj": (HIDDEN, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (WIDTH, HIDDEN), "mlp.up_proj": (WIDTH, HIDDEN),
        "mlp.down_proj": (HIDDEN, WIDTH), "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,)}  # fmt: skip
LARGEST = WIDTH * HIDDEN  # numbers of a tensor; gate and up, which are one linear, have twice as many
MIB = 1 << 20


def save(folder: Path, num_layers: int) -> int:
    """A random model in bf16; the bytes of its layers."""
    shapes = {f"model.layers.{layer}.{name}": shape for layer in range(num_layers) for name, shape in ROWS.items()}
    others = {"model.embed_tokens": (64, HIDDEN), "lm_head": (64, HIDDEN), "model.norm": (HIDDEN,)}
    tensors = {f"{name}.weight": torch.randn(shape).bfloat16() for name, shape in (shapes | others).items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {"architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "intermediate_size": WIDTH, "vocab_size": 64,
              "num_hidden_layers": num_layers, "num_attention_heads": 8, "max_position_embeddings": 64,
              "eos_token_id": None, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return sum(tensors[f"{name}.weight"].nbytes for name in shapes)


@contextmanager
def peak_of_process() -> Iterator[Callable[[], int]]:
    """Gives the peak of the process's own bytes, above those at first."""

    def held() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))

    first, highest, is_over = held(), [0], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.002):
            highest[0] = max(highest[0], held() - first)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield lambda: highest[0]
    finally:
        is_over.set()
        watching.join()


@contextmanager
def peak_of_gpu() -> Iterator[Callable[[], int]]:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    first = torch.cuda.memory_allocated()
    yield lambda: torch.cuda.max_memory_allocated() - first


@pytest.mark.parametrize("fmt", ["fp8", "int8"])
@pytest.mark.parametrize(
    ("device", "num_layers"),
    [pytest.param("cpu", 8, marks=pytest.mark.slow), pytest.param("cuda", 32, marks=pytest.mark.gpu)],
)  # what a process holds shows it only if no other test has left memory to it
def test_it_is_the_packed_model_and_a_plain_tensor(device: str, num_layers: int, fmt: str, tmp_path: Path):
    plain = save(tmp_path, num_layers)
    options = [f"checkpoint={tmp_path}", f"device={device}", "dtype=bf16", f"quant={fmt}", f"cache={tmp_path}/cache"]
    config = load([*options, "level=1"])
    graph = compile_graph(config)
    with peak_of_process() if device == "cpu" else peak_of_gpu() as peak:
        tensors = load_weights(graph, open_checkpoint(str(tmp_path)), config, SILENT)
        peak_bytes = peak()
    held = sum(tensor.nbytes for each in tensors.values() for tensor in tensors_in(each))
    assert held < 0.52 * plain
    scratch = 12 * MIB if device == "cpu" else 10 * 4 * LARGEST  # of what is rounded at a time, in float32
    assert peak_bytes < held + 2 * (2 * 2 * LARGEST) + scratch < plain
