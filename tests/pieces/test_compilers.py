"""A piece's code does what its ops say, at every number of rows, or there is none."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pieces.text import TEXT
from torch import Tensor

from atom.errors import PassError
from atom.graph import parse
from atom.kernels import Kernel, find_kernel, registry
from atom.kernels.inductor.piece_compiler import InductorCompiler
from atom.kernels.triton.codegen import write_source
from atom.pieces import compile_pieces, compilers


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


@pytest.fixture
def traced(compiled: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Callable[..., Any]], None]:
    """Have the op trace as another function. It becomes the code above: no time goes to a compiler."""

    def use(trace: Callable[..., Any]) -> None:
        def find(*names: Any) -> Kernel:
            return replace(find_kernel(*names), trace=trace)

        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        monkeypatch.setattr(registry, "find_kernel", find)
        monkeypatch.setattr(torch._inductor, "aot_compile", lambda *_args, **_options: str(compiled / "piece.so"))

    return use


def test_code_that_is_made_without_openssl_gives_the_numbers_at_any_rows(compiled: Path):
    run = InductorCompiler().load(compiled)
    for rows in (1, 2, 3, 16, 40):
        x, weight = torch.randn(rows, 8), torch.randn(8)
        torch.testing.assert_close(run(x, weight), [norm(x, weight, 1e-6)])


def test_code_takes_inputs_that_are_not_contiguous(compiled: Path):
    x, weight = torch.randn(8, 5).t(), torch.randn(16)[::2]
    torch.testing.assert_close(InductorCompiler().load(compiled)(x, weight), [norm(x, weight, 1e-6)])


def test_what_is_traced_as_it_should_be_becomes_files(compiled: Path, traced: Any):
    traced(norm)
    assert compilers.compile_piece(TEXT)["piece.so"] == (compiled / "piece.so").read_bytes()


def test_an_op_that_assumes_more_of_its_rows_is_refused(traced: Any):
    traced(lambda x, weight, eps: norm(x, weight, eps) if x.shape[0] < 100 else x)
    with pytest.raises(PassError, match=r"^a piece of rms_norm compiles only where \[.*100.*\]$"):
        compilers.compile_piece(TEXT)


def test_an_op_that_is_something_else_for_1_row_is_refused(traced: Any):
    """No assumption says so: the compiler takes open dims for 2 or more."""
    traced(lambda x, weight, eps: norm(x, weight, eps) * (1.01 if x.shape[0] == 1 else 1))
    with pytest.raises(PassError, match=r"^a compiled piece of rms_norm is 0\.0099 off at 1 rows$"):
        compilers.compile_piece(TEXT)


def test_code_that_is_wrong_for_more_rows_is_refused(traced: Any):
    traced(lambda x, weight, eps: norm(x, weight, eps) * torch.ones_like(x).cumsum(0))
    with pytest.raises(PassError, match=r"^a compiled piece of rms_norm is .* off at 2 rows$"):
        compilers.compile_piece(TEXT)


GPU_TEXT = TEXT.replace("inductor", "generated")


def checked(right: str, wrong: str, device: str) -> None:
    """Hold Triton's source against its traces, with another word in it."""
    source = write_source(GPU_TEXT)
    assert right in source
    program = parse(GPU_TEXT).programs["piece"]
    compilers._check(program, {"piece.py": source.replace(right, wrong).encode()}, "cuda", device)


def test_sources_for_a_gpu_are_held_against_their_traces(triton_device: str):
    checked("1e-06", "1e-06", triton_device)
    with pytest.raises(PassError, match=r"^a compiled piece of rms_norm is 0\.\d+ off at 1 rows$"):
        checked("1e-06", "0.5", triton_device)
    with pytest.raises(PassError, match=r"^a compiled piece of rms_norm is .* off at 2 rows$"):
        checked("row * x0_stride_0", "row * x0_stride_1", triton_device)


def test_the_files_for_a_gpu_are_one_source():
    assert compilers.compile_piece(GPU_TEXT, "cuda") == {"piece.py": write_source(GPU_TEXT).encode()}


def test_pieces_for_a_gpu_are_compiled_in_this_process():
    texts = [GPU_TEXT.replace("8]", f"{width}]") for width in (8, 9, 10)]
    assert {text: list(files) for text, files in compile_pieces(texts, "cuda")} == {
        text: ["piece.py"] for text in texts
    }


def test_a_piece_that_cannot_be_written_for_a_gpu_ends_it():
    broken = "def piece(x0: fp32[A, 8], w0: fp32[4, 8]):\n    y = reference.linear(x0, w0)\n    return y\n"
    with pytest.raises(PassError, match=r"^linear does not work"):
        list(compile_pieces([GPU_TEXT, broken], "cuda"))
