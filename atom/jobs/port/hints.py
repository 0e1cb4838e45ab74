"""Say which shipped model files read what a draft does not.

hint_of("model.layers.{layer}.linear_attn.A_log", known)
# "the role delta_decay, a gated_delta block; conf/model/qwen3_next.yaml has one"
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from atom.jobs.port.known import Known, part_of
from atom.jobs.port.stored import module_of, tail_of

ALIKE = 0.85  # of two names, from which a hint on the one may be of use for the other
MAX_FILES = 2  # that a hint names
GENERAL = {  # of config.json, of no use to a model's text
    *(
        "architectures",
        "auto_map",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "dtype",
        "torch_dtype",
        "model_type",
    ),
    *("transformers_version", "use_cache", "initializer_range", "_name_or_path", "quantization_config", "text_config"),
    *("vision_config", "sentence_transformers", "tie_word_embeddings", "vocab_size", "output_router_logits"),
    *("cross_encoder", "router_aux_loss_coef", "pretraining_tp", "rope_parameters", "gguf_architecture"),
}


def hint_of(pattern: str, known: Known) -> str:
    """Which role in which files has a tensor of such a name; that none has, if so."""
    roles, tail = known.roles(pattern), tail_of(module_of(pattern))
    if roles:
        is_exact = tail in known.by_tail or tail_of(pattern) in known.by_tail
        named = "the role" if is_exact else "it ends like the role"
        return " or ".join(
            f"{named} {role}{kind_of(role, files, known)}; {shown(files)}" for role, files in list(roles.items())[:2]
        )
    *_, parent, _ = ["", *tail.rsplit(".", 1)]
    near = {role: files for tail, roles in known.by_tail.items() if parent and tail.startswith(f"{parent}.")
            for role, files in roles.items() if part_of(role) is not None}  # fmt: skip
    if not near:
        return "no shipped file names one like it: a block that atom may not have"
    role, files = next(iter(near.items()))
    return f"a part of {parent}{kind_of(role, files, known)}, that is stored in another way; {shown(files)}"


def kind_of(role: str, files: Sequence[str], known: Known) -> str:
    """The kind of block that has a role, of the kinds of the files that name it; "" if several could."""
    part = part_of(role)
    kinds = sorted({kind for each in known.files if each.name in files for kind in each.kinds()})
    found = [kind for kind in kinds if part is not None and kind.startswith(part)]
    return f", {found[0]}" if found else ""


def shown(files: Sequence[str]) -> str:
    paths = [f"conf/model/{name}.yaml" for name in files[:MAX_FILES]]
    return f"{' and '.join(paths)} {'has' if len(paths) == 1 else 'have'} one"


def unread_fields(hf: Mapping[str, Any], read: Collection[str], known: Known) -> dict[str, str]:
    """The fields of config.json that nothing reads, each with its value and where another file reads it.

    If transformers has the model, only those that its code reads too.
    """
    theirs = read_by_transformers(str(hf.get("model_type")))
    hints = {}
    for key in hf:
        if key in GENERAL or "drop" in key or key in read or (theirs is not None and key not in theirs):
            continue
        like = key if key in known.fields else next(iter(difflib.get_close_matches(key, known.fields, 1, ALIKE)), None)
        fields = known.fields[like] if like is not None else {}
        hints[key] = "; ".join(
            f"{'' if like == key else f'like {like}: '}conf/model/{files[0]}.yaml has {at}: {known.lines[like, at]}"
            for at, files in list(fields.items())[:2]
            if like is not None
        )
    return hints


def read_by_transformers(model_type: str) -> set[str] | None:
    """The fields of a config that transformers' code of a model reads; None if it does not have the model."""
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name

        if model_type not in CONFIG_MAPPING_NAMES:
            return None
        folder = model_type_to_module_name(model_type)
        module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
        config = importlib.import_module(f"transformers.models.{folder}.configuration_{folder}")
        source, described = inspect.getsource(module), getattr(config, CONFIG_MAPPING_NAMES[model_type])
    except (ImportError, AttributeError, OSError):
        return None
    names = set(re.findall(r"config\.(\w+)", source)) | set(re.findall(r"getattr\(\w*\.?config, \"(\w+)\"", source))
    aliases = getattr(described, "attribute_map", {})
    return names | {aliases[name] for name in names if name in aliases}
