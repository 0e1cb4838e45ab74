"""Find conf/ and recipes/, in a checkout or in a wheel."""

from __future__ import annotations

from pathlib import Path


def project_folder(name: str) -> Path:
    """conf/ or recipes/: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).resolve().parents[1]
    return package / name if (package / name).is_dir() else package.parent / name


CONF = project_folder("conf")
