"""`scripts/replay-drafts` on a small repository."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from atom.config.limits import SuffixLimits
from atom.runtime.draft.speculation import NgramDrafter
from atom.runtime.draft.suffix import SuffixDrafter
from scripts import replay_drafts
from scripts.replay_drafts import Counts, act, git, record, replay

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "sleeps", "until", "noon"]


@pytest.fixture
def commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Those of a repository in which a file is written, changed in two places, and tested; the first one is left out."""
    monkeypatch.setattr(replay_drafts, "ROOT", tmp_path)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    lines = [f"{number} {' '.join(WORDS)}" for number in range(20)]

    def commit(message: str, **files: str) -> None:
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/")
            path.parent.mkdir(exist_ok=True)
            path.with_suffix(".py").write_text(text)
        git("add", ".")
        author = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
        git(*author, "commit", "-qm", message)

    commit("begin", a="\n")
    commit("write\n\nall", a="\n".join([*lines, "end"]), b="# b\n")
    commit("edit", a="\n".join([*lines[:2], "changed", *lines[2:15], *lines[16:], "end"]), tests__a="assert True\n")
    return git("log", "--format=%H", "-2").split()[::-1]


def test_a_commit_is_read_edited_tested_and_committed(commits: list[str]):
    told, answers = zip(*act(commits[1], 10), strict=True)
    kinds = [answer.splitlines()[1][len("<function=") : -1] for answer in answers]
    assert kinds == ["read", "edit", "edit", "write", "run", "run"]
    assert told[0].count("<|im_start|>") == 2 and "edit<|im_end|>" in told[0] and WORDS[0] in told[1]
    first, second = (answer.split("\n<parameter=")[2:] for answer in answers[1:3])
    assert first[0].count("fox") == first[1].count("fox") == 4 and "changed" in first[1]
    assert second[0].count("fox") == 5 and second[1].count("fox") == 4
    assert "pytest -q tests/a.py" in answers[4] and "git commit -am 'edit'" in answers[5]
    assert [answer.splitlines()[1] for _, answer in act(commits[0], 10)] == ["<function=write>", "<function=run>"]


def test_a_replay_counts_what_is_accepted(commits: list[str]):
    codes: dict[str, int] = {}

    def encode(text: str) -> list[int]:
        return [codes.setdefault(word, len(codes)) for word in text.replace("\n", " \n ").split(" ")]

    sessions = record(commits, 30, encode)
    num_tokens = sum(len(answer) - 1 for session in sessions for _, answer in session)
    assert [len(session) for session in sessions] == [4, 6]
    for drafter in (NgramDrafter(3, 2, 4), SuffixDrafter(3, SuffixLimits())):
        counts = replay(sessions, drafter, 3)
        assert 0 < counts.accepted < counts.drafted <= 3 * counts.steps
        assert num_tokens - counts.accepted <= counts.steps < num_tokens, (
            "each computes a token, but for one after an end"
        )
    answer = [1, 2, 3, 4, 5, 6]
    assert replay([[([9, 9], answer), ([8], answer)]], SuffixDrafter(3, SuffixLimits(max_spec_factor=9)), 3) == Counts(
        steps=5 + 2, drafted=2 * 3, accepted=3 + 1
    )
