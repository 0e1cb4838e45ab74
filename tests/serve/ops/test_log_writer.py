"""Lines come out in order, or are counted, and whoever writes them waits for nobody."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from atom.serve.ops.log_writer import LogWriter

PIPE = 4096  # bytes that it takes while nobody reads


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Its ends to read and to write."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE)
    yield reader, writer
    os.close(reader)


def describe(count: int) -> str:
    return f"{count} lines were dropped"


def read_all(reader: int) -> list[str]:
    with open(reader, closefd=False) as file:
        return file.read().splitlines()


@pytest.mark.parametrize("is_blocking", [True, False])
def test_what_is_read_comes_out_whole_and_in_order(pipe: tuple[int, int], is_blocking: bool):
    reader, end = pipe
    os.set_blocking(end, is_blocking)
    writer, lines = LogWriter(end, describe, 1 << 24), [f"{number} {'x' * (number % 200)}" for number in range(5000)]
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read_all, reader)
        for line in lines:
            writer.put(line)
        writer.flush(60)
        os.close(end)
        assert reading.result(60) == lines
    assert writer.num_dropped == 0


def test_what_has_no_room_is_counted_where_it_would_have_been(pipe: tuple[int, int]):
    reader, end = pipe
    writer, line = LogWriter(end, describe, 10_000), "x" * 99  # 100 wait, and 40 may be in the pipe already
    for _ in range(500):
        writer.put(line)
    dropped = writer.num_dropped
    assert 300 < dropped <= 400
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read_all, reader)
        writer.flush(60)
        writer.put("later")
        writer.flush(60)
        os.close(end)
        *lines, last = reading.result(60)
    counts = [each for each in lines if each != line]  # several if the thread that writes makes room meanwhile
    assert last == "later" and lines[:100] == [line] * 100 and lines.count(line) == 500 - dropped
    assert sum(int(each.removesuffix(" lines were dropped")) for each in counts) == dropped


def test_to_wait_for_a_reader_has_an_end(pipe: tuple[int, int]):
    _, end = pipe
    writer = LogWriter(end, describe, 100_000)
    writer.put("x" * 2 * PIPE)
    writer.flush(0.1)  # comes back


def test_a_line_that_cannot_be_written_is_lost_and_no_other():
    full = os.open("/dev/full", os.O_WRONLY)
    writer = LogWriter(full, describe, 100)
    for _ in range(3):
        writer.put("x" * 60)
        writer.flush(60)
    assert writer.num_dropped == 0
    os.close(full)
