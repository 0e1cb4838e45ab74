"""Find, publish, list and remove entries of the cache folder.

cache = Cache(Path("~/.cache/atom-run"))
cache.find("pieces", key)                    # its folder, every checksum and owner checked; else None
cache.entries()                              # all entries; those that are not trusted have a `fault`
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from atom.cache.files import (
    KEY,
    KINDS,
    MANIFEST,
    MAX_JSON,
    Damaged,
    Manifest,
    Unfit,
    check_owner,
    discard,
    fill_folder,
    locked,
    open_file,
    prepare_folder,
    read_manifest,
    reason_of,
    seal_folder,
    sizes_of,
    sweep_unfinished,
    sync_folder,
    unfinished_name,
    user_and_machine,
)
from atom.cache.temporary import temporary_folder
from atom.errors import ArtifactError


@dataclass(frozen=True)
class Entry:
    """An entry, as known without reading its files."""

    kind: str
    key: str
    about: dict[str, Any]  # its ingredients, in words
    files: dict[str, int]  # name -> bytes, without the manifest
    size: int  # bytes on disk
    created: datetime
    used: datetime  # as precise as the file system's times of access: often to the day
    built_by: str  # user@machine
    fault: str | None = None  # why it is not used


class Cache:
    """Entries in <folder>/<kind>/<key>/. Any number of processes may share the folder, and it may be read-only."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(os.path.realpath(folder.expanduser()))
        self.warnings: list[str] = []  # a line for each ignored entry and each failure to write
        self._private: tempfile.TemporaryDirectory[str] | None = None
        self._making_private = threading.Lock()  # several threads may publish

    def find(self, kind: str, key: str, unread: Collection[str] = ()) -> Path | None:
        """The folder of a trusted entry, None without one; an entry that is not trusted has a line in `warnings`.

        unread: files whose checksums are not compared here: the caller has faster ones of large data that is no code
        """
        location = self._locate(kind, key)
        try:
            self._check(kind, key, is_use=True, unread=unread)
        except (Unfit, OSError) as error:
            if os.path.lexists(location):  # else it never existed, or has just been removed
                what, then = reason_of(error), error.then if isinstance(error, Unfit) else "ignored"
                self._warn(f"{what if str(self.folder) in what else f'{location}: {what}'}, {then}")
            return None
        return location

    def distrust(self, kind: str, key: str, fault: str) -> None:
        """Say in `warnings` what the caller has found wrong with an entry, which it builds anew, and remove it."""
        location = self._locate(kind, key)
        self._warn(f"{location}: {fault}, {Damaged.then}")
        with contextlib.suppress(OSError):
            discard(location)

    def holds(self, kind: str, key: str) -> bool:
        """Whether there is such an entry, trusted or not."""
        return os.path.lexists(self._locate(kind, key))

    def verify(self, kind: str, key: str) -> str | None:
        """Check every checksum and owner of an entry; what is wrong with it. This does not count as a use."""
        try:
            self._check(kind, key)
        except (Unfit, OSError) as error:
            return reason_of(error)
        return None

    def describe(self, kind: str, key: str) -> Entry | None:
        """An entry without reading its files; None if `find` would not trust it."""
        entry = self._entry(kind, key)
        return None if entry is None or entry.fault else entry

    def entries(self, *kinds: str) -> list[Entry]:
        """Every entry; those that are not trusted have a `fault`. Checksums are not checked."""
        result: list[Entry | None] = []
        for kind in kinds or KINDS:
            try:
                keys = sorted(filter(KEY.fullmatch, os.listdir(self.folder / kind)))
            except (FileNotFoundError, NotADirectoryError):
                continue  # nothing has been stored yet
            except OSError as error:
                self._warn(f"{self.folder / kind}: {reason_of(error)}, ignored")
                continue
            result += [self._entry(kind, key) for key in keys]
        return [entry for entry in result if entry is not None]

    def lock(self, kind: str, key: str, on_wait: Callable[[], object] = lambda: None) -> AbstractContextManager[None]:
        """Hold the lock of an entry, as `files.locked` says."""
        location = self._locate(kind, key)
        return locked(self.folder, f"{location.parent.name}-{location.name}", on_wait)

    def publish(self, kind: str, key: str, files: Mapping[str, bytes | Path], about: Mapping[str, Any]) -> Path:
        """Store files under a key; the entry's folder, or another process's if that was first.

        If the cache folder cannot be written, it is a private folder that lives as long as this process and is
        unknown to `find`. ArtifactError if there is no room for that either.
        """
        manifest = Manifest(kind, key, dict(about), datetime.now(UTC), user_and_machine(), {})
        try:
            return self._store(manifest, files)
        except (Unfit, OSError) as error:
            why = reason_of(error)
            self._warn(f"{self.folder} takes no entries ({why}): what is built is not kept for the next run")
        try:
            with self._making_private:
                self._private = self._private or temporary_folder()
            folder = Path(tempfile.mkdtemp(dir=self._private.name))
            fill_folder(folder, manifest, files)
        except OSError as error:
            fix = "free some space, or set cache= to a folder that can be written"
            raise ArtifactError(
                f"{kind}/{key[:12]} fits neither in {self.folder} nor with other temporary files ({error}); {fix}"
            ) from None
        return folder

    def begin(self, kind: str) -> Path | None:
        """A new folder to write the files of an entry into, for `finish`; None if nothing can be written."""
        try:
            parent = prepare_folder(self.folder / kind)
            sweep_unfinished(parent)
            new = unfinished_name(parent)
            new.mkdir(0o700)
        except (Unfit, OSError) as error:
            self._warn(f"{self.folder} takes no entries ({reason_of(error)}): {kind} are not kept for the next run")
            return None
        return new

    def finish(self, kind: str, key: str, folder: Path, about: Mapping[str, Any]) -> None:
        """Publish the files of a folder that `begin` gave under a key; OSError if that fails."""
        try:
            seal_folder(folder, Manifest(kind, key, dict(about), datetime.now(UTC), user_and_machine(), {}))
            self._place(folder, self._locate(kind, key))
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def copy(self, entry: Entry, source: Cache) -> Path:
        """Copy another cache's entry, with its builder and date. ArtifactError if it cannot be written."""
        try:
            manifest = source._check(entry.kind, entry.key)
            folder = source._locate(entry.kind, entry.key)
            return self._store(manifest, {name: folder / name for name in manifest.files})
        except (Unfit, OSError) as error:
            raise ArtifactError(f"{entry.kind}/{entry.key[:12]} is not imported: {reason_of(error)}") from None

    def remove(self, entry: Entry) -> None:
        """Remove an entry atomically. ArtifactError if that is not allowed."""
        location = self._locate(entry.kind, entry.key)
        try:
            discard(location)
        except FileNotFoundError:
            return  # another process was first
        except OSError as error:
            raise ArtifactError(f"{location} cannot be removed: {reason_of(error)}") from None

    def close(self) -> None:
        """Remove the private folder of entries that could not be stored."""
        if self._private is not None:
            self._private.cleanup()
            self._private = None

    def _locate(self, kind: str, key: str) -> Path:
        assert kind in KINDS and KEY.fullmatch(key), f"{kind}/{key} is no kind and key of the cache"
        return self.folder / kind / key

    def _warn(self, line: str) -> None:
        if line not in self.warnings:
            self.warnings.append(line)

    def _check(
        self, kind: str, key: str, *, is_thorough: bool = True, is_use: bool = False, unread: Collection[str] = ()
    ) -> Manifest:
        """Check the owners, modes, names and sizes of an entry, and checksums if thorough; its manifest."""
        location = self._locate(kind, key)
        for folder in (self.folder, location.parent, location):
            check_owner(folder, is_folder=True)
        names = set(os.listdir(location))
        if MANIFEST not in names:
            raise Damaged(f"{MANIFEST} is missing")
        with open_file(location / MANIFEST, is_use) as file:
            manifest = read_manifest(file.read(MAX_JSON))
        if (manifest.kind, manifest.key) != (kind, key):
            raise Damaged(f"{MANIFEST} is that of {manifest.kind}/{manifest.key[:12]}")
        if missing := manifest.files.keys() - names:
            raise Damaged(f"{min(missing)} is missing")
        if strange := names - manifest.files.keys() - {MANIFEST}:
            raise Damaged(f"{MANIFEST} does not name {min(strange)!r}")
        for name, (size, digest) in manifest.files.items():
            with open_file(location / name, is_use) as file:
                actual = os.fstat(file.fileno()).st_size
                if actual != size:
                    raise Damaged(f"{name} has {actual:,} bytes instead of {size:,}")
                if is_thorough and name not in unread and hashlib.file_digest(file, "sha256").hexdigest() != digest:
                    raise Damaged(f"the checksum of {name} is wrong")
        return manifest

    def _entry(self, kind: str, key: str) -> Entry | None:
        location = self._locate(kind, key)
        try:
            sizes = sizes_of(location)
            seen = (location / MANIFEST if MANIFEST in sizes else location).lstat()  # before it is read
        except OSError:
            return None
        made, used = (datetime.fromtimestamp(at, UTC) for at in (seen.st_mtime, max(seen.st_atime, seen.st_mtime)))
        size = sum(sizes.values())
        sizes.pop(MANIFEST, None)
        try:
            manifest = self._check(kind, key, is_thorough=False)
        except (Unfit, OSError) as error:
            return Entry(kind, key, {}, sizes, size, made, used, "", reason_of(error))
        return Entry(kind, key, manifest.about, sizes, size, manifest.created, used, manifest.built_by)

    def _store(self, manifest: Manifest, files: Mapping[str, bytes | Path]) -> Path:
        location = self._locate(manifest.kind, manifest.key)
        sweep_unfinished(prepare_folder(location.parent))
        new = unfinished_name(location.parent)
        try:
            new.mkdir(0o700)
            fill_folder(new, manifest, files)
            self._place(new, location)
        finally:
            shutil.rmtree(new, ignore_errors=True)
        return location

    def _place(self, new: Path, location: Path) -> None:
        """Move a folder to its location, in place of what is not trusted there."""
        while not self._put(new, location):
            with contextlib.suppress(FileNotFoundError):  # another process was first
                discard(location)

    def _put(self, new: Path, location: Path) -> bool:
        """Move a folder to its location, unless a trusted entry is there. False if anything else is there."""
        try:
            os.rename(new, location)
        except OSError:
            if not os.path.lexists(location):
                raise
            return self.verify(location.parent.name, location.name) is None
        sync_folder(location.parent)
        return True
