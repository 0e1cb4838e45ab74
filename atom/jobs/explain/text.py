"""Write the results of `job=explain` as text, for a terminal and its page."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from atom.compiler import mesh_of
from atom.config import Config
from atom.config.schema import ServeConfig
from atom.graph.types import BITS
from atom.jobs.explain.changes import code_lines, kind_of
from atom.jobs.explain.layouts import CONTEXT

UNITS = ("bytes", "KiB", "MiB", "GiB")
Line = tuple[str, str]  # what it is about, and the text


def folded_diff(before: str, after: str) -> Iterator[str]:
    """The changed lines, each kind of line once: layers differ in their numbers only."""
    old, new = code_lines(before), code_lines(after)
    seen = set[str | None]()
    num_folded = 0
    for line in difflib.unified_diff(old, new, n=0, lineterm=""):
        if line.startswith(("---", "+++", "@@")):
            continue
        kind = kind_of(line)
        if kind in seen:
            num_folded += 1
            continue
        seen.add(kind)
        yield line
    if num_folded:
        yield f"… and {num_folded} lines like these"


def describe(result: dict[str, Any], config: Config) -> Iterator[Line]:
    """Describe the sizes."""
    if result.get("pieces"):
        yield from _describe_pieces(result)
    if "ranks" in result:
        yield from _describe_ranks(result, config)
    yield from _describe_weights(result, config)
    yield from _describe_invariance(result["batch_invariant"])
    yield from _describe_drafts(result)
    yield from _describe_kv(result, config)
    if "gpu" in result:
        yield from _describe_gpu(result["gpu"], result["weights_bytes"], config)


def _describe_pieces(result: dict[str, Any]) -> Iterator[Line]:
    distinct = result["distinct_pieces"]
    num_cached = sum(piece["cached"] for piece in distinct)
    yield "pieces", f"{result['pieces']}, {len(distinct)} distinct, {num_cached} in the cache"
    for piece in distinct:
        where = "in the cache" if piece["cached"] else "not in the cache"
        if piece["fault"]:
            where = f"in the cache and not used: {piece['fault']}"
        yield f"  {piece['key'][:8]}", f"{piece['times']} times {piece['name']}, {where}"


def _describe_invariance(found: Mapping[str, Sequence[str]]) -> Iterator[Line]:
    yield "same bits", f"in any batch: {', '.join(found['kernels']) or 'no kernel'}"
    if found["others"]:
        yield "  others", ", ".join(found["others"])


def _describe_ranks(result: dict[str, Any], config: Config) -> Iterator[Line]:
    sizes = ", ".join(f"{axis} {size}" for axis, size in result["ranks"].items() if size > 1)
    yield "ranks", f"{mesh_of(config).num_ranks} ({sizes}); bytes and limits are of each"
    for stage, each in enumerate(result.get("stages", ())):
        held, kv_bytes = format_bytes(each["weights_bytes"]), each["kv_bytes_per_token"]
        shown = "; the one that is shown" if stage == config.job.pipeline_rank else ""
        yield f"  stage {stage}", f"{each['layers']} layers, {held}, {kv_bytes:,} bytes of KV a token{shown}"
    for name, each in result["collectives"].items():
        yield f"  {name}", f"{each['times']} times a step, {each['bytes_per_token']:,} bytes a token in all"
    for name, each in result.get("exchanges", {}).items():
        time = f"{each['seconds_per_token'] * 1e6:,.1f} us at {config.job.network / 1e9:g} GB/s"
        chosen = "; as this text does" if name == config.parallel.dispatch else ""
        yield (
            f"  by {name}",
            f"{each['bytes_per_token']:,} bytes a token from a rank to other groups, {time}{chosen}",
        )


def _describe_weights(result: dict[str, Any], config: Config) -> Iterator[Line]:
    yield "parameters", f"{result['parameters']:,} in all, {result['active_parameters']:,} active"
    yield (
        "weights",
        f"{format_bytes(result['weights_bytes'])} in all, {format_bytes(result['active_weights_bytes'])} active",
    )
    if on_host := result.get("host_weights_bytes"):
        yield "  on the host", f"{format_bytes(on_host)}, of which a token reads rows"
    for fmt, size in result["formats"].items():
        stored, held = size["stored_bytes"], size["held_bytes"]
        where = " on a rank" if "ranks" in result else ""
        then = f", of which {format_bytes(held)} stay so{where}" if held < stored else ""
        if fmt not in BITS and held > stored:
            then = f", {format_bytes(held)} in memory"
        yield f"  {fmt}", f"{format_bytes(stored)}{then}" if stored else f"{format_bytes(held)}, packed while they load"
    if "calibration" in result:
        yield "rounding", _rounding(result["calibration"])
    for act, num_linears in result["activations"].items():
        yield "activations", f"{act} in {num_linears} linears, for many rows"
    for line in result["left_plain"]:
        yield "activations", f"quant.act={config.quant.act}: {line}"


def _describe_drafts(result: dict[str, Any]) -> Iterator[Line]:
    if result.get("draft_bytes"):  # a stage before the last one only gets drafts
        yield "drafts", f"{format_bytes(result['draft_bytes'])} of weights are read for a token of a sequence"
    if "draft_counts" in result:
        counts = "".join(f"{count} up to {size} sequences, " for size, count in result["draft_counts"].items())
        yield "drafted", f"{counts}above none" if counts else "none"
    for gpu, each in result.get("draft_times", {}).items():
        for size, times in each.items():
            measured = ", ".join(f"{time / 1e3:.3f}" for time in times)
            yield f"  {gpu}", f"{measured} ms a step of {size} sequences with 0, 1, … drafts of each"
    for name in result["left_out"]:
        yield "left out", f"{name}, stored after the last layer to predict further tokens"


def _describe_kv(result: dict[str, Any], config: Config) -> Iterator[Line]:
    yield "KV a token", _each(result["kv_bytes_per_token"], "bytes")
    serve = config.serve
    if "state_bytes" in result:
        held = f"{result['state_slots']} sequences and {result['state_copies']} copies"
        states = f" ({config.limits.num_states} states)" if config.limits.num_drafts else ""
        yield "recurrent state", f"{format_bytes(result['state_bytes'])} a sequence{states}, room for {held}"
    if "gpu" in result and serve.num_kvcache_blocks is None and serve.kv_cache_memory == ServeConfig.kv_cache_memory:
        return  # that GPU gives the pool what is left, which the lines about it say
    too_few = "" if result["kv_longest_sequence"] == serve.max_model_len else f": too few for {_longest(config)}"
    yield "KV pool", f"{format_bytes(result['kv_pool_bytes'])} for {_each(result['kv_tokens'], 'tokens')}{too_few}"


def _describe_gpu(gpu: dict[str, Any], weights_bytes: int, config: Config) -> Iterator[Line]:
    yield "", ""
    yield "GPU", f"{gpu['name']}: {format_bytes(gpu['memory_bytes'])} of memory, {gpu['bandwidth'] / 1e12:.2f} TB/s"
    if gpu["weights_fit"]:
        yield "  weights", f"fit: {weights_bytes / gpu['memory_bytes']:.1%} of its memory"
        does = "fits" if gpu["fits"] else "does not fit"
        room = _each(gpu["kv_tokens"], "tokens")
        if "state_slots" in gpu:
            room += f" and the states of {gpu['state_slots']} sequences"
        yield "  KV", f"{_longest(config)} {does}: after the weights there is room for {room}"
    else:
        yield "  weights", f"do not fit: they need at least {gpu['gpus_for_weights']} such GPUs"
    read = "weights, KV and states" if "state_slots" in gpu else "weights and KV"
    yield "  decode", f"{_decode(gpu['decode'])}: its bandwidth over {read}"
    for each in gpu["decode"]:
        moved = each["step_bytes"]
        yield f"  of {each['requests']}", f"{_shares(moved)} of {format_bytes(sum(moved.values()))} that a step moves"
    if times := [each["collective_seconds"] for each in gpu["decode"] if each["collective_seconds"]]:
        shown = ", ".join(f"{seconds * 1e3:.2f} ms" for seconds in times)
        yield "  collectives", f"{shown} of these steps, by the times in the GPU's file"
    if rate := gpu["prefill_tokens_per_second"]:
        yield "  prefill", f"at most {rate:,.0f} tokens/s: its rate over the layers' GEMMs, without attention"
        seconds, prompt = gpu["prompt"]["seconds"], gpu["prompt"]
        kinds = {("GEMMs" if kind == "matrix" else kind): each for kind, each in seconds.items()}
        at_most = f"at most {prompt['tokens_per_second']:,.0f} tokens/s for one of {prompt['tokens']:,} tokens"
        yield "  prompt", f"{at_most}: {_shares(kinds)} of {sum(seconds.values()) * 1e3:,.1f} ms"
    for layout in gpu.get("layouts", ()):
        yield f"  {layout['name']}", _layout(layout)


def _longest(config: Config) -> str:
    return f"one sequence of max_model_len={config.serve.max_model_len:,}"


def _rounding(calibration: str) -> str:
    if calibration == "none":
        return "4 bits to the nearest: quant.calibration=none"
    is_built_in = calibration in ("auto", "prompt")
    text = "the built-in text, if there is a tokenizer" if is_built_in else calibration
    return f"{'4 bits' if calibration == 'auto' else 'packed weights'} calibrated on {text}"


def _layout(layout: dict[str, Any]) -> str:
    """Describe a layout of ranks on several GPUs."""
    if "refused" in layout:
        return str(layout["refused"])
    held = f"{format_bytes(layout['weights_bytes'])} of weights a GPU"
    if not layout["weights_fit"]:
        return f"{held} do not fit"
    return f"{held}, room for {_each(layout['kv_tokens'], 'tokens')}, {_decode(layout['decode'])}"


def _decode(limits: list[dict[str, Any]]) -> str:
    one, *more = limits
    others = "".join(f", {each['tokens_per_second']:,.0f} for {each['requests']}" for each in more)
    which = "" if all(each["collective_seconds"] is not None for each in limits) else ", without collectives"
    return f"at most {one['tokens_per_second']:,.0f} tokens/s for one request of {CONTEXT:,} tokens{others}{which}"


def _each(numbers: dict[str, int], unit: str) -> str:
    return ", ".join(f"{number:,} {unit} ({name})" for name, number in numbers.items())


def _shares(parts: dict[str, float]) -> str:
    whole = sum(parts.values())
    return ", ".join(f"{name} {part / whole:.1%}" for name, part in parts.items())


def format_bytes(num_bytes: int) -> str:
    power = min(max(num_bytes.bit_length() - 1, 0) // 10, len(UNITS) - 1)
    return f"{num_bytes / 1024**power:,.1f} {UNITS[power]}" if power else f"{num_bytes:,} bytes"
