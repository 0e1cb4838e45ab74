"""Rows of scripts/bench-gpu: workloads, conversations, starts and sums, with their targets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple


class Row(NamedTuple):
    """A workload of a model."""

    title: str  # of the model, in its format
    model: str  # a file of tests/configs
    num_prompts: int
    input_len: str
    output_len: str
    target: float  # on an H200: a figure, or with `than` a multiple of another row's
    counted: str = "output"  # or input: the tokens of the figure
    sampling: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()  # overrides of the engine
    than: str = ""  # the row that it is compared with, in the same run
    by_share: bool = False  # compare shares of the limits, not figures
    num_gpus: int = 1

    @property
    def load(self) -> str:
        if self.counted == "input":
            return f"prefill {self.num_prompts} × {self.input_len}"
        requests = f"{self.num_prompts} request{'s' if self.num_prompts > 1 else ''}"
        return f"{requests}, {self.input_len} in / {self.output_len} out{', sampled' if self.sampling else ''}"

    def overrides(self, folder: Path) -> list[str]:
        """folder: with a config.json, and those of drafts"""
        sizes = [f"job.{name}={getattr(self, name)}" for name in ("num_prompts", "input_len", "output_len")]
        setup = [each.format(folder=folder) for each in self.setup]
        return [f"checkpoint={folder}", "job=bench", "load_dummy=true", *sizes, *self.sampling, *setup]

    @property
    def engine(self) -> tuple[str, tuple[str, ...]]:
        """What rows of one engine have in common."""
        return self.model, self.setup


FP8 = ("quant=fp8", "quant.head=fp8", "quant.kv=fp8")
INT4 = ("quant=int4", "quant.head=fp8", "quant.kv=fp8")
BLOCKS = ("quant=fp8_block",)
MTP = ("model.mtp_layers=1", "serve.method=mtp", "serve.num_speculative_tokens=1", "serve.acceptance_length=1.8")
# each draft accepted as often as that one: 1 + 0.8 + 0.8 * 0.8 tokens
MTP2 = ("model.mtp_layers=1", "serve.method=mtp", "serve.num_speculative_tokens=2", "serve.acceptance_length=2.44")
# by chance: 2.5 tokens of 4 on average, 2 of 2 if one is drafted
DRAFTS = ("serve.method=ngram", "serve.acceptance_length=2.5")
EAGLE3 = ("serve.method=eagle3", "serve.draft_model={folder}/qwen3_8b_eagle3", "serve.acceptance_length=2.5")
TABLE = (*EAGLE3, "tune=true", "cache={folder}/cache")  # where no other row finds what it measured
TP2, TP4 = ("parallel=tp2",), ("parallel=tp4",)
AIR, V3 = ("quant=fp8", "model.layers=13"), ("model.layers=7",)  # 12 and 4 layers with experts fit on one GPU
NEXT_TITLE, NEXT_MODEL, NEXT = "Qwen3-Next-80B-A3B bf16, 24 layers", "qwen3_next_80b_a3b", ("model.layers=24",)
LOADS = (1, 32, 128, "prefill")  # of a row's name
OFF = ("serve.method=ngram", "serve.max_verified_tokens=1")
FP8_TITLE = "Qwen3-8B fp8, head and KV too"


def decodes(
    title: str, model: str, targets: Sequence[float], setup: tuple[str, ...] = (), num_gpus: int = 1
) -> Iterator[Row]:
    """Rows of 1, 32 and 128 requests."""
    for (count, length), target in zip(((1, "128"), (32, "1024"), (128, "1024")), targets, strict=True):
        yield Row(title, model, count, length, "256", target, setup=setup, num_gpus=num_gpus)


def prefill(title: str, model: str, target: float, setup: tuple[str, ...] = (), num_gpus: int = 1) -> Row:
    return Row(title, model, 8, "8192", "1", target, "input", setup=setup, num_gpus=num_gpus)


def layout(parallel: str) -> dict[str, Row]:
    """Rows of a large mixture on 4 GPUs: the targets are to be reached by one of the layouts."""
    title, model, setup = f"Qwen3-235B-A22B block fp8, {parallel}", "qwen3_235b_a22b", (*BLOCKS, f"parallel={parallel}")
    name = f"235b-{parallel.replace('_', '-')}"
    rows = named(name, decodes(title, model, (280, 1750, 4500), setup, num_gpus=4))
    return rows | {f"{name}-prefill": prefill(title, model, 40000, setup, num_gpus=4)}


def multiples(title: str, of: str, factors: dict[int, float], setup: tuple[str, ...]) -> Iterator[Row]:
    """Rows like others, whose names end in their requests, with more setup. factors: of their figures, to be reached"""
    for count, factor in factors.items():
        row = ROWS[than := f"{of}-{count}"]
        yield row._replace(title=f"{row.title}, {title}", target=factor, setup=(*row.setup, *setup), than=than)


def shares(
    name: str,
    title: str,
    model: str,
    of: str,
    setup: tuple[str, ...] = (),
    loads: Sequence[int | str] = (1, 32),
    target: float = 1,
    num_gpus: int = 1,
) -> dict[str, Row]:
    """Rows with the loads of others, compared by the share of the limit. target: of their share, to be reached"""
    changes = {"title": title, "model": model, "setup": setup, "num_gpus": num_gpus, "target": target, "by_share": True}
    return {f"{name}-{load}": ROWS[than := f"{of}-{load}"]._replace(**changes, than=than) for load in loads}


def invariant(of: str) -> dict[str, Row]:
    """The row of 32 requests in the batch-invariant mode, which may be at most 25% slower."""
    row = ROWS[than := f"{of}-32"]
    setup = (*row.setup, "batch_invariant=true")
    return {
        f"{of}-invariant-32": row._replace(title=f"{row.title}, batch-invariant", target=0.8, setup=setup, than=than)
    }


def in_fp8(of: str, target: float, prompt_target: float) -> dict[str, Row]:
    """The rows of 128 requests and of prompts of a model in 4 bits, whose prompts are multiplied in fp8."""
    row = ROWS[f"{of}-128"]
    title, setup = f"{row.title}, prompts in fp8", (*row.setup, "quant.act=fp8")
    made = row._replace(title=title, setup=setup, target=target)
    return {f"{of}-act-128": made, f"{of}-act-prefill": prefill(title, row.model, prompt_target, setup)}


def named(name: str, rows: Iterable[Row]) -> dict[str, Row]:
    return {f"{name}-{row.num_prompts}": row for row in rows}


ROWS = {
    **named("8b", decodes("Qwen3-8B bf16", "qwen3_8b", (265, 4200, 6750))),
    "8b-256": Row("Qwen3-8B bf16", "qwen3_8b", 256, "1024", "256", 1, than="8b-128"),
    "8b-prefill": prefill("Qwen3-8B bf16", "qwen3_8b", 43500),
    "0.6b-1": Row("Qwen3-0.6B bf16", "qwen3_0.6b", 1, "128", "512", 2000),
    "0.6b-256": Row(
        "Qwen3-0.6B bf16", "qwen3_0.6b", 256, "100-1024", "100-1024", 33000, sampling=("sampling.temperature=0.6",)
    ),
    **named("8b-fp8", decodes(FP8_TITLE, "qwen3_8b", (430, 6300, 9800), FP8)),
    "8b-fp8-prefill": prefill(FP8_TITLE, "qwen3_8b", 62000, FP8),
    **named("8b-int4", decodes("Qwen3-8B int4, head and KV fp8", "qwen3_8b", (600, 6000, 8000), INT4)),
    **named("v2-lite", decodes("DeepSeek-V2-Lite bf16", "deepseek_v2_lite", (650, 3600, 9500))),
    **named("gpt-oss-20b", decodes("gpt-oss-20b", "gpt_oss_20b", (700, 6000, 13000))),
    **named("gpt-oss-120b", decodes("gpt-oss-120b", "gpt_oss_120b", (480, 2100, 4600))),
    **named("30b-a3b-fp8", decodes("Qwen3-30B-A3B block fp8", "qwen3_30b_a3b", (750, 3500, 8000), BLOCKS)),
    **named("30b-a3b", decodes("Qwen3-30B-A3B bf16", "qwen3_30b_a3b", (500, 2050, 5200))),
    "30b-a3b-fp8-prefill": prefill("Qwen3-30B-A3B block fp8", "qwen3_30b_a3b", 95_000, BLOCKS),
    "30b-a3b-prefill": prefill("Qwen3-30B-A3B bf16", "qwen3_30b_a3b", 70_000),
    "gpt-oss-20b-prefill": prefill("gpt-oss-20b", "gpt_oss_20b", 90_000),
    **named("next", decodes(NEXT_TITLE, NEXT_MODEL, (700, 2850, 5400), NEXT)),
    "next-prefill": prefill(NEXT_TITLE, NEXT_MODEL, 150_000, NEXT),
    **named("32b-tp2", decodes("Qwen3-32B bf16, 2 GPUs", "qwen3_32b", (112, 1950, 3100), TP2, num_gpus=2)),
    **named("32b-tp4", decodes("Qwen3-32B bf16, 4 GPUs", "qwen3_32b", (200, 3100, 5200), TP4, num_gpus=4)),
    "32b-tp4-prefill": prefill("Qwen3-32B bf16, 4 GPUs", "qwen3_32b", 33000, TP4, num_gpus=4),
    **layout("tp4"),
    **layout("tp4_ep"),
    **layout("dp4_ep"),
}
SPEED_UPS = {1: 2.0, 32: 1.8, 128: 1.0, 256: 1.0}
ROWS |= {
    **named("8b-drafts", multiples("n-gram drafts, 2.5 tokens a step", "8b", SPEED_UPS, DRAFTS)),
    **named("8b-eagle3", multiples("EAGLE-3 drafts, 2.5 tokens a step", "8b", SPEED_UPS, EAGLE3)),
    **named("8b-eagle3-table", multiples("EAGLE-3 drafts, as measured times allow", "8b", SPEED_UPS, TABLE)),
    **in_fp8("8b-int4", 8000, 60000),
    **in_fp8("gpt-oss-20b", 13000, 110_000),
    **invariant("8b"),
    **invariant("30b-a3b-fp8"),
    **named("8b-off", multiples("drafts that never come", "8b", dict.fromkeys(SPEED_UPS, 0.995), OFF)),
    **shares("glm-air-fp8", "GLM-4.5-Air fp8, 13 layers", "glm_4_5_air", "30b-a3b-fp8", AIR),
    **shares("v3-fp8", "DeepSeek-V3 block fp8, 7 layers", "deepseek_v3", "30b-a3b-fp8", V3),
    **shares("vl-8b", "Qwen3-VL-8B bf16, text", "qwen3_vl_8b", "8b", ("serve.images=true",), (32,), 0.99),
    **shares("nemotron-nano", "Nemotron-Nano-9B-v2 bf16", "nemotron_nano_9b_v2", "next", (), LOADS),
    **shares("next-fp8", NEXT_TITLE.replace("bf16", "fp8"), NEXT_MODEL, "next", ("quant=fp8", *NEXT), LOADS),
    **shares("next-fp8-block", NEXT_TITLE.replace("bf16", "block fp8"), NEXT_MODEL, "next", (*BLOCKS, *NEXT), LOADS),
    # 48 layers, with 0.85 of the share that 24 on one GPU have
    **shares("next-tp2", "Qwen3-Next-80B-A3B bf16, 2 GPUs", NEXT_MODEL, "next", TP2, (32,), 0.85, num_gpus=2),
    **named("v2-lite-mtp", multiples("MTP, 1.8 tokens a step", "v2-lite", {1: 1.45, 32: 1.4, 128: 1.0}, MTP)),
    **named("next-mtp", multiples("MTP, 1.8 tokens a step", "next", {1: 1.3}, MTP)),
    **named("next-mtp2", multiples("MTP, 2.44 tokens a step", "next", {1: 1.3}, MTP2)),
}


class Agents(NamedTuple):
    """Conversations that take turns: all send what was said and new tokens at once, and wait for all answers."""

    title: str
    model: str
    num_sessions: int
    shared_len: int  # tokens that all begin with
    new_len: int  # that a turn adds
    output_len: int  # of an answer
    targets: tuple[float, float]  # on an H200: seconds of all turns and of the first one
    compared: Mapping[str, tuple[float, float]] = {}  # others' seconds, by name
    setup: tuple[str, ...] = ()
    than: str = ""  # the row of a dense model, of whose cached tokens this one is to have MIN_CACHED
    num_turns: int = 6
    num_gpus: int = 1

    @property
    def load(self) -> str:
        turns = f"{self.num_sessions} conversations × {self.num_turns} turns"
        return f"{turns}, {self.shared_len} shared + {self.new_len} new in / {self.output_len} out"

    @property
    def engine(self) -> tuple[str, tuple[str, ...]]:
        """What rows of one engine have in common."""
        return self.model, self.setup

    def overrides(self, folder: Path) -> list[str]:
        return [f"checkpoint={folder}", "load_dummy=true", "serve.max_model_len=32768", *self.setup]


MIN_CACHED, VLLM = 0.9, "vLLM 0.26"
AGENTS = {
    "agents-32": Agents("Qwen3-8B bf16", "qwen3_8b", 32, 2000, 1500, 100, (14.9, 1.9), {VLLM: (16.2, 2.11)}),
    "agents-64": Agents("Qwen3-8B bf16", "qwen3_8b", 64, 8000, 500, 200, (22.3, 3.2), {VLLM: (33.4, 4.76)}),
}
AGENTS |= {
    f"next-{name}": AGENTS[name]._replace(
        title=NEXT_TITLE, model=NEXT_MODEL, setup=NEXT, targets=seconds, compared={VLLM: seconds}, than=name
    )
    for name, seconds in {"agents-32": (11.9, 1.88), "agents-64": (25.9, 4.25)}.items()
}


class Photos(NamedTuple):
    """Requests that come at once, each with an image of its own in its text."""

    title: str
    model: str
    num_requests: int
    side: int  # of an image, in pixels
    input_len: int  # tokens of text
    output_len: int  # of an answer
    share: float  # to be reached of the requests/s that the operations of encoder and prompts allow
    setup: tuple[str, ...] = ("serve.images=true",)
    than: str = ""
    num_gpus: int = 1

    @property
    def load(self) -> str:
        image = f"image of {self.side} × {self.side}"
        return f"{self.num_requests} requests, {image} + {self.input_len} in / {self.output_len} out"

    def overrides(self, folder: Path) -> list[str]:
        return [f"checkpoint={folder}", "load_dummy=true", *self.setup]


PHOTOS = {"vl-8b-images": Photos("Qwen3-VL-8B bf16", "qwen3_vl_8b", 64, 1024, 100, 100, 0.6)}
GRAPHS, PACKED_START, LOAD, LARGE_MODEL = "8b-graphs", "start-packed", "load", "qwen3_8b"


class Start(NamedTuple):
    """Starts of a model; targets: seconds, of cold and warm ones."""

    title: str
    model: str
    targets: Mapping[str, float]
    setup: tuple[str, ...] = ()
    num_gpus: int = 1
    than: str = ""  # the start that it may take `targets` longer than


MIXTURE_START = {"cold": 20.0, "warm": 9.0}
STARTS = {
    "start": Start("Qwen3-8B bf16", LARGE_MODEL, {"cold": 20, "warm": 8}),
    "start-tp4": Start("Qwen3-8B bf16, 4 GPUs", LARGE_MODEL, {"cold": 5, "warm": 5}, TP4, 4, than="start"),
    "start-235b-tp4": Start(
        "Qwen3-235B-A22B block fp8, tp4", "qwen3_235b_a22b", {"cold": 45, "warm": 25}, (*BLOCKS, *TP4), 4
    ),
    "start-30b-a3b-fp8": Start("Qwen3-30B-A3B block fp8", "qwen3_30b_a3b", MIXTURE_START, BLOCKS),
    "start-v2-lite": Start("DeepSeek-V2-Lite bf16", "deepseek_v2_lite", MIXTURE_START),
    "start-gpt-oss-20b": Start("gpt-oss-20b", "gpt_oss_20b", MIXTURE_START),
    "start-next": Start(NEXT_TITLE, NEXT_MODEL, MIXTURE_START, NEXT),
}
SUMS = {"sums-2": (2, 3.0), "sums-4": (4, 4.0)}  # ranks, and the µs that a sum may take
NAMES = (*ROWS, GRAPHS, *AGENTS, *PHOTOS, *SUMS, *STARTS, PACKED_START, LOAD)


def gpus_of(name: str) -> int:
    """The GPUs that a row needs."""
    return SUMS[name][0] if name in SUMS else getattr(find_row(name), "num_gpus", 1)


def find_row(name: str) -> Row | Agents | Photos | Start | None:
    return ROWS.get(name) or AGENTS.get(name) or PHOTOS.get(name) or STARTS.get(name)


def with_compared(names: Sequence[str]) -> list[str]:
    """Rows, and before them those that they are compared with."""
    found = dict.fromkeys(names)
    for name in names:
        while (row := find_row(name)) and (name := row.than):
            found[name] = None
    return sorted(found, key=NAMES.index)
