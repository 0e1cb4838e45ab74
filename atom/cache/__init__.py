"""The cache folder on disk: trusted entries by kind and key.

    cache = Cache(Path("~/.cache/atom-run"))
    with cache.lock("pieces", key):                              # one process builds, the others wait
        folder = cache.find("pieces", key)                       # None: missing, or not to be trusted
        if folder is None:
            folder = cache.publish("pieces", key, {"piece.so": code}, about={"name": "layer of llama"})
    for line in cache.warnings: …                                # what was ignored or could not be written, and why

Files of the cache are code that runs as the user. So an entry is used only when its manifest names every file with size
and sha256, and when nobody but the user and root can have written it. It appears and disappears by one rename; a hit
writes nothing.
"""

from atom.cache.bundle import export, is_for_gpu, open_bundle
from atom.cache.cache import Cache, Entry
from atom.cache.keys import digest, key_of

__all__ = ["Cache", "Entry", "digest", "export", "is_for_gpu", "key_of", "open_bundle"]
