"""Benchmark n-gram drafts, for answers that repeat their prompt and others.

One request is answered at a time. All engines are in this process and answer in turns; the best of the runs counts.
Answers are greedy. In 16 bits, a token that is as likely as another up to rounding may take its place, after which
the answer is another one (`is_same`). Overrides are those of `atom-run`, by default none, which is SmolLM2:

    scripts/bench-drafts --drafted 3 5 --runs 3
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from atom import LLMEngine, SamplingParams
from atom.config.load import load

CODE = """def count_words(text):
    counts = {}
    for word in text.lower().split():
        word = word.strip(".,;:!?")
        if word:
            counts[word] = counts.get(word, 0) + 1
    return counts
"""
TEXT = """\
The lighthouse on the northern cape was built in 1874 by a company of masons from the mainland. Its lamp was lit
with whale oil until 1903, when the keeper, Anna Lund, replaced it with paraffin. In the winter of 1911 a storm
broke the eastern windows, and for three weeks the keeper lit the lamp by hand every two hours. The lighthouse
was automated in 1968, and since 1990 the keeper's house has been a small museum that is open from May to
September."""
PROMPTS = {
    "code, repeated with a new name": f"Repeat this Python function, renamed to word_counts:\n\n{CODE}",
    "a summary of a text": f"Summarize this text in three sentences:\n\n{TEXT}",
    "a story, which repeats little": "Tell a short story about a fox that learns to swim.",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafted", type=int, nargs="+", default=[3, 5], help="tokens drafted for a step")
    parser.add_argument("--output", type=int, default=160, help="tokens of an answer, at most")
    parser.add_argument("--runs", type=int, default=3, help="of each answer; the best counts")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    counts = [0, *options.drafted]
    engines = [open_engine(options.overrides, count) for count in counts]
    rows = []
    for name, prompt in PROMPTS.items():
        texts, rates = {}, dict.fromkeys(counts, 0.0)
        before = [accepted(engine) for engine in engines]
        for _ in range(options.runs):
            for count, engine in zip(counts, engines, strict=True):
                text, rate = answer(engine, prompt, options.output)
                texts[count], rates[count] = text, max(rate, rates[count])
        row: dict[str, Any] = {"answer": name, "tokens_per_second": round(rates[0], 1)}
        for count, engine, (drafted, taken) in zip(counts, engines, before, strict=True):
            if count:
                drafted_now, taken_now = accepted(engine)
                row[f"drafted_{count}"] = {
                    "speedup": round(rates[count] / rates[0], 2),
                    "drafted": (drafted_now - drafted) // options.runs,
                    "accepted": (taken_now - taken) // options.runs,
                    "is_same": texts[count] == texts[0],
                }
        rows.append(row)
    print(json.dumps(rows, indent=2))
    return 0


def open_engine(overrides: list[str], count: int) -> LLMEngine:
    drafts = [f"serve.num_speculative_tokens={count}", "serve.method=ngram"] if count else []
    engine = LLMEngine.from_config(
        load([*overrides, *drafts, "serve.max_num_seqs=1", "serve.enable_prefix_caching=false"])
    )
    answer(engine, "Hello.", 8)  # warms up
    return engine


def answer(engine: LLMEngine, prompt: str, num_tokens: int) -> tuple[str, float]:
    """The text, and tokens a second after the first one."""
    started = time.perf_counter()
    (answer,) = engine.chat([{"role": "user", "content": prompt}], SamplingParams(temperature=0, max_tokens=num_tokens))
    seconds = time.perf_counter() - started - answer["ttft"]
    return answer["text"], (answer["num_tokens_output"] - 1) / seconds


def accepted(engine: LLMEngine) -> tuple[int, int]:
    """Tokens that were drafted, and accepted."""
    stats = engine.metrics.scheduler
    return stats.num_draft_tokens, stats.num_accepted_tokens


if __name__ == "__main__":
    sys.exit(main())
