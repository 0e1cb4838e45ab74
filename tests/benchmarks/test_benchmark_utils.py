from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from atom.benchmarks import __main__, benchmark_utils
from atom.benchmarks.benchmark_utils import (
    BenchmarkError,
    UsageError,
    convert_to_pytorch_benchmark_format,
    report,
    write_json,
)


def test_the_package_names_its_commands(capsys: pytest.CaptureFixture[str]):
    assert __main__.main() == 2
    named = [line.split()[2] for line in capsys.readouterr().err.splitlines()[:-1]]
    files = Path(__main__.__file__).parent.glob("*.py")
    commands = [path.stem for path in files if "def main(argv" in path.read_text()]
    assert sorted(named) == [f"atom.benchmarks.{name}" for name in sorted(commands)]


def raising(error: BaseException) -> Any:
    def work() -> int:
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UsageError("no such\n  file"), 2, "matrix: no such file\n"),
        (BenchmarkError("the server died"), 1, "matrix: the server died\n"),
        (KeyboardInterrupt(), 130, "matrix: interrupted\n"),
        (OSError(28, "No space left on device"), 1, "matrix: [Errno 28] No space left on device\n"),
    ],
)
def test_an_error_that_we_foresee_is_one_line(
    error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]
):
    assert report("matrix", raising(error)) == code
    assert capsys.readouterr().err == line


def test_other_errors_keep_their_traceback():
    with pytest.raises(ZeroDivisionError):
        report("matrix", raising(ZeroDivisionError()))
    assert report("matrix", lambda: 3) == 3


def test_a_device_is_written_to_and_not_replaced():
    main, terminal = os.openpty()
    path = Path(os.ttyname(terminal))
    write_json(path, {"rows": []})
    assert path.is_char_device() and os.read(main, 100) == b'{"rows": []}'
    os.close(terminal)
    os.close(main)


def test_json_is_written_whole_with_infinities_as_text(tmp_path: Path):
    path = tmp_path / "deep" / "a.json"
    write_json(path, {"rate": math.inf, "rows": [1.5, (-math.inf, None)]})
    assert json.loads(path.read_text()) == {"rate": "inf", "rows": [1.5, ["-inf", None]]}
    assert os.listdir(path.parent) == ["a.json"]
    before = path.stat().st_ino
    write_json(path, {})
    assert path.stat().st_ino != before  # another file took its place


def test_a_file_that_cannot_be_written_leaves_the_one_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(ValueError, match="Out of range float values"):
        write_json(path, {"rate": math.nan})

    def break_off(self: Path, text: str) -> None:
        with self.open("w") as file:
            file.write(text[:5])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(benchmark_utils.Path, "write_text", break_off)
    with pytest.raises(OSError, match="No space left"):
        write_json(path, {"rate": 1})
    assert os.listdir(tmp_path) == ["a.json"]
    assert path.read_text() == "old"


def test_records_for_pytorchs_benchmark_database(monkeypatch: pytest.MonkeyPatch):
    args, extra = argparse.Namespace(model="m", seed=0), {"tensor_parallel_size": 8}
    monkeypatch.delenv("SAVE_TO_PYTORCH_BENCHMARK_FORMAT", raising=False)
    assert convert_to_pytorch_benchmark_format(args, {"mean_ttft_ms": [1.5]}, extra) == []
    monkeypatch.setenv("SAVE_TO_PYTORCH_BENCHMARK_FORMAT", "1")
    assert convert_to_pytorch_benchmark_format(args, {"mean_ttft_ms": [1.5], "output_throughput": [9.0]}, extra) == [
        {
            "benchmark": {
                "name": "atom benchmark",
                "extra_info": {"args": {"model": "m", "seed": 0, "tensor_parallel_size": 8}},
            },
            "model": {"name": "m"},
            "metric": {"name": name, "benchmark_values": [value], "extra_info": {"tensor_parallel_size": 8}},
        }
        for name, value in (("mean_ttft_ms", 1.5), ("output_throughput", 9.0))
    ]
    assert vars(args) == {"model": "m", "seed": 0}
