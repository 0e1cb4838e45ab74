"""Draft methods, an object for each.

    METHODS["mtp"].has_programs                 # a key is a value of serve.method
    METHODS["eagle3"].check_config("AngelSlim/Qwen3-8B_eagle3", hf)      # hf: its config.json

What all of atom knows of a method is here, except its programs, which `atom.frontend.drafts` writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from atom.errors import ConfigError, UnsupportedError


class DraftMethod(NamedTuple):
    """A way to draft tokens."""

    has_programs: bool = True  # programs of the text draft; false: the tokens are looked up among earlier ones
    model_file: str | None = None  # with which serve.draft_model is read; None: the method reads no other checkpoint
    check_config: Callable[[str, Mapping[str, Any]], None] | None = None  # of that checkpoint's name and config.json
    needs_same_tokens: bool = False  # of that checkpoint's tokenizer
    num_tokens: int = 3  # that are drafted for a step if serve.num_speculative_tokens is not set
    reads_answers: bool = False  # earlier answers are looked up too; the host does it, and plans no step ahead
    num_own_layers: int = 0  # of the model, after its last one, that draft
    reads_all_stages: bool = False  # it reads hidden states of layers in several pipeline stages
    options: tuple[str, ...] = ()  # fields of serve that only this method reads
    vllm_names: tuple[str, ...] = ()  # vLLM's other names of it, as patterns


def check_eagle3(location: str, hf: Mapping[str, Any]) -> None:
    """Check that a checkpoint is a draft of EAGLE-3."""
    if not is_eagle3(hf):
        raise UnsupportedError(
            f"{location} is not a draft of EAGLE-3: its config.json has the architecture {architectures(hf)} and no "
            "draft_vocab_size; serve.method=draft takes models, and EAGLE-1, Medusa and others are not supported"
        )


def check_whole_model(location: str, hf: Mapping[str, Any]) -> None:
    """Check that a checkpoint is a model."""
    if is_eagle3(hf):
        raise ConfigError(f"{location} is a draft of EAGLE-3; set serve.method=eagle3")


def is_eagle3(hf: Mapping[str, Any]) -> bool:
    return hf.get("draft_vocab_size") is not None or "eagle3" in architectures(hf).lower()


def architectures(hf: Mapping[str, Any]) -> str:
    """The names of a config.json, for an error."""
    names = hf.get("architectures")
    return ", ".join(map(str, names)) if isinstance(names, list) and names else "no name"


METHODS: dict[str, DraftMethod] = {
    "ngram": DraftMethod(has_programs=False, options=("prompt_lookup_min", "prompt_lookup_max")),
    "suffix": DraftMethod(
        has_programs=False,
        num_tokens=7,
        reads_answers=True,
        options=(
            "suffix_decoding_max_tree_depth",
            "suffix_decoding_max_cached_requests",
            "suffix_decoding_max_spec_factor",
            "suffix_decoding_min_token_prob",
        ),
    ),
    "mtp": DraftMethod(num_own_layers=1, vllm_names=("*_mtp",)),
    "eagle3": DraftMethod(model_file="eagle3", check_config=check_eagle3, reads_all_stages=True),
    "draft": DraftMethod(
        model_file="auto", check_config=check_whole_model, needs_same_tokens=True, vllm_names=("draft_model",)
    ),
}
WITH_MODEL = [name for name, method in METHODS.items() if method.model_file]  # those that read serve.draft_model


def find_name(vllm_name: str) -> str:
    """Our name of the method that vLLM calls so; the same one if it has no other."""
    for name, method in METHODS.items():
        if any(fnmatchcase(vllm_name, pattern) for pattern in method.vllm_names):
            return name
    return vllm_name
