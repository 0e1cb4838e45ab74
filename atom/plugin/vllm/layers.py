"""vLLM's attention layers, as kernels of a lowered text.

layers = AttentionLayers(graph, vllm_config, prefix)
Bindings(tensors, kernels=layers.kernels())
layers.load(graph, tensors)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.linear import ColumnParallelLinear

from atom.graph import TORCH_DTYPES, Graph, Recipe
from atom.graph.graph import type_of
from atom.plugin.vllm.ops import attention_layer, mla_attention_layer
from atom.runtime.step.program import Kernels


class AttentionLayers(nn.Module):
    """A layer of vLLM for each attention of a text; vLLM gives them their caches and says which tokens are whose."""

    def __init__(self, graph: Graph, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self._by_name: dict[str, Any] = {}
        for node in graph.find(attention_layer):
            self._add(node, _make_attention(node, vllm_config, _layer_name(prefix, node)))
        num_ranks = vllm_config.parallel_config.tensor_parallel_size
        for node in graph.find(mla_attention_layer):
            self._add(node, _make_mla_attention(node, vllm_config, _layer_name(prefix, node), num_ranks))

    def kernels(self) -> Kernels:
        """Kernels of attention, in place of those that the text names."""

        def attend(q: Tensor, k: Tensor, v: Tensor, *_: Any, layer: str, **_attributes: Any) -> Tensor:
            out: Tensor = self._by_name[layer](q, k, v)
            return out.view(q.shape)

        def attend_latent(
            q: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, *_: Any, layer: str, **_attributes: Any
        ) -> Tensor:
            found, (num_tokens, heads, _plain) = self._by_name[layer], q.shape
            size = torch.Size((num_tokens, heads * found.v_head_dim))
            out: Tensor = found(torch.cat((q, q_rope), -1), latent, k_rope, output_shape=size)
            return out.view(num_tokens, heads, found.v_head_dim)

        return {(attention_layer, "reference"): attend, (mla_attention_layer, "reference"): attend_latent}

    @torch.no_grad()
    def load(self, graph: Graph, tensors: dict[Recipe, Any]) -> None:
        """Give layers what they keep of their own of the text's weights: sinks, scales of keys and values, kv_b."""
        for node in graph.find(attention_layer):
            layer = self._by_name[node.kwargs["layer"]]
            for name, recipe in zip(("sinks", "k_scale", "v_scale"), node.args[3:], strict=False):
                _copy(getattr(layer, name, None), recipe, tensors)
        for node in graph.find(mla_attention_layer):
            layer, kv_b = self._by_name[node.kwargs["layer"]], node.args[4]
            _copy(layer.kv_b_proj.weight, kv_b, tensors)
            tensors[kv_b] = layer.kv_b_proj.weight.data  # not kept twice
            for recipe in node.args[5:]:
                _copy(getattr(layer, "k_scale", None), recipe, tensors)

    def _add(self, node: Node, layer: nn.Module) -> None:
        name = str(node.kwargs["layer"])
        self._by_name[name] = layer
        self.add_module(name.replace(".", "_"), layer)


def _layer_name(prefix: str, node: Node) -> str:
    """The name that vLLM finds a layer by, with the layer's number in it."""
    return ".".join(filter(None, (prefix, str(node.kwargs["layer"]), "attn")))


def _make_attention(node: Node, vllm_config: VllmConfig, name: str) -> nn.Module:
    (_, heads, dim), kv_heads = type_of(node.args[0]).shape, type_of(node.args[1]).shape[1]
    sinks: dict[str, Any] = {}
    if len(node.args) > 3 and node.args[3] is not None:
        dtype = TORCH_DTYPES[type_of(node.args[3]).dtype]
        sinks["sinks"] = nn.Parameter(torch.zeros(int(heads), dtype=dtype), requires_grad=False)
    layer: nn.Module = Attention(
        int(heads),
        int(dim),
        node.kwargs["scale"],
        num_kv_heads=int(kv_heads),
        cache_config=vllm_config.cache_config,
        quant_config=vllm_config.quant_config,
        logits_soft_cap=node.kwargs.get("softcap"),
        per_layer_sliding_window=node.kwargs.get("window"),
        prefix=name,
        **sinks,
    )
    if sinks:
        layer.register_parameter("sinks", sinks["sinks"])
    return layer


def _make_mla_attention(node: Node, vllm_config: VllmConfig, name: str, num_ranks: int) -> nn.Module:
    (_, heads, plain), rotated = type_of(node.args[0]).shape, type_of(node.args[1]).shape[2]
    rows, rank = type_of(node.args[4]).shape
    attention: nn.Module = MLAAttention(
        num_heads=int(heads),
        scale=node.kwargs["scale"],
        qk_nope_head_dim=int(plain),
        qk_rope_head_dim=int(rotated),
        v_head_dim=int(rows) // int(heads) - int(plain),
        q_lora_rank=None,
        kv_lora_rank=int(rank),
        kv_b_proj=ColumnParallelLinear(int(rank), int(rows) * num_ranks, bias=False, prefix=f"{name}.kv_b_proj"),
        cache_config=vllm_config.cache_config,
        quant_config=vllm_config.quant_config,
        prefix=name,
    )
    return attention


def _copy(parameter: Tensor | None, recipe: Recipe | None, tensors: Mapping[Recipe, Any]) -> None:
    if parameter is not None and recipe is not None:
        parameter.copy_(tensors[recipe].view(parameter.shape))
