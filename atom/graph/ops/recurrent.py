"""Ops whose state each token writes over, and the short convolution.

@recurrent(lambda x, state, *, by: x, heads={"x": 1, "state": 0})    # ranks have channels of their own
def decayed_sum(x, state, *, by):       # of one sequence: values of its tokens, its state, weights -> out, new state
    ...

decayed_sum(x, STATE("model.layers.0", fp32[64]), by=0.9)                   # semantic: one whole sequence
batched_decayed_sum(x, STATE("model.layers.0", fp32[64]), batch, by=0.9)    # lowered: the sequences of a step
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from atom.graph.batch import Batch
from atom.graph.ops.attention import need_batch
from atom.graph.ops.base import LOWERED, OPS, SEMANTIC, Op
from atom.graph.ops.dense import ACTIVATIONS
from atom.graph.recipes import State
from atom.graph.types import Type, need

Infer = Callable[..., Type | tuple[Type, ...]]


def recurrent(
    infer: Infer, *, heads: Mapping[str, int | None] | None = None, flops: int = 2
) -> Callable[[Callable[..., tuple[Any, Tensor]]], Op]:
    """Make two ops of what a recurrence does with one sequence: NAME of a whole one, batched_NAME of a step's.

    The parameters of the body are values of tokens [T, …], then `state`, then weights. It gives what the op gives and
    the state after the last token. The batched op takes the states of all slots, see `run_batch`, and, after that, the
    batch; a sequence that begins has a state of zeros.

    infer: the shape rule; of the state it gets the `State` of the text
    heads: see `op`; None: each rank computes all of it
    flops: a token's multiplications and additions with each number of the state, by which its least time is computed
    """

    def register(body: Callable[..., tuple[Any, Tensor]]) -> Op:
        signature = inspect.signature(body)
        place = list(signature.parameters).index("state")

        def whole(*args: Any, **kwargs: Any) -> Any:
            return body(*args, **kwargs)[0]

        def infer_whole(*types: Any, **kwargs: Any) -> Any:
            state = types[place]
            need(isinstance(state, State) and state.rule.in_slot, f"{state} is no recurrent state")
            return infer(*types, **kwargs)

        def batched(*args: Any, **kwargs: Any) -> Any:
            return run_batch(body, args[:place], args[place], args[place + 1], args[place + 2 :], kwargs)

        def infer_batched(*types: Any, **kwargs: Any) -> Any:
            need_batch(types[place + 1])
            return infer_whole(*types[: place + 1], *types[place + 2 :], **kwargs)

        name = body.__name__
        batch = inspect.Parameter("batch", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = list(signature.parameters.values())
        batched_signature = signature.replace(parameters=[*parameters[: place + 1], batch, *parameters[place + 1 :]])
        batched.__module__ = whole.__module__ = body.__module__
        whole.__doc__ = body.__doc__
        batched.__doc__ = f"`{name}` of a batch, whose slots have states [slots + 1, L, …]."
        lowered = Op(f"batched_{name}", batched, infer_batched, LOWERED, True, (), batched_signature, state_flops=flops)
        semantic = Op(name, whole, infer_whole, SEMANTIC, False, (), signature, lowered=lowered, heads=heads or {})
        OPS[name], OPS[lowered.name] = semantic, lowered
        return semantic

    return register


def run_batch(body: Callable[..., tuple[Any, Tensor]], values: tuple[Any, ...], slots: Tensor, batch: Batch,
              weights: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # fmt: skip
    """Run a recurrence sequence by sequence.

    slots: [slots + 1, L, …], the last L states of each sequence: that after n tokens is number n % L. So a step may end
      with L - 1 drafts: whichever are rejected, the next step finds the state of where it begins
    """
    assert batch.slots is not None, "a model with recurrent state has slots"
    parts: list[Any] = []
    starts, lengths, num_kept = batch.starts.tolist(), batch.lengths.tolist(), slots.shape[1]
    for slot, length, (first, last) in zip(batch.slots.tolist(), lengths, itertools.pairwise(starts), strict=True):
        stops = range(max(last - num_kept, first) + 1, last + 1) if first < last else ()
        for start, stop in itertools.pairwise((first, *stops)):
            num_before, num_after = (length - last + at for at in (start, stop))  # tokens of the sequence
            before = slots[slot, num_before % num_kept] if num_before else torch.zeros_like(slots[0, 0])
            part, after = body(*(each[start:stop] for each in values), before, *weights, **kwargs)
            slots[slot, num_after % num_kept] = after
            parts.append(part)
    num_tokens = len(values[0])
    if not parts:  # nothing but padding
        return body(*values, torch.zeros_like(slots[0, 0]), *weights, **kwargs)[0]
    whole = torch.cat(parts)
    return F.pad(whole, (0, 0) * (whole.dim() - 1) + (0, num_tokens - len(whole)))  # of padding


def _causal_conv(x: Type, state: State, weight: Type, bias: Type | None = None, *, kind: str | None = None) -> Type:
    channels = x.shape[1]
    need(len(weight.shape) == 2 and weight.shape[0] == channels, f"the weight is {weight} for x {x}")
    taps = int(weight.shape[1])
    need(taps > 1, f"a convolution of {taps} tap needs no state")
    need(state.type == Type(x.dtype, (taps - 1, channels)), f"the state is {state.type} of {taps} taps of {x}")
    need(bias is None or bias.shape == (channels,), f"the bias is {bias} for x {x}")
    need(kind is None or kind in ACTIVATIONS, f"{kind} is no activation")
    return x


@recurrent(_causal_conv, heads={"x": 1, "state": 1, "weight": 0, "bias": 0})
def causal_conv(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None = None, *,
                kind: str | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A convolution over the last K tokens, channel by channel, then an activation, in float32.

    x [T, C], weight [C, K], whose last tap is the token's own, bias [C], state [K - 1, C]: the inputs before
    -> [T, C]

    kind: of the activation; None: none
    """
    inputs = torch.cat((state, x))
    out = F.conv1d(inputs.float().T, weight.float()[:, None], None if bias is None else bias.float(), groups=x.shape[1])
    out = out.T if kind is None else ACTIVATIONS[kind](out.T)
    return out.to(x.dtype).contiguous(), inputs[len(x) :]
