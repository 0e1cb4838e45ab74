"""Tune a model's GEMMs in its own decode steps (`tune=true`).

The fastest parameters of each are kept.

    tuners = find_tuners("cuda", model.device)         # of linears, and of experts
    use_measured(model, tuners, Path(cache), log)      # what was found on this machine before
    tune(model, tuner, Path(cache), progress, log)     # what has not been measured
    table = tune_drafts(model, tuner, Path(cache), text, log)     # steps with drafts, of a model that drafts

For each number of rows that has parameters of its own, as many slots are filled with CONTEXT tokens, and the captured
step is timed with one GEMM's candidates after the other, while the other GEMMs keep the best known so far.
Parameters that were timed with fewer rows than they would apply to are used in this run, but not kept.

All ranks tune at the same time, since each decode has collectives. They begin with the parameters that the first rank
knows, a step takes as long as on the slowest rank, and a candidate must be right on all.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from atom.cache.files import Unfit, reason_of
from atom.checkpoint import Progress
from atom.errors import CapacityError, is_out_of_memory
from atom.kernels import Tuner, tuned
from atom.runtime.draft.table import DraftTable
from atom.runtime.step.cuda_graphs import begin, draw
from atom.runtime.step.input import pack_admission
from atom.runtime.step.model import Model
from atom.runtime.step.program import Kernels
from atom.sampling_params import SAMPLING_KINDS, SamplingParams

CONTEXT = 300  # tokens of each row, the newest included
TIMINGS = 3  # of a step with drafts, the shortest of which counts
SECONDS = 0.01  # min seconds of replays that make one timing
Log = Callable[[str], object]  # takes a line for the user
Exchange = Callable[[bytes], list[bytes]]  # an all-gather: a rank's own bytes -> those of all ranks
Capture = Callable[[Callable[[], object]], Callable[[], float]]  # captures a function; the result times it in seconds


def use_measured(model: Model, tuners: Sequence[Tuner], cache: Path, log: Log) -> None:
    """Have a model use the parameters that were measured on this machine, if any."""
    if kernels := measured_kernels(tuners, cache, log):
        model.use({**model.kernels, **kernels})


def measured_kernels(tuners: Sequence[Tuner], cache: Path, log: Log) -> Kernels:
    """Kernels with the parameters that were measured on this machine; none if nothing was.

    tuners: of one GPU
    """
    if not tuners or not tuned.read_own(tuners[0].gpu, cache, log):
        return {}
    tables = tuned.read(tuners[0].gpu, cache)
    found = [tuner.kernels(tuner.known(tables[tuner.table])) for tuner in tuners]
    return {key: kernel for kernels in found for key, kernel in kernels.items()}


def single_rank(own: bytes) -> list[bytes]:
    """The exchange of one rank."""
    return [own]


@torch.inference_mode()
def tune(
    model: Model,
    tuner: Tuner,
    cache: Path,
    progress: Progress,
    log: Log,
    capture: Capture | None = None,
    exchange: Exchange = single_rank,
) -> None:
    """Measure parameters that are not known for this GPU, keep and use them.

    What is found for a GEMM is kept before the next one is tried. The model's slots, tables and KV are used, and are
    cleared afterwards. CapacityError if memory does not suffice for the steps.
    """
    gemms, max_rows = tuner.matmuls(model.graph), model.limits.max_decodes
    known = _known_of_first(tuner, tuner.table, cache, exchange)
    unknown = {size: [each for each in gemms if tuner.key(size, each) not in known] for size in _buckets(max_rows)}
    unknown = {size: missing for size, missing in unknown.items() if missing}
    if not unknown:
        has = f"knows all {len(gemms)} {tuner.what} of" if gemms else f"finds no {tuner.what} to tune in"
        log(f"tune=true {has} this model on {tuner.gpu}: nothing is measured")
        return
    trial, others = tuner.trial(tuner.known(known)), model.kernels
    tuning = _Tuning(model, tuner, trial, cache, progress, log, capture or _capture_on_gpu(exchange), exchange, others)
    with _pool_of(model, min(max(unknown), max_rows)):
        for size, missing in unknown.items():
            tuning.measure(size, min(size, max_rows), missing)
        found = known | {key: tuner.to_entry(chosen) for key, chosen in trial.chosen.items()}
        model.use({**others, **tuner.kernels(tuner.known(found))})


def use_measured_drafts(
    model: Model, tuner: Tuner, cache: Path, text: str, log: Log, exchange: Exchange = single_rank
) -> DraftTable | None:
    """The table of steps with drafts that was measured on this machine; None if some are missing.

    text: the digest of the model's text
    """
    known, missing = _split_drafts(model, _known_of_first(tuner, tuned.DRAFTS, cache, exchange), text)
    return None if missing else _describe_table(known, log)


@torch.inference_mode()
def tune_drafts(
    model: Model,
    tuner: Tuner,
    cache: Path,
    text: str,
    log: Log,
    capture: Capture | None = None,
    exchange: Exchange = single_rank,
) -> DraftTable:
    """Measure how long steps take with each number of drafts, and without, unless that is known, and keep it.

    A step is timed with its draw and the draft's own layers after it: without drafts, with one draft of each sequence,
    and with the max number. Times between these are interpolated. Other parameters are as in `tune`.
    """
    known, missing = _split_drafts(model, _known_of_first(tuner, tuned.DRAFTS, cache, exchange), text)
    if missing:
        capture = capture or _capture_on_gpu(exchange)
        with _pool_of(model, min(max(missing), model.limits.max_decodes)):
            for size in missing:
                rows = _admit(model, min(size, model.limits.max_decodes))
                known[size] = _time_drafts(model, rows, capture)
                if len(rows) == size:
                    _keep(tuner.gpu, cache, tuned.DRAFTS, {_key_of_drafts(size, text): known[size]}, log)
    return _describe_table(known, log)


def _time_drafts(model: Model, slots: Tensor, capture: Capture) -> list[float]:
    """Microseconds of a step of these slots i32[S] with 0, 1, … drafts of each, the shortest of TIMINGS."""
    index, times = slots.long(), dict[int, float]()
    known = model.state.tokens.index_select(0, index), model.state.lengths.index_select(0, index)
    for num_drafts in sorted({0, 1, model.num_drafts}):
        time = capture(partial(_step_with_drafts, model, slots, num_drafts, known))
        times[num_drafts] = min(time() for _ in range(TIMINGS)) * 1e6
    return [round(float(time), 3) for time in np.interp(range(model.num_drafts + 1), [*times], [*times.values()])]


def _step_with_drafts(model: Model, slots: Tensor, num_drafts: int, known: tuple[Tensor, Tensor]) -> None:
    """A step with its draw. known: the newest tokens and lengths that it begins with, each time it is run"""
    for kept, values in zip((model.state.tokens, model.state.lengths), known, strict=True):
        kept.index_copy_(0, slots.long(), values)
    if num_drafts:
        max_accepted = torch.full_like(slots, num_drafts)
        started = begin(model, model.decode_drafts(slots, max_accepted, num_drafts), slots, max_accepted=max_accepted)
    else:
        started = begin(model, model.decode(slots), slots)
    assert started.logits is not None, "decodes sample"
    draw(model, started, started.logits, SAMPLING_KINDS[0])
    started.follow()


def _split_drafts(model: Model, known: tuned.Table, text: str) -> tuple[dict[int, list[float]], list[int]]:
    """The times that are known, by sequences of a step, and the sizes of steps whose times are not."""
    keys = {size: _key_of_drafts(size, text) for size in _buckets(model.limits.max_decodes)}
    found = {size: known[key] for size, key in keys.items() if len(known.get(key, ())) > model.num_drafts}
    return found, [size for size in keys if size not in found]


def _key_of_drafts(size: int, text: str) -> str:
    return f"{size} {text[:16]}"


def _keep(gpu: str, cache: Path, table: str, entry: tuned.Table, log: Log) -> bool:
    """Keep what was measured; False, with a line for the user, if the cache folder takes no file."""
    try:
        tuned.save(gpu, cache, table, entry)
    except (Unfit, OSError) as error:
        log(f"{cache} takes no file ({reason_of(error)}): what is found is only for this run")
        return False
    return True


def _describe_table(times: dict[int, list[float]], log: Log) -> DraftTable:
    table = DraftTable(times)
    counts = ", ".join(f"{max(table.choices(size), default=0)} up to {size}" for size in times)
    log(f"drafts of a sequence, at most, by sequences of a step, as measured: {counts}; above none")
    return table


def _buckets(max_rows: int) -> list[int]:
    """The numbers of rows to measure, up to the one that holds max_rows."""
    return [size for before, size in zip((0, *tuned.BUCKETS), tuned.BUCKETS, strict=False) if before < max_rows]


@contextmanager
def _pool_of(model: Model, num_rows: int) -> Iterator[None]:
    """Give a model the KV of this number of contexts; its slots, tables and KV are cleared afterwards.

    CapacityError, with what to do, if memory does not suffice; the model is without KV then.
    """
    num_blocks = {kv.kind: len(tensor) for kv, tensor in model.caches.items()}
    try:
        model.bind(_pool(model, num_rows))
        yield
    except (RuntimeError, CapacityError) as error:
        if not isinstance(error, CapacityError) and not is_out_of_memory(error):
            raise
        raise CapacityError(
            f"tune=true: steps of {num_rows} decodes ran out of memory: "
            f"lower serve.max_num_seqs (to {max(num_rows // 2, 1)}), or leave tune=true out"
        ) from None
    model.clear_slots()
    model.bind(num_blocks)


@dataclass
class _Tuning:
    model: Model
    tuner: Tuner
    trial: Any
    cache: Path
    progress: Progress
    log: Log
    capture: Capture
    exchange: Exchange
    others: Kernels  # of ops that this tuner does not tune
    is_kept: bool = True  # results can be written to the cache folder

    def measure(self, size: int, num_rows: int, gemms: Sequence[Any]) -> None:
        """Find the parameters of GEMMs for up to `size` rows in a step of num_rows, and keep them if both are equal."""
        rows = _admit(self.model, num_rows)
        recording = self.tuner.recording()
        self.model.use({**self.others, **recording.kernels})
        self.model.decode(rows)
        self.model.use({**self.others, **self.tuner.kernels(self.trial)})
        step = partial(self.model.decode, rows)
        start = self.capture(step)
        for at, gemm in enumerate(gemms):
            found = self.find(gemm, rows, recording.calls_of(gemm), f"{at + 1} of {len(gemms)}")
            if num_rows == size:
                self.keep(self.tuner.key(size, gemm), found)
        before, after = self.tuner.take_turns(start, self.capture(step))
        took = f"{after * 1e3:.3f} ms in place of {before * 1e3:.3f}, {1 - after / before:.1%} less"
        unkept = "" if num_rows == size else f"; not kept, as it would be for up to {size}"
        self.log(f"tune=true: a step of {num_rows} decodes takes {took}{unkept}")

    def find(self, gemm: Any, rows: Tensor, calls: Sequence[Any], place: str) -> Any:
        """Find a GEMM's parameters for these rows; they are used from now on."""
        tuner, trial, key = self.tuner, self.trial, self.tuner.key(len(rows), gemm)
        current, options = tuner.options(len(rows), gemm, trial)
        if not calls:  # other kernels take this number of rows
            trial.chosen[key] = current
            return current

        def prepare(parameters: Any) -> Callable[[], float]:
            trial.chosen[key] = parameters
            return self.capture(partial(self.model.decode, rows))

        title = f"tuning {len(rows)} rows of {gemm.inner} → {gemm.out}, {place}"
        with self.progress.task(title, 2 * len(options), in_bytes=False) as task:
            fitting = compile_options(tuner, calls, options, partial(task.advance, 1), self.exchange)
            fastest = tuner.search(current, fitting.right, prepare, partial(task.advance, 1))
            task.advance(len(options) - len(fitting.right))
        for option in fitting.wrong:
            shape = f"{gemm.out} × {gemm.inner}"
            self.log(f"tune=true: {option} of {shape} differs from the untuned result: not used")
        trial.chosen[key] = fastest
        return fastest

    def keep(self, key: str, parameters: Any) -> None:
        if self.is_kept:
            entry = {key: self.tuner.to_entry(parameters)}
            self.is_kept = _keep(self.tuner.gpu, self.cache, self.tuner.table, entry, self.log)


@dataclass
class Fitting:
    """The options with the untuned result, and those without."""

    right: list[Any]
    wrong: list[Any]


def compile_options(
    tuner: Tuner,
    calls: Sequence[Any],
    options: Sequence[Any],
    on_compiled: Callable[[], object],
    exchange: Exchange = single_rank,
) -> Fitting:
    """Compile these calls with each option, on all cores, and check their results, on all ranks."""

    @torch.inference_mode()
    def is_fit(option: Any) -> bool:
        if option is None:  # untuned, compiled already
            return True
        try:
            for call in calls:
                call(parameters=lambda *_: option)
        except Exception as error:
            if not tuner.is_unfit(error):
                raise
            return False
        return True

    fitting: list[Any] = []
    # compilers release the interpreter's lock
    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)), initializer=partial(_enter_context, _current_gpu()))
    try:
        for option, fits in zip(options, pool.map(is_fit, options), strict=True):
            fitting += [option] if fits else []
            on_compiled()
    finally:
        pool.shutdown(cancel_futures=True)
    right = [option for option in fitting if option is None or all(tuner.agrees(call, option) for call in calls)]
    of_ranks = _of_all([[option in each for option in options] for each in (fitting, right)], exchange)
    fits_all, is_right = ([all(flags) for flags in zip(*each, strict=True)] for each in zip(*of_ranks, strict=True))
    is_wrong = [fits and not is_same for fits, is_same in zip(fits_all, is_right, strict=True)]
    return Fitting(list(compress(options, is_right)), list(compress(options, is_wrong)))


def _current_gpu() -> int | None:
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.current_device() if is_used else None


def _enter_context(gpu: int | None) -> None:
    """Make a thread use a GPU's context, in which TMA descriptors are made; a launch would do so too late."""
    if gpu is not None:
        torch.cuda.synchronize(gpu)


def _pool(model: Model, num_rows: int) -> dict[str, int]:
    """Blocks by state kind that hold the context of num_rows, or take half of the free memory."""
    num_blocks = 1 + num_rows * -(-_length(model) // model.block_size)
    if not model.is_cpu:
        size = sum(cache[0].nbytes for cache in model.caches.values())
        num_blocks = max(2, min(num_blocks, torch.cuda.mem_get_info()[0] // 2 // size))
    return dict.fromkeys((*model.kinds, *model.recurrent), num_blocks)


def _length(model: Model) -> int:
    return min(CONTEXT, model.limits.max_model_len)


def _admit(model: Model, num_rows: int) -> Tensor:
    """Fill slots from 0 on with a context; their numbers, i32[num_rows]."""
    length, device = _length(model), model.device
    greedy = SamplingParams(temperature=0)
    model.state.admit(bytearray(b"".join(pack_admission(slot, length, greedy, 0) for slot in range(num_rows))))
    rows = torch.arange(num_rows, dtype=torch.int32, device=device)
    model.state.tokens[:num_rows] = rows.long() * 7919 % model.state.vocab  # other experts for each
    width, per_row = model.tables.shape[2], -(-length // model.block_size)
    entries = rows[:, None] * per_row + torch.arange(width, dtype=torch.int32, device=device) % per_row
    by_kind = {kv.kind: len(cache) for kv, cache in model.caches.items()}
    for kind, name in enumerate(model.kinds):
        model.tables[kind, :num_rows] = 1 + entries % (by_kind[name] - 1)  # all valid, and none is block 0
    for cache in model.caches.values():
        cache.copy_(torch.randn(cache.shape[1:], device=device))  # a block for all; fp8 has no normal_
    return rows


def _of_all(own: Any, exchange: Exchange) -> list[Any]:
    """A value of each rank, in order; all call this at the same time."""
    return [msgspec.msgpack.decode(each) for each in exchange(msgspec.msgpack.encode(own))]


def _known_of_first(tuner: Tuner, table: str, cache: Path, exchange: Exchange) -> tuned.Table:
    """The measured entries of a table that the first rank has; all ranks call this at the same time."""
    return dict(_of_all(tuned.read(tuner.gpu, cache)[table], exchange)[0])


def _capture_on_gpu(exchange: Exchange) -> Capture:
    """Capture CUDA graphs that share their memory, since their results are not read."""
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    kept: list[torch.cuda.CUDAGraph] = []  # the latest graph, since a pool ends with its last one

    def capture(run: Callable[[], object]) -> Callable[[], float]:
        run()  # what a first launch allocates for good must not be in a graph
        graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
        kept[:] = [graph]

        def time(num: int) -> float:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            for _ in range(num):
                graph.replay()
            end.record()
            end.synchronize()
            return float(max(_of_all(start.elapsed_time(end) / num / 1e3, exchange)))

        time(1)  # uploads the graph to the GPU
        return partial(time, math.ceil(SECONDS / time(1)))

    return capture
