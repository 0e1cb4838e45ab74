from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atom.checkpoint import open_checkpoint
from atom.checkpoint.files import MAX_DESCRIPTION, MAX_INDEX, MAX_TOKENIZER, read_file
from atom.errors import CheckpointError

FILES = {  # by name: what is there next to it
    "config.json": [],
    "generation_config.json": ["config.json"],
    "model.safetensors": ["config.json"],
    "model.safetensors.index.json": ["config.json"],
    "tokenizer.json": ["config.json"],
    "tokenizer_config.json": ["config.json"],
    "special_tokens_map.json": ["config.json", "tokenizer.json"],
    "chat_template.jinja": ["config.json", "tokenizer.json"],
    "tokenizer.model": ["config.json"],
    "merges.txt": ["config.json", "vocab.json"],
}
TOKENIZER = {"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    """A test that waits for a pipe ends."""

    def fail(*_: object) -> None:
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def open_all(folder: Path) -> None:
    open_checkpoint(str(folder)).tokenizer()


def make(folder: Path, name: str, put: Callable[[Path], object]) -> Path:
    for other in FILES[name]:
        (folder / other).write_text(json.dumps(TOKENIZER) if other == "tokenizer.json" else "{}")
    put(folder / name)
    return folder


@pytest.mark.parametrize("name", FILES)
def test_a_pipe_is_no_file_of_a_checkpoint(tmp_path: Path, name: str) -> None:
    make(tmp_path, name, os.mkfifo)
    with pytest.raises(CheckpointError, match=f"{name} is not a regular file"):
        open_all(tmp_path)


@pytest.mark.parametrize("name", FILES)
def test_a_device_is_no_file_of_a_checkpoint(tmp_path: Path, name: str) -> None:
    make(tmp_path, name, lambda path: path.symlink_to("/dev/zero"))
    with pytest.raises(CheckpointError, match=f"{name} is not a regular file"):
        open_all(tmp_path)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_far_too_large_is_not_read(tmp_path: Path, name: str) -> None:
    if name in ("tokenizer.model", "merges.txt", "model.safetensors"):
        pytest.skip("mapped, or read by transformers")
    make(tmp_path, name, lambda path: (path.touch(), os.truncate(path, 1 << 40)))
    limit = {"model.safetensors.index.json": MAX_INDEX, "tokenizer.json": MAX_TOKENIZER}.get(name, MAX_DESCRIPTION)
    with pytest.raises(CheckpointError, match=f"{name} has more than the {limit >> 20} MiB"):
        open_all(tmp_path)


def test_a_file_that_grows_while_it_is_read_has_a_limit_too(tmp_path: Path) -> None:
    path = Path("/proc/self/maps")  # whose size is 0 before it is read
    with pytest.raises(CheckpointError, match="more than the 0 MiB"):
        read_file(path, 100)


def test_a_link_to_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "blob").write_text('{"hidden_size": 3}')
    (tmp_path / "config.json").symlink_to("blob")
    assert open_checkpoint(str(tmp_path)).config["hidden_size"] == 3


def test_a_folder_in_the_place_of_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"cannot read .*config.json: Is a directory"):
        open_all(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "tiny.gguf"])
def test_a_pointer_of_git_lfs_is_named(tmp_path: Path, name: str):
    (tmp_path / "config.json").write_text("{}")
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 98765432\n"
    (tmp_path / name).write_text(pointer)
    with pytest.raises(CheckpointError, match=f"{name} is a pointer of Git LFS in place of the file; run git lfs pull"):
        open_checkpoint(str(tmp_path / name if name.endswith("gguf") else tmp_path))
