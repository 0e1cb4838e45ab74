"""Load tokenizers that only transformers reads, or that are code of a checkpoint.

tokenizer = load_with_transformers(Path("/models/kimi"), "tokenization_kimi.TikTokenTokenizer")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from atom.checkpoint.bounds import find_bounds
from atom.checkpoint.chat_template import named_templates
from atom.checkpoint.files import open_file
from atom.checkpoint.tokenizer import Tokenizer, TokenizerBackend
from atom.errors import CheckpointError, first_line


def load_with_transformers(folder: Path, code: str | None) -> Tokenizer:
    """Load a tokenizer in a format that only transformers reads, or of the class `code` in the checkpoint's own file.

    No other code of the checkpoint is run: AutoTokenizer would also run that of config.json.
    """
    for path in folder.iterdir():
        if path.exists() and not path.is_dir():
            open_file(path).close()  # transformers would block on a pipe
    try:
        if code is None:
            from transformers import AutoTokenizer

            theirs = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        else:
            from transformers.dynamic_module_utils import get_class_from_dynamic_module

            own = get_class_from_dynamic_module(code, str(folder), local_files_only=True)
            theirs = own.from_pretrained(folder, trust_remote_code=True, local_files_only=True)
        backend: TokenizerBackend = (
            theirs.backend_tokenizer if theirs.is_fast and not code else TransformersBackend(theirs)
        )
        templates = named_templates(theirs.chat_template)
        render = find_render(theirs) if code else None
        bounds = None if isinstance(backend, TransformersBackend) else find_bounds(backend, folder)
        special_tokens = theirs.special_tokens_map
        return Tokenizer(backend, special_tokens=special_tokens, templates=templates, render=render, bounds=bounds)
    except CheckpointError:
        raise
    except Exception as error:  # the checkpoint's own code may raise anything
        raise CheckpointError(f"transformers cannot read the tokenizer of {folder}: {first_line(error)}") from error


def find_render(theirs: Any) -> Callable[..., str] | None:
    """The function that renders chats, if a tokenizer's code overrides its template."""
    from transformers import PreTrainedTokenizerBase

    if type(theirs).apply_chat_template is PreTrainedTokenizerBase.apply_chat_template:
        return None
    return lambda messages, **values: str(theirs.apply_chat_template(messages, tokenize=False, **values))


class TransformersBackend:
    """Adapts a tokenizer of transformers, which may be written in Python, to the methods of `tokenizers`."""

    def __init__(self, theirs: Any) -> None:
        self._theirs = theirs
        self._ids: dict[str, int] = {
            **theirs.get_vocab(),
            **theirs.added_tokens_encoder,
        }  # a class may leave out what was added

    def encode(self, sequence: str, *, add_special_tokens: bool = True) -> Any:
        return SimpleNamespace(ids=self._theirs(sequence, add_special_tokens=add_special_tokens)["input_ids"])

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        return str(self._theirs.decode(list(ids), **options))

    def token_to_id(self, token: str) -> int | None:
        return self._ids.get(token)

    def get_vocab(self) -> Mapping[str, int]:
        return self._ids

    def get_vocab_size(self) -> int:
        return len(self._ids)

    def get_added_tokens_decoder(self) -> Mapping[int, Any]:
        return dict(self._theirs.added_tokens_decoder)
