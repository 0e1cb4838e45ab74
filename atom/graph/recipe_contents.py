"""What a recipe reads, and what the tensor holds: ranges, formats, bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from atom.graph.gguf_blocks import PLANES, SPLIT, TYPES, split_bits
from atom.graph.recipe_ranges import narrow
from atom.graph.recipes import (
    JOINS_EXPERTS,
    Cat,
    Host,
    LoraStack,
    Quantize,
    Ranked,
    Recipe,
    Regroup,
    Share,
    Shuffle,
    Slice,
    Stack,
    leaves,
    once,
    operands,
)


def slices(recipe: Recipe) -> Iterator[Slice]:
    """The ranges of tensors that a recipe takes."""
    return (part for part in _within(recipe) if isinstance(part, Slice))


def ranked_parts(recipe: Recipe) -> Iterator[Ranked]:
    """The parts of a recipe that differ between ranks."""
    return (part for part in _within(recipe) if isinstance(part, Ranked))


def packed_to(recipe: Recipe) -> Iterator[str]:
    """The formats that plain tensors are packed to while they load, be they unpacked again or not."""
    return (part.fmt for part in _within(recipe) if isinstance(part, Quantize))


def lora_stack_of(recipe: Recipe) -> LoraStack | None:
    """The adapters that a recipe takes a part of; None if it is made of anything else."""
    while isinstance(recipe, Slice | Share):
        recipe = recipe.part
    return recipe if isinstance(recipe, LoraStack) else None


@once
def packed_while_loading(recipe: Recipe) -> tuple[Quantize, ...]:
    """The tensors of a packed recipe that are made of plain ones."""
    if isinstance(recipe, Quantize):
        return (recipe,)
    if not isinstance(recipe, Cat | Regroup | Shuffle | Slice | Share):
        return ()
    parts = layout_units(recipe) if isinstance(recipe, Shuffle) else operands(recipe)
    return tuple(packed for part in parts for packed in packed_while_loading(part))


def layout_units(recipe: Shuffle) -> list[Recipe]:
    """The units of a kernel's layout: a matrix, each expert's, or all experts' in layouts that join them."""
    part = recipe.part
    if len(part.type.shape) == 2 or recipe.layout in JOINS_EXPERTS:
        return [part]
    return [narrow(part, at, at + 1) for at in range(int(part.type.shape[0]))]


def held_bytes(recipe: Recipe) -> int:
    """Bytes of the tensor in memory: in its stored format, unless the recipe dequantizes it."""
    return sum(held_by_format(recipe).values())


def device_bytes(recipe: Recipe) -> int:
    """The bytes of `held_bytes` in the device's memory: none of a tensor that stays on the host."""
    return 0 if isinstance(recipe, Host) else held_bytes(recipe)


def host_bytes(recipe: Recipe) -> int:
    """The bytes of `held_bytes` in pinned host memory, from which a GPU reads them."""
    return held_bytes(recipe) if isinstance(recipe, Host) else 0


@once
def held_by_format(recipe: Recipe) -> Mapping[str, int]:
    """The bytes of `held_bytes` by stored format, or by dtype if a tensor is plain."""
    if isinstance(recipe, Stack):
        num_experts = recipe.stop - recipe.start
        return Counter({fmt: num_experts * size for fmt, size in held_by_format(recipe.part).items()})
    if isinstance(recipe, Cat):
        return sum((Counter(held_by_format(part)) for part in recipe.parts), Counter[str]())
    if isinstance(recipe, Shuffle):
        held = held_by_format(recipe.part)
        if recipe.layout in (SPLIT, PLANES):
            num = recipe.type.num_elements
            split = {fmt: int(num * split_bits(fmt, recipe.layout)) // 8 for fmt in held if fmt in TYPES}
            return Counter({**held, **split})
        return held
    leaf, packed = next(leaves(recipe), recipe), next(iter(packed_while_loading(recipe)), None)
    fmt = leaf.type.fmt if packed is None else packed.fmt
    return Counter({fmt or leaf.type.dtype: recipe.type.num_bytes})


def _within(recipe: Recipe) -> Iterator[Recipe]:
    """A recipe and all that it is made of; of experts, one stands for all."""
    yield recipe
    for part in operands(recipe):
        yield from _within(part)
