from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf_files
import huggingface_hub
import pytest
import tiny
from huggingface_hub import errors

from atom.checkpoint import hub, open_checkpoint
from atom.checkpoint.address import Address, choose_gguf, parse_address, short_name
from atom.config.load import load
from atom.config.shorthand import may_be_checkpoint
from atom.errors import CheckpointError

PAGE = "https://huggingface.co/Qwen/Qwen3-8B"


@pytest.mark.parametrize(
    ("location", "expected", "short"),
    [
        ("Qwen/Qwen3-8B", Address("Qwen/Qwen3-8B"), "Qwen/Qwen3-8B"),
        ("gpt2", Address("gpt2"), "gpt2"),
        (PAGE, Address("Qwen/Qwen3-8B"), "Qwen/Qwen3-8B"),
        (f"{PAGE}/", Address("Qwen/Qwen3-8B"), "Qwen/Qwen3-8B"),
        (f"{PAGE}?library=vllm#usage", Address("Qwen/Qwen3-8B"), "Qwen/Qwen3-8B"),
        (f"{PAGE}/tree/main", Address("Qwen/Qwen3-8B", "main"), "Qwen/Qwen3-8B"),
        (f"{PAGE}/tree/refs%2Fpr%2F1", Address("Qwen/Qwen3-8B", "refs/pr/1"), f"{PAGE}/tree/refs%2Fpr%2F1"),
        (f"{PAGE}/blob/main/x.gguf", Address("Qwen/Qwen3-8B", "main", "x.gguf"), "Qwen/Qwen3-8B:x.gguf"),
        (f"{PAGE}/resolve/v2/Q4/x%20y.gguf?download=true", Address("Qwen/Qwen3-8B", "v2", "Q4/x y.gguf"), None),
        ("http://www.huggingface.co/a/b", Address("a/b"), "a/b"),
        ("hf.co/a/b-GGUF:Q4_K_M", Address("a/b-GGUF", None, "Q4_K_M"), "a/b-GGUF:Q4_K_M"),
        ("a/b-GGUF:Q4_K_M", Address("a/b-GGUF", None, "Q4_K_M"), "a/b-GGUF:Q4_K_M"),
        ("/models/qwen3", None, "/models/qwen3"),
        ("a/b/c", None, "a/b/c"),
        ("https://example.com/a/b", None, "https://example.com/a/b"),
    ],
)
def test_addresses_as_people_write_them(location: str, expected: Address | None, short: str | None) -> None:
    assert parse_address(location) == expected
    assert short_name(location) == (short or location)


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("https://huggingface.co/datasets/a/b", "is not a model's page; write owner/name"),
        ("https://huggingface.co/", "is not a model's page"),
        (f"{PAGE}/blob/main/config.json", "names a part of Qwen/Qwen3-8B, which is opened whole"),
        (f"{PAGE}/tree/main/onnx", "names a part of Qwen/Qwen3-8B"),
    ],
)
def test_pages_that_are_no_model_are_refused(location: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse_address(location)


FILES = [
    "README.md", "mmproj-x-Q8_0.gguf", "x-Q4_K_M.gguf", "x-UD-Q4_K_M.gguf", "x-Q8_0.gguf", "BF16/x-BF16-00001-of-00002.gguf",
    "BF16/x-BF16-00002-of-00002.gguf", "Q6_K/x-00001-of-00001.gguf", "x-IQ3_M.gguf", "y-IQ3_M.gguf",
    "x-Q3_K-00002-of-00002.gguf",
]  # fmt: skip


@pytest.mark.parametrize(
    ("tag", "expected"),
    [
        (None, ["x-Q4_K_M.gguf"]),
        ("Q4_K_M", ["x-Q4_K_M.gguf"]),
        ("q8_0", ["x-Q8_0.gguf"]),
        ("UD-Q4_K_M", ["x-UD-Q4_K_M.gguf"]),
        ("BF16", ["BF16/x-BF16-00001-of-00002.gguf", "BF16/x-BF16-00002-of-00002.gguf"]),
        ("BF16/x-BF16-00002-of-00002.gguf", ["BF16/x-BF16-00001-of-00002.gguf", "BF16/x-BF16-00002-of-00002.gguf"]),
        ("x-BF16-00001-of-00002.gguf", ["BF16/x-BF16-00001-of-00002.gguf", "BF16/x-BF16-00002-of-00002.gguf"]),
        ("Q6_K", ["Q6_K/x-00001-of-00001.gguf"]),
        ("y-IQ3_M.gguf", ["y-IQ3_M.gguf"]),
    ],
)
def test_a_tag_chooses_a_file_with_all_its_parts(tag: str | None, expected: list[str]) -> None:
    assert choose_gguf(Address("a/b", None, tag), FILES) == expected


@pytest.mark.parametrize(
    ("tag", "files", "message"),
    [
        ("Q5_K_M", FILES, r"a/b: :Q5_K_M is no file of BF16/x-BF16\.gguf, .*x-Q8_0\.gguf"),
        ("Q4", FILES, ":Q4 is no file of"),
        ("Q4_K", FILES, ":Q4_K is no file of"),
        ("IQ3_M", FILES, r":IQ3_M is 2 files of x-IQ3_M\.gguf, y-IQ3_M\.gguf; write a/b:TAG"),
        ("Q3_K", FILES, "has 1 of the 2 parts of x-Q3_K"),
        (None, FILES[-3:-1], "the default :Q4_K_M is no file of"),
        (None, ["config.json"], r"a/b has no \.gguf file on the hub"),
    ],
)
def test_a_tag_of_no_file_or_of_several_lists_them(tag: str | None, files: list[str], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        choose_gguf(Address("a/b", None, tag), files)


def test_one_file_needs_no_tag() -> None:
    assert choose_gguf(Address("a/b"), ["x.gguf", "mmproj.gguf", "x-mmproj-f16.gguf"]) == ["x.gguf"]


@pytest.fixture
def on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A repository org/tiny-GGUF with a split file of Granite; what is asked of the hub."""
    tiny.save_changed("granite", tmp_path / "folder")
    (tmp_path / "Q8_0").mkdir()
    gguf_files.convert(tmp_path / "folder", tmp_path / "Q8_0" / "tiny.gguf", max_tensors=20)
    files = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.gguf")]
    asked: list[Any] = []

    def fetch(name: str, path: str, *, revision: str | None, **_: Any) -> str:
        asked.append((name, path, revision))
        return str(tmp_path / path)

    def model_info(name: str, *, revision: str | None) -> Any:
        asked.append((name, revision))
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=file) for file in files])

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
    monkeypatch.setattr(huggingface_hub, "model_info", model_info)
    return asked


@pytest.mark.parametrize(
    ("location", "revision"),
    [
        ("org/tiny-GGUF:q8_0", None),
        ("hf.co/org/tiny-GGUF", None),
        ("https://huggingface.co/org/tiny-GGUF/blob/v2/Q8_0/tiny-00002-of-00002.gguf", "v2"),
    ],
)
def test_a_file_of_the_hub_is_fetched_with_all_its_parts(
    on_the_hub: list[Any], location: str, revision: str | None
) -> None:
    checkpoint = open_checkpoint(location)
    assert checkpoint.config["gguf_architecture"] == "granite" and "model.norm.weight" in checkpoint.tensors
    parts = [f"Q8_0/tiny-0000{part}-of-00002.gguf" for part in (1, 2)]
    assert on_the_hub == [("org/tiny-GGUF", revision), *(("org/tiny-GGUF", part, revision) for part in parts)]
    assert checkpoint.location == "org/tiny-GGUF/Q8_0/tiny-00001-of-00002.gguf"


def test_a_configuration_takes_an_address_and_shortens_it(on_the_hub: list[Any]) -> None:
    config = load(["checkpoint=https://hf.co/org/tiny-GGUF/blob/main/Q8_0/tiny-00001-of-00002.gguf?download=true"])
    assert config.checkpoint == "org/tiny-GGUF:Q8_0/tiny-00001-of-00002.gguf"
    assert (config.model.name, config.model.attention.scale) == ("granite", 0.2)


def test_a_page_of_one_revision_is_not_read_at_another() -> None:
    with pytest.raises(CheckpointError, match="is of the revision v2, not v3; leave one of them out"):
        open_checkpoint(f"{PAGE}/tree/v2", revision="v3")


def test_the_files_of_a_repository_are_those_of_the_cache_without_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise errors.OfflineModeIsEnabled("off")

    (tmp_path / "Q8_0").mkdir()
    (tmp_path / "Q8_0" / "x.gguf").write_bytes(b"")
    monkeypatch.setattr(huggingface_hub, "model_info", fail)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    assert hub.list_files("a/b") == ["Q8_0/x.gguf"]


@pytest.mark.parametrize("word", [PAGE, "a/b-GGUF:Q4_K_M", "a/b"])
def test_a_single_word_is_taken_for_a_checkpoint(word: str) -> None:
    assert may_be_checkpoint(word)
