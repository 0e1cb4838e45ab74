"""Render a chat's messages, rewritten if the template does not take them.

    renderer = MessageRenderer()
    prompt, messages = renderer.render(render, messages)

Messages that the template takes are rendered as they are. Else `REWRITES` are tried in their order, from the slightest
on, and the first that it takes is used. If it takes none, its error for the messages as they are is raised.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from enum import IntEnum
from itertools import count, pairwise
from typing import Any

from atom.checkpoint.message_rewrites import REWRITES, Messages, write_calls
from atom.errors import RequestError

MARK = re.compile(r"\bmark\d+\b")
MAX_FORMS = 1000  # of chats, that are remembered


class Loss(IntEnum):
    """The parts of a chat that a template leaves out."""

    NOTHING = 0
    CALL = 1
    TEXT = 2


class MessageRenderer:
    """Renders the messages of one template; it remembers of which chats the template leaves something out."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Loss] = {}  # by the form of a chat

    def render(
        self, render: Callable[[Messages], str], messages: Messages, *, has_tools: bool = False
    ) -> tuple[str, Messages]:
        """The prompt, and the messages that were rendered: those given, or their first rewrite that the template takes.

        If it takes none, but renders some without one of their texts, those are rendered of which it leaves out least.
        A template that shows results, but no calls, gets neither as text. Messages that are not plain are rendered as
        they are.
        """
        if not is_plain(messages):
            return render(messages), messages
        has_results = any(each["role"] == "tool" for each in messages)
        lossy: list[tuple[Loss, Messages]] = []
        fault: RequestError | None = None
        for rewrites in ((), *REWRITES):
            if write_calls in rewrites and has_results and any(loss is Loss.CALL for loss, _ in lossy):
                break
            rewritten = messages
            for rewrite in rewrites:
                rewritten = rewrite(rewritten)
            if rewrites and rewritten == messages:
                continue
            form = (has_tools, form_of(rewritten))
            loss = self._known.get(form)
            if not loss:  # a template that is known to leave something out need not render it to show that
                try:
                    prompt = render(rewritten)
                except RequestError as error:
                    fault = fault or error
                    continue
                loss = self._remember(form, find_loss(render, rewritten)) if loss is None else loss
                if loss is Loss.NOTHING:
                    return prompt, rewritten
            lossy.append((loss, rewritten))
        for _, rewritten in sorted(lossy, key=lambda each: each[0]):
            try:
                return render(rewritten), rewritten
            except RequestError as error:
                fault = fault or error
        assert fault is not None, "it was rendered or refused"
        raise fault

    def _remember(self, form: Hashable, loss: Loss) -> Loss:
        if len(self._known) >= MAX_FORMS:
            self._known.clear()
        self._known[form] = loss
        return loss


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
    """The form of a chat, on which depends what a template shows: which kinds of messages follow which."""
    kinds = [
        (
            each["role"],
            has_text(each),
            min(len(each.get("tool_calls") or ()), 2),
            each.get("content") is None,
            isinstance(each.get("content"), list),
        )
        for each in messages
    ]
    return frozenset(pairwise([None, *kinds]))


def has_text(message: dict[str, Any]) -> bool:
    content = message.get("content")
    return bool(content.strip() if isinstance(content, str) else content)


def is_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(text := part.get("text"), str) and bool(text.strip())


def find_loss(render: Callable[[Messages], str], messages: Messages) -> Loss:
    """Find what a template leaves out of a chat like this, by a mark in each text and call.

    A text next to calls does not count: some templates leave it out on purpose.
    """
    numbers = count()
    marked, texts, names = Messages(), set[str](), set[str]()
    for message in messages:
        content, calls = message.get("content"), message.get("tool_calls") or ()
        if not calls and isinstance(content, str) and has_text(message):
            texts.add(mark := f"mark{next(numbers)}")
            message = message | {"content": mark}
        if not calls and isinstance(content, list):
            marks = {at: f"mark{next(numbers)}" for at, part in enumerate(content) if is_text(part)}
            texts.update(marks.values())
            parts = [part | {"text": marks[at]} if at in marks else part for at, part in enumerate(content)]
            message = message | {"content": parts}
        if calls:
            own = [f"mark{next(numbers)}" for _ in calls]
            names.update(own)
            message = message | {"tool_calls": [rename(call, name) for call, name in zip(calls, own, strict=True)]}
        marked.append(message)
    try:
        shown = set(MARK.findall(render(marked)))
    except RequestError:  # it takes the texts themselves
        return Loss.NOTHING
    return Loss.TEXT if texts - shown else Loss.CALL if names - shown else Loss.NOTHING


def rename(call: Any, name: str) -> Any:
    return call | {"function": call["function"] | {"name": name}}
