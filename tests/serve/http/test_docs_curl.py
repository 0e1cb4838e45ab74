"""The commands of curl in README and docs/, sent to one server of a tiny model in the order of each page."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import adapters
import pytest
import serving
import torch
import transformers
from safetensors.torch import save_file

ROOT = Path(__file__).parents[3]
COMMAND = re.compile(r"^    (curl (?:.*\\\n)*.*)", re.MULTILINE)
PAGES = {
    path.name: commands
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    if (commands := COMMAND.findall(path.read_text()))
}

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")


@pytest.fixture(scope="module")
def places(talker: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What stands here for the places that the pages name."""
    model, folder = transformers.AutoModelForCausalLM.from_pretrained(talker), tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("sql", "sql2")):
        adapters.save(model, folder / name, seed=seed)
    save_file({"model.layers.1": torch.ones(model.config.hidden_size)}, folder / "joy.safetensors")
    started = serving.start(
        talker, folder, f"serve.lora_modules={{sql: '{folder}/sql'}}", "serve.max_loras=2",
        "serve.allow_runtime_lora_updating=true", "serve.pooler_config.pooling_type=LAST",
        "serve.enable_sleep_mode=true", "passes.taps=[model.layers.1]", f"passes.steer={{joy: '{folder}/joy.safetensors'}}",
    )  # fmt: skip
    yield {"localhost:8000": started.url, "/adapters/": f"{folder}/", "model.layers.14": "model.layers.1"}
    started.process.kill()
    started.process.wait()


def test_the_pages_have_such_commands():
    assert {"README.md", "deploy.md", "lora.md", "serving.md"} <= set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_curl_is_answered(page: str, places: dict[str, str]):
    for command in PAGES[page]:
        here = command.replace("curl ", "curl --fail-with-body --silent --show-error ", 1)
        for place, instead in places.items():
            here = here.replace(place, instead)
        done = subprocess.run(["bash", "-c", here], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
