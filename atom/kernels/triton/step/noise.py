"""Random numbers and exponential variates by hash, on a GPU.

They are those of `atom.graph.noise`, which says what for.

key = hash_seed(tl.load(seed + slot), position)     # uint64, or of several
time = exponential(key, ids) * tl.exp((peak - x) * inverse)     # the shortest is drawn
"""

from __future__ import annotations

import triton.language as tl

from atom.graph import noise
from atom.kernels.triton.compile.jit import jit

GOLDEN_64, GOLDEN_32 = tl.constexpr(noise.GOLDEN_64), tl.constexpr(noise.GOLDEN_32)
LOW_BITS, LOW_MASK = tl.constexpr(noise.LOW_BITS), tl.constexpr(2**noise.LOW_BITS - 1)
HASH, HIGH_BITS = tl.constexpr(1 / noise.NUM_HASHES), tl.constexpr(2**noise.LOW_BITS / noise.NUM_HASHES)  # shares of 1


@jit
def hash_seed(seed, position):
    return _mix(_mix(seed.to(tl.uint64)) + (position.to(tl.int64) + 1).to(tl.uint64) * GOLDEN_64)


@jit
def uniform(key):
    return (key >> 11).to(tl.float64) * 1.1102230246251565e-16


@jit
def exponential(key, ids):
    low, high = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    x = ids.to(tl.uint32) * GOLDEN_32 + low
    x = ((x ^ (x >> 16)) * 0x7FEB352D) ^ high
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = ((x ^ (x >> 16)) >> 1).to(tl.int32)
    return ((x & LOW_MASK).to(tl.float32) + 0.5) * HASH - tl.log(1 - (x >> LOW_BITS).to(tl.float32) * HIGH_BITS)


@jit
def _mix(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)
