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

MAX_DEPTH = 100  # of schemas in schemas
BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # name -> schema
VALUES = ("const", "enum", "default", "example", "examples")  # keys whose values are no schemas


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
    """The schema for a tool_choice of "required" or of one function. RequestError where there is no such function.

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
                    key: arguments_schema(tool, index, f"#/items/anyOf/{index}/properties/{key}"),
                },
                "required": ["name", key],
                "additionalProperties": False,
            }
            for index, (name, tool) in enumerate(zip(names, tools, strict=True))
        ]
        most = {} if is_parallel else {"maxItems": 1}
        return {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **most}
    name = chosen_name(choice)
    if name not in names:
        raise RequestError(f"tool_choice: there is no function {name} in tools; there is: {', '.join(names)}")
    index = names.index(name)
    return arguments_schema(tools[index], index, "#")


def chosen_name(choice: str | Mapping[str, Any]) -> str:
    """The name of the function in a tool_choice."""
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        named = '{"type": "function", "function": {"name": …}}'
        raise RequestError(f"tool_choice={choice!r} is not required or {named}")
    return name


def arguments_schema(tool: Mapping[str, Any], index: int, at: str) -> dict[str, Any]:
    """The schema of a tool's arguments, moved to `at` in a document, a URI fragment."""
    parameters = tool["function"].get("parameters")
    if parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    where = f"tools[{index}].function.parameters"
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise RequestError(f'{where} is not a JSON schema of {{"type": "object"}}')
    moved: dict[str, Any] = move_schema({"type": "object", **parameters}, at, where)
    return moved


def move_schema(schema: Any, to: str, where: str, depth: int = 0) -> Any:
    """Rewrite the references of a schema that moves from a document's root to the fragment `to`."""
    if depth > MAX_DEPTH:
        raise RequestError(f"{where}: schemas are nested more than {MAX_DEPTH} deep")
    if isinstance(schema, list):
        return [move_schema(item, to, where, depth + 1) for item in schema]
    if not isinstance(schema, Mapping) or "$id" in schema:  # a schema with an id is its own root
        return schema

    def move(key: str, value: Any) -> Any:
        if key in VALUES:
            return value
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            return to + value[1:]
        if key in BY_NAME and isinstance(value, Mapping):
            return {name: move_schema(item, to, where, depth + 1) for name, item in value.items()}
        return move_schema(value, to, where, depth + 1)

    return {key: move(key, value) for key, value in schema.items()}
