"""Compute rotary frequencies from their recipe.

rope_freqs(RopeFreqs(64, 10000.0))     # fp32[32], radians a token
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from atom.graph import RopeFreqs


def rope_freqs(recipe: RopeFreqs) -> Tensor:
    """fp32[dim / 2] in radians a token. default: Su et al. 2021; linear: Chen et al. 2023; llama3: by wavelength, as in
    Llama 3.1; yarn: Peng et al. 2023; factors: divisors that the checkpoint states; proportional: the first share of
    them, then zeros, as in Gemma 4."""
    exponents = torch.arange(0, recipe.dim, 2, dtype=torch.float32) / recipe.dim
    freqs = 1.0 / recipe.theta**exponents
    match recipe.kind:
        case "linear":
            return freqs / recipe.factor
        case "llama3":
            return _llama3(recipe, freqs)
        case "yarn":
            share = _yarn_share(recipe)
            return freqs / recipe.factor * (1 - share) + freqs * share
        case "proportional":
            num_turned = int(recipe.partial * recipe.dim // 2)
            return freqs.where(torch.arange(len(freqs)) < num_turned, 0.0) / recipe.factor
        case "factors":
            return freqs / torch.tensor(recipe.factors, dtype=torch.float32)
    return freqs


def _llama3(recipe: RopeFreqs, freqs: Tensor) -> Tensor:
    """Short wavelengths stay, long ones stretch by the factor, those between are blended."""
    assert recipe.original_max_position is not None, "the recipe checks it"
    rotations = recipe.original_max_position * freqs / (2 * math.pi)  # in the original context
    low, high = recipe.low_freq_factor, recipe.high_freq_factor
    blend = ((rotations - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * freqs / recipe.factor + blend * freqs


def _yarn_share(recipe: RopeFreqs) -> Tensor:
    """The share of each frequency that is kept: 1 with more than beta_fast rotations, 0 with less than beta_slow."""
    assert recipe.original_max_position is not None, "the recipe checks it"

    def dim_of(rotations: float) -> float:
        ratio = recipe.original_max_position / (rotations * 2 * math.pi)  # type: ignore[operator]
        return recipe.dim * math.log(ratio) / (2 * math.log(recipe.theta))

    low, high = dim_of(recipe.beta_fast), dim_of(recipe.beta_slow)
    if recipe.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, recipe.dim - 1)
    ramp = (torch.arange(recipe.dim // 2, dtype=torch.float32) - low) / (max(high - low, 0.001))
    return 1 - ramp.clamp(0, 1)
