"""What a start compiles ahead is what its steps launch, and what a server may launch later: nothing is compiled then.

In processes of their own, without the interpreter, with a driver that is none: launches do nothing.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kernels.compiling import run_program

ALL = [1, 2, 4, 8, 16, 24, 40]
DEVICE = """
import contextlib, json, sys, tempfile, threading, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import torch, triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

class Driver:
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)

class Kernel:
    function = packed_metadata = None
    def launch_metadata(self, *args): return None
    @property
    def run(self):
        loaded.append(self)
        return lambda *args: launched.append(threading.current_thread().name)

driver.set_active(Driver())
functions, compiled, loaded, launched = set(), [], [], []
def compile(src, target=None, options=None, **rest):
    functions.add(src.fn)
    text = [src.fn.__name__, str(sorted(src.signature.items())), str(sorted(src.constants.items(), key=str)),
            str(sorted(src.attrs.items())), str(sorted(options.items()))]
    compiled.append(" ".join(text))
    return Kernel()
triton.compiler.compile = compile
"""
STEPS = """
from atom import SamplingParams
from atom import assemble
from atom.compiler import compile_graph
from atom.config.load import engine_overrides, load
from atom.graph import TORCH_DTYPES, PackedWeight
from atom.graph.parts import parts_of
from atom.kernels import Target
from atom.kernels.triton.experts import few_experts, grouped_linear, grouping, moe, router
from atom.kernels.triton.step import sampling
from atom.kernels.triton.compile import precompile
from atom.kernels.triton.attention import paged
from atom.kernels.triton.attention import decode
from atom.kernels.triton.step import prepare_inputs
from atom.kernels.triton.attention import latent
from atom.kernels.triton.linear import linear, matrix, vector
from atom.kernels.triton.attention import prefill
from atom.kernels.triton.attention import rope
from atom.kernels.triton.gpu import Gpu
from atom.pieces import find_pieces
from atom.kernels.triton.compile.codegen import write_source
from atom.kernels.triton.compile.piece_compiler import TritonCompiler
from atom.runtime.step.model import Model
from atom.runtime.step.program import Bindings
from atom.runtime.step.runner import Runner
from atom.runtime.step.builder import StepBuilder
from atom.runtime.types import Plan, ScheduledRequest, Sequence, StepLimits

for module in (decode, few_experts, grouped_linear, grouping, latent, linear, matrix, moe, prefill, rope, router, vector):
    module.find_gpu = lambda device: Gpu(132, 227 << 10, (9, 0))
folder = sys.argv[1]
fields = {"device": "cuda", "dtype": "bf16", "level": 3, "load_dummy": True, **json.loads(sys.argv[3])}
config = load(engine_overrides(folder, fields))
graph = compile_graph(config, target=Target("cuda", frozenset({"nvidia", "sm_90"})))
code = {}
for piece in (piece for program in graph.programs.values() for piece in find_pieces(program)):
    place = Path(tempfile.mkdtemp(dir=folder))
    (place / "piece.py").write_text(write_source(piece.text))
    code[piece.text] = TritonCompiler().load(place)
def zeros(recipe):
    if recipe.type.fmt is None:
        return torch.zeros([int(dim) for dim in recipe.type.shape], dtype=TORCH_DTYPES[recipe.type.dtype])
    return PackedWeight(recipe.type, {name: zeros(part) for name, part in parts_of(recipe).items()})

weights = {each: zeros(each) for each in graph.recipes()}
limits, drafting = StepLimits(40, 3000, 2048, 128), config.drafting
runner = Runner(
    Model(graph, Bindings(weights, code), 16, limits, device="cpu", backend="triton", drafting=drafting), run_ahead=2
)
kinds = runner.model.kinds
runner.bind(dict.fromkeys(kinds, 2))
sizes, max_tokens = json.loads(sys.argv[2]), 3000
runner.graphs.compile(sizes, max_tokens)
ahead_of, num_loaded = list(compiled), len(loaded)

WAYS = [{"temperature": 0}, {"temperature": 0.9}, {"top_p": 0.9}, {"top_k": 3, "presence_penalty": 0.5}, {"min_tokens": 3},
        {"temperature": 0, "logit_bias": {5: 1.0}, "repetition_penalty": 1.5}, {"logprobs": 2, "prompt_logprobs": 1}]
builder = StepBuilder(runner.capacity)

def execute(counts, num_decodes, way, num_drafts=0):
    rows, drafts = [], (-1,) * num_drafts
    for slot, num_tokens in enumerate([1] * num_decodes + counts):
        is_decode = slot < num_decodes
        each = Sequence(str(slot), [1] * num_tokens, SamplingParams(**way), slot=slot,
                        blocks={kind: [1] for kind in kinds})
        if is_decode:
            builder.build(Plan([ScheduledRequest(each, 0, 1, True)], 1))
            each.output = [1]
        num_tokens += num_drafts * is_decode
        rows.append(ScheduledRequest(each, int(is_decode), num_tokens, True, drafts * is_decode))
    runner.execute(builder.build(Plan(rows, num_decodes))).wait()

for num in (1, 2, 3, 7, 9, 17, 31, 32, 33, 40):
    execute([], num, WAYS[0])
for counts in ([1], [3], [17], [2, 9], [512], [3, 513], [1000, 1600], [20] * 31, [15] * 40):
    for num_decodes in (0, 1, 5, 33):
        if len(counts) + num_decodes <= 40:
            execute(counts, num_decodes, WAYS[0])
for way in WAYS:
    execute([9], 1, way)
if drafting is not None:
    for num_drafts in range(1, 1 + drafting.num_tokens):
        most = limits.max_verified_tokens // (1 + num_drafts)
        for num in (1, 2, 3, 7, 9, 17, 31, 32, 33, 40):
            for counts in ([], [3], [2, 700]):
                if num <= most and num + len(counts) <= 40:
                    execute(counts, num, WAYS[0], num_drafts)
    for way in WAYS[:4]:
        execute([], 3, way, drafting.num_tokens)
        execute([9], 3, way, drafting.num_tokens)
later = compiled[len(ahead_of):]

for function in functions:
    function.device_caches.clear(), function.launched.clear()
compiled.clear()
precompile.compile_launches = lambda pool: contextlib.nullcontext()  # from here on launches launch
runner.graphs.compile(sizes, max_tokens)
print(json.dumps([ahead_of, num_loaded, later, compiled]))
"""


LAUNCHES = """
from atom.kernels.triton.compile.jit import jit
from atom.kernels.triton.compile.precompile import compile_launches

@jit
def kernel(x, B: tl.constexpr): tl.store(x, B)
def launch(*sizes):
    for size in sizes: kernel[(1,)](torch.zeros(4), size)
def in_thread(name, run):
    thread = threading.Thread(target=run, name=name)
    thread.start()
    return thread
def walk(*sizes):
    with ThreadPoolExecutor(2) as pool, compile_launches(pool):
        launch(*sizes)
launch(1)
launched.clear(), compiled.clear()
"""
SIZES = """
from atom.kernels.hopper.grouped_linear import make_plan
from atom.kernels.triton.linear.row_kernels import FP8, quantize_rows
for rows in (500, 512, 1600):
    make_plan(torch.zeros(4, dtype=torch.int64), rows, 128)
    quantize_rows(torch.zeros(rows, 256, dtype=torch.bfloat16), 128, FP8, is_shuffled=True)
print(json.dumps(sorted(text.partition(" ")[0] for text in compiled)))
"""
WALK_BESIDE_A_SERVER = """
with ThreadPoolExecutor(2) as pool, compile_launches(pool):
    launch(1, 2)
    in_thread("server", lambda: launch(1, 2)).join()
print(json.dumps(launched))
"""
TWO_WALKS = """
first, second = threading.Event(), threading.Event()
def walk_first():
    with ThreadPoolExecutor(2) as pool, compile_launches(pool):
        launch(2, 3)
        first.set(), second.wait(60)
def walk_second():
    with ThreadPoolExecutor(2) as pool, compile_launches(pool):
        first.wait(60), launch(3, 4), second.set(), one.join(60)
one = in_thread("first", walk_first)
in_thread("second", walk_second).join()
num_walked = len(launched)
launch(2, 3, 4)
print(json.dumps([num_walked, launched]))
"""
FAILURES = """
def fail(*args, **options):
    compiled.append("")
    time.sleep(0.2)
    raise ValueError("it does not compile")
def outcome(call):
    try:
        call()
    except BaseException as error:
        return repr(error)
def fail_walking():
    with ThreadPoolExecutor(2) as pool, compile_launches(pool):
        launch(*range(2, 22))
        raise KeyboardInterrupt
working, kernel.compile = kernel.compile, fail
outcomes = [outcome(fail_walking), len(compiled), outcome(lambda: walk(*range(2, 22))), len(compiled) < 20]
kernel.compile = working
compiled.clear()
outcomes += [len(launched)]
walk(*range(2, 12))
outcomes += [len(compiled)]
launch(*range(2, 22))
print(json.dumps([*outcomes, len(compiled), len(launched)]))
"""


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Any]:
    """Runs a script after DEVICE: what it prints last."""

    def run(script: str, *args: str) -> Any:
        done = run_program(DEVICE + script, *args, TRITON_CACHE_DIR=str(tmp_path / "triton"))
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.fixture
def walk(tmp_path: Path, checkpoints: Any, run: Callable[..., Any]) -> Callable[[str, list[int]], Any]:
    """Runs STEPS on a tiny variant's config.json, with heads that the kernels of long prompts take."""

    def walk(name: str, sizes: list[int], fields: dict[str, Any] | None = None, **changed: Any) -> Any:
        described = {**json.loads((checkpoints(name) / "config.json").read_text()), **changed}
        if "head_dim" in described:
            described["head_dim"] = 64
        (tmp_path / "config.json").write_text(json.dumps(described))
        return run(STEPS, str(tmp_path), json.dumps(sizes), json.dumps(fields or {}))

    return walk


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("qwen3", [1, 2]),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("deepseek_v3", ALL), ("qwen3", ALL), ("gpt_oss", ALL), ("gpt_oss", []), ("deepseek_v3", []))
        ),
    ],
)
def test_what_is_compiled_ahead_is_what_its_steps_launch_and_leaves_nothing_for_later(
    name: str, sizes: list[int], walk: Any
):
    ahead, num_loaded, later, launched = walk(name, sizes)
    assert sorted(ahead) == sorted(launched)
    assert max(Counter(ahead).values()) == 1, "each once"
    assert num_loaded >= len(ahead), "and loaded"
    assert later == []
    kernels = {text.partition(" ")[0] for text in ahead}
    attention = {"_attend_kernel"} if name == "deepseek_v3" else {"_decode", "_prefill"}
    assert kernels > attention | {"_extend", "_prepare", "_summarize", "_limit", "_gather", "_draw", "_score"}


@pytest.mark.slow
def test_kernels_of_experts_are_compiled_ahead_for_all_rows_that_one_may_have(walk: Any):
    ahead, _, later, launched = walk("gpt_oss", ALL, num_local_experts=64, num_experts_per_tok=2)
    assert sorted(ahead) == sorted(launched)
    assert later == []


@pytest.mark.slow
def test_kernels_of_packed_experts_are_compiled_ahead_too(walk: Any):
    mxfp4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    ahead, _, later, launched = walk("gpt_oss", ALL, hidden_size=64, intermediate_size=96, quantization_config=mxfp4)
    assert sorted(ahead) == sorted(launched)
    assert later == []
    kernels = {text.partition(" ")[0] for text in ahead}
    assert "_packed_grouped_linear_kernel" in kernels and "_grouped_linear_kernel" not in kernels


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes", "method", "changed"),
    [
        ("qwen3", ALL, "ngram", {}),
        ("qwen3", [], "ngram", {}),
        ("deepseek_v3", ALL, "mtp", {"num_nextn_predict_layers": 1}),
    ],
)
def test_kernels_of_drafts_are_compiled_ahead_too(
    name: str, sizes: list[int], method: str, changed: dict[str, Any], walk: Any
):
    ahead, _, later, launched = walk(name, sizes, {"method": method}, **changed)
    assert sorted(ahead) == sorted(launched)
    assert later == []
    kernels = {text.partition(" ")[0] for text in ahead}
    assert kernels > {"_accept", *({"_find", "_repeat"} if method == "ngram" else ())}


def test_steps_of_odd_sizes_take_the_kernels_of_even_ones(run: Any):
    assert run(SIZES) == ["_plan_kernel", "_quantize_kernel"]


def test_a_walk_leaves_the_launches_of_other_threads_unchanged(run: Any):
    assert run(LAUNCHES + WALK_BESIDE_A_SERVER) == ["server", "server"]


def test_walks_of_two_threads_launch_nothing_and_what_comes_after_them_does(run: Any):
    num_walked, launched = run(LAUNCHES + TWO_WALKS)
    assert num_walked == 0
    assert launched == ["MainThread"] * 3


def test_what_fails_first_is_raised_and_what_has_not_begun_is_compiled_later(run: Any):
    interrupt, num_begun, error, is_cut_short, num_launched, *nums = run(LAUNCHES + FAILURES)
    assert (interrupt, num_begun) == ("KeyboardInterrupt()", 0)
    assert (error, is_cut_short) == ("ValueError('it does not compile')", True)
    assert num_launched == 0
    assert nums == [10, 20, 20], "another walk's, all that are launched, and their launches"
