"""`job=generate`: answers to prompts, shown as they are generated.

atom-run prompts='["What is the capital of France?"]' job.chat=true
atom-run prompts='["What is it?"]' images=[photo.jpg]
atom-run prompts=@questions.txt sampling.temperature=0 job.output=json
atom-run prompts=@questions.jsonl job.output_file=answers.jsonl job.resume=true      # goes on where it was interrupted
atom-run prompts=@questions.txt passes.taps=[model.layers.12] job.taps=[model.layers.12]  # writes hidden states
echo "Why is the sky blue?" | atom-run job.chat=true
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TextIO

from atom.checkpoint.steering import write_states
from atom.config import Config
from atom.errors import ConfigError, RequestError
from atom.jobs.prompt_file import Entry, read_prompts, without_answered
from atom.llm import LLMEngine, answer
from atom.measurement.phases import PhaseClock, seconds_since_exec
from atom.process.messages import say
from atom.prompts import IMAGES_KEY, Prompt, encode_conversation
from atom.runtime.requests.taps import read_steer, read_taps
from atom.runtime.types import RequestOutput, Sequence
from atom.sampling_params import SamplingParams

OBJECTIVES = ("load_seconds", "first_token_seconds", "tokens", "tokens_per_second")  # choices of job.objective


def run(config: Config, report: Callable[[Mapping[str, Any]], None] = lambda numbers: None) -> int:
    """Answer the prompts: text as it comes, and a table of times; with job.output=json one object a prompt, in order.

    With job.output_file the objects are appended to a file instead, each as soon as it is complete. A prompt that
    cannot be served is one line on stderr and does not stop the others; the exit code then is 2.
    report: is called with the numbers of OBJECTIVES.
    """
    is_terminal = sys.stdin is not None and sys.stdin.isatty()
    if (
        config.job.chat
        and config.prompts is None
        and config.job.output_file is None
        and is_terminal
        and not config.images
    ):
        from atom.jobs import chat

        return chat.run(config)
    if config.job.system_prompt is not None and not config.job.chat:
        raise ConfigError("job.system_prompt begins a chat, and prompts are sent as they are; set job.chat=true")
    if config.job.taps and config.job.resume:
        raise ConfigError("job.taps numbers its files by the prompts of a run; leave out job.resume")
    read_taps(config.job.taps), read_steer(config.job.steer)  # what is wrong is said once
    params = SamplingParams(**config.sampling.values())
    entries = read_prompts(config.prompts, is_chat=config.job.chat)
    if config.job.system_prompt is not None and (own := next(filter(_has_instructions, entries), None)):
        raise ConfigError(f"{own.where} begins with a {own.content[0]['role']} message: leave out job.system_prompt")
    file = None if config.job.output_file is None else Path(config.job.output_file)
    if file is not None and config.job.resume:
        num_prompts, entries = len(entries), without_answered(entries, file, params.n)
        say(f"{file} has the answers to {num_prompts - len(entries)} of {num_prompts} prompts")
        if not entries:
            return 0
    with open_output(file) if file else nullcontext(sys.stdout if config.job.output == "json" else None) as output:
        return _answer(entries, params, output, config, report)


def _answer(
    entries: list[Entry],
    params: SamplingParams,
    output: TextIO | None,
    config: Config,
    report: Callable[[Mapping[str, Any]], None],
) -> int:
    """Answer the prompts; the exit code. output: of an object a line; None: text is shown."""
    started = time.perf_counter()
    engine = LLMEngine.from_config(config, PhaseClock({"imports": seconds_since_exec()}))
    loaded = time.perf_counter()
    requests: dict[str, Entry] = {}
    numbers: dict[str, int] = {}  # request id -> number of the prompt
    show = None if output is not None else _Screen(numbers, is_single=len(entries) * params.n == 1)
    for number, entry in enumerate(entries):
        try:
            asked: dict[str, Any] = {"taps": config.job.taps, "steer": config.job.steer}
            (request_id,) = engine.add_request([prompt_of(entry, config, engine)], params, show, **asked)
            requests[request_id], numbers[request_id] = entry, number
        except RequestError as error:
            say(f"RequestError: {entry.where}: {error}")
    ended: list[Sequence] = []
    completed = _completed(engine, params.n)
    for sequences in completed if config.job.output_file else _in_order(list(requests), completed):
        ended += sequences
        files = [_write_taps(each, numbers[each.request_id], config) for each in sequences]
        if output is not None:
            fields = requests[sequences[0].request_id].fields
            answers = [answer(each) | file for each, file in zip(sequences, files, strict=True)]
            lines = [json.dumps({**fields, **_plain(each)}) for each in answers]
            output.write("".join(f"{line}\n" for line in lines))
            output.flush()
    if ended:
        times = _measure(ended, loaded - started)
        report(times)
        if config.job.output != "json":
            _show_times(times)
    is_whole = len(requests) == len(entries) and not any(sequence.error for sequence in ended)
    return 0 if is_whole else RequestError.exit_code


def _write_taps(sequence: Sequence, number: int, config: Config) -> dict[str, str]:
    """Write what an answer taps to a file; the field with its path, in place of the states. number: of the prompt"""
    if not sequence.tapped:
        return {}
    name = f"{number}-{sequence.index}" if sequence.params.n > 1 else str(number)
    path = Path(config.job.taps_folder) / f"{name}.safetensors"
    try:
        write_states(path, sequence.taps)
    except OSError as error:
        raise ConfigError(f"job.taps_folder={config.job.taps_folder}: {error.strerror}") from None
    return {"taps": str(path)}


def open_output(file: Path) -> TextIO:
    """Open a file to append lines to."""
    try:
        output = file.open("a+b")
        if output.tell() and os.pread(output.fileno(), 1, output.tell() - 1) != b"\n":
            output.write(b"\n")
    except OSError as error:
        raise ConfigError(f"job.output_file={file}: {error.strerror}") from None
    return io.TextIOWrapper(output, encoding="utf-8")


def _completed(engine: LLMEngine, num_answers: int) -> Iterator[list[Sequence]]:
    """The answers of each request, as soon as it has all of them."""
    done: dict[str, list[Sequence]] = {}
    while not engine.is_finished():
        for sequence in engine.step():
            answers = done.setdefault(sequence.request_id, [])
            answers.append(sequence)
            if len(answers) == num_answers:
                yield sorted(done.pop(sequence.request_id), key=lambda sequence: sequence.index)


def _in_order(ids: list[str], completed: Iterable[list[Sequence]]) -> Iterator[list[Sequence]]:
    """The same, each request after all that were added before it."""
    done: dict[str, list[Sequence]] = {}
    waiting = deque(ids)
    for answers in completed:
        done[answers[0].request_id] = answers
        while waiting and waiting[0] in done:
            yield done.pop(waiting.popleft())


def prompt_of(entry: Entry, config: Config, engine: LLMEngine) -> Prompt:
    """A prompt as the engine takes it, with its images."""
    if is_message(entry, config, engine):
        messages = conversation(entry, config)
        if engine.tokenizer is None:
            return engine.encode_chat(messages)  # which says what is missing
        return encode_conversation(engine.tokenizer, messages)
    content: Prompt = entry.content
    if not config.images:
        return content
    kind = "prompt" if isinstance(content, str) else "prompt_token_ids"
    return {kind: content, IMAGES_KEY: {"image": config.images}}


def is_message(entry: Entry, config: Config, engine: LLMEngine) -> bool:
    """Whether a prompt is a user's message: as asked, or since no token of it stands for its images."""
    if config.job.chat or not config.images or not isinstance(entry.content, str) or engine.tokenizer is None:
        return config.job.chat
    vision = engine.config.model.vision
    return vision is not None and vision.token not in engine.tokenizer.encode(entry.content)


def conversation(entry: Entry, config: Config) -> list[dict[str, Any]]:
    """The messages of a prompt, which is a user's, with the images, unless it has messages of its own."""
    if entry.is_conversation:
        return [*first_messages(config), *entry.content]
    content = entry.content
    if config.images:
        content = [*({"type": "image", "image": each} for each in config.images), {"type": "text", "text": content}]
    return [*first_messages(config), {"role": "user", "content": content}]


def _has_instructions(entry: Entry) -> bool:
    return entry.is_conversation and entry.content[0]["role"] in ("system", "developer")


def first_messages(config: Config) -> list[dict[str, Any]]:
    """The messages that each chat begins with."""
    text = config.job.system_prompt
    return [] if text is None else [{"role": "system", "content": text}]


class _Screen:
    """Streams a single answer; shows each of several when it is done."""

    def __init__(self, numbers: Mapping[str, int], is_single: bool) -> None:
        self.numbers = numbers
        self.is_single = is_single
        self.texts: dict[tuple[str, int], str] = {}

    def __call__(self, output: RequestOutput) -> None:
        new = " ".join(map(str, output.token_ids)) + " " if output.text is None else output.text
        if self.is_single:
            print(new, end="\n" if output.finished else "", flush=True)
            return
        key = output.request_id, output.index
        self.texts[key] = self.texts.get(key, "") + new
        if output.finished:
            answer = f", answer {output.index}" if output.index else ""
            print(f"── prompt {self.numbers[output.request_id]}{answer}\n{self.texts.pop(key).strip()}\n", flush=True)


def _plain(value: Any) -> Any:
    """Convert dataclasses in a value to dicts."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _measure(ended: list[Sequence], load_seconds: float) -> dict[str, float]:
    """The numbers of OBJECTIVES."""
    first = min(sequence.first_token_at or sequence.arrival for sequence in ended)
    last = max(sequence.finished_at or first for sequence in ended)
    start = min(sequence.arrival for sequence in ended)
    num_tokens = sum(len(sequence.output) for sequence in ended)
    rate = num_tokens / (last - start) if last > start else 0.0
    return dict(zip(OBJECTIVES, (load_seconds, first - start, num_tokens, rate), strict=True))


def _show_times(times: Mapping[str, float]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("load s", "first token s", "tokens", "tokens/s"):
        table.add_column(heading, justify="right")
    load, first, num_tokens, rate = times.values()
    table.add_row(f"{load:.2f}", f"{first:.2f}", str(num_tokens), f"{rate:.1f}")
    Console(stderr=True).print(table)
