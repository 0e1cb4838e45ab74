"""`job=chat`: a conversation with the model in the terminal.

atom-run job=chat checkpoint=Qwen/Qwen3-0.6B job.system_prompt='Answer in French.'
atom-run job.chat=true                       # the same on a terminal, if no prompts are given
printf 'Hello\\nAnd again?\\n' | atom-run job=chat
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from atom.config import Config
from atom.errors import ConfigError, RequestError
from atom.jobs.generate import first_messages
from atom.llm import LLMEngine
from atom.measurement.phases import PhaseClock, seconds_since_exec
from atom.process.messages import say
from atom.runtime.types import RequestOutput
from atom.sampling_params import SamplingParams
from atom.serve.output.parsers import ChatParsers

HELP = "/clear begins anew, /exit or Ctrl-D ends, Ctrl-C stops an answer, Up brings back a line"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # characters by which a text would steer the terminal
NUM_LINES = 1000  # of the history of what was typed


def run(config: Config) -> int:
    """Read a line, answer it, until there are no more; RequestErrors are shown and the chat goes on."""
    if config.sampling.n != 1:
        raise ConfigError(f"sampling.n={config.sampling.n}: a chat has one answer; leave it out")
    engine = LLMEngine.from_config(config, PhaseClock({"imports": seconds_since_exec()}))
    if engine.tokenizer is None:
        raise ConfigError("the checkpoint has no tokenizer, so it cannot chat")
    chat = Chat(engine, config)
    if sys.stdin.isatty():
        print(HELP, file=sys.stderr)
    with typed_history(Path(config.cache) / "chat_history" if config.cache else None):
        for line in read_lines():
            match line.strip():
                case "":
                    continue
                case "/exit" | "/quit":
                    break
                case "/clear":
                    chat.clear()
                case "/help":
                    print(HELP, file=sys.stderr)
                case command if re.fullmatch(r"/\w+", command):
                    print(f"{command} is not a command; {HELP}", file=sys.stderr)
                case _:
                    chat.ask(line)
    return 0


class Chat:
    """A conversation; what was said is sent again with each question."""

    def __init__(self, engine: LLMEngine, config: Config) -> None:
        self.engine, self.config = engine, config
        self.clear()
        self.parsers = ChatParsers(config, None, None, engine.tokenizer)
        self.params = SamplingParams(**config.sampling.values())
        self.console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)

    def clear(self) -> None:
        """Forget what was said; the system prompt stays."""
        self.messages: list[dict[str, Any]] = first_messages(self.config)

    def ask(self, question: str) -> None:
        """Show the answer to a question as it comes. A question that cannot be answered is forgotten."""
        self.messages.append({"role": "user", "content": question})
        try:
            self.messages.append({"role": "assistant", "content": self.answer()})
        except RequestError as error:
            self.messages.pop()
            is_begun = self.messages != first_messages(self.config)
            say(f"RequestError: {error}{'; /clear begins anew' if is_begun else ''}")

    def answer(self) -> str:
        """Show the answer to the messages; its content, as far as it came before Ctrl-C."""
        assert self.engine.tokenizer is not None, "run checks it"
        prompt, tokens = self.engine.tokenizer.prepare_chat(self.messages)
        params = self.parsers.constrain(self.params, prompt)
        limit = self.config.serve.max_model_len
        if self.config.sampling.max_tokens is None and limit is not None:  # all that fit, as in a chat that is served
            params = replace(params, max_tokens=max(1, limit - len(tokens)))
        parser, content, error, is_cut = self.parsers.parser(prompt), "", "", False

        def show(output: RequestOutput) -> None:
            nonlocal content, error, is_cut
            text, reasoning, *_ = self.parsers.next(parser, output.text or "", is_last=output.finished)
            content += text
            error = output.sequence.error or ""
            is_cut = output.finish_reason == "max_tokens"
            self.print(reasoning, style="dim")
            if text and not content.strip("\n"):
                return  # empty lines between reasoning and answer
            self.print(text)

        with interrupts() as is_interrupted:
            (id,) = self.engine.add_request([tokens], params, show)
            while not self.engine.is_finished():
                if is_interrupted():
                    self.engine.abort(id)
                self.engine.step()
        self.console.print()
        if is_cut:
            key = "serve.max_model_len" if self.config.sampling.max_tokens is None else "sampling.max_tokens"
            count = params.max_tokens
            print(f"cut off after {count} token{'s' * (count != 1)} ({key})", file=sys.stderr)
        if error:
            raise RequestError(error)
        return content

    def print(self, text: str, style: str | None = None) -> None:
        if text:
            self.console.print(CONTROL.sub("�", text), end="", style=style)
            self.console.file.flush()


def read_lines() -> Iterator[str]:
    """The lines that are typed, or piped in. Ctrl-C discards the one that is being typed."""
    is_terminal = sys.stdin.isatty()
    while True:
        try:
            yield input("> " if is_terminal else "")
        except KeyboardInterrupt:
            print(f"\n{HELP}", file=sys.stderr)
        except EOFError:
            if is_terminal:
                print()  # what comes next begins a line of its own
            return


@contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Ctrl-C is noticed instead of raised: a step of the engine ends as it should."""
    found: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: found.append(number))
    try:
        yield lambda: bool(found)
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def typed_history(file: Path | None) -> Iterator[None]:
    """Lines can be edited and brought back on a terminal, those of former chats too."""
    if file is None or not sys.stdin.isatty():
        yield
        return
    import readline

    with suppress(OSError):  # there is none, or none that can be read
        readline.read_history_file(file)
    readline.set_history_length(NUM_LINES)
    try:
        yield
    finally:
        with suppress(OSError):  # a cache folder that takes no file
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch(mode=0o600)
            readline.write_history_file(file)
