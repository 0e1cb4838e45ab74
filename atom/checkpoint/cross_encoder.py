"""Read how sentence-transformers scores pairs of texts with a checkpoint.

read_cross_encoder(folder, modules, config)    # {"tokens": [2152, 9693], "activation": "Sigmoid", "template": {}}

Its CrossEncoder has a Transformer and, for a model that answers with one of two tokens, a LogitScore with their ids.
The pair is a text or, since version 5.4, two messages for the checkpoint's chat template, of the roles query and
document.
Source: sentence_transformers/cross_encoder and base/modules/transformer.py, 6.2.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atom.checkpoint.base import read_json
from atom.errors import CheckpointError, UnsupportedError

ACTIVATIONS = ("Sigmoid", "Identity")
OWN_VALUES = ("restore_suffix", "tokenize", "return_dict", "return_tensors")  # of its calls, not of a template


def read_cross_encoder(folder: Path, modules: list[dict[str, Any]], config: Mapping[str, Any]) -> dict[str, Any]:
    """What of its files decides a score; {} if they do not say how pairs are scored.

    tokens: ids of two tokens [no, yes], whose logits' difference is scored; [None, yes]: one's logit
    activation: of ACTIVATIONS, if one is set
    template: variables of the chat template that makes a pair a prompt, of which `chat_template` is its name
    prompt: the system message before a pair, if there is one

    modules: those of modules.json
    """
    whole = _read(folder / "config_sentence_transformers.json")
    found: dict[str, Any] = {}
    inner = config.get("sentence_transformers")
    old = inner.get("activation_fn") if isinstance(inner, dict) else None
    if activation := whole.get("activation_fn") or old or config.get("sbert_ce_default_activation_function"):
        found["activation"] = _activation(folder, str(activation))
    if whole.get("model_type") != "CrossEncoder":
        return found if old or config.get("sbert_ce_default_activation_function") else {}
    kinds = [str(each.get("type")).rpartition(".")[2] for each in modules]
    if (at := logit_file(modules)) is not None:
        found["tokens"] = _tokens(folder / at)
    elif kinds not in ([], ["Transformer"]):
        raise UnsupportedError(f"{folder / 'modules.json'}: pairs are scored by {' and '.join(kinds)}, not supported")
    transformer = _read(folder / "sentence_bert_config.json")
    if "message" in (transformer.get("modality_config") or {}):
        values = (transformer.get("processing_kwargs") or {}).get("chat_template") or {}
        if not isinstance(values, dict):
            raise CheckpointError(f"{folder / 'sentence_bert_config.json'}: chat_template is no object")
        found["template"] = {name: value for name, value in values.items() if name not in OWN_VALUES}
        if prompt := (whole.get("prompts") or {}).get(whole.get("default_prompt_name")):
            found["prompt"] = str(prompt)
    return found


def logit_file(modules: list[dict[str, Any]]) -> str | None:
    """The path in the checkpoint of the file that names the tokens of a score."""
    for each in modules:
        path = str(each.get("path"))
        if str(each.get("type")).endswith(".LogitScore") and re.fullmatch(r"\w+", path):
            return f"{path}/config.json"
    return None


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _tokens(path: Path) -> list[int | None]:
    scored = read_json(path)
    tokens = [scored.get("false_token_id"), scored.get("true_token_id")]
    if not isinstance(tokens[1], int) or not isinstance(tokens[0], int | None):
        raise CheckpointError(f"{path} has no ids of tokens; download it again")
    return tokens


def _activation(folder: Path, name: str) -> str:
    last = name.rpartition(".")[2]
    if last not in ACTIVATIONS or not name.startswith("torch."):
        known = ", ".join(ACTIVATIONS)
        raise UnsupportedError(f"{folder}: activation_fn={name} of scores is not supported (supported: {known})")
    return last
