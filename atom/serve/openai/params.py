"""Sampling params of a request body, with the server's defaults and limits.

params = sampling_params(body, config)        # FieldError names the field that cannot be served
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any, NamedTuple

from atom.config import Config
from atom.errors import RequestError
from atom.runtime.requests.taps import read_steer, read_taps
from atom.runtime.types import RequestOptions
from atom.sampling_params import SamplingParams, repetition_detection
from atom.serve.http.errors import FieldError, constraint_error, shown
from atom.serve.openai.schema import ChatRequest, CompletionRequest, Generation, PooledRequest, RepetitionDetection

COMPLETION_TOKENS = 16  # default of max_tokens, as OpenAI's
# fields of a body that take another form here, or have several names
READ_APART = {"n", "stop", "logit_bias", "structured_outputs", "thinking_token_budget"} | {
    "repetition_detection",
    "cache_retention",
}
SAME_NAMES = [each.name for each in fields(SamplingParams) if each.name in Generation.model_fields.keys() - READ_APART]


def request_options(
    body: Generation | PooledRequest, pooling: str | None = None, *, classify: bool = False
) -> RequestOptions:
    """What a body says of its request; pooling: LAST or MEAN, for an embedding."""
    asked: dict[str, Any] = {}
    if isinstance(body, Generation):
        asked = {"taps": read_taps(body.taps), "steer": read_steer(body.steer)}
    salt, priority = (body.cache_salt or "").encode(), body.priority or 0
    return RequestOptions(salt=salt, priority=priority, pooling=pooling, classify=classify, **asked)


def sampling_params(body: Generation, config: Config, **more: Any) -> SamplingParams:
    """Make the sampling params of a body. Defaults come from the configuration's `sampling`; `more` overrides both.

    `Context.fit` cuts max_tokens to the rest of the context, which is the default of a chat.
    """
    longest = COMPLETION_TOKENS if isinstance(body, CompletionRequest) else config.serve.max_model_len
    values = {"max_tokens": longest} | config.sampling.values()
    values |= {name: value for name in SAME_NAMES if (value := getattr(body, name)) is not None}
    values["max_tokens"] = requested_tokens(body) or values["max_tokens"]
    values |= more
    if body.min_tokens is None:
        values["min_tokens"] = min(values["min_tokens"], values["max_tokens"])  # it was a default
    if body.stop is not None:
        values["stop_strings"] = [body.stop] if isinstance(body.stop, str) else body.stop
    if body.logit_bias is not None:
        values["logit_bias"] = read_bias(body.logit_bias)
    if (constraint := find_constraint(body)) is not None:
        values["structured_outputs"] = constraint.value
    if (budget := find_budget(body)) is not None:
        values["thinking_token_budget"] = budget.num_tokens
    if body.repetition_detection is not None:
        values["repetition_detection"] = read_repetition(body.repetition_detection)
    if body.cache_retention is not None:
        values["cache_retention"] = body.cache_retention.model_dump(exclude_none=True)
    num_logprobs = requested_logprobs(body)
    values["n"] = num_answers(body, config)
    if num_logprobs is None and values["n"] > (body.n or 1):
        num_logprobs = 0  # to choose the best by
    values["logprobs"] = num_logprobs
    check_limits(values, body, config)
    try:
        return SamplingParams(**values)
    except RequestError as error:
        if constraint is None:
            raise
        raise constraint_error(constraint.field, str(error)) from None


def requested_tokens(body: Generation) -> int | None:
    if isinstance(body, ChatRequest):
        return body.max_completion_tokens or body.max_tokens
    if isinstance(body, CompletionRequest) and body.max_tokens == 0:
        if not body.echo:
            raise FieldError("max_tokens", "max_tokens=0 is for echo: only the prompt comes back")
        return 1  # a token that is not shown
    return body.max_tokens if isinstance(body, CompletionRequest) else None


def requested_logprobs(body: Generation) -> int | None:
    """The number of most likely tokens to report at each position; None: no log probabilities."""
    if isinstance(body, CompletionRequest):
        return body.logprobs
    if isinstance(body, ChatRequest):
        if body.top_logprobs and not body.logprobs:
            raise FieldError("top_logprobs", "top_logprobs needs logprobs=true")
        return (body.top_logprobs or 0) if body.logprobs else None
    return None


def num_answers(body: Generation, config: Config) -> int:
    """The number of answers to generate for each prompt."""
    num, best_of, limit = body.n or 1, body.best_of or body.n or 1, config.serve.http.best_of
    if best_of < num:
        raise FieldError("best_of", f"best_of={best_of} is less than n={num}")
    if best_of > num and body.stream:
        raise FieldError("best_of", "best_of cannot be streamed: the best are known at the end")
    if best_of > limit:
        name = "n" if num > limit else "best_of"
        raise FieldError(name, f"{name}={max(num, best_of)} is more than the {limit} answers that this server makes")
    return best_of


class Constraint(NamedTuple):
    field: str  # of the body, dotted
    value: dict[str, Any]  # in the engine's form


def find_constraint(body: Generation) -> Constraint | None:
    """The constraint of the answer, None without one."""
    found: dict[str, dict[str, Any]] = {}
    response_format = body.response_format
    if response_format is not None and response_format.type == "json_object":
        found["response_format"] = {"json_object": True}
    elif response_format is not None and response_format.type == "json_schema":
        if response_format.json_schema is None:
            raise FieldError("response_format", "response_format.json_schema is missing")
        found["response_format.json_schema"] = {"json": response_format.json_schema.schema_}
    if body.structured_outputs is not None:
        found["structured_outputs"] = body.structured_outputs.model_dump(by_alias=True, exclude_none=True)
    for name in ("regex", "grammar"):
        if (value := getattr(body, name)) is not None:
            found[name] = {name: value}
    if len(found) > 1:
        names = [name.partition(".")[0] for name in found]
        raise FieldError(names[0], f"{' and '.join(names)} say twice what the answer must match; give one")
    return next((Constraint(*item) for item in found.items()), None)


class Budget(NamedTuple):
    field: str  # of the body, dotted
    num_tokens: int  # -1: any number


def find_budget(body: Generation) -> Budget | None:
    """The budget of an answer's reasoning, None without one."""
    found: dict[str, int | None] = {
        "thinking_token_budget": body.thinking_token_budget,
        "thinking_budget": body.thinking_budget,
    }
    if isinstance(body, ChatRequest) and body.reasoning is not None:
        found["reasoning.max_tokens"] = body.reasoning.max_tokens
    given = [Budget(name, value) for name, value in found.items() if value is not None]
    if len({each.num_tokens for each in given}) > 1:
        names = [each.field for each in given]
        raise FieldError(names[0], f"{' and '.join(names)} are the same; give one")
    return given[0] if given else None


def budget_field(body: Generation) -> str | None:
    """The field of a body that has the budget."""
    found = find_budget(body)
    return None if found is None else found.field


def effort_of(body: ChatRequest) -> str | None:
    """The effort that a chat asks for, under either of its names."""
    other = body.reasoning.effort if body.reasoning else None
    if body.reasoning_effort and other and body.reasoning_effort != other:
        raise FieldError("reasoning_effort", "reasoning_effort and reasoning.effort are the same; give one")
    return body.reasoning_effort or other


def read_repetition(body: RepetitionDetection) -> dict[str, int] | None:
    try:
        return repetition_detection(body.model_dump(exclude_none=True))
    except RequestError as error:
        raise FieldError("repetition_detection", str(error)) from None


def read_bias(bias: dict[str, float]) -> dict[int, float]:
    for token in bias:
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise FieldError("logit_bias", f"logit_bias: {shown(token)!r} is not a token id")
    return {int(token): value for token, value in bias.items()}


def check_limits(values: dict[str, Any], body: Generation, config: Config) -> None:
    http = config.serve.http
    check_tokens("stop_token_ids", values["stop_token_ids"] or (), config)
    check_tokens("logit_bias", values["logit_bias"] or (), config)
    check_tokens("allowed_token_ids", values["allowed_token_ids"] or (), config)
    if values["allowed_token_ids"] is not None and values["structured_outputs"] is not None:
        raise FieldError("allowed_token_ids", "allowed_token_ids and a constraint both say what the answer may be")
    if values["min_tokens"] > values["max_tokens"]:
        fault = f"min_tokens={values['min_tokens']} is more than max_tokens={values['max_tokens']}"
        raise FieldError("min_tokens", fault)
    if len(values["stop_strings"] or ()) > http.max_stop_sequences:
        raise FieldError("stop", f"stop has more than {http.max_stop_sequences} strings")
    for name in ("logprobs", "prompt_logprobs"):
        if (values[name] or 0) > http.max_top_n_tokens:
            field = "top_logprobs" if name == "logprobs" and isinstance(body, ChatRequest) else name
            raise FieldError(field, f"{field}={values[name]} is more than {http.max_top_n_tokens}")
    if body.stream and body.prompt_logprobs is not None:
        raise FieldError("prompt_logprobs", "prompt_logprobs cannot be streamed")
    if body.stream_options is not None and not body.stream:
        raise FieldError("stream_options", "stream_options is for stream=true")


def split_inputs(field: str, given: Any, config: Config) -> list[str | list[int]]:
    """The texts or lists of token ids of a field that takes one or several. FieldError for none or too many."""
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        return [given]
    limit = config.serve.http.max_queue
    if not given or len(given) > limit:
        raise FieldError(field, f"{len(given)} {field}s in one request; it takes 1 to {limit}")
    return list(given)


def check_tokens(field: str, tokens: Iterable[int], config: Config) -> None:
    vocab = config.model.vocab
    if wrong := next((token for token in tokens if not 0 <= token < vocab), None):
        raise FieldError(field, f"{field}: {wrong} is not a token id; they are numbers from 0 to {vocab - 1}")
