"""Choose the model file, and compose conf/ and overrides with Hydra.

    source = find_source(["checkpoint=/models/qwen3"])     # overrides with model='qwen3', the checkpoint's config.json
    with one_line_errors(Config):
        composed = compose(Config, source.overrides)       # a DictConfig with unresolved `${hf:…}`
        values = resolve(composed, source.hf)              # dicts and lists

The schema is handed in: this module knows no field but those that name a source.
"""

from __future__ import annotations

import copy
import difflib
import functools
import json
import operator
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import hydra
import yaml
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigSource
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from atom.checkpoint import open_checkpoint
from atom.config.folders import CONF
from atom.config.overrides import no_model, parse, plain, rewrite
from atom.config.schema_keys import inner_blocks, keys, plain_fields
from atom.config.spelling import did_you_mean, override
from atom.config.words import may_be_checkpoint
from atom.errors import AtomError, CheckpointError, ConfigError, UnsupportedError, one_line
from atom.plugins import package_folders

SEARCHPATH = "hydra.searchpath="
PLUGINS = {  # of Hydra, which run sweeps here: config group -> choice -> the package that brings it
    "hydra/launcher": {
        "joblib": "hydra-joblib-launcher",
        "submitit_local": "hydra-submitit-launcher",
        "submitit_slurm": "hydra-submitit-launcher",
    },
    "hydra/sweeper": {"optuna": "hydra-optuna-sweeper"},
}
COMPOSING = threading.Lock()  # Hydra composes through a singleton, and a copy unties the original for a moment


class ModelFile(NamedTuple):
    path: Path
    spec: dict[str, Any]  # as written, without inherited values

    @property
    def name(self) -> str:
        return self.path.stem

    def embedded_config(self) -> dict[str, Any]:
        """config.json of the model file's own checkpoint."""
        stated = self.spec["embedded"]
        if not isinstance(stated, dict) or not isinstance(stated.get("config"), str):
            raise ConfigError(f"{self.path}: embedded.config has no value; name the config.json beside this file")
        config: dict[str, Any] = json.loads((self.path.parent / stated["config"]).read_text("utf-8"))
        return config


class Source(NamedTuple):
    overrides: list[str]  # with the model file named
    hf: dict[str, Any]  # the checkpoint's config.json
    embedded: dict[str, Any] | None  # the model file's own checkpoint, where none is given
    generation: dict[str, Any]  # the checkpoint's generation_config.json
    names: frozenset[str] = frozenset()  # of the checkpoint's tensors, where they matter and are known


def find_source(overrides: Sequence[str] = (), config_dirs: Sequence[str] = ()) -> Source:
    """Find the checkpoint and the model file of these overrides; of a hub id, only the description is downloaded."""
    texts = rewrite(overrides, config_dirs=config_dirs)
    parsed = [parse(text) for text in texts]
    by_key = {each.key_or_group: each for each in parsed if each.package is None}
    for text, each in zip(texts, parsed, strict=True):
        if each.is_sweep_override():
            raise ConfigError(f"'{text}' is a sweep: add -m, or quote the value")
        if each.key_or_group.split(".")[:2] == ["model", "embedded"]:
            raise ConfigError(f"{each.key_or_group}: only a model file brings a checkpoint; set checkpoint instead")
        if each.key_or_group.split(".")[0] == "draft":
            raise ConfigError("draft is the model of serve.draft_model and cannot be set; set that")

    def value(key: str, default: Any = None) -> Any:
        return plain(by_key[key]) if key in by_key else default

    files = model_files(search_path_of(texts, config_dirs))
    name, checkpoint, embedded = value("model", "auto"), value("checkpoint"), None
    names: frozenset[str] = frozenset()
    if checkpoint is None:
        file = embedded_file(files, name)
        name = file.name if name == "auto" else name
        hf, embedded = file.embedded_config(), file.spec["embedded"]
        generation = embedded.get("generation") or {}
    else:
        described = open_checkpoint(str(checkpoint), revision=value("revision"), weights=False)
        hf, generation = described.config, described.generation_config
        name = choose_model(hf, files, str(checkpoint)) if name == "auto" else name
        has_options = any(file.name == name and "eagle3" in file.spec for file in files)  # tensors that may be missing
        names = frozenset(described.names()) if has_options or hf.get("quantization_config") else names
        described.close()
    if not isinstance(name, str):
        raise ConfigError(f"model={name}: it takes the name of one file in conf/model")
    texts = [text for text, each in zip(texts, parsed, strict=True) if each is not by_key.get("model")]
    return Source([*texts, override("model", name), override("model.name", name)], hf, embedded, generation, names)


def search_path_of(overrides: Iterable[str], config_dirs: Sequence[str] = ()) -> list[str]:
    """The search path after conf/ and the paths of plugins: the config dirs, then hydra.searchpath, then packages."""
    stated = [text for text in overrides if text.startswith(SEARCHPATH)]
    paths: Any = parse(stated[-1]).value() if stated else []
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        raise ConfigError(f"{stated[-1]}: it takes a list of folders, as in hydra.searchpath=[file://FOLDER]")
    folders = ([Path(folder).absolute() for folder in config_dirs], package_folders())
    of_dirs, of_packages = ([f"file://{folder}" for folder in each] for each in folders)
    return [*of_dirs, *paths, *of_packages]


def with_search_path(overrides: Sequence[str], config_dirs: Sequence[str] = ()) -> list[str]:
    """Add the config dirs to the overrides as one hydra.searchpath, since Hydra takes one config dir at most."""
    paths = search_path_of(overrides, config_dirs)
    others = [text for text in overrides if not text.startswith(SEARCHPATH)]
    return [*([override("hydra.searchpath", paths)] if paths else []), *others]


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
            spec = parse_yaml(path.read_text("utf-8")) or {}
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"{path}: {one_line(error)}") from None
        if not isinstance(spec, dict):
            raise ConfigError(f"{path}: a model file holds the fields of model, not {type(spec).__name__}")
        yield ModelFile(path, spec)


@functools.lru_cache(256)
def parse_yaml(text: str) -> Any:
    """The value of a YAML text; every load reads all model files, which are the same ones nearly always."""
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def embedded_file(files: Sequence[ModelFile], name: str = "auto") -> ModelFile:
    """The model file with its own checkpoint: the named one, else the only one."""
    candidates = [file for file in files if file.spec.get("embedded")]
    candidates = [file for file in candidates if file.name == name] or candidates
    if len(candidates) != 1:
        names = ", ".join(file.name for file in candidates)
        raise ConfigError(f"no checkpoint is given; model= can bring one: {names}")
    return candidates[0]


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
        stated = f"{key}={json.dumps(hf[key])[:100]} in its config.json"
        what = "name" if is_gguf else "list of names"
        raise CheckpointError(f"{checkpoint}: {stated} is not a {what}; mend it, or choose with model=NAME")
    matching = {file.name: file for name, file in known if name in names}
    if not matching:
        all_names = {name for name, _ in known if name}
        stated = f"the architecture {', '.join(names)}" if names else "no architecture in its config.json"
        whole = {re.sub("Model$", "ForCausalLM", name) for name in names} & all_names
        if whole:
            stated += f", which is a {', '.join(whole)} without its head: save it with AutoModelForCausalLM"
        elif near := nearest_architectures(names, all_names):
            stated += f"; the nearest known ones are {', '.join(near)}"
        listed = f"docs/checkpoints.md lists all {len(all_names)}"
        ways = "docs/add-a-model.md shows how to write a YAML file for another, model=NAME takes a file as it is"
        raise UnsupportedError(f"{checkpoint} has {stated}; {listed}, {ways}")
    if is_gguf or len(matching) == 1:
        return next(iter(matching))
    exact = [name for name, file in matching.items() if hf.get("model_type") in (file.spec.get("model_types") or ())]
    exact = exact or [name for name, file in matching.items() if not file.spec.get("model_types")]
    if len(exact) != 1:
        both = f"{' and '.join(exact or matching)} list the architecture {', '.join(names)}"
        raise ConfigError(f"{checkpoint}: {both}; choose with model=NAME")
    return exact[0]


def nearest_architectures(names: Iterable[str], known: Iterable[str]) -> list[str]:
    """At most three known architectures whose names are like one of these, the nearest first."""
    stems = {re.sub(r"For[A-Z]\w+$", "", name).lower(): name for name in sorted(known)}
    near = [difflib.get_close_matches(re.sub(r"For[A-Z]\w+$", "", name).lower(), stems, 3, 0.7) for name in names]
    return list(dict.fromkeys(stems[stem] for each in near for stem in each))[:3]


def compose(schema: Any, overrides: Sequence[str], config_dirs: Sequence[str] = ()) -> DictConfig:
    """Compose conf/ and the overrides with Hydra, also within a job of a sweep, where Hydra runs already.

    Hydra composes the choices of groups, those of conf/ alone once a process; values are set afterwards. Nor could it
    set all of them: it takes a plain field for a group where a config dir has a folder of that name, and cannot fill
    blocks that may be null.
    """
    for folder in config_dirs:
        if not Path(folder).is_dir():
            raise ConfigError(f"config dir {folder}: there is no such folder")
    optional = [at for at, _, is_list in inner_blocks(schema) if not is_list]
    is_ordered = any(text.startswith(("+", "~")) for text in overrides)  # Hydra adds and deletes between values
    values = [text for text in overrides if is_value(text, schema, optional, is_ordered)]
    choices = with_search_path([text for text in overrides if text not in values], config_dirs)
    try:
        with COMPOSING:
            if any(text.startswith("hydra.") for text in choices):  # folders whose files may change
                composed = compose_choices(schema, choices)
            else:
                composed = copy.deepcopy(compose_once(schema, *choices))
        for parsed in map(parse, values):
            key = parsed.key_or_group
            for at in optional:
                if f"{key}.".startswith(f"{at}.") and OmegaConf.select(composed, at) is None:
                    parent, _, name = at.rpartition(".")
                    OmegaConf.update(composed, parent, {name: {}}, merge=True)
            OmegaConf.update(composed, key, parsed.value(), merge=True)
    except (HydraException, OmegaConfBaseException):
        check_entries(schema, overrides, model_files(search_path_of(overrides, config_dirs)))
        raise
    return composed


@functools.lru_cache(256)
def compose_once(schema: Any, *choices: str) -> DictConfig:
    """A composition of conf/ alone, which is to be copied before it is changed."""
    return compose_choices(schema, choices)


def compose_choices(schema: Any, choices: Sequence[str]) -> DictConfig:
    """One thread at a time."""
    register(schema)
    outer, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None
    try:
        with hydra.initialize_config_dir(str(CONF), job_name="atom-run", version_base="1.3"):
            composed: DictConfig = hydra.compose("config", [*choices])
    finally:
        GlobalHydra.instance().hydra = outer
    return composed


def is_value(text: str, schema: Any, optional: Sequence[str], is_ordered: bool) -> bool:
    """Whether an override sets a plain field, a value in an optional block or, where none is ordered, a dotted key."""
    key = text.lstrip("+").partition("=")[0]
    if any(key.startswith(f"{at}.") for at in optional):
        return True
    if not is_ordered and re.fullmatch(r"(?!hydra\.)\w+(\.\w+)+=.*", text, re.DOTALL):
        return True
    return key in plain_fields(schema) or (key in optional and isinstance(parse(text).value(), dict))


def check_entries(schema: Any, overrides: Sequence[str], files: Sequence[ModelFile]) -> None:
    """Raise the error of a list's entry here, since Hydra's error does not name the list."""
    parsed = [each for each in map(parse, overrides) if not each.is_delete()]
    stated = [(each.key_or_group, each.value()) for each in parsed]
    by_name, names = {file.name: file.spec for file in files}, [value for key, value in stated if key == "model"]
    for name in names:  # grows by inherited files
        spec = by_name.get(name) if isinstance(name, str) else None
        stated += [(f"model.{key}", value) for key, value in (spec or {}).items()]
        names += [each for each in (spec or {}).get("defaults") or () if each not in names]
    for at, kind, is_list in inner_blocks(schema):
        lists = [value for key, value in stated if is_list and key == at and isinstance(value, list)]
        for index, entry in [each for value in lists for each in enumerate(value)]:
            try:
                OmegaConf.merge(OmegaConf.structured(kind), entry if isinstance(entry, dict) else {})
            except OmegaConfBaseException as error:
                error.full_key = f"{at}.{index}.{error.full_key}"
                raise


@functools.cache
def register(schema: Any) -> None:
    """Make the schema and the resolvers known to Hydra."""

    def choose(condition: Any, yes: Any, no: Any) -> Any:
        return yes if condition else no

    ConfigStore.instance().store(name="schema", node=schema)
    OmegaConf.register_new_resolver("hf", look_up, replace=True)
    OmegaConf.register_new_resolver("stated", look_up_null, replace=True)
    OmegaConf.register_new_resolver("same", look_up_same, replace=True)
    OmegaConf.register_new_resolver("generation", look_up_sampling, replace=True)
    OmegaConf.register_new_resolver("if", choose, replace=True)
    OmegaConf.register_new_resolver("equal", operator.eq, replace=True)


def resolve(composed: DictConfig, hf: Mapping[str, Any], sampling: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Resolve to dicts and lists, with the checkpoint's values in place of `${hf:…}` and `${generation:…}`."""
    attach(composed, hf, sampling)
    values: Any = OmegaConf.to_container(composed, resolve=True)
    return dict(values)


def attach(composed: DictConfig, hf: Mapping[str, Any], sampling: Mapping[str, Any] | None = None) -> None:
    """Resolve `${hf:…}` in this configuration by this config.json, and `${generation:…}` by these sampling values."""
    OmegaConf.get_cache(composed)["hf"] = dict(hf)
    OmegaConf.get_cache(composed)["sampling"] = dict(sampling or {})


def look_up(key: str, *default: Any, _root_: DictConfig, _node_: Any) -> Any:
    """`${hf:key}` or `${hf:key,default}`; dots reach inside, null counts as missing.

    OmegaConf also calls it while it merges files, before there is a config.json: then it gives the default, or null.
    """
    value: Any = OmegaConf.get_cache(_root_).get("hf")
    is_attached = value is not None
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if value is None and is_attached and not default:
        needed = f"conf/model/{_root_.model.name}.yaml needs it for {_node_._get_full_key('')}"
        where = _root_.checkpoint or f"the embedded checkpoint is none of {_root_.model.name}, set checkpoint"
        raise CheckpointError(f"{where}: config.json has no {key}; {needed}")
    return value if value is not None or not default else default[0]


def look_up_null(key: str, default: Any, *, _root_: DictConfig) -> Any:
    """`${stated:key,default}`: the value that config.json states at its top, null included; the default without one."""
    return (OmegaConf.get_cache(_root_).get("hf") or {}).get(key, default)


def look_up_same(key: str, *, _root_: DictConfig, _node_: Any) -> Any:
    """`${same:key}`: the value of config.json, or that of all layers where it lists one for each."""
    value = look_up(key, _root_=_root_, _node_=_node_)
    if not isinstance(value, list) or not value:
        return value
    if any(each != value[0] for each in value):
        where = _root_.checkpoint or "the embedded checkpoint"
        raise UnsupportedError(f"{where}: {key} in its config.json differs between layers, which is not built")
    return value[0]


def look_up_sampling(name: str, *, _root_: DictConfig, _parent_: DictConfig) -> Any:
    """`${generation:name}`: the checkpoint's value of this field of sampling; without one, the schema's default."""
    stated = OmegaConf.get_cache(_root_).get("sampling") or {}
    return stated[name] if name in stated else getattr(OmegaConf.get_type(_parent_), name)


@contextmanager
def one_line_errors(schema: Any) -> Iterator[None]:
    """Turn errors of Hydra and OmegaConf into one-line ConfigErrors: what, where, and the known names."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise explain(error, schema) from None


def explain(error: BaseException, schema: Any) -> AtomError:
    chain: list[Any] = []
    cause: Any = error
    while cause is not None and not any(cause is each for each in chain):  # an error that is raised anew may be its own
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    if own := [each for each in chain if isinstance(each, AtomError)]:
        return own[0]
    for each in chain:
        text, key = str(each), re.sub(r"\[(\d+)\]", r".\1", getattr(each, "full_key", None) or "")
        if choice := re.search(r"Could not (?:find|load) '(.+)'", text):
            listed = re.search(r"Available options in '(.+)'", text)
            group = listed[1] if listed else choice[1].rpartition("/")[0]
            name = choice[1].removeprefix(f"{group}/")
            if group == "model" and may_be_checkpoint(name):
                return no_model(name)
            return no_choice(group, name, re.findall(r"^\t([\w./-]+)$", text, re.MULTILINE))
        if key and re.match(r"Key '.*' (not in|is not in struct)", text):
            return unknown_key(key, schema)
        if key and re.search(r"is not a ListConfig, list or tuple", text):
            return ConfigError(f"{key} is a list; write {key}=[…]")
        if key:
            return ConfigError(f"{key}: {text.splitlines()[0]}")
    return ConfigError(one_line(error))


def no_choice(group: str, name: str, names: Sequence[str]) -> ConfigError:
    """The error of a choice that a config group does not have. A plugin of Hydra is named with its package."""
    packages = PLUGINS.get(group, {})
    if name in packages:
        return ConfigError(f"{group}={name} is a plugin of Hydra that is not installed: pip install {packages[name]}")
    known = {each: f"{each} (pip install {package})" for each, package in packages.items()}
    known |= {each: each for each in names}
    listed = f"; choices: {', '.join(known[each] for each in sorted(known))}" if known else ""
    if group == "parallel":
        listed += ", and others with any numbers, as tp3, tp2_pp2 or dp2_tp4_ep"
    return ConfigError(f"{group}={name}: there is no such choice{did_you_mean(name, known)}{listed}")


def unknown_key(key: str, schema: Any) -> ConfigError:
    """The error of a key that is not in the schema: the keys that are, and which one may be meant."""
    known = [re.sub(r"\.\d+", "", name) for name in keys(schema)]
    parent, _, last = re.sub(r"\.\d+", "", key).rpartition(".")
    inside = [name.removeprefix(f"{parent}.") for name in known if name.startswith(f"{parent}.") or not parent]
    siblings = list(dict.fromkeys(name.partition(".")[0] for name in inside))
    if not siblings:
        return ConfigError(f"{key}: there is no such key; +{key}=… adds one to a mapping")
    elsewhere = {name.rpartition(".")[2]: name for name in reversed(known) if not name.startswith("model.")}
    if not did_you_mean(last, siblings) and (near := difflib.get_close_matches(last, elsewhere, 1, 0.8)):
        return ConfigError(f"{key}: there is no such field, did you mean {elsewhere[near[0]]}?")
    return ConfigError(f"{key}: {no_such('field', last, siblings, f'{parent} has: ' if parent else 'there are: ')}")


def no_such(what: str, name: str, names: Sequence[str], heading: str) -> str:
    listed = f"; {heading}{', '.join(names)}" if names else ""
    return f"there is no such {what}{did_you_mean(name, names)}{listed}"
