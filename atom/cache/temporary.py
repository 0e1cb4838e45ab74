"""Temporary folders, removed even if their process is killed.

with temporary_folder() as folder:
    Path(folder, "a.so").write_bytes(code)

A folder is locked while its process has it. Whoever makes the next one removes those that no process has locked: of
processes that were killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
import weakref
from pathlib import Path

PREFIX, SUFFIX = "atom-run-", ".tmp"
YOUNG_SECONDS = 60  # for a folder that is being made to be locked


def temporary_folder(*, ignore_cleanup_errors: bool = False) -> tempfile.TemporaryDirectory[str]:
    """Make a temporary folder, and remove those of processes that were killed."""
    sweep(Path(tempfile.gettempdir()))
    made = tempfile.TemporaryDirectory(prefix=PREFIX, suffix=SUFFIX, ignore_cleanup_errors=ignore_cleanup_errors)
    with contextlib.suppress(OSError):  # without locks, no folder is swept either
        weakref.finalize(made, os.close, lock_folder(Path(made.name)))
    return made


def sweep(parent: Path) -> None:
    """Remove the folders of this user that are locked by none."""
    with contextlib.suppress(OSError):
        for path in parent.glob(f"{PREFIX}*{SUFFIX}"):
            with contextlib.suppress(OSError):
                status = path.lstat()
                if status.st_uid == os.getuid() and time.time() - status.st_mtime > YOUNG_SECONDS:
                    lock = lock_folder(path)
                    shutil.rmtree(path, ignore_errors=True)
                    os.close(lock)


def lock_folder(path: Path) -> int:
    """The descriptor that holds the lock of a folder. OSError if another process has it, or it is no folder."""
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(lock)
        raise
    return lock
