"""The server command: flags in, `job=serve` of the one configuration out."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import types
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atom.config import Config
from atom.entrypoints.openai_server import main
from atom.errors import EngineDeadError
from atom.serve.server import bind

ROOT = Path(__file__).parents[2]
Job = Callable[[Config], int]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[[Job], list[Config]]:
    """Puts a function in the place of job=serve; the configurations that it is run with."""

    def install(run: Job = lambda config: 0) -> list[Config]:
        seen: list[Config] = []

        def record(config: Config) -> int:
            seen.append(config)
            return run(config)

        module: Any = types.ModuleType("atom.jobs.serve")
        module.run = record
        monkeypatch.setitem(sys.modules, "atom.jobs.serve", module)
        return seen

    return install


def raising(error: BaseException) -> Job:
    def job(config: Config) -> int:
        raise error

    return job


def test_the_guides_command_is_job_serve(serve: Any):
    seen = serve()
    assert main(["--kv_cache_dtype", "bf16", "--host", "127.0.0.1", "--server-port", "8001", "--max-num-seqs=4"]) == 0
    (config,) = seen
    assert (config.job.kind, config.serve.http.host, config.serve.http.port) == ("serve", "127.0.0.1", 8001)
    assert (config.serve.kv_cache_dtype, config.serve.max_num_seqs) == ("bf16", 4)


def test_without_flags_it_listens_on_the_port_of_the_guide(serve: Any):
    seen = serve()
    assert main([]) == 0
    assert (seen[0].serve.http.host, seen[0].serve.http.port) == ("0.0.0.0", 8000)
    assert seen[0].checkpoint is None, "the embedded model"
    assert seen[0].sampling.max_tokens == 256, "ROCm/ATOM's own default"
    assert main(["--set", "sampling.max_tokens=null"]) == 0
    assert seen[1].sampling.max_tokens is None


def test_its_port_opens_when_the_model_is_loaded(serve: Any):
    seen = serve()
    assert main([]) == main(["--set", "serve.http.listen_when_ready=false"]) == 0
    assert [config.serve.http.listen_when_ready for config in seen] == [True, False]


def test_dtype_seed_and_device_are_those_of_the_configuration(serve: Any):
    seen = serve()
    assert main(["--dtype", "half", "--seed", "7", "--device", "cpu"]) == 0
    assert (seen[0].dtype, seen[0].seed, seen[0].device) == ("fp16", 7, "cpu")


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        ("--served-model-name a b", "served_model_name", ["a", "b"]),
        ("--served_model_name=a --served-model-name b", "served_model_name", ["a", "b"]),
        ("--api-key one,two", "api_keys", "one,two"),
        ("--api-key one two", "api_keys", "one,two"),
        ("--port 9000", "port", 9000),
        ("--port 8006 --server-port 9000", "port", 9000),
        ("--server-port 9000 --port 8006", "port", 9000),
        ("--root-path /a/b", "root_path", "/a/b"),
        ("--ssl-certfile a.pem --ssl-keyfile b.pem", "ssl_keyfile", "b.pem"),
        ("--max-num-queued-reqs 3", "max_queue", 3),
        ("--shutdown-timeout 2", "drain_seconds", 2.0),
        ("--tool-call-parser hermes", "tool_calls", "tagged_json"),
        ("--max-logprobs 5", "max_top_n_tokens", 5),
        ("--api-key @keys.txt", "api_keys", "@keys.txt"),
        ("--chat-template my.jinja", "chat_template", "my.jinja"),
        ('--default-chat-template-kwargs {"a":{"b":[1]}}', "chat_template_kwargs", {"a": {"b": [1]}}),
        ("--allowed-origins *", "cors", ["*"]),
        ('--allowed-origins ["http://a","http://b"]', "cors", ["http://a", "http://b"]),
        ("--tool-calls json", "tool_calls", "json"),
        ("--max-queue 3", "max_queue", 3),
        ("--drain_seconds 0.5", "drain_seconds", 0.5),
        ("--set serve.http.best_of=2", "best_of", 2),
    ],
)
def test_a_flag_of_the_server_is_a_field_of_http(argv: str, field: str, value: Any, serve: Any):
    seen = serve()
    assert main(argv.split()) == 0
    assert getattr(seen[0].serve.http, field) == value


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (
            "--sever-port 1",
            "atom-run: ConfigError: unrecognized arguments: --sever-port (did you mean --server-port?)",
        ),
        ("--server-port 99999", "atom-run: ConfigError: --server-port=99999 must be a whole number from 0 to 65535"),
        (
            "--tool-calls hermes",
            "atom-run: ConfigError: tool_calls=hermes: there is no such format; choices: deepseek_v3",
        ),
        ("--port 99999", "atom-run: ConfigError: --port=99999 must be a whole number from 0 to 65535"),
        ("--shutdown-timeout -1", "atom-run: ConfigError: --shutdown-timeout=-1.0 must be a finite number from 0"),
        ("a/b --model c", "atom-run: ConfigError: a/b and --model=c: the model is given twice; leave one out"),
        ("--ssl-keyfile key.pem", "atom-run: ConfigError: --ssl-keyfile needs --ssl-certfile; set both"),
        ("--root-path llm", "atom-run: ConfigError: --root-path=llm is not a path; write it as /llm"),
        ("--set serve.http.port=-1", "atom-run: ConfigError: serve.http.port=-1 must be a whole number from 0 to"),
        (
            "-tp8",
            "atom-run: UnsupportedError: --tensor-parallel-size=8 does not divide 9 heads with 3 of keys and values",
        ),
        ("--server-host x", "atom-run: ConfigError: unrecognized arguments: --server-host; see python -m atom"),
        (
            "--set job.stage=semantic",
            "atom-run: ConfigError: job.stage is a field of job=explain, and this is job=serve",
        ),
        ("--dtype fp7", "atom-run: ConfigError: --dtype=fp7: there is no such choice; choices: auto, bf16"),
        ("--model /nowhere", "atom-run: CheckpointError: no checkpoint '/nowhere'"),
        ("--kv_cache_dtype fp8_e5m2 -tp 3", "atom-run: UnsupportedError: --kv-cache-dtype=fp8_e5m2 is not supported"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(argv: str, line: str, serve: Any, capsys: pytest.CaptureFixture[str]):
    seen = serve()
    assert main(argv.split()) == 2
    out, err = capsys.readouterr()
    assert err.startswith(line)
    assert (err.count("\n"), out, seen) == (1, "", [])


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (EngineDeadError("it stopped"), 1, "atom-run: EngineDeadError: it stopped\n"),
        (KeyboardInterrupt(), 130, "atom-run: interrupted\n"),
        (OSError(98, "Address already in use"), 1, "atom-run: [Errno 98] Address already in use\n"),
    ],
)
def test_other_ends_are_those_of_atom_run(
    error: BaseException, code: int, line: str, serve: Any, capsys: pytest.CaptureFixture[str]
):
    serve(raising(error))
    assert main([]) == code
    assert capsys.readouterr().err == line


def test_a_port_that_is_taken_is_reported_by_its_flag(serve: Any, capsys: pytest.CaptureFixture[str]):
    def job(config: Config) -> int:
        bind(config.serve.http.host, config.serve.http.port)
        return 0

    serve(job)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["--host", "127.0.0.1", "--server_port", str(port)]) == 2
        err = capsys.readouterr().err
    assert err == (
        f"atom-run: ConfigError: cannot listen on 127.0.0.1:{port} (Address already in use); "
        "choose another --server-port\n"
    )


def test_the_exit_code_is_the_jobs(serve: Any):
    serve(lambda config: 3)
    assert main([]) == 3


@pytest.mark.parametrize("name", ["entrypoints.openai_server", "examples.simple_inference", "examples.profile_offline"])
def test_help_is_a_screen_without_torch_or_hydra(name: str):
    program = f"import sys; sys.argv = ['x', '--help']; from atom.{name} import main\n"
    program += "try: main()\nexcept SystemExit as end: assert not end.code\n"
    program += "assert not {'torch', 'hydra', 'transformers', 'fastapi'} & set(sys.modules)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith(f"usage: python -m atom.{name} [flag ...]\n")
    assert "--max-num-batched-tokens" in ended.stdout


def test_the_command_serves_and_ends_with_130_at_ctrl_c(checkpoints: Any):
    """A real process, a real socket, the guide's flags."""
    argv = ["--model", str(checkpoints("qwen3")), "--host", "127.0.0.1", "--server-port", "0", "--level", "0",
            "--max_num_seqs=2", "--api-key", "mine", "--set", "serve.kv_cache_memory=4194304"]  # fmt: skip
    command = [sys.executable, "-m", "atom.entrypoints.openai_server", *argv]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as server:
        try:
            assert server.stderr is not None
            urls = (re.search(r"http://127\.0\.0\.1:\d+", line) for line in server.stderr)
            url = next(found[0] for found in urls if found)
            body = {"prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}
            headers = {"Content-Type": "application/json", "Authorization": "Bearer mine"}
            request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert json.load(answer)["usage"]["completion_tokens"] == 4
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(f"{url}/v1/models", timeout=60)
            server.send_signal(signal.SIGINT)
            server.communicate(timeout=60)
        finally:
            server.kill()
    assert server.returncode == 130
