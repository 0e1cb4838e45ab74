"""docs/add-a-model.md is true: its worked example runs, and gives the numbers of transformers."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers

from atom import LLMEngine, SamplingParams

DOC = Path(__file__).parents[1] / "docs" / "add-a-model.md"


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    """A folder of the user's own with the file that the page shows."""
    (text,) = re.findall(r"```yaml\n# stablelm.yaml\n(.*?)```", DOC.read_text(), re.DOTALL)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "stablelm.yaml").write_text(text)
    return tmp_path


@pytest.mark.sampled(3)
@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize(
    "changes", [{}, {"use_parallel_residual": True}, {"use_qkv_bias": True, "tie_word_embeddings": True}]
)
def test_the_worked_example_gives_the_tokens_of_transformers(
    conf: Path, tmp_path: Path, changes: dict[str, Any], level: int
):
    torch.manual_seed(0)
    config = transformers.StableLmConfig(**{**tiny.SIZES, "hidden_size": 64, **changes})
    model = transformers.StableLmForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.2
    model.save_pretrained(tmp_path / "checkpoint")
    engine = LLMEngine(
        model=str(tmp_path / "checkpoint"), config_dirs=[str(conf)], level=level, kv_cache_memory=1 << 22
    )
    prompt = tiny.prompt(40)
    (answer,) = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
    tiny.assert_greedy(answer, prompt, model)


def test_the_command_of_the_page_runs_models_that_a_plain_run_leaves_out():
    root = DOC.parents[1]
    (of_script,) = re.findall(r'\n  (-m ".*") "\$@"\n', (root / "scripts" / "test").read_text())
    (of_page,) = re.findall(r"\n    scripts/test (.* NAME)\n", DOC.read_text())
    pytest = [sys.executable, "-m", "pytest", "-p", "pytest_timeout", "-q", "--collect-only"]
    words = shlex.split(f"{of_script} {of_page.replace('NAME', 'each_model_file')}")
    told = subprocess.run([*pytest, *words], cwd=root, capture_output=True, text=True, check=True).stdout
    collected = re.findall(r"::test_each_model_file_gives_the_logits_of_transformers\[(.*)\]", told)
    assert sorted(collected) == sorted(tiny.COMBINED)
