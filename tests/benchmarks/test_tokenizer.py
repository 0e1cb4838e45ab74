from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors
from tokenizers import Tokenizer as Reference

from atom.benchmarks.benchmark_utils import UsageError
from atom.benchmarks.tokenizer import load_tokenizer


def test_it_counts_as_the_tokenizers_library_does(tokenizer_folder: Path, reference_tokenizer: Reference):
    tokenizer, text = load_tokenizer(str(tokenizer_folder)), "the season of light 光"
    assert tokenizer.encode(text) == reference_tokenizer.encode(text).ids
    assert tokenizer.encode(text)[0] == 0  # <s>
    assert tokenizer.encode(text, add_special_tokens=False) == tokenizer.encode(text)[1:]
    assert tokenizer.decode(tokenizer.encode(text)) == f"<s>{text}"
    assert (tokenizer.vocab_size, tokenizer.added_ids) == (366, {0, 1, 365})


def test_a_message_is_put_into_the_chat_template(tokenizer_folder: Path):
    tokenizer = load_tokenizer(str(tokenizer_folder))
    assert tokenizer.has_template
    assert tokenizer.apply_template("Hi") == "<s><user>Hi<assistant>"


def test_a_limit_in_the_file_does_not_cut_texts(tokenizer_folder: Path, tmp_path: Path):
    shutil.copytree(tokenizer_folder, tmp_path, dirs_exist_ok=True)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    tokenizer["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert len(load_tokenizer(str(tmp_path)).encode("it was the best of times")) > 4


@pytest.mark.slow
def test_no_torch_is_loaded(tokenizer_folder: Path):
    program = (
        "import sys; from atom.benchmarks.tokenizer import load_tokenizer as load;"
        f"load({str(tokenizer_folder)!r}).apply_template('Hi'); assert 'torch' not in sys.modules"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_a_hub_id_fetches_no_weights(tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple[str, dict[str, Any]]] = []

    def snapshot_download(name: str, **options: Any) -> str:
        asked.append((name, options))
        return str(tokenizer_folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert load_tokenizer("org/model").has_template
    ((name, options),) = asked
    assert name == "org/model"
    assert not any("safetensors" in pattern or pattern == "*" for pattern in options["allow_patterns"])


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            errors.LocalEntryNotFoundError("x"),
            "no tokenizer org/m: no folder, not in the hub's cache, no way to the hub",
        ),
        (errors.HFValidationError("x"), "no tokenizer org/m: no such folder here and no such model on the hub"),
        (OSError("disk\nbroken"), r"cannot fetch the tokenizer org/m \(disk\)"),
    ],
)
def test_a_tokenizer_that_cannot_be_had_is_an_error_with_what_to_do(
    error: Exception, line: str, monkeypatch: pytest.MonkeyPatch
):
    def snapshot_download(name: str, **options: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(UsageError, match=f"^{line}; name a folder that has one with --tokenizer, or check the network"):
        load_tokenizer("org/m")


def test_a_file_is_not_looked_for_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def snapshot_download(name: str, **options: Any) -> str:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    (tmp_path / "weights.bin").write_bytes(b"")
    for name in (str(tmp_path / "weights.bin"), "elsewhere/model.gguf"):  # the server may be on another machine
        with pytest.raises(UsageError, match=f"^{name} is a file, and tokenizers .* with --tokenizer$"):
            load_tokenizer(name)


def test_a_folder_without_or_with_a_broken_tokenizer_is_named(tmp_path: Path):
    with pytest.raises(UsageError, match=f"{tmp_path} has no tokenizer: it has none of tokenizer.json, "):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UsageError, match=f"cannot load a tokenizer from {tmp_path} .*; name another with --tokenizer"):
        load_tokenizer(str(tmp_path))
