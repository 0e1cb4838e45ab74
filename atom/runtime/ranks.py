"""The ranks of an engine on this host.

One drives, the others take the steps that it takes.

    ranks = Ranks("from atom.rank import main; main(link)", openings)     # a process for each of the others
    ranks.wait()                             # for each to call `done`
    ranks.tell(encode(step))                 # before the driver takes it itself
    ranks.close()

and in such a process:

    def main(link: RankLink) -> None:
        opening = link.receive()             # the bytes that it was started with
        link.done()
        while True:
            decode(link.receive())

They talk over the pipes of the processes, in frames of msgpack: the length in 4 bytes, little-endian, and the body. A
rank sends a heartbeat each second. One that ends or falls silent ends all: the others are killed, whose connections end
with them, so that no collective waits for ever. A rank whose driver is gone ends at once.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO

import msgspec

from atom.child_process import start_python
from atom.errors import AtomError, EngineDeadError

HEAD = struct.Struct("<I")
BEAT_SECONDS = 1.0  # between a rank's heartbeats
START_SECONDS = 120.0  # of silence while ranks start
MAX_GAP = 1.0  # seconds that count of those between two looks at the clock: this process may have been stopped too
# in the folder that drives, whatever it imports from; beats while the rest is imported
LINK = "import os, sys; sys.path.insert(0, os.getcwd()); os.chdir({folder!r}); "
LINK += "from atom.runtime.ranks import RankLink; link = RankLink(); "


class Beat(msgspec.Struct, tag=True):
    pass


class Done(msgspec.Struct, tag=True):
    """A rank has done what it was last told."""


class Answer(msgspec.Struct, tag=True):
    """What the driver asked for, in the order of what it told."""

    body: bytes


class Failed(msgspec.Struct, tag=True):
    """A rank has failed; its process ends."""

    kind: str  # the class of the error
    error: str


FromRank = Beat | Done | Answer | Failed


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


class Ranks:
    """The other ranks, seen from the process that drives. One thread tells and waits."""

    def __init__(self, code: str, openings: Sequence[bytes]) -> None:
        """code: of the process of a rank, which has a `link`; its first frame is its opening"""
        self.at_close: Callable[[], object] = lambda: None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._done: queue.SimpleQueue[Done | None] = queue.SimpleQueue()  # None: a rank is dead
        self._answers: list[queue.SimpleQueue[bytes | None]] = [queue.SimpleQueue() for _ in openings]  # likewise
        self._fault: AtomError | None = None
        self._watchers: list[Callable[[AtomError], object]] = []
        self._silent, self._most_silent = [0.0] * len(openings), START_SECONDS  # seconds, of each; before it is dead
        self._lock = threading.Lock()  # of the fault and who watches for it
        self._is_closing = threading.Event()
        link = LINK.format(folder=os.getcwd())
        try:
            for rank, opening in enumerate(openings, 1):
                self._processes.append(start_python(link + code, stderr=2, has_own_session=False))
                threading.Thread(target=self._read, args=(rank,), name=f"rank {rank}", daemon=True).start()
                self._write(self._processes[-1].stdin, opening)
            threading.Thread(target=self._watch_silence, name="ranks", daemon=True).start()
        except BaseException:
            self.close()
            raise

    def limit_silence(self, seconds: float) -> None:
        """Take a rank for dead, from now on, that is silent for so long."""
        self._most_silent = seconds

    def await_fault(self, seconds: float) -> AtomError | None:
        """Why the ranks cannot go on, where that shows within this time."""
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
        """Send each rank its frame. The error of the one that is dead, if one is."""
        self.check()
        for process, body in zip(self._processes, bodies, strict=True):
            self._write(process.stdin, body)

    def receive(self, rank: int) -> bytes:
        """Wait for a rank's next answer. The error of the one that is dead, if one is."""
        answer = self._answers[rank - 1].get()
        if answer is None:
            self._answers[rank - 1].put(None)
            self.check()
        assert answer is not None, "there is a fault"
        return answer

    def wait(self) -> None:
        """Wait until all ranks have done what they were told. The error of the one that fails."""
        for _ in self._processes:
            if self._done.get() is None:
                self._done.put(None)
                self.check()

    def fail(self, error: AtomError) -> None:
        """End all ranks for a reason, unless they have ended for another one."""
        with self._lock:
            if self._fault is not None or self._is_closing.is_set():
                return
            self._fault, watchers = error, [*self._watchers]
        self._kill()
        self._done.put(None)
        for answers in self._answers:
            answers.put(None)
        for callback in watchers:
            callback(error)

    def close(self) -> None:
        """End all ranks; then call `at_close`."""
        if self._is_closing.is_set():
            return
        self._is_closing.set()
        self._kill()
        for process in self._processes:
            process.wait()
            for pipe in filter(None, (process.stdin, process.stdout)):
                with contextlib.suppress(OSError):
                    pipe.close()
        self.at_close()

    def check(self) -> None:
        """Raise why the ranks cannot go on, if they cannot."""
        if self._fault is not None:
            raise self._fault

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()

    def _write(self, pipe: IO[bytes] | None, body: bytes) -> None:
        assert pipe is not None, "start_python opens it"
        try:
            write_frame(pipe, body)
        except OSError as error:  # the thread that reads of it says why
            raise self.await_fault(BEAT_SECONDS) or EngineDeadError("a rank has ended") from error

    def _read(self, rank: int) -> None:
        pipe, decoder = self._processes[rank - 1].stdout, msgspec.msgpack.Decoder(FromRank)
        assert pipe is not None, "start_python opens it"
        with contextlib.suppress(OSError, ValueError, msgspec.DecodeError):
            while (frame := read_frame(pipe)) is not None:
                self._silent[rank - 1] = 0.0
                match decoder.decode(frame):
                    case Done() as done:
                        self._done.put(done)
                    case Answer(body):
                        self._answers[rank - 1].put(body)
                    case Failed(kind, error):
                        self.fail(error_of(kind, rank, error))
        self.fail(EngineDeadError(f"rank {rank} has ended"))

    def _watch_silence(self) -> None:
        before = time.monotonic()
        while not self._is_closing.wait(BEAT_SECONDS / 4) and self._fault is None:
            now = time.monotonic()
            gap, before = min(now - before, MAX_GAP), now
            self._silent = [silent + gap for silent in self._silent]
            if (longest := max(self._silent)) > self._most_silent:
                rank = self._silent.index(longest) + 1
                self.fail(EngineDeadError(f"rank {rank} has been silent for {longest:.1f} s"))


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
        """Wait for the next frame. The process ends where the driver does."""
        return self._frames.get()

    def done(self) -> None:
        """Answer `Ranks.wait`."""
        self._send(Done())

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
        while (frame := read_frame(sys.stdin.buffer)) is not None:
            self._frames.put(frame)
        os._exit(0)  # whatever a collective waits for

    def _beat(self) -> None:
        with contextlib.suppress(OSError):  # then reading ends too
            while True:
                self._send(Beat())
                time.sleep(BEAT_SECONDS)
