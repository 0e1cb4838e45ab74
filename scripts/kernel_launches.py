"""Record the launches of our kernels, for GPUs that are not here.

launches = record_launches("sm_90", folder)   # of the models of tests/configs, and calls that they do not make
kernels = find_kernels()                      # all that are launched anywhere in atom/kernels
launches = pick_launches(launches)            # fewer, which still have each value of each constexpr

Models run on a CPU with weights that are one stretch of untouched memory; nothing is computed, and kernels record how
they are launched. `use_gpu` must run before any other module of `atom.kernels.triton` is imported.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import dataclasses
import functools
import importlib
import inspect
import itertools
import json
import math
import mmap
import multiprocessing
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map
from triton import knobs
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from atom.kernels.triton import gpu as gpu_module
from atom.kernels.triton.gpu import Gpu

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "tests" / "configs"
GPUS = {  # by architecture: multiprocessors, and bytes of shared memory that a program may have
    "sm_80": Gpu(108, 163 << 10, (8, 0), "NVIDIA A100"),
    "sm_89": Gpu(58, 99 << 10, (8, 9), "NVIDIA L4"),
    "sm_90": Gpu(132, 227 << 10, (9, 0), "NVIDIA H200"),
    "sm_100": Gpu(148, 227 << 10, (10, 0), "NVIDIA B200"),
    "sm_120": Gpu(170, 99 << 10, (12, 0), "NVIDIA GeForce RTX 5090"),
}
MEMORY = 1 << 40  # bytes of addresses, of which hardly any are touched
NORESERVE = 0x4000  # of mmap on Linux; in Python's module from 3.13 on
STORED_BY_WGMMA = ("fp8[1, *]", "fp8[128, 128]", "int4[1, 128]", "mxfp4")  # in the layout wgmma
STORED = ("awq_int4[1, 128]", "int4[1, 32]", "int8[1, 128]", "ct_nvfp4", "q4_1")  # formats that checkpoints have, too
K_QUANTS = {"q4_k": 144, "q5_k": 176, "q6_k": 210}  # bytes of a block of 256 columns
ROWS = (1, 2, 3, 5, 9, 17, 33, 65, 129, 256, 1100)  # of matmuls: one for each power of 2, and many
WALKED = ("qwen3_8b", "qwen3_30b_a3b")  # which run in each format, and with all else that is optional
ALIKE = (
    "deepseek_v3",
    "glm_4_5_air",
    "glm_5_3_flash",
    "gpt_oss_120b",
    "kimi_k2",
    "qwen3_32b",
    "qwen3_vl_8b",
)  # others' launches, in other sizes
MAX_TOKENS = 3000  # of a step
TILES = re.compile("BLOCK_|(BOXES|STAGES|SPLITS|GROUPS|PARTS|PREFETCH)$")  # constexprs that are chosen together
MATMULS = ("_scaled_mm", "_scaled_mm_v2", "_int_mm")  # of the vendor's library, which a CPU has not or not so
EMPTY = ("aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided")


@dataclasses.dataclass(frozen=True)
class Pointer:
    """Stands for a tensor among a launch's arguments."""

    dtype: torch.dtype
    address: int  # modulo 16

    def data_ptr(self) -> int:
        return self.address


@dataclasses.dataclass(frozen=True)
class Launch:
    """A kernel and its arguments, which other processes can be sent."""

    module: str
    name: str
    path: str | None  # of a piece, which cannot be imported by name
    args: dict[str, Any]
    options: dict[str, Any]

    @property
    def kernel(self) -> str:
        return f"{self.module}.{self.name}"

    def find(self) -> Any:
        if self.path is None:
            return getattr(importlib.import_module(self.module), self.name)
        return getattr(load_piece(self.path), self.name)

    def __str__(self) -> str:
        values = [f"{name}={_name(value)}" for name, value in (self.args | self.options).items()]
        return f"{self.name}({', '.join(values)})"


@functools.cache
def load_piece(path: str) -> Any:
    from atom.kernels.triton.compile.piece_compiler import load_module

    return load_module(Path(path))


def _name(value: Any) -> str:
    if isinstance(value, Pointer):
        return str(value.dtype).removeprefix("torch.") + ("*" if value.address == 0 else "* at an odd address")
    return f"tiles of {value.block_shape}" if hasattr(value, "block_shape") else repr(value)


class Driver:
    """Triton's driver of a GPU that is not here."""

    def __init__(self, arch: str) -> None:
        self._target = target_of(arch)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


def target_of(arch: str) -> GPUTarget:
    return GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)


def use_gpu(arch: str) -> None:
    """Have Triton and our kernels see this GPU."""
    driver.set_active(Driver(arch))
    gpu_module.find_gpu = lambda device: GPUS[arch]


class Recorder:
    """Takes the place of a `precompile.Walk`: records launches, each once."""

    def __init__(self) -> None:
        self.launches: dict[Any, Launch] = {}

    def add(self, kernel: Any, args: Sequence[Any], options: dict[str, Any], _find: Callable[[], Any]) -> None:
        given = dict(zip(kernel.arg_names, args, strict=False))
        given |= {name: value for name, value in options.items() if name in kernel.arg_names}
        given |= {p.name: p.default for p in kernel.params if p.name not in given}
        given = {name: _freeze(given[name]) for name in kernel.arg_names}
        rest = {name: value for name, value in options.items() if name not in kernel.arg_names}
        # pieces of equal text have paths of their own
        key = kernel.cache_key, *(_key(p, given[p.name]) for p in kernel.params), *sorted(rest.items())
        if key not in self.launches:
            path = None if kernel.__module__ in sys.modules else kernel.__globals__["__file__"]
            self.launches[key] = Launch(kernel.__module__, kernel.__name__, path, given, rest)


def _freeze(value: Any) -> Any:
    return Pointer(value.dtype, value.data_ptr() % 16) if isinstance(value, Tensor) else value


def _key(param: Any, value: Any) -> Any:
    """What a binary depends on, of an argument."""
    if param.is_constexpr:
        return value if isinstance(value, int | float | str | None) else repr(value)
    if isinstance(value, bool | float | None):
        return type(value)
    if isinstance(value, int):
        return value == 1, value % 16 == 0, abs(value) < 1 << 31
    return (value.base.dtype, *value.block_shape, repr(value.layout)) if hasattr(value, "block_shape") else value


class NoMath(TorchDispatchMode):
    """Operations on floating point give what was in memory, in the right shape; others are computed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.name.partition("::")[2] in MATMULS:
            dtype = torch.int32 if args[0].dtype == torch.int8 else torch.bfloat16
            return torch.empty(len(args[0]), args[1].shape[1], dtype=dtype)
        results = [each.alias_info for each in func._schema.returns]
        has_floats = any(each.is_floating_point() for each in _tensors((*args, *kwargs.values())))
        if func._schema.name in EMPTY:
            return _from_meta(func(*args, **kwargs))
        if not has_floats or any(each is not None and not each.is_write for each in results):
            return func(*args, **kwargs)
        if any(each is not None for each in results):
            return kwargs.get("out", args[0])
        on_meta = {name: "meta" if name == "device" else _to_meta(value) for name, value in kwargs.items()}
        return tree_map(_from_meta, func(*tree_map(_to_meta, args), **on_meta))


def _tensors(args: Iterable[Any]) -> Iterator[Tensor]:
    """An operation's: its arguments, and those in lists."""
    for each in args:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, list | tuple):
            yield from (one for one in each if isinstance(one, Tensor))


def _to_meta(x: Any) -> Any:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x


def _from_meta(x: Any) -> Any:
    """Memory for a result; integers are ones, which are valid as tokens, slots, blocks and experts; bytes are unset."""
    if not isinstance(x, Tensor):
        return x
    if x.device.type != "meta":
        return x if x.is_floating_point() or x.dtype == torch.uint8 else x.fill_(1)
    return (torch.empty if x.is_floating_point() else torch.ones)(x.shape, dtype=x.dtype)


@functools.cache
def _memory() -> Tensor:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
    return torch.frombuffer(mmap.mmap(-1, MEMORY, flags=flags), dtype=torch.uint8)


def make(dtype: torch.dtype, shape: Iterable[Any]) -> Tensor:
    """A tensor of unset values, which takes no memory unless it is written."""
    return _make(dtype, tuple(int(dim) for dim in shape))


@functools.cache
def _make(dtype: torch.dtype, sizes: tuple[int, ...]) -> Tensor:
    with _disable_current_modes():
        return _memory()[: math.prod(sizes) * dtype.itemsize].view(dtype).view(sizes)


def make_weight(type: Any, layout: str | None) -> Any:
    """A weight of this type in a kernel's layout."""
    from atom.graph import TORCH_DTYPES

    if type.fmt is None:
        return make(TORCH_DTYPES[type.dtype], type.shape)
    weight = _make_on_meta(dataclasses.replace(type, shape=(*(1 for _ in type.shape[:-2]), *type.shape[-2:])), layout)
    # layouts are of one expert, since those of many take time
    shapes = {name: (*type.shape[:-2], *part.shape[len(type.shape) - 2 :]) for name, part in weight.parts.items()}
    parts = {name: make(part.dtype, shapes[name]) for name, part in weight.parts.items()}
    return dataclasses.replace(weight, type=type, parts=parts)


@functools.cache
def _make_on_meta(type: Any, layout: str | None) -> Any:
    from atom.graph import TORCH_DTYPES, PackedWeight
    from atom.kernels import shuffle
    from atom.weights.quantize import part_types

    if type.fmt in K_QUANTS:
        rows, columns = map(int, type.shape)
        shapes = {"values": ("u8", (rows, columns // 256, K_QUANTS[type.fmt]))}
    else:
        shapes = {name: (part.dtype, part.shape) for name, part in part_types(type).items()}
    with _disable_current_modes():
        parts = {
            name: torch.empty([int(dim) for dim in shape], dtype=TORCH_DTYPES[dtype], device="meta")
            for name, (dtype, shape) in shapes.items()
        }
        weight = PackedWeight(type, parts)
        return weight if layout is None else shuffle(weight, layout)


def record_launches(arch: str, folder: Path, is_thorough: bool = False) -> list[Launch]:
    """The launches of models and calls, recorded in processes.

    folder: for the code of pieces, which stays there. is_thorough: of all models, not only one of those that are alike
    """
    from atom.kernels.hopper import shuffle  # before processes are forked, and after `use_gpu`
    from atom.kernels.triton.linear import split_blocks
    from atom.runtime.step import runner  # noqa: F401

    shuffle.AT_ONCE = split_blocks.AT_ONCE = 1 << 60  # bytes: what has no data is laid out in one part
    tasks = [(walk_and_multiply, (*each, arch, folder / str(at))) for at, each in enumerate(models(arch, is_thorough))]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), multiprocessing.get_context("fork")) as pool:
        running = [pool.submit(record, call, *args) for call, args in (*tasks, (call_the_rest, (arch,)))]
        found: dict[Any, Launch] = {}
        for each in running:
            found |= each.result()
    return list(found.values())


def record(call: Callable[..., None], *args: Any) -> dict[Any, Launch]:
    """Run a call, and record its launches."""
    from atom.kernels.triton.compile.precompile import walking

    recorder = Recorder()
    token = walking.set(recorder)  # type: ignore[arg-type]
    torch.set_num_threads(1)
    try:
        with torch.inference_mode(), NoMath():
            call(*args)
    finally:
        walking.reset(token)
    return recorder.launches


def walk_and_multiply(name: str, fields: dict[str, Any], arch: str, folder: Path) -> None:
    """Run a model; and as it is stored, call its matmuls with weights in all formats."""
    graph = walk(name, fields, arch, folder)
    if not fields:
        multiply_by_weights(graph, (*STORED, *K_QUANTS) if name in WALKED else (), arch)


def formats() -> list[str]:
    """What `quant=` packs weights to."""
    found = [yaml.safe_load(path.read_text())["fmt"] for path in sorted((ROOT / "conf" / "quant").glob("*.yaml"))]
    return [each for each in found if each not in ("auto", "none", "budget")]


def models(arch: str, is_thorough: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names in tests/configs, with the fields of their configurations."""
    for path in sorted(CONFIGS.glob("*.json")):
        if "eagle" not in path.name and (is_thorough or path.stem not in ALIKE):  # eagle: a draft model
            yield path.stem, {}
    for name, fmt in itertools.product(WALKED, formats()):
        yield name, {"quant.fmt": fmt}
    for name in ("qwen3_8b", "deepseek_v3") if arch != "sm_80" else ():  # which has no fp8
        yield name, {"serve.kv_cache_dtype": "fp8"}
    yield "qwen3_8b", {"method": "ngram", "dtype": "fp16"}


def walk(name: str, fields: dict[str, Any], arch: str, folder: Path) -> Any:
    """Run each kind of step of a model, of which a few layers do; its graph."""
    from atom.compiler import compile_graph
    from atom.config.load import engine_overrides, load
    from atom.kernels.triton.compile.codegen import write_source
    from atom.kernels.triton.compile.piece_compiler import TritonCompiler
    from atom.pieces import find_pieces
    from atom.runtime.step.model import Model
    from atom.runtime.step.program import Bindings
    from atom.runtime.step.runner import Runner
    from atom.runtime.types import StepLimits

    folder.mkdir()
    described = json.loads((CONFIGS / f"{name}.json").read_text())
    text = described.get("text_config", described)
    kinds = text.get("compress_ratios", ())  # by layer, of DeepSeek-V4
    layers = max(2 + text.get("first_k_dense_replace", 0), *(kinds.index(each) + 1 for each in kinds), 0)
    text["num_hidden_layers"] = layers
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"][:layers]
    (folder / "config.json").write_text(json.dumps(described))
    options = {"device": "cuda", "dtype": "bf16", "level": 3, "load_dummy": True} | fields
    config = load(engine_overrides(str(folder), options))
    graph = compile_graph(config, target=target_features(arch))
    code = {}
    for number, piece in enumerate(piece for each in graph.programs.values() for piece in find_pieces(each)):
        (folder / str(number)).mkdir()
        (folder / str(number) / "piece.py").write_text(write_source(piece.text))
        code[piece.text] = TritonCompiler().load(folder / str(number))
    weights = {each: make_weight(each.type, getattr(each, "layout", None)) for each in graph.recipes()}
    model = Model(
        graph, Bindings(weights, code), 16, StepLimits(40, MAX_TOKENS, 2048, 128), device="cpu", backend="triton",
        drafting=config.drafting,
    )  # fmt: skip
    runner = Runner(model, run_ahead=2)
    runner.bind(dict.fromkeys((*model.kinds, *model.recurrent), 2))
    runner.graphs.compile([1, 2, 4, 8, 16, 24, 40], MAX_TOKENS)
    return graph


def target_features(arch: str) -> Any:
    from atom.kernels import Target

    return Target("cuda", frozenset({"nvidia", arch, *(("gluon",) if arch == "sm_90" else ())}))


def multiply_by_weights(graph: Any, stored: Iterable[str], arch: str) -> None:
    """Call a model's matmuls with weights in each format and each number of rows; of those with equal tiles one.

    stored: formats besides those of `quant=`"""
    from atom.graph import ops
    from atom.graph.graph import type_of

    taken = ops.linear, ops.gated_linear, ops.norm_linear, ops.add_norm_linear, ops.grouped_linear, ops.experts
    seen = set[Any]()
    for node in (node for program in graph.programs.values() for node in program.nodes if node.target in taken):
        types = tuple(map(type_of, node.args))
        given = {name: value for name, value in node.kwargs.items() if name not in ("act", "gives")}
        for fmt in (None, *formats(), *stored):
            packed = _pack(types, node.target.weights, fmt)
            if (key := (node.target, str(packed), str(given))) not in seen:
                seen.add(key)
                _multiply(node.target, packed, given, fmt, arch, _chosen_tiles())


@functools.cache
def _chosen_tiles() -> ChosenTiles:
    """Of all models that this process runs."""
    return ChosenTiles()


class ChosenTiles:
    """Finds the tiles of linears, and ends calls of those that are known."""

    def __init__(self) -> None:
        self.call: Any = None  # what else a launch depends on
        self._seen = set[Any]()

    def find(self, shape: Any, gpu: Gpu) -> Any:
        from atom.kernels.triton.linear.tiles import find

        found = find(shape, gpu)
        key = self.call, found
        if key in self._seen:
            raise KnownTiles
        self._seen.add(key)
        return found


class KnownTiles(Exception):
    pass


def _pack(types: tuple[Any, ...], weights: Iterable[int], fmt: str | None) -> tuple[Any, ...]:
    return tuple(dataclasses.replace(each, fmt=fmt) if place in weights else each for place, each in enumerate(types))


def _multiply(
    op: Any, types: tuple[Any, ...], given: dict[str, Any], fmt: str | None, arch: str, tiles: ChosenTiles
) -> None:
    from atom.errors import AtomError
    from atom.graph.formats import act_of, rounded_act_of
    from atom.kernels import find_kernel
    from atom.kernels.backend import LoadContext
    from atom.kernels.triton.linear.linear import Linears

    acts = {None} if fmt is None else {None, act_of(fmt), rounded_act_of(fmt)}
    for backend, act in itertools.product(("hopper", "triton"), acts):
        kernel, attributes = find_kernel(op, backend), given if act is None else given | {"act": act}
        try:
            if kernel.accepts(target_features(arch), *types, **attributes) is not None:
                continue
            layout = kernel.layout_of(*(types[place] for place in op.weights)) if fmt else None
            weights = {place: make_weight(types[place], layout) for place in op.weights}
        except AtomError:  # sizes that are no multiple of blocks
            continue
        run = kernel.load(LoadContext())
        is_linear = isinstance(getattr(run, "__self__", None), Linears)
        for rows in ROWS:
            tiles.call = op, backend, fmt, act, str(given)
            finding = {"parameters": tiles.find} if is_linear else {}
            with contextlib.suppress(KnownTiles):
                args = [weights.get(place, _argument(each, rows)) for place, each in enumerate(types)]
                run(*args, **attributes, **finding)


def _argument(type: Any, rows: int) -> Any:
    from atom.graph import TORCH_DTYPES

    if type is None:
        return None
    return make(TORCH_DTYPES[type.dtype], [dim if isinstance(dim, int) else rows for dim in type.shape])


def call_the_rest(arch: str) -> None:
    """Call what no step of these models calls."""
    attend(arch)
    attend_to_blocks(arch)
    attend_to_runs()
    attend_to_shared_keys(arch)
    attend_images(arch)
    attend_to_sums()
    attend_to_chosen(arch)
    multiply_by_many_experts(arch)
    compute_alike(arch)
    expand_adapters()
    recur()
    sum_over_ranks()
    copy_blocks()
    draft_tokens()
    number_tiles()


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)


def attend(arch: str) -> None:
    """Heads of each size, in each dtype, with and without sinks, windows and caps."""
    from atom.graph import Batch, PagedCache
    from atom.graph.batch import SharedPrefixes
    from atom.kernels.hopper import attention
    from atom.kernels.triton.attention import paged, rope

    attends = attention if arch == "sm_90" else paged
    fp8, scale = torch.float8_e4m3fn, torch.ones(1)
    numbers, angles = zeros(9, 9, dtype=torch.int32), zeros(9, 32, dtype=torch.float32)
    prefixes = SharedPrefixes("full", numbers[0, :4], numbers[0, :4], zeros(17, dtype=torch.int32))
    for dtype, heads, dim, has_sinks, window, softcap in (
        (torch.bfloat16, 32, 128, False, None, None), (torch.float16, 64, 64, True, 128, None),
        (torch.bfloat16, 32, 128, False, 4096, 50.0), (torch.bfloat16, 16, 256, False, 1024, None),
        (torch.bfloat16, 32, 80, False, None, None), (torch.float32, 8, 64, False, None, None),
        (torch.bfloat16, 64, 512, False, None, None), (torch.float32, 8, 512, False, None, None),
    ):  # fmt: skip
        sinks = zeros(heads, dtype=dtype) if has_sinks else None
        for kept in (dtype, fp8) if arch != "sm_80" and dtype != torch.float32 else (dtype,):
            cache, scales = (
                PagedCache(zeros(4, 16, 2, 8, dim, dtype=kept), "full"),
                (scale if kept == fp8 else None,) * 2,
            )
            for tokens, decodes, queries in ((600, 0, 1), (4, 4, 1), (12, 4, 3)):
                q, k = zeros(tokens, heads, dim, dtype=dtype), zeros(tokens, 8, dim, dtype=dtype)
                slots, norm = zeros(tokens, dtype=torch.int64), zeros(dim, dtype=dtype)
                batch = Batch({"full": numbers}, {"full": slots}, numbers[0], numbers[0], decodes, queries)
                options = {"scale": 0.1, "window": window}
                attends.PagedAttention()(q, cache, batch, sinks, *scales, **options, softcap=softcap)
                if decodes and not window:
                    grouped = batch._replace(prefixes=prefixes)
                    attends.PagedAttention()(q, cache, grouped, sinks, *scales, scale=0.1, softcap=softcap)
                angle = angles[:1].expand(tokens, 32).contiguous()
                for turned, normed in ((angle, norm), (None, None)):
                    args = q, k, k, turned, turned, normed, normed, cache, batch
                    attends.NormRopeAttention()(*args, sinks, *scales, **options, eps=1e-6)
                rope.norm_rope_write(q, k, k, angle, angle, norm, norm, cache, batch, *scales, eps=1e-6)
                rope.norm_rope(q, k, angle, angle, norm, norm, eps=1e-6)


def attend_to_blocks(arch: str) -> None:
    """To blocks that queries choose: few and many queries, whose blocks are in parts or not."""
    from atom.graph import Batch, PagedCache
    from atom.kernels.triton.attention import block_sparse, paged

    fp8, scale = torch.float8_e4m3fn, torch.ones(1)
    numbers, rules = zeros(9, 600, dtype=torch.int32), {"block": 128, "top_k": 16}
    for dtype, dim in ((torch.bfloat16, 128), (torch.float16, 64), (torch.float32, 64)):
        for kept in (dtype, fp8) if arch != "sm_80" and dtype != torch.float32 else (dtype,):
            cache = PagedCache(zeros(4, 16, 2, 4, dim, dtype=kept), "full")
            keys = PagedCache(zeros(4, 16, dim + (4 if kept == fp8 else 0), dtype=kept), "full")
            scales = (scale if kept == fp8 else None,) * 2
            for tokens, decodes in ((4, 4), (6000, 0)):
                batch = Batch({"full": numbers}, {}, numbers[0, :10], numbers[0, :9], decodes)
                selected = block_sparse.paged_index_blocks(zeros(tokens, 4, dim, dtype=dtype), keys, batch, **rules)
                q = zeros(tokens, 64, dim, dtype=dtype)
                args = q, cache, batch, None, *scales, None, None, selected
                paged.PagedAttention()(*args, scale=0.1, block=128)


def attend_to_runs() -> None:
    """To tokens of runs whose keys are means, in layers next to n-grams: few and many queries."""
    from atom.graph import Batch, PagedCache
    from atom.kernels.triton.attention import compressed, paged, top_k
    from atom.kernels.triton.recurrent.ngrams import batched_ngrams

    numbers = zeros(9, 600, dtype=torch.int32)
    tables = dict.fromkeys(("full", "window_4", "every_4"), numbers)
    for dtype, (tokens, decodes) in itertools.product((torch.bfloat16, torch.float16), ((4, 4), (6000, 0))):
        slots = dict.fromkeys(tables, zeros(tokens, dtype=torch.int64))
        batch = Batch(tables, slots, numbers[0, :10], numbers[0, :9], decodes, slots=numbers[0, :9], block_size=16)
        kept, keys = (PagedCache(zeros(4, size, *row, 128, dtype=dtype), kind)
                      for size, row, kind in ((16, (1,), "window_4"), (4, (), "every_4")))  # fmt: skip
        pooled = compressed.paged_compress(zeros(tokens, 128, dtype=dtype), None, None, kept, batch, every=4)
        top_k.paged_index_topk(pooled.view(tokens, 1, 128).expand(-1, 4, -1).contiguous(), None, keys, batch,
                               top_k=512, every=4)  # fmt: skip
        cache, chosen = (
            PagedCache(zeros(4, 16, 2, 2, 256, dtype=dtype), "full"),
            zeros(tokens, 1, 2051, dtype=torch.int32),
        )
        args = zeros(tokens, 24, 256, dtype=dtype), cache, batch, None, None, None, None, None, chosen
        paged.PagedAttention()(*args, scale=0.1)
        ids, rows = zeros(tokens, dtype=torch.int64), zeros(16, dtype=torch.int64)
        for states in (1, 3):
            batched_ngrams(ids, zeros(9, states, 2, dtype=torch.int64), batch, rows[:3], rows, rows, end=7)


def attend_to_shared_keys(arch: str) -> None:
    """Heads with one key, also their value, to a window in the model's dtype or fp8, and to runs or chosen ones."""
    from atom.graph import Batch, PagedCache
    from atom.kernels.triton.attention import compressed, top_k

    fp8, numbers = torch.float8_e4m3fn, zeros(9, 600, dtype=torch.int32)
    tables = dict.fromkeys(("window_128", "every_4", "every_128"), numbers)
    for dtype, (tokens, decodes) in itertools.product((torch.bfloat16, torch.float16), ((1, 1), (9, 9), (6000, 0))):
        batch = Batch(tables, {}, numbers[0, :10], numbers[0, :9], decodes, block_size=16)
        few, many = (PagedCache(zeros(4, size, 512, dtype=dtype), kind)
                     for size, kind in ((1, "every_128"), (4, "every_4")))  # fmt: skip
        keys = PagedCache(zeros(4, 4, 128, dtype=dtype), "every_4")
        chosen = top_k.paged_index_topk(zeros(tokens, 64, 128, dtype=dtype), zeros(tokens, 64, dtype=dtype), keys,
                                        batch, top_k=512, every=4)  # fmt: skip
        for heads, kept in itertools.product((8, 64), (dtype, fp8) if arch != "sm_80" else (dtype,)):
            window = PagedCache(zeros(4, 16, 512, dtype=kept), "window_128")
            scales = torch.ones(heads), torch.ones(1) if kept == fp8 else None
            args = zeros(tokens, heads, 512, dtype=dtype), window, batch, *scales
            for every, runs, selected in ((1, None, None), (4, many, chosen), (128, few, None)):
                compressed.paged_mqa_attention(*args, runs, selected, scale=0.1, window=128, every=every)


def attend_images(arch: str) -> None:
    """By heads of vision towers, of images and of windows."""
    from atom.kernels.hopper import segment_attention as hopper_segments
    from atom.kernels.triton.attention.segments import segment_attention

    for dtype, dim in itertools.product((torch.bfloat16, torch.float16, torch.float32), (64, 72, 80, 88, 128)):
        qkv = zeros(600, 3 * 16 * dim, dtype=dtype).view(600, 3, 16, dim)
        for segments in (1, 40):
            starts = zeros(segments + 1, dtype=torch.int32)
            segment_attention(*qkv.unbind(1), starts, scale=0.1)
            if arch == "sm_90" and hopper_segments.suits(qkv[:, 0], starts):
                hopper_segments.segment_attention(*qkv.unbind(1), starts, scale=0.1)


def attend_to_sums() -> None:
    from atom.kernels.triton.attention.residuals import attend_residuals

    for num, width in itertools.product((2, 9), (2048, 7168)):
        attend_residuals(zeros(width), zeros(1, width), *zeros(num, 7, width), eps=1e-5)


def attend_to_chosen(arch: str) -> None:
    """What queries choose by an indexer, of short and long contexts, and latent attention to it; and to a window."""
    from atom.graph import Batch, PagedCache
    from atom.kernels.hopper.index_scores import paged_index_topk as hopper_topk
    from atom.kernels.hopper.latent import PagedLatentAttention as HopperAttention
    from atom.kernels.triton.attention.index_scores import write_index
    from atom.kernels.triton.attention.latent import PagedLatentAttention
    from atom.kernels.triton.attention.top_k import paged_index_topk

    fp8 = torch.float8_e4m3fn
    for dtype, is_fp8 in itertools.product((torch.bfloat16, torch.float16, torch.float32), (False, True)):
        if is_fp8 and (arch == "sm_80" or dtype == torch.float32):
            continue
        kept, scale = (fp8, torch.ones(1)) if is_fp8 else (dtype, None)
        keys = PagedCache(zeros(4, 64, 132 if is_fp8 else 128, dtype=kept), "full")
        cache = PagedCache(zeros(4, 64, 512 + 64 * (2 if is_fp8 else 1), dtype=kept), "full")
        for heads, width, (tokens, decodes, queries) in itertools.product(
            (64, 128), (16, 512), ((4, 4, 1), (96, 96, 1), (12, 4, 3), (600, 0, 1), (20, 0, 1))
        ):
            table = zeros(max(decodes, 4), width, dtype=torch.int32)
            starts = zeros(len(table) + 1, dtype=torch.int32)
            slots = {"full": zeros(tokens, dtype=torch.int64)}
            batch = Batch({"full": table}, slots, starts, starts[1:], decodes, queries)
            q, weights = zeros(tokens, 64, 128, dtype=dtype), zeros(tokens, 64, dtype=torch.float32)
            write_index(q, q[:, 0], keys, batch)
            for choose in (paged_index_topk, hopper_topk)[: 2 if arch == "sm_90" else 1]:
                selected = choose(q, weights, keys, batch, top_k=512)
            q_nope, q_rope = zeros(tokens, heads, 192, dtype=dtype).split([128, 64], 2)
            kv_b = zeros(heads * 256, 512, dtype=dtype)
            for attention in (PagedLatentAttention, HopperAttention)[: 2 if arch == "sm_90" else 1]:
                attention()(q_nope, q_rope, kv_b, cache, batch, scale, selected, scale=0.1)
            sinks = zeros(heads, dtype=torch.float32)
            PagedLatentAttention()(q_nope, q_rope, kv_b, cache, batch, scale, selected, sinks, scale=0.1)
            if dtype != torch.float32 and not is_fp8 and heads == 64:
                wide = PagedCache(zeros(4, 64, 1088, dtype=dtype), "full")
                PagedLatentAttention()(
                    q_nope, q_rope, zeros(heads * 256, 1024, dtype=dtype), wide, batch, scale=0.1, window=512
                )
        attend_without_rope(dtype)


def attend_without_rope(dtype: torch.dtype) -> None:
    """Latent attention to tokens of chosen runs, and to all, of keys that have no rotated dims."""
    from atom.graph import Batch, PagedCache
    from atom.kernels.triton.attention.compressed import run_tokens
    from atom.kernels.triton.attention.latent import PagedLatentAttention, norm_rope_write_latent

    cache = PagedCache(zeros(4, 64, 512, dtype=dtype), "full")
    for width, (tokens, decodes) in itertools.product((16, 512), ((4, 4), (600, 0))):
        numbers, slots = zeros(5, width, dtype=torch.int32), {"full": zeros(tokens, dtype=torch.int64)}
        batch = Batch({"full": numbers[:4]}, slots, numbers[0, :5], numbers[0, :4], decodes)
        q_nope, q_rope = zeros(tokens, 64, 256, dtype=dtype).split([256, 0], 2)
        latent, k_rope = zeros(tokens, 512, dtype=dtype).split([512, 0], 1)
        q_rope = norm_rope_write_latent(q_rope, latent, k_rope.unsqueeze(1), None, None, None, cache, batch)
        runs = zeros(tokens, 1, 512, dtype=torch.int32)
        selected = run_tokens(runs, zeros(tokens, dtype=torch.int64), every=4)
        kv_b = zeros(64 * 512, 512, dtype=dtype)
        PagedLatentAttention()(q_nope, q_rope, kv_b, cache, batch, None, selected, scale=0.1)


def multiply_by_many_experts(arch: str) -> None:
    """Expert matmuls of many rows each, with and without gates and biases."""
    from atom.graph import Type
    from atom.kernels.hopper.experts import Experts
    from atom.kernels.hopper.shuffle import LAYOUT
    from atom.kernels.triton.activations import Gate
    from atom.kernels.triton.experts import grouping, moe

    experts = Experts if arch == "sm_90" else moe.Experts
    x, ends, bias = zeros(600, 512), zeros(4, dtype=torch.int64), zeros(4, 256)
    gates = (None, Gate("silu"), Gate("swigluoai", 7.0, 1.7), Gate("situ", 25.0, 4.0))
    for fmt, own, gate in itertools.product((None, *formats(), *STORED), (None, bias), gates):
        type = Type("bf16", (4, 256, 512), fmt)
        experts().multiply(x, make_weight(type, None), ends, own, gate)
        if arch == "sm_90" and fmt in (*formats(), STORED[0]) and fmt != "int8[1, *]":
            experts().multiply(x, make_weight(type, LAYOUT), ends, own, gate)
    for tokens in (7, 1100):
        pairs, weights = zeros(2 * tokens, 512), zeros(tokens, 2, dtype=torch.float32)
        grouping.combine(pairs, weights, zeros(2 * tokens, dtype=torch.int64))
        ids = zeros(tokens, 2, dtype=torch.int64)
        for first in (None, ids[0, :1]):
            grouping.group(pairs[:tokens], ids, first, experts=8)


def compute_alike(arch: str) -> None:
    """The kernels of batch-invariant runs, by weights in each format that they take."""
    from atom.graph import Batch, PagedCache, Type, ops
    from atom.kernels import find_kernel
    from atom.kernels.hopper import fixed_gemms
    from atom.kernels.hopper.shuffle import LAYOUT
    from atom.kernels.triton.attention import fixed
    from atom.kernels.triton.experts.fixed import FixedExperts, router
    from atom.kernels.triton.linear.fixed import FixedLinears
    from atom.kernels.triton.step.log_sum_exp import log_sum_exp

    numbers, fp8 = zeros(9, 9, dtype=torch.int32), torch.float8_e4m3fn
    for dtype, dim, window in ((torch.bfloat16, 128, None), (torch.float16, 256, 1024), (torch.float32, 64, None)):
        for kept in (dtype, fp8) if arch != "sm_80" and dtype != torch.float32 else (dtype,):
            cache = PagedCache(zeros(4, 16, 2, 8, dim, dtype=kept), "full")
            batch = Batch({"full": numbers}, {}, numbers[0], numbers[0, :8], 4)
            fixed.paged_attention(zeros(600, 32, dim, dtype=dtype), cache, batch, scale=0.1, window=window)
    linear, grouped = (find_kernel(op, "fixed_triton") for op in (ops.linear, ops.grouped_linear))
    for fmt in (None, *formats(), *STORED[:3]):
        x, weight = Type("bf16", ("T", 1024)), Type("bf16", (512, 1024), fmt)
        if linear.accepts(target_features(arch), x, weight) is None:
            for rows in (9, 32, 60, 100, 300, 900):
                FixedLinears().linear(zeros(rows, 1024), make_weight(weight, None))
        types = [Type("bf16", (8, rows, 256), fmt) for rows in (512, 256)]
        if grouped.accepts(target_features(arch), x, types[1], x) is None:
            gate_up, down = (make_weight(each, None) for each in types)
            for tokens in (4, 100, 400):
                weights, ids = router(zeros(tokens, 256), zeros(8, 256), top_k=2)
                FixedExperts().experts(zeros(tokens, 256), weights, ids, gate_up, down, kind="silu")
    for fmt in STORED_BY_WGMMA if arch == "sm_90" else ():
        weights = [
            make_weight(Type("bf16", shape, fmt), LAYOUT) for shape in ((512, 256), (8, 512, 256), (8, 256, 256))
        ]
        for rows in (9, 32, 60, 300):
            fixed_gemms.FixedLinears().linear(zeros(rows, 256), weights[0])
            weight, ids = router(zeros(rows * 4, 256), zeros(8, 256), top_k=2)
            fixed_gemms.FixedExperts().experts(zeros(rows * 4, 256), weight, ids, *weights[1:], kind="silu")
    FixedLinears().linear(zeros(9, 1024, dtype=torch.float32), zeros(512, 1024, dtype=torch.float32))
    log_sum_exp(zeros(9, 1003, dtype=torch.float32))


def expand_adapters() -> None:
    from atom.kernels.triton.linear import lora

    for rows, rank, kind in itertools.product((5, 300), (16, 64), (None, "silu")):
        sizes = [1024, 512, 512] if kind is None else [1024, 1024]
        x = zeros(rows, sum(sizes) + len(sizes) * 8 * rank)
        numbers = zeros(rows, dtype=torch.int64)
        lora.expand_lora(x, zeros(sum(sizes), 8 * rank), numbers, rank=rank, sizes=sizes, kind=kind)


def recur() -> None:
    """Recurrences of decodes and prompts."""
    from atom.graph import Batch
    from atom.kernels.hopper import delta_net as hopper_net
    from atom.kernels.triton.recurrent import causal_conv, delta_net, gated_delta, lightning, selective_scan, ssd

    numbers = zeros(5, dtype=torch.int32)
    dtypes = torch.bfloat16, torch.float16, torch.float32
    for tokens, dtype, kept in itertools.product((4, 300), dtypes, (1, 4)):  # states of a slot
        batch = Batch({}, {}, numbers, numbers[:4], 4 if tokens == 4 else 2, slots=numbers[:4])
        for channels, taps, kind in ((1024, 3, None), (8192, 4, "silu")):
            x, states = zeros(tokens, channels, dtype=dtype), zeros(6, kept, taps - 1, channels, dtype=dtype)
            weight, bias = zeros(channels, taps, dtype=dtype), zeros(channels, dtype=dtype) if kind else None
            causal_conv.batched_causal_conv(x, states, batch, weight, bias, kind=kind)
        x, states = zeros(tokens, 32, 128, dtype=dtype), zeros(6, kept, 32, 128, 128, dtype=torch.float32)
        steps = zeros(tokens, 32, 128, dtype=torch.float32)
        for keys, decay, normalize in ((x[:, :16], steps[..., 0], True), (x, steps, True), (x, steps, False)):
            given = keys, keys, x, decay, x[..., 0], states, batch
            gated_delta.batched_gated_delta(*given, scale=0.1, normalize=normalize)
        conv_states, weight = zeros(6, kept, 3, 8192, dtype=dtype), zeros(8192, 4, dtype=dtype)
        numbers_of_heads, norm = zeros(32, dtype=torch.float32), zeros(128, dtype=dtype)
        for decays in (32, 4096):  # by head, by dim
            sizes = [8192, 4096, decays, 32]
            parts = zeros(tokens, sum(sizes), dtype=dtype).split(sizes, 1)
            rest = conv_states, states, batch, weight, numbers_of_heads, zeros(decays, dtype=torch.float32), norm
            floor = {"floor": -5.0} if decays > 32 else {}
            options = {"key_heads": 16, "scale": 0.1, "eps": 1e-6, "normalize": True, **floor}
            delta_net.gated_delta_net(*parts, *rest, **options)
            if hopper_net.suits(parts[0], states, batch):
                hopper_net.decode(*parts, *rest, **options)
        lightning.batched_lightning(x, x, x, states, batch, steps[0, :, 0].contiguous(), scale=0.1)
        x, b, dt = zeros(tokens, 64, 64, dtype=dtype), zeros(tokens, 8, 128, dtype=dtype), steps[:, 0, :64].contiguous()
        states = zeros(6, kept, 64, 64, 128, dtype=torch.float32)
        ssd.batched_ssd(x, dt, b, b, states, batch, dt[0], dt[0])
        x, b, dt = (
            zeros(tokens, 8192, dtype=dtype),
            zeros(tokens, 16, dtype=dtype),
            zeros(tokens, 8192, dtype=torch.float32),
        )
        states = zeros(6, kept, 8192, 16, dtype=torch.float32)
        selective_scan.batched_selective_scan(x, dt, b, b, states, batch, states[0, 0], dt[0])


def sum_over_ranks() -> None:
    from atom.kernels.peers import collectives, tiles

    for ranks, dtype in itertools.product((2, 4, 8), (torch.bfloat16, torch.float16, torch.float32)):
        x = zeros(8, 1024 * ranks, dtype=dtype)
        programs = zeros(128, dtype=torch.int32)
        arena = collectives.Arena(zeros(ranks, dtype=torch.int64), programs, programs, programs[:1], 1)
        for reduce in (collectives.all_reduce, collectives.all_reduce_in_parts, collectives.reduce_scatter,
                       tiles.all_reduce):  # fmt: skip
            reduce(x, arena)
        collectives.all_gather(x, 1024 * ranks * ranks, arena)
        collectives.gather_tokens([x, zeros(8, 2, dtype=torch.float32), zeros(8, 2, dtype=torch.int64)], arena)


def copy_blocks() -> None:
    """KV to host memory and back, and from fp8 for long prompts; recurrent states of slots to blocks and back."""
    from atom.kernels.triton.attention.context import Context
    from atom.kernels.triton.step.blocks import BlockCopier, StateCopier

    copier, blocks = BlockCopier([zeros(4, 1024)]), zeros(2, dtype=torch.int64)
    rows = zeros(2, 2048, dtype=torch.uint8)
    copier.gather(blocks, rows)
    copier.scatter(rows, blocks)
    states, pairs = [zeros(4, 1024)], zeros(2, dtype=torch.int32)
    StateCopier(states, states).to_blocks(pairs, pairs)
    StateCopier(states, states).to_slots(pairs, pairs)
    cache, table = zeros(4, 16, 2, 8, 128, dtype=torch.float8_e4m3fn), zeros(2, 4, dtype=torch.int32)
    Context(1 << 24).unpack(cache, table, table[0, :2], 0, torch.bfloat16)


def draft_tokens() -> None:
    """By a draft model, as `method=draft` does."""
    from atom.graph import Batch
    from atom.kernels.step import Inputs
    from atom.kernels.triton.step import prepare_inputs, speculation
    from atom.runtime.step.input import PackedRows
    from atom.runtime.step.request_state import RequestState

    state, rows, slots = RequestState(3, 500, "cpu", 3, 100), zeros(3, dtype=torch.int32), zeros(9, dtype=torch.int64)
    keys, *noise = speculation.draw_noise(rows, state, 3)
    for offsets, dtype in itertools.product((None, zeros(500, dtype=torch.int64)), (torch.bfloat16, torch.float32)):
        speculation.gumbel_argmax(zeros(3, 500, dtype=dtype), keys[0], *noise, offsets)
    speculation.keep_rows(zeros(4, 8, 128), rows, zeros(9, 8, 128), slots)
    starts, tables = zeros(5, dtype=torch.int32), zeros(1, 3, 4, dtype=torch.int32)
    batch = Batch({"full": tables[0]}, {"full": slots}, starts, rows, 3, 4)
    inputs = Inputs(slots, slots, batch, slots[None], tables)
    split = PackedRows(rows, starts, rows, rows, rows, slots.int(), slots.int(), rows)
    for each in (None, split):
        prepare_inputs.draft_inputs(rows, each, state, inputs)


def number_tiles() -> None:
    """Of experts for AMD's kernels, which are AITER's."""
    from atom.kernels.aiter import mxfp4

    mxfp4.number_tiles(collections.defaultdict(lambda: lambda *_: None), zeros(8, dtype=torch.int64), 100)


def find_kernels() -> set[str]:
    """The names of the functions of atom/kernels that something launches."""
    import atom.kernels
    from atom.kernels.triton.compile.jit import JITFunction

    kernels = set[str]()
    for found in pkgutil.walk_packages(atom.kernels.__path__, "atom.kernels."):
        module = importlib.import_module(found.name)
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
                function = getattr(module, node.value.id, None)
                if isinstance(function, JITFunction):
                    kernels.add(f"{function.__module__}.{function.__name__}")
    return kernels


def compile_launch(launch: Launch, arch: str, is_to_end: bool) -> None:
    """Compile a launch to Triton's IR, or to a cubin, whose shared memory and addresses must be right."""
    kernel = launch.find()
    _, _, target, backend, binder = kernel.device_caches[0]
    given = launch.options | {"debug": False}
    options, *rest = kernel._pack_args(backend, given, *binder(**launch.args, **given))
    source, stages, metadata = kernel.ASTSource(kernel, *rest), dict[str, Any](), {"target": target, **vars(options)}
    backend.add_stages(stages, options, source.language)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    made = source.make_ir(
        target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context
    )
    if is_to_end:
        for compile in stages.values():
            made = compile(made, metadata)
        room, taken = GPUS[arch].shared_memory, metadata["shared"]
        assert taken <= room, f"takes {taken} bytes of shared memory, of {room}"
        lost = find_lost_addresses(made) if arch == "sm_90" else []
        assert not lost, f"sums of 64 bits have both halves from one register: {lost}"


def find_lost_addresses(cubin: bytes) -> list[str]:
    """Instructions that ptxas 12.8 gets wrong, see findings/ptxas_loses_addresses_of_narrow_wgmma.sh."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-sass", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lost, sources = list[str](), dict[str, str]()  # by the carry, the register of the low half
    for line in re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", text, re.MULTILINE):
        name, *operands = re.split(r"[ ,]+", line)
        if name == "UIADD3.X" and any(sources.get(each) == operands[1] for each in operands):
            lost.append(line)
        sources = {carry: source for carry, source in sources.items() if source not in operands[:1]}
        if name == "UIADD3" and operands[1].startswith("UP") and operands[2] not in (operands[0], "URZ"):
            sources[operands[1]] = operands[2]
    return lost


def pick_launches(launches: Iterable[Launch], is_thorough: bool = False) -> list[Launch]:
    """Of each kernel, launches that have all values of each constexpr and option, and types of each argument.

    Numbers above 8 are sizes, of which any will do. is_thorough: of sizes one for each power of 2 that divides them,
    and all sets of tiles in all formats
    """
    by_kernel: dict[str, list[Launch]] = {}
    for each in launches:
        by_kernel.setdefault(each.kernel, []).append(each)
    return [each for same in by_kernel.values() for each in _pick(same, is_thorough)]


def _pick(launches: Sequence[Launch], is_thorough: bool) -> Iterator[Launch]:
    constant = {p.name for p in launches[0].find().params if p.is_constexpr}
    left = list[tuple[set[Any], Launch]]()
    for each in launches:
        values = {name: _reduce(value) if name in constant else _type(value) for name, value in each.args.items()}
        is_size = {name: name in constant and isinstance(each.args[name], int) for name in values}
        together = [name for name in values if TILES.match(name) or not is_size[name]] if is_thorough else []
        kept = {item for item in values.items() if is_thorough or not is_size[item[0]] or each.args[item[0]] <= 8}
        left.append(({*kept, *each.options.items(), tuple((name, values[name]) for name in together)}, each))
    missing = set[Any]().union(*(values for values, _ in left))
    while missing:
        values, best = max(left, key=lambda each: len(each[0] & missing))
        missing -= values
        yield best


def _reduce(value: Any) -> Any:
    if not isinstance(value, int) or value <= 64 or value & (value - 1) == 0:
        return value if isinstance(value, int | float | str | None) else repr(value)
    return f"a multiple of {min(value & -value, 512)}"


def _type(value: Any) -> Any:
    if isinstance(value, int | float | None):
        return type(value), value == 1
    return (value.base.dtype, *value.block_shape, repr(value.layout)) if hasattr(value, "block_shape") else repr(value)
