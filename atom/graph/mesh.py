"""The mesh: how the ranks of an engine divide a model and its sequences.

    mesh = Mesh(tensor=2, experts=4, data=2)
    mesh.coordinates(3)             # {"tensor": 1, "data": 1, "experts": 3, "width": 0}
    mesh.size("width")              # 1
    mesh.peers(3, "data")           # (1, 3)

Heads, widths and the vocabulary are divided along `tensor`, sequences along `data`: the ranks of a data group have the
same ones. A mixture's experts are divided among all ranks along `experts`, and what remains of the ranks divides the
width of each expert, along `width`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mesh:
    tensor: int = 1  # ranks of a data group
    experts: int = 1  # parts of all ranks, among which experts are divided
    data: int = 1  # groups with sequences of their own

    @property
    def num_ranks(self) -> int:
        return self.tensor * self.data

    @property
    def leaders(self) -> range:
        """The first rank of each data group."""
        return range(0, self.num_ranks, self.tensor)

    def size(self, axis: str) -> int:
        """The number of ranks along an axis."""
        sizes = {"tensor": self.tensor, "data": self.data, "experts": self.experts}
        return sizes[axis] if axis in sizes else self.num_ranks // self.experts

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank is on each axis."""
        data, tensor = divmod(rank, self.tensor)
        experts, width = divmod(rank, self.size("width"))
        return {"tensor": tensor, "data": data, "experts": experts, "width": width}

    def peers(self, rank: int, axis: str) -> tuple[int, ...]:
        """The ranks along `tensor` or `data` with which a rank meets in a collective, itself too, in their order."""
        data, tensor = divmod(rank, self.tensor)
        if axis == "tensor":
            return tuple(range(data * self.tensor, (data + 1) * self.tensor))
        return tuple(range(tensor, self.num_ranks, self.tensor))


ALONE = Mesh()
