"""What doubles of drafting models share: the drafts that follow known tokens.

double.drafts(tokens, 3)        # the three tokens that an engine drafts after these
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import tiny
import torch
import torch.nn.functional as F
from torch import Tensor


def cold(num_rows: int) -> dict[str, Tensor]:
    """What `draft_head` takes besides rows of hidden states, where each is greedy."""
    return {
        "keys": torch.zeros(num_rows, dtype=torch.int64),
        **dict.fromkeys(("temperatures", "depths"), torch.zeros(num_rows)),
    }


class Double(Protocol):
    def drafts(self, known: Tensor, num_drafts: int) -> list[int]:
        """known i64[T], the newest token included"""


class LayerDouble:
    """A layer that reads a hidden state of each position, and the token after it."""

    def hidden(self, tokens: Tensor) -> Tensor:
        """tokens i64[T] -> fp32[T, H], of the model that it drafts for"""
        raise NotImplementedError

    def draft(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """tokens i64[T] at positions 1 to T, hidden fp32[T, H] at positions 0 to T - 1 -> fp32[T, H]"""
        raise NotImplementedError

    def tokens(self, hidden: Tensor) -> Tensor:
        """hidden fp32[T, H] -> i64[T], the tokens that come next"""
        raise NotImplementedError

    def drafts(self, known: Tensor, num_drafts: int) -> list[int]:
        hidden, given, found = self.hidden(known)[:-1], known[1:], list[int]()
        for _ in range(num_drafts):
            drafted = self.draft(given, hidden)
            token = self.tokens(drafted[-1:])
            given, hidden = torch.cat([given, token]), torch.cat([hidden, drafted[-1:]])
            found.append(int(token))
        return found


class ModelDouble:
    """Another model, in transformers. vocab: of the model that it drafts for; tokens that it has not are zeros to it"""

    def __init__(self, folder: Path, vocab: int) -> None:
        self.model, self.vocab = tiny.reference(folder), vocab
        for module in (self.model.get_input_embeddings(), self.model.get_output_embeddings()):
            missing = max(vocab - len(module.weight), 0)
            module.weight = torch.nn.Parameter(F.pad(module.weight.detach(), (0, 0, 0, missing)))

    @torch.inference_mode()
    def drafts(self, known: Tensor, num_drafts: int) -> list[int]:
        tokens = known
        for _ in range(num_drafts):
            logits = self.model(tokens[None]).logits[0, -1, : self.vocab]
            tokens = torch.cat([tokens, logits.argmax()[None]])
        return tokens[len(known) :].tolist()  # type: ignore[no-any-return]
