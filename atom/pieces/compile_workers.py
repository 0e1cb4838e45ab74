"""Compile pieces on all cores, in processes or in threads.

for text, files in compile_pieces(texts, device):
    publish(text, files)

A worker process and the compilers that it starts are a session, and all their files are in the worker's folder. The
parent ends the session and removes the folder; if the parent is killed, the worker does both when its stdin ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from atom.cache.temporary import temporary_folder
from atom.errors import ArtifactError, PassError
from atom.kernels import find_piece_compiler
from atom.pieces.compilers import compile_piece
from atom.process.child_process import end, exit_status, start_python


class PieceError(PassError):
    """A piece that must not be used: its code does not compute what its ops say."""

    def __init__(self, text: str, reason: str) -> None:
        super().__init__(reason)
        self.text = text


def compile_pieces(texts: Sequence[str], device: str = "cpu") -> Iterator[tuple[str, dict[str, bytes]]]:
    """Compile pieces, as many at a time as there are cores: each text with its files, as it is done.

    ArtifactError if there is no compiler or it fails; PieceError if a piece's code gives wrong results.
    """
    uses_processes = find_piece_compiler(device).uses_processes
    return (_compile_in_processes if uses_processes else _compile_in_threads)(texts, device)


def _compile_in_threads(texts: Sequence[str], device: str) -> Iterator[tuple[str, dict[str, bytes]]]:
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        waiting = {pool.submit(compile_piece, text, device): text for text in texts}
        try:
            for done in as_completed(waiting):
                try:
                    files = done.result()
                except PassError as error:
                    raise PieceError(waiting[done], str(error)) from None
                yield waiting[done], files
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _compile_in_processes(texts: Sequence[str], device: str) -> Iterator[tuple[str, dict[str, bytes]]]:
    count = min(len(texts), len(os.sched_getaffinity(0)))
    done: queue.Queue[tuple[str, dict[str, bytes]] | Exception | None] = queue.Queue()
    with temporary_folder(ignore_cleanup_errors=True) as folder:
        workers: list[_Worker] = []
        try:
            for index in range(count):
                workers.append(_Worker(Path(folder, str(index)), texts[index::count], device, done))
            running = count
            while running:
                item = done.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    running -= 1
                else:
                    yield item
        finally:
            for worker in workers:
                worker.stop()


class _Worker:
    """A process that compiles some pieces, and the thread that reads its results."""

    def __init__(self, folder: Path, texts: Sequence[str], device: str, done: queue.Queue[Any]) -> None:
        temporary = folder / "tmp"  # for the worker and its compilers
        temporary.mkdir(parents=True)
        (folder / "texts.json").write_text(json.dumps(list(texts)))
        self._errors = (folder / "errors.txt").open("w+")
        code = "import sys; from atom.pieces.compile_workers import work; work(*sys.argv[1:])"
        self._process = start_python(code, str(folder), device, stderr=self._errors, TMPDIR=str(temporary))
        self._thread = threading.Thread(target=self._read, args=(folder, texts, done), daemon=True)
        self._thread.start()

    def _read(self, folder: Path, texts: Sequence[str], done: queue.Queue[Any]) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            kind, _, rest = line.decode().rstrip().partition(" ")
            if kind == "done":
                made = folder / rest
                done.put((texts[int(rest)], {file.name: file.read_bytes() for file in made.iterdir()}))
            elif kind == "wrong":
                index, _, reason = rest.partition(" ")
                done.put(PieceError(texts[int(index)], reason))
            elif kind == "failed":
                done.put(ArtifactError(rest))
        if exit_status(self._process):
            self._errors.seek(0)
            last = (self._errors.read().strip().splitlines() or ["it was ended"])[-1]
            done.put(ArtifactError(f"compiling failed: {last}; level=1 runs without a compiler"))
        done.put(None)

    def stop(self) -> None:
        """End the worker and the compilers that it has started."""
        end(self._process, self._thread)
        self._errors.close()


def work(folder: str, device: str) -> None:
    """The main function of a worker: compile the texts in the folder, and print a line for each."""
    signal.signal(signal.SIGTERM, lambda *_: _leave(Path(folder)))
    threading.Thread(target=_watch, args=(os.dup(0),), daemon=True).start()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    out = os.fdopen(os.dup(1), "w")  # stdout without the compilers' own prints
    os.dup2(2, 1)
    for index, text in enumerate(json.loads(Path(folder, "texts.json").read_text())):
        try:
            files = compile_piece(text, device)
        except PassError as error:
            print("wrong", index, error, file=out, flush=True)
            return
        except ArtifactError as error:
            print("failed", error, file=out, flush=True)
            return
        made = Path(folder, str(index))
        made.mkdir()
        for name, content in files.items():
            (made / name).write_bytes(content)
        print("done", index, file=out, flush=True)


def _watch(link: int) -> None:
    """End this session when the parent is gone."""
    os.read(link, 1)
    os.killpg(0, signal.SIGTERM)


def _leave(folder: Path) -> None:
    """Remove the session's files, in the main thread, which writes nothing meanwhile; then end the session."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()  # the last worker does
    os.killpg(0, signal.SIGKILL)
