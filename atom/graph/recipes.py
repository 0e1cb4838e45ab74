"""Recipes: how a tensor of the graph is made of stored tensors.

    W("model.layers.0.mlp.up_proj.weight", bf16[1536, 576])     a stored tensor, in the dtype that the graph computes in
    W("model.layers.0.mlp.up_proj.weight", bf16[…], fmt="…")    one stored in a format, which is part of its type
    repack(W(…), "awq", 4, u8[…])                               words of a file as the bytes that kernels read
    dequantize(W(…, fmt="…"))                                   a packed tensor as a plain one
    quantize(W(…), "fp8[1, *]")                                 a plain tensor, packed while it is loaded
    regroup(W(…, fmt="…"), "fp8[64, 128]")                      a packed tensor in smaller blocks, its scales repeated
    cat([W(…), W(…)])                                           tensors joined
    stack(W("…experts.{expert}.up_proj.weight", …), 0, 8)       the tensors of experts 0 to 7, in a new first dim
    slice(W("…qkv_proj.weight", …), 576, 768)                   rows 576 to 767
    slices(W("…q_proj.weight", …), 0, 256, 512, 16)             rows 0 to 255, 512 to 767, …, 16 ranges joined: a cat
    shift(W("…norm.weight", …), 1.0)                            a tensor with a number added to each element
    apply(W("…lambda_1", …), "abs", factor=2.5)                 and one with a function of each element times a number
    shuffle(W(…), "onednn")                                     a tensor in a kernel's own layout
    host(W("model.embed_tokens_per_layer.weight", …))           one that a GPU reads from pinned host memory
    share(W("…o_proj.weight", …), "tensor", 4, dim=1)           a rank's equal part of a tensor
    once(W("…o_proj.bias", …), "tensor")                        a tensor on the first rank, zeros on the others
    offset("tensor", 4, 12288)                                  where a rank's part begins, i64[1]
    rope_freqs(64, 10000.0)                                     a constant
    measured("model.layers.0.k_scale")                          a scale that no file has: 1.0 until a start measures it
    lora_stack("model.layers.0.mlp.up_proj.lora_A", bf16[…])    adapters side by side: zeros until they are loaded
    KV("model.layers.0", bf16[2, 3, 64])                        no weight: a layer's state, an entry for each token
    STATE("model.layers.0", fp32[32, 128, 128])                 and one that each token writes over

Recipes are values: equal recipes are one tensor. Passes rewrite them with the nodes, `atom.weights` evaluates them.
A recipe that describes no tensor raises a ValueError with the reason when it is made.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from itertools import islice
from typing import Any, TypeVar

from atom.graph import formats
from atom.graph.formats import FormatError
from atom.graph.types import Type, need
from atom.state_rules import EveryRule, LatestRule, StateRule, TokenRule, WindowRule


@dataclass(frozen=True)
class W:
    """A stored tensor."""

    name: str  # in the checkpoint; {expert} is a number that a stack puts in
    type: Type  # shape and format as stored, dtype as computed

    def __post_init__(self) -> None:
        need(isinstance(self.name, str), f"a tensor's name is a string, not {self.name!r}")
        _need_type(self.type, self.name)
        if self.type.fmt is None:
            return
        need(isinstance(self.type.fmt, str), f"{self.name}: a format is a string, not {self.type.fmt!r}")
        try:
            formats.check_columns(self.type)
        except FormatError as error:
            raise FormatError(f"{self.name}: {error}") from None

    def with_name(self, name: str) -> W:
        """A tensor of the same type, which is not checked again: a model has some ten thousand of experts."""
        made = object.__new__(W)
        made.__dict__.update(name=name, type=self.type)
        return made


@dataclass(frozen=True)
class Cat:
    """Tensors joined along one dim."""

    parts: tuple[Recipe, ...]
    dim: int = 0

    def __post_init__(self) -> None:
        need(isinstance(self.parts, tuple) and len(self.parts) > 0, "cat takes a list of at least one tensor")
        for part in self.parts:
            _need_part("cat", part)
        first = self.parts[0].type
        _need_dim("cat", self.dim, first)
        for part in self.parts[1:]:
            others = [(*each.shape[: self.dim], *each.shape[self.dim + 1 :]) for each in (first, part.type)]
            fits = first.dtype == part.type.dtype and others[0] == others[1]
            if not fits:
                raise ValueError(f"cat: {first} and {part.type} cannot be joined along dim {self.dim}")
            if first.fmt != part.type.fmt:
                names = " and ".join(leaf.name for each in (self.parts[0], part) for leaf in islice(leaves(each), 1))
                raise FormatError(f"cat: {names} are stored in different formats, {first} and {part.type}")

    @cached_property
    def type(self) -> Type:
        return self.parts[0].type.with_size(self.dim, sum(int(part.type.shape[self.dim]) for part in self.parts))


@dataclass(frozen=True)
class Stack:
    """The tensors of a range of experts, along a new first dim."""

    part: Recipe  # of one expert
    start: int
    stop: int

    def __post_init__(self) -> None:
        _need_part("stack", self.part)
        need(_is_range(self.start, self.stop), f"stack: {self.start!r} to {self.stop!r} is no range of experts")

    @cached_property
    def type(self) -> Type:
        return replace(self.part.type, shape=(self.stop - self.start, *self.part.type.shape))

    def of(self, expert: int) -> Recipe:
        """The part of one expert."""
        return renamed(self.part, lambda name: name.replace("{expert}", str(expert)))


@dataclass(frozen=True)
class Slice:
    """A range of a tensor along one dim, every step-th of it."""

    part: Recipe
    start: int
    stop: int
    dim: int = 0
    step: int = 1

    def __post_init__(self) -> None:
        _need_part("slice", self.part)
        _need_dim("slice", self.dim, self.part.type)
        size = int(self.part.type.shape[self.dim])
        is_range = _is_range(self.start, self.stop) and self.stop <= size
        need(is_range, f"slice: {self.start!r} to {self.stop!r} is no range of the {size} in dim {self.dim}")
        _need_count("slice: step", self.step)

    @cached_property
    def type(self) -> Type:
        return self.part.type.with_size(self.dim, -(-(self.stop - self.start) // self.step))


@dataclass(frozen=True)
class Transpose:
    """A tensor with two neighbouring dims swapped."""

    part: Recipe
    dim: int = -2  # the first of the two, from the end

    def __post_init__(self) -> None:
        _need_part("transpose", self.part)
        need(_is_whole(self.dim) and self.dim < -1, f"transpose: dim={self.dim!r} is no whole number up to -2")
        need(len(self.part.type.shape) >= -self.dim, f"transpose: {self.part.type} has no two dims to swap")
        need(self.dim == -2 or self.part.type.fmt is None, f"transpose: {self.part.type} has blocks in its last dims")

    @cached_property
    def type(self) -> Type:
        shape, fmt = list(self.part.type.shape), self.part.type.fmt
        shape[self.dim : len(shape) + self.dim + 2] = shape[self.dim + 1], shape[self.dim]
        return Type(self.part.type.dtype, tuple(shape), fmt and formats.transpose(fmt))


@dataclass(frozen=True)
class Shift:
    """A tensor with a number added to each element."""

    part: Recipe
    by: float

    def __post_init__(self) -> None:
        _need_part("shift", self.part)
        need(_is_number(self.by), f"shift: {self.by!r} is no number")

    @cached_property
    def type(self) -> Type:
        return self.part.type


@dataclass(frozen=True)
class Apply:
    """A tensor with a function of each element times a number."""

    part: Recipe
    function: str
    factor: float = 1.0

    def __post_init__(self) -> None:
        _need_part("apply", self.part)
        need(self.part.type.fmt is None, f"apply: {self.part.type} is packed")
        known = ", ".join(FUNCTIONS)
        need(self.function in FUNCTIONS, f"apply: there is no function {self.function!r}; functions: {known}")
        need(_is_number(self.factor), f"apply: {self.factor!r} is no number")

    @cached_property
    def type(self) -> Type:
        return self.part.type


FUNCTIONS = ("scale", "square", "abs", "rest_of_abs", "sigmoid", "rest_of_sigmoid")  # see `atom.weights.evaluate`


@dataclass(frozen=True)
class Dequantize:
    """A packed tensor as a plain one."""

    part: Recipe

    def __post_init__(self) -> None:
        is_packed = isinstance(self.part, Recipe) and self.part.type.fmt is not None
        need(is_packed, 'dequantize takes a stored tensor with a format, W("…", …, fmt="…")')

    @cached_property
    def type(self) -> Type:
        return self.part.type.plain


@dataclass(frozen=True)
class Quantize:
    """A plain tensor, packed."""

    part: Recipe
    fmt: str

    def __post_init__(self) -> None:
        _need_part("quantize", self.part)
        need(self.part.type.fmt is None, f"quantize: {self.part.type} is packed already")
        need(isinstance(self.fmt, str), f"quantize: a format is a string, not {self.fmt!r}")
        need(bool(formats.parse_format(self.fmt).parts), f"quantize: nothing packs to {self.fmt}")
        formats.check_columns(self.type)

    @cached_property
    def type(self) -> Type:
        return replace(self.part.type, fmt=self.fmt)


@dataclass(frozen=True)
class Regroup:
    """A packed tensor in smaller blocks, whose scales are those of the larger ones."""

    part: Recipe
    fmt: str  # the part's, with a block that divides its own

    def __post_init__(self) -> None:
        is_packed = isinstance(self.part, Recipe) and self.part.type.fmt is not None
        need(is_packed, "regroup takes a packed tensor")
        need(isinstance(self.fmt, str), f"regroup: a format is a string, not {self.fmt!r}")
        for size, of in zip(formats.block_of(self.type), formats.block_of(self.part.type), strict=True):
            need(of % size == 0, f"regroup: blocks of {self.part.type.fmt} are no whole number of {self.fmt}")

    @cached_property
    def type(self) -> Type:
        return replace(self.part.type, fmt=self.fmt)


@dataclass(frozen=True)
class Repeat:
    """A tensor with each element repeated along a dim, cut to a size."""

    part: Recipe
    times: int
    dim: int
    size: int

    def __post_init__(self) -> None:
        _need_part("repeat", self.part)
        _need_dim("repeat", self.dim, self.part.type)
        has = int(self.part.type.shape[self.dim]) * self.times
        need(0 < self.size <= has, f"repeat: {self.times} times {self.part.type} has no {self.size} in dim {self.dim}")

    @cached_property
    def type(self) -> Type:
        return self.part.type.with_size(self.dim, self.size)


@dataclass(frozen=True)
class Repack:
    """Numbers of 4 or 8 bits that a file has in int32 words [R, C] or in blocks, as bytes in the type's shape: two of 4
    bits a byte, the first low; or a number a byte if they are zero points.

    columns: a word has numbers of one row, the first in its lowest bits; rows: of one column (compressed-tensors).
    gptq: as rows for values [I, O], as columns for zeros [G, O], both transposed; gptq_minus_1: less 1, as v1 has zeros
    awq: as columns, both transposed, and in the order 0, 2, 4, 6, 1, 3, 5, 7 (AutoAWQ, awq/utils/packing_utils.py).
    block_scales, block_exponents, block_mins, block_pairs, block_bytes: of blocks u8[..., B, bytes], each a scale fp16
    and maybe a minimum fp16, or an exponent u8, then its numbers (ggml, ggml-common.h): two a byte, the first half of
    them low, or i8, which become u8.
    exponents: u8 of the same shape, each a power of 2, plus 127 (e8m0), which becomes fp32 (compressed-tensors).
    """

    part: Recipe
    words: str
    bits: int
    type: Type

    def __post_init__(self) -> None:
        _need_part("repack", self.part)
        need(self.words in WORDS, f"repack: there are no words {self.words!r}; words: {', '.join(WORDS)}")
        need(self.bits in (4, 8), f"repack: bits={self.bits!r} is neither 4 nor 8")
        _need_type(self.type, "repack")


WORDS = ("columns", "rows", "awq", "gptq", "gptq_minus_1", "exponents", *formats.BLOCK_WORDS)


JOINS_EXPERTS = ("aiter", "wgmma")  # layouts in which all experts are one tensor


@dataclass(frozen=True)
class Shuffle:
    """A tensor in the layout that a kernel wants."""

    part: Recipe
    layout: str  # a layout of `atom.kernels`

    def __post_init__(self) -> None:
        _need_part("shuffle", self.part)
        need(isinstance(self.layout, str), f"shuffle: a layout is a string, not {self.layout!r}")

    @cached_property
    def type(self) -> Type:
        return self.part.type


@dataclass(frozen=True)
class Host:
    """A plain tensor that stays in pinned host memory, from which a GPU's kernels read it over the bus."""

    part: Recipe

    def __post_init__(self) -> None:
        _need_part("host", self.part)
        need(self.part.type.fmt is None, f"host: {self.part.type} is packed")

    @cached_property
    def type(self) -> Type:
        return self.part.type


@dataclass(frozen=True)
class Share:
    """A rank's equal part of a tensor along one dim.

    If the parts are more than the tensor, the last ones are filled up with zeros.
    """

    part: Recipe
    axis: str  # of the mesh
    ranks: int  # along it
    dim: int = 0
    copies: int = 1  # neighbouring ranks that have the same part

    def __post_init__(self) -> None:
        _need_part("share", self.part)
        _need_dim("share", self.dim, self.part.type)
        _need_axis("share", self.axis)
        _need_count("share: ranks", self.ranks)
        is_whole = _is_whole(self.copies) and self.copies > 0 and self.ranks % self.copies == 0
        need(is_whole, f"share: {self.ranks} ranks are no whole number of {self.copies!r} copies")

    @property
    def size(self) -> int:
        """How much a rank has along the dim."""
        return -(-int(self.part.type.shape[self.dim]) * self.copies // self.ranks)

    @cached_property
    def type(self) -> Type:
        return self.part.type.with_size(self.dim, self.size)


@dataclass(frozen=True)
class Once:
    """A tensor on the first rank of an axis, zeros on the others.

    Such as a bias, which a sum over ranks adds once.
    """

    part: Recipe
    axis: str

    def __post_init__(self) -> None:
        _need_part("once", self.part)
        need(self.part.type.fmt is None, f"once: {self.part.type} is packed")
        _need_axis("once", self.axis)

    @cached_property
    def type(self) -> Type:
        return self.part.type


@dataclass(frozen=True)
class Offset:
    """Where a rank's part begins: its coordinate times the size of a part."""

    axis: str
    ranks: int
    size: int

    def __post_init__(self) -> None:
        _need_axis("offset", self.axis)
        _need_count("offset: ranks", self.ranks)
        _need_count("offset: size", self.size)

    @cached_property
    def type(self) -> Type:
        return Type("i64", (1,))


@dataclass(frozen=True)
class Full:
    """A tensor filled with one number."""

    value: float
    type: Type

    def __post_init__(self) -> None:
        need(_is_number(self.value), f"full: {self.value!r} is no number")
        _need_type(self.type, "full")
        need(self.type.fmt is None, f"full: {self.type} is packed")


@dataclass(frozen=True)
class RopeFreqs:
    """Rotary frequencies fp32[dim / 2], radians a token; `atom.weights.rope_freqs` has the kinds and their sources."""

    dim: int  # rotated dims of a head
    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    factors: tuple[float, ...] | None = None
    partial: float = 1.0

    def __post_init__(self) -> None:
        dim, kind = self.dim, self.kind
        need(_is_whole(dim) and dim > 0 and dim % 2 == 0, f"rope_freqs: dim={dim!r} is no even number from 2")
        need(kind in ROPE_KINDS, f"rope_freqs: there is no kind {kind!r}; kinds: {', '.join(ROPE_KINDS)}")
        for name in ("theta", "factor", "beta_fast", "beta_slow"):
            value = getattr(self, name)
            need(_is_number(value) and value > 0, f"rope_freqs: {name}={value!r} is no number above 0")
        for name in ("low_freq_factor", "high_freq_factor"):
            need(_is_number(getattr(self, name)), f"rope_freqs: {name}={getattr(self, name)!r} is no number")
        if kind in ("llama3", "yarn"):
            original = self.original_max_position
            is_length = _is_whole(original) and original is not None and original > 0
            need(is_length, f"rope_freqs: kind {kind} needs an original_max_position from 1, not {original!r}")
        need(_is_number(self.partial) and 0 < self.partial <= 1, f"rope_freqs: partial={self.partial!r} is no share")
        if kind == "factors":
            is_list = isinstance(self.factors, tuple) and all(map(_is_number, self.factors))
            is_whole = is_list and len(self.factors or ()) == dim // 2
            need(is_whole, f"rope_freqs: kind factors needs a list of {dim // 2} numbers")

    @cached_property
    def type(self) -> Type:
        return Type("fp32", (self.dim // 2,))


@dataclass(frozen=True)
class LearnedFreqs:
    """Rotary frequencies fp32[dim / 2], each times e to the power of a stored number (LeRoPE)."""

    part: Recipe
    freqs: RopeFreqs

    def __post_init__(self) -> None:
        _need_part("learned_freqs", self.part)
        need(isinstance(self.freqs, RopeFreqs), f"learned_freqs: {self.freqs!r} are no rope_freqs")
        need(self.part.type == self.freqs.type, f"learned_freqs: {self.part.type} of frequencies {self.freqs.type}")

    @cached_property
    def type(self) -> Type:
        return self.freqs.type


@dataclass(frozen=True)
class Measured:
    """A scale fp32[1] that the checkpoint does not have: 1.0 until a start measures it, see `runtime.kv.scales`."""

    name: str

    def __post_init__(self) -> None:
        need(isinstance(self.name, str), f"measured: a scale's name is a string, not {self.name!r}")

    @cached_property
    def type(self) -> Type:
        return Type("fp32", (1,))


@dataclass(frozen=True)
class LoraStack:
    """One factor of all adapters of a module, side by side: zeros until `weights.lora` fills it in place."""

    name: str  # the module and .lora_A [L r, I] or .lora_B [O, L r]
    type: Type

    def __post_init__(self) -> None:
        need(isinstance(self.name, str), f"lora_stack: a factor's name is a string, not {self.name!r}")
        _need_type(self.type, self.name)
        need(self.type.fmt is None, f"{self.name}: adapters are plain, not {self.type.fmt}")


@dataclass(frozen=True)
class State(ABC):
    """What a layer keeps of a sequence between steps, by a rule; a layer may have several, of other types or rules."""

    name: str  # of the layer
    type: Type  # of an entry
    part: str = field(default="", kw_only=True)  # of the layer that has it, if it has several states of one form

    def __post_init__(self) -> None:
        need(isinstance(self.name, str), f"a cache's name is a string, not {self.name!r}")
        _need_type(self.type, self.name)
        need(self.type.fmt is None, f"{self.name}: a cache is stored plain, not as {self.type.fmt}")

    @property
    @abstractmethod
    def rule(self) -> StateRule:
        """Which entries a sequence has."""

    @property
    def kind(self) -> str:
        """States of one kind share a pool's block numbers, and a block table."""
        return self.rule.name

    def stride(self, block_size: int) -> int:
        """Blocks of `block_size` tokens for each block of this state: several if an entry is of more tokens."""
        size = self.rule.entry_tokens
        whole = block_size % size == 0 or size % block_size == 0
        need(whole, f"{self.name}: a block of {block_size} tokens is neither a multiple nor a divisor of {size}")
        return max(size // block_size, 1)

    def block(self, block_size: int) -> Type:
        """The type of a block: the entries of `stride` blocks of tokens, or a copy of the only one after them."""
        num_entries = block_size * self.stride(block_size) // self.rule.entry_tokens
        return self.type if self.rule.in_slot else replace(self.type, shape=(num_entries, *self.type.shape))


@dataclass(frozen=True)
class KV(State):
    """The KV cache of one layer, with an entry for each token, or each few."""

    window: int | None = None  # tokens that a query sees, itself included; None: all
    every: int | None = None  # tokens that have an entry together; None: each has its own

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("window", self.window), ("every", self.every)):
            if value is not None:
                _need_count(f"{self.name}: {name}", value)
        need(self.window is None or self.every is None, f"{self.name}: only entries of single tokens have a window")

    @property
    def rule(self) -> StateRule:
        if self.every is not None:
            return EveryRule(self.every)
        return TokenRule() if self.window is None else WindowRule(self.window)


@dataclass(frozen=True)
class LatestState(State):
    """The recurrent state of one layer, which each token writes over."""

    @property
    def rule(self) -> StateRule:
        return LatestRule()


AXES = ("tensor", "experts", "width")  # of a mesh of ranks, see `atom.graph.mesh`
ROPE_KINDS = ("default", "linear", "llama3", "yarn", "factors", "proportional")

Packing = Repack | Repeat | Regroup | Quantize | Dequantize
Constant = RopeFreqs | Measured | LoraStack | Full  # of no stored tensor
Ranked = Share | Once | Offset  # of which each rank has its own
Recipe = (
    W | Cat | Stack | Slice | Transpose | Shift | Apply | LearnedFreqs | Packing | Shuffle | Host | Constant | Ranked
)

# the names that recipes have in the text
TEXT_NAMES: dict[str, type[Recipe | State]] = {
    "W": W,
    "cat": Cat,
    "stack": Stack,
    "slice": Slice,
    "transpose": Transpose,
    "shift": Shift,
    "apply": Apply,
    "repack": Repack,
    "repeat": Repeat,
    "regroup": Regroup,
    "quantize": Quantize,
    "dequantize": Dequantize,
    "shuffle": Shuffle,
    "host": Host,
    "share": Share,
    "once": Once,
    "offset": Offset,
    "full": Full,
    "rope_freqs": RopeFreqs,
    "learned_freqs": LearnedFreqs,
    "measured": Measured,
    "lora_stack": LoraStack,
    "KV": KV,
    "STATE": LatestState,
}


def leaves(recipe: Recipe) -> Iterator[W]:
    """The stored tensors that a recipe reads, in order."""
    if isinstance(recipe, W):
        yield recipe
    elif isinstance(recipe, Stack):
        for expert in range(recipe.start, recipe.stop):
            yield from leaves(recipe.of(expert))
    else:
        for part in operands(recipe):
            yield from leaves(part)


def operands(recipe: Recipe) -> tuple[Recipe, ...]:
    """The recipes that a recipe is directly made of; of experts, one stands for all."""
    if isinstance(recipe, W | Constant | Offset):
        return ()
    return recipe.parts if isinstance(recipe, Cat) else (recipe.part,)


T = TypeVar("T")


def once(compute: Callable[[Recipe], T]) -> Callable[[Recipe], T]:
    """Compute what follows from a recipe once, and keep it on the recipe, as cached_property does."""
    key = f"{compute.__module__}.{compute.__qualname__}"

    @wraps(compute)
    def find(recipe: Recipe) -> T:
        kept = vars(recipe)
        if key not in kept:
            kept[key] = compute(recipe)
        found: T = kept[key]
        return found

    return find


def renamed(recipe: Recipe, rename: Callable[[str], str]) -> Recipe:
    """The recipe with other names of stored tensors and measured scales."""
    if isinstance(recipe, W):
        return recipe.with_name(rename(recipe.name))
    if isinstance(recipe, Measured):
        return replace(recipe, name=rename(recipe.name))
    if isinstance(recipe, Constant | Offset):
        return recipe
    if isinstance(recipe, Cat):
        return Cat(tuple(renamed(part, rename) for part in recipe.parts), recipe.dim)
    return replace(recipe, part=renamed(recipe.part, rename))


def _need_part(name: str, part: Any) -> None:
    if not isinstance(part, Recipe):
        raise ValueError(f"{name} takes a tensor, not {part!r}")


def _need_type(type: Any, name: str) -> None:
    if not isinstance(type, Type) or not all(_is_whole(dim) and dim >= 0 for dim in type.shape):  # type: ignore[operator]
        raise ValueError(f"{name}: {type} is no type of a tensor whose dims are numbers")


def _need_dim(name: str, dim: Any, type: Type) -> None:
    if not _is_whole(dim) or not 0 <= dim < len(type.shape):
        raise ValueError(f"{name}: {type} has no dim {dim!r}")


def _need_axis(name: str, axis: Any) -> None:
    need(axis in AXES, f"{name}: there is no axis {axis!r}; axes: {', '.join(AXES)}")


def _need_count(name: str, value: Any) -> None:
    need(_is_whole(value) and value > 0, f"{name}={value!r} is no whole number from 1")


def _is_range(start: Any, stop: Any) -> bool:
    return _is_whole(start) and _is_whole(stop) and 0 <= start < stop


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
