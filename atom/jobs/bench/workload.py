"""Draw the requests of `job=bench` and `job=profile`, and record their steps.

All requests come at once.

    draw = open_workload(config)
    with recording(engine) as record:
        submit(engine, draw(engine), config)
        while engine.has_work:
            engine.step()
    record.steps, record.times()        # what each step computed and when it was committed; the times of tokens

Prompts are random tokens of the model's vocabulary, which need no tokenizer, or those of a file of conversations.
"""

from __future__ import annotations

import itertools
import random
import time
from array import array
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from atom.config import Config
from atom.errors import ConfigError
from atom.graph import BODY, DRAFT, DRAFT_HEAD, DRAFT_IN, HEAD
from atom.measurement.conversations import NO_ANSWER_LEN, Conversation, is_usable, read_sharegpt
from atom.runtime.engine import Engine
from atom.runtime.schedule.data_parallel import split
from atom.runtime.types import Plan, Sampled, Sequence
from atom.sampling_params import SamplingParams


class WorkloadRequest(NamedTuple):
    prompt: list[int]  # token ids
    output_len: int  # tokens


Draw = Callable[[Engine], list[WorkloadRequest]]


class Step(NamedTuple):
    """A committed step: what it computed."""

    at: float  # seconds, when it was committed
    decodes: array[int]  # rows that compute the newest token, and drafts: positions that the last sees, itself included
    chunks: list[tuple[int, int]]  # the other rows, of prompts: first position and number of tokens
    num_sampled: int
    drafted: tuple[int, ...] = ()  # the decodes with a first draft that was verified, those with a second one, …
    groups: tuple[Step, ...] = ()  # what each of several data groups computed

    @property
    def num_drafts(self) -> int:
        return sum(self.drafted)

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + self.num_drafts + sum(num_tokens for _, num_tokens in self.chunks)

    def runs(self, programs: Container[str]) -> list[Run]:
        """The runs of a text's programs, in their order.

        Drafts are computed one after the other. The first needs no run of DRAFT if that takes the body's hidden states,
        since it ran over the newest token with the step before.
        """
        runs = list[Run]()
        for at, num_rows in enumerate(self.drafted):
            if at or DRAFT_IN not in programs:
                contexts = array("q", sorted(self.decodes)[:num_rows])
                runs.append(Run(DRAFT, num_rows, Step(self.at, contexts, [], 0)))
            runs.append(Run(DRAFT_HEAD, num_rows, self))
        runs += [Run(BODY, self.num_tokens, self), Run(HEAD, self.num_sampled, self)]
        runs += [Run(name, self.num_tokens, self) for name in (DRAFT_IN, DRAFT)]
        return [run for run in runs if run.program in programs]


class Run(NamedTuple):
    """A run of a program within a step."""

    program: str
    num_rows: int
    step: Step  # what its layers with states see


@dataclass
class Record:
    steps: list[Step] = field(default_factory=list)
    sampled: list[list[Sequence]] = field(default_factory=list)  # by step, the sequences that got a token

    def times(self) -> dict[Sequence, list[float]]:
        """The seconds of each token."""
        times: dict[Sequence, list[float]] = {}
        for step, sequences in zip(self.steps, self.sampled, strict=True):
            for sequence in sequences:
                times.setdefault(sequence, []).append(step.at)
        return times


@contextmanager
def recording(engine: Engine) -> Iterator[Record]:
    """Record every commit, in a fraction of a µs a row, while a stream callback would take some µs a token."""
    record, scheduler = Record(), engine.scheduler
    commit_plan = scheduler.commit

    def commit(plan: Plan, sampled: Sampled, finish: Callable[[Sequence], str | None]) -> list[Sequence]:
        every: tuple[Sampled, ...] = (sampled, *sampled.others)
        sampling: list[Sequence] = []
        groups = [read_step(part, own, sampling) for part, own in zip(split(plan, len(every)), every, strict=True)]
        before = [len(sequence.output) for sequence in sampling]
        ended = commit_plan(plan, sampled, finish)
        record.steps.append(together(groups, at=time.perf_counter()))
        gained = zip(sampling, before, strict=True)
        record.sampled.append([sequence for sequence, had in gained for _ in range(len(sequence.output) - had)])
        return ended

    scheduler.commit = commit  # type: ignore[method-assign]
    try:
        yield record
    finally:
        del scheduler.commit  # restores the class's method


def read_step(plan: Plan, sampled: Sampled, sampling: list[Sequence]) -> Step:
    """What a group computed, before its plan is committed. sampling: gets the sequences that may get a token"""
    decodes, others = (
        [row for row in rows if row.sequence.finish_reason is None]  # tokens past the end are not counted
        for rows in (plan.rows[: plan.num_decodes], plan.rows[plan.num_decodes :])
    )
    rows = [*decodes, *(row for row in others if row.samples)]
    sampling += [row.sequence for row in rows]
    contexts = array("q", [row.sequence.num_tokens + len(row.drafts) for row in decodes])
    chunks = [(row.start, row.num_tokens) for row in others]
    counts = sampled.num_drafted.values()
    drafted = tuple(sum(count > at for count in counts) for at in range(max(counts, default=0)))
    return Step(0.0, contexts, chunks, len(rows) + sum(drafted), drafted)


def together(groups: list[Step], at: float) -> Step:
    """The step that data groups took at a time; that of one group is its own."""
    if len(groups) == 1:
        return groups[0]._replace(at=at)
    contexts = array("q", itertools.chain(*(group.decodes for group in groups)))
    chunks = [chunk for group in groups for chunk in group.chunks]
    drafted = map(sum, itertools.zip_longest(*(group.drafted for group in groups), fillvalue=0))
    return Step(at, contexts, chunks, sum(group.num_sampled for group in groups), tuple(drafted), tuple(groups))


def submit(engine: Engine, requests: list[WorkloadRequest], config: Config) -> list[str]:
    """Submit the requests; their ids. RequestError if one cannot be served."""
    values = config.sampling.values()
    every = [SamplingParams(**{**values, "max_tokens": request.output_len}) for request in requests]
    prepared = [engine.prepare(request.prompt, params) for request, params in zip(requests, every, strict=True)]
    return [engine.submit(sequences) for sequences in prepared]


def open_workload(config: Config) -> Draw:
    """A function that draws the requests of a run: equal lengths in every run, but new random prompts."""
    if config.job.dataset_path is not None:
        conversations = read_conversations(config.job.dataset_path)
        return lambda engine: choose_conversations(conversations, config, engine)
    rng = random.Random(config.seed)
    lengths, vocab = draw_lengths(config, rng), range(config.model.vocab)
    return lambda engine: [WorkloadRequest(rng.choices(vocab, k=num_in), num_out) for num_in, num_out in lengths]


def draw_lengths(config: Config, rng: random.Random) -> list[tuple[int, int]]:
    """Draw the tokens of each prompt and answer, uniform over the ranges. ConfigError if the model takes fewer."""
    job, limit = config.job, config.serve.max_model_len
    assert limit is not None, "config.load resolves it"
    inputs = parse_range("job.input_len", job.input_len)
    default = SamplingParams(**config.sampling.values()).max_tokens
    outputs = parse_range("job.output_len", job.output_len or str(default))
    if (total := inputs[1] + outputs[1]) > limit:
        raise ConfigError(
            f"job.input_len and job.output_len are {total} tokens, more than serve.max_model_len={limit}; lower one"
        )
    return [(rng.randint(*inputs), rng.randint(*outputs)) for _ in range(job.num_prompts)]


def parse_range(key: str, text: str) -> tuple[int, int]:
    """Parse `128` or `100-1024` to its bounds."""
    low, dash, high = text.partition("-")
    if not (low.isdecimal() and (high if dash else low).isdecimal()):
        raise ConfigError(f"{key}={text}: write a number of tokens, as in 128, or a range, as in 100-1024")
    first, last = int(low), int(high if dash else low)
    if not 0 < first <= last:
        raise ConfigError(f"{key}={text}: it goes from 1 upwards")
    return first, last


def read_conversations(path: str) -> list[Conversation]:
    try:
        return read_sharegpt(Path(path).expanduser())
    except OSError as error:
        raise ConfigError(f"job.dataset_path={path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"job.dataset_path: {error}") from None


def choose_conversations(conversations: list[Conversation], config: Config, engine: Engine) -> list[WorkloadRequest]:
    """Choose prompts and answer lengths at random, without very short and very long ones; the same each time."""
    job, tokenizer, limit = config.job, engine.vocabulary.tokenizer, config.serve.max_model_len
    assert limit is not None, "config.load resolves it"
    if tokenizer is None:
        raise ConfigError("job.dataset_path needs a tokenizer, which the checkpoint has not; leave it out")
    rng = random.Random(config.seed)
    lengths = None if job.output_len is None else parse_range("job.output_len", job.output_len)
    requests: list[WorkloadRequest] = []
    for prompt, answer in rng.sample(conversations, len(conversations)):
        messages = [{"role": "user", "content": prompt}]
        tokens = engine.vocabulary.encode_chat(messages) if job.chat else tokenizer.encode(prompt)
        own = len(tokenizer.encode(answer, add_special_tokens=False)) if answer else NO_ANSWER_LEN
        output_len = own if lengths is None else rng.randint(*lengths)
        if len(tokens) + output_len <= limit and is_usable(len(tokens), output_len, is_own=lengths is None):
            requests.append(WorkloadRequest(tokens, output_len))
        if len(requests) == job.num_prompts:
            return requests
    raise ConfigError(
        f"job.dataset_path: {job.dataset_path} has only {len(requests)} conversations of a usable length; "
        f"lower job.num_prompts={job.num_prompts}"
    )
