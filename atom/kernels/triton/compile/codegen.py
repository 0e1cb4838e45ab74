"""Generate Triton source from a piece's text: one kernel, row by row.

A module has the kernels and the Python that launches them.

    source = write_source(text)      # a module, to be read and diffed; `run` in it takes inputs and weights
    run = TritonCompiler().load(folder)    # of the folder that holds it as piece.py

No op of such a piece looks at another row. So a result is written by asking for its value at all columns of a row, and
each op asks for its inputs at the columns that it needs: views move columns, norms look at the whole row first. What an
op gives is rounded to its dtype wherever the op's body rounds; in between numbers are float32.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from textwrap import indent
from typing import Any, NamedTuple

from torch.fx import Node

from atom.dtypes import DTYPES, MODEL_DTYPES
from atom.errors import PassError
from atom.graph import Program, Type, ops, parse
from atom.graph.graph import call_of, results_of
from atom.graph.ops import Op
from atom.graph.ops.vision import CUBIC

WIDTH = 120  # characters of a line
BLOCK = 1024  # columns per program, where no norm needs the whole row
PER_THREAD = 8  # columns per thread of a whole row
MAX_WARPS = 16  # that every GPU takes
FLOATS = {dtype: DTYPES[dtype].name for dtype in MODEL_DTYPES}
NORMS = (ops.rms_norm, ops.layer_norm, ops.add_rms_norm, ops.group_rms_norm, ops.match_rms, ops.gaussian_topk)
IMPORTS = {  # what a piece's module imports, by module of atom.kernels.triton
    "activations": ("activation", "gated", "softplus", "tanh", "xielu"),
    "attention.common": ("wait_for_inputs",),
    "attention.rope": ("find_angle", "find_partner", "rotate"),
    "compile.jit": ("jit",),
    "gpu": ("find_gpu",),
}

Index = str | int  # of one dim, as Triton's expression
At = tuple[Index, ...]  # of all dims after the rows


class _Tile(NamedTuple):
    """The columns of a program at a time."""

    name: str
    mask: str = ""  # the columns that exist; "": all


SCALAR = _Tile("")


def write_source(text: str) -> str:
    """Write the module of a piece. PassError if one of its ops does not work row by row."""
    program = parse(text, "piece").programs["piece"]
    views = {node: _view(node) for node in program.results if _is_view(node)}
    computed = _computed(program)
    kernels = _kernels(program, computed)
    inputs = [node.name for node in program.inputs]
    allocations = [f"{place} = {_allocation(node, program)}" for node, place in computed.items()]
    returned = ", ".join(views.get(node) or computed[node] for node in program.results)
    used = {_rows_of(node) for node in (*computed, *views)}
    rows = [f"{rows} = {_input_of(program, rows).name}.shape[0]" for rows in sorted(used)]
    parts = [
        f'"""Each row of a piece by itself.\n\n{text.strip()}\n"""',
        "import torch\nimport triton.language as tl",
        "\n".join(f"from atom.kernels.triton.{name} import {', '.join(IMPORTS[name])}" for name in IMPORTS),
        *(kernel.source() for kernel in kernels),
        _function("run", inputs, [*rows, *allocations, *(k.launch() for k in kernels), f"return [{returned}]"]),
    ]
    return "\n\n".join(parts) + "\n"


def kernel_names(text: str) -> list[str]:
    """The names of the kernels in a piece's module, which are also their names in a profiler trace."""
    program = parse(text, "piece").programs["piece"]
    return [kernel.name for kernel in _kernels(program, _computed(program))]


def _computed(program: Program) -> dict[Node, str]:
    """The results that are no views, each with the name of its output tensor."""
    return {node: f"y{index}" for index, node in enumerate(program.results) if not _is_view(node)}


def _kernels(program: Program, computed: dict[Node, str]) -> list[_Kernel]:
    return [
        _Kernel(program, {node: place for node, place in computed.items() if _rows_of(node) == rows}, rows)
        for rows in dict.fromkeys(map(_rows_of, computed))
    ]


class _Kernel:
    """Generates the kernel of all results that have the same rows."""

    def __init__(self, program: Program, results: dict[Node, str], rows: str) -> None:
        self._program = program
        self._rows = rows
        self._results = results
        self._calls = _calls_needed(program, results)
        self._loaded: set[Node] = set()
        self._values: dict[Any, str] = {}
        self._lines = ["wait_for_inputs(PDL)", "row = tl.program_id(0).to(tl.int64)"]
        imported = [name for names in IMPORTS.values() for name in names]
        self._names = {"row", "c", "tl", "PDL", *imported, *results.values(), *(node.name for node in program.inputs)}
        self._is_whole = any(call.target in NORMS for call in self._calls)
        widths = [math.prod(_dims(node)) for node in results]
        self._size = 1 if self._is_whole else min(BLOCK, _power(max(widths)))  # of the largest tile
        self._num_blocks = 1 if self._is_whole else math.ceil(max(widths) / self._size)
        for node, place in results.items():
            if 0 not in _dims(node):  # of a head without rotated dims there is nothing to store
                self._store(node, place)

    @property
    def name(self) -> str:
        done = dict.fromkeys(call.target.name for call in self._calls if call.target not in ops.VIEWS)
        return f"{'_'.join(done)[:60]}_rows_{self._rows.lower()}"

    def source(self) -> str:
        inputs = [name for node in self._inputs() for name in (node.name, *_strides(node))]
        parameters = [*inputs, *self._results.values(), "PDL: tl.constexpr"]
        return _function(self.name, parameters, self._lines, "@jit\n")

    def launch(self) -> str:
        grid = f"({self._rows},)" if self._num_blocks == 1 else f"({self._rows}, {self._num_blocks})"
        num_warps = max(1, min(MAX_WARPS, self._size // (32 * PER_THREAD)))
        tensors = [name for node in self._inputs() for name in (node.name, f"*{node.name}.stride()")]
        # a product fused with a sum would not be rounded in between, as the bodies round it
        gpu = f"find_gpu({self._inputs()[0].name}.device)"
        options = [f"num_warps={num_warps}", "enable_fp_fusion=False", f"**{gpu}.options"]
        return _call(f"{self.name}[{grid}]", [*tensors, *self._results.values(), *options])

    def _inputs(self) -> list[Node]:
        return [node for node in self._program.inputs if node in self._loaded]

    def _store(self, node: Node, place: str) -> None:
        dims = _dims(node)
        tile = self._tile(math.prod(dims)) if dims else SCALAR
        value = self._value(node, _unflatten(tile.name, dims), tile)
        offset = f"row * {math.prod(dims)} + {tile.name}" if dims else "row"
        self._lines.append(_call("tl.store", [f"{place} + {offset}", value, *_mask(tile)]))

    def _tile(self, width: int) -> _Tile:
        """All columns of a row, or this program's block of them."""
        if not self._is_whole:
            if "c" not in self._values:
                block = f"tl.program_id(1) * {self._size} + " if self._num_blocks > 1 else ""
                self._lines.append(f"c = {block}tl.arange(0, {self._size})")
                self._values["c"] = "c"
            return _Tile("c", "" if width == self._num_blocks * self._size else f"c < {width}")
        return self._whole(f"c{width}", _power(width), "" if width == _power(width) else f"c{width} < {width}")

    def _whole(self, name: str, size: int, mask: str) -> _Tile:
        if name not in self._values:
            self._lines.append(f"{name} = tl.arange(0, {size})")
            self._size = max(self._size, size)
            self._values[name] = name
            self._names.add(name)
        return _Tile(name, mask)

    def _assign(self, name: str, expression: str) -> str:
        unique, number = name, 1
        while unique in self._names:
            number += 1
            unique = f"{name}_{number}"
        self._names.add(unique)
        self._lines.append(f"{unique} = {expression}")
        return unique

    def _rounded(self, node: Node, expression: str, name: str = "") -> str:
        """A variable of a value that is rounded to the node's dtype."""
        dtype = _type(node).dtype
        rounded = expression if dtype == "fp32" else f"({expression}).to(tl.{FLOATS[dtype]}).to(tl.float32)"
        return self._assign(name or str(node.name), rounded)

    def _value(self, node: Node, at: At, tile: _Tile) -> str:
        """A variable that holds a node's value at some columns, float32 if it is a float."""
        key = node, at, tile
        if key not in self._values:
            op = call_of(node).target
            if op not in RULES and node.op != "placeholder":
                raise PassError(f"{op.name} does not work on each row by itself: it cannot be in a piece on a gpu")
            self._values[key] = RULES[op](self, node, at, tile) if op in RULES else self._load(node, at, tile)
        return self._values[key]

    def _load(self, node: Node, at: At, tile: _Tile) -> str:
        type = _type(node)
        self._loaded.add(node)
        index: At = ("row", *at) if isinstance(type.shape[0], str) else at
        terms = [f"{each} * {stride}" for each, stride in zip(index, _strides(node), strict=True)]
        masks = _mask(tile) if any(tile.name and tile.name in str(each) for each in index) else []
        wide = "float32" if type.dtype in FLOATS else "int64"
        loaded = _call("tl.load", [" + ".join([node.name, *terms]), *masks])
        return self._assign(f"{node.name}_values", loaded if type.dtype == "fp32" else f"{loaded}.to(tl.{wide})")

    def _embedding(self, node: Node, at: At, tile: _Tile) -> str:
        tokens, weight = node.args
        return self._value(weight, (self._value(tokens, at[:-1], tile), at[-1]), tile)

    def _add(self, node: Node, at: At, tile: _Tile) -> str:
        a, b = call_of(node).args[:2]
        own = at[-len(_type(b).shape) :] if len(_type(b).shape) < len(_type(a).shape) else at  # a vector for all rows
        return self._rounded(node, f"{self._value(a, at, tile)} + {self._value(b, own, tile)}")

    def _mul(self, node: Node, at: At, tile: _Tile) -> str:
        a, b = node.args
        first = self._value(a, at, tile)
        last: Index = at[-1] if _type(b).shape[-1] == _type(a).shape[-1] else 0
        own = (last,) if len(_type(b).shape) == 1 else (*at[:-1], last)  # _load adds a row to those that have some
        second = self._value(b, own, tile)
        return self._rounded(node, f"{first} * {second}")

    def _scale_by_expert(self, node: Node, at: At, tile: _Tile) -> str:
        weights, ids, scales = node.args
        weight, expert = (self._value(each, at, tile) for each in (weights, ids))
        self._loaded.add(scales)
        place = f"{scales.name} + {expert} * {_strides(scales)[0]}"
        return self._rounded(node, f"{weight} * {_call('tl.load', [place, *_mask(tile)])}.to(tl.float32)")

    def _scale_by_position(self, node: Node, at: At, tile: _Tile) -> str:
        q, positions, *by_head = node.args
        value, position = self._value(q, at, tile), self._value(positions, at[:-2], tile)
        scale, bias = (self._value(each, at[:1], tile) for each in by_head)
        return self._rounded(node, f"{value} * ({scale} * tl.log(({position} + 1).to(tl.float32)) + {bias})")

    def _affine(self, node: Node, at: At, tile: _Tile) -> str:
        x, factor, offset = node.args
        value, *own = self._value(x, at, tile), *(self._value(each, at[-1:], tile) for each in (factor, offset))
        return self._rounded(node, f"({value} + {own[1]}) * {own[0]}")

    def _steer(self, node: Node, at: At, tile: _Tile) -> str:
        x, scales, vector = node.args
        value, share = self._value(x, at, tile), self._value(scales, (*at[:-1], int(node.kwargs["index"])), tile)
        return self._rounded(node, f"{value} + {share} * {self._value(vector, at[-1:], tile)}")

    def _scale(self, node: Node, at: At, tile: _Tile) -> str:
        return self._rounded(node, f"{self._value(node.args[0], at, tile)} * {float(node.kwargs['by'])}")

    def _softcap(self, node: Node, at: At, tile: _Tile) -> str:
        cap = float(node.kwargs["cap"])
        share = self._rounded(node, f"{self._value(node.args[0], at, tile)} / {cap}", "share")
        return self._rounded(node, f"{self._rounded(node, f'tanh({share})', 'bent')} * {cap}")

    def _clamp(self, node: Node, at: At, tile: _Tile) -> str:
        limit = float(node.kwargs["limit"])
        x = self._value(node.args[0], at, tile)
        return self._rounded(node, f"tl.clamp({x}, -{limit}, {limit}, tl.PropagateNan.ALL)")

    def _activate(self, node: Node, at: At, tile: _Tile) -> str:
        return self._rounded(node, f'activation({self._value(node.args[0], at, tile)}, "{node.kwargs["kind"]}")')

    def _xielu(self, node: Node, at: At, tile: _Tile) -> str:
        x, *alphas = node.args
        numbers = ", ".join(self._value(each, (0,), tile) for each in alphas)
        return self._rounded(node, f"xielu({self._value(x, at, tile)}, {numbers})")

    def _time_step(self, node: Node, at: At, tile: _Tile) -> str:
        low, high = node.kwargs.get("low", 0.0), node.kwargs.get("high")
        value = f"tl.maximum(softplus({self._biased(node, at, tile)}), {float(low)}, tl.PropagateNan.ALL)"
        if high is not None:
            value = f"tl.minimum({value}, {float(high)}, tl.PropagateNan.ALL)"
        return self._rounded(node, value)

    def _ssm_decay(self, node: Node, at: At, tile: _Tile) -> str:
        (a, a_log, _), floor = node.args, node.kwargs.get("floor")
        head, _ = _divide(at[0], _dims(a)[0] // int(_type(a_log).shape[0]))
        rate, raw = f"tl.exp({self._value(a_log, (head,), tile)})", self._biased(node, at, tile)
        value = f"-{rate} * softplus({raw})" if floor is None else f"{float(floor)} * tl.sigmoid({rate} * ({raw}))"
        return self._rounded(node, value)

    def _biased(self, node: Node, at: At, tile: _Tile) -> str:
        """The first argument, and the last one added to each row of it if there is another."""
        x, *rest = node.args
        biases = [self._value(each, at, tile) for each in rest[-1:] if each is not None]
        return " + ".join([self._value(x, at, tile), *biases])

    def _gated_activate(self, node: Node, at: At, tile: _Tile) -> str:
        x, width = node.args[0], int(_type(node).shape[-1])
        gate, up = self._value(x, at, tile), self._value(x, (*at[:-1], _plus(at[-1], width)), tile)
        limits = [f"{name.upper()}={float(node.kwargs[name])}" for name in ("limit", "alpha") if name in node.kwargs]
        dtype, kind = FLOATS[_type(node).dtype], node.kwargs["kind"]
        return self._rounded(node, _call("gated", [gate, up, f"tl.{dtype}", f'"{kind}"', *limits]))

    def _pad(self, node: Node, at: At, tile: _Tile) -> str:
        x, column = node.args[0], at[-1]
        width = _dims(x)[-1]
        value = self._value(x, (*at[:-1], f"tl.minimum({column}, {width - 1})"), tile)
        return self._rounded(node, f"tl.where({column} < {width}, {value}, 0.0)")

    def _split(self, node: Node, at: At, tile: _Tile) -> str:
        call = call_of(node)
        before = sum(call.kwargs["sizes"][: node.args[1]])
        return self._value(call.args[0], (*at[:-1], _plus(at[-1], before)), tile)

    def _split_heads(self, node: Node, at: At, tile: _Tile) -> str:
        return self._value(node.args[0], (*at[:-2], _flatten(at[-2:], _dims(node)[-2:])), tile)

    def _merge_heads(self, node: Node, at: At, tile: _Tile) -> str:
        return self._value(node.args[0], _unflatten(at[0], _dims(node.args[0])), tile)

    def _norm(self, node: Node, at: At, tile: _Tile) -> str:
        call = call_of(node)
        is_sum, is_centred = call.target is ops.add_rms_norm, call.target is ops.layer_norm
        x = results_of(call)[1] if is_sum else call.args[0]
        weight, *bias = call.args[2 if is_sum else 1 :]
        dims = _dims(x)
        # load everything before the row is summed up, where its threads wait for each other
        own = at[-len(_type(weight).shape) :]  # a head may have its own
        value, factor = self._value(x, at, tile), self._value(weight, own, tile)
        offset = f" + {self._value(bias[0], own, tile)}" if bias and bias[0] is not None else ""
        mean, deviation = self._statistics(x, dims, is_centred, call.kwargs["eps"])
        if is_centred:
            value = f"({value} - {self._spread(mean, at, dims)})"
        value = f"{value} * {self._spread(deviation, at, dims)} * {factor}{offset}"
        return self._rounded(node, value)

    def _add_rms_norm(self, node: Node, at: At, tile: _Tile) -> str:
        return (self._norm, self._add)[node.args[1]](node, at, tile)

    def _group_rms_norm(self, node: Node, at: At, tile: _Tile) -> str:
        (x, weight), groups = node.args, int(node.kwargs["groups"])
        dims = [groups, _dims(node)[0] // groups]
        value, factor = self._value(x, at, tile), self._value(weight, at, tile)
        _, deviation = self._statistics(x, dims, False, node.kwargs["eps"])
        return self._rounded(node, f"{value} * {self._spread(deviation, _unflatten(at[0], dims), dims)} * {factor}")

    def _match_rms(self, node: Node, at: At, tile: _Tile) -> str:
        x, like = node.args
        value, largest = self._value(x, at, tile), float(node.kwargs["eps"]) ** -0.5
        (_, own), (_, target) = (self._statistics(each, _dims(each), False, 0.0) for each in (x, like))
        factor = self._assign("factor", f"tl.minimum({own}, {largest}) / {target}")
        return self._rounded(node, f"{value} * {self._spread(factor, at, _dims(x))}")

    def _gaussian_topk(self, node: Node, at: At, tile: _Tile) -> str:
        x, *moments = node.args
        value, deviations = self._value(x, at, tile), ops.deviations_of(node.kwargs["sparsity"])
        if moments and moments[0] is not None:
            sums = [self._value(moments[0], (*at[:-1], place), SCALAR) for place in (0, 1)]
            mean, squares = (self._assign("mean", f"{each} / {node.kwargs['columns']}") for each in sums)
            cut = f"{mean} + {deviations} * tl.sqrt(tl.maximum({squares} - {mean} * {mean}, 0.0))"
        else:
            mean, inverse = self._statistics(x, _dims(x), True, 0.0)
            cut = f"{mean} + {deviations} / {inverse}"
        cut = self._spread(self._assign("cut", cut), at, _dims(x) if not moments else [1])
        return self._rounded(node, f"tl.maximum({value} - {cut}, 0.0, tl.PropagateNan.ALL)")

    def _mix_streams(self, node: Node, at: At, tile: _Tile) -> str:
        (x, weights), streams = node.args, int(node.kwargs["streams"])
        size = int(_type(x).shape[-1]) // streams
        made, column = _divide(at[-1], size)
        rows = at[:-1] if len(_type(weights).shape) > 1 else ()
        terms = []
        for number in range(streams):
            weight = self._value(weights, (*rows, _flatten((made, number), (1, streams))), tile)
            terms.append(f"{weight} * {self._value(x, (*at[:-1], _plus(column, number * size)), tile)}")
        return self._rounded(node, " + ".join(terms))

    def _statistics(self, x: Node, dims: Sequence[int], is_centred: bool, eps: float) -> tuple[str, str]:
        """Variables of the mean and of 1 over the deviation of each row, or of each head of it; dims: x's, or parts."""
        *heads, width = dims
        num_heads, size = math.prod(heads), _power(width)
        if heads:
            name, num = f"h{num_heads}x{width}", _power(num_heads)
            head, column = _divide(name, size)
            limits = [f"({head} < {num_heads})"] * (num != num_heads) + [f"({column} < {width})"] * (size != width)
            tile = self._whole(name, num * size, " & ".join(limits))
            at: At = (*_unflatten(head, heads), column)
        else:
            num, tile = 0, self._tile(width)
            at = (tile.name,)
        own = at if len(dims) == len(_dims(x)) else (_flatten(at, dims),)

        def average(expression: str) -> str:
            kept = _call("tl.where", [tile.mask, expression, "0.0"]) if tile.mask else expression
            kept = self._assign("kept", kept)
            total = f"tl.sum(tl.reshape({kept}, [{num}, {size}]), axis=1)" if num else f"tl.sum({kept}, axis=0)"
            return f"{total} / {width}"

        key = "statistics", x, *dims, is_centred, eps
        if key not in self._values:
            value, mean = self._value(x, own, tile), ""
            if is_centred:
                mean = self._assign("mean", average(value))
                value = self._assign("centred", f"{value} - {self._spread(mean, at, dims)}")
            self._values[key] = self._assign("deviation", f"tl.rsqrt({average(f'{value} * {value}')} + {eps})")
            self._values[("mean", *key)] = mean
        return self._values[("mean", *key)], self._values[key]

    def _spread(self, statistic: str, at: At, dims: Sequence[int]) -> str:
        """A statistic of each row, or of each head at the heads of these columns."""
        *heads, _ = dims
        if not heads:
            return statistic
        head = f"tl.minimum({_flatten(at[:-1], heads)}, {math.prod(heads) - 1})"  # columns that are masked have none
        return self._assign(f"{statistic}_of_head", f"tl.gather({statistic}, {head}, axis=0)")

    def _rotary(self, node: Node, at: At, tile: _Tile) -> str:
        call = call_of(node)
        positions, freqs = call.args
        key = "angles", call, at, tile
        if key not in self._values:
            position, freq = self._value(positions, at[:-1], tile), self._value(freqs, at[-1:], tile)
            if (every := int(call.kwargs.get("every", 1))) > 1:
                position = f"({position} // {every} * {every})"
            self._values[key] = self._assign("angles", f"{position}.to(tl.float32) * {freq}")
        trig, scale = ("cos", "sin")[node.args[1]], str(float(call.kwargs.get("scale", 1.0)))
        if growth := float(call.kwargs.get("growth", 0.0)):
            counted = f"({self._value(positions, at[:-1], tile)} + {int(call.kwargs.get('offset', 0))})"
            is_power = call.kwargs.get("power", False)
            periods = f"({counted} {'/' if is_power else '//'} {int(call.kwargs['period'])}).to(tl.float32)"
            logarithm = f"{growth} * tl.log(1.0 + {periods})"
            scale += f" * tl.exp({logarithm})" if is_power else f" * (1.0 + {logarithm})"
        return self._assign(str(node.name), f"tl.{trig}({self._values[key]}) * {scale}")

    def _rotary_sections(self, node: Node, at: At, tile: _Tile) -> str:
        call = call_of(node)
        (positions, freqs), sections, column = call.args, call.kwargs["sections"], at[-1]
        is_interleaved, axes = call.kwargs.get("interleaved", False), call.kwargs.get("axes") or range(len(sections))
        key = "angles", call, at, tile
        if key not in self._values:
            axis = str(axes[0])
            for number, size in tuple(enumerate(sections))[1:]:
                turn = f"({column} % {len(sections)} == {number}) & ({column} < {len(sections) * size})"
                own = turn if is_interleaved else f"{column} >= {sum(sections[:number])}"
                axis = f"tl.where({own}, {axes[number]}, {axis})"
            position = self._value(positions, (self._assign("axis", axis),), tile)
            num = int(_type(freqs).shape[0])
            shared = _divide(column, sum(sections) // num)[0] if is_interleaved else _divide(column, num)[1]
            freq = self._value(freqs, (shared,), tile)
            self._values[key] = self._assign("angles", f"{position}.to(tl.float32) * {freq}")
        trig, scale = ("cos", "sin")[node.args[1]], float(call.kwargs.get("scale", 1.0))
        return self._assign(str(node.name), f"tl.{trig}({self._values[key]}) * {scale}")

    def _place_rows(self, node: Node, at: At, tile: _Tile) -> str:
        x, rows, encoded = node.args
        value, row = self._value(x, at, tile), self._value(rows, at[:-1], tile)
        self._loaded.add(encoded)
        stride, step = _strides(encoded)
        column = _plus(at[-1], int(node.kwargs.get("part", 0)) * _dims(x)[-1])
        masks = [f"({row} >= 0)", *([f"({tile.mask})"] if tile.mask else [])]  # text reads no row
        loads = [f"{encoded.name} + {row} * {stride} + {column} * {step}", f"mask={' & '.join(masks)}", "other=0.0"]
        placed = self._assign("placed", f"{_call('tl.load', loads)}.to(tl.float32)")
        total = f"{value} + {placed}" if node.kwargs.get("adds", False) else placed
        return self._rounded(node, f"tl.where({row} >= 0, {total}, {value})")

    def _interpolate_table(self, node: Node, at: At, tile: _Tile) -> str:
        (table, places), side = node.args, int(node.kwargs["side"])
        find_taps = self._cubic_taps if node.kwargs.get("mode") == "bicubic" else self._linear_taps
        rows, columns = (find_taps(places, axis, side) for axis in (0, 1))
        terms = [
            f"{self._value(table, (f'({row} * {side} + {column})', at[-1]), tile)} * ({share} * {other})"
            for (row, share), (column, other) in itertools.product(rows, columns)
        ]
        return self._rounded(node, " + ".join(terms))

    def _linear_taps(self, places: Node, axis: int, side: int) -> list[tuple[str, str]]:
        """The two entries of one axis of a table that a patch lies between, and their shares."""
        position, size = (self._value(places, (number,), SCALAR) for number in (axis, axis + 2))
        scaled = f"{position}.to(tl.float32) * {side - 1} / tl.maximum({size} - 1, 1).to(tl.float32)"
        place = self._assign("place", scaled)
        low = self._assign("low", f"{place}.to(tl.int64)")
        share = self._assign("share", f"{place} - {low}.to(tl.float32)")
        return [(low, f"(1.0 - {share})"), (self._assign("high", f"tl.minimum({low} + 1, {side - 1})"), share)]

    def _cubic_taps(self, places: Node, axis: int, side: int) -> list[tuple[str, str]]:
        """The four entries of one axis that are nearest to a patch, and their shares."""
        position, size = (self._value(places, (number,), SCALAR) for number in (axis, axis + 2))
        scaled = f"({position}.to(tl.float32) + 0.5) * {side} / {size}.to(tl.float32) - 0.5"
        place = self._assign("place", scaled)
        low = self._assign("low", f"tl.floor({place})")
        past = self._assign("past", f"{place} - {low}")
        distances = [f"{past} + 1.0", past, f"1.0 - {past}", f"2.0 - {past}"]
        kernels = [_cubic_far, _cubic_near, _cubic_near, _cubic_far]
        shares = [kernel(self._assign("distance", each)) for kernel, each in zip(kernels, distances, strict=True)]
        entries = [f"tl.minimum(tl.maximum({low}.to(tl.int64) + {step}, 0), {side - 1})" for step in range(-1, 3)]
        return [
            (self._assign("entry", entry), self._assign("share", share))
            for entry, share in zip(entries, shares, strict=True)
        ]

    def _normalize_pixels(self, node: Node, at: At, tile: _Tile) -> str:
        (patches,), mean, std = node.args, node.kwargs["mean"], node.kwargs["std"]
        channel, _ = _divide(at[-1], _dims(patches)[-1] // len(mean))
        shift, size = (_pick([float(each) for each in numbers], channel) for numbers in (mean, std))
        return self._rounded(node, f"({self._value(patches, at, tile)}.to(tl.float32) - {shift}) / {size}")

    def _rope(self, node: Node, at: At, tile: _Tile) -> str:
        x, cos, sin = node.args
        *head, column = at
        half = int(_type(cos).shape[-1])
        rotation = f"{column} % {2 * half}, {half}, {node.kwargs.get('interleaved', False)}"
        value, other = self._value(x, at, tile), self._value(x, (*head, f"find_partner({rotation})"), tile)
        cosine, sine = (self._value(each, (f"find_angle({rotation})",), tile) for each in (cos, sin))
        rotated = f"rotate({value}, {other}, {cosine}, {sine}, {rotation})"
        return self._rounded(node, f"tl.where({column} < {2 * half}, {rotated}, {value})")


def _cubic_near(distance: str) -> str:
    return f"({CUBIC + 2} * {distance} - {CUBIC + 3}) * {distance} * {distance} + 1.0"


def _cubic_far(distance: str) -> str:
    return f"(({CUBIC} * {distance} - {5 * CUBIC}) * {distance} + {8 * CUBIC}) * {distance} - {4 * CUBIC}"


RULES: dict[Op, Callable[[_Kernel, Node, At, _Tile], str]] = {
    ops.embedding: _Kernel._embedding,
    ops.rms_norm: _Kernel._norm,
    ops.layer_norm: _Kernel._norm,
    ops.add_rms_norm: _Kernel._add_rms_norm,
    ops.add: _Kernel._add,
    ops.mul: _Kernel._mul,
    ops.affine: _Kernel._affine,
    ops.steer: _Kernel._steer,
    ops.scale: _Kernel._scale,
    ops.scale_by_expert: _Kernel._scale_by_expert,
    ops.scale_by_position: _Kernel._scale_by_position,
    ops.softcap: _Kernel._softcap,
    ops.clamp: _Kernel._clamp,
    ops.activate: _Kernel._activate,
    ops.xielu: _Kernel._xielu,
    ops.gated_activate: _Kernel._gated_activate,
    ops.time_step: _Kernel._time_step,
    ops.ssm_decay: _Kernel._ssm_decay,
    ops.group_rms_norm: _Kernel._group_rms_norm,
    ops.match_rms: _Kernel._match_rms,
    ops.gaussian_topk: _Kernel._gaussian_topk,
    ops.mix_streams: _Kernel._mix_streams,
    ops.pad: _Kernel._pad,
    ops.split: _Kernel._split,
    ops.split_heads: _Kernel._split_heads,
    ops.merge_heads: _Kernel._merge_heads,
    ops.rotary: _Kernel._rotary,
    ops.rotary_sections: _Kernel._rotary_sections,
    ops.rope: _Kernel._rope,
    ops.place_rows: _Kernel._place_rows,
    ops.normalize_pixels: _Kernel._normalize_pixels,
    ops.interpolate_table: _Kernel._interpolate_table,
}


def _type(node: Node) -> Type:
    type: Type = node.meta["type"]
    return type


def _rows_of(node: Node) -> str:
    """The symbol of a node's rows."""
    rows = _type(node).shape[0]
    assert isinstance(rows, str), f"{node.name} is {_type(node)}: it has no rows"
    return rows


def _dims(node: Node) -> list[int]:
    """The dims after the rows."""
    return [int(dim) for dim in _type(node).shape[1:]]


def _power(number: int) -> int:
    """The power of two that is not less."""
    return 1 << (number - 1).bit_length()


def _input_of(program: Program, rows: str) -> Node:
    return next(node for node in program.inputs if _type(node).shape[:1] == (rows,))


def _calls_needed(program: Program, results: Sequence[Node] | dict[Node, str]) -> list[Node]:
    """The calls that these results depend on, in order."""
    found: set[Node] = set()
    waiting = [call_of(node) for node in results]
    while waiting:
        call = waiting.pop()
        if call not in found:
            found.add(call)
            waiting += map(call_of, call.all_input_nodes)
    return [call for call in program.nodes if call in found]


def _is_view(node: Node) -> bool:
    call = call_of(node)
    return node.op == "placeholder" or (call.target in ops.VIEWS and _is_view(call.args[0]))


def _view(node: Node) -> str:
    """A view of an input, as Python."""
    call = call_of(node)
    if node.op == "placeholder":
        return str(node.name)
    x = _view(call.args[0])
    if call.target is ops.split_heads:
        return f"{x}.view({', '.join(map(str, [_rows_of(node), *_dims(node)]))})"
    if call.target is ops.merge_heads:
        return f"{x}.flatten(1)"
    sizes, index = call.kwargs["sizes"], node.args[1]
    return f"{x}.narrow(-1, {sum(sizes[:index])}, {sizes[index]})"


def _allocation(node: Node, program: Program) -> str:
    like = _input_of(program, _rows_of(node)).name
    shape = map(str, [_rows_of(node), *_dims(node)])
    return _call("torch.empty", [*shape, f"dtype=torch.{FLOATS[_type(node).dtype]}", f"device={like}.device"])


def _strides(node: Node) -> list[str]:
    return [f"{node.name}_stride_{dim}" for dim in range(len(_type(node).shape))]


def _mask(tile: _Tile) -> list[str]:
    return [f"mask={tile.mask}"] if tile.mask else []


def _plus(index: Index, number: int) -> Index:
    if isinstance(index, int):
        return index + number
    return f"({index} + {number})" if number else index


def _divide(index: Index, by: int) -> tuple[Index, Index]:
    if isinstance(index, int):
        return divmod(index, by)
    return f"({index} // {by})", f"({index} % {by})"


def _pick(numbers: Sequence[float], index: Index) -> str:
    """The number of this index, as Triton's expression."""
    picked = str(numbers[-1])
    for place, number in reversed(tuple(enumerate(numbers[:-1]))):
        if str(number) != picked:
            picked = f"tl.where({index} == {place}, {number}, {picked})"
    return picked


def _unflatten(index: Index, dims: Sequence[int]) -> At:
    """One index over these dims as one for each."""
    indices: list[Index] = []
    for dim in reversed(dims[1:]):
        index, last = _divide(index, dim)
        indices.insert(0, last)
    return (index, *indices) if dims else ()


def _flatten(indices: Sequence[Index], dims: Sequence[int]) -> Index:
    flat = indices[0]
    for index, dim in zip(indices[1:], dims[1:], strict=True):
        flat = flat * dim + index if isinstance(flat, int) and isinstance(index, int) else f"({flat} * {dim} + {index})"
    return flat


def _call(function: str, arguments: Sequence[str]) -> str:
    """A call, over several lines where one would be too long."""
    line = f"{function}({', '.join(arguments)})"
    if len(line) <= WIDTH - 32:  # less its indent, and what it is given to
        return line
    lines = [arguments[0]]
    for argument in arguments[1:]:
        if len(lines[-1]) + len(argument) > WIDTH - 12:
            lines.append(argument)
        else:
            lines[-1] += f", {argument}"
    return "\n".join([f"{function}(", *(f"    {each}," for each in lines), ")"])


def _function(name: str, parameters: Sequence[str], lines: Sequence[str], decorator: str = "") -> str:
    return f"\n{decorator}{_call(f'def {name}', parameters)}:\n{indent(chr(10).join(lines), '    ')}"
