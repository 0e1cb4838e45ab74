"""The flags of ROCm/ATOM's guide, and what they mean to the one configuration."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atom import LLMEngine
from atom.config.load import load
from atom.entrypoints.args import EngineArgs, Parser, name_flags, run_command
from atom.entrypoints.openai_server import ServerArgs
from atom.errors import ConfigError, UnsupportedError

MEANS = {
    "--model /a b": "checkpoint='/a b'",
    "--trust-remote-code": "trust_remote_code=true",
    "--tensor-parallel-size 2": "parallel.tensor=2",
    "-tp 2": "parallel.tensor=2",
    "-tp8": "parallel.tensor=8",
    "-dp4": "parallel.replicas=4",
    "--dtype bfloat16": "dtype='bfloat16'",
    "--seed 7": "seed=7",
    "--revision v1.0": "revision='v1.0'",
    "--device cpu": "device='cpu'",
    "--data-parallel-size 2": "parallel.replicas=2",
    "-dp 2": "parallel.replicas=2",
    "--enforce-eager": "serve.enforce_eager=true",
    "--enable-prefix-caching": "serve.enable_prefix_caching=true",
    "--no-enable-prefix-caching": "serve.enable_prefix_caching=false",
    "--port 8007": "serve.port=8007",
    "--kv-cache-dtype fp8": "serve.kv_cache_dtype='fp8'",
    "--block-size 32": "serve.block_size=32",
    "--max-model-len 100": "serve.max_model_len=100",
    "--max-num-batched-tokens 64": "serve.max_num_batched_tokens=64",
    "--max-num-seqs 8": "serve.max_num_seqs=8",
    "--gpu-memory-utilization 0.8": "serve.gpu_memory_utilization=0.8",
    "--scheduler-delay-factor 0.5": "serve.scheduler_delay_factor=0.5",
    "--cudagraph-capture-sizes [1,2]": "serve.cudagraph_capture_sizes=['1','2']",
    "--level 1": "level=1",
    "--load-dummy": "load_dummy=true",
    "--enable-expert-parallel": "serve.enable_expert_parallel=true",
    "--enable-dp-attention": "serve.enable_dp_attention=true",
    "--torch-profiler-dir my traces": "serve.torch_profiler_dir='my traces'",
    "--method mtp": "serve.method='mtp'",
    "--draft-model org/name": "serve.draft_model='org/name'",
    "--num-speculative-tokens 2": "serve.num_speculative_tokens=2",
    "--spec-decode-acceptance-length 1.5": "serve.acceptance_length=1.5",
    "--set seed=3": "seed=3",
}

# as the guide has them, but for kv_cache_dtype, level and the model, which stay open
DEFAULTS = {
    "tensor-parallel-size": "1",
    "data-parallel-size": "1",
    "port": "8006",
    "kv_cache_dtype": "auto",
    "block-size": "16",
    "max-model-len": "auto, the model's",
    "max-num-batched-tokens": "16384",
    "max-num-seqs": "512",
    "gpu-memory-utilization": "0.9",
    "scheduler-delay-factor": "0.0",
    "level": "the highest that runs here",
    "model": "the embedded model",
    "torch-profiler-dir": "$ATOM_TORCH_PROFILER_DIR",
    "num-speculative-tokens": "3",
    "dtype": "auto",
    "device": "auto",
    "seed": "0",
    "revision": "main",
    "enforce-eager": None,
    "load_dummy": None,
}

REFUSED = {
    "-tp 2": "parallel.tensor=2 does not divide 9 heads with 3 of keys and values (supported: 1, 3, 9",
    "--kv_cache_dtype fp8_e5m2": "serve.kv_cache_dtype=fp8_e5m2 is not supported (supported: auto, bf16, fp16, fp32, fp8",
    "--level 3": "level=3 captures CUDA graphs, device=cpu has none (supported: 0, 1, 2",
}

WRONG = {
    "--max-num-seq 4": "unrecognized arguments: --max-num-seq 4 (did you mean --max-num-seqs?); see prog --help",
    "--max_num_seq=4": "unrecognized arguments: --max_num_seq=4 (did you mean --max-num-seqs?); see prog --help",
    "--tensor 1": "unrecognized arguments: --tensor 1",
    "-t 1": "unrecognized arguments: -t; see prog --help",
    "--kv-cache-dtyp x": "unrecognized arguments: --kv-cache-dtyp x (did you mean --kv-cache-dtype?)",
    "--sequences 8": "unrecognized arguments: --sequences 8; see prog --help",
    "--num-blocks 8": "unrecognized arguments: --num-blocks 8; see prog --help",
    "--tp 1": "unrecognized arguments: --tp 1; see prog --help",
    "stray": "unrecognized arguments: stray",
    "--max-num-seqs": "argument --max-num-seqs: expected one argument",
    "--max-num-seqs many": "argument --max-num-seqs: invalid int value: 'many'",
    "--load-dummy=yes": "argument --load-dummy: ignored explicit argument 'yes'",
    "--cudagraph-capture-sizes [1,": "'[1,' is no JSON list",
    "--max-num-seqs 0": "--max-num-seqs=0 must be a whole number from 1",
    "--kv_cache_dtype fp7": "--kv-cache-dtype=fp7: there is no such choice",
    "--level 5": "--level=5: there is no such choice",
    "--set level=5": "level=5: there is no such choice",
    "--set serve.max_num_seqs=0": "serve.max_num_seqs=0 must be a whole number from 1",
    "--set nonsense": "'nonsense' is not an override; write key=value",
    "--set serve.max_num_seq=4": "serve.max_num_seq: there is no such field (did you mean max_num_seqs?)",
}


def parse(*argv: str) -> EngineArgs:
    parser = Parser("prog", "A test.")
    EngineArgs.add_cli_args(parser)
    return EngineArgs.from_cli_args(parser.parse(argv))


def split(text: str) -> list[str]:
    """A flag and, after the first space, its value."""
    return text.split(" ", 1)


@pytest.mark.parametrize("typed", MEANS)
def test_a_flag_is_an_override(typed: str):
    name, *value = split(typed)
    assert parse(name, *value).overrides() == [MEANS[typed]]
    assert parse(f"--{name[2:].replace('-', '_')}" if name.startswith("--") else name, *value).overrides() == [
        MEANS[typed]
    ]
    if value:
        assert parse(f"{name}={value[0]}").overrides() == [MEANS[typed]]


def test_vllms_speculative_config_is_our_fields():
    given = '{"method": "eagle3", "model": "org/draft", "num_speculative_tokens": 2}'
    expected = ["serve.method='eagle3'", "serve.draft_model='org/draft'", "serve.num_speculative_tokens=2"]
    assert parse("--speculative-config", given).overrides() == expected
    assert parse("--speculative_config", '{"method": "draft_model"}').overrides() == ["serve.method='draft'"]
    given = '{"method": "ngram", "prompt_lookup_max": 5, "prompt_lookup_min": 3, "synthetic_acceptance_length": 2.5}'
    assert parse("--speculative-config", given).overrides() == [
        "serve.method='ngram'",
        "serve.prompt_lookup_max=5",
        "serve.prompt_lookup_min=3",
        "serve.acceptance_length=2.5",
    ]
    given = (
        '{"method": "suffix", "suffix_decoding_max_tree_depth": 32, "suffix_decoding_max_cached_requests": 500, '
        '"suffix_decoding_max_spec_factor": 1.5, "suffix_decoding_min_token_prob": 0.2}'
    )
    assert parse("--speculative-config", given).overrides() == [
        "serve.method='suffix'",
        "serve.suffix_decoding_max_tree_depth=32",
        "serve.suffix_decoding_max_cached_requests=500",
        "serve.suffix_decoding_max_spec_factor=1.5",
        "serve.suffix_decoding_min_token_prob=0.2",
    ]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (
            '{"metod": "ngram"}',
            "--speculative-config: there is no such field metod (did you mean method?) (known: ",
        ),
        ('{"draft_tensor_parallel_size": 2}', "there is no such field draft_tensor_parallel_size (known: method, "),
        ("{", "--speculative-config={ is no JSON ("),
        ("[1]", "--speculative-config=[1] is no JSON object"),
    ],
)
def test_a_speculative_config_that_is_not_understood_is_refused(given: str, reason: str):
    with pytest.raises(ConfigError, match=re.escape(reason)):
        parse("--speculative-config", given).overrides()


def test_a_flag_that_is_not_given_overrides_nothing():
    assert parse().overrides() == []
    assert EngineArgs().overrides() == []


def test_the_engines_port_at_its_default_needs_no_override():
    assert parse("--port", "8006").overrides() == []


def test_several_values_are_words_or_a_json_list():
    for words in (["1", "2", "4"], ["[1, 2, 4]"], ["[1,2]", "4"]):
        assert parse("--cudagraph-capture-sizes", *words).cudagraph_capture_sizes == ("1", "2", "4")


def test_what_is_set_follows_the_flags():
    args = parse("--set", "serve.kv_cache_memory=5", "seed=1", "--level", "0", "--set", "level=1")
    assert args.overrides() == ["level=0", "serve.kv_cache_memory=5", "seed=1", "level=1"]
    assert load(args.overrides()).level == 1


def test_a_command_line_with_the_guides_defaults_changes_nothing():
    argv = "-tp 1 -dp 1 --port 8006 --block-size 16 --max-num-batched-tokens 16384 --max-num-seqs 512"
    argv += " --gpu-memory-utilization 0.9 --scheduler-delay-factor 0.0 --num-speculative-tokens 1"
    assert replace(load(parse(*argv.split()).overrides()), overrides=[]) == replace(load([]), overrides=[])


@pytest.mark.parametrize("typed", REFUSED)
def test_what_is_not_built_is_refused_by_name(typed: str):
    with pytest.raises(UnsupportedError, match=re.escape(REFUSED[typed])):
        load(parse(*split(typed)).overrides())


@pytest.mark.parametrize("typed", WRONG)
def test_a_wrong_flag_is_one_line_and_exit_code_2(typed: str, capsys: pytest.CaptureFixture[str]):
    def work(args: argparse.Namespace) -> int:
        load(EngineArgs.from_cli_args(args).overrides())
        return 0

    parser = Parser("prog", "A test.")
    EngineArgs.add_cli_args(parser)
    assert run_command(parser, work, split(typed)) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"atom-run: ConfigError: {WRONG[typed]}")
    assert (err.count("\n"), out) == (1, "")


@pytest.mark.parametrize("typed", REFUSED)
def test_what_is_not_built_is_refused_by_the_flag_that_was_typed(typed: str, capsys: pytest.CaptureFixture[str]):
    def work(args: argparse.Namespace) -> int:
        load(EngineArgs.from_cli_args(args).overrides())
        return 0

    parser = Parser("prog", "A test.")
    EngineArgs.add_cli_args(parser)
    assert run_command(parser, work, split(typed)) == 2
    flag = {"-tp": "--tensor-parallel-size", "-dp": "--data-parallel-size"}.get(typed.split()[0], typed.split()[0])
    assert re.match(f"atom-run: UnsupportedError: {flag.replace('_', '-')}[=: ]", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ("cannot listen; choose another serve.port.", "cannot listen; choose another --port."),
        ("serve.max_num_seqs=8 and serve.max_model_len=9", "--max-num-seqs=8 and --max-model-len=9"),
        ("serve.gpu_memory_utilization=0.8: no", "--gpu-memory-utilization=0.8: no"),
        ("set serve.max_model_len=null or level=1", "set serve.max_model_len=null or --level=1"),  # no flag is null
        ("read it, then set trust_remote_code=true", "read it, then set --trust-remote-code"),
        ("set serve.enforce_eager=false", "set serve.enforce_eager=false"),  # nor false
        ("serve.enforce_eager: nothing to capture", "--enforce-eager: nothing to capture"),
        ("no checkpoint at this level", "no checkpoint at this level"),
        ("/models/level=3/config.json, conf.level=3", "/models/level=3/config.json, conf.level=3"),
        ("serve.port.other and serve.http.port", "serve.port.other and serve.http.port"),
    ],
)
def test_a_key_in_an_error_is_named_by_its_flag(message: str, named: str):
    assert name_flags(message, {flag.key: (name, kind) for name, kind, flag in EngineArgs.flags()}) == named


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_help_shows_the_default_that_applies(name: str):
    parser = Parser("prog", "A test.")
    EngineArgs.add_cli_args(parser)
    text = parser.format_help()
    (entry,) = (" ".join(each.split()) for each in text.split("\n  -") if each.startswith(f"-{name.replace('_', '-')}"))
    shown = re.search(r"\(default: (.*?)(; others are not supported)?\)", entry)
    assert (shown[1] if shown else None) == DEFAULTS[name]
    assert "_" not in "".join(re.findall(r"--[\w-]+", text)), "only the spelling with - is listed"


def test_the_help_has_each_flag_in_a_group():
    parser = Parser("prog", "A test.")
    ServerArgs.add_cli_args(parser)
    first = {}
    for part in parser.format_help().split("\n\n")[2:]:
        title, *entries = part.splitlines()
        first[title] = entries[0].split()[0]
        assert len(re.findall(r"^  -", part, re.MULTILINE)) <= 25
    assert first == {
        "options:": "-h,",
        "model:": "--model",
        "engine:": "--device",
        "several devices:": "--tensor-parallel-size",
        "drafts:": "--method",
        "answers and embeddings:": "--max-logprobs",
        "server:": "--port",
        "taken as vLLM has them, with no effect here:": "--enable-auto-tool-choice",
    }


def test_the_help_marks_what_is_not_supported():
    parser = Parser("prog", "A test.")
    EngineArgs.add_cli_args(parser)
    entries = [" ".join(each.split()) for each in parser.format_help().split("\n  --")]
    assert [each.split()[0] for each in entries if "not supported" in each] == [
        "port",
    ]


def test_a_parser_of_the_users_own_takes_the_flags():
    parser = argparse.ArgumentParser()
    assert EngineArgs.add_cli_args(parser) is parser
    args = parser.parse_args(["--model", "x", "--kv_cache_dtype", "bf16", "-tp", "1"])
    assert EngineArgs.from_cli_args(args) == EngineArgs(model="x", kv_cache_dtype="bf16", tensor_parallel_size=1)


def test_false_is_given_and_none_is_not():
    assert EngineArgs(enforce_eager=False, load_dummy=None).overrides() == ["serve.enforce_eager=false"]


def test_the_engine_has_what_the_flags_say(checkpoints: Any, tmp_path: Path):
    (tmp_path / "config.json").write_bytes((checkpoints("qwen3") / "config.json").read_bytes())
    args = parse("--model", str(tmp_path), "--load_dummy", "--max-num-seqs=8", "--level", "0",
                 "--set", "serve.kv_cache_memory=4194304")  # fmt: skip
    engine = args.create_engine()
    assert isinstance(engine, LLMEngine)
    assert (engine.config.serve.max_num_seqs, engine.config.level, engine.config.load_dummy) == (8, 0, True)
    assert engine.generate([[1, 2, 3]])[0]["num_tokens_input"] == 3
    engine.close()


def test_the_guides_keyword_arguments_of_the_engine_are_taken(checkpoints: Any):
    """LLMEngine takes all fields of ROCm/ATOM's Config that the guide names."""
    engine = LLMEngine(model=str(checkpoints("qwen3")), tensor_parallel_size=1, data_parallel_size=1, level=0,
                       gpu_memory_utilization=0.9, max_model_len=64, kv_cache_memory=1 << 22)  # fmt: skip
    assert engine.config.serve.max_model_len == 64
    engine.close()
    with pytest.raises(UnsupportedError, match=r"^parallel.replicas=2: LLMEngine is one engine; leave it out, or ser"):
        LLMEngine(model=str(checkpoints("qwen3")), data_parallel_size=2)
    with pytest.raises(UnsupportedError, match=r"^serve.models lists those of a server: LLMEngine is one engine"):
        LLMEngine(models=["smollm2_greedy"])


def test_a_parser_names_the_command_to_ask():
    with pytest.raises(ConfigError, match="; see python -m x --help"):
        Parser("python -m x", "").error("no")


def test_json_lists_need_not_be_of_text():
    assert parse("--cudagraph-capture-sizes", json.dumps([1, 8])).overrides() == [
        "serve.cudagraph_capture_sizes=['1','8']"
    ]
