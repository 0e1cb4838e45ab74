"""Replace other names of values, as vLLM and SGLang have them, by ours."""

from __future__ import annotations

from dataclasses import replace

from atom.checkpoint.address import short_name
from atom.config.schema import Config, ParallelConfig, ServeConfig
from atom.dtypes import BY_NAME
from atom.errors import ConfigError

ACTIVATIONS = {"swish": "silu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
DTYPES = BY_NAME | {f"torch.{name}": dtype for name, dtype in BY_NAME.items()}
CACHE_DTYPES = DTYPES | {"fp8": "fp8_e4m3"}


def respell(config: Config) -> Config:
    """Replace other names of values by ours."""
    mlp = [replace(each, activation=ACTIVATIONS.get(each.activation, each.activation)) for each in config.model.mlp]
    cache_dtype = config.serve.kv_cache_dtype
    parallel, serve = config.parallel, config.serve
    if serve.enable_dp_attention and parallel.data == 1:
        parallel, serve = divide_attention(parallel, serve)
    others = {"tensor": "tensor_parallel_size", "pipeline": "pipeline_parallel_size", "replicas": "data_parallel_size"}
    for name, other in others.items():
        ours, theirs = getattr(parallel, name), getattr(serve, other)
        if theirs not in (1, ours):
            if ours != 1:
                raise ConfigError(f"serve.{other}={theirs} and parallel.{name}={ours}: set one of them")
            parallel = replace(parallel, **{name: theirs})
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
        model=replace(config.model, mlp=mlp),
        parallel=parallel,
        serve=replace(
            serve,
            kv_cache_dtype=CACHE_DTYPES.get(cache_dtype, cache_dtype),
            tensor_parallel_size=parallel.tensor,
            pipeline_parallel_size=parallel.pipeline,
            data_parallel_size=parallel.replicas,
            enable_expert_parallel=parallel.experts > 1,
            enable_dp_attention=parallel.data > 1,
        ),
    )


def divide_attention(parallel: ParallelConfig, serve: ServeConfig) -> tuple[ParallelConfig, ServeConfig]:
    """Divide ranks into data groups, as serve.enable_dp_attention does in SGLang.

    tensor_parallel_size counts all ranks, and data_parallel_size the groups; without one, each rank is a group.
    """
    ranks = max(parallel.tensor, serve.tensor_parallel_size)
    groups = max(parallel.replicas, serve.data_parallel_size)
    groups = groups if groups > 1 else ranks
    if ranks > 1 and ranks % groups:
        raise ConfigError(
            f"serve.enable_dp_attention=true: {groups} groups (serve.data_parallel_size) do not divide the {ranks} "
            f"ranks; set serve.tensor_parallel_size (-tp) to a multiple of {groups}"
        )
    divided = replace(parallel, tensor=max(ranks // groups, 1), data=groups, replicas=1)
    return divided, replace(serve, tensor_parallel_size=divided.tensor, data_parallel_size=1)
