"""Find the binary of a repeated launch without Triton's full specialization.

    launches = LaunchCache(kernel)
    launches.launch(grid, *args, num_warps=4)    # kernel[grid](*args, num_warps=4), for less of the host's time

Triton's own launch specializes on everything about every argument. What can matter follows from a kernel's parameters
and the classes of its arguments, so each combination of these has a function that looks at no more than that. Rare
cases are left to Triton's own launch: the first launch of a binary, hooks, debugging, instrumentation, arguments of
other classes, other vendors' GPUs, and versions of Triton that this was not written for.

The environment's settings of instrumentation count as they were at a binary's first launch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from operator import itemgetter
from types import NoneType
from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from atom.kernels.triton.gpu import load_driver
from atom.kernels.triton.precompile import walking

VALUES = {int, float, bool, str, NoneType}  # classes of which equal values give equal binaries
HAS_PLAIN_LAUNCHER = triton.__version__.startswith("3.6.")  # its launcher in C takes a kernel's arguments unpacked


class Described:
    """An argument that states what a binary depends on."""

    kind: object  # equal for two arguments only if they have one class and Triton compiles the same for both
    made: dict[str, list[Any]]  # the arguments of the launcher in C for it, by Triton's metadata of the binary


class _Path(NamedTuple):
    """A binary and its launcher."""

    binary: Any  # Triton's CompiledKernel
    caches: Any  # Triton's caches that hold it
    used: tuple[tuple[dict[str, Any], str, Any], ...]  # global values that it was compiled with
    call: Callable[..., None]
    head: tuple[Any, ...]  # arguments behind grid and stream
    named: tuple[Any, ...]  # arguments behind the positional ones


class LaunchCache:
    """The launched binaries of a kernel."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._asked: dict[tuple[Any, ...], tuple[Callable[..., Any] | None, dict[Any, _Path]]] = {}  # by classes

    def launch(self, grid: Any, *args: Any, **options: Any) -> Any:
        kernel = self._kernel
        classes = (*map(type, args), *options, *map(type, options.values()))
        known = self._asked.get(classes)
        if known is None:
            known = self._asked[classes] = _find_question(kernel, args, options), {}
        question, paths = known
        if question is None or type(grid) is not tuple or not _is_plain(kernel):
            return kernel.run(*args, grid=grid, warmup=False, **options)

        active = driver.active
        device = active.get_current_device()
        key = (device, question(args), *options.values())
        path = paths.get(key)
        if path is None or path.caches is not kernel.device_caches.get(device) or not _is_unchanged(path.used):
            compiled = kernel.run(*args, grid=grid, warmup=False, **options)
            path = _find_path(kernel, compiled, device, options) if _is_plain(kernel) else None
            if path is not None:
                paths[key] = path
            return compiled

        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        path.call(x, y, z, active.get_current_stream(device), *path.head, *args, *path.named)
        return path.binary


def _is_plain(kernel: Any) -> bool:
    """Whether a launch of this thread is plain: no `Walk`, no hook, no debugging, no instrumentation."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return not (
        walking.get()
        or runtime.debug
        or kernel.debug
        or kernel.pre_run_hooks
        or (enter is not None and getattr(enter, "calls", True))
        or (leave is not None and getattr(leave, "calls", True))
        or runtime.add_stages_inspection_hook
        or knobs.compilation.__dict__.get("instrumentation_mode")
    )


def _is_unchanged(used: tuple[tuple[dict[str, Any], str, Any], ...]) -> bool:
    return all(names.get(name) is value for names, name, value in used) if used else True


def _find_question(kernel: Any, args: Sequence[Any], options: dict[str, Any]) -> Callable[..., Any] | None:
    """Make a key function for arguments of these classes: equal keys and options mean one binary. None: not possible.

    The key has all that Triton's specialization depends on (native_specialize_impl), or more.
    """
    params = {param.name: param for param in kernel.params}
    unnamed = [name for name in params if name not in options]
    is_known = (
        [*params][: len(args)] == unnamed
        and all(param.kind is param.POSITIONAL_OR_KEYWORD for param in kernel.signature.parameters.values())
        and all(type(value) in VALUES for value in options.values())
        and all(params[name].is_constexpr for name in options if name in params)
        and load_driver().get_current_target().backend == "cuda"
    )
    places: list[list[int]] = [[], [], [], [], [], []]
    constants, tensors, aligned, numbers, factors, boxes = places
    for place, (param, arg) in enumerate(zip(kernel.params, args, strict=False)):
        kind = type(arg)
        if param.is_constexpr:
            is_known = is_known and kind in VALUES
            constants.append(place)
        elif kind is Tensor:
            is_any = param.do_not_specialize or param.do_not_specialize_on_alignment
            (tensors if is_any else aligned).append(place)
        elif kind is int:
            (numbers if param.do_not_specialize else factors).append(place)
        elif isinstance(arg, Described):
            boxes.append(place)
        else:
            is_known = is_known and kind in (float, bool, NoneType)
    if not is_known:
        return None
    constants_of, tensors_of, aligned_of, numbers_of, factors_of, boxes_of = map(_finder, places)

    def ask(args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (
            *constants_of(args),
            *[x.dtype for x in tensors_of(args)],
            *[x.dtype if x.data_ptr() % 16 == 0 else (x.dtype,) for x in aligned_of(args)],
            *[-0x80000000 <= x < 0x80000000 or x for x in numbers_of(args)],
            *[(2 if x == 1 else x % 16 == 0) if -0x80000000 <= x < 0x80000000 else x for x in factors_of(args)],
            *[x.kind for x in boxes_of(args)],
        )

    return ask


def _finder(places: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """A function that takes the items at these indices out of a tuple."""
    if len(places) > 1:
        return itemgetter(*places)
    return itemgetter(slice(places[0], places[0] + 1) if places else slice(0))  # a tuple of one, or of none


def _find_path(kernel: Any, compiled: Any, device: int, options: dict[str, Any]) -> _Path | None:
    """The path to a binary that Triton has just launched; None where only Triton can launch it."""
    caches = kernel.device_caches.get(device)
    if compiled is None or hasattr(compiled, "result") or caches is None or caches[2].backend != "cuda":
        return None
    if knobs.compilation.instrumentation_mode:
        return None
    used = tuple((names, name, names.get(name)) for (name, _), (_, names) in kernel.used_global_vals.items())
    named = tuple(options[param.name] for param in kernel.params if param.name in options)
    call, function, nothing = compiled.run, compiled.function, (None, None, None)  # metadata of a launch, and hooks
    has_scratch = getattr(call, "global_scratch_size", 1) or getattr(call, "profile_scratch_size", 1)
    if HAS_PLAIN_LAUNCHER and not has_scratch:
        flags = call.launch_cooperative_grid, call.launch_pdl
        head = (function, *flags, None, None, compiled.packed_metadata, *nothing)
        return _Path(compiled, caches, used, _with_boxes(call.launch, 4 + len(head)), head, named)
    return _Path(compiled, caches, used, call, (function, compiled.packed_metadata, *nothing), named)


def _with_boxes(launch: Callable[..., None], first: int) -> Callable[..., None]:
    """Wrap Triton 3.6's `launch`, whose kernel arguments begin at index `first`: the C arguments of a tensor descriptor
    are made at its first launch, and not at each."""
    around = inspect.getclosurevars(launch).nonlocals if inspect.isfunction(launch) else {}
    if not around.keys() >= {"launcher", "tensordesc_indices", "tensordesc_meta"}:
        return launch
    from triton.backends.nvidia.driver import make_tensordesc_arg

    places = sorted(around["tensordesc_indices"])
    metas = [(place + first, meta, str(meta)) for place, meta in zip(places, around["tensordesc_meta"], strict=True)]
    launcher, metas = around["launcher"], metas[::-1]  # from the last on: each expands to several arguments

    def call(*args: Any) -> None:
        given = [*args]
        for place, meta, text in metas:
            made = given[place].made
            if text not in made:
                made[text] = make_tensordesc_arg(given[place], meta)
            given[place : place + 1] = made[text]
        launcher(*given)

    return call
