"""Trace an engine with torch's profiler, for TensorBoard or Chrome's viewer.

    profiler = Profiler("traces", is_detailed=False)
    profiler.start()
    ...                            # steps, in this thread
    profiler.stop()                # traces/rank_0/atom.1716899120527.pt.trace.json.gz

On a GPU it has the kernels too. `is_detailed` adds shapes, stacks and memory, and takes more time.
"""

from __future__ import annotations

import time
import warnings
from pathlib import Path

from torch.profiler import profile

from atom.errors import ConfigError, RequestError


class Profiler:
    """Traces one rank, one trace at a time. ConfigError without a folder that it can write to."""

    def __init__(self, folder: str | None, *, rank: int = 0, is_detailed: bool = False) -> None:
        self._folder = Path(folder) / f"rank_{rank}" if folder else None
        self._is_detailed = is_detailed
        self._running: profile | None = None

    @property
    def is_running(self) -> bool:
        return self._running is not None

    def start(self) -> None:
        """Start a trace. RequestError if one runs."""
        if self._folder is None:
            raise ConfigError(
                "there is no folder for traces; set serve.torch_profiler_dir or ATOM_TORCH_PROFILER_DIR and restart"
            )
        if self._running is not None:
            raise RequestError("the profiler runs already; stop it before it is started again")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"serve.torch_profiler_dir: {error}") from None
        detail = self._is_detailed
        running = profile(record_shapes=detail, with_stack=detail, profile_memory=detail)
        # torch 2.11 warns of cycles, of which there are none; acc_events=True, as it says, makes a stop 20 times slower
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning: Profiler clears events")
            running.start()
        self._running = running

    def stop(self) -> Path:
        """End the trace and write it; its file. RequestError if none runs."""
        if self._running is None or self._folder is None:
            raise RequestError("the profiler does not run; start it first")
        running, self._running = self._running, None
        running.stop()
        path = self._folder / f"atom.{time.time_ns()}.pt.trace.json.gz"  # TensorBoard looks for this name
        try:
            running.export_chrome_trace(str(path))
        except OSError as error:
            raise ConfigError(f"serve.torch_profiler_dir: {error}") from None
        return path
