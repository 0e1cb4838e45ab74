from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest
from generated import check_block

from atom.config import model_files as model_files_module
from atom.config.folders import CONF
from atom.config.load import load
from atom.config.model_files import SHARED, ModelFile, choose_model, find_source, model_files, with_inherited
from atom.config.unsupported import unsupported
from atom.errors import CheckpointError, ConfigError, UnreachableError


def test_a_source_names_the_model_file_last():
    assert find_source(["model=llama", "seed=1"]).overrides == ["seed=1", "model='llama'", "model.name='llama'"]


def test_a_source_downloads_nothing_for_the_embedded_checkpoint():
    source = find_source()
    assert source.hf["hidden_size"] == 576
    assert source.embedded is not None
    assert source.overrides == ["model='smollm2'", "model.name='smollm2'"]


class Described:
    """A checkpoint on the hub, of DeepSeek-V3's shape but for its layers."""

    generation_config: ClassVar = {"temperature": 0.6}

    def __init__(self, layers: int) -> None:
        own = json.loads((CONF / "model" / "deepseek_v3.json").read_text())
        self.config = {**own, "num_hidden_layers": layers}

    def names(self) -> list[str]:
        return []

    def close(self) -> None:
        pass


def unreachable(name: str, **_: Any) -> Any:
    raise UnreachableError(f"{name}: the hub cannot be reached")


def test_a_model_file_without_a_checkpoint_means_its_usual_one(monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setattr(model_files_module, "open_checkpoint", lambda *a, **k: asked.append((a, k)) or Described(5))
    config = load(["model=deepseek_v3", "revision=main"])
    (((checkpoint,), given),) = asked
    assert (checkpoint, given["revision"], given["weights"]) == ("deepseek-ai/DeepSeek-V3", "main", False)
    assert (config.checkpoint, config.model.name, config.model.layers) == ("deepseek-ai/DeepSeek-V3", "deepseek_v3", 5)
    assert config.sampling.temperature == 0.6 and config.model.usual is config.model.embedded is None
    assert load(["recipe=deepseek_r1_tp8_mtp", "device=cpu"]).checkpoint == "deepseek-ai/DeepSeek-R1", (
        "one that is given"
    )


def test_without_the_hub_it_is_described_by_the_file_next_to_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(model_files_module, "open_checkpoint", unreachable)
    config = load(["model=deepseek_v3", "parallel=tp8_ep", "quant=fp8", "device=cpu"])
    assert (config.checkpoint, config.model.layers, config.parallel.experts) == ("deepseek-ai/DeepSeek-V3", 61, 8)
    with pytest.raises(CheckpointError, match="the hub cannot be reached"):
        load(["model=deepseek_v3", "revision=another"])


@pytest.mark.parametrize(
    ("name", "layers", "experts", "fmt"),
    [
        ("deepseek_v3", 61, 256, "fp8[128, 128]"),
        ("gpt_oss", 24, 32, "mxfp4"),
        ("kimi_k2", 61, 384, "ct_packed_int4[1, 32]"),
        ("kimi_k3", 93, 896, "ct_mxfp4"),
        ("qwen3_moe", 48, 128, None),
    ],
)
def test_every_model_that_names_a_checkpoint_is_described_without_the_hub(
    name: str, layers: int, experts: int, fmt: str | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(model_files_module, "open_checkpoint", unreachable)
    config = load([f"model={name}", "device=cpu"])
    mixture = next(mlp for mlp in config.model.mlp if mlp.kind == "moe")
    assert (config.model.layers, mixture.experts) == (layers, experts)
    assert config.model.fmt == fmt


def test_those_are_all_that_name_a_checkpoint():
    named = {file.name for file in model_files() if file.spec.get("usual")}
    assert named == {"deepseek_v3", "gpt_oss", "kimi_k2", "kimi_k3", "qwen3_moe"}
    assert all(file.spec["usual"].get("config") for file in model_files() if file.spec.get("usual"))


def test_a_checkpoint_that_the_hub_refuses_is_not_described_by_another_file(monkeypatch: pytest.MonkeyPatch):
    def refuse(name: str, **_: Any) -> Any:
        raise CheckpointError(f"{name} is gated")

    monkeypatch.setattr(model_files_module, "open_checkpoint", refuse)
    with pytest.raises(CheckpointError, match="DeepSeek-V3 is gated"):
        load(["model=deepseek_v3"])


def test_the_first_file_that_lists_a_ggufs_architecture_is_meant():
    assert choose_model({"gguf_architecture": "llama"}, model_files(), "x.gguf") == "llama"


def test_one_file_takes_an_architecture_with_a_model_type():
    taking = Counter(
        (name, model_type)
        for file in automatic()
        for name in file.spec.get("architectures", ())
        for model_type in file.spec.get("model_types") or [None]
    )
    assert [each for each, files in taking.items() if files > 1] == []


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


def automatic() -> list[ModelFile]:
    """The model files that `model=auto` chooses from, by name."""
    files = [file for file in model_files() if file.spec.get("auto", True)]
    return sorted(
        (file for file in files if file.spec.get("architectures") or file.states("gguf.architecture")),
        key=lambda file: file.name,
    )


def stated(file: ModelFile, key: str) -> Any:
    """The value of a file's key, or of those that it inherits from."""
    chain = with_inherited(file.name, model_files())
    return next((each.states(key) for each in chain if key.partition(".")[0] in each.spec), None)


def has_tower(file: ModelFile) -> bool:
    """Whether a file, or the nearest one that it inherits from and that says so, has a vision tower."""
    for each in with_inherited(file.name, model_files()):
        if "vision" in each.spec:
            return each.spec["vision"] is not None
        if any(isinstance(name, dict) and "/vision@vision" in name for name in each.spec.get("defaults", ())):
            return True
    return False


def test_the_page_lists_all_model_files(request: pytest.FixtureRequest):
    files = automatic()
    counts = Counter(name for file in files for name in file.spec.get("architectures", ()))
    rows = []
    for file in files:
        names, types = file.spec.get("architectures", ()), file.spec.get("model_types") or ()
        chooses = any(counts[name] > 1 or name.endswith(SHARED) for name in names)
        markers = stated(file, "reasoning")
        has_images = any(name.endswith(SHARED) for name in names)
        cells = (
            ", ".join(f"`{name}`" for name in sorted(names, key=str.lower)),
            f"`{file.name}`",
            ", ".join(f"`{each}`" for each in types if chooses),
            ("read" if has_tower(file) else "text half") if has_images else "",
            "MTP" if stated(file, "mtp_layers") else "",
            f"`{found}`" if (found := file.states("gguf.architecture")) else "",
            f"`{found}`" if (found := stated(file, "tool_calls")) else "",
            "`{}`".format(markers[0].replace("|", r"\|")) if markers else "",
        )
        rows.append(f"| {' | '.join(cells)} |\n")
    titles = (
        "architectures",
        "model file",
        "only of `model_type`",
        "images",
        "drafts",
        "GGUF",
        "tool calls",
        "reasoning",
    )
    heading = f"| {' | '.join(titles)} |\n{'|---' * len(titles)}|\n"
    check_block("models.md", "models", heading + "".join(rows), request)


def test_the_page_lists_what_the_others_need(request: pytest.FixtureRequest):
    by_need: dict[str, list[str]] = {}
    for name, missing in unsupported().items():
        by_need.setdefault(missing, []).append(f"`{name}`")
    rows = "".join(f"| {missing} | {', '.join(names)} |\n" for missing, names in sorted(by_need.items()))
    check_block("models.md", "unsupported", "| needs | architectures |\n|---|---|\n" + rows, request)
