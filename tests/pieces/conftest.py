from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from filelock import FileLock
from pieces.text import TEXT

from atom.pieces import compile_pieces


@pytest.fixture(scope="session")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all programs of this machine but openssl."""
    folder = tmp_path_factory.mktemp("tools")
    for place in os.get_exec_path():
        for program in Path(place).iterdir() if Path(place).is_dir() else ():
            if program.name != "openssl" and not (folder / program.name).is_symlink():
                (folder / program.name).symlink_to(program)
    return folder


@pytest.fixture(scope="session")
def compiled(tools: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the text's code, made with these programs, once for all processes of a run."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            files = compile_text(tools)
            folder.mkdir()
            for name, content in files.items():
                (folder / name).write_bytes(content)
    return folder


def compile_text(tools: Path) -> dict[str, bytes]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(tools))
        assert shutil.which("g++") and not shutil.which("openssl")
        ((text, files),) = compile_pieces([TEXT])
    assert text == TEXT
    return files
