"""KV that goes to files and comes back in another engine: the tokens are those of one that holds all of it."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_host_blocks import NUM_TALKS, SIZES, load_always, talk

from atom import LLMEngine
from atom.config.load import load
from atom.errors import ConfigError, UnsupportedError
from atom.runtime.kv.files import Block, Fetch, KVFiles, chain

pytestmark = pytest.mark.early

Open = Callable[..., LLMEngine]

FILES = {"num_kvcache_blocks": 16, "swap_space": 40 << 10, **SIZES}  # both hold a tenth of 10 conversations
SIZE = 1000


@pytest.fixture
def files(tmp_path: Path) -> Iterator[KVFiles]:
    files = KVFiles(tmp_path / "kv", 1 << 20, {"full": SIZE})
    yield files
    files.close()


def block(number: int, age: int = 0) -> Block:
    return Block(key(number), "full", torch.full((SIZE,), number, dtype=torch.uint8), age=age)


def key(number: int) -> bytes:
    """The key of a block in a prompt of the blocks b"0000", b"0001" and so on."""
    return chain(key(number - 1) if number else b"root", b"%04d" % number)


def read(files: KVFiles, num_blocks: int) -> list[int]:
    """The first bytes of the blocks that are there of a prompt, from its beginning."""
    content = b"".join(b"%04d" % number for number in range(num_blocks))
    needs = lambda num: {"full": range(num)}  # noqa: E731
    files.fetch(Fetch(b"root", content, 4, needs, {"full"}, 0, None, time.perf_counter() + 60))  # type: ignore[arg-type]
    files.wait(10)
    (fetch,) = files.take_fetched()
    return [int(each["full"][0]) for each in fetch.blocks if each]


def paths(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "scale"), [("llama", 1), ("gpt_oss", 1), ("glm_moe_dsa", 1), ("deepseek_v4", 3)])
def test_another_engine_reads_what_one_has_written(name: str, scale: int, open_engine: Open, tmp_path: Path):
    """scale: of the host's memory"""
    expected = talk(open_engine(name, **SIZES, num_kvcache_blocks=200))
    fields = {**FILES, "kv_cache_dir": str(tmp_path / "kv"), "swap_space": scale * int(FILES["swap_space"])}
    engine = load_always(open_engine(name, **fields))
    assert talk(engine) == expected, "a pool, and host memory, of a tenth of what is needed"
    assert engine.metrics.num_written_blocks > 0 and engine.metrics.num_read_blocks > 0
    engine.close()
    engine = load_always(open_engine(name, **fields))
    assert talk(engine) == expected
    assert engine.metrics.num_read_blocks > NUM_TALKS
    assert engine.metrics.scheduler.num_host_hit_tokens > 0.3 * NUM_TALKS * 16
    (folder,) = {path.parent.parent for path in paths(tmp_path)}
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in paths(folder)} == {0o600}


def test_files_of_other_weights_and_damaged_ones_are_not_used(checkpoints: Callable[[str], Path], tmp_path: Path):
    model, folder = tmp_path / "model", tmp_path / "kv"
    shutil.copytree(checkpoints("llama"), model)
    fields: dict[str, Any] = {**SIZES, "num_kvcache_blocks": 200, "swap_space": 1 << 20, "kv_cache_dir": str(folder)}

    def run() -> tuple[list[list[int]], int]:
        engine = load_always(LLMEngine(model=str(model), dtype="fp32", level=1, **fields))
        try:
            return talk(engine), engine.metrics.num_read_blocks
        finally:
            engine.close()

    expected, num_read = run()
    assert num_read == 0
    again, num_read = run()
    assert again == expected and num_read > 0
    for path in paths(folder):
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)
    assert run() == (expected, 0)
    assert run()[1] > 0, "they were written again"
    os.utime(model / "model.safetensors", (1, 1))
    assert run() == (expected, 0), "these may be other weights"


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[:-1],
        lambda raw: raw + b"\0",
        lambda raw: b"",
        lambda raw: bytes(len(raw)),  # blocks of the file system that were not written before the power went
        lambda raw: raw[:-64] + bytes(64),
        lambda raw: raw[:100] + bytes([raw[100] ^ 1]) + raw[101:],
        lambda raw: raw[:10] + bytes([raw[10] ^ 1]) + raw[11:],
    ],
    ids=["torn", "longer", "empty", "zeros", "zeros at the end", "bit flipped", "key flipped"],
)
def test_a_damaged_file_is_missing_and_written_again(damage: Any, files: KVFiles, tmp_path: Path):
    files.write([block(number) for number in range(3)])
    files.flush(10)
    assert read(files, 4) == [0, 1, 2]
    path = next(each for each in paths(tmp_path) if key(1).hex() in each.name)
    path.write_bytes(damage(path.read_bytes()))
    assert read(files, 4) == [0] and not path.exists()
    files.write([block(1)])
    files.flush(10)
    assert read(files, 4) == [0, 1, 2]


def test_all_damaged_files_of_a_prompt_are_written_again(files: KVFiles, tmp_path: Path):
    files.write([block(number) for number in range(6)])
    files.flush(10)
    for path in paths(tmp_path):
        if key(3).hex() not in path.name:
            path.write_bytes(path.read_bytes()[:-1])
    assert read(files, 6) == []
    assert read(files, 6) == [], "behind the other, in the thread's order"
    assert [path.name for path in paths(tmp_path)] == [f"{key(3).hex()}.full"]
    files.write([block(number) for number in range(6)])
    files.flush(10)
    assert read(files, 6) == [0, 1, 2, 3, 4, 5]


def test_blocks_that_a_window_has_left_keep_their_places(files: KVFiles):
    files.write([block(number) for number in range(4)])
    files.flush(60)
    content = b"".join(b"%04d" % number for number in range(4))

    def needs(num_blocks: int) -> dict[str, range]:
        return {"full": range(max(num_blocks - 2, 0), num_blocks)}

    files.fetch(Fetch(b"root", content, 4, needs, (), 0, None, time.perf_counter() + 600))  # type: ignore[arg-type]
    files.wait(60)
    (fetch,) = files.take_fetched()
    found = [{kind: int(row[0]) for kind, row in each.items()} for each in fetch.blocks]
    assert found == [{}, {}, {"full": 2}, {"full": 3}]


def test_a_file_under_the_name_of_another_is_missing(files: KVFiles, tmp_path: Path):
    files.write([block(0), block(1)])
    files.flush(10)
    first, second = (next(each for each in paths(tmp_path) if key(n).hex() in each.name) for n in (0, 1))
    shutil.copyfile(first, second)
    assert read(files, 2) == [0]
    second.symlink_to(first)
    assert read(files, 2) == [0]
    second.unlink()
    os.mkfifo(second)
    assert read(files, 2) == [0]


def test_what_was_used_longest_ago_is_removed(tmp_path: Path):
    files = KVFiles(tmp_path / "kv", 32 * SIZE, {"full": SIZE})
    try:
        files.write([block(number, age=number) for number in range(24)])  # 0 was used last
        files.flush(10)
        assert read(files, 24) == list(range(24))
        files.write([block(number, age=1_000_000) for number in range(100, 140)])
        files.flush(10)
        assert sum(path.stat().st_size for path in paths(tmp_path)) <= 32 * SIZE
        assert read(files, 24) == list(range(24)), "these were read since, or written by a newer use"
    finally:
        files.close()


def test_a_full_disk_ends_writing_with_one_line(files: KVFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    files.write([block(0)])
    files.flush(10)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE // 2, before[1]))
    try:
        for number in range(1, 5):
            files.write([block(number)])
        files.flush(10)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [record.getMessage() for record in caplog.records] == [
        f"serve.kv_cache_dir={tmp_path}/kv: File too large; no more KV is written until the next start"
    ]
    assert read(files, 5) == [0] and len(paths(tmp_path)) == 1


def test_what_nobody_foresaw_ends_no_later_read(files: KVFiles, monkeypatch: pytest.MonkeyPatch, caplog: Any):
    files.write([block(0), block(1)])
    files.flush(20)
    with monkeypatch.context() as patch:
        patch.setattr(files, "_read", lambda key, kind: 1 / 0)
        assert read(files, 2) == []
        patch.setattr(files, "_write", lambda block: 1 / 0)
        files.write([block(2)])
        files.flush(20)
    assert [each.levelname for each in caplog.records] == ["ERROR", "ERROR"]
    assert read(files, 2) == [0, 1]


def test_two_servers_share_a_folder(files: KVFiles, tmp_path: Path):
    other = KVFiles(tmp_path / "kv", 16 * SIZE, {"full": SIZE})
    try:
        for number in range(40):
            (files if number % 2 else other).write([block(number)])
        files.flush(10)
        other.flush(10)
        files.write([block(0)])
        files.flush(10)
        other.write([block(number) for number in range(50, 70)])  # removes what the first one wrote
        other.flush(10)
        found = read(files, 40)
        assert found == list(range(len(found)))
    finally:
        other.close()


WRITER = """
import sys, torch
from pathlib import Path
from atom.runtime.kv.files import Block, KVFiles, chain
size = 32 << 20
files = KVFiles(Path(sys.argv[1]), 1 << 40, {"full": size})
key = b"root"
for number in range(1000):
    key = chain(key, b"%04d" % number)
    files.write([Block(key, "full", torch.full((size,), number, dtype=torch.uint8))])
    files.flush(60)
    print(number, flush=True)
"""


@pytest.mark.slow
def test_a_kill_amid_a_write_leaves_whole_files(tmp_path: Path):
    command = [sys.executable, "-c", WRITER, str(tmp_path / "kv")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == b"0\n"
        end = time.monotonic() + 120
        while time.monotonic() < end and not (unfinished := list((tmp_path / "kv").glob(".*"))):
            pass
        writer.send_signal(signal.SIGKILL)
    assert unfinished, "it was killed amid a write"
    size = 32 << 20
    files = KVFiles(tmp_path / "kv", size * 2, {"full": size})
    try:
        found = read(files, 3)
        assert found and found == list(range(len(found)))
        files.write([Block(b"k" * 32, "full", torch.zeros(size, dtype=torch.uint8))])  # which looks at the folder
        files.flush(10)
        assert not list((tmp_path / "kv").glob(".*"))
    finally:
        files.close()


def test_a_disk_that_is_slower_than_computing_is_not_waited_for(open_engine: Open, tmp_path: Path, monkeypatch: Any):
    fields = {**FILES, "kv_cache_dir": str(tmp_path / "kv")}
    engine = load_always(open_engine("llama", **fields))
    expected = talk(engine)
    engine.close()
    engine = open_engine("llama", **fields)  # with measured costs
    num_reads = [0]

    def read_slowly(*_: object) -> None:
        num_reads[0] += 1
        time.sleep(0.05)

    monkeypatch.setattr(KVFiles, "_read", read_slowly)
    assert talk(engine) == expected
    assert num_reads[0] < 50, "150 if all are waited for"


def test_folders_of_others_and_what_is_not_built_are_refused(checkpoints: Any, tmp_path: Path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ConfigError, match=r"serve.kv_cache_dir=.*/open: .* is writable by others"):
        KVFiles(tmp_path / "open", 1, {})
    base = [f"checkpoint={checkpoints('llama')}", "serve.enable_prefix_caching=true", "serve.kv_cache_dir=/kv"]
    with pytest.raises(ConfigError, match=r"serve.kv_cache_dir is empty; name a folder"):
        load([*base[:2], "serve.swap_space=1000000", "serve.kv_cache_dir=''"])
    with pytest.raises(ConfigError, match=r"serve.kv_cache_dir=/kv keeps .* set serve.swap_space too"):
        load(base)
    with pytest.raises(
        UnsupportedError, match=r"parallel.tensor=2 with serve.kv_cache_dir: .*; serve.swap_space keeps"
    ):
        load([*base, "serve.swap_space=1000000", "parallel.tensor=2", "device=cpu"])
