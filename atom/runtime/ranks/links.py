"""Channels between the driver and its ranks, which detect when either ends.

The driver takes each step itself, and sends it to the others first.

    ranks = Ranks([RankProcess(RANK)], openings)       # a channel and an opening for each of the others
    ranks.wait()                                       # for each to call `done`
    ranks.send([encode(step)])                         # before the driver takes it itself
    ranks.close()

In the process of a rank:

    def main(link: RankLink) -> None:
        opening = link.receive()             # its first message
        link.done()
        while True:
            decode(link.receive())

A rank is a child of the driver, and its stdin and stdout carry the messages; or it is a child of a supervisor on
another host, which relays messages to and from an authenticated connection (`remote`). Frames are msgpack: the length
in 4 bytes, little-endian, and the body.

If a rank ends or hangs (`atom.process.liveness`), all are ended, so that no collective waits forever. One that is
stopped ends nothing. A rank sends heartbeats to the process that started it, which watches it. A rank whose driver has
ended ends at once.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO, Any, Protocol

import msgspec

from atom.errors import AtomError, EngineDeadError
from atom.process.child_process import start_python
from atom.process.liveness import BEAT_SECONDS, HANG_SECONDS, LOOK_SECONDS, Life, Watch, read_vitals

HEAD = struct.Struct("<I")
LOOPBACK = "127.0.0.1"
FAULT_SECONDS = 1.0  # for the reading thread to learn why a rank accepts no messages
RANK = "from atom.assemble.rank_process import main; main(link)"  # the code of a rank's process
RANK_ON_GPU = f"from atom.devices import open_early; open_early(); {RANK}"
# in its parent's folder, wherever it imports from; sends heartbeats while the rest is imported
LINK = "import os, sys; sys.path.insert(0, os.getcwd()); os.chdir({folder!r}); "
LINK += "from atom.runtime.ranks.links import RankLink; link = RankLink(); "


class Heartbeat(msgspec.Struct, tag=True):
    pass


class Done(msgspec.Struct, tag=True):
    """A rank has done what it was last asked to, or nothing of it."""

    refused: str = ""  # why nothing


class Answer(msgspec.Struct, tag=True):
    """An answer to the driver, in the order of its messages."""

    body: bytes


class Failed(msgspec.Struct, tag=True):
    """A rank has failed; its process ends."""

    kind: str  # the class of the error
    error: str


class Message(msgspec.Struct, tag=True):
    """From the driver to a rank."""

    body: bytes


class SilenceLimit(msgspec.Struct, tag=True):
    """From the driver to the supervisor of a rank."""

    seconds: float  # without a sign of life, after which the rank is hung


class LifeChange(msgspec.Struct, tag=True):
    """From a supervisor: its rank has stopped, continued, hung or ended."""

    life: Life


FromRank = Heartbeat | Done | Answer | Failed | LifeChange
ToRank = Message | SilenceLimit


def write_frame(file: IO[bytes], body: bytes) -> None:
    file.write(HEAD.pack(len(body)) + body)
    file.flush()


def read_frame(file: IO[bytes]) -> bytes | None:
    """The next frame's body; None at the end of the file, even if that is within a frame."""
    head = file.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    (size,) = HEAD.unpack(head)
    body = file.read(size)
    return body if len(body) == size else None


class Channel(Protocol):
    """Carries frames to a rank and back. Several threads may send; one receives."""

    def send(self, body: bytes) -> None:
        """OSError if the rank has ended."""

    def limit_silence(self, seconds: float) -> None:
        """Set the seconds without a sign of life after which the rank counts as hung."""

    def look(self) -> Life | None:
        """The state of the rank's process, to be polled; None if a supervisor polls it, and reports changes."""

    def receive(self) -> bytes | None:
        """Wait for the next frame; None, or OSError with a reason, if no more will come."""

    def end(self) -> None:
        """End the rank, without waiting."""

    def close(self) -> None:
        """End the rank, and wait until its resources on this host are released."""


class RankProcess:
    """A rank as a child of this process."""

    def __init__(self, code: str, device: str | None = None) -> None:
        """
        code: Python that it runs, which has a `link`
        device: the GPU that it sees; None: those of this process
        """
        self._watch = Watch()
        code = LINK.format(folder=os.getcwd()) + code
        seen: dict[str, Any] = {} if device is None else {"CUDA_VISIBLE_DEVICES": device}
        self._process = start_python(code, stderr=2, has_own_session=False, **seen)
        assert self._process.stdin is not None and self._process.stdout is not None, "start_python opens them"
        self._in, self._out = self._process.stdin, self._process.stdout
        self._sending = threading.Lock()

    def send(self, body: bytes) -> None:
        with self._sending:
            write_frame(self._in, body)

    def limit_silence(self, seconds: float) -> None:
        self._watch.seconds = seconds

    def look(self) -> Life:
        return self._watch.look(time.monotonic(), read_vitals(self._process.pid))

    def receive(self) -> bytes | None:
        frame = read_frame(self._out)
        self._watch.hear()
        return frame

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self.end()
        self._process.wait()
        for pipe in (self._in, self._out):
            with contextlib.suppress(OSError):
                pipe.close()


class Ranks:
    """The other ranks, in the driver. One thread sends and waits."""

    def __init__(self, channels: Sequence[Channel], openings: Sequence[bytes]) -> None:
        """openings: the first message of each rank"""
        self.at_close: list[Callable[[], object]] = []  # called then, the last one first
        self._channels = channels
        self._done: queue.SimpleQueue[Done | None] = queue.SimpleQueue()  # None: a rank has ended
        self._answers: list[queue.SimpleQueue[bytes | None]] = [queue.SimpleQueue() for _ in openings]  # None too
        self._fault: AtomError | None = None
        self._watchers: list[Callable[[AtomError], object]] = []
        self._lives = [Life.RUNNING] * len(channels)
        self._hang_seconds = HANG_SECONDS
        self._lock = threading.Lock()  # of the fault and the watchers
        self._is_closing = threading.Event()
        try:
            for rank, (channel, opening) in enumerate(zip(channels, openings, strict=True), 1):
                threading.Thread(target=self._read, args=(rank, channel), name=f"rank {rank}", daemon=True).start()
                self._send(channel, opening)
            threading.Thread(target=self._look, name="ranks", daemon=True).start()
        except BaseException:
            self.close()
            raise

    def limit_silence(self, seconds: float) -> None:
        """Set the seconds without a sign of life after which a rank counts as hung."""
        self._hang_seconds = seconds
        for channel in self._channels:
            channel.limit_silence(seconds)

    @property
    def stopped(self) -> list[int]:
        """The ranks whose processes are stopped."""
        return [rank for rank, life in enumerate(self._lives, 1) if life is Life.STOPPED]

    def await_fault(self, seconds: float) -> AtomError | None:
        """Why the ranks cannot go on, if that is known within this time."""
        end = time.monotonic() + seconds
        while self._fault is None and time.monotonic() < end:
            time.sleep(0.01)
        return self._fault

    def watch(self, callback: Callable[[AtomError], object]) -> None:
        """Have a thread call this with the reason when a rank fails."""
        with self._lock:
            self._watchers.append(callback)
            fault = self._fault
        if fault is not None:
            callback(fault)

    def send(self, bodies: Sequence[bytes]) -> None:
        """Send each rank its message. Raises the error of a rank that has failed."""
        self.check()
        for channel, body in zip(self._channels, bodies, strict=True):
            self._send(channel, body)

    def receive(self, rank: int) -> bytes:
        """Wait for a rank's next answer. Raises the error of a rank that has failed."""
        answer = self._answers[rank - 1].get()
        if answer is None:
            self._answers[rank - 1].put(None)
            self.check()
        assert answer is not None, "there is a fault"
        return answer

    def wait(self) -> list[str]:
        """Wait until all ranks have done what they were asked to; the reasons of those that refuse.

        Raises the error of a rank that has failed.
        """
        refused = []
        for _ in self._channels:
            done = self._done.get()
            if done is None:
                self._done.put(None)
                self.check()
            elif done.refused:
                refused.append(done.refused)
        return refused

    def exchange(self, own: bytes) -> list[bytes]:
        """All-gather bytes: those of each rank, in order. All ranks call it, the others by their `RankLink`."""
        every = [own, *(self.receive(rank) for rank in range(1, len(self._channels) + 1))]
        self.send([msgspec.msgpack.encode(every)] * len(self._channels))
        return every

    def fail(self, error: AtomError) -> None:
        """End all ranks for this reason, unless they have ended for another one."""
        with self._lock:
            if self._fault is not None or self._is_closing.is_set():
                return
            self._fault, watchers = error, [*self._watchers]
        for channel in self._channels:
            channel.end()
        self._wake()
        for callback in watchers:
            callback(error)

    def close(self) -> None:
        """End all ranks, then call `at_close`. Threads that wait for a rank get an EngineDeadError."""
        if self._is_closing.is_set():
            return
        self._is_closing.set()
        with self._lock:
            self._fault = self._fault or EngineDeadError("the ranks are closed")
        self._wake()
        for channel in self._channels:
            channel.end()
        for channel in self._channels:
            channel.close()
        while self.at_close:
            self.at_close.pop()()

    def check(self) -> None:
        """Raise why the ranks cannot go on, if they cannot."""
        if self._fault is not None:
            raise self._fault

    def _wake(self) -> None:
        """Have `wait` and `receive` raise the fault."""
        self._done.put(None)
        for answers in self._answers:
            answers.put(None)

    def _send(self, channel: Channel, body: bytes) -> None:
        try:
            channel.send(msgspec.msgpack.encode(Message(body)))
        except OSError as error:  # the thread that reads from it learns why
            raise self.await_fault(FAULT_SECONDS) or EngineDeadError("a rank has ended") from error

    def _read(self, rank: int, channel: Channel) -> None:
        decoder, reason = msgspec.msgpack.Decoder(FromRank), ""
        try:
            while (frame := channel.receive()) is not None:
                match decoder.decode(frame):
                    case Done(refused):
                        self._done.put(Done(refused and f"rank {rank}: {refused}"))
                    case Answer(body):
                        self._answers[rank - 1].put(body)
                    case Failed(kind, error):
                        self.fail(error_of(kind, rank, error))
                    case LifeChange(life):
                        self._set_life(rank, life)
        except Exception as error:  # any: this thread reads no more from the rank
            reason = f": {error}"
        self.fail(EngineDeadError(f"rank {rank} has ended{reason}"))

    def _look(self) -> None:
        while not self._is_closing.wait(LOOK_SECONDS) and self._fault is None:
            for rank, channel in enumerate(self._channels, 1):
                if (life := channel.look()) is not None:
                    self._set_life(rank, life)

    def _set_life(self, rank: int, life: Life) -> None:
        self._lives[rank - 1] = life
        if life is Life.HUNG:
            reason = f"rank {rank} has neither answered nor used the CPU for {self._hang_seconds:g} s"
            self.fail(EngineDeadError(reason))
        elif life is Life.ENDED:  # its children may keep its pipe open
            self.fail(EngineDeadError(f"rank {rank} has ended"))


def error_of(kind: str, rank: int, text: str) -> AtomError:
    """The error of a rank: of the class of this name in atom's error tree, otherwise EngineDeadError."""
    kinds = {each.__name__: each for each in AtomError.__subclasses__()}
    return kinds[kind](f"rank {rank}: {text}") if kind in kinds else EngineDeadError(f"rank {rank}: {kind}: {text}")


class RankLink:
    """The rank's end of its messages: stdin and stdout of its process, which uses them for nothing else."""

    def __init__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):  # the driver decides when this process ends
            signal.signal(number, signal.SIG_IGN)
        self._out = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)  # for what libraries print
        self._frames: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._sending = threading.Lock()
        threading.Thread(target=self._read, name="read", daemon=True).start()
        threading.Thread(target=self._send_heartbeats, name="heartbeat", daemon=True).start()

    def receive(self) -> bytes:
        """Wait for the driver's next message. The process ends when the driver does."""
        return self._frames.get()

    def done(self, refused: str = "") -> None:
        """Answer `Ranks.wait`. refused: why nothing was done; empty: it was"""
        self._send(Done(refused))

    def exchange(self, own: bytes) -> list[bytes]:
        """All-gather bytes: those of each rank, in order. All ranks call it, the driver by its `Ranks`."""
        self.answer(own)
        return msgspec.msgpack.decode(self.receive(), type=list[bytes])

    def answer(self, body: bytes) -> None:
        """Answer `Ranks.receive`."""
        self._send(Answer(body))

    def fail(self, error: Exception) -> None:
        """Report to the driver why this process ends."""
        self._send(Failed(type(error).__name__, str(error)))

    def _send(self, message: FromRank) -> None:
        with self._sending:
            write_frame(self._out, msgspec.msgpack.encode(message))

    def _read(self) -> None:
        """Queue the driver's messages. The process ends when they do, even if a collective waits."""
        decoder, code = msgspec.msgpack.Decoder(Message), 1
        try:
            while (frame := read_frame(sys.stdin.buffer)) is not None:
                self._frames.put(decoder.decode(frame).body)
            code = 0
        except Exception as error:
            self.fail(error)
        finally:
            os._exit(code)

    def _send_heartbeats(self) -> None:
        with contextlib.suppress(OSError):  # the reading thread ends the process
            while True:
                self._send(Heartbeat())
                time.sleep(BEAT_SECONDS)
