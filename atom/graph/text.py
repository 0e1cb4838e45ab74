"""Show a graph as text, a small subset of Python, and parse it back.

    def body(tokens: i64[T], positions: i64[T]):
        x = embedding(tokens, W("model.embed_tokens.weight", bf16[49152, 576]))    # bf16[T, 576]
        h = rms_norm(x, W("model.norm.weight", bf16[576]), eps=1e-05)    # bf16[T, 576]
        return h

`parse(show(graph))` is the same graph. Comments (types, and why a kernel was refused) are written and not
read. Once kernels are chosen a call names its own: `torch.rms_norm(x, …)`.
"""

from __future__ import annotations

import ast
import dataclasses
import json
from collections.abc import Callable
from typing import Any

from torch.fx import Node

from atom.errors import ConfigError, PassError
from atom.graph.graph import Graph, Program, call_of, results_of
from atom.graph.ops import OPS
from atom.graph.recipes import TEXT_NAMES, Cat, Recipe, Slice, State, W
from atom.graph.types import BATCH, BITS, BatchType, Type, need

NAMES = {kind: name for name, kind in TEXT_NAMES.items()}
MIN_SLICES = 3  # of a tensor, equally far apart, that are joined and written as one


def show(graph: Graph) -> str:
    """Write the graph as text."""
    return "\n".join(_show_program(program) for program in graph.programs.values())


def _show_program(program: Program) -> str:
    inputs = ", ".join(f"{node.name}: {node.meta['type']}" for node in program.inputs)
    lines = [f"def {program.name}({inputs}):"]
    for node in program.nodes:
        results = results_of(node)
        args = [_show_value(arg) for arg in node.args] + [
            f"{key}={_show_value(arg)}" for key, arg in node.kwargs.items()
        ]
        op = ".".join([*([node.meta["kernel"]] if "kernel" in node.meta else []), node.target.name])
        notes = [", ".join(str(result.meta["type"]) for result in results), *node.meta.get("notes", [])]
        notes += [f"piece {node.meta['piece']}"] if "piece" in node.meta else []
        lines.append(
            f"    {', '.join(result.name for result in results)} = {op}({', '.join(args)})    # {'; '.join(notes)}"
        )
    returned = ", ".join(node.name for node in program.results)
    return "\n".join([*lines, f"    return {returned}", ""])


def _show_value(value: Any) -> str:
    if isinstance(value, Node):
        return str(value.name)
    if isinstance(value, Recipe | State):
        return _show_leaf(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_show_value, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return str(value) if isinstance(value, Type) else repr(value)


def _show_leaf(leaf: Any) -> str:
    if isinstance(leaf, W) and leaf.type.fmt is not None:
        return f"W({_show_value(leaf.name)}, {leaf.type.plain}, fmt={_show_value(leaf.type.fmt)})"
    if isinstance(leaf, Cat) and (every := _distance_of_slices(leaf)) is not None:
        first, last = leaf.parts[0], f", dim={leaf.dim}" if leaf.dim else ""
        assert isinstance(first, Slice)
        return f"slices({_show_value(first.part)}, {first.start}, {first.stop}, {every}, {len(leaf.parts)}{last})"
    shown = []
    for field in dataclasses.fields(leaf):
        value = getattr(leaf, field.name)
        if field.default is dataclasses.MISSING:
            shown.append(_show_value(value))
        elif value != field.default:
            shown.append(f"{field.name}={_show_value(value)}")
    return f"{NAMES[type(leaf)]}({', '.join(shown)})"


def _distance_of_slices(joined: Cat) -> int | None:
    """From the start of a slice to the next one's, if what is joined are equal ranges of one tensor; else None."""
    first, *rest = joined.parts
    if len(rest) + 1 < MIN_SLICES or not isinstance(first, Slice):
        return None
    every = rest[0].start - first.start if isinstance(rest[0], Slice) else 0
    is_equal = first.step == 1 and first.dim == joined.dim and _slices_of(first, every, len(joined.parts)) == joined
    return every if is_equal else None


def _slices_of(first: Slice, every: int, count: int) -> Cat | None:
    """So many slices with this distance, joined; None if they do not lie one after another within the tensor."""
    if not isinstance(every, int) or not first.stop - first.start <= every:
        return None
    if first.stop + (count - 1) * every > int(first.part.type.shape[first.dim]):
        return None
    starts = range(0, count * every, every)
    moved = (dataclasses.replace(first, start=first.start + each, stop=first.stop + each) for each in starts)
    return Cat(tuple(moved), first.dim)


def _slices(part: Recipe, start: int, stop: int, every: int, count: int, dim: int = 0) -> Cat:
    """Rows start to stop of a tensor, joined with those that lie `every` further, and so on, `count` ranges in all."""
    for name, value in (("every", every), ("count", count)):
        need(type(value) is int and value > 0, f"slices: {name}={value!r} is no whole number from 1")
    made = _slices_of(Slice(part, start, stop, dim), every, count)
    need(made is not None, f"slices: {count} ranges {start} to {stop}, {every} apart, are not within {part.type}")
    assert made is not None
    return made


def parse(text: str, source: str = "graph") -> Graph:
    """Parse a text to its graph. ConfigError, with the line, if it is wrong; `source` names the text in it."""
    try:
        module = ast.parse(text)
    except SyntaxError as error:
        raise ConfigError(f"{source}:{error.lineno}: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: {error}") from None
    graph = Graph()
    for function in module.body:
        if not isinstance(function, ast.FunctionDef):
            raise ConfigError(f"{source}:{function.lineno}: a graph's text consists of functions")
        _Parser(source, graph.program(function.name)).function(function)
    return graph


def _stored(name: str, type: Type, fmt: str | None = None) -> W:
    """A leaf as it is written, with the format after the type."""
    return W(name, type if fmt is None or not isinstance(type, Type) else dataclasses.replace(type, fmt=fmt))


MAKERS: dict[str, Callable[..., Any]] = TEXT_NAMES | {"W": _stored, "slices": _slices}


class _Parser:
    """Reads one function into one program."""

    def __init__(self, source: str, program: Program) -> None:
        self.source = source
        self.program = program
        self.names: dict[str, Node] = {}

    def fail(self, node: ast.AST, reason: str) -> ConfigError:
        return ConfigError(f"{self.source}:{getattr(node, 'lineno', 0)}: {reason}")

    def function(self, function: ast.FunctionDef) -> None:
        for argument in function.args.args:
            if argument.annotation is None:
                raise self.fail(argument, f"{argument.arg} has no type")
            self.names[argument.arg] = self.program.input(argument.arg, self.input_type(argument.annotation))
        for statement in function.body:
            match statement:
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() as call):
                    self.call(call, (name,))
                case ast.Assign(targets=[ast.Tuple(elts=elements)], value=ast.Call() as call):
                    self.call(call, tuple(element.id for element in elements if isinstance(element, ast.Name)))
                case ast.Return(value=ast.Tuple(elts=elements)):
                    self.program.output(*(self.name(element) for element in elements))
                case ast.Return(value=ast.Name() as element):
                    self.program.output(self.name(element))
                case _:
                    raise self.fail(statement, "a line is `name = op(...)` or `return name`")
        if not function.body or not isinstance(function.body[-1], ast.Return):
            raise self.fail(function, f"{function.name} returns nothing")

    def call(self, call: ast.Call, names: tuple[str, ...]) -> None:
        kernel = ""
        match call.func:
            case ast.Name(id=name):
                pass
            case ast.Attribute(value=ast.Name(id=kernel), attr=name):
                pass
            case _:
                raise self.fail(call, "a line is `name = op(...)` or `name = kernel.op(...)`")
        if name not in OPS:
            raise self.fail(call, f"there is no op '{name}'; ops: {', '.join(sorted(OPS))}")
        args = [self.value(arg) for arg in call.args]
        kwargs = {str(keyword.arg): self.value(keyword.value) for keyword in call.keywords}
        try:
            result = self.program.call(OPS[name], *args, name=names, **kwargs)
        except PassError as error:
            raise self.fail(call, str(error)) from None
        except (ArithmeticError, LookupError) as error:  # a shape rule with too few dims
            raise self.fail(call, f"{name}: its arguments do not fit ({error})") from None
        results = result if isinstance(result, tuple) else (result,)
        if len(results) != len(names):
            raise self.fail(call, f"{name} has {len(results)} results, not {len(names)}")
        if kernel:
            call_of(results[0]).meta["kernel"] = kernel
        for given, node in zip(names, results, strict=True):
            if given in self.names:
                raise self.fail(call, f"{given} is set twice")
            self.names[given] = node

    def name(self, node: ast.AST) -> Node:
        if not isinstance(node, ast.Name) or node.id not in self.names:
            raise self.fail(node, f"nothing is named {ast.unparse(node)}")
        return self.names[node.id]

    def input_type(self, node: ast.AST) -> Type | BatchType:
        match node:
            case ast.Name(id=name) if name == str(BATCH):
                return BATCH
        return self.type(node)

    def type(self, node: ast.AST) -> Type:
        match node:
            case ast.Subscript(value=ast.Name(id=dtype), slice=dims) if dtype in BITS:
                elements = dims.elts if isinstance(dims, ast.Tuple) else [dims]
                fmt: str | None = None
                match elements:
                    case [*elements, ast.Constant(value=str(fmt))]:
                        pass
                shape = tuple(self.dim(e) for e in elements)
                if all(isinstance(dim, str) or (type(dim) is int and dim >= 0) for dim in shape):
                    return Type(dtype, shape, fmt)
            case ast.Name(id=dtype) if dtype in BITS:
                return Type(dtype, ())
        raise self.fail(
            node, f"{ast.unparse(node)} is no type; types look like bf16[T, 576], dtypes are {', '.join(BITS)}"
        )

    def dim(self, node: ast.AST) -> Any:
        match node:
            case ast.Name(id=letter):
                return letter
            case ast.BinOp(left=ast.Constant(value=int(count)), op=ast.Mult(), right=ast.Name(id=letter)):
                return f"{count}*{letter}"
        return self.value(node)

    def value(self, node: ast.AST) -> Any:
        match node:
            case ast.Name(id=name) if name in self.names:
                return self.names[name]
            case ast.Name(id=name) if name not in BITS:
                return self.name(node)
            case ast.Name() | ast.Subscript():
                return self.type(node)
            case ast.List(elts=elements):
                return tuple(self.value(element) for element in elements)
            case ast.Call(func=ast.Name(id=name)) if name in MAKERS:
                args = [self.value(arg) for arg in node.args]
                kwargs = {str(keyword.arg): self.value(keyword.value) for keyword in node.keywords}
                try:
                    leaf = MAKERS[name](*args, **kwargs)
                    assert isinstance(leaf.type, Type), "a recipe has the type of one tensor"
                except (TypeError, ValueError) as error:
                    raise self.fail(node, str(error)) from None
                return leaf
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError):
            raise self.fail(node, f"{ast.unparse(node)} is no value that a graph knows") from None
