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
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from atom.cache import Cache
from atom.checkpoint import SILENT, Checkpoint, JoinedCheckpoint, Progress
from atom.graph import Graph, Offset, Recipe
from atom.graph.recipe_contents import device_bytes, packed_to, packed_while_loading
from atom.weights.calibration import PREFIX, Calibration
from atom.weights.checks import check, check_counts, check_order, refuse_packed
from atom.weights.evaluate import Loaded, Place
from atom.weights.localize import localize
from atom.weights.make import make_all
from atom.weights.packed_store import PackedStore
from atom.weights.sources import MappedSource, RandomSource
from atom.weights.stream import StreamedSource

__all__ = ["check", "check_counts", "check_order", "load", "load_dummy", "num_bytes", "refuse_packed"]

M_MMAP_THRESHOLD = -3  # of mallopt(3)


def num_bytes(graph: Graph) -> int:
    """Bytes of the tensors of all recipes of a graph, in the device's memory."""
    return sum(map(device_bytes, graph.recipes()))


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
    """Load every recipe's tensor to the device. CapacityError if they do not fit.

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
            """Of a recipe's tensor, in the dtypes that it is filled in: plain if it is packed now."""
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
        libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)  # the maximum that glibc's own rule comes to
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
