from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom.serve.output.reasoning_parser import ReasoningSplitter, is_opened

TAGS = ("<think>", "</think>")
texts = st.lists(st.sampled_from(["<think>", "</think>", "<", "think>", "/", "\n", " ", "a", "yes."]), max_size=10)


def split(pieces: list[str], is_inside: bool = False) -> tuple[str, str]:
    splitter = ReasoningSplitter(TAGS, is_inside=is_inside)
    parts = [splitter.push(piece) for piece in pieces] + [splitter.finish()]
    return "".join(reasoning for reasoning, _ in parts), "".join(content for _, content in parts)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>Hm.\n<call>f", "Hm.", "<call>f"),
        ("<think>Hm.</think>\n<call>f", "Hm.", "<call>f"),
        ("<think>Hm.</think>\nSo <call>f", "Hm.", "So <call>f"),
        ("<think>Hm <call", "Hm <call", ""),
        ("<call>f", "", "<call>f"),
    ],
)
def test_another_marker_may_end_the_reasoning_and_is_content(text: str, reasoning: str, content: str):
    for pieces in ([text], list(text)):
        splitter = ReasoningSplitter(TAGS, ends=["<call>"])
        parts = [*map(splitter.push, pieces), splitter.finish()]
        assert ("".join(each for each, _ in parts), "".join(each for _, each in parts)) == (reasoning, content)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>Hm.</think>Yes.", "Hm.", "Yes."),
        ("<think>\n\nHm.\n So.\n</think>\n\nYes.\n", "Hm.\n So.", "Yes.\n"),
        ("\n<think></think>\nYes.", "", "Yes."),
        ("<think>\n\n</think>\n\nYes.", "", "Yes."),
        ("Yes.", "", "Yes."),
        ("\n Yes.", "", "\n Yes."),
        ("The tag <think> opens, </think> closes.", "", "The tag <think> opens, </think> closes."),
        ("<think>a</think>b<think>c</think>d", "a", "b<think>c</think>d"),
        ("<think>a < b and </thin", "a < b and </thin", ""),
        ("<think>Hm.\n", "Hm.\n", ""),
        ("<thi", "", "<thi"),
        ("", "", ""),
        ("  \n", "", "  \n"),
    ],
)
def test_what_is_between_the_markers_is_reasoning(text: str, reasoning: str, content: str):
    assert split([text]) == (reasoning, content)
    assert split(list(text)) == (reasoning, content)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
        ("\nHm.</think>Yes.", "Hm.", "Yes."),
        (" Hm.</think>Yes.", " Hm.", "Yes."),
        ("<think>\nHm.</think>Yes.", "Hm.", "Yes."),
        ("</think>Yes.", "", "Yes."),
        ("Hm.", "Hm.", ""),
        ("<thi", "<thi", ""),
    ],
)
def test_the_opening_marker_may_be_in_the_prompt(text: str, reasoning: str, content: str):
    assert split([text], is_inside=True) == (reasoning, content)
    assert split(list(text), is_inside=True) == (reasoning, content)


@given(texts.map("".join), st.lists(st.integers(0, 60)), st.booleans())
def test_the_parts_do_not_depend_on_where_the_text_is_cut(text: str, cuts: list[int], is_inside: bool):
    ends = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(ends)]
    assert split(pieces, is_inside) == split([text], is_inside)


def test_only_what_may_be_a_marker_is_held_back():
    splitter = ReasoningSplitter(TAGS)
    assert splitter.push("\n<th") == ("", "")
    assert splitter.push("ink>Let me") == ("Let me", "")
    assert splitter.push(" see.\n\n") == (" see.", "")
    assert splitter.push("So </b> <") == ("\n\nSo </b> ", "")
    assert splitter.push("/think>\n") == ("", "")
    assert splitter.push("\nIt <") == ("", "It <")
    assert splitter.push("think>\n") == ("", "think>\n")


def test_an_answer_without_reasoning_is_not_held_back():
    splitter = ReasoningSplitter(TAGS)
    assert splitter.push("I") == ("", "I")
    assert splitter.push("<think>") == ("", "<think>")


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("<|user|>Hi<|assistant|><think>\n", True),
        ("<|user|>Hi<|assistant|><think>", True),
        ("<|user|>Hi<|assistant|><think>\n\n</think>\n\n", False),
        ("<|user|>What is <think>?<|assistant|>", False),
        ("", False),
    ],
)
def test_a_prompt_opens_reasoning_where_it_ends_with_the_marker(prompt: str, expected: bool):
    assert is_opened(prompt, TAGS) is expected
