from __future__ import annotations

import errno
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from atom.checkpoint import SilentProgress, Tokenizer, hub, open_checkpoint, stop_ids
from atom.checkpoint.progress import RichProgress
from atom.errors import AtomError, CheckpointError


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("", "no checkpoint ''"),
        ("./nowhere", "no such folder or .gguf file, and no hub id"),
        ("/no/such/folder", "no such folder or .gguf file, and no hub id"),
        ("~/surely/not/here", "no such folder or .gguf file, and no hub id"),
        ("a/b/c", "no such folder or .gguf file, and no hub id"),
        ("owner/name@v2", "write checkpoint=owner/name revision=v2"),
        ("two words", "no such folder or .gguf file, and no hub id"),
        ("model.gguf", "no such folder or .gguf file"),
        ("x" * 5000, "File name too long"),
        (__file__, "is no .gguf file; name the folder"),
    ],
)
def test_a_location_that_is_nothing_is_refused_with_what_was_looked_for(location: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(location)


def test_a_folder_wins_over_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "org" / "name" / "config.json").write_text('{"hidden_size": 3}')
    assert open_checkpoint("org/name").config["hidden_size"] == 3


@pytest.mark.parametrize("weights", [True, False])
def test_a_hub_id_is_fetched_without_pickles_and_other_formats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: bool
) -> None:
    files = ["config.json", "model.safetensors", "model.gguf", "pytorch_model.bin", "tokenizer.json", "merges.txt"]
    files += ["tokenizer.model", "chat_template.jinja", "onnx/model.safetensors", "consolidated.safetensors"]
    seen: dict[str, Any] = {}

    def snapshot(name: str, **options: Any) -> str:
        seen.update(options, name=name)
        (tmp_path / "config.json").write_text("{}")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    checkpoint = open_checkpoint("org/name", revision="v2", weights=weights)
    filters = {"allow_patterns": seen["allow_patterns"], "ignore_patterns": seen["ignore_patterns"]}
    chosen = set(huggingface_hub.utils.filter_repo_objects(files, **filters))
    described = {"config.json", "tokenizer.json", "merges.txt", "tokenizer.model", "chat_template.jinja"}
    assert chosen == described | ({"model.safetensors"} if weights else set())
    assert (seen["name"], seen["revision"], checkpoint.location) == ("org/name", "v2", "org/name")


class Response:
    status_code, headers, request, text = 404, {}, None, ""


def raiser(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def test_names_of_a_single_file_on_the_hub_are_known_before_it_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = tmp_path / "0123abc"
    commit.mkdir()
    (commit / "config.json").write_text("{}")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(commit))
    checkpoint, asked = open_checkpoint("org/name", revision="v2", weights=False), list[Any]()

    def parse(*of: str, revision: str) -> Any:
        asked.append((*of, revision))
        return SimpleNamespace(tensors={"a.weight": ..., "b.weight": ...})

    monkeypatch.setattr(huggingface_hub, "parse_safetensors_file_metadata", parse)
    assert set(checkpoint.names()) == {"a.weight", "b.weight"}
    assert asked == [("org/name", "model.safetensors", "0123abc")]


@pytest.mark.parametrize(
    "error", [errors.OfflineModeIsEnabled("off"), errors.RemoteEntryNotFoundError("404", response=Response())]
)
def test_names_are_not_known_offline_and_without_such_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    checkpoint = open_checkpoint("org/name", weights=False)
    monkeypatch.setattr(huggingface_hub, "parse_safetensors_file_metadata", raiser(error))
    assert not checkpoint.names()
    monkeypatch.setattr(huggingface_hub, "parse_safetensors_file_metadata", raiser(RuntimeError("first\nsecond")))
    with pytest.raises(CheckpointError, match=r"cannot download the header of org/name/model\.safetensors: .*first$"):
        checkpoint.names()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.RepositoryNotFoundError("404\nlong", response=Response()), "no model on the hub"),
        (errors.GatedRepoError("403\nlong", response=Response()), "org/name is gated: .*HF_TOKEN"),
        (errors.RevisionNotFoundError("404", response=Response()), "org/name has no revision v2"),
        (errors.LocalEntryNotFoundError("offline\nlong"), "the hub cannot be reached"),
        (errors.HFValidationError("bad name"), "no checkpoint org/name"),
        (OSError(errno.EACCES, "denied"), r"cannot download org/name \(revision v2\): .*denied"),
        (RuntimeError("first\nsecond"), "cannot download .*first$"),
    ],
)
def test_trouble_with_the_hub_is_one_line(monkeypatch: pytest.MonkeyPatch, error: Exception, message: str) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", raiser(error))
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint("org/name", revision="v2")
    assert "\n" not in str(caught.value)


def test_bytes_that_are_received_and_written_are_counted_once() -> None:
    class Recorder:
        done = 0

        def advance(self, amount: int, /) -> None:
            self.done += amount

    task = Recorder()
    bar = hub.counting_bar(task)
    files, received, written = bar(total=2, desc="Fetching 2 files"), bar(unit="B"), bar(unit="B", total=90)
    received.update(50)
    written.update(30)
    assert task.done == 50
    written.update(60)
    files.update(2)
    assert task.done == 90


def test_a_full_disk_while_fetching_is_an_error_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    error = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", raiser(error))
    with pytest.raises(AtomError, match="the disk is full") as caught:
        open_checkpoint("org/name")
    assert caught.value.exit_code == 1


class Words:
    """The least a tokenizer needs: its ids are places in a list."""

    def encode(self, sequence: str, *, add_special_tokens: bool = True) -> Any: ...
    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str: ...
    def token_to_id(self, token: str) -> int | None:
        return {"</s>": 2, "<s>": 1}.get(token)

    def get_vocab_size(self) -> int:
        return 3

    def get_added_tokens_decoder(self) -> dict[int, Any]:
        return {}


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({}, {}, set()),
        ({"eos_token_id": None}, {"eos_token_id": 7}, {7}),
        ({"eos_token_id": [2, 5]}, {"eos_token_id": [7, 8]}, {2, 5, 7, 8}),
        ({"eos_token_id": 0}, {}, {0}),
    ],
)
def test_stop_ids_are_those_of_all_three_sources(
    tmp_path: Path, config: dict[str, Any], generation: dict[str, Any], expected: set[int]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    checkpoint = open_checkpoint(str(tmp_path))
    tokenizer = Tokenizer(Words(), special_tokens={"eos_token": "</s>", "bos_token": "<s>"})
    assert stop_ids(checkpoint, None) == expected
    assert stop_ids(checkpoint, tokenizer) == expected | {2}


@pytest.mark.parametrize("eos", [[[1]], "x", {}, 1.5, True, [None], [1, "2"]], ids=str)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_an_eos_that_is_no_token_id_is_named(tmp_path: Path, file: str, eos: Any) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(CheckpointError, match=re.escape(f"eos_token_id={json.dumps(eos)} in its config.json or")):
        stop_ids(open_checkpoint(str(tmp_path)), None)


def test_opening_a_checkpoint_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    code = (
        "import sys; from atom.checkpoint import *; import atom.checkpoint.gguf, atom.checkpoint.embedded; "
        f"open_checkpoint({str(tmp_path)!r}).tokenizer(); "
        "print({'torch', 'transformers', 'huggingface_hub', 'rich', 'jinja2'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("total", [None, 10])
def test_progress_goes_to_stderr_or_nowhere(capfd: pytest.CaptureFixture[str], total: int | None) -> None:
    with SilentProgress().task("Loading weights", total) as task:
        task.advance(10)
    assert capfd.readouterr() == ("", "")
    with RichProgress().task("Loading [weights]", total) as task:
        task.advance(10)
    out, err = capfd.readouterr()
    assert out == "" and "Loading [weights]" in err


def test_a_revision_is_of_a_hub_id(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="has no revision v2; only a hub id has"):
        open_checkpoint(str(tmp_path), revision="v2")
