"""Present the tensors of two checkpoints as one.

    joined = JoinedCheckpoint(open_checkpoint("/models/qwen3"), open_checkpoint("/models/draft"), DRAFT_PREFIX)
    joined.read("draft:lm_head.weight")

Only the name distinguishes what a draft model of speculative decoding reads from the model's own, so that recipes,
checks, keys and readers know of no second checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from atom.checkpoint.base import Checkpoint, FileRange, StoredTensor
from atom.checkpoint.tokenizer import Tokenizer

DRAFT_PREFIX = "draft:"  # ahead of the names of a draft model's tensors


class JoinedCheckpoint(Checkpoint):
    """A checkpoint, and besides its tensors those of another one, with a prefix, all of other names."""

    def __init__(self, checkpoint: Checkpoint, other: Checkpoint, prefix: str = "") -> None:
        self.location, self.config = checkpoint.location, checkpoint.config
        self.generation_config = checkpoint.generation_config
        self.reading = f"{checkpoint.reading} {other.reading}".strip()
        self._checkpoint = checkpoint
        self.other, self._prefix = other, prefix
        others = {prefix + name: tensor for name, tensor in other.tensors.items()}
        self.tensors: Mapping[str, StoredTensor] = {**checkpoint.tensors, **others}
        self._others = others.keys()

    def name_of(self, name: str) -> str | None:
        return self._checkpoint.name_of(name)

    def read(self, name: str) -> memoryview:
        checkpoint, stored = self._find(name)
        return checkpoint.read(stored)

    def read_part(self, name: str, index: int, count: int) -> memoryview:
        checkpoint, stored = self._find(name)
        return checkpoint.read_part(stored, index, count)

    def read_blocks(self, name: str) -> memoryview:
        checkpoint, stored = self._find(name)
        return checkpoint.read_blocks(stored)

    def locate(self, name: str) -> FileRange | None:
        checkpoint, stored = self._find(name)
        return checkpoint.locate(stored)

    def files(self) -> Collection[Path]:
        return sorted({*self._checkpoint.files(), *self.other.files()})

    def tokenizer(self, *, trust_remote_code: bool = False) -> Tokenizer | None:
        return self._checkpoint.tokenizer(trust_remote_code=trust_remote_code)

    def close(self) -> None:
        self.other.close()
        self._checkpoint.close()

    def _find(self, name: str) -> tuple[Checkpoint, str]:
        """The checkpoint that has a tensor, and its name there."""
        return (self.other, name.removeprefix(self._prefix)) if name in self._others else (self._checkpoint, name)
