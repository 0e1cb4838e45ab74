"""The runtime's data types: Sequence, Plan, Sampled, RequestOutput; no torch.

sequence = Sequence("req-0", prompt=[1, 2, 3], params=SamplingParams(max_tokens=8))
plan = scheduler.schedule()                     # which rows run, and how many tokens of each
pending = runner.execute(builder.build(plan))   # on the device
ended = scheduler.commit(plan, pending.wait(), finish)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from atom.config import SamplingParams

# what a batch provides to a lowered body by name: these, and for each kind of cache one that begins like the others
INPUTS = ("tokens", "positions", "starts", "lengths", "num_decodes")
INPUTS_BY_KIND = ("table_", "slots_")


@dataclass(frozen=True)
class CacheKind:
    """What the layers of one kind keep for each token of a sequence."""

    name: str  # "full", "window_4096"
    bytes_per_token: int  # over all layers of this kind
    window: int | None = None  # tokens that a query sees, itself included; None: all


@dataclass(frozen=True)
class Logprobs:
    """One position: the chosen token's log probability and those of the most likely tokens, best first."""

    token: int
    logprob: float
    rank: int  # 1: the most likely token
    top: list[tuple[int, float]]


class Matcher(Protocol):
    """What an answer must be, and how far it is; `runtime.grammar` makes them."""

    def allowed(self, vocab: int) -> npt.NDArray[np.bool_]:
        """bool[vocab]: the tokens that may come next, at least one."""

    def push(self, token: int) -> bool:
        """Takes the next token of the answer; whether it is complete."""


@dataclass(eq=False)
class Request:
    """What one sequence was asked: nothing changes it."""

    id: str  # unique in the engine
    prompt: list[int]
    params: SamplingParams
    seed: int = 0
    salt: bytes = b""  # separates prefix caches: what else the KV depends on
    request_id: str = ""  # shared by the n sequences of one request
    index: int = 0  # among them
    parent: Sequence | None = None  # the sibling whose prompt blocks this one shares, once they are computed
    stop_ids: frozenset[int] = frozenset()  # eos tokens
    priority: int = 0  # lower is served earlier
    matcher: Matcher | None = None  # None: the answer may be anything
    arrival: float = field(default_factory=time.perf_counter)  # seconds


@dataclass(eq=False)
class Progress:
    """How far it is: the scheduler's, its blocks the KV cache's."""

    num_computed: int = 0  # tokens whose KV is in the cache
    num_planned: int = 0  # these and those of steps that are not committed: where the next step begins
    num_pending: int = 0  # tokens that those steps sample, which the device has and the host has not
    slot: int = -1  # its place in the device's state, while it is admitted
    num_cached: int = 0  # prompt tokens that the prefix cache gave at the first admission
    blocks: dict[str, list[int]] = field(default_factory=dict)  # cache kind -> block numbers, in order; 0 is no block
    admitted_at: float | None = None  # first


@dataclass(eq=False)
class Answer:
    """What it has got: tokens from the scheduler's commit, the rest from the engine."""

    output: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs | None] = field(default_factory=list)
    finish_reason: str | None = None  # eos | max_tokens | stop_sequence | stop_{id} | abort | error
    stop_string: str | None = None  # the one that was met
    error: str | None = None  # what went wrong, where that is the reason
    text: str | None = None  # the answer, once finished; None without a tokenizer
    first_token_at: float | None = None
    finished_at: float | None = None


@dataclass(eq=False)  # equal only to itself
class Sequence(Answer, Progress, Request):
    """One prompt and its answer so far, fields grouped by who writes them."""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def needs_host(self) -> bool:
        """Whether what may come next follows from the tokens themselves, so that no step can be planned ahead."""
        return self.matcher is not None

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids at positions start to stop, over prompt and output."""
        num_prompt = len(self.prompt)
        return self.prompt[start:stop] + self.output[max(start - num_prompt, 0) : max(stop - num_prompt, 0)]


class ScheduledRequest(NamedTuple):
    """A sequence's share of a step: positions start to start + num_tokens."""

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool  # these are the last known tokens: a new one comes of them


@dataclass(frozen=True)
class Plan:
    """A step. Rows of one token that sample come first (decodes), then the others (prefill chunks)."""

    rows: list[ScheduledRequest]
    num_decodes: int

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


@dataclass(frozen=True)
class Sampled:
    """What a step gave, in the order of the plan's rows that sample."""

    tokens: list[int]
    logprobs: list[Logprobs | None]
    prompt_logprobs: dict[int, list[Logprobs]] = field(default_factory=dict)  # plan's row -> for positions start + 1 …


@dataclass(frozen=True)
class RequestOutput:
    """What a stream callback gets, once for every token that completes text and once at the end."""

    request_id: str
    index: int
    text: str | None  # new text since the last one; None without a tokenizer
    token_ids: list[int]  # new tokens since the last one
    finish_reason: str | None
    finished: bool
    logprobs: list[Logprobs]  # of token_ids; none where they were not asked for
    sequence: Sequence  # as it is now: what it has and when, beside what is new


StreamCallback = Callable[[RequestOutput], Any]
