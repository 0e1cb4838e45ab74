from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from atom.config import Config, load
from atom.config.hydra import choose_model, compose, find_source, keys, model_files, plain_fields, resolve, unknown_key
from atom.errors import ConfigError


def test_a_source_names_the_model_file_last():
    assert find_source(["model=llama", "seed=1"]).overrides == ["seed=1", "model='llama'", "model.name='llama'"]


def test_a_source_downloads_nothing_for_the_embedded_checkpoint():
    source = find_source()
    assert source.hf["hidden_size"] == 576
    assert source.embedded is not None
    assert source.overrides == ["model='smollm2'", "model.name='smollm2'"]


def test_composing_leaves_the_values_of_the_checkpoint_open_until_they_are_looked_up():
    composed = compose(Config, ["model=llama", "model.name=llama"])
    model = resolve(composed, {**find_source().hf, "hidden_size": 60, "nested": {"key": 1}})["model"]
    assert (model["hidden"], model["layers"]) == (60, 30)


def test_the_first_file_that_lists_a_ggufs_architecture_is_meant():
    assert choose_model({"gguf_architecture": "llama"}, model_files(), "x.gguf") == "llama"


def test_a_file_of_the_users_own_does_not_replace_a_shipped_one(tmp_path: Path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "llama.yaml").write_text("hidden: 1\n")
    (found,) = [file for file in model_files([str(tmp_path)]) if file.name == "llama"]
    assert "hidden" not in found.spec
    assert load(["model=llama"], config_dirs=[str(tmp_path)]).model.hidden == 576


def test_two_files_that_bring_a_checkpoint_have_to_be_named(tmp_path: Path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("defaults: [smollm2, _self_]\nembedded: {config: mine.json}\n")
    (tmp_path / "model" / "mine.json").write_text('{"hidden_size": 64}')
    with pytest.raises(ConfigError, match="no checkpoint is given; model= can bring one: smollm2, mine"):
        find_source(config_dirs=[str(tmp_path)])
    assert find_source(["model=mine"], [str(tmp_path)]).hf == {"hidden_size": 64}


def test_a_schema_lists_its_keys_and_plain_fields():
    assert {"model.mlp.0.width", "serve.block_size", "seed"} <= set(keys(Config))
    assert "seed" in plain_fields(Config) and "model" not in plain_fields(Config)


def test_an_unknown_key_is_sought_near_then_everywhere():
    assert "did you mean temperature?" in str(unknown_key("sampling.temprature", Config))
    assert "did you mean serve.max_num_seqs?" in str(unknown_key("max_num_seq", Config))
    assert "did you mean" not in str(unknown_key("nope", Config))


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
