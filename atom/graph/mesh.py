"""The mesh: how the ranks of an engine divide a model and its sequences.

    mesh = Mesh(tensor=2, experts=4, data=2)
    mesh.coordinates(3)             # {"pipeline": 0, "tensor": 1, "data": 1, "experts": 3, "width": 0}
    mesh.size("width")              # 1
    mesh.peers(3, "data")           # (1, 3)

Heads, widths and the vocabulary are divided along `tensor`, sequences along `data`: the ranks of a data group have the
same ones. A mixture's experts are divided among all ranks along `experts`, and what remains of the ranks divides the
width of each expert, along `width`.

Layers are divided along `pipeline`: each stage has some of them, and ranks that divide these as above. The ranks of the
first stage come first.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mesh:
    tensor: int = 1  # ranks of a data group
    experts: int = 1  # parts of a stage's ranks, among which experts are divided
    data: int = 1  # groups with sequences of their own
    pipeline: int = 1  # stages of layers

    @property
    def num_ranks(self) -> int:
        return self.ranks_per_stage * self.pipeline

    @property
    def ranks_per_stage(self) -> int:
        return self.tensor * self.data

    @property
    def leaders(self) -> range:
        """The first rank of each data group, of the first stage."""
        return range(0, self.ranks_per_stage, self.tensor)

    def reporters(self, *, has_taps: bool) -> range:
        """The ranks that report what they sample; with taps also the first of each data group of further stages."""
        return range(0, self.num_ranks, self.tensor) if has_taps else self.leaders

    def stage(self, rank: int) -> int:
        """The stage of a rank."""
        return rank // self.ranks_per_stage

    def size(self, axis: str) -> int:
        """The number of ranks along an axis."""
        sizes = {"tensor": self.tensor, "data": self.data, "experts": self.experts, "pipeline": self.pipeline}
        return sizes[axis] if axis in sizes else self.ranks_per_stage // self.experts

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank is on each axis."""
        stage, place = divmod(rank, self.ranks_per_stage)
        data, tensor = divmod(place, self.tensor)
        experts, width = divmod(place, self.size("width"))
        return {"pipeline": stage, "tensor": tensor, "data": data, "experts": experts, "width": width}

    def peers(self, rank: int, axis: str) -> tuple[int, ...]:
        """The ranks along `tensor`, `data` or `pipeline` that a rank meets, itself too, in their order."""
        steps = {"tensor": 1, "data": self.tensor, "pipeline": self.ranks_per_stage}
        first = rank - self.coordinates(rank)[axis] * steps[axis]
        return tuple(first + place * steps[axis] for place in range(self.size(axis)))


SINGLE = Mesh()
