"""The stream of one request's outputs.

The engine's client pushes them; the one task that writes the response reads them.

    stream = client.submit([[1, 2, 3]], [params], id="cmpl-1")
    while not stream.is_done:
        for output in await stream.next(seconds=15.0):
            print(output.text)

Every token takes this path, so it is kept cheap: one future a token, one timer a stream. What a client does not read
waits here, up to MAX_UNREAD outputs, each some hundred bytes to some kilobytes with log probabilities.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from atom.errors import AtomError
from atom.serve.engine.protocol import Output

MAX_UNREAD = 1 << 14  # outputs of a request that its client has not read


class UnreadError(AtomError):
    """A client has not read its answer for too long."""


class RequestStream:
    """The outputs of one request, which may have several prompts. One task reads it."""

    def __init__(self, id: str, prompt_ids: list[str], num_sequences: int) -> None:
        """prompt_ids: of its prompts in the engine"""
        self.id = id
        self.prompt_index = {each: index for index, each in enumerate(prompt_ids)}  # by the id of an output
        self.num_running = num_sequences
        self.is_done = False  # all outputs have been read
        self.engine = 0  # the number of the replica that serves it
        self.watch: Callable[[Output], object] | None = None  # called with each output
        self._outputs: list[Output] = []
        self._error: AtomError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._seconds: float | None = None  # of silence after which `next` returns nothing
        self._last = 0.0  # the time of the last output, or of the last end of silence
        self._timer: asyncio.TimerHandle | None = None  # one for the whole stream: one for each token costs too much

    @property
    def is_full(self) -> bool:
        """Whether no more outputs may wait to be read."""
        return len(self._outputs) >= MAX_UNREAD

    async def next(self, seconds: float | None = None) -> list[Output]:
        """Wait for new outputs; an empty list after this many seconds of silence.

        RequestError if the engine refuses the request, EngineDeadError if it dies.
        """
        if not self._outputs and self._error is None:
            loop = asyncio.get_running_loop()
            self._waiter, self._seconds = loop.create_future(), seconds
            if self._timer is None and seconds is not None:
                self._last = loop.time()
                self._timer = loop.call_later(seconds, self._end_silence, loop)
            await self._waiter
        outputs, self._outputs = self._outputs, []
        if self._error is not None and not outputs:
            self.is_done = True
            raise self._error
        self.is_done = not self.num_running and self._error is None
        return outputs

    def push(self, output: Output, now: float) -> None:
        """now: the loop's time."""
        self._last = now
        self._outputs.append(output)
        if self.watch is not None:
            self.watch(output)
        if output.finish is not None:
            self.num_running -= 1
            if not self.num_running:
                self.stop_timer()
        self._wake()

    def fail(self, error: AtomError, *, drops: bool = False) -> None:
        """drops: the outputs that have not been read"""
        self._error = error
        if drops:
            self._outputs.clear()
        self.num_running = 0
        self.stop_timer()
        self._wake()

    def stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_silence(self, loop: asyncio.AbstractEventLoop) -> None:
        assert self._seconds is not None, "the timer was started with them"
        left = self._last + self._seconds - loop.time()
        if left <= 0:
            self._last = loop.time()
            self._wake()
        self._timer = loop.call_later(left if left > 0 else self._seconds, self._end_silence, loop)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
