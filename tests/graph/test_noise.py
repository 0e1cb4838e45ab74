"""Random numbers of (seed, position) and the noise of tokens, by their definitions in plain integers and by counting."""

import math

import torch
from torch import Tensor

from atom.graph.noise import LONGEST, exponential, gumbel, hash_ids, hash_seeds, uniform

WORD, LONG = 2**32 - 1, 2**64 - 1


def keyed_lowbias32(key: int, token: int) -> int:
    """Chris Wellons' lowbias32 (nullprogram.com/blog/2018/07/31) of the token's golden ratio sequence from half of the key
    on, with the other half between its two multiplications."""
    x = (token * 0x9E3779B9 + key) & WORD
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & WORD
    x ^= (key & LONG) >> 32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & WORD
    return x ^ (x >> 16)


def chi_square(shares: Tensor, num_bins: int = 200) -> float:
    """Of how many numbers of [0, 1) are in each of some bins, less what is expected, in standard deviations."""
    counts, expected = torch.histc(shares, num_bins, 0, 1), shares.numel() / num_bins
    freedom = num_bins - 1
    return float(((counts - expected).square() / expected).sum() - freedom) / math.sqrt(2 * freedom)


def shares_of(hashes: Tensor) -> Tensor:
    return hashes.double() / 2**31


def test_random_numbers_are_splitmix64_and_uniform():
    # the published stream of seed 0, whose hash is 0
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    keys = hash_seeds(torch.zeros(3, dtype=torch.int64), torch.arange(3))
    assert uniform(keys).tolist() == [(word >> 11) / 2**53 for word in expected]
    seeds = torch.arange(300)
    grid = uniform(hash_seeds(seeds.repeat_interleave(300), seeds.repeat(300))).view(300, 300)
    assert grid.min() >= 0 and grid.max() < 1
    for numbers in (grid, (grid[1:] - grid[:-1]) % 1, (grid[:, 1:] - grid[:, :-1]) % 1):  # and independent neighbors
        assert chi_square(numbers) < 4


def test_a_token_is_hashed_with_both_halves_of_the_key():
    keys = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF])
    ids = torch.tensor([0, 1, 2, 49151, 151935, 262143])
    expected = [[keyed_lowbias32(key, token) >> 1 for token in ids.tolist()] for key in keys.tolist()]
    assert hash_ids(keys, ids).tolist() == expected
    assert hash_ids(keys, ids.expand(6, -1)).tolist() == expected


def test_hashes_of_neighbors_are_uniform_and_independent():
    """Of tokens, of positions, of seeds."""
    zeros, many = torch.zeros(100, dtype=torch.int64), torch.arange(100)
    for keys in (hash_seeds(many, zeros), hash_seeds(zeros + 7, many)):
        shares = shares_of(hash_ids(keys, torch.arange(20_000)))
        assert chi_square(shares) < 4
        assert chi_square((shares[1:] - shares[:-1]) % 1) < 4
        for lag in (1, 2, 3, 64, 4096):
            assert chi_square((shares[:, lag:] - shares[:, :-lag]) % 1) < 4, lag


def test_noise_is_gumbels_down_to_the_smallest_hash():
    hashes = torch.tensor([[0, 1, 1000, 2**24 + 1, 2**30, 2**31 - 1]], dtype=torch.int32)
    times = [-math.log1p(-(each + 0.5) / 2**31) for each in hashes[0].tolist()]
    times[-1] = 24 * math.log(2)  # the largest of 128 hashes that float32 cannot distinguish
    torch.testing.assert_close(exponential(hashes)[0], torch.tensor(times), rtol=1e-6, atol=0)
    expected = torch.tensor([-math.log(time) for time in times])
    torch.testing.assert_close(gumbel(hashes)[0], expected, rtol=1e-6, atol=1e-6)
    assert expected[0] > 22 and exponential(hashes).max() < LONGEST


def test_the_largest_noisy_logit_is_drawn_by_softmax():
    logits = torch.randn(40, generator=torch.Generator().manual_seed(3)).mul(2)
    keys = hash_seeds(torch.arange(100_000), torch.arange(100_000) % 777)
    drawn = (logits + gumbel(hash_ids(keys, torch.arange(1000, 1040)))).argmax(-1)
    expected = logits.double().softmax(0) * len(keys)
    counts = torch.bincount(drawn, minlength=40).double()
    assert ((counts - expected).square() / expected).sum() < 76, "the 99.98th percentile by 39 degrees of freedom"
