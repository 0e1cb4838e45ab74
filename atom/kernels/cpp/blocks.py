"""Plain weights in oneDNN's blocks of 64 rows, which plain.cpp reads.

    weight = pack_blocks(plain)                # once: [O, I] in oneDNN's layout, replaces the plain one
    y = block_linear(x, weight, bias)          # [T, I] -> [T, O]; many rows by oneDNN
    h = block_embedding(tokens, weight)        # i64[T] -> [T, H], of a weight that the head shares

oneDNN chooses a layout by CPU, dtype and shape, so each weight's layout is checked before C++ reads it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, library

from atom.graph import TORCH_DTYPES
from atom.graph.types import Type
from atom.kernels.backend import Target
from atom.kernels.cpp.build import PLAIN, load_library
from atom.kernels.torch.linear import find_features as find_dtypes
from atom.kernels.torch.linear import pack, packed_linear

ROWS, COLUMNS = 64, 16  # of a block; a column is a lane of 4 bytes: one number or two
STRIDES, BLOCKS = slice(39, 42), slice(52, 68)  # of i64 in oneDNN's description of a layout


def find_features() -> frozenset[str]:
    """The dtypes that oneDNN lays out in such blocks on this CPU, as features of a target."""
    named = {name: f"onednn_{name}" in find_dtypes() for name in ("fp32", "bf16")}
    shapes = ((ROWS, 1), (ROWS + 1, ROWS + 1), (1000, 512))
    return frozenset(
        f"blocks_{name}"
        for name, is_known in named.items()
        if is_known and all(_is_blocked(pack(torch.zeros(shape, dtype=TORCH_DTYPES[name]))) for shape in shapes)
    )


def refusal(target: Target, weight: Type) -> str | None:
    """Why a plain weight cannot be read in blocks; None: it can."""
    if f"blocks_{weight.dtype}" not in target.features:
        return f"oneDNN has no blocks of {weight.dtype} on this CPU"
    return f"{weight.shape[-2]} rows are no block" if int(weight.shape[-2]) < ROWS else None


def pack_blocks(weight: Tensor) -> Tensor:
    """A weight [O, I] in blocks; plain without the library, or if oneDNN chooses another layout."""
    if load_library(PLAIN) and _is_blocked(made := pack(weight)):
        return made
    return weight.clone()  # its memory is reused for the next expert


def _is_blocked(weight: Tensor) -> bool:
    """Whether oneDNN's description of a weight is [O / 64][I / 16 lanes][16][64][bytes of a lane]."""
    if not weight.is_mkldnn:
        return False
    per_lane = 4 // weight.element_size()
    width = -(-weight.shape[1] // (COLUMNS * per_lane)) * COLUMNS * per_lane
    described = torch.ops.mkldnn._get_mkldnn_serialized_md(weight)
    numbers = described[: len(described) // 8 * 8].view(torch.int64).tolist()
    blocks = [COLUMNS, ROWS, per_lane] if per_lane > 1 else [COLUMNS, ROWS]
    dims = [1, 0, 1][: len(blocks)]  # of these blocks
    wanted = [len(blocks), *blocks, *[0] * (12 - len(blocks)), *dims]
    strides = [2, width * ROWS, COLUMNS * ROWS * per_lane]
    return bool(numbers[STRIDES] == strides and numbers[BLOCKS][: len(wanted)] == wanted)


# The ops for plain weights: in a process that only checks compiled code, and for weights that cannot be in blocks.


def _embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    return F.embedding(tokens, weight)


LIBRARY = library.Library("atom", "FRAGMENT")  # type: ignore[no-untyped-call]
LIBRARY.define("block_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")  # type: ignore[no-untyped-call]
LIBRARY.define("block_embedding(Tensor tokens, Tensor weight) -> Tensor")  # type: ignore[no-untyped-call]
LIBRARY.impl("block_linear", packed_linear, "CPU")  # type: ignore[no-untyped-call]
LIBRARY.impl("block_embedding", _embedding, "CPU")  # type: ignore[no-untyped-call]


def _linear_shape(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


LIBRARY.impl("block_linear", _linear_shape, "Meta")  # type: ignore[no-untyped-call]


def _embedding_shape(tokens: Tensor, weight: Tensor) -> Tensor:
    return tokens.new_empty(tokens.shape[0], weight.shape[1], dtype=weight.dtype)


LIBRARY.impl("block_embedding", _embedding_shape, "Meta")  # type: ignore[no-untyped-call]


def block_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, I], weight [O, I], bias [O] -> [T, O]"""
    return torch.ops.atom.block_linear(x.contiguous(), weight, bias)  # type: ignore[no-any-return]


def block_embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    """tokens i64[T], weight [V, H] -> [T, H]"""
    return torch.ops.atom.block_embedding(tokens.contiguous(), weight)  # type: ignore[no-any-return]
