"""The configuration: plain dataclasses, which `atom.config.load` makes of conf/ and overrides.

config = load(["checkpoint=/models/qwen3", "sampling.temperature=0"])
config.model.attention.heads                     # nothing is assigned from here on

Only what loads or writes a configuration imports Hydra: a process that is handed one need not.
"""

from atom.config.schema import (
    AdvancedConfig,
    AttentionConfig,
    BlockScalesConfig,
    BlockSettings,
    Config,
    EmbeddedConfig,
    GatedDeltaConfig,
    GPUConfig,
    Group,
    HTTPConfig,
    ImageTextConfig,
    JobConfig,
    LightningConfig,
    Mamba2Config,
    MambaConfig,
    MLPConfig,
    ModelConfig,
    NormConfig,
    PassesConfig,
    QuantConfig,
    RopeConfig,
    RouterConfig,
    SamplingConfig,
    SectionConfig,
    ServeConfig,
    ShortConvConfig,
    TilesConfig,
    VisionConfig,
)

__all__ = [
    "AdvancedConfig",
    "AttentionConfig",
    "BlockScalesConfig",
    "BlockSettings",
    "Config",
    "EmbeddedConfig",
    "GPUConfig",
    "GatedDeltaConfig",
    "Group",
    "HTTPConfig",
    "ImageTextConfig",
    "JobConfig",
    "LightningConfig",
    "MLPConfig",
    "Mamba2Config",
    "MambaConfig",
    "ModelConfig",
    "NormConfig",
    "PassesConfig",
    "QuantConfig",
    "RopeConfig",
    "RouterConfig",
    "SamplingConfig",
    "SectionConfig",
    "ServeConfig",
    "ShortConvConfig",
    "TilesConfig",
    "VisionConfig",
]
