"""What users can rely on, frozen: a surface grows on purpose, by editing this file. And how the parts may know each other."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import atom
from atom.config import Config
from atom.config.schema_keys import keys
from atom.jobs.start import JOBS
from atom.sampling_params import SamplingParams

pytestmark = pytest.mark.early

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "atom").rglob("*.py"))
SCRIPTS = sorted((ROOT / "scripts").rglob("*.py"))
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

PUBLIC = """
ArtifactError AsyncLLMEngine AtomError CapacityError CheckpointError ConfigError EngineDeadError LLM LLMEngine PassError RequestError
SamplingParams UnsupportedError WeightsIncompleteError
"""

SAMPLING = {
    "temperature": 1.0,
    "max_tokens": 64,
    "ignore_eos": False,
    "stop_strings": None,
    "stop": None,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "seed": None,
    "n": 1,
    "stop_token_ids": None,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": None,
    "include_stop_str_in_output": False,
    "skip_special_tokens": True,
    "visible_tokens": None,
    "mark_visible_tokens": False,
    "structured_outputs": None,
    "thinking_token_budget": None,
    "repetition_detection": None,
    "cache_retention": None,
    "explain": False,
    "reasoning": None,
    "tool_calls": None,
}

CONFIG = """
model: name architectures model_types auto hidden layers loops vocab max_position tied head_bias classifier state_dtype layer_scalar kv_shared_from kv_layers residual weights ignore
model: assumes embedding_affine embedding_norm embedding_norm_weight embedding_rows learned_positions position_offset transposed embedding_scale embedding_scale_root residual_scale scales logits_divisor logits_scale logits_softcap mlp_layer_types layer_types layer_pattern branches shared_blocks mtp_layers mtp_layer mtp_like stacked
model: fmt plain formats act tool_calls reasoning
model.eagle3: input_of output_of target_hidden vocab norm_before_residual use_aux_hidden_state
passes: extra taps steer sink_into_head fuse_qkv fuse_gate_up fuse_shared_experts fuse_norm_residual fuse_lora fuse_linear_gate
passes: fuse_sibling_linears fuse_linear_activate fuse_norm_linear fuse_norm_router fuse_norm_rope_attention fuse_gated_delta fuse_gate_quant
quant: fmt experts head plain formats max_kl choices calibration act kv method
parallel: tensor data experts pipeline replicas visible_devices collectives dispatch launcher address key_file host
advanced.torchrun: rank world_size local_world_size local_rank master_addr master_port run_id
model.norm: kind eps weight unweighted weighs_input bias offset final final_offset before gated gate_rank after after_eps after_only
model.attention: kind heads kv_heads head_dim bias o_bias clip gate gate_act o_norm gate_bias adapter_rank ssmax q_joined latent_scale qk_norm qk_norm_weight cca_taps v_norm k_is_v scale scale_dim softcap sinks
model.attention: qkv_chunks qkv_order alibi chunked full_rope dense_rope rope_layers no_rope_every no_rope_key window window_from q_rank o_rank o_groups kv_rank nope_dim rope_dim value_dim
model.attention.compress: every overlaps
model.attention.index: heads dim top_k every block local interleaved last reads eps layers
model.attention.rope: kind theta partial dims interleaved learned sections sections_interleaved factor original_max_position low_freq_factor high_freq_factor
model.attention.rope: beta_fast beta_slow attention_factor mscale mscale_all_dim query_growth growth_kind growth_offset truncate factors
model.attention.rope: short_factor long_factor short_mscale long_mscale
model.attention.window_rope: kind theta partial dims interleaved learned sections sections_interleaved factor original_max_position low_freq_factor high_freq_factor
model.attention.window_rope: beta_fast beta_slow attention_factor mscale mscale_all_dim query_growth growth_kind growth_offset truncate factors
model.attention.window_rope: short_factor long_factor short_mscale long_mscale
model.mlp.0: kind width widths sparsity activation limit limits shared_limits alpha bias down_norm shared_bias adapter_rank experts top_k expert latent shared shared_width shared_gate shared_mean zero_experts zero_gives after_norm expert_norm latent_norm transposed down_transposed interleaved
model.mlp.0: every first last skip
model.mlp.0.router: method score correction ranks weighs jitter bias transposed groups top_groups renormalize scale logits_scale scale_by_expert hidden carried own_norm
model.blocks.NAME.attention: kind heads kv_heads head_dim bias o_bias clip gate gate_act o_norm gate_bias adapter_rank ssmax q_joined latent_scale qk_norm qk_norm_weight cca_taps v_norm k_is_v scale scale_dim softcap sinks
model.blocks.NAME.attention: qkv_chunks qkv_order alibi chunked full_rope dense_rope rope_layers no_rope_every no_rope_key window window_from q_rank o_rank o_groups kv_rank nope_dim rope_dim value_dim
model.blocks.NAME.attention.compress: every overlaps
model.blocks.NAME.attention.index: heads dim top_k every block local interleaved last reads eps layers
model.blocks.NAME.attention.rope: kind theta partial dims interleaved learned sections sections_interleaved factor original_max_position low_freq_factor high_freq_factor
model.blocks.NAME.attention.rope: beta_fast beta_slow attention_factor mscale mscale_all_dim query_growth growth_kind growth_offset truncate factors
model.blocks.NAME.attention.rope: short_factor long_factor short_mscale long_mscale
model.blocks.NAME.attention.window_rope: kind theta partial dims interleaved learned sections sections_interleaved factor original_max_position low_freq_factor high_freq_factor
model.blocks.NAME.attention.window_rope: beta_fast beta_slow attention_factor mscale mscale_all_dim query_growth growth_kind growth_offset truncate factors
model.blocks.NAME.attention.window_rope: short_factor long_factor short_mscale long_mscale
model.blocks.NAME.mlp: kind width widths sparsity activation limit limits shared_limits alpha bias down_norm shared_bias adapter_rank experts top_k expert latent shared shared_width shared_gate shared_mean zero_experts zero_gives after_norm expert_norm latent_norm transposed down_transposed interleaved
model.blocks.NAME.mlp: every first last skip
model.blocks.NAME.mlp.router: method score correction ranks weighs jitter bias transposed groups top_groups renormalize scale logits_scale scale_by_expert hidden carried own_norm
model.blocks.NAME.short_conv: taps bias
model.blocks.NAME.gated_delta: key_heads value_heads key_dim value_dim taps by_head eps beta_scale decay_rank decay_by_dim decay_rows decay_floor gate_rank gate_act
model.block_scales.NAME: read given kept stored
model.channel_scales.NAME: factor power
model.residual_gate: kind factor
model.own_norms.NAME: before after
model.per_layer_input: dims vocab activation
model.ngrams: layers size heads dim rows multiple parts taps end
model.streams: kind num rank rounds eps write_scale write_eps merge layers in_mtp
model.vision: channels patch frames mean std patch_bias table_side hidden layers layer_types window norm eps heads bias o_bias rope_theta mlp mlp_bias width activation out deepstack weights min_pixels max_pixels resample token bidirectional row_token final_norm area normalizes patch_order table_length v_norm scale after_norms clips
model.vision.video: token text pixels_of min_pixels max_pixels time tokens_per_second
model.vision: model_types max_edge patch_norm rope_order assumes min_edge pad table_mode assumes class_token qk_norm layer_scale
model.vision.tiles: fit side edge min max over
model.vision.text: start tile tile_line thumbnail whole line end
model.vision.merger: side pool scale standardize norm norm_kind norm_eps fold fold_bias mlp width bias activation
model.sections.0: layers loops name norm adds_input own_state
model.blocks.NAME.mamba2: heads head_dim state groups taps step_min step_max norm conv_bias bias
model.blocks.NAME.lightning: heads head_dim layers eps
model.blocks.NAME.mamba: inner state step_rank taps conv_bias bias norms eps
model.gguf: architecture weights interleaved by_axis norm_offset split ignore_merges projector tower tokens
model.embedded: requirement member sha256 config generation
model.usual: checkpoint config
serve: kv_cache_dtype block_size num_kvcache_blocks kv_cache_memory swap_space kv_cache_dir kv_cache_dir_bytes idle_exit_seconds max_model_len max_num_seqs max_num_batched_tokens
serve: enable_prefix_caching cache_retention_share state_memory state_interval enforce_eager enable_expert_parallel enable_dp_attention gpu_memory_utilization cudagraph_capture_sizes
serve.pooler_config: pooling_type normalize classifier_from_token
serve: scheduler_delay_factor max_itl_ms method draft_model num_speculative_tokens max_verified_tokens acceptance_length prompt_lookup_min prompt_lookup_max suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor suffix_decoding_min_token_prob torch_profiler_dir profiler_more
serve: images image_memory max_patches max_images max_image_pixels image_domains
serve: models max_awake spare_engine idle_sleep_seconds idle_sleep_level
serve: cpu_offload_params enable_sleep_mode enable_lora lora_modules lora_experts max_loras max_lora_rank allow_runtime_lora_updating
serve.http: host port listen_when_ready root_path ssl_certfile ssl_keyfile served_model_name api_keys public_keys signature_seconds signing_key cors log log_level chat_template chat_template_kwargs tool_calls max_queue max_input_length max_total_tokens
serve.http: max_stop_sequences max_top_n_tokens best_of max_body
serve.http: drain_seconds enable_tokenizer_info_endpoint vllm_metrics otlp_traces_endpoint response_store_bytes
advanced: max_values max_items max_header read_seconds write_seconds comment_seconds heartbeat_seconds notify_socket listen_fds listen_pid
job: kind output output_file gpu chat system_prompt taps taps_folder steer stage save_tokenizer pipeline_rank network graph save_recipe objective recipes diff resume entry prune verify export import_from trust
job: gpus formats trace min_user_rate max_ttft price_per_hour
job: a b bound bisect texts num_tokens context_len stride reference tasks num_fewshot limit save_draft check max_inflight num_prompts input_len output_len dataset_path num_warmups num_iters num_steps
sampling: temperature max_tokens ignore_eos stop_strings stop top_k top_p min_p seed n stop_token_ids min_tokens logprobs
sampling: prompt_logprobs presence_penalty frequency_penalty repetition_penalty logit_bias allowed_token_ids bad_words defaults
sampling: include_stop_str_in_output skip_special_tokens visible_tokens mark_visible_tokens structured_outputs thinking_token_budget repetition_detection cache_retention explain reasoning tool_calls
: checkpoint mmproj revision trust_remote_code dtype device seed level batch_invariant tune load_dummy prompts images recipe cache hf generation overrides config_dirs draft other_models
"""

MODEL_FILES = """
afmoe alice_ai apertus apertus1p5 arcee aria auto axk1 axk2 baichuan bailing_moe bailing_moe_v2 bailing_moe_v3 bamba beam biogpt bloom codegen chatglm cohere cohere2 cohere2_moe cohere_compass cosmos3_edge cwm dbrx decoder deepseek deepseek_v3 deepseek_v4 deepseek_v32 dory dots1 dots3_note eagle3 ernie4_5 ernie4_5_moe ernie4_5_vl_moe exaone exaone4 exaone_moe falcon falcon_h1 falcon_mamba flex_olmo flint gemma
gemma2 gemma3 gemma3n gemma4 glm glm4 glm4_moe glm4_moe_lite glm4v glm4v_moe glm5_next glm_moe_dsa gpt2 gpt_bigcode gpt_neo glm_ocr gpt_neox gpt_oss gptj granite granitemoe granitemoehybrid granitemoeshared granitemoe_swa granite_swa helium hrm_text hunyuan_dense hunyuan_moe hy_v3 hy_v4
hyperclovax internlm2 internlm3 jais2 jamba kimi_k2 kimi_k25 kimi_k3 kimi_linear kimi_vl laguna kolibri1 lfm2 lfm2_moe lfm3 llama llama4 llava llava_mistral longcat_flash mamba mamba2 mellum mimo_v2_flash mllama mimo minicpm minicpm3 minicpmv minimax_m2 minimax_m3 minimax_text_01 ministral ministral3 mistral mistral4 mistral_large4 mixtral molmo2 mpt muse_glimmer muse_spark nemotron nemotron_h nemotron_h_moe olmo olmo2 olmo3 olmo_hybrid olmoe opt paligemma paligemma2 persimmon orion ouro pangu_embedded param2moe paddleocr_vl phi phi3 phimoe qwen2 qwen2_audio qwen2_moe qwen2_vl qwen2_5_vl
qwen3 qwen3_5 qwen3_5_moe qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe qwen4_exp sarvam_mla seed_oss smollm2 smollm3 solar_open stablelm starcoder2 step3p5 vaultgemma voxtral youtu zamba2 zaya
"""

TOOL_FORMATS = """
deepseek_v3 deepseek_v31 deepseek_v32 gemma4 glm45 granite harmony hy_v3 json kimi_k2 kimi_k3 lfm2 llama4 longcat minimax_m2 minimax_m3 mistral
olmo3 phi4_mini python_tag pythonic qwen3_coder seed_oss tagged_json
"""

ENVIRONMENT = {
    "ATOM_API_KEYS",
    "ATOM_CACHE",
    "ATOM_PROFILER_MORE",
    "ATOM_TORCH_PROFILER_DIR",
    "CUDA_VISIBLE_DEVICES",
    "NOTIFY_SOCKET",
    "LISTEN_FDS",
    "LISTEN_PID",
    "VLLM_API_KEY",
    "VLLM_BATCH_INVARIANT",
    "XDG_CACHE_HOME",
    *(
        "RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "LOCAL_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
    ),  # torchrun's
}

ENGINE_FLAGS = """
help model trust-remote-code pipeline-parallel-size tensor-parallel-size data-parallel-size enforce-eager enable-prefix-caching port kv-cache-dtype
block-size max-model-len max-num-batched-tokens max-num-seqs gpu-memory-utilization scheduler-delay-factor
cudagraph-capture-sizes level load-dummy enable-expert-parallel enable-dp-attention torch-profiler-dir method draft-model
speculative-config num-speculative-tokens spec-decode-acceptance-length set online-quant-config dtype seed revision device
"""

VLLM_FLAGS = """
served-model-name chat-template default-chat-template-kwargs tool-calls config load-format quantization download-dir
kv-cache-memory-bytes swap-space num-gpu-blocks-override max-logprobs enable-sleep-mode enable-lora lora-modules
max-loras max-lora-rank lora-dtype generation-config override-generation-config tool-call-parser reasoning-parser
distributed-executor-backend enable-auto-tool-choice enable-chunked-prefill async-scheduling calculate-kv-scales
use-tqdm-on-load hf-overrides disable-custom-all-reduce disable-log-requests disable-log-stats disable-uvicorn-access-log
enable-prompt-tokens-details enable-request-id-headers enable-server-load-tracking runner task convert pooler-config
model-impl tokenizer-mode config-format logprobs-mode scheduling-policy response-role chat-template-content-format
decode-context-parallel-size api-server-count cpu-offload-gb cpu-offload-params spec-method spec-model spec-tokens
device-memory-utilization language-model-only enable-ep-weight-filter prefill-context-parallel-size
"""  # of commands that answer requests

COMMANDS = {  # ROCm/ATOM's -> their own flags
    "atom.entrypoints.openai_server": f"""{VLLM_FLAGS}
        host server-port api-key allowed-origins max-queue drain-seconds enable-tokenizer-info-endpoint root-path
        ssl-certfile ssl-keyfile max-num-queued-reqs otlp-traces-endpoint shutdown-timeout sse-keep-alive-interval
        log-level
    """,
    "atom.entrypoints.run_batch": f"{VLLM_FLAGS} input-file output-file max-inflight",
    "atom.examples.simple_inference": "temperature",
    "atom.examples.profile_offline": "input-length output-length bs random-input",
}

# A line imports only from lines above it; between | neither imports the other.
IMPORT_ORDER = """
errors | process | devices | dtypes | measurement | state_rules
sampling_params
cache | checkpoint
plugins
config | graph
images
kernels | runtime.types
pieces | frontend | passes | weights
compiler | runtime | pair_prompts | trainer
assemble | prompts | embeddings
llm | plugin
async_llm
serve
jobs
cli
entrypoints | benchmarks | __main__
examples
"""

# What a function may import, and why not its module. All else is imported at the top.
LOCAL_IMPORTS = {
    # packages of an extra, or of some platforms
    "aiohttp": "the extra bench",
    "datasets": "the extra bench",
    "llguidance": "the extra structured",
    "matplotlib": "the extra bench",
    "opentelemetry": "the extra otel",
    "PIL": "the extra images",
    "ray": "the extra ray",
    "cryptography": "the extra signatures",
    "http_sf": "the extra signatures",
    "readline": "it changes input(), and is not on Windows",
    "resource": "a benchmark's client may run on Windows",
    "triton": "the extra cuda",
    "uvloop": "not for Windows",
    "vllm": "the extra vllm",
    # packages that take a launch, or --help, longer to import than all else that it does with them
    "atom.serve.engine.worker": "the command's process has no use for it, its fork does",
    "gguf": "only some types are dequantized by it",
    "huggingface_hub": "a benchmark of a folder's tokenizer has no use for it, nor has --help",
    "jinja2": "an engine process renders no chat template",
    "rich": "a bar on a terminal, a table that is asked for",
    "torch": "an engine process sends heartbeats while torch is imported",
    "tqdm": "a benchmark's --help has no bar",
    "transformers": "only some tokenizers need it, for half a second",
    # modules that import such packages
    "atom.assemble": "torch, as above",
    "atom.checkpoint.gguf.GGUFCheckpoint": "numpy, which a description of a folder does not need",
    "atom.checkpoint.mmproj.with_tower": "numpy, as above",
    "atom.checkpoint.hub": "huggingface_hub",
    "atom.config.load": "hydra: a configuration that is loaded needs it no more",
    "atom.compiler.artifact": "torch: job=cache lists entries without it",
    "atom.config.tool_formats": "yaml: an engine reads formats of calls once an answer has a budget of reasoning",
    "atom.config.recipes": "yaml: most launches name no recipe, and one that finds its artifact writes none",
    "atom.jobs.eval.harness": "the extra eval",
    "atom.jobs.chat": "fastapi: answers to prompts are not parsed",
    "atom.kernels.find_target": "torch, as above",
    "atom.kernels.tuned": "torch, as above",
    "atom.kernels.aiter": "triton, once a kernel is loaded",
    "atom.kernels.hopper": "triton, once a kernel is loaded",
    "atom.kernels.peers": "triton, once ranks connect",
    "atom.kernels.triton": "triton, once a kernel is loaded or a piece compiled",
}

# Where a module is imported by a name that is found at run time.
IMPORTERS = """
__init__ entrypoints.args jobs.__init__ jobs.port.hints kernels.aiter.functions kernels.inductor.piece_compiler
kernels.registry kernels.triton.compile.compile_processes plugins
"""


class Source(NamedTuple):
    """What the rules read of a file; its tree would be looked at by each garbage collection."""

    docstring: str
    nodes: list[tuple[ast.AST, bool]]  # statements and names that a rule is about, and whether they are in a function


KINDS = (ast.Import, ast.ImportFrom, ast.Global, ast.Call, ast.Attribute, ast.AugAssign)


@functools.cache
def read(path: Path) -> Source:
    tree = ast.parse(path.read_text())
    left: list[tuple[ast.AST, bool]] = [(tree, False)]
    for node, is_inner in left:
        below = is_inner or isinstance(node, FUNCTIONS)
        left += [(child, below) for child in ast.iter_child_nodes(node)]
    return Source(ast.get_docstring(tree) or "", [each for each in left if isinstance(each[0], KINDS)])


def nodes_of(path: Path) -> list[tuple[ast.AST, bool]]:
    return read(path).nodes


def test_the_names_that_atom_exports():
    assert sorted(atom.__all__) == PUBLIC.split()
    assert set(atom.__all__) <= set(dir(atom))
    assert {name for name in atom.__all__ if name.endswith("Error")} == {
        name for name in atom.__all__ if isinstance(getattr(atom, name), type) and name.endswith("Error")
    }
    with pytest.raises(AttributeError, match="module 'atom' has no attribute 'nope'"):
        atom.nope  # noqa: B018


def test_the_fields_of_sampling_params_and_their_defaults():
    assert {each.name: each.default for each in dataclasses.fields(SamplingParams)} == SAMPLING


def test_the_keys_of_the_configuration():
    frozen = [line.partition(":")[::2] for line in CONFIG.strip().splitlines()]
    expected = {f"{at}.{name}".lstrip(".") for at, names in frozen for name in names.split()}
    assert set(keys(Config)) == expected


def test_the_groups_jobs_and_commands():
    groups = {
        path.name: {file.stem for file in path.glob("*.yaml")} for path in (ROOT / "conf").iterdir() if path.is_dir()
    }
    assert groups == {
        "gpu": {"a100", "b200", "h100", "h200", "l4", "l40s", "mi300x", "mi355x", "rtx_4090", "rtx_5090"},
        "job": {
            "batch",
            "bench",
            "cache",
            "chat",
            "compare",
            "compile",
            "eval",
            "explain",
            "generate",
            "plan",
            "port",
            "profile",
            "recipe",
            "serve",
        },
        "model": set(MODEL_FILES.split()),
        "tool_calls": set(TOOL_FORMATS.split()),
        "vision": {
            "qwen2_vl",
            "qwen2_5_vl",
            "qwen3_vl",
            "pixtral",
            "mistral3",
            "idefics3",
            "gemma3",
            "gemma4",
            "glm4v",
            "glm_ocr",
            "moonvit",
            "internvl",
            "lfm2_vl",
        },
        "parallel": set(
            [
                "tp1",
                "tp2",
                "tp4",
                "tp8",
                "tp2_ep",
                "tp4_ep",
                "tp8_ep",
                "dp2",
                "dp4",
                "dp8",
                "dp2_ep",
                "dp4_ep",
                "dp8_ep",
            ]
        ),
        "quant": {"auto", "none", "fp8", "fp8_block", "int8", "int4", "mxfp4", "budget"},
        "serve": {"default"},
    }
    assert set(JOBS) == groups["job"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["scripts"] == {"atom-run": "atom.cli:main"}
    extras = "amd bench cuda dev eval images otel ray signatures structured sweeps vllm"
    assert set(project["project"]["optional-dependencies"]) == set(extras.split())
    assert project["project"]["entry-points"] == {
        "vllm.general_plugins": {"atom": "atom.plugin.vllm:register_model"},
        "vllm.platform_plugins": {"atom": "atom.plugin.vllm:register_platform"},
    }


@pytest.mark.parametrize("command", COMMANDS)
def test_the_flags_of_the_commands_of_others(command: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        importlib.import_module(command).main(["--help"])
    shown = re.findall(r"^  (?:-h, )?--([\w-]+)", capsys.readouterr().out, re.MULTILINE)
    assert sorted(shown) == sorted(ENGINE_FLAGS.split() + COMMANDS[command].split())


def test_the_environment_variables_that_conf_reads():
    texts = [path.read_text() for path in (ROOT / "conf").rglob("*.yaml")]
    assert {name for text in texts for name in re.findall(r"oc\.env:(\w+)", text)} == ENVIRONMENT


def packages_of(distributions: set[str]) -> dict[str, str]:
    """Their packages and modules, each with its distribution's name.

    By the text of their lists of files: importlib.metadata makes an object of each of 50,000 files.
    """
    known = {}
    for name in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            files = importlib.metadata.distribution(name).read_text("RECORD") or ""
            known |= dict.fromkeys(re.findall(r"^(\w+)[^,]*\.(?:py|so),", files, re.MULTILINE), name)
    return known


def test_what_the_sources_import_is_what_they_depend_on():
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [each for name, some in found["optional-dependencies"].items() if name != "dev" for each in some]
    declared = {re.match(r"[\w.-]+", each)[0] for each in [*found["dependencies"], *extras]}  # type: ignore[index]
    names = {
        name.split(".")[0]
        for path in SOURCES
        for node, _ in nodes_of(path)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([each.name for each in node.names] if isinstance(node, ast.Import) else [node.module or "atom"])
    }
    known = packages_of(declared)
    several = {"opentelemetry"}  # of several distributions
    used = {known.get(name, name) for name in names - set(sys.stdlib_module_names) - {"atom"} - several}
    by_name = {"httptools", "amd-aiter"}  # that no import statement names
    by_name |= {"opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"}
    by_name |= {"hydra-optuna-sweeper", "hydra-joblib-launcher", "hydra-submitit-launcher"}
    assert {each.lower().replace("_", "-") for each in used | by_name} == {
        each.lower().replace("_", "-") for each in declared
    }
    private = {"hydra-core", "uvicorn", "triton", "vllm"}
    assert all("<" in each for each in [*found["dependencies"], *extras] if re.split("[<>]", each)[0] in private)


def test_a_wheel_carries_every_package():
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {".".join(path.parent.relative_to(ROOT).parts) for path in SOURCES}
    data = {f"atom.conf.{path.parent.name}" for path in (ROOT / "conf").glob("*/*.yaml")} | {
        "atom.serve.web",
        "atom.serve.web.vendor",
    }
    assert set(packages) == folders | data | {"atom.conf", "atom.recipes"}, (
        "setuptools warns of those that are not named"
    )


def test_a_source_distribution_carries_what_the_tests_read():
    listed = (ROOT / "MANIFEST.in").read_text()
    folders = set(re.findall(r"^graft (\w+)$", listed, re.MULTILINE))
    assert folders == {"deploy", "docs", "scripts", "tests"} and all((ROOT / name).is_dir() for name in folders)
    (files,) = re.findall(r"^include (.+)$", listed, re.MULTILINE)
    assert all((ROOT / name).is_file() for name in files.split())


def test_an_index_shows_the_readme_without_links_to_files(tmp_path: Path):
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (shown,) = tmp_path.glob("*/PKG-INFO")
    about, _, text = shown.read_text().partition("\n\n")
    assert "Description-Content-Type: text/markdown" in about
    assert re.findall(r"\]\((?!https?://)[^)]*\)", text) == [] and "Configuration, field by field" in text


def test_a_wheel_carries_every_file_that_is_no_module():
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    folders = {
        package: ROOT / package.replace(".", "/") for package in data if package not in ("atom.conf", "atom.recipes")
    }
    found = (path for package, folder in folders.items() for pattern in data[package] for path in folder.glob(pattern))
    carried = {path for path in found if path.is_file()}
    files = {path for path in (ROOT / "atom").rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert carried == files


def unit(module: str, units: set[str]) -> str | None:
    """The unit of the order that a module belongs to: runtime.types is one, runtime.engine is part of runtime."""
    parts = module.split(".")
    return next((name for n in (2, 1) if (name := ".".join(parts[:n])) in units), None)


def imports(path: Path) -> Iterator[str]:
    """Modules of atom that a file imports anywhere in it, without the leading atom."""
    for node, _ in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and node.module == "atom":
            yield from (alias.name for alias in node.names if alias.name not in atom.__all__)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("atom."):
            assert node.module
            yield from (f"{node.module}.{alias.name}".removeprefix("atom.") for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name.removeprefix("atom.") for alias in node.names if alias.name.startswith("atom."))


def test_imports_go_down_only():
    row = {name.strip(): row for row, line in enumerate(IMPORT_ORDER.strip().splitlines()) for name in line.split("|")}
    faults = []
    for path in SOURCES[1:]:
        own = unit(".".join(path.relative_to(ROOT / "atom").with_suffix("").parts), set(row))
        if own is None:
            faults.append(f"{path} has no place in the order of imports")
            continue
        for module in imports(path):
            other = unit(module, set(row))
            if other is None or not (other == own or row[other] < row[own]):
                faults.append(f"{path}, of {own}, imports {module}, of {other}")
    assert SOURCES[0] == ROOT / "atom" / "__init__.py", "which imports what it exports"
    assert faults == []


def test_only_these_are_imported_in_functions():
    found, importers = set(), set()
    for path in SOURCES:
        for node in (node for node, is_inner in nodes_of(path) if is_inner):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Attribute) and node.attr == "import_module":
                importers.add(".".join(path.relative_to(ROOT / "atom").with_suffix("").parts))
    known = {name: next((each for each in LOCAL_IMPORTS if f"{name}.".startswith(f"{each}.")), None) for name in found}
    assert [name for name, listed in known.items() if listed is None] == []
    assert set(known.values()) == set(LOCAL_IMPORTS), "a reason without an import"
    assert importers == set(IMPORTERS.split())


def test_a_backend_names_only_those_that_it_composes():
    """hopper's classes are above triton's, aiter takes some of triton's kernels; triton names none of them."""
    for path in (ROOT / "atom" / "kernels" / "triton").rglob("*.py"):
        others = {module for module in imports(path) if module.startswith(("kernels.hopper", "kernels.aiter"))}
        assert not others and not re.search("hopper|gluon", path.read_text(), re.IGNORECASE), path


def test_benchmarks_take_of_atom_only_what_is_measured():
    found = {module.split(".")[0] for path in (ROOT / "atom" / "benchmarks").glob("*.py") for module in imports(path)}
    assert found == {"benchmarks", "measurement"}


def test_a_module_begins_with_a_short_line_that_says_what_it_does():
    faults = []
    for path in [*SOURCES, *SCRIPTS]:
        first, _, rest = read(path).docstring.partition("\n")
        if not 2 <= len(first.split()) <= 14:
            faults.append(f"{path}: {first!r}")
        if rest and not rest.startswith("\n"):
            faults.append(f"{path}: a blank line belongs after the first one")
    assert faults == []


def forbidden(node: ast.AST, may_read: bool, may_pickle: bool) -> str | None:
    """What a statement or expression does that no source may."""
    if isinstance(node, ast.Global):
        return "global"
    if isinstance(node, ast.Import | ast.ImportFrom):
        names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
        return "pickle" if {"pickle", "marshal", "shelve", "dill"} & set(names) and not may_pickle else None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
        return node.func.id
    if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") and not may_read:
        return "the environment is conf's to read"
    return None


def test_no_state_is_global_and_no_data_is_code():
    faults = []
    for path in SOURCES:
        nodes = [node for node, _ in nodes_of(path)]
        written = [node.target for node in nodes if isinstance(node, ast.AugAssign)]  # `os.environ |= …` reads nothing
        # these have no conf, and OpenMP and oneDNN read their settings in the environment only
        reads = bool({path.parent.name, path.name} & {"benchmarks", "vllm", "openmp.py", "cpu.py"})
        # compositions within this process: a third of copy.deepcopy's time; and what torch and vLLM send, name by name
        pickles = path.name in ("hydra.py", "pickles.py")
        found = [(node, forbidden(node, reads or node in written, pickles)) for node in nodes]
        faults += [f"{path}:{getattr(node, 'lineno', 0)}: {fault}" for node, fault in found if fault]
    assert faults == []


@pytest.mark.parametrize(
    ("statement", "unloaded"),
    [
        ("import atom; atom.SamplingParams; atom.ConfigError", "torch triton transformers hydra omegaconf tokenizers"),
        (
            "import atom.config, atom.cli, atom.runtime.types",
            "torch triton transformers hydra omegaconf yaml tokenizers huggingface_hub",
        ),
        (
            "from atom.cli import main; main(['--help'])",
            "torch triton transformers hydra omegaconf yaml tokenizers huggingface_hub",
        ),
        ("import atom.jobs.flags", "torch triton transformers tokenizers huggingface_hub"),
        ("from atom.cli import main; main(['--cfg', 'job'])", "torch triton transformers huggingface_hub gguf"),
        ("from atom.config.load import load; load()", "torch triton transformers huggingface_hub gguf"),
        ("import atom.checkpoint", "torch triton transformers"),
        (
            "import atom.jobs.serve, atom.serve.server, atom.serve.engine.worker",
            "torch triton transformers llguidance hydra omegaconf gguf rich",
        ),
        (
            "import atom.serve.engine.worker, atom.assemble, atom.checkpoint.gguf",
            "triton transformers llguidance hydra omegaconf yaml jinja2 fastapi pydantic gguf sympy rich torch._dynamo "
            "torch._inductor",
        ),
        ("import atom.pieces.compile_workers", "triton transformers hydra omegaconf yaml torch._inductor"),
        (
            "import atom.benchmarks.benchmark_serving, atom.benchmarks.matrix, atom.benchmarks.compare",
            "torch triton transformers tokenizers huggingface_hub aiohttp tqdm matplotlib datasets hydra",
        ),
    ],
)
def test_imports_are_light(statement: str, unloaded: str):
    program = (
        f"{statement}\nimport sys\nassert not [m for m in '{unloaded}'.split() if m in sys.modules], sys.modules.keys()"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
