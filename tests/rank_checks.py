"""What ranks are asked on a CPU and on GPUs alike, and what becomes of their processes.

answers = answer_during_an_abort(engine, prompts, params)
assert_tokens_of_groups(engine, model)             # those of transformers' model, whatever happens
assert_same_answers(answers, of_one_process)
assert_same_texts_of_a_grammar(save_with_texts("llama", folder), {"level": 0}, {"tensor_parallel_size": 2})
assert_ends_by_a_signal(engine, signal.SIGKILL, "has ended", place=0)
assert_ranks_end_with_their_driver(folder, level=0)
assert_goes_on_after_a_stop(engine, place=0)
assert_server_ends_by_a_signal(server, 1, signal.SIGKILL, temporary)      # rank 1 of a server whose TMPDIR that is
assert_server_outlives_a_stop(server, 1)
"""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import tiny
import wire
from serving import Server, family, is_alive
from test_kv_scales import add_tokenizer

from atom import LLMEngine, SamplingParams
from atom.cache.temporary import sweep
from atom.errors import EngineDeadError

END_SECONDS = 50.0  # in which the end of a rank ends all, on a busy machine too: before its silence would
GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
EVENTFUL = {"num_kvcache_blocks": 22, "block_size": 4, "max_model_len": 76, "max_num_batched_tokens": 16,
            "enable_prefix_caching": True}  # fmt: skip


def rank_processes() -> list[int]:
    """The processes of ranks that this one has started."""
    shown = subprocess.run(
        ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(os.getpid())], capture_output=True, text=True
    )
    return [int(line.split()[0]) for line in shown.stdout.splitlines() if "RankLink" in line]


def eventful_prompts() -> list[list[int]]:
    """Prompts that share blocks, of more than a step's tokens each."""
    shared = tiny.prompt(30)
    return [shared, tiny.prompt(25, seed=1), shared[:17] + tiny.prompt(24, seed=2)]


def assert_tokens_of_groups(engine: LLMEngine, model: Any) -> None:
    """Of prompts in chunks, prefix hits and preemptions; of a batch so small that a second group would be empty, too."""
    shared = tiny.prompt(30)
    prompts = [
        shared,
        *(tiny.prompt(1 + 9 * seed, seed=seed) for seed in range(5)),
        shared[:17] + tiny.prompt(24, seed=6),
    ]
    for batch in (prompts, prompts[::-1], prompts[:1]):
        for answer, prompt in zip(engine.generate(batch, GREEDY), batch, strict=True):
            tiny.assert_greedy(answer, prompt, model)
    metrics = engine.metrics.scheduler
    assert metrics.num_chunks > 0
    assert metrics.num_prefix_hit_tokens > 0
    assert metrics.num_preemptions > 0


def answer_during_an_abort(engine: LLMEngine, prompts: list[list[int]], params: Any) -> list[dict[str, Any]]:
    """The answers to prompts that come while another request has been aborted within its prompt."""
    (aborted,) = engine.add_request([tiny.prompt(50, seed=9)], GREEDY)
    engine.step()
    engine.abort(aborted)
    return engine.generate(prompts, params)


def assert_same_answers(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    """The same tokens, and the same log probabilities of the last prompt's and of its answer's."""
    assert [each["token_ids"] for each in ours] == [each["token_ids"] for each in theirs]
    for key, first in (("prompt_logprobs", 1), ("logprobs", 0)):
        found, expected = ([each.logprob for each in answers[-1][key][first:]] for answers in (ours, theirs))
        assert found == pytest.approx(expected, abs=1e-4) and any(expected)


def save_with_texts(name: str, folder: Path) -> Path:
    """Write the checkpoint of a variant whose tokens are bytes, and its tokenizer."""
    tiny.save_changed(name, folder, vocab_size=300, eos_token_id=255)
    add_tokenizer(folder)
    return folder


def assert_same_texts_of_a_grammar(folder: Path, common: dict[str, Any], divided: dict[str, Any]) -> None:
    """One rank writes what a grammar allows, and several write the same."""
    pattern, texts = r"[a-f]{3}-[0-9]{2,4}(xyz)?", []
    wanted = SamplingParams(temperature=1.0, seed=3, n=2, max_tokens=40, structured_outputs={"regex": pattern})
    for own in ({}, divided):
        engine = LLMEngine(str(folder), **common, **own)
        texts.append([answer["text"] for answer in engine.generate(["x", "yz", "q"], [wanted, GREEDY, wanted])])
        engine.close()
    assert texts[1] == texts[0]
    written = [*texts[0][:2], *texts[0][3:]]
    assert all(re.fullmatch(pattern, text) for text in written), texts
    assert len({*written}) > 1


def traced_by_each_rank(engine: LLMEngine, folder: Path) -> list[list[dict[str, Any]]]:
    """The events of the traces that two ranks write of an answer of 14 tokens; the engine is closed."""
    engine.start_profile()
    engine.generate([[1, 2, 3]], GREEDY)
    engine.stop_profile()
    engine.generate([[1, 2, 3]], GREEDY)  # which the other rank takes once it has written
    engine.close()
    (first,), (second,) = ((folder / f"rank_{rank}").iterdir() for rank in range(2))
    return [json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"] for trace in (first, second)]


def assert_ends_by_a_signal(engine: LLMEngine, number: int, reason: str, place: int) -> None:
    """A signal to one of its ranks ends an engine that runs, and all of its processes, in time and for good.

    place: among its other ranks
    """
    pids = sorted(rank_processes())
    files = files_of(pids)
    reason = f"rank {pids.index(pids[place]) + 1} {reason}"
    engine.add_request(
        [tiny.prompt(9), tiny.prompt(12)], SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    )
    for _ in range(20):
        engine.step()
    os.kill(pids[place], number)
    since = time.monotonic()
    with pytest.raises(EngineDeadError, match=reason):
        while True:
            engine.step()
    while rank_processes():
        time.sleep(0.02)
    assert time.monotonic() - since < END_SECONDS
    with pytest.raises(EngineDeadError, match=reason):
        engine.generate([[1]], GREEDY)
    engine.close()
    assert not any(file.exists() for file in files)


def assert_goes_on_after_a_stop(engine: LLMEngine, place: int) -> None:
    """A stop of one of its other ranks, for longer than its silence may last, ends nothing and changes no token.

    place: among its other ranks
    """
    pids = sorted(rank_processes())
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    (expected,) = engine.generate([tiny.prompt(9)], params)
    ranks = engine._engine._ranks
    assert ranks is not None
    ranks.limit_silence(2.0)
    stopped: list[list[int]] = []

    def go_on() -> None:
        wire.wait_until(lambda: ranks.stopped)
        time.sleep(3.5)
        stopped.append(ranks.stopped)
        os.kill(pids[place], signal.SIGCONT)

    os.kill(pids[place], signal.SIGSTOP)
    continuing = threading.Thread(target=go_on)
    continuing.start()
    (answer,) = engine.generate([tiny.prompt(9)], params)
    continuing.join()
    assert stopped == [[pids.index(pids[place]) + 1]], "it was stopped in the midst of it"
    assert answer["token_ids"] == expected["token_ids"]
    wire.wait_until(lambda: not ranks.stopped)


def files_of(pids: list[int], temporary: Path | None = None) -> list[Path]:
    """The files whose memory processes share, which could be left over. temporary: their TMPDIR, if not this one's"""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    files = [Path(line.split(maxsplit=5)[5].removesuffix(" (deleted)")) for line in lines if " rw-s " in line]
    folders = (Path("/dev/shm"), temporary or Path(tempfile.gettempdir()))
    return [file for file in files if any(folder in file.parents for folder in folders)]


def assert_ranks_end_with_their_driver(folder: Path, **fields: Any) -> None:
    """No child of a process is left once that is killed in the midst of a request."""
    code = f"""if True:
        from atom import LLMEngine, SamplingParams
        engine = LLMEngine({str(folder)!r}, tensor_parallel_size=2, **{fields!r})
        engine.add_request([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
        engine.step()
        print("runs", flush=True)
        while True:
            engine.step()
    """
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None and driver.stdout.readline() == "runs\n"
        children = Path(f"/proc/{driver.pid}/task/{driver.pid}/children").read_text().split()
        files = files_of([driver.pid, *map(int, children)])
        end = time.monotonic() + END_SECONDS
        driver.kill()
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < end, "a rank is left"
        time.sleep(0.05)
    assert children
    assert not any(file.exists() for file in files)


def ranks_of(server: Server) -> list[int]:
    """The processes of a server's ranks, that of the engine first, which drives."""
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in family(server)}
    others = sorted(pid for pid, command in commands.items() if b"RankLink" in command)
    (driver,) = {int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in others}
    return [driver, *others]


def assert_server_outlives_a_stop(server: Server, rank: int) -> None:
    """A stop of a process of ranks, for longer than heartbeat_seconds=2, ends nothing: /health says so, streams go on."""
    pid, name = ranks_of(server)[rank], f"rank {rank}" if rank else "engine"
    body = {"prompt": [0, 9], "max_tokens": 400, "ignore_eos": True}
    with ExitStack() as opened:
        streams = [wire.Stream(server.url, body) for _ in range(3)]
        for stream in streams:
            opened.callback(stream.close)
            stream.read_events(3)
        os.kill(pid, signal.SIGSTOP)
        wire.wait_until(lambda: name in wire.ask(server.url, "GET", "/health").json.get("stopped", []))
        time.sleep(3.5)
        health = wire.ask(server.url, "GET", "/health")
        assert health.status == 200 and health.json["state"] == "stopped"
        os.kill(pid, signal.SIGCONT)
        assert all(stream.read_events()[-1] == "[DONE]" for stream in streams)
    wire.wait_until(lambda: wire.ask(server.url, "GET", "/health").json == {"status": "ok", "state": "ready"})


def assert_server_ends_by_a_signal(
    server: Server, rank: int | None, number: int, temporary: Path, is_free: Callable[[], bool] = lambda: True
) -> None:
    """A signal to a process of a server ends its streams with an error, and all processes of its engine, in time.

    rank: whose process; None: the one that serves HTTP. temporary: its TMPDIR. is_free: whether the memory that the
    engine took is free
    """
    processes, ranks = family(server), ranks_of(server)
    files = files_of(ranks, temporary)
    with ExitStack() as opened:
        body = {"prompt": [0, 9], "max_tokens": 8000, "ignore_eos": True}
        streams = [wire.Stream(server.url, body) for _ in range(3)]
        for stream in streams:
            opened.callback(stream.close)
            stream.read_events(3)
        since = time.monotonic()
        os.kill(server.process.pid if rank is None else ranks[rank], number)
        for stream in streams if rank is not None else ():
            *_, last = stream.read_events()
            assert last["error"]["code"] == "unavailable"
        wire.wait_until(lambda: not any(map(is_alive, processes)) and is_free())
        assert time.monotonic() - since < END_SECONDS
        server.process.terminate()  # it reports the death for some seconds more
        code = server.process.wait(20)
    assert code == (-number if rank is None else 1)
    assert rank is None or (f"rank {rank} has" if rank else "the engine is dead") in server.log.read_text()
    assert not any(file.exists() for file in files)
    for left in temporary.iterdir():
        os.utime(left, (0, 0))  # a minute later
    sweep(temporary)  # as the next start does
    assert list(temporary.iterdir()) == []
