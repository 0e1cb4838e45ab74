"""vLLM's batch command: `atom-run job=batch` with its flags.

python -m atom.entrypoints.run_batch -i batch.jsonl -o results.jsonl --model Qwen/Qwen3-0.6B
python -m atom.entrypoints.run_batch -i batch.jsonl -o results.jsonl --max-inflight 256 Qwen/Qwen3-0.6B

Lines that have an answer in the output file are left out, so the same command goes on after an interruption. The exit
code is 2 if lines failed; errors and Ctrl-C are those of `atom-run`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from atom.cli import run
from atom.config.spelling import override
from atom.entrypoints.args import run_command
from atom.entrypoints.request_args import RequestArgs
from atom.entrypoints.vllm_args import VLLMParser, vllm_flag
from atom.errors import ConfigError


def write_prompts(path: str) -> list[str]:
    return [override("prompts", f"@{path}")]


@dataclass
class BatchArgs(RequestArgs):
    """The values of the flags; None for a flag that was not given."""

    input_file: str | None = vllm_flag(
        "prompts", "a file of OpenAI's batch lines", short="-i", null="it must be given", write=write_prompts
    )
    output_file: str | None = vllm_flag(
        "job.output_file", "of result lines; it goes on with one", short="-o", null="stdout"
    )
    max_inflight: int | None = vllm_flag(
        "job.max_inflight", "lines under way at a time", null="twice --max-num-seqs an engine, at least 1024"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Answer the lines of a file; the exit code."""
    parser = VLLMParser("python -m atom.entrypoints.run_batch", "Answers OpenAI's batch files: atom-run job=batch.")
    BatchArgs.add_cli_args(parser)
    return run_command(parser, run_batch, argv, BatchArgs)


def run_batch(args: argparse.Namespace) -> int:
    if args.input_file is None:
        raise ConfigError("there is no input file; give -i FILE")
    for path in (args.input_file, args.output_file):
        if path is not None and path.startswith(("http://", "https://")):
            raise ConfigError(f"{path} is an address; give a file, and move it with another program")
    return run(["job=batch", *BatchArgs.from_cli_args(args).overrides()])


if __name__ == "__main__":
    sys.exit(main())
