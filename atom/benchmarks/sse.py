"""Parse server-sent events from raw chunks, as fast as a load generator needs.

Most chunks are one whole event.

    reader = EventReader()
    reader.feed(b'data: {"a"')          # []
    reader.feed(b': 1}\\n\\ndata: x\\n\\n')   # [b'{"a": 1}', b'x']

Only the data of an event is returned; comments (": keep-alive") and other fields are skipped.
"""

from __future__ import annotations


class EventReader:
    """Splits a byte stream at blank lines; an incomplete event is held back."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of the events that end in this chunk, in order."""
        if self._rest:
            chunk = self._rest + chunk
        if b"\r" in chunk:  # only as part of a line's end: JSON writes it as \r
            chunk = chunk.replace(b"\r\n", b"\n")
        *events, self._rest = chunk.split(b"\n\n")
        return [data for event in events if (data := read_data(event)) is not None]


def read_data(event: bytes) -> bytes | None:
    """The data of an event, its lines joined; None for a comment."""
    if event.startswith(b"data:") and b"\n" not in event:
        return event[6:] if event[5:6] == b" " else event[5:]
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
