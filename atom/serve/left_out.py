"""Log what a request has that is left out, once for each kind.

left_out = LeftOut()
left_out.note("web_search", "a tool of the provider's own is not run here")     # a line in the log, the first time

Agents send the same tools with every request, so a line for each request would say nothing new.
"""

from __future__ import annotations

import logging

from atom.serve.errors import shown

LOG = logging.getLogger("atom.serve")
MAX_KINDS = 100  # clients choose the names, so neither the memory nor the log may grow with them


class LeftOut:
    def __init__(self) -> None:
        self._kinds: set[str] = set()

    def note(self, kind: str, why: str) -> None:
        """Log that what is of this kind is left out of requests, unless a line has said so."""
        kind = shown(kind)
        if kind in self._kinds or len(self._kinds) >= MAX_KINDS:
            return
        self._kinds.add(kind)
        LOG.info("left out of requests: %s", why, extra={"fields": {"kind": kind}})
