"""The package as users have it: a wheel that is built from the source distribution, installed, and run outside the repo."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MADE = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info")
MADE_AT_ROOT = shutil.ignore_patterns("build", "dist", "multirun")
BUILD = "import sys; from setuptools.build_meta import build_sdist; print(build_sdist(sys.argv[1]))"


def find_made(folder: str, names: list[str]) -> set[str]:
    """The names of a folder of a checkout that are no sources: environments, caches, what was built."""
    return MADE(folder, names) | (MADE_AT_ROOT(folder, names) if Path(folder) == ROOT else set())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_wheel_of_the_source_distribution_runs_outside_the_repo(tmp_path: Path):
    sources, installed, elsewhere = tmp_path / "sources", tmp_path / "installed", tmp_path / "elsewhere"
    shutil.copytree(ROOT, sources, ignore=find_made)
    elsewhere.mkdir()
    env = {**os.environ, "PYTHONPATH": ""}

    def run(*command: str, folder: Path) -> str:
        ended = subprocess.run(
            [sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    archive = tmp_path / run("-c", BUILD, str(tmp_path), folder=sources).splitlines()[-1]
    shutil.rmtree(sources)
    pip = ["-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    run(*pip, "--target", str(installed), str(archive), folder=elsewhere)

    env["PYTHONPATH"] = str(installed)
    assert run("-c", "import atom; print(atom.__file__)", folder=elsewhere) == f"{installed / 'atom' / '__init__.py'}\n"
    listed = run("-m", "atom", "job=recipe", folder=elsewhere)
    assert [path.stem for path in (ROOT / "recipes").glob("*.yaml") if path.stem not in listed] == []
    text = run("-m", "atom", "recipe=demo", "job=explain", "job.stage=semantic", "device=cpu", folder=elsewhere)
    assert text.count("def body(") == 1
    assert os.listdir(elsewhere) == []
