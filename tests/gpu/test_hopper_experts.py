"""Mixtures of packed experts in the backend `hopper`, against transformers in float32 with the same weights unpacked.

Of 4 experts, 2 a token, a prompt of 300 tokens has more than 128 rows an expert, and one of 512 has 256: their kernels
are others than those of short prompts, and of decodes of one or two sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple

import pytest
import tiny
import torch
import torch.nn.functional as F
from gpu.steps import FIELDS
from law import median_error
from probe import logits_of

from atom import LLMEngine, SamplingParams
from atom.graph import ops

pytest.importorskip("compressed_tensors", reason="tests/test_quantized.py packs with it")
pytest.importorskip("triton")
from kernels.hopper.test_hopper import IS_HOPPER
from kernels.hopper.ways import watch_ways
from test_quantized import LAYOUTS, WIDE_MOE, Layout, fp8, packed, write

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not IS_HOPPER, reason="there is no Hopper GPU here")]

SIZES = {**WIDE_MOE, "hidden_size": 384, "moe_intermediate_size": 256, "num_experts": 4, "head_dim": 64,
         "max_position_embeddings": 2048}  # fmt: skip
EXPERTS, SPAN = SIZES["num_experts"], 128
BLOCKS = Layout({**LAYOUTS["deepseek"].config, "weight_block_size": [SPAN, SPAN]}, fp8((SPAN, SPAN), "_scale_inv"))
CASES = {
    "blocks": BLOCKS,
    "FP8_DYNAMIC": LAYOUTS["FP8_DYNAMIC"],
    "W4A16": packed(4, group=SPAN),
    "W4A16 asymmetric": packed(4, group=SPAN, symmetric=False),
    "MXFP4": LAYOUTS["MXFP4"],
}
SCORED = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=20)


class Opened(NamedTuple):
    engine: LLMEngine
    level: int
    taken: list[str]  # the ways of all matmuls since before it was opened, captured ones too
    exact: Any  # transformers' model in float32
    half: Any  # and in bf16


def write_experts(layout: Layout, folder: Path) -> tuple[Path, Path]:
    """A checkpoint stored in the layout, and one of the same weights unpacked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny.VARIANTS, "wide_moe", ("Qwen3MoeConfig", SIZES))
        return write("wide_moe", layout, folder)


def open_on_hopper(folder: Path, cache: Path, level: int, act: str) -> LLMEngine:
    """An engine in bf16, whose experts are hopper's."""
    fields = {**FIELDS, "max_num_batched_tokens": 1024, "cudagraph_capture_sizes": [1, 2, 3, 4], "quant.act": act}
    engine = LLMEngine(model=str(folder), **{**fields, "cache": str(cache), "dtype": "bf16", "level": level})
    experts = list(engine._engine.runner.model.graph.find(ops.experts))  # type: ignore[attr-defined]
    assert [node.meta["kernel"] for node in experts] == ["hopper"] * tiny.SIZES["num_hidden_layers"]
    return engine


@pytest.fixture(scope="module", params=[(case, level) for case in CASES for level in (1, 3)], ids=str)
def opened(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, gpu_cache: Path
) -> Iterator[Opened]:
    """Experts in each layout, with activations in bf16."""
    case, level = request.param
    stored, plain = write_experts(CASES[case], tmp_path_factory.mktemp("hopper"))
    with pytest.MonkeyPatch.context() as patch:
        taken = watch_ways(patch)
        engine = open_on_hopper(stored, gpu_cache, level, "none")
        yield Opened(engine, level, taken, tiny.reference(plain), tiny.reference(plain, torch.bfloat16))
        engine.close()
    torch.cuda.empty_cache()


def forget(opened: Opened) -> None:
    """Steps from here on must differ from those before; captured ones cannot be."""
    if opened.level == 1:
        opened.taken.clear()


def assert_taken(ways: set[str], opened: Opened) -> None:
    taken = set(opened.taken)
    assert taken == ways if opened.level == 1 else ways <= taken


@pytest.mark.parametrize(("lengths", "way"), [([24] * 12, "groups"), ([300, 300], "many"), ([512, 512], "many")])
def test_prompts_are_as_near_to_float32_as_those_of_transformers(opened: Opened, lengths: list[int], way: str):
    prompts = [tiny.prompt(length, seed=at) for at, length in enumerate(lengths)]
    forget(opened)
    ours = torch.cat([logits_of(opened.engine, prompt) for prompt in prompts])
    assert_taken({way, "few"}, opened)  # the last layer has few rows, those that logits are needed of
    exact, half = (
        torch.cat([tiny.logits(model, prompt) for prompt in prompts]) for model in (opened.exact, opened.half)
    )
    assert median_error(ours, exact) <= 1.25 * median_error(half, exact)


def test_decodes_of_some_at_once_are_as_near_to_float32_as_those_of_transformers(opened: Opened):
    scored = []
    for num in (1, 2, 3, 4):
        prompts = [tiny.prompt(20, seed=10 * num + at) for at in range(num)]
        forget(opened)
        answers = opened.engine.generate(prompts, SCORED)
        is_grouped = num > 2  # its decodes, and all prompts
        assert_taken({"groups"} if is_grouped else {"groups", "few"}, opened)
        for answer, prompt in zip(answers, prompts, strict=True):
            tokens, places = prompt + answer["token_ids"], torch.arange(SCORED.max_tokens)[:, None]
            best = torch.tensor([[token for token, _ in entry.top] for entry in answer["logprobs"]])
            ours = torch.tensor([[logprob for _, logprob in entry.top] for entry in answer["logprobs"]])
            theirs = (tiny.logits(model, tokens)[len(prompt) - 1 : -1] for model in (opened.exact, opened.half))
            scored.append((ours, *(logits.log_softmax(-1)[places, best] for logits in theirs)))
    ours, exact, half = (torch.cat(each) for each in zip(*scored, strict=True))
    assert median_error(ours, exact) <= 1.25 * median_error(half, exact)


def in_fp8(x: torch.Tensor, span: int) -> torch.Tensor:
    """Activations rounded to fp8, each `span` columns by a scale of their own; 0: a row by one."""
    spans = x.float().unflatten(-1, (-1, span or x.shape[-1]))
    scales = spans.abs().amax(-1, keepdim=True) / 448
    return ((spans / scales).to(torch.float8_e4m3fn).float() * scales).flatten(-2).to(x.dtype)


def round_inputs(model: Any, span: int) -> Any:
    """transformers' model, whose packed linears and experts round what they take."""

    def forward(self: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        x, total = in_fp8(x, span), torch.zeros_like(x)
        for expert in range(EXPERTS):
            token, place = torch.where(ids == expert)
            gate, up = F.linear(x[token], self.gate_up_proj[expert]).chunk(2, -1)
            y = F.linear(in_fp8(F.silu(gate) * up, span), self.down_proj[expert])
            total.index_add_(0, token, (y * weights[token, place, None]).to(x.dtype))
        return total

    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(lambda _, inputs: (in_fp8(inputs[0], span),))
        elif name.endswith(".experts"):
            module.forward = MethodType(forward, module)
    return model


@pytest.mark.parametrize("level", [1, 3])
@pytest.mark.parametrize(("case", "act", "span", "length"), [("blocks", "auto", SPAN, 512), ("MXFP4", "fp8", 0, 1024)])
def test_activations_in_fp8_are_as_near_to_float32_as_those_that_transformers_rounds(
    case: str,
    act: str,
    span: int,
    length: int,
    level: int,
    tmp_path: Path,
    gpu_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """A number between two of fp8 falls to either one, so that ours are as far from these as both are from float32."""
    stored, plain = write_experts(CASES[case], tmp_path)
    exact, rounded = tiny.reference(plain), round_inputs(tiny.reference(plain, torch.bfloat16), span)
    prompts = [tiny.prompt(length, seed=seed) for seed in range(2)]
    taken = watch_ways(monkeypatch)
    engine = open_on_hopper(stored, gpu_cache, level, act)
    try:
        forget(opened := Opened(engine, level, taken, exact, rounded))
        ours = torch.cat([logits_of(engine, prompt) for prompt in prompts])
    finally:
        engine.close()
        torch.cuda.empty_cache()
    assert_taken({"fp8", "few"}, opened)
    wanted, theirs = (torch.cat([tiny.logits(model, prompt) for prompt in prompts]) for model in (exact, rounded))
    assert median_error(ours, wanted) <= 1.25 * median_error(theirs, wanted)
