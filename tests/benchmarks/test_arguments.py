from __future__ import annotations

import argparse
import math
from typing import Any

import pytest
from generated import check_block

from atom.benchmarks.arguments import make_parser, parse_goodput, read_arguments
from atom.benchmarks.benchmark_utils import UsageError

RAMP = ["--ramp-up-strategy", "linear", "--ramp-up-start-rps"]
MINIMAL = ["--model", "m", "--dataset-name", "random"]
GUIDE = {  # the flags of ROCm/ATOM's guide and what they are without a word
    "backend": "vllm",
    "base_url": None,
    "host": "127.0.0.1",
    "port": 8000,
    "dataset_name": "sharegpt",
    "dataset_path": None,
    "num_prompts": 1000,
    "request_rate": math.inf,
    "burstiness": 1.0,
    "max_concurrency": None,
    "ignore_eos": False,
    "save_result": False,
    "result_dir": None,
    "result_filename": None,
    "percentile_metrics": "ttft,tpot,itl",
    "metric_percentiles": "99",
    "goodput": None,
    "profile": False,
    "tokenizer": None,
    "seed": 0,
    "random_input_len": 1024,
    "random_output_len": 128,
    "random_range_ratio": 1.0,
    "random_prefix_len": 0,
    "use_chat_template": False,
    "metadata": None,
    "trust_remote_code": False,
}
MORE = {
    "model": "m",
    "endpoint": None,
    "served_model_name": None,
    "num_warmups": 1,
    "disable_tqdm": False,
    "sharegpt_output_len": None,
    "custom_output_len": 256,
    "sonnet_input_len": 550,
    "sonnet_output_len": 150,
    "sonnet_prefix_len": 200,
    "hf_subset": None,
    "hf_split": None,
    "hf_output_len": None,
}
ROCM = {"save_detailed": False}  # that its guide does not name
VLLM = {  # flags that only `vllm bench serve` has, with its defaults
    "prefix_repetition_prefix_len": 256,
    "prefix_repetition_suffix_len": 256,
    "prefix_repetition_num_prefixes": 10,
    "prefix_repetition_output_len": 128,
    "ramp_up_strategy": None,
    "ramp_up_start_rps": None,
    "ramp_up_end_rps": None,
    "temperature": None,
    "top_p": None,
    "top_k": None,
    "min_p": None,
    "frequency_penalty": None,
    "presence_penalty": None,
    "repetition_penalty": None,
    "extra_body": None,
    "label": None,
    "ready_check_timeout_sec": 0,
    "request_id_prefix": None,
}
OWN = {
    "multi_turn_turns": 6,
    "multi_turn_shared_len": 2000,
    "multi_turn_new_len": 1500,
    "multi_turn_output_len": 100,
    "multi_turn_think_time": 0.0,
}


def test_the_flags_and_their_defaults():
    assert vars(make_parser().read(["--model", "m"])) == GUIDE | MORE | ROCM | VLLM | OWN


@pytest.mark.parametrize(
    "argv",
    [
        ["--random-input-len", "5", "--ignore-eos", "--metadata", "a=1", "b_c=d_e"],
        ["--random_input_len", "5", "--ignore_eos", "--metadata", "a=1", "b_c=d_e"],
        ["--random_input-len=5", "--ignore_eos", "--metadata", "a=1", "b_c=d_e"],
    ],
)
def test_flags_are_written_with_dashes_or_underscores(argv: list[str]):
    args = read_arguments([*MINIMAL, *argv])
    assert (args.random_input_len, args.ignore_eos, args.metadata) == (5, True, {"a": "1", "b_c": "d_e"})


@pytest.mark.parametrize(
    ("argv", "url", "endpoint"),
    [
        ([], "http://127.0.0.1:8000", "/v1/completions"),
        (["--host", "gpu1", "--port", "9"], "http://gpu1:9", "/v1/completions"),
        (["--base-url", "https://gpu1/x/"], "https://gpu1/x", "/v1/completions"),
        (["--backend", "openai-chat"], "http://127.0.0.1:8000", "/v1/chat/completions"),
        (["--backend", "tgi"], "http://127.0.0.1:8000", "/generate_stream"),
        (["--backend", "tensorrt-llm"], "http://127.0.0.1:8000", "/v2/models/ensemble/generate_stream"),
        (["--backend", "sglang", "--endpoint", "/my/completions"], "http://127.0.0.1:8000", "/my/completions"),
    ],
)
def test_where_requests_go(argv: list[str], url: str, endpoint: str):
    args = read_arguments([*MINIMAL, *argv])
    assert (args.base_url, args.endpoint) == (url, endpoint)


def test_lists_are_parsed():
    args = read_arguments([*MINIMAL, "--percentile-metrics", "ttft, e2el", "--metric-percentiles", "99.9,50,50",
                           "--goodput", "ttft:100", "tpot:20"])  # fmt: skip
    assert (args.percentile_metrics, args.metric_percentiles) == (["ttft", "e2el"], [50.0, 99.9])
    assert args.goodput == {"ttft": 100.0, "tpot": 20.0}


def test_fields_of_requests_are_sampling_parameters_and_then_the_extra_body():
    argv = ["--temperature", "0.6", "--top-k", "20", "--extra-body", '{"top_k": 5, "chat_template_kwargs": {"a": 1}}']
    args = read_arguments([*MINIMAL, *argv])
    assert args.extra_body == {"temperature": 0.6, "top_k": 5, "chat_template_kwargs": {"a": 1}}
    assert read_arguments(MINIMAL).extra_body == {}


@pytest.mark.parametrize(
    ("argv", "mistake"),
    [
        (["--nope"], "unrecognized arguments: --nope; see python -m atom.benchmarks.benchmark_serving --help"),
        (["--num-prompt", "5"], "unrecognized arguments: --num-prompt 5 (did you mean --num-prompts?)"),
        (["--num-clients", "4"], "--num-clients: write --max-concurrency"),
        (["--input_len=64"], "--input-len: write --random-input-len or --sonnet-input-len"),
        (["--random-range-ratio", "0"], "vLLM's 0, all lengths equal, is 1 here"),
        (["--dataset-name", "custom", "--dataset-path", "/nope"], "--dataset-path /nope: no such file; custom is read"),
        (["--backend", "x"], "argument --backend: invalid choice: 'x'"),
        (["--num-prompts", "0"], "argument --num-prompts: 0 is less than 1"),
        (["--random-prefix-len", "-1"], "argument --random-prefix-len"),
        (["--request-rate", "0"], "argument --request-rate: 0 is not greater than 0"),
        (["--request-rate", "nan"], "argument --request-rate: nan is not greater than 0"),
        (["--burstiness", "inf"], "--burstiness inf: give a number"),
        (["--random-range-ratio", "1.5"], "--random-range-ratio 1.5: it is greater than 0 and at most 1"),
        (["--random-range-ratio", "0"], "--random-range-ratio 0: it is greater than 0"),
        (["--percentile-metrics", "ttft,x"], "--percentile-metrics: there is no x; there are ttft, tpot, itl, e2el"),
        (["--metric-percentiles", "101"], "percentiles are from 0 to 100"),
        (["--metric-percentiles", "p99"], "--metric-percentiles p99: write numbers, as in 25,50,99"),
        (["--metric-percentiles", ","], "percentiles are from 0 to 100"),
        (["--goodput", "itl:5"], "--goodput itl:5: there is no itl"),
        (["--metadata", "x"], "--metadata x: write KEY=VALUE"),
        (["--base-url", "localhost:8000"], "--base-url localhost:8000: write http://host:port"),
        (["--endpoint", "v1/completions"], "--endpoint v1/completions: write a path"),
        (["--base-url", "http://h:1/v1/"], "--base-url http://h:1/v1: leave /v1 out, which is in --endpoint /v1/"),
        (["--endpoint", "/v1/chat/completions"], "does not speak the protocol of vllm: use --backend openai-chat"),
        (["--backend", "tgi", "--endpoint", "/v1/completions"], "of tgi: its path ends with /generate_stream"),
        (["--backend", "tgi", "--ignore-eos"], "--ignore-eos: the protocol of tgi has nothing to ask for it with"),
        (["--backend", "deepspeed-mii", "--ignore-eos"], "--ignore-eos: the protocol of deepspeed-mii"),
        (["--backend", "deepspeed-mii", "--goodput", "ttft:5"], "deepspeed-mii answers in one piece"),
        (["--backend", "openai-chat", "--use-chat-template"], "--use-chat-template: openai-chat's server applies"),
        (["--dataset-name", "sonnet"], "--dataset-name sonnet needs --dataset-path; these need none: random, "),
        (
            ["--dataset-name", "multi-turn", "--dataset-path", "/nope"],
            "/nope: no such file; multi-turn is read from one",
        ),
        (["--dataset-name", "multi-turn", "--use-chat-template"], "what --backend openai-chat sends"),
        (["--multi-turn-think-time", "-1"], "argument --multi-turn-think-time: -1 is not a number from 0 on"),
        (["--dataset-name", "prefix_repetition", "--num-prompts", "9"], "num-prefixes 10: there are only 9 prompts"),
        (["--ramp-up-start-rps", "1"], "--ramp-up-start-rps needs --ramp-up-strategy, linear or exponential"),
        (["--ramp-up-strategy", "linear", "--ramp-up-end-rps", "1"], "needs --ramp-up-start-rps and --ramp-up-end-rps"),
        ([*RAMP, "5", "--ramp-up-end-rps", "4"], "give two numbers, the second not less"),
        ([*RAMP, "5", "--ramp-up-end-rps", "inf"], "give two numbers, the second not less"),
        ([*RAMP, "0", "--ramp-up-end-rps", "4"], "argument --ramp-up-start-rps: 0 is not greater than 0"),
        ([*RAMP, "1", "--ramp-up-end-rps", "4", "--request-rate", "3"], "--request-rate: the rate is that of"),
        (["--extra-body", "{"], "--extra-body {: this is not valid JSON"),
        (["--extra-body", "[1]"], "--extra-body [1]: write an object"),
        (["--extra-body", '{"stream": false}'], "--extra-body: stream is always set"),
        (["--backend", "tgi", "--top-p", "0.9"], "--top-p: tgi does not have OpenAI's fields"),
        (["--backend", "tgi", "--extra-body", '{"a": 1}'], "--extra-body: tgi does not have OpenAI's fields"),
        (["--result-dir", "x"], "--result-dir is about the result's file: add --save-result"),
        (["--result-filename", "x"], "--result-filename is about the result's file: add --save-result"),
        (["--save-detailed"], "--save-detailed is about the result's file: add --save-result"),
        (["--label", "x"], "--label is about the result's file: add --save-result"),
        (["--endpoint-type", "openai-chat"], "--endpoint-type: this is --backend"),
        (["--endpoint_type=vllm"], "--endpoint-type: this is --backend"),
        (["--ready-check-timeout-sec", "-1"], "argument --ready-check-timeout-sec: -1 is less than 0"),
    ],
)
def test_mistakes_are_named_with_what_to_do(argv: list[str], mistake: str):
    with pytest.raises(UsageError) as caught:
        read_arguments([*MINIMAL, *argv])
    assert mistake in str(caught.value)


def test_help_shows_every_flag_and_the_defaults(capsys: pytest.CaptureFixture[Any]):
    with pytest.raises(SystemExit) as ended:
        read_arguments(["--help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(f"--{name.replace('_', '-')}" in shown for name in GUIDE | MORE | ROCM | VLLM | OWN)
    assert "(default: 1024)" in shown and "(default: None)" not in shown and "(default: False)" not in shown


def test_the_table_of_the_page_is_that_of_the_parser(request: pytest.FixtureRequest):
    lines = ["| flag | default | meaning |", "|---|---|---|"]
    for action in make_parser()._actions:
        if action.dest != "help" and action.help != argparse.SUPPRESS:
            choices = f": {', '.join(f'`{each}`' for each in action.choices)}" if action.choices else ""
            default = "" if action.default is None or action.default is False else f"`{action.default}`"
            lines.append(f"| `{action.option_strings[0]}` | {default} | {action.help}{choices} |")
    check_block("benchmarks.md", "flags", "\n".join(lines) + "\n", request)


def test_objectives_are_read_and_mistakes_in_them_named():
    assert parse_goodput(["ttft:100", "e2el:2.5e3"]) == {"ttft": 100.0, "e2el": 2500.0}
    for pair, mistake in [
        ("ttft=100", "write KEY:MILLISECONDS"),
        ("ttft:fast", "write KEY:MILLISECONDS"),
        ("itl:5", "there is no itl; there are ttft, tpot, e2el"),
        ("ttft:-1", "cannot be less than 0"),
        ("ttft:nan", "cannot be less than 0"),
    ]:
        with pytest.raises(UsageError, match=f"--goodput {pair}: .*{mistake}"):
            parse_goodput([pair])
