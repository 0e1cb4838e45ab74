from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atom.measurement.conversations import read_entry, read_sharegpt


@pytest.mark.parametrize(("text", "mistake"), [("{", "is no JSON file"), ("{}", "is not a list of conversations")])
def test_a_file_that_is_no_sharegpt_is_named(text: str, mistake: str, tmp_path: Path):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=mistake):
        read_sharegpt(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("entry", "conversation"),
    [
        ({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}, ("q", "a")),
        ({"prompt": "q", "completion": "a"}, ("q", "a")),
        ({"instruction": "q", "output": "a"}, ("q", "a")),
        ({"question": "q"}, ("q", None)),
        ({"messages": [{"role": "user", "content": [1]}, {"role": "assistant", "content": "a"}]}, None),
        ({"prompt": "half \ud83d", "question": "q"}, ("q", None)),
        ({"conversations": [{"value": "half \ud83d"}, {"value": "a"}]}, None),
        ({"label": 3}, None),
        ("text", None),
    ],
)
def test_the_forms_in_which_data_sets_have_conversations(entry: Any, conversation: Any):
    assert read_entry(entry) == conversation
