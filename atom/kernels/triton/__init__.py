"""The backend `triton`: kernels for GPUs of all vendors.

Nothing here imports triton before a kernel is loaded.

for kernel in BACKEND.kernels:
    reason = kernel.accepts(find_target("cuda"), *types)     # None: yes
    run = kernel.load(LoadContext())                         # a callable with the op's signature
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch

from atom.cache import Cache
from atom.errors import UnsupportedError
from atom.graph import ops
from atom.graph.ops import Op
from atom.graph.types import Type
from atom.kernels.backend import Accepts, Backend, Kernel, LoadContext, Target, Tuner, accepts_all, on_device
from atom.kernels.step import import_step_kernels

MAX_HEAD_DIM = 256
MAX_RANK, MAX_ROTATED = 512, 64  # of latent entries


def find_features() -> frozenset[str]:
    """The vendor and the architecture of the GPU that this process sees first. UnsupportedError without one."""
    if not torch.cuda.is_available():
        raise UnsupportedError(
            "device=cuda: torch finds no GPU here; take device=cpu, or job=explain job.gpu= to ask about one"
        )
    properties = torch.cuda.get_device_properties(0)
    if torch.version.hip is not None:
        return frozenset({"amd", properties.gcnArchName.partition(":")[0], properties.name})
    return frozenset({"nvidia", f"sm_{properties.major}{properties.minor}", properties.name})


def find_versions() -> dict[str, str]:
    import triton

    return {"torch": torch.__version__, "triton": triton.__version__}


@contextmanager
def keep_binaries(cache: Cache) -> Iterator[None]:
    """Keep binaries in a cache folder. `cache.warnings` says what was ignored there, after this context stderr."""
    own = Cache(cache.folder)  # it must stay open while Triton compiles
    own.warnings = cache.warnings
    binaries = _module("binary_cache").keep_in(own)
    try:
        yield
    finally:
        binaries.print_warnings()


def compile_launches(pool: Executor) -> AbstractContextManager[None]:
    launches: AbstractContextManager[None] = _module("precompile").compile_launches(pool)
    return launches


def find_tuner(device: torch.device) -> Tuner:
    tuner: Tuner = _module("linear.tune").LinearTuner(device)
    return tuner


def _module(name: str) -> Any:
    """A module of this backend, imported when it is needed, since it imports triton."""
    return importlib.import_module(f"{__name__}.{name}")


def accepts_attention(_target: Target, q: Type, *_types: Any, **_attributes: Any) -> str | None:
    dim = int(q.shape[-1])
    return f"heads have {dim} dims, more than {MAX_HEAD_DIM}" if dim > MAX_HEAD_DIM else None


def accepts_linear(_target: Target, x: Type, *_types: Any, kind: str | None = None, **_attributes: Any) -> str | None:
    if kind == "swigluoai":
        return "has no swigluoai gate"
    return "takes rows in two dims" if len(x.shape) != 2 else None


def accepts_latent(_target: Target, _q_nope: Type, q_rope: Type, kv_b: Type, *_types: Any,
                   **_attributes: Any) -> str | None:  # fmt: skip
    rank, rotated = int(kv_b.shape[1]), int(q_rope.shape[2])
    if rank <= MAX_RANK and rotated <= MAX_ROTATED:
        return None
    return f"entries have {rank} + {rotated} dims, more than {MAX_RANK} + {MAX_ROTATED}"


def _kernel(op: Op, module: str, name: str = "", accepts: Accepts = accepts_all) -> Kernel:
    """The kernel of an op in a module below: a function, a program's object of a class, or a method of it."""

    def load(context: LoadContext) -> Callable[..., Any]:
        owner, _, method = (name or op.name).partition(".")
        found = getattr(_module(module), owner)
        shared = context.share(found) if isinstance(found, type) else found
        return getattr(shared, method) if method else shared  # type: ignore[no-any-return]

    return Kernel(op, "triton", on_device("cuda", accepts), load)


KERNELS: tuple[Kernel, ...] = (
    _kernel(ops.linear, "linear.linear", "Products.linear", accepts_linear),
    _kernel(ops.gated_linear, "linear.linear", "Products.gated_linear", accepts_linear),
    _kernel(ops.norm_linear, "linear.linear", "Products.norm_linear", accepts_linear),
    _kernel(ops.add_norm_linear, "linear.linear", "Products.add_norm_linear", accepts_linear),
    _kernel(ops.norm_rope_write, "attention.rope", accepts=accepts_attention),
    _kernel(ops.paged_attention, "attention.paged", "PagedAttention", accepts_attention),
    _kernel(ops.norm_rope_attention, "attention.paged", "NormRopeAttention", accepts_attention),
    _kernel(ops.norm_rope_write_latent, "attention.latent"),
    _kernel(ops.paged_mla_attention, "attention.latent", accepts=accepts_latent),
    _kernel(ops.router, "moe"),
    _kernel(ops.group, "moe"),
    _kernel(ops.grouped_linear, "moe"),
    _kernel(ops.combine, "moe"),
)

BACKEND = Backend(
    "triton",
    KERNELS,
    find_features=find_features,
    find_versions=find_versions,
    keep_binaries=keep_binaries,
    compile_launches=compile_launches,
    step_kernels=partial(import_step_kernels, __name__),
    find_tuner=find_tuner,
)
