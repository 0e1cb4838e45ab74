"""The runtime's data types: Sequence, Plan, Sampled, RequestOutput; no torch.

sequence = Sequence("req-0", prompt=[1, 2, 3], params=SamplingParams(max_tokens=8))
plan = scheduler.schedule()                     # which rows run, and how many tokens of each
pending = runner.execute(builder.build(plan))   # on the device
ended = scheduler.commit(plan, pending.wait(), finish)
"""

from __future__ import annotations

import collections.abc as abc
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from atom.config.limits import EngineLimits
from atom.images.types import PlacedImage
from atom.sampling_params import SamplingParams
from atom.state_rules import StateRule

WEIGHTS, KV_CACHE = "weights", "kv_cache"  # parts of an engine's memory that can be woken up apart, by vLLM's names
TAGS = (WEIGHTS, KV_CACHE)
SLEEP_LEVELS = (1, 2)
PAUSE_MODES = ("abort", "wait", "keep")  # what becomes of running requests
INPUTS = ("tokens", "positions", "batch")  # what a step provides to a lowered body, by name


@dataclass(frozen=True)
class StateKind:
    """The layers whose states have one rule, in blocks of a pool of their own."""

    name: str  # "full", "window_4096"
    rule: StateRule
    block_bytes: int  # over all layers of this kind
    block_tokens: int  # whose entries are in a block
    stride: int = 1  # entries of a table, one for each block of tokens, of which the last one is a block and others 0

    @property
    def bytes_per_token(self) -> int:
        return 0 if self.rule.in_slot else self.block_bytes // self.block_tokens

    def bytes_per_slot(self, limits: EngineLimits) -> int:
        return limits.num_states * self.block_bytes if self.rule.in_slot else 0

    def blocks(self, num_tokens: int, step: int = 1) -> int:
        """The max number of blocks that a sequence needs while it grows to `num_tokens`, `step` tokens at a time.

        Of recurrent state it needs none: blocks have copies, which are taken while there is room.
        """
        if self.rule.in_slot:
            return 0
        whole = -(-num_tokens // self.block_tokens)
        if self.rule.keeps_all:
            return whole
        span = self.rule.num_read(max(num_tokens - step, 0), num_tokens)  # tokens, wherever blocks begin
        kept = (span - 2) // self.block_tokens + 2 + 1  # and the block that `KVCache.commit` keeps for siblings
        return min(whole, kept)

    def places(self, start: int, stop: int) -> range:
        """Those of the entries start to stop of a table that are blocks."""
        return range(start + (-start - 1) % self.stride, stop, self.stride)

    def first_visible(self, query: int) -> int:
        """The index of the first block that a query at this position reads."""
        return self.rule.first_visible(query) // self.block_tokens

    def is_usable(self, first_held: int, num_tokens: int) -> bool:
        """Whether a prefix of that many tokens can be used if its blocks from number `first_held` on are held."""
        return first_held <= self.first_visible(num_tokens)


class DraftTable(Protocol):
    """Chooses how many tokens to draft; see `runtime.draft.table`."""

    def best(self, num_decodes: int, rates: abc.Sequence[float]) -> int:
        """The number of drafts of each decode with the max tokens/s. rates: chance to accept each draft"""

    def choices(self, num_decodes: int) -> list[int]:
        """The numbers of drafts that may be the best."""

    def likely(self, num_decodes: int) -> list[int]:
        """The numbers of drafts that are usually the best."""


@dataclass(frozen=True)
class StepLimits(EngineLimits):
    """The limits of a step and a sequence, and the table that chooses the number of drafts if one was measured."""

    draft_table: DraftTable | None = None  # None: max_verified_tokens does


@dataclass(frozen=True)
class Logprobs:
    """One position: the chosen token's log probability and those of the most likely tokens, best first."""

    token: int
    logprob: float
    rank: int  # 1: the most likely token
    top: list[tuple[int, float]]


class Matcher(Protocol):
    """The constraint of an answer, and its state; `runtime.requests.grammar` makes them."""

    def allowed(self, vocab: int) -> npt.NDArray[np.bool_]:
        """bool[vocab]: the tokens that may come next, at least one."""

    def push(self, token: int) -> bool:
        """Take the next token of the answer; whether it is complete."""


class TokenBudget(Protocol):
    """The limit of an answer's reasoning, and its state; `runtime.requests.thinking` has it."""

    @property
    def forced(self) -> int | None:
        """The token that has to come next; None if any may."""

    @property
    def num_free(self) -> int:
        """The number of next tokens of which none is forced, unless reasoning begins with one of them."""

    def push(self, token: int) -> None:
        """Take the next token of the answer."""


class RepetitionState(Protocol):
    """The repetitions of an answer so far; `runtime.requests.repetition` has it."""

    is_met: bool  # whether they end it

    def push(self, token: int) -> None:
        """Take the next token of the answer."""


@dataclass(eq=False)
class Adapter:
    """A LoRA adapter that is loaded; `runtime.requests.loras` writes it."""

    name: str
    number: int  # its place among those that are loaded
    digest: bytes  # of its files
    num_holders: int = 0  # requests that have not ended
    is_dropped: bool = False  # no new request gets it


class RetainedPrefix(NamedTuple):
    """A beginning of a prompt whose KV is kept from eviction, as far as the share of its key goes."""

    num_tokens: int
    seconds: float  # from the end of the last request that asks for it
    priority: int  # 0 to 100: those of a lower one are given up first


class PrefixHit(msgspec.Struct, array_like=True, frozen=True):
    """Where the hit of a prompt in the prefix cache ended, and why; `runtime.kv.explain` has the reasons."""

    num_tokens: int  # that were cached
    reason: str
    index: int  # of the first token to which the reason applies
    token: int | None = None  # the prompt's there
    earlier: int | None = None  # that of the earlier prompt, with `different_token`
    seconds: float | None = None  # since the eviction, with `evicted`; None: not known


class WeightSpan(NamedTuple):
    """Tokens of an answer that weights of one version have sampled: start to end."""

    version: str
    start: int
    end: int


POOLS = ("last", "mean", "all")


class Tap(NamedTuple):
    """The hidden states of a layer that a request asks for."""

    name: str  # of the layer, one of passes.taps
    pool: str = "last"  # of the prompt: its last token, or their mean; all: of each token, those of the answer too


Steering = tuple[tuple[str, float], ...]  # names of vectors, each of passes.steer, with their scales


class TapResult(Protocol):
    """What a sequence has of a tap so far; `runtime.requests.taps` has it."""

    tap: Tap
    index: int  # of its layer among those that are registered

    def span(self, start: int, num_tokens: int, num_prompt: int) -> tuple[int, int]:
        """The tokens that it reads of a step's, from position start on: how many come before them, and how many."""

    def take(self, start: int, num_tokens: int, data: bytes) -> None:
        """Take the states of these tokens."""

    def states(self, num_prompt: int, num_tokens: int) -> npt.NDArray[np.float32] | None:
        """fp32[H], or of all [tokens, H], of several streams [S, H] in place of H; None: it has none."""


@dataclass(frozen=True)
class RequestOptions:
    """Options of a request besides its prompt and its sampling parameters."""

    salt: bytes = b""  # requests of another salt share no cached prefix with this one
    priority: int = 0  # lower is served earlier
    tenant: str = ""  # whose request it is; those that wait are served in turn
    weight: float = 1.0  # the tenant's share of all turns, relative to the others'
    pooling: str | None = None  # LAST or MEAN, for an embedding; the one token that is generated is ignored
    classify: bool = False  # the embedding is scored for each label, and the scores are in its place
    adapter: str | None = None  # the name of a LoRA adapter; only its requests share cached prefixes
    retained: tuple[RetainedPrefix, ...] = ()  # besides the one of SamplingParams.cache_retention
    images: tuple[PlacedImage, ...] = ()  # of the prompt's placeholders, in their order
    taps: tuple[Tap, ...] = ()  # hidden states that it asks for, of layers each once
    steer: Steering = ()  # vectors that are added to hidden states; only its equals share cached prefixes

    @property
    def reads_prompt(self) -> bool:
        """Whether an embedding or a tap needs each token of the prompt."""
        return self.pooling == "MEAN" or any(tap.pool != "last" for tap in self.taps)


NO_OPTIONS = RequestOptions()


@dataclass(eq=False)
class Request:
    """The request of one sequence: nothing changes it."""

    id: str  # unique in the engine
    prompt: list[int]
    params: SamplingParams
    seed: int = 0
    salt: bytes = b""  # separates prefix caches: what else the KV depends on
    request_id: str = ""  # shared by the n sequences of one request
    index: int = 0  # among them
    parent: Sequence | None = None  # the sibling whose prompt blocks this sequence shares, once they are computed
    stop_ids: frozenset[int] = frozenset()  # eos tokens
    priority: int = 0  # lower is served earlier
    tenant: str = ""  # whose request it is; tenants are served in turn
    weight: float = 1.0  # the tenant's share of all turns, relative to the others'
    pooling: str | None = None  # LAST or MEAN: an embedding is made of these tokens of the prompt; None: no embedding
    classifier: npt.NDArray[np.float32] | None = None  # [C, H], of which the embedding is the C scores; None: it stays
    matcher: Matcher | None = None  # None: the answer is not constrained
    thinking: TokenBudget | None = None  # None: its reasoning is not limited
    repetition: RepetitionState | None = None  # None: it may repeat itself
    bad_words: list[list[int]] = field(default_factory=list)  # tokens that may not follow one another
    adapter: Adapter | None = None  # None: only the model's own weights
    retained: tuple[RetainedPrefix, ...] = ()  # beginnings of the prompt that are kept from eviction
    images: tuple[PlacedImage, ...] = ()  # of the prompt's placeholders, which are its negative tokens
    rope_positions: npt.NDArray[np.int32] | None = None  # [3, L] up to the last image's end; None: the tokens' own
    rope_delta: int = 0  # from the positions of later tokens to those that their rope takes
    reads_prompt: bool = False  # an embedding or a tap needs each token of the prompt
    steering: tuple[float, ...] = ()  # the scale of each registered vector; none: all are 0
    arrival: float = field(default_factory=time.perf_counter)  # seconds


@dataclass(eq=False)
class SchedulingState:
    """The progress of one sequence: written by the scheduler, its blocks by the KV cache."""

    num_computed: int = 0  # tokens whose KV is in the cache
    num_planned: int = 0  # tokens computed or planned: where the next step begins
    num_pending: int = 0  # max tokens sampled by uncommitted steps, which the device knows and the host does not
    num_unverified: int = 0  # of these, drafts that may be rejected
    group: int = 0  # the data group that it is in, once it is in one
    slot: int = -1  # its slot in the request state of the group while it is admitted, else -1
    num_cached: int = 0  # prompt tokens that the prefix cache gave at the first admission
    hit: PrefixHit | None = None  # where that ended, if the request asks for it
    blocks: dict[str, list[int]] = field(default_factory=dict)  # state kind -> block numbers, in order; 0 is no block
    num_released: dict[str, int] = field(default_factory=dict)  # state kind -> the first blocks, which it has released
    num_matched: int = 0  # tokens of which others had the KV when it was admitted, but not the recurrent state
    parting: int = 0  # tokens after which waiting sequences part from it: its recurrent state is kept there
    awaits: tuple[Sequence, int] | None = None  # while it waits: who computes its prefix, and up to which token
    drafts: list[int] = field(default_factory=list)  # after the newest token, of the planned step; -1: the runner's
    admitted_at: float | None = None  # first
    num_preemptions: int = 0


@dataclass(eq=False)
class Answer:
    """The answer of one sequence: tokens are written by the scheduler's commit, the rest by the engine."""

    output: list[int] = field(default_factory=list)
    num_accepted: int = 0  # tokens of it that were drafted
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs | None] = field(default_factory=list)
    pooled: npt.NDArray[np.float64] | None = None  # [H], the sum over tokens that are pooled, so far
    tapped: abc.Sequence[TapResult] = ()  # of each of its taps
    weight_versions: list[WeightSpan] = field(default_factory=list)  # in order, complete once it has finished
    finish_reason: str | None = None  # eos | max_tokens | stop_sequence | stop_{id} | repetition | abort | error
    stop_string: str | None = None  # the stop string that was met
    error: str | None = None  # the message, if finish_reason is error
    text: str | None = None  # the answer, once finished; None without a tokenizer
    first_token_at: float | None = None
    finished_at: float | None = None


@dataclass(eq=False)  # equal only to itself
class Sequence(Answer, SchedulingState, Request):
    """One prompt and its answer so far; fields are grouped by who writes them."""

    def __post_init__(self) -> None:
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]  # nothing comes before the first token

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def needs_prompt(self) -> bool:
        """Whether each token of the prompt must be computed, whatever is cached."""
        return self.params.prompt_logprobs is not None or self.reads_prompt

    @property
    def taps(self) -> dict[str, npt.NDArray[np.float32]]:
        """By the names of layers that it taps, as far as they are computed: see `TappedStates`."""
        found = {each.tap.name: each.states(len(self.prompt), self.num_tokens) for each in self.tapped}
        return {name: states for name, states in found.items() if states is not None}

    @property
    def embedding(self) -> npt.NDArray[np.float32] | None:
        """The mean [H] over the tokens that are pooled, once all are computed; [C] of a classifier."""
        if self.pooled is None:
            return None
        mean = (self.pooled / (len(self.prompt) if self.pooling == "MEAN" else 1)).astype(np.float32)
        return mean if self.classifier is None else self.classifier @ mean

    @property
    def needs_host(self) -> bool:
        """Whether the next token depends on the tokens themselves, so that no step can be planned ahead."""
        may_be_forced = self.thinking is not None and self.thinking.num_free <= self.num_pending
        return may_be_forced or self.matcher is not None or any(len(word) > 1 for word in self.bad_words)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids at positions start to stop, over prompt and output."""
        num_prompt = len(self.prompt)
        return self.prompt[start:stop] + self.output[max(start - num_prompt, 0) : max(stop - num_prompt, 0)]

    def shown_tokens(self, start: int, stop: int) -> list[int]:
        """The same with 0 in place of images' placeholders."""
        tokens = self.tokens(start, stop)
        return [max(token, 0) for token in tokens] if self.images else tokens


class ScheduledRequest(NamedTuple):
    """A sequence's part of a step: positions start to start + num_tokens."""

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool  # a token is sampled: the last token, apart from drafts, is the newest known one
    drafts: tuple[int, ...] = ()  # tokens after the newest, to be verified; -1: the runner knows it

    @property
    def is_decode(self) -> bool:
        """Whether it computes only the newest token and its drafts."""
        return self.samples and self.num_tokens == 1 + len(self.drafts)


class BlockCopies(msgspec.Struct, tag=True):
    """Copies of blocks to host memory, and then from there, by state kind: pairs of a block and a block of the host.

    They start after the preceding steps and run during the next one; the step after that waits for them. Writes to
    files come first, then fills from files, saves and loads.
    """

    writes: dict[str, list[tuple[int, bytes]]] = {}  # blocks of the host, and the keys of their files
    fills: dict[str, list[tuple[int, Any]]] = {}  # blocks of the host, and the content read from files
    saves: dict[str, list[tuple[int, int]]] = {}
    loads: dict[str, list[tuple[int, int]]] = {}
    awaits_saves: bool = False  # the next step waits for all but loads, since it writes to a block that is saved
    awaits_loads: bool = False  # the next step waits for all, since it reads what is loaded
    others: list[BlockCopies] = []  # of the other data groups


class Profile(msgspec.Struct, tag=True):
    """Starts or stops the profiler of a rank."""

    starts: bool


class LoadAdapter(msgspec.Struct, tag=True):
    """Makes a rank load an adapter from the files that the driver has read."""

    number: int  # its place among those that are loaded
    path: str
    digest: bytes


class ChangeWeights(msgspec.Struct, tag=True):
    """Makes a rank take part in an update of the weights, see `atom.runtime.weight_updates`."""

    action: str  # init | open | apply | finish | close
    info: bytes = b""  # of init and open as they came, of apply the names of the tensors
    is_whole: bool = False  # open and apply: the only part of an update


class SwapCosts(NamedTuple):
    """The time to load KV from host memory, and to compute it."""

    load_seconds: float  # of each load
    load_token_seconds: float  # in addition, of each of its tokens
    compute_token_seconds: float

    def pays(self, num_tokens: int) -> bool:
        """Whether loading this number of tokens takes less time than computing them."""
        return self.load_seconds + num_tokens * self.load_token_seconds < num_tokens * self.compute_token_seconds


@dataclass(frozen=True)
class Plan:
    """A step. Rows of one token that sample come first (decodes, with drafts), then the others (prefill chunks)."""

    rows: list[ScheduledRequest]
    num_decodes: int
    copies: BlockCopies | None = None  # that run during it; they are made once, even if the step fails
    is_chained: bool = False  # a row reads KV that another one of the step writes: all rows run in it, or none

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


@dataclass(frozen=True)
class Sampled:
    """The results of a step, in the order of the plan's rows that sample."""

    tokens: list[int]
    logprobs: list[Logprobs | None]
    prompt_logprobs: dict[int, list[Logprobs]] = field(default_factory=dict)  # plan's row -> for positions start + 1 …
    accepted: dict[int, list[int]] = field(default_factory=dict)  # row that samples -> tokens after its first
    num_drafted: dict[int, int] = field(default_factory=dict)  # row that samples -> drafts that were verified, if any
    pooled: dict[int, bytes] = field(default_factory=dict)  # plan's row -> fp32[H], the sum over tokens that are pooled
    tapped: dict[int, dict[int, bytes]] = field(default_factory=dict)  # plan's row -> number of its tap -> fp32
    others: list[Sampled] = field(default_factory=list)  # of the other data groups


@dataclass(frozen=True)
class RequestOutput:
    """The argument of a stream callback, for every token that completes text and at the end."""

    request_id: str
    index: int
    text: str | None  # new text since the last one; None without a tokenizer
    token_ids: list[int]  # new tokens since the last one
    finish_reason: str | None
    finished: bool
    logprobs: list[Logprobs]  # of token_ids; empty if they were not requested
    sequence: Sequence  # the whole sequence in its present state


StreamCallback = abc.Callable[[RequestOutput], Any]


def openai_reason(reason: str) -> str:
    """A finish reason as OpenAI and vLLM name it: stop, length, repetition, abort or error."""
    return "stop" if reason.startswith("stop_") else {"eos": "stop", "max_tokens": "length"}.get(reason, reason)
