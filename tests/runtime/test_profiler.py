from __future__ import annotations

import gzip
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import profile

from atom.errors import ConfigError, RequestError
from atom.runtime.profiler import Profiler


def trace(profiler: Profiler) -> tuple[Path, list[dict[str, Any]]]:
    profiler.start()
    torch.ones(7, 11) @ torch.ones(11, 13)
    path = profiler.stop()
    return path, json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def test_a_trace_of_each_rank_has_a_file_that_tensorboard_finds(tmp_path: Path):
    path, events = trace(Profiler(str(tmp_path / "traces"), rank=3))
    assert path.parent == tmp_path / "traces" / "rank_3"
    assert path.name.endswith(".pt.trace.json.gz")
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == [path]
    (matmul,) = [event for event in events if event.get("name") == "aten::mm"]
    assert matmul["dur"] > 0
    assert "Input Dims" not in matmul["args"]


def test_more_detail_has_shapes_stacks_and_memory(tmp_path: Path):
    _, events = trace(Profiler(str(tmp_path), is_detailed=True))
    (matmul,) = [event for event in events if event.get("name") == "aten::mm"]
    assert matmul["args"]["Input Dims"][:2] == [[7, 11], [11, 13]]
    assert any("test_profiler.py" in event.get("name", "") for event in events), "the stack has this file"
    assert any(event.get("name") == "[memory]" and event["args"]["Bytes"] == 7 * 13 * 4 for event in events)


def test_each_trace_has_a_file_of_its_own(tmp_path: Path):
    profiler = Profiler(str(tmp_path))
    paths = {trace(profiler)[0] for _ in range(2)}
    assert sorted(paths) == sorted(tmp_path.rglob("*.gz")) and len(paths) == 2


def test_starts_and_stops_come_in_turns(tmp_path: Path):
    profiler = Profiler(str(tmp_path))
    with pytest.raises(RequestError, match="the profiler does not run; start it first"):
        profiler.stop()
    profiler.start()
    with pytest.raises(RequestError, match="the profiler runs already; stop it"):
        profiler.start()
    profiler.stop()
    with pytest.raises(RequestError, match="start it first"):
        profiler.stop()


@pytest.mark.parametrize("folder", [None, ""])
def test_without_a_folder_the_error_names_what_to_set(folder: str | None):
    with pytest.raises(ConfigError, match=r"set serve\.torch_profiler_dir or ATOM_TORCH_PROFILER_DIR"):
        Profiler(folder).start()


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    profiler = Profiler(str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"serve\.torch_profiler_dir: .*file/rank_0"):
        profiler.start()
    with pytest.raises(RequestError, match="start it first"):
        profiler.stop()


def test_what_torch_says_of_cycles_is_left_out_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Talking(profile):
        def start(self) -> None:
            warnings.warn("Warning: Profiler clears events at the end of each cycle.", stacklevel=1)
            warnings.warn("the driver is too old", stacklevel=1)
            super().start()

    monkeypatch.setattr("atom.runtime.profiler.profile", Talking)
    with pytest.warns(UserWarning) as warned:
        trace(Profiler(str(tmp_path)))
    assert [str(each.message) for each in warned] == ["the driver is too old"]
