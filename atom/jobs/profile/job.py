"""`job=profile`: show where a step's time goes, by kernel.

A piece counts as a kernel; on a CPU operators are shown too.

atom-run job=profile checkpoint=/models/qwen3 job.num_prompts=32 job.input_len=1024 job.output_len=64
atom-run job=profile load_dummy=true job.num_steps=8 serve.torch_profiler_dir=traces
atom-run job=profile job.output=json | jq .phases.decode.rows
atom-run job=profile job.output=html > page.html     # the timeline of a step, kernels against their limit

Prefill steps are one trace, and the decode steps after them another.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from torch.profiler import record_function

from atom.config import Config
from atom.errors import ConfigError
from atom.graph import Graph, Program, ops
from atom.jobs.bench.job import describe_run, open_warm
from atom.jobs.bench.roofline import Costs, Limits, Matmul, Work, read_costs, step_work, total, wait_for
from atom.jobs.bench.workload import Record, Step, recording, submit
from atom.jobs.profile.page import make_page
from atom.jobs.profile.trace import KINDS, WITH_LIMITS, Event, Row, Summary, has_events, middle_step, summarize
from atom.jobs.tables import make_table
from atom.kernels import find_piece_compiler
from atom.measurement.cores import core_seconds, warn_of
from atom.pieces import find_pieces
from atom.process.messages import say
from atom.runtime.engine import Engine
from atom.runtime.step.program import Executable
from atom.runtime.step.runner import Runner

PIECE, GAP, OTHER = "piece", "gap", "other"
ALWAYS = ("attention", "matrix", OTHER)  # kinds that are shown even if nothing is of them
NUM_SHOWN = 24  # rows of a table


def run(config: Config) -> int:
    """Print a table for each phase or, with job.output=json, an object with all rows."""
    draw, compiled, costs, limits, engine = open_warm(config)
    graph, num_stages = compiled.graph, config.parallel.pipeline
    if num_stages > 1:  # the trace is of the first one only
        costs = read_costs(graph)
    pieces = prepare_names(engine, graph, config.device)
    phases: dict[str, Any] = {}
    windows: dict[str, list[Event]] = {}  # of a phase, the events of about one step
    engine.scheduler.drop_kv()  # of the runs that have warmed it up
    before = core_seconds()
    with recording(engine) as record:
        ids = submit(engine, draw(engine), config)
        for name, path, steps in trace_phases(engine, record, config):
            with gzip.open(path) as file:
                trace = json.load(file)
            if name == "decode" and not has_events(trace):
                check_ahead(len(steps), engine.runner.run_ahead)
            summary = summarize(trace)
            windows[name] = middle_step(trace, len(steps))
            phases[name] = {"trace": str(path), **describe(summary, steps, costs, limits, pieces)}
        for id in ids:
            engine.abort(id)
    waited = core_seconds().share_waited(before)
    result = {
        **describe_run(config, compiled.level),
        **({"stages": num_stages} if num_stages > 1 else {}),
        "limits": limits.measured(),
        "share_waited_for_cores": waited,
        "warnings": warn_of(waited),
        "phases": phases,
    }
    if config.job.output == "json":
        print(json.dumps(result))
    elif config.job.output == "html":
        print(make_page(result, windows))
    else:
        show(result)
    for warning in result["warnings"]:
        say(warning)
    return 0


def prepare_names(engine: Engine, graph: Graph, device: str) -> list[PieceKernel]:
    """Label the calls of a CPU for the trace; of a GPU, whose kernels have names, find those of pieces."""
    if device != "cpu":
        return find_piece_kernels(graph, device)
    numbers: dict[str, int] = {}
    if isinstance(engine.runner, Runner):
        for name, executable in engine.runner.model.executables.items():
            label_calls(executable, name_calls(graph.programs[name], len(executable._steps), numbers))
    return []


def trace_phases(engine: Engine, record: Record, config: Config) -> Iterator[tuple[str, Path, list[Step]]]:
    """Trace the phases prefill and decode; for each the trace's file and its steps."""
    num_steps = config.job.num_steps
    for phase in ("prefill", "decode"):
        while phase == "decode" and engine.has_work and not is_decoding(engine):
            engine.step()
        first = len(record.steps)
        wait_for(config.device)  # so that a trace has whole steps if they run ahead
        engine.start_profile()
        while engine.has_work and len(record.steps) < first + num_steps and is_decoding(engine) == (phase == "decode"):
            engine.step()
        wait_for(config.device)
        path = engine.stop_profile()
        if steps := record.steps[first:]:
            yield phase, path, steps
        else:
            path.unlink()


def check_ahead(num_steps: int, run_ahead: int) -> None:
    """Raise ConfigError if decodes without events may all have run before their trace began."""
    if num_steps <= run_ahead + 1:
        steps = "the one decode step" if num_steps == 1 else f"all {num_steps} decode steps"
        raise ConfigError(f"{steps} had run before the trace began, since steps run ahead of it: raise job.output_len")


def is_decoding(engine: Engine) -> bool:
    """Whether all running sequences have computed their prompts, and no other can be admitted."""
    scheduler = engine.scheduler
    is_full = not scheduler.num_waiting or scheduler.num_running == scheduler.num_slots
    return is_full and all(sequence.output for sequence in scheduler.running)


def label_calls(executable: Executable, names: Sequence[str]) -> None:
    """Label each call of a program in a trace, with its operators inside."""

    def labelled(call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with record_function(name):
                return call(*args)

        return run

    steps = zip(executable._steps, names, strict=True)
    executable._steps = [step._replace(call=labelled(step.call, name)) for step, name in steps]


def name_calls(program: Program, num_calls: int, numbers: dict[str, int]) -> list[str]:
    """Name each call: kernels as in the text, pieces by number, equal ones alike.

    numbers: of pieces by their text; those of new ones are added.
    """
    pieces = find_pieces(program) if num_calls < len(program.nodes) else []  # else there are no compiled pieces
    first = {piece.calls[0]: f"piece {numbers.setdefault(piece.text, len(numbers))}" for piece in pieces}
    inside = {call for piece in pieces for call in piece.calls}
    return [
        first.get(node) or f"{node.meta.get('kernel', 'reference')}.{node.target.name}"
        for node in program.nodes
        if node in first or node not in inside
    ]


class PieceKernel(NamedTuple):
    """The kernel of one piece, or of several pieces whose kernels have one name in a trace."""

    name: str
    numbers: list[int]  # the pieces' numbers in `job=explain`
    reads: list[tuple[str, Work, Work]]  # for each use: program, work of the kernel, work of one of its rows

    @property
    def title(self) -> str:
        return f"piece {', '.join(map(str, self.numbers))}: {self.name}"

    def limit(self, steps: Sequence[Step], limits: Limits, programs: Container[str]) -> float:
        """programs: those of the text"""
        return sum(
            limits.seconds(total([once, each.times(run.num_rows)]))
            for step in steps
            for run in step.runs(programs)
            for program, once, each in self.reads
            if program == run.program and run.num_rows
        )


def find_piece_kernels(graph: Graph, device: str) -> list[PieceKernel]:
    """Find the kernels of a GPU text's pieces, nearly all of which are one kernel."""
    compiler = find_piece_compiler(device)
    numbers: dict[str, int] = {}
    names: dict[str, list[str]] = {}
    kernels: dict[str, PieceKernel] = {}
    for program in graph.programs.values():
        for piece in find_pieces(program):
            number = numbers.setdefault(piece.text, len(numbers))
            if piece.text not in names:
                names[piece.text] = compiler.kernel_names(piece.text)
            embeddings = [call for call in piece.calls if call.target is ops.embedding]
            tables = [call.args[call.target.weight].type for call in embeddings]  # a token reads one row
            weights = [weight.type for weight in piece.weights if weight.type not in tables]
            once = Work(float(sum(type.num_bytes for type in weights)))
            read = (*tables, *(node.meta["type"] for node in piece.inputs))
            each = Work(float(sum(type.bytes_per_token for type in read)))
            for at, name in enumerate(names[piece.text]):
                kernel = kernels.setdefault(name, PieceKernel(name, [], []))
                kernel.numbers.extend({number} - {*kernel.numbers})
                kernel.reads.extend([(program.name, once, each)] if at == 0 else [])
    return list(kernels.values())


def match_matmuls(
    launches: Sequence[float], costs: Mapping[str, Costs], steps: Sequence[Step], limits: Limits
) -> list[tuple[str, int, float, float]]:
    """Name, calls, seconds and limit of the matmuls with weights of a shape, from the seconds of all in order.

    Empty if kernels and matmuls are not one to one. Steps that ran ahead may follow those that are known.
    """
    by_step = [
        [
            (call, run.num_rows)
            for run in step.runs(costs)
            if run.num_rows
            for call in _calls(costs[run.program].matmuls)
        ]
        for step in steps
    ]
    expected = list(chain.from_iterable(by_step))
    num_ahead, per_step = len(launches) - len(expected), max(map(len, by_step), default=0)
    if not per_step or num_ahead < 0 or num_ahead % per_step:
        return []
    calls, seconds, min_seconds = Counter[str](), defaultdict[str, float](float), defaultdict[str, float](float)
    for (call, num_rows), taken in zip(expected, launches, strict=False):
        name = "weight " + " + ".join(str(list(matmul.shape)) for matmul in call)
        calls[name] += 1
        seconds[name] += taken
        min_seconds[name] += limits.seconds(total(matmul.work(num_rows) for matmul in call))
    return [(name, calls[name], seconds[name], min_seconds[name]) for name in calls]


def _calls(matmuls: Sequence[Matmul]) -> list[list[Matmul]]:
    """The matmuls of each kernel."""
    calls: list[list[Matmul]] = []
    is_last = True
    for matmul in matmuls:
        if is_last:
            calls.append([])
        calls[-1].append(matmul)
        is_last = not matmul.with_next
    return calls


def describe(
    summary: Summary,
    steps: Sequence[Step],
    costs: Mapping[str, Costs],
    limits: Limits,
    pieces: Sequence[PieceKernel] = (),
) -> dict[str, Any]:
    """The summary in plain values; a kind's limit is the min time of all its rows together."""
    piece_of = {piece.name: piece for piece in pieces}
    own = [step.groups[0] if step.groups else step for step in steps]  # the trace is of the first rank
    work = [step_work(costs, step) for step in own]

    def entry(name: str, calls: int, seconds: float, limit: float | None = None) -> dict[str, Any]:
        fields = {"name": name, "calls": calls, "seconds": seconds, "share": seconds / summary.seconds}
        fields["us_per_call"] = seconds / calls * 1e6 if calls else None
        return fields if limit is None else {**fields, "limit_seconds": limit, "share_of_limit": limit / seconds}

    def kind_of(row: Row) -> str:
        return PIECE if row.name in piece_of or row.name.startswith(f"{PIECE} ") else row.kind or OTHER

    kinds = []
    for kind in (*KINDS, PIECE, OTHER):
        rows = [row for row in summary.rows if kind_of(row) == kind]
        calls, seconds = sum(row.calls for row in rows), sum(row.seconds for row in rows)
        has_work = kind in WITH_LIMITS and any(any(each[kind]) for each in work)
        if not rows and not has_work and kind not in ALWAYS:
            continue
        limit = None
        if rows and kind in WITH_LIMITS:
            limit = limits.seconds(total(each[kind] for each in work))
        elif rows and piece_of and kind == PIECE:
            limit = sum(piece_of[row.name].limit(own, limits, costs) for row in rows)
        kinds.append(entry(kind, calls, seconds, limit))
    matmuls = match_matmuls(summary.matmuls, costs, own, limits)
    return {
        "steps": len(steps),
        "tokens": sum(step.num_tokens for step in steps),
        "timeline": summary.timeline,
        "timeline_seconds": summary.seconds,
        "kinds": [*kinds, entry(GAP, summary.num_gaps, summary.gap_seconds)],
        "products": [entry(*matmul) for matmul in matmuls],
        "rows": [
            {**entry(piece.title, row.calls, row.seconds, piece.limit(own, limits, costs)), "kind": PIECE}
            if (piece := piece_of.get(row.name))
            else {**entry(row.name, row.calls, row.seconds), "kind": row.kind}
            for row in summary.rows
        ],
    }


def show(result: dict[str, Any]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{result['model']}, {result['dtype']}, level {result['level']}, on {result['hardware']}")
    if "stages" in result:
        console.print(
            f"the first of {result['stages']} stages; each rank has traces in a folder of its own next to these"
        )
    for phase, about in result["phases"].items():
        per_step = about["timeline_seconds"] / about["steps"] * 1e3
        console.print(
            f"\n{phase}, steps: {about['steps']:,}, tokens: {about['tokens']:,}, {per_step:,.3f} ms a step on the "
            f"{about['timeline']}'s timeline\n{about['trace']}"
        )
        table = make_table("", "calls", "ms", "share", "µs a call", "limit ms", "of limit", left=("",))
        rows = about["rows"]
        for part in (about["kinds"], about["products"], rows[:NUM_SHOWN]):
            for row in part:
                table.add_row(*cells(row))
            table.add_row()
        console.print(table)
        if len(rows) > NUM_SHOWN:
            console.print(f"… and {len(rows) - NUM_SHOWN} more, which job.output=json has")


def cells(row: Mapping[str, Any]) -> list[str]:
    each, limit = row["us_per_call"], row.get("limit_seconds")
    name = row["name"] if len(row["name"]) <= 60 else f"{row['name'][:59]}…"
    shown = [name, f"{row['calls']:,}", f"{row['seconds'] * 1e3:,.3f}", f"{row['share']:.1%}"]
    shown.append("-" if each is None else f"{each:,.1f}")
    if limit is None:
        return shown
    return [*shown, f"{limit * 1e3:,.3f}", f"{row['share_of_limit']:.0%}" if row["share_of_limit"] <= 1 else ">100%"]
