"""Export an artifact and its pieces as one file, and open such a file.

export(cache, entry, Path("qwen3.tar"), measured)
with open_bundle(Path("qwen3.tar")) as (cache, entries, measured):    # intact, but code of an unknown author
    ...
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from atom.cache.cache import Cache, Entry
from atom.cache.files import (
    BINARIES,
    KEY,
    KINDS,
    MANIFEST,
    MAX_JSON,
    NAME,
    Damaged,
    Unfit,
    copy_bytes,
    create_file,
    reason_of,
    seal,
    sync_folder,
    unseal,
)
from atom.cache.temporary import temporary_folder
from atom.errors import ArtifactError

BUNDLE = "bundle.json"  # the first member of a bundle


class Bundle(NamedTuple):
    """The content of a bundle."""

    cache: Cache
    entries: list[Entry]  # the artifact last
    measured: dict[str, Any]  # tuned parameters, unread


def export(cache: Cache, entry: Entry, path: Path, measured: Mapping[str, Any]) -> list[Entry]:
    """Write an artifact and its pieces to one tar file; the entries in it, the artifact last.

    All binaries of its device in the cache go with it, since only their compiler knows which ones it needs.
    measured: included as it is. ArtifactError, with nothing written, if an entry is missing or not trusted.
    """
    is_gpu = is_for_gpu(entry)
    of_device = [each for each in cache.entries(BINARIES) if (each.about.get("device") != "cpu") == is_gpu]
    binaries = [each.key for each in of_device if each.fault is None]
    keys = [(BINARIES, key) for key in binaries] + [("pieces", key) for key in _piece_keys(entry)]
    keys.append((entry.kind, entry.key))
    try:
        entries = [_checked(cache, kind, key) for kind, key in keys]
    except Damaged as error:
        raise ArtifactError(f"{path} is not written: {error}; run the model once to build it anew") from None
    names = [f"{kind}/{key}" for kind, key in keys]
    if path.exists() and not path.is_file():
        raise ArtifactError(f"{path} is no file, and would be replaced by one; name another path")
    head = seal({"artifact": entry.key, "entries": names, "measured": dict(measured)})
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
        with open(part, "rb") as written:
            os.fsync(written.fileno())
        os.replace(part, path)
        sync_folder(path.parent)
    except OSError as error:
        raise ArtifactError(f"{path} cannot be written: {reason_of(error)}") from None
    finally:
        with contextlib.suppress(OSError):
            part.unlink()
    return entries


@contextlib.contextmanager
def open_bundle(path: Path) -> Iterator[Bundle]:
    """Open a bundle as a cache of its own, in a private folder.

    ArtifactError unless every name, size and checksum is right. That does not say who made it, and it is code.
    """
    with temporary_folder() as folder:
        cache = Cache(Path(folder))
        try:
            names, key, measured = _unpack(path, cache.folder)
            entries = [_checked(cache, *name.split("/")) for name in names]
            named = [name for name in names if not name.startswith(f"{BINARIES}/")]
            if named != [*(f"pieces/{piece}" for piece in _piece_keys(entries[-1])), f"artifacts/{key}"]:
                raise Damaged("it does not hold the pieces that its artifact names")
        except OSError as error:
            raise ArtifactError(f"{path} cannot be unpacked: {reason_of(error)}") from None
        except (Unfit, ArtifactError, tarfile.TarError) as error:
            raise ArtifactError(f"{path} is not a whole bundle: {reason_of(error)}; get it again") from None
        yield Bundle(cache, entries, measured)


def _unpack(path: Path, folder: Path) -> tuple[list[str], str, dict[str, Any]]:
    """Unpack the members of a bundle to a folder; the entries' names, the artifact's key, and the tuned parameters.

    Only plain members of kinds and names that we know, so that none leaves the folder. tarfile reads one header at
    a time and nothing else, since what it does for links, sparse files and long names is not wanted. A tar is not
    compressed: what is written is no more than what is read.
    """
    with open(path, "rb") as bundle:
        end = os.fstat(bundle.fileno()).st_size
        names: list[str] = []
        key, measured = "", dict[str, Any]()
        while any(block := bundle.read(tarfile.BLOCKSIZE)):
            member = tarfile.TarInfo.frombuf(block, "utf-8", "replace")
            if member.type != tarfile.REGTYPE or not 0 <= member.size <= end - bundle.tell():
                raise Damaged(f"its member {member.name!r} is no plain file of the size that it says")
            if not names:
                if member.name != BUNDLE or member.size > MAX_JSON:
                    raise Damaged(f"it does not begin with {BUNDLE}")
                names, key, measured = _read_head(bundle.read(member.size))
            else:
                entry, _, name = member.name.rpartition("/")
                if entry not in names or not NAME.fullmatch(name):
                    raise Damaged(f"it holds {member.name!r}, which its head does not name")
                for each in (folder / entry).parent, folder / entry:
                    each.mkdir(0o700, exist_ok=True)
                with create_file(folder / entry / name) as file:
                    copy_bytes(bundle, file, member.size)
            bundle.seek(-member.size % tarfile.BLOCKSIZE, os.SEEK_CUR)
    if not names:
        raise Damaged("it is empty")
    return names, key, measured


def _read_head(raw: bytes) -> tuple[list[str], str, dict[str, Any]]:
    head = unseal(raw)
    names, key, measured = head.get("entries"), head.get("artifact"), head.get("measured", {})
    if not isinstance(names, list) or not names or not isinstance(key, str) or not isinstance(measured, dict):
        raise Damaged(f"{BUNDLE} does not say what it holds")
    for name in names:
        kind, _, rest = name.partition("/") if isinstance(name, str) else ("", "", "")
        if kind not in KINDS or not KEY.fullmatch(rest):
            raise Damaged(f"{BUNDLE} names {name!r}, which is not an entry")
    return names, key, measured


def _checked(cache: Cache, kind: str, key: str) -> Entry:
    fault, entry = cache.verify(kind, key), cache.describe(kind, key)
    if fault or entry is None:
        raise Damaged(f"{kind}/{key[:12]}: {fault or 'it is gone'}")
    return entry


def _piece_keys(artifact: Entry) -> list[str]:
    keys = artifact.about.get("pieces", [])
    if not isinstance(keys, list) or not all(isinstance(key, str) and KEY.fullmatch(key) for key in keys):
        raise ArtifactError(f"artifacts/{artifact.key[:12]} does not say which pieces it is made of")
    return list(dict.fromkeys(keys))


def is_for_gpu(artifact: Entry) -> bool:
    ingredients = artifact.about.get("ingredients")
    return isinstance(ingredients, dict) and ingredients.get("device") != "cpu"


def _member(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)  # mode 0644, nobody's, of no time
    member.size = size
    return member
