"""Keep the state of running requests by slot, on the device.

All that depends on sampled tokens is here, so that the next step needs nothing from the host.

state = RequestState(num_slots=256, vocab=151936, device="cuda")
state.admit(bytearray(pack_admission(3, num_tokens, params, seed)))  # one copy to the device
state.set_counts(3, prompt, output)                                  # only if params have penalties
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from atom.runtime.step.input import ADMISSION, NUM_REPORTED, pack_admission
from atom.sampling_params import COLUMNS, SamplingParams

NO_SCALES = bytearray()


class RequestState:
    """The state of `num_slots` sequences, and of one more slot for the rows that pad a batch.

    The slot of padding never changes, whatever is sampled there.

    tokens: i64[num_slots + 1], the newest token, whose KV is not written yet
    lengths: i32[num_slots + 1], the number of tokens known, including the newest
    reported: i64[num_slots + 1, NUM_REPORTED] in host memory, which the device writes: the token at position p of a
      sequence is at p % NUM_REPORTED, once the step that sampled it has ended
    seed, adapters (-1: none), rope_deltas (to the positions of text after images): i64[num_slots + 1]
    columns: by name of a sampling parameter that kernels read, its values i64 or f64[num_slots + 1]
    steering: fp32[num_slots + 1, num_scales], the scales of steering vectors; None: there are none
    counts: i32[num_slots + 1, vocab], how often a token is in the output, times 2, plus 1 if it is in the prompt
    drafts: i64[num_slots + 1, num_drafts], tokens that may follow the newest, -1 for none; None if nothing drafts
    history: i32[num_slots + 1, max_history], the tokens known, including the newest; None if nothing looks them up
    """

    def __init__(
        self,
        num_slots: int,
        vocab: int,
        device: torch.device | str,
        num_drafts: int = 0,
        max_history: int = 0,
        num_scales: int = 0,
    ) -> None:
        self.num_slots, self.vocab, self.device = num_slots, vocab, torch.device(device)
        self.tokens = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self.lengths = torch.ones(num_slots + 1, dtype=torch.int32, device=device)
        reported = torch.zeros(num_slots + 1, NUM_REPORTED, dtype=torch.int64)
        self.reported = reported if self.device.type == "cpu" else reported.pin_memory()
        greedy = np.frombuffer(pack_admission(0, 1, SamplingParams(temperature=0), seed=0), np.int64)[2:]
        self._params = torch.tensor(greedy).to(device)[:, None].repeat(1, num_slots + 1)  # one, so that a copy fills it
        self.seed, self.adapters, self.rope_deltas, *columns = self._params
        self.columns: Mapping[str, Tensor] = {
            name: column if dtype == "i64" else column.view(torch.float64)
            for (name, dtype), column in zip(COLUMNS.items(), columns, strict=True)
        }
        self.steering = torch.zeros(num_slots + 1, num_scales, device=device) if num_scales else None
        # large and rarely needed; allocated now, so that the first request with penalties does not run out of memory
        self.counts = zeros((num_slots + 1, vocab), torch.int32, self.device)
        self.drafts = torch.full((num_slots + 1, num_drafts), -1, device=device) if num_drafts else None
        self.history = zeros((num_slots + 1, max_history), torch.int32, self.device) if max_history else None

    def admit(self, packed: bytearray, steering: bytearray = NO_SCALES) -> None:
        """Admit sequences to slots, each packed by `pack_admission`, in one copy that the host does not wait for.

        steering: f32[A, num_scales], in a second copy if there are any
        """
        columns = send(packed, torch.int64, self.device).view(-1, ADMISSION.size // 8).T
        index = columns[0]
        self.lengths.index_copy_(0, index, columns[1].int())
        self._params.index_copy_(1, index, columns[2:])
        if self.steering is not None:
            scales = send(steering, torch.float32, self.device).view(len(index), -1)
            self.steering.index_copy_(0, index, scales)

    def set_counts(self, slot: int, prompt: list[int], output: list[int]) -> None:
        """Set the token counts that the penalties of a slot's sequence use."""
        counts = 2 * np.bincount(np.array(output, np.int64), minlength=self.vocab).astype(np.int32)
        counts[np.array(prompt, np.int64)] += 1
        self.counts[slot].copy_(send(counts, torch.int32, self.device))

    def set_drafts(self, packed: bytearray) -> None:
        """Set the drafts of slots, as in `StepInput.drafted`."""
        assert self.drafts is not None, "nothing drafts"
        rows = send(packed, torch.int64, self.device).view(-1, 1 + self.drafts.shape[1])
        self.drafts.index_copy_(0, rows[:, 0], rows[:, 1:])

    def set_history(self, slot: int, tokens: bytearray) -> None:
        """Set the first tokens i32 of a slot's history."""
        assert self.history is not None, "nothing looks them up"
        sent = send(tokens, torch.int32, self.device)
        self.history[slot, : len(sent)].copy_(sent)


def send(array: bytearray | npt.NDArray[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy an array to the device; the host does not wait. On a CPU it is the array itself."""
    tensor = torch.frombuffer(array, dtype=dtype)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU the system allocates pages when they are first written. MemoryError if there is no room."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    try:
        return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
    except ValueError as error:  # more than the address space
        raise MemoryError(str(error)) from None


def counts_bytes(num_slots: int, vocab: int) -> int:
    """Bytes of `RequestState.counts`, by far the largest of its tensors."""
    return (num_slots + 1) * vocab * torch.int32.itemsize
