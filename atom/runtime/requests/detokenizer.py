"""Detokenize a stream of tokens, and stop at stop strings.

It shows no broken character and no part of a stop string, and takes no text back.

    detokenizer = Detokenizer(tokenizer, prompt, params)
    for token in tokens:
        print(detokenizer.push(token), end="")      # "" while a character or a possible stop string is incomplete
        if detokenizer.stopped:                     # a stop string was met: the text ends before it
            break
    print(detokenizer.finish())                     # the rest, if something was held back

A single token has no text: sentencepiece drops the first space of what it decodes, bytes make characters together. So
each token is decoded with the text before it, in a window (as in Hugging Face's text-generation-inference) of the last
piece of text shown and the tokens since: the cost of a token does not grow with the text, and the pieces add up to what
the tokenizer makes of all tokens at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from atom.sampling_params import SamplingParams

MARK = "\ufdd1"  # stands before a marked special token: a noncharacter of Unicode, which is shown nowhere else
BROKEN = "\N{REPLACEMENT CHARACTER}"  # what tokenizers make of bytes that are no character, or not yet
RARE = "\U0010fffd"  # a character that no vocabulary has: it becomes bytes
MAX_HELD = 64  # tokens that may wait for others before they are shown as they are, so that their cost has a bound


class TextCodec(Protocol):
    """The methods of `checkpoint.Tokenizer` that are used here."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


class Detokenizer:
    """Detokenizes one sequence. A token whose text must not be seen (one that ends the sequence) is not pushed."""

    stop: str | None  # the stop string that was met

    def __init__(self, tokenizer: TextCodec, prompt: Sequence[int], params: SamplingParams) -> None:
        """prompt: the context of the first token; a stop string does not begin in it."""
        self.stop = None
        if params.visible_tokens or not params.skip_special_tokens:
            tokenizer = _Showing(tokenizer, params)
        self._tokenizer = tokenizer
        self._stops = params.stop_strings or []
        self._keeps_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._shown: list[str] = []
        self._held = ""  # whole characters that a stop string may begin with
        self._num_searched = 0  # characters not shown yet in which no stop string can end any more
        self._context = _tail(tokenizer, prompt)  # the window: tokens whose text is settled
        self._context_text = tokenizer.decode(self._context)
        self._tokens: list[int] = []  # and those since
        self._text = ""  # their text so far
        self._stray = _stray_byte(tokenizer)

    @property
    def text(self) -> str:
        """The text returned by push and finish so far."""
        return "".join(self._shown)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was met."""
        return self.stop is not None

    @property
    def num_held(self) -> int:
        """Tokens whose text may still change with the next ones."""
        return len(self._tokens)

    def push(self, token: int) -> str:
        """Take the next token; the text that is now safe to show."""
        assert not self.stopped, "a token was pushed after a stop string"
        self._num_tokens += 1
        text = self._text_with(token)
        if text != self._text or self._tokenizer.decode([token, token]):
            self._tokens.append(token)  # all but special tokens, which have no text anywhere
        self._text = text
        is_settled = self._is_settled()
        text = self._held + text
        end = self._find_stop(text if is_settled else text.rstrip(BROKEN))
        if end is not None:
            return self._show(text, end)
        if not is_settled:
            return ""
        self._context, self._context_text = self._tokens, self._tokenizer.decode(self._tokens)
        self._tokens, self._text = [], ""
        return self._show(text, min((_start_of(stop, text) for stop in self._stops), default=len(text)))

    def finish(self) -> str:
        """End the text; the rest of it, broken characters too. A stop string in it still counts."""
        text = "" if self.stopped else self._held + self._text
        end = self._find_stop(text) if text else None
        self._text = ""
        return self._show(text, len(text) if end is None else end)

    def _text_with(self, token: int) -> str:
        """The text of the tokens since the context and of one more."""
        text = self._tokenizer.decode([*self._context, *self._tokens, token])
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        return self._tokenizer.decode([*self._tokens, token])  # it spoils bytes of the context, which stay as shown

    def _is_settled(self) -> bool:
        """Whether no further token can change the text so far."""
        if not self._text or len(self._tokens) >= MAX_HELD:
            return bool(self._text)
        if self._text.endswith(BROKEN):
            return False
        return self._stray is None or self._text_with(self._stray).startswith(self._text)

    def _find_stop(self, text: str) -> int | None:
        """The position of the earliest stop string that ends in the part not searched before."""
        found: list[tuple[int, int, str]] = []
        if self._num_tokens >= self._min_tokens:
            first = self._num_searched + 1  # no stop string ends before it
            starts = [(text.find(stop, max(0, first - len(stop))), len(stop), stop) for stop in self._stops]
            found = [each for each in starts if each[0] >= 0]
        self._num_searched = len(text)
        if not found:
            return None
        start, length, self.stop = min(found)
        return start + length if self._keeps_stop else start

    def _show(self, text: str, end: int) -> str:
        self._shown.append(text[:end])
        self._held = text[end:]
        self._num_searched -= end
        return text[:end]


class _Showing:
    """A tokenizer that decodes special tokens to text: all of them, or those in `visible_tokens`.

    With `mark_visible_tokens`, those have a MARK before them, so that they differ from the same text in other tokens.
    """

    def __init__(self, tokenizer: TextCodec, params: SamplingParams) -> None:
        self.encode = tokenizer.encode
        self._tokenizer = tokenizer
        self._hides = params.skip_special_tokens
        encoded = [tokenizer.encode(text, add_special_tokens=False) for text in params.visible_tokens or ()]
        self._has_text = {ids[0]: True for ids in encoded if len(ids) == 1}  # other texts are no token, and always seen
        self._marked = frozenset(self._has_text) if params.mark_visible_tokens else None

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        shown = [id for id in ids if not self._hides or self._is_shown(id)]
        text = self._tokenizer.decode(shown, skip_special_tokens=False)
        return text if self._marked is None else self._mark(shown, text.replace(MARK, BROKEN))

    def _mark(self, ids: Sequence[int], text: str) -> str:
        """Put a mark before each marked token."""
        assert self._marked is not None, "there are marked tokens"
        places = [index for index, id in enumerate(ids) if id in self._marked]
        for index in reversed(places):
            before = self._tokenizer.decode(ids[:index], skip_special_tokens=False).replace(MARK, BROKEN)
            if text.startswith(before):
                text = f"{before}{MARK}{text[len(before) :]}"
        return text

    def _is_shown(self, id: int) -> bool:
        if id not in self._has_text:
            self._has_text[id] = bool(self._tokenizer.decode([id, id]))
        return self._has_text[id]


def _start_of(stop: str, text: str) -> int:
    """The first position from which the text may still become the stop string."""
    start = max(0, len(text) - len(stop) + 1)
    while not stop.startswith(text[start:]):
        start += 1
    return start


def _tail(tokenizer: TextCodec, prompt: Sequence[int]) -> list[int]:
    """The fewest last tokens of the prompt that have text; none if it has none or ends within a character."""
    size = 4
    while True:
        tail = list(prompt[-size:])
        text = tokenizer.decode(tail)
        if text and not text.endswith(BROKEN):
            return tail
        if size >= len(prompt):
            return []
        size *= 2


def _stray_byte(tokenizer: TextCodec) -> int | None:
    """A token of one byte, if the tokenizer decodes bytes in runs (`byte_fallback`) that one such token spoils.

    There a run is one U+FFFD a byte if any of it is no character, so whole characters in it may still be lost.
    """
    ids = tokenizer.encode(RARE, add_special_tokens=False)
    return ids[-2] if tokenizer.decode(ids[:-1]).endswith(2 * BROKEN) else None
