"""The fields of a tower: the numbers of a checkpoint's image processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import vision
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from atom.config import VisionConfig
from atom.config.load import load
from atom.errors import UnsupportedError

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
