"""The host's logit processors: biases, min_tokens, grammars, as plain data.

shaping = find_shaping([(0, sequence, num_output)], vocab)       # None where it says nothing
"""

from __future__ import annotations

from collections.abc import Iterable

from atom.runtime.step_input import Shaping
from atom.runtime.types import Sequence


def is_shaped(sequence: Sequence) -> bool:
    """Whether the sequence may need a logit processor."""
    return bool(sequence.params.logit_bias) or sequence.params.min_tokens > 0 or sequence.matcher is not None


def find_shaping(rows: Iterable[tuple[int, Sequence, int]], vocab: int) -> Shaping | None:
    """Collect the logit processors of a step; None where no row needs one.

    rows: index among the rows that sample, sequence, number of its output tokens before the next one. Where a grammar
    allows only what min_tokens forbids, or nothing else is left, min_tokens is ignored.
    Token ids are below `vocab`.
    """
    shaping = Shaping()
    for row, sequence, num_output in rows:
        p = sequence.params
        shaping.added += [(row, token, value) for token, value in (p.logit_bias or {}).items() if token < vocab]
        allowed = None if sequence.matcher is None else sequence.matcher.allowed(vocab)
        stops = sequence.stop_ids.union(p.stop_token_ids or ()) if num_output < p.min_tokens else ()
        banned = [token for token in stops if token < vocab]
        num_allowed, num_banned = vocab, len(banned)
        if allowed is not None:
            shaping.allowed.append((row, allowed.tobytes()))
            num_allowed, num_banned = allowed.sum(), allowed[banned].sum()
        if num_allowed > num_banned:
            shaping.banned += [(row, token) for token in banned]
    return shaping if shaping.added or shaping.banned or shaping.allowed else None
