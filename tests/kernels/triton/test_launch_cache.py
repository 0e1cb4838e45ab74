"""What is launched again is what Triton would launch: the same binary, with the same arguments.

In processes of their own, without the interpreter, with a driver that is none: launches tell of themselves.
"""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from kernels.triton.test_precompile import run  # noqa: F401

from atom.kernels.triton import launch_cache

KERNELS = """
import itertools
from triton import JITFunction, knobs
from atom.kernels.triton import launch_cache
from atom.kernels.triton.jit import jit

SIZE = tl.constexpr(4)
runs = []
triton_run = JITFunction.run
def count(kernel, *args, **options):
    runs.append(kernel)
    return triton_run(kernel, *args, **options)
JITFunction.run = count

@jit(do_not_specialize=["n", "m"], do_not_specialize_on_alignment=["y", "m", "k"])
def kernel(x, y, n, m, k, stride, A: tl.constexpr, B: tl.constexpr):
    tl.store(x + SIZE, 1)
Kernel.run = property(lambda binary: lambda *args: launched.append((binary, args[:4], args[4:6], args[6:9], args[9:])))
Driver.get_current_stream = lambda self, device: 77 + device

def call(*args, grid=(2, 3), **options):
    return kernel[grid](*args, **options)
memory = torch.zeros(64)
args = (memory, memory, 3, 4, 5, 6, 7, 8)
def is_again(run):
    before = len(runs)
    run()
    return len(runs) == before
"""
SAME = """
shifted, half = memory[2:], memory.half()
ints = [0, 1, 2, 16, 17, -16, -3, 2**31 - 1, 2**31, 2**32, -2**31, -2**31 - 1, 2**40, 2**62 + 1]
tensors = [memory, shifted, half, half[8:], half[1:], memory.long(), memory[16:]]
values = [*ints, *tensors, 0.5, 1.0, 0.0, True, False, None]
plain = (memory, memory, 3, 3, 3, 3, 7, 8)
given = [(*plain[:place], value, *plain[place + 1:]) for place in range(6) for value in values]
given += [(*plain[:6], *both) for both in itertools.product([1, 2, 1.0, 0.5, 1.5, True, False, 0, None, "a", "1"], repeat=2)]
given += [(first, second, 16, n, n, n, 1, 2) for first in tensors for second in tensors for n in (1, 16, 5)]
options = [{}, {"num_warps": 8}, {"num_warps": 4}, {"num_warps": 4, "launch_pdl": True}, {"launch_pdl": True, "num_warps": 4},
           {"maxnreg": 168}, {"enable_fp_fusion": False}, {"num_stages": 2}]
calls = [(each, {}) for each in given] + [(args, each) for each in options] + [((*args[:7],), {"B": b}) for b in (1, 2.0, 8)]
def launch_all(again):
    launched.clear()
    for each, chosen in calls:
        grid = (2, 3)
        if again:
            kernel[grid](*each, **chosen)
        else:
            kernel.run(*each, grid=grid, warmup=False, **chosen)
    return list(launched)
wanted = launch_all(False)
first, second, third = launch_all(True), launch_all(True), []
runs.clear()
third = launch_all(True)
def is_same(found):
    return [(left[0] is right[0], left[1:3] == right[1:3], len(left[4]) == len(right[4]),
             all(a is b or a == b for a, b in zip(left[4], right[4]))) for left, right in zip(wanted, found)]
print(json.dumps([len(wanted), len({id(each[0]) for each in wanted}), len(runs),
                  [set(map(all, is_same(found))) == {True} for found in (first, second, third)]]))
"""
ANSWERS = """
binder = kernel.device_caches[0][4]
values = [0, 1, 2, 16, 17, 32, -16, -3, 2**31 - 1, 2**31, -2**31, -2**31 - 1, 2**40, 2**40 + 1, 2**63, 0.5, True, None,
          memory, memory[1:], memory[2:], memory[4:], memory.half(), memory.half()[1:]]
wrong, num_equal = [], 0
for place in range(8):
    if place > 5:
        values = [0, 1, 2, 1.0, 2.0, True, False, None, "1", "True"]
    known = []
    for value in values:
        each = (*args[:place], value, *args[place + 1:])
        _, specialization, _ = binder(*each)
        answer = type(value), launch_cache._find_question(kernel, each, {})(each)
        # Triton's own table takes 1, 1.0 and True for one
        known.append((answer, [(str(x), type(y).__name__, str(y)) for x, y in specialization]))
    for (answer, wanted), (other, found) in itertools.combinations(known, 2):
        num_equal += answer == other
        if answer == other and wanted != found:
            wrong.append([place, str(answer), wanted, found])
print(json.dumps([wrong, num_equal]))
"""
RARE = """
import os
def expect(name, change, undo):
    call(*args), call(*args)
    assert is_again(lambda: call(*args)), name
    change()
    assert not is_again(lambda: call(*args)), name
    undo()
hooked = []
for hook in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
    expect("hook", lambda: hook.add(hooked.append), lambda: hook.remove(hooked.append))
def alone(name, value, undo):
    def change(value): setattr(knobs.runtime, name, value)
    expect(name, lambda: change(value), lambda: change(undo))
alone("launch_enter_hook", print, knobs.runtime.launch_enter_hook)
alone("debug", True, False)
alone("add_stages_inspection_hook", lambda *args: ("", ""), None)
expect("instrumentation", lambda: setattr(knobs.compilation, "instrumentation_mode", "mode"),
       lambda: setattr(knobs.compilation, "instrumentation_mode", ""))
expect("pre-run hook", lambda: kernel.add_pre_run_hook(lambda *args, **options: None), kernel.pre_run_hooks.clear)
expect("debugged", lambda: setattr(kernel, "debug", True), lambda: setattr(kernel, "debug", None))
expect("cleared", kernel.device_caches.clear, lambda: None)
here = Driver.get_current_device
expect("device", lambda: setattr(Driver, "get_current_device", lambda self: 1),
       lambda: setattr(Driver, "get_current_device", here))
first, second = (lambda: call(*args[:7], B=1)), (lambda: call(*args[:7], B=True))
first(), first()
assert is_again(first) and not is_again(second) and is_again(second), "of another class"
Driver.get_current_device = lambda self: 1
call(*args)
assert is_again(lambda: call(*args))
Driver.get_current_device = here
assert is_again(lambda: call(*args)), "both devices are known"
from atom.kernels.triton.precompile import compile_launches
launched.clear()
with ThreadPoolExecutor(1) as pool, compile_launches(pool):
    call(*args)
assert launched == [], "a walk launches nothing"
call(*args)
call(*args, grid=lambda bound: (bound["n"],)), call(*args, grid=[5]), call(*args, grid=(6, 7, 8)), call(*args, grid=(9,))
grids = [each[1][:3] for each in launched]
assert {each[1][3] for each in launched} == {77}, "the stream"
missing = []
try:
    call(*args[:7])
except TypeError:
    missing.append("raised")
SIZE = tl.constexpr(5)
try:
    call(*args)
except RuntimeError as error:
    missing.append("has changed" in str(error))
SIZE = tl.constexpr(4)
assert not is_again(lambda: call(*args)) and is_again(lambda: call(*args)), "the value is another object"
class Mine(torch.Tensor): pass
for each in (torch.nn.Parameter(memory), memory.as_subclass(Mine)):
    for _ in range(3):
        assert not is_again(lambda: call(each, *args[1:])), "another class"
Driver.get_current_target = lambda self: GPUTarget("hip", "gfx942", 64)
kernel.device_caches.clear()
for _ in range(3):
    assert not is_again(lambda: call(*args)), "another vendor"
print(json.dumps([grids, missing]))
"""
PLAIN = """
from types import SimpleNamespace
launch_cache.HAS_PLAIN_LAUNCHER = True
plain = []
class Launcher(SimpleNamespace):
    def __call__(self, *args): launched.append(args)
Kernel.function, Kernel.packed_metadata = "function", "packed"
Kernel.run = Launcher(global_scratch_size=0, profile_scratch_size=0, launch=lambda *args: plain.append(args),
                      launch_cooperative_grid="cooperative", launch_pdl="pdl")
call(*args), call(*args)
Kernel.run = Launcher(**{**vars(Kernel.run), "global_scratch_size": 8})
call(*args, num_warps=8), call(*args, num_warps=8)
known = (str, int, type(None))
print(json.dumps([[each if isinstance(each, known) else type(each).__name__ for each in call] for call in (*plain, *launched)]))
"""
OTHER_VERSION = """
triton.__version__ = "3.9.0"
from atom.kernels.triton.jit import jit
@jit
def kernel(x): tl.store(x, 1)
kernel[(1,)](torch.zeros(1)), kernel[(1,)](torch.zeros(1))
print(json.dumps([len(launched), kernel._launches._asked]))
"""


def test_what_is_launched_again_is_what_triton_launches(run: Any):  # noqa: F811
    num_calls, num_binaries, num_left, are_same = run(KERNELS + SAME)
    assert num_calls > 300
    assert num_binaries > 60
    assert are_same == [True, True, True]
    assert num_left == 0, "all that was launched before is known"


def test_equal_answers_mean_one_specialization(run: Any):  # noqa: F811
    wrong, num_equal = run(KERNELS + ANSWERS)
    assert wrong == []
    assert num_equal > 50, "and are not asked for nothing"


def test_what_is_rare_is_left_to_triton(run: Any):  # noqa: F811
    grids, failures = run(KERNELS + RARE)
    assert grids == [[2, 3, 1], [3, 1, 1], [5, 1, 1], [6, 7, 8], [9, 1, 1]]
    assert failures == ["raised", True]


def test_the_launcher_in_c_gets_what_triton_3_6_gives_it(run: Any):  # noqa: F811
    """Where a kernel needs memory beside its arguments, Triton's launcher comes first."""
    where, given = [2, 3, 1, 77, "function"], ["Tensor", "Tensor", 3, 4, 5, 6, 7, 8]
    plain, first, other_first, other = run(KERNELS + PLAIN)
    assert plain == [*where, "cooperative", "pdl", None, None, "packed", None, None, None, *given]
    assert first == other_first == [*where, "packed", None, "HookChain", "HookChain", *given]
    assert other == [*where, "packed", None, None, None, *given]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_a_kernel_of_a_gpu_is_launched_again_without_triton_s_own_launch(monkeypatch: pytest.MonkeyPatch):
    from triton import JITFunction

    from atom.kernels.triton.linear.linear import normalize

    weight, xs = torch.ones(64, device="cuda"), [torch.randn(rows, 64, device="cuda") for rows in (3, 3, 5)]
    wanted = [torch.nn.functional.rms_norm(x, (64,), weight, 1e-6) for x in xs]
    found = [normalize(xs[0], None, weight, 1e-6)[0]]
    monkeypatch.setattr(JITFunction, "run", None)
    found += [normalize(x, None, weight, 1e-6)[0] for x in xs[1:]]
    torch.testing.assert_close(found, wanted)


def test_another_version_launches_as_it_does(run: Any):  # noqa: F811
    assert run(OTHER_VERSION) == [2, {}], "and nothing of it is remembered"


class TestBoxes:
    @pytest.fixture
    def boxes(self) -> Any:
        gl = pytest.importorskip("triton.experimental.gluon.language")
        from atom.kernels.triton.tensor_descriptors import Boxes

        return lambda *shape: Boxes(shape, gl.NVMMASharedLayout(128, 16, 2))

    def test_a_tensor_where_one_was_has_its_descriptor(self, boxes: Any):
        made, x = boxes(64, 64), torch.zeros(128, 64, dtype=torch.bfloat16)
        box = made.find(x, (128, 64), x.stride())
        assert made.find(x[:128], (128, 64), (64, 1)) is box
        others = [
            made.find(x[64:], (64, 64), (64, 1)),
            made.find(x, (64, 64), (64, 1)),
            made.find(x, (128, 64), (128, 1)),
        ]
        assert len({id(each) for each in (box, *others)}) == 4
        assert {each.kind for each in others} == {box.kind}, "of one binary"
        assert made.find(x.half(), (128, 64), (64, 1)).kind is not box.kind
        assert boxes(32, 64).find(x, (128, 64), (64, 1)).kind is not box.kind

    def test_it_keeps_no_tensor_alive(self, boxes: Any):
        made, x = boxes(64, 64), torch.zeros(128, 64, dtype=torch.bfloat16)
        box, seen = made.find(x, (128, 64), (64, 1)), weakref.ref(x)
        assert (box.base.data_ptr(), box.base.dtype) == (x.data_ptr(), x.dtype)
        del x
        assert seen() is None

    def test_the_launcher_gets_what_is_made_of_each_once(self, boxes: Any, monkeypatch: pytest.MonkeyPatch):
        made, x = boxes(64, 64), torch.zeros(128, 64, dtype=torch.bfloat16)
        a, b = made.find(x, (128, 64), (64, 1)), made.find(x[64:], (64, 64), (64, 1))
        launched, filled = [], []

        def fill(box: Any, meta: Any) -> list[Any]:
            filled.append((box, meta))
            return [meta["name"], *box.shape]

        monkeypatch.setattr("triton.backends.nvidia.driver.make_tensordesc_arg", fill)

        def wrap(launcher: Any, tensordesc_indices: set[int], tensordesc_meta: list[Any]) -> Any:
            return lambda *args: (launcher, tensordesc_indices, tensordesc_meta)  # as Triton's own refers to them

        plain = [].append
        assert launch_cache._with_boxes(plain, 2) is plain
        metas = [{"name": "first"}, {"name": "second"}]
        launch = launch_cache._with_boxes(wrap(lambda *args: launched.append(args), {1, 3}, metas), 2)
        for _ in range(2):
            launch("x", "y", 5, a, 6, b, 7)
        assert launched == [("x", "y", 5, "first", 128, 64, 6, "second", 64, 64, 7)] * 2
        assert len(filled) == 2
        other = launch_cache._with_boxes(wrap(lambda *args: launched.append(args), {0}, [{"name": "other"}]), 0)
        other(a)
        assert launched[-1] == ("other", 128, 64), "another binary's"
