from __future__ import annotations

import pytest

from atom.benchmarks.sse import EventReader

STREAM = b': ping\n\ndata: {"a": 1}\n\ndata:x\n\nevent: note\ndata: one\ndata: two\n\ndata: [DONE]\n\n'
DATA = [b'{"a": 1}', b"x", b"one\ntwo", b"[DONE]"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_events_are_the_same_however_the_stream_is_cut(size: int, newline: bytes):
    stream, reader = STREAM.replace(b"\n", newline), EventReader()
    chunks = [stream[at : at + size] for at in range(0, len(stream), size)]
    assert [data for chunk in chunks for data in reader.feed(chunk)] == DATA


def test_an_event_is_given_as_soon_as_it_ends():
    reader = EventReader()
    assert reader.feed(b"data: a\n") == []
    assert reader.feed(b"\ndata: b") == [b"a"]
    assert reader.feed(b"\n\n") == [b"b"]


def test_a_comment_by_itself_is_no_event():
    assert EventReader().feed(b": keep-alive\n\n: another\n\n") == []
