"""The fields of a tower: the numbers of a checkpoint's image processor."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import vision
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from atom.config import VisionConfig
from atom.config.load import load
from atom.errors import AtomError, ConfigError, UnsupportedError

NUMBERS = {"patch_size": 4, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("qwen3_vl")
    vision.save("Qwen3VL", made)
    return made


def load_vision(folder: Path) -> VisionConfig:
    found = load([f"checkpoint={folder}", "device=cpu", "serve.images=true"]).model.vision
    assert found is not None
    return found


def write(folder: Path, name: str, content: dict[str, Any]) -> None:
    for each in ("processor_config.json", "preprocessor_config.json"):
        (folder / each).unlink(missing_ok=True)
    (folder / name).write_text(json.dumps(content))


def test_numbers_are_those_of_the_processor_in_each_form(folder: Path) -> None:
    processor = Qwen2VLImageProcessorPil(min_pixels=4096, max_pixels=65536, **NUMBERS)
    stored = processor.to_dict()
    sizes = {"min_pixels": 4096, "max_pixels": 65536}
    older = {**NUMBERS, **sizes, "size": {"shortest_edge": 1, "longest_edge": 2}}  # transformers takes the former
    for name, content in (
        ("preprocessor_config.json", stored),
        ("processor_config.json", {"processor_class": "Qwen3VLProcessor", "image_processor": stored}),
        ("preprocessor_config.json", older),
    ):
        write(folder, name, content)
        found = load_vision(folder)
        assert (found.min_pixels, found.max_pixels) == (processor.size.shortest_edge, processor.size.longest_edge)
        assert (found.mean, found.std) == (NUMBERS["image_mean"], NUMBERS["image_std"])
        assert (found.min_pixels, found.max_pixels) == (4096, 65536)


@pytest.mark.parametrize(
    ("field", "value"), [("resample", 2), ("do_normalize", False), ("rescale_factor", 1.0), ("patch_size", 5)]
)
def test_a_processor_that_does_something_else_is_refused(field: str, value: Any, folder: Path) -> None:
    write(folder, "preprocessor_config.json", {**NUMBERS, field: value})
    with pytest.raises(UnsupportedError, match=f"{field}={value} of its image processor is not supported"):
        load_vision(folder)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("hidden_act", "relu", "activation=relu is not supported"),
        ("patch_size", [4, 4], "patch: While dereferencing"),
        ("deepstack_visual_indexes", [9], "deepstack=.* the tower has 4 layers"),
    ],
)
def test_the_text_runs_without_a_tower_that_is_not_supported(
    field: str, value: Any, says: str, folder: Path, tmp_path: Path
) -> None:
    stored = json.loads((folder / "config.json").read_text())
    stored["vision_config"][field] = value
    (tmp_path / "config.json").write_text(json.dumps(stored))
    given = [f"checkpoint={tmp_path}", "device=cpu", "load_dummy=true"]
    for job in ("serve", "generate", "explain"):
        assert not load([*given, f"job={job}"]).reads_images
    with pytest.raises(AtomError, match=says):
        load([*given, "serve.images=true"])


def test_a_server_without_pillow_serves_the_text(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = [f"checkpoint={folder}", "device=cpu", "load_dummy=true"]
    write(folder, "preprocessor_config.json", NUMBERS)
    assert load(given).reads_images and load([*given, "job=batch"]).reads_images
    assert not load([*given, "job=generate"]).reads_images
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert not load(given).reads_images


@pytest.mark.parametrize("domain", ["https://example.org", "example.org/a", "example.org:80", "*", ""])
def test_a_domain_that_no_url_can_have_is_refused(domain: str, folder: Path) -> None:
    given = [f"checkpoint={folder}", "device=cpu", "load_dummy=true", "serve.images=false"]
    load([*given, 'serve.image_domains=["*.example.org",localhost,127.0.0.1,"::1"]'])
    with pytest.raises(ConfigError, match=r"serve\.image_domains: '.*' is no domain; write it as images\.example\.org"):
        load([*given, f'serve.image_domains=["{domain}"]'])


def test_images_that_are_not_read_are_refused_at_the_start(folder: Path) -> None:
    given = ["device=cpu", "load_dummy=true", "job=generate", "images=[photo.jpg]"]
    with pytest.raises(ConfigError, match=r"serve\.images=false reads none of images"):
        load([f"checkpoint={folder}", *given, "serve.images=false"])
    with pytest.raises(
        ConfigError, match=r"^images: .*: model=qwen3 has no encoder of model_type=qwen3_vl_vision; leave it out"
    ):
        load([f"checkpoint={folder}", "model=qwen3", *given])
