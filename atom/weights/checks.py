"""Check a graph against the tensors of a checkpoint, before any is read.

check(graph, checkpoint.tensors, ignore=config.model.ignore)      # CheckpointError: missing, unused, wrong shape
check_counts(config.model, checkpoint.tensors)                    # before there is a graph: layers and experts
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatch

import torch

from atom.checkpoint import Checkpoint, StoredTensor
from atom.config import ModelConfig
from atom.config.stored_names import numbered
from atom.dtypes import BYTES, FLOAT_DTYPES
from atom.errors import CheckpointError, UnsupportedError
from atom.graph import Graph, Recipe, Type
from atom.graph.formats import block_of, parse_format
from atom.graph.parts import has_parts, stored_tensors
from atom.graph.recipes import leaves


def check(graph: Graph, stored: Mapping[str, StoredTensor], ignore: Iterable[str] = ()) -> None:
    """Check the checkpoint against the graph: no tensor is missing, unused or of another shape."""
    needed = check_stored(graph.recipes(), stored)
    check_surplus(needed, stored, ignore)


def check_stored(recipes: Iterable[Recipe], stored: Mapping[str, StoredTensor]) -> Collection[str]:
    """Check that recipes have their tensors, of the right shapes; the names of these."""
    needed = {leaf.name: leaf.type for recipe in recipes for leaf in stored_tensors(recipe)}
    missing = [name for name in needed if name not in stored]
    if missing:
        raise CheckpointError(
            f"the checkpoint has no tensor {_some(missing)}; is it whole, and is model= the right one?"
        )
    for name, type in needed.items():
        check_tensor(name, stored[name], type)
    return needed


def check_tensor(name: str, stored: StoredTensor, type: Type) -> None:
    """Check that a stored tensor has the shape and the dtype that a recipe reads."""
    shape, dtype, blocks = stored.shape, stored.dtype, stored.blocks
    if type.dtype == "u8" and blocks is not None:
        shape, dtype = blocks, "u8"
    if type.dtype == "u8" and dtype in BYTES:
        dtype = "u8"
    if not _is_same_shape(shape, type):
        raise CheckpointError(f"tensor {name} is {list(shape)}, the model expects {list(type.shape)}")
    if dtype != type.dtype and not {dtype, type.dtype} <= set(FLOAT_DTYPES):
        raise CheckpointError(f"tensor {name} is {dtype}, the model expects {type.dtype}; is its scale missing?")


def check_surplus(needed: Collection[str], stored: Iterable[str], ignore: Iterable[str] = ()) -> None:
    """Check that every stored tensor is needed, or may be left out."""
    patterns = tuple(ignore)
    surplus = [
        name for name in stored if name not in needed and not any(fnmatch(name, pattern) for pattern in patterns)
    ]
    modules = {_module_of(name): name for name in needed if "." in name}
    for name in surplus:
        if (used := modules.get(_module_of(name))) is not None:
            found = f"the model does not use tensor {name}, though it uses {used}"
            raise CheckpointError(f"{found}: without it answers are wrong; is model= the right one?")
    if surplus:
        raise CheckpointError(
            f"the model does not use tensor {_some(surplus)}; name it in model.ignore if it may be left out"
        )


def _module_of(name: str) -> str:
    """The module of a tensor: `up` of up.weight, up.bias and up.scale, `experts` of experts.up_bias."""
    return name.rpartition(".")[0]


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"


def _is_same_shape(stored: Sequence[int], type: Type) -> bool:
    """Whether a tensor has a type's shape, but for dims of 1: a scale may be stored as [], [1] or [1, 1].

    Blocks of bytes may be stored one after the other, as rows; the matrices of experts as one of all their rows; a
    vector of several parts as a matrix with a row for each; and a matrix as the weight of a convolution, whose steps
    are as wide as its kernel, or as a table of rows in two dims.
    """
    dims = [int(dim) for dim in type.shape]
    shapes = [dims, [*dims[:-2], math.prod(dims[-2:])]] if type.dtype == "u8" else [dims]
    if len(dims) == 3 and type.fmt is None:
        shapes.append([math.prod(dims[:2]), dims[2]])
    if len(dims) == 1 and len(stored) == 2 and type.fmt is None:
        stored = [math.prod(stored)]
    found = [list(stored)]
    if len(dims) == 2 and len(stored) > 3 and type.fmt is None:
        found.append([stored[0], math.prod(stored[1:])])
    if len(dims) == 2 and len(stored) == 3 and type.fmt is None:
        found.append([math.prod(stored[:2]), stored[2]])
    known = [[dim for dim in shape if dim != 1] for shape in shapes]
    return any([dim for dim in each if dim != 1] in known for each in found)


def check_order(graph: Graph, checkpoint: Checkpoint) -> None:
    """Check the order of columns in a GPTQ file if the format says that the columns of a group are neighbours."""
    in_order: dict[Type, bytes] = {}  # the groups of all columns
    for leaf in dict.fromkeys(leaf for recipe in graph.recipes() for leaf in leaves(recipe) if leaf.type.fmt):
        index, fmt, type = f"{leaf.name.removesuffix('.weight')}.g_idx", str(leaf.type.fmt), leaf.type
        if index not in checkpoint.tensors or parse_format(fmt).has_order:
            continue
        if type not in in_order:
            groups = torch.arange(int(type.shape[-1]), dtype=torch.int32) // block_of(type)[-1]
            in_order[type] = groups.numpy().tobytes()
        if bytes(checkpoint.read(index)) != in_order[type]:
            raise CheckpointError(
                f"tensor {index} has columns of a group apart, which desc_act=false in quantization_config denies: "
                f"set it to true in its config.json, or model.fmt='{fmt.replace('[', '_ordered[')}'"
            )


def check_counts(model: ModelConfig, stored: Mapping[str, StoredTensor]) -> None:
    """Check a model's numbers of layers and experts against the names in a checkpoint's header, before a text of that
    many is written."""
    if not stored:
        raise CheckpointError("the checkpoint has no weights; download it again, or take load_dummy=true, random ones")
    names = [*model.weights.values()]
    is_paired = any("{pair}" in name for name in names)
    num_layers = model.stored_layers
    if any("{section}" in name for name in names):
        num_layers = max(section.layers for section in model.sections)
    layers = ("pair", -(-model.layers // 2)) if is_paired else ("layer", num_layers)
    experts = max((mlp.experts or 0 for mlp in model.mlps if mlp.kind == "moe"), default=0)
    for placeholder, num_expected in (layers, ("expert", experts)):
        numbers = _find_numbers(stored, names, placeholder)
        if numbers is not None and len(numbers) < num_expected:
            counted = f"{len(numbers)} {placeholder}s, its configuration says {num_expected}"
            raise CheckpointError(f"the checkpoint has {counted}; is it whole, and is model= the right one?")


def _find_numbers(stored: Iterable[str], names: Iterable[str], placeholder: str) -> set[str] | None:
    """The numbers that stored names have for a placeholder; None if no name has it."""
    marked = (re.escape(name).partition(re.escape(f"{{{placeholder}}}")) for name in names)
    fronts = {numbered(front) for front, mark, _ in marked if mark}
    if not fronts:
        return None
    find = re.compile(f"(?:{'|'.join(sorted(fronts))})([0-9]+)").match
    return {match[1] for name in stored if (match := find(name))}


def refuse_packed(graph: Graph) -> None:
    """Raise UnsupportedError if a graph would compute with a weight in its packed format."""
    for recipe in graph.recipes():
        if recipe.type.fmt is not None and not has_parts(recipe):
            leaf = next(leaves(recipe))
            stored = f"{leaf.name} is stored as {leaf.type.fmt}"
            raise UnsupportedError(f"{stored}: a format without parts cannot be run, job=explain counts its bytes")
