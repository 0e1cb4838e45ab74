"""Compose conf/ and overrides with Hydra, and resolve what they take from the checkpoint.

    source = find_source(["checkpoint=/models/qwen3"])     # of `model_files`
    with one_line_errors(Config):
        composed = compose(Config, source.overrides)       # a DictConfig with unresolved `${hf:…}`
        values = resolve(composed, source.hf)              # dicts and lists

The schema is passed in: this module knows none of its fields but those that a generation_config.json may set.
"""

from __future__ import annotations

import copy
import functools
import operator
import pickle
import re
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, ListConfig, OmegaConf, ValueNode, grammar_parser
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from atom.config.bounded_yaml import parse_yaml
from atom.config.folders import CONF, GROUPS
from atom.config.model_files import SEARCHPATH, ModelFile, model_files, search_path_of
from atom.config.overrides import parse
from atom.config.resolvers import RESOLVERS
from atom.config.schema_keys import inner_blocks, optional_along, plain_fields, value_above
from atom.config.spelling import override
from atom.errors import CheckpointError, ConfigError, UnsupportedError, one_line
from atom.sampling_params import GENERATION

COMPOSING = threading.Lock()  # Hydra composes through a singleton
SPECIAL = r"\$\{|\?\?\?"  # of OmegaConf in a text


def with_search_path(overrides: Sequence[str], config_dirs: Sequence[str] = ()) -> list[str]:
    """Add the config dirs to the overrides as one hydra.searchpath, since Hydra takes one config dir at most."""
    paths = search_path_of(overrides, config_dirs)
    others = [text for text in overrides if not text.startswith(SEARCHPATH)]
    return [*([override("hydra.searchpath", paths)] if paths else []), *others]


def compose(schema: Any, overrides: Sequence[str], config_dirs: Sequence[str] = ()) -> DictConfig:
    """Compose conf/ and the overrides with Hydra, also within a job of a sweep, where Hydra runs already.

    Hydra composes the choices of groups, those of conf/ only once a process; values are set afterwards. Nor could it
    set all of them: it takes a plain field for a group if a config dir has a folder of that name, and cannot fill
    blocks that may be null.
    """
    optional = [at for at, _, is_list in inner_blocks(schema) if not is_list]
    is_ordered = any(text.startswith(("+", "~")) for text in overrides)  # Hydra adds and deletes between values
    check_files(overrides, config_dirs)
    values = [text for text in overrides if is_value(text, schema, optional, is_ordered)]
    choices = with_search_path([text for text in overrides if text not in values], config_dirs)
    try:
        with COMPOSING:
            if any(text.startswith("hydra.") for text in choices):  # folders whose files may change
                composed = compose_choices(schema, choices)
            else:
                composed = pickle.loads(compose_once(schema, *choices))  # copy.deepcopy takes three times as long
        for parsed in map(parse, values):
            key = parsed.key_or_group
            for at in optional_along(schema, key):
                if OmegaConf.select(composed, at) is None:
                    parent, _, name = at.rpartition(".")
                    OmegaConf.update(composed, parent, {name: {}}, merge=True)
            if above := value_above(schema, key):
                raise ConfigError(f"{key}: {above[0]} takes {above[1]}, and has no fields; write {above[0]}=…")
            check_entry(composed, key)
            OmegaConf.update(composed, key, parsed.value(), merge=True)
    except (HydraException, OmegaConfBaseException):
        check_entries(schema, overrides, model_files(search_path_of(overrides, config_dirs)))
        raise
    return composed


def check_entry(composed: DictConfig, key: str) -> None:
    """Raise ConfigError if a key continues after a list with something other than an index."""
    node, at, parts = composed, "", key.split(".")
    for part in parts:
        if isinstance(node, ListConfig) and not (part.isdecimal() and len(part) < 9 and int(part) < len(node)):
            entries = f"its entries are {at}.0 to {at}.{len(node) - 1}" if len(node) else "it is empty"
            raise ConfigError(f"{key}: {at} is a list, and {entries}; write {at}=[…]")
        if node is None:
            raise ConfigError(f"{key}: {at} is null; write {at}=…")
        index = int(part) if isinstance(node, ListConfig) else part
        if not isinstance(node, DictConfig | ListConfig) or OmegaConf.is_interpolation(node, index):
            return
        node = node[index] if isinstance(node, ListConfig) else OmegaConf.select(node, part)
        at = f"{at}.{part}".lstrip(".")


def check_files(overrides: Sequence[str], config_dirs: Sequence[str]) -> None:
    """Parse the users' files that Hydra is to read within bounds; those of models have been parsed."""
    folders = [
        Path(path.removeprefix("file://")) for path in search_path_of(overrides, config_dirs) if "pkg:" not in path
    ]
    for group, _, choice in (text.lstrip("+").partition("=") for text in overrides):
        for file in [folder / group / f"{choice}.yaml" for folder in folders if group in GROUPS and group != "model"]:
            try:
                if file.is_file():
                    parse_yaml(file.read_text("utf-8"))
            except (OSError, ValueError, YAMLError) as error:
                raise ConfigError(f"{file}: {one_line(error)}") from None


class PackagedFiles(ConfigRepository):  # type: ignore[misc]  # Hydra has no types
    """Hydra's files and those of conf/, read once a process: Hydra parses some twenty for each composition."""

    def __init__(self, search_path: ConfigSearchPath) -> None:
        super().__init__(search_path)
        self._pickled: dict[tuple[str, str], bytes] = {}  # by folder and name

    def __deepcopy__(self, memo: object) -> PackagedFiles:
        return copy.copy(self)  # Hydra gives a composition its own, which may get folders, too

    def load_config(self, config_path: str) -> ConfigResult | None:
        source = self._find_object_source(config_path, ObjectType.CONFIG)
        if source is None or source.provider.startswith(SEARCHPATH.removesuffix("=")):  # a file that may change
            return super().load_config(config_path)
        key = source.path, config_path
        if key not in self._pickled:
            self._pickled[key] = pickle.dumps(super().load_config(config_path), pickle.HIGHEST_PROTOCOL)
        result: ConfigResult = pickle.loads(self._pickled[key])  # a composition takes its nodes
        return result


@functools.lru_cache(8)
def packaged_files(schema: Any, folders: str) -> PackagedFiles:
    """Those with this schema among them, in folders that Hydra's plugins may add."""
    return PackagedFiles(create_config_search_path(str(CONF)))


@functools.lru_cache(256)
def compose_once(schema: Any, *choices: str) -> bytes:
    """A composition of conf/ only, pickled: each caller gets one of its own."""
    return pickle.dumps(compose_choices(schema, choices), pickle.HIGHEST_PROTOCOL)


def compose_choices(schema: Any, choices: Sequence[str]) -> DictConfig:
    """One thread at a time."""
    register(schema)
    outer, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None
    try:
        with hydra.initialize_config_dir(str(CONF), job_name="atom-run", version_base="1.3"):
            made = GlobalHydra.instance().hydra
            if made is not None:
                made.config_loader.repository = packaged_files(schema, str(made.config_loader.get_search_path()))
            composed: DictConfig = hydra.compose("config", [*choices])
    finally:
        GlobalHydra.instance().hydra = outer
    return composed


def is_value(text: str, schema: Any, optional: Sequence[str], is_ordered: bool) -> bool:
    """Whether an override sets a plain field, a value in an optional block or, if none is ordered, a dotted key."""
    key = text.lstrip("+").partition("=")[0]
    if any(key.startswith(f"{at}.") for at in optional):
        return True
    if not is_ordered and re.fullmatch(r"(?!hydra\.)\w+(\.\w+)+=.*", text, re.DOTALL):
        return True
    return key in plain_fields(schema) or (key in optional and isinstance(parse(text).value(), dict))


def check_entries(schema: Any, overrides: Sequence[str], files: Sequence[ModelFile]) -> None:
    """Raise the error of a list's entry here, since Hydra's error does not name the list."""
    parsed = [each for each in map(parse, overrides) if not each.is_delete()]
    entries = [(each.key_or_group, each.value()) for each in parsed]
    by_name, names = {file.name: file.spec for file in files}, [value for key, value in entries if key == "model"]
    for name in names:  # grows by inherited files
        spec = by_name.get(name) if isinstance(name, str) else None
        entries += [(f"model.{key}", value) for key, value in (spec or {}).items()]
        names += [each for each in (spec or {}).get("defaults") or () if each not in names]
    for at, kind, is_list in inner_blocks(schema):
        lists = [value for key, value in entries if is_list and key == at and isinstance(value, list)]
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
    # what the checkpoint's generation_config.json says, unless a job or a user says otherwise
    sampling = {name: f"${{generation:{name}}}" for name in GENERATION.values()}
    ConfigStore.instance().store(name="sampling", node=sampling, package="sampling")
    OmegaConf.register_new_resolver("hf", look_up, replace=True)
    OmegaConf.register_new_resolver("stated", look_up_null, replace=True)
    OmegaConf.register_new_resolver("same", look_up_same, replace=True)
    OmegaConf.register_new_resolver("generation", look_up_sampling, replace=True)
    OmegaConf.register_new_resolver("if", choose, replace=True)
    OmegaConf.register_new_resolver("equal", operator.eq, replace=True)
    for resolver in RESOLVERS:
        OmegaConf.register_new_resolver(resolver.__name__, resolver, replace=True)


def resolve(
    composed: DictConfig, hf: Mapping[str, Any], sampling: Mapping[str, Any] | None = None, file: str = ""
) -> dict[str, Any]:
    """Resolve to dicts and lists, with the checkpoint's values in place of `${hf:…}` and `${generation:…}`.

    file: the model file, which errors name
    """
    attach(composed, hf, sampling, file)
    fill_in(composed)
    values: Any = OmegaConf.to_container(composed, resolve=True)
    return dict(values)


def fill_in(container: DictConfig | ListConfig) -> None:
    """Put values in place of interpolations, each parsed once a process: OmegaConf parses it for each node, for long.

    Left to OmegaConf: what fails, for its error, and what could be taken for an interpolation or becomes a block.
    """
    for key in range(len(container)) if isinstance(container, ListConfig) else list(container):
        node: Any = container._get_node(key)
        if isinstance(node, DictConfig | ListConfig):
            if not (node._is_none() or node._is_missing() or node._is_interpolation()):
                fill_in(node)
        elif node._is_interpolation():
            with suppress(OmegaConfBaseException):
                value = container.resolve_parse_tree(parse_interpolation(node._value()), node=node, key=key)
                value = value._value() if isinstance(value, ValueNode) else value
                if isinstance(value, bool | int | float | str | None) and not re.search(SPECIAL, str(value)):
                    container[key] = value


@functools.lru_cache(4096)
def parse_interpolation(text: str) -> Any:
    return grammar_parser.parse(text)


def attach(
    composed: DictConfig, hf: Mapping[str, Any], sampling: Mapping[str, Any] | None = None, file: str = ""
) -> None:
    """Resolve `${hf:…}` in this configuration by this config.json, and `${generation:…}` by these sampling values."""
    OmegaConf.get_cache(composed)["hf"] = dict(hf)
    OmegaConf.get_cache(composed)["sampling"] = dict(sampling or {})
    OmegaConf.get_cache(composed)["file"] = file


def look_up(key: str, *default: Any, _root_: DictConfig, _node_: Any) -> Any:
    """`${hf:key}` or `${hf:key,default}`; dots reach inside objects and lists, null counts as missing.

    OmegaConf also calls it while it merges files, before there is a config.json: then it gives the default, or null.
    """
    value: Any = OmegaConf.get_cache(_root_).get("hf")
    is_attached = value is not None
    is_null = False
    for part in key.split("."):
        is_null = isinstance(value, Mapping) and part in value and value[part] is None
        if isinstance(value, list):
            value = value[int(part)] if part.isdigit() and int(part) < len(value) else None
        else:
            value = value.get(part) if isinstance(value, Mapping) else None
    if value is None and is_attached and not default:
        needed = f"{OmegaConf.get_cache(_root_)['file']} needs {'a value' if is_null else 'it'}"
        where = _root_.checkpoint or f"the embedded checkpoint is none of {_root_.model.name}, set checkpoint"
        missing = f"null for {key}" if is_null else f"no {key}"
        raise CheckpointError(f"{where}: config.json has {missing}; {needed} for {_node_._get_full_key('')}")
    return value if value is not None or not default else default[0]


def look_up_null(key: str, default: Any, *, _root_: DictConfig) -> Any:
    """`${stated:key,default}`: the value of config.json, null included; the default without one."""
    found: Any = OmegaConf.get_cache(_root_).get("hf")
    *objects, last = key.split(".")
    for part in objects:
        found = found.get(part) if isinstance(found, Mapping) else None
    return found.get(last, default) if isinstance(found, Mapping) else default


def look_up_same(key: str, *, _root_: DictConfig, _node_: Any) -> Any:
    """`${same:key}`: the value of config.json, or that of all layers if it lists one for each."""
    value = look_up(key, _root_=_root_, _node_=_node_)
    if not isinstance(value, list) or not value:
        return value
    if any(each != value[0] for each in value):
        where = _root_.checkpoint or "the embedded checkpoint"
        raise UnsupportedError(f"{where}: {key} in its config.json differs between layers, which is not supported")
    return value[0]


def look_up_sampling(name: str, *, _root_: DictConfig, _parent_: DictConfig) -> Any:
    """`${generation:name}`: the checkpoint's value of this field of sampling; without one, the schema's default."""
    values = OmegaConf.get_cache(_root_).get("sampling") or {}
    return values[name] if name in values else getattr(OmegaConf.get_type(_parent_), name)
