"""AITER's sources, where there are any."""

from __future__ import annotations

from pathlib import Path

import pytest

from atom.kernels.aiter.functions import find_root


@pytest.fixture(scope="session")
def sources(request: pytest.FixtureRequest) -> Path:
    """AITER's own: of --aiter-source, else of the installed package."""
    given = request.config.getoption("--aiter-source")
    root = Path(given) if given else find_root()
    if root is None:
        pytest.skip("amd-aiter is not installed, and there is no --aiter-source")
    return root
