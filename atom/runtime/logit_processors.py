"""What the host says of the next token of some rows: biases, tokens that come too early, grammars.

shaping = shape(rows, vocab)       # None where it says nothing
bias, banned, allowed = shape_next(sequence, len(sequence.output), vocab)     # of one sequence
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from atom.runtime.types import Row
from atom.runtime.types import Sequence as Running


@dataclass
class Shaping:
    """By sequence id: values added to logits, then logits set, then the tokens that are allowed at all."""

    added: list[tuple[str, int, float]] = field(default_factory=list)  # token ids are below the vocabulary's size
    banned: list[tuple[str, int, float]] = field(default_factory=list)
    allowed: dict[str, npt.NDArray[np.bool_]] = field(default_factory=dict)


def shape(rows: Sequence[Row], vocab: int) -> Shaping | None:
    """For rows that sample."""
    shaping = Shaping()
    for row in rows:
        id = row.sequence.id
        bias, banned, allowed = shape_next(row.sequence, row.start + row.num_tokens - len(row.sequence.prompt), vocab)
        shaping.added += [(id, token, value) for token, value in bias.items()]
        shaping.banned += [(id, token, -np.inf) for token in banned]
        if allowed is not None:
            shaping.allowed[id] = allowed
    return shaping if shaping.added or shaping.banned or shaping.allowed else None


def shape_next(
    sequence: Running, num_output: int, vocab: int
) -> tuple[dict[int, float], list[int], npt.NDArray[np.bool_] | None]:
    """What is added to logits, the tokens that come too early, those that a grammar allows: behind num_output tokens.

    Where a grammar allows nothing but what min_tokens forbids, the grammar counts. Token ids are below `vocab`.
    """
    p = sequence.params
    bias = {token: value for token, value in (p.logit_bias or {}).items() if token < vocab}
    allowed = None if sequence.matcher is None else sequence.matcher.allowed(vocab)
    stops = sequence.stop_ids.union(p.stop_token_ids or ()) if num_output < p.min_tokens else ()
    banned = [token for token in stops if token < vocab]
    if allowed is not None and allowed.sum() == allowed[banned].sum():
        banned = []
    return bias, banned, allowed
