"""Render the messages of a chat, rewritten where its template refuses them or leaves out a text.

    renderer = MessageRenderer()
    prompt, messages = renderer.render(render, messages)

Messages that the template takes are rendered as they are. Else `REWRITES` are tried in their order, from the slightest
on, and the first that it takes is used. If it takes none, its error for the messages as they are is raised.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from itertools import count, pairwise
from typing import Any

from atom.checkpoint.message_rewrites import REWRITES, Messages
from atom.errors import RequestError

MARK = re.compile(r"\bmark\d+\b")
MAX_FORMS = 1000  # of chats, that are remembered


class MessageRenderer:
    """Renders the messages of one template; it remembers of which chats the template leaves something out."""

    def __init__(self) -> None:
        self._known: dict[Hashable, bool] = {}  # by the form of a chat: whether something is left out

    def render(
        self, render: Callable[[Messages], str], messages: Messages, *, has_tools: bool = False
    ) -> tuple[str, Messages]:
        """The prompt, and the messages that were rendered: those given, or their first rewrite that the template takes.

        If it takes none, but renders some without one of their texts, the first of those are rendered. Messages that
        are not plain are rendered as they are.
        """
        if not is_plain(messages):
            return render(messages), messages
        first: tuple[str, Messages] | None = None
        fault: RequestError | None = None
        for rewrites in ((), *REWRITES):
            rewritten = messages
            for rewrite in rewrites:
                rewritten = rewrite(rewritten)
            if rewrites and rewritten == messages:
                continue
            try:
                prompt = render(rewritten)
            except RequestError as error:
                fault = fault or error
                continue
            if not self._leaves_out(render, rewritten, has_tools):
                return prompt, rewritten
            first = first or (prompt, rewritten)
        if first is None:
            assert fault is not None, "it was rendered or refused"
            raise fault
        return first

    def _leaves_out(self, render: Callable[[Messages], str], messages: Messages, has_tools: bool) -> bool:
        form = (has_tools, form_of(messages))
        known = self._known.get(form)
        if known is None:
            if len(self._known) >= MAX_FORMS:
                self._known.clear()
            known = self._known[form] = leaves_out(render, messages)
        return known


def is_plain(messages: Messages) -> bool:
    """Whether messages have the form that chats of the API have, whose parts the rewrites know."""
    calls = [call for each in messages if isinstance(each, dict) for call in each.get("tool_calls") or ()]
    return all(isinstance(each, dict) and isinstance(each.get("role"), str) for each in messages) and all(
        isinstance(call, dict)
        and isinstance(call.get("function"), dict)
        and isinstance(call["function"].get("name"), str)
        for call in calls
    )


def form_of(messages: Messages) -> Hashable:
    """What decides whether a template shows all of a chat: which kinds of messages follow which."""
    kinds = [
        (
            each["role"],
            bool(each.get("content")),
            min(len(each.get("tool_calls") or ()), 2),
            each.get("content") is None,
        )
        for each in messages
    ]
    return frozenset(pairwise([None, *kinds]))


def leaves_out(render: Callable[[Messages], str], messages: Messages) -> bool:
    """Whether a chat like this lacks a text or a call, as the same chat with a mark for each of them shows.

    A text next to calls does not count: some templates leave it out on purpose.
    """
    marks = (f"mark{number}" for number in count())
    marked, wanted = Messages(), set[str]()
    for message in messages:
        content, calls = message.get("content"), message.get("tool_calls") or ()
        if not calls and isinstance(content, str) and content.strip():
            wanted.add(mark := next(marks))
            message = message | {"content": mark}
        if calls:
            names = [next(marks) for _ in calls]
            wanted.update(names)
            renamed = [rename(call, name) for call, name in zip(calls, names, strict=True)]
            message = message | {"tool_calls": renamed}
        marked.append(message)
    try:
        return not wanted.issubset(MARK.findall(render(marked)))
    except RequestError:  # it takes the texts themselves
        return False


def rename(call: Any, name: str) -> Any:
    return call | {"function": call["function"] | {"name": name}}
