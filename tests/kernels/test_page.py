"""docs/kernels.md says which kernels each op has, in the order of the registry."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
from generated import check_block

from atom.graph import ops
from atom.graph.gguf_blocks import TYPES
from atom.kernels import backends_of, candidates, find_backend
from atom.kernels.backend import Backend, Kernel, LoadContext, OnDevice
from atom.kernels.gloo import GlooCommunicator
from atom.kernels.nccl import NcclCommunicator
from atom.kernels.registry import INVARIANT_ORDER, MODULES, ORDER

COMMUNICATORS = {"nccl": NcclCommunicator, "gloo": GlooCommunicator}
SUMS = {"fixed_triton": "nccl", "fixed_cpp": "gloo"}  # of ranks: by whose communicator
DEVICES = {"cuda": "GPU", "cpu": "CPU"}
SHARED = ("generated", "inductor", "reference")  # backends that have the ops' bodies
FIXED = {device: [name for name in INVARIANT_ORDER[device] if name.startswith("fixed")] for device in DEVICES}
LEVELS = ("reference bodies", "kernels", "compiled pieces", "CUDA graphs")


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("attention", "recurrent", "fixed"):
        monkeypatch.setattr(f"atom.kernels.cpp.{module}.load_library", lambda _: True)


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |\n"


def table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return "".join([row(*header), "|---" * len(header) + "|\n", *(row(*each) for each in rows)])


def place_of(run: Callable[..., Any]) -> tuple[str, str]:
    """The file below atom/kernels and the function, method or class that a loaded kernel is."""
    if isinstance(run, partial):
        return place_of(run.func)
    if inspect.ismethod(run):
        file, owner = place_of(run.__self__)
        return file, f"{owner}.{run.__name__}"
    named = run if inspect.isfunction(run) else type(run)
    path = Path(str(inspect.getsourcefile(named))).as_posix()
    return path.partition("/atom/kernels/")[2] or path.partition("/atom/")[2], named.__name__


def load(kernel: Kernel) -> Callable[..., Any]:
    communicator = COMMUNICATORS.get(SUMS.get(kernel.backend, kernel.backend))
    return kernel.load(LoadContext(communicator and communicator.__new__(communicator)))


def words(kernel: Kernel) -> str:
    """What a kernel accepts, by its function's docstring and the formats that it takes."""
    accepts = kernel.accepts
    assert isinstance(accepts, OnDevice), kernel
    first = (accepts.accepts.__doc__ or "").partition("\n")[0]
    assert first and first[0].islower() and not first.endswith("."), f"{kernel.backend}.{kernel.op.name}: {first!r}"
    of_gguf = ["GGUF's"] if {*TYPES} <= {*accepts.packed} else [each for each in accepts.packed if each in TYPES]
    kinds = [each for each in accepts.packed if each not in TYPES] + of_gguf
    parts = [first, f"packed: {', '.join(kinds)}" if kinds else "", f"activations: {', '.join(accepts.acts)}"]
    return "; ".join(parts[: 2 + bool(accepts.acts)]).rstrip("; ")


def all_of(device: str) -> list[Backend]:
    """The backends of a device, then those that only batch_invariant=true takes."""
    return [*backends_of(device), *map(find_backend, FIXED[device])]


def rows_of(device: str) -> Iterator[tuple[str, ...]]:
    for op in sorted(ops.OPS.values(), key=lambda op: op.name):
        for kernel in candidates(op, [each for each in all_of(device) if each.name not in SHARED]):
            file, function = place_of(load(kernel))
            has = "yes" if kernel.batch_invariant else ""
            yield f"`{op.name}`", kernel.backend, f"`{file}: {function}`", words(kernel), has


def describe(backend: Backend) -> tuple[str, ...]:
    """A backend with the first line of its module, and the feature of GPUs that it is for."""
    module = importlib.import_module(f"atom.kernels.{MODULES.get(backend.name, backend.name)}")
    first = str(module.__doc__).partition("\n")[0].partition(": ")[2].rstrip(".")
    assert first, f"{backend.name}: its module begins with: The backend `{backend.name}`: …"
    return f"`{backend.name}`", f"`{backend.vendor}`" if backend.vendor else "", first


def test_the_page_has_the_order_of_backends(request: pytest.FixtureRequest):
    rows = [
        (
            DEVICES[device],
            "any, `batch_invariant=true`" if level == "any" else f"{level}: {LEVELS[level]}",
            ", ".join(f"`{name}`" for name in names),
        )
        for device in DEVICES
        for level, names in [*enumerate(ORDER[device]), ("any", INVARIANT_ORDER[device])]
    ]
    check_block("kernels.md", "order", table(("device", "level", "backends, the first asked first"), rows), request)


def test_the_page_has_the_backends(request: pytest.FixtureRequest):
    found = {backend.name: backend for device in DEVICES for backend in all_of(device)}
    expected = table(("backend", "GPUs with the feature", "what it is"), map(describe, found.values()))
    check_block("kernels.md", "backends", expected, request)


@pytest.mark.parametrize("device", DEVICES)
def test_the_page_has_each_kernel_with_its_file_and_what_it_accepts(device: str, request: pytest.FixtureRequest):
    expected = table(
        ("op", "backend", "file of atom/kernels: what runs", "accepts", "batch-invariant"), rows_of(device)
    )
    check_block("kernels.md", f"kernels of a {DEVICES[device]}", expected, request)


def test_the_page_has_the_ops_that_pieces_compile(request: pytest.FixtureRequest):
    for name in ("generated", "inductor"):
        names = sorted(kernel.op.name for kernel in find_backend(name).kernels)
        check_block("kernels.md", f"ops of {name}", ", ".join(f"`{each}`" for each in names) + "\n", request)


def test_every_kernel_is_of_a_file_that_is_there():
    root = Path(__file__).parents[2] / "atom"
    for device in DEVICES:
        for _, _, place, *_ in rows_of(device):
            file = re.sub(r"^`|: .*$", "", place)
            assert (root / "kernels" / file).is_file() or (root / file).is_file(), place
