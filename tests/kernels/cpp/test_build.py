"""The C++ sources are valid for every instruction set that they have code for, whichever this CPU has."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import pytest
import torch

from atom.kernels.cpp.build import FLAGS, FOLDER, SOURCES, accepted, find_compiler
from atom.kernels.cpu import instruction_set

KINDS = {"avx512_fp16": "sapphirerapids", "avx512": "x86-64-v4", "avx2": "x86-64-v3"}
HERE = next((name for flag, name in KINDS.items() if flag in instruction_set()), None)  # load_library compiles for it
pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="these are instruction sets of x86-64")


@pytest.mark.parametrize(
    "instructions",
    [
        pytest.param(name, marks=pytest.mark.slow if name in ("x86-64", "x86-64-v4", "cascadelake", HERE) else ())
        for name in ("x86-64", "x86-64-v3", "x86-64-v4", "cascadelake", "cooperlake", "sapphirerapids")
    ],
)
def test_sources_are_valid_for(instructions: str) -> None:
    """Without AVX, with AVX2, AVX512, its VNNI, BF16, FP16 and AMX: a library that does not compile only makes atom slower."""
    compiler = find_compiler()
    assert compiler is not None, "the dev setup installs g++"
    flags = [flag for flag in FLAGS if flag not in ("-O3", "-march=native", "-shared")]
    include = Path(torch.__file__).parent / "include"
    command = [compiler, *flags, f"-march={instructions}", "-fsyntax-only", f"-I{include}"]
    ended = subprocess.run(
        [*command, *(str(FOLDER / source) for source in SOURCES)], check=False, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr


def test_a_flag_that_an_old_compiler_refuses_is_left_out():
    compiler = find_compiler()
    assert compiler is not None, "the dev setup installs g++"
    assert accepted(compiler, ["-mno-such-instructions", "-mno-avx2"]) == ["-mno-avx2"]
