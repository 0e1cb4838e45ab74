"""Write a batch's results as OpenAI's lines, and go on with a file.

    {"id": "batch_req_5f…", "custom_id": "a", "response": {"status_code": 200, "request_id": "…", "body": {…}},
     "error": null}

    answered = keep_answered(Path("out.jsonl"))       # {"a"}; lines that failed leave the file, and are answered anew
    with open("out.jsonl", "ab") as file:
        Results(file).write(BatchRequest("b", url, body), Response(200, "req-1", b"{}"))

A line is written as a whole once its answer is complete, so the lines are in the order in which answers have ended.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from atom.errors import ConfigError
from atom.serve.batch.lines import BatchFault, BatchRequest
from atom.serve.ids import new_id

START = b'{"id":'  # of each line, also of one that was cut off


class Response(NamedTuple):
    """What a route has answered."""

    status: int
    request_id: str
    body: bytes  # JSON


class Results:
    """A file of results, and how many of each kind were written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.num_answered = self.num_failed = 0

    def write(self, request: BatchRequest, response: Response) -> None:
        """Write a route's answer, an error among them."""
        if response.status == 200:
            self.num_answered += 1
        else:
            self.num_failed += 1
        answer = {"status_code": response.status, "request_id": response.request_id}
        self._write(request.custom_id, {**answer, "body": msgspec.Raw(response.body)}, None)

    def refuse(self, fault: BatchFault) -> None:
        """Write that a line of the batch could not be sent."""
        self.num_failed += 1
        error = {"code": fault.code, "message": f"line {fault.line}: {fault.message}", "line": fault.line}
        self._write(fault.custom_id, None, error)

    def _write(self, custom_id: str | None, response: object, error: object) -> None:
        line = {"id": new_id("batch_req", "_"), "custom_id": custom_id, "response": response, "error": error}
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()


class _Status(msgspec.Struct):
    status_code: int


class _Result(msgspec.Struct):
    custom_id: str | None
    response: _Status | None
    error: msgspec.Raw

    @property
    def is_answer(self) -> bool:
        return self.response is not None and self.response.status_code == 200


def keep_answered(path: Path) -> set[str]:
    """The custom_ids that a file of results has an answer to. All its other lines leave it, one that was cut off too.

    ConfigError, and nothing is changed, if a line is no result.
    """
    answered: set[str] = set()
    if not path.is_file():  # a device, or a pipe, keeps nothing
        return answered
    part, is_whole = path.with_name(f"{path.name}.part"), True
    with path.open("rb") as file, part.open("wb") as kept:
        for number, line in enumerate(file, 1):
            is_last = not line.endswith(b"\n")
            try:
                result = msgspec.json.decode(line, type=_Result)
            except (msgspec.DecodeError, UnicodeDecodeError):
                if not is_last or line[: len(START)] != START[: len(line)]:
                    part.unlink()
                    raise ConfigError(f"{path}: line {number} is no result of a batch; name another file") from None
                is_whole = False
                continue
            if result.is_answer and result.custom_id is not None and result.custom_id not in answered:
                answered.add(result.custom_id)
                kept.write(line + b"\n" * is_last)
            else:
                is_whole = False
            is_whole = is_whole and not is_last
    if is_whole:
        part.unlink()
    else:
        shutil.copymode(path, part)
        part.replace(path.resolve())
    return answered
