"""Sampling parameters of a request: how its answer is sampled, and when it ends.

    SamplingParams(temperature=0, max_tokens=8)

The fields of `SamplingParams` are the one table of sampling parameters. What follows from a line of it: its check, the
key `sampling.NAME` of the configuration, its page in the docs, the values that a checkpoint may set, how a request body
sets it (once `serve.openai.schema` has the field), and its column in the request state on the device.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

from atom.errors import RequestError

SAMPLING_KINDS = ("greedy", "random", "filtered")  # a batch of a later kind may have rows of those before it
MIN_TEMPERATURE = 1e-5  # of a request that is sampled: anything lower is greedy, as in vLLM
FILTER, PENALTY = "filter", "penalty"  # uses of a parameter: to choose the tokens that are kept, to change logits


def number(default: Any, low: float, high: float = math.inf, *, above: bool = False) -> Any:
    """A field from low to high, both included, or above low."""
    return field(default=default, metadata={"low": low, "high": high, "above": above})


def parameter(
    default: Any,
    low: float,
    high: float = math.inf,
    *,
    above: bool = False,
    column: str = "",
    use: str = "",
    checkpoint: str = "",
    gguf: str = "",
) -> Any:
    """A field of `number` that kernels read, or that a checkpoint sets.

    default: for FILTER and PENALTY the neutral value, with which kernels skip it
    low, high, above: as in `number`
    column: dtype, i64 or f64, of its column in the request state, which has its value by slot; "": none
    use: FILTER, PENALTY, or "" for neither
    checkpoint: its key in generation_config.json; "": none
    gguf: its key below `general.sampling.` in a GGUF file, besides `checkpoint`; "": none
    """
    limits = number(default, low, high, above=above).metadata
    return field(
        default=default, metadata={**limits, "column": column, "use": use, "checkpoint": checkpoint, "gguf": gguf}
    )


# fields of generation_config.json that have no counterpart here -> the value, besides null, with which transformers
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
UNUSED_OF_BEAMS: dict[str, Any] = {  # the same, read only with num_beams
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
COUNT = number(0, 0, INT32).metadata
PATTERNS = ("max_pattern_size", "min_pattern_size", "min_count")  # of repetition_detection, by vLLM's names
BIAS = number(0, -100, 100).metadata
RETENTION = {  # the fields of cache_retention
    "seconds": number(300.0, 0, 86400, above=True),  # as Anthropic's shortest ttl
    "priority": number(50, 0, 100),  # those of a lower one are given up first
}
# the kinds of SamplingParams.structured_outputs, by the names of vLLM's StructuredOutputsParams: types and meaning
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

    temperature: float = parameter(1.0, 0, column="f64", checkpoint="temperature", gguf="temp")  # 0: greedy
    max_tokens: int = parameter(64, 1, INT32, checkpoint="max_new_tokens")
    ignore_eos: bool = False  # an answer goes on after the end token
    stop_strings: list[str] | None = None  # texts that end an answer
    top_k: int = parameter(
        0, -1, INT32, column="i64", use=FILTER, checkpoint="top_k", gguf="top_k"
    )  # as many of the likeliest tokens; 0 or -1: all
    top_p: float = parameter(
        1.0, 0, 1, above=True, column="f64", use=FILTER, checkpoint="top_p", gguf="top_p"
    )  # of the likeliest tokens, those that add up to this probability
    min_p: float = parameter(
        0.0, 0, 1, column="f64", use=FILTER, checkpoint="min_p", gguf="min_p"
    )  # min probability of a token, as a share of the likeliest one's
    seed: int | None = number(None, -math.inf)  # null: drawn from the engine's seed
    n: int = number(1, 1, 128)  # answers to one prompt
    stop_token_ids: list[int] | None = None  # tokens that end an answer
    min_tokens: int = number(0, 0, INT32)  # no eos and no stop before as many
    logprobs: int | None = number(None, 0, 20)  # how many most likely tokens to report with each chosen one
    prompt_logprobs: int | None = number(None, 0, 20)  # the same for the prompt's tokens
    presence_penalty: float = parameter(
        0.0, -2, 2, column="f64", use=PENALTY
    )  # subtracted from the logits of tokens that the answer has
    frequency_penalty: float = parameter(0.0, -2, 2, column="f64", use=PENALTY)  # the same, times how often it has them
    repetition_penalty: float = parameter(
        1.0, 0, above=True, column="f64", use=PENALTY, checkpoint="repetition_penalty", gguf="penalty_repeat"
    )  # divides positive logits of prompt's and answer's tokens
    logit_bias: dict[int, float] | None = None  # token id -> added to its logit, -100 to 100
    allowed_token_ids: list[int] | None = None  # the only tokens that an answer may have, its end among them
    bad_words: list[str] | None = None  # texts that an answer may not have, as tokenized at its start and within it
    include_stop_str_in_output: bool = False  # the text ends after the stop string or stop token, not before it
    skip_special_tokens: bool = True  # special tokens have no text
    visible_tokens: list[str] | None = None  # special tokens that have text nevertheless, such as <|python_tag|>
    mark_visible_tokens: bool = False  # with U+FDD1 before each, to distinguish them from the same text spelled out
    structured_outputs: dict[str, Any] | None = None  # {kind: value} of json, json_object, regex, grammar or choice
    thinking_token_budget: int | None = number(
        None, -1, INT32
    )  # tokens of reasoning, after which its end marker is forced; null or -1: any number
    repetition_detection: dict[str, int] | None = None  # {max_pattern_size, min_pattern_size, min_count}: tokens, times
    cache_retention: dict[str, int | float] | None = (
        None  # {seconds, priority}: keep the prompt's KV from eviction so long
    )
    explain: bool = False  # report where the prompt's hit in the prefix cache ended, and why
    stop: list[str] | None = None  # the same as stop_strings, by vLLM's name
    reasoning: dict[str, str] | None = None  # before what structured_outputs constrains: {begin, end, then}
    tool_calls: str | None = None  # a grammar in Lark's notation, in which @answer is what structured_outputs say

    def __post_init__(self) -> None:
        if self.stop is not None:
            if self.stop_strings is not None:
                raise RequestError("stop and stop_strings are the same; give one")
            self.stop_strings, self.stop = self.stop, None
        if isinstance(self.stop_strings, str):
            self.stop_strings = [self.stop_strings]
        for each in fields(self):
            setattr(self, each.name, checked(each, getattr(self, each.name)))
        self.top_k = max(self.top_k, 0)
        if self.thinking_token_budget == -1:
            self.thinking_token_budget = None
        self.repetition_detection = repetition_detection(self.repetition_detection)
        self.cache_retention = cache_retention(self.cache_retention)
        if self.min_tokens > (self.max_tokens or math.inf):  # a SamplingConfig's may be null
            raise RequestError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids is empty; give at least one token id")
        if self.allowed_token_ids is not None and self.structured_outputs is not None:
            raise RequestError("allowed_token_ids and structured_outputs both say what the answer may be; give one")
        check_bias(self.logit_bias)
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


def _named(key: str) -> dict[str, Any]:
    """What the table says under this key, by name of the parameters of which it says anything."""
    return {each.name: each.metadata[key] for each in fields(SamplingParams) if each.metadata.get(key)}


COLUMNS: dict[str, str] = _named("column")  # parameter -> dtype of its column in the request state, i64 or f64
USES: dict[str, str] = _named("use")  # parameter -> FILTER or PENALTY
GENERATION: dict[str, str] = {key: name for name, key in _named("checkpoint").items()}  # key of generation_config.json
GGUF: dict[str, str] = {
    key: _named("checkpoint")[name] for name, key in _named("gguf").items()
}  # key below `general.sampling.` of a GGUF file -> key of generation_config.json
DEFAULTS = {each.name: each.default for each in fields(SamplingParams)}


def has_use(params: SamplingParams, use: str) -> bool:
    """Whether a parameter of this use is set to anything but its default, so that kernels have to look at it."""
    return any(getattr(params, name) != DEFAULTS[name] for name, its in USES.items() if its == use)


def sampling_kind(params: SamplingParams) -> str:
    """One of SAMPLING_KINDS."""
    if params.temperature < MIN_TEMPERATURE:
        return "greedy"
    return "filtered" if has_use(params, FILTER) else "random"


def checked(parameter: Field[Any], value: Any) -> Any:
    """The value of a parameter, after the check that its limits or its type ask for."""
    name = parameter.name
    if "low" in parameter.metadata:
        return sampling_number(name, value, str(parameter.type), parameter.metadata)
    if parameter.type == "bool" and not isinstance(value, bool):
        raise RequestError(f"{name}={value!r} is not true or false")
    if check := LIST_CHECKS.get(str(parameter.type)):
        if not isinstance(value, list | tuple | None):
            raise RequestError(f"{name}={value!r} is not a list")
        for item in value or ():
            check(name, item)
    return value


def check_text(name: str, text: Any) -> None:
    if not isinstance(text, str) or not text:
        raise RequestError(f"{name}: {text!r} is not a string of at least one character")


def check_token_id(name: str, token: Any) -> None:
    sampling_number(name, token, "int", TOKEN_ID)


LIST_CHECKS = {"list[str] | None": check_text, "list[int] | None": check_token_id}  # type -> the check of an item


def check_bias(bias: Any) -> None:
    """Check a mapping from token ids to what is added to their logits."""
    if not isinstance(bias, Mapping | None):
        raise RequestError(f"logit_bias={bias!r} is not a mapping from token ids to numbers")
    for token, value in (bias or {}).items():
        sampling_number("logit_bias: token id", token, "int", TOKEN_ID)
        sampling_number(f"logit_bias[{token}]", value, "float", BIAS)


def repetition_detection(value: Any) -> dict[str, int] | None:
    """Which repetitions end an answer, with all its fields, as vLLM's RepetitionDetectionParams; None: none do.

    max_pattern_size, min_pattern_size: tokens of what is repeated; a maximum of 0 means none, a minimum of 0 means 1
    min_count: how often it has to be there
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise RequestError(f"repetition_detection={value!r} is not a mapping of {', '.join(PATTERNS)}")
    if unknown := [name for name in value if name not in PATTERNS]:
        raise RequestError(f"repetition_detection: there is no {unknown[0]!r}; it takes {', '.join(PATTERNS)}")
    found = {
        name: sampling_number(f"repetition_detection: {name}", value.get(name) or 0, "int", COUNT) for name in PATTERNS
    }
    if found["min_pattern_size"] > found["max_pattern_size"]:
        raise RequestError("repetition_detection: min_pattern_size is more than max_pattern_size")
    if found["max_pattern_size"] and found["min_count"] < 2:
        raise RequestError(f"repetition_detection: min_count={found['min_count']} must be 2 or more")
    return found | {"min_pattern_size": max(found["min_pattern_size"], 1)} if found["max_pattern_size"] else None


def cache_retention(value: Any) -> dict[str, int | float] | None:
    """How long a prompt's KV is kept from eviction, with all fields of RETENTION; None: as any other."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise RequestError(f"cache_retention={value!r} is not a mapping of {', '.join(RETENTION)}")
    if unknown := [name for name in value if name not in RETENTION]:
        raise RequestError(f"cache_retention: there is no {unknown[0]!r}; it takes {', '.join(RETENTION)}")
    found = {name: value[name] if value.get(name) is not None else each.default for name, each in RETENTION.items()}
    return {
        name: sampling_number(f"cache_retention: {name}", number, type(each.default).__name__, each.metadata)
        for (name, number), each in zip(found.items(), RETENTION.values(), strict=True)
    }


def check_reasoning(value: Any) -> None:
    """Check a mapping with an end, and maybe a beginning and what follows the end."""
    is_mapping = isinstance(value, Mapping) and all(isinstance(text, str) for text in value.values())
    if not is_mapping or not set(value) <= {"begin", "end", "then"} or not value.get("end"):
        raise RequestError(f'reasoning={value!r} is not {{"begin": …, "end": …, "then": …}}; end is needed')


def structured_outputs(value: Any) -> dict[str, Any]:
    """The constraint of an answer, {kind: value}, as in STRUCTURED_OUTPUTS."""
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
    """The range of a number that is not within it, in words; None if it is."""
    low, high, above = limits["low"], limits["high"], limits["above"]
    if (isinstance(value, int) or math.isfinite(value)) and low <= value <= high and not (above and value == low):
        return None
    return f"a {'whole' if isinstance(value, int) else 'finite'} number {describe_limits(limits)}".rstrip()


def describe_limits(limits: Mapping[str, Any]) -> str:
    """The limits of a field of `number` in words; empty if there are none."""
    low = "" if limits["low"] == -math.inf else f"{'above' if limits['above'] else 'from'} {limits['low']}"
    return low if limits["high"] == math.inf else f"{low} to {limits['high']}".lstrip()
