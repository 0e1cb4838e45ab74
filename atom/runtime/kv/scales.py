"""Measure the scales of an fp8 cache over a prompt, and keep them.

    scales = KVScales(graph, tensors)             # those that the text calls measured, 1.0 each
    store = ScaleStore(measured_names(graph), checkpoint, cache)
    if values := store.read():                    # what an earlier start has measured
        scales.use(values)
    else:
        scales.measure(model, tokens[:512])
        store.write(scales.values())

The prompt is one step of the model itself. Each layer's scales are set from its keys and values right before these are
written, so that the following layers read what they will read later. The tensors are filled in place, before any CUDA
graph is captured, which holds their addresses. Several ranks measure at the same time, and take the maximum of all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from atom.cache import Cache, digest, key_of
from atom.cache.files import MAX_JSON, WEIGHTS
from atom.checkpoint import Checkpoint
from atom.graph import Graph, Recipe, ops
from atom.graph.ops import Op
from atom.graph.ops.attention import FP8_MAX
from atom.graph.recipes import Measured
from atom.kernels import LoadContext, find_kernel
from atom.runtime.step.input import BatchShape
from atom.runtime.step.model import Model
from atom.weights.packed_store import describe_file

HEADROOM = 2.0  # how much larger the numbers of other prompts may be
MAX_TOKENS = 512  # of the prompt
WRITES = (ops.norm_rope_write, ops.norm_rope_attention, ops.norm_rope_write_latent, ops.write_mqa)
FILE = "kv_scales.json"

# prose, names, numbers, code, a table, markup and some other scripts: what makes keys large differs from model to model
PROMPT = """\
The lighthouse at Cape Wrath was built in 1828 by Robert Stevenson; it stands 122 metres above the sea. "Did you hear \
that?" she asked. He hadn't, or so he said: the wind, the rain, and the old engine were louder than any voice. On \
Monday, 3 March 2014, at 09:45, the committee (Dr. A. Okafor, M. Dubois, Prof. Li Wei) met to discuss Table 2 of the \
report, whose total of $1,284,503.17 was 12.5% below the forecast. Why? Nobody knew.

def quicksort(items: list[int]) -> list[int]:
    # not in place
    if len(items) <= 1:
        return items
    pivot, *rest = items
    return quicksort([x for x in rest if x < pivot]) + [pivot] + quicksort([x for x in rest if x >= pivot])

SELECT name, COUNT(*) AS n FROM orders WHERE total > 99.9 GROUP BY name HAVING n >= 3 ORDER BY n DESC;

| planet  | mass (10^24 kg) | moons |
|---------|-----------------|-------|
| Mars    | 0.642           | 2     |
| Saturn  | 568             | 146   |

{"id": 17, "tags": ["a", "b"], "ok": true, "url": "https://example.org/path?q=1#top"}
<p class="note">Water boils at 100&nbsp;&deg;C.</p>

Let f(x) = x^2 - 4x + 3. Its roots are x = 1 and x = 3, since (x - 1)(x - 3) = 0; the minimum f(2) = -1 lies between.
Der Zug nach München fährt um acht. L'été dernier, nous étions à la mer. ¿Dónde está la biblioteca? Привет, как дела? \
你好，世界。今天天气很好。 こんにちは、元気ですか。 안녕하세요. مرحبا بالعالم. नमस्ते दुनिया।

Once upon a time there was a miller who had three sons, a mill, a donkey and a cat. The sons had to grind, the donkey \
had to fetch the grain and carry the flour away, and the cat had to catch the mice. When the miller died, the three \
sons shared out what he left: the eldest got the mill, the second the donkey, and the third the cat; nothing more was \
left for him. So he was sad, and said to himself that he had come off worst of all.
"""


Largest = Callable[[Tensor], Tensor]


class ScalePlan(msgspec.Struct):
    """Where the scales of all ranks come from. If both are empty, scales are 1.0."""

    values: dict[str, float] = {}  # by name, if an earlier start has measured them
    tokens: list[int] = []  # otherwise a prompt to measure them over


def measured_names(graph: Graph) -> list[str]:
    """The names of a graph's scales that no file has."""
    return [recipe.name for recipe in graph.recipes() if isinstance(recipe, Measured)]


class KVScales:
    """The scales of a graph that no file has."""

    def __init__(self, graph: Graph, tensors: Mapping[Recipe, Any]) -> None:
        self.tensors: dict[str, Tensor] = {
            recipe.name: tensors[recipe] for recipe in graph.recipes() if isinstance(recipe, Measured)
        }
        self.num_tokens = 0  # length of the prompt over which they were measured

    def values(self) -> dict[str, float]:
        return {name: tensor.item() for name, tensor in self.tensors.items()}

    @torch.inference_mode()
    def use(self, values: Mapping[str, float]) -> None:
        for name, tensor in self.tensors.items():
            tensor.fill_(values[name])

    @torch.inference_mode()
    def measure(self, model: Model, tokens: Sequence[int], largest: Largest = lambda x: x) -> None:
        """Set the scales from a step of these tokens, or as many of them as a step can have.

        Temporarily replaces the KV pool. The pool and all slots are cleared on return.

        model: the model whose step is run
        tokens: the prompt
        largest: reduces a number [1, 1] to the maximum over all ranks
        """
        tokens = tokens[: min(MAX_TOKENS, model.limits.max_num_batched_tokens, model.limits.max_model_len)]
        num_tokens, kernels = len(tokens), model.kernels
        num_blocks = -(-num_tokens // model.block_size)
        before = {kv.kind: len(blocks) for kv, blocks in model.caches.items()}
        packed = np.array([0, 0, num_tokens, num_tokens, *tokens, *[0] * num_tokens], np.int32)  # see BatchShape.split
        try:
            model.bind(dict.fromkeys(before, 1 + num_blocks))
            model.use({**kernels, **_measuring(model.graph, kernels, largest)})
            model.tables[:, 0, :num_blocks] = torch.arange(1, 1 + num_blocks, dtype=torch.int32, device=model.device)
            shape, sent = BatchShape(num_tokens, 1, 0), model.send(packed)
            computed, rows = model.mix(shape, sent), shape.split(sent)
            if model.has_draft_programs:
                model.state.set_history(0, bytearray(np.array(tokens, np.int32)))
                model.follow(computed, rows.sampled, rows)
        finally:  # an error may have left the model without a pool
            model.bind(before)
            model.use(kernels)
            model.clear_slots()
        self.num_tokens = num_tokens


def _measuring(
    graph: Graph, kernels: Mapping[tuple[Op, str], Callable[..., Any]], largest: Largest
) -> dict[tuple[Op, str], Any]:
    """The graph's kernels that write keys and values, each with its scales set before it runs."""
    context = LoadContext()
    calls = [node for program in graph.programs.values() for node in program.nodes if node.target in WRITES]
    keys = dict.fromkeys((node.target, node.meta.get("kernel", "reference")) for node in calls)
    return {key: _after_scales(key[0], kernels.get(key) or find_kernel(*key).load(context), largest) for key in keys}


def _after_scales(op: Op, run: Callable[..., Any], largest: Largest) -> Callable[..., Any]:
    def write(*args: Any, **attributes: Any) -> Any:
        call = op.signature.bind(*args, **attributes)
        call.apply_defaults()
        for scale, numbers in _scaled(op, call.arguments):
            scale.fill_(scale_of(largest(numbers.abs().max().float().view(1, 1)).item()))
        return run(*args, **attributes)

    return write


def _scaled(op: Op, given: Mapping[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """The scales that a write takes, each with the numbers that it scales."""
    if op is ops.norm_rope_write_latent:
        return [(given["k_scale"], _normed(given["latent"], given["norm"], given))]
    if op is ops.write_mqa:  # of tokens: entries of runs have no scale
        return [] if given["k_scale"] is None else [(given["k_scale"], given["kv"])]
    keys = _normed(given["k"], given["k_norm"], given)
    if given["cos"] is not None:
        keys = ops.rope(keys, given["cos"], given["sin"], interleaved=given["interleaved"])
    return [(given["k_scale"], keys), (given["v_scale"], given["v"])]


def _normed(x: Tensor, norm: Tensor | None, given: Mapping[str, Any]) -> Tensor:
    return x if norm is None else ops.rms_norm(x, norm, eps=given["eps"])


def scale_of(largest: float) -> float:
    """The power of 2 that makes numbers up to `largest` fit fp8_e4m3 with HEADROOM; 1 if all are 0 or not finite."""
    return 2.0 ** math.ceil(math.log2(HEADROOM * largest / FP8_MAX)) if 0 < largest < math.inf else 1.0


class ScaleStore:
    """Measured scales in the cache folder, by the checkpoint's files: their names, sizes and times."""

    def __init__(self, names: Sequence[str], checkpoint: Checkpoint, cache: Cache) -> None:
        self.names, self.cache = frozenset(names), cache
        ingredients = {
            "files": "; ".join(map(describe_file, checkpoint.files())),
            "scales": digest(" ".join(sorted(names))),
            "prompt": digest(PROMPT),
        }
        self._key = key_of(ingredients)
        self._about = {"name": f"KV scales of {checkpoint.location}", "ingredients": ingredients}

    def read(self) -> dict[str, float]:
        """The scales that are kept; empty without any."""
        folder = self.cache.find(WEIGHTS, self._key)
        if folder is None:
            return {}
        try:
            kept = json.loads((folder / FILE).read_bytes()[:MAX_JSON])
        except (OSError, ValueError):
            return {}
        if not isinstance(kept, dict) or kept.keys() != self.names:
            return {}
        return kept if all(isinstance(value, float) and 0 < value < math.inf for value in kept.values()) else {}

    def write(self, values: Mapping[str, float]) -> None:
        """Keep the scales for the next start."""
        content = json.dumps(values).encode()
        self.cache.publish(WEIGHTS, self._key, {FILE: content}, self._about)
