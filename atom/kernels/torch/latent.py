"""Paged latent attention on a CPU, absorbed or expanded (DeepSeek-AI 2024), whichever multiplies less.

    attend = PagedLatentAttention()          # one object for all layers, as PagedAttention
    for layer in layers:
        out = attend(q_nope, q_rope, kv_b, cache, batch, scale=0.1)

Absorbed: queries times the key rows of kv_b attend over the entries themselves, one key/value head whose values are the
first L dims of its keys, and the sums are multiplied by the value rows. This is used for decodes, and for prefills of
few queries after a long context, and where queries choose entries. Expanded: the entries times kv_b are the keys and
values of every head, a linear like any other and rounded like one. This is used for other prefills.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from atom.graph import Batch, PagedCache
from atom.graph.ops.latent import split_entries
from atom.kernels.torch.plan import Plans
from atom.kernels.torch.prefill import Prefill
from atom.kernels.torch.softmax import Rule, kept_of_sinks, softmax_
from atom.kernels.torch.sparse import find_slots
from atom.kernels.torch.workspace import Workspace


class PagedLatentAttention:
    """The op `paged_mla_attention`. Weights are [N, P + U, L] here, heads apart."""

    def __init__(self, workspace_bytes: int = 6 << 20, expanded_bytes: int = 32 << 20) -> None:
        """workspace_bytes: of fp32 entries that decodes read at once, and of weights converted to fp32 at once
        expanded_bytes: of fp32 keys and values that a prefill expands at once; at least one head's
        """
        self._workspace = Workspace()
        self._plans = Plans(self._workspace, workspace_bytes)
        self._weight_bytes = workspace_bytes
        self._expanded_bytes = expanded_bytes

    def __call__(self, q_nope: Tensor, q_rope: Tensor, kv_b: Tensor, cache: PagedCache, batch: Batch,
                 k_scale: Tensor | None = None, selected: Tensor | None = None, sinks: Tensor | None = None, *,
                 scale: float, window: int | None = None) -> Tensor:  # fmt: skip
        """Shapes as in the op. Tokens of no sequence, and sequences without positions, get zeros."""
        (tokens, heads, plain), rank = q_nope.shape, kv_b.shape[1]
        weight = kv_b.view(heads, -1, rank)
        rule = Rule(scale, sinks=sinks, value_scale=1.0 if k_scale is None else float(k_scale))
        if selected is not None and len(batch.lengths) and int(batch.lengths.max()) > selected.shape[2]:
            slots = find_slots(selected[:, 0], cache, batch)
            return self._attend_chosen(q_nope, q_rope, weight, cache.blocks.flatten(0, 1), slots, rule)
        blocks = cache.blocks.view(*cache.blocks.shape[:2], 1, 1, -1)
        plan = self._plans.find(PagedCache(blocks, cache.kind), rank, heads, window, batch, q_rope.dtype)
        num_decodes = plan.num_decodes
        out = q_nope.new_zeros(tokens, heads, weight.shape[1] - plain)
        if num_decodes:
            q = self._absorb(q_nope[:num_decodes], q_rope[:num_decodes], weight, rule)
            self._sum_values(plan.decodes.attend(q, blocks, rule), weight, out[:num_decodes])
        for prefill in plan.prefills:
            own = prefill.tokens
            args = prefill, q_nope[own], q_rope[own], weight
            attend = self._attend_absorbed if _is_absorbed(*args) else self._attend_expanded
            attend(*args, blocks, rule, out[own])
        return out

    def _attend_absorbed(self, prefill: Prefill, q_nope: Tensor, q_rope: Tensor, weight: Tensor, cache: Tensor,
                         rule: Rule, out: Tensor) -> None:  # fmt: skip
        """q_nope [Q, N, P], q_rope [Q, N, R] -> out [Q, N, U]"""
        prefill.reader.read(cache)
        q = self._absorb(q_nope, q_rope, weight, rule)
        sums = self._workspace.take("sums", *q.shape[:2], weight.shape[2])
        prefill.attend(q, prefill.reader.keys, prefill.reader.values, rule, sums)
        self._sum_values(sums, weight, out)

    def _attend_expanded(self, prefill: Prefill, q_nope: Tensor, q_rope: Tensor, weight: Tensor, cache: Tensor,
                         rule: Rule, out: Tensor) -> None:  # fmt: skip
        """q_nope [Q, N, P], q_rope [Q, N, R] -> out [Q, N, U]"""
        plain, value_dim = q_nope.shape[2], out.shape[2]
        entries = prefill.reader.gather(cache).flatten(1)
        latents, k_rope = split_entries(entries, weight.shape[2], q_rope.dtype)
        if rule.value_scale != 1.0:
            latents, rule = latents * rule.value_scale, rule._replace(value_scale=1.0)
        latents = latents.to(weight.dtype)
        q = torch.cat((q_nope, q_rope), dim=2)
        for some in _slices(len(weight), self._expanded_bytes // (len(entries) * (q.shape[2] + value_dim) * 4)):
            expanded = F.linear(latents, weight[some].flatten(0, 1)).view(len(entries), -1, plain + value_dim)
            keys, values = torch.split(expanded.transpose(0, 1), [plain, value_dim], dim=2)
            wide_keys = self._workspace.take("keys", *keys.shape[:2], q.shape[2])
            wide_keys[..., :plain].copy_(keys)
            wide_keys[..., plain:].copy_(k_rope)
            wide_values = self._workspace.take("values", *values.shape).copy_(values)
            own = rule if rule.sinks is None else rule._replace(sinks=rule.sinks[some])
            prefill.attend(q[:, some], wide_keys, wide_values, own, out[:, some])

    def _attend_chosen(self, q_nope: Tensor, q_rope: Tensor, weight: Tensor, cache: Tensor, slots: Tensor,
                       rule: Rule) -> Tensor:  # fmt: skip
        """q_nope [T, N, P], q_rope [T, N, R], cache [slots, E], slots i64[T, k], -1 for none -> [T, N, U]"""
        (tokens, heads, plain), rank, num = q_nope.shape, weight.shape[2], slots.shape[1]
        out = q_nope.new_zeros(tokens, heads, weight.shape[1] - plain)
        stored = cache.view(torch.uint8) if cache.dtype is torch.float8_e4m3fn else cache
        for some in _slices(tokens, self._expanded_bytes // (4 * num * (rank + q_rope.shape[2] + heads))):
            own, first = slots[some], slots[some, :1]  # in place of none a query reads the first that it chose
            entries = stored[torch.where(own < 0, first, own).clamp(min=0).flatten()].view(cache.dtype)
            latents, k_rope = split_entries(entries, rank, q_rope.dtype)
            keys = torch.cat((latents.float(), k_rope.float()), dim=1).view(len(own), num, -1)
            q = self._absorb(q_nope[some], q_rope[some], weight, rule)
            scores = torch.bmm(q, keys.mT).mul_(rule.scale).masked_fill_((own < 0).unsqueeze(1), float("-inf"))
            totals = softmax_(scores)
            sums = torch.bmm(scores, keys[..., :rank])
            if rule.sinks is not None:
                sums.mul_(kept_of_sinks(totals, rule.sinks))
            sums.masked_fill_((first < 0).unsqueeze(2), 0.0)
            self._sum_values(sums * rule.value_scale, weight, out[some])
        return out

    def _absorb(self, q_nope: Tensor, q_rope: Tensor, weight: Tensor, rule: Rule) -> Tensor:
        """q_nope [Q, N, P], q_rope [Q, N, R] -> fp32[Q, N, L + R], in the workspace"""
        rank = weight.shape[2]
        q = self._workspace.take("absorbed", *q_rope.shape[:2], rank + q_rope.shape[2])
        for some, rows in self._widen(weight[:, : q_nope.shape[2]]):
            q[:, some, :rank].copy_(torch.bmm(q_nope[:, some].transpose(0, 1).float(), rows).transpose(0, 1))
        if rule.value_scale != 1.0:  # that of the latents
            q[..., :rank].mul_(rule.value_scale)
        q[..., rank:].copy_(q_rope)
        return q

    def _sum_values(self, sums: Tensor, weight: Tensor, out: Tensor) -> None:
        """Sums of entries fp32[Q, N, L] -> of values, out [Q, N, U]"""
        for some, rows in self._widen(weight[:, -out.shape[2] :]):
            out[:, some].copy_(torch.bmm(sums[:, some].transpose(0, 1), rows.mT).transpose(0, 1))

    def _widen(self, rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Rows [N, ., L] in float32, some heads at a time."""
        for some in _slices(len(rows), self._weight_bytes // (rows[0].numel() * 4)):
            part = rows[some]
            yield some, part if part.dtype is torch.float32 else self._workspace.take("rows", *part.shape).copy_(part)


def _slices(num: int, size: int) -> Iterator[slice]:
    """Slices of range(num), of this size, or of 1 if it is less."""
    size = max(1, size)
    return (slice(first, first + size) for first in range(0, num, size))


def _is_absorbed(prefill: Prefill, q_nope: Tensor, q_rope: Tensor, weight: Tensor) -> bool:
    """Whether a prefill multiplies less absorbed than expanded; q_nope [Q, N, P], q_rope [Q, N, R]"""
    queries, context = len(q_nope), prefill.reader.keys.shape[1]
    (_, expanded, rank), rotated = weight.shape, q_rope.shape[2]
    linear = rank * expanded * weight.itemsize / 4  # bf16 multiplies twice as fast as fp32
    by_absorbing = queries * (rank * expanded + context * (2 * rank + rotated))
    by_expanding = context * (linear + queries * (expanded + rotated))
    return by_absorbing < by_expanding
