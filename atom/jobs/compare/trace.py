"""Record the values of a run by name.

recorder = Recorder([len(prompt) for prompt in prompts], names, logits="logits")
with recorder.prompt(0), model.watched(recorder):
    …                                    # a step with the prompt, then a decode for each token after it
recorder.trace.values[0, 0]["body", "h_3"]       # [tokens, …] of the first prompt; [0, 1]: of the first decode after it

A step is one of the engine's: that of a prompt has all its tokens, a decode one. The head runs for the prompt's last
token first, which samples, then for the others, whose log probabilities were asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atom.graph import BODY, HEAD

TOKENS = "tokens"  # the body's input
Value = tuple[str, str]  # program, name
At = tuple[int, int]  # prompt, step: 0 of the prompt itself, 1 of the first decode, …


@dataclass
class Trace:
    """What one run computed."""

    values: dict[At, dict[Value, Tensor]] = field(default_factory=dict)  # [tokens of the step, …]
    logits: dict[At, Tensor] = field(default_factory=dict)  # fp32[tokens of the step, V]
    answers: list[list[int]] = field(default_factory=list)  # the tokens after each prompt, greedy

    def find(self, at: At, value: Value, own: Container[Value]) -> Tensor | None:
        """A value of this name, of the same program or of the one that a pass has moved its call from.

        own: all values of the text that has `value`
        """
        values, (program, name) = self.values.get(at, {}), value
        other = BODY if program == HEAD else HEAD, name
        return values.get(value, values.get(other) if other not in own else None)


class Rows(NamedTuple):
    """Which tokens of a step a value's first rows are of."""

    first: int
    num: int

    @property
    def tokens(self) -> slice:
        return slice(self.first, self.first + self.num)


class Watcher:
    """Follows the steps of prompts, and hands each call's results to `see` with the tokens that their rows are of."""

    def __init__(self, lengths: Sequence[int]) -> None:
        """lengths: the tokens of each prompt"""
        self._lengths = lengths
        self._prompt, self._step = 0, -1
        self._scored = -1  # tokens of the step that the head has run for besides the last; -1: it has not run
        self._head_inputs: Collection[str] = ()
        self._rows = Rows(0, 0)

    @contextmanager
    def prompt(self, number: int) -> Iterator[None]:
        """Within this context, what runs is this prompt and the decodes after it."""
        self._prompt, self._step = number, -1
        yield

    @property
    def at(self) -> At:
        return self._prompt, self._step

    @property
    def num_tokens(self) -> int:
        """The tokens of the step."""
        return self._lengths[self._prompt] if self._step == 0 else 1

    def __call__(self, program: str, results: Mapping[str, Any]) -> None:
        """The inputs of a program or the results of a call, as `Model.watched` shows them."""
        if program == BODY and TOKENS in results:
            self._step += 1
            self._scored, self._rows = -1, Rows(0, self.num_tokens)
            self.begin(results[TOKENS])
        elif program == HEAD and (self._scored < 0 or results.keys() == self._head_inputs):
            if self._scored < 0:
                self._head_inputs = results.keys()
            self._rows = self._next_head_rows(len(next(iter(results.values()))))
        if program in (BODY, HEAD) and (seen := dict(self._rows_of(results))):
            self.see(program, seen, self._rows)

    def _rows_of(self, results: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """The tensors that have a row for each token of the step, without those of padding."""
        num = self._rows.num
        for name, value in results.items():
            if torch.is_tensor(value) and value.dim() and 0 < num <= len(value):
                yield name, value[:num]

    def _next_head_rows(self, num_rows: int) -> Rows:
        last = self.num_tokens - 1
        if self._scored < 0:
            self._scored = 0
            return Rows(last, 1)
        rows = Rows(self._scored, min(num_rows, last - self._scored))
        self._scored += rows.num
        return rows

    def begin(self, tokens: Tensor) -> None:
        """A step begins with these tokens i64[T]."""

    def see(self, program: str, results: Mapping[str, Tensor], rows: Rows) -> None:
        """The results [num, …] of a call for some tokens of the step."""
        raise NotImplementedError


class Recorder(Watcher):
    """Records the logits of a run, and the values of some names."""

    def __init__(self, lengths: Sequence[int], logits: str, names: Container[str] = ()) -> None:
        """
        lengths: the tokens of each prompt
        logits: what the text calls the result of its head
        names: the other values that are recorded
        """
        super().__init__(lengths)
        self.trace, self._logits, self._names = Trace(), logits, names

    def see(self, program: str, results: Mapping[str, Tensor], rows: Rows) -> None:
        for name, value in results.items():
            if program == HEAD and name == self._logits:
                self._keep(self.trace.logits, self.at, value.float(), rows)
            elif name in self._names and (value.is_floating_point() or is_choice(value)):
                self._keep(self.trace.values.setdefault(self.at, {}), (program, name), value, rows)

    def _keep(self, kept: dict[Any, Tensor], key: Any, value: Tensor, rows: Rows) -> None:
        if rows.num == self.num_tokens:
            kept[key] = value.to("cpu", copy=True)  # later calls may write to it
            return
        if key not in kept:
            kept[key] = torch.zeros((self.num_tokens, *value.shape[1:]), dtype=value.dtype)
        kept[key][rows.tokens] = value.cpu()


def is_choice(value: Tensor) -> bool:
    """Whether a value is what a router chooses for each token: i64[T, k]."""
    return value.dim() == 2 and not value.is_floating_point()
