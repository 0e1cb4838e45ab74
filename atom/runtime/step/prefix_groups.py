"""Group decodes whose block tables begin alike, to read shared blocks once.

    rule = find_rule(graph, limits)                 # None: no kernel of the graph's attention does so
    groups = PrefixGroups(rule, block_size=16)
    sent = groups.find(tables, ends, 64)            # empty: it would not pay; else as in `StepInput.prefixes`

Groups are chosen by the tokens whose KV a layer then need not read. They change only with the rows of a step, so most
steps have those of the step before.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from math import lcm
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from atom.config.limits import EngineLimits
from atom.graph import Graph, ops
from atom.graph.batch import PREFIX_MULTIPLE
from atom.graph.graph import names_of
from atom.graph.recipes import KV
from atom.kernels import find_kernel
from atom.runtime.step.input import NUM_GROUPS, PrefixRule

# min bytes of a layer that are not read, by the dims of a head: what is added takes as long, on an H200 some 40 us, and
# with larger heads, whose shared part is slower, 130
SAVED_BYTES = {128: 192 << 20, 256: 640 << 20}
ROW_TOKENS = 64  # of a decode in a group: writing and reading its parts takes as long as that many tokens of KV
MAX_DEPTH = 16  # of prefixes that go on from one another

Table = npt.NDArray[np.int32]


class Group(NamedTuple):
    rows: list[int]
    length: int  # tokens that they share
    saved: int  # tokens whose KV is not read


def find_rule(graph: Graph, limits: EngineLimits) -> PrefixRule | None:
    """Find the rule for a lowered graph; None if no layer's kernel has use for groups, or they can never pay."""
    layers = {
        state: state.type.num_bytes
        for program in graph.programs.values()
        for node in program.nodes
        if node.target in (ops.paged_attention, ops.norm_rope_attention)
        if find_kernel(node.target, node.meta.get("kernel", "reference")).reads_prefixes_once
        if not {"slopes", "selected"} & {*names_of(node.target, len(node.args), *node.kwargs)}
        for state in node.args
        if isinstance(state, KV) and state.rule.keeps_all and node.kwargs.get("window") is None
    }
    if not layers:
        return None
    dim = max(int(state.type.shape[-1]) for state in layers)
    saved_bytes = next((saved for dims, saved in SAVED_BYTES.items() if dim <= dims), max(SAVED_BYTES.values()))
    rule = PrefixRule(next(iter(layers)).kind, sum(layers.values()) // len(layers), saved_bytes)
    can_pay = (limits.max_num_seqs - 1) * limits.max_model_len * rule.token_bytes >= rule.saved_bytes
    return rule if can_pay else None


class PrefixGroups:
    """Finds the groups of steps, and remembers those of the last one."""

    def __init__(self, rule: PrefixRule, block_size: int) -> None:
        self._rule, self._block_size, self._unit = rule, block_size, lcm(block_size, PREFIX_MULTIPLE)
        self._tables: list[list[int]] = []  # of the last step; as they are held, no other table has the id of one
        self._key: tuple[int, ...] = ()  # their ids
        self._begins: dict[int, Table] = {}  # by id, of those that have been compared: as long as they then were
        self._groups: list[Group] = []
        self._packed: dict[int, bytearray] = {}  # by size

    def find(self, tables: Sequence[list[int]], ends: Sequence[int], size: int) -> bytearray:
        """Find the groups of a step's decodes; empty if they do not pay.

        tables: of each decode, only appended to
        ends: before which positions all their queries see all keys
        size: the number of decodes with padding
        """
        key = tuple(map(id, tables))
        if key != self._key:
            self._key, self._tables, self._packed = key, list(tables), {}
            self._begins = {each: self._begins[each] for each in key if each in self._begins}
            self._groups = self._find_groups(tables, ends)
        if not self._groups:
            return bytearray()
        if size not in self._packed:
            self._packed[size] = pack(self._groups, size)
        return self._packed[size]

    def _find_groups(self, tables: Sequence[list[int]], ends: Sequence[int]) -> list[Group]:
        by_first: dict[int, list[int]] = {}
        for row, table in enumerate(tables):
            by_first.setdefault(table[0], []).append(row)
        groups = list[Group]()
        for rows in by_first.values():
            if len(rows) > 1:
                begins = {row: self._begin_of(tables[row], ends[row]) for row in rows}
                groups += group_alike(begins, rows, self._count_tokens)
        groups = sorted(groups, key=lambda group: -group.saved)[:NUM_GROUPS]
        saved = sum(group.saved for group in groups) * self._rule.token_bytes
        return groups if saved >= self._rule.saved_bytes else []

    def _begin_of(self, table: list[int], end: int) -> Table:
        found = self._begins.get(id(table))
        if found is None:
            found = np.frombuffer(array("i", table[: max(end, 0) // self._block_size]), np.int32)
            self._begins[id(table)] = found
        return found

    def _count_tokens(self, num_blocks: int) -> int:
        """The tokens of so many blocks that a group may share."""
        return num_blocks * self._block_size // self._unit * self._unit


def group_alike(
    tables: dict[int, Table], rows: list[int], count_tokens: Callable[[int], int], depth: int = 0
) -> list[Group]:
    """Group rows whose tables begin alike, so that the most is saved.

    Rows whose tables go on alike are groups of their own where that saves more than being in the group of all.

    tables: by row
    count_tokens: the tokens of so many blocks that a group may share
    """
    num_alike = count_alike([tables[row] for row in rows])
    length = count_tokens(num_alike)
    branches: dict[int, list[int]] = {}
    for row in rows:
        if len(tables[row]) > num_alike:
            branches.setdefault(int(tables[row][num_alike]), []).append(row)
    apart, inner, joined = list[Group](), list[Group](), set(rows)
    for branch in branches.values():
        if len(branch) > 1 and depth < MAX_DEPTH:
            own = group_alike(tables, branch, count_tokens, depth + 1)
            if count_saved(own) > len(branch) * (length - ROW_TOKENS):
                apart += own
                joined.difference_update(branch)
            else:
                inner += own
    whole = Group(sorted(joined), length, (len(joined) - 1) * length - len(joined) * ROW_TOKENS)
    if whole.saved > count_saved(inner):
        return [*apart, whole]
    return apart + inner


def count_saved(groups: Sequence[Group]) -> int:
    return sum(group.saved for group in groups)


def count_alike(tables: Sequence[Table]) -> int:
    """The number of blocks with which all tables begin."""
    shortest = min(map(len, tables))
    begins = np.stack([table[:shortest] for table in tables])
    is_other = (begins != begins[0]).any(0)
    return int(is_other.argmax()) if is_other.any() else shortest


def pack(groups: Sequence[Group], size: int) -> bytearray:
    """Pack the groups of so many decodes, as in `StepInput.prefixes`."""
    packed = bytearray(4 * packed_size(size))
    lengths, members, starts = np.split(np.frombuffer(packed, np.int32), [size, 2 * size])
    first = 0
    for number, group in enumerate(groups):
        lengths[group.rows] = group.length
        members[first : first + len(group.rows)] = group.rows
        first += len(group.rows)
        starts[number + 1 :] = first
    return packed


def packed_size(size: int) -> int:
    """The numbers in `StepInput.prefixes` of so many decodes."""
    return 2 * size + NUM_GROUPS + 1
