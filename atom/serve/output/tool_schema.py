"""The JSON schema of an answer that must call tools.

    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {…}}}}]
    tool_names(tools)                                    # ["f"]
    tool_schema(tools, "required", "tagged_json")        # a list of at least one {"name": "f", "arguments": {…}}
    tool_schema(tools, {"type": "function", "function": {"name": "f"}}, "tagged_json")       # the arguments of f

The server constrains generation to it (structured outputs), so that the answer can be parsed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from atom.errors import RequestError


def tool_names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of a request's functions, in order. RequestError for a wrong or repeated name."""
    names: list[str] = []
    for index, tool in enumerate(tools):
        function = tool.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if tool.get("type") != "function" or not isinstance(name, str) or not name:
            raise RequestError(f'tools[{index}] is not {{"type": "function", "function": {{"name": …}}}}')
        if name in names:
            raise RequestError(f"tools[{index}]: there is another function {name}; a name stands for one")
        names.append(name)
    return names


def tool_schema(
    tools: Sequence[Mapping[str, Any]],
    choice: str | Mapping[str, Any],
    tool_format: str | None,
    *,
    is_parallel: bool = True,
) -> dict[str, Any]:
    """The schema for a tool_choice of "required" or of one function. RequestError if there is no such function.

    tool_format: the model's format, which decides the key of the arguments
    is_parallel: the answer may have several calls
    """
    names = tool_names(tools)
    if not names:
        raise RequestError("tool_choice forces a call, but the request has no tools")
    if choice == "required":
        key = "parameters" if tool_format == "python_tag" else "arguments"
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": name},
                    key: arguments_schema(tool, index),
                },
                "required": ["name", key],
                "additionalProperties": False,
            }
            for index, (name, tool) in enumerate(zip(names, tools, strict=True))
        ]
        max_items = {} if is_parallel else {"maxItems": 1}
        return {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **max_items}
    name = chosen_name(choice)
    if name not in names:
        raise RequestError(f"tool_choice: there is no function {name} in tools (known: {', '.join(names)})")
    index = names.index(name)
    return arguments_schema(tools[index], index)


def chosen_name(choice: str | Mapping[str, Any]) -> str:
    """The name of the function in a tool_choice."""
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        named = '{"type": "function", "function": {"name": …}}'
        raise RequestError(f"tool_choice={choice!r} is not required or {named}")
    return name


def arguments_schema(tool: Mapping[str, Any], index: int) -> dict[str, Any]:
    """The schema of a tool's arguments, with the tool's name as $id: references in it and errors begin there."""
    function = tool["function"]
    parameters = function.get("parameters")
    if parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    types = parameters.get("type", "object") if isinstance(parameters, Mapping) else None
    if types != "object" and not (isinstance(types, list) and "object" in types):
        raise RequestError(f'tools[{index}].function.parameters is not a JSON schema of {{"type": "object"}}')
    return {**parameters, "type": "object", "$id": function["name"]}
