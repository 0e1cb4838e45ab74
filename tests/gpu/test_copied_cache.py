"""A cache folder that was copied starts a model with no compiler, no pass and nothing new in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from atom.cache.files import BINARIES

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
LAUNCH = """
import sys
if sys.argv.pop(1) == "copied":
    import atom.passes.pipeline as pipeline

    def refuse(*args, **kwargs):
        raise AssertionError("a pass ran")

    pipeline.PIPELINE = tuple((refuse, *rest) for _, *rest in pipeline.PIPELINE)
from atom.cli import main
sys.exit(main())
"""


def launch(model: Path, cache: Path, home: Path, way: str) -> str:
    """What it answers; all that is cached lies in the cache folder, and the other folders are empty."""
    home.mkdir()
    env = {**os.environ, "HOME": str(home), "TMPDIR": str(home), "TRITON_HOME": str(home)}
    if way == "copied":
        env |= {"CC": "/bin/false", "CXX": "/bin/false", "TRITON_PTXAS_PATH": "/bin/false"}
    command = [
        sys.executable, "-c", LAUNCH, way, "job=generate", f"checkpoint={model}", f"cache={cache}", "level=3",
        "prompts=[[1,2,3],[4,5,6,7]]", "sampling.temperature=0", "sampling.ignore_eos=true", "sampling.max_tokens=16",
        "job.output=json", "serve.num_kvcache_blocks=64", "serve.max_num_seqs=4",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return "\n".join(line.partition('"ttft"')[0] for line in done.stdout.splitlines())


def files_of(folder: Path) -> dict[str, bytes]:
    kept = (BINARIES, "pieces", "artifacts", "tuned")
    return {str(path.relative_to(folder)): path.read_bytes() for name in kept for path in folder.glob(f"{name}/**/*")
            if path.is_file()}  # fmt: skip


def test_a_copied_cache_starts_without_a_compiler(checkpoints: Any, tmp_path: Path):
    model, first, second = checkpoints("qwen3"), tmp_path / "first", tmp_path / "second"
    answered = launch(model, first, tmp_path / "home", "first")
    made = files_of(first)
    assert any(name.startswith(f"{BINARIES}/") for name in made), made.keys()
    shutil.copytree(first, second)
    shutil.rmtree(first)
    assert launch(model, second, tmp_path / "other home", "copied") == answered
    assert files_of(second) == made
