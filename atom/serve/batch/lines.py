"""Read the lines of a batch file, as OpenAI's Batch API takes them.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [{…}]}}

    for each in read_lines(file, answered={"b"}, max_bytes=1 << 20):
        each                                 # BatchRequest("a", "/v1/chat/completions", b'{"messages": …}'), or a fault

Only the ids that have come are held, so a file may have millions of lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

import msgspec

URLS = (
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/score", "/v1/rerank",
    "/score", "/rerank", "/v2/rerank",
)  # fmt: skip
BOM = b"\xef\xbb\xbf"  # which some editors put before the first line


class BatchRequest(NamedTuple):
    custom_id: str
    url: str
    body: bytes  # JSON, as it stands in the file


class BatchFault(NamedTuple):
    """A line that cannot be sent. code: OpenAI's, of an error of a batch."""

    custom_id: str | None  # None: it has none that can be read
    code: str
    message: str
    line: int  # the first is 1


class _Line(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Named(msgspec.Struct):
    custom_id: str | None = None


class _Streamed(msgspec.Struct):
    stream: bool | None = None


def read_lines(file: BinaryIO, answered: set[str], max_bytes: int) -> Iterator[BatchRequest | BatchFault]:
    """The requests of a file and its faults, without blank lines and those whose answer is known.

    answered: custom_ids of lines that are left out; each is removed once its line has come
    max_bytes: of a line
    """
    seen: set[str] = set()
    number = 0
    while line := file.readline(max_bytes + 1):
        number += 1
        if len(line) > max_bytes and not line.endswith(b"\n"):
            skip_line(file, max_bytes)
            yield BatchFault(None, "invalid_line", f"the line has more than {max_bytes} bytes", number)
            continue
        line = line.removeprefix(BOM) if number == 1 else line
        if not line.strip():
            continue
        each = read_line(line, number)
        if each.custom_id in answered:
            answered.remove(each.custom_id)
            seen.add(each.custom_id)
            continue
        if isinstance(each, BatchRequest):
            if each.custom_id in seen:
                fault = f"the custom_id {each.custom_id!r:.200} is that of an earlier line"
                yield BatchFault(each.custom_id, "duplicate_custom_id", fault, number)
                continue
            seen.add(each.custom_id)
        yield each


def skip_line(file: BinaryIO, max_bytes: int) -> None:
    """Read to the end of a line, holding no more than max_bytes of it."""
    while (part := file.readline(max_bytes)) and not part.endswith(b"\n"):
        pass


def read_line(line: bytes, number: int) -> BatchRequest | BatchFault:
    """Read a line, and check all but its body, which its route checks."""
    try:
        given = msgspec.json.decode(line, type=_Line)
    except msgspec.ValidationError as error:
        return BatchFault(custom_id_of(line), "invalid_request", str(error), number)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return BatchFault(None, "invalid_json_line", f"the line is no JSON: {error}", number)
    id, body = given.custom_id, bytes(given.body)
    if given.method != "POST":
        return BatchFault(id, "invalid_method", f"the method is {given.method!r:.40}; it must be POST", number)
    if given.url not in URLS:
        fault = f"the url is {given.url!r:.200} (supported: {', '.join(URLS)})"
        return BatchFault(id, "invalid_url", fault, number)
    if is_streamed(body):
        return BatchFault(id, "invalid_request", "stream=true has no meaning in a file; leave it out", number)
    return BatchRequest(id, given.url, body)


def custom_id_of(line: bytes) -> str | None:
    """The custom_id of a line that lacks something else."""
    try:
        return msgspec.json.decode(line, type=_Named).custom_id
    except msgspec.ValidationError:
        return None


def is_streamed(body: bytes) -> bool:
    """Whether a body asks for a stream; of one that cannot be read, its route says so."""
    try:
        return msgspec.json.decode(body, type=_Streamed).stream is True
    except msgspec.ValidationError:
        return False
