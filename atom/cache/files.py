"""Write and check the files of a cache entry.

An entry is written whole, with a manifest that has the size and sha256 of each file, and is read only if these hold.

fill_folder(new, Manifest("pieces", key, about, now, "me@here", {}), {"piece.so": code})
check_owner(folder, is_folder=True)              # Unfit: somebody else can have written it
read_manifest(raw)                               # Damaged: it is not what was published
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import os
import platform
import pwd
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

BINARIES = "binaries"  # the kind of what is compiled of our kernels
WEIGHTS = "weights"  # the kind of what is made while weights load
KINDS = (BINARIES, "pieces", "failures", "artifacts", WEIGHTS)
MANIFEST = "manifest.json"
MAX_JSON = 64 << 20  # bytes of a manifest; a larger one is not read
KEY = re.compile(r"[0-9a-f]{1,128}")
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,99}")  # of a file in an entry: never a path; fits a tar header
UNFINISHED = re.compile(r"\.(.+)-([1-9]\d{0,8})-[0-9a-f]{16}")  # folders that are being written or removed: host, pid
UNFINISHED_SECONDS = 3600  # after which such a folder counts as abandoned
CHUNK = 1 << 20  # bytes


class Manifest(NamedTuple):
    kind: str
    key: str
    about: dict[str, Any]
    created: datetime
    built_by: str
    files: dict[str, tuple[int, str]]  # name -> bytes, sha256

    def as_json(self) -> bytes:
        files = {name: {"size": size, "sha256": digest} for name, (size, digest) in self.files.items()}
        return seal(self._asdict() | {"created": self.created.isoformat(), "files": files})


class Unfit(Exception):
    """An entry is not used, since somebody else can have written it."""

    then = "ignored"


class Damaged(Unfit):
    """An entry is not what was published."""

    then = "built anew"


def fill_folder(folder: Path, manifest: Manifest, files: Mapping[str, bytes | Path]) -> None:
    """Write the files and their manifest to a folder, and sync them to disk."""
    written: dict[str, tuple[int, str]] = {}
    for name, content in files.items():
        assert NAME.fullmatch(name) and name != MANIFEST, f"{name!r} is no name for a file of the cache"
        with io.BytesIO(content) if isinstance(content, bytes) else open(content, "rb") as source:
            written[name] = write_file(folder / name, source)
    write_file(folder / MANIFEST, io.BytesIO(manifest._replace(files=written).as_json()))
    sync_folder(folder)


def seal_folder(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a folder whose files are there, and sync them to disk."""
    written: dict[str, tuple[int, str]] = {}
    for path in sorted(folder.iterdir()):
        with open_file(path, False) as file:
            written[path.name] = os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
    write_file(folder / MANIFEST, io.BytesIO(manifest._replace(files=written).as_json()))
    sync_folder(folder)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file atomically, and sync it to disk."""
    new = unfinished_name(path.parent)
    try:
        write_file(new, io.BytesIO(content))
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_file(path: Path, source: BinaryIO) -> tuple[int, str]:
    """Write all bytes to a new file, and sync it to disk; their number and sha256."""
    with create_file(path) as file:
        written = copy_bytes(source, file)
        os.fsync(file.fileno())
    return written


def create_file(path: Path) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")


def copy_bytes(source: BinaryIO, target: BinaryIO, size: int | None = None) -> tuple[int, str]:
    """Copy all bytes, or `size` of them; their number and sha256."""
    digest, num = hashlib.sha256(), 0
    while chunk := source.read(CHUNK if size is None else min(CHUNK, size - num)):
        target.write(chunk)
        digest.update(chunk)
        num += len(chunk)
    target.flush()
    return num, digest.hexdigest()


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unfinished_name(parent: Path) -> Path:
    """A new name next to entries, with the host and pid of this process."""
    return parent / f".{_host()}-{os.getpid()}-{secrets.token_hex(8)}"


def discard(path: Path) -> None:
    """Remove a path atomically, by a rename first."""
    aside = unfinished_name(path.parent)
    os.rename(path, aside)
    if stat.S_ISDIR(aside.lstat().st_mode):
        shutil.rmtree(aside)
    else:
        aside.unlink()


def sweep_unfinished(parent: Path) -> None:
    """Remove unfinished folders of processes that are dead, and those that are too old."""
    for name in os.listdir(parent):
        if is_abandoned(parent / name):
            shutil.rmtree(parent / name, ignore_errors=True)


def is_abandoned(path: Path) -> bool:
    """Whether a path is unfinished and was left by a process that is dead or has had it for too long."""
    if not (match := UNFINISHED.fullmatch(path.name)):
        return False
    with contextlib.suppress(OSError):
        is_ours = match[1] == _host() and not _is_alive(int(match[2]))
        return is_ours or time.time() - path.lstat().st_mtime > UNFINISHED_SECONDS
    return False


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody else's
    return True


@contextlib.contextmanager
def locked(cache: Path, name: str, on_wait: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Hold a lock, as the only process and thread; no lock is held if the folder cannot be written.

    `on_wait` is called before waiting for another holder. A thread must not take it twice: it would wait for
    itself. It is released when the process dies. Its file goes with it, so that none pile up.
    """
    path, lock = cache / "locks" / f"{name}.lock", -1
    with contextlib.suppress(Unfit, OSError):
        prepare_folder(path.parent)
        lock = _lock(path, on_wait)
    try:
        yield
    finally:
        if lock >= 0:
            with contextlib.suppress(OSError):
                path.unlink()  # while it is held: who waits for it sees that it is gone
            os.close(lock)


def _lock(path: Path, on_wait: Callable[[], object]) -> int:
    """Lock a file that is made for that; its descriptor, to be closed. OSError if that cannot be done."""
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(lock, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), path.lstat()):
                    return lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)  # its last holder has removed it


def prepare_folder(folder: Path) -> Path:
    """Make a folder and the one it is in if they are missing. Unfit if others can write to them."""
    for each in (folder.parent, folder):
        each.mkdir(0o700, parents=True, exist_ok=True)
        check_owner(each, is_folder=True)
    return folder


def check_owner(path: Path, *, is_folder: bool = False) -> None:
    """Raise unless a path is a folder or plain file that only the user and root can change."""
    status = path.lstat()
    if not (stat.S_ISDIR if is_folder else stat.S_ISREG)(status.st_mode):
        raise Damaged(f"{path} is no plain {'folder' if is_folder else 'file'}")
    if status.st_uid not in (os.geteuid(), 0):
        raise Unfit(f"{path} is owned by {_user(status.st_uid)}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Unfit(f"{path} is writable by others (chmod go-w would mend it, if you trust what is there)")


def open_file(path: Path, is_use: bool) -> io.BufferedReader:
    """Open a file of an entry. Only a use updates its time of access, if the file system keeps one."""
    check_owner(path)
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    with contextlib.suppress(PermissionError):  # a file of root's
        return os.fdopen(os.open(path, flags if is_use else flags | os.O_NOATIME), "rb")
    return os.fdopen(os.open(path, flags), "rb")


def sizes_of(folder: Path) -> dict[str, int]:
    """The files of a folder: name -> bytes."""
    try:
        with os.scandir(folder) as files:
            return {file.name: file.stat(follow_symlinks=False).st_size for file in files}
    except NotADirectoryError:
        return {}


def seal(body: Mapping[str, Any]) -> bytes:
    """Write JSON that holds a checksum of itself."""
    body = json.loads(json.dumps(body, allow_nan=False))
    return json.dumps({**body, "sha256": _digest(body)}, indent=1).encode()


def unseal(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw)
        digest = body.pop("sha256")
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        raise Damaged("its JSON is damaged") from None
    if not isinstance(body, dict) or digest != _digest(body):
        raise Damaged("the checksum of its JSON is wrong")
    return body


def _digest(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def read_manifest(raw: bytes) -> Manifest:
    body = unseal(raw)
    try:
        files = {name: (file["size"], file["sha256"]) for name, file in body.pop("files").items()}
        manifest = Manifest(**body | {"created": datetime.fromisoformat(body["created"]), "files": files})
    except (ValueError, TypeError, AttributeError, KeyError):
        raise Damaged(f"{MANIFEST} is damaged") from None
    texts = (manifest.kind, manifest.key, manifest.built_by, *(digest for _, digest in files.values()))
    is_whole = all(isinstance(text, str) for text in texts) and isinstance(manifest.about, dict)
    is_whole &= all(isinstance(size, int) for size, _ in files.values()) and manifest.created.tzinfo is not None
    if not is_whole or not all(NAME.fullmatch(name) and name != MANIFEST for name in files):
        raise Damaged(f"{MANIFEST} is damaged")
    return manifest


def reason_of(error: Exception) -> str:
    return str((error.strerror if isinstance(error, OSError) else None) or error)


def user_and_machine() -> str:
    return f"{_user(os.geteuid())}@{_host()}"


def _user(id: int) -> str:
    try:
        return pwd.getpwuid(id).pw_name
    except KeyError:
        return f"user {id}"


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9.-]", "-", platform.node())[:100] or "localhost"
