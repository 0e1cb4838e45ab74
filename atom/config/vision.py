"""Check the fields of a vision tower; make a model of its layers.

model.vision = derive_vision(config)
tower = tower_of(model.vision)          # a ModelConfig, whose layers the frontend writes as it does the body's
"""

from __future__ import annotations

from dataclasses import replace

from atom.config.resolve_model import derive_attention, derive_mlp
from atom.config.schema import Config, ModelConfig, VisionConfig
from atom.errors import ConfigError, UnsupportedError

LAYER_TYPES = ("full_attention", "sliding_attention")
WITHOUT = {"gate": "none", "softcap": None, "sinks": False, "alibi": "none"}  # fields of attention, their only values


def derive_vision(config: Config) -> VisionConfig | None:
    """Check a model's tower, and replace null; as it is if no images are read."""
    vision, at = config.model.vision, "model.vision"
    if not config.serve.images:
        return vision
    if vision is None:
        why = f"model={config.model.name} has no encoder of them" if config.hf.get("vision_config") else "it reads none"
        raise ConfigError(f"serve.images=true: {config.checkpoint or 'the embedded checkpoint'}: {why}; leave it out")
    for name in ("hidden", "layers"):
        if not getattr(vision, name):
            raise ConfigError(f"{at}.{name}=0: the tower has none; set 1 at least")
    if not len(vision.mean) == len(vision.std) == vision.channels:
        raise ConfigError(f"{at}: mean and std have a number for each of its {vision.channels} channels")
    if (wrong := [layer for layer in vision.deepstack if not 0 <= layer < vision.layers]) or (
        len(vision.deepstack) > config.model.layers
    ):
        raise ConfigError(f"{at}.deepstack: layers {wrong or vision.deepstack} are not all there")
    if vision.out not in (None, config.model.hidden):
        raise UnsupportedError(f"{at}.out={vision.out}: rows of the body have {config.model.hidden} numbers")
    for kind in vision.layer_types or ():
        if kind not in LAYER_TYPES:
            raise UnsupportedError(f"{at}.layer_types: {kind} is not supported (supported: {', '.join(LAYER_TYPES)})")
    for name, value in WITHOUT.items():
        if getattr(vision.attention, name) != value or vision.attention.kind != "gqa":
            raise UnsupportedError(f"{at}.attention.{name} is not supported: patches have plain attention")
    own = replace(config, model=tower_of(vision))
    attention = derive_attention(own, vision.attention, f"{at}.attention", max_model_len=1)
    if attention.kv_heads != attention.heads:
        raise UnsupportedError(f"{at}.attention.kv_heads={attention.kv_heads}: patches have as many as heads")
    check_sections(config)
    return replace(
        vision,
        attention=attention,
        mlp=[derive_mlp(mlp, f"{at}.mlp.{index}", vision.layers) for index, mlp in enumerate(vision.mlp)],
        out=config.model.hidden,
    )


def check_sections(config: Config) -> None:
    """Check that the sections of the body's ropes are of all their frequencies."""
    for attention in config.model.attentions:
        rope = attention.rope
        rotated = rope.dims or int((attention.head_dim or config.model.hidden // attention.heads) * rope.partial)
        if rope.sections is not None and sum(rope.sections) != rotated // 2:
            raise ConfigError(f"model.attention.rope.sections={rope.sections} are not of {rotated // 2} frequencies")


def tower_of(vision: VisionConfig) -> ModelConfig:
    """A model of the tower's layers, which has no embedding, head or cache."""
    return ModelConfig(
        name="vision",
        hidden=vision.hidden,
        layers=vision.layers,
        layer_types=vision.layer_types,
        norm=vision.norm,
        attention=vision.attention,
        mlp=vision.mlp,
        weights=vision.weights,
        fmt=None,
        max_position=1,
    )


def tower_modules(vision: VisionConfig | None) -> frozenset[str]:
    """The outermost modules that have the tower's tensors."""
    names = vision.weights.values() if vision is not None else ()
    return frozenset(name.partition(".")[0] for name in names)
