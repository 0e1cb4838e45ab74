"""An engine on two hosts, which are addresses of the loopback: its answers, and what becomes of it when one is gone."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import serving
import wire
from serving import Server, family, free_port, is_alive, listening

from atom import LLMEngine, SamplingParams
from atom.config.parallel import read_key
from atom.errors import ConfigError
from atom.runtime.ranks.remote import find_driver

PROMPT = {"prompt": [0, 9], "max_tokens": 40, "temperature": 0, "ignore_eos": True}
COMMAND = [sys.executable, "-m", "atom.cli", "dtype=fp32", "level=1", "serve.kv_cache_memory=16777216", "parallel=tp2"]


class Hosts(NamedTuple):
    """A server on 127.0.0.1, and a rank of its engine on 127.0.0.2."""

    server: Server
    supervisor: Server

    @property
    def rank(self) -> int:
        (pid,) = family(self.supervisor)
        return pid


def save_key(file: Path) -> Path:
    file.write_text(secrets.token_hex(32) + "\n")
    file.chmod(0o600)
    return file


@pytest.fixture
def start_hosts(talker: Path, tmp_path: Path) -> Iterator[Callable[..., Hosts]]:
    launched: list[Server] = []
    key, wrong = save_key(tmp_path / "key"), save_key(tmp_path / "wrong")

    def launch(rank: int, key: Path, name: str, layout: str, *overrides: str) -> Server:
        folder = tmp_path / name
        folder.mkdir()
        where = [f"advanced.torchrun.rank={rank}", f"parallel.host=127.0.0.{rank + 1}", f"parallel.key_file={key}"]
        fields = ["advanced.torchrun.world_size=2", f"parallel.address=tcp://127.0.0.1:{port}"]
        server = serving.launch(
            talker, folder, f"parallel={layout}", "parallel.launcher=torchrun", *where, *fields, *overrides
        )
        launched.append(server)
        return server

    def start(layout: str = "tp2", *overrides: str) -> Hosts:
        server = launch(0, key, "first", layout, *overrides)
        address = f"tcp://127.0.0.1:{port}"
        with pytest.raises(ConfigError, match=r"parallel\.key_file must hold the same on each host"):
            find_driver(address, read_key(str(wrong)), 1, "127.0.0.2")
        serving.wait_for_line(server, "a connection from 127.0.0.2 is refused: it has another key")
        supervisor = launch(1, key, "second", layout, *overrides)
        return Hosts(server._replace(url=serving.wait_for_url(server)), supervisor)

    port = free_port()
    yield start
    for each in launched:
        for pid in [*family(each), each.process.pid] if each.process.poll() is None else ():
            os.kill(pid, signal.SIGKILL)
        each.process.wait()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "gone"),
    [
        ("tp2", "supervisor"),
        *(
            pytest.param(layout, gone, marks=pytest.mark.slow)
            for layout, gone in (("pp2", "supervisor"), ("tp2", "rank"), ("tp2", "driver"))
        ),
    ],
)
def test_two_hosts_answer_as_one_until_one_is_gone(
    layout: str, gone: str, start_hosts: Callable[..., Hosts], talker: Path
):
    hosts = start_hosts(layout)
    server, supervisor, rank = hosts.server, hosts.supervisor.process, hosts.rank
    answer = wire.ask(server.url, "POST", "/v1/completions", PROMPT)
    assert answer.json["choices"][0]["text"] == answer_of_one_rank(talker, [0, 9], max_tokens=40, ignore_eos=True)
    (engine,) = family(server)
    listens = [{host for host, _ in listening(pid)} for pid in (engine, rank, supervisor.pid)]
    assert listens == [{"127.0.0.1"}, {"127.0.0.2"}, set()], "each at its own address, for gloo"
    with closing(wire.Stream(server.url, {"prompt": [0, 9], "max_tokens": 8000})) as stream:
        stream.read_events(3)
        if gone == "driver":
            os.kill(engine, signal.SIGKILL)
        if gone == "supervisor":
            os.kill(supervisor.pid, signal.SIGKILL)
        if gone == "rank":
            os.kill(rank, signal.SIGKILL)
        *_, last = stream.read_events()
        assert last["error"]["code"] == "unavailable"
    code = {"supervisor": -signal.SIGKILL, "rank": 1, "driver": 0}[gone]
    assert supervisor.wait(wire.SECONDS) == code
    wire.wait_until(lambda: not is_alive(rank) and not is_alive(engine))
    if gone != "driver":
        serving.wait_for_line(server, "rank 1 has ended")
    server.process.terminate()  # it reports the death for some seconds more
    assert server.process.wait(wire.SECONDS) == 1


@pytest.mark.slow
@pytest.mark.parametrize("stopped", ["host", "rank", "driver"])
def test_two_hosts_go_on_after_a_stop_of_one(stopped: str, start_hosts: Callable[..., Hosts]):
    hosts = start_hosts("tp2", "advanced.heartbeat_seconds=2")
    server, rank = hosts.server, hosts.rank
    (engine,) = family(server)
    pids = {"host": [hosts.supervisor.process.pid, rank], "rank": [rank], "driver": [engine]}[stopped]
    with closing(wire.Stream(server.url, {"prompt": [0, 9], "max_tokens": 400, "ignore_eos": True})) as stream:
        stream.read_events(3)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(4)
        shown = wire.ask(server.url, "GET", "/health").json
        names = {"host": None, "rank": ["rank 1"], "driver": ["engine"]}  # of a host that is stopped nothing is known
        assert shown.get("stopped") == names[stopped] and shown.get("step_seconds", 2) >= 2
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        assert stream.read_events()[-1] == "[DONE]"
    server.process.terminate()
    assert server.process.wait(wire.SECONDS) == 0 and hosts.supervisor.process.wait(wire.SECONDS) == 0


def answer_of_one_rank(talker: Path, prompt: str | list[int], **params: Any) -> str:
    """What one rank answers."""
    engine = LLMEngine(str(talker), dtype="fp32", level=1, kv_cache_memory=1 << 24)
    (answer,) = engine.generate([prompt], SamplingParams(temperature=0, **params))
    engine.close()
    return str(answer["text"])


def run_torchrun(arguments: list[str], *overrides: str) -> str:
    """What `atom-run` prints under torchrun, of which a single process prints anything."""
    words = [sys.executable, "-m", "torch.distributed.run", *arguments, "--no-python", *COMMAND, *overrides]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_torchrun_starts_the_ranks_of_one_host(talker: Path):
    fields = [f"checkpoint={talker}", "prompts=Hello", "sampling.temperature=0", "job.output=json"]
    out = run_torchrun(["--standalone", "--nproc-per-node", "2"], "parallel.launcher=torchrun", *fields)
    (line,) = out.splitlines()
    assert json.loads(line)["text"] == answer_of_one_rank(talker, "Hello")


@pytest.mark.slow
def test_a_rank_compiles_where_its_host_s_cache_has_no_pieces(talker: Path, tmp_path: Path):
    key, address = save_key(tmp_path / "key"), f"tcp://127.0.0.1:{free_port()}"
    fields = [f"checkpoint={talker}", "prompts=Hello", "sampling.temperature=0", "job.output=json", "level=2"]
    fields += ["parallel.launcher=torchrun", f"parallel.address={address}", f"parallel.key_file={key}"]
    for has_compiled in (True, False):
        processes = [
            subprocess.Popen(
                [*COMMAND, *fields, f"cache={tmp_path / str(rank)}", f"parallel.host=127.0.0.{rank + 1}"],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"},
            )
            for rank in range(2)
        ]  # fmt: skip
        (out, _), (nothing, said) = (process.communicate(timeout=280) for process in processes)
        assert [process.returncode for process in processes] == [0, 0], said
        assert json.loads(out)["text"] == answer_of_one_rank(talker, "Hello") and nothing == ""
        assert (
            bool(re.search(rf"rank 1 has compiled \d+ pieces, which {tmp_path}/1 did not have", said)) == has_compiled
        )
