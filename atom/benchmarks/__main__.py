"""`python -m atom.benchmarks`: says which commands there are."""

from __future__ import annotations

import sys

COMMANDS = {
    "benchmark_serving": "measures a server over HTTP, as `vllm bench serve` does",
    "matrix": "starts servers, and measures each with several lengths and concurrencies",
    "compare": "shows two results, or two folders of them, side by side; or one",
}


def main() -> int:
    lines = [f"python -m atom.benchmarks.{name:<18} {about}" for name, about in COMMANDS.items()]
    print(*lines, "atom-run job=bench measures without a server", sep="\n", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
