from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra.errors import HydraException
from omegaconf import OmegaConf, base, grammar_parser

from atom.config import Config
from atom.config.folders import CONF
from atom.config.hydra import compose, compose_once, register, resolve
from atom.config.load import load
from atom.config.model_files import find_source
from atom.config.schema import ServeConfig
from atom.config.schema_keys import keys, plain_fields
from atom.errors import AtomError, ConfigError


def test_composing_leaves_the_values_of_the_checkpoint_open_until_they_are_looked_up():
    composed = compose(Config, ["model=llama", "model.name=llama"])
    model = resolve(composed, {**find_source().hf, "hidden_size": 60, "nested": {"key": 1}})["model"]
    assert (model["hidden"], model["layers"]) == (60, 30)


def test_a_composition_is_not_changed_by_what_another_one_sets():
    for size in (32, 64):
        composed = compose(Config, ["model=llama", f"serve.block_size={size}", "+model.weights.x=y"])
        composed.model.weights.attention_norm = f"of {size}"
        assert (composed.serve.block_size, composed.model.weights.x) == (size, "y")
    plain = compose(Config, ["model=llama"])
    assert plain.serve.block_size == ServeConfig().block_size and "x" not in plain.model.weights
    for _ in range(2):
        assert (
            compose(Config, ["model=llama", "+model.weights.x=y"]).model.weights.attention_norm
            == plain.model.weights.attention_norm
        )
        assert plain.model.weights.attention_norm == "model.layers.{layer}.input_layernorm"


def test_threads_that_compose_at_a_time_get_compositions_of_their_own():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(3) as pool:
            made = list(pool.map(lambda _: compose(Config, ["model=llama"]), range(6)))
    finally:
        sys.setswitchinterval(interval)
    assert len({id(composed.model) for composed in made}) == 6
    for composed in made:
        assert all(composed._get_node(name)._get_parent() is composed for name in ("model", "serve", "job"))


def test_files_are_parsed_once_a_process_and_give_what_hydra_makes_of_them(monkeypatch: pytest.MonkeyPatch):
    choices = ["model=qwen3_moe", "quant=none", "job=eval"]  # a chain of files, and one with a package of its own
    register(Config)
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        expected = hydra.compose("config", choices)
    compose_once.cache_clear()
    opened, load_file = list[str](), OmegaConf.load

    def record(file: Any) -> object:
        opened.append(Path(file.name).name)
        return load_file(file)

    monkeypatch.setattr(OmegaConf, "load", record)
    for model in ("qwen3_moe", "qwen3_moe", "mixtral"):
        composed = compose(Config, [f"model={model}", *choices[1:]])
        if model == "qwen3_moe":
            assert composed == expected and OmegaConf.to_yaml(composed) == OmegaConf.to_yaml(expected)
    assert len(opened) == len(set(opened)) and "mixtral.yaml" not in opened[:-1]


def test_the_interpolations_of_a_model_are_parsed_once_a_process(monkeypatch: pytest.MonkeyPatch):
    hf, parsed, parse = find_source().hf, list[str](), grammar_parser.parse
    resolve(compose(Config, ["model=llama", "model.name=llama"]), hf)

    def record(text: str, *options: object) -> object:
        parsed.append(text)
        return parse(text, *options)

    monkeypatch.setattr(base, "parse", record)
    monkeypatch.setattr(grammar_parser, "parse", record)
    model = resolve(compose(Config, ["model=llama", "model.name=llama"]), {**hf, "hidden_size": 60})["model"]
    assert model["hidden"] == 60 and not [text for text in parsed if text.startswith("${hf:hidden")]
    assert len(parsed) < 10, "what becomes no number or text"


@pytest.mark.parametrize("text", ["${oc.env:HOME}", "???", r"\${x}", "a${b"])
def test_a_text_of_the_checkpoint_is_no_interpolation(text: str):
    composed = compose(Config, ["model=llama", "model.weights.attention_norm='${hf:mine}'"])
    assert resolve(composed, {**find_source().hf, "mine": text})["model"]["weights"]["attention_norm"] == text


def test_what_is_added_and_deleted_is_so_in_its_order():
    def weights(*overrides: str) -> dict[str, str]:
        return dict(compose(Config, ["model=llama", *overrides]).model.weights)

    assert weights("model.weights.attention_norm=a", "+model.weights.x=b", "model.weights.x=c")["attention_norm"] == "a"
    assert weights("model.weights.attention_norm=a", "+model.weights.x=b", "model.weights.x=c")["x"] == "c"
    assert "attention_norm" not in weights("model.weights.attention_norm=a", "~model.weights.attention_norm")
    with pytest.raises(HydraException):
        weights("model.weights.x=c", "+model.weights.x=b")


def test_a_model_at_another_package_is_not_the_model():
    with pytest.raises(ConfigError, match="model@other"):
        load(["model@other=qwen3"])


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "/models/qwen3", "./qwen3", "qwen3.gguf"])
def test_a_model_that_reads_as_a_checkpoint_is_refused_with_checkpoint_as_hint(name: str):
    with pytest.raises(ConfigError) as error:
        load([f"model={name}"])
    assert str(error.value) == f"model={name}: model is the name of a file in conf/model; write checkpoint={name}"


def test_a_schema_lists_its_keys_and_plain_fields():
    assert {"model.mlp.0.width", "serve.block_size", "seed"} <= set(keys(Config))
    assert "seed" in plain_fields(Config) and "model" not in plain_fields(Config)


def test_load_works_in_threads_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    seeds: list[int] = []
    threads = [threading.Thread(target=lambda n=n: seeds.append(load([f"seed={n}"]).seed)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seeds) == [0, 1, 2]
    assert os.listdir() == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model.mlp.alpha=1", r"model\.mlp\.alpha: model\.mlp is a list, and its entries are model\.mlp\.0 to model\.mlp\.0; write"),
        ("model.mlp.7.alpha=1", r"model\.mlp\.7\.alpha: model\.mlp is a list"),
        ("sampling.stop_strings.0=x", r"sampling\.stop_strings\.0: sampling\.stop_strings is null; write sampling\.stop_strings="),
        ("sampling.stop_strings.x=1", r"^sampling\.stop_strings\.x: sampling\.stop_strings is null; write sampling\.stop_strings=…$"),
        ("quant.fmt.x=1", r"^quant\.fmt\.x: quant\.fmt takes a text, and has no fields; write quant\.fmt=…$"),
        ("dtype.x=1", r"^dtype\.x: dtype takes a text, and"),
        ("serve.http.port.x=1", r"^serve\.http\.port\.x: serve\.http\.port takes a whole number, and"),
        ("sampling.temperature.x.y=1", r"^sampling\.temperature\.x\.y: sampling\.temperature takes a number, and"),
        ("tune.x=1", "^tune.x: tune takes true or false, and"),
        ("model.mlp.0.kind.x=1", r"^model\.mlp\.0\.kind\.x: model\.mlp\.0\.kind takes a text, and"),
        ("+quant.fmt.x=1", r"^quant\.fmt={} is not a text$"),
        ("quant.fmt=[1]", r"^quant\.fmt=\[1\] is not a text$"),
        ("model.eagle3.vocab=7", "name its checkpoint in serve.draft_model"),
    ],
)  # fmt: skip
def test_a_key_that_goes_on_where_nothing_is_is_refused(text: str, message: str):
    with pytest.raises(AtomError, match=message):
        load([text])


def test_a_value_that_the_checkpoint_brings_can_be_set():
    assert load(["model=llama", "model.layers=4", "model.attention.heads=9"]).model.layers == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [("swap_space: 1\nswap_space: 2", "the key swap_space is set twice"), ("[" * 600, "nested deeper than 64")],
)
def test_a_file_of_a_config_dir_is_parsed_within_bounds(tmp_path: Path, text: str, message: str):
    (tmp_path / "serve").mkdir()
    (tmp_path / "serve" / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=rf"^{tmp_path}/serve/mine\.yaml: .*{message}"):
        load(["serve=mine"], config_dirs=[str(tmp_path)])
