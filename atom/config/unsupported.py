"""What architectures that atom does not run would need.

    missing_block("DeepseekV41ForCausalLM")          # "decoder replay"

conf/unsupported.yaml has them; docs/models.md lists them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from atom.config.bounded_yaml import parse_yaml
from atom.config.folders import CONF


@functools.cache
def unsupported() -> Mapping[str, str]:
    """What each architecture of conf/unsupported.yaml needs, by its name."""
    table: dict[str, str] = parse_yaml((CONF / "unsupported.yaml").read_text("utf-8"))
    return table


def missing_block(architecture: str) -> str | None:
    """What this architecture needs that atom does not have; None if the table does not list it."""
    return unsupported().get(architecture)
