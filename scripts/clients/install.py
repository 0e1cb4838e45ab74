"""Install clients: a Python package in its own environment, npm's in one folder.

python = install_python("litellm", "1.110.2", folder)      # its interpreter
version = install_npm({"@openai/codex": None}, folder)     # None: the newest

Each has its own environment because they do not fit together: instructor 1.17 takes jiter < 0.15, openai 3.57 >= 0.16.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

EXTRAS = {"pydantic-ai-slim": "openai"}  # that they need to speak to a server
# what vllm computes with, which its benchmark does without; torch is that of the environment below
UNUSED = """\
torch
torchaudio
torchvision
torchcodec
triton
flashinfer-python
tilelang
nvidia-cudnn-frontend
nvidia-cutlass-dsl
quack-kernels
tokenspeed-mla
humming-kernels
fastsafetensors
pynvvideocodec
nvtx
"""


class MissingError(Exception):
    """This machine lacks a program."""


def install_python(name: str, version: str | None, folder: Path) -> Path:
    """The interpreter of an environment with a package, and after it that of this process. None: the newest version."""
    extra = f"[{EXTRAS[name]}]" if name in EXTRAS else ""
    requirement = f"{name}{extra}" + (f"=={version}" if version else "")
    environment = folder / name
    python, stamp = environment / "bin" / "python", environment / "installed"
    if version and stamp.exists() and stamp.read_text() == requirement:
        return python
    print(f"installing {requirement}", file=sys.stderr)
    uv = [str(find_uv(folder))]
    subprocess.run([*uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(environment)], check=True)
    unused = folder / "unused"
    unused.write_text(UNUSED)
    command = [*uv, "pip", "install", "--quiet", "--python", str(python), "--excludes", str(unused), requirement]
    subprocess.run(command, check=True)
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "base.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})")
    stamp.write_text(requirement)
    return python


def find_uv(folder: Path) -> Path:
    """uv, which finds versions that fit together where pip gives up."""
    uv = folder / "uv" / "bin" / "uv"
    if not uv.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder / "uv")], check=True)
        command = [str(uv.with_name("python")), "-m", "pip", "install", "--quiet", "uv>=0.9"]
        subprocess.run(command, check=True)
    return uv


def install_npm(packages: Mapping[str, str | None], folder: Path) -> dict[str, str]:
    """The versions of packages that are installed in the folder then. None: the newest. MissingError without npm"""
    if not (shutil.which("node") and shutil.which("npm")):
        raise MissingError("it needs Node.js and npm, which are not installed")
    wanted = [
        f"{name}@{version or 'latest'}"
        for name, version in packages.items()
        if version is None or find_version(name, folder) != version
    ]
    if wanted:
        print(f"installing {' '.join(wanted)}", file=sys.stderr)
        folder.mkdir(exist_ok=True)
        quiet = ["--no-audit", "--no-fund", "--loglevel=error"]
        subprocess.run(["npm", "install", *quiet, "--prefix", str(folder), *wanted], check=True, stdout=sys.stderr)
    return {name: find_version(name, folder) or "none" for name in packages}


def find_version(name: str, folder: Path) -> str | None:
    about = folder / "node_modules" / name / "package.json"
    return str(json.loads(about.read_text())["version"]) if about.exists() else None
