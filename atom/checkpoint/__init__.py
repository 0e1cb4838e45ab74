"""Open a checkpoint: config, tensors under their hub names, tokenizer.

A checkpoint is a folder, a hub id, a page of the hub or a .gguf file.

    checkpoint = open_checkpoint("org/name")
    tokenizer = checkpoint.tokenizer()
    checkpoint.config["hidden_size"], checkpoint.tensors["model.norm.weight"]
    checkpoint.read("model.norm.weight")         # memoryview
    stop_ids(checkpoint, tokenizer)              # tokens that end an answer

It imports no torch, and transformers only for a tokenizer that nothing else can read.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from atom.checkpoint.address import choose_gguf, order_mmproj, parse_address
from atom.checkpoint.base import NO_FACTS, Checkpoint, GGUFFacts, StoredTensor
from atom.checkpoint.folder import FolderCheckpoint
from atom.checkpoint.joined import DRAFT_PREFIX, JoinedCheckpoint
from atom.checkpoint.progress import SILENT, CheckedProgress, Progress, RichProgress, SilentProgress, WatchedProgress
from atom.checkpoint.stacked import unstack
from atom.checkpoint.tokenizer import Tokenizer
from atom.errors import CheckpointError

__all__ = [
    "DRAFT_PREFIX",
    "SILENT",
    "CheckedProgress",
    "Checkpoint",
    "GGUFFacts",
    "JoinedCheckpoint",
    "Progress",
    "RichProgress",
    "SilentProgress",
    "StoredTensor",
    "Tokenizer",
    "WatchedProgress",
    "fetch_file",
    "open_checkpoint",
    "stop_ids",
]


def open_checkpoint(
    location: str,
    *,
    revision: str | None = None,
    gguf: GGUFFacts = NO_FACTS,
    stacked: Mapping[str, Sequence[str]] = {},
    weights: bool = True,
    progress: Progress = SILENT,
    towers: Collection[str] = (),
    mmproj: str | None = None,
    images: bool = True,
) -> Checkpoint:
    """Open a folder, a .gguf file or, if no such path exists, what a hub id or an address of the hub names.

    revision: of a hub id.
    gguf: facts that a GGUF file leaves out.
    stacked: the parts of tensors that may be stored as one, see `unstack`.
    weights: False reads and downloads only the description of the model.
    towers: modules that read images, whose tensors it has besides those of the text.
    mmproj: the file that has the tower of a GGUF file; None: one that lies next to it.
    images: False looks for no such file.

    Raises CheckpointError, UnsupportedError.
    """
    path = Path.home() / location[2:] if location.startswith("~/") else Path(location)
    try:
        is_folder, is_file = bool(location) and path.is_dir(), path.is_file()
    except OSError as error:
        raise CheckpointError(f"cannot read {location}: {error.strerror}") from None
    if revision is not None and (is_folder or is_file):
        raise CheckpointError(f"{location} is on this disk and has no revision {revision}; only a hub id has")
    checkpoint: Checkpoint
    if is_folder:
        checkpoint = FolderCheckpoint(path, weights=weights, towers=towers)
    elif is_file:
        if path.suffix != ".gguf":
            raise CheckpointError(f"{location} is no .gguf file; name the folder of a safetensors checkpoint instead")
        from atom.checkpoint.gguf import GGUFCheckpoint
        from atom.checkpoint.mmproj import with_tower

        checkpoint = GGUFCheckpoint(path, gguf)
        if images:
            found = [path.parent / name for name in order_mmproj(each.name for each in path.parent.iterdir())]
            checkpoint = with_tower(checkpoint, mmproj, found, towers, gguf)
    else:
        checkpoint = _open_from_hub(location, revision, gguf, weights, progress, towers, mmproj, images)
    if mmproj is not None and isinstance(checkpoint, FolderCheckpoint):
        raise CheckpointError(f"mmproj={mmproj} is of a .gguf file, and {location} is none; leave it out")
    return unstack(checkpoint, stacked)


def _open_from_hub(
    location: str,
    revision: str | None,
    gguf: GGUFFacts,
    weights: bool,
    progress: Progress,
    towers: Collection[str],
    mmproj: str | None,
    images: bool,
) -> Checkpoint:
    """Open what a hub id or an address names; a GGUF file is downloaded whole even for its description, the header."""
    address = parse_address(location)
    if address is None or (location.endswith(".gguf") and address.repo == location):
        message = "no such folder or .gguf file, and no hub id (owner/name, owner/name-GGUF:Q4_K_M)"
        name, _, revision = location.partition("@")
        if revision and parse_address(name):
            message += f"; write checkpoint={name} revision={revision}"
        raise CheckpointError(f"no checkpoint {location!r}: {message}")
    if revision is not None and address.revision not in (None, "main", revision):
        raise CheckpointError(
            f"{location} is of the revision {address.revision}, not {revision}; leave one of them out"
        )
    from atom.checkpoint.hub import download, download_file, list_files, tensor_names

    name, revision = address.repo, revision or address.revision
    if not address.may_be_gguf:
        folder = download(name, revision=revision, weights=weights, progress=progress)
        commit = folder.name  # of which the description is, whatever the revision's name means by now
        names = functools.partial(tensor_names, name, commit)
        return FolderCheckpoint(folder, location=name, weights=weights, fetch_names=names, towers=towers)
    from atom.checkpoint.gguf import GGUFCheckpoint
    from atom.checkpoint.mmproj import with_tower

    listed = list_files(name, revision=revision)
    files = choose_gguf(address, listed)
    first, *_ = [download_file(name, file, revision=revision, progress=progress) for file in files]
    checkpoint = GGUFCheckpoint(first, gguf, location=f"{name}/{files[0]}")
    if not images:
        return checkpoint
    best = order_mmproj(listed)[:1] if mmproj is None else []
    found = [download_file(name, file, revision=revision, progress=progress) for file in best]
    return with_tower(checkpoint, mmproj, found, towers, gguf)


def stop_ids(checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> frozenset[int]:
    """The tokens that end an answer: of generation_config, config and tokenizer together.

    CheckpointError if eos_token_id is neither a whole number, nor a list of them, nor null.
    """
    ids = set(tokenizer.eos_ids) if tokenizer else set()
    for described in (checkpoint.generation_config, checkpoint.config):
        eos = described.get("eos_token_id")
        given = eos if isinstance(eos, list) else [] if eos is None else [eos]
        if not all(type(id) is int for id in given):
            where = f"{checkpoint.location}: eos_token_id={json.dumps(eos)[:100]} in its config.json"
            raise CheckpointError(
                f"{where} or generation_config.json is neither a token id nor a list of them; mend it"
            )
        ids.update(given)
    return frozenset(ids)


def fetch_file(name: str, path: str, *, revision: str | None = None) -> Path:
    """Download one file of a hub id, or find it in the hub's cache. Raises CheckpointError."""
    from atom.checkpoint.hub import download_file

    return download_file(name, path, revision=revision)
