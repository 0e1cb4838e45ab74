"""Bound the hidden states of a request, and of all that run.

size = tapped_bytes(taps, prompts, params, columns)     # that the answers of a request may have at most
with running.hold(size): …                              # LimitError (429) if those that run leave no room for it
tapped_states(choice)                                   # {"taps": {"model.layers.12": {"dtype": …, "data": …}}}
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from atom.runtime.types import Tap
from atom.sampling_params import SamplingParams
from atom.serve.auth.tenants import LimitError
from atom.serve.engine.protocol import Tapped
from atom.serve.http.errors import FieldError

MAX_OF_REQUEST = 256 << 20  # bytes, before they are base64
MAX_RUNNING = 1 << 30  # of all requests that run
RETRY_SECONDS = 1.0


def tapped_bytes(taps: Sequence[Tap], prompts: list[list[int]], params: list[SamplingParams], columns: int) -> int:
    """The most bytes of hidden states that the answers to all prompts may have. FieldError beyond MAX_OF_REQUEST.

    columns: numbers that a layer gives of a token
    """
    answers = [(one.n, len(prompt) + one.max_tokens) for prompt, one in zip(prompts, params, strict=True)]
    size = 4 * columns * sum(num * (longest if tap.pool == "all" else 1) for tap in taps for num, longest in answers)
    if size > MAX_OF_REQUEST:
        sizes = f"up to {size / 1e6:,.0f} MB, more than {MAX_OF_REQUEST / 1e6:,.0f} MB"
        raise FieldError("taps", f"taps: hidden states of {sizes}: lower max_tokens or n, or name fewer layers")
    return size


@dataclass
class RunningTaps:
    """The hidden states that running requests may have at most."""

    num_bytes: int = 0

    @contextmanager
    def hold(self, size: int) -> Iterator[None]:
        """Count a request while it runs. LimitError if there is no room for it."""
        if size and self.num_bytes + size > MAX_RUNNING:
            held, most = self.num_bytes / 1e6, MAX_RUNNING / 1e6
            fault = f"hidden states of running requests take up to {held:,.0f} of {most:,.0f} MB"
            raise LimitError("tapped_states", f"taps: {fault}, these up to {size / 1e6:,.0f} MB", RETRY_SECONDS)
        self.num_bytes += size
        try:
            yield
        finally:
            self.num_bytes -= size


def tapped_states(taps: Mapping[str, Tapped]) -> dict[str, Any]:
    """The field of an answer with the hidden states that it taps, empty without any: base64 of float32, by row."""
    found = {
        name: {"dtype": "float32", "shape": list(states.shape), "data": b64encode(states.data).decode()}
        for name, states in taps.items()
    }
    return {"taps": found} if found else {}
