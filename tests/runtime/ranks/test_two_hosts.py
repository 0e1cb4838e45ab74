"""The commands of docs/parallel.md for two machines, which here are two addresses of the loopback."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import serving

from atom import LLMEngine, SamplingParams

RUN = [sys.executable, "-m", "atom.cli", "parallel=tp2", "dtype=fp32", "level=1", "serve.kv_cache_memory=16777216"]
RUN += ["prompts=Hello", "sampling.temperature=0", "job.output=json"]
RAY = [sys.executable, "-c", "import sys; from ray.scripts.scripts import main; sys.exit(main())", "start"]
RAY += ["--num-cpus=1", "--block"]

pytestmark = pytest.mark.slow


@pytest.fixture
def talker(tmp_path: Path) -> Path:
    return serving.save_talker(tmp_path / "talker")


def answer_of_one_rank(talker: Path) -> str:
    engine = LLMEngine(str(talker), dtype="fp32", level=1, kv_cache_memory=1 << 24)
    (answer,) = engine.generate(["Hello"], SamplingParams(temperature=0))
    return str(answer["text"])


def test_torchrun_starts_a_rank_on_each_of_two_hosts(talker: Path, tmp_path: Path):
    key, port = tmp_path / "key", serving.free_port()
    key.write_text(secrets.token_hex(32))
    key.chmod(0o600)
    hosts = []
    for rank in range(2):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(rank)]
        torchrun += ["--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port), "--no-python"]
        fields = ["parallel.launcher=torchrun", f"parallel.key_file={key}", f"parallel.host=127.0.0.{rank + 1}"]
        command = [*torchrun, *RUN, *fields, f"checkpoint={talker}", f"cache={tmp_path / str(rank)}"]
        hosts.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    (out, driver_said), (nothing, rank_said) = (host.communicate(timeout=280) for host in hosts)
    assert [host.returncode for host in hosts] == [0, 0], driver_said + rank_said
    assert f"rank 1 of the driver at tcp://127.0.0.1:{port + 1}" in rank_said
    assert json.loads(out)["text"] == answer_of_one_rank(talker) and nothing == ""


@contextmanager
def running(command: Sequence[str], log: Path) -> Iterator[None]:
    """Ray on one host, until the block ends."""
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as started:
        try:
            while "Ray runtime started" not in log.read_text():
                assert started.poll() is None, log.read_text()
                time.sleep(0.1)
            yield
        finally:
            started.terminate()  # which ends the processes that it has started


def test_ray_starts_a_rank_on_each_of_two_hosts(talker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each has one CPU, so neither has room for both ranks. Ray asks for a token of its own."""
    pytest.importorskip("ray")
    environment = {"RAY_worker_niceness": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    port = serving.free_port()
    with ExitStack() as hosts:
        head = ["--head", "--node-ip-address=127.0.0.1", f"--port={port}"]
        head += ["--include-dashboard=false", "--disable-usage-stats"]
        hosts.enter_context(running([*RAY, *head], tmp_path / "head.log"))
        other = [f"--address=127.0.0.1:{port}", "--node-ip-address=127.0.0.2"]
        hosts.enter_context(running([*RAY, *other], tmp_path / "other.log"))
        command = [*RUN, "parallel.launcher=ray", f"checkpoint={talker}", f"cache={tmp_path / 'cache'}"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr
    assert "ip=127.0.0.2)" in ended.stderr, "where Ray ran the other rank"
    assert json.loads(ended.stdout)["text"] == answer_of_one_rank(talker)
