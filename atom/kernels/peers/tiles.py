"""All-reduce of large tensors, in tiles that ranks push.

    all_reduce(x, arena)                            # each rank adds a part, and pushes its sum

A word of `collectives.py` is half data. A **tile** is only data, followed by a flag for which its reader waits (NCCL's
Simple protocol). Each program of each rank has slots for each source: two, used in turn, for the tiles of its part,
which it adds, and two for the sums of the others' parts; and a flag for either, which counts the tiles that the source
has sent since the ranks connected. In a step, a program reads the sums of the tile before the last, adds the last tile,
and sends the next: what it waits for was sent a step ago.

A slot is free when it is written again:

1. A rank sends tile t + 2 after it has read the sums of t. Its peers computed them from its tile t, so have read it.
2. It sends its sum of t + 2 when it has the tiles t + 2 of its peers. They sent these after they had read the sums of
   t, including this one.
3. A kernel ends when it has read its last sums. The next one continues the count.

Counts wrap after 2**32 tiles, and are compared by their difference. All programs of a launch are resident at once;
`stop` ends their wait. Every rank gets the same bits, as with words.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from atom.kernels.peers.collectives import DTYPES, MAX_PROGRAMS, MAX_RANKS, WORDS_BYTES, Arena, as_words, pack, unpack
from atom.kernels.triton.compile.jit import jit

SLOT_WORDS = 32768  # of 4 bytes, of all sources together
FLAG_WORDS = 32  # between two flags, so that no two share a cache line
FLAGS_BYTES = 2 * MAX_PROGRAMS * MAX_RANKS * FLAG_WORDS * 4
TILES_BYTES = FLAGS_BYTES + 2 * 2 * MAX_PROGRAMS * SLOT_WORDS * 4
NUM_WARPS = 16


@jit
def _flag(table, peer, shot, source, FLAGS: tl.constexpr, FLAG_WORDS: tl.constexpr, PROGRAMS: tl.constexpr,
          RANKS: tl.constexpr):  # fmt: skip
    """The address, at a rank, of the count of tiles, or sums, of a source that this program has."""
    place = ((shot * PROGRAMS + tl.program_id(0)) * RANKS + source) * FLAG_WORDS
    return (tl.load(table + peer) + FLAGS).to(tl.pointer_type(tl.int32)) + place


@jit
def _slot(table, peer, shot, number, source, SLOTS: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
          RANKS: tl.constexpr):  # fmt: skip
    """The address, at a rank, of this program's tile, or sum, of a source."""
    place = (((shot * 2 + (number & 1)) * PROGRAMS + tl.program_id(0)) * RANKS + source) * BLOCK
    return tl.multiple_of((tl.load(table + peer) + SLOTS).to(tl.pointer_type(tl.int32)), 16) + place


@jit
def _wait(table, rank, shot, number, stop, FLAGS: tl.constexpr, FLAG_WORDS: tl.constexpr, PROGRAMS: tl.constexpr,
          RANKS: tl.constexpr):  # fmt: skip
    """Wait until all peers have sent the tile of this number; what they wrote before is then visible."""
    for distance in tl.static_range(1, RANKS):
        flag = _flag(table, rank, shot, (rank + distance) % RANKS, FLAGS, FLAG_WORDS, PROGRAMS, RANKS)
        waits = 1
        while waits > 0:
            sent = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
            waits = ((sent - number <= 0) & (tl.load(stop, volatile=True) == 0)).to(tl.int32)


@jit
def _signal(table, rank, shot, number, FLAGS: tl.constexpr, FLAG_WORDS: tl.constexpr, PROGRAMS: tl.constexpr,
          RANKS: tl.constexpr):  # fmt: skip
    """Signal all peers that they have this program's tile of this number."""
    tl.debug_barrier()  # all threads have stored theirs
    for distance in tl.static_range(1, RANKS):
        flag = _flag(table, (rank + distance) % RANKS, shot, rank, FLAGS, FLAG_WORDS, PROGRAMS, RANKS)
        tl.atomic_xchg(flag, number + 1, sem="release", scope="sys")


@jit(do_not_specialize=["rank"])
def _all_reduce_kernel(
    x, out, table, counts, stop, rank, words, part, tiles, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
    FLAGS: tl.constexpr, SLOTS: tl.constexpr, FLAG_WORDS: tl.constexpr, PROGRAMS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """x i32[words], in parts of `part` words, out i32[words]; FLAGS, SLOTS: their byte offsets in a rank's memory"""
    count = tl.load(counts + tl.program_id(0))
    first, columns = tl.program_id(0) * tiles * BLOCK, tl.arange(0, BLOCK)
    for step in range(tiles + 2):
        if step >= 2:
            number, inside = count + step - 2, first + (step - 2) * BLOCK + columns
            _wait(table, rank, 1, number, stop, FLAGS, FLAG_WORDS, PROGRAMS, RANKS)
            for distance in tl.static_range(1, RANKS):
                peer = (rank + distance) % RANKS
                slot = _slot(table, rank, 1, number, peer, SLOTS, BLOCK, PROGRAMS, RANKS)
                total = tl.load(slot + columns, cache_modifier=".cg")
                place = peer * part + inside
                tl.store(out + place, total, mask=(inside < part) & (place < words))
        if (step >= 1) & (step <= tiles):
            number, inside = count + step - 1, first + (step - 1) * BLOCK + columns
            place = rank * part + inside
            is_own = (inside < part) & (place < words)
            own = tl.load(x + place, mask=is_own, other=0)
            _wait(table, rank, 0, number, stop, FLAGS, FLAG_WORDS, PROGRAMS, RANKS)
            low, high = unpack(own, DTYPE)
            for source in tl.static_range(RANKS):
                is_peer = tl.full([BLOCK], source, tl.int32) != rank
                slot = _slot(table, rank, 0, number, source, SLOTS, BLOCK, PROGRAMS, RANKS)
                more = tl.load(slot + columns, mask=is_peer, other=own, cache_modifier=".cg")
                more_low, more_high = unpack(more, DTYPE)
                if source == 0:
                    low, high = more_low, more_high
                else:
                    low, high = low + more_low, high + more_high
            total = pack(low, high, DTYPE)
            for distance in tl.static_range(1, RANKS):
                peer = (rank + distance) % RANKS
                tl.store(_slot(table, peer, 1, number, rank, SLOTS, BLOCK, PROGRAMS, RANKS) + columns, total)
            tl.store(out + place, total, mask=is_own)
            _signal(table, rank, 1, number, FLAGS, FLAG_WORDS, PROGRAMS, RANKS)
        if step < tiles:
            number, inside = count + step, first + step * BLOCK + columns
            for distance in tl.static_range(1, RANKS):
                peer = (rank + distance) % RANKS
                place = peer * part + inside
                value = tl.load(x + place, mask=(inside < part) & (place < words), other=0)
                tl.store(_slot(table, peer, 0, number, rank, SLOTS, BLOCK, PROGRAMS, RANKS) + columns, value)
            _signal(table, rank, 0, number, FLAGS, FLAG_WORDS, PROGRAMS, RANKS)
    tl.store(counts + tl.program_id(0), count + tiles)


def all_reduce(x: Tensor, arena: Arena) -> Tensor:
    """x [...], contiguous and of whole words -> the sum of all ranks'"""
    out, words, block = torch.empty_like(x), x.nbytes // 4, SLOT_WORDS // MAX_RANKS
    while block * 2 * arena.ranks <= SLOT_WORDS:
        block *= 2
    part = -(-words // arena.ranks // 16) * 16  # whole cache lines at each rank
    tiles = -(-part // (block * len(arena.counts)))
    programs = -(-part // (block * tiles))
    _all_reduce_kernel[(programs,)](
        as_words(x), as_words(out), arena.table, arena.counts, arena.stop, arena.rank, words, part, tiles,
        DTYPES[x.dtype], BLOCK=block, FLAGS=WORDS_BYTES, SLOTS=WORDS_BYTES + FLAGS_BYTES, FLAG_WORDS=FLAG_WORDS,
        PROGRAMS=len(arena.counts), RANKS=arena.ranks, num_warps=NUM_WARPS,
    )  # fmt: skip
    return out
