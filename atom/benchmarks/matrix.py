"""Measure every tensor-parallel size, input length, output length and concurrency.

Each case has a result file.

    python -m atom.benchmarks.matrix --model org/model --tp 1 8 --input-len 1024 8192 --output-len 1024 \\
        --concurrency 4 8 16 32 --result-dir results --server-args="--kv_cache_dtype fp8"
    python -m atom.benchmarks.matrix --model org/model --dataset-name multi-turn --input-len 1500 --output-len 100 \\
        --concurrency 1 8 32 --plot

A server is started for each tensor-parallel size with cases left to measure, and stopped after it. Existing results are
kept, so that an interrupted matrix continues where it was; a result with failed requests is measured again. Cases of a
server have other prompts each, else it would have them in its prefix cache.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn
from zlib import crc32

from atom.benchmarks.benchmark_utils import (
    BenchmarkError,
    FlagParser,
    UsageError,
    positive_float,
    positive_int,
    report,
    say,
)
from atom.benchmarks.compare import read_results, show
from atom.benchmarks.server_process import DEFAULT_SERVER, find_free_port, is_alive, make_command, running_server

LENGTHS = {  # flags of each data set's lengths
    "random": ("--random-input-len", "--random-output-len"),
    "multi-turn": ("--multi-turn-new-len", "--multi-turn-output-len"),
}


class Case(NamedTuple):
    tp: int
    input_len: int  # tokens
    output_len: int
    concurrency: int

    def file_name(self, prefix: str) -> str:
        return f"{prefix}_tp{self.tp}_isl{self.input_len}_osl{self.output_len}_conc{self.concurrency}.json"

    @property
    def seed(self) -> int:
        return crc32(f"{self.input_len} {self.output_len} {self.concurrency}".encode())


def make_parser() -> FlagParser:
    description = "Starts servers and measures them at several lengths and concurrencies."
    parser = FlagParser("matrix", description, usage="--model MODEL [flags]")
    add = parser.add_argument
    add("--model", required=True, help="folder or hub id, for the server and for the requests")
    add("--tp", type=positive_int, nargs="+", default=[1], help="tensor-parallel sizes: a server each")
    add("--dataset-name", choices=[*LENGTHS], default="random", help="independent requests, or conversations")
    add("--input-len", type=positive_int, nargs="+", default=[1024], help="tokens of a prompt, or that a turn adds")
    add("--output-len", type=positive_int, nargs="+", default=[1024], help="tokens of an answer")
    add(
        "--concurrency",
        type=positive_int,
        nargs="+",
        default=[4, 8, 16, 32],
        help="requests or conversations under way",
    )
    add(
        "--num-prompts-per-concurrency",
        type=positive_int,
        default=10,
        help="requests or conversations = this × concurrency",
    )
    add("--range-ratio", type=float, default=0.8, help="lengths are uniform from this share of them up to them")
    add("--result-dir", default="results", help="folder of the results and the servers' logs")
    add("--prefix", help="of the results' names; by default the model's name, and multi-turn if that is measured")
    add(
        "--plot",
        action="store_true",
        help="draw PREFIX.png and PREFIX.html: tokens/s of a user against tokens/s of a GPU",
    )
    add("--server-command", default=DEFAULT_SERVER, help="starts a server; {model}, {port} and {tp} are filled in")
    add("--server-args", default="", help='more flags of the server, as one text: --server-args="--level 1"')
    add("--bench-args", default="", help='more flags of benchmark_serving, as one text: --bench-args="--seed 1"')
    add("--health-timeout", type=positive_float, default=1200.0, help="seconds until a server has to be ready")
    add("--run-timeout", type=positive_float, default=7200.0, help="seconds that a measurement may take")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    return report("matrix", lambda: run(read_arguments(argv)))


def read_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    args = make_parser().read(join_texts(sys.argv[1:] if argv is None else argv))
    kind = "" if args.dataset_name == "random" else f"-{args.dataset_name}"
    args.prefix = args.prefix or args.model.rstrip("/").rpartition("/")[2] + kind
    if not re.fullmatch(r"[\w.+-]+", args.prefix):
        raise UsageError(f"--prefix {args.prefix}: it is part of a file's name; give letters, digits, . + - and _")
    if not 0 < args.range_ratio <= 1:
        raise UsageError(f"--range-ratio {args.range_ratio}: it is greater than 0 and at most 1")
    try:
        args.server_args, args.bench_args = shlex.split(args.server_args), shlex.split(args.bench_args)
    except ValueError as error:
        raise UsageError(f"--server-args or --bench-args: {error}") from None
    return args


def join_texts(argv: Sequence[str]) -> list[str]:
    """Allow the text after --server-args to begin with a dash, which would be taken for a flag."""
    joined: list[str] = []
    for word in argv:
        if joined and joined[-1].replace("_", "-") in ("--server-args", "--bench-args"):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def run(args: argparse.Namespace) -> int:
    """Measure the cases that are left, and show all results. Exit code 1 if a case could not be fully measured."""
    choices = itertools.product(args.tp, args.input_len, args.output_len, args.concurrency)
    cases = [Case(*choice) for choice in dict.fromkeys(choices)]
    with ending_on_sigterm():
        troubles = [trouble for tp in dict.fromkeys(args.tp) for trouble in measure_size(args, tp, cases)]
    for case in cases:
        if result := read_result(path_of(args, case)):
            print(summarize(case.file_name(args.prefix).removesuffix(".json"), result))
    for trouble in troubles:
        say(trouble)
    if args.plot and any(read_result(path_of(args, case)) for case in cases):
        path = str(Path(args.result_dir, args.prefix))
        show([read_results(path)], Path(path))
    return 1 if troubles else 0


@contextlib.contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """Within this context, SIGTERM unwinds the stack, so that the server is stopped."""

    def end(signum: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + signum)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def measure_size(args: argparse.Namespace, tp: int, cases: Sequence[Case]) -> list[str]:
    """Measure the cases of one tensor-parallel size; a line for each that failed."""
    own = [case for case in cases if case.tp == tp]
    left = [case for case in own if not is_whole(read_result(path_of(args, case)))]
    if len(left) < len(own):
        say(f"tp{tp}: {len(own) - len(left)} of {len(own)} results are in {args.result_dir} already")
    if not left:
        return []
    port = find_free_port()
    url = f"http://127.0.0.1:{port}"
    command = make_command(args.server_command, model=args.model, port=port, tp=tp, extra=args.server_args)
    log = Path(args.result_dir) / f"{args.prefix}_tp{tp}_server.log"
    troubles = []
    try:
        with running_server(command, url, log=log, health_timeout=args.health_timeout) as server:
            for at, case in enumerate(left):
                if trouble := measure_case(args, case, url):
                    troubles.append(f"{case.file_name(args.prefix)}: {trouble}")
                if not is_alive(server):
                    ended, num_left = f"the server ended with {server.returncode}", len(left) - at - 1
                    raise BenchmarkError(f"{ended}, {num_left} measurements were left; see {log}")
    except BenchmarkError as error:
        if isinstance(error, UsageError):
            raise
        troubles.append(f"tp{tp}: {error}")
    return troubles


def measure_case(args: argparse.Namespace, case: Case, url: str) -> str:
    """Run one measurement in its own process; the error, or an empty text."""
    num_prompts = args.num_prompts_per_concurrency * case.concurrency
    flags = {
        "--model": args.model,
        "--backend": "vllm",
        "--base-url": url,
        "--dataset-name": args.dataset_name,
        **dict(zip(LENGTHS[args.dataset_name], (case.input_len, case.output_len), strict=True)),
        "--random-range-ratio": args.range_ratio,
        "--num-prompts": num_prompts,
        "--max-concurrency": case.concurrency,
        "--request-rate": "inf",
        "--seed": case.seed,
        "--percentile-metrics": "ttft,tpot,itl,e2el",
        "--result-dir": args.result_dir,
        "--result-filename": case.file_name(args.prefix),
    }
    words = [str(word) for pair in flags.items() for word in pair]
    tp = ["--metadata", f"tensor_parallel_size={case.tp}"]
    command = [
        "-m",
        "atom.benchmarks.benchmark_serving",
        *words,
        "--ignore-eos",
        "--save-result",
        *tp,
        *args.bench_args,
    ]
    say(f"python {shlex.join(command)}")
    try:
        code = subprocess.run([sys.executable, *command], timeout=args.run_timeout).returncode
    except subprocess.TimeoutExpired:
        return f"it took longer than {args.run_timeout:g} s (--run-timeout)"
    if code:
        return f"benchmark_serving ended with {code}"
    failed = read_result(path_of(args, case)).get("failed")
    return f"{failed} of its requests failed; the next run measures it again" if failed else ""


def path_of(args: argparse.Namespace, case: Case) -> Path:
    return Path(args.result_dir) / case.file_name(args.prefix)


def read_result(path: Path) -> dict[str, Any]:
    """Read a result file; empty if it is missing or incomplete."""
    try:
        result = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return result if isinstance(result, dict) and "output_throughput" in result else {}


def is_whole(result: Mapping[str, Any]) -> bool:
    """Whether it is a result of all its requests."""
    return bool(result) and not result.get("failed")


def summarize(name: str, result: dict[str, Any]) -> str:
    numbers = [
        ("output", result["output_throughput"], " tok/s"),
        ("total", result.get("total_token_throughput"), " tok/s"),
        ("ttft", result.get("mean_ttft_ms"), " ms"),
        ("tpot", result.get("median_tpot_ms"), " ms"),
    ]
    shown = [f"{label}={value:.1f}{unit}" for label, value, unit in numbers if value is not None]
    failed = [f"failed={result['failed']}"] if result.get("failed") else []
    return f"{name}: {' '.join(shown + failed)}"


if __name__ == "__main__":
    sys.exit(main())
