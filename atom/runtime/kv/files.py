"""Keep KV blocks in files that survive a restart, written by a thread.

    files = KVFiles(Path("/var/lib/atom/kv"), 64 << 30, {"full": 65536})     # bytes of a block, by state kind
    files.write([Block(digest_of(prefix), "full", rows)])                    # later; dropped if the disk is too slow
    files.fetch(fetch)                                                       # of a prompt's blocks
    files.take_fetched()                                                     # the fetches that have ended

A block is known by the SHA-256 of what the KV depends on, its tenant's salt and all its tokens. Its file has that key
and a checksum of everything; a file that does not agree with them is removed and counts as missing. A file appears by
one rename, so servers may share a folder; it is not synced to the disk: what a power cut leaves of it fails the check.
What has not been used for longest is removed first.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from pathlib import Path
from threading import Condition, Thread
from typing import NamedTuple

import torch
from torch import Tensor
from xxhash import xxh3_128

from atom.cache.files import Unfit, check_owner, create_file, is_abandoned, unfinished_name
from atom.errors import ConfigError
from atom.runtime.kv.prefix_cache import Prefix
from atom.runtime.types import Sequence

LOG = logging.getLogger("atom.engine")
MAGIC = b"atom-kv1"
KEY_BYTES = 32
CHECKSUM_BYTES = 16
HEAD_BYTES = len(MAGIC) + KEY_BYTES + CHECKSUM_BYTES
QUEUED_BYTES = 256 << 20  # that wait to be written; more are dropped
SCANS = 16  # of the folder while its max number of bytes is written
KEPT_SHARE = 15 / 16  # of its max number of bytes, after files are removed


class Block(NamedTuple):
    """The content of a KV block that is to be written."""

    key: bytes
    kind: str
    row: Tensor  # its bytes, on the host
    ready: Callable[[], object] | None = None  # waits until they are there
    age: int = 0  # used before those of a lower age, which are to be removed later


@dataclass(eq=False)
class Fetch:
    """Blocks of a prompt that are read, or were."""

    key: bytes  # of the salt and tokens before `content`
    content: bytes  # tokens, `width` bytes for each block
    width: int
    needs: Callable[[int], Mapping[str, range]]  # number of blocks -> by state kind, those of them that are needed
    whole: Collection[str]  # kinds that need all blocks, whatever their number
    first: int  # blocks of the sequence before `content`
    sequence: Sequence
    deadline: float  # time.perf_counter() after which computing the rest is faster
    blocks: list[dict[str, Tensor]] = field(default_factory=list)  # by place in `content` and state kind
    is_dropped: bool = False

    @property
    def is_late(self) -> bool:
        return self.is_dropped or time.perf_counter() > self.deadline


def digest_of(prefix: Prefix) -> bytes:
    """The SHA-256 of a prefix, chained block by block."""
    path = []
    node: Prefix | None = prefix
    while node is not None and node.digest is None:
        path.append(node)
        node = node.parent
    digest = b"" if node is None or node.digest is None else node.digest
    for each in reversed(path):
        each.digest = digest = chain(digest, each.content)
    return digest


def chain(digest: bytes, content: bytes) -> bytes:
    return hashlib.sha256(digest + content).digest()


class KVFiles:
    """The files and their thread. One thread calls the public methods, any `stop`."""

    def __init__(self, folder: Path, max_bytes: int, sizes: Mapping[str, int], pin_memory: bool = False) -> None:
        """ConfigError if the folder cannot be made, or others can write to it."""
        try:
            folder.mkdir(0o700, parents=True, exist_ok=True)
            check_owner(folder, is_folder=True)
        except (OSError, Unfit) as error:
            raise ConfigError(f"serve.kv_cache_dir={folder}: {error}; choose a folder of your own") from None
        self.num_read = self.num_written = 0  # blocks
        self.is_stopped = False
        self._folder, self._max_bytes, self._sizes, self._pin_memory = folder, max_bytes, sizes, pin_memory
        self._changed = Condition()  # of what follows
        self._writes: deque[Block] = deque()
        self._num_queued = 0  # bytes of these
        self._fetches: deque[Fetch] = deque()
        self._fetched: list[Fetch] = []
        self._is_full = False  # nothing more is written
        self._num_bytes, self._num_unscanned = 0, math.inf  # of all files at the last scan, and written since
        self._thread = Thread(target=self._run, name="kv-files", daemon=True)
        self._thread.start()

    def has(self, key: bytes, kind: str) -> bool:
        return self._path(key, kind).exists()

    def fetch(self, fetch: Fetch) -> None:
        """Begin to read the blocks that there are."""
        with self._changed:
            self._fetches.append(fetch)
            self._changed.notify_all()

    def take_fetched(self) -> list[Fetch]:
        """The fetches that have ended since the last call."""
        with self._changed:
            fetched, self._fetched = self._fetched, []
            return fetched

    def wait(self, seconds: float) -> None:
        """Wait for a fetch to end."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._fetched), seconds)

    def write(self, blocks: SequenceOf[Block], max_bytes: float = QUEUED_BYTES) -> None:
        """Queue blocks to be written. Blocks that would make the queue larger than max_bytes are dropped."""
        with self._changed:
            for block in blocks:
                if not self._is_full and self._num_queued + block.row.nbytes <= max_bytes:
                    self._writes.append(block)
                    self._num_queued += block.row.nbytes
            self._changed.notify_all()

    def flush(self, seconds: float) -> None:
        """Wait until all is written, or so long."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_stopped or not self._num_queued, seconds)

    def stop(self) -> None:
        """Have the thread end after the block that it is writing."""
        with self._changed:
            self.is_stopped = True
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread; what is not written yet is lost."""
        self.stop()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.is_stopped or self._fetches or self._writes)
                if self.is_stopped:
                    return
                work = self._fetches.popleft() if self._fetches else self._writes.popleft()
            if isinstance(work, Fetch):
                self._run_fetch(work)
            else:
                self._run_write(work)

    def _run_fetch(self, fetch: Fetch) -> None:
        """Read the blocks of a prompt, and hand them over."""
        unread: list[bytes] = []
        try:
            unread = self._read_all(fetch)
        except Exception:  # the memory that is pinned may be lacking
            LOG.exception("serve.kv_cache_dir=%s: the KV of a prompt could not be read", self._folder)
        finally:
            with self._changed:
                self._fetched.append(fetch)
                self._changed.notify_all()
        for key, kind in ((key, kind) for key in unread for kind in self._sizes):
            self._read(key, kind)  # removes it if it is damaged too: one that is there is not written again

    def _run_write(self, block: Block) -> None:
        """Write a block that was queued."""
        try:
            self._write(block)
        except Exception:
            LOG.exception("serve.kv_cache_dir=%s: KV could not be written", self._folder)
        finally:
            with self._changed:
                self._num_queued -= block.row.nbytes
                self._changed.notify_all()

    def _read_all(self, fetch: Fetch) -> list[bytes]:
        """Read the blocks of a prompt until one is missing or time is up; the keys after one that cannot be read."""
        keys, key, num_max = list[bytes](), fetch.key, len(fetch.content) // fetch.width
        whole = [(kind, places) for kind, places in fetch.needs(num_max).items() if kind in fetch.whole]
        for place, start in enumerate(range(0, len(fetch.content), fetch.width)):
            key = chain(key, fetch.content[start : start + fetch.width])
            if not all(self.has(key, kind) for kind, places in whole if place in places):
                break
            keys.append(key)
        while keys and not self._has_needed(fetch, keys):
            keys.pop()
        needs, used, unread = fetch.needs(len(keys)), [], list[bytes]()
        for place, key in enumerate(keys):
            if fetch.is_late:
                break
            rows = {kind: self._read(key, kind) for kind, places in needs.items() if place in places}
            found = {kind: row for kind, row in rows.items() if row is not None}
            fetch.blocks.append(found)
            used += [self._path(key, kind) for kind in found]
            if any(row is None for row in rows.values()):
                unread = keys[place + 1 :]
                break
        for path in reversed(used):  # what follows a prefix is removed before it
            with contextlib.suppress(OSError):
                os.utime(path)
        self.num_read += len(used)
        return unread

    def _has_needed(self, fetch: Fetch, keys: list[bytes]) -> bool:
        """Whether there are files of the blocks that a sequence needs after this prefix, besides those of all kinds."""
        needs = fetch.needs(len(keys)).items()
        some = ((kind, places) for kind, places in needs if kind not in fetch.whole)
        return all(self.has(keys[place], kind) for kind, places in some for place in reversed(places))

    def _read(self, key: bytes, kind: str) -> Tensor | None:
        path, size = self._path(key, kind), self._sizes[kind]
        try:
            with open(path, "rb", opener=_open_plainly) as file:
                head = file.read(HEAD_BYTES)
                row = torch.empty(size, dtype=torch.uint8, pin_memory=self._pin_memory)
                num_read = file.readinto(row.numpy().data)
                is_whole = num_read == size and not file.read(1) and head == head_of(key, kind, row)
        except OSError:
            return None
        if not is_whole:
            LOG.warning("%s is damaged: removed", path)
            with contextlib.suppress(OSError):
                path.unlink()
        return row if is_whole else None

    def _write(self, block: Block) -> None:
        """Write a block. If the disk is full, nothing more is written from then on."""
        path, num_bytes = self._path(block.key, block.kind), HEAD_BYTES + block.row.nbytes
        if self._is_full or num_bytes > self._max_bytes:
            return
        new = unfinished_name(self._folder)
        try:
            if path.exists():
                self._set_age(path, block.age)
                return
            if block.ready is not None:
                block.ready()
            path.parent.mkdir(0o700, exist_ok=True)
            with create_file(new) as file:
                file.write(head_of(block.key, block.kind, block.row))
                file.write(block.row.numpy().data)
            self._set_age(new, block.age)
            os.replace(new, path)
            self.num_written += 1
            self._make_room(num_bytes)
        except OSError as error:
            self._is_full = True
            why = error.strerror or error
            LOG.warning("serve.kv_cache_dir=%s: %s; no more KV is written until the next start", self._folder, why)
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)

    def _make_room(self, num_written: int) -> None:
        """Remove the least recently used files while they take more bytes than they may."""
        self._num_unscanned += num_written
        has_room = self._num_bytes + self._num_unscanned <= self._max_bytes
        if has_room and self._num_unscanned <= self._max_bytes / SCANS:
            return
        files = []
        for path in self._folder.glob("*"):
            if path.name.startswith("."):
                if is_abandoned(path):
                    path.unlink(missing_ok=True)
                continue
            with contextlib.suppress(NotADirectoryError), os.scandir(path) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):  # another server has removed it
                        stat = entry.stat(follow_symlinks=False)
                        files.append((stat.st_mtime_ns, stat.st_size, entry.path))
        self._num_bytes, self._num_unscanned = sum(size for _, size, _ in files), 0
        if self._num_bytes <= self._max_bytes:
            return
        for _, size, name in sorted(files):
            if self._num_bytes <= self._max_bytes * KEPT_SHARE:
                break
            Path(name).unlink(missing_ok=True)
            self._num_bytes -= size

    def _path(self, key: bytes, kind: str) -> Path:
        name = key.hex()
        return self._folder / name[:2] / f"{name}.{kind}"

    @staticmethod
    def _set_age(path: Path, age: int) -> None:
        at = time.time_ns() - age * 1_000_000
        os.utime(path, ns=(at, at))


def head_of(key: bytes, kind: str, row: Tensor) -> bytes:
    """The beginning of a block's file."""
    checksum = xxh3_128(MAGIC + key + kind.encode())
    checksum.update(row.numpy().data)
    return MAGIC + key + checksum.digest()


def _open_plainly(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
