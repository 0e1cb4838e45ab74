"""The contract of docs/tool-calls.md, for every prefix of every text.

What is shown while an answer arrives is the beginning of the whole answer, wherever the text is cut. A call that was
shown is a call of the whole. Content is the text at places that were no call. No word of a value or of the text around
calls is lost. This is said here without the parser, and held against mutations of valid texts.
"""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from call_texts import WORD, WRITERS, mutate, write_calls
from pydantic_core import from_json

from atom.config.tool_formats import ToolFormat, format_files, read_format
from atom.runtime.requests.detokenizer import MARK
from atom.serve.output.channel_parser import ChannelReader
from atom.serve.output.output_parser import OutputParser
from atom.serve.output.reasoning_parser import ReasoningSplitter
from atom.serve.output.tool_parser import CallReader

TOOLS = {
    "f": {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"type": "integer"}, "c": {"type": "object"}},
    },
    "get_weather": {"type": "object", "properties": {"d": {"type": "array"}}},
}
# formats, also of models whose markers are tokens
NAMES = [*WRITERS, *(name + MARK for name in WRITERS if read_format(name).tokens)]
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("f", {"a": "qv1q <b> qv2q", "b": 12}),
    ("get_weather", {"city": "qv3q\nqv4q", "d": [1, {"x": "qv5q"}]}),
    ("f", {}),
    ("f", {"c": {"y": "qv6q", "z": None}, "a": "", "e": 1.5}),
]


@dataclass
class Shown:
    """What a client has put together."""

    content: str = ""
    reasoning: str = ""
    places: list[tuple[int, int]] = field(default_factory=list)
    calls: list[tuple[str, str, str]] = field(default_factory=list)  # id, name, arguments
    whole: list[bool] = field(default_factory=list)

    @property
    def text(self) -> str:
        return " ".join([self.content, self.reasoning, *(f"{name} {arguments}" for _, name, arguments in self.calls)])


def find_format(name: str) -> ToolFormat:
    """A format by its name, of a model whose markers are tokens if it ends with MARK."""
    tool_format = read_format(name.removesuffix(MARK))
    return tool_format.mark(MARK, bool) if name.endswith(MARK) else tool_format


class Client:
    def __init__(self, name: str) -> None:
        tool_format, numbers = find_format(name), itertools.count(1)
        kind = ChannelReader if tool_format.channels else CallReader
        splitter = None if tool_format.channels else ReasoningSplitter(("<think>", "</think>"))
        reader = kind(tool_format, TOOLS, lambda: f"id{next(numbers)}")
        self._parser = OutputParser(splitter, reader, is_marked=True)
        self.shown = Shown()

    def push(self, text: str | None) -> None:
        """Take the next text, or the end."""
        delta = self._parser.finish() if text is None else self._parser.push(text)
        shown = self.shown
        shown.content += delta.content
        shown.reasoning += delta.reasoning
        shown.places += delta.places
        for index, id, name, arguments in delta.tools:
            if id is not None:
                assert name is not None and index == len(shown.calls)
                shown.calls.append((id, name, ""))
            shown.calls[index] = (*shown.calls[index][:2], shown.calls[index][2] + arguments)
        shown.whole = list(self._parser.whole)


def read(name: str, *pieces: str) -> Shown:
    client = Client(name)
    for piece in (*pieces, None):
        client.push(piece)
    return client.shown


def begins(part: Shown, whole: Shown) -> bool:
    """Whether what was shown first is the beginning of what is shown in the end."""
    return (
        whole.content.startswith(part.content)
        and whole.reasoning.startswith(part.reasoning)
        and len(part.calls) <= len(whole.calls)
        and all(
            known[:2] == last[:2] and last[2].startswith(known[2])
            for known, last in zip(part.calls, whole.calls, strict=False)
        )
    )


def check(name: str, text: str, random: Random) -> None:
    whole = read(name, text)
    said = f"{name}: {text!r}"
    cuts = sorted(random.randrange(len(text) + 1) for _ in range(random.randrange(6)))
    pieces = [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]
    assert texts(read(name, *pieces)) == texts(whole), f"{said} as {pieces}"
    client = Client(name)
    for end, char in enumerate(text, 1):
        client.push(char)
        assert begins(client.shown, whole), f"{said} at {end}"
        if random.random() < 0.03:
            prefix = read(name, text[:end])
            assert begins(client.shown, prefix), f"{said} cut off at {end}"
            check_answer(name, text[:end], prefix)
    client.push(None)
    assert texts(client.shown) == texts(whole), f"{said} by characters"
    check_answer(name, text, whole)


def texts(shown: Shown) -> tuple[Any, ...]:
    return shown.content, shown.reasoning, shown.calls, shown.whole


def check_answer(name: str, text: str, answer: Shown) -> None:
    said = f"{name}: {text!r} is {answer}"
    assert len(answer.whole) == len(answer.calls), said
    for (_, function, arguments), is_whole in zip(answer.calls, answer.whole, strict=True):
        assert function in TOOLS, said
        read_arguments = json.loads(arguments) if is_whole else from_json(arguments or "{}", allow_partial=True)
        assert isinstance(read_arguments, dict), said
    lost = set(WORD.findall(without_headers(name, text))) - set(WORD.findall(answer.text))
    assert not lost, f"{said}, without {lost}"
    if not find_format(name).channels:  # which join messages with newlines
        assert answer.content == "".join(text[start:end] for start, end in answer.places).replace(MARK, ""), said
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(answer.places)), said
        assert answer.calls or answer.content == text.replace(MARK, "") or "<think>" in text, said


def without_headers(name: str, text: str) -> str:
    """A text without the headers of its messages, which are no text of the answer."""
    if (each := find_format(name).channels) is None:
        return text
    begin, end = (
        "|".join(map(re.escape, texts))
        for texts in ((each.start, each.channel, "to="), (each.body, each.start, *each.end))
    )
    return re.sub(f"(?:{begin})(?:(?!{end}).)*{re.escape(each.body)}", "", text, flags=re.DOTALL)


def make_text(name: str, random: Random) -> str:
    """Calls with text around them, and reasoning before."""
    has_channels = find_format(name).channels is not None
    calls = random.sample(CALLS, random.randint(1, 3))
    around = [""] if has_channels else ["", "", "qv90q. ", "\nqv91q\n\n", 'qv92q {"a": 1} <b>']
    plain = name.removesuffix(MARK)
    blocks = [write_calls(plain, calls), write_calls(plain, random.sample(CALLS, 1))][: random.randint(1, 2)]
    join = "<|start|>assistant" if has_channels else random.choice(around)
    before = (
        "<|channel|>analysis<|message|>qv93q<|end|><|start|>assistant" if has_channels else "<think>qv93q</think>\n"
    )
    text = random.choice(["", before]) + random.choice(around) + join.join(blocks) + random.choice(around)
    if name.endswith(MARK):  # the same words are no markers where the model spells them out
        text = mark(plain, text) + random.choice(["", *read_format(plain).markers])
    return text


def mark(name: str, text: str) -> str:
    """The text of a model whose markers are tokens."""
    for marker in read_format(name).markers:
        text = text.replace(marker, MARK + marker)
    return text


def check_mutations(name: str, num_texts: int) -> None:
    random = Random(f"{name} {num_texts}")
    for _ in range(num_texts):
        text = make_text(name, random)
        check(name, text, random)
        for _ in range(random.randint(1, 3)):
            text = mutate(text, random) or "qv99q"
        check(name, text, random)


def test_every_format_has_a_writer():
    assert sorted(WRITERS) == list(format_files())


@pytest.mark.parametrize("name", WRITERS)
def test_what_a_model_writes_is_read_as_its_calls(name: str):
    answer = read(name, write_calls(name, CALLS))
    assert [(name, json.loads(arguments)) for _, name, arguments in answer.calls] == CALLS
    assert (answer.content.strip(), all(answer.whole)) == ("", True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NAMES)
def test_streamed_and_whole_answers_agree_on_almost_calls(name: str):
    check_mutations(name, 12)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_streamed_and_whole_answers_agree_on_very_many_almost_calls(name: str):
    check_mutations(name, 200)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", WRITERS)
def test_a_text_that_is_cut_off_anywhere_loses_no_word(name: str):
    text = write_calls(name, CALLS)
    for end in range(len(text) + 1):
        check_answer(name, text[:end], read(name, text[:end]))


SPELLED = [name for name in WRITERS if read_format(name).tokens]


@pytest.mark.parametrize("name", SPELLED)
def test_markers_that_are_spelled_out_are_text(name: str):
    text = write_calls(name, CALLS)
    assert (read(name + MARK, text).content, read(name + MARK, text).calls) == (text, [])
    if not read_format(name).channels:
        value = f"It writes {text}"
        marked = mark(name, write_calls(name, [("f", {"a": "VALUE"})]))
        for written, quoted in (
            ('"VALUE"', json.dumps(value, ensure_ascii=False)),
            ("'VALUE'", repr(value)),
            ("VALUE", value),
        ):
            marked = marked.replace(written, quoted)
        assert json.loads(read(name + MARK, marked).calls[0][2]) == {"a": value}
