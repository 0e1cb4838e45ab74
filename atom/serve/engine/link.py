"""The engine's end of the socket to the HTTP process.

link = Link(socket.socket(fileno=3))
(start,) = link.receive()
threading.Thread(target=send_heartbeats, args=(link, make, stopped), daemon=True).start()
link.send(Ready(num_blocks, gpus))
fail(link, error, 1)                            # before the process ends
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from atom.process.liveness import BEAT_SECONDS
from atom.serve.engine.frames import Frames, Message, encode
from atom.serve.engine.protocol import Beat, Failed, ToEngine, to_engine

RECEIVE = 1 << 16  # bytes at a time


class Link:
    """The connection to the HTTP process: any thread may send, one receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._frames: Frames[ToEngine] = to_engine()

    def send(self, message: Message) -> None:
        frame = encode(message)
        with self._sending:
            self._connection.sendall(frame)

    def receive(self) -> list[ToEngine]:
        """Wait for the next messages; EOFError at the end."""
        while True:
            data = self._connection.recv(RECEIVE)
            if not data:
                raise EOFError
            if messages := self._frames.feed(data):
                return messages


def send_heartbeats(link: Link, make: Callable[[], Beat], stopped: threading.Event) -> None:
    """Send a heartbeat every `BEAT_SECONDS`, until `stopped` is set."""
    while not stopped.wait(BEAT_SECONDS):
        try:
            link.send(make())
        except OSError:  # the HTTP process is gone, which the receiving thread sees
            return


def fail(link: Link, error: Exception, exit_code: int) -> int:
    """Send the HTTP process the error that ends the engine; return the exit code."""
    with contextlib.suppress(OSError):
        link.send(Failed(type(error).__name__, str(error), exit_code))
    return exit_code
