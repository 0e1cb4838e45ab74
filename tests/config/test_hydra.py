from __future__ import annotations

import json
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from generated import DOCS, check_block
from hydra.errors import HydraException
from omegaconf.errors import ConfigKeyError

from atom.config import Config
from atom.config.hydra import (
    choose_model,
    compose,
    compose_once,
    explain,
    find_source,
    model_files,
    resolve,
    unknown_key,
)
from atom.config.load import load
from atom.config.schema import ServeConfig
from atom.config.schema_keys import keys, plain_fields
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


def test_threads_that_compose_at_a_time_leave_what_they_copy_as_it_is():
    original = compose_once(Config, "model=llama")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(3) as pool:
            made = list(pool.map(lambda _: compose(Config, ["model=llama"]), range(6)))
    finally:
        sys.setswitchinterval(interval)
    for composed in (original, *made):
        assert all(composed._get_node(name)._get_parent() is composed for name in ("model", "serve", "job"))


def test_what_is_added_and_deleted_is_so_in_its_order():
    def weights(*overrides: str) -> dict[str, str]:
        return dict(compose(Config, ["model=llama", *overrides]).model.weights)

    assert weights("model.weights.attention_norm=a", "+model.weights.x=b", "model.weights.x=c")["attention_norm"] == "a"
    assert weights("model.weights.attention_norm=a", "+model.weights.x=b", "model.weights.x=c")["x"] == "c"
    assert "attention_norm" not in weights("model.weights.attention_norm=a", "~model.weights.attention_norm")
    with pytest.raises(HydraException):
        weights("model.weights.x=c", "+model.weights.x=b")


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


TINY = {"architectures": ["MineForCausalLM"], "hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 80, "vocab_size": 101, "max_position_embeddings": 64}  # fmt: skip


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A checkpoint whose architecture only `conf`/model/mine.yaml of this folder knows."""
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "mine.yaml").write_text(
        "defaults: [llama, _self_]\narchitectures: [MineForCausalLM]\n"
    )
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / "config.json").write_text(json.dumps(TINY))
    return tmp_path


def test_auto_finds_a_model_file_in_hydras_search_path(mine: Path):
    found = load([f"checkpoint={mine}/ckpt", f"hydra.searchpath=[file://{mine}/conf]"])
    assert (found.model.name, found.model.hidden) == ("mine", 48)


def test_auto_finds_a_model_file_in_each_of_several_config_dirs(mine: Path):
    (mine / "first").mkdir()
    dirs = [str(mine / "first"), str(mine / "conf")]
    assert load([f"checkpoint={mine}/ckpt"], config_dirs=dirs).model.name == "mine"
    assert load([f"checkpoint={mine}/ckpt"], config_dirs=dirs[::-1]).model.name == "mine"


def test_a_config_dir_and_hydras_search_path_count_both(mine: Path):
    (mine / "first" / "model").mkdir(parents=True)
    (mine / "first" / "model" / "other.yaml").write_text("defaults: [mine, _self_]\nauto: false\nmax_position: 7\n")
    texts = [f"checkpoint={mine}/ckpt", f"hydra.searchpath=[file://{mine}/conf]"]
    assert load([*texts, "model=other"], config_dirs=[str(mine / "first")]).model.max_position == 7
    assert load(texts, config_dirs=[str(mine / "first")]).model.name == "mine"


def test_auto_finds_a_model_file_of_a_package(mine: Path, monkeypatch: pytest.MonkeyPatch):
    (mine / "conf").rename(mine / "mine_conf")
    (mine / "mine_conf" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(mine))
    assert load([f"checkpoint={mine}/ckpt", "hydra.searchpath=[pkg://mine_conf]"]).model.name == "mine"


def test_auto_finds_a_model_file_that_a_plugin_brings(mine: Path, monkeypatch: pytest.MonkeyPatch):
    from hydra.core.config_search_path import ConfigSearchPath
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    class Plugin(SearchPathPlugin):
        def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
            search_path.append("mine", f"file://{mine}/conf")

    plugins = Plugins.instance().plugin_type_to_subclass_list[SearchPathPlugin]
    monkeypatch.setitem(Plugins.instance().plugin_type_to_subclass_list, SearchPathPlugin, [*plugins, Plugin])
    assert load([f"checkpoint={mine}/ckpt"]).model.name == "mine"


@pytest.mark.parametrize("text", ["hydra.searchpath=conf", "hydra.searchpath=[1]"])
def test_a_search_path_that_is_no_list_of_folders_is_refused(text: str):
    with pytest.raises(ConfigError, match=r"hydra\.searchpath=.*: it takes a list of folders"):
        load([text])


def test_a_model_at_another_package_is_not_the_model():
    with pytest.raises(ConfigError, match=r"Could not override 'model@other'"):
        load(["model@other=qwen3"])


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "/models/qwen3", "./qwen3", "qwen3.gguf"])
def test_a_model_that_reads_as_a_checkpoint_is_refused_with_checkpoint_as_hint(name: str):
    with pytest.raises(ConfigError) as told:
        load([f"model={name}"])
    assert str(told.value) == f"model={name}: model is the name of a file in conf/model; write checkpoint={name}"


def test_a_schema_lists_its_keys_and_plain_fields():
    assert {"model.mlp.0.width", "serve.block_size", "seed"} <= set(keys(Config))
    assert "seed" in plain_fields(Config) and "model" not in plain_fields(Config)


def test_the_page_lists_the_architectures_of_all_model_files(request: pytest.FixtureRequest):
    rows = {}
    for path in sorted((DOCS.parent / "conf" / "model").glob("*.yaml")):
        spec = yaml.safe_load(path.read_text())
        for name in spec.get("architectures", []) if spec.get("auto", True) else []:
            types = ", ".join(f"`{each}`" for each in spec.get("model_types", []))
            rows[f"| `{name}` | `{path.stem}` | {types} |\n"] = name.lower()
    table = "".join(sorted(rows, key=lambda row: (rows[row], row)))
    heading = "| architecture | model file | only of `model_type` |\n|---|---|---|\n"
    check_block("checkpoints.md", "architectures", heading + table, request)


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


def test_an_error_whose_causes_go_round_is_told_in_a_line():
    """As one that is kept and raised anew may be its own cause."""
    first, second = ConfigKeyError("one\ntwo"), ConfigKeyError("three")
    first.__cause__, second.__cause__ = second, first
    assert isinstance(error := explain(first, Config), ConfigError) and "\n" not in str(error)
