"""ROCm/ATOM's server command: `atom-run job=serve` with its flags and those of `vllm serve`.

python -m atom.entrypoints.openai_server --model Qwen/Qwen3-0.6B --host 127.0.0.1 --server-port 8000
python -m atom.entrypoints.openai_server Qwen/Qwen3-0.6B --port 8000 --max-model-len 4k
python -m atom.entrypoints.openai_server --model /models/llama --served-model-name llama default --api-key @keys.txt

Its port is closed until the model is loaded. The errors, Ctrl-C and exit codes are those of `atom-run`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from atom.cli import run
from atom.config.spelling import override
from atom.entrypoints.args import ROCM, flag, run_command
from atom.entrypoints.request_args import RequestArgs
from atom.entrypoints.vllm_args import VLLMParser, vllm_flag

# ROCm/ATOM's default of max_tokens; and as there and in vLLM, the port opens when ready: scripts wait for that
DEFAULTS = ["sampling.max_tokens=256", "serve.http.listen_when_ready=true"]


def write_keys(keys: Sequence[str]) -> list[str]:
    return [override("serve.http.api_keys", ",".join(keys))]


@dataclass
class ServerArgs(RequestArgs):
    """The values of the flags; None for a flag that was not given."""

    host: str | None = flag("serve.http.host", "address to listen on")
    port: int | None = vllm_flag(
        "serve.http.port", "the same as --server-port; next to it, ROCm/ATOM's engine port, unused here"
    )
    server_port: int | None = flag("serve.http.port", "of HTTP; 0: a free one", of=(ROCM,))
    root_path: str | None = vllm_flag(
        "serve.http.root_path", "in front of all paths, as /llm, or taken away by a proxy"
    )
    ssl_certfile: str | None = vllm_flag("serve.http.ssl_certfile", "of HTTPS: a PEM file of certificates", null="HTTP")
    ssl_keyfile: str | None = vllm_flag("serve.http.ssl_keyfile", "its key, unless that is in the same file")
    api_key: tuple[str, ...] | None = vllm_flag(
        "serve.http.api_keys",
        "keys, also separated by commas, or @FILE with one a line",
        null="$ATOM_API_KEYS, $VLLM_API_KEY",
        write=write_keys,
    )
    allowed_origins: tuple[str, ...] | None = vllm_flag("serve.http.cors", "whose pages may read answers; '*': all")
    max_num_queued_reqs: int | None = vllm_flag("serve.http.max_queue", "the same as --max-queue")
    otlp_traces_endpoint: str | None = vllm_flag(
        "serve.http.otlp_traces_endpoint", "URL of a collector that takes OTLP over HTTP, as http://HOST:4318"
    )
    shutdown_timeout: float | None = vllm_flag("serve.http.drain_seconds", "the same as --drain-seconds")
    sse_keep_alive_interval: float | None = vllm_flag(
        "advanced.comment_seconds", "seconds of silence in a stream before something is sent that clients ignore"
    )
    log_level: str | None = vllm_flag(
        "serve.http.log_level", "of lines on stderr, from which they are written: info, warning, error", read=str.lower
    )
    enable_tokenizer_info_endpoint: bool | None = vllm_flag(
        "serve.http.enable_tokenizer_info_endpoint", "serve /tokenizer_info: special tokens and the chat template"
    )
    max_queue: int | None = flag("serve.http.max_queue", "requests that wait; more are answered 429", of=())
    drain_seconds: float | None = flag("serve.http.drain_seconds", "for running requests to end after SIGTERM", of=())


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal; the exit code."""
    parser = VLLMParser("python -m atom.entrypoints.openai_server", "Serves the OpenAI API: atom-run job=serve.")
    ServerArgs.add_cli_args(parser)
    return run_command(parser, serve, argv, ServerArgs)


def serve(args: argparse.Namespace) -> int:
    return run(["job=serve", *DEFAULTS, *ServerArgs.from_cli_args(args).overrides()])


if __name__ == "__main__":
    sys.exit(main())
