"""Logit processors on the host: biases, allowed tokens, bad words, min_tokens, grammars, budgets.

shaping = find_shaping([(0, sequence, num_output)], vocab)       # None if no row needs one
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from atom.runtime.step.input import Shaping
from atom.runtime.types import Sequence


def is_shaped(sequence: Sequence) -> bool:
    """Whether the sequence may need a logit processor."""
    params = sequence.params
    has_state = sequence.matcher is not None or sequence.thinking is not None
    return params.has_token_rules or params.min_tokens > 0 or has_state


def find_shaping(rows: Iterable[tuple[int, Sequence, int]], vocab: int) -> Shaping | None:
    """Collect the logit processors of a step; None if no row needs one.

    If min_tokens and bad words forbid all that is allowed, they are ignored. Token ids are below `vocab`.

    rows: index among the rows that sample, sequence, number of its output tokens before the next one
    vocab: number of tokens
    """
    shaping = Shaping()
    for row, sequence, num_output in rows:
        p = sequence.params
        shaping.added += [(row, token, value) for token, value in (p.logit_bias or {}).items() if token < vocab]
        allowed = find_allowed(sequence, vocab)
        stops = sequence.stop_ids.union(p.stop_token_ids or ()) if num_output < p.min_tokens else ()
        banned = [token for token in {*stops, *find_bad(sequence)} if token < vocab]
        num_allowed, num_banned = vocab, len(banned)
        if allowed is not None:
            shaping.allowed.append((row, allowed.tobytes()))
            num_allowed, num_banned = allowed.sum(), allowed[banned].sum()
        if num_allowed > num_banned:
            shaping.banned += [(row, token) for token in banned]
    return shaping if shaping.added or shaping.banned or shaping.allowed else None


def find_allowed(sequence: Sequence, vocab: int) -> npt.NDArray[np.bool_] | None:
    """bool[vocab]: the tokens that the grammar, the budget or allowed_token_ids let come next; None if all may.

    A budget forces the end of reasoning, which allowed_token_ids need not have, but nothing within a grammar.
    """
    allowed = None if sequence.matcher is None else sequence.matcher.allowed(vocab)
    forced = None if sequence.thinking is None else sequence.thinking.forced
    if forced is not None and (allowed is None or allowed[forced]):
        return np.isin(np.arange(vocab), [forced])
    ids = sequence.params.allowed_token_ids
    return allowed if ids is None else np.isin(np.arange(vocab), ids)


def find_bad(sequence: Sequence) -> list[int]:
    """The tokens that would complete a bad word (as in vLLM's v1/sample/ops/bad_words.py)."""
    output, words = sequence.output, sequence.bad_words
    return [last for *start, last in words if not start or output[-len(start) :] == start]
