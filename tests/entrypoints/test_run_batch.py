"""vLLM's batch command: flags in, `job=batch` of the one configuration out."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from atom.config import Config
from atom.entrypoints.run_batch import main


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configurations with which job=batch was run."""
    found: list[Config] = []
    module: Any = types.ModuleType("atom.jobs.batch")
    module.run = lambda config: found.append(config) or 0
    monkeypatch.setitem(sys.modules, "atom.jobs.batch", module)
    return found


def test_vllms_command_is_job_batch(seen: list[Config]):
    argv = "-i in.jsonl -o out.jsonl --max-inflight 7 --max-num-seqs=4 --served-model-name one two"
    assert main([*argv.split(), "--default-chat-template-kwargs", '{"enable_thinking": false}']) == 0
    (config,) = seen
    job, http = config.job, config.serve.http
    assert (config.prompts, job.kind, job.output_file, job.max_inflight) == ("@in.jsonl", "batch", "out.jsonl", 7)
    assert (config.serve.max_num_seqs, http.served_model_name) == (4, ["one", "two"])
    assert http.chat_template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("", "there is no input file; give -i FILE"),
        ("-i https://a/b.jsonl", "https://a/b.jsonl is an address; give a file, and move it with another program"),
        ("-i a --max-inflight 0", "--max-inflight=0 must be a whole number from 1"),
        ("-i a --enable-metrics", "--enable-metrics: a batch opens no port; leave it out"),
        ("-i a --api-key x", "unrecognized arguments: --api-key; see"),
    ],
)
def test_a_mistake_is_one_line(argv: str, message: str, seen: list[Config], capsys: Any, tmp_path: Path):
    assert main(argv.split()) == 2 and not seen
    assert message in capsys.readouterr().err.splitlines()[-1]
