"""Random numbers and Gumbel noise on a GPU: those of `atom.graph.noise`, which says what they are.

key = hash_seed(tl.load(seed + slot), position)     # uint64, or of several
noisy = x * inverse + gumbel(key, ids)
"""

from __future__ import annotations

import triton.language as tl

from atom.graph import noise
from atom.kernels.triton.jit import jit

GOLDEN_64, GOLDEN_32 = tl.constexpr(noise.GOLDEN_64), tl.constexpr(noise.GOLDEN_32)
NUM_HASHES, BELOW_ONE = tl.constexpr(noise.NUM_HASHES), tl.constexpr(noise.BELOW_ONE)


@jit
def hash_seed(seed, position):
    return _mix(_mix(seed.to(tl.uint64)) + (position.to(tl.int64) + 1).to(tl.uint64) * GOLDEN_64)


@jit
def uniform(key):
    return (key >> 11).to(tl.float64) * 1.1102230246251565e-16


@jit
def gumbel(key, ids):
    low, high = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    x = ids.to(tl.uint32) * GOLDEN_32 + low
    x = ((x ^ (x >> 16)) * 0x7FEB352D) ^ high
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = (x ^ (x >> 16)) >> 1
    q = tl.minimum((x.to(tl.int32).to(tl.float32) + 0.5) * (1.0 / NUM_HASHES), BELOW_ONE)
    # -log(1 - q), by its series where 1 - q has lost what counts
    near = q * (1 + q * (1 / 2 + q * (1 / 3 + q * (1 / 4 + q * (1 / 5 + q * (1 / 6))))))
    return -tl.log(tl.where(q < 1 / 16, near, -tl.log(1 - q)))


@jit
def _mix(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)
