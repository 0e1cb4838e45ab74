"""Rewrite messages into forms that more chat templates take.

    join_turns(messages)      # system messages as one in front, neighbors of one role as one

A template may insist on one system message in front, on turns that alternate, on one call in a turn, on ids of nine
characters. Each function of `REWRITES` gives new messages of the same meaning, and changes none in place.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
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
        results = Messages()
        while index < len(messages) and messages[index]["role"] == "tool":
            results.append(messages[index])
            index += 1
        for call in calls:
            split.append(message | {"tool_calls": [call]})
            found = [each for each in results if each.get("tool_call_id") == call.get("id")]
            split += found
            results = [each for each in results if each not in found]
            message = {"role": "assistant", "content": ""}  # the others have no words
        split += results
    return split


def join_turns(messages: Messages) -> Messages:
    """One system message in front, and neighbors of one role as one message."""
    system = [message for message in messages if message["role"] in SYSTEM]
    joined = Messages()
    for message in [*system, *(each for each in messages if each["role"] not in SYSTEM)]:
        last = joined[-1] if joined else None
        is_system = message["role"] in SYSTEM
        if last is None or not (is_system or can_join(last, message)):
            joined.append(message)
        else:
            joined[-1] = last | message | join_texts(last, message) | {"role": last["role"]}
    return joined


def can_join(last: Message, message: Message) -> bool:
    return last["role"] == message["role"] != "tool" and not last.get("tool_calls")


def join_texts(first: Message, second: Message) -> Message:
    """The texts of two messages as one's."""
    names = [name for name in ("content", "reasoning_content", "thinking") if name in first or name in second]
    return {name: join(first.get(name), second.get(name)) for name in names}


def join(first: Any, second: Any) -> Any:
    if not first or not second:
        return first or second
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    return [*as_parts(first), *as_parts(second)]


def as_parts(content: Any) -> list[Any]:
    """A content as a list of parts."""
    return content if isinstance(content, list) else [{"type": "text", "text": content or ""}]


def fill_turns(messages: Messages) -> Messages:
    """Turns that templates look for: the user's in front, results of all calls, the assistant's after results."""
    return list(_fill(messages))


def _fill(messages: Messages) -> Iterator[Message]:
    last: Message | None = None
    waiting: Messages = []  # calls without a result
    for message in messages:
        role = message["role"]
        if role == "tool":
            waiting = [call for call in waiting if call.get("id") != message.get("tool_call_id")]
        else:
            results = [no_result(call) for call in waiting]
            yield from results
            if role == "user" and (results or (last and last["role"] == "tool")):
                yield {"role": "assistant", "content": ""}
            waiting = list(message.get("tool_calls") or ())
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
            for call in calls:
                names[call.get("id", "")] = call["function"]["name"]
                content = join(content, write_call(call["function"]))
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
