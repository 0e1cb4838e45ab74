"""The prefix tree: find the cached KV of a new prompt's beginning.

The pools own the blocks.

    prefixes = PrefixCache()
    root = prefixes.extend(None, b"salt")              # all else that the KV depends on
    first = prefixes.extend(root, pack(tokens[:16]))   # the prefix of one block; None if its hash is taken
    first.blocks["full"] = 7                           # block 7 of that kind holds its last 16 tokens
    prefixes.find(root, pack(tokens[:16])) is first

A prefix is a block of tokens after its parent. Its hash, xxhash64 of the parent's hash and the tokens, only finds it:
parent and tokens are compared, so that a collision costs a hit and never gives a wrong one.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from xxhash import xxh64_intdigest


def pack(tokens: Iterable[int]) -> bytes:
    """Token ids as bytes, TOKEN_BYTES each."""
    return array("q", tokens).tobytes()


TOKEN_BYTES = len(pack([0]))


def count_common(first: SequenceOf[int], second: SequenceOf[int]) -> int:
    """The number of tokens with which both begin."""
    start, stop = 0, min(len(first), len(second))
    while start < stop:
        middle = (start + stop + 1) // 2
        if first[start:middle] == second[start:middle]:
            start = middle
        else:
            stop = middle - 1
    return start


def chain_hash(parent: int, content: bytes) -> int:
    return xxh64_intdigest(parent.to_bytes(8, "little") + content)


class Prefix:
    """A node of the tree. It lives while it has blocks or users: children, and sequences that have come this far."""

    __slots__ = ("blocks", "content", "digest", "key", "num_users", "parent")

    def __init__(self, parent: Prefix | None, content: bytes, key: int) -> None:
        self.parent = parent
        self.content = content
        self.key = key
        self.blocks: dict[str, int] = {}  # state kind -> the block that holds `content`
        self.num_users = 0
        self.digest: bytes | None = None  # of all its content, if KV is kept in files


class PrefixCache:
    def __init__(self) -> None:
        self.by_hash: dict[int, Prefix] = {}

    def find(self, parent: Prefix | None, content: bytes) -> Prefix | None:
        found = self.by_hash.get(chain_hash(parent.key if parent else 0, content))
        return found if found and found.parent is parent and found.content == content else None

    def extend(self, parent: Prefix | None, content: bytes) -> Prefix | None:
        """Find or add the prefix; None while another one has its hash."""
        key = chain_hash(parent.key if parent else 0, content)
        found = self.by_hash.get(key)
        if found is None:
            found = self.by_hash[key] = Prefix(parent, content, key)
            if parent:
                parent.num_users += 1
        return found if found.parent is parent and found.content == content else None

    def leave(self, prefix: Prefix) -> None:
        """Remove one user."""
        prefix.num_users -= 1
        self.prune(prefix)

    def forget(self, prefix: Prefix, kind: str) -> None:
        """Forget its block of that kind, which is used for something else from now on."""
        del prefix.blocks[kind]
        self.prune(prefix)

    def prune(self, prefix: Prefix | None) -> None:
        """Remove a prefix that has neither blocks nor users, and those before it that are left without."""
        while prefix and not prefix.blocks and not prefix.num_users:
            del self.by_hash[prefix.key]
            prefix = prefix.parent
            if prefix:
                prefix.num_users -= 1
