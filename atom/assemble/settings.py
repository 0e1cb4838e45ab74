"""Values that a configuration implies: the cache folder, limits of a step, drafting, overlap."""

from __future__ import annotations

from pathlib import Path

from atom.compiler import has_draft, mesh_of
from atom.config import Config
from atom.runtime.draft.speculation import acceptance_rates
from atom.runtime.types import Drafting, StepLimits

VERIFIED_TOKENS = {"cpu": 8, "cuda": 128}  # serve.max_verified_tokens where nothing is said or measured


def cache_of(config: Config) -> Path:
    assert config.cache is not None, "config.load resolves it"
    return Path(config.cache)


def limits_of(config: Config) -> StepLimits:
    serve = config.serve
    assert serve.max_model_len is not None, "config.load resolves it"
    verified = serve.max_verified_tokens or VERIFIED_TOKENS[config.device]
    return StepLimits(serve.max_num_seqs, serve.max_num_batched_tokens, serve.max_model_len, verified)


def drafting_of(config: Config) -> Drafting | None:
    """How the runner drafts; None without drafts, and where the host looks them up, which on a CPU knows all tokens."""
    serve = config.serve
    is_host = serve.method == "ngram" and config.device == "cpu" and serve.acceptance_length is None
    if serve.method is None or is_host:
        return None
    num_tokens, least, most = draft_sizes(config)
    rates = acceptance_rates(serve.acceptance_length, num_tokens)
    return Drafting(num_tokens, least, most, has_draft(config), rates)


def draft_sizes(config: Config) -> tuple[int, int, int]:
    """Tokens of a draft, and the fewest and the most last tokens that are looked up."""
    serve = config.serve
    num_tokens, least, most = serve.num_speculative_tokens, serve.prompt_lookup_min, serve.prompt_lookup_max
    assert num_tokens is not None and least is not None and most is not None, "config.load resolves them"
    return num_tokens, least, most


def has_draft_table(config: Config) -> bool:
    """Whether measured times decide how many tokens are drafted."""
    return drafting_of(config) is not None and config.serve.max_verified_tokens is None


def stages_overlap(config: Config) -> bool:
    """Whether stages compute steps of different sequences at a time; not with drafts, which follow known tokens."""
    return mesh_of(config).pipeline > 1 and config.serve.method is None
