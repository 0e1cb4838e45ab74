"""Write calls into a program, with weights named by role.

    writer = Writer(model, graph.program("body"), dtype="bf16", cache_dtype="bf16")
    h = writer.norm(x, "attention_norm", layer=0)
    q, k, v = writer.linears(h, {"q": 576, "k": 192, "v": 192}, has_bias=False, layer=0)

A role is a part of the model; the model file says what the checkpoint calls it. Roles that name one tensor are parts of
it, in their order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

from torch.fx import Node

from atom.checkpoint.modules import format_of, matches, module_of
from atom.config import ModelConfig, QuantConfig
from atom.config.stored_names import stored_name
from atom.errors import ConfigError
from atom.graph import Apply, Dequantize, Full, Program, Quantize, Recipe, Shift, Slice, State, Transpose, Type, W, ops
from atom.graph.formats import FormatError, act_of, rounded_act_of, shrink_group
from atom.graph.ops import Op
from atom.graph.recipe_ranges import cat, padded
from atom.graph.recipes import renamed

NORMS = {"rms": ops.rms_norm, "layer": ops.layer_norm, "l2": ops.rms_norm}


class Segments(NamedTuple):
    """Where segments of patches begin, i32[S + 1] with the number of patches last."""

    starts: Node  # of images
    window_starts: Node | None  # of windows within images, of layers of type sliding_attention


@dataclass(frozen=True)
class Writer:
    """Writes one program."""

    model: ModelConfig
    program: Program
    dtype: str
    cache_dtype: str
    quant: QuantConfig
    prefix: str = ""  # ahead of the names of weights and caches
    scaled: set[str] = field(default_factory=set)  # names in model.scales, channel_scales and norm that were read
    carried: dict[str, Node] = field(default_factory=dict)  # by role, what a layer hands to later ones
    stream: int | None = None  # of several, of which each has weights of its own
    ends: dict[str, Node] = field(default_factory=dict)  # by type of layer, up to where its tokens see, see placed.py
    clips: bool = False  # what linears read and give is clipped, to bounds that are stored next to them
    segments: Segments | None = None  # of a program without caches, whose tokens see all of their segment

    def call(self, op: Op, *args: Any, name: str | tuple[str, ...], **kwargs: Any) -> Any:
        return self.program.call(op, *map(self._prefixed, args), name=name, **kwargs)

    def _prefixed(self, arg: Any) -> Any:
        if isinstance(arg, State):
            return replace(arg, name=self.prefix + arg.name)
        return renamed(arg, lambda name: self.prefix + name) if isinstance(arg, Recipe) else arg

    def linear(
        self, x: Node, role: str, rows: int, has_bias: bool, layer: int | None = None, bias: Recipe | None = None
    ) -> Node:
        """x [T, I] -> [T, rows]

        bias: in place of the one that has_bias says is stored.
        """
        return self.linears(x, {role: rows}, has_bias, layer, biases=None if bias is None else [bias])[0]

    def linears(
        self, x: Node, rows: dict[str, int], has_bias: bool, layer: int | None, num_chunks: int = 1,
        biases: list[Recipe] | None = None,
    ) -> list[Node]:  # fmt: skip
        """x [T, I] -> for each role [T, rows]

        num_chunks: see `parts`.
        biases: of the roles, in place of those that has_bias says are stored.
        """
        inner = x.meta["type"].shape[-1]

        def stored(role: str, n: int) -> Recipe:
            name = self.weight_name(role, layer)
            if not self.model.transposed:
                return self.stored(name, (n, inner))
            return Transpose(W(name, Type(self.dtype, (inner, n))))

        weights = self.parts(rows, stored, layer, num_chunks=num_chunks)
        args = [weights]
        if biases is None and has_bias:
            biases = self.parts(
                rows, lambda role, n: self.weight(role, (n,), layer, "bias"), layer, num_chunks=num_chunks
            )
        args += [biases] if biases else []
        args[0] = [self.packed(weight, role, layer) for role, weight in zip(rows, weights, strict=True)]
        read = [self.clip(x, role, layer, "input") for role in rows]
        every = zip(rows, read, *args, strict=True)
        made = [self.multiply(x, *recipes, role=role, layer=layer) for role, x, *recipes in every]
        made = [self.clip(y, role, layer, "output") for role, y in zip(rows, made, strict=True)]
        return [self.scale_as(y, role) for role, y in zip(rows, made, strict=True)]

    def clip(self, x: Node, role: str, layer: int | None, which: str) -> Node:
        """x [T, I], clipped as the input or the output of a linear, if the program's linears have bounds"""
        if not self.clips:
            return x
        module = self.name(role, layer).removesuffix(".linear")
        low, high = (W(f"{module}.{which}_{end}", Type(self.dtype, ())) for end in ("min", "max"))
        clipped: Node = self.call(ops.clip, x, low, high, name=x.name)
        return clipped

    def adapt(self, x: Node, rank: int, layer: int, **outputs: Node) -> list[Node]:
        """What linears give, by role, with what a use of these adds: two linears of x, of a low rank (Hu et al. 2021).

        Roles may read one first linear: these have one second one, too.
        """
        roles_of: dict[str, list[str]] = {}
        for role in outputs:
            roles_of.setdefault(self.name(f"{role}_adapter_in", layer), []).append(role)
        added: dict[str, Node] = {}
        for roles in roles_of.values():
            low = self.linear(x, f"{roles[0]}_adapter_in", rank, False, layer)
            rows = {f"{role}_adapter": int(outputs[role].meta["type"].shape[-1]) for role in roles}
            added |= zip(roles, self.linears(low, rows, False, layer), strict=True)
        return [self.call(ops.add, y, added[role], name=role) for role, y in outputs.items()]

    def multiply(self, x: Node, weight: Recipe, *bias: Recipe, role: str, layer: int | None, name: str = "") -> Node:
        """A linear by a role's weight; activations in the format that `quant.act` and the weight's own say."""
        act = self.act_of(weight, self.name(role, layer))
        node: Node = self.call(ops.linear, x, weight, *bias, act=act, name=name or role)
        return node

    def act_of(self, weight: Recipe, module: str) -> str | None:
        """The format of activations that a weight is multiplied with; None: they stay in x's dtype."""
        quant, fmt = self.quant, weight.type.fmt
        own = self._own_act(fmt)
        kind = own and own.partition("[")[0]
        if quant.requires_act and fmt is not None and kind != quant.act:
            acts = f"activations in {kind} only" if kind else "none but plain activations"
            stored = f"{self.prefix}{module} is stored as {fmt}, which is multiplied with {acts}"
            raise ConfigError(f"quant.act={quant.act}: {stored}; leave quant.act out")
        taken = {"auto": ("fp8", self.model.act), "none": ()}.get(quant.act, (quant.act,))
        return own if kind in taken else None

    def _own_act(self, fmt: str | None) -> str | None:
        """The format of activations that a weight is multiplied with, if any is: rounded to fp8 only if asked for."""
        own = None if fmt is None else act_of(fmt)
        return rounded_act_of(fmt) if own is None and fmt is not None and self.quant.act == "fp8" else own

    def act_of_experts(self, *weights: Recipe) -> str | None:
        """The format of activations that experts are multiplied with, if all their weights are stored in one."""
        acts = {self._own_act(weight.type.fmt) for weight in weights}
        act = acts.pop() if len(acts) == 1 else None
        is_taken = act is not None and act.startswith("fp8") and self.quant.act in ("auto", "fp8")
        return act if is_taken else None

    def norm(
        self,
        x: Node,
        role: str,
        layer: int | None = None,
        name: str = "h",
        weight_of_heads: str = "shared",
        eps: float | None = None,
        groups: int = 1,
    ) -> Node:
        """x [..., H], normed along its last dim, each of some groups of its columns by itself

        weight_of_heads: as attention.qk_norm_weight, of x [T, N, D]
        eps: None: the model's
        """
        norm, shape = self.model.norm, x.meta["type"].shape[-2 if weight_of_heads == "by_head" else -1 :]
        is_final = role == "final_norm" and norm.final_offset is not None
        offset = required(norm.final_offset) if is_final else norm.offset
        if eps is None:
            eps = norm.after_eps if role.endswith("_after_norm") and norm.after_eps is not None else norm.eps
        ones = Full(1.0, Type(self.dtype, shape))
        if norm.kind == "l2":  # the length is the root of the mean square times that of the number of channels
            eps, ones = eps / int(shape[-1]), Full(int(shape[-1]) ** -0.5, Type("fp32", shape))
        self.scaled.add(role)
        if role in norm.weighs_input:
            x = self.call(ops.mul, x, self._norm_weight(role, shape, layer, offset), name=name)
        if weight_of_heads == "none" or role in (*norm.unweighted, *norm.weighs_input):
            unweighted: Node = self.call(NORMS[norm.kind], x, ones, eps=eps, name=name)
            return unweighted
        weight = self._norm_weight(role, shape, layer, offset) if norm.weight else ones
        if groups > 1:
            grouped: Node = self.call(ops.group_rms_norm, x, weight, eps=eps, groups=groups, name=name)
            return grouped
        bias = [self.weight(role, shape, layer, "bias")] if norm.bias else []
        normed: Node = self.call(NORMS[norm.kind], x, weight, *bias, eps=eps, name=name)
        return normed

    def _norm_weight(self, role: str, shape: tuple[int, ...], layer: int | None, offset: float) -> Recipe:
        if not offset:
            return self.weight(role, shape, layer)
        # in float32, so that a small weight is not rounded away
        return Shift(W(self.weight_name(role, layer), Type("fp32", shape)), offset)

    def scale(self, x: Node, by: float | None) -> Node:
        """x times a number, None for 1"""
        return x if by is None else self.call(ops.scale, x, by=by, name=x.name)

    def affine(self, x: Node, role: str, layer: int | None = None) -> Node:
        """x [T, H], shifted and scaled by stored numbers, by channel"""
        of_role = (W(self.name(f"{role}_{part}", layer), Type(self.dtype, x.meta["type"].shape[-1:]))
                   for part in ("factor", "offset"))  # fmt: skip
        made: Node = self.call(ops.affine, x, *of_role, name=x.name)
        return made

    def scale_as(self, x: Node, name: str) -> Node:
        """x times the number that `model.scales` has for a name, if any"""
        by = self.model.scales.get(name, 1.0)
        self.scaled.add(name)
        return self.scale(x, None if by == 1 else by)

    def scale_channels(self, x: Node, name: str, layer: int | None = None) -> Node:
        """x [T, C] times the vector that `model.channel_scales` has for a name, if any, and zeros beyond its end"""
        if name not in self.model.channel_scales:
            return x
        scales, size = self.model.channel_scales[name], int(x.meta["type"].shape[-1])
        self.scaled.add(f"{name}_channels")
        stored = self.model.vocab if name == "head" else size
        vector = W(self.name(f"{name}_channels", layer), Type("fp32", (stored,)))
        by = padded(Apply(vector, "square" if scales.power == 2 else "scale", scales.factor), 0, size)
        scaled: Node = self.call(ops.mul, x, by, name=x.name)
        return scaled

    def parts(self, rows: dict[str, int], stored: Callable[[str, int], Recipe], layer: int | None, suffix: str = "",
              dim: int = 0, interleaved: bool = False, num_chunks: int = 1) -> list[Recipe]:  # fmt: skip
        """The weights of these roles, each of this many rows in `dim`.

        stored: makes the recipe of a role's stored tensor, of this many rows.
        interleaved: whether the rows of the roles alternate one by one within a fused tensor.
        num_chunks: number of contiguous chunks each role is split into within a fused tensor.
        """
        roles_of: dict[str, dict[str, int]] = {}
        for role, n in rows.items():
            roles_of.setdefault(self.name(role + suffix, layer), {})[role] = n
        made = {
            role: part
            for roles in roles_of.values()
            for role, part in zip(roles, self._parts_of_one(roles, stored, dim, interleaved, num_chunks), strict=True)
        }
        return [made[role] for role in rows]

    def _parts_of_one(
        self, rows: dict[str, int], stored: Callable[[str, int], Recipe], dim: int, interleaved: bool, num_chunks: int
    ) -> list[Recipe]:
        """The weights of roles that one tensor has."""
        if len(rows) == 1:
            return [stored(role, n) for role, n in rows.items()]
        total = sum(rows.values())
        whole = stored(next(iter(rows)), total)
        if interleaved:
            return [Slice(whole, first, total, dim, len(rows)) for first in range(len(rows))]
        ends = [end // num_chunks for end in accumulate(rows.values())]
        starts = range(0, total, total // num_chunks)
        return [
            cat(tuple(Slice(whole, at + end - n // num_chunks, at + end, dim) for at in starts), dim)
            for end, n in zip(ends, rows.values(), strict=True)
        ]

    def packed(
        self, weight: Recipe, role: str, layer: int | None, fmt: str | None = None, by_pattern: bool = True
    ) -> Recipe:
        """A role's weight as `quant` wants it: packed while it loads, unpacked, or as the checkpoint stores it.

        fmt: in place of quant.fmt; plain: none. The module's own, of quant.formats, goes first
        by_pattern: whether patterns of quant.formats hold for the module, besides its name
        """
        module = module_of(self.name(role, layer))
        own = self.prefix + module  # distinguishes a draft's from the model's
        is_plain = any(matches(each, pattern) for each in {module, own} for pattern in self.quant.plain)
        fmt = self._own_format(module, own, by_pattern) or fmt or self.quant.fmt
        is_packed = weight.type.fmt is not None
        is_kept = fmt is None or fmt in ("auto", "none", "plain") or is_plain
        if is_packed and (self.quant.fmt != "auto" or not is_kept):  # a GGUF file's is packed anew
            weight = Dequantize(weight)
        if fmt is None or is_kept:
            return weight
        try:
            return Quantize(weight, shrink_group(fmt, weight.type))
        except FormatError as error:
            raise ConfigError(f"quant: {own}: {error}; or name it in quant.plain") from None

    def _own_format(self, module: str, own: str, by_pattern: bool) -> str | None:
        """The format that quant.formats has for a module by its name or a pattern; None: it has none."""
        formats = self.quant.formats
        if not by_pattern:
            return formats.get(own) or formats.get(module)
        patterns = (fmt for pattern, fmt in formats.items() if matches(module, pattern) or matches(own, pattern))
        return formats.get(own) or formats.get(module) or next(patterns, None)

    def weight(self, role: str, shape: tuple[int, ...], layer: int | None = None, part: str = "weight") -> W:
        """A plain tensor of a module."""
        return W(f"{self.name(role, layer)}.{part}", Type(self.dtype, shape))

    def matrix(self, role: str, shape: tuple[int, ...], layer: int | None = None) -> Recipe:
        """An embedding, a head, a router or what joins a draft: packed only if the formats name its module."""
        if self.name(role, layer) not in self.model.formats:
            return self.weight(role, shape, layer)
        stored = self.stored(self.weight_name(role, layer), shape)
        return stored if stored.type.fmt is None or self.quant.fmt == "auto" else Dequantize(stored)

    def stored(self, name: str, shape: tuple[int, ...]) -> W:
        """A tensor, in the checkpoint's stored format unless that leaves it plain."""
        model = self.model
        return W(name, Type(self.dtype, shape, format_of(module_of(name), model.fmt, model.plain, model.formats)))

    def weight_name(self, role: str, layer: int | None) -> str:
        return f"{self.name(role, layer)}.weight"

    def name(self, role: str, layer: int | None = None) -> str:
        """The stored name of a role."""
        if role not in self.model.weights:
            raise ConfigError(f"model.weights: nothing says what the checkpoint calls '{role}'; add {role}: <name>")
        return stored_name(self.model, role, layer).replace("{stream}", str(self.stream))


def required(value: Any) -> Any:
    """A value that `config.load` has ensured."""
    assert value is not None, "config.load checks it"
    return value
