"""Check the fields of a vision tower.

serve.images = choose_images(config)
vision = derive_vision(config)
tower_modules(vision)                   # {"visual"}: the modules of a checkpoint that have its tensors
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace

from atom.config.resolve_model import check_assumed
from atom.config.schema import AttentionConfig, Config, MergerConfig, ModelConfig, VisionConfig
from atom.errors import ConfigError, UnsupportedError

DOMAIN = re.compile(r"(\*\.)?[^\s/:*@\[\]]+|[0-9a-fA-F:.]+")  # or an address
LAYER_TYPES = ("full_attention", "sliding_attention")
SERVING = ("serve", "batch", "compile")  # jobs that serve, and the one that prepares their start
RESAMPLE = {"lanczos": 1, "bilinear": 2, "bicubic": 3}  # Pillow's numbers, which files of processors have


def choose_images(config: Config) -> bool:
    """Whether images are read: as asked, else by jobs that serve, with Pillow, if the model has a tower.

    ConfigError if they are asked for of stages or data groups, or given and not read, or to be fetched from no server.
    """
    asked, parallel = config.serve.images, config.parallel
    if asked is False and config.images:
        raise ConfigError("serve.images=false reads none of images; leave one of both out")
    if (url := next((each for each in config.serve.image_domains if not DOMAIN.fullmatch(each)), None)) is not None:
        raise ConfigError(f"serve.image_domains: {url!r} is no domain; write it as images.example.org or *.example.org")
    if asked is None and config.images:
        asked = True
    divided = next((name for name in ("pipeline", "data") if getattr(parallel, name) > 1), None)
    if asked and divided is not None:
        given = f"parallel.{divided}={getattr(parallel, divided)}"
        raise ConfigError(f"serve.images=true does not work with {given}; divide the model by parallel.tensor")
    if asked is not None:
        return asked
    return config.job.kind in SERVING and config.model.vision is not None and divided is None and has_pillow()


def has_pillow() -> bool:
    return importlib.util.find_spec("PIL") is not None


def derive_vision(config: Config) -> VisionConfig | None:
    """Check a model's tower, and replace null. `serve.images` is not looked at."""
    vision, at = config.model.vision, "model.vision"
    if vision is None:
        tower, given = config.hf.get("vision_config"), "serve.images=true" if config.serve.images else "images"
        kind = f"model_type={tower['model_type']}" if tower and tower.get("model_type") else "them"
        why = f"model={config.model.name} has no encoder of {kind}" if tower else "it reads no images"
        raise ConfigError(f"{given}: {config.checkpoint or 'the embedded checkpoint'}: {why}; leave it out")
    for name in ("hidden", "layers", "width"):
        if not getattr(vision, name):
            raise ConfigError(f"{at}.{name}=0: a tower has more; set it")
    if vision.hidden % vision.heads or (vision.rope_theta and vision.hidden // vision.heads % 4):
        into = "heads of a multiple of 4 dims" if vision.rope_theta else "heads"
        raise UnsupportedError(f"{at}.hidden={vision.hidden} does not divide into {into}; heads={vision.heads}")
    if not len(vision.mean) == len(vision.std) == vision.channels or not all(vision.std):
        raise ConfigError(f"{at}: mean and std have a number for each of its {vision.channels} channels, std none of 0")
    if not all(0 <= layer < vision.layers for layer in vision.deepstack):
        raise ConfigError(f"{at}.deepstack={vision.deepstack}: the tower has {vision.layers} layers")
    if len(vision.deepstack) > config.model.layers:
        raise ConfigError(f"{at}.deepstack has {len(vision.deepstack)} layers, the body only {config.model.layers}")
    if vision.out not in (None, config.model.hidden):
        raise UnsupportedError(f"{at}.out={vision.out}: hidden states of the body have {config.model.hidden} numbers")
    for kind in vision.layer_types or ():
        if kind not in LAYER_TYPES:
            raise UnsupportedError(f"{at}.layer_types: {kind} is not supported (supported: {', '.join(LAYER_TYPES)})")
    if vision.layer_types is not None and len(vision.layer_types) < vision.layers:
        raise ConfigError(f"{at}.layer_types names only {len(vision.layer_types)} layers, it has {vision.layers}")
    if vision.window is not None and vision.class_token:
        raise UnsupportedError(f"{at}.window={vision.window}: windows have no class token; set class_token=false")
    if ("sliding_attention" in (vision.layer_types or ())) != (vision.window is not None):
        raise ConfigError(f"{at}.window is of layers of type sliding_attention in {at}.layer_types; set both, or none")
    if vision.pad and vision.max_edge is None:
        raise ConfigError(f"{at}.pad=true is of images whose sides are reduced to {at}.max_edge; set that, too")
    check_merger(vision.merger)
    check_assumed(config, vision.assumes)
    check_bidirectional(config.model, vision)
    check_video(config.model, vision)
    check_sections(config)
    check_tiles(config, vision)
    check_processor(config, vision)
    return replace(vision, out=config.model.hidden)


def check_merger(merger: MergerConfig) -> None:
    """Check that no field is of something that the merger has not."""
    at = "model.vision.merger"
    if merger.pool != "mean" and (merger.scale is not None or merger.standardize):
        raise ConfigError(f"{at}.pool={merger.pool}: scale and standardize are of pool=mean; leave them out")
    if merger.norm == "none" and merger.norm_kind != "tower":
        raise ConfigError(f"{at}.norm_kind={merger.norm_kind}: the merger has no norm; leave it out")
    if merger.fold == "none" and merger.fold_bias:
        raise ConfigError(f"{at}.fold_bias=true: no linear folds a square; set {at}.fold")


def check_bidirectional(model: ModelConfig, vision: VisionConfig) -> None:
    """Check that the layers in which an image's tokens see all of it have an attention that can do so."""
    for kind in vision.bidirectional:
        layers = [layer for layer in range(model.layers) if model.layer_type(layer) == kind]
        if not layers:
            raise ConfigError(f"model.vision.bidirectional: the body has no layers of type {kind}")
        names = {name for layer in layers for name in model.branches_of(layer)}
        settings = (model.attention if name == "attention" else model.blocks[name].settings for name in names - {"mlp"})
        for each in settings:
            if isinstance(each, AttentionConfig) and (each.kind != "gqa" or each.alibi != "none"):
                raise UnsupportedError(
                    f"model.vision.bidirectional: {kind} has attention of kind {each.kind}, alibi={each.alibi} "
                    "(supported: gqa, without)"
                )


def check_video(model: ModelConfig, vision: VisionConfig) -> None:
    """Check the text of a video's images, and that the body has what their times are written in."""
    if vision.video is None:
        return
    time, rate = vision.video.time, vision.video.tokens_per_second
    if time != "text" and not any(attention.rope.sections for attention in model.attentions):
        raise ConfigError(f"model.vision.video.time={time}: the body's ropes have no sections, so no positions in time")
    if time != "text" and vision.video.text != "{rows}":
        raise ConfigError(f"model.vision.video.text={vision.video.text}: with time={time} it is {{rows}}")
    if time != "seconds" and rate != 1:
        raise ConfigError(f"model.vision.video.tokens_per_second={rate} is of time=seconds; leave it out")
    try:
        has_rows = vision.video.text.format(rows="\0", seconds=0.0).count("\0") == 1
    except (ValueError, LookupError):
        has_rows = False
    if not has_rows:
        text = vision.video.text
        raise ConfigError(f"model.vision.video.text={text}: write {{rows}} once, and maybe {{seconds:.1f}}")


def check_sections(config: Config) -> None:
    """Check that the sections of the body's ropes are of all their frequencies, and of single tokens."""
    for attention in config.model.attentions:
        rope = attention.rope
        rotated = rope.dims or int((attention.head_dim or config.model.hidden // attention.heads) * rope.partial)
        if rope.sections is not None and sum(rope.sections) != rotated // 2:
            raise UnsupportedError(
                f"model.attention.rope.sections={rope.sections} are not of {rotated // 2} frequencies"
            )
        if rope.sections is not None and attention.index is not None and attention.index.every > 1:
            every = f"model.attention.index.every={attention.index.every}"
            raise UnsupportedError(f"{every}: runs have one position, images several; set model.vision=null")


def check_tiles(config: Config, vision: VisionConfig) -> None:
    """Check that a tile has whole rows, and the positions that the tower has learned."""
    tiles, at = vision.tiles, "model.vision.tiles"
    num = tiles.side // vision.patch  # patches along a side
    if tiles.fit == "none":
        return
    if not num or num % vision.merger.side:
        squares = f"no squares of {vision.merger.side}"
        raise UnsupportedError(f"{at}.side={tiles.side}: {num} patches make {squares}")
    if vision.table_side not in (None, num) and vision.table_mode == "bilinear":
        raise UnsupportedError(f"{at}.side={tiles.side}: {num} patches, the tower has learned {vision.table_side}")
    size = config.hf.get("image_processor", {}).get("size")
    known = {"longest_edge": tiles.edge} if tiles.fit == "edge" else {"height": tiles.side, "width": tiles.side}
    if size not in (None, known):
        raise UnsupportedError(
            f"{config.checkpoint}: size={size} of its image processor is not supported (supported: {known})"
        )


def check_processor(config: Config, vision: VisionConfig) -> None:
    """Check that the checkpoint's image and video processors do what ours do, with the tower's numbers."""
    ours = {
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": vision.normalizes == "processor",
        "do_pan_and_scan": False,
        "rescale_factor": 1 / 255,
        "resample": RESAMPLE[vision.resample],
        "patch_size": vision.patch,
        "encoder_patch_size": vision.patch,
        "temporal_patch_size": vision.frames,
        "merge_size": vision.merger.side,
        "pooling_kernel_size": vision.merger.side,
        "downsample_factor": vision.merger.side,
        "use_thumbnail": True,
        "spatial_merge_size": vision.merger.side,
    }
    of_video = ours | {
        "image_mean": vision.mean, "image_std": vision.std,  # one op normalizes pixels of both
        "cap_pixels_per_frame": False,
    }  # fmt: skip
    stored = config.hf.get("image_processor", {}) | config.hf.get("processor", {})  # these are handed to the former
    video = config.hf.get("video_processor", {}) if vision.video is not None else {}
    for kind, given, known in (("image", stored, ours), ("video", video, of_video)):
        for key, value in known.items():
            if (found := given.get(key)) not in (None, value, {"height": value, "width": value}):
                at = f"{config.checkpoint}: {key}={found} of its {kind} processor"
                raise UnsupportedError(f"{at} is not supported (supported: {value})")
    edge = "max_height" if vision.pad else "longest_edge"
    if vision.max_edge is not None and edge not in (size := stored.get("size") or {edge: 0}):
        at = f"{config.checkpoint}: size={size} of its image processor"
        raise UnsupportedError(f"{at} is not supported (supported: {edge})")


def tower_modules(vision: VisionConfig | None) -> frozenset[str]:
    """The outermost modules that have the tower's tensors."""
    names = vision.weights.values() if vision is not None else ()
    return frozenset(name.partition(".")[0] for name in names)
