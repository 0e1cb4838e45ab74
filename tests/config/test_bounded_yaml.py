from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from atom.config.bounded_yaml import parse_yaml
from atom.config.folders import CONF
from atom.errors import one_line

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4)
)


@given(VALUES)
def test_a_value_is_read_as_pyyaml_reads_it(value: Any):
    text = yaml.safe_dump(value)
    assert parse_yaml(text) == yaml.safe_load(text)


def test_every_shipped_file_is_read_as_pyyaml_reads_it():
    files = sorted(CONF.rglob("*.yaml"))
    assert len(files) > 100
    for file in files:
        assert parse_yaml(file.read_text("utf-8")) == yaml.safe_load(file.read_text("utf-8"))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("a: &x [1, 2]\nb: *x", {"a": [1, 2], "b": [1, 2]}),
        ("a: &x {y: 1, z: 2}\nb: {<<: *x, z: 3}", {"a": {"y": 1, "z": 2}, "b": {"y": 1, "z": 3}}),
        ("a: &x 1\nb: &x 2\nc: *x", {"a": 1, "b": 2, "c": 2}),
        ('!!str 1', "1"),
        ("! 1", 1),
        ("[" * 60 + "]" * 60, None),
    ],
)  # fmt: skip
def test_anchors_merges_and_tags_keep_their_meaning(text: str, value: Any):
    assert parse_yaml(text) == (yaml.safe_load(text) if value is None else value)


def billion_laughs(levels: int) -> str:
    """The last of the lists is 9^levels texts."""
    lists = [f"- &l{level + 1} [{', '.join([f'*l{level}'] * 9)}]" for level in range(1, levels)]
    return "\n".join(["- &l1 [x, x, x, x, x, x, x, x, x]", *lists])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nlevel: 2\nseed: 3", "^line 3, column 1: the key seed is set twice$"),
        ("a: {b: 1, b: 1}", "the key b is set twice"),
        ("a: &x [*x]", r"the alias \*x refers to nothing before it"),
        ("a: &x\n  b: *x", r"the alias \*x refers to nothing before it"),
        ("a: *x", r"the alias \*x refers to nothing before it"),
        ("[" * 600 + "]" * 600, "it is nested deeper than 64"),
        ("{a: " * 600 + "1" + "}" * 600, "it is nested deeper than 64"),
        ("- " * 600 + "1", "it is nested deeper than 64"),
        ("[" * 100_000, "maximum nesting depth|it is nested deeper"),
        (billion_laughs(6), "there are more than 100,000 values, an alias counted as what it stands for"),
        ("[" + "a," * 200_000 + "]", "there are more than 100,000 values.* put long lists .* as prompts=@FILE"),
        ("a: 1\n---\nb: 2", "there is more than one document"),
        ("day: 2024-13-45", "a value is malformed: "),
        ("9" * 5000, "a value is malformed: "),
        ("!!int x", "a value is malformed"),
        ("!!timestamp x", "a value is malformed"),
        ("!!python/name:os.system x", "python/name"),
        ("a: \x00", "."),
        ("a: '\ud800'", "a value is malformed"),
    ],
)
def test_what_has_no_bound_or_no_single_meaning_is_refused(text: str, message: str):
    with pytest.raises(yaml.YAMLError) as raised:
        parse_yaml(text)
    assert re.search(message, one_line(raised.value)), one_line(raised.value)
