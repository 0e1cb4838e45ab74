"""Texts of calls in every format, with words that are easy to find again, and mutations of them.

text = write_calls("qwen3_coder", [("f", {"a": "qv1q"})])
mutated = mutate(text, Random(0))
WORD.findall(mutated)           # the words that are left in it
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

WORD = re.compile(r"qv\d+q")  # a value, or text around calls: it must never be lost
PART = re.compile(r"(<[^<>]*>|\[[A-Z_]+\]|qv\d+q|\w+|\s|.)", re.DOTALL)

STRAY = [*'{}[]()<>",:;=\\/\n\'` e1-', "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<parameter=a>", "</parameter>",
         "</function>", '"arguments": null', '{"name": "f"}', "<|call|>", "<|channel|>", "null", "]}", "\\u12", '<|"|>']  # fmt: skip

Calls = Sequence[tuple[str, Mapping[str, Any]]]


def write_calls(tool_format: str, calls: Calls) -> str:
    """Calls as the chat templates of the format's models write them."""
    return WRITERS[tool_format](calls)


def mutate(text: str, random: Random) -> str:
    """Drop, double, insert or swap a character or a part of a text, or cut it off."""
    parts = PART.findall(text) if random.random() < 0.5 else list(text)
    at, other = sorted(random.sample(range(len(parts) + 1), 2))
    match random.randrange(6):
        case 0:
            del parts[at]
        case 1:
            parts.insert(at, parts[at])
        case 2:
            parts.insert(at, random.choice(STRAY))
        case 3:
            parts[at] = random.choice(STRAY)
        case 4:
            parts = parts[:other]
        case _:
            size = random.randint(1, 6)
            parts[at : at + 2 * size] = parts[at + size : at + 2 * size] + parts[at : at + size]
    return "".join(parts)


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def each(form: str, between: str = "\n") -> Callable[[Calls], str]:
    """Each call in this form, in which NAME, ARGUMENTS and INDEX stand for its parts."""

    def write(calls: Calls) -> str:
        return between.join(
            form.replace("NAME", name).replace("INDEX", str(index)).replace("ARGUMENTS", as_json(arguments))
            for index, (name, arguments) in enumerate(calls)
        )

    return write


def listed(begin: str) -> Callable[[Calls], str]:
    """All calls as a JSON list."""
    return lambda calls: begin + as_json([{"name": name, "arguments": value} for name, value in calls])


def python(begin: str, between: str, end: str) -> Callable[[Calls], str]:
    """All calls as in Python."""

    def write(calls: Calls) -> str:
        written = [
            f"{name}({', '.join(f'{key}={value!r}' for key, value in values.items())})" for name, values in calls
        ]
        return begin + between.join(written) + end

    return write


def tagged(call: str, parameter: str, between: str = "\n") -> Callable[[Calls], str]:
    """Each call with its parameters one by one."""

    def write(calls: Calls) -> str:
        texts = []
        for name, values in calls:
            written = (
                parameter.replace("KEY", key)
                .replace("IS_STRING", as_json(isinstance(value, str)))
                .replace("TYPE", "string" if isinstance(value, str) else "object")
                .replace("VALUE", value if isinstance(value, str) else as_json(value))
                for key, value in values.items()
            )
            texts.append(call.replace("NAME", name).replace("PARAMETERS", "".join(f"{each}\n" for each in written)))
        return between.join(texts)

    return write


def as_fields(value: Any) -> str:
    """JSON with bare keys, and strings in quotes of their own."""
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{as_fields(each)}" for key, each in value.items()) + "}"
    return f"[{','.join(map(as_fields, value))}]" if isinstance(value, list) else as_json(value)


def fields(calls: Calls) -> str:
    """Each call with its arguments as fields."""
    return "".join(f"<|tool_call>call:{name}{as_fields(arguments)}<tool_call|>" for name, arguments in calls)


TAG = "]<]minimax[>[<"


def as_element(key: str, value: Any) -> str:
    """An element with others in it for an object or a list."""
    if isinstance(value, Mapping):
        text = "".join(as_element(*each) for each in value.items())
    elif isinstance(value, list):
        text = "".join(as_element("item", each) for each in value)
    else:
        text = value if isinstance(value, str) else as_json(value)
    return f"{TAG}{key}>{text}{TAG}/{key}>"


def elements(calls: Calls) -> str:
    """Each call with its arguments as elements."""
    written = (
        f'{TAG}invoke name="{name}">{"".join(as_element(*each) for each in values.items())}{TAG}/invoke>\n'
        for name, values in calls
    )
    return f"{TAG}tool_call>\n{''.join(written)}{TAG}/tool_call>"


WRITERS: dict[str, Callable[[Calls], str]] = {
    "json": listed("[TOOL_CALLS] "),
    "tagged_json": each('<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>'),
    "longcat": each('<longcat_tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</longcat_tool_call>'),
    "python_tag": each('<|python_tag|>{"name": "NAME", "parameters": ARGUMENTS}', "; "),
    "pythonic": python("[", ", ", "]"),
    "lfm2": python("<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
    "llama4": python("<|python_start|>[", ", ", "]<|python_end|>"),
    "gemma4": fields,
    "minimax_m3": elements,
    "kimi_k3": lambda calls: (
        "<|open|>tools<|sep|>"
        + tagged(
            '<|open|>call tool="NAME" index="1"<|sep|>PARAMETERS<|close|>call<|sep|>',
            '<|open|>argument key="KEY" type="TYPE"<|sep|>VALUE<|close|>argument<|sep|>',
            "",
        )(calls)
        + "<|close|>tools<|sep|>"
    ),
    "olmo3": python("<function_calls>", "\n", "</function_calls>"),
    "mistral": each("[TOOL_CALLS]NAME[ARGS]ARGUMENTS", ""),
    "granite": listed("<|tool_call|>"),
    "phi4_mini": listed("functools"),
    "deepseek_v3": lambda calls: (
        "<｜tool▁calls▁begin｜>"
        + each("<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```<｜tool▁call▁end｜>")(calls)
        + "<｜tool▁calls▁end｜>"
    ),
    "deepseek_v31": lambda calls: (
        "<｜tool▁calls▁begin｜>"
        + each("<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>", "")(calls)
        + "<｜tool▁calls▁end｜>"
    ),
    "kimi_k2": lambda calls: (
        "<|tool_calls_section_begin|>"
        + each("<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>", "")(
            calls
        )
        + "<|tool_calls_section_end|>"
    ),
    "glm45": tagged("<tool_call>NAME\nPARAMETERS</tool_call>", "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>"),
    "hy_v3": lambda calls: (
        "<tool_calls>\n"
        + tagged(
            "<tool_call>NAME<tool_sep>\nPARAMETERS</tool_call>", "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>"
        )(calls)
        + "\n</tool_calls>"
    ),
    "deepseek_v32": lambda calls: (
        "<｜DSML｜function_calls>\n"
        + tagged(
            '<｜DSML｜invoke name="NAME">\nPARAMETERS</｜DSML｜invoke>',
            '<｜DSML｜parameter name="KEY" string="IS_STRING">VALUE</｜DSML｜parameter>',
        )(calls)
        + "\n</｜DSML｜function_calls>"
    ),
    "minimax_m2": lambda calls: (
        "<minimax:tool_call>\n"
        + tagged('<invoke name="NAME">\nPARAMETERS</invoke>', '<parameter name="KEY">VALUE</parameter>')(calls)
        + "\n</minimax:tool_call>"
    ),
    "qwen3_coder": tagged(
        "<tool_call>\n<function=NAME>\nPARAMETERS</function>\n</tool_call>", "<parameter=KEY>\nVALUE\n</parameter>"
    ),
    "seed_oss": tagged(
        "<seed:tool_call>\n<function=NAME>\nPARAMETERS</function>\n</seed:tool_call>",
        "<parameter=KEY>VALUE</parameter>",
    ),
    "harmony": each(
        "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS<|call|>", "<|start|>assistant"
    ),
}
