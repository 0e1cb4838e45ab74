"""The flags of `vllm serve`: what they mean to the configuration, and what is refused."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from entrypoints import rocm_flags
from entrypoints.vllm_flags import ADDED, BATCH, FLAGS
from vllm_sources import sources, tree, version

from atom.config import Config
from atom.config.load import load
from atom.entrypoints import openai_server
from atom.entrypoints.args import ROCM, EngineArgs, Parser
from atom.entrypoints.openai_server import ServerArgs
from atom.entrypoints.refused_flags import REFUSED, ROCM_REFUSED, VLLM_REFUSED, refusal_of, refused, with_dashes
from atom.entrypoints.run_batch import BatchArgs
from atom.entrypoints.vllm_args import VLLMParser
from atom.errors import ConfigError, UnsupportedError

CONFIGS = Path(__file__).parents[1] / "configs"

MEANS: dict[str, list[str]] = {
    "org/name": ["checkpoint='org/name'"],
    "serve org/name --seed 1": ["checkpoint='org/name'", "seed=1"],
    "serve": ["checkpoint='serve'"],
    "org/name --seed 1": ["checkpoint='org/name'", "seed=1"],
    "--served-model-name a b -- org/name": ["checkpoint='org/name'", "serve.http.served_model_name=['a','b']"],
    "--load-format dummy": ["load_dummy=true"],
    "--load-format auto": [],
    "--disable-custom-all-reduce": ["parallel.collectives=nccl"],
    "x.gguf --load-format gguf": ["checkpoint='x.gguf'"],
    "--load-format safetensors": [],
    "-q fp8": ["quant.method='fp8'"],
    "--quantization awq_marlin": ["quant.method='awq'"],
    "--download-dir /data": ["cache='/data'"],
    "--kv-cache-memory-bytes 8GiB": ["serve.kv_cache_memory=8589934592"],
    "--swap-space 0.5": ["serve.swap_space=536870912"],
    "--enable-sleep-mode": ["serve.enable_sleep_mode=true"],
    "--cpu-offload-gb 6 --cpu-offload-params embed_tokens_per_layer embed_tokens": [
        "serve.cpu_offload_params=['embed_tokens_per_layer','embed_tokens']"
    ],
    "--enable-tokenizer-info-endpoint": ["serve.http.enable_tokenizer_info_endpoint=true"],
    "--enable-lora --max-loras 2 --max-lora-rank 64": ["serve.enable_lora=true", "serve.max_loras=2", "serve.max_lora_rank=64"],
    """--lora-modules sql=/adapters/sql '{"name": "chat", "path": "/a=b"}'""": ["serve.lora_modules={sql:'/adapters/sql',chat:'/a=b'}"],
    "--num-gpu-blocks-override 7": ["serve.num_kvcache_blocks=7"],
    "--max-model-len 4k": ["serve.max_model_len=4000"],
    "--max-model-len 4K": ["serve.max_model_len=4096"],
    "--max-model-len 25.6k": ["serve.max_model_len=25600"],
    "--max_num_batched_tokens=2M": ["serve.max_num_batched_tokens=2097152"],
    "--no-enable-prefix-caching": ["serve.enable_prefix_caching=false"],
    "--no_enable_prefix_caching": ["serve.enable_prefix_caching=false"],
    "--enable-prefix-caching --no-enable-prefix-caching": ["serve.enable_prefix_caching=false"],
    "--no-enforce-eager": ["serve.enforce_eager=false"],
    "--generation-config auto": [],
    "--generation-config vllm": ["sampling.defaults=none"],
    """--override-generation-config '{"top_k": 5, "max_new_tokens": 9}'""": ["sampling.top_k=5", "sampling.max_tokens=9"],
    """--override-generation-config '{"do_sample": false}'""": ["sampling.temperature=0"],
    "--tool-call-parser llama3_json": ["serve.http.tool_calls='python_tag'"],
    "--tool-call-parser mistral --enable-auto-tool-choice": ["serve.http.tool_calls='mistral'"],
    "--tool-call-parser deepseek_v31": ["serve.http.tool_calls='deepseek_v31'"],
    "--tool-call-parser openai --reasoning-parser openai_gptoss": [
        "serve.http.tool_calls='harmony'",
        "model.tool_calls='harmony'",
    ],
    "--tool-call-parser mine.yaml": ["serve.http.tool_calls='mine.yaml'"],
    "--tool-call-parser glm47 --reasoning-parser gemma4": [
        "serve.http.tool_calls='glm45'",
        "model.reasoning=['<|channel>thought','<channel|>']",
    ],
    "--tool-call-parser minimax_m3 --reasoning-parser minimax_m3": [
        "serve.http.tool_calls='minimax_m3'",
        "model.reasoning=['<mm:think>','</mm:think>']",
    ],
    "--tool-call-parser kimi_k3 --reasoning-parser kimi_k3": [
        "serve.http.tool_calls='kimi_k3'",
        "model.reasoning=['<|open|>think<|sep|>','<|close|>think<|sep|>']",
    ],
    "--reasoning-parser deepseek_r1": ["model.reasoning=['<think>','</think>']"],
    "--distributed-executor-backend mp": ["parallel.launcher='local'"],
    "--distributed-executor-backend uni": [],
    "-tp 2 -pp 3": ["parallel.tensor=2", "parallel.pipeline=3"],
    "--disable-log-requests --runner generate --cpu-offload-gb 0 --scheduling-policy priority": [],
    "--runner pooling": ["serve.pooler_config.pooling_type=LAST"],
    '--hf-overrides \'{"architectures":["Qwen3ForSequenceClassification"],"classifier_from_token":["no","yes"],'
    '"is_original_qwen3_reranker":true}\'': ["serve.pooler_config.classifier_from_token=['no','yes']"],
    "--task embed --pooler-config '{\"seq_pooling_type\":\"MEAN\",\"use_activation\":false}'": [
        "serve.pooler_config.pooling_type=LAST",
        "serve.pooler_config.pooling_type='MEAN'",
        "serve.pooler_config.normalize=false",
    ],
    "--spec-method ngram --spec-tokens 4": ["serve.method='ngram'", "serve.num_speculative_tokens=4"],
    "--spec-method draft_model --spec-model org/small": ["serve.method='draft'", "serve.draft_model='org/small'"],
    "--spec-method deepseek_mtp": ["serve.method='mtp'"],
    "-sc '{\"method\":\"ernie_mtp\"}' -ep": ["serve.enable_expert_parallel=true", "serve.method='mtp'"],
    "-pcp1 -dcp1 --enable-ep-weight-filter": [],
    "--language-model-only": ["serve.images=false"],
    "--no-language-model-only": [],
    "--device-memory-utilization 0.5": ["serve.gpu_memory_utilization=0.5"],
    "--sse-keep-alive-interval 5 --log-level WARNING": [
        "advanced.comment_seconds=5.0",
        "serve.http.log_level='warning'",
    ],
    "--speculative-config.method ngram --speculative_config.num_speculative_tokens=4": [
        "serve.method='ngram'",
        "serve.num_speculative_tokens=4",
    ],
    "-sc.method=ngram --speculative-config '{\"prompt_lookup_max\": 3}'": [
        "serve.method='ngram'",
        "serve.prompt_lookup_max=3",
    ],
    "--override-generation-config '{\"top_k\": 5}' --override-generation-config.temperature 0.5": [
        "sampling.top_k=5",
        "sampling.temperature=0.5",
    ],
    "--pooler-config.pooling_type MEAN --pooler-config.normalize false": [
        "serve.pooler_config.pooling_type='MEAN'",
        "serve.pooler_config.normalize=false",
    ],
    "--served-model-name a --default-chat-template-kwargs.enable_thinking false org/name": [
        "checkpoint='org/name'",
        "serve.http.served_model_name=['a']",
        "serve.http.chat_template_kwargs={enable_thinking:false}",
    ],
    "--default-chat-template-kwargs.a.b 1 --default-chat-template-kwargs.a.c=x=y": [
        "serve.http.chat_template_kwargs={a:{b:1,c:'x=y'}}"
    ],
    "--default-chat-template-kwargs '{\"a b\": [null, \"x\"], \"c\": {\"d\": 1}}'": [
        "serve.http.chat_template_kwargs={a\\ b:[null,'x'],c:{d:1}}"
    ],
    """--online_quant_config '{"global_quant_config": "ptpc_fp8", "exclude_layer": ["lm_head", "*expert*"]}'""": [
        "quant.fmt='fp8'",
        "quant.plain=['*expert*']",
    ],
    """--online-quant-config '{"layer_quant_config": {"*mlp.experts*": "mxfp4", "lm_head": "ptpc_fp8"}}'""": [
        "quant.experts='mxfp4'",
        "quant.head='fp8'",
    ],
    "--online_quant_config.global_quant_config mxfp4 --online_quant_config.exclude_layer model.layers.0": [
        "quant.fmt='mxfp4'",
        "quant.plain=['model.layers.0']",
    ],
    "--max-model-len auto": [],
    "--max-model-len -1": [],
    "--max-model-len 4k --max-model-len=-1": [],
    "--allowed-origins '[\"*\"]'": ["serve.http.cors=['*']"],
}  # fmt: skip

WRONG = {
    "--max-model-len 4kk": "argument --max-model-len: '4kk' is not a number as 4096, 4k, 25.6k or 4K",
    "--max-model-len 2.5K": "'2.5K' is not a number",
    "--max-model-len -2": "argument --max-model-len: '-2' is not a number as 4096, 4k, 25.6k or 4K",
    "--speculative-config.methd ngram": "--speculative-config: there is no such field methd (did you mean method?)",
    "--speculative-config.method": "argument --speculative-config.method: expected one argument",
    "--speculative-config.method --seed 1": "argument --speculative-config.method: expected one argument",
    "--speculative-config.method ngram -sc x": "--speculative-config=x is no JSON",
    "--override-generation-config.temprature=1": "temprature is not read (did you mean temperature?)",
    f"--speculative-config {'[' * 30_000}": "--speculative-config: it is nested deeper than 64",
    f"--served-model-name {'[' * 30_000}": "a list: it is nested deeper than 64",
    f"--default-chat-template-kwargs.a {'[' * 30_000}": "a: it is nested deeper than 64",
    """--online_quant_config '{"global_quant_config": "int4"}'""": "there is no format int4 (supported: ptpc_fp8, mxfp4",
    """--online_quant_config '{"exclude_layers": []}'""": "there is no exclude_layers (did you mean exclude_layer?)",
    """--online_quant_config '{"layer_quant_config": {"*o_proj": "mxfp4"}}'""": "*o_proj has a format of its own, which only",
    "--enable-log-stats": "--enable-log-stats: no statistics are logged; /metrics has them",
    "--enable-tbo all": "--enable-tbo: how experts are placed and exchanged follows from --enable-expert-parallel",
    "--cudagraph-mode NONE": "--cudagraph-mode: write --level: 3 captures CUDA graphs",
    "--dp-load-balance=round_robin": "--dp-load-balance: a request goes to the engine that has most of its prompt",
    "--block-size.x 5": "unrecognized arguments: --block-size.x",
    "--compilation-config.mode 3": "--compilation-config.mode: write --level 0, 1, 2 or 3",
    "--profiler-config.profiler=torch": "--profiler-config.profiler: write --torch-profiler-dir",
    "--tool-parser-plugin x.py": "a YAML file, not code: write --tool-call-parser FILE.yaml, see docs/tool-calls.md",
    "--swap-space 4GiB": "argument --swap-space: '4GiB' is not a number of GiB as 4 or 0.5",
    "--load-format pt": "--load-format=pt: there is no such choice; choices: auto, safetensors, gguf, dummy",
    "--load-format gguf": "--load-format=gguf: the checkpoint is another; leave it out",
    "x.gguf --load-format safetensors": "--load-format=safetensors: x.gguf is another; leave it out",
    "bench serve --model x": "write python -m atom.benchmarks.benchmark_serving for vllm bench serve",
    "--modle x": "unrecognized arguments: --modle (did you mean --model?)",
    "--runner draft": "draft: a decoder's embeddings and labels are served, and its text; give pooling, or embed",
    "--hf-overrides.rope_theta 5": "rope_theta is not read (known: architectures, classifier_from_token",
    '--pooler-config \'{"pooling_type":"CLS"}\'': "pooling_type=CLS: there is no such choice; choices: LAST, MEAN",
    "--pooler-config '{\"step_tag_id\":1}'": "step_tag_id is not read (known: pooling_type, normalize",
    "--no-enable-chunked-prefill": "--no-enable-chunked-prefill: long prompts are always computed in chunks; leave",
    "--help=max-num-seqs": "--help=max-num-seqs: write --help, which shows all flags in groups",
    "--tool-call-parser jamba": "--tool-call-parser=jamba: there is no such choice; choices: hermes, ernie45",
    "--reasoning-parser hunyuan_a13b": "--reasoning-parser=hunyuan_a13b: there is no such choice; choices: deepseek_r1",
    "--override-generation-config '{\"temprature\": 1}'": "temprature is not read (did you mean temperature?)",
    "--override-generation-config 5": "--override-generation-config=5 is no JSON object",
    "--override-generation-config x": "--override-generation-config=x is no JSON",
    "--generation-config /nowhere": "/nowhere/generation_config.json: No such file or directory",
    "--config": "argument --config: expected one argument",
    "--config /nowhere": "/nowhere: No such file or directory",
    "-O3": "-O3: write --level 0, 1, 2 or 3",
    "-O 3": "-O: write --level 0, 1, 2 or 3",
    "-cc.mode=3": "-cc.mode: write --level 0, 1, 2 or 3",
    "-n 2": "-n: one engine is one host's",
    "-dpa=10.0.0.1": "-dpa: one engine is one host's",
    "-ac.backend FLASH_ATTN": "-ac.backend: kernels are chosen call by call",
    "--no-enable-log-deltas": "--no-enable-log-deltas: no client's words are logged",
    "--offload-params experts": "--offload-params: weights stay on their device",
    "--cpu-offload-gb 4": "--cpu-offload-gb=4: only tables that --cpu-offload-params names are in host memory, as embed_tokens_per_layer",
    "-pcp 2": "--prefill-context-parallel-size=2: a prompt is not divided among ranks (supported: 1)",
    "--preemption_mode=swap": "--preemption_mode: whether blocks are swapped follows from --swap-space",
    "--max-cpu-loras 4": "--max-cpu-loras: all adapters that are loaded are on the device",
    "--lora-modules sql": "--lora-modules=sql: write name=path, or JSON with name and path",
    "--lora-modules a=/a a=/b": "--lora-modules: a is given twice",
    "--lora-dtype float32": "--lora-dtype=float32: adapters are in the model's dtype (supported: auto)",
}


def make_parser() -> VLLMParser:
    parser = VLLMParser("prog", "A test.")
    ServerArgs.add_cli_args(parser)
    return parser


def parse(argv: Sequence[str]) -> ServerArgs:
    return ServerArgs.from_cli_args(make_parser().parse(argv))


@pytest.mark.parametrize("typed", MEANS)
def test_a_flag_of_vllm_is_an_override(typed: str):
    assert parse(shlex.split(typed)).overrides() == MEANS[typed]


@pytest.mark.parametrize("typed", WRONG)
def test_what_is_not_taken_is_refused_with_a_reason(typed: str):
    with pytest.raises((ConfigError, UnsupportedError), match=re.escape(WRONG[typed])):
        parse(shlex.split(typed)).overrides()


def test_every_refused_flag_has_one_reason_and_is_taken_nowhere():
    names = [name for reasons in (VLLM_REFUSED, ROCM_REFUSED) for name, _ in refused(reasons)]
    assert len(set(names)) == len(names)
    parser = make_parser()
    assert not parser._option_string_actions.keys() & set(map(with_dashes, names))
    for name in names:
        typed = with_dashes(name)
        with pytest.raises(UnsupportedError, match=f"^{typed}: {re.escape(REFUSED[name])}$"):
            parser.parse([typed, "1"])


def find_unanswered(names: Iterable[str]) -> list[str]:
    """Those of these flags that are neither taken nor refused with a reason."""
    parser, unknown = make_parser(), []
    for name in names:
        try:
            parser.parse([with_dashes(name), "1"])
        except (ConfigError, UnsupportedError) as error:
            unknown += [name] if "unrecognized arguments" in str(error) else []
    return unknown


def test_every_flag_of_vllm_is_taken_or_refused():
    assert find_unanswered(["seed", "no-such", "-xx", "watermark"]) == ["no-such", "-xx"]
    assert find_unanswered((FLAGS + ADDED).split()) == []
    of_server = find_unanswered(BATCH.split())
    assert set(of_server) == {name.replace("_", "-") for name, _, _ in BatchArgs.flags()} & set(BATCH.split())


def test_every_flag_of_rocm_atom_is_taken_or_refused():
    names = rocm_flags.FLAGS.split()
    assert find_unanswered(names) == []
    assert find_unanswered(name.replace("-", "_") for name in names if not name.startswith("-")) == []
    assert {name.replace("_", "-") for name, _, flag in ServerArgs.flags() if ROCM in flag.of} <= set(names)
    assert {name for name, _ in refused(ROCM_REFUSED)} <= set(names)


def test_these_are_vllms_flags():
    """Every flag of its sources has an answer; those of 0.26 are the list."""
    found = {
        argument.value
        for file in ("engine/arg_utils.py", cli_args())
        for node in ast.walk(tree(file))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "add_argument"
        for argument in node.args
        if isinstance(argument, ast.Constant)
    }
    found |= {  # written from a class
        f"--{each.target.id.replace('_', '-')}"
        for node in ast.walk(tree(cli_args()))
        if isinstance(node, ast.ClassDef) and node.name in ("FrontendArgs", "BaseFrontendArgs")
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    names = {name.removeprefix("--") for name in found if name.startswith("-")}
    assert len(names) > 250 and find_unanswered(names) == []
    if version().startswith("0.26."):
        assert names == set(FLAGS.split())


def cli_args() -> str:
    """The file with the flags of the server, which newer versions have elsewhere."""
    (path,) = sources().glob("entrypoints/*/cli_args.py")
    return str(path.relative_to(sources()))


@pytest.mark.parametrize("text", ["--seed", "-tp", "-Other", "--model=--preemption-mode", "O", "--Swap"])
def test_other_words_are_not_refused(text: str):
    assert refusal_of(text) is None


@pytest.mark.parametrize("hint", re.findall(r"--set (\S+?=\S+)", " ".join(VLLM_REFUSED)))
def test_a_field_that_a_refusal_names_is_there(hint: str, tmp_path: Path):
    (tmp_path / "config.json").write_text((CONFIGS / "qwen3_30b_a3b.json").read_text())
    load([f"checkpoint={tmp_path}", hint.replace("BYTES", "4096").rstrip(",;")])


def test_a_flag_that_a_refusal_names_is_there():
    named = {name for reason in REFUSED.values() for name in re.findall(r"--([a-z][\w-]+)", reason)}
    taken = {name.replace("_", "-") for name, _, _ in ServerArgs.flags()} | {"set", "help"}
    assert named <= taken and len(named) > 5


def test_a_command_of_rocm_atom_refuses_the_same_flags():
    parser = Parser("prog", "A test.")
    EngineArgs.add_cli_args(parser)
    with pytest.raises(UnsupportedError, match=r"^--request-log: no client's words are logged"):
        parser.parse(["--request-log", "x.jsonl"])


def test_a_folder_has_the_generation_config(tmp_path: Path):
    written = {"temperature": 0.5, "eos_token_id": 2, "do_sample": True, "max_new_tokens": 7, "top_k": None}
    (tmp_path / "generation_config.json").write_text(json.dumps(written))
    overrides = parse(
        ["--generation-config", str(tmp_path), "--override-generation-config", '{"top_p": 0.5}']
    ).overrides()
    config = load(overrides)
    assert (config.sampling.temperature, config.sampling.top_p, config.sampling.max_tokens) == (0.5, 0.5, 7)
    assert config.sampling.defaults == "none"


def test_rocm_atoms_online_quantization_is_quant(tmp_path: Path):
    (tmp_path / "config.json").write_text((CONFIGS / "qwen3_30b_a3b.json").read_text())
    given = {
        "global_quant_config": "ptpc_fp8",
        "layer_quant_config": {"*expert*": "mxfp4"},
        "exclude_layer": ["lm_head", "model.embed_tokens", "*o_proj"],
    }
    quant = load(parse([str(tmp_path), "--online_quant_config", json.dumps(given)]).overrides()).quant
    assert (quant.fmt, quant.experts, quant.head, quant.plain) == ("fp8[1, *]", "mxfp4", "plain", ["*o_proj"])


def load_yaml(folder: Path, text: str, *argv: str) -> Config:
    (folder / "server.yaml").write_text(text)
    return load(parse(["--config", str(folder / "server.yaml"), *argv]).overrides())


def test_a_yaml_file_has_flags(tmp_path: Path):
    text = """
        # as in vLLM's guide
        host: "127.0.0.1"
        port: 6398
        max_model_len: 4k
        served-model-name: [one, two]
        enable-prefix-caching: true
        enforce_eager: false
        override-generation-config: {temperature: 0.5}
        uds: null
    """
    config = load_yaml(tmp_path, text)
    http = config.serve.http
    assert (http.host, http.port, http.served_model_name) == ("127.0.0.1", 6398, ["one", "two"])
    assert (config.serve.max_model_len, config.serve.enable_prefix_caching, config.sampling.temperature) == (
        4000,
        True,
        0.5,
    )


def test_the_command_line_counts_before_the_file(tmp_path: Path):
    text = "seed: 1\nserved_model_name: [one, two]\nenable-prefix-caching: true\nlevel: 0\n"
    config = load_yaml(tmp_path, text, "--seed=2", "--served-model-name", "three", "--no_enable_prefix_caching")
    assert (config.seed, config.serve.http.served_model_name) == (2, ["three"])
    assert (config.serve.enable_prefix_caching, config.level) == (False, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "is not a mapping from flags to values"),
        ("a: [", "is no YAML"),
        ("seeed: 1", "server.yaml: unrecognized arguments: --seeed=1 (did you mean --seed?)"),
        ("preemption-mode: swap", "server.yaml: --preemption-mode: whether blocks are swapped"),
        ("max-num-seqs: many", "server.yaml: argument --max-num-seqs: invalid int value: 'many'"),
    ],
)
def test_a_wrong_file_is_refused(text: str, message: str, tmp_path: Path):
    with pytest.raises((ConfigError, UnsupportedError), match=re.escape(message)):
        load_yaml(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-num-seqs: 0", r"server\.yaml: .*--max-num-seqs=0"),
        ("pooler_config: {pooling_type: CLS}", r"server\.yaml: --pooler-config: pooling_type=CLS"),
        ("quantization: awq", r"server\.yaml: --quantization=awq: the checkpoint has no quantization_config"),
        ("seed: 1", r"ConfigError: --max-num-seqs=0|ConfigError: .*--max-num-seqs"),
    ],
)
def test_a_value_of_a_file_that_is_refused_late_names_file_and_key(
    text: str, message: str, tmp_path: Path, capsys: Any
):
    (tmp_path / "config.json").write_text((CONFIGS / "qwen3_0.6b.json").read_text())
    (tmp_path / "server.yaml").write_text(f"model: {tmp_path}\n{text}\n")
    argv = ["--max-num-seqs=0"] if text == "seed: 1" else []
    assert openai_server.main(["--config", str(tmp_path / "server.yaml"), *argv]) == 2
    err = capsys.readouterr().err
    assert re.search(message, err), err
    assert ("server.yaml" in err) == (not argv)
