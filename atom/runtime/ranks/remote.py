"""Ranks that others have started, as torchrun on several hosts: their driver, their supervisors.

In the process that drives:

    listener = Listener("tcp://10.0.0.1:7000", key, num_ranks=4)
    channels = listener.join(seconds=300)                # RemoteRank of 1, 2, 3
    ranks = Ranks(channels, openings)                    # each channel has the `hello` of its rank

In that of a rank:

    code = supervise(find_driver("tcp://10.0.0.1:7000", key, rank=3), hello=b"…")

`supervise` starts the rank as a child and passes frames on. So a rank is killed where the connection to the driver
ends, even if it is stopped. A supervisor watches its rank and reports when that stops, continues or hangs.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import msgspec

from atom.config import Config
from atom.config.parallel import UNIX, bracketed, own_device, read_key
from atom.config.schema import ParallelConfig
from atom.errors import ConfigError, EngineDeadError
from atom.process.liveness import HANG_SECONDS, LOOK_SECONDS, Life
from atom.process.messages import say
from atom.runtime.ranks.links import (
    LOOPBACK,
    RANK,
    RANK_ON_GPU,
    Limit,
    RankProcess,
    Seen,
    Told,
    ToRank,
)  # fmt: skip
from atom.runtime.ranks.secure_connection import HANDSHAKE_SECONDS, Connection, WrongKeyError, accept, connect, listen

DRIVER_SECONDS = 300.0  # for the driver to listen, which it does before it downloads and compiles
JOIN_SECONDS = 300.0  # for all ranks to join, once the model is compiled
RETRY_SECONDS = 0.5
MAX_STRANGERS = 64  # connections at a time, beside those of ranks, that are greeted
MAX_LINES = 20  # on stderr, of refused connections


class Refused(msgspec.Struct, tag=True):
    """A driver does not take a rank that has the key."""

    reason: str


FromDriver = ToRank | Refused


class RemoteRank:
    """The channel to a rank whose supervisor has connected."""

    def __init__(self, connection: Connection, hello: bytes) -> None:
        """hello: the first frame of the rank"""
        self.hello, self.host = hello, connection.host
        self._connection = connection
        connection.limit_loss(HANG_SECONDS)

    @property
    def has_ended(self) -> bool:
        return self._connection.has_ended

    def send(self, body: bytes) -> None:
        self._connection.send(body)

    def receive(self) -> bytes | None:
        return self._connection.receive()

    def limit_silence(self, seconds: float) -> None:
        with contextlib.suppress(OSError):  # whoever receives is told too
            self._connection.limit_loss(seconds)
            self.send(msgspec.msgpack.encode(Limit(seconds)))

    def look(self) -> None:
        """Its supervisor does."""

    def refuse(self, reason: str) -> None:
        """End the rank with the reason."""
        with contextlib.suppress(OSError):
            self.send(msgspec.msgpack.encode(Refused(reason)))
        self.close()

    def end(self) -> None:
        self._connection.end()

    def close(self) -> None:
        self.end()
        self._connection.close()


class Listener:
    """Listens at the driver's address until all ranks have joined; strangers are dropped, and logged."""

    def __init__(self, address: str, key: bytes, num_ranks: int) -> None:
        """ConfigError where it cannot listen."""
        self._key, self._ranks = key, range(1, num_ranks)
        self._joined: dict[int, RemoteRank] = {}
        self._changed = threading.Condition()
        self._slots = threading.BoundedSemaphore(MAX_STRANGERS + num_ranks)
        self._lines: set[str] = set()
        self._socket = listen(address)
        self.place: tuple[str, int] = self._socket.getsockname()[:2]  # host and port, except of a unix socket
        threading.Thread(target=self._accept, name="accept", daemon=True).start()

    def join(self, seconds: float, check: Callable[[], object] = lambda: None) -> list[RemoteRank]:
        """Wait for all ranks; their channels, in order. EngineDeadError after so many seconds.

        check: is called now and then, and may raise
        """
        end = time.monotonic() + seconds
        with self._changed:
            while sum(not each.has_ended for each in self._joined.values()) < len(self._ranks):
                self._changed.wait(RETRY_SECONDS)
                check()
                if time.monotonic() > end:
                    missing = ", ".join(str(rank) for rank in self._ranks if rank not in self._joined)
                    raise EngineDeadError(f"rank {missing} did not join within {seconds:.0f} s")
            joined, self._joined = self._joined, {}
            ranks = self._ranks
        self.close()
        return [joined[rank] for rank in ranks]

    def close(self) -> None:
        """Stop listening, and end the ranks that `join` has not returned."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._socket.close()
        with self._changed:
            joined, self._joined = self._joined, {}
            self._ranks = range(0)
        for each in joined.values():
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it listens no more
            while True:
                connected, _ = self._socket.accept()
                if self._slots.acquire(blocking=False):
                    threading.Thread(target=self._greet, args=(connected,), name="greet", daemon=True).start()
                else:
                    connected.close()

    def _greet(self, connected: socket.socket) -> None:
        try:
            rank, connection = accept(connected, self._key)
            connection.limit_silence(HANDSHAKE_SECONDS)
            if (hello := connection.receive()) is None:
                raise OSError("it left again")
            connection.limit_silence(None)
            self._add(rank, RemoteRank(connection, hello))
        except OSError as error:
            self._log(connected, str(error))
            connected.close()
        finally:
            self._slots.release()

    def _add(self, rank: int, channel: RemoteRank) -> None:
        with self._changed:
            before, is_ours = self._joined.get(rank), rank in self._ranks
            if is_ours and (before is None or before.has_ended):
                self._joined[rank] = channel
                self._changed.notify_all()
                return
        reason = f"another process is rank {rank}" if is_ours else f"there is no rank {rank} to join"
        channel.refuse(reason)
        raise OSError(reason)

    def _log(self, connected: socket.socket, reason: str) -> None:
        """Say once that a host was refused for a reason."""
        try:
            other = connected.getpeername()
        except OSError:  # it has left
            other = ""
        line = f"a connection{f' from {other[0]}' if other else ''} is refused: {reason}"
        with self._changed:
            is_new = line not in self._lines and len(self._lines) < MAX_LINES
            if is_new:
                self._lines.add(line)
        if is_new:
            say(line)


class Placement:
    """The ranks that others start for this process, which drives."""

    num_threads: int | None = None  # of each; None: as the environment of each says

    def __init__(self, address: str, key: bytes, num_ranks: int) -> None:
        """ConfigError where it cannot listen."""
        self._joined: list[RemoteRank] = []
        self.is_one_host = address.startswith(UNIX)
        self._listener = Listener(address, key, num_ranks)
        self.host, self.address = LOOPBACK, address
        if not self.is_one_host:
            self.host, port = self._listener.place
            self.address = f"tcp://{bracketed(self.host)}:{port}"
        say(f"waits for {num_ranks - 1} other ranks at {self.address}")

    def join(self) -> list[RemoteRank]:
        """Wait for all ranks; their channels, in order."""
        self._joined = self._listener.join(JOIN_SECONDS, self.check)
        return self._joined

    def check(self) -> None:
        """Raise why a rank cannot come, where that is known."""

    def close(self) -> None:
        """Stop listening, and end the ranks that have joined."""
        self._listener.close()
        for channel in self._joined:
            channel.close()


def await_ranks(parallel: ParallelConfig, num_ranks: int) -> Placement:
    """Wait for ranks that torchrun starts."""
    assert parallel.address is not None, "config.load resolves it"
    return Placement(parallel.address, key_of(parallel), num_ranks)


def key_of(parallel: ParallelConfig) -> bytes:
    """The key of all ranks; none on one host, where the kernel says whose a process is."""
    return read_key(parallel.key_file) if parallel.key_file is not None else b""


def serve_rank(config: Config) -> int:
    """Be the rank that torchrun has made this process, until the driver ends; the exit code."""
    parallel = config.parallel
    assert parallel.address is not None, "config.load resolves it"
    connection = find_driver(parallel.address, key_of(parallel), config.rank, parallel.host)
    handled = {}
    with contextlib.suppress(ValueError):  # not the main thread
        for number in (signal.SIGINT, signal.SIGTERM):  # of a terminal or a launcher; the driver may drain first
            handled[number] = signal.signal(number, signal.SIG_IGN)
    try:
        hello = msgspec.msgpack.encode(without_secrets(config))
        if config.device == "cpu":
            return supervise(connection, hello)
        return supervise(connection, hello, RANK_ON_GPU, own_device(parallel, config.advanced.torchrun))
    finally:
        for number, handler in handled.items():
            signal.signal(number, handler)


def without_secrets(config: Config) -> Config:
    """A configuration that may cross a network: without API keys, and the overrides that may hold them."""
    http = replace(config.serve.http, api_keys=None)
    return replace(config, overrides=[], serve=replace(config.serve, http=http))


def supervise(connection: Connection, hello: bytes, code: str = RANK, device: str | None = None) -> int:
    """Run a rank as a child of this process until the driver ends; the exit code: 1 where the rank ended first.

    device: the GPU that it sees
    ConfigError where the driver refuses this rank, EngineDeadError where its host is gone.
    """
    connection.limit_silence(None)
    connection.limit_loss(HANG_SECONDS)
    process, frames = RankProcess(code, device), queue.SimpleQueue[bytes]()
    decoder, has_failed = msgspec.msgpack.Decoder(FromDriver), threading.Event()
    sending = threading.Thread(target=_tell, args=(process, frames), daemon=True)  # a stopped rank reads nothing
    answering = threading.Thread(target=_answer, args=(process, connection, has_failed), daemon=True)
    ended = threading.Event()
    watching = threading.Thread(target=_watch, args=(process, connection, ended), daemon=True)
    try:
        connection.send(hello)
        sending.start()
        while (frame := connection.receive()) is not None:
            match decoder.decode(frame):
                case Limit(seconds):
                    connection.limit_loss(seconds)
                    process.limit_silence(seconds)
                case Refused(reason):
                    raise ConfigError(f"the driver refuses this rank: {reason}")
                case Told():
                    if answering.ident is None:  # not before, so that the driver can see whether this process has left
                        answering.start()
                        watching.start()
                    frames.put(frame)
    except (OSError, msgspec.DecodeError) as error:
        if not has_failed.is_set():
            raise EngineDeadError(f"the driver is lost: {error}") from None
    finally:
        is_failed = has_failed.is_set()
        ended.set()
        connection.close()
        process.close()
        frames.put(b"")  # ends the thread that tells
    return int(is_failed)


def find_driver(
    address: str, key: bytes, rank: int, host: str | None = None, seconds: float = DRIVER_SECONDS
) -> Connection:
    """Connect to the driver, which may still be starting. ConfigError for a wrong key, EngineDeadError without one."""
    say(f"rank {rank} of the driver at {address}")
    end, has_said = time.monotonic() + seconds, False
    while True:
        try:
            return connect(address, key, rank, host)
        except WrongKeyError as error:
            raise ConfigError(f"{error}; parallel.key_file must hold the same on each host") from None
        except OSError as error:
            if time.monotonic() > end:
                fix = "MASTER_PORT to that of rank 0" if address.startswith(UNIX) else "parallel.address (MASTER_ADDR)"
                raise EngineDeadError(f"rank {rank} finds no driver at {address}: {error}; set {fix}") from None
            if not has_said and not isinstance(error, ConnectionRefusedError):  # of a driver that is yet to listen
                say(f"rank {rank} cannot reach {address} yet: {error}")
                has_said = True
        time.sleep(RETRY_SECONDS)


def _tell(process: RankProcess, frames: queue.SimpleQueue[bytes]) -> None:
    with contextlib.suppress(OSError, ValueError):  # it has ended, and its pipe is closed
        while True:
            process.send(frames.get())


def _answer(process: RankProcess, connection: Connection, has_failed: threading.Event) -> None:
    with contextlib.suppress(OSError, ValueError):
        while (frame := process.receive()) is not None:
            connection.send(frame)
        has_failed.set()
    connection.end()


def _watch(process: RankProcess, connection: Connection, ended: threading.Event) -> None:
    """Report to the driver when the rank stops, continues or hangs."""
    before = Life.RUNNING
    with contextlib.suppress(OSError):
        while not ended.wait(LOOK_SECONDS):
            if (life := process.look()) is not before:
                before = life
                connection.send(msgspec.msgpack.encode(Seen(life)))
