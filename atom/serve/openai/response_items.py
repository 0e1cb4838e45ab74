"""Output items of the Responses API: reasoning, message, function call, whole or streamed.

    items = ItemStream()
    data = items.push(delta, logprobs)           # the bytes of events; b"" if nothing is new
    yield from items.close("completed")          # at the end: one event at a time, since each may be long
    items.done                                   # [{"type": "message", "content": [...], ...}]

An item ends before the next one begins. Events are numbered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Raw

from atom.serve.http.sse import event
from atom.serve.ids import new_id
from atom.serve.output.output_parser import Delta, ToolDelta

PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}  # of ids
PARTS = {"reasoning": "reasoning_text", "message": "output_text"}  # the type of an item's one part


class ItemStream:
    def __init__(self, names: Mapping[str, Mapping[str, str]] | None = None, *, is_streamed: bool = True) -> None:
        """names: by the flat name of a function in a namespace, the fields of a call that name it

        is_streamed: write events; else only the items are wanted, and every event is empty
        """
        self._names, self._is_streamed = names or {}, is_streamed
        self.done: list[dict[str, Any]] = []
        self._item: dict[str, Any] | None = None  # that is not closed
        self._texts: list[str] = []  # of it
        self._logprobs: list[Raw] = []  # of its tokens, if it is a message
        self._num_events = 0

    def push(self, delta: Delta, logprobs: Sequence[Raw] = ()) -> bytes:
        """The events of a delta, in a model's order: reasoning, the rest of a call, text, further calls.

        logprobs: the JSON of each token of the text
        """
        data = self._say("reasoning", delta.reasoning)
        calls = list(delta.tools)
        while calls and calls[0].id is None:
            data += self._add(calls.pop(0).arguments)
        data += self._say("message", delta.content, logprobs)
        return data + b"".join(map(self._call, calls))

    def close(self, status: str) -> Iterator[bytes]:
        """End the open item, event by event. status: of it, completed or incomplete."""
        item, text, logprobs = self._item, "".join(self._texts), self._logprobs
        if item is None:
            return
        self._item, self._texts, self._logprobs = None, [], []
        kind = item["type"]
        if kind == "function_call":
            item["arguments"] = text
            yield self._tell("response.function_call_arguments.done", item, arguments=text)
        else:
            part, more = self._part(kind, text, logprobs), self._more(kind, logprobs)
            yield self._tell(f"response.{PARTS[kind]}.done", item, content_index=0, text=text, **more)
            yield self._tell("response.content_part.done", item, content_index=0, part=part)
            item["content"] = [part]
        item["status"] = status
        index = len(self.done)
        self.done.append(item)
        yield self.event("response.output_item.done", output_index=index, item=item)

    def event(self, name: str, **fields: Any) -> bytes:
        """One event with its number."""
        if not self._is_streamed:
            return b""
        self._num_events += 1
        return event({"type": name, "sequence_number": self._num_events - 1, **fields}, name)

    def _say(self, kind: str, text: str, logprobs: Sequence[Raw] = ()) -> bytes:
        """Add to an item of text, which begins where another kind is open."""
        if not text:
            return b""
        data = b""
        if self._item is None or self._item["type"] != kind:
            fields: dict[str, Any] = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
            data = self._begin(kind, **fields, content=[])
            data += self._tell("response.content_part.added", self._item, content_index=0, part=self._part(kind, ""))
        return data + self._add(text, logprobs)

    def _call(self, call: ToolDelta) -> bytes:
        data = b""
        if call.id is not None:
            named = self._names.get(call.name or "", {"name": call.name})
            data = self._begin("function_call", call_id=call.id, **named, arguments="")
        return data + self._add(call.arguments)

    def _begin(self, kind: str, **fields: Any) -> bytes:
        data = b"".join(self.close("completed"))
        self._item = {"id": new_id(PREFIXES[kind], "_"), "type": kind, "status": "in_progress", **fields}
        return data + self.event("response.output_item.added", output_index=len(self.done), item=self._item)

    def _add(self, text: str, logprobs: Sequence[Raw] = ()) -> bytes:
        item = self._item
        assert item is not None, "text belongs to an item"
        if not text:
            return b""
        self._texts.append(text)
        if item["type"] == "function_call":
            return self._tell("response.function_call_arguments.delta", item, delta=text)
        self._logprobs += logprobs
        name, more = f"response.{PARTS[item['type']]}.delta", self._more(item["type"], logprobs)
        return self._tell(name, item, content_index=0, delta=text, **more)

    def _tell(self, name: str, item: dict[str, Any] | None, **fields: Any) -> bytes:
        assert item is not None, "it has begun"
        return self.event(name, item_id=item["id"], output_index=len(self.done), **fields)

    def _part(self, kind: str, text: str, logprobs: Sequence[Raw] = ()) -> dict[str, Any]:
        annotations: dict[str, Any] = {"annotations": []} if kind == "message" else {}
        return {"type": PARTS[kind], "text": text, **annotations, **self._more(kind, logprobs)}

    @staticmethod
    def _more(kind: str, logprobs: Sequence[Raw]) -> dict[str, Any]:
        """The fields that a message has besides its text."""
        return {"logprobs": logprobs} if kind == "message" else {}


def output_items(
    delta: Delta, logprobs: Sequence[Raw], status: str, names: Mapping[str, Mapping[str, str]]
) -> list[dict[str, Any]]:
    """The items of a whole answer. status: of the last one. names: as in `ItemStream`"""
    items = ItemStream(names, is_streamed=False)
    items.push(delta, logprobs)
    for _ in items.close(status):
        pass
    return items.done
