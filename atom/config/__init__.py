"""Load the configuration once: conf/ and overrides become plain dataclasses.

config = load(["checkpoint=/models/qwen3", "sampling.temperature=0"])
config.model.attention.heads                     # nothing is assigned from here on
"""

from atom.config.load import SET_BY_LOAD, describe_fields, engine_overrides, load, load_gpu, show
from atom.config.overrides import override
from atom.config.schema import (
    AttentionConfig,
    Config,
    EmbeddedConfig,
    GPUConfig,
    HTTPConfig,
    JobConfig,
    MLPConfig,
    ModelConfig,
    NormConfig,
    RopeConfig,
    RouterConfig,
    SamplingConfig,
    ServeConfig,
)

__all__ = [
    "SET_BY_LOAD",
    "AttentionConfig",
    "Config",
    "EmbeddedConfig",
    "GPUConfig",
    "HTTPConfig",
    "JobConfig",
    "MLPConfig",
    "ModelConfig",
    "NormConfig",
    "RopeConfig",
    "RouterConfig",
    "SamplingConfig",
    "ServeConfig",
    "describe_fields",
    "engine_overrides",
    "load",
    "load_gpu",
    "override",
    "show",
]
