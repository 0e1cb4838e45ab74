"""Parse users' YAML with bounds on nesting and aliases; duplicate keys are refused.

    parse_yaml("seed: 1")                            # {"seed": 1}
    parse_yaml("seed: 1\nseed: 2")                   # yaml.YAMLError: the key seed is set twice

PyYAML composes nodes by recursion without a bound, takes the last of two equal keys, and expands aliases to any size:
300 bytes can mean millions of nodes. Its constructors raise other errors than its own for some scalars (2024-13-45).
"""

from __future__ import annotations

from typing import Any

import yaml

from atom.errors import first_line

MAX_DEPTH = 64  # of nesting; recipes and model files have some 6
MAX_NODES = 100_000  # keys and values, an alias counted as what it stands for
BaseLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class BoundedLoader(BaseLoader):  # type: ignore[misc]
    """A safe loader that composes nodes within bounds."""

    def get_single_node(self) -> yaml.Node | None:
        self.sizes: dict[str, tuple[yaml.Node, int]] = {}  # anchor -> its node and number of nodes, aliases expanded
        self.num_nodes = 0
        self.get_event()  # the stream's start
        if self.check_event(yaml.StreamEndEvent):
            return None
        self.get_event()  # the document's start
        node = self.compose_bounded(0)
        self.get_event()  # the document's end
        if not self.check_event(yaml.StreamEndEvent):
            raise fault("there is more than one document", self.peek_event())
        return node

    def compose_bounded(self, depth: int) -> yaml.Node:
        event = self.get_event()
        if isinstance(event, yaml.AliasEvent):
            return self.expand_alias(event)
        if depth > MAX_DEPTH:
            raise fault(f"it is nested deeper than {MAX_DEPTH}", event)
        first = self.num_nodes
        self.count(1, event)
        node: yaml.Node
        if isinstance(event, yaml.ScalarEvent):
            tag = self.find_tag(yaml.ScalarNode, event, event.value)
            node = yaml.ScalarNode(tag, event.value, event.start_mark, event.end_mark, style=event.style)
        elif isinstance(event, yaml.SequenceStartEvent):
            node = yaml.SequenceNode(self.find_tag(yaml.SequenceNode, event), [], event.start_mark)
            while not self.check_event(yaml.SequenceEndEvent):
                node.value.append(self.compose_bounded(depth + 1))
            self.get_event()
        else:
            node = yaml.MappingNode(self.find_tag(yaml.MappingNode, event), [], event.start_mark)
            keys = set()
            while not self.check_event(yaml.MappingEndEvent):
                at = self.peek_event()
                key = self.compose_bounded(depth + 1)
                if isinstance(key, yaml.ScalarNode):
                    if (key.tag, key.value) in keys:
                        raise fault(f"the key {key.value} is set twice", at)
                    keys.add((key.tag, key.value))
                node.value.append((key, self.compose_bounded(depth + 1)))
            self.get_event()
        if event.anchor is not None:
            self.sizes[event.anchor] = node, self.num_nodes - first
        return node

    def expand_alias(self, event: yaml.AliasEvent) -> yaml.Node:
        if event.anchor not in self.sizes:  # within its own anchor, too
            raise fault(f"the alias *{event.anchor} refers to nothing before it", event)
        node, size = self.sizes[event.anchor]
        self.count(size, event)
        return node

    def count(self, num_nodes: int, event: yaml.Event) -> None:
        self.num_nodes += num_nodes
        if self.num_nodes > MAX_NODES:
            much = f"there are more than {MAX_NODES:,} values, an alias counted as what it stands for"
            raise fault(f"{much}; put long lists into files of their own, as prompts=@FILE", event)

    def find_tag(self, kind: type[yaml.Node], event: Any, value: str | None = None) -> str:
        return str(self.resolve(kind, value, event.implicit) if event.tag in (None, "!") else event.tag)


def fault(problem: str, event: yaml.Event) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)


def _with_place(error: yaml.MarkedYAMLError) -> str:
    """An error's message, after the line and column that it is about: PyYAML names a <unicode string>."""
    mark = error.problem_mark or error.context_mark
    at = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return at + "; ".join(filter(None, (error.context, error.problem)))


class PlacedError(yaml.YAMLError):  # type: ignore[misc]  # PyYAML has no types
    """An error in a document, with its place in the message."""

    def __init__(self, message: str, line: int | None) -> None:
        super().__init__(message)
        self.line = line  # from 1; None if unknown


def parse_yaml(text: str) -> Any:
    """Parse one document. yaml.YAMLError for invalid YAML, a duplicate key, and what exceeds the bounds."""
    try:
        loader = BoundedLoader(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise PlacedError(_with_place(error), mark.line + 1 if mark else None) from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:  # of PyYAML's constructors
        raise yaml.YAMLError(f"a value is malformed: {first_line(error).partition(';')[0]}") from None
