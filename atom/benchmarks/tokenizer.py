"""Load the tokenizer of the model under test, without torch.

    tokenizer = load_tokenizer("org/model")             # a folder or a hub id
    tokenizer.encode("Hello")                           # token ids, with those around every text (mostly BOS)
    tokenizer.apply_template("Hello")                   # the prompt of a chat with this one message

Without a tokenizer.json, only transformers' AutoTokenizer can read the files, and that loads torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atom.benchmarks.benchmark_utils import UsageError

WANTED = ["*.json", "*.jinja", "*.py", "*.txt", "*.model", "*.tiktoken"]  # files downloaded from the hub
SKIPPED = ["*/*", "*.index.json"]
FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "tiktoken.model")


class Tokenizer:
    """Wraps a tokenizer of transformers: the methods that are used."""

    def __init__(self, theirs: Any) -> None:
        self._theirs = theirs
        self._backend = getattr(theirs, "backend_tokenizer", None)  # many times faster than its wrapper
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()
        self.vocab_size: int = len(theirs)
        self.added_ids = frozenset({*theirs.all_special_ids, *theirs.added_tokens_decoder})  # not made of plain text
        self.has_template = bool(theirs.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if self._backend is None:
            return list(self._theirs(text, add_special_tokens=add_special_tokens)["input_ids"])
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        if self._backend is None:
            return str(self._theirs.decode(list(ids), clean_up_tokenization_spaces=False))
        text: str = self._backend.decode(list(ids), skip_special_tokens=False)
        return text

    def apply_template(self, text: str) -> str:
        """The prompt that a chat server makes from one user message."""
        messages = [{"role": "user", "content": text}]
        return str(self._theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> Tokenizer:
    """Load a tokenizer. name: a folder or a hub id. UsageError if it has no tokenizer or cannot be downloaded."""
    folder = find_folder(name)
    if not any((folder / file).exists() for file in FILES):
        raise UsageError(f"{name} has no tokenizer: it has none of {', '.join(FILES)}; name another with --tokenizer")
    try:
        if (folder / "tokenizer.json").exists():
            from transformers import PreTrainedTokenizerFast

            return Tokenizer(PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True))
        from transformers import AutoTokenizer

        theirs = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
        return Tokenizer(theirs)
    except Exception as error:  # the Rust library raises plain Exception, a checkpoint's own code anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(f"cannot load a tokenizer from {name} ({reason}); name another with --tokenizer") from error


def find_folder(name: str) -> Path:
    """The folder itself, or that of a snapshot from the hub, which is downloaded if it is not in the cache."""
    if Path(name).is_dir():
        return Path(name)
    if name.endswith(".gguf") or Path(name).is_file():
        raise UsageError(
            f"{name} is a file, and tokenizers are read from none: name a folder or hub id that has it with --tokenizer"
        )
    from huggingface_hub import errors, snapshot_download
    from tqdm import tqdm  # type: ignore[import-untyped]

    class NoBar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **(options | {"disable": True}))

    mend = "name a folder that has one with --tokenizer, or check the network, HF_TOKEN and HF_HUB_OFFLINE"
    try:
        return Path(snapshot_download(name, allow_patterns=WANTED, ignore_patterns=SKIPPED, tqdm_class=NoBar))
    except (errors.HFValidationError, errors.RepositoryNotFoundError):
        raise UsageError(f"no tokenizer {name}: no such folder here and no such model on the hub; {mend}") from None
    except errors.LocalEntryNotFoundError:
        raise UsageError(f"no tokenizer {name}: no folder, not in the hub's cache, no way to the hub; {mend}") from None
    except Exception as error:  # the HTTP library beneath has changed over versions, and its errors with it
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(f"cannot fetch the tokenizer {name} ({reason}); {mend}") from error
