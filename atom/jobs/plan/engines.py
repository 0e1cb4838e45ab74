"""Try engines: what each layout holds and gives, in the formats of one `quant`.

    tried = try_layouts(tasks, progress)    # Tried(engines, refusal) of each, by several processes
    tried[0].engines[0].runs                # [Run(replicas=1, requests=32, estimate), …], that hold or keep up

A layout is compiled once: formats that differ in the cache only have the same text but for the dtype of its states. The
processes are forks of this one, which has no thread and has not opened a GPU.
"""

from __future__ import annotations

import gc
import os
import threading
from bisect import bisect_left
from collections.abc import Sequence
from math import ceil
from typing import Any, NamedTuple

from atom.assemble import state_kinds
from atom.checkpoint import Progress
from atom.checkpoint.progress import Task as Shown
from atom.config import GPUConfig
from atom.config.schema import ParallelConfig
from atom.errors import ConfigError, UnsupportedError
from atom.graph.recipe_contents import device_bytes
from atom.jobs.explain.layouts import find_room
from atom.jobs.plan.candidates import Candidate, Format, compile_candidate
from atom.jobs.plan.estimate import Estimate, estimate_run
from atom.jobs.plan.forks import Forks
from atom.jobs.plan.load import Load
from atom.jobs.plan.shares import Shares
from atom.kernels import Target
from atom.process.gc_utils import no_collection

MIN_TASKS = 6  # that processes are worth starting for


class Task(NamedTuple):
    """A layout to try."""

    parallel: ParallelConfig  # of one engine
    formats: list[Format]  # of one quant
    num_gpus: int
    gpu: GPUConfig  # with the memory that engines use
    load: Load
    shares: Shares
    target: Target
    batches: tuple[int, ...] = ()  # requests at a time that each engine is estimated with besides


class Run(NamedTuple):
    replicas: int
    requests: int  # at a time, of one engine
    estimate: Estimate  # the same


class Engine(NamedTuple):
    weights_bytes: list[int]  # of a rank of each stage
    sequence_bytes: list[int]  # the same: of the KV and state of a sequence of the context
    sequences: int  # of the context, that memory holds
    runs: list[Run]
    curve: list[Run]  # of task.batches that it holds


class Tried(NamedTuple):
    engines: list[Engine]  # of each format; none if it is refused
    refusal: str | None = None


def try_layouts(tasks: Sequence[Task], progress: Progress) -> list[Tried]:
    """Try layouts, in as many processes as there are cores."""
    num = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1, len(tasks))
    if num == 0:
        return []
    about = f"estimating {len(tasks)} layouts"
    with no_collection():
        if num == 1 or len(tasks) < MIN_TASKS or threading.active_count() > 1:
            with progress.task(about, len(tasks), in_bytes=False) as shown:
                return [_counted(try_layout(task), shown) for task in tasks]
        gc.freeze()
        forks = Forks(lambda number: try_layout(tasks[number]), len(tasks), num)
        with forks, progress.task(about, len(tasks), in_bytes=False) as shown:
            tried = {number: _counted(each, shown) for number, each in forks}
    return [tried[number] for number in range(len(tasks))]


def _counted(tried: Tried, shown: Shown) -> Tried:
    shown.advance(1)
    return tried


def try_layout(task: Task) -> Tried:
    first, *others = task.formats
    try:
        candidate = compile_candidate(first, task.parallel, task.target)
    except (UnsupportedError, ConfigError) as error:
        return Tried([], str(error))
    engines = [describe_engine(candidate, task)]
    for each in others:
        candidate = candidate.with_kv(each)
        engines.append(describe_engine(candidate, task))
    del candidate
    gc.collect()  # graphs are cyclic
    return Tried(engines)


def describe_engine(candidate: Candidate, task: Task) -> Engine:
    room = find_room(task.gpu, candidate.graphs, candidate.config)
    sequences, runs = count_sequences(room, candidate), list[Run]()
    for replicas in num_replicas(candidate.mesh.num_ranks, task.num_gpus) if sequences else ():
        run = estimate_engine(candidate, task, replicas, sequences)
        runs += [run] if run is not None else []
    most = max_requests(candidate, sequences)
    loads = [task.load._replace(requests=batch) for batch in task.batches if batch <= most]
    curve = [Run(1, each.requests, estimate_run(candidate, task.gpu, each, task.shares)) for each in loads]
    return Engine(rank_bytes(candidate), sequence_bytes(candidate), sequences, runs, curve)


def num_replicas(num_ranks: int, num_gpus: int) -> list[int]:
    """The numbers of engines side by side: 1, 2, 4, … and as many as have room."""
    most = num_gpus // num_ranks
    return sorted({*(1 << power for power in range(most.bit_length())), most} - {0})


def estimate_engine(candidate: Candidate, task: Task, replicas: int, sequences: int) -> Run | None:
    """Estimate one of several engines, with its part of the load; None if it does not hold it, or keep up."""
    load, most = task.load, max_requests(candidate, sequences)

    def estimate(requests: int) -> Estimate:
        return estimate_run(candidate, task.gpu, load._replace(requests=requests), task.shares)

    if load.rate is None:
        own = ceil(load.requests / replicas)
        return Run(replicas, own, estimate(own)) if own <= most else None
    rate = load.rate / replicas
    keeps_up = bisect_left(range(1, most + 1), True, key=lambda own: own / estimate(own).seconds >= rate) + 1
    return Run(replicas, keeps_up, estimate(keeps_up)) if keeps_up <= most else None


def max_requests(candidate: Candidate, sequences: int) -> int:
    """The requests that an engine takes at a time, of the sequences that it holds."""
    return min(sequences, candidate.config.limits.max_num_seqs * candidate.mesh.data)


def rank_bytes(candidate: Candidate) -> list[int]:
    """The weights of a rank of each stage."""
    return [sum(map(device_bytes, graph.recipes())) for graph in candidate.graphs]


def sequence_bytes(candidate: Candidate) -> list[int]:
    """The KV and recurrent state that a sequence of the context keeps, in a rank of each stage."""
    config, limits = candidate.config, candidate.config.limits
    return [
        sum(
            kind.bytes_per_slot(limits) if kind.rule.in_slot else kind.blocks(limits.max_model_len) * kind.block_bytes
            for kind in state_kinds(graph, config.serve.block_size)
        )
        for graph in candidate.graphs
    ]


def count_sequences(room: dict[str, Any], candidate: Candidate) -> int:
    """The sequences of the context that an engine holds; 0 if its weights do not fit."""
    if not room["weights_fit"] or not room["fits"]:
        return 0
    counts = [room["kv_sequences"]] if room["kv_tokens"] else []
    counts += [room["state_slots"] * candidate.mesh.data] if "state_slots" in room else []
    return int(min(counts, default=0))
