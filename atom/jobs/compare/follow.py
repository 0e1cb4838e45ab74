"""Compare the values of a run with a reference's, and replace them with these.

comparer = Comparer(lengths, "logits", own, reference, Everything(), is_forced=True)
with comparer.prompt(0), model.watched(comparer):
    …
comparer.errors["body", "h_3"].relative          # of the token where it is off the most
comparer.choices["body", "ids"].num_differing    # tokens for which the router chose other experts

What is replaced goes on with the reference's value, so that later errors are those of the calls since then.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from atom.graph import HEAD
from atom.jobs.compare.trace import Recorder, Rows, Trace, Value, is_choice

Pair = tuple[Tensor, Tensor]  # ours, the reference's, of one shape


class Error(NamedTuple):
    """How far a value is off; of choices the share of the tokens that differ, both times."""

    relative: float  # max |a - b| / max |b| of the token where it is off the most
    norm: float  # |a - b| / |b| of all tokens together, by the norm
    prompt: int  # of that token
    step: int
    token: int  # of the step


@dataclass
class Choices:
    """How many tokens have other experts than in the reference."""

    num_tokens: int = 0
    num_differing: int = 0
    first: tuple[int, int, int] = (0, 0, 0)  # that differs: prompt, step, token

    @property
    def error(self) -> Error:
        share = self.num_differing / self.num_tokens
        return Error(share, share, *self.first)


class Follower(Recorder):
    """Records the logits of a run while it has the reference's tokens."""

    def __init__(
        self,
        lengths: Sequence[int],
        logits: str,
        own: Container[Value],
        reference: Trace,
        replaced: Container[Value] = (),
        *,
        is_forced: bool = False,
    ) -> None:
        """
        lengths, logits: as of `Recorder`
        own: all values of the text that runs
        replaced: the values that are replaced with the reference's
        is_forced: whether decodes get the reference's tokens
        """
        super().__init__(lengths, logits)
        self._own, self._reference, self._replaced, self._is_forced = own, reference, replaced, is_forced
        self._parted = -1  # the prompt whose answer differs

    def begin(self, tokens: Tensor) -> None:
        answer = self._reference.answers[self._prompt]
        if not 0 < self._step <= len(answer):
            return
        if self._is_forced:
            tokens[0] = answer[self._step - 1]
        elif int(tokens[0]) != answer[self._step - 1]:
            self._parted = self._prompt

    def see(self, program: str, results: Mapping[str, Tensor], rows: Rows) -> None:
        if self._parted == self._prompt:
            return
        super().see(program, results, rows)
        pairs = self._pair(program, results, rows)
        if pairs:
            self.follow(program, pairs, rows)

    def _pair(self, program: str, results: Mapping[str, Tensor], rows: Rows) -> dict[str, Pair]:
        """The results that the reference has too, in the shapes of ours."""
        found = {name: value[rows.tokens] for name in results if (value := self._find(program, name)) is not None}
        chosen = next((results[name] for name in found if is_choice(results[name])), None)
        pairs = {}
        for name, theirs in found.items():
            ours = results[name]
            if chosen is not None and ours.shape == chosen.shape:
                ours = ours[:, : theirs.shape[1]]  # without the shared experts, which come last
            if ours[:1].numel() == theirs[:1].numel():
                pairs[name] = ours, theirs.reshape(ours.shape)
        return pairs

    def _find(self, program: str, name: str) -> Tensor | None:
        if program == HEAD and name == self._logits:
            return self._reference.logits.get(self.at)
        return self._reference.find(self.at, (program, name), self._own)

    def follow(self, program: str, pairs: Mapping[str, Pair], rows: Rows) -> None:
        """The results of a call that the reference has too."""
        for name, (ours, theirs) in pairs.items():
            if (program, name) in self._replaced:
                ours.copy_(theirs.to(ours.device, ours.dtype))


class Comparer(Follower):
    """Compares each value before it is replaced.

    A router's weights are compared expert by expert, for the tokens that have the same experts. If its choices are not
    replaced, a token with other experts is not compared any further in its step.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        logits: str,
        own: Container[Value],
        reference: Trace,
        replaced: Container[Value] = (),
        *,
        is_forced: bool = False,
    ) -> None:
        super().__init__(lengths, logits, own, reference, replaced, is_forced=is_forced)
        self.errors: dict[Value, Error] = {}
        self._squares: dict[Value, Tensor] = {}  # fp64[2]: summed up, of the differences and of the reference
        self.choices: dict[Value, Choices] = {}
        self._differing = torch.zeros(0, dtype=torch.bool)  # tokens of the step that go on with other experts

    def begin(self, tokens: Tensor) -> None:
        super().begin(tokens)
        self._differing = torch.zeros(self.num_tokens, dtype=torch.bool)

    def follow(self, program: str, pairs: Mapping[str, Pair], rows: Rows) -> None:
        compared = {name: (ours.cpu(), theirs) for name, (ours, theirs) in pairs.items()}
        skipped = self._differing[rows.tokens].clone()
        chosen = next((name for name, (ours, _) in pairs.items() if is_choice(ours)), None)
        differing = skipped
        if chosen is not None:
            compared |= by_expert(compared, *compared[chosen])
            ours, theirs = compared.pop(chosen)
            differing = (ours != theirs).any(-1) | skipped
            self._count((program, chosen), differing & ~skipped, rows)
            if (program, chosen) not in self._replaced:
                self._differing[rows.tokens] = differing
        for name, (ours, theirs) in compared.items():
            is_of_experts = chosen is not None and ours.shape == pairs[chosen][0].shape
            left_out = differing if is_of_experts else skipped
            self._add_squares((program, name), ours[~left_out], theirs[~left_out])
            self._note((program, name), relative_errors(ours, theirs).masked_fill(left_out, 0.0), rows)
        super().follow(program, pairs, rows)

    def _count(self, value: Value, differing: Tensor, rows: Rows) -> None:
        choices = self.choices.setdefault(value, Choices())
        if not choices.num_differing and differing.any():
            choices.first = *self.at, rows.first + int(differing.int().argmax())
        choices.num_tokens += len(differing)
        choices.num_differing += int(differing.sum())
        self.errors[value] = choices.error

    def _add_squares(self, value: Value, ours: Tensor, reference: Tensor) -> None:
        a, b = ours.double(), reference.double()
        squares = torch.stack([differences(a, b).square().sum(), b.nan_to_num(0.0, 0.0, 0.0).square().sum()])
        self._squares[value] = self._squares.get(value, torch.zeros_like(squares)) + squares

    def _note(self, value: Value, errors: Tensor, rows: Rows) -> None:
        worst = int(errors.argmax())
        difference, size = self._squares[value].tolist()
        share = difference / size if size else math.inf
        norm = 0.0 if difference == 0 else math.sqrt(share) if math.isfinite(share) else math.inf
        found = Error(float(errors[worst]), norm, *self.at, rows.first + worst)
        if found.relative < (before := self.errors.get(value, found)).relative:
            found = before._replace(norm=norm)
        self.errors[value] = found


class Everything:
    """Contains all values."""

    def __contains__(self, value: object) -> bool:
        return True


def by_expert(pairs: Mapping[str, Pair], ids: Tensor, expected: Tensor) -> dict[str, Pair]:
    """The values [T, k] of the experts of ids i64[T, k], ours and the reference's, in the order of the experts."""
    orders = ids.argsort(-1), expected.argsort(-1)
    return {
        name: (ours.gather(1, orders[0]), theirs.gather(1, orders[1]))
        for name, (ours, theirs) in pairs.items()
        if ours.shape == ids.shape
    }


def relative_errors(ours: Tensor, reference: Tensor) -> Tensor:
    """fp32[T]: max |a - b| / max |b| of each token of values [T, …]; infinite where one of the two is not finite."""
    a, b = (each.float().flatten(1) if each.dim() > 1 else each.float()[:, None] for each in (ours, reference))
    size = b.abs().nan_to_num(0.0, 0.0).amax(-1)
    error = differences(a, b).abs().amax(-1)
    return torch.where(error == 0, 0.0, error / size).nan_to_num(torch.inf, torch.inf)


def differences(a: Tensor, b: Tensor) -> Tensor:
    """a - b, and 0 where both are the same infinity or no number."""
    return torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, a - b)
