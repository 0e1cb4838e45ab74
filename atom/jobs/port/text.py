"""Write a draft as a file, with comments on what has no place yet."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from atom.jobs.port.fit import Draft, Fit
from atom.jobs.port.stored import Stored

NOT_COMPARED = "Not compared with anything: until job=compare agrees, its answers may be wrong without a word."


def write_file(draft: Draft, result: Mapping[str, Any]) -> str:
    """The text of a draft's file, its comments included.

    result: what `job.output=json` prints
    """
    lines = [f"# {line}" for line in begin(draft, result)]
    lines += ["", draft.text().rstrip(), ""]
    for title, entries in sections(result):
        if entries:
            lines += [f"# {title}", *(f"#   {entry}" for entry in entries), "#"]
    return "\n".join(lines).rstrip("\n#") + "\n"


def begin(draft: Draft, result: Mapping[str, Any]) -> Iterator[str]:
    yield f"A draft of job=port for {result['checkpoint']}."
    yield NOT_COMPARED
    near = f"; also near: {', '.join(result['also_near'])}" if result["also_near"] else ""
    yield f"It begins with {result['base']}{near}."
    if result["needs"]:
        yield f"{result['needs']}: this file cannot be the whole model."
    if result["error"]:
        yield f"It cannot be loaded yet: {result['error']}"
    elif not result["stored"]:
        yield "The checkpoint's tensors are not known here: only config.json was read."
    else:
        yield f"{result['placed']} of {result['stored']} names of tensors are placed."
    yield f"Save it as my_conf/model/{draft.name}.yaml, complete it, and compare it:"
    checkpoint = f"checkpoint={result['checkpoint']} model={draft.name}"
    yield f"  atom-run --config-dir my_conf job=port {checkpoint} job.check=true"
    yield f"  atom-run --config-dir my_conf job=compare {checkpoint} dtype=fp32 job.b=transformers"


def sections(result: Mapping[str, Any]) -> Iterator[tuple[str, Sequence[str]]]:
    """What follows the file: a title, and its lines."""
    yield "Guesses, to be looked at:", result["guesses"]
    unread = [f"{name}{each['stored']}: {each['hint']}" for name, each in result["unread_tensors"].items()]
    yield "Tensors that have no place:", unread
    missing = [f"{name} {each}" for name, each in result["missing_tensors"].items()]
    yield "Tensors that the file asks for and the checkpoint lacks:", missing
    yield (
        "Tensors of another shape than the file expects:",
        [f"{name} is {stored}, not {needed}" for name, (stored, needed) in result["misshapen_tensors"].items()],
    )
    fields = [
        f"{key}={json.dumps(each['value'])[:80]}{': ' if each['hint'] else ''}{each['hint']}"
        for key, each in result["unread_fields"].items()
    ]
    yield "Fields of config.json that the file does not read; name each that is right as it is in assumes:", fields


def describe_stored(stored: Stored) -> str:
    """A tensor's dtype, shape and layers, as far as they are known."""
    shape = f" {stored.dtype}{list(stored.shape)}" if stored.shape is not None else ""
    if len(stored.shapes) > 1:
        shape += f" and {len(stored.shapes) - 1} other shapes"
    return shape + (f" in layers {ranges(stored.layers)}" if stored.layers else "")


def ranges(numbers: Sequence[int]) -> str:
    """0-3, 5: whole numbers, runs of them shortened."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in parts)


def describe_fit(fit: Fit, stored: Mapping[str, Stored]) -> str:
    """How much of a checkpoint a file takes, in a line."""
    if fit.error is not None:
        return f"cannot be loaded: {fit.error}"
    if not stored:
        return "its tensors are not known here, only config.json was read"
    placed = len(stored) - len(fit.unread)
    faults = f", {len(fit.missing)} more are asked for" if fit.missing else ""
    wrong = f", {len(fit.misshapen)} are of another shape" if fit.misshapen else ""
    return f"{placed} of {len(stored)} names of tensors are placed{faults}{wrong}"
