"""`job=batch`: answer a file of OpenAI's batch lines.

atom-run prompts=@batch.jsonl job.output_file=results.jsonl checkpoint=/models/qwen3
python -m atom.entrypoints.run_batch -i batch.jsonl -o results.jsonl --model /models/qwen3
"""

from __future__ import annotations

import sys
from pathlib import Path

from atom.config import Config
from atom.errors import ConfigError
from atom.process.messages import say
from atom.serve.batch.results import Results, keep_answered
from atom.serve.batch.run import run_batch


def run(config: Config) -> int:
    """Answer each line; the exit code, 2 if one failed. See `run_batch`.

    With job.output_file, lines that have an answer there are left out; those that failed are answered anew.
    """
    prompts = config.prompts
    if not isinstance(prompts, str) or not prompts.startswith("@"):
        raise ConfigError("job=batch answers a file of OpenAI's batch lines: give prompts=@FILE")
    file, output = Path(prompts[1:]), config.job.output_file
    if not file.is_file():
        raise ConfigError(f"{prompts[1:]} is no file; write the lines to one first")
    if output is None:
        return answer(config, file, Results(sys.stdout.buffer), set())
    path = Path(output)
    try:
        answered = keep_answered(path)
        opened = path.open("ab")
    except OSError as error:
        raise ConfigError(f"job.output_file={output}: {error.strerror}") from None
    if answered:
        say(f"{path} has the answers to {len(answered)} lines")
    with opened:
        return answer(config, file, Results(opened), answered)


def answer(config: Config, file: Path, results: Results, answered: set[str]) -> int:
    code = run_batch(config, file, results, answered)
    say(f"{results.num_answered} lines were answered, {results.num_failed} failed")
    return code
