"""Random numbers of (seed, position), and Gumbel noise of (seed, position, token).

    keys = hash_seeds(seeds, positions)                     # i64[R]
    uniform(keys)                                           # f64[R] in 0 to 1
    (logits / temperature + gumbel(hash_ids(keys, ids))).argmax(-1)   # a draw from softmax(logits / temperature)

The Gumbel-max trick (Gumbel 1954; Maddison et al. 2014): the largest of noisy logits is a draw from their softmax. So
is the shortest of exponential times over weights. Two models that are given the same noise mostly draw the same token
where they are nearly alike, so what is drafted with the noise of the draw that it guesses is accepted more often
(Daliri et al. 2024). `kernels.triton.noise` has the same functions.
"""

from __future__ import annotations

from torch import Tensor

GOLDEN_64, GOLDEN_32 = 0x9E3779B97F4A7C15, 0x9E3779B9  # 2^64 and 2^32 over the golden ratio
NUM_HASHES = 2**31
LOW_BITS = 7  # of a hash: what float32 does not hold besides the 24 others
LONGEST = 16.64  # of `exponential`, above


def hash_seeds(seeds: Tensor, positions: Tensor) -> Tensor:
    """seeds i64[R], positions [R] -> i64[R]: SplitMix64 (Steele et al. 2014) started at the hashed seed."""
    return _mix(_mix(seeds) + (positions.long() + 1) * _signed(GOLDEN_64, 64))


def uniform(keys: Tensor) -> Tensor:
    """keys i64[R] -> f64[R] in [0, 1)"""
    return _shifted(keys, 11, 64).double() * 2.0**-53


def hash_ids(keys: Tensor, ids: Tensor) -> Tensor:
    """keys i64[R], ids [V] or [R, V] -> i32[R, V] in [0, 2^31): lowbias32 (Wellons 2018) of the ids, keyed twice."""
    low, high = keys.int()[:, None], (keys >> 32).int()[:, None]
    x = ids.int() * _signed(GOLDEN_32, 32) + low
    x = (x ^ _shifted(x, 16, 32)).mul_(0x7FEB352D).bitwise_xor_(high)
    x = (x ^ _shifted(x, 15, 32)).mul_(_signed(0x846CA68B, 32))
    return _shifted(x.bitwise_xor_(_shifted(x, 16, 32)), 1, 32)


def exponential(hashes: Tensor) -> Tensor:
    """hashes i32[R, V] -> fp32[R, V]: exponential times, from the smallest hash to the largest.

    -log(1 - q) of the high bits, and the low bits as they are: they count if that is small, and its slope 1.
    """
    high, low = hashes >> LOW_BITS, hashes & ((1 << LOW_BITS) - 1)
    log = high.float().mul_(-(2**LOW_BITS) / NUM_HASHES).add_(1).log_()
    return low.float().add_(0.5).mul_(1 / NUM_HASHES).sub_(log)


def gumbel(hashes: Tensor) -> Tensor:
    """hashes i32[R, V] -> fp32[R, V]: Gumbel noise."""
    return exponential(hashes).log_().neg_()


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shifted(z, 30, 64)) * _signed(0xBF58476D1CE4E5B9, 64)
    z = (z ^ _shifted(z, 27, 64)) * _signed(0x94D049BB133111EB, 64)
    return z ^ _shifted(z, 31, 64)


def _shifted(x: Tensor, by: int, bits: int) -> Tensor:
    """x as an unsigned number, shifted to the right."""
    return (x >> by) & ((1 << (bits - by)) - 1)


def _signed(number: int, bits: int) -> int:
    """The integer of this many bits that is stored alike."""
    return number - (1 << bits) if number >> (bits - 1) else number
