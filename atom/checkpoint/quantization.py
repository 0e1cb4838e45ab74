"""Read quantization_config: how a checkpoint's weights are stored.

    read({"quantization_config": {"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*gate": {}}}})
    # Quantization(fmt="gptq_int4[1, 128]", plain=["re:.*gate"], unread=["*.g_idx"])

One reader a `quant_method`, in READERS; what a reader does not know of is refused by name. Sources: transformers
(utils/quantization_config.py, integrations), compressed-tensors (quantization/quant_scheme.py), NVIDIA's modelopt and
AMD's Quark as vLLM 0.26 reads them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from atom.checkpoint.modules import check_pattern, reads_more, text_pattern
from atom.checkpoint.typed_config import KEY, UNPACKED, TypedConfig
from atom.dtypes import FORMATS
from atom.errors import CheckpointError, UnsupportedError

# of activations, which stay in the model's dtype
INPUTS = ["*.input_scale", "*.input_zero_point", "*.input_global_scale", "*.activation_scale"]
CACHE_SCALES = ["*.k_scale", "*.v_scale", "*.kv_scale", "*.q_scale", "*.output_scale"]  # of fp8 entries


@dataclass(frozen=True)
class Quantization:
    fmt: str | None = None  # of the layers' weights, see `atom.dtypes.FORMATS`; None: plain
    plain: list[str] = field(default_factory=list)  # patterns of modules that are stored plain
    unread: list[str] = field(default_factory=list)  # patterns of tensors that are not needed
    formats: dict[str, str] = field(default_factory=dict)  # pattern of modules -> another format; plain goes first
    act: str | None = None  # int8 if linears of 8-bit integers are to multiply activations in these too


def read(hf: Mapping[str, Any], names: Collection[str] = ()) -> Quantization:
    """Read how a checkpoint's weights are stored from its config.json, and the names of its tensors if it leaves a
    choice. UnsupportedError for what is not known."""
    config = hf.get(KEY)
    if config is not None and not isinstance(config, dict):
        raise CheckpointError(f"{KEY}={json.dumps(config)} in its config.json is not an object; mend it")
    if not config:
        return Quantization()
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in READERS:
        fault = f"{KEY}.quant_method={json.dumps(method)} is not supported (supported: {', '.join(READERS)})"
        raise UnsupportedError(f"{fault}; {UNPACKED}")
    if method == "fp8" and hf.get("expert_dtype") is not None:  # next to it, as DeepSeek-V4 has it
        config = {"expert_dtype": hf["expert_dtype"], **config}
    read = READERS[method](TypedConfig(config, names=names))
    if not reads_more(hf):
        return read
    formats = {text_pattern(pattern): fmt for pattern, fmt in read.formats.items()}
    return replace(read, plain=[text_pattern(pattern) for pattern in read.plain], formats=formats)


def read_fp8(config: TypedConfig) -> Quantization:
    """DeepSeek-V3, Qwen3-…-FP8 (blocks, scales in weight_scale_inv), and one scale a tensor (weight_scale).

    DeepSeek-V4's have both parts of a weight under the name of its module, and experts in MXFP4.
    """
    config.check_keys(*KEYS, "fmt", "activation_scheme", "scale_fmt", "weight_block_size", "dequantize", "expert_dtype",
                      "kv_cache_scheme", "export")  # fmt: skip
    experts = config.one_of("expert_dtype", "fp8", "fp4", None)
    config.one_of("fmt", "e4m3", "float8_e4m3fn", None)
    config.one_of("activation_scheme", "dynamic", "static", None)
    config.one_of("scale_fmt", "ue8m0", "float", None)
    fmt, formats = "ct_fp8[*, *]", {"*.experts.*": "ds_mxfp4"} if experts == "fp4" else {}
    if config.values.get("weight_block_size") is not None:
        is_by_module = any(name.endswith(".scale") for name in config.names) if config.names else experts is not None
        fmt = f"{'ds_' * is_by_module}fp8{config.block('weight_block_size')}"
    elif any(name.endswith(".weight_scale_inv") for name in config.names):  # transformers writes these
        fmt = "fp8[*, *]"
    return Quantization(fmt, config.patterns(*EXCEPTIONS), INPUTS + CACHE_SCALES, formats)


def read_fbgemm_fp8(config: TypedConfig) -> Quantization:
    """Llama 3.1's: a scale a row, activations cut at an upper bound."""
    config.check_keys(*KEYS, "activation_scale_ub")
    return Quantization("ct_fp8[1, *]", config.patterns(*EXCEPTIONS), ["*.input_scale_ub"])


def read_mxfp4(config: TypedConfig) -> Quantization:
    """gpt-oss: only the experts."""
    config.check_keys(*KEYS, "dequantize")
    return Quantization("mxfp4", config.patterns(*EXCEPTIONS))


def read_awq(config: TypedConfig) -> Quantization:
    """AutoAWQ's gemm; the other versions pack in orders of their own."""
    config.check_keys(*KEYS, *GROUPED, "zero_point", "version")
    for key in ("version", "format", "checkpoint_format"):
        if (config.text(key) or "gemm").lower() != "gemm":
            raise config.unknown(key)
    if config.whole("bits", 4) != 4:
        raise config.unknown("bits")
    if config.values.get("zero_point") is False:
        raise config.unknown("zero_point")
    return Quantization(f"awq_int4{group_block(config)}", config.patterns(*EXCEPTIONS))


def read_gptq(config: TypedConfig) -> Quantization:
    """GPTQModel's and AutoGPTQ's, v1 (the default, zero points less 1) and v2."""
    config.check_keys(*KEYS, *GROUPED, "dynamic", "lm_head")
    key = "checkpoint_format" if config.values.get("checkpoint_format") else "format"  # transformers' name
    version = config.one_of(key, "gptq", "gptq_v2", None) or "gptq"
    plain, formats = config.patterns(*EXCEPTIONS), {}
    rules = config.object("dynamic")  # GPTQModel's, first match
    for pattern in rules.values if rules else ():
        changes = rules.get(pattern, dict, "an object") if rules else None
        sign, expression = ("+:", pattern) if pattern[:2] not in ("+:", "-:") else (pattern[:2], pattern[2:])
        check_pattern(f"re:{expression}", f"{config.at}.dynamic", CheckpointError)
        if sign == "-:":
            plain = [*plain, f"re:{expression}"]
        else:
            formats[f"re:{expression}"] = gptq_format(
                TypedConfig({**config.values, **(changes or {})}, config.at), version
            )
    if config.get("lm_head", bool, "true or false"):
        formats.setdefault("lm_head", gptq_format(config, version))
    return Quantization(gptq_format(config, version), plain, ["*.g_idx"], formats)


def gptq_format(config: TypedConfig, version: str) -> str:
    bits, order = config.whole("bits", 4), "_ordered" if config.values.get("desc_act") else ""
    if bits not in (4, 8):
        raise config.unknown("bits")
    return f"{version}_int{bits}{order}{group_block(config)}"


def group_block(config: TypedConfig) -> str:
    config.one_of("data_type", "int", None)
    group = config.whole("group_size", 128, or_all=True)
    return f"[1, {'*' if group == -1 else group}]"


def read_compressed_tensors(config: TypedConfig) -> Quantization:
    """Groups of modules, each with a format: all linears, or modules by name."""
    config.check_keys(*KEYS, "config_groups", "format", "version", "kv_cache_scheme", "quantization_status",
                      "global_compression_ratio", "run_compressed", "dequantize", "sparsity_config")  # fmt: skip
    if (sparsity := config.object("sparsity_config")) is not None:
        sparsity.one_of("format", "dense", None)
    groups, fmt, formats, acts = config.object("config_groups"), None, {}, set[str | None]()
    for name in groups.values if groups else ():
        group = groups.object(name) if groups else None
        weights = group.object("weights") if group else None
        if group is None or weights is None:
            raise UnsupportedError(f"{config.at}.config_groups.{name} quantizes no weights; {UNPACKED}")
        group.check_keys("targets", "weights", "input_activations", "output_activations", "format")
        one = compressed_format(weights, group.text("format") or config.text("format"))
        if one.startswith("ct_int8"):
            acts.add(compressed_act(group.object("input_activations")))
        for target in group.patterns("targets") or ["Linear"]:
            if target == "Linear":
                fmt = one
            elif target[:1].isupper():
                raise UnsupportedError(f"{group.at}.targets: modules of class {target} are not supported; {UNPACKED}")
            else:
                formats[target] = one
    if fmt is None and not formats and config.object("kv_cache_scheme") is None:
        raise UnsupportedError(f"{config.at} of compressed-tensors has no config_groups")
    unread = [*INPUTS, *CACHE_SCALES, "*.weight_shape"]
    return Quantization(fmt, config.patterns(*EXCEPTIONS), unread, formats, "int8" if acts == {"int8"} else None)


def compressed_act(inputs: TypedConfig | None) -> str | None:
    """int8 of 8-bit integers without a zero point; others stay in the model's dtype."""
    if inputs is None or inputs.values.get("symmetric") is False:
        return None
    return "int8" if (inputs.text("type") or "int", inputs.whole("num_bits", 8)) == ("int", 8) else None


FP4_PACKINGS = {"mxfp4-pack-quantized": "ct_mxfp4", "nvfp4-pack-quantized": "ct_nvfp4"}


def compressed_format(weights: TypedConfig, packing: str | None) -> str:
    """The format of a group's weights, see `compressed_tensors.quantization.QuantizationArgs`."""
    weights.check_keys("num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic",
                       "actorder", "scale_dtype", "zp_dtype", "observer", "observer_kwargs")  # fmt: skip
    if packing in FP4_PACKINGS:
        return FP4_PACKINGS[packing]
    bits = weights.whole("num_bits")
    kind = "fp" if weights.one_of("type", "float", "int", None) == "float" else "int"
    is_symmetric = weights.values.get("symmetric") is not False
    strategy = weights.text("strategy")
    match strategy:
        case "group":
            block = f"[1, {weights.whole('group_size')}]"
        case "channel":
            block = "[1, *]"
        case "tensor":
            block = "[*, *]"
        case "block":
            block = weights.block("block_structure")
        case _:
            raise weights.unknown("strategy")
    if packing == "mxfp8-quantized" or weights.text("scale_dtype") == "torch.uint8":  # exponents, of OCP's formats
        for key, value in {"type": "float", "num_bits": 8, "strategy": "group", "group_size": 32}.items():
            if weights.values.get(key) != value:
                raise weights.unknown(key)
        return "ct_mxfp8"
    order = weights.values.get("actorder")  # weight, static: the order in which columns were rounded, no more
    if order not in (None, False, True, "group", "dynamic", "weight", "static"):
        raise weights.unknown("actorder")
    ordered = "_ordered" if order in (True, "group", "dynamic") else ""
    name = f"ct_{'packed_' if packing == 'pack-quantized' else ''}{kind}{bits}{'' if is_symmetric else 'z'}{ordered}"
    if name not in FORMATS:
        raise UnsupportedError(f"{weights.at}: {name.removeprefix('ct_')} is not supported; {UNPACKED}")
    return name + block


def read_modelopt(config: TypedConfig) -> Quantization:
    """NVIDIA's, whose exceptions are globs."""
    fmt = {"FP8": "ct_fp8[*, *]", "FP8_PER_CHANNEL_PER_TOKEN": "ct_fp8[1, *]", "FP8_PB_WO": "ct_fp8[128, 128]",
           "NVFP4": "modelopt_nvfp4", "W4A16_NVFP4": "modelopt_nvfp4"}  # fmt: skip
    config.check_keys(*KEYS, "quant_algo", "exclude_modules", "kv_cache_scheme", "kv_cache_quant_algo", "group_size",
                      "producer", "config_groups")  # fmt: skip
    algorithm = config.one_of("quant_algo", *fmt)
    assert algorithm is not None, "one_of refuses null"
    if fmt[algorithm] == "modelopt_nvfp4" and config.whole("group_size", 16) != 16:
        raise config.unknown("group_size")
    plain = config.patterns("ignore", "exclude_modules", *EXCEPTIONS)
    return Quantization(fmt[algorithm], plain, INPUTS + CACHE_SCALES)


def read_quark(config: TypedConfig) -> Quantization:
    """AMD's; layers may have formats of their own, by globs."""
    config.check_keys("quant_method", "global_quant_config", "layer_quant_config", "exclude", "export", "version",
                      "algo_config", "kv_cache_quant_config", "kv_cache_post_rope", "quant_mode", "softmax_quant_spec",
                      "layer_type_quant_config")  # fmt: skip
    if config.values.get("layer_type_quant_config"):
        raise config.unknown("layer_type_quant_config")
    plain, formats = config.patterns("exclude"), dict[str, str]()
    layers = config.object("layer_quant_config")
    for pattern in layers.values if layers else ():
        check_pattern(pattern, f"{config.at}.layer_quant_config", CheckpointError)
        one = quark_format(layers.object(pattern)) if layers else None
        plain, formats = ([*plain, pattern], formats) if one is None else (plain, {**formats, pattern: one})
    whole, unread = config.object("global_quant_config"), INPUTS + CACHE_SCALES
    return Quantization(quark_format(whole), plain, unread, formats, quark_act(whole))


def quark_act(config: TypedConfig | None) -> str | None:
    """int8 of activations without a zero point in it, None for others."""
    inputs = config.values.get("input_tensors") if config else None  # a list: scales of scales
    is_int8 = isinstance(inputs, dict) and inputs.get("dtype") == "int8" and inputs.get("symmetric") is not False
    return "int8" if is_int8 else None


def quark_format(config: TypedConfig | None) -> str | None:
    """The format of a config's weights, None for plain ones."""
    if config is not None and isinstance(config.values.get("weight"), list):  # scales of scales
        raise config.unknown("weight")
    weight = config.object("weight") if config else None
    if weight is None:
        return None
    dtype, scheme = weight.text("dtype"), weight.text("qscheme")
    if (dtype, scheme) not in QUARK:
        raise weight.unknown("dtype" if dtype not in [known for known, _ in QUARK] else "qscheme")
    if dtype == "fp4" and (weight.whole("group_size", 32) != 32 or weight.text("scale_format") not in ("e8m0", None)):
        raise weight.unknown("group_size" if weight.values.get("group_size", 32) != 32 else "scale_format")
    return QUARK[dtype, scheme]


QUARK: dict[tuple[str | None, str | None], str] = {
    ("fp8_e4m3", "per_tensor"): "ct_fp8[*, *]",
    ("fp8_e4m3", "per_channel"): "ct_fp8[1, *]",
    ("int8", "per_tensor"): "ct_int8[*, *]",
    ("int8", "per_channel"): "ct_int8[1, *]",
    ("fp4", "per_group"): "quark_mxfp4",
}


def read_gguf(config: TypedConfig) -> Quantization:
    """A GGUF file's types of tensors, see `gguf.find_formats`."""
    formats = config.check_keys("quant_method", "formats").object("formats")
    for pattern in formats.values if formats else ():
        check_pattern(pattern, f"{config.at}.formats", CheckpointError)
        if formats and formats.text(pattern) not in FORMATS:
            raise formats.unknown(pattern)
    return Quantization(formats=dict(formats.values) if formats else {})


GROUPED = (  # of AWQ and GPTQ; after the first five, how values were found, which is not needed to unpack them
    "bits", "group_size", "desc_act", "checkpoint_format", "format",
    "sym", "method", "data_type", "damp_percent", "damp_auto_increment", "true_sequential", "static_groups", "mse",
    "uri", "model_name_or_path", "model_file_base_name", "meta", "pack_dtype", "tokenizer", "dataset", "batch_size",
    "backend", "use_exllama", "exllama_config", "disable_exllama", "max_input_length", "cache_block_outputs",
    "model_seqlen", "block_name_to_quantize", "module_name_preceding_first_block", "modules_in_block_to_quantize",
    "pad_token_id", "act_group_aware", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "use_cuda_fp16", "quantizer",
    "hyb_act", "autoround_version", "iters", "lr", "minmax_lr", "nsamples", "seqlen", "enable_quanted_input",
    "enable_minmax_tuning", "low_gpu_mem_usage", "gradient_accumulate_steps", "amp", "scale_dtype", "packing_format",
    "to_quant_block_names",
)  # fmt: skip
EXCEPTIONS = ("modules_to_not_convert", "ignored_layers", "ignore")
KEYS = ("quant_method", *EXCEPTIONS)
READERS: dict[str, Callable[[TypedConfig], Quantization]] = {
    "fp8": read_fp8,
    "fbgemm_fp8": read_fbgemm_fp8,
    "compressed-tensors": read_compressed_tensors,
    "modelopt": read_modelopt,
    "quark": read_quark,
    "mxfp4": read_mxfp4,
    "awq": read_awq,
    "gptq": read_gptq,
    "gguf": read_gguf,
}
