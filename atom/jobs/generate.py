"""`job=generate`: answers to prompts, shown as they are generated.

atom-run prompts='["What is the capital of France?"]' job.chat=true
atom-run prompts=@questions.txt sampling.temperature=0 job.output=json
echo "Why is the sky blue?" | atom-run job.chat=true
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from atom.config import Config
from atom.errors import ConfigError, RequestError
from atom.llm import LLMEngine, answer
from atom.measurement.phases import PhaseClock, seconds_since_exec
from atom.messages import say
from atom.runtime.types import RequestOutput, Sequence
from atom.sampling_params import SamplingParams

OBJECTIVES = ("load_seconds", "first_token_seconds", "tokens", "tokens_per_second")  # choices of job.objective


def run(config: Config, report: Callable[[Mapping[str, Any]], None] = lambda numbers: None) -> int:
    """Answer the prompts: text as it comes, and a table of times; with job.output=json one object a prompt, in order.

    A prompt that cannot be served is one line on stderr and does not stop the others; the exit code then is 2.
    report: is called with the numbers of OBJECTIVES.
    """
    if config.job.chat and config.prompts is None and sys.stdin is not None and sys.stdin.isatty():
        from atom.jobs import chat

        return chat.run(config)
    if config.job.system_prompt is not None and not config.job.chat:
        raise ConfigError("job.system_prompt begins a chat, and prompts are sent as they are; set job.chat=true")
    prompts = read_prompts(config.prompts)
    params = SamplingParams(**config.sampling.values())
    started = time.perf_counter()
    engine = LLMEngine.from_config(config, PhaseClock({"imports": seconds_since_exec()}))
    loaded = time.perf_counter()
    is_json = config.job.output == "json"
    indices: dict[str, int] = {}  # request id -> index of the prompt
    show = None if is_json else _Screen(indices, is_single=len(prompts) * params.n == 1)
    for index, prompt in enumerate(prompts):
        try:
            messages = [*first_messages(config), {"role": "user", "content": prompt}]
            tokens = engine.encode_chat(messages) if config.job.chat else prompt
            (request_id,) = engine.add_request([tokens], params, show)
            indices[request_id] = index
        except RequestError as error:
            say(f"RequestError: prompt {index}: {error}")
    ended: list[Sequence] = []
    for sequences in _answer_in_order(engine, list(indices), params.n):
        ended += sequences
        for sequence in sequences if is_json else ():
            fields = {"prompt": prompts[indices[sequence.request_id]], **_plain(answer(sequence))}
            print(json.dumps(fields), flush=True)
    if ended:
        times = _measure(ended, loaded - started)
        report(times)
        if not is_json:
            _show_times(times)
    return 0 if len(indices) == len(prompts) else RequestError.exit_code


def _answer_in_order(engine: LLMEngine, ids: list[str], num_answers: int) -> Iterator[list[Sequence]]:
    """The answers of each request, once all before it are there too."""
    done: dict[str, list[Sequence]] = {id: [] for id in ids}
    waiting = deque(ids)
    while not engine.is_finished():
        for sequence in engine.step():
            done[sequence.request_id].append(sequence)
        while waiting and len(done[waiting[0]]) == num_answers:
            yield sorted(done.pop(waiting.popleft()), key=lambda sequence: sequence.index)


def first_messages(config: Config) -> list[dict[str, Any]]:
    """The messages that each chat begins with."""
    text = config.job.system_prompt
    return [] if text is None else [{"role": "system", "content": text}]


def read_prompts(prompts: Any) -> list[Any]:
    """Read the prompts of a configuration: a prompt (text or token ids), a list of prompts, @FILE, or null for stdin.

    A file has a JSON list of prompts, or on each line a prompt as plain text, as JSON, or as an object with `prompt`.
    """
    if prompts is None:
        if sys.stdin is None or sys.stdin.isatty():
            raise ConfigError("there are no prompts: give prompts='[\"…\"]' or prompts=@FILE, or pipe them in")
        prompts = _parse_prompts(sys.stdin.read(), "stdin")
    elif isinstance(prompts, str) and prompts.startswith("@"):
        try:
            prompts = _parse_prompts(Path(prompts[1:]).read_text(), prompts[1:])
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"prompts={prompts}: {getattr(error, 'strerror', error)}") from None
    if not isinstance(prompts, str) and not prompts:
        raise ConfigError("there are no prompts: the list is empty")
    if isinstance(prompts, str) or (all(isinstance(token, int) for token in prompts)):
        return [prompts]
    return list(prompts)


def _parse_prompts(text: str, source: str) -> list[Any]:
    try:
        whole = json.loads(text)
    except ValueError:
        whole = None
    if isinstance(whole, list):
        return whole
    prompts = [_parse_line(line) for line in text.splitlines() if line.strip()]
    if not prompts:
        raise ConfigError(f"there are no prompts in {source}")
    return prompts


def _parse_line(line: str) -> Any:
    try:
        value = json.loads(line)
    except ValueError:
        return line
    if isinstance(value, dict) and "prompt" in value:
        return value["prompt"]
    return value if isinstance(value, str | list) else line


class _Screen:
    """Streams a single answer; shows each of several when it is done."""

    def __init__(self, indices: Mapping[str, int], is_single: bool) -> None:
        self.indices = indices
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
            print(f"── prompt {self.indices[output.request_id]}{answer}\n{self.texts.pop(key).strip()}\n", flush=True)


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
