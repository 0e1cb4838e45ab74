"""The ranks of an engine, seen from the process that drives, and from theirs.

One drives, the others take the steps that it takes.

    ranks = Ranks([RankProcess(RANK)], openings)       # a channel and an opening for each of the others
    ranks.wait()                                       # for each to call `done`
    ranks.tell(encode(step))                           # before the driver takes it itself
    ranks.close()

and in the process of a rank:

    def main(link: RankLink) -> None:
        opening = link.receive()             # the bytes that it was started with
        link.done()
        while True:
            decode(link.receive())

A rank is a child of the process that drives, and talks over its own pipes; or it is a child of a supervisor on another
host, which passes on what comes over an authenticated connection (`remote_ranks`). Frames are msgpack: the length in 4
bytes, little-endian, and the body.

A rank that ends or hangs (`atom.process.liveness`) ends all: the others are ended, whose connections end with them, so
that no collective waits for ever. One that is stopped ends nothing. A rank sends heartbeats to the process that has
started it, which watches it. A rank whose driver is gone ends at once.
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
FAULT_SECONDS = 1.0  # in which it shows why a rank takes nothing any more
RANK = "from atom.assemble.rank_process import main; main(link)"  # the code of a rank's process
RANK_ON_GPU = f"from atom.devices import open_early; open_early(); {RANK}"
# in the folder of its parent, whatever it imports from; beats while the rest is imported
LINK = "import os, sys; sys.path.insert(0, os.getcwd()); os.chdir({folder!r}); "
LINK += "from atom.runtime.ranks.links import RankLink; link = RankLink(); "


class Beat(msgspec.Struct, tag=True):
    pass


class Done(msgspec.Struct, tag=True):
    """A rank has done what it was last told, or left everything as it was."""

    refused: str = ""  # why it did not


class Answer(msgspec.Struct, tag=True):
    """What the driver asked for, in the order of what it told."""

    body: bytes


class Failed(msgspec.Struct, tag=True):
    """A rank has failed; its process ends."""

    kind: str  # the class of the error
    error: str


class Told(msgspec.Struct, tag=True):
    """What a rank is told."""

    body: bytes


class Limit(msgspec.Struct, tag=True):
    """What the driver sends to the supervisor of a rank."""

    seconds: float  # without a sign of life after which it is hung


class Seen(msgspec.Struct, tag=True):
    """What a supervisor has seen of its rank, when that changes."""

    life: Life


FromRank = Beat | Done | Answer | Failed | Seen
ToRank = Told | Limit


def write_frame(file: IO[bytes], body: bytes) -> None:
    file.write(HEAD.pack(len(body)) + body)
    file.flush()


def read_frame(file: IO[bytes]) -> bytes | None:
    """The next frame's body; None at the end, also within a frame."""
    head = file.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    (size,) = HEAD.unpack(head)
    body = file.read(size)
    return body if len(body) == size else None


class Channel(Protocol):
    """The way to a rank, and back. Several threads may send, and one receives."""

    def send(self, body: bytes) -> None:
        """OSError where the rank has ended."""

    def limit_silence(self, seconds: float) -> None:
        """From now on, take the rank for hung after so many seconds without a sign of life."""

    def look(self) -> Life | None:
        """How the rank's process is, to be asked regularly; None if a supervisor looks, and says when it changes."""

    def receive(self) -> bytes | None:
        """Wait for the next frame; None, or OSError with a reason, where there will be no more."""

    def end(self) -> None:
        """End the rank, and do not wait."""

    def close(self) -> None:
        """End the rank, and wait until nothing is left of it here."""


class RankProcess:
    """A rank that is a child of this process."""

    def __init__(self, code: str, device: str | None = None) -> None:
        """code: what it runs, which has a `link`. device: the GPU that it sees; None: what this process sees"""
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
    """The other ranks, seen from the process that drives. One thread tells and waits."""

    def __init__(self, channels: Sequence[Channel], openings: Sequence[bytes]) -> None:
        """openings: the first frame of each rank"""
        self.at_close: list[Callable[[], object]] = []  # to be called then, the last one first
        self._channels = channels
        self._done: queue.SimpleQueue[Done | None] = queue.SimpleQueue()  # None: a rank is dead
        self._answers: list[queue.SimpleQueue[bytes | None]] = [queue.SimpleQueue() for _ in openings]  # likewise
        self._fault: AtomError | None = None
        self._watchers: list[Callable[[AtomError], object]] = []
        self._lives = [Life.RUNNING] * len(channels)
        self._hang_seconds = HANG_SECONDS
        self._lock = threading.Lock()  # of the fault and who watches for it
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
        """From now on, take a rank for hung after so many seconds without a sign of life."""
        self._hang_seconds = seconds
        for channel in self._channels:
            channel.limit_silence(seconds)

    @property
    def stopped(self) -> list[int]:
        """The ranks whose processes are stopped."""
        return [rank for rank, life in enumerate(self._lives, 1) if life is Life.STOPPED]

    def await_fault(self, seconds: float) -> AtomError | None:
        """Why the ranks cannot go on, if that turns out within this time."""
        end = time.monotonic() + seconds
        while self._fault is None and time.monotonic() < end:
            time.sleep(0.01)
        return self._fault

    def watch(self, callback: Callable[[AtomError], object]) -> None:
        """Have a thread call this with the reason when a rank dies."""
        with self._lock:
            self._watchers.append(callback)
            fault = self._fault
        if fault is not None:
            callback(fault)

    def tell(self, bodies: Sequence[bytes]) -> None:
        """Send each rank its frame. Raises the error of a rank that is dead."""
        self.check()
        for channel, body in zip(self._channels, bodies, strict=True):
            self._send(channel, body)

    def receive(self, rank: int) -> bytes:
        """Wait for a rank's next answer. Raises the error of a rank that is dead."""
        answer = self._answers[rank - 1].get()
        if answer is None:
            self._answers[rank - 1].put(None)
            self.check()
        assert answer is not None, "there is a fault"
        return answer

    def wait(self) -> list[str]:
        """Wait until all ranks have done what they were told; why some have not. The error of the one that fails."""
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
        """Give all ranks the bytes of each, in order; they call theirs at the same time."""
        every = [own, *(self.receive(rank) for rank in range(1, len(self._channels) + 1))]
        self.tell([msgspec.msgpack.encode(every)] * len(self._channels))
        return every

    def fail(self, error: AtomError) -> None:
        """End all ranks for a reason, unless they have ended for another one."""
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
        """End all ranks; then do what is to be done `at_close`. Threads that wait for a rank get an EngineDeadError."""
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
            channel.send(msgspec.msgpack.encode(Told(body)))
        except OSError as error:  # the thread that reads of it says why
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
                    case Seen(life):
                        self._note(rank, life)
        except Exception as error:  # whatever it is, nobody reads of this rank any more
            reason = f": {error}"
        self.fail(EngineDeadError(f"rank {rank} has ended{reason}"))

    def _look(self) -> None:
        while not self._is_closing.wait(LOOK_SECONDS) and self._fault is None:
            for rank, channel in enumerate(self._channels, 1):
                if (life := channel.look()) is not None:
                    self._note(rank, life)

    def _note(self, rank: int, life: Life) -> None:
        self._lives[rank - 1] = life
        if life is Life.HUNG:
            reason = f"rank {rank} has neither answered nor used the CPU for {self._hang_seconds:g} s"
            self.fail(EngineDeadError(reason))
        elif life is Life.ENDED:  # what it has started may keep its pipe open
            self.fail(EngineDeadError(f"rank {rank} has ended"))


def error_of(kind: str, rank: int, text: str) -> AtomError:
    """A rank's error of atom's, by its class name; EngineDeadError for one of others."""
    kinds = {each.__name__: each for each in AtomError.__subclasses__()}
    return kinds[kind](f"rank {rank}: {text}") if kind in kinds else EngineDeadError(f"rank {rank}: {kind}: {text}")


class RankLink:
    """A rank's end: stdin and stdout of its process, which has no other use for them."""

    def __init__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):  # the driver decides when it ends
            signal.signal(number, signal.SIG_IGN)
        self._out = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)  # what a library prints
        self._frames: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._sending = threading.Lock()
        threading.Thread(target=self._read, name="read", daemon=True).start()
        threading.Thread(target=self._beat, name="beat", daemon=True).start()

    def receive(self) -> bytes:
        """Wait for what the driver tells next. The process ends where the driver does."""
        return self._frames.get()

    def done(self, refused: str = "") -> None:
        """Answer `Ranks.wait`. refused: why nothing was done"""
        self._send(Done(refused))

    def exchange(self, own: bytes) -> list[bytes]:
        """Give own bytes for those of all ranks, in order; they call theirs at the same time."""
        self.answer(own)
        return msgspec.msgpack.decode(self.receive(), type=list[bytes])

    def answer(self, body: bytes) -> None:
        """Answer `Ranks.receive`."""
        self._send(Answer(body))

    def fail(self, error: Exception) -> None:
        """Tell the driver why this process ends."""
        self._send(Failed(type(error).__name__, str(error)))

    def _send(self, message: FromRank) -> None:
        with self._sending:
            write_frame(self._out, msgspec.msgpack.encode(message))

    def _read(self) -> None:
        """Take what the driver tells. The process ends with this, whatever a collective waits for."""
        decoder, code = msgspec.msgpack.Decoder(Told), 1
        try:
            while (frame := read_frame(sys.stdin.buffer)) is not None:
                self._frames.put(decoder.decode(frame).body)
            code = 0
        except Exception as error:
            self.fail(error)
        finally:
            os._exit(code)

    def _beat(self) -> None:
        with contextlib.suppress(OSError):  # then reading ends too
            while True:
                self._send(Beat())
                time.sleep(BEAT_SECONDS)
