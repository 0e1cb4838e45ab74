"""Matmuls and rows of plain weights in oneDNN's blocks, against those of torch in float32."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from kernels.checks import relative_error

from atom.graph import Type, ops
from atom.kernels import Target, find_kernel, shuffle
from atom.kernels.backend import LoadContext
from atom.kernels.cpp import blocks

BOUNDS = {"fp32": 2e-6, "bf16": 5e-3}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SHAPES = [(64, 1), (65, 33), (100, 70), (200, 192), (1000, 577), (2048, 64)]
HERE = [name for name in DTYPES if f"blocks_{name}" in blocks.find_features()]
pytestmark = pytest.mark.skipif(not HERE, reason="oneDNN has other layouts on this CPU")


def run(op: ops.Op, *args: object) -> torch.Tensor:
    made: torch.Tensor = find_kernel(op, "cpp").load(LoadContext())(*args)
    return made


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", HERE)
def test_matmuls_are_those_of_the_plain_weight(dtype: str, shape: tuple[int, int]):
    weight, bias = torch.randn(shape).to(DTYPES[dtype]), torch.randn(shape[0]).to(DTYPES[dtype])
    laid_out = shuffle(weight, "blocks")
    assert laid_out.is_mkldnn
    for rows in (1, 2, 3, 5, 6, 7, 12, 13, 17, 31, 32, 33, 70):
        x = torch.randn(rows, shape[1]).to(DTYPES[dtype])
        truth = x.float() @ weight.float().T
        assert relative_error(run(ops.linear, x, laid_out), truth) < BOUNDS[dtype]
        assert relative_error(run(ops.linear, x, laid_out, bias), truth + bias.float()) < BOUNDS[dtype]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", HERE)
def test_rows_are_those_of_the_plain_weight(dtype: str, shape: tuple[int, int]):
    weight = torch.randn(shape).to(DTYPES[dtype])
    for tokens in ([], [0], [63, 5, 5, 16, 15], [shape[0] - 1], list(range(40))):
        made = run(ops.embedding, torch.tensor(tokens, dtype=torch.int64), shuffle(weight, "blocks"))
        assert torch.equal(made, weight[tokens]) and made.dtype == weight.dtype


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_threads_may_begin_amid_a_block(threads: int):
    weight, x = torch.randn(9 * 64, 40).to(DTYPES[HERE[0]]), torch.randn(3, 40).to(DTYPES[HERE[0]])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        made = run(ops.linear, x, shuffle(weight, "blocks"))
    finally:
        torch.set_num_threads(before)
    assert relative_error(made, x.float() @ weight.float().T) < BOUNDS[HERE[0]]


def test_a_token_that_the_vocabulary_has_not_is_refused():
    laid_out = shuffle(torch.randn(70, 32).to(DTYPES[HERE[0]]), "blocks")
    for token in (-1, 70):
        with pytest.raises(RuntimeError, match=f"there is no token {token}"):
            run(ops.embedding, torch.tensor([token]), laid_out)


def test_no_rows_give_no_rows():
    laid_out = shuffle(torch.randn(70, 32).to(DTYPES[HERE[0]]), "blocks")
    assert run(ops.linear, torch.empty(0, 32).to(DTYPES[HERE[0]]), laid_out).shape == (0, 70)


def test_x_may_be_a_view_with_gaps():
    weight, x = torch.randn(80, 64).to(DTYPES[HERE[0]]), torch.randn(5, 200).to(DTYPES[HERE[0]])[:, 3:67]
    made = run(ops.linear, x, shuffle(weight, "blocks"))
    assert relative_error(made, x.float() @ weight.float().T) < BOUNDS[HERE[0]]


@pytest.mark.parametrize("dtype", HERE)
def test_nan_and_infinity_are_kept(dtype: str):
    weight = torch.randn(64, 33).to(DTYPES[dtype])
    weight[7, 32] = float("nan")
    x = torch.randn(2, 33).to(DTYPES[dtype])
    x[1, 32] = float("inf")
    made = run(ops.linear, x, shuffle(weight, "blocks"))
    assert torch.equal(made[0].isnan().nonzero().flatten(), torch.tensor([7]))
    assert not made[1].isfinite().any()


@pytest.mark.parametrize("dtype", HERE)
def test_experts_are_laid_out_one_by_one(dtype: str):
    weight, kernel = torch.randn(3, 70, 48).to(DTYPES[dtype]), find_kernel(ops.grouped_linear, "cpp")
    types = Type(dtype, ("P", 48)), Type(dtype, (3, 70, 48)), Type("i64", (3,))
    assert kernel.accepts(Target("cpu", blocks.find_features()), *types) is None
    x, ends, bias = torch.randn(9, 48).to(DTYPES[dtype]), torch.tensor([2, 2, 9]), torch.randn(3, 70).to(DTYPES[dtype])
    made = run(ops.grouped_linear, x, [shuffle(expert, "blocks") for expert in weight], ends, bias)
    truth = ops.grouped_linear.body(x.float(), weight.float(), ends, bias.float())
    assert relative_error(made, truth) < BOUNDS[dtype]


@pytest.mark.parametrize(
    ("x", "weight", "reason"),
    [
        (Type("fp16", ("T", 64)), Type("fp16", (64, 64)), "oneDNN has no blocks of fp16 on this CPU"),
        (Type("fp32", ("T", 64)), Type("fp32", (63, 64)), "63 rows are no block"),
        (Type("fp32", ("T", 2, 64)), Type("fp32", (64, 64)), "takes rows in two dims"),
    ],
)
def test_what_it_does_not_take_has_a_reason(x: Type, weight: Type, reason: str):
    target = Target("cpu", frozenset({"blocks_fp32", "blocks_bf16"}))
    assert find_kernel(ops.linear, "cpp").accepts(target, x, weight) == reason


def test_a_layout_that_is_not_known_leaves_the_weight_plain():
    weight, x = torch.randn(1, 40), torch.randn(3, 40)  # oneDNN leaves a single row as it is
    laid_out = shuffle(weight, "blocks")
    assert not laid_out.is_mkldnn and laid_out.data_ptr() != weight.data_ptr()
    assert relative_error(run(ops.linear, x, laid_out), x @ weight.T) < 2e-6
    assert torch.equal(run(ops.embedding, torch.tensor([0]), laid_out), weight)


ALONE = """
import torch
from atom.graph import ops
from atom.kernels import find_kernel, shuffle
from atom.kernels.backend import LoadContext

weight, x = torch.randn(80, 64), torch.randn(3, 64)
laid_out = shuffle(weight, "blocks")
linear, embedding = (find_kernel(op, "cpp").load(LoadContext()) for op in (ops.linear, ops.embedding))
assert torch.allclose(linear(x, laid_out), x @ weight.T, atol=1e-4)
assert torch.equal(embedding(torch.tensor([79, 0]), laid_out), weight[[79, 0]])
"""


@pytest.mark.slow
def test_without_a_compiler_weights_stay_plain_and_a_line_says_so():
    environment = {**os.environ, "PATH": "/nowhere"}
    ended = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert "atom-run: plain.cpp cannot be compiled: there is no C++ compiler" in ended.stderr
