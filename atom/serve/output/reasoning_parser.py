"""Split a streamed answer into reasoning and content.

    splitter = ReasoningSplitter(("<think>", "</think>"), is_inside=is_opened(prompt, ("<think>", "</think>")))
    reasoning, content = splitter.push("Let me see.\n</think>\n\nIt is")     # "Let me see.", "It is"
    reasoning, content = splitter.push(" four.")                             # "", " four."
    reasoning, content = splitter.finish()                                   # what was held back

Only the beginning of an answer can be reasoning: a later marker is plain text. Some models leave the closing marker out
before a call: if a call's marker is a token that only calls have, it ends the reasoning too.
"""

from __future__ import annotations

from collections.abc import Sequence

from atom.serve.output.incremental_text import NEWLINES, SPACE, Excerpt, Reading, Span, TextBuffer


def is_opened(prompt: str, markers: tuple[str, str]) -> bool:
    """Whether a rendered prompt ends with the opening marker, so that the answer begins with reasoning."""
    return prompt.rstrip().endswith(markers[0])


class ReasoningSplitter:
    """Splits a text into reasoning and content. The markers and the newlines that touch them belong to neither."""

    def __init__(self, markers: tuple[str, str], *, is_inside: bool = False, ends: Sequence[str] = ()) -> None:
        """
        is_inside: the prompt ends with the opening marker; the model may repeat it
        ends: other texts that end the reasoning, and are content
        """
        self._open, self._close = markers
        self._is_inside, self._ends = is_inside, tuple(ends)
        self._text = TextBuffer()
        self._reasoning, self._content = Excerpt(), Excerpt()
        self._is_over = False  # the rest is content
        self._reading = self._read()

    def push(self, text: str) -> tuple[str, str]:
        """Parse the next text; the new reasoning and content. It holds back only text that may begin a marker."""
        assert not (text and self._text.is_ended), "text came after the end"
        self._text.push(text)
        if not self._is_over:
            next(self._reading, None)
        if self._is_over:
            self._text.move(len(self._text.text), self._content)
        return self._reasoning.take(), self._content.take()

    def take_places(self) -> list[Span]:
        """Where the new content was in the text."""
        return self._content.take_places()

    def finish(self) -> tuple[str, str]:
        """End the text; the rest of it. Reasoning that was not closed stays reasoning."""
        self._text.is_ended = True
        return self.push("")

    def _read(self) -> Reading[None]:
        text = self._text
        yield from text.skip(SPACE)
        if (yield from text.starts_with(self._open)):
            text.at += len(self._open)
        elif self._is_inside:
            text.at = 0
        else:
            self._is_over = True
            return
        yield from text.skip(NEWLINES)
        text.take(text.at)
        marker = yield from text.move_until((self._close, *self._ends), self._reasoning)
        if marker == self._close:
            yield from text.skip(NEWLINES)
        elif marker is not None:
            text.at -= len(marker)
        text.take(text.at)
        self._is_over = True
