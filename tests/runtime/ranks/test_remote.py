"""Ranks that join over a network: strangers, ranks that are taken, ranks that die or stop."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from atom.config.parallel import split_address
from atom.errors import ConfigError, EngineDeadError
from atom.runtime.ranks import remote as remote_ranks
from atom.runtime.ranks import secure_connection
from atom.runtime.ranks.links import Ranks
from atom.runtime.ranks.remote import Placement, find_driver, supervise
from atom.runtime.ranks.secure_connection import Connection

KEY = b"0123456789abcdef"
SECONDS = 120.0  # that a test waits for anything, also on a busy machine
ECHO = "\nwhile True: link.answer(link.receive())"


class Joining:
    """A driver that listens, and ranks that join it as threads."""

    def __init__(self, num_ranks: int) -> None:
        self.placement = Placement("tcp://127.0.0.1:0", KEY, num_ranks)
        self.address = self.placement.address
        self.connections: list[Connection] = []

    def join(self, rank: int, hello: bytes = b"hello") -> Connection:
        connection = find_driver(self.address, KEY, rank)
        self.connections.append(connection)
        connection.send(hello)
        return connection

    def stranger(self, said: bytes = b"") -> socket.socket:
        connected = socket.create_connection(split_address(self.address))
        connected.sendall(said)
        return connected


@pytest.fixture
def joining() -> Iterator[Callable[[int], Joining]]:
    made: list[Joining] = []

    def make(num_ranks: int) -> Joining:
        made.append(Joining(num_ranks))
        return made[-1]

    yield make
    for each in made:
        each.placement.close()
        for connection in each.connections:
            connection.close()


def wait_until(condition: Callable[[], object], seconds: float = SECONDS) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def test_strangers_neither_delay_nor_harm_ranks_and_are_logged_once_each(
    joining: Callable[[int], Joining], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(secure_connection, "HANDSHAKE_SECONDS", 10_000)
    driver = joining(4)
    said = [b"", b"GET / HTTP/1.1\r\n\r\n" + bytes(99), os.urandom(99), b"\xff" * 99]
    strangers = [driver.stranger(text) for text in said * 10]  # those of the first kind stay and say nothing
    with ThreadPoolExecutor(3) as pool:
        joined = list(pool.map(driver.join, (3, 1, 2)))
    channels = driver.placement.join(SECONDS)
    for stranger in strangers:
        stranger.close()
    with closing(Ranks(channels, [b"to 1", b"to 2", b"to 3"])):
        for rank, connection in zip((3, 1, 2), joined, strict=True):
            frame = connection.receive()
            assert frame is not None and f"to {rank}".encode() in frame
    with pytest.raises(ConnectionRefusedError):
        driver.stranger()
    reasons = {
        "a connection from 127.0.0.1 is refused: it said nothing",
        "a connection from 127.0.0.1 is refused: it is no rank",
    }
    lines: list[str] = []

    def are_said() -> bool:
        lines.extend(
            line.removeprefix("atom-run: ") for line in capfd.readouterr().err.splitlines() if "refused" in line
        )
        return reasons <= set(lines)

    wait_until(are_said)
    assert sorted(lines) == sorted(reasons)


def test_a_wrong_key_is_reported_on_both_sides(joining: Callable[[int], Joining], capfd: Any):
    driver = joining(2)
    with pytest.raises(ConfigError, match=r"has another key; parallel\.key_file must hold the same on each host"):
        find_driver(driver.address, KEY[::-1], 1)
    with pytest.raises(ConfigError, match="has another key"):
        find_driver(driver.address, b"", 1)
    driver.join(1)
    assert len(driver.placement.join(SECONDS)) == 1
    assert capfd.readouterr().err.count("a connection from 127.0.0.1 is refused: it has another key") == 1


@pytest.mark.parametrize(
    ("rank", "reason"), [(1, "another process is rank 1"), (0, "there is no rank 0"), (7, "there is no rank 7")]
)
def test_a_rank_that_is_taken_or_does_not_exist_is_refused_with_the_reason(
    rank: int, reason: str, joining: Callable[[int], Joining]
):
    driver = joining(3)
    first = driver.join(1)
    wait_until(lambda: driver.placement._joined)
    with pytest.raises(ConfigError, match=reason):
        supervise(find_driver(driver.address, KEY, rank), b"hello", ECHO)
    driver.join(2)
    channels = driver.placement.join(SECONDS)
    channels[0].send(b"still there")
    assert first.receive() == b"still there"


def test_a_rank_that_has_left_may_join_again(joining: Callable[[int], Joining]):
    driver = joining(3)
    driver.join(1, b"before").close()
    wait_until(lambda: driver.placement._joined)
    driver.join(1, b"after")
    driver.join(2)
    assert [channel.hello for channel in driver.placement.join(SECONDS)] == [b"after", b"hello"]


def test_ranks_that_do_not_join_are_named(joining: Callable[[int], Joining]):
    driver = joining(4)
    driver.join(2)
    with pytest.raises(EngineDeadError, match="rank 1, 3 did not join within 1 s"):
        driver.placement.join(0.6)


def test_a_rank_waits_for_a_driver_that_does_not_listen_yet(joining: Callable[[int], Joining]):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(EngineDeadError, match=f"rank 1 finds no driver at {address}: .*refused"):
        find_driver(address, KEY, 1, seconds=0.1)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(find_driver, address, KEY, 1)
        time.sleep(0.2)
        placement = Placement(address, KEY, 2)
        with closing(placement), closing(found.result(SECONDS)) as connection:
            connection.send(b"hello")
            assert placement.join(SECONDS)[0].hello == b"hello"


def test_an_unknown_host_name_is_reported_at_once_and_with_the_setting_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capfd: Any
):
    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(secure_connection.socket, "getaddrinfo", fail)
    monkeypatch.setattr(remote_ranks, "RETRY_SECONDS", 0.01)
    reason = r"rank 1 finds no driver at tcp://nowhere:7000: .*not known; set parallel\.address \(MASTER_ADDR\)"
    with pytest.raises(EngineDeadError, match=reason):
        find_driver("tcp://nowhere:7000", KEY, 1, seconds=0.1)
    said = re.findall("rank 1 cannot reach tcp://nowhere:7000 yet: .*not known$", capfd.readouterr().err, re.MULTILINE)
    assert len(said) == 1


def test_a_missing_driver_on_this_host_may_have_another_port():
    with pytest.raises(EngineDeadError, match=r"unix:atom-run-0-x-1: .*refused; set MASTER_PORT to that of rank 0"):
        find_driver("unix:atom-run-0-x-1", b"", 1, seconds=0)


SUPERVISE = """
import sys
from atom.runtime.ranks.remote import find_driver, supervise
sys.exit(supervise(find_driver(sys.argv[1], sys.argv[2].encode(), 1), b"hello", sys.argv[3]))
"""


class Supervised:
    """A rank whose supervisor is a process of its own."""

    def __init__(self, driver: Joining, code: str) -> None:
        command = [sys.executable, "-c", SUPERVISE, driver.address, KEY.decode(), code]
        self.supervisor = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.ranks = Ranks(driver.placement.join(SECONDS), [b"opening"])

    @property
    def rank(self) -> int:
        """The process of the rank."""
        path = Path(f"/proc/{self.supervisor.pid}/task/{self.supervisor.pid}/children")
        (pid,) = path.read_text().split()
        return int(pid)

    def close(self) -> None:
        self.ranks.close()
        self.supervisor.kill()
        self.supervisor.communicate()


@pytest.fixture
def supervised(joining: Callable[[int], Joining]) -> Iterator[Supervised]:
    with closing(Supervised(joining(2), ECHO)) as made:
        assert made.ranks.receive(1) == b"opening"
        yield made


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_rank_on_another_host_answers_and_ends_with_its_driver(supervised: Supervised):
    rank, body = supervised.rank, os.urandom(3_000_000)
    supervised.ranks.send([body])
    assert supervised.ranks.receive(1) == body
    supervised.ranks.close()
    assert supervised.supervisor.wait(SECONDS) == 0
    wait_until(lambda: is_gone(rank))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("which", ["rank", "supervisor"])
def test_a_rank_or_supervisor_that_dies_is_a_fault_at_once_and_leaves_nothing(which: str, supervised: Supervised):
    rank = supervised.rank
    os.kill(rank if which == "rank" else supervised.supervisor.pid, signal.SIGKILL)
    assert str(supervised.ranks.await_fault(SECONDS)).startswith("rank 1 has ended")
    assert supervised.supervisor.wait(SECONDS) != 0
    wait_until(lambda: is_gone(rank))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("which", ["rank", "supervisor", "both"])
def test_a_rank_or_supervisor_that_is_stopped_ends_nothing_and_goes_on(which: str, supervised: Supervised):
    ranks, rank, supervisor = supervised.ranks, supervised.rank, supervised.supervisor.pid
    ranks.limit_silence(2.0)
    stopped = {"rank": [rank], "supervisor": [supervisor], "both": [supervisor, rank]}[which]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    if which == "rank":
        wait_until(lambda: ranks.stopped == [1])
    ranks.send([b"meanwhile"])
    assert ranks.await_fault(3.5) is None
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    assert ranks.receive(1) == b"meanwhile"
    wait_until(lambda: not ranks.stopped)


def test_a_supervisor_reports_a_rank_that_hangs(joining: Callable[[int], Joining]):
    code = "import ctypes; link.answer(link.receive()); link.receive(); ctypes.PyDLL(None).sleep(1000)"
    with closing(Supervised(joining(2), code)) as hanging:
        assert hanging.ranks.receive(1) == b"opening"
        rank = hanging.rank
        hanging.ranks.limit_silence(1.0)
        hanging.ranks.send([b"hang"])
        reason = "rank 1 has neither answered nor used the CPU for 1 s"
        assert str(hanging.ranks.await_fault(SECONDS)) == reason
        assert hanging.supervisor.wait(SECONDS) == 0
        wait_until(lambda: is_gone(rank))


def test_an_error_of_a_rank_is_that_of_the_engine(joining: Callable[[int], Joining]):
    code = "from atom.errors import CapacityError; link.fail(CapacityError(link.receive().decode())); sys.exit(1)"
    with closing(Supervised(joining(2), code)) as failing:
        assert str(failing.ranks.await_fault(SECONDS)) == "rank 1: opening"
        assert failing.supervisor.wait(SECONDS) in (0, 1)


def test_a_host_that_is_gone_ends_the_connection_on_both_sides(
    joining: Callable[[int], Joining], monkeypatch: pytest.MonkeyPatch
):
    """Packets cannot be dropped here, so this checks the limits that the kernel is given."""
    driver, limits = joining(2), []
    monkeypatch.setattr(Connection, "limit_loss", lambda _, seconds: limits.append(seconds))
    with ThreadPoolExecutor(1) as pool:
        supervising = pool.submit(supervise, find_driver(driver.address, KEY, 1), b"hello", ECHO)
        with closing(Ranks(driver.placement.join(SECONDS), [b"opening"])) as ranks:
            assert ranks.receive(1) == b"opening"
            ranks.limit_silence(20.0)
            wait_until(lambda: limits == [60.0, 60.0, 20.0, 20.0])
        assert supervising.result(SECONDS) == 0


def test_a_rank_that_is_stopped_does_not_hold_up_its_supervisor(supervised: Supervised):
    rank = supervised.rank
    os.kill(rank, signal.SIGSTOP)
    for _ in range(20):
        supervised.ranks.send([b"x" * 100_000])  # more than its pipe holds
    supervised.ranks.close()
    assert supervised.supervisor.wait(SECONDS) is not None
    wait_until(lambda: is_gone(rank))


def test_no_more_connections_are_greeted_at_once_than_there_are_slots(
    joining: Callable[[int], Joining], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(remote_ranks, "MAX_STRANGERS", 3)
    monkeypatch.setattr(secure_connection, "HANDSHAKE_SECONDS", 0.5)
    driver = joining(2)
    strangers = [driver.stranger() for _ in range(30)]
    driver.join(1)  # again and again, until there is a slot
    assert len(driver.placement.join(SECONDS)) == 1
    for stranger in strangers:
        stranger.close()
