"""What depends on sampled tokens, by slot on the device, so that the next step needs nothing of the host.

slots = Slots(num_slots=256, vocab=151936, device="cuda")
slots.admit([3, 7], [describe(params, seed, num_tokens) for ...])    # one copy to the device
slots.set_counts(3, prompt, output)                                  # only where params have penalties
kernels.triton.sampling.sample(logits, rows, slots, kind, out)       # writes tokens, lengths, counts and reported
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from atom.config import SamplingParams

NUM_REPORTED = 8  # of a slot's tokens that the host can read: more than the steps that may be on their way
NUM_PARAMS = 8  # numbers that describe how a slot is sampled, of 8 bytes each


class Slots:
    """The state of `num_slots` sequences, and behind it that of one more slot for the rows that pad a batch, which
    stays as it is whatever is sampled there.

    tokens: i64[num_slots + 1], the newest token, whose KV is not written yet
    lengths: i32[num_slots + 1], the tokens known, the newest included
    reported: i64[num_slots + 1, NUM_REPORTED] in memory of the host, which the device writes: the token at position p
      of a sequence is at p % NUM_REPORTED, once the step that sampled it has ended
    seed, top_k (0: all): i64[num_slots + 1]; temperature, top_p, min_p, repetition, frequency, presence: f64
    counts: i32[num_slots + 1, vocab], how often a token is in the output, times 2, plus 1 if it is in the prompt
    """

    def __init__(self, num_slots: int, vocab: int, device: torch.device | str) -> None:
        self.num_slots, self.vocab, self.device = num_slots, vocab, torch.device(device)
        self.tokens = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self.lengths = torch.ones(num_slots + 1, dtype=torch.int32, device=device)
        reported = torch.zeros(num_slots + 1, NUM_REPORTED, dtype=torch.int64)
        self.reported = reported if self.device.type == "cpu" else reported.pin_memory()
        greedy = torch.from_numpy(describe(SamplingParams(temperature=0), seed=0, num_tokens=1)[1:]).to(device)
        self._params = greedy[:, None].repeat(1, num_slots + 1)  # one storage, so that one copy fills it
        self.seed, self.top_k = self._params[:2]
        self.temperature, self.top_p, self.min_p = self._params[2:5].view(torch.float64)
        self.repetition, self.frequency, self.presence = self._params[5:].view(torch.float64)
        # large, and few requests need it; but the first that does shall not run out of memory
        self.counts = torch.zeros(num_slots + 1, vocab, dtype=torch.int32, device=device)

    def admit(self, slots: list[int], rows: list[npt.NDArray[np.int64]]) -> None:
        """Give these slots to sequences, as `describe` packs them, in one copy that the host does not wait for."""
        packed = self._upload(np.vstack([np.array(slots, np.int64), np.stack(rows, axis=1)]))
        index = packed[0]
        self.lengths.index_copy_(0, index, packed[1].int())
        self._params.index_copy_(1, index, packed[2:])

    def set_counts(self, slot: int, prompt: list[int], output: list[int]) -> None:
        """What the penalties of the sequence in this slot count."""
        counts = 2 * np.bincount(np.array(output, np.int64), minlength=self.vocab).astype(np.int32)
        counts[np.array(prompt, np.int64)] += 1
        self.counts[slot].copy_(self._upload(counts))

    def _upload(self, array: npt.NDArray[np.int64] | npt.NDArray[np.int32]) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self.device.type == "cpu" else tensor.pin_memory().to(self.device, non_blocking=True)


def counts_bytes(num_slots: int, vocab: int) -> int:
    """Of `Slots.counts`, by far the largest of them."""
    return (num_slots + 1) * vocab * torch.int32.itemsize


def describe(params: SamplingParams, seed: int, num_tokens: int) -> npt.NDArray[np.int64]:
    """What `Slots.admit` takes for a sequence that has `num_tokens` tokens when the next one is sampled.

    i64[1 + NUM_PARAMS]; floats as the bits of a float64, a seed as it is modulo 2^64.
    """
    p = params
    floats = (p.temperature, p.top_p, p.min_p, p.repetition_penalty, p.frequency_penalty, p.presence_penalty)
    bits = np.array([seed & 0xFFFF_FFFF_FFFF_FFFF], np.uint64).view(np.int64)
    return np.concatenate([[num_tokens], bits, [min(p.top_k, 1 << 31)], np.array(floats, np.float64).view(np.int64)])
