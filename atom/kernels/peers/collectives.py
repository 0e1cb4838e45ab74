"""Collective kernels: programs push words into peers' memory and poll their own.

    all_reduce(x, arena)                            # one shot: each rank gets all tensors, and adds them
    all_reduce_in_parts(x, arena)                   # two shots: each adds a part, and pushes its sum; see also tiles.py
    reduce_scatter(x, arena)
    all_gather(x, size, arena)

A **word** has 8 bytes: 4 of data, and the epoch in which they were sent. It is stored and loaded atomically, so a
reader that finds the epoch has the data (NCCL's LL protocol). Nothing else is ordered, counted or cleared. A CUDA graph
can replay a launch, since epochs are in device memory.

Each program of each rank has a region in the arena for each source and for even and odd epochs, and an epoch that
counts the calls it took part in. Ranks make the same calls in the same order, on one stream, so an epoch names the same
call on all of them, and **two regions, used in turn, are enough**, whatever the sizes and kinds of calls:

1. A kernel sends at least one word to each peer, and ends only when it has all words of its epoch from each of them:
   blocks are sent whole, including their padding.
2. A rank that writes epoch e has therefore received words of epoch e - 1 from the peer that it writes to.
3. That peer sent them in its kernel of epoch e - 1, which did nothing until that of epoch e - 2 had ended: kernels of a
   stream run one after the other, and one that is launched early (PDL) waits for the preceding one, which has waited
   for its own predecessor.
4. That kernel had read all words of epoch e - 2, the last ones in the region that is written now; the next region is
   the other one. A second shot has words of its own, next to the first one's, and the same epoch.

Words that a call does not write are of earlier epochs, which no reader mistakes for its own. An epoch has 4 bytes, and
wraps after 2**32 - 2 calls, skipping 0, which cleared memory holds, and 1, so that even and odd ones alternate.

All programs of a launch must be resident at once, since each waits for a program of its peers: there are at most as
many as multiprocessors, and a following kernel that is launched early starts only once all of them have begun. `stop`
ends their wait if a rank has ended; their sums are then meaningless.

Every rank adds in float32, in the order of the ranks, and rounds once, so all get the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from atom.kernels.triton.compile.jit import jit
from atom.kernels.triton.gpu import find_gpu

MAX_PROGRAMS, MAX_RANKS = 128, 8
WORD = 8  # bytes in the arena, for 4 of a tensor
REGION_WORDS = 16384  # of all sources together, per program and epoch
WORDS_BYTES = 2 * MAX_PROGRAMS * REGION_WORDS * WORD  # per rank; tiles follow them
SMALL, LARGE = (512, 4), (1024, 4)  # words of a block, and warps for it
# Triton ignores `volatile` on AMD's GPUs; there cache modifiers bypass the caches (sc0 sc1)
POLLED = tl.constexpr("" if torch.version.hip is None else ".cv")
PUSHED = tl.constexpr("" if torch.version.hip is None else ".wt")
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}  # that are added


class Arena(NamedTuple):
    """The memory of all ranks along an axis, as the arguments of one rank's kernels."""

    table: Tensor  # i64[ranks]: address in this process, by rank
    epochs: Tensor  # i32[programs]: next epoch of each program
    counts: Tensor  # i32[programs]: tiles that each has sent
    stop: Tensor  # i32[1]: nonzero: stop waiting
    rank: int

    @property
    def ranks(self) -> int:
        return len(self.table)

    @property
    def region(self) -> int:
        """The words of a source, per program and epoch; a multiple of all block sizes."""
        return REGION_WORDS // self.ranks // (2 * LARGE[0]) * (2 * LARGE[0])

    @property
    def room(self) -> int:
        """The max bytes that a rank can send each peer in a call."""
        return len(self.epochs) * self.region * 4


class Launch(NamedTuple):
    programs: int
    tiles: int  # blocks per program
    block: int  # words
    num_warps: int


def plan(words: int, programs: int) -> Launch:
    """Divide words among programs: use all of them first, then larger blocks, then several blocks each."""
    block, num_warps = SMALL if words <= SMALL[0] * programs else LARGE
    tiles = -(-words // (block * programs))
    return Launch(-(-words // (block * tiles)), tiles, block, num_warps)


@jit
def _to_word(value, epoch):
    return (epoch.to(tl.int64) << 32) | (value.to(tl.int64) & 0xFFFFFFFF)


@jit
def unpack(value, DTYPE: tl.constexpr):
    """The one or two numbers of 4 bytes, in float32."""
    if DTYPE == "bf16":
        low, high = (value << 16).to(tl.float32, bitcast=True), (value & -65536).to(tl.float32, bitcast=True)
    elif DTYPE == "fp16":
        low = value.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (value >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        low, high = value.to(tl.float32, bitcast=True), tl.zeros(value.shape, tl.float32)
    return low, high


@jit
def pack(low, high, DTYPE: tl.constexpr):
    if DTYPE == "fp32":
        value = low.to(tl.int32, bitcast=True)
    else:
        half: tl.constexpr = tl.bfloat16 if DTYPE == "bf16" else tl.float16
        first = low.to(half).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        value = first | (high.to(half).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    return value


@jit
def _region(table, peer, epoch, source, PROGRAMS: tl.constexpr, RANKS: tl.constexpr, REGION: tl.constexpr):
    """The address, at a rank, of this program's words of a source."""
    place = (((epoch & 1) * PROGRAMS + tl.program_id(0)) * RANKS + source) * REGION
    return tl.multiple_of(tl.load(table + peer).to(tl.pointer_type(tl.int64)), 16) + place


@jit
def _push(value, table, rank, epoch, place, PROGRAMS: tl.constexpr, RANKS: tl.constexpr, REGION: tl.constexpr):
    """Send the same words to all peers."""
    for distance in tl.static_range(1, RANKS):
        region = _region(table, (rank + distance) % RANKS, epoch, rank, PROGRAMS, RANKS, REGION)
        tl.store(region + place, _to_word(value, epoch), cache_modifier=PUSHED)


@jit
def _sum(own, mine, rank, epoch, stop, place, RANKS: tl.constexpr, REGION: tl.constexpr, DTYPE: tl.constexpr):
    """Wait for a block of words of all peers, and add them and this rank's own in the order of the ranks."""
    own = _to_word(own, epoch)
    low, high = unpack(own.to(tl.int32), DTYPE)
    waits = 1
    while waits > 0:
        waits = (tl.load(stop, volatile=True, cache_modifier=POLLED) == 0).to(tl.int32)
        is_late = tl.zeros(own.shape, tl.int32)
        for source in tl.static_range(RANKS):
            is_peer = tl.full(own.shape, source, tl.int32) != rank
            word = tl.load(
                mine + source * REGION + place, mask=is_peer, other=own, volatile=True, cache_modifier=POLLED
            )
            is_late |= ((word >> 32).to(tl.int32) != epoch).to(tl.int32)
            more_low, more_high = unpack(word.to(tl.int32), DTYPE)
            if source == 0:
                low, high = more_low, more_high
            else:
                low, high = low + more_low, high + more_high
        waits *= tl.max(is_late)
    return pack(low, high, DTYPE)


@jit
def _begin(epochs, PDL: tl.constexpr):
    """This program's epoch, once the preceding kernel has ended; the next one begins to prefetch its weights."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    return tl.load(epochs + tl.program_id(0))


@jit
def _advance(epochs, epoch):
    following = epoch + 1
    tl.store(epochs + tl.program_id(0), tl.where(following == 0, 2, following))


@jit(do_not_specialize=["rank"])
def _all_reduce_kernel(
    x, out, table, epochs, stop, rank, words, tiles,
    DTYPE: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr, RANKS: tl.constexpr, REGION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """x i32[words], out i32[words]"""
    epoch = _begin(epochs, PDL)
    first, columns = tl.program_id(0) * tiles * BLOCK, tl.arange(0, BLOCK)
    for tile in range(tiles):
        place = tile * BLOCK + columns
        own = tl.load(x + first + place, mask=first + place < words, other=0)
        _push(own, table, rank, epoch, place, PROGRAMS, RANKS, REGION)
    mine = _region(table, rank, epoch, 0, PROGRAMS, RANKS, REGION)
    for tile in range(tiles):
        place = tile * BLOCK + columns
        own = tl.load(x + first + place, mask=first + place < words, other=0)
        total = _sum(own, mine, rank, epoch, stop, place, RANKS, REGION, DTYPE)
        tl.store(out + first + place, total, mask=first + place < words)
    _advance(epochs, epoch)


@jit(do_not_specialize=["rank"])
def _reduce_scatter_kernel(
    x, out, table, epochs, stop, rank, words, part, tiles, GATHERS: tl.constexpr,
    DTYPE: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr, RANKS: tl.constexpr, REGION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """x i32[words], in parts of `part` words -> out i32[part], the sum of the rank's part, or all sums if GATHERS"""
    epoch = _begin(epochs, PDL)
    first, columns = tl.program_id(0) * tiles * BLOCK, tl.arange(0, BLOCK)
    for tile in range(tiles):
        place = tile * BLOCK + columns
        inside = first + place
        for distance in tl.static_range(1, RANKS):
            peer = (rank + distance) % RANKS
            source = peer * part + inside
            value = tl.load(x + source, mask=(inside < part) & (source < words), other=0)
            region = _region(table, peer, epoch, rank, PROGRAMS, RANKS, REGION)
            tl.store(region + place, _to_word(value, epoch), cache_modifier=PUSHED)
    mine = _region(table, rank, epoch, 0, PROGRAMS, RANKS, REGION)
    for tile in range(tiles):
        place = tile * BLOCK + columns
        inside = first + place
        source = rank * part + inside
        is_own = (inside < part) & (source < words)
        own = tl.load(x + source, mask=is_own, other=0)
        total = _sum(own, mine, rank, epoch, stop, place, RANKS, REGION, DTYPE)
        if GATHERS:
            _push(total, table, rank, epoch, REGION // 2 + place, PROGRAMS, RANKS, REGION)
            tl.store(out + source, total, mask=is_own)
        else:
            tl.store(out + inside, total, mask=is_own)
    if GATHERS:
        for tile in range(tiles):
            place = tile * BLOCK + columns
            inside = first + place
            waits = 1
            while waits > 0:
                waits = (tl.load(stop, volatile=True, cache_modifier=POLLED) == 0).to(tl.int32)
                is_late = tl.zeros([BLOCK], tl.int32)
                for distance in tl.static_range(1, RANKS):
                    peer = (rank + distance) % RANKS
                    word = tl.load(mine + peer * REGION + REGION // 2 + place, volatile=True, cache_modifier=POLLED)
                    is_here = (word >> 32).to(tl.int32) == epoch
                    target = peer * part + inside
                    is_kept = is_here & (inside < part) & (target < words)
                    tl.store(out + target, word.to(tl.int32), mask=is_kept)
                    is_late |= (is_here == 0).to(tl.int32)
                waits *= tl.max(is_late)
    _advance(epochs, epoch)


@jit
def _load_joined(x, y, z, at, x_words, y_words, z_words):
    """The words at these places of x, y and z, concatenated; y and z may be None"""
    value = tl.load(x + at, mask=at < x_words, other=0)
    if y is not None:
        below = at - x_words
        value |= tl.load(y + below, mask=(below >= 0) & (below < y_words), other=0)
        beyond = below - y_words
        value |= tl.load(z + beyond, mask=(beyond >= 0) & (beyond < z_words), other=0)
    return value


@jit(do_not_specialize=["rank"])
def _gather_kernel(
    x, y, z, out_x, out_y, out_z, table, epochs, stop, rank, x_words, y_words, z_words, row, out_row, tiles,
    BLOCK: tl.constexpr, PROGRAMS: tl.constexpr, RANKS: tl.constexpr, REGION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """x i32[x_words] in rows of `row` words -> concatenated by row, cut to out_row words; y i32[y_words] and z
    i32[z_words], unless None -> concatenated"""
    epoch = _begin(epochs, PDL)
    first, columns = tl.program_id(0) * tiles * BLOCK, tl.arange(0, BLOCK)
    mine = _region(table, rank, epoch, 0, PROGRAMS, RANKS, REGION)
    for tile in range(tiles):
        place = tile * BLOCK + columns
        at = first + place
        value = _load_joined(x, y, z, at, x_words, y_words, z_words)
        _push(value, table, rank, epoch, place, PROGRAMS, RANKS, REGION)
    for tile in range(tiles):
        place = tile * BLOCK + columns
        at = first + place
        value = _load_joined(x, y, z, at, x_words, y_words, z_words)
        own = _to_word(value, epoch)
        waits = 1
        while waits > 0:
            waits = (tl.load(stop, volatile=True, cache_modifier=POLLED) == 0).to(tl.int32)
            is_late = tl.zeros([BLOCK], tl.int32)
            for source in tl.static_range(RANKS):
                is_peer = tl.full([BLOCK], source, tl.int32) != rank
                word = tl.load(
                    mine + source * REGION + place, mask=is_peer, other=own, volatile=True, cache_modifier=POLLED
                )
                is_here = (word >> 32).to(tl.int32) == epoch
                column = source * row + at % row
                is_x = is_here & (at < x_words) & (column < out_row)
                tl.store(out_x + at // row * out_row + column, word.to(tl.int32), mask=is_x)
                if y is not None:
                    below = at - x_words
                    is_y = is_here & (below >= 0) & (below < y_words)
                    tl.store(out_y + source * y_words + below, word.to(tl.int32), mask=is_y)
                    beyond = below - y_words
                    is_z = is_here & (beyond >= 0) & (beyond < z_words)
                    tl.store(out_z + source * z_words + beyond, word.to(tl.int32), mask=is_z)
                is_late |= (is_here == 0).to(tl.int32)
            waits *= tl.max(is_late)
    _advance(epochs, epoch)


def _constants(arena: Arena, launch: Launch) -> dict[str, int]:
    return {"BLOCK": launch.block, "PROGRAMS": len(arena.epochs), "RANKS": arena.ranks, "REGION": arena.region,
            "num_warps": launch.num_warps, **find_gpu(arena.table.device).options}  # fmt: skip


def as_words(x: Tensor) -> Tensor:
    """A contiguous tensor as i32[words]."""
    return x.view(-1).view(torch.int32)


def all_reduce(x: Tensor, arena: Arena) -> Tensor:
    """x [...], contiguous and of whole words, no more than `arena.room` -> the sum of all ranks'"""
    words, out = x.nbytes // 4, torch.empty_like(x)
    launch = plan(words, len(arena.epochs))
    _all_reduce_kernel[(launch.programs,)](
        as_words(x), as_words(out), arena.table, arena.epochs, arena.stop, arena.rank, words, launch.tiles,
        DTYPES[x.dtype], **_constants(arena, launch),
    )  # fmt: skip
    return out


def all_reduce_in_parts(x: Tensor, arena: Arena) -> Tensor:
    """x [...], contiguous and of whole words, no more than `ranks / 2` times `arena.room` -> the sum of all ranks'"""
    out, words = torch.empty_like(x), x.nbytes // 4
    _launch_reduce_scatter(x, out, -(-words // arena.ranks), True, arena)
    return out


def reduce_scatter(x: Tensor, arena: Arena) -> Tensor:
    """x [ranks T, ...], contiguous, T rows of whole words, no more than `arena.room` -> [T, ...], its own of the sum"""
    out = x.new_empty(len(x) // arena.ranks, *x.shape[1:])
    _launch_reduce_scatter(x, out, out.nbytes // 4, False, arena)
    return out


def _launch_reduce_scatter(x: Tensor, out: Tensor, part: int, gathers: bool, arena: Arena) -> None:
    launch = plan(part, len(arena.epochs))
    _reduce_scatter_kernel[(launch.programs,)](
        as_words(x), as_words(out), arena.table, arena.epochs, arena.stop, arena.rank, x.nbytes // 4, part,
        launch.tiles, gathers, DTYPES[x.dtype], **_constants(arena, launch),
    )  # fmt: skip


def all_gather(x: Tensor, size: int, arena: Arena) -> Tensor:
    """x [..., N], contiguous, rows of whole words, no more than `arena.room` -> [..., size], side by side"""
    assert size <= arena.ranks * x.shape[-1], "no rank has columns from there on"
    out = x.new_empty(*x.shape[:-1], size)
    row, out_row = (columns * x.itemsize // 4 for columns in (x.shape[-1], size))
    _launch_gather([x], [out], row, out_row, arena)
    return out


def gather_tokens(tensors: Sequence[Tensor], arena: Arena) -> list[Tensor]:
    """Three tensors [T, ...], contiguous, of whole words, no more than `arena.room` -> [ranks T, ...] of each"""
    outs = [each.new_empty(arena.ranks * len(each), *each.shape[1:]) for each in tensors]
    words = tensors[0].nbytes // 4
    _launch_gather(tensors, outs, words, arena.ranks * words, arena)
    return outs


def _launch_gather(xs: Sequence[Tensor], outs: Sequence[Tensor], row: int, out_row: int, arena: Arena) -> None:
    words = [x.nbytes // 4 for x in xs]
    launch, missing = plan(sum(words), len(arena.epochs)), 3 - len(xs)
    _gather_kernel[(launch.programs,)](
        *map(as_words, xs), *[None] * missing, *map(as_words, outs), *[None] * missing, arena.table, arena.epochs,
        arena.stop, arena.rank, *words, *[0] * missing, row, out_row, launch.tiles, **_constants(arena, launch),
    )  # fmt: skip
