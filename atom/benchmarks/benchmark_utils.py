"""Shared by the benchmark commands: flags, errors, result files.

    parser = FlagParser("matrix", "Measures ...", usage="--model MODEL [flags]")
    parser.add_argument("--result-dir")                         # --result_dir is the same flag
    sys.exit(report("matrix", lambda: run(parser.read())))
    write_json(Path("results/a.json"), {"request_rate": math.inf})   # whole or not at all

A mistake in the flags is one line and exit code 2, another foreseen error one line and 1, Ctrl-C 130.
"""

from __future__ import annotations

import argparse
import difflib
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn


class BenchmarkError(Exception):
    """The measurement has failed: what happened, where, what to do, in one line."""

    exit_code = 1


class UsageError(BenchmarkError):
    """The command line, or a file in it, is wrong."""

    exit_code = 2


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows only meaningful defaults."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        is_none = action.default is None or action.default is False
        return action.help if is_none else super()._get_help_string(action)


class FlagParser(argparse.ArgumentParser):
    """Flags are written with - or _, never abbreviated, and a mistake raises UsageError.

    elsewhere: flags of a command that users know, and what to do in place of each
    """

    def __init__(self, name: str, description: str, usage: str, elsewhere: Mapping[str, str] | None = None) -> None:
        prog = f"python -m atom.benchmarks.{name}"
        self.elsewhere = elsewhere or {}
        super().__init__(
            prog, f"{prog} {usage}", description, formatter_class=partial(Help, width=110), allow_abbrev=False
        )

    def read(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Parse a command line, by default that of the process."""
        args, unknown = self.parse_known_args([self._spell(each) for each in (sys.argv[1:] if argv is None else argv)])
        if unknown:
            self._refuse(unknown)
        return args

    def _refuse(self, unknown: Sequence[str]) -> NoReturn:
        flag = unknown[0].partition("=")[0].replace("_", "-")
        if flag in self.elsewhere:
            raise UsageError(f"{flag}: {self.elsewhere[flag]}")
        near = difflib.get_close_matches(flag, self._option_string_actions, n=1, cutoff=0.7)
        hint = f" (did you mean {near[0]}?)" if near else ""
        self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")

    def _spell(self, text: str) -> str:
        name, equals, value = text.partition("=")
        flag = name.replace("_", "-")
        return flag + equals + value if flag in self._option_string_actions else text


def report(command: str, work: Callable[[], int]) -> int:
    """Run some work; its exit code. A foreseen error is one line on stderr."""
    try:
        code = work()
        sys.stdout.flush()
        return code
    except BenchmarkError as error:
        print(f"{command}: {one_line(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"{command}: interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        print(f"{command}: {one_line(str(error))}", file=sys.stderr)
        return 1


def one_line(text: str) -> str:
    return " ".join(text.split())


def say(text: str) -> None:
    """Print a line to stderr; stdout is only for results."""
    print(one_line(text), file=sys.stderr, flush=True)


def positive_int(text: str) -> int:
    """The type of a flag that counts."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def count_int(text: str) -> int:
    """The type of a flag that counts and may be 0."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is less than 0")
    return value


def positive_float(text: str) -> float:
    """The type of a flag that measures; inf is allowed."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not greater than 0")
    return value


def nonnegative_float(text: str) -> float:
    """The type of a flag that measures and may be 0."""
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 on")
    return value


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically; an infinite number becomes the text "inf". A device or a pipe stays what it is."""
    text = json.dumps(name_infinite(value), allow_nan=False)
    if path.exists() and not path.is_file():
        path.write_text(text)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def name_infinite(value: Any) -> Any:
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if isinstance(value, Mapping):
        return {key: name_infinite(each) for key, each in value.items()}
    return [name_infinite(each) for each in value] if isinstance(value, list | tuple) else value


def convert_to_pytorch_benchmark_format(
    args: argparse.Namespace, metrics: Mapping[str, Sequence[float]], extra_info: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Results as records of PyTorch's benchmark database, one for each metric.

    Empty unless SAVE_TO_PYTORCH_BENCHMARK_FORMAT is set in the environment, as with its other producers.

    metrics: values by name
    extra_info: more about the run; its tensor_parallel_size is added to the arguments
    """
    if not os.environ.get("SAVE_TO_PYTORCH_BENCHMARK_FORMAT"):
        return []
    arguments = dict(vars(args))
    if not arguments.get("tensor_parallel_size") and "tensor_parallel_size" in extra_info:
        arguments["tensor_parallel_size"] = extra_info["tensor_parallel_size"]
    return [
        {
            "benchmark": {"name": "atom benchmark", "extra_info": {"args": arguments}},
            "model": {"name": args.model},
            "metric": {"name": name, "benchmark_values": list(values), "extra_info": dict(extra_info)},
        }
        for name, values in metrics.items()
    ]
