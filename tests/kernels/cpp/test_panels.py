"""Matmuls and rows of weights in panels, against those of the weight unpacked."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import wire
from gguf_files import draw_blocks
from gil import releases_gil
from kernels.checks import poisoned, relative_error

from atom.cache import Cache
from atom.graph import LaidOut, PackedWeight, Type, ops, parse
from atom.graph.formats import parse_format, part_shape
from atom.graph.gguf_blocks import TYPES
from atom.graph.unpack import unpack
from atom.kernels import Target, find_kernel, shuffle
from atom.kernels.backend import LoadContext
from atom.kernels.cpp import build, panels
from atom.kernels.registry import tensor_type
from atom.weights.quantize import quantize

CPU = Target("cpu")
K_QUANTS = ["q2_k", "q3_k", "q4_k", "q5_k", "q6_k"]
FORMATS = [
    "q4_0", "q4_1", "q8_0", "int8[1, *]", "int4[1, 32]", "int4[1, 96]", "int4[1, *]", "awq_int4[1, 64]",
    "ct_packed_int4z[1, 32]", "ct_packed_int8[1, 32]", "gptq_v2_int8[1, 96]", "fp8[1, *]", "ct_fp8[*, *]",
    "fp8[128, 128]", "fp8[24, 40]", "int8[16, 16]", "mxfp4", "ct_nvfp4", "modelopt_nvfp4", "q5_0", "q5_1", *K_QUANTS,
]  # fmt: skip
BOUNDS = {torch.float32: 3e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def draw(fmt: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> PackedWeight:
    """A random packed weight, with zero points and minima that differ from block to block."""
    if fmt in TYPES:
        type = Type(NAMES[dtype], shape, fmt)
        blocks = torch.from_numpy(draw_blocks(fmt.upper(), *shape))
        return PackedWeight(type, {"values": blocks.view(part_shape(type, parse_format(fmt).parts["values"]))})
    parts = quantize(fmt, torch.randn(shape) * 0.05)
    if "zeros" in parts:
        parts["zeros"].random_(0, 16 if "int4" in fmt else 256)
    if "mins" in parts:
        parts["mins"].normal_(0, 0.1)
    return PackedWeight(Type(NAMES[dtype], shape, fmt), parts)


def width_of(fmt: str) -> int:
    return 512 if fmt in K_QUANTS else 192


def run(op: ops.Op, *args: object) -> torch.Tensor:
    made: torch.Tensor = find_kernel(op, "cpp").load(LoadContext())(*args)
    return made


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_matmuls_are_those_of_the_weight_unpacked(fmt: str, dtype: torch.dtype):
    width = width_of(fmt)
    weight, bias = draw(fmt, 200, width, dtype=dtype), torch.randn(200).to(dtype)  # 12 panels and a half
    assert find_kernel(ops.linear, "cpp").accepts(CPU, Type(NAMES[dtype], ("T", width)), weight.type) is None
    laid_out, dense = shuffle(weight, "panels"), unpack(fmt, weight.parts).float()
    for rows in (1, 2, 3, 7, 9, 15, 32, 33, 70):
        x = torch.randn(rows, width).to(dtype)
        assert relative_error(run(ops.linear, x, laid_out, bias), x.float() @ dense.T + bias.float()) < BOUNDS[dtype]
        assert relative_error(run(ops.linear, x, laid_out), x.float() @ dense.T) < BOUNDS[dtype]


@pytest.mark.parametrize("fmt", ["q4_0", "q4_1", "q8_0"])
def test_few_rows_of_16_bits_are_multiplied_as_they_are(fmt: str):
    """Rounded to 8 bits in blocks of 32 columns, most sums would differ."""
    weight = draw(fmt, 200, 192)
    laid_out, dense = shuffle(weight, "panels"), unpack(fmt, weight.parts).double()
    for rows in (1, 2, 4, 7, 9):
        x = torch.randn(rows, 192).bfloat16()
        made = run(ops.linear, x, laid_out)
        assert (made != (x.double() @ dense.T).bfloat16()).float().mean() < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["AVX2", "AVX512_CORE", "AVX512_CORE_VNNI"])
def test_matmuls_are_right_with_fewer_instructions(limit: str):
    """As on an older CPU: of the instructions that this one has, oneDNN and our code use those of the limit."""
    tests = ["-k", "matmuls_are_those or few_rows_of_16_bits or very_many_rows or not_finite", "-m", ""]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", __file__, *tests],
        env={**os.environ, "ONEDNN_MAX_CPU_ISA": limit}, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 0 and " passed" in ended.stdout, ended.stdout


def test_a_product_releases_the_gil():
    weight, x = shuffle(draw("int8[1, *]", 2048, 1024), "panels"), torch.randn(64, 1024).bfloat16()
    kernel = find_kernel(ops.linear, "cpp").load(LoadContext())
    assert releases_gil(lambda: kernel(x, weight))


@pytest.mark.parametrize("columns", [2, 6, 34, 130])
def test_columns_need_not_fill_a_block_or_a_vector(columns: int):
    for fmt in ("fp8[1, *]", "fp8[32, 32]", "int8[1, *]", "int4[1, *]"):
        weight = draw(fmt, 17, columns, dtype=torch.float32)
        laid_out, x = shuffle(weight, "panels"), torch.randn(5, columns)
        assert relative_error(run(ops.linear, x, laid_out), x @ unpack(fmt, weight.parts).T) < 2e-6


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_rows_are_those_of_the_weight_unpacked(fmt: str, dtype: torch.dtype):
    weight = draw(fmt, 200, width_of(fmt), dtype=dtype)
    laid_out, dense = shuffle(weight, "panels"), unpack(fmt, weight.parts).float()
    for tokens in ([], [0], [199, 5, 5, 16, 15], list(range(40))):
        made = run(ops.embedding, torch.tensor(tokens, dtype=torch.int64), laid_out)
        assert made.dtype == dtype and made.shape == (len(tokens), width_of(fmt))
        assert not tokens or relative_error(made, dense[tokens]) < BOUNDS[dtype]


@pytest.mark.parametrize("fmt", ["q4_0", "q8_0", "int4[1, 32]"])
def test_scales_that_a_file_has_in_fp16_are_exact(fmt: str):
    weight = draw(fmt, 40, 96)
    weight.parts["scales"][:8] *= 2**-12  # below fp16's normal numbers
    made = run(ops.embedding, torch.arange(40), shuffle(weight, "panels"))
    assert torch.equal(made, unpack(fmt, weight.parts).bfloat16())


def test_a_token_that_the_vocabulary_has_not_is_refused():
    laid_out = shuffle(draw("q8_0", 33, 32), "panels")
    for token in (-1, 33):
        with pytest.raises(RuntimeError, match=f"there is no token {token}"):
            run(ops.embedding, torch.tensor([token]), laid_out)


def test_no_rows_give_no_rows():
    assert run(ops.linear, torch.empty(0, 32), shuffle(draw("q8_0", 33, 32, dtype=torch.float32), "panels")).shape == (
        0,
        33,
    )


def test_a_weight_of_many_panels_is_unpacked_in_parts():
    weight = draw("q8_0", 2056, 768)
    x, laid_out, bias = torch.randn(100, 768).bfloat16(), shuffle(weight, "panels"), torch.randn(2056).bfloat16()
    truth = x.float() @ unpack("q8_0", weight.parts).T + bias.float()
    assert relative_error(run(ops.linear, x, laid_out, bias), truth) < 5e-3


@pytest.mark.parametrize("rows", [511, 512, 513, 1030])
def test_very_many_rows_are_multiplied_some_at_a_time(rows: int):
    weight = draw("q4_1", 40, 64)
    x, laid_out, bias = torch.randn(rows, 64).bfloat16(), shuffle(weight, "panels"), torch.randn(40).bfloat16()
    truth, made = x.float() @ unpack("q4_1", weight.parts).T + bias.float(), run(ops.linear, x, laid_out, bias).float()
    errors = (made - truth).norm(dim=1) / truth.norm(dim=1)  # of each row
    assert errors.max() < 1e-2


def test_x_may_be_a_view_with_gaps():
    weight = draw("int8[1, *]", 48, 64, dtype=torch.float32)
    x = torch.randn(5, 200)[:, 3:67]
    laid_out = shuffle(weight, "panels")
    assert relative_error(run(ops.linear, x, laid_out), x @ unpack("int8[1, *]", weight.parts).T) < 2e-6


def test_an_activation_that_is_nan_gives_nan():
    laid_out = shuffle(draw("q8_0", 16, 32), "panels")
    x = torch.full((1, 32), float("nan")).bfloat16()
    assert run(ops.linear, x, laid_out).isnan().all()


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("fmt", ["fp8[1, *]", "fp8[32, 32]"])
def test_a_weight_that_is_nan_gives_nan_in_its_row_only(fmt: str, rows: int):
    weight = draw(fmt, 40, 64)
    weight.parts["values"].view(torch.uint8)[[3, 17], [5, 63]] = torch.tensor([0x7F, 0xFF], dtype=torch.uint8)
    made = run(ops.linear, torch.randn(rows, 64).bfloat16(), shuffle(weight, "panels"))
    assert torch.equal(made.isnan().all(0).nonzero().flatten(), torch.tensor([3, 17]))
    assert made.isnan().sum() == 2 * rows


@pytest.mark.sampled(4)
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 40, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fmt", ["q8_0", "q4_0", "q4_1", "q5_1"])
def test_numbers_of_x_that_are_not_finite_make_of_sums_what_they_make_in_float32(
    fmt: str, dtype: torch.dtype, rows: int
):
    weight, x = draw(fmt, 48, 192, dtype=dtype), torch.randn(rows, 192).to(dtype)
    laid_out, dense = shuffle(weight, "panels"), unpack(fmt, weight.parts).float()
    finite = run(ops.linear, x, laid_out)
    x[-1, 190], x[rows // 2, 70], x[rows // 2, 71] = math.nan, -math.inf, 3e38
    x[0] = 1.0
    x[0, 5] = math.inf
    made, expected = run(ops.linear, x, laid_out), x.float() @ dense.T
    assert expected.isinf().any(), "a NaN in each place would pass too"
    assert torch.equal(made.isnan(), expected.isnan())
    assert torch.equal(made.isposinf(), expected.isposinf()) and torch.equal(made.isneginf(), expected.isneginf())
    is_finite = x.isfinite().all(1)
    assert torch.equal(made[is_finite], finite[is_finite]), "other rows stay as they are"


@pytest.mark.parametrize("rows", [7, 80])
@pytest.mark.parametrize(
    "fmt", ["q4_1", "int4[1, 32]", "int8[1, *]", "fp8[1, *]", "fp8[128, 128]", "mxfp4", "ct_nvfp4", "q4_k", "q6_k"]
)
def test_experts_are_packed_one_by_one_and_one_without_rows_is_not_read(fmt: str, rows: int):
    width = 256 if fmt in K_QUANTS else 96
    weight, kernel = draw(fmt, 3, 40, width), find_kernel(ops.grouped_linear, "cpp")
    assert kernel.accepts(CPU, Type("bf16", ("P", width)), weight.type, Type("i64", (3,))) is None
    bad = poisoned(weight, torch.tensor([False, True, False]))
    experts = [
        PackedWeight(Type("bf16", (1, 40, width), fmt), {name: part[at : at + 1] for name, part in bad.parts.items()})
        for at in range(3)
    ]
    ends, bias = torch.tensor([2, 2, 2 + rows]), torch.randn(3, 40).bfloat16()
    x = torch.randn(2 + rows, width).bfloat16()
    y = run(ops.grouped_linear, x, [shuffle(expert, "panels") for expert in experts], ends, bias)
    truth = ops.grouped_linear.body(x.float(), unpack(fmt, weight.parts), ends, bias.float())
    assert relative_error(y, truth) < 5e-3


@pytest.mark.parametrize(
    ("x", "weight", "reason"),
    [
        (Type("bf16", ("T", 64)), Type("bf16", (64, 64), "gptq_int4_ordered[1, 32]"), "is stored as gptq"),
        (Type("bf16", ("T", 2, 64)), Type("bf16", (64, 64), "q4_1"), "takes rows in two dims"),
    ],
)
def test_what_it_does_not_take_has_a_reason(x: Type, weight: Type, reason: str):
    assert reason in str(find_kernel(ops.linear, "cpp").accepts(CPU, x, weight))


@pytest.mark.slow
def test_a_piece_has_such_calls_within():
    text = (
        'def piece(x0: i64[A], w0: bf16[100, 64, "q8_0"], w1: bf16[64], w2: bf16[128, 64, "q4_1"]):\n'
        "    x = cpp.embedding(x0, w0)\n"
        "    h = inductor.rms_norm(x, w1, eps=1e-05)\n"
        "    y = cpp.linear(h, w2)\n"
        "    return y\n"
    )
    assert tensor_type(parse(text, "piece").programs["piece"].inputs[3]) == Type("u8", (8, 16 * 40))
    code = "import sys; from atom.pieces.compilers import compile_piece; print(*compile_piece(sys.argv[1]))"
    made = subprocess.run([sys.executable, "-c", code, text], capture_output=True, text=True, timeout=200)
    assert "piece.so" in made.stdout.split(), made.stderr


@pytest.mark.parametrize("fmt", FORMATS)
def test_what_checks_compiled_code_computes_the_same(fmt: str):
    """A process that compiles pieces need not have the library."""
    weight = draw(fmt, 40, width_of(fmt), dtype=torch.float32)
    laid_out, x = shuffle(weight, "panels"), torch.randn(3, width_of(fmt))
    assert isinstance(laid_out, LaidOut)
    numbers = panels.Panels.of(weight.type).numbers
    assert relative_error(panels._linear(x, laid_out.tensor, None, numbers), run(ops.linear, x, laid_out)) < 2e-6


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build._Process, "loaded", {})
    monkeypatch.setattr(build._Process, "cache", None)
    monkeypatch.setattr("torch.ops.load_library", lambda _: None)  # which takes the same ops once


@pytest.mark.usefixtures("unloaded")
def test_the_library_is_compiled_once_for_a_cache_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(build, "FOLDER", tmp_path / "sources")  # of a source that is compiled at once
    build.FOLDER.mkdir()
    (build.FOLDER / "plain.cpp").write_text('#include "numbers.h"\nint seven() { return SEVEN; }\n')
    (build.FOLDER / "numbers.h").write_text("#define SEVEN 7\n")
    with build.keep_libraries(Cache(tmp_path)):
        assert build.load_library("plain.cpp")
    assert "compiling plain.cpp" in capsys.readouterr().err
    monkeypatch.setattr(build._Process, "loaded", {})
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    assert build.load_library("plain.cpp")
    with build.keep_libraries(Cache(tmp_path / "other")):  # a process that has it puts it into any folder
        build.build_library("plain.cpp")
    assert not capsys.readouterr().err and len(Cache(tmp_path / "other").entries("binaries")) == 1
    (entry,) = Cache(tmp_path).entries("binaries")
    assert entry.about["name"] == "plain.cpp"


ALONE = """
import torch
from atom.graph import PackedWeight, Type, ops
from atom.graph.unpack import unpack
from atom.kernels import find_kernel, shuffle
from atom.kernels.backend import LoadContext
from atom.weights.quantize import quantize

weight = PackedWeight(Type("fp32", (40, 64), "q8_0"), quantize("q8_0", torch.randn(40, 64)))
laid_out, dense, x = shuffle(weight, "panels"), unpack("q8_0", weight.parts), torch.randn(3, 64)
linear, embedding = (find_kernel(op, "cpp").load(LoadContext()) for op in (ops.linear, ops.embedding))
assert torch.allclose(linear(x, laid_out), x @ dense.T, atol=1e-5)
assert torch.equal(embedding(torch.tensor([39, 0]), laid_out), dense[[39, 0]])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("", "there is no C++ compiler; install g++"),
        ("#!/bin/sh\necho $TMPDIR > {said}\necho 'x.cpp:1: error: no such instruction' >&2\nexit 1\n",
         "x.cpp:1: error: no such instruction"),
    ],
    ids=["none", "broken"],
)  # fmt: skip
def test_without_a_compiler_weights_are_unpacked_and_a_line_says_so(compiler: str, reason: str, tmp_path: Path):
    """A compiler has its own files in the folder that ends with it."""
    if compiler:
        (tmp_path / "g++").write_text(compiler.format(said=tmp_path / "said"))
        (tmp_path / "g++").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:/nowhere", "TMPDIR": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr
    line = f"atom-run: packed.cpp cannot be compiled: {reason}; without it this is slower"
    assert line in ended.stderr.splitlines()
    if compiler:
        folder = Path((tmp_path / "said").read_text().strip())
        assert folder.parent == tmp_path and folder.name.startswith("atom-run-") and not folder.exists()


COMPILES = "from atom.kernels.cpp.build import PACKED, load_library; load_library(PACKED)"
STARTS_ANOTHER = """#!/bin/sh
sleep 600 &
echo $! > {pid}.new
mv {pid}.new {pid}
wait
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
def test_a_compiler_ends_with_its_parent_and_so_does_what_it_has_started(tmp_path: Path):
    pid = tmp_path / "pid"
    (tmp_path / "g++").write_text(STARTS_ANOTHER.format(pid=pid))
    (tmp_path / "g++").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    parent = subprocess.Popen([sys.executable, "-c", COMPILES], stderr=subprocess.DEVNULL, env=environment)
    wire.wait_until(pid.exists, 60)
    started = int(pid.read_text())
    assert is_running(started)
    parent.kill()
    assert parent.wait(wire.SECONDS) == -9
    wire.wait_until(lambda: not is_running(started), 60)


TWICE = """
from concurrent.futures import ThreadPoolExecutor
from atom.kernels.cpp.build import PACKED, load_library

with ThreadPoolExecutor(2) as pool:
    for each in [pool.submit(load_library, PACKED) for _ in range(2)]:
        print(type(each.exception()).__name__)
"""


@pytest.mark.slow
def test_a_compiler_that_was_interrupted_is_not_called_broken(tmp_path: Path):
    interrupt = "import os, signal, time\ntime.sleep(1)\nsignal.signal(2, signal.SIG_DFL)\nos.kill(os.getpid(), 2)\n"
    (tmp_path / "g++").write_text(f"#!{sys.executable}\n{interrupt}")
    (tmp_path / "g++").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:/nowhere"}
    ended = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, text=True, env=environment)
    assert ended.stdout.split() == ["KeyboardInterrupt"] * 2, ended.stderr
    assert ended.stderr.count("compiling packed.cpp") == 1, "not again for the thread that waited"
    assert "cannot be compiled" not in ended.stderr


def test_sources_use_the_macros_that_the_oldest_pytorch_has():
    sources = list(Path(build.__file__).parent.glob("*.cpp"))
    assert sources and not [each.name for each in sources if "STABLE_TORCH_ERROR_CODE_CHECK" in each.read_text()], (
        "2.12 or newer"
    )
