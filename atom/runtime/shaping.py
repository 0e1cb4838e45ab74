"""What the host says of the next token of some rows: biases, tokens that come too early, grammars.

shaping = shape(rows, vocab)       # None where it says nothing
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from atom.runtime.types import Row


@dataclass
class Shaping:
    """By sequence id: values added to logits, then logits set, then the tokens that are allowed at all."""

    added: list[tuple[str, int, float]] = field(default_factory=list)  # token ids are below the vocabulary's size
    banned: list[tuple[str, int, float]] = field(default_factory=list)
    allowed: dict[str, npt.NDArray[np.bool_]] = field(default_factory=dict)


def shape(rows: Sequence[Row], vocab: int) -> Shaping | None:
    """For rows that sample. Where a grammar allows nothing but what min_tokens forbids, the grammar counts."""
    shaping = Shaping()
    for row in rows:
        sequence, p = row.sequence, row.sequence.params
        allowed = None if sequence.matcher is None else sequence.matcher.allowed(vocab)
        shaping.added += [(sequence.id, token, bias) for token, bias in (p.logit_bias or {}).items() if token < vocab]
        if row.start + row.num_tokens - len(sequence.prompt) < p.min_tokens:
            stops = [token for token in sequence.stop_ids.union(p.stop_token_ids or ()) if token < vocab]
            if allowed is None or allowed.sum() > allowed[stops].sum():
                shaping.banned += [(sequence.id, token, -np.inf) for token in stops]
        if allowed is not None:
            shaping.allowed[sequence.id] = allowed
    return shaping if shaping.added or shaping.banned or shaping.allowed else None
