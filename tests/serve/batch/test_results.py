"""A file of results, and what is kept of one to go on with."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest

from atom.errors import ConfigError
from atom.serve.batch.lines import BatchFault, BatchRequest
from atom.serve.batch.results import Response, Results, keep_answered


def write(*statuses: int) -> list[bytes]:
    """Result lines of the ids 0, 1, … ; a status of 0 is of a line that could not be sent."""
    file = io.BytesIO()
    results = Results(file)
    for number, status in enumerate(statuses):
        if status:
            results.write(BatchRequest(str(number), "", b""), Response(status, "req-1", b'{"a":[1]}'))
        else:
            results.refuse(BatchFault(str(number), "invalid_url", "no such url", 9))
    assert results.num_answered == statuses.count(200) and results.num_failed == len(statuses) - statuses.count(200)
    return file.getvalue().splitlines(keepends=True)


def test_a_line_is_openais():
    answered, failed, refused = map(json.loads, write(200, 400, 0))
    assert answered.pop("id").startswith("batch_req_")
    response = {"status_code": 200, "request_id": "req-1", "body": {"a": [1]}}
    assert answered == {"custom_id": "0", "response": response, "error": None}
    assert failed["response"]["status_code"] == 400 and failed["error"] is None
    assert refused["response"] is None and refused["custom_id"] == "2"
    assert refused["error"] == {"code": "invalid_url", "message": "line 9: no such url", "line": 9}


def test_answers_stay_and_what_failed_or_was_cut_off_leaves(tmp_path: Path):
    path = tmp_path / "out"
    assert keep_answered(path) == set()
    lines = write(200, 400, 0, 200, 503, 200)
    path.write_bytes(b"".join(lines)[:-5])
    assert keep_answered(path) == {"0", "3"}
    assert path.read_bytes() == lines[0] + lines[3]
    kept = path.stat().st_ino
    assert keep_answered(path) == {"0", "3"} and path.stat().st_ino == kept, "a whole file is not written anew"
    path.write_bytes((lines[0] + lines[3]).rstrip())  # whole, though without its end
    assert keep_answered(path) == {"0", "3"} and path.read_bytes() == lines[0] + lines[3]
    assert list(tmp_path.iterdir()) == [path]


def test_a_result_of_vllm_is_one(tmp_path: Path):
    """A line as its `run-batch` writes it: errors have a body and an error."""
    line = {
        "id": "vllm-1",
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "vllm-batch-1", "body": {}},
    }
    failed = {**line, "custom_id": "b", "response": {"status_code": 400, "request_id": "x", "body": None}}
    text = json.dumps(line | {"error": None}) + "\n" + json.dumps(failed | {"error": {"error": {}}}) + "\n"
    (tmp_path / "out").write_text(text)
    assert keep_answered(tmp_path / "out") == {"a"}


@pytest.mark.parametrize("text", ["notes", '{"id": 1}\n', '{"custom_id": "a", "url": "/v1/responses"}\n'])
def test_another_file_is_left_as_it_is(text: str, tmp_path: Path):
    path = tmp_path / "out"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"out: line 1 is no result of a batch; name another file$"):
        keep_answered(path)
    assert path.read_text() == text and list(tmp_path.iterdir()) == [path]


def test_a_device_keeps_nothing_and_is_left_as_it_is():
    main, terminal = os.openpty()
    path = Path(os.ttyname(terminal))
    assert keep_answered(path) == set() and path.is_char_device()
    os.close(terminal)
    os.close(main)
