from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    """Kernels run as in an engine, and tests draw the same numbers each time."""
    torch.manual_seed(0)
    with torch.inference_mode():
        yield
