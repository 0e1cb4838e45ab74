"""`job=serve`: the OpenAI API over HTTP.

atom-run checkpoint=Qwen/Qwen3-0.6B
atom-run checkpoint=/models/llama serve.http.port=9000 serve.http.api_keys=@keys.txt
curl localhost:8000/v1/chat/completions -H "Content-Type: application/json" \\
    -d '{"messages": [{"role": "user", "content": "Hello!"}]}'
atom-run serve.models=[chat.yaml,embed.yaml] serve.idle_sleep_seconds=600
"""

from __future__ import annotations

from atom.config import Config
from atom.serve.engine.process import WORKER, EngineProcess
from atom.serve.server import Server, run_loop


def run(config: Config, started: EngineProcess | None = None) -> int:
    """Serve until a signal; the exit code. started: a process for the first engine, which the caller ends"""
    others = load_others(config) if config.other_models else []

    async def serve() -> int:
        return await Server(config, WORKER, started, others).run()

    return run_loop(serve, config.serve.http)


def load_others(config: Config) -> list[Config]:
    """The configurations of serve.models but the first."""
    from atom.config.load import load_models

    return load_models(config)[1:]
