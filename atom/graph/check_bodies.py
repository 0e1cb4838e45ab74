"""Compare the reference bodies of users' ops with their shape rules.

check_bodies(graph)     # PassError: clipped_silu returned bf16[T, 3], its rule says bf16[T, 1536]

A body runs on meta tensors, which have a shape and a dtype but no values. One that needs values cannot be checked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import count
from typing import Any

import torch
from torch.fx import Node

from atom.errors import PassError
from atom.graph.graph import Graph, type_of
from atom.graph.interpret import TORCH_DTYPES
from atom.graph.ops import Op
from atom.graph.types import Dim, Type

LETTER = re.compile(r"[A-Za-z]\w*")  # of a dim that is known only in a step
SMALLEST = 1009  # size of a letter: none that a slice in a body would state
NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def check_bodies(graph: Graph) -> None:
    """Raise PassError if the body of an op that is not atom's returns other types than its rule."""
    seen = set()
    for program in graph.programs.values():
        for call in program.nodes:
            if isinstance(call.target, Op) and not is_own(call.target):
                types = tuple(map(type_of, call.args))
                key = (call.target, str(types), str(call.kwargs))
                if key not in seen:
                    seen.add(key)
                    check_body(call, types)


def is_own(op: Op) -> bool:
    """Whether an op is atom's own."""
    return op.body.__module__.partition(".")[0] == __name__.partition(".")[0]


def check_body(call: Node, types: tuple[Any, ...]) -> None:
    """Run a call's body on meta tensors of these types, but for collectives, batches, caches and packed weights."""
    op: Any = call.target
    if op.is_collective or not all(isinstance(each, Type) and each.fmt is None for each in types):
        return
    sizes = sizes_of(types)
    tensors = [
        torch.empty([size_of(dim, sizes) for dim in each.shape], dtype=TORCH_DTYPES[each.dtype], device="meta")
        for each in types
    ]
    try:
        result = op(*tensors, **call.kwargs)
    except Exception:  # it is the user's code, and may need values
        return
    results, expected = (each if isinstance(each, tuple) else (each,) for each in (result, call.meta["type"]))
    if len(results) != len(expected) or not all(
        isinstance(tensor, torch.Tensor) and is_alike(tensor, rule, sizes)
        for tensor, rule in zip(results, expected, strict=True)
    ):
        returned, ruled = (
            ", ".join(shown) for shown in ([show_result(each, sizes) for each in results], map(str, expected))
        )
        raise PassError(f"{op.name} returned {returned}, its rule says {ruled}")


def sizes_of(types: tuple[Type, ...]) -> dict[str, int]:
    """A size for each letter in the types, none of which is another dim's."""
    dims = [dim for each in types for dim in each.shape]
    letters = dict.fromkeys(letter for dim in dims if isinstance(dim, str) for letter in LETTER.findall(dim))
    return dict(zip(letters, (size for size in count(SMALLEST) if size not in dims), strict=False))


def size_of(dim: Dim, sizes: Mapping[str, int]) -> int:
    """The size of a dim: 576, or of "4*T" four times that of T. KeyError for a letter without one."""
    times, _, letter = str(dim).rpartition("*")
    return dim if isinstance(dim, int) else int(times or 1) * sizes[letter]


def is_alike(tensor: torch.Tensor, rule: Type, sizes: Mapping[str, int]) -> bool:
    """Whether a tensor is what a rule says; a letter that no argument has stands for any size."""
    if tensor.dtype != TORCH_DTYPES[rule.dtype] or tensor.dim() != len(rule.shape):
        return False
    known = [isinstance(dim, int) or dim.rpartition("*")[2] in sizes for dim in rule.shape]
    pairs = zip(tensor.shape, rule.shape, known, strict=True)
    return all(size == size_of(dim, sizes) for size, dim, is_known in pairs if is_known)


def show_result(result: Any, sizes: Mapping[str, int]) -> str:
    """Show a body's result in the text's form."""
    if not isinstance(result, torch.Tensor):
        return type(result).__name__
    return str(Type(NAMES.get(result.dtype, str(result.dtype)), tuple(show_dim(size, sizes) for size in result.shape)))


def show_dim(size: int, sizes: Mapping[str, int]) -> Dim:
    for letter, own in sizes.items():
        if size % own == 0 and size > 0:
            return letter if size == own else f"{size // own}*{letter}"
    return size
