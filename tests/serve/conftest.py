from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import serving
from serving import Server, Start


@pytest.fixture(scope="session")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return serving.save_talker(tmp_path_factory.mktemp("checkpoints") / "talker")


@pytest.fixture(scope="session")
def start_server(talker: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts a server of the talker with overrides; all end with the session."""
    folder = tmp_path_factory.mktemp("servers")
    servers: list[Server] = []

    def start(*overrides: str, stub: dict[str, Any] | None = None) -> Server:
        servers.append(serving.start(talker, folder, *overrides, stub=stub))
        return servers[-1]

    yield start
    for server in servers:
        server.process.kill()  # its engine ends when the socket to it closes
        server.process.wait()


@pytest.fixture(scope="session")
def stub(start_server: Start) -> Server:
    """A stub for all tests that leave it as it is."""
    return start_server(stub={})


@pytest.fixture(scope="session")
def server(start_server: Start) -> Server:
    """One for all tests that do not harm it."""
    return start_server("serve.pooler_config.pooling_type=LAST")
