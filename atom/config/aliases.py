"""Replace vLLM's and SGLang's names of values by ours."""

from __future__ import annotations

from dataclasses import replace

from atom.checkpoint.address import short_name
from atom.config.schema import Config, MLPConfig, ParallelConfig, VisionConfig
from atom.dtypes import BY_NAME
from atom.errors import ConfigError

ACTIVATIONS = {"swish": "silu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
DTYPES = BY_NAME | {f"torch.{name}": dtype for name, dtype in BY_NAME.items()}
CACHE_DTYPES = DTYPES | {"fp8": "fp8_e4m3"}


def respell(config: Config) -> Config:
    """Replace other names of values by ours."""
    mlp = [respell_mlp(each) for each in config.model.mlp]
    blocks = {
        name: block if block.mlp is None else replace(block, mlp=respell_mlp(block.mlp))
        for name, block in config.model.blocks.items()
    }
    state_dtype, own = config.model.state_dtype, config.model.per_layer_input
    own = replace(own, activation=ACTIVATIONS.get(own.activation, own.activation))
    cache_dtype = config.serve.kv_cache_dtype
    parallel, serve = config.parallel, config.serve
    if serve.enable_dp_attention and parallel.data == 1:
        parallel = divide_attention(parallel)
    if serve.enable_expert_parallel and parallel.experts == 1:
        parallel = replace(parallel, experts=parallel.tensor * parallel.data)
    if config.quant.kv != "auto":
        if cache_dtype not in ("auto", config.quant.kv, "fp8_e4m3"):
            raise ConfigError(f"quant.kv={config.quant.kv} and serve.kv_cache_dtype={cache_dtype}: set one of them")
        cache_dtype = config.quant.kv
    return replace(
        config,
        checkpoint=config.checkpoint and short_name(config.checkpoint),
        dtype=DTYPES.get(config.dtype, config.dtype),
        model=replace(
            config.model,
            mlp=mlp,
            blocks=blocks,
            vision=respell_vision(config.model.vision),
            per_layer_input=own,
            state_dtype=DTYPES.get(state_dtype, state_dtype),
        ),
        parallel=parallel,
        serve=replace(
            serve,
            kv_cache_dtype=CACHE_DTYPES.get(cache_dtype, cache_dtype),
            enable_expert_parallel=parallel.experts > 1,
            enable_dp_attention=parallel.data > 1,
        ),
    )


def respell_mlp(mlp: MLPConfig) -> MLPConfig:
    return replace(mlp, activation=ACTIVATIONS.get(mlp.activation, mlp.activation))


def respell_vision(vision: VisionConfig | None) -> VisionConfig | None:
    if vision is None:
        return None
    merger = replace(vision.merger, activation=ACTIVATIONS.get(vision.merger.activation, vision.merger.activation))
    return replace(vision, activation=ACTIVATIONS.get(vision.activation, vision.activation), merger=merger)


def divide_attention(parallel: ParallelConfig) -> ParallelConfig:
    """Divide ranks into data groups, as serve.enable_dp_attention does in SGLang.

    Here parallel.tensor counts all ranks, and parallel.replicas the groups; without one, each rank is a group.
    """
    ranks, groups = parallel.tensor, parallel.replicas if parallel.replicas > 1 else parallel.tensor
    if ranks > 1 and ranks % groups:
        raise ConfigError(
            f"serve.enable_dp_attention=true: {groups} groups (parallel.replicas, -dp) do not divide the {ranks} "
            f"ranks; set parallel.tensor (-tp) to a multiple of {groups}"
        )
    return replace(parallel, tensor=max(ranks // groups, 1), data=groups, replicas=1)
