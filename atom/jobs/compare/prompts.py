"""The prompts of a comparison."""

from __future__ import annotations

import random
from contextlib import closing

from atom.checkpoint import RichProgress, Tokenizer
from atom.config import Config
from atom.config.checkpoint import open_for
from atom.errors import ConfigError
from atom.jobs.prompt_file import read_prompts

TEXTS = (
    "The",
    "The capital of France is Paris, and the capital of Japan is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) +",
    "Question: a train leaves at 14:35 and takes 2 hours and 50 minutes. When does it arrive? Answer: at",
)
LONG = (
    "Water boils at 100 degrees at sea level; on a mountain of 3,000 metres it boils at 90, since the air is thinner. "
)
NUM_LONG = 160  # tokens of the last prompt, or as many as are over a window
MAX_LONG = 1100
SPARE = 16  # tokens of the model's length that are left for answers


def choose_prompts(config: Config, side: Config) -> list[list[int]]:
    """The tokens of the prompts: `prompts`, or else a handful of texts, the last longer than the layers' window.

    Without a tokenizer, random tokens in place of the texts.
    """
    with closing(open_for(side, RichProgress(), weights=False)) as checkpoint:
        tokenizer = checkpoint.tokenizer(trust_remote_code=side.trust_remote_code)
    limit = min(side.limits.max_model_len - SPARE, side.limits.max_num_batched_tokens)
    window = max((each.window or 0 for each in side.model.attentions), default=0)
    num_long = min(max(NUM_LONG, min(window + 33, MAX_LONG)), limit)
    if config.prompts is not None:
        contents = [entry.content for entry in read_prompts(config.prompts)]
        return [list(each) if not isinstance(each, str) else encode(tokenizer, each) for each in contents]
    if tokenizer is None:
        draw = random.Random(side.seed)
        return [[draw.randrange(side.model.vocab) for _ in range(min(num, limit))] for num in (1, 17, 33, num_long)]
    long = encode(tokenizer, LONG * (1 + num_long // 16))[:num_long]
    return [*(encode(tokenizer, each)[:limit] for each in TEXTS), long]


def encode(tokenizer: Tokenizer | None, text: str) -> list[int]:
    """ConfigError without a tokenizer."""
    if tokenizer is None:
        raise ConfigError("prompts: the checkpoint has no tokenizer; give lists of token ids")
    return list(tokenizer.encode(text))
