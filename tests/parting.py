"""Name the line at which a model parts from transformers, once a test has found that it does.

with naming_line(engine.config, model, tokens):
    assert_same_logits(logits_of(engine, tokens), tiny.logits(model, tokens))
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from atom.config import Config
from atom.config.load import load
from atom.errors import AtomError
from atom.jobs.compare.job import compare
from atom.jobs.compare.text import first_finding, outputs


@contextmanager
def naming_line(config: Config, model: Any, *prompts: list[int]) -> Iterator[None]:
    """Add the first line that parts to an AssertionError; nothing is computed without one.

    config: of the engine that failed
    model: transformers', which is the reference
    """
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{error}\n{find_line(config, model, prompts)}") from error


def find_line(config: Config, model: Any, prompts: tuple[list[int], ...]) -> str:
    """What `job=compare` says first of a configuration and a model of transformers."""
    shared = [each for each in config.overrides if not each.startswith(("prompts=", "serve.max_num_batched_tokens="))]
    overrides = [*shared, "job=compare", "job.b=transformers", f"prompts={json.dumps(prompts)}"]
    try:
        with patch("atom.jobs.compare.reference.open_model", lambda *_: model):
            result = compare(load(overrides, config_dirs=config.config_dirs))
    except AtomError as error:
        return f"job=compare cannot say where: {error}"
    found = [line for line in first_finding(result) if line]
    return "\n".join(found or ["job=compare finds all values within the bound", *outputs(result)])
