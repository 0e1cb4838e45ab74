"""Read addresses of models on the hub, and choose among GGUF files.

    parse_address("https://huggingface.co/org/name/blob/main/q8.gguf")   # Address("org/name", "main", "q8.gguf")
    parse_address("hf.co/org/name-GGUF:Q4_K_M")                          # Address("org/name-GGUF", None, "Q4_K_M")
    choose_gguf(address, files)                                          # the parts of one file

A tag is a file's name, or what stands in it between dashes, dots or slashes, in any case of letters: mostly the name of
a quantization.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import NamedTuple
from urllib.parse import unquote

from atom.errors import CheckpointError

HOST = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/", re.IGNORECASE)
NAME = r"\w[\w.-]*(?:/\w[\w.-]*)?"
TAG = r"[^\s:/][^\s:]*"
PART = re.compile(r"-(\d{5})-of-(\d{5})(?=\.gguf$)")
OTHERS = ("datasets", "spaces", "collections", "papers", "blog", "docs")  # what else the hub has at its addresses
DEFAULT_TAG = "Q4_K_M"  # as llama.cpp has it
NO_MODEL = re.compile(r"mmproj[^/]*$|(^|/)imatrix", re.IGNORECASE)  # GGUF files next to those of models

MMPROJ = re.compile(r"mmproj[^/]*\.gguf$", re.IGNORECASE)
PREFERRED = ("bf16", "f16", "f32")  # in the name of an mmproj file, of several that a model has: the hub's dtype first


class Address(NamedTuple):
    repo: str  # owner/name
    revision: str | None = None
    tag: str | None = None  # of a GGUF file, or its name

    @property
    def may_be_gguf(self) -> bool:
        return self.tag is not None or re.search(r"[-_.]gguf$", self.repo, re.IGNORECASE) is not None


def parse_address(location: str) -> Address | None:
    """The address that a hub id, one with a tag, or a page of the hub means; None for anything else.

    CheckpointError for a page that is no model's.
    """
    host = HOST.match(location)
    path = location[host.end() :].partition("?")[0].partition("#")[0].rstrip("/") if host else location
    if host and (path.split("/")[0] in OTHERS or not path):
        raise CheckpointError(f"{location} is not a model's page; write owner/name")
    if page := re.fullmatch(rf"({NAME})/(tree|blob|resolve|raw)/([^/]+)(?:/(.+))?", path) if host else None:
        repo, _, revision, file = page.groups()
        if file is not None and not file.endswith(".gguf"):
            raise CheckpointError(f"{location} names a part of {repo}, which is opened whole; write {repo}")
        return Address(repo, unquote(revision), unquote(file) if file else None)
    match = re.fullmatch(rf"({NAME})(?::({TAG}))?", path)
    return Address(match[1], None, match[2]) if match else None


def short_name(location: str) -> str:
    """A page of the hub as owner/name or owner/name:TAG; other locations, and other revisions, as they are."""
    address = parse_address(location) if HOST.match(location) else None
    if address is None or address.revision not in (None, "main"):
        return location
    return address.repo + (f":{address.tag}" if address.tag else "")


def choose_gguf(address: Address, files: Collection[str]) -> list[str]:
    """The paths of the file that an address means, among a repository's files; of all its parts, if it is split.

    CheckpointError names those that there are, if none or several fit.
    """
    parts: dict[str, list[str]] = {}  # by the name without the number of a part
    for file in sorted(files):
        if file.endswith(".gguf") and not NO_MODEL.search(file):
            parts.setdefault(PART.sub("", file), []).append(file)
    if not parts:
        raise CheckpointError(
            f"{address.repo} has no .gguf file on the hub, so :{address.tag or DEFAULT_TAG} has no meaning"
        )
    chosen = find_tagged(parts, address.tag or DEFAULT_TAG)
    if not chosen and address.tag is None and len(parts) == 1:
        chosen = list(parts)
    if len(chosen) != 1:
        which = f"{len(chosen)} files of" if chosen else "no file of"
        tag = f":{address.tag}" if address.tag else f"the default :{DEFAULT_TAG}"
        listed = ", ".join(sorted(chosen or parts))
        raise CheckpointError(f"{address.repo}: {tag} is {which} {listed}; write {address.repo}:TAG or :FILE.gguf")
    whole = parts[chosen[0]]
    count = int(match[2]) if (match := PART.search(whole[0])) else 1
    if len(whole) != count:
        raise CheckpointError(f"{address.repo} has {len(whole)} of the {count} parts of {chosen[0]} on the hub")
    return whole


def find_tagged(names: Collection[str], tag: str) -> list[str]:
    """The names that are the tag, else those that end with it, else those that have it anywhere."""
    if tag.endswith(".gguf"):
        return [name for name in names if PART.sub("", tag) in (name, name.rpartition("/")[2])]
    word = rf"(?<![^-._/]){re.escape(tag)}"
    for pattern in (rf"{word}\.gguf$", rf"{word}(?![^-./])"):
        if found := [name for name in names if re.search(pattern, name, re.IGNORECASE)]:
            shortest = min(map(len, found))
            return [name for name in found if len(name) == shortest]  # Q4_K_M rather than UD-Q4_K_M
    return []


def order_mmproj(files: Iterable[str]) -> list[str]:
    """Those of these names or paths that are mmproj files', the best first."""

    def rank(file: str) -> tuple[int, str]:
        words = re.split(r"[^a-z0-9]", file.lower())
        return next((at for at, dtype in enumerate(PREFERRED) if dtype in words), len(PREFERRED)), file

    return sorted(filter(MMPROJ.search, files), key=rank)
