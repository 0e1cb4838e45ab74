"""The command `atom-run`: run a job.

Overrides go in, answers come out on stdout, everything else goes to stderr.

    atom-run prompts="What is 2+2?" job.chat=true        # one run
    atom-run -m level=0,1 prompts=@questions.txt         # a run for each choice
    atom-run --cfg job model=qwen3 -p model.attention    # shows, runs nothing

A user's mistake is one line and exit code 2, any other foreseen error one line and 1, Ctrl-C 130.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import atom
from atom.config.help import help_text
from atom.jobs import module_of
from atom.jobs.forked_load import run_apart
from atom.jobs.report import report


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; its exit code."""
    return report(lambda: dispatch(list(sys.argv[1:] if argv is None else argv)))


def dispatch(argv: list[str]) -> int:
    """Print help or the version, or run what the flags and overrides ask for."""
    if "--version" in argv:
        print(f"atom-run {atom.__version__}")
        return 0
    if "--help" in argv or "-h" in argv:
        print(help_text())
        return 0
    if (done := run_apart(argv)) is not None:
        return done
    args = module_of("flags").parse_flags(argv)
    code: int = module_of("command").run_flags(args)
    return code


def run(overrides: Sequence[str]) -> int:
    """Load the configuration and run its job."""
    if (done := run_apart(overrides)) is not None:
        return done
    code: int = module_of("run").run(overrides)
    return code


if __name__ == "__main__":
    sys.exit(main())
