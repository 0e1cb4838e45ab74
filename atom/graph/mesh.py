"""The mesh: how the ranks of an engine divide a model.

    mesh = Mesh(tensor=4, experts=2)
    mesh.coordinates(3)             # {"tensor": 3, "experts": 1, "width": 1}
    mesh.size("width")              # 2

Heads, widths and the vocabulary are divided along `tensor`. A mixture's experts are divided along `experts`, and what
remains of the ranks divides the width of each, along `width`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mesh:
    tensor: int = 1  # ranks
    experts: int = 1  # parts of them, among which experts are divided

    @property
    def num_ranks(self) -> int:
        return self.tensor

    def size(self, axis: str) -> int:
        """The number of ranks along an axis."""
        return {"tensor": self.tensor, "experts": self.experts, "width": self.tensor // self.experts}[axis]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank is on each axis."""
        width = self.size("width")
        return {"tensor": rank, "experts": rank // width, "width": rank % width}


ALONE = Mesh()
