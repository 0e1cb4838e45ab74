"""ROCm/ATOM's server command: `atom-run job=serve` with its flags.

python -m atom.entrypoints.openai_server --model Qwen/Qwen3-0.6B --host 127.0.0.1 --server-port 8000
python -m atom.entrypoints.openai_server --model /models/llama --served-model-name llama default --api-key @keys.txt

The errors, Ctrl-C and exit codes are those of `atom-run`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from atom.cli import run
from atom.entrypoints.args import EngineArgs, Parser, flag, run_command

MAX_TOKENS = 256  # default of max_tokens, as ROCm/ATOM's


@dataclass
class ServerArgs(EngineArgs):
    """The values of the flags; None for a flag that was not given."""

    host: str | None = flag("serve.http.host", "address to listen on")
    server_port: int | None = flag("serve.http.port", "of HTTP; 0: a free one")
    served_model_name: tuple[str, ...] | None = flag(
        "serve.http.served_model_name", "what requests may call the model", null="the checkpoint's name"
    )
    api_key: str | None = flag(
        "serve.http.api_keys", "keys, separated by commas, or @FILE with one a line", null="$ATOM_API_KEYS"
    )
    chat_template: str | None = flag(
        "serve.http.chat_template", "a file with a jinja template", null="the checkpoint's"
    )
    allowed_origins: tuple[str, ...] | None = flag("serve.http.cors", "whose pages may read answers; '*': all")
    tool_calls: str | None = flag("serve.http.tool_calls", "their format: none, json, tagged_json, python_tag or auto")
    max_queue: int | None = flag("serve.http.max_queue", "requests that wait; more are answered 429")
    drain_seconds: float | None = flag("serve.http.drain_seconds", "for running requests to end after SIGTERM")


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal; the exit code."""
    parser = Parser("python -m atom.entrypoints.openai_server", "Serves the OpenAI API: atom-run job=serve.")
    ServerArgs.add_cli_args(parser)
    return run_command(parser, serve, argv, ServerArgs)


def serve(args: argparse.Namespace) -> int:
    return run(["job=serve", f"sampling.max_tokens={MAX_TOKENS}", *ServerArgs.from_cli_args(args).overrides()])


if __name__ == "__main__":
    sys.exit(main())
