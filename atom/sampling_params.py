"""Sampling parameters of a request: how its answer is sampled, and when it ends.

SamplingParams(temperature=0, max_tokens=8)
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from atom.errors import RequestError

SAMPLING_KINDS = ("greedy", "random", "filtered")  # a batch of a later kind may have rows of those before it
MIN_TEMPERATURE = 1e-5  # of a request that is sampled: anything lower is greedy, as in vLLM


def number(default: Any, low: float, high: float = math.inf, *, above: bool = False) -> Any:
    """A field from low to high, both included, or above low."""
    return field(default=default, metadata={"low": low, "high": high, "above": above})


# field of generation_config.json -> field of sampling
GENERATION = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
# fields of generation_config.json that have no counterpart here -> the value, beside null, with which transformers
# computes the same answers as without it
UNUSED: dict[str, Any] = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "min_length": 0,
    "min_new_tokens": 0,
    "max_time": None,
    "stop_strings": None,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "exponential_decay_length_penalty": None,
    "guidance_scale": 1.0,
    "penalty_alpha": 0.0,
    "dola_layers": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "bad_words_ids": [],
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
    "sequence_bias": [],
    "token_healing": False,
    "watermarking_config": None,
}
UNUSED_OF_BEAMS: dict[str, Any] = {  # the same, with num_beams alone
    "early_stopping": False,
    "length_penalty": 1.0,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "constraints": [],
    "force_words_ids": [],
}
UNUSED_OF_SAMPLES = {"typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "top_h": None}  # unless greedy
INT32 = (1 << 31) - 1
TOKEN_ID = number(0, 0, INT32).metadata
BIAS = number(0, -100, 100).metadata
# what SamplingParams.structured_outputs may hold, one of them, by the names of vLLM's StructuredOutputsParams
STRUCTURED_OUTPUTS: dict[str, tuple[tuple[type, ...], str]] = {
    "json": ((Mapping, str), "a JSON schema, as an object or as its text"),
    "json_object": ((bool,), "true"),
    "regex": ((str,), "a regular expression of at least one character"),
    "grammar": ((str,), "a grammar in Lark's notation or GBNF"),
    "choice": ((list, tuple), "a list of at least one string"),
}


def unused_values(generation: Mapping[str, Any]) -> dict[str, Any]:
    """The values of generation_config.json that change answers in transformers, and none here."""
    neutral = dict(UNUSED)
    if generation.get("num_beams") not in (None, 1):
        neutral |= UNUSED_OF_BEAMS
    if generation.get("do_sample") is not False:
        neutral |= UNUSED_OF_SAMPLES
    return {name: generation[name] for name, value in neutral.items() if generation.get(name) not in (None, value)}


@dataclass
class SamplingParams:
    """How one request is sampled and when it ends. Bad values raise RequestError."""

    temperature: float = number(1.0, 0)  # 0: greedy
    max_tokens: int = number(64, 1, INT32)
    ignore_eos: bool = False  # an answer goes on behind the end token
    stop_strings: list[str] | None = None  # texts that end an answer
    top_k: int = number(0, -1, INT32)  # as many of the likeliest tokens; 0 or -1: all
    top_p: float = number(1.0, 0, 1, above=True)  # of the likeliest tokens, those that add up to this probability
    min_p: float = number(0.0, 0, 1)  # least probability of a token, as a share of the likeliest one's
    seed: int | None = number(None, -math.inf)  # null: drawn from the engine's seed
    n: int = number(1, 1, 128)  # answers to one prompt
    stop_token_ids: list[int] | None = None  # tokens that end an answer
    min_tokens: int = number(0, 0, INT32)  # no eos and no stop before as many
    logprobs: int | None = number(None, 0, 20)  # how many most likely tokens to report with each chosen one
    prompt_logprobs: int | None = number(None, 0, 20)  # the same for the prompt's tokens
    presence_penalty: float = number(0.0, -2, 2)  # subtracted from the logits of tokens that the answer has
    frequency_penalty: float = number(0.0, -2, 2)  # the same, times how often it has them
    repetition_penalty: float = number(1.0, 0, above=True)  # divides positive logits of prompt's and answer's tokens
    logit_bias: dict[int, float] | None = None  # token id -> added to its logit, -100 to 100
    allowed_token_ids: list[int] | None = None  # the only tokens that an answer may have, its end among them
    bad_words: list[str] | None = None  # texts that it may not have, as they are tokenized at its start and within it
    include_stop_str_in_output: bool = False  # the text ends behind the stop string or stop token, not before it
    skip_special_tokens: bool = True  # special tokens have no text
    visible_tokens: list[str] | None = None  # special tokens that have it all the same, such as <|python_tag|>
    mark_visible_tokens: bool = False  # with U+FDD1 before each, which tells them from the same text spelled out
    structured_outputs: dict[str, Any] | None = None  # {kind: value} of json, json_object, regex, grammar or choice
    stop: list[str] | None = None  # the same as stop_strings, by vLLM's name
    reasoning: dict[str, str] | None = None  # before what structured_outputs constrains: {begin, end, then}
    tool_calls: str | None = None  # a grammar in Lark's notation, in which @answer is what structured_outputs say

    def __post_init__(self) -> None:
        if self.stop is not None:
            if self.stop_strings is not None:
                raise RequestError("stop and stop_strings are the same; give one")
            self.stop_strings, self.stop = self.stop, None
        for each in fields(self):
            if "low" in each.metadata:
                value = sampling_number(each.name, getattr(self, each.name), str(each.type), each.metadata)
                setattr(self, each.name, value)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "mark_visible_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name}={getattr(self, name)!r} is not true or false")
        if self.min_tokens > (self.max_tokens or math.inf):  # a SamplingConfig's may be null
            raise RequestError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}")
        self.top_k = max(self.top_k, 0)
        if isinstance(self.stop_strings, str):
            self.stop_strings = [self.stop_strings]
        for name in ("stop_strings", "stop_token_ids", "visible_tokens", "allowed_token_ids", "bad_words"):
            if not isinstance(getattr(self, name), list | tuple | None):
                raise RequestError(f"{name}={getattr(self, name)!r} is not a list")
        for name in ("stop_strings", "visible_tokens", "bad_words"):
            for text in getattr(self, name) or ():
                if not isinstance(text, str) or not text:
                    raise RequestError(f"{name}: {text!r} is not a string of at least one character")
        for name in ("stop_token_ids", "allowed_token_ids"):
            for id in getattr(self, name) or ():
                sampling_number(name, id, "int", TOKEN_ID)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids is empty; give at least one token id")
        if self.allowed_token_ids is not None and self.structured_outputs is not None:
            raise RequestError("allowed_token_ids and structured_outputs both say what the answer may be; give one")
        if not isinstance(self.logit_bias, Mapping | None):
            raise RequestError(f"logit_bias={self.logit_bias!r} is not a mapping from token ids to numbers")
        for id, bias in (self.logit_bias or {}).items():
            sampling_number("logit_bias: token id", id, "int", TOKEN_ID)
            sampling_number(f"logit_bias[{id}]", bias, "float", BIAS)
        if self.reasoning is not None:
            check_reasoning(self.reasoning)
            if self.structured_outputs is None:
                raise RequestError("reasoning says what structured_outputs do not constrain; give both")
        if self.tool_calls is not None and (self.structured_outputs is None or not isinstance(self.tool_calls, str)):
            raise RequestError("tool_calls is a grammar of calls in place of structured_outputs; give both")
        if self.structured_outputs is not None:
            self.structured_outputs = structured_outputs(self.structured_outputs)

    @property
    def has_token_rules(self) -> bool:
        """Whether some tokens are made likelier, or impossible, at every place of the answer."""
        return bool(self.logit_bias or self.allowed_token_ids or self.bad_words)


def check_reasoning(value: Any) -> None:
    """Check a mapping with an end, and maybe a beginning and what follows the end."""
    is_mapping = isinstance(value, Mapping) and all(isinstance(text, str) for text in value.values())
    if not is_mapping or not set(value) <= {"begin", "end", "then"} or not value.get("end"):
        raise RequestError(f'reasoning={value!r} is not {{"begin": …, "end": …, "then": …}}; end is needed')


def structured_outputs(value: Any) -> dict[str, Any]:
    """The one thing that an answer must be, {kind: value}, as STRUCTURED_OUTPUTS has it."""
    kinds = ", ".join(STRUCTURED_OUTPUTS)
    if not isinstance(value, Mapping):
        raise RequestError(f"structured_outputs={value!r} is not a mapping with one of {kinds}")
    if unknown := [kind for kind in value if kind not in STRUCTURED_OUTPUTS]:
        raise RequestError(f"structured_outputs: there is no {unknown[0]!r}; give one of {kinds}")
    given = {kind: item for kind, item in value.items() if item is not None}
    if len(given) != 1:
        raise RequestError(f"structured_outputs gives {', '.join(given) or 'nothing'}; give exactly one of {kinds}")
    ((kind, item),) = given.items()
    types, meaning = STRUCTURED_OUTPUTS[kind]
    is_wrong = item is not True if kind == "json_object" else not item and kind != "json"
    texts = item if kind == "choice" and isinstance(item, list | tuple) else ()
    if not isinstance(item, types) or is_wrong or not all(isinstance(text, str) for text in texts):
        raise RequestError(f"structured_outputs: {kind}={item!r} is not {meaning}")
    return given


def sampling_number(name: str, value: Any, kind: str, limits: Mapping[str, Any]) -> Any:
    """The value as int or float, within its limits."""
    if value is None and "None" in kind:
        return None
    is_whole = kind.startswith("int")
    expected: Any = numbers.Integral if is_whole else numbers.Real
    if isinstance(value, bool) or not isinstance(value, expected):
        raise RequestError(f"{name}={value!r} is not a {'whole number' if is_whole else 'number'}")
    try:
        value = int(value) if is_whole else float(value)
    except OverflowError:  # a whole number of more than 308 digits
        value = math.inf
    if fault := out_of_range(value, limits):
        raise RequestError(f"{name}={value!r} must be {fault}")
    return value


def out_of_range(value: float, limits: Mapping[str, Any]) -> str | None:
    """Where a number may lie, if it does not."""
    low, high, above = limits["low"], limits["high"], limits["above"]
    if (isinstance(value, int) or math.isfinite(value)) and low <= value <= high and not (above and value == low):
        return None
    return f"a {'whole' if isinstance(value, int) else 'finite'} number {describe_limits(limits)}".rstrip()


def describe_limits(limits: Mapping[str, Any]) -> str:
    """The limits of a field of `number` in words; empty where there are none."""
    low = "" if limits["low"] == -math.inf else f"{'above' if limits['above'] else 'from'} {limits['low']}"
    return low if limits["high"] == math.inf else f"{low} to {limits['high']}".lstrip()
