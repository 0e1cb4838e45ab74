"""The cache folder on disk: folders of files under a kind and a key, and whether they can be trusted.

    cache = Cache(Path("~/.cache/atom-run"))
    with cache.lock("pieces", key):                              # one process builds, the others wait
        folder = cache.find("pieces", key)                       # None: not there, or not to be trusted
        if folder is None:
            folder = cache.publish("pieces", key, {"piece.so": code}, about={"name": "layer of llama"})
    for line in cache.warnings: …                                # what was ignored or could not be written, and why

What lies there runs as the user. So an entry counts only when its manifest names every file with size and sha256, and
when nobody but the user and root can have written it. It appears and disappears by one rename; a hit writes nothing.
"""

from __future__ import annotations

import contextlib
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
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from filelock import FileLock

from atom.errors import ArtifactError

KINDS = ("pieces", "artifacts")
MANIFEST = "manifest.json"
BUNDLE = "bundle.json"  # the first member of a bundle
MAX_JSON = 64 << 20  # bytes of a manifest; a larger one is not read
KEY = re.compile(r"[0-9a-f]{1,128}")
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,99}")  # of a file in an entry: never a path, fits a tar header
UNFINISHED = re.compile(r"\.(.+)-([1-9]\d{0,8})-[0-9a-f]{16}")  # folders that are being written or removed: host, pid
UNFINISHED_SECONDS = 3600  # after which such a folder is nobody's, whoever made it
CHUNK = 1 << 20  # bytes


@dataclass(frozen=True)
class Entry:
    """What is known of an entry without reading its files."""

    kind: str
    key: str
    about: dict[str, Any]  # what it was made of, in words
    files: dict[str, int]  # name -> bytes, without the manifest
    size: int  # bytes on disk
    created: datetime
    used: datetime  # as exactly as the file system notes reads: often to the day
    built_by: str  # user@machine
    fault: str | None = None  # why it is not used


class _Manifest(NamedTuple):
    kind: str
    key: str
    about: dict[str, Any]
    created: datetime
    built_by: str
    files: dict[str, tuple[int, str]]  # name -> bytes, sha256

    def as_json(self) -> bytes:
        files = {name: {"size": size, "sha256": digest} for name, (size, digest) in self.files.items()}
        return _seal(self._asdict() | {"created": self.created.isoformat(), "files": files})


class _Unfit(Exception):
    """Why an entry is not used: somebody else can have written it."""

    then = "ignored"


class _Damaged(_Unfit):
    """It is not what was published."""

    then = "built anew"


class Cache:
    """Entries in <folder>/<kind>/<key>/. Any number of processes may share the folder, and it may be read-only."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(os.path.realpath(folder.expanduser()))
        self.warnings: list[str] = []  # one line for each entry ignored and each failure to write
        self._private: tempfile.TemporaryDirectory[str] | None = None

    def find(self, kind: str, key: str) -> Path | None:
        """The folder of a trusted entry. None where there is none; what is not trusted has a line in `warnings`."""
        place = self._place(kind, key)
        try:
            self._check(kind, key, is_use=True)
        except (_Unfit, OSError) as error:
            if os.path.lexists(place):  # else it never was there, or has just been removed
                what, then = _reason(error), error.then if isinstance(error, _Unfit) else "ignored"
                self._warn(f"{what if str(self.folder) in what else f'{place}: {what}'}, {then}")
            return None
        return place

    def verify(self, kind: str, key: str) -> str | None:
        """What is wrong with an entry, every checksum and owner looked at. It does not count as a use."""
        try:
            self._check(kind, key)
        except (_Unfit, OSError) as error:
            return _reason(error)
        return None

    def describe(self, kind: str, key: str) -> Entry | None:
        """What an entry says of itself, its files unread. None where `find` would have to say no already."""
        entry = self._entry(kind, key)
        return None if entry is None or entry.fault else entry

    def entries(self) -> list[Entry]:
        """Every entry, also those that are not trusted, which have a `fault`; checksums are not looked at."""
        result: list[Entry | None] = []
        for kind in KINDS:
            try:
                keys = sorted(filter(KEY.fullmatch, os.listdir(self.folder / kind)))
            except (FileNotFoundError, NotADirectoryError):
                continue  # nothing has been stored yet
            except OSError as error:
                self._warn(f"{self.folder / kind}: {_reason(error)}, ignored")
                continue
            result += [self._entry(kind, key) for key in keys]
        return [entry for entry in result if entry is not None]

    @contextlib.contextmanager
    def lock(self, kind: str, key: str) -> Iterator[None]:
        """Held by one process, and one thread in it, at a time; not at all where the folder cannot be written.

        Not to be taken twice by one thread: it would wait for itself. The death of a process frees it.
        """
        place = self._place(kind, key)
        lock = FileLock(self.folder / "locks" / f"{place.parent.name}-{place.name}.lock", mode=0o600)
        with contextlib.suppress(_Unfit, OSError, NotImplementedError):
            self._prepare("locks")
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def publish(self, kind: str, key: str, files: Mapping[str, bytes | Path], about: Mapping[str, Any]) -> Path:
        """Store files under a key: the folder of the entry, of another process's if that was first.

        Where the cache folder cannot be written, a private folder that lives as long as this process and that `find`
        does not know. ArtifactError where there is no room for that either.
        """
        manifest = _Manifest(kind, key, dict(about), datetime.now(UTC), _user_and_machine(), {})
        try:
            return self._store(manifest, files)
        except (_Unfit, OSError) as error:
            self._warn(f"{self.folder} takes no entries ({_reason(error)}): what is built is not kept for the next run")
        try:
            self._private = self._private or tempfile.TemporaryDirectory(prefix="atom-run-")
            folder = Path(tempfile.mkdtemp(dir=self._private.name))
            _fill(folder, manifest, files)
        except OSError as error:
            fix = "free some space, or set cache= to a folder that can be written"
            raise ArtifactError(
                f"{kind}/{key[:12]} fits neither in {self.folder} nor beside other temporary files ({error}); {fix}"
            ) from None
        return folder

    def copy(self, entry: Entry, source: Cache) -> Path:
        """Take over another cache's entry, with who built it and when. ArtifactError where it cannot be written."""
        try:
            manifest = source._check(entry.kind, entry.key)
            folder = source._place(entry.kind, entry.key)
            return self._store(manifest, {name: folder / name for name in manifest.files})
        except (_Unfit, OSError) as error:
            raise ArtifactError(f"{entry.kind}/{entry.key[:12]} is not imported: {_reason(error)}") from None

    def remove(self, entry: Entry) -> None:
        """Remove an entry; no process sees half of it. ArtifactError where that is not allowed."""
        place = self._place(entry.kind, entry.key)
        try:
            _discard(place)
        except FileNotFoundError:
            return  # another process was first
        except OSError as error:
            raise ArtifactError(f"{place} cannot be removed: {_reason(error)}") from None

    def close(self) -> None:
        """Remove the private folder of what could not be stored."""
        if self._private is not None:
            self._private.cleanup()
            self._private = None

    def _place(self, kind: str, key: str) -> Path:
        assert kind in KINDS and KEY.fullmatch(key), f"{kind}/{key} is no kind and key of the cache"
        return self.folder / kind / key

    def _warn(self, line: str) -> None:
        if line not in self.warnings:
            self.warnings.append(line)

    def _check(self, kind: str, key: str, *, is_thorough: bool = True, is_use: bool = False) -> _Manifest:
        """The manifest of an entry whose owners, modes, names and sizes, and if thorough checksums, are in order."""
        place = self._place(kind, key)
        for folder in (self.folder, place.parent, place):
            _check_owner(folder, is_folder=True)
        names = set(os.listdir(place))
        if MANIFEST not in names:
            raise _Damaged(f"{MANIFEST} is missing")
        with _open(place / MANIFEST, is_use) as file:
            manifest = _read_manifest(file.read(MAX_JSON))
        if (manifest.kind, manifest.key) != (kind, key):
            raise _Damaged(f"{MANIFEST} is that of {manifest.kind}/{manifest.key[:12]}")
        if missing := manifest.files.keys() - names:
            raise _Damaged(f"{min(missing)} is missing")
        if strange := names - manifest.files.keys() - {MANIFEST}:
            raise _Damaged(f"{MANIFEST} does not name {min(strange)!r}")
        for name, (size, digest) in manifest.files.items():
            with _open(place / name, is_use) as file:
                found = os.fstat(file.fileno()).st_size
                if found != size:
                    raise _Damaged(f"{name} has {found:,} bytes instead of {size:,}")
                if is_thorough and hashlib.file_digest(file, "sha256").hexdigest() != digest:
                    raise _Damaged(f"the checksum of {name} is wrong")
        return manifest

    def _entry(self, kind: str, key: str) -> Entry | None:
        place = self._place(kind, key)
        try:
            sizes = _sizes(place)
            seen = (place / MANIFEST if MANIFEST in sizes else place).lstat()  # before it is read below
        except OSError:
            return None
        made, used = (datetime.fromtimestamp(at, UTC) for at in (seen.st_mtime, max(seen.st_atime, seen.st_mtime)))
        size = sum(sizes.values())
        sizes.pop(MANIFEST, None)
        try:
            told = self._check(kind, key, is_thorough=False)
        except (_Unfit, OSError) as error:
            return Entry(kind, key, {}, sizes, size, made, used, "", _reason(error))
        return Entry(kind, key, told.about, sizes, size, told.created, used, told.built_by)

    def _prepare(self, name: str) -> Path:
        """A folder of the cache to write to, made where it is missing."""
        folder = self.folder / name
        self.folder.mkdir(0o700, parents=True, exist_ok=True)
        folder.mkdir(0o700, exist_ok=True)
        for each in (self.folder, folder):
            _check_owner(each, is_folder=True)
        return folder

    def _store(self, manifest: _Manifest, files: Mapping[str, bytes | Path]) -> Path:
        place = self._place(manifest.kind, manifest.key)
        _sweep(self._prepare(manifest.kind))
        new = _unfinished(place.parent)
        try:
            new.mkdir(0o700)
            _fill(new, manifest, files)
            while not self._put(new, place):
                with contextlib.suppress(FileNotFoundError):  # another process was first
                    _discard(place)
        finally:
            shutil.rmtree(new, ignore_errors=True)
        return place

    def _put(self, new: Path, place: Path) -> bool:
        """Move a folder to its place; a trusted entry there is as good. False where something else is in the way."""
        try:
            os.rename(new, place)
        except OSError:
            if not os.path.lexists(place):
                raise
            return self.verify(place.parent.name, place.name) is None
        _sync(place.parent)
        return True


def export(cache: Cache, entry: Entry, path: Path) -> list[Entry]:
    """Write an artifact and the pieces that it names into one tar file: what went into it, the artifact last.

    ArtifactError where one of them is missing or not trusted; then nothing is written.
    """
    keys = [("pieces", key) for key in _piece_keys(entry)] + [(entry.kind, entry.key)]
    try:
        entries = [_checked(cache, kind, key) for kind, key in keys]
    except _Damaged as error:
        raise ArtifactError(f"{path} is not written: {error}; run the model once to build it anew") from None
    head = _seal({"artifact": entry.key, "entries": [f"{kind}/{key}" for kind, key in keys]})
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    try:
        with tarfile.open(part, "x", format=tarfile.USTAR_FORMAT) as bundle:
            bundle.addfile(_member(BUNDLE, len(head)), io.BytesIO(head))
            for each in entries:
                for name in (MANIFEST, *each.files):
                    file = cache.folder / each.kind / each.key / name
                    with open(file, "rb") as stream:
                        size = os.fstat(stream.fileno()).st_size
                        bundle.addfile(_member(f"{each.kind}/{each.key}/{name}", size), stream)
        os.replace(part, path)
    except OSError as error:
        raise ArtifactError(f"{path} cannot be written: {_reason(error)}") from None
    finally:
        with contextlib.suppress(OSError):
            part.unlink()
    return entries


@contextlib.contextmanager
def open_bundle(path: Path) -> Iterator[tuple[Cache, list[Entry]]]:
    """A bundle's content as a cache of its own, in a private folder, and its entries, the artifact last.

    Every name, size and checksum is in order: else ArtifactError. Who made it is not known by that, and it is code.
    """
    with tempfile.TemporaryDirectory(prefix="atom-run-") as folder:
        cache = Cache(Path(folder))
        try:
            names, key = _unpack(path, cache.folder)
            entries = [_checked(cache, *name.split("/")) for name in names]
            if names != [*(f"pieces/{piece}" for piece in _piece_keys(entries[-1])), f"artifacts/{key}"]:
                raise _Damaged("it does not hold the pieces that its artifact names")
        except OSError as error:
            raise ArtifactError(f"{path} cannot be unpacked: {_reason(error)}") from None
        except (_Unfit, ArtifactError, tarfile.TarError) as error:
            raise ArtifactError(f"{path} is no whole bundle: {_reason(error)}; get it again") from None
        yield cache, entries


def _unpack(path: Path, folder: Path) -> tuple[list[str], str]:
    """Write the members of a bundle below a folder: the entries' names as the head tells them, and the artifact's key.

    Only plain members of kinds and names that we know, so that none leaves the folder. tarfile reads one header at
    a time and nothing else, since what it does for links, sparse files and long names is not wanted. A tar is not
    compressed: what is written is no more than what is read.
    """
    with open(path, "rb") as bundle:
        end = os.fstat(bundle.fileno()).st_size
        names: list[str] = []
        key = ""
        while any(block := bundle.read(tarfile.BLOCKSIZE)):
            member = tarfile.TarInfo.frombuf(block, "utf-8", "replace")
            if member.type != tarfile.REGTYPE or not 0 <= member.size <= end - bundle.tell():
                raise _Damaged(f"its member {member.name!r} is no plain file of the size that it says")
            if not names:
                if member.name != BUNDLE or member.size > MAX_JSON:
                    raise _Damaged(f"it does not begin with {BUNDLE}")
                names, key = _read_head(bundle.read(member.size))
            else:
                place, _, name = member.name.rpartition("/")
                if place not in names or not NAME.fullmatch(name):
                    raise _Damaged(f"it holds {member.name!r}, which its head does not name")
                for each in (folder / place).parent, folder / place:
                    each.mkdir(0o700, exist_ok=True)
                with _create(folder / place / name) as file:
                    _copy(bundle, file, member.size)
            bundle.seek(-member.size % tarfile.BLOCKSIZE, os.SEEK_CUR)
    if not names:
        raise _Damaged("it is empty")
    return names, key


def _read_head(raw: bytes) -> tuple[list[str], str]:
    head = _unseal(raw)
    names, key = head.get("entries"), head.get("artifact")
    if not isinstance(names, list) or not names or not isinstance(key, str):
        raise _Damaged(f"{BUNDLE} does not say what it holds")
    for name in names:
        kind, _, rest = name.partition("/") if isinstance(name, str) else ("", "", "")
        if kind not in KINDS or not KEY.fullmatch(rest):
            raise _Damaged(f"{BUNDLE} names {name!r}, which is no entry")
    return names, key


def _checked(cache: Cache, kind: str, key: str) -> Entry:
    fault, entry = cache.verify(kind, key), cache.describe(kind, key)
    if fault or entry is None:
        raise _Damaged(f"{kind}/{key[:12]}: {fault or 'it is gone'}")
    return entry


def _piece_keys(artifact: Entry) -> list[str]:
    keys = artifact.about.get("pieces", [])
    if not isinstance(keys, list) or not all(isinstance(key, str) and KEY.fullmatch(key) for key in keys):
        raise ArtifactError(f"artifacts/{artifact.key[:12]} does not say which pieces it is made of")
    return list(dict.fromkeys(keys))


def _member(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)  # mode 0644, nobody's, of no time
    member.size = size
    return member


def _fill(folder: Path, manifest: _Manifest, files: Mapping[str, bytes | Path]) -> None:
    """Write the files and their manifest to a folder, and have the disk hold them."""
    written: dict[str, tuple[int, str]] = {}
    for name, content in files.items():
        assert NAME.fullmatch(name) and name != MANIFEST, f"{name!r} is no name for a file of the cache"
        with _create(folder / name) as file:
            if isinstance(content, bytes):
                written[name] = _copy(io.BytesIO(content), file)
            else:
                with open(content, "rb") as source:
                    written[name] = _copy(source, file)
            os.fsync(file.fileno())
    with _create(folder / MANIFEST) as file:
        file.write(manifest._replace(files=written).as_json())
        file.flush()
        os.fsync(file.fileno())
    _sync(folder)


def _create(path: Path) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")


def _copy(source: BinaryIO, target: BinaryIO, size: int | None = None) -> tuple[int, str]:
    """Copy all, or so many bytes: how many, and their sha256."""
    digest, num = hashlib.sha256(), 0
    while chunk := source.read(CHUNK if size is None else min(CHUNK, size - num)):
        target.write(chunk)
        digest.update(chunk)
        num += len(chunk)
    target.flush()
    return num, digest.hexdigest()


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unfinished(parent: Path) -> Path:
    """A new name beside entries that tells which process it belongs to."""
    return parent / f".{_host()}-{os.getpid()}-{secrets.token_hex(8)}"


def _discard(place: Path) -> None:
    """Remove what is at a path, by a rename first, so that nobody sees half of it."""
    aside = _unfinished(place.parent)
    os.rename(place, aside)
    if stat.S_ISDIR(aside.lstat().st_mode):
        shutil.rmtree(aside)
    else:
        aside.unlink()


def _sweep(parent: Path) -> None:
    """Remove what processes left unfinished that are dead, or started it too long ago."""
    for name in os.listdir(parent):
        if match := UNFINISHED.fullmatch(name):
            with contextlib.suppress(OSError):
                is_ours = match[1] == _host() and not _is_alive(int(match[2]))
                if is_ours or time.time() - (parent / name).lstat().st_mtime > UNFINISHED_SECONDS:
                    shutil.rmtree(parent / name, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody else's
    return True


def _check_owner(path: Path, *, is_folder: bool = False) -> None:
    """Raise unless a path is a folder or plain file, and none but the user and root can change it."""
    found = path.lstat()
    if not (stat.S_ISDIR if is_folder else stat.S_ISREG)(found.st_mode):
        raise _Damaged(f"{path} is no plain {'folder' if is_folder else 'file'}")
    if found.st_uid not in (os.geteuid(), 0):
        raise _Unfit(f"{path} is owned by {_user(found.st_uid)}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _Unfit(f"{path} is writable by others (chmod go-w would mend it, if you trust what is there)")


def _open(path: Path, is_use: bool) -> io.BufferedReader:
    """A file of an entry. Only a use leaves its time of access behind, where the file system keeps one."""
    _check_owner(path)
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    with contextlib.suppress(PermissionError):  # of a file that is root's
        return os.fdopen(os.open(path, flags if is_use else flags | os.O_NOATIME), "rb")
    return os.fdopen(os.open(path, flags), "rb")


def _sizes(folder: Path) -> dict[str, int]:
    """The files of an entry, if it is a folder: name -> bytes."""
    try:
        with os.scandir(folder) as found:
            return {file.name: file.stat(follow_symlinks=False).st_size for file in found}
    except NotADirectoryError:
        return {}


def _seal(body: Mapping[str, Any]) -> bytes:
    """JSON that holds a checksum of itself."""
    body = json.loads(json.dumps(body, allow_nan=False))
    return json.dumps({**body, "sha256": _digest(body)}, indent=1).encode()


def _unseal(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw)
        digest = body.pop("sha256")
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        raise _Damaged("its JSON is damaged") from None
    if not isinstance(body, dict) or digest != _digest(body):
        raise _Damaged("the checksum of its JSON is wrong")
    return body


def _digest(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _read_manifest(raw: bytes) -> _Manifest:
    body = _unseal(raw)
    try:
        files = {name: (file["size"], file["sha256"]) for name, file in body.pop("files").items()}
        manifest = _Manifest(**body | {"created": datetime.fromisoformat(body["created"]), "files": files})
    except (ValueError, TypeError, AttributeError, KeyError):
        raise _Damaged(f"{MANIFEST} is damaged") from None
    texts = (manifest.kind, manifest.key, manifest.built_by, *(digest for _, digest in files.values()))
    is_whole = all(isinstance(text, str) for text in texts) and isinstance(manifest.about, dict)
    is_whole &= all(isinstance(size, int) for size, _ in files.values()) and manifest.created.tzinfo is not None
    if not is_whole or not all(NAME.fullmatch(name) and name != MANIFEST for name in files):
        raise _Damaged(f"{MANIFEST} is damaged")
    return manifest


def _reason(error: Exception) -> str:
    return str((error.strerror if isinstance(error, OSError) else None) or error)


def _user_and_machine() -> str:
    return f"{_user(os.geteuid())}@{_host()}"


def _user(id: int) -> str:
    try:
        return pwd.getpwuid(id).pw_name
    except KeyError:
        return f"user {id}"


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9.-]", "-", platform.node())[:100] or "localhost"
