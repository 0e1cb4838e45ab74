"""The paths of scripts/smoke_gpu.py, each compared with the CPU's reference.

    with Session("cuda", cache, folder) as session:
        print(PATHS["fp8"](session))        # the error; AssertionError says what is wrong

The reference is the same checkpoint at level 0 on the CPU, in float32. An engine in float32 is as near to it as
tests/law.py says; one in bf16 as near as the reference in bf16 is, by the bounds below. Each path also asserts that
what it is about took place, and on Hopper by which kernels.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from law import RELATIVE_ERROR, assert_greedy_tokens, median_error  # noqa: E402
from probe import logits_of  # noqa: E402

from atom import LLMEngine, SamplingParams  # noqa: E402
from atom.cache import Cache  # noqa: E402
from atom.cache.files import WEIGHTS  # noqa: E402
from atom.errors import RequestError  # noqa: E402
from atom.graph.graph import type_of  # noqa: E402
from atom.runtime.step import prefix_groups  # noqa: E402
from scripts import smoke_kernels  # noqa: E402
from scripts.image_prompts import draw_prompt_with_images  # noqa: E402
from scripts.smoke_models import (  # noqa: E402
    add_tokenizer,
    deepseek_v3,
    deepseek_v4,
    deepseek_v32,
    dots3_note,
    gemma3,
    gemma4,
    gpt_oss,
    hy_v4,
    internvl,
    kimi_k3,
    lfm2,
    mamba,
    minimax,
    minimax_m3,
    nemotron_h,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_vl,
    qwen4_exp,
    write_adapter,
    write_checkpoint,
)

Grids = Sequence[tuple[int, int]]  # of images of a prompt: height and width in patches
ONE_SIZE = (((16, 16), (16, 16)), ((16, 16),))  # of two prompts, of images that a model resizes to one size
PART = 32  # positions of a prompt that are judged by themselves, as each answer is
NUM_TOP = 20  # log probabilities at each token of an answer
BATCHES = (1, 2, 4)  # answers at a time
REGRET = 0.05  # of the largest logit: how far a greedy token in bf16 may be from the reference's best
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
ENGINE: dict[str, Any] = {"num_kvcache_blocks": 400, "max_num_seqs": 4, "max_num_batched_tokens": 1280,
                          "max_model_len": 1280, "cudagraph_capture_sizes": [1, 2, 4]}  # fmt: skip
REFERENCE: dict[str, Any] = {"device": "cpu", "level": 0, "num_kvcache_blocks": 400, "max_model_len": 1280,
                             "max_num_seqs": 4, "max_num_batched_tokens": 1280}  # fmt: skip


class Bounds(NamedTuple):
    """How often the error of the CPU's bf16 the device's may be: medians of all positions, and of some in a row."""

    prompts: float = 1.25
    answers: float = 1.25
    part: float = 2.0


DENSE = Bounds()
# a near tie may give a token another expert, and all that attend to it other numbers
ROUTED = Bounds(answers=1.5, part=4.0)
FP8_EXPERTS = ROUTED._replace(prompts=2.5)  # only the device rounds the activations of experts
MXFP4_IN_FP8 = ROUTED._replace(prompts=6.0, part=8.0)  # the same, next to linears in bf16: 6% by fp8, 1.4% by bf16


class Skipped(Exception):
    """A path cannot run here; the message says why."""


@dataclass
class Part:
    """Numbers [T, V] of some positions: the device's, the reference's in float32 and, of a path in bf16, in bf16."""

    what: str
    ours: Tensor
    exact: Tensor
    half: Tensor | None

    def errors(self) -> tuple[float, float]:
        assert self.half is not None
        return median_error(self.ours, self.exact), median_error(self.half, self.exact)


def judge(parts: Sequence[Part], bounds: Bounds = DENSE) -> str:
    """The error in words; AssertionError if one is too large."""
    for part in parts:
        assert part.ours.isfinite().all(), f"{part.what}: not all numbers are finite"
    if parts[0].half is None:
        errors = [((each.ours - each.exact).abs().amax(-1) / each.exact.abs().amax(-1)).max().item() for each in parts]
        worst = max(range(len(parts)), key=errors.__getitem__)
        assert errors[worst] <= RELATIVE_ERROR, (
            f"{parts[worst].what}: an error of {errors[worst]:.2g} is over {RELATIVE_ERROR:g}"
        )
        return f"{errors[worst]:.1e}, at most {RELATIVE_ERROR:g}"
    said, ratios = [], {part.what: ours / half for part in parts for ours, half in [part.errors()]}
    for what, kind, near in (("prompts", "prompt", bounds.prompts), ("answers", "answer", bounds.answers)):
        if own := [part for part in parts if part.what.startswith(kind)]:
            ours, half = joined(own).errors()
            said.append(f"{what} {ours:.2%} (CPU {half:.2%})")
            assert ours <= near * half, f"{said[-1]}: over {near:g} times"
    worst = max(ratios, key=ratios.__getitem__)
    said.append(f"{worst} {ratios[worst]:.2f} times")
    assert ratios[worst] <= bounds.part, f"{', '.join(said)}: over {bounds.part:g} times"
    return ", ".join(said)


def joined(parts: Sequence[Part]) -> Part:
    ours, exact, half = (torch.cat([getattr(part, name) for part in parts]) for name in ("ours", "exact", "half"))
    return Part("", ours, exact, half)


def draw_prompt(length: int, seed: int, vocab: int) -> list[int]:
    found: list[int] = torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return found


@dataclass
class Check:
    """What to compare of one checkpoint."""

    folder: Path
    lengths: tuple[int, ...] = (300,)  # of prompts whose logits are compared at each position
    fields: dict[str, Any] = field(default_factory=dict)  # of all engines
    own: dict[str, Any] = field(default_factory=dict)  # of the device's engine only
    rounding: dict[str, Any] = field(default_factory=dict)  # of the bf16 reference of prompts
    dtype: str = "bf16"
    level: int | None = None  # of the device's engine; None: the highest
    runs: tuple[str, ...] = ()  # what Hopper must have run, in words of smoke_kernels.py
    bounds: Bounds = DENSE
    drafted: int | None = None  # tokens of answers without log probabilities, which are drafted
    event: Callable[[LLMEngine], None] = lambda _: None  # asserts that it took place, after all answers
    prepare: Callable[[LLMEngine], None] = lambda _: None  # before all answers


class Session:
    """The engines of a path, in a folder of their own."""

    def __init__(self, device: str, cache: str | None, folder: Path) -> None:
        self.device, self.folder = device, folder
        self.is_hopper = device == "cuda" and torch.cuda.get_device_capability() == (9, 0)
        self.ran = smoke_kernels.watch() if device == "cuda" else set[str]()
        self.seconds: dict[str, float] = {}
        self._cache = {"cache": cache} if cache else {}
        self._opened: list[LLMEngine] = []

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        for engine in self._opened:
            engine.close()
        self._forget_weights()

    def _forget_weights(self) -> None:
        """Remove what engines have kept of this session's checkpoints in their cache folder: kernels stay there."""
        for thread in threading.enumerate():
            if thread.name == "keep packed weights":
                thread.join()
        for folder in {engine.config.cache for engine in self._opened}:
            cache = Cache(Path(str(folder)))
            for entry in cache.entries(WEIGHTS):
                if f"{self.folder}/" in str(entry.about.get("name")):
                    cache.remove(entry)

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[what] = self.seconds.get(what, 0.0) + time.monotonic() - started

    def open(self, folder: Path, level: int | None = None, **fields: Any) -> LLMEngine:
        """An engine on the device."""
        if self.device == "cpu":  # to try the script: it compiles nothing and captures no graph
            level, fields = min(level or 1, 1), {**fields, "cudagraph_capture_sizes": None}
        with self.timed("start"):
            engine = LLMEngine(
                str(folder), **{**ENGINE, **self._cache, "device": self.device, "level": level, **fields}
            )
        self._opened.append(engine)
        return engine

    def reference(self, folder: Path, dtype: str, **fields: Any) -> LLMEngine:
        with self.timed("CPU"):
            engine = LLMEngine(str(folder), **{**REFERENCE, **self._cache, "dtype": dtype, **fields})
        self._opened.append(engine)
        return engine

    def score(self, engine: LLMEngine, tokens: list[int]) -> Tensor:
        """The reference's logits at every position, float32[T, V]."""
        with self.timed("CPU"):
            return logits_of(engine, tokens).float()

    def write(self, config: dict[str, Any], *overrides: str, **options: Any) -> Path:
        return write_checkpoint(config, self.folder / "model", *overrides, **options)

    def compare(self, check: Check) -> str:
        """The error of an engine on the device, in words."""
        engine = self.open(check.folder, check.level, dtype=check.dtype, **check.fields, **check.own)
        self.check_kernels(engine)
        exact = self.reference(check.folder, "fp32", **check.fields)
        is_half, half, rounded = check.dtype == "bf16", None, None
        if is_half:
            half = self.reference(check.folder, "bf16", **check.fields)
            rounded = self.reference(check.folder, "bf16", **check.fields, **check.rounding) if check.rounding else half
        parts, vocab = list[Part](), engine.config.hf["vocab_size"]
        for seed, length in enumerate(check.lengths):
            parts += self._compare_prompt(engine, exact, rounded, draw_prompt(length, seed, vocab))
        check.prepare(engine)
        batches = make_batches(vocab)
        if check.drafted:
            batches = [self._extend(engine, exact, prompts, check.drafted) for prompts in batches]
        for prompts in batches:
            parts += self.compare_answers(engine, exact, half, prompts)
        figure = judge(parts, check.bounds)
        check.event(engine)
        runner: Any = engine._engine.runner
        is_ahead = engine.metrics.scheduler.num_ahead > 0
        assert is_ahead == (runner.run_ahead > 0), "steps are planned ahead of the one before unless the host drafts"
        if self.is_hopper:
            wanted = {*check.runs, *(("graph",) if check.level in (None, 3) else ())}
            assert wanted <= self.ran, f"has not run: {', '.join(sorted(wanted - self.ran))}; ran: {sorted(self.ran)}"
        return figure

    def check_kernels(self, engine: LLMEngine) -> None:
        """No call is left to the reference from level 1 on; on Hopper, packed weights are in its layout."""
        runner: Any = engine._engine.runner
        level = engine.config.level
        if self.device == "cpu" or level == 0:
            return
        for program in runner.model.graph.programs.values():
            for node in program.nodes:
                kernel, name = node.meta.get("kernel"), node.target.name
                assert kernel != "reference", f"{name} is left to the reference: {node.meta.get('notes')}"
                if self.is_hopper and any(type_of(node.args[place]).fmt for place in node.target.weights):
                    wanted = "fixed_hopper" if engine.config.batch_invariant else "hopper"
                    assert kernel == wanted, f"{name} of packed weights is {kernel}'s: {node.meta.get('notes')}"

    def _compare_prompt(
        self, engine: LLMEngine, exact: LLMEngine, half: LLMEngine | None, tokens: list[int]
    ) -> Iterator[Part]:
        ours, wanted = logits_of(engine, tokens).float(), self.score(exact, tokens)
        theirs = None if half is None else self.score(half, tokens)
        for first in range(0, len(tokens), PART):
            some = slice(first, first + PART)
            what = f"prompt of {len(tokens)} from {first} on"
            yield Part(what, ours[some], wanted[some], None if theirs is None else theirs[some])

    def compare_answers(
        self, engine: LLMEngine, exact: LLMEngine, half: LLMEngine | None, prompts: list[list[int]],
        adapter: str | None = None,
    ) -> Iterator[Part]:  # fmt: skip
        """The log probabilities of greedy answers at a time, by the reference of the same tokens."""
        params = replace(GREEDY, logprobs=NUM_TOP)
        for place, answer in enumerate(engine.generate(prompts, params, adapters=[adapter] * len(prompts))):
            prompt, tokens = prompts[place], answer["token_ids"]
            best = torch.tensor([[token for token, _ in each.top] for each in answer["logprobs"]])
            ours = torch.tensor([[logprob for _, logprob in each.top] for each in answer["logprobs"]])
            assert best.shape == (params.max_tokens, NUM_TOP), f"log probabilities {[*best.shape]}"
            assert best[:, 0].tolist() == tokens, "a greedy token is not the most probable one"
            logits = self.score(exact, prompt + tokens)[len(prompt) - 1 : -1]
            theirs = None
            if half is None:
                assert_greedy_tokens(tokens, logits)
            else:
                theirs = self.score(half, prompt + tokens)[len(prompt) - 1 : -1].log_softmax(-1).gather(1, best)
            what = f"answer {place + 1} of {len(prompts)} at a time"
            yield Part(what, ours, logits.log_softmax(-1).gather(1, best), theirs)

    def _extend(
        self, engine: LLMEngine, exact: LLMEngine, prompts: list[list[int]], num_tokens: int
    ) -> list[list[int]]:
        """Prompts and answers that are drafted, whose KV the prefix cache has: what follows them is compared next."""
        answers = engine.generate(prompts, replace(GREEDY, max_tokens=num_tokens))
        extended = [prompt + answer["token_ids"] for prompt, answer in zip(prompts, answers, strict=True)]
        for prompt, tokens in zip(prompts, extended, strict=True):
            logits = self.score(exact, tokens)[len(prompt) - 1 : -1]
            chosen = logits.gather(1, torch.tensor(tokens[len(prompt) :])[:, None])[:, 0]
            regret = ((logits.amax(-1) - chosen) / logits.abs().amax(-1)).max().item()
            assert regret <= REGRET, f"a drafted answer's token is {regret:.1%} worse than the reference's best"
        return extended


def make_batches(vocab: int) -> list[list[list[int]]]:
    """Prompts of few tokens, of which together no more are in a step than linears of few rows take."""
    return [[draw_prompt(9 + 2 * place, 100 * batch + place, vocab) for place in range(batch)] for batch in BATCHES]


def dense(session: Session) -> str:
    runs = ("decode in Gluon", "prefill in Gluon", "gates in Gluon")
    return session.compare(Check(session.write(qwen3()), (1100, 200), runs=runs))


def fp8(session: Session) -> str:
    """Wide enough that linears of few rows are split, and those of a prompt multiplied in fp8."""
    folder = session.write(qwen3(hidden_size=2048, intermediate_size=4096))
    runs = ("packed linear", "split packed linear", "scaled GEMM")
    fields, rounding = {"quant": "fp8"}, {"quant.act": "fp8"}
    return session.compare(Check(folder, fields=fields, rounding=rounding, runs=runs))


def fp8_block_experts(session: Session) -> str:
    folder = session.write(qwen3_moe())
    runs = ("packed linear", "split packed linear", "scaled GEMM", "few experts", "split few experts",
            "grouped experts", "split grouped experts", "fp8 experts")  # fmt: skip
    fields, rounding = {"quant": "fp8_block"}, {"quant.act": "fp8"}  # which on a CPU leaves those of experts in bf16
    return session.compare(Check(folder, (600, 1100), fields=fields, rounding=rounding, runs=runs, bounds=FP8_EXPERTS))


def batch_invariant(session: Session) -> str:
    """Experts in fp8, whose activations stay in bf16; each answer has the bits that it has by itself."""

    def check_bits(engine: LLMEngine) -> None:
        vocab, params = engine.config.hf["vocab_size"], replace(GREEDY, logprobs=NUM_TOP)
        prompts = [draw_prompt(length, length, vocab) for length in (1, 15, 16, 17, 64, 65, 300)]
        for prompt, answer in zip(prompts, engine.generate(prompts, params), strict=True):
            (own,) = engine.generate([prompt], params)
            assert own["logprobs"] == answer["logprobs"], f"a prompt of {len(prompt)} tokens has other bits by itself"

    fields, own = {"quant": "fp8_block"}, {"batch_invariant": True}
    check = Check(session.write(qwen3_moe()), (300,), fields=fields, own=own, event=check_bits, bounds=ROUTED)
    return session.compare(check)


def int4_zeros(session: Session) -> str:
    quantized = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm",
                 "modules_to_not_convert": None}  # fmt: skip
    folder = session.write(qwen3(hidden_size=2048, intermediate_size=4096, quantization_config=quantized))
    return session.compare(Check(folder, runs=("packed linear", "split packed linear")))


def mxfp4_experts(session: Session) -> str:
    plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    quantized = {"quant_method": "mxfp4", "modules_to_not_convert": plain}
    folder = session.write(gpt_oss(hidden_size=2048, quantization_config=quantized))
    runs = ("few experts", "split few experts", "grouped experts", "split grouped experts", "many experts")
    return session.compare(Check(folder, (600,), runs=runs, bounds=ROUTED))


def int4_in_fp8(session: Session) -> str:
    """int4 with zero points, rounded to fp8 for prompts."""
    quantized = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm",
                 "modules_to_not_convert": None}  # fmt: skip
    folder = session.write(qwen3(hidden_size=1024, intermediate_size=2048, quantization_config=quantized))
    return session.compare(Check(folder, (600,), **_in_fp8(session), runs=("scaled GEMM",)))


def mxfp4_in_fp8(session: Session) -> str:
    """Experts in MXFP4 with biases, rounded to fp8 for prompts."""
    plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    quantized = {"quant_method": "mxfp4", "modules_to_not_convert": plain}
    folder = session.write(gpt_oss(num_local_experts=4, quantization_config=quantized))
    return session.compare(Check(folder, (1100,), **_in_fp8(session), runs=("fp8 experts",), bounds=MXFP4_IN_FP8))


def _in_fp8(session: Session) -> dict[str, Any]:
    act = {"quant.act": "fp8"}
    return {"own": {} if session.device == "cpu" else act, "rounding": act}  # a CPU has no such kernels


def latents(session: Session) -> str:
    runs = ("expanded latents", "few experts")
    return session.compare(Check(session.write(deepseek_v3()), (600,), runs=runs, bounds=ROUTED))


def chosen_tokens(session: Session) -> str:
    folder, runs = session.write(deepseek_v32()), ("chosen entries", "index scores")
    exact = session.compare(Check(folder, (300,), dtype="fp32"))
    return f"{exact}; {session.compare(Check(folder, (600,), runs=runs, bounds=ROUTED))}"


def chosen_blocks(session: Session) -> str:
    return session.compare(Check(session.write(minimax_m3()), (300,), dtype="fp32"))


def pooled_runs(session: Session) -> str:
    return session.compare(Check(session.write(deepseek_v4()), (300,), dtype="fp32"))


def latent_sinks(session: Session) -> str:
    return session.compare(Check(session.write(hy_v4()), (150,), dtype="fp32"))


def latent_windows(session: Session) -> str:
    return session.compare(Check(session.write(dots3_note()), (150,), dtype="fp32"))


def mean_runs(session: Session) -> str:
    """Runs by the mean of their index keys, and n-grams, of which a sequence keeps the last tokens."""
    fields = {"state_memory": 1 << 26}
    return session.compare(Check(session.write(qwen4_exp()), (150,), dtype="fp32", fields=fields))


def attention_residuals(session: Session) -> str:
    fields = {"state_memory": 1 << 26}
    return session.compare(Check(session.write(kimi_k3()), (150,), dtype="fp32", fields=fields))


def fp8_kv(session: Session) -> str:
    def check_dtype(engine: LLMEngine) -> None:
        runner: Any = engine._engine.runner
        dtypes = {cache.dtype for cache in runner.model.caches.values()}
        assert dtypes == {torch.float8_e4m3fn}, f"caches are in {dtypes}"

    runs = ("decode in Gluon", "prefill in Gluon")
    return session.compare(
        Check(session.write(qwen3()), (600,), fields={"kv_cache_dtype": "fp8"}, runs=runs, event=check_dtype)
    )


def windows(session: Session) -> str:
    def check_release(engine: LLMEngine) -> None:
        """A long sequence holds fewer blocks of the window's kind."""
        engine.add_request([draw_prompt(400, 7, 512)], SamplingParams(max_tokens=8, ignore_eos=True))
        most: dict[bool, int] = {}
        while not engine.is_finished():
            engine.step()
            for pool in engine._engine.scheduler.cache.pools:
                held = pool.num_blocks - 1 - pool.num_free
                most[pool.keeps_all] = max(most.get(pool.keeps_all, 0), held)
        assert 0 < most[False] < most[True], f"blocks of windows and of full attention: {most}"

    fields = {"max_num_batched_tokens": 128, "max_model_len": 512}
    return session.compare(Check(session.write(gpt_oss()), fields=fields, event=check_release, bounds=ROUTED))


def shared_prefix(session: Session) -> str:
    """Prompts that arrive together: those after the first read what its row of the same step writes.

    Their decodes read the KV of 512 of these tokens once.
    """
    prefix_groups.SAVED_BYTES = {256: 1}  # of a model as small as this one
    folder, dtypes = session.write(qwen3()), ("fp32", "bf16")
    engine, (exact, half) = session.open(folder, dtype="bf16"), (session.reference(folder, each) for each in dtypes)
    vocab = engine.config.hf["vocab_size"]
    shared = draw_prompt(608, 1, vocab)  # 38 blocks
    prompts = [shared + draw_prompt(length, length, vocab) for length in (40, 1, 2, 65)]
    figure = judge(list(session.compare_answers(engine, exact, half, prompts)))
    hits = engine.metrics.scheduler.num_prefix_hit_tokens
    assert hits == 592 + 2 * 608, f"{hits} tokens were found; a row of one token would read its own step"
    assert session.device == "cpu" or "prefix attention" in session.ran, "decodes were not grouped"
    return figure


def shared_kv(session: Session) -> str:
    """Heads of 512 dims, layers that read the KV of others, inputs by layer."""

    def check_caches(engine: LLMEngine) -> None:
        sizes = [tuple(cache.shape[2:]) for cache in engine._engine.runner.model.caches.values()]
        assert sizes == [(2, 1, 256), (2, 1, 512)], f"four layers have the caches {sizes}"

    return session.compare(Check(session.write(gemma4()), (600,), event=check_caches))


def recurrent(session: Session, config: dict[str, Any], runs: tuple[str, ...] = (), bounds: Bounds = DENSE) -> str:
    """runs: on Hopper, see `Check`"""

    def check_copies(engine: LLMEngine) -> None:
        """An equal prompt begins with a copy of the state of the first one, and gives the same answer."""
        stats, prompt = engine.metrics.scheduler, draw_prompt(100, 7, 512)
        first, second = (engine.generate([prompt], GREEDY)[0]["token_ids"] for _ in range(2))
        hits = engine.metrics.scheduler.num_prefix_hit_tokens - stats.num_prefix_hit_tokens
        assert hits == 96, f"{hits} tokens of 100 were found"
        assert first == second, f"from a copy of the state {second}, without {first}"

    fields = {"max_num_batched_tokens": 64, "max_model_len": 512, "state_memory": 1 << 26}
    return session.compare(
        Check(session.write(config), (70,), fields=fields, event=check_copies, runs=runs, bounds=bounds)
    )


def short_convolution(session: Session) -> str:
    return recurrent(session, lfm2())


def delta_rule(session: Session) -> str:
    return recurrent(session, qwen3_5(), ("delta rule in Gluon", "chunks"))


def mamba_2(session: Session) -> str:
    return recurrent(session, nemotron_h(), ("chunks",))


def selective_scan(session: Session) -> str:
    return recurrent(session, mamba())


def lightning(session: Session) -> str:
    return recurrent(session, minimax(), ("chunks",), ROUTED)


def check_drafts(engine: LLMEngine) -> None:
    stats = engine.metrics.scheduler
    assert stats.num_prefix_hit_tokens > 0, "what follows drafted answers was computed without their KV"
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens, (
        f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} drafted tokens were accepted"
    )


NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "max_verified_tokens": 64}
SUFFIX = {"method": "suffix", "suffix_decoding_max_spec_factor": 4, "max_verified_tokens": 64}


def looked_up(session: Session, config: dict[str, Any], own: dict[str, Any], **fields: Any) -> str:
    folder = session.write(config, loudness=0.5)
    return session.compare(Check(folder, fields=fields, own=own, drafted=40, event=check_drafts))


def ngram(session: Session) -> str:
    return looked_up(session, qwen3(vocab_size=64), NGRAM)


def suffix(session: Session) -> str:
    """The host drafts, a different number for each sequence; the runner verifies."""
    return looked_up(session, qwen3(vocab_size=64), SUFFIX)


def delta_rule_ngram(session: Session) -> str:
    """What follows drafted answers begins with a copy of the state that accepted drafts have left."""
    return looked_up(session, qwen3_5(vocab_size=64), NGRAM, state_memory=1 << 26)


def predicted(session: Session, config: dict[str, Any], bounds: Bounds, **fields: Any) -> str:
    folder = session.write(config, "serve.method=mtp", loudness=0.3)
    own = {"method": "mtp", "num_speculative_tokens": 2, "max_verified_tokens": 64}
    return session.compare(Check(folder, fields=fields, own=own, drafted=24, event=check_drafts, bounds=bounds))


def mtp(session: Session) -> str:
    return predicted(session, deepseek_v3(vocab_size=64), ROUTED)


def delta_rule_mtp(session: Session) -> str:
    """Decodes of three tokens each, after which a slot has a state of each that may be accepted."""
    return predicted(session, qwen3_5(vocab_size=64, mtp_num_hidden_layers=1), DENSE, state_memory=1 << 26)


def lora(session: Session) -> str:
    """Answers by two adapters and none, against checkpoints with each merged."""
    base = session.write(qwen3())
    names = {None: base} | {name: session.folder / f"merged-{name}" for name in ("a", "b")}
    for seed, name in enumerate(("a", "b")):
        write_adapter(base, session.folder / name, session.folder / f"merged-{name}", seed)
    modules = {name: str(session.folder / name) for name in ("a", "b")}
    engine = session.open(base, dtype="bf16", lora_modules=modules, max_loras=2)
    session.check_kernels(engine)
    parts = list[Part]()
    for name, folder in names.items():
        exact, half = (session.reference(folder, dtype) for dtype in ("fp32", "bf16"))
        for prompts in make_batches(512):
            parts += session.compare_answers(engine, exact, half, prompts, name)
    tokens = [engine.generate([draw_prompt(9, 0, 512)], GREEDY, adapters=name)[0]["token_ids"] for name in names]
    assert len({*map(tuple, tokens)}) == 3, "adapters change nothing"
    return judge(parts)


def grammar(session: Session) -> str:
    """Text that a regular expression allows, of the tokens that the reference chooses under it."""
    if importlib.util.find_spec("llguidance") is None:
        raise Skipped("llguidance is not installed")
    folder = session.write(qwen3(vocab_size=256, hidden_size=256, eos_token_id=255))
    add_tokenizer(folder)
    regex = "[a-f]{6}(-[0-9]{3}){4}"
    held = SamplingParams(temperature=0, max_tokens=40, structured_outputs={"regex": regex})
    prompts = [draw_prompt(9 + place, place, 256) for place in range(4)]
    engine, reference = session.open(folder, dtype="fp32"), session.reference(folder, "fp32")
    free = engine.generate(prompts, GREEDY)
    assert not any(re.match("[a-f]{6}", answer["text"]) for answer in free), "answers match without a grammar"
    found, wanted = (each.generate(prompts, held) for each in (engine, reference))
    for ours, theirs in zip(found, wanted, strict=True):
        assert re.fullmatch(regex, ours["text"]), f"{ours['text']!r} does not match {regex}"
        assert ours["token_ids"] == theirs["token_ids"], f"{ours['text']!r} is not the CPU's {theirs['text']!r}"
    return "the CPU's tokens"


def sleep(session: Session) -> str:
    def fall_asleep(engine: LLMEngine) -> None:
        before = engine.generate([draw_prompt(30, 0, 512)], GREEDY)[0]["token_ids"]
        for level in (1, 2):
            session.ran.discard("memory released")
            engine.sleep(level)
            assert engine.is_sleeping, "the engine does not sleep"
            assert session.device == "cpu" or "memory released" in session.ran, "no memory was released"
            try:
                engine.generate([[1]], GREEDY)
            except RequestError:
                pass
            else:
                raise AssertionError("a sleeping engine answers")
            engine.wake_up()
            after = engine.generate([draw_prompt(30, 0, 512)], GREEDY)[0]["token_ids"]
            assert after == before, f"after a sleep of level {level}: {after}, not {before}"

    own = {"enable_sleep_mode": True}
    return session.compare(Check(session.write(qwen3()), own=own, prepare=fall_asleep))


def images(session: Session) -> str:
    """Chunks that end within images of any size."""
    return compare_images(session, qwen3_vl(), (((32, 34), (2, 2)), ((6, 10),)))


def whole_images(session: Session) -> str:
    """Chunks that end ahead of images, whose tokens see each other."""
    return compare_images(session, gemma3(), ONE_SIZE)


def class_tokens(session: Session) -> str:
    """Chunks that end within tiles, each of which begins with a class token."""
    return compare_images(session, internvl(), ONE_SIZE)


def compare_images(session: Session, config: dict[str, Any], grids_of: Sequence[Grids]) -> str:
    """Prompts with images, which are encoded once; then text, of which decodes are captured."""
    folder = session.write(config, "serve.images=true")
    fields: dict[str, Any] = {"images": True, "image_memory": 1 << 24, "max_patches": 2048}
    engine = session.open(folder, dtype="bf16", **fields, max_num_batched_tokens=128)
    session.check_kernels(engine)
    exact, half = (session.reference(folder, dtype, **fields) for dtype in ("fp32", "bf16"))
    parts = list[Part]()
    for seed, grids in enumerate(grids_of):
        tokens, placed = draw_prompt_with_images(grids, seed, engine.config.model, 20)
        ours = logits_of(engine, tokens, placed).float()
        with session.timed("CPU"):
            wanted, theirs = (logits_of(each, tokens, placed).float() for each in (exact, half))
        for first in range(0, len(tokens), PART):
            some = slice(first, first + PART)
            parts.append(Part(f"prompt of {len(tokens)} from {first} on", ours[some], wanted[some], theirs[some]))
    num_images, num_encoded = sum(map(len, grids_of)), engine.metrics.num_encoded_images
    assert num_encoded == num_images, f"{num_encoded} encodings of {num_images} images"
    for prompts in make_batches(500):
        parts += session.compare_answers(engine, exact, half, prompts)
    return judge(parts)


def level_0(session: Session) -> str:
    folder = session.write(qwen3_moe(hidden_size=256, intermediate_size=256, moe_intermediate_size=128))
    return session.compare(Check(folder, (100,), dtype="fp32", level=0))


def level_3(session: Session) -> str:
    folder = session.write(qwen3_moe(hidden_size=256, intermediate_size=256, moe_intermediate_size=128))
    return session.compare(Check(folder, (100,), dtype="fp32"))


def scaled_gemm(session: Session) -> str:
    """torch._scaled_mm with blocks of 128 x 128, whose scales atom pads to a multiple of 4 a row."""
    if not session.is_hopper:
        raise Skipped("torch._scaled_mm takes such blocks on Hopper only")
    from gpu.scaled import COLUMNS, LARGEST_ERROR, relative_error

    errors = {columns: relative_error(columns, is_shuffled=True) for columns in COLUMNS}
    assert max(errors.values()) <= LARGEST_ERROR, f"errors by columns: {errors}"
    return f"{max(errors.values()):.2%}, at most {LARGEST_ERROR:.0%}"


PATHS: dict[str, Callable[[Session], str]] = {
    "dense": dense,
    "fp8": fp8,
    "fp8-block-experts": fp8_block_experts,
    "batch-invariant": batch_invariant,
    "int4-zeros": int4_zeros,
    "mxfp4-experts": mxfp4_experts,
    "int4-in-fp8": int4_in_fp8,
    "mxfp4-in-fp8": mxfp4_in_fp8,
    "latents": latents,
    "chosen-tokens": chosen_tokens,
    "chosen-blocks": chosen_blocks,
    "pooled-runs": pooled_runs,
    "latent-sinks": latent_sinks,
    "latent-windows": latent_windows,
    "mean-runs": mean_runs,
    "attention-residuals": attention_residuals,
    "fp8-kv": fp8_kv,
    "windows": windows,
    "shared-prefix": shared_prefix,
    "shared-kv": shared_kv,
    "short-convolution": short_convolution,
    "delta-rule": delta_rule,
    "mamba-2": mamba_2,
    "selective-scan": selective_scan,
    "lightning": lightning,
    "ngram": ngram,
    "suffix": suffix,
    "delta-rule-ngram": delta_rule_ngram,
    "mtp": mtp,
    "delta-rule-mtp": delta_rule_mtp,
    "lora": lora,
    "images": images,
    "whole-images": whole_images,
    "class-tokens": class_tokens,
    "grammar": grammar,
    "sleep": sleep,
    "level-0": level_0,
    "level-3": level_3,
    "scaled-gemm": scaled_gemm,
}
