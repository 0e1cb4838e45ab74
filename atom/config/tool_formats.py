"""Read the formats of tool calls, which are YAML files.

    read_format("kimi_k2").call          # ("<|tool_call_begin|>{id}<|tool_call_argument_begin|>{arguments}…",)
    read_format("mine.yaml")             # a user's own; ConfigError if it is invalid
    detect_format(chat_template)         # "kimi_k2"; None if the template has the markers of none

A call is a text with fields in braces: `<invoke name="{name}"> {parameters} </invoke>`. A space in it stands for any
space or none. docs/tool-calls.md explains the keys.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from atom.config.bounded_yaml import parse_yaml
from atom.config.folders import CONF
from atom.config.spelling import did_you_mean
from atom.errors import ConfigError, one_line
from atom.plugins import package_folders

if TYPE_CHECKING:
    from atom.config.schema import Config

FIELD = re.compile(r"\{(name|arguments|parameters|json|python|fields|id|key|type|value|index)\}")
MARKER = re.compile(r"\]<\][a-z]+\[>\[|<[^<>\s{}]+>|\[[A-Z_]+\]")  # within a text: what may be a token
HOLDS = ("{arguments}", "{parameters}", "{json}", "{python}", "{fields}")  # a call has one of these
NAMED = ("{name}", "{id}")
ELEMENT = re.compile(r"[^\s{}]+\{key\}[^\s{}]+\{value\}[^\s{}]+\{key\}[^\s{}]+")  # a parameter that may nest
Replace = Callable[[re.Match[str]], str]


@dataclass(frozen=True)
class Channels:
    """The markers of an answer that is several messages: header, body marker, body, end marker."""

    start: str  # before the role of a message
    channel: str  # before the name of its channel
    body: str  # between header and body
    end: tuple[str, ...]  # any of them follows a body
    prompt: str  # how a prompt opens the answer's first message
    reasoning: str  # the channel of what is thought; others are content
    content: str  # the channel of a constrained answer
    recipient: str  # in the header of a call, after to=, with {name} in it
    constrain: str = ""  # what a call's header may end with: the type of its body


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes calls of tools."""

    begin: tuple[str, ...] = ()  # any of them is before the calls; "": nothing
    call: tuple[str, ...] = ()  # one call; the first of them that reads it counts
    end: tuple[str, ...] = ()  # any of them may follow the calls
    parameter: str = ""  # one of {parameters}
    entities: bool = False  # in {key}, " and & are written as &quot; and &amp;
    quote: str = ""  # around strings in {fields}
    id: tuple[str, ...] = ()  # what {id} consists of, if the name is in it
    content: tuple[str, ...] = ()  # markers of content, left out of it; the first of them begins it
    separator: str = ""  # characters that may be between the calls of a block, besides space
    bare: bool = False  # an answer may begin with a call in JSON or a list, without begin
    tokens: bool = False  # a marker that is a token of the checkpoint counts only as that token, not spelled out
    channels: Channels | None = None  # in place of all of these but tokens
    template: tuple[str, ...] = ()  # texts that a chat template has if its model writes calls so

    @property
    def markers(self) -> list[str]:
        """The texts that may be special tokens of the checkpoint, each once."""
        whole = [*self.begin, *self.end, *self.content]
        texts = [*whole, *self.call, self.parameter, self.quote]
        if self.channels:
            each = self.channels
            whole = texts = [each.start, each.channel, each.body, *each.end]
        found = [marker for text in texts for marker in (MARKER.findall(text) or ([text] if text in whole else []))]
        return list(dict.fromkeys(filter(None, found)))

    def mark(self, mark: str, is_token: Callable[[str], bool]) -> ToolFormat:
        """The format of a text that has a mark before each of the markers that is a token."""
        known = list(filter(is_token, self.markers))
        if not known:
            return self
        marked = marker_of(mark, known)

        def all_marked(texts: Iterable[str]) -> tuple[str, ...]:
            return tuple(map(marked, texts))

        channels = self.channels and replace(
            self.channels,
            start=marked(self.channels.start),
            channel=marked(self.channels.channel),
            body=marked(self.channels.body),
            end=all_marked(self.channels.end),
            prompt=marked(self.channels.prompt),
        )
        return replace(
            self,
            begin=all_marked(self.begin),
            call=all_marked(self.call),
            end=all_marked(self.end),
            parameter=marked(self.parameter),
            quote=marked(self.quote),
            content=all_marked(self.content),
            channels=channels,
        )


def marker_of(mark: str, tokens: Iterable[str]) -> Callable[[str], str]:
    """What puts a mark before each of these tokens in a text."""
    pattern = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)")
    return lambda text: pattern.sub(lambda match: mark + match[0], text)


@cache
def format_files() -> dict[str, Path]:
    """The files of formats by name: those that are shipped, and those of installed packages."""
    folders = (*reversed(package_folders()), CONF)  # of two with one name the shipped one counts
    found = {file.stem: file for folder in folders for file in folder.glob("tool_calls/*.yaml")}
    return dict(sorted(found.items()))


@cache
def read_format(name: str) -> ToolFormat:
    """Read a format by its name, or a user's file. ConfigError if it does not exist or is no format."""
    known = format_files()
    path = known.get(name) or Path(name).expanduser()
    if name not in known and path.suffix not in (".yaml", ".yml"):
        own = "or a file, FORMAT.yaml"
        raise ConfigError(f"tool_calls={name}: there is no such format{did_you_mean(name, known)}; "
                          f"choices: {', '.join(known)}, {own}")  # fmt: skip
    try:
        values = parse_yaml(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"tool_calls={path}: {getattr(error, 'strerror', None) or one_line(error)}") from None
    return make_format(values, f"tool_calls={path}")


def detect_format(template: str) -> str | None:
    """The format of a chat template: the one of which it has all texts, and most of them."""
    found = [(len(texts), name) for name, texts in known_templates().items() if all(map(template.__contains__, texts))]
    return max(found)[1] if found else None


def choose_format(config: Config, template: str) -> str | None:
    """The format of a model's calls: as set, as its chat template shows, or the model file's."""
    if config.serve.http.tool_calls != "auto":
        return config.serve.http.tool_calls
    return detect_format(template) or config.model.tool_calls


def find_channels(config: Config, template: str) -> ToolFormat | None:
    """The format of a model whose answers have channels, whatever is set for its calls."""
    name = detect_format(template) or config.model.tool_calls
    found = read_format(name) if name else None
    return found if found and found.channels else None


@cache
def known_templates() -> dict[str, tuple[str, ...]]:
    """Format -> the texts that a chat template has if its model writes calls so."""
    return {name: texts for name in format_files() if (texts := read_format(name).template)}


def make_format(values: Any, at: str) -> ToolFormat:
    """Check the content of a file. ConfigError, which begins with `at`, if it is invalid."""
    made = ToolFormat(**read_keys(ToolFormat, values, at))
    if made.channels:
        if made.begin or made.call or made.end or made.parameter or "{name}" not in made.channels.recipient:
            raise ConfigError(f"{at}: channels stand in place of the other keys, and have a recipient with {{name}}")
        return made
    if not made.call:
        raise ConfigError(f"{at}: call is missing, as in call: '<call>{{name}} {{arguments}}</call>'")
    for call in made.call:
        check_call(made, call, at)
    if not made.bare and not all(openers(made)):
        raise ConfigError(f"{at}: nothing at its beginning distinguishes a call from content; set begin, or bare: true")
    if clash := next(((a, b) for a in made.begin for b in made.begin if a and a != b and b.startswith(a)), None):
        raise ConfigError(f"{at}: begin: {clash[1]!r} begins with {clash[0]!r}; they cannot be distinguished")
    return made


def openers(tool_format: ToolFormat) -> list[str]:
    """The texts with which calls begin: begin, or if that is empty, what a call has before its first field."""
    firsts = [FIELD.split(call)[0].strip() for call in tool_format.call]
    begins = tool_format.begin or ("",)
    found = [opener for begin in begins for opener in ([begin] if begin else firsts)]
    return list(dict.fromkeys(found))


def check_call(made: ToolFormat, call: str, at: str) -> None:
    held = [field for field in HOLDS if field in call]
    if len(held) != 1 or call.count(held[0]) != 1:
        raise ConfigError(f"{at}: call: {call!r} must have one of {', '.join(HOLDS)}")
    is_whole = held[0] in ("{json}", "{python}")
    if not is_whole and not any(call.find(field) in range(call.find(held[0])) for field in NAMED):
        raise ConfigError(f"{at}: call: {call!r} must have {{name}}, or {{id}}, before {held[0]}")
    if "{name}" not in call and "{id}" in call and not any("{name}" in id for id in made.id):
        raise ConfigError(f"{at}: id must say where the name is, as in id: 'functions.{{name}}:{{index}}'")
    if held[0] == "{parameters}" and not re.fullmatch(
        r"\s*[^\s{].*\{key\}.*[^\s}]\s*\{value\}\s*[^\s{].*", made.parameter, re.DOTALL
    ):
        example = "<parameter={key}>{value}</parameter>"
        raise ConfigError(f"{at}: parameter: {made.parameter!r} must be texts around {{key}} and {{value}}: {example}")
    if made.parameter.count("{key}") > 1 and not ELEMENT.fullmatch(made.parameter):
        example = "<{key}>{value}</{key}>"
        raise ConfigError(f"{at}: parameter: {made.parameter!r} has {{key}} twice, and is not of this form: {example}")
    if (held[0] == "{fields}") != bool(made.quote):
        raise ConfigError(f"{at}: {{fields}} and quote, which is around its strings, need each other")


def read_keys(kind: type, values: Any, at: str) -> dict[str, Any]:
    """The values of a block, checked by the types of its dataclass."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{at}: {values!r} is not a mapping of keys")
    types = {each.name: str(each.type) for each in fields(kind)}
    if unknown := next((key for key in values if key not in types), None):
        known = ", ".join(types)
        raise ConfigError(f"{at}: there is no key {unknown}{did_you_mean(str(unknown), types)}; keys: {known}")
    needed = [each.name for each in fields(kind) if each.default is MISSING]
    if missing := [name for name in needed if name not in values]:
        raise ConfigError(f"{at}: {', '.join(missing)} is missing")
    return {key: read_value(types[key], value, f"{at}: {key}") for key, value in values.items()}


def read_value(kind: str, value: Any, at: str) -> Any:
    if kind.startswith("Channels"):
        return Channels(**read_keys(Channels, value, at))
    if kind == "bool":
        if not isinstance(value, bool):
            raise ConfigError(f"{at}={value!r} is not true or false")
        return value
    texts = value if isinstance(value, list) and kind != "str" else [value]
    if not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"{at}={value!r} is not a text{'' if kind == 'str' else ', or list of texts'}")
    return value if kind == "str" else tuple(texts)
