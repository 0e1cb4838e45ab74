"""What atom's plug-in takes of vLLM: paged attention in plain torch, one process.

with installed():
    from atom.plugin.vllm.model import AtomForCausalLM

A signature has the parameters that atom gives, in the way it gives them: by position, then by keyword.
`tests/plugin/test_vllm_contract.py` holds them against vLLM's sources where they are at hand.
"""

from __future__ import annotations

import enum
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from atom.graph.ops import attend
from atom.graph.ops.latent import attend_latent


class CompilationMode(enum.IntEnum):
    NONE = 0
    VLLM_COMPILE = 3


class CUDAGraphMode(enum.Enum):
    NONE = 0
    FULL_DECODE_ONLY = (2, 0)


@dataclass
class ModelConfig:
    model: str
    dtype: torch.dtype = torch.float32
    max_model_len: int = 128
    revision: str | None = None
    hf_overrides: Mapping[str, Any] = field(default_factory=dict)
    quantization: str | None = None
    hf_config: Any = field(default_factory=SimpleNamespace)
    is_moe: bool = False
    architectures: list[str] = field(default_factory=list)
    enforce_eager: bool = False


@dataclass
class CacheConfig:
    cache_dtype: str = "auto"
    sliding_window: int | None = None
    block_size: int = 16


@dataclass
class ParallelConfig:
    tensor_parallel_size: int = 1
    enable_expert_parallel: bool = False


@dataclass
class CompilationConfig:
    cudagraph_capture_sizes: list[int] | None = None
    mode: CompilationMode | None = None
    cudagraph_mode: CUDAGraphMode | None = None
    static_forward_context: dict[str, Any] = field(default_factory=dict)


@dataclass
class SchedulerConfig:
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 64


@dataclass
class LoadConfig:
    load_format: str = "auto"


@dataclass
class DeviceConfig:
    device_type: str = "cpu"


@dataclass
class VllmConfig:
    model_config: ModelConfig
    cache_config: CacheConfig = field(default_factory=CacheConfig)
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    compilation_config: CompilationConfig = field(default_factory=CompilationConfig)
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    load_config: LoadConfig = field(default_factory=LoadConfig)
    device_config: DeviceConfig = field(default_factory=DeviceConfig)
    quant_config: Any = None
    additional_config: Any = field(default_factory=dict)


@dataclass
class Step:
    """What vLLM's forward context says of a step: of each sequence, its blocks, and how many tokens it has by then."""

    tables: list[list[int]]
    lengths: list[int]
    num_queries: list[int]


class ForwardContext(threading.local):
    """The step that runs, and the configuration of the model that is made; vLLM keeps both for a process, a rank."""

    config: VllmConfig
    step: Step
    rank: Rank | None = None  # None: there is one


class Rank(NamedTuple):
    number: int
    communicator: Any  # what all_reduce and all_gather of all ranks meet by


context = ForwardContext()
NUM_BLOCKS = 16


class _Layer(nn.Module):
    """Blocks of vLLM's cache for a layer, written and read by the step's tables."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        layers = context.config.compilation_config.static_forward_context
        assert prefix not in layers, f"Duplicate layer name: {prefix}"
        assert len([part for part in prefix.split(".") if part.isdigit()]) == 1, "vLLM wants one number in a name"
        layers[prefix] = self
        self.block_size = context.config.cache_config.block_size
        self.blocks: torch.Tensor | None = None

    def sequences(self, entries: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Write entries [T, …]; of each sequence its queries among them, and all of its entries."""
        step = context.step
        assert sum(step.num_queries) == len(entries)
        if self.blocks is None:
            self.blocks = torch.full((NUM_BLOCKS * self.block_size, *entries.shape[1:]), torch.nan, dtype=entries.dtype)
        first = 0
        for table, length, num_queries in zip(step.tables, step.lengths, step.num_queries, strict=True):
            slots = torch.tensor([table[at // self.block_size] * self.block_size + at % self.block_size
                                  for at in range(length)])  # fmt: skip
            own = slice(first, first := first + num_queries)
            self.blocks[slots[length - num_queries :]] = entries[own]
            yield own, self.blocks[slots]


class Attention(_Layer):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        /,
        *,
        num_kv_heads: int,
        cache_config: CacheConfig | None,
        quant_config: Any,
        logits_soft_cap: float | None,
        per_layer_sliding_window: int | None,
        prefix: str,
        sinks: torch.Tensor | None = None,
    ) -> None:
        super().__init__(prefix)
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads
        self.scale, self.softcap = scale, logits_soft_cap
        self.window = per_layer_sliding_window or (cache_config.sliding_window if cache_config else None)
        self.impl_sinks = sinks
        if quant_config is not None:
            self.k_scale, self.v_scale = (nn.Parameter(torch.tensor(-1.0), requires_grad=False) for _ in range(2))

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        /,
    ) -> torch.Tensor:
        q = query.view(-1, self.num_heads, self.head_size)
        k, v = (each.view(-1, self.num_kv_heads, self.head_size) for each in (key, value))
        out = torch.empty_like(q)
        for own, entries in self.sequences(torch.stack((k, v), 1)):
            out[own] = attend(q[own], *entries.unbind(1), self.scale, self.window, self.softcap, self.impl_sinks)
        return out.flatten(1)


class ColumnParallelLinear(nn.Module):
    def __init__(self, input_size: int, output_size: int, /, *, bias: bool, prefix: str) -> None:
        super().__init__()
        assert not bias and prefix
        rows = output_size // context.config.parallel_config.tensor_parallel_size
        self.weight = nn.Parameter(
            torch.zeros(rows, input_size, dtype=context.config.model_config.dtype), requires_grad=False
        )


class MLAAttention(_Layer):
    def __init__(
        self,
        *,
        num_heads: int,
        scale: float,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        kv_b_proj: ColumnParallelLinear,
        cache_config: CacheConfig | None,
        quant_config: Any,
        prefix: str,
    ) -> None:
        super().__init__(prefix)
        self.num_heads, self.scale, self.v_head_dim = num_heads, scale, v_head_dim
        self.plain, self.rotated, self.rank, self.kv_b_proj = (
            qk_nope_head_dim,
            qk_rope_head_dim,
            kv_lora_rank,
            kv_b_proj,
        )

    def forward(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        /,
        *,
        output_shape: torch.Size,
    ) -> torch.Tensor:
        assert q.shape[1:] == (self.num_heads, self.plain + self.rotated) and k_pe.shape[1:] == (1, self.rotated)
        assert output_shape == (len(q), self.num_heads * self.v_head_dim)
        out = q.new_empty(len(q), self.num_heads, self.v_head_dim)
        for own, entries in self.sequences(torch.cat((kv_c_normed, k_pe.squeeze(1)), 1)):
            parts = q[own].split([self.plain, self.rotated], -1)
            latent, k_rope = entries.split([self.rank, self.rotated], -1)
            out[own] = attend_latent(*parts, latent, k_rope, self.kv_b_proj.weight, self.scale)
        return out.flatten(1)


def get_tensor_model_parallel_rank() -> int:
    return context.rank.number if context.rank else 0


def get_tensor_model_parallel_world_size() -> int:
    return context.config.parallel_config.tensor_parallel_size


def tensor_model_parallel_all_reduce(input_: torch.Tensor, /) -> torch.Tensor:
    assert context.rank is not None
    return context.rank.communicator.all_reduce(input_, axis="tensor")


def tensor_model_parallel_all_gather(input_: torch.Tensor, /, *, dim: int) -> torch.Tensor:
    assert context.rank is not None and dim == -1 and input_.is_contiguous()
    size = input_.shape[-1] * context.config.parallel_config.tensor_parallel_size
    return context.rank.communicator.all_gather(input_, axis="tensor", size=size)


class _ModelRegistry:
    def __init__(self) -> None:
        self.models: dict[str, str] = {}

    def register_model(self, model_arch: str, model_cls: type[nn.Module] | str, /) -> None:
        assert isinstance(model_cls, str) and len(model_cls.split(":")) == 2
        self.models[model_arch] = model_cls


ModelRegistry = _ModelRegistry()


class RocmPlatform:
    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: VllmConfig, /) -> None:
        vllm_config.compilation_config.static_forward_context["rocm"] = "defaults"


MODULES: dict[str, dict[str, Any]] = {
    "vllm": {"ModelRegistry": ModelRegistry},
    "vllm.config": {
        "VllmConfig": VllmConfig,
        "CompilationMode": CompilationMode,
        "CUDAGraphMode": CUDAGraphMode,
    },
    "vllm.distributed": {
        each.__name__: each
        for each in (
            get_tensor_model_parallel_rank,
            get_tensor_model_parallel_world_size,
            tensor_model_parallel_all_gather,
            tensor_model_parallel_all_reduce,
        )
    },
    "vllm.model_executor": {},
    "vllm.model_executor.layers": {},
    "vllm.model_executor.layers.attention": {"Attention": Attention, "MLAAttention": MLAAttention},
    "vllm.model_executor.layers.linear": {"ColumnParallelLinear": ColumnParallelLinear},
    "vllm.platforms": {"builtin_platform_plugins": {"rocm": lambda: None}},
    "vllm.platforms.rocm": {"RocmPlatform": RocmPlatform},
}
OURS = "atom.plugin.vllm"


@contextmanager
def installed() -> Iterator[None]:
    """Within this context, what atom imports of vLLM is this."""
    before = {name: module for name, module in sys.modules.items() if _is_of(name)}
    for name in before:
        del sys.modules[name]
    for name, values in MODULES.items():
        module = ModuleType(name)
        module.__dict__.update(values, __path__=[])
        sys.modules[name] = module
    ModelRegistry.models = {}
    try:
        yield
    finally:
        for name in [name for name in sys.modules if _is_of(name)]:
            del sys.modules[name]
        sys.modules.update(before)
        context.rank = None


def _is_of(name: str) -> bool:
    """Whether a module is vLLM's, or one of ours that has imported it."""
    own = [f"{OURS}.{each}" for each in ("communicator", "layers", "model", "platform")]
    return name == "vllm" or name.startswith("vllm.") or name in own
