"""`job=port`: the draft of a model file, what it could not place, and its check."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file
from semantic import assert_same_as_transformers

from atom.cli import main
from atom.config.load import load
from atom.config.model_files import model_files
from atom.jobs.port import job

NEW = {"stablelm", "hy_v3"}  # files that are left out here, if they are shipped by now


@pytest.fixture(autouse=True)
def hide_files(monkeypatch: pytest.MonkeyPatch):
    """Let the families of these tests be unknown."""
    monkeypatch.setattr(job, "model_files", lambda paths: [file for file in model_files(paths) if file.name not in NEW])


SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 176, "vocab_size": 301, "max_position_embeddings": 256,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def save(folder: Path, name: str = "LlamaConfig", **changes: Any) -> Any:
    """Save a random checkpoint of a family of transformers; its model."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**{**SIZES, **changes}))
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.2
    model.save_pretrained(folder)
    return model.eval()


def edit_config(folder: Path, **changes: Any) -> None:
    """Change values of a config.json; ... leaves one out."""
    config = json.loads((folder / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))


def port(capsys: Any, *argv: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the object that job=port prints."""
    code = main(["job=port", "job.output=json", *argv])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "changes", [{}, pytest.param({"use_parallel_residual": True, "use_qkv_bias": True}, marks=pytest.mark.slow)]
)
def test_stablelm_is_ported_by_one_command(changes: dict[str, Any], tmp_path: Path, capsys: Any):
    save(tmp_path / "new", "StableLmConfig", **changes)
    file = tmp_path / "conf" / "model" / "mine.yaml"
    argv = [f"checkpoint={tmp_path / 'new'}", f"job.save_draft={file}", "job.check=true"]
    assert main(["job=port", *argv]) == 0
    out, err = capsys.readouterr()
    assert "next tokens: the same at 100.0%" in out
    assert "names of tensors are placed" in err and f"{file} has the draft, which was not compared" in err
    text = file.read_text()
    assert "\n# Not compared with anything: until job=compare agrees" in text
    assert yaml.safe_load(text)["norm"]["kind"] == "layer"
    config = ["--config-dir", str(tmp_path / "conf"), f"checkpoint={tmp_path / 'new'}", "model=mine"]
    assert main([*config, "job=compare", "job.b=transformers", "dtype=fp32", "level=0"]) == 0, "the file says it all"


RENAMED = {
    r"model\.layers\.": "transformer.blocks.", r"self_attn\.(.)_proj": r"attention.w\1", r"mlp\.gate_proj": "ffn.w1",
    r"mlp\.up_proj": "ffn.w3", r"mlp\.down_proj": "ffn.w2", "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm", r"model\.embed_tokens": "transformer.tok_embeddings",
    r"model\.norm": "transformer.norm", "lm_head": "output",
}  # fmt: skip
FIELDS = {"dim": 64, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 176, "max_seq_len": 256, "norm_eps": 1e-6}


def rename(folder: Path, names: dict[str, str], **fields: Any) -> None:
    """Give a checkpoint's tensors other names, and its config.json other fields."""
    tensors = load_file(folder / "model.safetensors")
    for pattern, replacement in names.items():
        tensors = {re.sub(pattern, replacement, name): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    about = {"architectures": ["NewForCausalLM"], "model_type": "new", "vocab_size": 301, "rope_theta": 1e4}
    (folder / "config.json").write_text(json.dumps({**about, **fields}))


@pytest.mark.slow
def test_other_names_of_tensors_and_fields_are_found(tmp_path: Path, capsys: Any):
    model = save(tmp_path / "new")
    rename(tmp_path / "new", RENAMED, **FIELDS)
    file = tmp_path / "conf" / "model" / "new.yaml"
    assert main(["job=port", f"checkpoint={tmp_path / 'new'}", f"job.save_draft={file}"]) == 0
    assert "12 of 12 names of tensors are placed" in capsys.readouterr().err
    spec = yaml.safe_load(file.read_text())
    assert spec["weights"]["q"] == "transformer.blocks.{layer}.attention.wq" and spec["hidden"] == "${hf:dim}"
    assert "#   n_kv_heads of config.json is read as num_key_value_heads\n" in file.read_text()
    config = load([f"checkpoint={tmp_path / 'new'}", "dtype=fp32", f"hydra.searchpath=[file://{tmp_path}/conf]"])
    assert_same_as_transformers(config, model)


def test_a_tensor_of_an_unknown_block_comes_with_the_file_that_has_one(tmp_path: Path, capsys: Any):
    save(tmp_path / "new")
    tensors = load_file(tmp_path / "new" / "model.safetensors")
    more = {
        "linear_attn.A_log": torch.zeros(4),
        "linear_attn.in_proj.weight": torch.zeros(7, 64),
        "zoom.x": torch.zeros(2),
    }
    tensors |= {f"model.layers.{layer}.{name}": each.clone() for name, each in more.items() for layer in (0, 2)}
    save_file(tensors, tmp_path / "new" / "model.safetensors")
    edit_config(tmp_path / "new", architectures=["NewForCausalLM"])
    code, result = port(capsys, f"checkpoint={tmp_path / 'new'}")
    assert code == 1 and result["base"] == "conf/model/llama.yaml" and result["placed"] == result["stored"] - 3
    at = "model.layers.{layer}"
    unread = {name.removeprefix(f"{at}."): each for name, each in result["unread_tensors"].items()}
    assert unread["linear_attn.A_log"] == {
        "stored": " fp32[4] in layers 0, 2",
        "hint": "the role delta_decay, gated_delta; conf/model/olmo_hybrid.yaml and conf/model/qwen3_next.yaml have one",
    }
    assert unread["linear_attn.in_proj.weight"]["hint"].startswith(
        "a part of linear_attn, gated_delta, that is stored in"
    )
    assert unread["zoom.x"]["hint"].startswith("no shipped file names one like it")


@pytest.mark.slow
def test_a_field_of_a_router_that_nothing_reads_is_named_and_the_check_finds_its_line(tmp_path: Path, capsys: Any):
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16}
    save(tmp_path / "new", "HYV3Config", **sizes)
    edit_config(tmp_path / "new", architectures=["NewForCausalLM"])
    code, result = port(capsys, f"checkpoint={tmp_path / 'new'}")
    assert code == 0 and result["draft"]["weights"]["router_correction"] == "model.layers.{layer}.mlp.expert_bias"
    scale = result["unread_fields"]["router_scaling_factor"]
    assert scale["value"] == 2.826 and "like routed_scaling_factor: conf/model/" in scale["hint"]
    assert "has mlp.router.scale: ${hf:routed_scaling_factor" in scale["hint"]
    assert main(["job=port", f"checkpoint={tmp_path / 'new'}", "job.check=true"]) == 1
    assert "the first: body's weights of layer 1" in capsys.readouterr().out


def test_a_draft_for_an_architecture_that_lacks_a_block_says_so(tmp_path: Path, capsys: Any):
    save(tmp_path / "new")
    edit_config(tmp_path / "new", architectures=["DeepseekV41ForCausalLM"])
    assert main(["job=port", f"checkpoint={tmp_path / 'new'}"]) == 1
    out = capsys.readouterr().out
    assert "# DeepseekV41ForCausalLM needs decoder replay: this file cannot be the whole model.\n" in out


def test_a_known_checkpoint_is_said_to_be_known_and_a_draft_takes_no_name_of_a_file(tmp_path: Path, capsys: Any):
    save(tmp_path / "new")
    assert main(["job=port", f"checkpoint={tmp_path / 'new'}"]) == 0
    out, err = capsys.readouterr()
    assert "model=auto takes conf/model/llama.yaml for this checkpoint already" in err
    assert "my_conf/model/my_llama.yaml" in out, "a shipped file of this name would be read in its place"


@pytest.mark.slow
def test_without_weights_names_are_taken_from_the_index_or_only_the_config_is_read(tmp_path: Path, capsys: Any):
    save(tmp_path / "new", "StableLmConfig")
    weights = tmp_path / "new" / "model.safetensors"
    names = list(load_file(weights))
    weights.unlink()
    code, result = port(capsys, f"checkpoint={tmp_path / 'new'}")
    assert (code, result["stored"]) == (1, 0) and result["draft"]["norm"] == {"eps": "${hf:layer_norm_eps,1e-6}"}
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (tmp_path / "new" / "model.safetensors.index.json").write_text(json.dumps(index))
    code, result = port(capsys, f"checkpoint={tmp_path / 'new'}")
    assert (code, result["stored"], result["placed"]) == (0, 15, 15)
    assert result["draft"]["norm"] == {"eps": "${hf:layer_norm_eps,1e-6}", "bias": True, "kind": "layer"}


def test_a_named_file_is_the_one_that_is_looked_at(tmp_path: Path, capsys: Any):
    save(tmp_path / "new", "StableLmConfig")
    code, result = port(capsys, f"checkpoint={tmp_path / 'new'}", "model=llama")
    assert code == 1 and result["draft"] == {"defaults": ["llama", "_self_"]}
    assert [*result["unread_tensors"]] == [
        "model.layers.{layer}.input_layernorm.bias", "model.layers.{layer}.post_attention_layernorm.bias",
        "model.norm.bias",
    ]  # fmt: skip
    code, result = port(capsys, f"checkpoint={tmp_path / 'new'}", "model=qwen3")
    assert code == 1 and [*result["missing_tensors"]] == [
        f"model.layers.{{layer}}.self_attn.{name}_norm.weight" for name in "qk"
    ]
    edit_config(tmp_path / "new", intermediate_size=170)
    code, result = port(capsys, f"checkpoint={tmp_path / 'new'}", "model=llama")
    at = "model.layers.{layer}.mlp"
    assert code == 1 and result["misshapen_tensors"][f"{at}.up_proj.weight"] == [[176, 64], [170, 64]]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "job=port has no checkpoint; set checkpoint=FOLDER"),
        (["checkpoint=./nowhere"], "no checkpoint './nowhere'"),
        (["checkpoint={new}", "model=nope"], "model=nope: there is no such choice"),
        (["checkpoint={new}", "model.hidden=3"], "model.hidden=3: job=port writes these fields; set them in its file"),
        (["checkpoint={new}", "job.save_recipe=x.yaml"], "job.save_recipe: job=port runs no model; leave it out"),
        (["checkpoint={new}", "job.check=true", "job.output=json"], "job.check=true prints a comparison"),
        (["checkpoint={new}", "job.save_draft={new}/config.json"], "config.json: the file exists; name another"),
        (["checkpoint={new}", "job.stage=semantic"], "job.stage is a field of job=explain, and this is job=port"),
        (["checkpoint={new}", "job.output=html"], "job.output=html: job=port has no page"),
        (["checkpoint={new}/inner", "job.check=true"], 'transformers has no model_type "new"; compare the checkpoint'),
    ],
)
def test_a_mistake_is_one_line(argv: list[str], message: str, tmp_path: Path, capsys: Any):
    (tmp_path / "inner").mkdir()
    for folder in (tmp_path, tmp_path / "inner"):
        (folder / "config.json").write_text(json.dumps({**SIZES, "model_type": "new"}))
    assert main(["job=port", *(text.format(new=tmp_path) for text in argv)]) == 2
    out, err = capsys.readouterr()
    assert message in err.splitlines()[-1] and not out
