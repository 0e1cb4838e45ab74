"""`job=compile`: build or find the artifact that other jobs start from.

atom-run job=compile checkpoint=/models/qwen3
atom-run job=compile job.output=json          # key, hit, reason, pieces, compiled, seconds by stage
"""

from __future__ import annotations

import json
from pathlib import Path

from atom.assemble import compile_with, open_runner, settle_formats
from atom.cache import Cache
from atom.checkpoint import RichProgress
from atom.compiler import Report, compile_model
from atom.compiler.artifact import level_of, mesh_of
from atom.config import Config
from atom.errors import ConfigError
from atom.process.messages import say
from atom.weights import load_dummy


def run(config: Config) -> int:
    """Compile and print the report."""
    if level_of(config) < 2:
        raise ConfigError(f"level={config.level} has nothing to compile; pieces begin at level=2")
    config = settle_formats(config, RichProgress())
    stages = range(mesh_of(config).pipeline)
    if config.device == "cpu":
        reports = [compile_for_cpu(config, stage) for stage in stages]
    else:
        reports = [compile_for_gpu(config)]
    if config.job.output == "json":
        names = ("key", "hit", "reason", "pieces", "compiled", "seconds")
        shown = [{name: getattr(report, name) for name in names} for report in reports]
        print(json.dumps(shown[0] if len(stages) == 1 else {"stages": shown}))
        return 0
    for stage, report in enumerate(reports):
        if len(stages) > 1:
            print(f"{'stage':<10}{stage}")
        for name, value in describe(report):
            print(f"{name:<10}{value}")
    return 0


def compile_for_cpu(config: Config, stage: int) -> Report:
    """Compile for a CPU, whose memory may be too small to run the model. stage: of the pipeline"""
    assert config.cache is not None, "config.load resolves it"
    cache = Cache(Path(config.cache))
    try:
        return compile_model(config, RichProgress(), cache, stage=stage).report
    finally:
        for line in cache.warnings:
            say(line)
        cache.close()


def compile_for_gpu(config: Config) -> Report:
    """Compile for a GPU, whose kernels are compiled for the steps that run them, here with random weights."""
    progress = RichProgress()
    compiled = compile_with(config, progress)
    open_runner(compiled, load_dummy(compiled.graph.recipes(), config.seed, config.device), config, progress)
    return compiled.report


def describe(report: Report) -> list[tuple[str, str]]:
    """The report as lines for the screen."""
    return [
        ("key", report.key or "none"),
        ("", "hit" if report.hit else f"miss: {report.reason}"),
        ("pieces", f"{report.pieces}, {report.distinct} of them distinct, {report.compiled} compiled"),
        ("seconds", ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in report.seconds.items())),
    ]
