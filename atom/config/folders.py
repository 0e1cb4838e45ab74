"""Find conf/ and recipes/, and check the config dirs of a user.

conf/ and recipes/ are in a checkout, or in a wheel.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from atom.errors import ConfigError
from atom.process.messages import say

GROUPS = ("job", "model", "parallel", "quant", "serve")  # the folders of conf/ that a config dir may have too


def project_folder(name: str) -> Path:
    """conf/ or recipes/: next to the package in a checkout, inside it in a wheel."""
    package = Path(__file__).resolve().parents[1]
    return package / name if (package / name).is_dir() else package.parent / name


CONF = project_folder("conf")


def check_config_dirs(folders: Sequence[str]) -> None:
    """Raise ConfigError if the folder does not exist; warn, once a process, of one that nothing is read from."""
    for folder in folders:
        if not Path(folder).is_dir():
            raise ConfigError(f"config dir {folder}: there is no such folder")
        warn_of_useless(Path(folder).absolute())


@functools.cache
def warn_of_useless(folder: Path) -> None:
    """Warn of a folder without a group of conf/, as my_conf/model in place of my_conf."""
    known = (*GROUPS, "recipes", "hydra")
    if any((folder / name).is_dir() for name in known):
        return
    hint = f"; write {folder.parent}" if folder.name in known else ""
    say(f"config dir {folder}: it has none of {', '.join(f'{name}/' for name in known)}{hint}")
