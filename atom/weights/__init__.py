"""Load weights: evaluate every recipe of a graph to a tensor.

Only here are weights read, joined and made.

    check(graph, checkpoint.tensors, ignore=config.model.ignore)      # CheckpointError: missing, unused, wrong shape
    weights = load(graph.recipes(), checkpoint, progress)             # {recipe: tensor}; equal recipes are one tensor
    weights = load(graph.recipes(), checkpoint, progress, "cuda")     # the same on a GPU, num_bytes(graph) in all
    weights = load(…, coordinates=mesh.coordinates(1))                # the second rank's

Tensors are streamed: a source (`sources.py`) reads the bytes that a recipe needs, converts them to the dtype that the
graph computes in, and copies them to their target. Every device takes this one way, and random weights do too.
"""

from __future__ import annotations

import ctypes
import math
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor

from atom.cache import Cache
from atom.checkpoint import SILENT, Checkpoint, JoinedCheckpoint, Progress, StoredTensor
from atom.config import ModelConfig
from atom.dtypes import FLOAT_DTYPES
from atom.errors import CheckpointError, UnsupportedError, naming_a_lack_of_memory
from atom.graph import (
    TORCH_DTYPES,
    Cat,
    Dequantize,
    Full,
    Graph,
    LaidOut,
    Offset,
    PackedWeight,
    Quantize,
    Recipe,
    Regroup,
    RopeFreqs,
    Shuffle,
    Slice,
    Type,
    W,
)  # fmt: skip
from atom.graph.formats import block_of, parse_format
from atom.graph.parts import has_parts, parts_of, stored_tensors
from atom.graph.recipe_contents import held_bytes, lora_stack_of, packed_to, packed_while_loading, shuffled_alone
from atom.graph.recipes import Measured, leaves
from atom.kernels import shuffle
from atom.weights.calibration import PREFIX, Calibration
from atom.weights.evaluate import Loaded, Place, split_recipe
from atom.weights.localize import localize
from atom.weights.packed_store import PackedStore
from atom.weights.quantize import quantize
from atom.weights.rope import rope_freqs
from atom.weights.sources import MappedSource, RandomSource, WeightSource
from atom.weights.stream import StreamedSource

M_MMAP_THRESHOLD = -3  # of mallopt(3)
LARGE = 256 << 20  # bytes of a plain tensor whose memory is given back once it is packed, so that no weight stays there


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
        shape, dtype, blocks = stored[name].shape, stored[name].dtype, stored[name].blocks
        if type.dtype == "u8" and blocks is not None:
            shape, dtype = blocks, "u8"
        if not _is_same_shape(shape, type):
            raise CheckpointError(f"tensor {name} is {list(shape)}, the model expects {list(type.shape)}")
        if dtype != type.dtype and not {dtype, type.dtype} <= set(FLOAT_DTYPES):
            raise CheckpointError(f"tensor {name} is {dtype}, the model expects {type.dtype}; is its scale missing?")
    return needed


def check_surplus(needed: Collection[str], stored: Iterable[str], ignore: Iterable[str] = ()) -> None:
    """Check that every stored tensor is needed, or may be left out."""
    patterns = tuple(ignore)
    surplus = [
        name for name in stored if name not in needed and not any(fnmatch(name, pattern) for pattern in patterns)
    ]
    if surplus:
        raise CheckpointError(
            f"the model does not use tensor {_some(surplus)}; name it in model.ignore if it may be left out"
        )


def check_order(graph: Graph, checkpoint: Checkpoint) -> None:
    """Check that the columns of a group are neighbours in a GPTQ file too, where the format of a weight says so."""
    in_turn: dict[Type, bytes] = {}  # the groups of all columns
    for leaf in dict.fromkeys(leaf for recipe in graph.recipes() for leaf in leaves(recipe) if leaf.type.fmt):
        index, fmt, type = f"{leaf.name.removesuffix('.weight')}.g_idx", str(leaf.type.fmt), leaf.type
        if index not in checkpoint.tensors or parse_format(fmt).has_order:
            continue
        if type not in in_turn:
            groups = torch.arange(int(type.shape[-1]), dtype=torch.int32) // block_of(type)[-1]
            in_turn[type] = groups.numpy().tobytes()
        if bytes(checkpoint.read(index)) != in_turn[type]:
            raise CheckpointError(
                f"tensor {index} has columns of a group apart, which desc_act=false in quantization_config denies: "
                f"set it to true in its config.json, or model.fmt='{fmt.replace('[', '_ordered[')}'"
            )


def _is_same_shape(stored: Sequence[int], type: Type) -> bool:
    """Whether a tensor has a type's shape, but for dims of 1: a scale may be stored as [], [1] or [1, 1].

    Blocks of bytes may be stored one behind the other, as rows.
    """
    dims = [int(dim) for dim in type.shape]
    shapes = [dims, [*dims[:-2], math.prod(dims[-2:])]] if type.dtype == "u8" else [dims]
    return [dim for dim in stored if dim != 1] in [[dim for dim in shape if dim != 1] for shape in shapes]


def check_counts(model: ModelConfig, stored: Mapping[str, StoredTensor]) -> None:
    """Check a model's numbers of layers and experts against the names in a checkpoint's header, before a text of that
    many is written."""
    names = [name for name in model.weights.values() if "{layer}" in name or "{expert}" in name]
    experts = max((mlp.experts or 0 for mlp in model.mlp if mlp.kind == "moe"), default=0)
    for placeholder, num_stated in (("layer", model.layers), ("expert", experts)):
        numbers = _find_numbers(stored, names, placeholder)
        if numbers is not None and len(numbers) < num_stated:
            counted = f"{len(numbers)} {placeholder}s, its configuration says {num_stated}"
            raise CheckpointError(f"the checkpoint has {counted}; is it whole, and is model= the right one?")


def _find_numbers(stored: Iterable[str], names: Iterable[str], placeholder: str) -> set[str] | None:
    """The numbers that stored names have for a placeholder; None where no name has it."""
    marked = (re.escape(name).partition(re.escape(f"{{{placeholder}}}")) for name in names)
    fronts = {front.replace(re.escape("{layer}"), "[0-9]+") for front, mark, _ in marked if mark}
    if not fronts:
        return None
    find = re.compile(f"(?:{'|'.join(sorted(fronts))})([0-9]+)").match
    return {match[1] for name in stored if (match := find(name))}


def refuse_packed(graph: Graph) -> None:
    """Raise UnsupportedError where a graph would compute with a weight in its packed format."""
    for recipe in graph.recipes():
        if recipe.type.fmt is not None and not has_parts(recipe):
            leaf = next(leaves(recipe))
            stored = f"{leaf.name} is stored as {leaf.type.fmt}"
            raise UnsupportedError(f"{stored}: a format without parts cannot be run, job=explain counts its bytes")


def num_bytes(graph: Graph) -> int:
    """Bytes of the tensors of all recipes of a graph."""
    return sum(map(held_bytes, graph.recipes()))


def load(
    recipes: Iterable[Recipe],
    checkpoint: Checkpoint,
    progress: Progress,
    device: str = "cpu",
    cache: Cache | None = None,
    coordinates: Mapping[str, int] | None = None,
    place: Place | None = None,
    sources: str = "",
    calibration: Calibration | None = None,
) -> dict[Recipe, Loaded]:
    """Load every recipe's tensor to the device. CapacityError where they do not fit.

    cache: keeps what is packed or laid out while it loads, for the next time
    sources: a digest of the code that does so, with which it is kept
    coordinates: of the rank whose parts are loaded; None: there is one rank
    place: takes each weight to where it is to be; None: it stays where it was made
    calibration: rounds weights by what they are multiplied with; None: to the nearest
    """

    def load_plain(recipe: Recipe) -> Any:
        return load([recipe], checkpoint, SILENT, device)[recipe]

    own = {recipe: recipe if coordinates is None else localize(recipe, coordinates) for recipe in recipes}
    ordered = sorted({*own.values()}, key=lambda recipe: -recipe.type.num_bytes)  # so the readers end together
    key = None if calibration is None else calibration.key

    def is_rounded(recipe: Recipe) -> bool:
        return calibration is not None and calibration.find(recipe) is not None

    with (
        nullcontext() if cache is None else PackedStore(ordered, checkpoint, cache, device, sources, key, is_rounded)
    ) as store:
        opened = checkpoint if store is None else store.checkpoint
        rounded = None if calibration is None or _is_all_kept(ordered, store, calibration) else calibration
        if rounded is not None:
            opened = JoinedCheckpoint(opened, rounded.open(load_plain, device, progress), PREFIX)

        def num_bytes_to_read(recipe: Recipe) -> int:
            """Of a recipe's tensor, in the dtypes that it is filled in: plain where it is packed now."""
            is_kept = store is not None and store.is_kept
            is_made = not is_kept and not all(map(is_rounded, packed_while_loading(recipe)))
            return recipe.type.plain.num_bytes if is_made else recipe.type.num_bytes

        with (
            returned_memory(),
            progress.task("loading weights", sum(map(num_bytes_to_read, ordered))) as task,
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", message="The given buffer is not writable")  # it is only read
            source = (
                MappedSource(opened, task.advance)
                if device == "cpu"
                else StreamedSource(opened, torch.device(device), task.advance)
            )
            source.packed, source.calibration = store, rounded
            made = make_all(ordered, source, device, place)
    return {recipe: made[local] for recipe, local in own.items()}


def _is_all_kept(recipes: Iterable[Recipe], store: PackedStore | None, calibration: Calibration) -> bool:
    """Whether all that a calibration rounds is kept in layouts from an earlier start."""
    rounded = (recipe for recipe in recipes if not calibration.formats.isdisjoint(packed_to(recipe)))
    return all(store is not None and store.has_laid_out(recipe) for recipe in rounded)


@contextmanager
def returned_memory() -> Iterator[None]:
    """Within this context glibc takes memory of 128 KiB and more from the system and gives it back when it is freed;
    between tensors that stay, it would keep what readers unpacked with."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt") or not hasattr(libc, "malloc_trim"):
        yield
        return
    libc.mallopt(M_MMAP_THRESHOLD, 128 << 10)
    try:
        yield
    finally:
        libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)  # the most that glibc's own rule comes to
        libc.malloc_trim(0)


def load_dummy(
    recipes: Iterable[Recipe],
    seed: int,
    device: str = "cpu",
    coordinates: Mapping[str, int] | None = None,
    place: Place | None = None,
) -> dict[Recipe, Loaded]:
    """Make random weights as `RandomSource` does, on the device, in place of stored ones; all ranks have the same.

    place: as in `load`
    """
    own = {
        recipe: localize(recipe, coordinates) if coordinates and isinstance(recipe, Offset) else recipe
        for recipe in recipes
    }
    made = make_all([*own.values()], RandomSource(seed, device), device, place)
    return {recipe: made[local] for recipe, local in own.items()}


def make_all(
    recipes: Sequence[Recipe], source: WeightSource, device: str, place: Place | None = None
) -> dict[Recipe, Loaded]:
    """Make the tensors of recipes from a source. CapacityError where they do not fit. place: as in `load`"""

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
    """Raise a CapacityError with the sizes where the device runs out of memory."""
    has = "the system has less"
    if device != "cpu":
        free, total = torch.cuda.mem_get_info(device)
        has = f"device={device} had {free} free of {total}"
    size = sum(map(held_bytes, recipes))
    with naming_a_lack_of_memory(
        f"the weights take {size} bytes, {has}: end what else uses it, or set checkpoint= to a smaller model"
    ):
        yield


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"


@torch.inference_mode()
def _make(recipe: Recipe, source: WeightSource, device: str) -> Loaded:
    """Make a recipe's tensor; the source fills it, maybe after the return."""
    if isinstance(recipe, RopeFreqs):
        return rope_freqs(recipe).to(device)
    if isinstance(recipe, Measured):
        return torch.ones(1, device=device)
    if isinstance(recipe, Shuffle):
        return _shuffled(recipe, source, device)
    if recipe.type.fmt is not None:
        return _packed(recipe, source, device)
    return _fill(recipe, _empty(recipe.type, device), source)


def _packed(recipe: Recipe, source: WeightSource, device: str) -> PackedWeight:
    """Make a packed weight: of its stored parts, or of the plain tensor, which is in memory meanwhile."""
    if isinstance(recipe, Cat | Regroup | Slice) and any(packed_while_loading(recipe)) and not source.is_random:
        parts_of_it = recipe.parts if isinstance(recipe, Cat) else (recipe.part,)
        joined = [_packed(part, source, device) for part in parts_of_it]
        source.flush()
        return _joined(recipe, joined)
    parts = source.find(recipe)
    if source.is_random or (isinstance(recipe, Quantize) and parts is None):
        plain = recipe.part if isinstance(recipe, Quantize) else W("", recipe.type.plain)
        tensor = _fill(plain, _empty(plain.type, device), source)
        source.flush()
        made = PackedWeight(recipe.type, quantize(str(recipe.type.fmt), tensor))
        if source.packed and isinstance(recipe, Quantize):
            source.packed.write(recipe, made.parts)
        if tensor.is_cuda and tensor.nbytes >= LARGE:
            del tensor
            torch.cuda.empty_cache()
        return made
    parts = parts or parts_of(recipe)
    filled = {name: _fill(part, _empty(part.type, device), source) for name, part in parts.items()}
    return PackedWeight(recipe.type, filled)


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
    part, parts = recipe.part, shuffled_alone(recipe)
    is_whole = len(part.type.shape) == 2 or parts[0] is part
    made: list[Tensor | LaidOut | PackedWeight] = []
    if part.type.fmt is not None:
        for each in parts:
            made.append(_laid_out(Shuffle(each, recipe.layout), source, device))
        return made[0] if is_whole else made
    plain = _empty(parts[0].type, device)  # one buffer for all, to avoid fragmentation
    for each in parts:
        _fill(each, plain, source)
        source.flush()
        made.append(shuffle(plain.view(plain.shape[-2:]), recipe.layout))
    return made[0] if is_whole else made


def _laid_out(recipe: Shuffle, source: WeightSource, device: str) -> Tensor | LaidOut | PackedWeight:
    """Make a packed weight in a kernel's layout, or map it where an earlier start has kept it."""
    if source.packed and (mapped := source.packed.map(recipe)) is not None:
        return mapped
    packed = _packed(recipe.part, source, device)
    source.flush()
    made = shuffle(packed, recipe.layout)
    if source.packed and isinstance(made, LaidOut):
        source.packed.write(recipe, {"": made.tensor})
    return made


def _fill(recipe: Recipe, tensor: Tensor, source: WeightSource) -> Tensor:
    for part, target in split_recipe(recipe, tensor):
        if (rounded := _rounded(part, source, str(target.device))) is not None:
            target.copy_(rounded)
        elif isinstance(part, Full):
            target.fill_(part.value)
        elif lora_stack_of(part) is not None:
            target.zero_()
        else:
            source.fill(part, target)
    return tensor


def _rounded(recipe: Recipe, source: WeightSource, device: str) -> Tensor | None:
    """A plain tensor, or a range of one, that is packed and unpacked again; None where a recipe is none."""
    if isinstance(recipe, Dequantize) and any(packed_while_loading(recipe.part)):
        packed = _packed(recipe.part, source, device)
        source.flush()
        return packed.unpack()
    if isinstance(recipe, Slice) and (whole := _rounded(recipe.part, source, device)) is not None:
        return whole[(slice(None),) * recipe.dim + (slice(recipe.start, recipe.stop, recipe.step),)]
    return None


def _empty(type: Type, device: str) -> Tensor:
    return torch.empty([int(dim) for dim in type.shape], dtype=TORCH_DTYPES[type.dtype], device=device)
