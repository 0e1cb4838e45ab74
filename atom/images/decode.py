"""Decode images in processes that are killed if they take too long.

    decoder = Decoder(max_pixels=50_000_000)
    image = decoder.read(data, processor)
    decoder.close()

A process has limited memory, and opens no file. If it ends, its next image starts another one. It also resizes the
image and cuts it into patches, so all that is large is elsewhere, and as many images are read at a time.
"""

from __future__ import annotations

import os
import queue
import select
import subprocess
import threading
import time
from types import TracebackType

import msgspec

from atom.errors import EngineDeadError, RequestError
from atom.images.decode_process import BODY, HEAD, TASK, Order
from atom.images.patches import import_pillow, is_whole, with_digest
from atom.images.processor import NO_LIMIT, Processor
from atom.images.types import Image
from atom.process.child_process import end, start_python

CODE = "from atom.images.decode_process import main; main()"
MAX_PIXELS = 50_000_000
MAX_PROCESSES = 4
SECONDS = 10.0
BROKEN, CLOSED = "the image cannot be decoded", "the image is not decoded: atom ends"


class Decoder:
    """Decodes as many images at a time as it has processes; any thread may ask it to."""

    def __init__(
        self, max_pixels: int = MAX_PIXELS, seconds: float = SECONDS, num_processes: int | None = None
    ) -> None:
        """
        max_pixels: of an image; a file whose header has more is refused
        seconds: after which a process is killed
        num_processes: that decode at a time; None: as many as count_processes says
        """
        import_pillow()  # so that its lack is said early
        self.max_pixels, self.seconds = max_pixels, seconds
        self._workers = [Worker() for _ in range(num_processes or count_processes())]
        self._idle: queue.LifoQueue[Worker] = queue.LifoQueue()  # so that few are started if few are needed
        for worker in self._workers:
            self._idle.put(worker)

    def read(self, data: bytes, processor: Processor, limit: int = NO_LIMIT) -> Image:
        """The patches of a PNG, JPEG, WebP or GIF, of which the first frame.

        It is turned as its EXIF data says, and what is transparent is on white. RequestError says what is wrong,
        EngineDeadError that this is closed.

        limit: pixels that it is reduced to, a further limit than the processor's
        """
        order = msgspec.msgpack.encode(Order(self.max_pixels, processor, limit))
        worker = self._idle.get()
        try:
            image = worker.ask(order, data, self.seconds)
        finally:
            self._idle.put(worker)
        if not is_whole(image, processor):
            raise RequestError(BROKEN)
        return with_digest(image, processor)

    def close(self) -> None:
        """End the processes, and the images that they decode."""
        for worker in self._workers:
            worker.close()

    def __enter__(self) -> Decoder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def count_processes() -> int:
    """As many processes as there are cores for them, at most MAX_PROCESSES."""
    return min(len(os.sched_getaffinity(0)), MAX_PROCESSES)


class Worker:
    """A process that decodes one image at a time, asked by one thread at a time."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self._is_closed = False
        self._lock = threading.Lock()  # held while an image is decoded

    def ask(self, order: bytes, data: bytes, seconds: float) -> Image:
        with self._lock:
            return self._ask(order, data, seconds)

    def close(self) -> None:
        """End the process, and the image that it decodes."""
        self._is_closed = True
        if (process := self.process) is not None:
            process.kill()
        with self._lock:
            self._kill()

    def _ask(self, order: bytes, data: bytes, seconds: float) -> Image:
        if self._is_closed:
            raise EngineDeadError(CLOSED)
        process = self.process or self._start()
        deadline = time.monotonic() + seconds
        try:
            self._send(process, TASK.pack(len(order), len(data)) + order + data, deadline)
            is_image, size = HEAD.unpack(self._receive(process, HEAD.size, deadline))
            content = self._receive(process, size, deadline)
            if is_image:
                return msgspec.msgpack.decode(content, type=Image)
        except TimeoutError:
            self._kill()
            raise RequestError(f"{BROKEN}: it takes more than {seconds:g} s") from None
        except (OSError, msgspec.MsgspecError):
            self._kill()
            if self._is_closed:
                raise EngineDeadError(CLOSED) from None
            raise RequestError(BROKEN) from None
        except BaseException:  # such as an interrupt: an answer may be left
            self._kill()
            raise
        raise RequestError(content.decode(errors="replace"))

    def _start(self) -> subprocess.Popen[bytes]:
        self.process = process = start_python(CODE, stderr=subprocess.DEVNULL)
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        os.set_blocking(process.stdin.fileno(), False)
        if self._is_closed:
            process.kill()
        return process

    def _kill(self) -> None:
        if self.process is not None:
            end(self.process)
            self.process = None

    @staticmethod
    def _send(process: subprocess.Popen[bytes], data: bytes, deadline: float) -> None:
        assert process.stdin is not None, "it is a pipe"
        left, fd = memoryview(data), process.stdin.fileno()
        while left:
            _, ready, _ = select.select([], [fd], [], max(deadline - time.monotonic(), 0))
            if not ready:
                raise TimeoutError
            left = left[os.write(fd, left[:BODY]) :]

    @staticmethod
    def _receive(process: subprocess.Popen[bytes], size: int, deadline: float) -> bytearray:
        assert process.stdout is not None, "it is a pipe"
        data, fd = bytearray(), process.stdout.fileno()
        while len(data) < size:
            ready, _, _ = select.select([fd], [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                raise TimeoutError
            chunk = os.read(fd, min(size - len(data), BODY))
            if not chunk:
                raise ConnectionResetError("the process has ended")
            data += chunk
        return data
