"""Join and supervise ranks that torchrun or Ray starts, on several hosts.

In the process that drives:

    placement = Placement("tcp://10.0.0.1:7000", key, num_ranks=4)
    channels = placement.join()                          # RemoteRank of 1, 2, 3
    ranks = Ranks(channels, openings)                    # each channel has the `hello` of its rank

In the process that torchrun or Ray starts for another rank:

    code = supervise(find_driver("tcp://10.0.0.1:7000", key, rank=3), hello=b"…")

`supervise` starts the rank as a child and relays its messages. It kills the rank, even a stopped one, when the
connection to the driver ends, and reports when the rank stops, continues or hangs. torchrun and Ray only start
processes: docs/parallel.md says why neither watches ranks or carries their messages.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import socket
import threading
import time
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
    LifeChange,
    Message,
    RankProcess,
    SilenceLimit,
    ToRank,
)
from atom.runtime.ranks.secure_connection import HANDSHAKE_SECONDS, Connection, WrongKeyError, accept, connect, listen

DRIVER_SECONDS = 300.0  # for the driver to listen, which it does before it downloads and compiles
JOIN_SECONDS = 300.0  # for all ranks to join, once the model is compiled
RETRY_SECONDS = 0.5
MAX_STRANGERS = 64  # concurrent handshakes, besides those of ranks
MAX_LINES = 20  # on stderr, about refused connections


class Refused(msgspec.Struct, tag=True):
    """The driver does not accept a rank that has the key."""

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
        with contextlib.suppress(OSError):  # the receiving thread gets the error too
            self._connection.limit_loss(seconds)
            self.send(msgspec.msgpack.encode(SilenceLimit(seconds)))

    def look(self) -> None:
        """None: its supervisor looks."""

    def refuse(self, reason: str) -> None:
        """Send the reason, and end the rank."""
        with contextlib.suppress(OSError):
            self.send(msgspec.msgpack.encode(Refused(reason)))
        self.close()

    def end(self) -> None:
        self._connection.end()

    def close(self) -> None:
        self.end()
        self._connection.close()


class Placement:
    """The ranks that torchrun or Ray starts for this process, which drives.

    Listens at the driver's address until all have joined. Strangers are dropped, and logged.

    host: of this process, for other ranks
    num_threads: of each rank; None: as its environment says
    """

    num_threads: int | None = None

    def __init__(self, address: str, key: bytes, num_ranks: int) -> None:
        """ConfigError if it cannot listen."""
        self._key, self._ranks = key, range(1, num_ranks)  # those that may join
        self._joined: dict[int, RemoteRank] = {}
        self._changed = threading.Condition()
        self._slots = threading.BoundedSemaphore(MAX_STRANGERS + num_ranks)
        self._lines: set[str] = set()
        self._socket = listen(address)
        self.is_one_host = address.startswith(UNIX)
        self.host, self.address = LOOPBACK, address
        if not self.is_one_host:
            self.host, port = self._socket.getsockname()[:2]
            self.address = f"tcp://{bracketed(self.host)}:{port}"
        threading.Thread(target=self._accept, name="accept", daemon=True).start()
        say(f"waits for {num_ranks - 1} other ranks at {self.address}")

    def join(self, seconds: float = JOIN_SECONDS) -> list[RemoteRank]:
        """Wait for all ranks; their channels, in order. EngineDeadError after this many seconds."""
        end = time.monotonic() + seconds
        with self._changed:
            while sum(not each.has_ended for each in self._joined.values()) < len(self._ranks):
                self._changed.wait(RETRY_SECONDS)
                self.check()
                if time.monotonic() > end:
                    missing = ", ".join(str(rank) for rank in self._ranks if rank not in self._joined)
                    raise EngineDeadError(f"rank {missing} did not join within {seconds:.0f} s")
            joined = [self._joined[rank] for rank in self._ranks]
        self._stop_listening()
        return joined

    def check(self) -> None:
        """Raise why a rank cannot join, if that is known."""

    def close(self) -> None:
        """Stop listening, and end the ranks that have joined."""
        self._stop_listening()
        for each in self._joined.values():
            each.close()

    def _stop_listening(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._socket.close()
        with self._changed:
            self._ranks = range(0)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
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
        """Print once per host and reason that a connection was refused."""
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


def await_ranks(parallel: ParallelConfig, num_ranks: int) -> Placement:
    """Wait for ranks that torchrun starts."""
    assert parallel.address is not None, "config.load resolves it"
    return Placement(parallel.address, key_of(parallel), num_ranks)


def key_of(parallel: ParallelConfig) -> bytes:
    """The key of all ranks; empty on one host, where the kernel reports each process's user."""
    return read_key(parallel.key_file) if parallel.key_file is not None else b""


def serve_rank(config: Config) -> int:
    """Be the rank that torchrun has started this process as, until the driver ends; the exit code."""
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
    """The configuration without API keys, and without overrides, which may contain them: for a network."""
    http = replace(config.serve.http, api_keys=None)
    return replace(config, overrides=[], serve=replace(config.serve, http=http))


def supervise(connection: Connection, hello: bytes, code: str = RANK, device: str | None = None) -> int:
    """Run a rank as a child of this process until the driver ends.

    hello: the first frame for the driver
    code: Python that the rank runs, which has a `link`
    device: the GPU that it sees; None: those of this process

    The exit code: 1 if the rank ended first. ConfigError if the driver refuses this rank, EngineDeadError if the
    connection to the driver is lost.
    """
    connection.limit_silence(None)
    connection.limit_loss(HANG_SECONDS)
    process, messages = RankProcess(code, device), queue.SimpleQueue[bytes]()
    decoder, has_failed = msgspec.msgpack.Decoder(FromDriver), threading.Event()
    to_rank = threading.Thread(target=_relay_to_rank, args=(process, messages), daemon=True)  # may block: it is stopped
    to_driver = threading.Thread(target=_relay_to_driver, args=(process, connection, has_failed), daemon=True)
    ended = threading.Event()
    watching = threading.Thread(target=_report_life, args=(process, connection, ended), daemon=True)
    try:
        connection.send(hello)
        to_rank.start()
        while (frame := connection.receive()) is not None:
            match decoder.decode(frame):
                case SilenceLimit(seconds):
                    connection.limit_loss(seconds)
                    process.limit_silence(seconds)
                case Refused(reason):
                    raise ConfigError(f"the driver refuses this rank: {reason}")
                case Message():
                    if to_driver.ident is None:  # not earlier: the driver reads only to see whether this process left
                        to_driver.start()
                        watching.start()
                    messages.put(frame)
    except (OSError, msgspec.DecodeError) as error:
        if not has_failed.is_set():
            raise EngineDeadError(f"the driver is lost: {error}") from None
    finally:
        is_failed = has_failed.is_set()
        ended.set()
        connection.close()
        process.close()
        messages.put(b"")  # ends the thread that relays them
    return int(is_failed)


def find_driver(
    address: str, key: bytes, rank: int, host: str | None = None, seconds: float = DRIVER_SECONDS
) -> Connection:
    """Connect to the driver, which may still be starting.

    host: this host's address to connect from; None: any
    seconds: to keep trying

    ConfigError for another key, EngineDeadError if no driver listens within the time.
    """
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
            if not has_said and not isinstance(error, ConnectionRefusedError):  # the driver does not listen yet
                say(f"rank {rank} cannot reach {address} yet: {error}")
                has_said = True
        time.sleep(RETRY_SECONDS)


def _relay_to_rank(process: RankProcess, messages: queue.SimpleQueue[bytes]) -> None:
    with contextlib.suppress(OSError, ValueError):  # it has ended, and its pipe is closed
        while True:
            process.send(messages.get())


def _relay_to_driver(process: RankProcess, connection: Connection, has_failed: threading.Event) -> None:
    with contextlib.suppress(OSError, ValueError):
        while (frame := process.receive()) is not None:
            connection.send(frame)
        has_failed.set()
    connection.end()


def _report_life(process: RankProcess, connection: Connection, ended: threading.Event) -> None:
    """Report to the driver when the rank stops, continues or hangs."""
    before = Life.RUNNING
    with contextlib.suppress(OSError):
        while not ended.wait(LOOK_SECONDS):
            if (life := process.look()) is not before:
                before = life
                connection.send(msgspec.msgpack.encode(LifeChange(life)))
