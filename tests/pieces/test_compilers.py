"""A piece's code does what its ops say, at every number of rows, or there is none."""

from __future__ import annotations

import ctypes
import re
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gil import releases_gil
from pieces.text import TEXT
from torch import Tensor

from atom.errors import PassError
from atom.graph import parse
from atom.kernels import Kernel, find_kernel, registry
from atom.kernels.inductor.piece_compiler import InductorCompiler
from atom.kernels.registry import trace_calls
from atom.kernels.triton.compile.codegen import write_source
from atom.pieces import PieceError, compile_pieces, compilers


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


def test_code_releases_the_gil_while_it_runs(compiled: Path):
    x, weight, piece = torch.randn(1 << 20, 8), torch.randn(8), InductorCompiler().load(compiled)
    hold = ctypes.PyDLL(None).usleep
    assert not releases_gil(lambda: hold(100)), "nothing but the call lets another thread run"
    assert releases_gil(lambda: piece(x, weight))


def test_threads_that_run_one_piece_wait_for_each_other(compiled: Path):
    x, weight, piece = torch.randn(1 << 10, 8), torch.randn(8), InductorCompiler().load(compiled)
    with ThreadPoolExecutor(4) as pool:
        for (y,) in pool.map(lambda _: piece(x, weight), range(200)):
            torch.testing.assert_close(y, norm(x, weight, 1e-6))


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
    with pytest.raises(PieceError, match=r"^linear does not work") as raised:
        list(compile_pieces([GPU_TEXT, broken], "cuda"))
    assert raised.value.text == broken


# the check

MLP = """\
def piece(x0: i64[A], x1: fp16[A, 8, 96], w0: fp16[{vocab}, 768], w1: fp16[768, 768], w2: fp16[768], w3: fp16[{wide}, 768], w4: fp16[768, {half}], w5: fp16[768]):
    x = inductor.embedding(x0, w0)
    a = inductor.merge_heads(x1)
    o = reference.linear(a, w1)
    h, s = inductor.add_rms_norm(x, o, w2, eps=1e-06)
    gate_up = reference.linear(h, w3)
    m = inductor.gated_activate(gate_up, kind="relu2")
    down = reference.linear(m, w4, w5)
    y = inductor.add(s, down)
    return s, y
"""
SMALL, LARGE = MLP.format(vocab=64, wide=512, half=256), MLP.format(vocab=24000, wide=24576, half=12288)


def drawn(text: str) -> tuple[Any, list[Tensor]]:
    program = parse(text).programs["piece"]
    draw = compilers._Draw(program, "cpu")
    return trace_calls(program), [draw(node, 17) for node in program.inputs]


@pytest.mark.parametrize("text", [SMALL, LARGE])
def test_what_a_check_draws_is_computed_in_fp16_without_overflow(text: str):
    evaluate, inputs = drawn(text)
    for result in evaluate(*inputs):
        assert result.isfinite().all() and 0.5 < result.float().std() < 4 and result.abs().max() < 100
    named = inputs[2][:2].float().std(-1)  # the rows that tokens name have values of their own, in any vocabulary
    assert ((named > 0.9) & (named < 1.1)).all()
    for weight in (inputs[5], inputs[6]):
        assert weight[: len(weight) // 2].count_nonzero() > 0.99 * weight[: len(weight) // 2].numel()


def wrong_row(*results: Tensor) -> list[Tensor]:
    return [torch.cat([each[:-1], each[:1]]) for each in results]


WRONG = {
    "one row is another's": wrong_row,
    "a result is missing its last columns": lambda s, y: [s, torch.where(torch.arange(768) < 760, y, 0)],
    "a result is somewhat too large": lambda s, y: [s * 1.03, y],
    "a number is nan": lambda s, y: [s, torch.where(torch.arange(768) == 5, torch.nan, y)],
    "a number is infinite": lambda s, y: [torch.where(torch.arange(768) == 5, torch.inf, s), y],
    "a result has another shape": lambda s, y: [s, y[:, :1]],
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("text", [SMALL, LARGE])
def test_a_check_finds_what_is_wrong_in_fp16(text: str, monkeypatch: pytest.MonkeyPatch):
    program = parse(text).programs["piece"]
    evaluate = trace_calls(program)

    def check(spoil: Callable[..., list[Tensor]], *inputs: Tensor) -> None:
        monkeypatch.setattr(InductorCompiler, "load", lambda *_: lambda *inputs: spoil(*evaluate(*inputs)))
        compilers._check(program, {}, "cpu", "cpu")

    check(lambda *results: list(results))
    for spoil in WRONG.values():
        with pytest.raises(
            PassError, match=r"^a compiled piece of embedding, merge_heads, linear, .* off at \d+ rows$"
        ):
            check(spoil)


@pytest.mark.parametrize("place", [0, 1, 2, 3, 4, 5, 6, 7])
def test_a_check_finds_an_input_that_is_not_read(place: int, monkeypatch: pytest.MonkeyPatch):
    program = parse(SMALL).programs["piece"]
    evaluate = trace_calls(program)

    def run(*inputs: Tensor) -> list[Tensor]:
        return list(evaluate(*inputs[:place], torch.zeros_like(inputs[place]), *inputs[place + 1 :]))

    monkeypatch.setattr(InductorCompiler, "load", lambda *_: run)
    with pytest.raises(PassError, match=" off at "):
        compilers._check(program, {}, "cpu", "cpu")


def test_code_that_does_not_run_is_refused(traced: Any, monkeypatch: pytest.MonkeyPatch):
    """As with PyTorch 2.11, whose code of SmolLM2's first piece raises."""

    def fail(*inputs: Tensor) -> list[Tensor]:
        raise RuntimeError("run_func_ API call failed\nat line 144")

    traced(norm)
    monkeypatch.setattr(InductorCompiler, "load", lambda *_: fail)
    with pytest.raises(
        PassError, match=r"^a compiled piece of rms_norm does not run at 1 rows: run_func_ API call failed$"
    ):
        compilers.compile_piece(TEXT)


def test_what_is_infinite_or_no_number_in_both_is_no_error():
    inf, nan = torch.inf, torch.nan
    theirs = torch.tensor([1.0, inf, -inf, nan, 2.0])
    assert compilers._relative_error(theirs.clone(), theirs) == 0
    assert compilers._relative_error(torch.tensor([1.0, inf, -inf, nan, 1.0]), theirs) == pytest.approx(5**-0.5)
    for place, other in [(0, nan), (0, inf), (1, 3.0), (1, -inf), (1, nan), (3, inf), (3, 0.0)]:
        ours = theirs.clone()
        ours[place] = other
        assert not compilers._relative_error(ours, theirs) <= 1


EMBEDDING = "def piece(x0: i64[A], w0: fp16[40, 32]):\n    y = generated.embedding(x0, w0)\n    return y\n"


@pytest.mark.parametrize("large", [1 << 24, 64])
def test_the_row_of_a_large_embedding_matters(large: int, triton_device: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compilers, "LARGE", large)
    program, source = parse(EMBEDDING).programs["piece"], write_source(EMBEDDING)
    compilers._check(program, {"piece.py": source.encode()}, "cuda", triton_device)
    wrong = re.sub(r"x0_values \*", "0 *", source)
    assert wrong != source
    with pytest.raises(PassError, match=r"^a compiled piece of embedding is .* off at 2 rows$"):
        compilers._check(program, {"piece.py": wrong.encode()}, "cuda", triton_device)


@pytest.mark.slow
def test_the_error_of_a_wrong_piece_names_its_text():
    """In float16 the reference is infinite, and code that does not round in between is not."""
    wrong = """\
def piece(x0: fp16[A, 8]):
    a = inductor.scale(x0, by=1000000.0)
    y = inductor.scale(a, by=1e-06)
    return y
"""
    with pytest.raises(PieceError, match=r"^a compiled piece of scale is inf off at 1 rows$") as raised:
        list(compile_pieces([wrong]))
    assert raised.value.text == wrong
