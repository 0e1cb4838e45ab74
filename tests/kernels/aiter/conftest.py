"""AITER's sources, if any."""

from __future__ import annotations

from pathlib import Path

import pytest

from atom.kernels.aiter.functions import find_root


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent and "sources" in getattr(item, "fixturenames", ()):
            item.add_marker("aiter_sources")


@pytest.fixture(scope="session")
def sources(request: pytest.FixtureRequest) -> Path:
    """AITER's own: of --aiter-source, else of the installed package."""
    given = request.config.getoption("--aiter-source")
    root = Path(given) if given else find_root()
    if root is None:
        pytest.skip("amd-aiter is not installed, and there is no --aiter-source")
    return root
