"""Load the configuration into the dataclasses of `atom.config.schema`.

    config = load(["checkpoint=/models/qwen3", "sampling.temperature=0"])
    config.model.attention.heads                     # plain dataclasses from here on

Every field is set here and never assigned again: `hydra` turns the overrides into plain values, `resolve` derives the
others and checks all.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, cast, get_args, get_origin

from omegaconf import DictConfig, OmegaConf, open_dict
from yaml import YAMLError

from atom.checkpoint import open_checkpoint
from atom.checkpoint.base import normalize_rope
from atom.config.aliases import respell
from atom.config.bounded_yaml import parse_yaml
from atom.config.checks import check
from atom.config.draft import check_fits
from atom.config.folders import CONF, check_config_dirs
from atom.config.hydra import attach, compose, resolve
from atom.config.hydra_errors import no_such, one_line_errors, unknown_key
from atom.config.model_files import Source, find_source
from atom.config.overrides import SECRET, is_for_sweep, rewrite, same_option
from atom.config.resolve import derive
from atom.config.schema import Config, EmbeddedConfig, GPUConfig, ModelConfig, ServeConfig
from atom.config.schema_keys import keys, types_of
from atom.config.several import check_served_names, naming_entry, split_models
from atom.config.spelling import ALIASES, HIDDEN, did_you_mean, is_secret, override, spelled
from atom.config.tied_head import settle_head
from atom.config.tool_formats import read_format
from atom.devices import find_device
from atom.errors import AtomError, CheckpointError, ConfigError, RequestError, UnsupportedError, one_line
from atom.sampling_params import GENERATION, SamplingParams, sampling_number

DEFAULT_GPU = "h200"  # of job=explain device=cuda on a machine without a GPU
ITEMS = {int: ((int,), "whole numbers"), float: ((int, float), "numbers"), str: ((str,), "texts")}  # of typed lists


def load(overrides: Sequence[str] = (), *, config_dirs: Sequence[str] = ()) -> Config:
    """Load the configuration of these overrides; `config_dirs` hold the user's files, besides conf/.

    Of serve.models, it is that of the first; `load_models` loads all. Of a hub id, only the description is downloaded.
    Raises ConfigError, CheckpointError, UnsupportedError, and
    RequestError for a sampling value.
    """
    check_config_dirs(config_dirs)
    with naming_recipes(overrides, config_dirs):
        first, *others = split_models(overrides, config_dirs)
    with naming_entry(first.text), naming_recipes(first.overrides, config_dirs):
        config = load_model(first.overrides, config_dirs)
    if config.serve.models and not first.text:
        raise ConfigError("serve.models is read from the command line and from recipes only; write serve.models=[…]")
    config = replace(config, other_models=[each.overrides for each in others])
    if config.model.eagle3 is not None:
        raise ConfigError(f"model={config.model.name} drafts for a model; name its checkpoint in serve.draft_model")
    return replace(config, draft=load_draft(config, config_dirs))


def load_models(config: Config) -> list[Config]:
    """The configurations of all models of serve.models, of which `load` has given the first."""
    configs = [config]
    for text, overrides in zip(config.serve.models[1:], config.other_models, strict=True):
        with naming_entry(text):
            own = load_model(overrides, config.config_dirs)
            configs.append(replace(own, draft=load_draft(own, config.config_dirs)))
    check_served_names(configs)
    return configs


def load_draft(config: Config, config_dirs: Sequence[str] = ()) -> ModelConfig | None:
    """The model of serve.draft_model, None without one; it computes in the dtypes of the model it drafts for."""
    serve, method = config.serve, config.serve.draft_method
    if serve.draft_model is None or method is None:
        return None
    same = {name: getattr(config, name) for name in ("dtype", "device", "trust_remote_code", "cache")}
    divided = {"parallel.tensor": config.parallel.tensor, "serve.kv_cache_dtype": serve.kv_cache_dtype}
    values = {"checkpoint": serve.draft_model, "model": method.model_file, **same, **divided}
    try:
        described = open_checkpoint(serve.draft_model, weights=False)
        described.close()
        if method.check_config is not None:
            method.check_config(serve.draft_model, described.config)
        draft = load_model([override(key, value) for key, value in values.items()], config_dirs).model
        check_fits(config.model, draft)
    except AtomError as error:
        error.args = (f"serve.draft_model: {error}",)
        raise
    return draft


def load_model(overrides: Sequence[str], config_dirs: Sequence[str]) -> Config:
    """Load the configuration without its draft model."""
    with one_line_errors(Config):
        source = find_source(overrides, config_dirs)
    with naming_model_file(source):
        return load_source(source, config_dirs)


def load_source(source: Source, config_dirs: Sequence[str]) -> Config:
    """Load the configuration of a source, without its draft model, and without a tower that is not supported.

    A tower that is asked for, by serve.images=true or by images, has to be.
    """
    with one_line_errors(Config):
        composed = compose(Config, source.overrides, config_dirs)
        check_mmproj(composed, source.hf)
        drop_vision(composed, source.hf)
        try:
            return derive_source(source, composed, config_dirs)
        except AtomError:
            if composed.model.get("vision") is None or composed.serve.images or composed.images:
                raise
        drop_vision(composed, {})
        return derive_source(source, composed, config_dirs)  # which raises what else is wrong


def derive_source(source: Source, composed: DictConfig, config_dirs: Sequence[str]) -> Config:
    """The configuration of what was composed."""
    with one_line_errors(Config):
        hf, sampling = normalize_rope(source.hf), sampling_defaults(source.generation, composed)
        config: Config = build(Config, resolve(composed, hf, sampling, source.file))
    if config.hf:
        raise ConfigError("hf is the checkpoint's config.json and cannot be set; set a field of model instead")
    if config.overrides or config.config_dirs:
        raise ConfigError("overrides is what the configuration is loaded from and cannot be set; set the fields")
    if config.other_models:
        raise ConfigError("other_models is read from serve.models and cannot be set; set that")
    if config.generation:
        raise ConfigError(
            "generation is the checkpoint's generation_config.json and cannot be set; set sampling's fields"
        )
    check_tool_calls(config)
    embedded = EmbeddedConfig(**source.embedded) if source.embedded else None
    described = None if config.load_dummy else source.described
    model = replace(config.model, embedded=embedded, usual=None)
    if "gguf_architecture" in hf:
        model = with_gguf_names(model)
    model = settle_head(model, described, source.overrides)
    config = replace(
        config, hf=hf, generation=sampling, overrides=source.overrides, config_dirs=list(config_dirs), model=model
    )
    return derive(config, source.names)


def with_gguf_names(model: ModelConfig) -> ModelConfig:
    """A model with the names that GGUF files have of its roles, and mmproj files of its tower's."""
    weights = model.weights | {role: name for role, name in model.gguf.weights.items() if role in model.weights}
    vision = model.vision
    if vision is not None:
        tower = {role: name for role, name in model.gguf.tower.items() if role in vision.weights}
        vision = replace(vision, weights=vision.weights | tower)
    return replace(model, weights=weights, vision=vision)


def check_mmproj(composed: DictConfig, hf: Mapping[str, Any]) -> None:
    """Raise ConfigError if an mmproj file is given that is not read; one next to a model may have any tower."""
    given, name = composed.mmproj, composed.model.name
    if given is None:
        return
    if composed.serve.images is False:
        raise ConfigError(f"serve.images=false does not read mmproj={given}; leave one of both out")
    known = OmegaConf.select(composed, "model.gguf.projector")
    found = hf["vision_config"]["projector_type"] if "gguf_architecture" in hf else None
    if found is None:
        raise ConfigError(f"mmproj={given} is of a checkpoint that is a .gguf file; name that, too")
    if found != known:
        reads = "reads no mmproj files" if known is None else f"reads those of {known}"
        raise ConfigError(f"mmproj={given} has a tower of {found}; model={name} {reads}")


def drop_vision(composed: DictConfig, hf: Mapping[str, Any]) -> None:
    """Leave out what encodes images if config.json has no fields of that, or those of another tower."""
    tower, types = hf.get("vision_config"), OmegaConf.select(composed, "model.vision.model_types")
    if "gguf_architecture" in hf:
        projector = OmegaConf.select(composed, "model.gguf.projector")
        is_known = tower is not None and tower["projector_type"] == projector is not None
    else:
        is_known = tower is not None and (not types or tower.get("model_type") in types)
    if not is_known:
        OmegaConf.update(composed, "model.vision", None)


@contextmanager
def naming_recipes(overrides: Sequence[str], config_dirs: Sequence[str]) -> Iterator[None]:
    """Let an error begin with the recipe that it comes from."""
    try:
        yield
    except (ConfigError, UnsupportedError) as error:
        for text in overrides:
            if text.lstrip("+").startswith("recipe=") and str(error) == fault_of(text, config_dirs):
                error.args = (f"recipe {text.partition('=')[2]}: {error}",)
        raise


@contextmanager
def naming_model_file(source: Source) -> Iterator[None]:
    """Let an error of a key begin with the user's model file that states it, unless an override or config.json does."""
    try:
        yield
    except (ConfigError, UnsupportedError) as error:
        keys = [text.lstrip("+").partition("=")[0] for text in source.overrides]
        named = re.match(r"model\.([\w.]*\w)", str(error))
        if named is None or any(f"{named[0]}.".startswith(f"{key}.") for key in keys if key != "model"):
            raise
        found = next(((file, value) for file in source.files if (value := file.states(named[1])) is not None), None)
        if found is None or found[0].is_shipped or re.search(r"\$\{(hf|same|stated):", str(found[1])):
            raise
        if choice := re.fullmatch(r"(.*)=(.*) is not supported \(supported: (.*)\)", str(error)):
            hint = did_you_mean(choice[2], choice[3].split(", "))
            fault = f"{choice[1]}={choice[2]}: there is no such choice{hint}; choices: {choice[3]}"
            raise ConfigError(f"{found[0].shown}: {fault}") from None
        error.args = (f"{found[0].shown}: {error}",)
        raise


def fault_of(recipe: str, config_dirs: Sequence[str]) -> str | None:
    """The fault of a recipe, whatever else is set."""
    try:
        load_settings([recipe], config_dirs)
    except AtomError as error:
        return str(error)
    return None


def load_settings(overrides: Sequence[str], config_dirs: Sequence[str] = ()) -> Config:
    """Load all that needs no checkpoint: everything but the model, which only has to compose.

    Choices of a sweep are left out. ConfigError and UnsupportedError name the key.
    """
    texts = [text for text in rewrite(overrides, config_dirs=config_dirs) if not is_for_sweep(text)]
    with one_line_errors(Config):
        composed = compose(Config, texts, config_dirs)
        with open_dict(composed):
            del composed["model"]
        config: Config = respell(build(Config, resolve(composed, {})))
    check(replace(config, model=cast(Any, None)))
    return config


def check_tool_calls(config: Config) -> None:
    """Check the formats of tool calls that are set."""
    if config.model.tool_calls is not None:
        read_format(config.model.tool_calls)
    if config.serve.http.tool_calls not in ("auto", "none", None):
        read_format(config.serve.http.tool_calls)


def sampling_defaults(generation: Mapping[str, Any], composed: DictConfig) -> dict[str, Any]:
    """The values of generation_config.json for fields of `sampling`; empty with sampling.defaults=none.

    CheckpointError for a value that its field does not take.
    """
    if composed.sampling.defaults == "none":
        return {}
    where = f"{composed.checkpoint or 'the embedded checkpoint'}: generation_config.json"
    way_out = "mend it, or sampling.defaults=none leaves out what it says of sampling"
    do_sample = generation.get("do_sample")
    if not isinstance(do_sample, bool | None):
        raise CheckpointError(f"{where}: do_sample={do_sample!r:.80} is not true or false; {way_out}")
    kinds, values = {each.name: each for each in fields(SamplingParams)}, {}
    for key, name in GENERATION.items():
        if (value := generation.get(key)) is None:
            continue
        try:
            values[name] = sampling_number(key, value, str(kinds[name].type), kinds[name].metadata)
        except RequestError as error:
            raise CheckpointError(f"{where}: {error}; {way_out}") from None
    return values | ({"temperature": 0.0} if do_sample is False else {})


def gpu_of(config: Config) -> str | None:
    """The GPU that job=explain is about: job.gpu, or DEFAULT_GPU for device=cuda on a machine without one."""
    is_elsewhere = config.job.kind == "explain" and config.device == "cuda" and find_device() == "cpu"
    return config.job.gpu or (DEFAULT_GPU if is_elsewhere else None)


def load_gpu(name: str) -> GPUConfig:
    """Load the GPU of `job.gpu`: a YAML file, or a name in conf/gpu. ConfigError says what is wrong with it."""
    candidates = [Path(name).expanduser(), CONF / "gpu" / f"{name}.yaml"]
    path = next((path for path in candidates if path.is_file()), None)
    if path is None:
        names = sorted(file.stem for file in (CONF / "gpu").glob("*.yaml"))
        raise ConfigError(f"job.gpu={name}: {no_such('file and no such GPU', name, names, 'GPUs: ')}")
    try:
        with one_line_errors(GPUConfig):
            given, typed = parse_yaml(path.read_text("utf-8")) or {}, OmegaConf.structured(GPUConfig)
            if not isinstance(given, dict):
                raise ConfigError(f"it is a list, not {', '.join(each.name for each in fields(GPUConfig))}")
            for key, value in given.items():
                typed[key] = value
            gpu = cast(GPUConfig, OmegaConf.to_object(typed))
        check(gpu)
    except (ConfigError, OSError, UnicodeDecodeError, YAMLError) as error:
        raise ConfigError(f"{path}: {one_line(error)}") from None
    return gpu


def show(
    overrides: Sequence[str] = (),
    *,
    config_dirs: Sequence[str] = (),
    package: str | None = None,
    is_resolved: bool = False,
) -> str:
    """The composed configuration, or the part at a dotted key, as YAML; resolved, with the checkpoint's values.

    API keys are hidden, unless they are in a file.
    """
    with one_line_errors(Config):
        source = find_source(overrides, config_dirs)
        composed = compose(Config, source.overrides, config_dirs)
        with open_dict(composed):
            del composed["hf"], composed["generation"], composed["overrides"]
            check_names(Config, OmegaConf.to_container(composed))
            if is_secret(OmegaConf.select(composed, SECRET)):
                OmegaConf.update(composed, SECRET, HIDDEN)
        drop_vision(composed, source.hf)
        attach(composed, normalize_rope(source.hf), sampling_defaults(source.generation, composed), source.file)
        part = OmegaConf.select(composed, package) if package else composed
        if part is None and package not in keys(Config):
            raise unknown_key(str(package), Config)
        return OmegaConf.to_yaml(part, resolve=is_resolved) if OmegaConf.is_config(part) else f"{part}\n"


def engine_overrides(model: str | os.PathLike[str] | None, values: Mapping[str, Any]) -> list[str]:
    """The overrides of an engine's keyword arguments: serve's fields and plain ones by name, others by dotted key."""
    serve = {each.name for each in fields(ServeConfig)} | {key.removeprefix("serve.") for key in ALIASES}
    for key in ALIASES:
        twice = [name for name in (key.removeprefix("serve."), ALIASES[key].removeprefix("serve.")) if name in values]
        if len(twice) > 1:
            raise same_option(*twice)
    checkpoint = [] if model is None else [override("checkpoint", model)]
    return checkpoint + [override(f"serve.{name}" if name in serve else name, value) for name, value in values.items()]


def check_names(kind: Any, value: Any, at: str = "") -> None:
    """Raise ConfigError if a name was added, by +name=…, that no dataclass of the type `kind` has."""
    if not is_dataclass(kind) or not isinstance(value, Mapping):
        return
    kinds, prefix = types_of(kind), f"{at}." if at else ""
    for name, item in value.items():
        if name not in kinds:
            raise unknown_key(f"{prefix}{name}", Config)
        check_names(kinds[name], item, f"{prefix}{name}")


def build(kind: Any, value: Any, at: str = "") -> Any:
    """Build dataclasses of the type `kind` from nested dicts and lists."""
    if get_origin(kind) is UnionType:
        return None if value is None else build(get_args(kind)[0], value, at)
    if get_origin(kind) is list and value != "???":
        (inner,) = get_args(kind)
        types, named = ITEMS.get(inner, ((object,), "entries"))
        if not isinstance(value, list) or not all(isinstance(item, types) for item in value):
            raise ConfigError(f"{at}={spelled(value)[:100]} is not a list of {named}")
        return [build(inner, item, f"{at}.{index}") for index, item in enumerate(value)]
    if get_origin(kind) is dict and isinstance(value, Mapping):
        return {name: build(get_args(kind)[1], item, f"{at}.{name}") for name, item in value.items()}
    if not is_dataclass(kind):
        if value == "???" and kind is not Any:
            raise ConfigError(f"{at}=??? has no value; set it")
        return value
    kinds, prefix = types_of(kind), f"{at}." if at else ""
    for name in value:
        if name not in kinds:
            raise unknown_key(f"{prefix}{name}", Config)
    made: Any = kind
    return made(**{name: build(kinds[name], item, f"{prefix}{name}") for name, item in value.items()})
