"""The weights that are packed while they load, and the text that they are calibrated on."""

from __future__ import annotations

from pathlib import Path

import pytest

from atom.assemble.calibration import find_calibrated, formats_made, plain_graph, read_calibration_text
from atom.compiler import compile_graph
from atom.config import Config, QuantConfig
from atom.config.load import load
from atom.errors import ConfigError
from atom.graph import HEAD

INT4, INT8 = "quant.fmt='int4[1, 16]'", "quant.fmt='int8[1, 16]'"  # a row of the tiny model has 48 columns


def config_of(calibration: str) -> Config:
    return Config(quant=QuantConfig(calibration=calibration))


@pytest.fixture(scope="module")
def folder(checkpoints: object) -> Path:
    return checkpoints("qwen3")  # type: ignore[no-any-return, operator]


def test_four_bits_are_calibrated_and_eight_are_not_unless_a_text_is_named(folder: Path):
    fields = [f"checkpoint={folder}", "device=cpu", "dtype=fp32", "level=0"]
    int4, int8 = load([*fields, INT4]), load([*fields, INT8])
    graph = compile_graph(int4)
    (fmt,) = formats_made(graph)
    assert fmt.startswith("int4") and find_calibrated(graph, int4) == [fmt]
    assert find_calibrated(graph, load([*fields, INT4, "quant.calibration=none"])) == []
    graph = compile_graph(int8)
    assert next(iter(formats_made(graph))).startswith("int8") and find_calibrated(graph, int8) == []
    assert formats_made(compile_graph(load(fields))) == {}


def test_the_plain_model_has_no_head_unless_the_head_is_packed(folder: Path):
    fields = [f"checkpoint={folder}", "device=cpu", "dtype=fp32", "level=0", INT4]
    plain = plain_graph(load(fields))
    assert HEAD not in plain.programs and not any(leaf.type.fmt for leaf in plain.recipes())
    assert HEAD in plain_graph(load([*fields, "quant.head='int4[1, 16]'"])).programs


def test_a_text_is_read_from_a_file_or_is_the_built_in_one(tmp_path: Path):
    file = tmp_path / "text.txt"
    file.write_text("some words")
    assert read_calibration_text(config_of(str(file))) == "some words"
    assert "The lighthouse at Cape Wrath" in read_calibration_text(config_of("auto"))


@pytest.mark.parametrize(("content", "reason"), [(b" \n", "the file is empty"), (b"\xff\xfe\xfd", "can't decode")])
def test_a_text_that_cannot_be_used_is_refused(content: bytes, reason: str, tmp_path: Path):
    file = tmp_path / "text.txt"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"^quant\.calibration={file}: .*{reason}"):
        read_calibration_text(config_of(str(file)))
    with pytest.raises(ConfigError, match="No such file"):
        read_calibration_text(config_of(str(tmp_path / "none.txt")))
