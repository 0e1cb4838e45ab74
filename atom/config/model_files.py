"""Find the checkpoint that overrides name, and the model file that describes it.

    source = find_source(["checkpoint=/models/qwen3"])     # overrides with model='qwen3', the checkpoint's config.json

The files of the group `model` come from conf/, config dirs, hydra.searchpath, and the packages of plugins.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigSource
from omegaconf import OmegaConf

from atom.checkpoint import Checkpoint, open_checkpoint
from atom.checkpoint.folder import with_inner_configs
from atom.config.bounded_yaml import parse_yaml
from atom.config.folders import CONF
from atom.config.overrides import parse, plain, rewrite
from atom.config.spelling import override
from atom.config.unsupported import missing_block
from atom.errors import CheckpointError, ConfigError, UnreachableError, UnsupportedError, one_line
from atom.plugins import package_folders

SEARCHPATH = "hydra.searchpath="


class ModelFile(NamedTuple):
    path: Path
    spec: dict[str, Any]  # as written, without inherited values

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def shown(self) -> str:
        """The path that errors name."""
        return str(self.path.relative_to(CONF.parent) if self.is_shipped else self.path)

    @property
    def is_shipped(self) -> bool:
        return self.path.is_relative_to(CONF)

    def states(self, key: str) -> Any:
        """The file's own value of a dotted key of model; None if it has none."""
        value: Any = self.spec
        for part in key.split("."):
            if isinstance(value, list):
                value = value[int(part)] if part.isdigit() and int(part) < len(value) else None
            else:
                value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def read_config(self, key: str) -> dict[str, Any]:
        """config.json of the model file's own checkpoint, `embedded`, or `usual`."""
        entry = self.spec[key]
        if not isinstance(entry, dict) or not isinstance(entry.get("config"), str):
            raise ConfigError(f"{self.path}: {key}.config has no value; name the config.json next to this file")
        config: dict[str, Any] = json.loads((self.path.parent / entry["config"]).read_text("utf-8"))
        return config


class Source(NamedTuple):
    overrides: list[str]  # with the model file named
    hf: dict[str, Any]  # the checkpoint's config.json
    embedded: dict[str, Any] | None  # the model file's own checkpoint, if none is given
    generation: dict[str, Any]  # the checkpoint's generation_config.json
    names: frozenset[str] = frozenset()  # of the checkpoint's tensors, if they matter and are known
    files: tuple[ModelFile, ...] = ()  # the model file, and those that it inherits from
    described: Checkpoint | None = None  # closed

    @property
    def file(self) -> str:
        """The model file's path as errors name it."""
        return self.files[0].shown if self.files else ""


def find_source(overrides: Sequence[str] = (), config_dirs: Sequence[str] = ()) -> Source:
    """Find the checkpoint and the model file of these overrides; of a hub id, only the description is downloaded."""
    texts = rewrite(overrides, config_dirs=config_dirs)
    parsed = [parse(text) for text in texts]
    by_key = {each.key_or_group: each for each in parsed if each.package is None}
    for text, each in zip(texts, parsed, strict=True):
        if each.is_sweep_override():
            raise ConfigError(f"'{text}' is a sweep: add -m, or quote the value")
        if each.key_or_group.split(".")[:2] in (["model", "embedded"], ["model", "usual"]):
            raise ConfigError(f"{each.key_or_group}: only a model file brings a checkpoint; set checkpoint instead")
        if each.key_or_group.split(".")[0] == "draft":
            raise ConfigError("draft is the model of serve.draft_model and cannot be set; set that")

    def value(key: str, default: Any = None) -> Any:
        return plain(by_key[key]) if key in by_key else default

    files = model_files(search_path_of(texts, config_dirs))
    name, checkpoint, embedded, described = value("model", "auto"), value("checkpoint"), None, None
    names: frozenset[str] = frozenset()
    usual = usual_file(files, name) if checkpoint is None else None
    kept = [text for text, each in zip(texts, parsed, strict=True) if each is not by_key.get("model")]
    if usual is not None:
        checkpoint = usual.spec["usual"]["checkpoint"]
        kept.append(override("checkpoint", checkpoint))
    if checkpoint is None:
        file = embedded_file(files, name)
        name = file.name if name == "auto" else name
        hf, embedded = file.read_config("embedded"), file.spec["embedded"]
        generation = embedded.get("generation") or {}
    else:
        try:
            asked = {"mmproj": value("mmproj"), "images": value("serve.images") is not False}
            described = open_checkpoint(str(checkpoint), revision=value("revision"), weights=False, **asked)
        except UnreachableError:
            if usual is None or usual.spec["usual"].get("config") is None or value("revision") is not None:
                raise
            hf, generation = with_inner_configs(usual.read_config("usual")), {}  # job=explain needs no more
        else:
            hf, generation = described.config, described.generation_config
            name = choose_model(hf, files, str(checkpoint)) if name == "auto" else name
            hf = hf | (ids_of_tokens(described, with_inherited(name, files)) if isinstance(name, str) else {})
            has_options = any(file.name == name and "eagle3" in file.spec for file in files)  # tensors may be missing
            names = frozenset(described.names()) if has_options or hf.get("quantization_config") else names
            described.close()
    if not isinstance(name, str):
        raise ConfigError(f"model={name}: it takes the name of one file in conf/model")
    kept += [override("model", name), override("model.name", name)]
    return Source(kept, hf, embedded, generation, names, tuple(with_inherited(name, files)), described)


def ids_of_tokens(described: Checkpoint, files: Iterable[ModelFile]) -> dict[str, int]:
    """The entries of config.json for the tokens of images, which a GGUF file has among its tokens."""
    texts: dict[str, str] = next((value for file in files if (value := file.states("gguf.tokens"))), {})
    ids = {key: described.token_id(text) for key, text in texts.items()}
    return {key: token for key, token in ids.items() if token is not None}


def with_inherited(name: str, files: Sequence[ModelFile]) -> Iterator[ModelFile]:
    """The file of a name, then those that its defaults name, and theirs."""
    by_name, waiting = {file.name: file for file in files}, [name]
    while waiting:
        if file := by_name.pop(waiting.pop(0), None):
            yield file
            defaults = file.spec.get("defaults")
            waiting += [each for each in (defaults if isinstance(defaults, list) else ()) if isinstance(each, str)]


def search_path_of(overrides: Iterable[str], config_dirs: Sequence[str] = ()) -> list[str]:
    """The search path after conf/ and the paths of plugins: the config dirs, then hydra.searchpath, then packages."""
    given = [text for text in overrides if text.startswith(SEARCHPATH)]
    paths: Any = parse(given[-1]).value() if given else []
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        raise ConfigError(f"{given[-1]}: it takes a list of folders, as in hydra.searchpath=[file://FOLDER]")
    folders = ([Path(folder).absolute() for folder in config_dirs], package_folders())
    of_dirs, of_packages = ([f"file://{folder}" for folder in each] for each in folders)
    return [*of_dirs, *paths, *of_packages]


def make_search_path(paths: Sequence[str] = ()) -> ConfigSearchPath:
    """Make Hydra's search path: conf/, the paths of plugins, these paths."""
    search_path: ConfigSearchPath = create_config_search_path(str(CONF))
    for path in paths:
        search_path.prepend("command-line", path, SearchPathQuery("schema", None))
    return search_path


def model_files(paths: Sequence[str] = ()) -> list[ModelFile]:
    """The files of the group `model` in Hydra's search path; of two with one name the first counts, as for Hydra."""
    files: dict[str, ModelFile] = {}
    for source in ConfigRepository(make_search_path(paths)).get_sources():
        for file in read_files(source):
            files.setdefault(file.name, file)
    return list(files.values())


def read_files(source: ConfigSource) -> Iterator[ModelFile]:
    """Read the model files of one source: a folder, or another kind of Hydra or its plugins."""
    if source.scheme() != "file":
        for name in source.list("model", ObjectType.CONFIG) if source.is_group("model") else ():
            spec: Any = OmegaConf.to_container(source.load_config(f"model/{name}").config, resolve=False)
            yield ModelFile(Path(f"{source.scheme()}://{source.path}", "model", f"{name}.yaml"), spec)
        return
    for path in sorted(Path(source.path, "model").glob("*.yaml")):
        try:
            spec = parse_once(path.read_text("utf-8")) or {}
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"{path}: {one_line(error)}") from None
        if not isinstance(spec, dict):
            raise ConfigError(f"{path}: a model file holds the fields of model, not {type(spec).__name__}")
        yield ModelFile(path, spec)


@functools.lru_cache(256)
def parse_once(text: str) -> Any:
    """The value of a YAML text; every load reads all model files, which are the same ones nearly always."""
    return parse_yaml(text)


SHARED = "ForConditionalGeneration"  # ends the architectures whose text may be of one family or another


def embedded_file(files: Sequence[ModelFile], name: str = "auto") -> ModelFile:
    """The model file with its own checkpoint: the named one, else the only one."""
    candidates = [file for file in files if file.spec.get("embedded")]
    candidates = [file for file in candidates if file.name == name] or candidates
    if len(candidates) != 1:
        names = ", ".join(file.name for file in candidates)
        raise ConfigError(f"no checkpoint is given; model= can bring one: {names}")
    return candidates[0]


def usual_file(files: Sequence[ModelFile], name: str) -> ModelFile | None:
    """The model file of this name, if it names its usual checkpoint."""
    return next((file for file in files if file.name == name and file.spec.get("usual")), None)


def choose_model(hf: Mapping[str, Any], files: Sequence[ModelFile], checkpoint: str) -> str:
    """Choose the model file for `auto`: by architecture, then by model_type; a GGUF has names of its own."""
    automatic = [file for file in files if file.spec.get("auto", True)]
    is_gguf = "gguf_architecture" in hf
    if is_gguf:
        key, names = "gguf_architecture", [name for name in [hf["gguf_architecture"]] if name is not None]
        known = [((file.spec.get("gguf") or {}).get("architecture"), file) for file in automatic]
    else:
        key, names = "architectures", hf.get("architectures") or []
        known = [(name, file) for file in automatic for name in file.spec.get("architectures") or ()]
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        found = f"{key}={json.dumps(hf[key])[:100]} in its config.json"
        what = "name" if is_gguf else "list of names"
        raise CheckpointError(f"{checkpoint}: {found} is not a {what}; mend it, or choose with model=NAME")
    matching = {file.name: file for name, file in known if name in names}
    shared = not is_gguf and any(name.endswith(SHARED) for name in names)
    if matching and shared:
        matching = taking_text(matching, hf.get("model_type"), f"{checkpoint} has the architecture {', '.join(names)}")
    if not matching:
        raise unknown_architecture(checkpoint, names, {name for name, _ in known if name})
    if is_gguf:
        return next(iter(with_tower(matching, hf)))
    if len(matching) == 1:
        return next(iter(matching))
    exact = [name for name, file in matching.items() if hf.get("model_type") in (file.spec.get("model_types") or ())]
    exact = exact or [name for name, file in matching.items() if not file.spec.get("model_types")]
    if len(exact) != 1:
        both = f"{' and '.join(exact or matching)} list the architecture {', '.join(names)}"
        raise ConfigError(f"{checkpoint}: {both}; choose with model=NAME")
    return exact[0]


def with_tower(matching: Mapping[str, ModelFile], hf: Mapping[str, Any]) -> list[str]:
    """The names of model files of one GGUF architecture, first those of the tower that the checkpoint has."""
    tower = (hf.get("vision_config") or {}).get("projector_type")
    projectors = {name: file.spec["gguf"].get("projector") for name, file in matching.items()}
    return sorted(matching, key=lambda name: (projectors[name] != tower, projectors[name] is not None))


def unknown_architecture(checkpoint: str, names: Sequence[str], known: Collection[str]) -> UnsupportedError:
    """The error of a checkpoint whose architecture no model file lists: what is missing, or where to begin."""
    for name in names:
        if missing := missing_block(name):
            needs = f"{name} needs {missing}, which atom does not have"
            return UnsupportedError(f"{checkpoint}: {needs}; docs/models.md lists what runs, job=port drafts the rest")
    found = f"the architecture {', '.join(names)}" if names else "no architecture in its config.json"
    whole = {re.sub("Model$", "ForCausalLM", name) for name in names} & set(known)
    if whole:
        found += f", which is a {', '.join(whole)} without its head: save it with AutoModelForCausalLM"
    elif near := nearest_architectures(names, known):
        found += f"; the nearest known ones are {', '.join(near)}"
    ways = "job=port drafts a YAML file for another (docs/port.md), model=NAME takes a file as it is"
    return UnsupportedError(f"{checkpoint} has {found}; docs/models.md lists all {len(known)}, {ways}")


def taking_text(matching: Mapping[str, ModelFile], model_type: Any, found: str) -> dict[str, ModelFile]:
    """Of the files for a model that also reads images those that take its text."""
    types = {name: file.spec.get("model_types") or () for name, file in matching.items()}
    taking = {name: file for name, file in matching.items() if not types[name] or model_type in types[name]}
    if not taking:
        known = ", ".join(sorted({each for of_file in types.values() for each in of_file}))
        raise UnsupportedError(
            f"{found} with text of model_type {json.dumps(model_type)} (supported: {known}); "
            "job=port drafts a YAML file for another (docs/port.md)"
        )
    return taking


def nearest_architectures(names: Iterable[str], known: Iterable[str]) -> list[str]:
    """At most three known architectures whose names are like one of these, the nearest first."""
    stems = {re.sub(r"For[A-Z]\w+$", "", name).lower(): name for name in sorted(known)}
    near = [difflib.get_close_matches(re.sub(r"For[A-Z]\w+$", "", name).lower(), stems, 3, 0.7) for name in names]
    return list(dict.fromkeys(stems[stem] for each in near for stem in each))[:3]
