"""The model class for vLLM: any family of the model files.

vLLM schedules, keeps KV, computes attention, captures CUDA graphs and samples; what lies between two attentions is
atom's: written from YAML, rewritten by passes, run by kernels and compiled pieces.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank

from atom import weights
from atom.assemble import check_values, left_out, refuse_act
from atom.cache import Cache
from atom.checkpoint import SILENT
from atom.compiler import Compiled, compile_model, mesh_of
from atom.config import Config
from atom.config.load import load
from atom.config.stored_names import stacked_parts
from atom.errors import AtomError, UnsupportedError
from atom.graph import BODY, HEAD, Graph, Recipe
from atom.kernels import compile_launches, find_tuners
from atom.plugin.vllm import DISABLE
from atom.plugin.vllm.communicator import GroupCommunicator, NoCommunicator
from atom.plugin.vllm.config import overrides_of
from atom.plugin.vllm.layers import AttentionLayers
from atom.plugin.vllm.ops import attention_layer, mla_attention_layer
from atom.plugin.vllm.tied_head import without_copy
from atom.process.messages import say
from atom.runtime.step.program import Bindings, Executable, Kernels, score
from atom.runtime.tune import measured_kernels
from atom.weights.evaluate import Loaded, overwrite
from atom.weights.incremental import load_incremental


class AtomForCausalLM(nn.Module):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        with naming_the_way_out(), defaults_of_torch():
            self._config = load(overrides_of(vllm_config))
            if self._config.passes.taps or self._config.passes.steer:
                raise UnsupportedError(
                    "passes.taps and passes.steer: vLLM's requests have no such fields; leave them out"
                )
            self._graph, self._code = compile_for(self._config)[:2]
        self.attention = AttentionLayers(self._graph, vllm_config, prefix)
        mesh, rank = mesh_of(self._config), get_tensor_model_parallel_rank()
        self._coordinates = mesh.coordinates(rank) if mesh.num_ranks > 1 else None
        is_cpu = self._config.device == "cpu"
        self._device = "cpu" if is_cpu else f"cuda:{torch.cuda.current_device()}"  # this rank's, of all that it sees
        self._steps = shapes_of_steps(vllm_config)
        self._tensors: dict[Recipe, Loaded] = {}
        if vllm_config.load_config.load_format == "dummy":
            with defaults_of_torch():
                recipes, seed = self._graph.recipes(), self._config.seed
                self._bind(weights.load_dummy(recipes, seed, self._device, self._coordinates))

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        raise UnsupportedError("embeddings are part of atom's text: leave --enable-prompt-embeds out")

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **_others: Any,
    ) -> Tensor:
        """input_ids and positions [T] -> hidden states [T, H]"""
        if input_ids is None or inputs_embeds is not None or intermediate_tensors is not None:
            raise UnsupportedError("atom's models take only token ids, and compute all layers")
        (hidden,) = self._body({"tokens": input_ids.long(), "positions": positions})
        return hidden  # type: ignore[no-any-return]

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """hidden states [R, H] -> [R, V]"""
        return score(self._head, (hidden_states,))

    @torch.inference_mode()
    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load what vLLM reads; a second time into the same memory, which CUDA graphs hold. The parameters' names."""
        stacked, ignore = stacked_parts(self._config.model), left_out(self._config)
        tensors = without_copy(tensors, self._config.model)
        with naming_the_way_out(), defaults_of_torch():
            loads = load_incremental(self._graph.recipes(), tensors, stacked, self._device, self._coordinates, ignore)
            if self._tensors:
                for recipe, loaded in loads:
                    overwrite(self._tensors[recipe], loaded)
                self.attention.load(self._graph, self._tensors)
            else:
                self._bind(dict(loads))
            check_values(self._tensors, self._config)
        return {name for name, _ in self.named_parameters()}

    def _bind(self, tensors: dict[Recipe, Loaded]) -> None:
        self._tensors = tensors
        self.attention.load(self._graph, tensors)
        tuners = find_tuners(self._config.device, torch.device(self._device))
        kernels = {**measured_kernels(tuners, Path(str(self._config.cache)), say), **self.attention.kernels()}
        communicator = GroupCommunicator() if self._coordinates else None
        bindings = Bindings(tensors, self._code, kernels=kernels, communicator=communicator)
        if self._device != "cpu":
            precompile(self._graph, bindings, self._steps, self._device)
        self._body, self._head = executables(self._graph, bindings)


def executables(graph: Graph, bindings: Bindings) -> tuple[Executable, Executable]:
    return Executable(graph.programs[BODY], bindings), Executable(graph.programs[HEAD], bindings)


def shapes_of_steps(vllm_config: VllmConfig) -> list[tuple[int, int]]:
    """The tokens of steps, and how many of them have logits, for which kernels are compiled ahead.

    Kernels of experts differ by the power of two that holds the tokens.
    """
    scheduler, captured = vllm_config.scheduler_config, vllm_config.compilation_config.cudagraph_capture_sizes or ()
    powers = (1 << power for power in range(scheduler.max_num_batched_tokens.bit_length()))
    sizes = sorted({*powers, *captured, scheduler.max_num_seqs, scheduler.max_num_batched_tokens})
    return [(size, min(size, scheduler.max_num_seqs)) for size in sizes]


@contextmanager
def defaults_of_torch() -> Iterator[None]:
    """Within this context torch has its own defaults, in place of the device and the dtype that vLLM sets."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)


@contextmanager
def naming_the_way_out() -> Iterator[None]:
    """Within this context, the error of a refused model or checkpoint says how to run vLLM's own model."""
    try:
        yield
    except AtomError as error:
        raise type(error)(f"{error}; {DISABLE}=1 has vLLM run its own model") from error


def compile_for(config: Config) -> Compiled:
    """The lowered text and its pieces, from the cache folder if they are there."""

    def check(graph: Graph) -> None:
        weights.refuse_packed(graph)
        refuse_act(graph, config)

    cache = Cache(Path(str(config.cache)))
    try:
        return compile_model(config, SILENT, cache, check=check)
    finally:
        for line in cache.warnings:
            say(line)
        cache.close()


@torch.inference_mode()
def precompile(graph: Graph, bindings: Bindings, steps: Iterable[tuple[int, int]], device: str) -> None:
    """Compile on all cores the kernels that these steps launch; none is launched."""

    def attend(q: Tensor, *_: Any, **_attributes: Any) -> Tensor:
        return torch.empty_like(q)

    def attend_latent(
        q: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, kv_b: Tensor, *_: Any, **_attributes: Any
    ) -> Tensor:
        return q.new_empty(*q.shape[:2], kv_b.shape[0] // q.shape[1] - q.shape[2])

    without: Kernels = {(attention_layer, "reference"): attend, (mla_attention_layer, "reference"): attend_latent}
    communicator = NoCommunicator() if bindings.communicator else None
    body, head = executables(
        graph, bindings._replace(kernels={**bindings.kernels, **without}, communicator=communicator)
    )
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool, compile_launches(torch.device(device).type, pool):
        for num_tokens, num_logits in steps:
            numbers = torch.zeros(num_tokens, dtype=torch.int64, device=device)
            (hidden,) = body({"tokens": numbers, "positions": numbers})
            score(head, (hidden[:num_logits],))
