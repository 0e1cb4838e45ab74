"""Weights that are calibrated on a GPU: as near as a CPU rounds them, by float64, and what is multiplied with them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from gpu.steps import FIELDS
from law import assert_same_logits
from probe import logits_of
from safetensors import safe_open
from test_kv_scales import add_tokenizer
from tokenizers import Tokenizer
from torch import Tensor
from weights.test_calibration import hooked

from atom import LLMEngine
from atom.assemble import calibration as planning
from atom.assemble import load_weights
from atom.checkpoint import SILENT, open_checkpoint
from atom.compiler import compile_graph
from atom.config.load import load
from atom.weights import calibration

LENGTH, NUM_TOKENS = 128, 1024  # of a sequence of the prompt, and of all
WIDE = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "vocab_size": 301}
VARIANTS = {"dense": ("LlamaConfig", WIDE),
            "experts": ("Qwen3MoeConfig", {**WIDE, "num_experts": 4, "num_experts_per_tok": 2,
                                           "moe_intermediate_size": 128})}  # fmt: skip
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SUFFIXES = {"int4": ("_packed", "_scale"), "mxfp4": ("_blocks", "_scales")}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.parametrize("fmt", ["int4", "mxfp4"]),
    pytest.mark.parametrize("variant", VARIANTS),
]


@pytest.fixture
def folder(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A random model whose inputs depend on each other, with a tokenizer of bytes."""
    monkeypatch.setitem(tiny.VARIANTS, variant, VARIANTS[variant])
    monkeypatch.setattr(planning, "MAX_TOKENS", NUM_TOKENS)
    monkeypatch.setattr(calibration, "MAX_LENGTH", LENGTH)
    made = tiny.save(variant, tmp_path)
    add_tokenizer(made)
    return made


def options(folder: Path, cache: Path, device: str, fmt: str, *overrides: str) -> Any:
    common = [f"checkpoint={folder}", f"cache={cache}", f"device={device}", "dtype=fp32", "level=1", f"quant={fmt}"]
    return load([*common, *overrides])


def rounded(folder: Path, device: str, fmt: str, *overrides: str) -> dict[str, Tensor]:
    """What a calibration on the device makes of the stored tensors, in float64."""
    cache = folder.parent / f"{device} {len(overrides)}"
    config = options(folder, cache, device, fmt, *overrides)
    load_weights(compile_graph(config), open_checkpoint(str(folder)), config, SILENT)
    return dict(read_rounded(cache, fmt))


def read_rounded(cache: Path, fmt: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the file of calibrated weights, unpacked number by number."""
    values, scales = SUFFIXES[fmt]
    for path in cache.glob("weights/*/model.safetensors"):
        with safe_open(path, "pt") as file:  # type: ignore[no-untyped-call]
            for name in file.keys():  # noqa: SIM118
                if name.endswith(f".weight{values}"):
                    of = name.removesuffix(values)
                    yield of, unpacked(fmt, file.get_tensor(name), file.get_tensor(of + scales))


def unpacked(fmt: str, values: Tensor, scales: Tensor) -> Tensor:
    """values u8[O, B, N / 2], the first number in the lower half; scales fp16 or exponents u8[O, B] -> [O, I]"""
    numbers = torch.stack((values % 16, values // 16), -1).flatten(-2).long()
    if fmt == "mxfp4":
        signed = torch.tensor([*FP4, *(-each for each in FP4)], dtype=torch.float64)
        return (signed[numbers] * 2.0 ** (scales.double() - 127)[..., None]).flatten(1)
    return ((numbers - 8).double() * scales.double()[..., None]).flatten(1)


def output_errors(folder: Path, fmt: str, every: list[dict[str, Tensor]]) -> list[float]:
    """The squared errors of all linears' outputs over the prompt, relative to the outputs, of weights by name."""
    config = options(folder, folder.parent / "none", "cpu", fmt)
    text = planning.read_calibration_text(config)
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids[:NUM_TOKENS]
    sequences = [tokens[start : start + LENGTH] for start in range(0, NUM_TOKENS, LENGTH)]
    moments = hooked(folder, sequences, torch.float64)
    plain = stored(folder)
    errors = [0.0 for _ in every]
    for name in every[0]:
        moment = moments[name].detach().double()
        matrix = moment if len(moment) > 1 else torch.diag(moment[0])
        whole = torch.einsum("oi,ij,oj->", plain[name], matrix, plain[name])
        for place, weights in enumerate(every):
            off = weights[name] - plain[name]
            errors[place] += float(torch.einsum("oi,ij,oj->", off, matrix, off) / whole)
    return errors


def stored(folder: Path) -> dict[str, Tensor]:
    with safe_open(folder / "model.safetensors", "pt") as file:  # type: ignore[no-untyped-call]
        return {name: file.get_tensor(name).double() for name in file.keys()}  # noqa: SIM118


def nearest(fmt: str, weight: Tensor) -> Tensor:
    """What rounding to the nearest gives at the usual scales: the largest number of a block to the format's."""
    blocks = weight.unflatten(1, (-1, 128 if fmt == "int4" else 32))
    largest = blocks.abs().amax(-1, keepdim=True)
    if fmt == "int4":
        scale = (largest / 7).half().double()
        return ((blocks / scale).round().clamp(-8, 7) * scale).flatten(1)
    scale = 2.0 ** (largest.log2().floor() - 2)
    signed = torch.tensor([*FP4, *(-each for each in FP4)], dtype=torch.float64)
    return (signed[(blocks[..., None] / scale[..., None] - signed).abs().argmin(-1)] * scale).flatten(1)


def test_a_gpu_rounds_as_a_cpu_does(folder: Path, variant: str, fmt: str):
    here, there = rounded(folder, "cuda", fmt), rounded(folder, "cpu", fmt)
    assert here.keys() == there.keys() and len(here) == (14 if variant == "dense" else 2 * (4 + 4 * 3))
    for name, weight in here.items():
        assert (weight == there[name]).double().mean() > 0.95, f"{name}: a number between two may fall to the other"
    half = rounded(folder, "cuda", fmt, "dtype=bf16")
    usual = {name: nearest(fmt, weight) for name, weight in stored(folder).items() if name in here}
    errors = output_errors(folder, fmt, [here, there, half, usual])
    assert errors[0] < 1.02 * errors[1] and errors[2] < 1.05 * errors[1]
    assert errors[0] < 0.9 * errors[3]


@pytest.mark.parametrize("level", [1, 3])
def test_logits_are_those_of_transformers_with_the_rounded_weights(folder: Path, variant: str, fmt: str, level: int):
    cache = folder.parent / "cache"
    engine = LLMEngine(model=str(folder), quant=fmt, level=level, **{**FIELDS, "cache": str(cache)})
    try:
        tokens = tiny.prompt(100, vocab_size=301)
        ours = logits_of(engine, tokens)
    finally:
        engine.close()
    exact, weights = tiny.reference(folder, torch.float64), dict(read_rounded(cache, fmt))
    put(exact, weights)
    assert_same_logits(ours, tiny.logits(exact, tokens))


def put(model: Any, weights: dict[str, Tensor]) -> None:
    """Put rounded tensors in the place of a model's own; transformers keeps those of all experts in one."""
    own = dict(model.named_parameters())
    for name, weight in weights.items():
        if ".experts." not in name:
            own[name].data.copy_(weight)
            continue
        layer, _, rest = name.partition(".experts.")
        expert, role, _ = rest.split(".")
        joined = own[f"{layer}.experts.{'down_proj' if role == 'down_proj' else 'gate_up_proj'}"].data[int(expert)]
        (joined if role == "down_proj" else joined.chunk(2)[role == "up_proj"]).copy_(weight)
