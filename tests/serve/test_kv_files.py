"""Servers that keep KV in files, and end in the middle of it."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import serving
import tiny
import wire
from serving import Server, Start, family, is_alive

from atom.runtime.kv.files import HEAD_BYTES

NUM_TALKS, NUM_TURNS = 6, 3
BLOCKS = ["level=0", "serve.block_size=4", "serve.max_model_len=200", "serve.max_num_batched_tokens=64"]
SMALL = ["serve.num_kvcache_blocks=60", "serve.swap_space=100000", *BLOCKS]


def ask(server: Server, prompt: list[int]) -> tuple[list[int], int]:
    """The answer's tokens, and how many of the prompt's were cached."""
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = wire.ask(server.url, "POST", "/v1/completions", body | {"return_token_ids": True})
    assert answer.status == 200, answer.json
    (choice,) = answer.json["choices"]
    return choice["token_ids"], answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]


def talk(server: Server) -> tuple[list[list[int]], list[int]]:
    """Conversations that take turns, some at a time: their tokens, and in each turn how many were cached."""
    talks, num_cached = [tiny.prompt(24, seed=number) for number in range(NUM_TALKS)], []
    for turn in range(NUM_TURNS):
        with ThreadPoolExecutor(3) as pool:
            answers = list(pool.map(lambda each: ask(server, each), talks))
        talks = [[*each, *tokens, *tiny.prompt(7, seed=turn)] for each, (tokens, _) in zip(talks, answers, strict=True)]
        num_cached.append(sum(cached for _, cached in answers))
    return talks, num_cached


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def assert_whole(folder: Path) -> None:
    """No file was left half written, and none under a name of its own."""
    sizes = {path.suffix: path.stat().st_size for path in files(folder)}
    assert sizes and all(size > HEAD_BYTES for size in sizes.values())
    assert {(path.suffix, path.stat().st_size) for path in files(folder)} == set(sizes.items())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("is_ending", [False, True], ids=["while it serves", "while it writes what is kept"])
def test_an_engine_whose_server_is_killed_writes_no_more(is_ending: bool, start_server: Start, tmp_path: Path):
    kept = [*SMALL, f"serve.kv_cache_dir={tmp_path / 'kv'}", "serve.http.drain_seconds=100"]
    server = start_server(*kept, stub={"write_seconds": 0.15})
    (engine,) = family(server)
    talk(server)
    if is_ending:
        server.process.send_signal(signal.SIGTERM)
        num_files = len(files(tmp_path))
        serving.wait_for_line(server, "draining")
        wire.wait_until(lambda: len(files(tmp_path)) > num_files + 2)
    assert is_alive(engine)
    num_files = len(files(tmp_path))
    server.process.kill()
    server.process.wait()
    wire.wait_until(lambda: not is_alive(engine))
    assert len(files(tmp_path)) < num_files + 40, "2 s have room for 14"
    assert_whole(tmp_path / "kv")


@pytest.mark.slow
def test_a_server_that_ends_in_order_writes_all_that_it_can_in_its_time(start_server: Start, tmp_path: Path):
    kept = [*SMALL, f"serve.kv_cache_dir={tmp_path / 'kv'}"]
    server = start_server(*kept, "serve.http.drain_seconds=5", stub={"write_seconds": 1.0})
    talk(server)
    stream = wire.Stream(server.url, {"prompt": [0, 9], "max_tokens": 150, "ignore_eos": True})
    stream.read_events(1)
    num_files = len(files(tmp_path))
    server.process.terminate()
    assert server.process.wait(wire.SECONDS) == 0
    assert num_files + 3 < len(files(tmp_path)) < num_files + 40
    assert_whole(tmp_path / "kv")


def talk_on(server: Server) -> None:
    """Talk until it is killed."""
    while True:
        talk(server)


def test_a_server_that_is_killed_gives_the_same_tokens_from_its_files(start_server: Start, tmp_path: Path):
    expected, _ = talk(start_server(*BLOCKS, stub={"write_seconds": 0}))
    kept = [*SMALL, f"serve.kv_cache_dir={tmp_path / 'kv'}"]
    server = start_server(*kept, stub={"write_seconds": 0.001})
    with ThreadPoolExecutor() as pool:
        talking = pool.submit(talk_on, server)
        wire.wait_until(lambda: len(files(tmp_path)) > 40)
        server.process.kill()
        assert talking.exception() is not None, "it was killed amid the conversations"
    server = start_server(*kept, stub={"write_seconds": 0})
    talks, (num_first, *_) = talk(server)
    assert talks == expected
    assert num_first > 0, "of the first turn, only files can have anything"
