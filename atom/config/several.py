"""Split the models of serve.models: the overrides of each, after those of all.

    split_models(["serve.models=[a.yaml, b.yaml]", "level=1"])      # one list of overrides for each
    split_models(["level=1"])                                       # [["level=1"]]

An entry is what a command line would say of one model: a recipe or a checkpoint, then overrides, as in
`b.yaml serve.max_model_len=4096`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from atom.config.overrides import parse, plain, rewrite
from atom.config.recipes import find_recipe
from atom.config.schema import Config
from atom.config.shorthand import may_be_checkpoint
from atom.errors import AtomError, ConfigError

MODELS = "serve.models"
OWN_HTTP = {  # fields of serve.http that models may differ in; the others are of the whole server
    "served_model_name", "chat_template", "chat_template_kwargs", "tool_calls", "max_queue", "max_input_length",
    "max_total_tokens", "max_stop_sequences", "max_top_n_tokens", "best_of",
}  # fmt: skip
OF_SERVER = ("serve.max_awake", "serve.spare_engine", "serve.idle_exit_seconds", "advanced", "cache", MODELS, "hydra")


class Entry(NamedTuple):
    """A model of serve.models."""

    text: str  # the entry; empty without serve.models
    overrides: list[str]


def split_models(overrides: Sequence[str], config_dirs: Sequence[str] = ()) -> list[Entry]:
    """The overrides of each model; without serve.models, the given ones. ConfigError for an entry that is none."""
    if not any(text.lstrip("+").startswith((MODELS, "recipe=")) for text in overrides):
        return [Entry("", list(overrides))]
    common = rewrite(overrides, config_dirs=config_dirs)
    found = [parsed for parsed in map(parse, common) if parsed.key_or_group == MODELS]
    if not found or found[-1].is_sweep_override():
        return [Entry("", list(overrides))]
    jobs = (plain(parse(text)) for text in overrides if text.startswith("job="))
    if job := next((each for each in jobs if each != "serve"), None):
        raise ConfigError(f"job={job} is of one model, and {MODELS} lists those of a server: leave one of them out")
    texts = plain(found[-1])
    if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts):
        raise ConfigError(f"{MODELS}={texts} is not a list of texts; write {MODELS}=[a.yaml, b.yaml]")
    return [Entry(text, [*common, *read_entry(text, config_dirs), "job=serve"]) for text in texts] or [
        Entry("", list(overrides))
    ]


def read_entry(text: str, config_dirs: Sequence[str]) -> list[str]:
    """The overrides of an entry, recipes opened."""
    with naming_entry(text):
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise ConfigError(f"{error}; close it") from None
        if not words:
            raise ConfigError(f"{MODELS}: an entry is empty; name a recipe or a checkpoint")
        if text.startswith("["):
            raise ConfigError(f"quote each entry that has spaces or =, as in {MODELS}=\"['a.yaml level=1', b.yaml]\"")
        own = [word if "=" in word else f"{key_of(word, config_dirs)}={word}" for word in words]
        if typed := next((each for each in own if each.partition("=")[0] in ("job", "prompts")), None):
            raise ConfigError(f"{typed.partition('=')[0]} is of no model; leave it out")
        overrides = rewrite(own, config_dirs=config_dirs)
        for each in overrides:
            if is_of_server(key := each.lstrip("+").partition("=")[0]):
                raise ConfigError(f"{key} is of the whole server; set it outside of {MODELS}")
        return overrides


def key_of(word: str, config_dirs: Sequence[str]) -> str:
    is_recipe = find_recipe(word, config_dirs) is not None or not may_be_checkpoint(word)
    return "recipe" if is_recipe else "checkpoint"


def is_of_server(key: str) -> bool:
    """Whether a key is of the server, and not of one of its models."""
    if key == "serve.http" or key.startswith("serve.http."):
        return key.removeprefix("serve.http.").partition(".")[0] not in OWN_HTTP
    return any(key == each or key.startswith(f"{each}.") for each in OF_SERVER)


@contextmanager
def naming_entry(text: str) -> Iterator[None]:
    """Let an error begin with the entry that it comes from, unless that is empty."""
    try:
        yield
    except AtomError as error:
        if text:
            error.args = (f"{MODELS}: {text}: {error}",)
        raise


def check_served_names(configs: Sequence[Config]) -> None:
    """Check that no two models are called the same."""
    names = [str(name) for config in configs for name in (*config.served_names, *(config.serve.lora_modules or {}))]
    if twice := next((name for name in names if names.count(name) > 1), None):
        fix = "name one in its entry, as in serve.http.served_model_name=[other]"
        raise ConfigError(f"{MODELS}: two models are called {twice}; {fix}")
