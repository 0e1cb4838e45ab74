"""scripts/check-kernels: what it compiles of what is launched, and what it reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
from kernels.compiling import run_program

from scripts.check_kernels import find_tritons, read_failures, share_tasks

KERNELS = """
import triton.language as tl
from atom.kernels.triton.compile.jit import jit

@jit
def good(x, SIZE: tl.constexpr, BLOCK_M: tl.constexpr, SPLITS: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK_M), SIZE + SPLITS)

@jit
def bad(x, SPLITS: tl.constexpr):
    if SPLITS > 1:
        _add(x)

@jit
def _add(x):
    tl.store(x, x.no_such_thing)

@jit
def large(x, y, BLOCK_M: tl.constexpr):
    rows, columns = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_M)[None]
    tl.store(x + rows * BLOCK_M + columns, tl.dot(tl.load(y + rows * BLOCK_M + columns), tl.load(y + columns * BLOCK_M + rows)))
"""
START = """
import json, sys
from pathlib import Path
sys.path[:0] = ["scripts", sys.argv[1]]
import kernel_launches
from kernel_launches import Launch, Pointer, compile_launch, pick_launches
import check_kernels, torch
kernel_launches.use_gpu("sm_89")

def launch(name, **args):
    return Launch("some_kernels", name, None, {"x": Pointer(torch.float32, 0), **args}, {})

def outcome(*args):
    try:
        compile_launch(*args)
    except Exception as error:
        return check_kernels.explain(error)
"""


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """Runs a script after START: what it prints last."""
    (tmp_path / "some_kernels.py").write_text(KERNELS)

    def run(script: str) -> Any:
        done = run_program(START + script, str(tmp_path), TRITON_CACHE_DIR=str(tmp_path / "triton"))
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


def test_a_branch_that_does_not_compile_is_found_by_the_variant_that_takes_it(run: Any):
    plain, split, sound = run(
        """
print(json.dumps([outcome(launch("bad", SPLITS=1), "sm_89", False), outcome(launch("bad", SPLITS=2), "sm_89", False),
                  outcome(launch("good", SIZE=3, BLOCK_M=16, SPLITS=1), "sm_89", True)]))
"""
    )
    assert plain is None and sound is None
    assert "no_such_thing" in split.splitlines()[-1], "the innermost error"


def test_a_kernel_that_needs_more_shared_memory_than_the_gpu_has_fails(run: Any):
    fits, exceeds = run(
        """
y = Pointer(torch.float32, 0)
print(json.dumps([outcome(launch("large", y=y, BLOCK_M=size), "sm_89", True) for size in (32, 128)]))
"""
    )
    assert fits is None
    assert "bytes of shared memory, of 101376" in exceeds


def test_each_value_stays_and_with_to_end_sizes_of_each_kind_and_each_set_of_tiles(run: Any):
    sizes = [(96, 16, 1), (160, 16, 1), (100, 16, 1), (96, 32, 1), (96, 16, 2), (96, 32, 2)]  # the last is no size
    quick, thorough = run(
        f"""
launches = [launch("good", SIZE=size, BLOCK_M=block, SPLITS=splits) for size, block, splits in {sizes}]
print(json.dumps([[list(each.args.values())[1:] for each in pick_launches(launches, is_thorough)]
                  for is_thorough in (False, True)]))
"""
    )
    assert sorted(splits for *_, splits in quick) == [1, 2]
    assert {size & -size for size, *_ in thorough} == {32, 4}, "160 is a multiple of 32, as 96 is"
    assert {(block, splits) for _, block, splits in thorough} == {(16, 1), (16, 2), (32, 1), (32, 2)}
    assert len(thorough) == 5


def test_a_kernel_that_nothing_calls_is_reported(run: Any):
    missing = run(
        """
kernel_launches.record_launches = lambda *args: []
print(json.dumps(check_kernels.record("sm_90", Path(sys.argv[1]))[1]))
"""
    )
    assert {"atom.kernels.triton.linear.matrix._matrix_kernel", "atom.kernels.peers.tiles._all_reduce_kernel",
            "atom.kernels.hopper.packed_linear._multiply"} <= set(missing)  # fmt: skip
    assert not any(each.endswith("._add_splits") for each in missing), "which only kernels call"


class Fake:
    """A launch, as far as a report has it."""

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel

    def __str__(self) -> str:
        return f"{self.kernel}()"


def test_each_kernel_is_compiled_with_both_tritons_and_each_variant_with_one():
    launches: Any = [Fake({"a": "atom.kernels.hopper.a"}.get(name, name)) for name in "aababcccc"]
    shares = share_tasks(launches, 2)
    assert all({"atom.kernels.hopper.a", "b", "c"} <= {each.kernel for each, _ in tasks} for tasks in shares)
    assert {each for tasks in shares for each, _ in tasks} == {*launches}
    assert [len(tasks) for tasks in shares] == [6, 6], "three firsts, and half of six others"
    to_end = [each.kernel for tasks in shares for each, is_to_end in tasks if is_to_end]
    assert to_end == ["atom.kernels.hopper.a"], "which is in Gluon"
    assert {each for each, _ in share_tasks(launches, 1)[0]} == {*launches}
    assert share_tasks(launches, 2, is_to_end=True) == [[(each, True) for each in launches]] * 2


def test_a_compiler_that_dies_is_reported_with_what_it_compiled_last():
    code = "import os; print(0); print('\"does not compile\"'); print(1, flush=True); os.abort()"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    tasks: Any = [(Fake("first"), False), (Fake("second"), True), (Fake("third"), False)]
    refused, died = read_failures(process, tasks, "3.6.0")
    assert refused == ("first", "first()", "3.6.0", "does not compile")
    assert died.kernel == "second" and died.error == "the compiler's process ended with -6"


@pytest.mark.slow
def test_without_a_network_it_takes_what_is_here_or_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("scripts.check_kernels.WHEELS", tmp_path)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(LookupError, match=r"^Triton 3\.6\.0 is not in .*, and cannot be fetched: "):
        find_tritons()
    assert not [*tmp_path.iterdir()], "nothing half done stays"
    for version in ("3.6.0", "3.8.9", "3.9.0"):
        (tmp_path / version).mkdir()
    assert find_tritons() == {"3.6.0": tmp_path / "3.6.0", "3.8.9": tmp_path / "3.8.9"}
    assert find_tritons(is_newest=True) == {"3.8.9": tmp_path / "3.8.9"}
    assert "takes those that are here" in capfd.readouterr().err
