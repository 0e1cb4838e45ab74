"""Decodes of a block with the gated delta rule on Hopper: by programs in plain Python, and on such a GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernels.checks import assert_as_near
from kernels.compiling import compile_for_hopper

pytest.importorskip("triton")

from kernels.delta_nets import make, run_on
from kernels.hopper.emulated import Value, emulate, value
from kernels.hopper.test_hopper import IS_HOPPER
from torch import Tensor

from atom.graph import ops
from atom.kernels.hopper import delta_net

SIZES: list[dict[str, Any]] = [
    {"key_heads": 2, "heads": 4},
    {"key_heads": 1, "heads": 3, "taps": 2, "kind": "sigmoid", "beta_scale": 2.0},
    {"key_heads": 2, "heads": 8, "normalize": False, "key_dim": 64},
    {"key_heads": 1, "heads": 4, "value_dim": 64},  # four heads at a time
    {"key_heads": 2, "heads": 4, "by_dim": True, "kind": "sigmoid", "floor": -5.0},
    {"key_heads": 2, "heads": 4, "state_dtype": torch.bfloat16},
]


@pytest.fixture(scope="module")
def emulated() -> SimpleNamespace:
    """The kernel, without a GPU."""

    def activation(x: Tensor, kind: str) -> Value:
        return value(ops.ACTIVATIONS[kind](x))

    def row_of(slot: Tensor, num_tokens: Tensor, kept: int) -> Tensor:
        return slot.long() * kept + num_tokens % kept

    def logarithm_of_decay(rate: Tensor, raw: Tensor, floor: float | None) -> Tensor:
        return -rate * torch.nn.functional.softplus(raw) if floor is None else floor * torch.sigmoid(rate * raw)

    return emulate(delta_net, activation=activation, logarithm_of_decay=logarithm_of_decay, row_of=row_of)


def check(device: str, run: Callable[..., Tensor], count: int, kept: int, sizes: dict[str, Any]) -> None:
    """What is given is as near to the truth as the reference, and so are the states that are left."""
    lengths = [1, 2, 3, 40, *range(7, 7 + max(count - 4, 0))][-count:]
    args, attributes = make(
        [1] * count, lengths, count, kept=kept, dtype=torch.bfloat16, **{"key_dim": 128, "value_dim": 128, **sizes}
    )
    args = [each[:count] if n < 4 else each for n, each in enumerate(args)]  # no row is of no sequence
    wide = [each.float() if isinstance(each, Tensor) else each for each in args]
    ours = run_on(device, run, args, attributes)
    theirs, truth = (run_on("cpu", ops.gated_delta_net, given, attributes) for given in (args, wide))
    assert torch.equal(ours[1], theirs[1]), "the inputs that are kept"
    for one, other, exact in zip(ours[::2], theirs[::2], truth[::2], strict=True):
        assert_as_near(one, other, exact)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("count", "kept"), [(1, 1), (2, 3), (9, 1)])
def test_decodes_equal_the_reference_by_these_programs(
    count: int, kept: int, sizes: dict[str, Any], emulated: SimpleNamespace
):
    check("cpu", emulated.decode, count, kept, sizes)


@pytest.mark.parametrize(
    ("counts", "num_decodes", "query_len", "sizes", "is_taken"),
    [
        ([1, 1], 2, 1, {}, True),
        ([1, 1], 2, 1, {"key_dim": 64, "dtype": torch.float16}, False),
        ([1, 1], 2, 1, {"value_dim": 96}, False),
        ([1, 70], 1, 1, {}, False),
        ([2, 2], 2, 2, {}, False),
    ],
    ids=["decodes", "fp16", "odd values", "a prompt", "drafts"],
)
def test_it_takes_decodes_of_one_token(
    counts: list[int], num_decodes: int, query_len: int, sizes: dict[str, Any], is_taken: bool
):
    sizes = {"key_dim": 128, "value_dim": 128, "dtype": torch.bfloat16, **sizes}
    (qkv, *_, state, batch, _, _, _, _), _ = make(counts, [80] * len(counts), num_decodes, query_len, **sizes)
    assert delta_net.suits(qkv[: sum(counts)], state, batch) == is_taken


@pytest.mark.gpu
@pytest.mark.skipif(not IS_HOPPER, reason="there is no Hopper GPU here")
@pytest.mark.parametrize(
    "sizes",
    [
        *SIZES,
        {"key_heads": 16, "heads": 32},
        {"key_heads": 4, "heads": 16},
        {"key_heads": 32, "heads": 32, "by_dim": True},
    ],
    ids=str,
)
@pytest.mark.parametrize(("count", "kept"), [(1, 1), (3, 1), (2, 3), (130, 1)])
def test_decodes_equal_the_reference(count: int, kept: int, sizes: dict[str, Any]):
    check("cuda", delta_net.decode, count, kept, sizes)


@pytest.mark.gpu
@pytest.mark.skipif(not IS_HOPPER, reason="there is no Hopper GPU here")
def test_prompts_and_drafts_are_left_to_triton():
    for counts, num_decodes, kept in (([1, 70], 1, 1), ([2, 2], 2, 2)):
        given = make(
            counts, [80] * len(counts), num_decodes, counts[0], kept, dtype=torch.bfloat16, key_dim=64, value_dim=64
        )
        ours, theirs = (
            run_on(*how, *given) for how in (("cuda", delta_net.gated_delta_net), ("cpu", ops.gated_delta_net))
        )
        for one, other in zip(ours, theirs, strict=True):
            assert (one.double() - other.double()).norm() < 2e-2 * other.double().norm()


COMPILE = """
import torch
from kernels.compiling import use_hopper
from kernels.delta_nets import make
from kernels.hopper.test_delta_net import SIZES
from atom.kernels.hopper import delta_net

use_hopper()
kernel = delta_net._gated_delta_net

class Compile:
    def __getitem__(self, grid):
        def compile(*args, **options):
            assert ".local" not in kernel.warmup(*args, grid=grid, **options).asm["ptx"]
            print("compiled")
        return compile

delta_net._gated_delta_net = Compile()
for sizes in SIZES:
    args, attributes = make([1], [5], 1, dtype=torch.bfloat16, **{"key_dim": 128, "value_dim": 128, **sizes})
    delta_net.decode(*args, **attributes)
"""


@pytest.mark.slow  # scripts/check-kernels compiles a variant of each kernel
def test_it_compiles_for_such_a_gpu():
    assert compile_for_hopper(COMPILE).stdout.count("compiled") == len(SIZES)
