"""Show a comparison on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console

from atom.jobs.tables import make_table

NUM_FINDINGS = 12  # that are listed
NUM_SINCE = 8  # calls that are listed before one


def print_result(result: dict[str, Any]) -> None:
    console = Console(soft_wrap=True, highlight=False, markup=False)
    for line in (*summary(result), *choices(result), *first_finding(result), *other_findings(result)):
        console.print(line)
    console.print()
    console.print(layer_table(result))
    console.print()
    for line in (*outputs(result), *bisection(result)):
        console.print(line)


def summary(result: dict[str, Any]) -> Iterator[str]:
    sides, num = result["sides"], len(result["findings"])
    yield f"a: {sides['a']}"
    yield f"b: {sides['b']}"
    num_prompts = len(result["prompts"])
    tokens = sum(prompt["tokens"] + len(prompt["answer"]) - 1 for prompt in result["prompts"])
    yield (
        f"{result['values']} values of {result['lines']} lines compared over {tokens} tokens of "
        f"{num_prompts} prompt{'s' * (num_prompts > 1)}: {f'{num} beyond the bound' if num else 'all within the bound'}"
    )
    if not result["synchronized"]:
        yield "only the values of rank 0 are compared, and errors add up from one to the next"


def choices(result: dict[str, Any]) -> Iterator[str]:
    """The routers that choose other experts."""
    for each in result["choices"]:
        if each["differing"]:
            layer = f" in layer {each['layer']}"
            yield f"experts chosen differ for {each['differing']} of {each['tokens']} tokens{layer}"


def first_finding(result: dict[str, Any]) -> Iterator[str]:
    """The first value beyond the bound, and the calls that it may come from."""
    if not result["findings"]:
        return
    first = result["findings"][0]
    yield ""
    yield f"the first: {where(first)}"
    yield f"    line {first['line']}: {first['text']}"
    if first["passes"]:
        yield f"    made or changed by {', '.join(first['passes'])}"
    calls = before(first)
    if calls:
        yield "    or one of the calls before it, whose results were not compared:"
    for line in calls[-NUM_SINCE:]:
        yield f"    line {line['line']}: {line['text']}"


def before(finding: dict[str, Any]) -> list[dict[str, Any]]:
    """The calls since the compared values before a value, each once, without its own."""
    calls = {line["line"]: line for line in finding["since"]}
    calls.pop(finding["line"], None)
    return list(calls.values())


def other_findings(result: dict[str, Any]) -> Iterator[str]:
    for finding in result["findings"][1:NUM_FINDINGS]:
        yield f"then {where(finding)}, line {finding['line']}"
    if (more := len(result["findings"]) - NUM_FINDINGS) > 0:
        yield f"and {more} more"


def where(finding: dict[str, Any]) -> str:
    """Where a value is off the most, and by how much."""
    layer = "" if finding["layer"] is None else f" of layer {finding['layer']}"
    at = place_of(finding)
    match finding["measure"]:
        case "choices":
            off = f"differs for {finding['error']:.1%} of the tokens, first at {at}, allowed {finding['allowed']:.0%}"
        case "norm":
            off = f"off by {finding['error']:.2g} over all tokens, the most at {at}, allowed {finding['allowed']:.2g}"
        case _:
            off = f"off by {finding['error']:.2g} at {at}, allowed {finding['allowed']:.2g}"
    return f"{finding['program']}'s {finding['value']}{layer}, kernel {finding['kernel']}: {off}"


def place_of(finding: dict[str, Any]) -> str:
    """The token that a value is off the most at."""
    step = f"token {finding['token']}" if finding["step"] == 0 else f"decode {finding['step']}"
    return f"{step} of prompt {finding['prompt']}"


def layer_table(result: dict[str, Any]) -> Any:
    table = make_table("layer", "values", "error", "allowed", "of", "line", left=("layer", "of"))
    for each in result["layers"]:
        mark = " !" if each["error"] > each["allowed"] else ""
        table.add_row(
            *(str(each["layer"]), str(each["values"]), f"{each['error']:.2g}{mark}", f"{each['allowed']:.2g}"),
            *(each["value"], str(each["line"])),
        )
    return table


def outputs(result: dict[str, Any]) -> Iterator[str]:
    """The logits, and the answers."""
    each = result["outputs"]
    yield f"logits: off by {each['error']:.2g} at most, {each['mean_error']:.2g} on average"
    yield f"next tokens: the same at {each['agreement']:.1%} of {each['num']} positions"
    yield f"KL divergence: {each['kl']:.2g} nats on average, {each['max_kl']:.2g} at most"
    differing = [(at, prompt) for at, prompt in enumerate(result["prompts"]) if prompt["difference"]]
    if not differing:
        yield f"greedy answers: the same {len(result['prompts'][0]['answer'])} tokens after each prompt"
    for number, prompt in differing:
        at, gap = prompt["difference"]["token"], prompt["difference"]["gap"]
        ours, theirs = prompt["answer"][at], prompt["expected"][at]
        lead = f"which leads by {gap:.2g} of the largest logit" if gap else "which is a tie"
        yield f"greedy answers: after prompt {number}, token {at} is {ours} and the reference's {theirs}, {lead}"


def bisection(result: dict[str, Any]) -> Iterator[str]:
    if "bisect" in result:
        yield ""
        yield result["bisect"]["line"]
