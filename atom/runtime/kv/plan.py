"""Plan the number of KV blocks of each state kind; no tensors.

plan_memory(kinds, 16, limits, memory_bytes=8 << 30)    # {"full": 262144, "window_4096": …}
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from atom.config.limits import EngineLimits
from atom.errors import CapacityError, ConfigError
from atom.runtime.types import StateKind

SLOT_SHARE = 0.55  # of slots and pools, for slots of recurrent state
STATE_SHARES = 0.1, 0.5  # of the pools, for copies of recurrent state: at least and at most
COPY_TOKENS = 8192  # of KV, for which there is a copy of recurrent state, or a window: a turn of a conversation
MIN_COPIES = 2  # with block 0


def fit_slots(kinds: Sequence[StateKind], limits: EngineLimits, memory_bytes: int) -> int:
    """The number of sequences whose recurrent states take at most SLOT_SHARE: max_num_seqs, else a power of two."""
    size, max_num_seqs = sum(kind.bytes_per_slot(limits) for kind in kinds), limits.max_num_seqs
    room = int(memory_bytes * SLOT_SHARE) // size - 1 if size else max_num_seqs  # besides that of padding
    return max_num_seqs if room >= max_num_seqs else 1 << max(room.bit_length() - 1, 0) if room > 0 else 1


def plan_memory(
    kinds: Sequence[StateKind],
    block_size: int,
    limits: EngineLimits,
    *,
    memory_bytes: int | None = None,
    num_blocks: int | None = None,
    state_memory: int | None = None,
    describe_room: Callable[[int, int], str] = "there are {}".format,
) -> dict[str, int]:
    """The number of blocks of each pool by state kind, including block 0.

    Recurrent state takes its slots first, one for each sequence and one for padding, each with `num_states` of the
    limits. Blocks with copies of it take `state_memory`, and the other kinds what is left, see `plan_blocks`.

    memory_bytes: the size of slots and pools together; None: see num_blocks
    num_blocks: of each pool but that of recurrent state, or of that one if there is no other, without block 0
    state_memory: bytes; None: the share of the pools that `state_share` gives, as long as a sequence of `max_model_len`
      has room in the rest
    describe_room: for the error, describes the bytes that are available and those that are needed

    Raises as `plan_blocks` does.
    """
    plan = partial(plan_blocks, [kind for kind in kinds if not kind.rule.in_slot], block_size, limits)
    recurrent = [kind for kind in kinds if kind.rule.in_slot]
    if not recurrent:
        return plan(memory_bytes=memory_bytes, num_blocks=num_blocks, describe_room=describe_room)
    size = sum(kind.block_bytes for kind in recurrent)
    if num_blocks is not None:
        planned = plan(num_blocks=num_blocks)
        total = sum(planned[kind.name] * kind.block_bytes for kind in kinds if kind.name in planned)
        share = state_share(kinds)
        own = int(total * share / (1 - share)) if planned else (1 + num_blocks) * size
        copies = own if state_memory is None else state_memory
    else:
        assert memory_bytes is not None, "plan_memory needs memory_bytes or num_blocks"
        slots = (limits.max_num_seqs + 1) * sum(kind.bytes_per_slot(limits) for kind in recurrent)
        if state_memory is None:
            left, others = memory_bytes - slots, [kind for kind in kinds if not kind.rule.in_slot]
            room = left - size_of(others, one_sequence(others, block_size, limits))
            state_memory = max(min(int(left * state_share(kinds)), room), int(left * STATE_SHARES[0]))
        copies = max(state_memory // size, MIN_COPIES) * size
        taken = slots + copies
        if taken > memory_bytes:
            raise CapacityError(
                f"the recurrent states of serve.max_num_seqs={limits.max_num_seqs} sequences take {slots} bytes, and "
                f"copies of them {copies}, " + describe_room(memory_bytes, taken) + " or lower serve.max_num_seqs"
            )
        planned = plan(
            memory_bytes=memory_bytes - taken,
            describe_room=lambda _has, needs: describe_room(memory_bytes, taken + needs),
        )
    copies = max(copies // size, MIN_COPIES)
    useful = max(planned.values(), default=copies)  # a block of tokens has one
    return {kind.name: planned.get(kind.name, max(min(copies, useful), MIN_COPIES)) for kind in kinds}


def state_share(kinds: Sequence[StateKind]) -> float:
    """The share of the pools that copies of recurrent state take: with it, there is one for each COPY_TOKENS of KV.

    So what is kept of conversations can be continued: without a copy, all their KV is computed again.
    """
    least, most = STATE_SHARES
    state = sum(kind.block_bytes for kind in kinds if kind.rule.in_slot)
    kept = sum(kind.bytes_per_token for kind in kinds if kind.rule.keeps_all) * COPY_TOKENS
    if all(kind.rule.in_slot for kind in kinds):
        return 1.0
    return min(max(state / (state + kept), least), most)


def one_sequence(kinds: Sequence[StateKind], block_size: int, limits: EngineLimits, length: int = 0) -> dict[str, int]:
    """The blocks of each pool that hold one sequence, including block 0. length: tokens; 0: max_model_len"""
    length = length or limits.max_model_len
    step = min(length, limits.max_num_batched_tokens)
    return {kind.name: 1 + kind.blocks(length, step) for kind in kinds}


def size_of(kinds: Sequence[StateKind], blocks: Mapping[str, int]) -> int:
    """The bytes of so many blocks of each kind."""
    return sum(blocks[kind.name] * kind.block_bytes for kind in kinds)


def plan_blocks(
    kinds: Sequence[StateKind],
    block_size: int,
    limits: EngineLimits,
    *,
    memory_bytes: int | None = None,
    num_blocks: int | None = None,
    describe_room: Callable[[int, int], str] = "there are {}".format,
) -> dict[str, int]:
    """The number of blocks of each pool of a kind with an entry for each token, including block 0.

    All kinds get the same number, but one that keeps a part of each sequence no more than a step can fill, and so many
    sequences: `max_num_seqs`, or one for each COPY_TOKENS of the others, so that what is kept of conversations can be
    continued.

    memory_bytes: the size of all pools together; None: see num_blocks
    num_blocks: of each pool, without block 0
    describe_room: for the error, describes the bytes that are available and those that are needed

    Raises CapacityError (memory_bytes) or ConfigError (num_blocks) if they do not hold one sequence of `max_model_len`.
    """
    max_model_len, max_step = limits.max_model_len, limits.max_num_batched_tokens
    step_blocks = -(-max_step // block_size)
    of_sequence = {kind.name: kind.blocks(max_model_len) for kind in kinds if not kind.rule.keeps_all}

    def equal(count: int) -> dict[str, int]:
        num_kept = count * block_size // COPY_TOKENS if len(of_sequence) < len(kinds) else 0
        num_sequences = max(limits.max_num_seqs, num_kept)
        useful = {name: num_sequences * blocks + step_blocks for name, blocks in of_sequence.items()}
        return {kind.name: 1 + min(-(-count // kind.stride), useful.get(kind.name, count)) for kind in kinds}

    minimum = one_sequence(kinds, block_size, limits)
    if num_blocks is not None:
        plan_of_blocks = equal(num_blocks)
        needed = max(((minimum[kind.name] - 2) * kind.stride + 1 for kind in kinds), default=0)
        if any(plan_of_blocks[name] < blocks for name, blocks in minimum.items()):
            raise ConfigError(
                f"serve.num_kvcache_blocks={num_blocks} hold no sequence of serve.max_model_len={max_model_len}, which "
                f"takes {needed} blocks of {block_size} tokens: set serve.num_kvcache_blocks={needed} or more, or "
                f"serve.max_model_len={num_blocks * block_size} or less"
            )
        return plan_of_blocks
    assert memory_bytes is not None, "plan_blocks needs memory_bytes or num_blocks"
    size = partial(size_of, kinds)
    if (needed_bytes := size(minimum)) > memory_bytes:
        length = bisect_right(
            range(1, max_model_len),
            memory_bytes,
            key=lambda length: size(one_sequence(kinds, block_size, limits, length)),
        )
        raise CapacityError(
            f"the KV of one sequence of serve.max_model_len={max_model_len} takes {needed_bytes} bytes, "
            + describe_room(memory_bytes, needed_bytes)
            + (f" or lower serve.max_model_len to {length}" if length else "")
        )

    def plan(count: int) -> dict[str, int]:
        return {name: max(blocks, minimum[name]) for name, blocks in equal(count).items()}

    counts = range(max((memory_bytes * kind.stride // kind.block_bytes for kind in kinds), default=memory_bytes) + 1)
    return plan(bisect_right(counts, memory_bytes, key=lambda count: size(plan(count))) - 1)
