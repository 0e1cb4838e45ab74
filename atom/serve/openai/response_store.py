"""Store responses in a SQLite file, so that they can be fetched and continued.

    store = ResponseStore(Path("~/.cache/atom-run/responses"), max_bytes=1 << 30)
    store.put("resp_1", "key1", b'{"id": "resp_1"}', [{"role": "user", "content": "Hello"}])
    store.find("resp_1", "key1")         # Stored(body, items); None for another key
    store.delete("resp_1", "key1")       # whether it was there

A response is there for the key that made it only. Beyond max_bytes the oldest one goes of the key that holds most, so
that no key pushes out what others keep. Several servers may share the file. It is not synced to the disk: a machine
that loses its power may lose the last responses, or all of them.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from atom.cache.files import Damaged, Unfit, prepare_folder
from atom.errors import ConfigError

FILE = "responses.sqlite"
WAIT_SECONDS = 0.5  # for another server that writes; the event loop may wait for it
# totals: of each key, which triggers keep, since to add them up takes time by the number of responses
TABLES = """
CREATE TABLE IF NOT EXISTS responses
    (number INTEGER PRIMARY KEY, tenant TEXT, id TEXT, size INTEGER, body BLOB, items BLOB, UNIQUE (tenant, id));
CREATE INDEX IF NOT EXISTS ages ON responses (tenant, number);
CREATE TABLE IF NOT EXISTS totals (tenant TEXT PRIMARY KEY, size INTEGER);
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON responses BEGIN
    INSERT INTO totals VALUES (new.tenant, new.size) ON CONFLICT DO UPDATE SET size = size + new.size; END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON responses BEGIN
    UPDATE totals SET size = size - old.size WHERE tenant = old.tenant; END;
"""
OLDEST = """
DELETE FROM responses WHERE number = (SELECT min(number) FROM responses WHERE tenant =
    (SELECT tenant FROM totals ORDER BY size DESC, tenant LIMIT 1))
"""


class Stored(NamedTuple):
    """A response that is stored."""

    body: bytes  # as it was sent, in JSON
    items: list[dict[str, Any]]  # its whole input, that of earlier responses included


class ResponseStore:
    """Any thread may use it."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """ConfigError if the folder is not the user's own, or its file is no store."""
        self._max_bytes, self._lock = max_bytes, threading.Lock()
        path = folder / FILE
        try:
            prepare_folder(folder)
            self._file = sqlite3.connect(path, WAIT_SECONDS, isolation_level=None, check_same_thread=False)
            path.chmod(0o600)
            self._file.executescript(f"PRAGMA journal_mode=WAL; PRAGMA synchronous=OFF; {TABLES}")
        except (OSError, Damaged, Unfit, sqlite3.Error) as error:
            raise ConfigError(f"serve.http.response_store_bytes: {path}: {error}; remove it, or set cache") from None

    def put(self, id: str, tenant: str, body: bytes, items: Sequence[dict[str, Any]]) -> bool:
        """Store a response, in place of one of the same id; whether there was room and the file took it."""
        said = json.dumps(items, separators=(",", ":")).encode()
        size = len(body) + len(said)
        if size > self._max_bytes:
            return False
        try:
            with self._lock, self._file, closing(self._file.cursor()) as cursor:
                cursor.execute("BEGIN IMMEDIATE")
                cursor.execute("DELETE FROM responses WHERE tenant = ? AND id = ?", (tenant, id))
                row = (tenant, id, size, body, said)
                cursor.execute("INSERT INTO responses (tenant, id, size, body, items) VALUES (?, ?, ?, ?, ?)", row)
                while cursor.execute("SELECT sum(size) FROM totals").fetchone()[0] > self._max_bytes:
                    if not cursor.execute(OLDEST).rowcount:
                        break  # the file was changed by hand
        except sqlite3.Error:
            return False
        return True

    def find(self, id: str, tenant: str) -> Stored | None:
        """The response of this key under this id."""
        with self._lock, closing(self._file.cursor()) as cursor:
            asked = "SELECT body, items FROM responses WHERE tenant = ? AND id = ?"
            row = cursor.execute(asked, (tenant, id)).fetchone()
        return None if row is None else Stored(row[0], json.loads(row[1]))

    def delete(self, id: str, tenant: str) -> bool:
        """Delete a response; whether it was there."""
        with self._lock, closing(self._file.cursor()) as cursor:
            return cursor.execute("DELETE FROM responses WHERE tenant = ? AND id = ?", (tenant, id)).rowcount > 0

    def close(self) -> None:
        with self._lock:
            self._file.close()
