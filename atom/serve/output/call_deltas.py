"""Deltas of tool calls while they stream.

deltas = CallDeltas(new_call_id)
deltas.start("f", None)
deltas.add('{"a": ')
deltas.take()           # [ToolDelta(index=0, id="call_…", name="f", arguments='{"a": ')]
deltas.add("1}")
deltas.end()
deltas.take()           # [ToolDelta(index=0, id=None, name=None, arguments="1}")]
deltas.whole            # [True]
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import NamedTuple


class ToolDelta(NamedTuple):
    """The new part of one call."""

    index: int  # type: ignore[assignment]  # of the call; a tuple has a method of that name
    id: str | None  # of the first delta of a call only
    name: str | None  # of the first delta of a call only
    arguments: str  # the next piece of their JSON text


def new_call_id() -> str:
    """call_ and 24 hexadecimal digits that nobody can guess."""
    return f"call_{secrets.token_hex(12)}"


class CallDeltas:
    def __init__(self, new_id: Callable[[], str]) -> None:
        self.whole: list[bool] = []  # for each call that was started, whether it is whole
        self._new_id = new_id
        self._deltas: list[ToolDelta] = []

    def start(self, name: str | None, id: str | None, arguments: str = "") -> None:
        """Send the id and the name of a call. id: None: a new one"""
        self._deltas.append(ToolDelta(len(self.whole), id or self._new_id(), name, arguments))
        self.whole.append(False)

    def add(self, piece: str) -> None:
        """Send the next piece of the arguments of the call that was started last."""
        index = len(self.whole) - 1
        last = self._deltas[-1] if self._deltas else None
        if last is not None and last.index == index:
            self._deltas[-1] = last._replace(arguments=last.arguments + piece)
        elif piece:
            self._deltas.append(ToolDelta(index, None, None, piece))

    def end(self) -> None:
        """Count the call that was started last as whole."""
        self.whole[-1] = True

    def take(self) -> list[ToolDelta]:
        """The deltas since the last call."""
        deltas, self._deltas = self._deltas, []
        return deltas
