from __future__ import annotations

import json

from msgspec import Raw

from atom.serve.openai.response_items import ItemStream
from atom.serve.output.output_parser import Delta


def test_each_event_of_an_end_comes_by_itself():
    items = ItemStream()
    items.push(Delta("a", "", []), [Raw(b'{"token":"a"}')])
    heads = [data.split(b"\n")[0] for data in items.close("completed")]
    assert heads == [
        b"event: response.output_text.done",
        b"event: response.content_part.done",
        b"event: response.output_item.done",
    ]
    assert list(items.close("completed")) == [], "it is closed"


def test_of_an_answer_as_a_whole_no_event_is_written():
    items = ItemStream(is_streamed=False)
    assert items.push(Delta("a", "hm", [])) == b""
    assert set(items.close("incomplete")) == {b""}
    assert [(each["type"], each["status"]) for each in items.done] == [
        ("reasoning", "completed"),
        ("message", "incomplete"),
    ]


def test_events_are_numbered_across_items():
    items = ItemStream()
    data = items.push(Delta("a", "hm", [])) + b"".join(items.close("completed"))
    numbers = [json.loads(line[6:])["sequence_number"] for line in data.splitlines() if line.startswith(b"data: ")]
    assert numbers == list(range(12))
