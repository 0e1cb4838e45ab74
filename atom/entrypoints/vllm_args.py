"""Flags of `vllm serve` beyond those of ROCm/ATOM, written as overrides.

parser = VLLMParser("python -m my_server", "What it does.")
VLLMArgs.add_cli_args(parser)
args = VLLMArgs.from_cli_args(parser.parse(["/models/qwen3", "--load-format", "dummy"]))
args.overrides()                                        # ["checkpoint='/models/qwen3'", "load_dummy=true"]

parser.parse(["--config", "server.yaml", "--seed", "2"])     # the flags of the file, but for those of the command line
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from atom.checkpoint.address import parse_address
from atom.config.bounded_yaml import parse_yaml
from atom.config.draft_methods import find_name
from atom.config.spelling import did_you_mean, override
from atom.config.tool_formats import format_files
from atom.config.typed_json import read_object
from atom.entrypoints.args import (
    BOTH,
    VLLM,
    EngineArgs,
    Parser,
    flag,
    json_text,
    read_count,
    read_gib,
)
from atom.errors import ConfigError, UnsupportedError
from atom.sampling_params import GENERATION

THINK = ["<think>", "</think>"]
THINKING = (
    "deepseek_r1 deepseek_v3 deepseek_v4 ernie45 glm45 glm47 "
    "hy_v3 kimi_k2 ling3 minimax_m2 nemotron_v3 olmo3 qwen3 step3p5"
)
REASONING_PARSERS = {  # vLLM's name -> the markers around what is thought
    **dict.fromkeys(THINKING.split(), THINK),
    "gemma4": ["<|channel>thought", "<channel|>"],
    "kimi_k3": ["<|open|>think<|sep|>", "<|close|>think<|sep|>"],
    "minimax_m3": ["<mm:think>", "</mm:think>"],
    "granite": ["Here is my thought process:", "Here is my response:"],
    "mistral": ["[THINK]", "[/THINK]"],
    "seed_oss": ["<seed:think>", "</seed:think>"],
}
RERANKER_OVERRIDES = ("architectures", "classifier_from_token", "is_original_qwen3_reranker", "method", "num_labels")
HARMONY = "openai_gptoss"  # vLLM's name for reasoning in channels
TOOL_PARSERS = {  # vLLM's name -> serve.http.tool_calls; those of conf/tool_calls are taken too
    "hermes": "tagged_json",
    "ernie45": "tagged_json",
    "granite4": "tagged_json",
    "llama3_json": "python_tag",
    "llama4_json": "python_tag",
    "llama4_pythonic": "llama4",
    "deepseek_v4": "deepseek_v32",
    "glm47": "glm45",
    "ling3": "glm45",
    "step3p5": "qwen3_coder",
    "openai": "harmony",
    "phi4_mini_json": "phi4_mini",
    "qwen3_xml": "qwen3_coder",
    "xlam": "json",
}
QUANTIZATIONS = {  # vLLM's name -> the quant_method in a checkpoint; others are the same
    "awq_marlin": "awq",
    "gptq_marlin": "gptq",
}


def vllm_flag(key: str, about: str, **options: Any) -> Any:
    """A field for a flag of vLLM's, with `of` of ROCm/ATOM's too; without a key, `accepted` changes nothing here."""
    return flag(key, about, of=options.pop("of", (VLLM,)), **options)


def write_collectives(is_nccl: bool) -> list[str]:
    return ["parallel.collectives=nccl"] if is_nccl else []


def write_text_only(is_text_only: bool) -> list[str]:
    return ["serve.images=false"] if is_text_only else []


def write_load_format(name: str) -> list[str]:
    if name != "dummy":
        raise ConfigError(f"--load-format={name}: there is no such choice; choices: auto, safetensors, gguf, dummy")
    return ["load_dummy=true"]


def write_generation(values: Mapping[str, Any]) -> list[str]:
    """The overrides of fields of generation_config.json."""
    set_fields = {GENERATION[key]: value for key, value in values.items() if key in GENERATION and value is not None}
    texts = [override(f"sampling.{name}", value) for name, value in set_fields.items()]
    return texts + (["sampling.temperature=0"] if values.get("do_sample") is False else [])


def write_generation_config(name: str) -> list[str]:
    """auto: the checkpoint's; vllm: none; else a folder with a generation_config.json."""
    if name == "vllm":
        return ["sampling.defaults=none"]
    path = Path(name).expanduser() / "generation_config.json"
    return ["sampling.defaults=none", *write_generation(read_object(f"--generation-config={name}", read_text(path)))]


def override_generation_config(text: str) -> list[str]:
    name = f"--override-generation-config={text}"
    values = read_object(name, text)
    known = [*GENERATION, "do_sample"]
    if unknown := next((key for key in values if key not in known), None):
        raise ConfigError(f"{name}: {unknown} is not read{did_you_mean(unknown, known)} (known: {', '.join(known)})")
    return write_generation(values)


def write_tool_parser(name: str) -> list[str]:
    known = TOOL_PARSERS | {own: own for own in ("auto", "none", *format_files())}
    is_file = Path(name).suffix in (".yaml", ".yml")
    chosen = str(Path(name).expanduser()) if is_file else choose("--tool-call-parser", name, known)
    return [override("serve.http.tool_calls", chosen)]


def write_reasoning_parser(name: str) -> list[str]:
    if name == HARMONY:
        return [override("model.tool_calls", "harmony")]
    return [override("model.reasoning", choose("--reasoning-parser", name, REASONING_PARSERS | {HARMONY: None}))]


def write_lora_modules(modules: Sequence[str]) -> list[str]:
    """Each is name=path, or JSON with name and path."""
    paths: dict[str, str] = {}
    for text in modules:
        if text.startswith("{"):
            fields = read_object(f"--lora-modules={text}", text)
            name, path = fields.get("name"), fields.get("path")
        else:
            name, _, path = text.partition("=")
        if not (isinstance(name, str) and isinstance(path, str) and name and path):
            raise ConfigError(f"--lora-modules={text}: write name=path, or JSON with name and path")
        if name in paths:
            raise ConfigError(f"--lora-modules: {name} is given twice; leave one out")
        paths[name] = path
    return [override("serve.lora_modules", paths)]


def write_executor(name: str) -> list[str]:
    launchers = {"mp": "local", "ray": "ray", "external_launcher": "torchrun"}
    return [override("parallel.launcher", choose("--distributed-executor-backend", name, launchers))]


def write_pooling(name: str) -> list[str]:
    """embed and the like: embeddings as Qwen3-Embedding's, for which --pooler-config may say otherwise."""
    if name not in ("pooling", "embed", "embedding", "classify", "score"):
        raise ConfigError(f"{name}: a decoder's embeddings and labels are served, and its text; give pooling, or embed")
    return ["serve.pooler_config.pooling_type=LAST"]


def write_pooler_config(text: str) -> list[str]:
    """The overrides of vLLM's PoolerConfig, by its older names and its newer ones."""
    name = f"--pooler-config={text}"
    values, names = read_object(name, text), {"seq_pooling_type": "pooling_type", "use_activation": "normalize"}
    found = {"pooling_type": "LAST"} | {names.get(key, key): value for key, value in values.items()}
    known = ["pooling_type", "normalize"]
    if unknown := next((key for key in found if key not in known), None):
        known += names
        raise ConfigError(f"{name}: {unknown} is not read{did_you_mean(unknown, known)} (known: {', '.join(known)})")
    kind = str(found["pooling_type"]).upper()
    found["pooling_type"] = choose("--pooler-config: pooling_type", kind, {"LAST": "LAST", "MEAN": "MEAN"})
    return [override(f"serve.pooler_config.{key}", value) for key, value in found.items()]


def write_hf_overrides(text: str) -> list[str]:
    """The tokens that a reranker is scored by; vLLM needs a class of its own for that, and a method."""
    name = f"--hf-overrides={text}"
    values = read_object(name, text)
    if unknown := next((key for key in values if key not in RERANKER_OVERRIDES), None):
        fix = "set the model's own field with --set, as --set model.attention.rope.theta=1e6"
        raise ConfigError(f"{name}: {unknown} is not read (known: {', '.join(RERANKER_OVERRIDES)}); {fix}")
    tokens = values.get("classifier_from_token")
    return [] if tokens is None else [override("serve.pooler_config.classifier_from_token", tokens)]


def choose(flag_name: str, name: str, known: Mapping[str, Any]) -> Any:
    if name not in known:
        raise ConfigError(f"{flag_name}={name}: there is no such choice; choices: {', '.join(known)}")
    return known[name]


def read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', error)}") from None


@dataclass
class VLLMArgs(EngineArgs):
    """The values of the flags; None for a flag that was not given."""

    model_tag: str | None = None  # the word without a flag, as in `vllm serve MODEL`

    # flags that change something
    load_format: str | None = vllm_flag(
        "load_dummy",
        "auto, safetensors or gguf, which are found out; dummy: random weights",
        null="auto",
        accepted=("auto", "safetensors", "gguf"),
        write=write_load_format,
    )
    quantization: str | None = vllm_flag(
        "quant.method",
        "of the checkpoint, as it says itself; fp8 packs plain weights",
        short="-q",
        null="the checkpoint's",
        read=lambda name: QUANTIZATIONS.get(name, name),
    )
    download_dir: str | None = vllm_flag(
        "cache", "folder for downloads and compiled artifacts", null="~/.cache/atom-run"
    )
    kv_cache_memory_bytes: int | None = vllm_flag(
        "serve.kv_cache_memory", "of the KV cache on a CPU, also as 8G or 8GiB", read=read_count
    )
    swap_space: int | None = vllm_flag(
        "serve.swap_space", "GiB of host memory a GPU, for KV that its pool has no room for", read=read_gib, null="none"
    )
    num_gpu_blocks_override: int | None = vllm_flag("serve.num_kvcache_blocks", "KV blocks", null="as memory holds")
    device_memory_utilization: float | None = vllm_flag(
        "serve.gpu_memory_utilization", "the same as --gpu-memory-utilization"
    )
    spec_method: str | None = vllm_flag("serve.method", "the same as method in --speculative-config", read=find_name)
    spec_model: str | None = vllm_flag("serve.draft_model", "the same as model in --speculative-config")
    spec_tokens: int | None = vllm_flag(
        "serve.num_speculative_tokens", "the same as num_speculative_tokens in --speculative-config", null="3"
    )
    max_logprobs: int | None = vllm_flag("serve.http.max_top_n_tokens", "log probabilities of a token, at most")
    generation_config: str | None = vllm_flag(
        "sampling.defaults",
        "auto: the checkpoint's; vllm: none; or a folder that has one",
        null="auto",
        accepted=("auto",),
        write=write_generation_config,
    )
    override_generation_config: str | None = vllm_flag(
        "sampling",
        "sampling defaults as JSON, with the names of generation_config.json",
        read=json_text,
        write=override_generation_config,
    )
    tool_call_parser: str | None = vllm_flag(
        "serve.http.tool_calls",
        f"{', '.join(sorted({*TOOL_PARSERS, *format_files()}))}, or a YAML file",
        null="auto",
        of=BOTH,
        write=write_tool_parser,
    )
    reasoning_parser: str | None = vllm_flag(
        "model.reasoning",
        ", ".join(sorted([*REASONING_PARSERS, HARMONY])),
        null="the model file's",
        write=write_reasoning_parser,
    )
    runner: str | None = vllm_flag(
        "serve.pooler_config.pooling_type",
        "pooling: `/v1/embeddings` of the last token, in addition to generated text",
        null="auto",
        accepted=("auto", "generate"),
        write=write_pooling,
    )
    task: str | None = vllm_flag(
        "serve.pooler_config.pooling_type",
        "embed: the same as --runner=pooling",
        null="auto",
        accepted=("auto", "generate"),
        write=write_pooling,
    )
    convert: str | None = vllm_flag(
        "serve.pooler_config.pooling_type",
        "embed: the same as --runner=pooling",
        null="auto",
        accepted=("auto", "none"),
        write=write_pooling,
    )
    pooler_config: str | None = vllm_flag(
        "serve.pooler_config",
        "JSON with pooling_type, LAST or MEAN, and normalize; counts after --runner",
        read=json_text,
        write=write_pooler_config,
    )
    hf_overrides: str | None = vllm_flag(
        "serve.pooler_config.classifier_from_token",
        "JSON whose classifier_from_token names the tokens of a reranker, [no, yes]",
        of=BOTH,
        read=json_text,
        write=write_hf_overrides,
    )
    enable_sleep_mode: bool | None = vllm_flag("serve.enable_sleep_mode", "serve /sleep, /wake_up and /is_sleeping")
    cpu_offload_params: tuple[str, ...] | None = vllm_flag(
        "serve.cpu_offload_params", "tables in host memory, by parts of their names, as embed_tokens_per_layer"
    )
    cpu_offload_gb: float | None = vllm_flag(
        "serve.cpu_offload_params",
        "any number if --cpu-offload-params names tables, all of which are moved",
        null="0",
        accepted=(0.0,),
        write=lambda _: [],
    )
    enable_lora: bool | None = vllm_flag("serve.enable_lora", "room for LoRA adapters; --lora-modules makes it, too")
    lora_modules: tuple[str, ...] | None = vllm_flag(
        "serve.lora_modules", "adapters as name=path, or JSON with name and path", null="none", write=write_lora_modules
    )
    max_loras: int | None = vllm_flag("serve.max_loras", "adapters that are loaded at a time")
    max_lora_rank: int | None = vllm_flag("serve.max_lora_rank", "of an adapter, at most")
    distributed_executor_backend: str | None = vllm_flag(
        "parallel.launcher",
        "of ranks: mp, ray or external_launcher",
        null="mp",
        accepted=("uni",),
        write=write_executor,
    )
    disable_custom_all_reduce: bool | None = vllm_flag(
        "parallel.collectives", "sums of ranks on GPUs only through NCCL", write=write_collectives
    )
    language_model_only: bool | None = vllm_flag("serve.images", "leave out what encodes images", write=write_text_only)

    # flags whose one meaning is what is done here anyway
    enable_auto_tool_choice: bool | None = vllm_flag("", "calls are read in every chat with tools", accepted=(True,))
    enable_chunked_prefill: bool | None = vllm_flag(
        "", "long prompts are always computed in chunks", of=BOTH, accepted=(True,)
    )
    async_scheduling: bool | None = vllm_flag("", "a GPU's steps are always planned ahead", accepted=(True,))
    calculate_kv_scales: bool | None = vllm_flag(
        "", "scales of an fp8 cache are measured if the checkpoint has none", accepted=(True,)
    )
    use_tqdm_on_load: bool | None = vllm_flag("", "loading always shows its progress", accepted=(True,))
    disable_log_requests: bool | None = vllm_flag("", "no prompt is ever logged", accepted=(True,))
    disable_log_stats: bool | None = vllm_flag("", "no statistics are logged; /metrics has them", accepted=(True,))
    disable_uvicorn_access_log: bool | None = vllm_flag(
        "", "uvicorn logs nothing; the line of each request stays", of=BOTH, accepted=(True,)
    )
    enable_prompt_tokens_details: bool | None = vllm_flag("", "usage always has them", accepted=(True,))
    enable_request_id_headers: bool | None = vllm_flag("", "answers always bear X-Request-Id", accepted=(True,))
    enable_server_load_tracking: bool | None = vllm_flag("", "/load always counts", accepted=(True,))
    enable_ep_weight_filter: bool | None = vllm_flag("", "a rank reads its own experts' weights", accepted=(True,))
    lora_dtype: str | None = vllm_flag("", "adapters are in the model's dtype", accepted=("auto",))
    model_impl: str | None = vllm_flag("", "models are atom's own", accepted=("auto", "vllm"))
    tokenizer_mode: str | None = vllm_flag("", "tokenizers are Hugging Face's", accepted=("auto", "hf", "slow"))
    config_format: str | None = vllm_flag("", "a checkpoint has a config.json", accepted=("auto", "hf"))
    logprobs_mode: str | None = vllm_flag("", "reported before biases and penalties", accepted=("raw_logprobs",))
    scheduling_policy: str | None = vllm_flag(
        "", "a request's priority counts, then its arrival", accepted=("fcfs", "priority")
    )
    response_role: str | None = vllm_flag("", "answers are the assistant's", accepted=("assistant",))
    chat_template_content_format: str | None = vllm_flag("", "contents are texts", accepted=("auto", "string"))
    decode_context_parallel_size: int | None = vllm_flag(
        "", "a sequence's KV is not divided", short="-dcp", of=BOTH, accepted=(1,)
    )
    prefill_context_parallel_size: int | None = vllm_flag(
        "", "a prompt is not divided among ranks", short="-pcp", of=BOTH, accepted=(1,)
    )
    api_server_count: int | None = vllm_flag("", "one process speaks HTTP", short="-asc", accepted=(1,))

    def overrides(self) -> list[str]:
        if self.cpu_offload_gb and not self.cpu_offload_params:
            named = "only tables that --cpu-offload-params names are in host memory, as embed_tokens_per_layer"
            raise UnsupportedError(f"--cpu-offload-gb={self.cpu_offload_gb:g}: {named}")
        model = self.model_tag
        if model is None:
            self.check_format(self.model)
            return super().overrides()
        if self.model is not None:
            raise ConfigError(f"{model} and --model={self.model}: the model is given twice; leave one out")
        self.check_format(model)
        return [override("checkpoint", model), *super().overrides()]

    def check_format(self, model: str | None) -> None:
        """ConfigError if --load-format is not the checkpoint's."""
        address = parse_address(model or "")
        is_gguf = (model or "").endswith(".gguf") or (address is not None and address.may_be_gguf)
        if self.load_format in ("safetensors", "gguf") and is_gguf != (self.load_format == "gguf"):
            raise ConfigError(f"--load-format={self.load_format}: {model or 'the checkpoint'} is another; leave it out")


class VLLMParser(Parser):
    """Takes the model as a word of its own, too, and flags from a YAML file: --config FILE, as vLLM has them."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog, description)
        self.file: Path | None = None  # of --config
        self.flags_of_file: set[str] = set()
        self.add_argument("model_tag", nargs="?", metavar="MODEL", help="the same as --model")
        self.add_argument("--config", metavar="FILE", help="YAML with flags; those of the command line take precedence")

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        own = list(sys.argv[1:] if argv is None else argv)
        if own[:2] == ["bench", "serve"]:
            raise ConfigError("write python -m atom.benchmarks.benchmark_serving for vllm bench serve")
        if own[:1] == ["serve"] and len(own) > 1:  # of `vllm serve MODEL`
            own = own[1:]
        path, of_file, own = open_config(own)
        try:
            super().parse(of_file)  # by itself, so that an error names the file
        except (ConfigError, UnsupportedError) as error:
            error.args = (f"{path}: {error}",)
            raise
        self.file, self.flags_of_file = path, {name for text in of_file if (name := flag_name(text))}
        return super().parse([*of_file, *own])

    def locate(self, text: str) -> str:
        named = {flag_name(word) for word in re.findall(r"(?<![\w-])--[\w-]+", text)}
        return f"{self.file}: {text}" if named & self.flags_of_file else text


def open_config(argv: list[str]) -> tuple[Path | None, list[str], list[str]]:
    """The file of --config, its flags but for those that the command line has itself, and the rest of that line."""
    at = next((index for index, text in enumerate(argv) if re.fullmatch("--config(=.*)?", text)), None)
    if at is None or argv[at:] == ["--config"]:
        return None, [], argv  # which the parser reports
    path, rest = Path(argv[at].partition("=")[2]), argv[at + 1 :]
    if argv[at] == "--config":
        path, rest = Path(rest[0]), rest[1:]
    try:
        values = parse_yaml(read_text(path.expanduser()))
    except yaml.YAMLError as error:
        raise ConfigError(f"--config={path} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"--config={path} is not a mapping from flags to values")
    own = [*argv[:at], *rest]
    given = {name for text in own if (name := flag_name(text))}
    return path, [text for key, value in values.items() for text in spell_flag(str(key), value, given)], own


def flag_name(text: str) -> str:
    """The name of a flag, the same for --max_num_seqs=4 and --no-max-num-seqs; "" for another word."""
    match = re.match(r"--(?:no-)?([\w-]+)", text.replace("_", "-"))
    return match[1] if match else ""


def spell_flag(key: str, value: Any, given: set[str]) -> Iterator[str]:
    """A flag of a file as words of a command line; none if it is given there, or null."""
    name = key.replace("_", "-")
    if value is None or name in given:
        return
    if isinstance(value, bool):
        yield f"--{name}" if value else f"--no-{name}"
    elif isinstance(value, list):
        yield from (f"--{name}", *(json.dumps(each) if isinstance(each, dict) else str(each) for each in value))
    else:
        yield f"--{name}={json.dumps(value) if isinstance(value, dict) else value}"
