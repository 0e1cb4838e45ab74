from __future__ import annotations

from pathlib import Path

import pytest

from scripts.check_words import find_words, main

SOURCE = '''\
"""What is behind a page."""

def first(x):
    """Where there are none, x.

    It runs alone.
    """
    return x  # beside it, likewise


LABEL = "behind the text alone"  # behind nginx, left alone
'''


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "page.py"
    path.write_text(SOURCE)
    return path


def test_words_are_found_in_comments_and_docstrings_and_in_no_other_string(page: Path):
    found = [(line, word) for line, word, _ in find_words(page)]
    assert sorted(found) == [(1, "behind"), (4, "Where there are"), (6, "alone"), (8, "beside"), (8, "likewise")]


def test_words_are_found_in_names_of_functions(tmp_path: Path):
    page = tmp_path / "test_page.py"
    page.write_text(
        "def test_rows_are_left_alone(): ...\ndef test_b_stands_beside_c(beside=1): ...\nbehind_proxy = 1\n"
    )
    assert [(line, word) for line, word, _ in find_words(page)] == [(2, "beside")]


def test_a_word_makes_the_check_fail_and_names_the_line(page: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(page)]) == 1
    assert f"{page}:8: 'beside': write besides, next to\n" in capsys.readouterr().out
    page.write_text("x = 1  # next to it\n")
    assert main([str(page)]) == 0


def test_every_line_of_a_markdown_page_is_read(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("## Behind nginx\nA server [behind nginx](x.md#behind-nginx).\nA server behind a wall.\n")
    assert [(line, word) for line, word, _ in find_words(page)] == [(3, "behind")]
