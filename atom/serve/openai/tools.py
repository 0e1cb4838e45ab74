"""Choose the tools that a model is shown: functions, which the client runs.

    tools = offered_tools(context, body.tools, body.tool_choice)

Agents send web search and the like with every request, whether or not a model uses them. They are left out, Anthropic's
own tools too, and each kind is logged once. A choice that forces one of them is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from atom.serve.context import Context
from atom.serve.http.errors import FieldError
from atom.serve.openai.schema import AllowedChoice, NamedTool, OtherTool, Tool


def offered_tools(
    context: Context, tools: Sequence[Tool | OtherTool] | None, choice: str | NamedTool | AllowedChoice | None = None
) -> list[Tool]:
    """The functions among a request's tools. FieldError if a choice forces a call, and allows no function."""
    allowed = choice.allowed_tools.tools if isinstance(choice, AllowedChoice) else tools or ()
    kinds = sorted({each.type for each in (*(tools or ()), *allowed) if isinstance(each, OtherTool)})
    mode = choice.allowed_tools.mode if isinstance(choice, AllowedChoice) else choice
    if kinds and mode == "required" and all(isinstance(each, OtherTool) for each in allowed):
        fault = f"tool_choice forces a call, but no {' or '.join(kinds)} is called here"
        raise FieldError("tool_choice", f"{fault}; leave tool_choice out, or send a function, which the client runs")
    for kind in kinds:
        context.log_once(f"tools of the type {kind} are left out of prompts: a model is shown functions only")
    return [each for each in tools or () if isinstance(each, Tool)]
