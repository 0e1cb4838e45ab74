"""Make the tensors of recipes from a source of values.

    made = make_all(recipes, source, "cuda")        # CapacityError if they do not fit

A tensor is allocated here, and the source fills its parts (`evaluate.py`). A weight that is packed or laid out while it
loads is made in memory first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from atom.errors import naming_a_lack_of_memory
from atom.graph import (
    TORCH_DTYPES,
    Cat,
    Dequantize,
    Full,
    Host,
    LaidOut,
    PackedWeight,
    Quantize,
    Recipe,
    Regroup,
    RopeFreqs,
    Shuffle,
    Slice,
    Type,
    W,
)
from atom.graph.formats import block_of, parse_format
from atom.graph.gguf_blocks import TYPES, fit_factors
from atom.graph.parts import parts_of
from atom.graph.recipe_contents import device_bytes, layout_units, lora_stack_of, packed_while_loading
from atom.graph.recipes import Measured
from atom.kernels import shuffle
from atom.kernels.host_memory import HostTensor
from atom.weights.evaluate import Loaded, Place, split_recipe
from atom.weights.quantize import quantize
from atom.weights.rope import rope_freqs
from atom.weights.sources import WeightSource

LARGE = 256 << 20  # bytes of a plain tensor whose memory is given back once it is packed, so that no weight stays there


def make_all(
    recipes: Sequence[Recipe], source: WeightSource, device: str, place: Place | None = None
) -> dict[Recipe, Loaded]:
    """Make the tensors of recipes from a source. CapacityError if they do not fit.

    place: as in `load`.
    """

    def make(recipe: Recipe) -> Loaded:
        made = _make(recipe, source, device)
        if place is None:
            return made
        source.flush()  # it has arrived
        return place(recipe, made)

    with _within_memory(recipes, device):
        return dict(zip(recipes, source.map(make, recipes), strict=True))


@contextmanager
def _within_memory(recipes: Iterable[Recipe], device: str) -> Iterator[None]:
    """Raise a CapacityError with the sizes if the device runs out of memory."""
    has = "the system has less"
    if device != "cpu":
        free, total = torch.cuda.mem_get_info(device)
        has = f"device={device} had {free} free of {total}"
    size = sum(map(device_bytes, recipes))
    with naming_a_lack_of_memory(
        f"the weights take {size} bytes, {has}: end what else uses it, or set checkpoint= to a smaller model"
    ):
        yield


@torch.inference_mode()
def _make(recipe: Recipe, source: WeightSource, device: str) -> Loaded:
    """Make a recipe's tensor; the source fills it, maybe after the return."""
    if isinstance(recipe, RopeFreqs):
        return rope_freqs(recipe).to(device)
    if isinstance(recipe, Measured):
        return torch.ones(1, device=device)
    if isinstance(recipe, Host):
        return _on_host(recipe, source, device)
    if isinstance(recipe, Shuffle):
        return _shuffled(recipe, source, device)
    if recipe.type.fmt is not None:
        return pack(recipe, source, device)
    return _fill(recipe, _empty(recipe.type, device), source)


def _on_host(recipe: Host, source: WeightSource, device: str) -> HostTensor:
    """Make a tensor in host memory, which the source fills without the device."""
    made = HostTensor([int(dim) for dim in recipe.type.shape], TORCH_DTYPES[recipe.type.dtype], device)
    if source.is_random:  # drawn by the device, so that the numbers are those of a run without host()
        made.on_host.copy_(_fill(recipe.part, _empty(recipe.type, device), source))
    else:
        _fill(recipe.part, made.on_host, source)
    return made


def pack(recipe: Recipe, source: WeightSource, device: str) -> PackedWeight:
    """Make a packed weight: of its stored parts, or of the plain tensor, which is in memory meanwhile."""
    if isinstance(recipe, Cat | Regroup | Slice) and any(packed_while_loading(recipe)) and not source.is_random:
        parts_of_it = recipe.parts if isinstance(recipe, Cat) else (recipe.part,)
        joined = [pack(part, source, device) for part in parts_of_it]
        source.flush()
        return _joined(recipe, joined)
    parts = source.find(recipe)
    if source.is_random or (isinstance(recipe, Quantize) and parts is None):
        plain = recipe.part if isinstance(recipe, Quantize) else W("", recipe.type.plain)
        tensor = _fill(plain, _empty(plain.type, device), source)
        source.flush()
        made = PackedWeight(recipe.type, _drawn(recipe.type, tensor) or quantize(str(recipe.type.fmt), tensor))
        if source.packed and isinstance(recipe, Quantize):
            source.packed.write(recipe, made.parts)
        if tensor.is_cuda and tensor.nbytes >= LARGE:
            del tensor
            torch.cuda.empty_cache()
        return made
    parts = parts or parts_of(recipe)
    filled = {name: _fill(part, _empty(part.type, device), source) for name, part in parts.items()}
    return PackedWeight(recipe.type, filled)


def _drawn(type: Type, drawn: Tensor) -> dict[str, Tensor] | None:
    """The parts of a weight in GGUF's blocks that nothing packs to: their bits are those of random numbers drawn for
    it; None of other formats."""
    kind, values = parse_format(str(type.fmt)).kind, parts_of(W("", type))["values"].type
    if kind not in TYPES:
        return None
    *blocks, size = map(int, values.shape)
    bits = drawn.view(torch.uint8).view(*blocks, -1, drawn.itemsize)[..., :size, 0]
    return {"values": fit_factors(kind, bits, 0.02)}


def _joined(recipe: Cat | Regroup | Slice, made: Sequence[PackedWeight]) -> PackedWeight:
    """Join weights, take a range of one, or repeat its scales, as `graph.parts` does with recipes."""
    parts = dict(made[0].parts)
    if isinstance(recipe, Cat):
        parts = {name: torch.cat([each.parts[name] for each in made], recipe.dim) for name in parts}
    elif isinstance(recipe, Slice):
        size, known = block_of(recipe.part.type)[recipe.dim], parse_format(str(recipe.type.fmt)).parts
        for name, kind in known.items():
            of = 1 if kind.holds == "elements" else size
            if kind.holds in ("elements", "blocks", "bytes"):
                first, last = recipe.start // of, -(-recipe.stop // of)
                parts[name] = parts[name].narrow(recipe.dim, first, last - first)
    else:
        blocks = zip(block_of(recipe.type), block_of(recipe.part.type), strict=True)
        for dim, (size, larger) in enumerate(blocks):
            num_blocks = -(-int(recipe.type.shape[dim]) // size)
            parts["scales"] = parts["scales"].repeat_interleave(-(-larger // size), dim).narrow(dim, 0, num_blocks)
    return PackedWeight(recipe.type, {name: part.contiguous() for name, part in parts.items()})


def _shuffled(recipe: Shuffle, source: WeightSource, device: str) -> Loaded:
    """Make a tensor in a kernel's layout, part by part, so that not all experts are in memory twice."""
    units = layout_units(recipe)
    is_whole = units[0] is recipe.part
    plain = _empty(units[0].type, device) if recipe.type.fmt is None else None  # one buffer, to avoid fragmentation
    made = [lay_out(each, recipe.layout, source, device, is_whole=is_whole, plain=plain) for each in units]
    return made[0] if is_whole else made


def lay_out(
    unit: Recipe, layout: str, source: WeightSource, device: str, *, is_whole: bool, plain: Tensor | None = None
) -> Tensor | LaidOut | PackedWeight:
    """Make one of `layout_units` in a kernel's layout.

    is_whole: it is all of the tensor
    plain: is written over, of the unit's plain type; None: it is allocated
    """
    if unit.type.fmt is not None:
        return _laid_out(Shuffle(unit, layout), source, device)
    plain = _fill(unit, _empty(unit.type, device) if plain is None else plain, source)
    source.flush()
    return shuffle(plain if is_whole else plain.view(plain.shape[-2:]), layout)


def _laid_out(recipe: Shuffle, source: WeightSource, device: str) -> Tensor | LaidOut | PackedWeight:
    """Make a packed weight in a kernel's layout, or map it if an earlier start has kept it."""
    if source.packed and (mapped := source.packed.map(recipe)) is not None:
        return mapped
    packed = pack(recipe.part, source, device)
    source.flush()
    made = shuffle(packed, recipe.layout)
    if source.packed and isinstance(made, LaidOut):
        source.packed.write(recipe, {"": made.tensor})
    return made


def _fill(recipe: Recipe, tensor: Tensor, source: WeightSource) -> Tensor:
    for part, target in split_recipe(recipe, tensor):
        if isinstance(part, Full):
            target.fill_(part.value)
        elif lora_stack_of(part) is not None:
            target.zero_()
        else:
            fill_part(part, target, source)
    return tensor


def fill_part(part: Recipe, target: Tensor, source: WeightSource) -> None:
    """Fill a target with a part of a recipe, see `split_recipe`, that is made of stored tensors."""
    if (rounded := _rounded(part, source, str(target.device))) is not None:
        target.copy_(rounded)
    else:
        source.fill(part, target)


def _rounded(recipe: Recipe, source: WeightSource, device: str) -> Tensor | None:
    """A plain tensor, or a range of one, that is packed and unpacked again; None if a recipe is none."""
    if isinstance(recipe, Dequantize) and any(packed_while_loading(recipe.part)):
        packed = pack(recipe.part, source, device)
        source.flush()
        return packed.unpack()
    if isinstance(recipe, Slice) and (whole := _rounded(recipe.part, source, device)) is not None:
        return whole[(slice(None),) * recipe.dim + (slice(recipe.start, recipe.stop, recipe.step),)]
    return None


def _empty(type: Type, device: str) -> Tensor:
    return torch.empty([int(dim) for dim in type.shape], dtype=TORCH_DTYPES[type.dtype], device=device)
