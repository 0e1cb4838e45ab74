"""docs/add-a-model.md is true: its worked example runs, and gives the numbers of transformers."""

from __future__ import annotations

import contextlib
import io
import json
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
from parting import naming_line

from atom import LLMEngine, SamplingParams
from atom.cli import main
from atom.config.load import load
from atom.errors import UnsupportedError

DOC = Path(__file__).parents[1] / "docs" / "add-a-model.md"


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    """A folder of the user's own with the file that the page shows."""
    (text,) = re.findall(r"```yaml\n# aria.yaml\n(.*?)```", DOC.read_text(), re.DOTALL)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "aria.yaml").write_text(text)
    return tmp_path


def test_the_worked_example_is_the_shipped_file(conf: Path):
    shown, shipped = (folder / "model" / "aria.yaml" for folder in (conf, DOC.parents[1] / "conf"))
    assert shipped.read_text().partition("\n")[2] == shown.read_text()


TOWER = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def saved_by_itself(folder: Path) -> Any:
    """The text model that the page's lines save, of the checkpoint in this folder."""
    (lines,) = re.findall(r"```python\n(from transformers import Aria.*?)```", DOC.read_text(), re.DOTALL)
    found: dict[str, Any] = {}
    exec(lines.replace("/models/aria_text", f"{folder}/text").replace("/models/aria", f"{folder}/checkpoint"), found)
    assert (folder / "text" / "model.safetensors").exists()
    return found["text"].eval()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("changes", [{}, {"moe_topk": 3, "moe_num_shared_experts": 1, "tie_word_embeddings": True}])
def test_the_worked_example_gives_the_tokens_of_transformers(
    conf: Path, tmp_path: Path, changes: dict[str, Any], level: int
):
    torch.manual_seed(0)
    sizes = {"moe_num_experts": 6, "moe_topk": 2, "moe_num_shared_experts": 2, "intermediate_size": 24}
    text_config = transformers.AriaTextConfig(**{**tiny.SIZES, **sizes, **changes})
    config = transformers.AriaConfig(text_config=text_config, vision_config=TOWER, image_token_index=9)
    whole = transformers.AriaForConditionalGeneration(config)
    for parameter in whole.parameters():
        parameter.data += torch.randn_like(parameter) * 0.2
    whole.save_pretrained(tmp_path / "checkpoint")
    model = saved_by_itself(tmp_path)
    engine = LLMEngine(
        model=str(tmp_path / "checkpoint"), config_dirs=[str(conf)], level=level, kv_cache_memory=1 << 22
    )
    prompt = tiny.prompt(40)
    (answer,) = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
    with naming_line(engine.config, model, prompt):
        tiny.assert_greedy(answer, prompt, model)
    engine.close()


@pytest.fixture
def nanochat(tmp_path: Path) -> tuple[Path, Any]:
    """The second file of the page, in `conf`, and a checkpoint next to it; its model."""
    (text,) = re.findall(r"```yaml\n# nanochat.yaml\n(.*?)```", DOC.read_text(), re.DOTALL)
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "nanochat.yaml").write_text(text)
    torch.manual_seed(0)
    model = transformers.NanoChatForCausalLM(transformers.NanoChatConfig(**tiny.SIZES)).eval()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.2
    model.save_pretrained(tmp_path / "checkpoint")
    return tmp_path, model


def edit(text: str) -> str:
    """A saved text, with the lines that the page shows in place of those of the same calls."""
    (shown,) = re.findall(r"```python\n(    cos, .*?)```", DOC.read_text(), re.DOTALL)
    for line in shown.splitlines():
        if line.endswith("(…)"):
            call = line.rpartition(" = ")[2].removesuffix("…)")
            saved = next(each for each in text.splitlines() if f" = {call}" in each)
            last = line.replace("…)", saved.partition(call)[2])
            text = text.replace(saved, last)
        else:
            text = text.replace(last, f"{last}\n{line}")
    return text


@pytest.mark.sampled(2)
@pytest.mark.parametrize("level", [0, 1])
def test_a_file_and_an_edited_line_give_the_tokens_of_transformers(nanochat: tuple[Path, Any], level: int):
    folder, model = nanochat
    with contextlib.redirect_stdout(io.StringIO()) as saved:
        assert main([f"--config-dir={folder}/conf", f"checkpoint={folder}/checkpoint", "job.stage=semantic"]) == 0
    edited = edit(saved.getvalue())
    assert len(edited.splitlines()) == len(saved.getvalue().splitlines()) + 1
    (folder / "mine.py").write_text(edited)
    options = {"model": str(folder / "checkpoint"), "config_dirs": [str(folder / "conf")], "level": level}
    engine = LLMEngine(**options, kv_cache_memory=1 << 22, **{"job.graph": str(folder / "mine.py")})
    prompt = tiny.prompt(40)
    (answer,) = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
    with naming_line(engine.config, model, prompt):
        tiny.assert_greedy(answer, prompt, model)
    engine.close()


def test_what_the_file_assumes_is_held(nanochat: tuple[Path, Any]):
    folder, _ = nanochat
    path = folder / "checkpoint" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"attention_bias": True}))
    with pytest.raises(
        UnsupportedError, match=r"attention_bias=true in its config\.json is not supported \(supported: false"
    ):
        load([f"checkpoint={folder}/checkpoint"], config_dirs=[str(folder / "conf")])


@pytest.mark.slow
def test_the_command_for_one_model_runs_those_that_a_plain_run_leaves_out():
    root = DOC.parents[1]
    (of_script,) = re.findall(r'\n  (-m ".*") "\$@"\n', (root / "scripts" / "test").read_text())
    (of_page,) = re.findall(r"`scripts/test (.* NAME)`", (root / "CONTRIBUTING.md").read_text())
    pytest = [sys.executable, "-m", "pytest", "-p", "pytest_timeout", "-q", "--collect-only"]
    words = shlex.split(f"{of_script} {of_page.replace('NAME', 'each_model_file')}")
    out = subprocess.run([*pytest, *words], cwd=root, capture_output=True, text=True, check=True).stdout
    collected = re.findall(r"::test_each_model_file_gives_the_logits_of_transformers\[(.*)\]", out)
    assert sorted(collected) == sorted(tiny.COMBINED)
