"""Benchmark conversations that take turns, with KV in host memory and without.

All conversations send their turn at once, and the next one when all have an answer: new tokens after what was said.
The pool holds a part of them, the host all. The engines run one after the other; answers are greedy and of full
length. Overrides are those of `atom-run`:

    scripts/bench-turns checkpoint=FOLDER load_dummy=true      # a folder with a config.json
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time

from atom import LLMEngine, SamplingParams
from atom.assemble import state_kinds
from atom.compiler import compile_graph
from atom.config.load import load


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--talks", type=int, default=64, help="conversations")
    parser.add_argument("--turns", type=int, default=8, help="of each")
    parser.add_argument("--fits", type=int, default=16, help="conversations that the pool holds")
    parser.add_argument("--input", type=int, default=512, help="new tokens of a turn")
    parser.add_argument("--output", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--runs", type=int, default=2, help="of each engine; the best counts")
    parser.add_argument("overrides", nargs="+")
    options = parser.parse_args()
    length = options.turns * (options.input + options.output)
    config = load([*options.overrides, f"serve.max_model_len={length}"])
    num_blocks = -(-length // config.serve.block_size)
    size = sum(kind.block_bytes for kind in state_kinds(compile_graph(config), config.serve.block_size))
    overrides = [
        *options.overrides,
        f"serve.max_model_len={length}",
        f"serve.num_kvcache_blocks={options.fits * num_blocks}",
    ]
    swap_space = size * (options.talks * num_blocks + 2)
    results = {
        name: measure([*overrides, f"serve.swap_space={each}"], options)
        for name, each in (("recomputed", 0), ("loaded", swap_space))
    }
    ratio = results["loaded"]["turns_per_second"] / results["recomputed"]["turns_per_second"]
    print(json.dumps({"swap_space": swap_space, **results, "ratio": round(ratio, 3)}, indent=2))
    return 0


def measure(overrides: list[str], options: argparse.Namespace) -> dict[str, float]:
    """Turns a second of the best run, and what the prefix cache gave in all of them."""
    config = load(overrides)
    engine = LLMEngine.from_config(config)
    try:
        rates = [run(engine, options, seed, config.model.vocab) for seed in range(options.runs + 1)][1:]  # one warms up
        stats = engine.metrics.scheduler
    finally:
        engine.close()
    return {
        "turns_per_second": round(max(rates), 3),
        "queried_tokens": stats.num_prefix_queries,
        "hit_tokens": stats.num_prefix_hit_tokens,
        "loaded_tokens": stats.num_host_hit_tokens,
        "saved_blocks": stats.num_saved_blocks,
        "preemptions": stats.num_preemptions,
    }


def run(engine: LLMEngine, options: argparse.Namespace, seed: int, vocab: int) -> float:
    """Turns a second of new conversations."""
    chance = random.Random(seed)
    params = SamplingParams(temperature=0, max_tokens=options.output, ignore_eos=True)
    talks: list[list[int]] = [[] for _ in range(options.talks)]
    start = time.perf_counter()
    for _ in range(options.turns):
        talks = [[*each, *(chance.randrange(vocab) for _ in range(options.input))] for each in talks]
        answers = engine.generate(talks, params)
        talks = [[*each, *answer["token_ids"]] for each, answer in zip(talks, answers, strict=True)]
    return options.talks * options.turns / (time.perf_counter() - start)


if __name__ == "__main__":
    sys.exit(main())
