"""Record the values of a run by name, or compare those of a second run with them.

recorder = Recorder([len(prompt) for prompt in prompts])
with recorder.prompt(0), model.watched(recorder):
    …                                    # a step with the prompt, then a decode for each token after it
recorder.trace.values[0, 0]["body", "h_3"]       # [tokens, …] of the first prompt; [0, 1]: of the first decode after it

A step is one of the engine's: that of a prompt has all its tokens, a decode one. The head runs for the prompt's last
token first, which samples, then for the others, whose log probabilities were asked for.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
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

    def find(self, at: At, value: Value) -> Tensor | None:
        """A value of this name, in the same program or in another one that a pass has moved its call from."""
        values = self.values.get(at, {})
        others = ((program, value[1]) for program in (BODY, HEAD))
        return next((values[each] for each in (value, *others) if each in values), None)


class Rows(NamedTuple):
    """Which tokens of a step a value's first rows are of."""

    first: int
    num: int

    @property
    def tokens(self) -> slice:
        return slice(self.first, self.first + self.num)


class Watcher:
    """Follows the steps of prompts, and hands each floating value to `see` with the tokens that its rows are of."""

    def __init__(self, lengths: Sequence[int]) -> None:
        """lengths: the tokens of each prompt"""
        self._lengths = lengths
        self._prompt, self._step = 0, -1
        self._scored = -1  # tokens of the step that the head has run for besides the last; -1: it has not run
        self._first = ""  # what the head takes first
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

    def __call__(self, program: str, name: str, value: Any) -> None:
        """A value of a program, as `Model.watched` shows it."""
        if program == BODY and name == TOKENS:
            self._step += 1
            self._scored, self._rows = -1, Rows(0, self.num_tokens)
            self.begin(value)
        elif program == HEAD and (self._scored < 0 or name == self._first):
            if self._scored < 0:
                self._first = name
            self._rows = self._next_head_rows(len(value))
        is_seen = program in (BODY, HEAD) and torch.is_tensor(value) and value.is_floating_point() and value.dim()
        if is_seen and 0 < self._rows.num <= len(value):
            self.see(program, name, value[: self._rows.num], self._rows)

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

    def see(self, program: str, name: str, value: Tensor, rows: Rows) -> None:
        """A value [num, …] of some tokens of the step."""
        raise NotImplementedError


class Recorder(Watcher):
    """Records a run: its logits, and all other values."""

    def __init__(self, lengths: Sequence[int], logits: str) -> None:
        """
        lengths: the tokens of each prompt
        logits: what the text calls the result of its head
        """
        super().__init__(lengths)
        self.trace, self._logits = Trace(), logits

    def see(self, program: str, name: str, value: Tensor, rows: Rows) -> None:
        if name == self._logits and program == HEAD:
            self._keep(self.trace.logits, self.at, value.float(), rows)
        else:
            self._keep(self.trace.values.setdefault(self.at, {}), (program, name), value, rows)

    def _keep(self, kept: dict[Any, Tensor], key: Any, value: Tensor, rows: Rows) -> None:
        if key not in kept:
            kept[key] = torch.full((self.num_tokens, *value.shape[1:]), torch.nan, dtype=value.dtype)
        kept[key][rows.tokens] = value.cpu()


class Error(NamedTuple):
    """How far a value is off at the token where it is off the most."""

    relative: float  # max |a - b| / max |b| of the token
    prompt: int
    step: int
    token: int  # of the step


class Follower(Recorder):
    """Follows the answers of a reference, and compares each value with the reference's.

    What is replaced goes on with the reference's value, so that later errors are those of the calls since then.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        logits: str,
        reference: Trace,
        names: Container[str],
        replaced: Container[Value],
        *,
        is_forced: bool = True,
    ) -> None:
        """
        lengths, logits: as of `Recorder`
        names: the values that are compared, which passes have not named
        replaced: those that are replaced
        is_forced: whether decodes compute the reference's tokens; if not, they count while they have them
        """
        super().__init__(lengths, logits)
        self.errors: dict[Value, Error] = {}
        self._reference, self._names, self._replaced, self._is_forced = reference, names, replaced, is_forced
        self._parted = -1  # the prompt whose answer differs

    def begin(self, tokens: Tensor) -> None:
        answer = self._reference.answers[self._prompt]
        if not 0 < self._step <= len(answer):
            return
        if self._is_forced:
            tokens[0] = answer[self._step - 1]
        elif int(tokens[0]) != answer[self._step - 1]:
            self._parted = self._prompt

    def see(self, program: str, name: str, value: Tensor, rows: Rows) -> None:
        if self._parted == self._prompt:
            return
        if name == self._logits and program == HEAD:
            super().see(program, name, value, rows)
            expected = self._reference.logits.get(self.at)
        else:
            expected = self._reference.find(self.at, (program, name)) if name in self._names else None
        if expected is None or expected[:1].numel() != value[:1].numel():
            return
        expected = expected[rows.tokens].reshape(value.shape)
        errors = relative_errors(value.cpu(), expected)
        worst = int(errors.argmax())
        found = Error(float(errors[worst]), *self.at, rows.first + worst)
        if found.relative >= self.errors.setdefault((program, name), found).relative:
            self.errors[program, name] = found
        if (program, name) in self._replaced:
            value.copy_(expected.to(value.device, value.dtype))


class Everything:
    """Contains all values."""

    def __contains__(self, value: object) -> bool:
        return True


def relative_errors(ours: Tensor, reference: Tensor) -> Tensor:
    """fp32[T]: max |a - b| / max |b| of each token of values [T, …]; infinite where only ours is not finite."""
    a, b = (each.float().flatten(1) if each.dim() > 1 else each.float()[:, None] for each in (ours, reference))
    size = b.abs().amax(-1)
    error = (a - b).abs().amax(-1)
    same = (a == b) | (a.isnan() & b.isnan())  # two infinities are equal, and their difference is not
    error = torch.where(same.all(-1), 0.0, error)
    return torch.where(error == 0, 0.0, error / size).nan_to_num(torch.inf, torch.inf)
