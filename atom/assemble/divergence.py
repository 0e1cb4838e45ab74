"""KL divergence of next-token distributions.

kl_divergence(logits, reference.log_softmax(-1)).mean()          # nats a position
"""

from __future__ import annotations

import torch
from torch import Tensor


def kl_divergence(logits: Tensor, reference: Tensor) -> Tensor:
    """KL(reference || logits) of each position, in nats.

    logits: fp32[..., V].
    reference: log probabilities, fp32[..., V]; minus infinity for tokens that it rules out.
    """
    p = reference.exp()
    return torch.where(p == 0, 0.0, p * (reference - logits.log_softmax(-1))).sum(-1).clamp(min=0)
