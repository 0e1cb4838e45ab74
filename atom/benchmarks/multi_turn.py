"""Sample conversations of several turns: random ones, or those of a trace.

    draw = RandomPrompts(rng, ids, form)
    sample_multi_turn(draw, 32, num_turns=6, shared_len=2000, new_len=1500, output_len=100, think_time=2.0)
    sample_trace(RandomPrompts(rng, ids, None, seeds=(7,)), 100, Path("toolagent_trace.jsonl"), keeps_times=True)

A trace has a request a line, in Mooncake's format (https://github.com/kvcache-ai/Mooncake): `timestamp` in ms,
`input_length`, `output_length`, and `hash_ids`, each of which stands for a block of 512 tokens. As in AIPerf's, lines
of one `session_id` are the turns of a conversation: `input_length` and `hash_ids` are of what a turn adds, and `delay`
is ms from the answer before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy

from atom.benchmarks.benchmark_utils import UsageError, say
from atom.benchmarks.prompts import Conversation, PromptForm, SampleRequest
from atom.benchmarks.random_dataset import Ids, draw_lengths, sample_random, sample_random_ids

BLOCK = 512  # tokens that a hash id stands for


@dataclass(frozen=True)
class RandomPrompts:
    """Draws prompts.

    ids: tokens of the vocabulary to draw from
    form: of texts; None: prompts are token ids
    seeds: of a trace's blocks, which are the same in all prompts
    """

    rng: numpy.random.Generator
    ids: Ids
    form: PromptForm | None
    seeds: Sequence[int] = ()

    def sample(
        self, input_lens: Sequence[int], output_lens: Sequence[int], *, prefix_len: int = 0, is_part: bool = False
    ) -> list[SampleRequest]:
        """Requests of prefix_len + input_lens tokens with one prefix. is_part: they continue a conversation."""
        if self.form is None:
            return sample_random_ids(self.rng, self.ids, input_lens, output_lens, prefix_len=prefix_len)
        form = replace(self.form, is_part=is_part)
        return sample_random(self.rng, form, input_lens, output_lens, prefix_len=prefix_len)

    def sample_blocks(self, hash_ids: Sequence[int], length: int, output_len: int, *, is_part: bool) -> SampleRequest:
        """A request whose prompt is made of named blocks, cut to a length; if they are too few, other tokens follow."""
        blocks = [self.draw_block(each) for each in hash_ids[: -(-length // BLOCK)]]
        rest = self.ids[self.rng.integers(0, len(self.ids), max(0, length - BLOCK * len(blocks)))]
        tokens = numpy.concatenate([*blocks, rest])[:length].tolist()
        if self.form is None:
            return SampleRequest(tokens, length, output_len)
        text = self.form.tokenizer.decode(tokens)
        return SampleRequest(text, replace(self.form, is_part=is_part).count(text), output_len)

    def draw_block(self, hash_id: int) -> Ids:
        seeds = [*self.seeds, BLOCK, hash_id + 1]  # which no other generator has: zeros at the end would not count
        return self.ids[numpy.random.default_rng(seeds).integers(0, len(self.ids), BLOCK)]


def sample_multi_turn(
    draw: RandomPrompts,
    num: int,
    *,
    num_turns: int,
    shared_len: int,
    new_len: int,
    output_len: int,
    range_ratio: float = 1.0,
    think_time: float = 0.0,
) -> list[Conversation]:
    """
    num: conversations
    shared_len: tokens that all of them begin with
    new_len: tokens that each turn adds; range_ratio: lengths are uniform from this share of them up to them
    think_time: mean seconds, exponentially distributed, from an answer to the next turn
    """
    rng, total = draw.rng, num * num_turns
    inputs = draw_lengths(rng, total, new_len, range_ratio=range_ratio)
    outputs = draw_lengths(rng, total, output_len, range_ratio=range_ratio)
    first = draw.sample(inputs[:num], outputs[:num], prefix_len=shared_len)
    later = draw.sample(inputs[num:], outputs[num:], is_part=True) if num_turns > 1 else []
    delays = rng.exponential(think_time, len(later)).tolist()
    later = [replace(turn, delay=delay) for turn, delay in zip(later, delays, strict=True)]
    return [[first[at], *later[at::num]] for at in range(num)]


class TraceLine(msgspec.Struct):
    """A request of a trace."""

    input_length: int  # tokens; of a conversation's later turn, those that it adds
    output_length: int
    timestamp: float = 0.0  # ms from the start
    hash_ids: list[int] = []
    session_id: str | int | None = None  # None: a conversation of its own
    delay: float = 0.0  # ms from the answer before it


def sample_trace(draw: RandomPrompts, num: int, path: Path, *, keeps_times: bool) -> list[Conversation]:
    """The first conversations of a trace, by their times. keeps_times: they arrive at these, not all at once."""
    conversations = read_trace(path)
    if len(conversations) < num:
        say(f"{path} has only {len(conversations)} conversations: so many are sent, not {num}")
    return [sample_lines(draw, lines, keeps_times=keeps_times) for lines in conversations[:num]]


def sample_lines(draw: RandomPrompts, lines: Sequence[TraceLine], *, keeps_times: bool) -> Conversation:
    delays = [lines[0].timestamp if keeps_times else 0.0, *(line.delay for line in lines[1:])]
    return [
        replace(
            draw.sample_blocks(line.hash_ids, line.input_length, line.output_length, is_part=number > 0),
            delay=delay / 1000,
        )
        for number, (line, delay) in enumerate(zip(lines, delays, strict=True))
    ]


def read_trace(path: Path) -> list[list[TraceLine]]:
    """The lines of each conversation; conversations in the order of their first timestamps."""
    conversations: dict[object, list[TraceLine]] = {}
    decode = msgspec.json.Decoder(TraceLine).decode
    for number, text in enumerate(path.read_bytes().splitlines(), 1):
        if not text.strip():
            continue
        try:
            line = decode(text)
        except msgspec.MsgspecError as error:
            raise UsageError(f"{path}, line {number} is no request of a trace in Mooncake's format: {error}") from None
        if min(line.input_length, line.output_length) < 1 or min(line.timestamp, line.delay, *line.hash_ids, 0) < 0:
            raise UsageError(f"{path}, line {number}: lengths are 1 at least; times and hash_ids are not negative")
        name = ("line", number) if line.session_id is None else ("session", line.session_id)
        conversations.setdefault(name, []).append(line)
    if not conversations:
        raise UsageError(f"{path} has no request")
    return sorted(conversations.values(), key=lambda lines: lines[0].timestamp)
