"""Flatten namespaces of tools: their functions under one name each.

    flat_tools(body.tools)       # mcp__weather__look_up, of {"type": "namespace", "name": "mcp__weather", "tools": […]}
    call_names(body.tools)       # {"mcp__weather__look_up": {"name": "look_up", "namespace": "mcp__weather"}}

Codex sends the tools of an MCP server so, and takes only calls that name the namespace apart. Chat templates have no
such thing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from atom.serve.openai.responses_schema import FunctionTool, NamespaceTool
from atom.serve.openai.schema import OtherTool

GivenTool = FunctionTool | NamespaceTool | OtherTool


def flat_name(namespace: str | None, name: str) -> str:
    """The name by which the model calls a function."""
    return name if namespace is None else f"{namespace}__{name}"


def flat_tools(tools: Sequence[GivenTool]) -> Iterator[FunctionTool | OtherTool]:
    """The tools with those of namespaces in their place; a namespace's description begins its first function's."""
    for tool in tools:
        if not isinstance(tool, NamespaceTool):
            yield tool
            continue
        heading = tool.description
        for each in tool.tools:
            if isinstance(each, FunctionTool):
                texts = [text for text in (heading, each.description) if text]
                changed = {"name": flat_name(tool.name, each.name), "description": "\n\n".join(texts) or None}
                heading = None
                yield each.model_copy(update=changed)
            else:
                yield each


def call_names(tools: Sequence[GivenTool]) -> dict[str, dict[str, str]]:
    """What a call of each function in a namespace says as its name, by its flat name."""
    return {
        flat_name(tool.name, each.name): {"name": each.name, "namespace": tool.name}
        for tool in tools
        if isinstance(tool, NamespaceTool)
        for each in tool.tools
        if isinstance(each, FunctionTool)
    }
