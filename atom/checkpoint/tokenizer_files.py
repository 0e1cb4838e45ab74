"""Load a tokenizer from the files of a checkpoint.

    tokenizer = load_tokenizer(Path("/models/tiny"))        # None if it has none

tokenizer.json is read by `tokenizers`, by the rules of transformers 5 (`TokenizersBackend`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from atom.checkpoint.added_tokens import read_declared
from atom.checkpoint.base import read_json
from atom.checkpoint.bounds import find_bounds
from atom.checkpoint.chat_template import named_templates
from atom.checkpoint.files import MAX_DESCRIPTION, MAX_TOKENIZER, read_file
from atom.checkpoint.tokenizer import Tokenizer, is_panic
from atom.checkpoint.transformers_tokenizer import load_with_transformers
from atom.errors import CheckpointError, first_line

OTHER_FORMATS = ("tokenizer.model", "vocab.json", "tiktoken.model", "tekken.json")  # read by transformers only


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Tokenizer | None:
    """Load the tokenizer of a folder; None if it has none.

    Without a tokenizer.json this needs transformers, and `trust_remote_code` for a tokenizer that is code.
    """
    path = folder / "tokenizer_config.json"
    config = read_json(path) if path.exists() else {}
    if not (folder / "tokenizer.json").exists():
        code = find_code(config)
        if code is None and not any((folder / name).exists() for name in OTHER_FORMATS):
            return None
        if code is not None and not trust_remote_code:
            raise CheckpointError(
                f"the tokenizer of {folder} is code of the checkpoint's own: read it, then set trust_remote_code=true"
            )
        return load_with_transformers(folder, code)

    try:
        backend = read_backend(folder / "tokenizer.json")
        declared = read_declared(folder, config, backend.get_added_tokens_decoder())
        declared.add_to(backend)
        backend.encode_special_tokens = config.get("split_special_tokens") is True
        return Tokenizer(
            backend,
            special_tokens=declared.special_tokens,
            templates=read_templates(folder, config),
            bounds=find_bounds(backend, folder),
        )
    except CheckpointError:
        raise
    except BaseException as error:  # the Rust library raises Exception itself, or panics; malformed files much else
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise CheckpointError(f"cannot read the tokenizer files of {folder} ({reason}); download them again") from error


def read_backend(path: Path) -> tokenizers.Tokenizer:
    """Read a tokenizer.json. Only it decides the tokens around a text: the config's add_bos_token is ignored."""
    backend = tokenizers.Tokenizer.from_buffer(read_file(path, MAX_TOKENIZER))
    backend.no_truncation()
    backend.no_padding()
    return backend


def read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Read chat templates by name: from their own files, else from tokenizer_config.json."""
    files = {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    if (folder / "chat_template.jinja").exists():
        files["default"] = folder / "chat_template.jinja"
    if files:
        return {name: read_file(path, MAX_DESCRIPTION).decode() for name, path in files.items()}
    return named_templates(config.get("chat_template"))


def find_code(config: Mapping[str, Any]) -> str | None:
    """The class "module.Name" of a tokenizer in tokenizer_config.json: the fast one, else the other."""
    named = config.get("auto_map")
    classes = named.get("AutoTokenizer") if isinstance(named, dict) else named
    names = classes if isinstance(classes, list) else [classes]
    return next((name for name in reversed(names) if isinstance(name, str)), None)
