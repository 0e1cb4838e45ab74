"""What is read of a batch file, and what is said of its faults."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from atom.serve.batch.lines import BatchFault, BatchRequest, read_lines

LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi"}}


def read(*lines: Any, answered: set[str] | None = None, max_bytes: int = 1000) -> list[BatchRequest | BatchFault]:
    text = b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
    return list(read_lines(io.BytesIO(text), answered or set(), max_bytes))


def test_a_line_is_a_request_with_its_body_as_it_stands():
    assert read(
        b'\xef\xbb\xbf{"body": {"n":  1}, "custom_id": "\xc3\xa9", "method": "POST", "url": "/v1/responses"}'
    ) == [BatchRequest("é", "/v1/responses", b'{"n":  1}')]


@pytest.mark.parametrize(
    ("line", "custom_id", "code", "message"),
    [
        (b"{bad", None, "invalid_json_line", "the line is no JSON"),
        (b'{"custom_id": "\xff"}', None, "invalid_json_line", "the line is no JSON"),
        ([1], None, "invalid_request", "Expected `object`"),
        ({**LINE, "custom_id": 7}, None, "invalid_request", "Expected `str`, got `int` - at `$.custom_id`"),
        ({"custom_id": "a"}, "a", "invalid_request", "missing required field `method`"),
        ({**LINE, "method": "GET"}, "a", "invalid_method", "the method is 'GET'; it must be POST"),
        ({**LINE, "url": "/metrics"}, "a", "invalid_url", "the url is '/metrics' (supported: /v1/chat/completions,"),
        ({**LINE, "body": {"stream": True}}, "a", "invalid_request", "stream=true has no meaning in a file"),
        ({**LINE, "body": {"prompt": "a" * 999}}, None, "invalid_line", "the line has more than 1000 bytes"),
    ],
)
def test_a_fault_has_the_id_and_number_of_its_line_and_ends_nothing(
    line: Any, custom_id: str | None, code: str, message: str
):
    fault, after = read(b"", line, {**LINE, "custom_id": "b"})
    assert isinstance(fault, BatchFault) and (fault.custom_id, fault.code, fault.line) == (custom_id, code, 2)
    assert message in fault.message and after.custom_id == "b"


def test_only_the_first_line_of_an_id_is_sent_and_none_whose_answer_is_known():
    names = ["a", "b", "a", "c", "b"]
    found = read(*({**LINE, "custom_id": name} for name in names), answered={"b"})
    assert [(each.custom_id, getattr(each, "code", "")) for each in found] == [
        ("a", ""),
        ("a", "duplicate_custom_id"),
        ("c", ""),
        ("b", "duplicate_custom_id"),
    ]
