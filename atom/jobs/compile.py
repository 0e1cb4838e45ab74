"""`job=compile`: builds the artifact that other jobs start from, or finds it.

atom-run job=compile checkpoint=/models/qwen3
atom-run job=compile job.output=json          # key, hit, reason, pieces, compiled, seconds by stage
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from atom.artifact import Cache
from atom.checkpoint import RichProgress
from atom.compiler import Report, compile_model
from atom.config import Config
from atom.errors import ConfigError
from atom.launch import level_of
from atom.llm import LLMEngine


def run(config: Config) -> int:
    """Print what was found or made."""
    if level_of(config) < 2:
        raise ConfigError(f"level={config.level} has nothing to compile; pieces begin at level=2")
    assert config.cache is not None, "config.load resolves it"
    cache = Cache(Path(config.cache))
    try:
        report = compile_model(config, RichProgress(), cache).report
        if config.device != "cpu":  # kernels are compiled for the steps that run them
            LLMEngine.from_config(replace(config, load_dummy=True), RichProgress()).close()
    finally:
        for line in cache.warnings:
            print(f"atom-run: {line}", file=sys.stderr)
        cache.close()
    if config.job.output == "json":
        told = report._asdict()
        print(json.dumps({name: told[name] for name in ("key", "hit", "reason", "pieces", "compiled", "seconds")}))
        return 0
    for name, value in describe(report):
        print(f"{name:<10}{value}")
    return 0


def describe(report: Report) -> list[tuple[str, str]]:
    """The report as lines for the screen."""
    return [
        ("key", report.key or "none"),
        ("", "hit" if report.hit else f"miss: {report.reason}"),
        ("pieces", f"{report.pieces}, {report.distinct} of them distinct, {report.compiled} compiled"),
        ("seconds", ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in report.seconds.items())),
    ]
