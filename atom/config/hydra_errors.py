"""Turn errors of Hydra and OmegaConf into errors of one line.

They say what, where, and the known names.

with one_line_errors(Config):
    composed = compose(Config, ["serve.blok_size=8"])      # ConfigError: … did you mean block_size?
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from atom.config.overrides import BYTES, UNITS, no_model
from atom.config.schema import SET_BY_LOAD
from atom.config.schema_keys import blocks, keys, without_entries
from atom.config.shorthand import may_be_checkpoint
from atom.config.spelling import ALIASES, MOVED, did_you_mean
from atom.config.transformers_words import HINTS
from atom.errors import AtomError, ConfigError, one_line

PLUGINS = {  # of Hydra, which run sweeps here: config group -> choice -> the package that brings it
    "hydra/launcher": {
        "joblib": "hydra-joblib-launcher",
        "submitit_local": "hydra-submitit-launcher",
        "submitit_slurm": "hydra-submitit-launcher",
    },
    "hydra/sweeper": {"optuna": "hydra-optuna-sweeper"},
}
WRONG_VALUES = {  # OmegaConf's message -> what the value is not
    r"Value '(.*)' of type '\w+' could not be converted to Integer": "a whole number",
    r"Value '(.*)' of type '\w+' could not be converted to Float": "a number",
    r"Value '(.*)' is not a valid bool \(type \w+\)": "true or false",
    r"Cannot convert '\w+' to string: '(.*)'": "a text",
}
NUM_BYTES = f"a number of bytes, as 4294967296, 4GB or 4GiB; units: {', '.join(UNITS)}"


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
        if key and re.search(r"is not a ListConfig, list or tuple|incompatible with type hint '[\w.]*List\[", text):
            return ConfigError(f"{key} is a list; write {key}=[…]")
        if key and "is not a subclass of" in text:
            return ConfigError(f"{key} is a group of fields; write {key}.NAME=…")
        if key and "does not support deletion" in text:
            return ConfigError(f"~{key}: a field cannot be removed; leave ~{key} out, or write {key}=VALUE")
        if twice := re.search(r"An item is already at '(.+?)'|Multiple values for (\S+)\. To override", text):
            return ConfigError(f"+{twice[1] or twice[2]}: it has a value already; leave out the +")
        for pattern, kind in WRONG_VALUES.items():
            if key and (wrong := re.match(pattern, text, re.DOTALL)):
                kind = NUM_BYTES if key in BYTES else kind
                return ConfigError(f"{key}={one_line(wrong[1])} is not {kind}")
        if key and re.match(r"field '.*' is not Optional", text):
            return ConfigError(f"{key}=null: it needs a value; leave it out for its default")
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
    if key.removeprefix("sampling.") in HINTS:
        return ConfigError(f"{key} as in transformers: {HINTS[key.removeprefix('sampling.')]}")
    for old, new in (MOVED | ALIASES).items():
        if f"{key}.".startswith(f"{old}."):
            return ConfigError(f"{key} is now {new}{key.removeprefix(old)}; set that")
    known = [without_entries(schema, name) for name in keys(schema) if name not in SET_BY_LOAD]
    parent, _, last = without_entries(schema, key).rpartition(".")
    inside = [name.removeprefix(f"{parent}.") for name in known if name.startswith(f"{parent}.") or not parent]
    siblings = list(dict.fromkeys(name.partition(".")[0] for name in inside))
    mapping, _, name = key.rpartition(".")
    if any(at == f"{mapping}.NAME." for at, _ in blocks(schema)):
        return ConfigError(f"{key}: there is no such block; a model file adds one")
    is_entry = not name.isdecimal() and without_entries(schema, key) == without_entries(schema, mapping)
    if not siblings or is_entry:
        return ConfigError(f"{key}: there is no such key; +{key}=… adds one to a mapping")
    elsewhere = {name.rpartition(".")[2]: name for name in reversed(known) if not name.startswith("model.")}
    if not did_you_mean(last, siblings) and (near := difflib.get_close_matches(last, elsewhere, 1, 0.8)):
        return ConfigError(f"{key}: there is no such field (did you mean {elsewhere[near[0]]}?)")
    return ConfigError(f"{key}: {no_such('field', last, siblings, f'{parent} has: ' if parent else 'there are: ')}")


def no_such(what: str, name: str, names: Sequence[str], heading: str) -> str:
    listed = f"; {heading}{', '.join(names)}" if names else ""
    return f"there is no such {what}{did_you_mean(name, names)}{listed}"
