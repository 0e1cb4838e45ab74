"""Windows of texts, and the built-in texts."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from atom.errors import ConfigError
from atom.jobs.eval.texts import Text, Window, choose_windows, cut_windows, read_human_eval, read_sonnets

TEXT = Text("t", [], [*range(10)], 10)
BEGUN = Text("t", [99], [*range(5)], 5)


def test_windows_without_overlap_leave_their_first_token_unscored():
    assert cut_windows(TEXT, 4) == [
        Window("t", [0, 1, 2, 3], 3, 4),
        Window("t", [4, 5, 6, 7], 3, 8),
        Window("t", [8, 9], 1, 10),
    ]
    assert cut_windows(Text("t", [], [0, 1, 2, 3, 4], 5), 4, 4) == [Window("t", [0, 1, 2, 3], 3, 4)], "a rest of one"


def test_windows_that_overlap_score_what_is_new():
    assert cut_windows(TEXT, 6, 3) == [
        Window("t", [0, 1, 2, 3, 4, 5], 5, 6),
        Window("t", [3, 4, 5, 6, 7, 8], 3, 9),
        Window("t", [6, 7, 8, 9], 1, 10),
    ]


def test_windows_of_texts_with_bos_score_every_token():
    assert cut_windows(BEGUN, 4, 3) == [Window("t", [99, 0, 1, 2], 3, 3), Window("t", [99, 3, 4], 2, 5)]
    with pytest.raises(ConfigError, match=r"^job.stride=4 is more than the 3 tokens of a text that a window has$"):
        cut_windows(BEGUN, 4, 4)
    with pytest.raises(ConfigError, match=r"^job.context_len=2: 2 special tokens begin each window; raise it$"):
        cut_windows(Text("t", [98, 99], [*range(5)], 5), 2)


def test_texts_take_turns_until_as_many_tokens_are_scored():
    one = [Window("one", [0, 1], 1, end) for end in (2, 4)]
    two = [Window("two", [0, 1, 2], 2, end) for end in (3, 6, 9)]
    assert choose_windows([one, two], 4) == [one[0], two[0], one[1]]
    assert choose_windows([one, two], 99) == [one[0], two[0], one[1], two[1], two[2]]


def test_built_in_texts_are_prompts_with_solutions_and_verse_without_the_plays(tmp_path: Path):
    rows = [{"prompt": f"def f{i}():\n", "canonical_solution": f"    return {i}\n", "test": "no"} for i in range(2)]
    (tmp_path / "rows").write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    (tmp_path / "verse").write_text("THE SONNETS\n1\nFrom fairest\nTHE END\nA PLAY\nTHE END\n")
    assert read_human_eval(tmp_path / "rows") == "def f0():\n    return 0\n\n\ndef f1():\n    return 1\n"
    assert read_sonnets(tmp_path / "verse") == "THE SONNETS\n1\nFrom fairest"
