"""What a start compiles ahead is what its steps launch, and what a server may launch later: nothing is compiled then.

In processes of their own, without the interpreter, with a driver that is none: launches do nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

STEPS = """
import contextlib, json, sys, tempfile
from pathlib import Path
import torch, triton
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
        return lambda *args: None

driver.set_active(Driver())
functions, compiled, loaded = set(), [], []
def compile(src, target=None, options=None, **rest):
    functions.add(src.fn)
    text = [src.fn.__name__, str(sorted(src.signature.items())), str(sorted(src.constants.items(), key=str)),
            str(sorted(src.attrs.items())), str(sorted(options.items()))]
    compiled.append(" ".join(text))
    return Kernel()
triton.compiler.compile = compile

from atom import SamplingParams, llm
from atom.compiler import compile_graph
from atom.config import engine_overrides, load
from atom.graph import TORCH_DTYPES
from atom.kernels import Target
from atom.kernels.triton import ahead, attention, decode, feed, latent, linear, moe, prefill, rope, sampling
from atom.kernels.triton.tiles import Gpu
from atom.pieces import find_pieces, load_piece
from atom.pieces.rows import write_source
from atom.runtime.device_runner import DeviceRunner
from atom.runtime.types import Plan, Row, Sequence

for module in (decode, latent, linear, moe, prefill, rope):
    module.find_gpu = lambda device: Gpu(132, 227 << 10, (9, 0))
folder = sys.argv[1]
config = load(engine_overrides(folder, {"device": "cuda", "dtype": "bf16", "level": 3, "load_dummy": True}))
graph = compile_graph(config, target=Target("cuda", frozenset({"nvidia", "sm_90"})))
code = {}
for piece in (piece for program in graph.programs.values() for piece in find_pieces(program)):
    place = Path(tempfile.mkdtemp(dir=folder))
    (place / "piece.py").write_text(write_source(piece.text))
    code[piece.text] = load_piece(place)
weights = {each: torch.zeros([int(dim) for dim in each.type.shape], dtype=TORCH_DTYPES[each.type.dtype])
           for each in graph.recipes()}
kinds = [kind.name for kind in llm.cache_kinds(graph)]
runner = DeviceRunner(graph, weights, dict.fromkeys(kinds, 2), 16, code, device="cpu", max_num_seqs=40,
                      max_model_len=2048)
sizes, max_tokens = [1, 2, 4, 8, 16, 24, 40], 3000
runner.graphs.compile(sizes, max_tokens)
ahead_of, num_loaded = list(compiled), len(loaded)

WAYS = [{"temperature": 0}, {"temperature": 0.9}, {"top_p": 0.9}, {"top_k": 3, "presence_penalty": 0.5}, {"min_tokens": 3},
        {"temperature": 0, "logit_bias": {5: 1.0}, "repetition_penalty": 1.5}, {"logprobs": 2, "prompt_logprobs": 1}]
def execute(counts, num_decodes, way):
    rows = []
    for slot, num_tokens in enumerate([1] * num_decodes + counts):
        is_decode = slot < num_decodes
        each = Sequence(str(slot), [1] * num_tokens, SamplingParams(**way), slot=slot, num_given=num_tokens,
                        output=[1] if is_decode else [], blocks={kind: [1] for kind in kinds})
        rows.append(Row(each, int(is_decode), num_tokens, True))
    runner.execute(Plan(rows, num_decodes)).wait()

for num in (1, 2, 3, 7, 9, 17, 31, 32, 33, 40):
    execute([], num, WAYS[0])
for counts in ([1], [3], [17], [2, 9], [512], [3, 513], [1000, 1600], [20] * 31, [15] * 40):
    for num_decodes in (0, 1, 5, 33):
        if len(counts) + num_decodes <= 40:
            execute(counts, num_decodes, WAYS[0])
for way in WAYS:
    execute([9], 1, way)
later = compiled[len(ahead_of):]

for function in functions:
    function.device_caches.clear()
compiled.clear()
ahead.compile_launches = lambda pool: contextlib.nullcontext()  # from here on launches launch
runner.graphs.compile(sizes, max_tokens)
print(json.dumps([ahead_of, num_loaded, later, compiled]))
"""


@pytest.fixture
def walk(tmp_path: Path, checkpoints: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Runs STEPS on a tiny variant's config.json, with heads that the kernels of long prompts take."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def walk(name: str) -> Any:
        stated = json.loads((checkpoints(name) / "config.json").read_text())
        if "head_dim" in stated:
            stated["head_dim"] = 64
        (tmp_path / "config.json").write_text(json.dumps(stated))
        argv, root = [sys.executable, "-c", STEPS, str(tmp_path)], Path(__file__).parents[2]
        done = subprocess.run(argv, cwd=root, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return walk


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss", "deepseek_v3"])
def test_what_is_compiled_ahead_is_what_its_steps_launch_and_leaves_nothing_for_later(name: str, walk: Any):
    ahead, num_loaded, later, launched = walk(name)
    assert sorted(ahead) == sorted(launched)
    assert max(Counter(ahead).values()) == 1, "each once"
    assert num_loaded >= len(ahead), "and loaded"
    assert later == []
    kernels = {text.partition(" ")[0] for text in ahead}
    attention = {"_attend_kernel"} if name == "deepseek_v3" else {"_decode", "_prefill"}
    assert kernels > attention | {"_extend", "_feed", "_summarize", "_limit", "_gather", "_draw", "_score"}
