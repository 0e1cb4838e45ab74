"""Rewrite messages into forms that more chat templates take.

    join_turns(messages)      # system messages as one in front, neighbors of one role as one

A template may insist on one system message in front, on turns that alternate, on one call in a turn, on ids of nine
characters. Each function of `REWRITES` gives new messages of the same meaning, and changes none in place.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import ChainMap, defaultdict
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

Message = dict[str, Any]
Messages = list[Message]
SYSTEM = ("system", "developer")
SHORT_ID = re.compile("[a-zA-Z0-9]{9}")
NO_RESULT = "no result"


def shorten_ids(messages: Messages) -> Messages:
    """Ids of calls as 9 letters and digits, which Mistral's templates insist on; equal ones stay equal."""
    shortened = Messages()
    for message in messages:
        if calls := message.get("tool_calls"):
            message = message | {"tool_calls": [call | {"id": short_id(call.get("id"))} for call in calls]}
        if "tool_call_id" in message:
            message = message | {"tool_call_id": short_id(message["tool_call_id"])}
        shortened.append(message)
    return shortened


def short_id(id: Any) -> str:
    text = str(id)
    return text if SHORT_ID.fullmatch(text) else hashlib.sha256(text.encode()).hexdigest()[:9]


def part_calls(messages: Messages) -> Messages:
    """Calls in messages whose content is null, for templates that look for calls only in these."""
    parted = Messages()
    for message in messages:
        if not message.get("tool_calls"):
            parted.append(message)
            continue
        if message.get("content"):
            parted.append({name: value for name, value in message.items() if name != "tool_calls"})
            message = {"role": message["role"], "tool_calls": message["tool_calls"]}
        parted.append(message | {"content": None})
    return parted


def split_calls(messages: Messages) -> Messages:
    """Several calls of one turn as turns of one call, each with its result: call, result, call, result."""
    split, index = Messages(), 0
    while index < len(messages):
        message, index = messages[index], index + 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            split.append(message)
            continue
        results = defaultdict[Any, Messages](list)  # by the id of their call
        while index < len(messages) and messages[index]["role"] == "tool":
            results[messages[index].get("tool_call_id")].append(messages[index])
            index += 1
        for call in calls:
            split += [message | {"tool_calls": [call]}, *results.pop(call.get("id"), ())]
            message = {"role": "assistant", "content": ""}  # the others have no words
        split += chain.from_iterable(results.values())
    return split


def join_turns(messages: Messages) -> Messages:
    """One system message in front, and neighbors of one role as one message."""
    system = [message for message in messages if message["role"] in SYSTEM]
    groups: list[Messages] = []
    for message in [*system, *(each for each in messages if each["role"] not in SYSTEM)]:
        if groups and (message["role"] in SYSTEM or can_join(groups[-1][-1], message)):
            groups[-1].append(message)
        else:
            groups.append([message])
    return [join_messages(group) if len(group) > 1 else group[0] for group in groups]


def can_join(last: Message, message: Message) -> bool:
    return last["role"] == message["role"] != "tool" and not last.get("tool_calls")


def join_messages(messages: Messages) -> Message:
    """Messages as one, of the first one's role."""
    joined = dict(ChainMap(*reversed(messages))) | {"role": messages[0]["role"]}
    texts = [name for name in ("content", "reasoning_content", "thinking") if name in joined]
    return joined | {name: join(*(message.get(name) for message in messages)) for name in texts}


def join(*contents: Any) -> Any:
    found = list(filter(None, contents))
    if len(found) < 2:
        return found[0] if found else contents[-1]
    if all(isinstance(each, str) for each in found):
        return "\n\n".join(found)
    return [part for each in found for part in as_parts(each)]


def as_parts(content: Any) -> list[Any]:
    """A content as a list of parts."""
    return content if isinstance(content, list) else [{"type": "text", "text": content or ""}]


def fill_turns(messages: Messages) -> Messages:
    """Turns that templates look for: the user's in front, results of all calls, the assistant's after results."""
    return list(_fill(messages))


def _fill(messages: Messages) -> Iterator[Message]:
    last: Message | None = None
    waiting: dict[Any, Any] = {}  # calls without a result, by their ids
    for message in messages:
        role = message["role"]
        if role == "tool":
            waiting.pop(message.get("tool_call_id"), None)
        else:
            results = [no_result(call) for call in waiting.values()]
            yield from results
            if role == "user" and (results or (last and last["role"] == "tool")):
                yield {"role": "assistant", "content": ""}
            waiting = {call.get("id"): call for call in message.get("tool_calls") or ()}
        if role not in (*SYSTEM, "user") and (last is None or last["role"] in SYSTEM):
            yield {"role": "user", "content": ""}
        yield message
        last = message


def no_result(call: Any) -> Message:
    name = call["function"]["name"]
    return {"role": "tool", "tool_call_id": call.get("id", ""), "name": name, "content": NO_RESULT}


def move_system(messages: Messages) -> Messages:
    """The system message at the beginning of the user's first one, for templates that know none."""
    if not messages or messages[0]["role"] not in SYSTEM:
        return messages
    system, *others = messages
    first = others.pop(0) if others and others[0]["role"] == "user" else {}
    return [first | {"role": "user", "content": join(system["content"], first.get("content"))}, *others]


def write_calls(messages: Messages) -> Messages:
    """Calls and results as texts of the assistant's and the user's, for templates that know none."""
    written, names = Messages(), dict[str, str]()  # of the tools, by the id of the call
    for message in messages:
        content = message.get("content")
        if calls := message.get("tool_calls"):
            names |= {call.get("id", ""): call["function"]["name"] for call in calls}
            content = join(content, *(write_call(call["function"]) for call in calls))
            message = {name: value for name, value in message.items() if name != "tool_calls"} | {"content": content}
        elif message["role"] == "tool":
            name = message.get("name") or names.get(message.get("tool_call_id", ""), "the tool")
            message = {"role": "user", "content": join(f"Result of {name}:", content)}
        written.append(message)
    return written


def write_call(function: Message) -> str:
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f"Call of {function['name']}: {text}"


Rewrite = Callable[[Messages], Messages]
REWRITES: tuple[tuple[Rewrite, ...], ...] = (
    (shorten_ids,),
    (shorten_ids, split_calls),
    (shorten_ids, part_calls),
    (shorten_ids, join_turns),
    (shorten_ids, join_turns, split_calls),
    (shorten_ids, join_turns, part_calls),
    (shorten_ids, join_turns, split_calls, fill_turns),
    (shorten_ids, join_turns, move_system, join_turns, split_calls, fill_turns),
    (write_calls, join_turns, fill_turns),
    (write_calls, join_turns, move_system, join_turns, fill_turns),
)
