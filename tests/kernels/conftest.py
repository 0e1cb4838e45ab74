from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    """Kernels run as in an engine, and tests draw the same numbers each time."""
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


@pytest.fixture
def exact_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that Triton's interpreter makes fp8_e4m3 are rounded as a GPU does it: its own loses a carry."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    tl, convert = interpreter.tl, interpreter._convert_float

    def convert_exactly(values: Any, source: Any, target: Any, mode: Any) -> Any:
        if target != tl.float8e4nv or source != tl.float32:
            return convert(values, source, target, mode)
        return torch.from_numpy(values.view("float32")).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", convert_exactly)
