"""Compile chat templates, and prepare what they render, by the rules of transformers 5.

    compile_template(source).render(messages=messages, add_generation_prompt=True)
    find_variables(source)      # {"messages", "tools", "enable_thinking"}
    find_levels(source)         # ("low", "medium", "xhigh")

A template is a program of the checkpoint: jinja2 renders it in its sandbox.
"""

from __future__ import annotations

import json
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from atom.errors import CheckpointError, RequestError, first_line

if TYPE_CHECKING:
    import jinja2
    from jinja2 import nodes

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@lru_cache(maxsize=16)
def compile_template(source: str) -> jinja2.Template:
    """Compile a chat template in transformers' environment: trimmed blocks, loop controls, functions, `generation`."""
    import jinja2
    from jinja2 import ext, nodes, sandbox
    from jinja2.parser import Parser

    class GenerationTag(ext.Extension):  # marks an answer's text for training; here it is just its text
        tags = {"generation"}  # noqa: RUF012 (jinja2 declares it as an instance variable)

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:  # jinja's own escapes HTML
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise CheckpointError(f"the checkpoint's chat template is not valid jinja: {first_line(error)}") from None


@lru_cache(maxsize=16)
def find_variables(source: str) -> frozenset[str]:
    """The variables that a chat template reads, without those that it has set before."""
    from jinja2 import meta

    return frozenset(meta.find_undeclared_variables(compile_template(source).environment.parse(source)))


@lru_cache(maxsize=16)
def find_levels(source: str) -> tuple[str, ...]:
    """The levels that a chat template compares reasoning_effort with, ascending; empty if it takes any text."""
    from jinja2 import nodes

    tree = compile_template(source).environment.parse(source)
    names, lists = {"reasoning_effort"}, dict[str, nodes.Expr]()
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name):
            if isinstance(assign.node, nodes.List | nodes.Tuple | nodes.Dict):
                lists[assign.target.name] = assign.node
            elif names.intersection(names_in(assign.node)):
                names.add(assign.target.name)
    found = set[Any]()
    for each in tree.find_all((nodes.Compare, nodes.Getitem)):
        read = names_in(each)
        if read & names:
            known = [each, *(lists[name] for name in read if name in lists)]
            found |= {const.value for node in known for const in node.find_all(nodes.Const)}
    return tuple(level for level in EFFORTS if level in found)


def names_in(node: nodes.Node) -> set[str]:
    """The variables that an expression reads."""
    from jinja2 import nodes

    own = {node.name} if isinstance(node, nodes.Name) else set[str]()
    return own | {name.name for name in node.find_all(nodes.Name)}


class Arguments(dict[str, Any]):
    """The arguments of a call: an object, and its JSON if a template joins it to other texts, as DeepSeek's do."""

    def __add__(self, other: Any) -> Any:
        return self._text() + other

    def __radd__(self, other: Any) -> Any:
        return other + self._text()

    def _text(self) -> str:
        return json.dumps(self, ensure_ascii=False)


def with_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose calls have `Arguments`."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    whole = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), dict):
            call = call | {"function": function | {"arguments": Arguments(function["arguments"])}}
        whole.append(call)
    return message | {"tool_calls": whole}


def cut_after_content(prompt: str, content: str) -> str:
    """A rendered chat up to the end of its last message, as transformers' continue_final_message cuts it."""
    start, found = content.lstrip(), prompt.rfind(content.strip())
    if found < 0:
        raise RequestError("the chat template changes the last message, which cannot be continued then")
    is_kept = prompt.startswith(start, found)  # with the spaces at its end, which many templates strip
    return prompt[: found + len(start if is_kept else content.strip())]


def last_text(content: Any) -> str:
    """The text that a message ends with: its content, or the last part of it."""
    if isinstance(content, list):
        last = content[-1] if content else None
        content = last.get("text") if isinstance(last, dict) else None
    return content or ""


def named_templates(templates: Any) -> dict[str, str]:
    """Chat templates by name, from any stored form: text, {name: text}, [{name, template}]."""
    if isinstance(templates, list):
        return {entry["name"]: entry["template"] for entry in templates}
    return templates if isinstance(templates, dict) else {"default": templates} if templates else {}
