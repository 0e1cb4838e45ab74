"""Decode images in a process that is killed if it takes too long.

    decoder = Decoder(max_pixels=50_000_000)
    pixels = decoder.decode(data)               # u8[height, width, 3]
    decoder.close()

The process has limited memory, and opens no file. If it ends, the next image starts another one.
"""

from __future__ import annotations

import os
import select
import subprocess
import threading
import time
from types import TracebackType

import numpy as np

from atom.errors import RequestError
from atom.images.decode_process import BODY, FAULT, HEAD, PIXELS, TASK
from atom.images.processor import import_pillow
from atom.images.tiles import Pixels
from atom.process.child_process import end, start_python

CODE = "from atom.images.decode_process import main; main()"
MAX_PIXELS = 50_000_000
SECONDS = 10.0
BROKEN = "the image cannot be decoded"


class Decoder:
    """Decodes one image at a time; any thread may ask it to."""

    def __init__(self, max_pixels: int = MAX_PIXELS, seconds: float = SECONDS) -> None:
        """
        max_pixels: of an image; a file whose header has more is refused
        seconds: after which the process is killed
        """
        import_pillow()  # so that its lack is said early
        self.max_pixels, self.seconds = max_pixels, seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    def decode(self, data: bytes) -> Pixels:
        """The pixels u8[height, width, 3] of a PNG, JPEG, WebP or GIF, of which the first frame.

        It is turned as its EXIF data says, and what is transparent is on white. RequestError says what is wrong, also
        once this is closed.
        """
        with self._lock:
            if self._is_closed:
                raise RequestError(f"{BROKEN}: atom ends")
            process = self._process or self._start()
            deadline = time.monotonic() + self.seconds
            try:
                self._send(process, TASK.pack(len(data), self.max_pixels) + data, deadline)
                kind, first, second = HEAD.unpack(self._receive(process, HEAD.size, deadline))
                content = self._receive(process, first * second * (3 if kind == PIXELS else 1), deadline)
            except TimeoutError:
                self._kill()
                raise RequestError(f"{BROKEN}: it takes more than {self.seconds:g} s") from None
            except OSError:
                self._kill()
                raise RequestError(BROKEN) from None
            except BaseException:  # such as an interrupt: an answer may be left
                self._kill()
                raise
        if kind == FAULT:
            raise RequestError(content.decode())
        return np.frombuffer(content, np.uint8).reshape(first, second, 3)

    def close(self) -> None:
        """End the process, and the image that it decodes."""
        self._is_closed = True
        if (process := self._process) is not None:
            process.kill()  # without the lock, which is held until an image is decoded
        with self._lock:
            self._kill()

    def __enter__(self) -> Decoder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _start(self) -> subprocess.Popen[bytes]:
        self._process = process = start_python(CODE, stderr=subprocess.DEVNULL)
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        os.set_blocking(process.stdin.fileno(), False)
        return process

    def _kill(self) -> None:
        if self._process is not None:
            end(self._process)
            self._process = None

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
