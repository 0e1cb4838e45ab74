"""Check taps and steering of requests, and collect their hidden states.

registered = Registered(["model.layers.12"], ["calm"], shape=(576,))
tapped = registered.open((Tap("model.layers.12", "mean"),))          # of a sequence
tapped[0].span(0, 16, num_prompt=40)                                 # (0, 16): the tokens of a step that it reads
tapped[0].take(0, 16, data)                                          # fp32, as the runner has sent it
registered.scales_of((("calm", 4.0),))                               # (4.0,), one for each registered name
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from atom.errors import RequestError
from atom.runtime.types import POOLS, Steering, Tap

MAX_SCALE = float(np.finfo(np.float32).max)

GivenTaps = Mapping[str, str] | Sequence[str] | str | None
GivenSteer = Mapping[str, float] | Sequence[str] | str | None


@dataclass
class TappedStates:
    """What a sequence has of one of its taps so far. The same tokens may come again, after a preemption."""

    tap: Tap
    index: int  # of its layer among those that are registered
    shape: tuple[int, ...]  # of a token's states: [H], or of several streams [S, H]
    _rows: list[npt.NDArray[np.float32]] = field(default_factory=list)  # [tokens, *shape] of all, in order
    _num_rows: int = 0
    _sum: npt.NDArray[np.float64] | None = None  # of mean
    _last: npt.NDArray[np.float32] | None = None

    def span(self, start: int, num_tokens: int, num_prompt: int) -> tuple[int, int]:
        """The tokens that it reads of a step's, from position start on: how many come before them, and how many."""
        if self.tap.pool == "all":
            return 0, num_tokens
        if self.tap.pool == "mean":
            return 0, max(min(num_tokens, num_prompt - start), 0)
        return num_prompt - 1 - start, int(start < num_prompt <= start + num_tokens)

    def take(self, start: int, num_tokens: int, data: bytes) -> None:
        """Take the states of the tokens of `span`, fp32, or their sum for a mean.

        start: position of the step's first token
        num_tokens: of the step, without drafts that were rejected; states of these come last
        """
        values = np.frombuffer(data, np.float32).reshape(-1, *self.shape)
        if self.tap.pool == "last":
            self._last = values[0]
        elif self.tap.pool == "mean":
            self._sum = values[0] + (self._sum if self._sum is not None and start else np.zeros(self.shape))
        else:
            if start < self._num_rows:
                self._rows = [np.concatenate(self._rows)[:start]]
            self._rows.append(values[:num_tokens])
            self._num_rows = start + num_tokens

    def states(self, num_prompt: int, num_tokens: int) -> npt.NDArray[np.float32] | None:
        """fp32 [*shape], or of all [tokens, *shape], without the newest token, which is not computed; None: none yet.

        num_prompt, num_tokens: of the sequence, and without its answer
        """
        if self.tap.pool == "all":
            return np.concatenate(self._rows)[: num_tokens - 1] if self._rows else None
        if self.tap.pool == "mean":
            return None if self._sum is None else (self._sum / num_prompt).astype(np.float32)
        return self._last


@dataclass(frozen=True)
class Registered:
    """The layers that requests may tap, and the vectors by which they may be steered, by their names."""

    layers: Sequence[str] = ()
    vectors: Sequence[str] = ()
    shape: tuple[int, ...] = ()  # of what a layer gives of a token

    def open(self, taps: Sequence[Tap]) -> list[TappedStates]:
        """The taps of a sequence, which have nothing yet. RequestError for one that is not registered."""
        for tap in taps:
            check_name("taps", tap.name, self.layers, "passes.taps")
            if tap.pool not in POOLS:
                raise RequestError(f"taps: {tap.name}: {tap.pool[:40]!r} is not one of {', '.join(POOLS)}")
        return [TappedStates(tap, self.layers.index(tap.name), self.shape) for tap in taps]

    def scales_of(self, steer: Steering) -> tuple[float, ...]:
        """The scale of each registered vector; none if the request is not steered. RequestError as of `open`."""
        for name, _ in steer:
            check_name("steer", name, self.vectors, "passes.steer")
        given = dict(steer)
        return tuple(given.get(name, 0.0) for name in self.vectors) if given else ()


def read_taps(given: GivenTaps) -> tuple[Tap, ...]:
    """The taps of a request: a mapping from names to pools, or names, for which it is the last token."""
    if isinstance(given, Mapping):
        return tuple(Tap(str(name), str(pool)) for name, pool in given.items())
    return tuple(map(Tap, read_names("taps", given)))


def read_steer(given: GivenSteer) -> Steering:
    """The vectors of a request: a mapping from names to scales, or names, whose scale is 1."""
    if not isinstance(given, Mapping):
        return tuple((name, 1.0) for name in read_names("steer", given))
    if wrong := [scale for scale in given.values() if not isinstance(scale, int | float) or isinstance(scale, bool)]:
        raise RequestError(f"steer: the scale {str(wrong[0])[:100]!r} is no number")
    if large := [name for name, scale in given.items() if not abs(scale) <= MAX_SCALE]:
        raise RequestError(f"steer: {str(large[0])[:100]}: the scale is not finite in fp32")
    return tuple((str(name), float(scale)) for name, scale in given.items())


def read_names(field: str, given: Sequence[str] | str | None) -> list[str]:
    """Names, each once. RequestError if they are something else."""
    names = [given] if isinstance(given, str) else given or []
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise RequestError(f"{field}={str(given)[:100]} is no list of names, and no mapping from them")
    return list(dict.fromkeys(names))


def check_name(field: str, name: str, known: Collection[str], option: str) -> None:
    """RequestError unless a name is registered. option: that registers names"""
    if name not in known:
        there = f"registered: {', '.join(known)}" if known else f"none is: start with {option}"
        raise RequestError(f"{field}: {name[:100]!r} is not registered ({there})")
