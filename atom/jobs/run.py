"""Load a configuration and run its job.

run(["job=explain", "checkpoint=/models/qwen3"])         # the exit code
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from atom.config.overrides import SECRET, rewrite
from atom.devices import open_early
from atom.errors import ConfigError
from atom.jobs import module_of
from atom.jobs.save_recipe import save_recipe
from atom.jobs.start import choose_job, has_objectives, is_objective, load_job
from atom.process.gc_utils import no_collection
from atom.process.messages import say
from atom.runtime.ranks.remote import serve_rank

IN_PROCESS = ("generate", "chat", "bench", "profile", "compare", "eval")  # jobs that run an engine in this process


def run(
    overrides: Sequence[str],
    dirs: Sequence[str] = (),
    *,
    is_sweep: bool = False,
    report: Callable[[Mapping[str, Any]], None] = lambda numbers: None,
) -> int:
    """Load the configuration and run its job; the exit code.

    report: is called with the numbers of a job that has any, which are those of its OBJECTIVES
    """
    overrides = choose_job(overrides, dirs)
    with no_collection():
        config = load_job(overrides, dirs, is_sweep=is_sweep)
        if config.rank > 0:
            return serve_rank(config)
        if config.device == "cuda" and config.job.kind in IN_PROCESS:
            open_early()
        job = module_of(config.job.kind)
    texts = rewrite(overrides, config_dirs=dirs)
    saves = config.job.save_recipe is not None and config.job.kind != "plan"  # whose recipe is of what it has found
    if saves and save_recipe(config, texts):
        line = f"{config.job.save_recipe} is without {SECRET}, as others may read it; {SECRET}=@FILE would stay"
        say(line)
    numbers: dict[str, Any] = {}
    code: int = job.run(config, numbers.update) if has_objectives(config.job.kind) else job.run(config)
    name = config.job.objective
    if code == 0 and name is not None and numbers.get(name) is None:
        raise ConfigError(f"job.objective={name} has no value in this run; choose another")
    if numbers:
        known = [name for each in job.OBJECTIVES for name in numbers if is_objective(name, [each])]
        numbers = {name: numbers[name] for name in known if numbers[name] is not None}
        report(numbers)
        if saves:
            save_recipe(config, texts, numbers)
    return code
