"""Random prompts of an exact length, as the server counts tokens.

    form = PromptForm(tokenizer)
    lengths = draw_lengths(rng, 1000, 1024, range_ratio=0.8)                # from 819 to 1024
    sample_random(rng, form, lengths, outputs, prefix_len=0)

Text of random tokens is seldom encoded to the same tokens: a prompt of 1024 may be counted as 1000 or 1100. So tokens
are added or removed until the count is right.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy
from numpy.typing import NDArray

from atom.benchmarks.benchmark_utils import UsageError, say
from atom.benchmarks.prompts import PromptForm, SampleRequest
from atom.benchmarks.tokenizer import Tokenizer

Ids = NDArray[numpy.int64]

NUM_TRIED = 4096  # tokens of the vocabulary that are tried
NUM_STEPS = 20  # corrections until another prompt is tried
NUM_PROMPTS = 5  # prompts tried until the nearest is taken
SMALL_VOCABULARY = 1000  # ids that any model has


def draw_lengths(rng: numpy.random.Generator, num: int, length: int, *, range_ratio: float) -> list[int]:
    """Draw lengths uniformly from length × range_ratio to length, both included: at a ratio of 1 all are equal."""
    lowest = max(1, int(length * range_ratio))
    return [int(each) for each in rng.integers(lowest, length + 1, size=num)]


def sample_random(
    rng: numpy.random.Generator,
    form: PromptForm,
    input_lens: Sequence[int],
    output_lens: Sequence[int],
    *,
    prefix_len: int = 0,
    num_prefixes: int = 1,
) -> list[SampleRequest]:
    """Make prompts of prefix_len + input_lens tokens. They take turns with the prefixes."""
    ids = find_stable_ids(rng, form.tokenizer)
    prefixes = [form.tokenizer.decode(rng.choice(ids, prefix_len).tolist()) for _ in range(num_prefixes)]
    requests = []
    for input_len, output_len, prefix in zip(input_lens, output_lens, itertools.cycle(prefixes), strict=False):
        text, num_tokens = make_prompt(rng, form, ids, prefix, prefix_len + input_len)
        requests.append(SampleRequest(form.word(text), num_tokens, output_len))
    off = [each.prompt_len - wanted - prefix_len for each, wanted in zip(requests, input_lens, strict=True)]
    if any(off):
        num_off, furthest = numpy.count_nonzero(off), max(map(abs, off))
        say(f"{num_off} of {len(off)} prompts are not of the length asked for, by up to {furthest} tokens: this "
            "tokenizer cannot be made to count it")  # fmt: skip
    return requests


def make_prompt(rng: numpy.random.Generator, form: PromptForm, ids: Ids, prefix: str, wanted: int) -> tuple[str, int]:
    """Make a random text of `wanted` tokens, or nearly so, as the server counts; the text and its count."""
    own = form.count(prefix)  # the tokens of the template and the prefix
    if own >= wanted:
        raise UsageError(f"{wanted} tokens are too few for a prompt: the template and the prefix take {own}")
    nearest = ("", -wanted)
    for _ in range(NUM_PROMPTS):
        body = rng.choice(ids, wanted - own)
        for _ in range(NUM_STEPS):
            text = prefix + form.tokenizer.decode(body.tolist())
            surplus = form.count(text) - wanted
            if abs(surplus) < abs(nearest[1]):
                nearest = (text, surplus)
            if surplus == 0:
                return text, wanted
            num = max(1, round(abs(surplus) * len(body) / max(1, wanted + surplus - own)))
            body = body[:-num] if surplus > 0 else numpy.concatenate([body, rng.choice(ids, num)])
    return nearest[0], wanted + nearest[1]


def find_stable_ids(rng: numpy.random.Generator, tokenizer: Tokenizer) -> Ids:
    """Find tokens that, repeated, are encoded as themselves: text made of them mostly keeps its tokens."""
    plain = find_plain_ids(tokenizer)
    tried = rng.permutation(plain)[:NUM_TRIED].tolist()
    stable = [
        each
        for each in tried
        if tokenizer.encode(tokenizer.decode([each, each]), add_special_tokens=False) == [each, each]
    ]
    return numpy.asarray(stable) if len(stable) > 1 else plain


def find_plain_ids(tokenizer: Tokenizer) -> Ids:
    """The tokens of plain text."""
    return numpy.asarray([each for each in range(tokenizer.vocab_size) if each not in tokenizer.added_ids])


def sample_random_ids(
    rng: numpy.random.Generator,
    ids: Ids,
    input_lens: Sequence[int],
    output_lens: Sequence[int],
    *,
    prefix_len: int = 0,
    num_prefixes: int = 1,
) -> list[SampleRequest]:
    """The same as token ids, drawn from some of the vocabulary."""
    prefixes = ids[rng.integers(0, len(ids), (num_prefixes, prefix_len))].tolist()
    return [
        SampleRequest(prefix + ids[rng.integers(0, len(ids), input_len)].tolist(), prefix_len + input_len, output_len)
        for input_len, output_len, prefix in zip(input_lens, output_lens, itertools.cycle(prefixes), strict=False)
    ]


def find_vocab_size(model: str) -> int:
    """The vocabulary's size in the config.json of a folder, else a size that every model has."""
    path = Path(model) / "config.json"
    if not path.is_file():
        return SMALL_VOCABULARY
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise UsageError(f"{path} is no JSON file ({error})") from None
    return int(config.get("vocab_size") or config.get("text_config", {}).get("vocab_size") or SMALL_VOCABULARY)
