"""The cache folder: real files, real processes. Where a folder must refuse writing, os.mkdir or os.open does it or a
regular file stands in the path: the tests may run as root, whom no mode stops."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atom.cache import Cache, export, open_bundle
from atom.cache.files import replace_file, seal
from atom.errors import ArtifactError

ROOT = Path(__file__).parents[2]
KEY, OTHER = "ab" * 32, "cd" * 32
FILES: dict[str, bytes | Path] = {"piece.so": b"\x7fELF" + bytes(range(256)) * 20, "piece.json": b"{}"}
ABOUT = {"name": "layer of llama", "inputs": ["fp32[T, 64]"]}
NOBODY = 65534


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    cache = Cache(tmp_path / "cache")
    yield cache
    cache.close()


@pytest.fixture
def entry(cache: Cache) -> Path:
    """The folder of a published piece."""
    return cache.publish("pieces", KEY, FILES, ABOUT)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}


def run_python(program: str, *argv: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", program, *argv], cwd=ROOT, stdout=subprocess.PIPE, text=True)


# hits


def test_what_was_published_is_found(cache: Cache, entry: Path):
    assert entry == cache.folder / "pieces" / KEY
    assert content(entry) == FILES
    found = Cache(cache.folder)
    assert found.find("pieces", KEY) == entry
    assert found.find("pieces", OTHER) is None and found.find("artifacts", KEY) is None
    assert (cache.warnings, found.warnings) == ([], [])


def test_a_file_may_be_given_as_a_path(cache: Cache, tmp_path: Path):
    (tmp_path / "big").write_bytes(b"x" * 3_000_000)
    folder = cache.publish("pieces", KEY, {"a": tmp_path / "big", "b": b"y"}, {})
    assert content(folder) == {"a": b"x" * 3_000_000, "b": b"y"}
    assert cache.find("pieces", KEY) == folder


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What is synced, by inode and size, and what is moved, in order."""
    done: list[tuple[str, Any]] = []

    def sync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        done.append(("sync", (status.st_ino, None if stat.S_ISDIR(status.st_mode) else status.st_size)))

    def recorded(move: Callable[..., None]) -> Callable[..., None]:
        def record(source: Path, target: Path) -> None:
            done.append(("move", Path(target)))
            move(source, target)

        return record

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "rename", recorded(os.rename))
    monkeypatch.setattr(os, "replace", recorded(os.replace))
    return done


def assert_on_disk_first(disk: list[tuple[str, Any]], placed: Path) -> None:
    """The whole content is synced before the name is there, and the name after that."""
    at = disk.index(("move", placed))
    paths = [placed, *placed.iterdir()] if placed.is_dir() else [placed]
    needed = {(path.stat().st_ino, None if path.is_dir() else path.stat().st_size) for path in paths}
    assert needed <= {what for kind, what in disk[:at] if kind == "sync"}
    assert (placed.parent.stat().st_ino, None) in {what for kind, what in disk[at:] if kind == "sync"}


def test_what_is_published_is_on_disk_before_it_has_its_name(cache: Cache, tmp_path: Path, disk: list[tuple[str, Any]]):
    (tmp_path / "big").write_bytes(b"x" * 3_000_000)
    assert_on_disk_first(disk, cache.publish("pieces", KEY, {**FILES, "big": tmp_path / "big"}, ABOUT))
    folder = cache.begin("weights")
    assert folder is not None
    (folder / "model.safetensors").write_bytes(b"y" * 100)
    cache.finish("weights", OTHER, folder, {})
    assert_on_disk_first(disk, cache.folder / "weights" / OTHER)
    replace_file(cache.folder / "tuned.json", b"{}")
    assert_on_disk_first(disk, cache.folder / "tuned.json")


def test_a_bundle_is_on_disk_before_it_has_its_name(cache: Cache, tmp_path: Path, disk: list[tuple[str, Any]]):
    export(cache, make_artifact(cache), tmp_path / "bundle.tar", {})
    assert_on_disk_first(disk, tmp_path / "bundle.tar")


def test_an_entry_has_its_ingredients_files_and_builder(cache: Cache, entry: Path):
    found = cache.describe("pieces", KEY)
    assert found is not None
    assert (found.kind, found.key, found.about, found.fault) == ("pieces", KEY, ABOUT, None)
    assert found.files == {"piece.so": 5124, "piece.json": 2}
    assert found.size == 5126 + (entry / "manifest.json").stat().st_size
    assert abs(found.created.timestamp() - time.time()) < 60 and found.used >= found.created.replace(microsecond=0)
    assert "@" in found.built_by
    assert cache.entries() == cache.entries("pieces") == [found] and cache.entries("artifacts") == []
    assert cache.describe("pieces", OTHER) is None
    assert cache.holds("pieces", KEY) and not cache.holds("pieces", OTHER) and not cache.holds("artifacts", KEY)


def test_only_a_use_is_noted(cache: Cache, entry: Path):
    manifest = entry / "manifest.json"
    long_ago = time.time() - 40 * 86400
    os.utime(manifest, (long_ago, long_ago))
    for look in (cache.entries, lambda: cache.describe("pieces", KEY), lambda: cache.verify("pieces", KEY)):
        look()
        assert manifest.stat().st_atime == pytest.approx(long_ago)
    cache.find("pieces", KEY)
    assert manifest.stat().st_mtime == pytest.approx(long_ago)


def test_nobody_else_can_read_or_write_what_is_published_whatever_the_umask(tmp_path: Path):
    before = os.umask(0)
    try:
        cache = Cache(tmp_path / "cache")
        folder = cache.publish("pieces", KEY, FILES, ABOUT)
        with cache.lock("pieces", KEY):
            pass
    finally:
        os.umask(before)
    for path in [cache.folder, *cache.folder.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert cache.find("pieces", KEY) == folder


def test_a_copied_folder_hits(entry: Path, tmp_path: Path):
    shutil.copytree(entry.parents[1], tmp_path / "copy")
    copy = Cache(tmp_path / "copy")
    assert copy.find("pieces", KEY) == tmp_path / "copy" / "pieces" / KEY
    assert copy.warnings == []


def test_the_cache_folder_may_be_named_by_a_link(entry: Path, tmp_path: Path):
    (tmp_path / "link").symlink_to(entry.parents[1])
    assert Cache(tmp_path / "link").find("pieces", KEY) == entry


def test_a_hit_writes_nothing(entry: Path, monkeypatch: pytest.MonkeyPatch):
    """So that it works on a read-only file system: every way to write is closed here."""
    opened = os.open

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def only_read(path: Any, flags: int, *rest: Any, **names: Any) -> int:
        return refuse() if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) else opened(path, flags, *rest, **names)

    for name in ("mkdir", "rename", "replace", "unlink", "rmdir", "chmod", "utime"):
        monkeypatch.setattr(os, name, refuse)
    monkeypatch.setattr(os, "open", only_read)
    cache = Cache(entry.parents[1])
    with cache.lock("pieces", KEY):
        assert cache.find("pieces", KEY) == entry
    assert cache.warnings == []


# damage


def damage_truncated(entry: Path) -> str:
    os.truncate(entry / "piece.so", 100)
    return "piece.so has 100 bytes instead of 5,124"


def damage_flipped(entry: Path) -> str:
    raw = bytearray((entry / "piece.so").read_bytes())
    raw[77] ^= 1
    (entry / "piece.so").write_bytes(raw)
    return "the checksum of piece.so is wrong"


def damage_extra(entry: Path) -> str:
    (entry / "more.so").write_bytes(b"")
    return "manifest.json does not name 'more.so'"


def damage_extra_folder(entry: Path) -> str:
    (entry / "more").mkdir()
    return "manifest.json does not name 'more'"


def damage_missing(entry: Path) -> str:
    (entry / "piece.so").unlink()
    return "piece.so is missing"


def damage_no_manifest(entry: Path) -> str:
    (entry / "manifest.json").unlink()
    return "manifest.json is missing"


def damage_manifest_empty(entry: Path) -> str:
    (entry / "manifest.json").write_bytes(b"")
    return "its JSON is damaged"


def damage_manifest_garbage(entry: Path) -> str:
    (entry / "manifest.json").write_bytes(b"\xff[" * 200_000)
    return "its JSON is damaged"


def damage_manifest_deep(entry: Path) -> str:
    (entry / "manifest.json").write_bytes(b"[" * 200_000)
    return "its JSON is damaged"


def damage_manifest_other_words(entry: Path) -> str:
    text = (entry / "manifest.json").read_text()
    (entry / "manifest.json").write_text(text.replace("llama", "lhama"))
    return "the checksum of its JSON is wrong"


def damage_manifest_of_another_key(entry: Path) -> str:
    cache = Cache(entry.parents[1])
    other = cache.publish("pieces", OTHER, FILES, ABOUT)
    shutil.copy(other / "manifest.json", entry / "manifest.json")
    return "manifest.json is that of pieces/cdcdcdcdcdcd"


def damage_link(entry: Path) -> str:
    os.rename(entry / "piece.so", entry.parents[2] / "piece.so")
    (entry / "piece.so").symlink_to(entry.parents[2] / "piece.so")
    return "piece.so is no plain file"


def damage_fifo(entry: Path) -> str:
    (entry / "piece.so").unlink()
    os.mkfifo(entry / "piece.so")
    return "piece.so is no plain file"


def damage_linked_folder(entry: Path) -> str:
    os.rename(entry, entry.parents[2] / "elsewhere")
    entry.symlink_to(entry.parents[2] / "elsewhere")
    return "is no plain folder"


def damage_file_for_folder(entry: Path) -> str:
    shutil.rmtree(entry)
    entry.write_bytes(b"")
    return "is no plain folder"


def damage_empty_folder(entry: Path) -> str:
    shutil.rmtree(entry)
    entry.mkdir()
    return "manifest.json is missing"


DAMAGES = [value for name, value in sorted(globals().items()) if name.startswith("damage_")]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__.removeprefix("damage_"))
def test_a_damaged_entry_is_not_found_and_is_built_anew(damage: Callable[[Path], str], entry: Path):
    reason = damage(entry)
    cache = Cache(entry.parents[1])
    assert cache.find("pieces", KEY) is None
    assert cache.find("pieces", KEY) is None
    (line,) = cache.warnings
    assert line.startswith(str(entry)) and reason in line and line.endswith((", built anew", ", ignored"))
    assert cache.verify("pieces", KEY) is not None
    assert len(cache.entries()) == len(list(entry.parent.iterdir()))
    assert cache.publish("pieces", KEY, FILES, ABOUT) == entry
    assert cache.find("pieces", KEY) == entry and content(entry) == FILES
    assert cache.warnings == [line]
    assert {path.name for path in entry.parent.iterdir()} <= {KEY, OTHER}, "the damaged one is gone"


def test_what_only_listing_can_see_is_a_fault_of_entries(cache: Cache, entry: Path):
    damage_truncated(entry)
    (found,) = cache.entries()
    assert cache.holds("pieces", KEY), "whether it is trusted or not"
    assert found.fault == "piece.so has 100 bytes instead of 5,124" and found.about == {}
    assert cache.describe("pieces", KEY) is None


def test_a_folder_that_cannot_be_listed_is_a_warning(cache: Cache, entry: Path, monkeypatch: pytest.MonkeyPatch):
    """os.listdir refuses: root is stopped by no mode."""

    def refuse(path: Path) -> list[str]:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", refuse)
    assert cache.entries() == [] and cache.find("pieces", KEY) is None
    assert f"{entry.parent}: Permission denied, ignored" in cache.warnings
    assert f"{entry}: Permission denied, ignored" in cache.warnings


# owners

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.mark.parametrize("mode", [0o020, 0o002, 0o022, 0o1002])
@pytest.mark.parametrize("place", ["", "..", "../..", "piece.so", "manifest.json"])
def test_what_others_can_write_is_ignored(place: str, mode: int, entry: Path):
    path = Path(os.path.normpath(entry / place))
    path.chmod(path.stat().st_mode | mode)
    cache = Cache(entry.parents[1])
    assert cache.find("pieces", KEY) is None
    (line,) = cache.warnings
    assert line.startswith(f"{path} is writable by others") and line.endswith(", ignored")


@needs_root
@pytest.mark.parametrize("place", ["", "..", "../..", "piece.so", "manifest.json"])
def test_what_somebody_else_owns_is_ignored(place: str, entry: Path):
    path = Path(os.path.normpath(entry / place))
    os.chown(path, NOBODY, -1)
    cache = Cache(entry.parents[1])
    assert cache.find("pieces", KEY) is None
    (line,) = cache.warnings
    assert line == f"{path} is owned by nobody, ignored"


@needs_root
def test_a_user_takes_what_root_made_and_not_what_another_user_made(entry: Path):
    program = """if True:
        import os, sys
        from pathlib import Path
        from atom.cache import Cache
        os.seteuid(int(sys.argv[2]))
        cache = Cache(Path(sys.argv[1]))
        print(cache.find("pieces", "ab" * 32) is not None, cache.describe("pieces", "ab" * 32) is not None, cache.warnings)
    """
    with tempfile.TemporaryDirectory() as folder:  # only root can read pytest's own folders
        top = Path(folder) / "cache"
        shutil.copytree(entry.parents[1], top)
        for path in [top.parent, *top.parent.rglob("*")]:
            path.chmod(0o755)

        def found_by(user: int) -> str:
            return run_python(program, str(top), str(user)).communicate()[0]

        assert found_by(1234) == "True True []\n"
        for path in [top, *top.rglob("*")]:
            os.chown(path, NOBODY, -1)
        assert found_by(NOBODY) == "True True []\n"
        assert found_by(1234) == f"False False ['{top} is owned by nobody, ignored']\n"


def test_a_folder_that_others_can_write_takes_no_entries(tmp_path: Path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    cache = Cache(tmp_path / "cache")
    with cache.lock("pieces", KEY):
        folder = cache.publish("pieces", KEY, FILES, ABOUT)
    assert content(folder) == FILES and tmp_path not in folder.parents
    (line,) = cache.warnings
    assert "cache is writable by others" in line and "is not kept for the next run" in line
    cache.close()


# folders that cannot be written


def test_below_a_regular_file_nothing_is_kept_and_all_goes_on(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"")
    cache = Cache(tmp_path / "file" / "cache")
    with cache.lock("pieces", KEY):
        assert cache.find("pieces", KEY) is None
        folder = cache.publish("pieces", KEY, FILES, ABOUT)
    assert content(folder) == FILES
    assert cache.publish("artifacts", OTHER, {"graph.py": b"1"}, {}) != folder
    (line,) = cache.warnings
    assert line == f"{cache.folder} takes no entries (Not a directory): what is built is not kept for the next run"
    assert cache.entries() == [] and cache.describe("pieces", KEY) is None
    cache.close()
    assert not folder.exists()


def test_the_private_folder_goes_with_the_process(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"")
    program = """if True:
        import sys
        from pathlib import Path
        from atom.cache import Cache
        cache = Cache(Path(sys.argv[1]))
        folder = cache.publish("pieces", "ab", {"a": b"x"}, {})
        assert (folder / "a").read_bytes() == b"x"
        print(folder)
    """
    folder = run_python(program, str(tmp_path / "file" / "cache")).communicate()[0].strip()
    assert folder and not Path(folder).exists()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("call", ["mkdir", "open", "fsync", "rename"])
def test_a_refused_write_leaves_nothing(
    call: str, code: int, cache: Cache, entry: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of a full disk, a read-only file system, a missing permission: os itself refuses, below the cache folder only."""
    actual = getattr(os, call)

    def refuse(path: Any, *rest: Any, **names: Any) -> Any:
        at = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else os.fspath(path)
        is_writing = call != "open" or rest[0] & (os.O_WRONLY | os.O_RDWR)
        if at.startswith(str(cache.folder)) and is_writing:
            raise OSError(code, os.strerror(code))
        return actual(path, *rest, **names)

    monkeypatch.setattr(os, call, refuse)
    folder = cache.publish("pieces", OTHER, FILES, ABOUT)
    assert content(folder) == FILES and cache.folder not in folder.parents
    (line,) = cache.warnings
    assert os.strerror(code) in line
    monkeypatch.undo()
    assert [path.name for path in entry.parent.iterdir()] == [KEY]
    assert cache.find("pieces", OTHER) is None and cache.find("pieces", KEY) == entry


def test_a_really_full_disk_is_an_artifact_error(cache: Cache, monkeypatch: pytest.MonkeyPatch):
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ArtifactError, match=r"No space left on device.*free some space, or set cache="):
        cache.publish("pieces", KEY, FILES, ABOUT)
    monkeypatch.undo()
    assert cache.entries() == [] and list(cache.folder.rglob("piece.so")) == []


@needs_root
def test_a_disk_that_is_full_in_the_middle(tmp_path: Path):
    """A tmpfs of 64 KiB, where this machine lets one be mounted."""
    (tmp_path / "disk").mkdir(mode=0o700)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "none", str(tmp_path / "disk")], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        cache = Cache(tmp_path / "disk" / "cache")
        cache.publish("pieces", KEY, FILES, ABOUT)
        folder = cache.publish("pieces", OTHER, {"big.so": b"x" * 200_000}, {})
        assert content(folder) == {"big.so": b"x" * 200_000}
        (line,) = cache.warnings
        assert "No space left on device" in line
        assert [entry.key for entry in cache.entries()] == [KEY]
        assert len(list((cache.folder / "pieces").iterdir())) == 1
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path / "disk")], check=True)
        again = Cache(cache.folder)
        with again.lock("pieces", KEY):
            assert again.find("pieces", KEY) and again.find("pieces", OTHER) is None
        cache.close()
    finally:
        subprocess.run(["umount", str(tmp_path / "disk")], check=True)


# several processes

BUILD = """if True:
    import sys, time
    from pathlib import Path
    from atom.cache import Cache
    cache = Cache(Path(sys.argv[1]))
    with cache.lock("pieces", "ab" * 32):
        folder = cache.find("pieces", "ab" * 32)
        if folder is None:
            print("built", flush=True)
            time.sleep(0.5)
            folder = cache.publish("pieces", "ab" * 32, {"a": b"x"}, {})
    assert (folder / "a").read_bytes() == b"x" and not cache.warnings
"""


def test_processes_that_start_together_build_once(tmp_path: Path):
    processes = [run_python(BUILD, str(tmp_path / "cache")) for _ in range(4)]
    said = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    assert sorted(said) == ["", "", "", "built\n"]


def test_threads_build_once_too(cache: Cache):
    built = []

    def build() -> None:
        with cache.lock("pieces", KEY):
            if cache.find("pieces", KEY) is None:
                built.append(1)
                time.sleep(0.1)
                cache.publish("pieces", KEY, FILES, ABOUT)

    threads = [threading.Thread(target=build) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert built == [1]


def test_a_lock_s_file_goes_with_it_and_still_one_at_a_time_holds_it(cache: Cache):
    holders, max_holders = 0, 0

    def hold() -> None:
        nonlocal holders, max_holders
        for _ in range(20):
            with cache.lock("pieces", KEY):
                holders += 1
                max_holders = max(max_holders, holders)
                time.sleep(0.0005)  # others come meanwhile, and wait for a file that is gone then
                holders -= 1

    threads = [threading.Thread(target=hold) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max_holders == 1 and os.listdir(cache.folder / "locks") == []


def test_only_who_has_to_wait_is_called(cache: Cache):
    called, other = [], contextlib.ExitStack()
    with cache.lock("pieces", KEY, lambda: called.append("free")):
        pass
    other.enter_context(cache.lock("pieces", KEY))
    with Cache(cache.folder).lock("pieces", KEY, lambda: (called.append("held"), other.close())):
        assert called == ["held"]


def test_other_entries_are_not_locked(cache: Cache):
    with cache.lock("pieces", KEY), cache.lock("pieces", OTHER), cache.lock("artifacts", KEY):
        pass


def test_without_a_lock_the_first_to_publish_wins(cache: Cache, entry: Path):
    assert cache.publish("pieces", KEY, {"other.so": b"y"}, {}) == entry
    assert content(entry) == FILES
    assert [path.name for path in entry.parent.iterdir()] == [KEY]


PUBLISH = """if True:
    import os, sys
    from pathlib import Path
    from atom.cache import Cache
    cache, key = Cache(Path(sys.argv[1])), "ab" * 32
    print("ready", flush=True)
    for turn in range(10**9):
        files = {f"{name}.so": bytes([turn % 256]) * 50_000 for name in "abc"}
        with cache.lock("pieces", key):
            folder = cache.publish("pieces", key, files, {"turn": turn})
            (folder / "b.so").write_bytes(b"damaged")  # so that the next turn moves it aside and publishes anew
"""


@pytest.mark.slow
def test_a_process_killed_at_any_moment_leaves_nothing_that_is_trusted_wrongly(tmp_path: Path):
    """The process publishes, damages what it published, publishes anew; it ends by SIGKILL."""
    top, moments = tmp_path / "cache", random.Random(0)
    num_trusted = num_left = 0
    for _ in range(20):
        process = run_python(PUBLISH, str(top))
        assert process.stdout and process.stdout.readline() == "ready\n"
        time.sleep(moments.uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        cache = Cache(top)
        folder = cache.find("pieces", KEY)
        if folder is not None:
            manifest = json.loads((folder / "manifest.json").read_text())
            same = bytes([manifest["about"]["turn"] % 256]) * 50_000
            assert content(folder) == {f"{name}.so": same for name in "abc"}
            num_trusted += 1
        if (top / "pieces").is_dir():
            num_left += len(os.listdir(top / "pieces")) > (folder is not None)
        with cache.lock("pieces", KEY):  # the death freed it
            cache.publish("pieces", KEY, FILES, ABOUT)
        found = cache.find("pieces", KEY)
        assert found and (folder or content(found) == FILES)
        assert os.listdir(top / "pieces") == [KEY], "what the dead process left is gone"
        shutil.rmtree(found)
    assert num_left, "no process was killed in the middle of publishing"


def test_unfinished_folders_of_the_living_stay_for_an_hour(cache: Cache, entry: Path):
    parent = entry.parent
    alive = run_python("import time; time.sleep(60)")
    try:
        (other_host := parent / f".some-machine.example-99-{'0' * 16}").mkdir()
        host = cache.entries()[0].built_by.partition("@")[2]
        (living := parent / f".{host}-{alive.pid}-{'0' * 16}").mkdir()
        (old := parent / f".{host}-{alive.pid}-{'1' * 16}").mkdir()
        os.utime(old, (time.time() - 3700,) * 2)
        cache.publish("pieces", OTHER, FILES, ABOUT)
        assert (other_host.exists(), living.exists(), old.exists()) == (True, True, False)
    finally:
        alive.kill()
        alive.communicate()
    cache.publish("pieces", "ef" * 32, FILES, ABOUT)
    assert (other_host.exists(), living.exists()) == (True, False)
    assert {each.key for each in cache.entries()} == {KEY, OTHER, "ef" * 32}


def test_a_removed_entry_is_gone_at_once_and_twice_is_no_error(cache: Cache, entry: Path):
    (found,) = cache.entries()
    cache.remove(found)
    cache.remove(found)
    assert os.listdir(entry.parent) == [] and cache.find("pieces", KEY) is None and cache.warnings == []


# bundles


def make_artifact(cache: Cache, *, is_large: bool = True) -> Any:
    size = 20 if is_large else 1
    for key, fill in ((KEY, b"a"), (OTHER, b"b")):
        cache.publish("pieces", key, {"piece.so": fill * 100 * size, "piece.json": b"{}"}, {"name": "a piece"})
    about = {"name": "llama on a CPU", "pieces": [KEY, OTHER], "level": 2}
    cache.publish("artifacts", "12" * 32, {"graph.py": b"def body(): ...\n" * size}, about)
    artifact = cache.describe("artifacts", "12" * 32)
    assert artifact
    return artifact


def test_a_bundle_holds_an_artifact_and_its_pieces(cache: Cache, tmp_path: Path):
    artifact = make_artifact(cache)
    exported = export(cache, artifact, tmp_path / "bundle.tar", {"a_gpu": {"linear": {}}})
    assert [(each.kind, each.key) for each in exported] == [
        ("pieces", KEY),
        ("pieces", OTHER),
        ("artifacts", artifact.key),
    ]
    target = Cache(tmp_path / "target")
    with open_bundle(tmp_path / "bundle.tar") as (bundle, entries, measured):
        assert measured == {"a_gpu": {"linear": {}}}
        assert [(each.kind, each.key, each.about, each.built_by, each.created) for each in entries] == [
            (each.kind, each.key, each.about, each.built_by, each.created) for each in exported
        ]
        for each in entries:
            target.copy(each, bundle)
    assert not bundle.folder.exists()
    for each in exported:
        found = target.find(each.kind, each.key)
        assert found and content(found) == content(cache.folder / each.kind / each.key)
        assert (found / "manifest.json").read_bytes() == (
            cache.folder / each.kind / each.key / "manifest.json"
        ).read_bytes()


def test_a_bundle_holds_nothing_of_the_machine_that_wrote_it(cache: Cache, tmp_path: Path):
    export(cache, make_artifact(cache), tmp_path / "bundle.tar", {})
    with tarfile.open(tmp_path / "bundle.tar") as bundle:
        members = bundle.getmembers()
    assert members[0].name == "bundle.json"
    assert {(each.mode, each.uid, each.gid, each.uname, each.gname, each.mtime) for each in members} == {
        (0o644, 0, 0, "", "", 0)
    }
    assert all(each.isreg() and not each.name.startswith("/") and ".." not in each.name for each in members)


def test_a_bundle_opens_whatever_the_umask(cache: Cache, tmp_path: Path):
    export(cache, make_artifact(cache), tmp_path / "bundle.tar", {})
    before = os.umask(0)
    try:
        assert len(unpacked(tmp_path / "bundle.tar")) == 8
    finally:
        os.umask(before)


def test_an_artifact_whose_piece_is_damaged_is_not_exported(cache: Cache, tmp_path: Path):
    artifact = make_artifact(cache)
    os.truncate(cache.folder / "pieces" / OTHER / "piece.so", 3)
    with pytest.raises(ArtifactError, match=r"bundle.tar is not written: pieces/cdcd.* has 3 bytes instead of 2,000"):
        export(cache, artifact, tmp_path / "bundle.tar", {})
    shutil.rmtree(cache.folder / "pieces" / OTHER)
    with pytest.raises(ArtifactError, match="No such file"):
        export(cache, artifact, tmp_path / "bundle.tar", {})
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_a_bundle_replaces_nothing_but_a_file(cache: Cache, tmp_path: Path):
    main, terminal = os.openpty()
    for path in (Path(os.ttyname(terminal)), tmp_path):
        with pytest.raises(ArtifactError, match="is no file, and would be replaced by one"):
            export(cache, make_artifact(cache), path, {})
    assert Path(os.ttyname(terminal)).is_char_device()
    os.close(terminal)
    os.close(main)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, dict[str, bytes]]:
    """A small bundle, and what comes out of it."""
    folder = tmp_path_factory.mktemp("bundle")
    cache = Cache(folder / "cache")
    export(cache, make_artifact(cache, is_large=False), folder / "bundle.tar", {})
    return (folder / "bundle.tar").read_bytes(), unpacked(folder / "bundle.tar")


def unpacked(path: Path) -> dict[str, bytes]:
    with open_bundle(path) as (cache, _, _):
        files = [file for file in cache.folder.rglob("*") if file.is_file()]
        return {str(file.relative_to(cache.folder)): file.read_bytes() for file in files}


def assert_refused_or_same(raw: bytes, same: dict[str, bytes], path: Path) -> bool:
    path.write_bytes(raw)
    try:
        assert unpacked(path) == same
    except ArtifactError as error:
        assert str(error).startswith(str(path)) and "\n" not in str(error)
        return True
    return False


reuse_folder = settings(max_examples=75, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)


@reuse_folder
@given(at=st.integers(0), bit=st.integers(0, 7))
def test_a_flipped_bit_is_refused_or_changes_nothing(
    at: int, bit: int, bundle: tuple[bytes, dict[str, bytes]], tmp_path: Path
):
    raw = bytearray(bundle[0])
    raw[at % len(raw)] ^= 1 << bit
    assert_refused_or_same(bytes(raw), bundle[1], tmp_path / "bundle.tar")


@reuse_folder
@given(at=st.integers(0), value=st.binary(min_size=1, max_size=8))
def test_overwritten_bytes_are_refused_or_change_nothing(
    at: int, value: bytes, bundle: tuple[bytes, dict[str, bytes]], tmp_path: Path
):
    raw = bytearray(bundle[0])
    start = at % len(raw)
    raw[start : start + len(value)] = value
    assert_refused_or_same(bytes(raw), bundle[1], tmp_path / "bundle.tar")


def test_a_truncated_bundle_is_refused_at_every_length(bundle: tuple[bytes, dict[str, bytes]], tmp_path: Path):
    raw, same = bundle
    end = len(raw.rstrip(b"\0")) // 512 * 512
    for size in [*range(0, end, 97), end - 1, end]:
        assert assert_refused_or_same(raw[:size], same, tmp_path / "bundle.tar"), size
    assert not assert_refused_or_same(raw, same, tmp_path / "bundle.tar")


def test_members_that_leave_the_folder_or_are_no_files_are_refused(tmp_path: Path):
    def member(name: str, content: bytes = b"x", **fields: Any) -> tuple[Any, bytes]:
        info = tarfile.TarInfo(name)
        info.size = len(content)
        for field, value in fields.items():
            setattr(info, field, value)
        return info, content

    head = member("bundle.json", seal({"artifact": "12", "entries": ["pieces/ab", "artifacts/12"]}))
    strange = [
        member("../evil.so"),
        member("/etc/evil.so"),
        member("pieces/ab/../../../evil.so"),
        member("pieces/ab/.."),
        member("pieces/ef/piece.so"),
        member("locks/ab/piece.so"),
        member("pieces/ab/link", b"", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        member("pieces/ab/link", b"", type=tarfile.LNKTYPE, linkname="bundle.json"),
        member("pieces/ab/pipe", b"", type=tarfile.FIFOTYPE),
        member("pieces/ab/device", b"", type=tarfile.CHRTYPE),
        member("pieces/ab", b"", type=tarfile.DIRTYPE),
        member("pieces/ab/long", b"a" * 2000, type=tarfile.GNUTYPE_LONGNAME),
        member("pieces/ab/sparse", b"a", type=tarfile.GNUTYPE_SPARSE),
        member("pieces/ab/pax", b"12 path=evil\n", type=tarfile.XHDTYPE),
        member("bundle.json", b"{}"),
    ]
    for info, content in strange:
        with tarfile.open(tmp_path / "bundle.tar", "w", format=tarfile.USTAR_FORMAT) as bundle:
            for each, raw in (head, (info, content)):
                bundle.fileobj.write(each.tobuf(tarfile.USTAR_FORMAT))  # type: ignore[union-attr]
                bundle.fileobj.write(raw + bytes(-len(raw) % 512))  # type: ignore[union-attr]
        with pytest.raises(ArtifactError, match=r"is not a whole bundle: (its member|it holds) "):
            unpacked(tmp_path / "bundle.tar")
    assert [path.name for path in tmp_path.iterdir()] == ["bundle.tar"]
    huge = tarfile.TarInfo("bundle.json")
    huge.size = 1 << 40
    (tmp_path / "bundle.tar").write_bytes(huge.tobuf(tarfile.GNU_FORMAT))
    with pytest.raises(ArtifactError, match="no plain file of the size that it says"):
        unpacked(tmp_path / "bundle.tar")


def test_threads_may_publish_where_the_folder_takes_nothing(tmp_path: Path):
    (tmp_path / "file").write_text("")
    cache = Cache(tmp_path / "file" / "below")
    with ThreadPoolExecutor(8) as pool:
        keys = [f"{number:064x}" for number in range(24)]
        folders = list(pool.map(lambda key: cache.publish("pieces", key, {"piece.so": key.encode()}, {}), keys))
    assert [(folder / "piece.so").read_bytes() for folder in folders] == [key.encode() for key in keys]
    cache.close()
