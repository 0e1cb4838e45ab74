from __future__ import annotations

import asyncio
import importlib.util
import logging
import resource
import subprocess
import sys

import pytest
import uvicorn
import uvloop

from atom.config import HTTPConfig
from atom.serve.server import _Uvicorn, bind, find_loop, is_loopback, raise_file_limit, run_loop


def test_without_uvloop_the_loop_is_asyncios(monkeypatch: pytest.MonkeyPatch):
    assert find_loop() is uvloop.new_event_loop
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvloop" else find(name))
    kept = logging.getLogger("atom").handlers, logging.getLogger().handlers

    async def serve() -> int:
        assert type(asyncio.get_running_loop()).__module__.startswith("asyncio")
        return 7

    try:
        assert run_loop(serve, HTTPConfig()) == 7
    finally:
        logging.getLogger("atom").handlers, logging.getLogger().handlers = kept
        logging.getLogger("atom").propagate = True
        logging.captureWarnings(False)


def test_the_log_is_written_before_the_error_of_the_command_line():
    program = """
import logging
from atom.config import HTTPConfig
from atom.errors import ConfigError
from atom.serve.server import run_loop

async def serve():
    for number in range(20000):
        logging.getLogger("atom").info("line")
    raise ConfigError("it cannot")

try:
    run_loop(serve, HTTPConfig())
except ConfigError as error:
    os.write(2, str(error).encode())
"""
    done = subprocess.run([sys.executable, "-c", f"import os{program}"], capture_output=True, text=True)
    *lines, last = done.stderr.splitlines()
    assert last == "it cannot" and all('"message":"line"' in line for line in lines) and len(lines) > 100


def test_a_server_that_does_not_listen_yet_can_stop_too():
    _Uvicorn(uvicorn.Config("")).stop_listening()


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("localhost", True), ("0.0.0.0", False), ("127.1.2.3", True), ("0", False), ("0x0", False)],
)
def test_who_reaches_an_address(host: str, expected: bool):
    with bind(host, 0) as listening:
        assert is_loopback(listening) is expected


def test_as_many_files_may_be_open_as_the_system_allows():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (65536 if hard < 0 else min(hard, 65536), hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
