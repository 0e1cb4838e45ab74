"""Run a tokenizer in a child process with limits of time and memory.

    encoder = EncoderProcess(backend.to_str)         # starts with the first text
    encoder.encode("Hello", True)                    # RequestError if it takes more than SECONDS or MEMORY

The process ends when its time is up, and with the one that started it. The next text starts another.
"""

from __future__ import annotations

import resource
import signal
import struct
import subprocess
import sys
import threading
import weakref
from array import array
from collections.abc import Callable
from typing import IO, Any

import tokenizers

from atom.errors import RequestError
from atom.process.child_process import end, start_python

CODE = "from atom.checkpoint.encoder import work; work()"
SECONDS = 8.0  # for a text: less than a request waits
START_SECONDS = 60.0  # to read the tokenizer
MEMORY = 4 << 30  # bytes of address space
DEFINITION = struct.Struct("<?Q")  # whether special tokens are split, bytes of the tokenizer
REQUEST, ANSWER = struct.Struct("<?Q"), struct.Struct("<q")  # special tokens, bytes of text | number of ids or -1


class EncoderProcess:
    """definition: returns the text of the tokenizer.json, which does not say whether special tokens are split."""

    def __init__(self, definition: Callable[[], str], *, split_special_tokens: bool = False) -> None:
        self._definition, self._split_special_tokens = definition, split_special_tokens
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], Any] | None = None

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        data = text.encode()
        with self._lock:
            try:
                ids = self._ask(REQUEST.pack(add_special_tokens, len(data)) + data)
            except (EOFError, OSError):
                ids, self._process = None, None
                if self._end is not None:
                    self._end()
        if ids is None:
            limits = f"more than {SECONDS:g} s or {MEMORY >> 30} GiB, or fails"
            raise RequestError(
                f"the checkpoint's tokenizer takes {limits}, for these {len(text)} characters; shorten them"
            )
        return ids

    def _ask(self, request: bytes) -> list[int] | None:
        if self._process is None:
            self._process = start(self._definition(), self._split_special_tokens)
            self._end = weakref.finalize(self, end, self._process)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(request)
        self._process.stdin.flush()
        (count,) = ANSWER.unpack(read_exactly(self._process.stdout, ANSWER.size))
        if count < 0:
            return None
        ids = array("I")
        ids.frombytes(read_exactly(self._process.stdout, count * ids.itemsize))
        return ids.tolist()


def start(definition: str, split_special_tokens: bool) -> subprocess.Popen[bytes]:
    """Start a process and send it the tokenizer."""
    # the Rust library prints its panics to stderr
    process = start_python(CODE, stderr=subprocess.DEVNULL, TOKENIZERS_PARALLELISM="false")
    assert process.stdin is not None
    data = definition.encode()
    try:
        process.stdin.write(DEFINITION.pack(split_special_tokens, len(data)) + data)
        process.stdin.flush()
    except OSError:
        end(process)
        raise
    return process


def work() -> None:
    """The main function of the process: read a tokenizer, then answer texts until stdin ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    signal.setitimer(signal.ITIMER_REAL, START_SECONDS)  # its signal ends the process in any state
    try:
        split_special_tokens, size = DEFINITION.unpack(read_exactly(source, DEFINITION.size))
        backend = tokenizers.Tokenizer.from_buffer(read_exactly(source, size))
        backend.encode_special_tokens = split_special_tokens
        while True:
            signal.setitimer(signal.ITIMER_REAL, 0)
            add_special_tokens, size = REQUEST.unpack(read_exactly(source, REQUEST.size))
            text = read_exactly(source, size).decode()
            signal.setitimer(signal.ITIMER_REAL, SECONDS)
            try:
                ids = array("I", backend.encode(text, add_special_tokens=add_special_tokens).ids)
                sink.write(ANSWER.pack(len(ids)) + ids.tobytes())
            except BaseException:  # a panic of the Rust library is no Exception
                sink.write(ANSWER.pack(-1))
            sink.flush()
    except (EOFError, OSError):
        return


def read_exactly(stream: IO[bytes], size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data
