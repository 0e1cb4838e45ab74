"""The output stream of one sequence: its text, and its callback.

stream = Stream(sequence, Detokenizer(tokenizer, sequence.prompt, sequence.params), callback)
stream.push(reason)          # its newest token becomes text, and may complete a stop string
stream.emit()                # the callback gets a RequestOutput, if there is text or the end to report
"""

from __future__ import annotations

from dataclasses import dataclass

from atom.runtime.requests.detokenizer import Detokenizer
from atom.runtime.types import RequestOutput, Sequence, StreamCallback


@dataclass
class Stream:
    sequence: Sequence
    detokenizer: Detokenizer | None
    callback: StreamCallback | None
    num_shown: int = 0  # output tokens that the callback has received
    is_ended: bool = False  # the callback has received the end
    pending: str = ""  # text that it has not received

    def push(self, reason: str | None) -> str | None:
        """Detokenize the newest token, unless this finish reason hides it; the finish reason after that."""
        if self.detokenizer is None or self._is_hidden(reason):
            return reason
        self.pending += self.detokenizer.push(self.sequence.output[-1])
        return "stop_sequence" if self.detokenizer.stopped else reason

    def finish(self) -> None:
        """End the text of a sequence that has ended."""
        if self.detokenizer is not None:
            self.pending += self.detokenizer.finish()

    def emit(self) -> None:
        """Call the callback if there is new text or the end."""
        sequence = self.sequence
        finished = sequence.finished_at is not None
        is_new = bool(self.pending) if self.detokenizer is not None else len(sequence.output) > self.num_shown
        if self.callback is None or self.is_ended or not (finished or is_new):
            return
        self.is_ended = finished
        text = None if self.detokenizer is None else self.pending
        tokens, logprobs = sequence.output[self.num_shown :], sequence.logprobs[self.num_shown :]
        self.num_shown, self.pending = len(sequence.output), ""
        reason = sequence.finish_reason if finished else None
        update = RequestOutput(sequence.request_id, sequence.index, text, tokens, reason, finished, logprobs, sequence)
        self.callback(update)

    def _is_hidden(self, reason: str | None) -> bool:
        if reason is None:
            return False
        params, token = self.sequence.params, self.sequence.output[-1]
        if reason == "eos":  # a grammar may also end with a token that is none
            return token in self.sequence.stop_ids
        return reason.startswith("stop_") and not params.include_stop_str_in_output
