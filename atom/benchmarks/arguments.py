"""The flags of the serving benchmark: ROCm/ATOM's names and defaults, else vLLM's.

    args = read_arguments(["--model", "org/model", "--dataset_name=random", "--goodput", "ttft:200"])
    args.endpoint, args.base_url, args.goodput      # "/v1/completions", "http://127.0.0.1:8000", {"ttft": 200.0}

Contradicting flags are refused here, before a tokenizer is loaded or a request is sent.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atom.benchmarks.backend_request_func import ASYNC_REQUEST_FUNCS
from atom.benchmarks.benchmark_utils import (
    FlagParser,
    UsageError,
    count_int,
    nonnegative_float,
    positive_float,
    positive_int,
)
from atom.measurement.metrics import METRICS

ENDPOINTS = {
    "openai-chat": "/v1/chat/completions",
    "tgi": "/generate_stream",
    "tensorrt-llm": "/v2/models/ensemble/generate_stream",
}  # the others speak OpenAI's /v1/completions
ENDINGS = {"openai-chat": "/chat/completions", "tgi": "/generate_stream", "tensorrt-llm": "/generate_stream"}
GOODPUT_METRICS = ("ttft", "tpot", "e2el")
TEXT_ONLY = ("openai-chat", "tgi", "tensorrt-llm", "deepspeed-mii")  # take no token ids
NO_IGNORE_EOS = ("tgi", "deepspeed-mii")  # their protocols have no such field
RETURN_IDS = ("vllm",)  # send an answer's token ids if asked to, which the next turn's prompt repeats
SYNTHETIC = ("random", "prefix_repetition", "multi-turn")  # need no file, and no tokenizer if token ids are sent
DATASETS = (*SYNTHETIC, "sharegpt", "sonnet", "burstgpt", "hf", "custom")
SAMPLING = ("top_p", "top_k", "min_p", "temperature", "frequency_penalty", "presence_penalty", "repetition_penalty")
OTHER_FIELDS = ("tgi", "tensorrt-llm", "deepspeed-mii")  # backends with other fields than OpenAI's
# of each request
DETAILS = ("input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors", "turns")
RAMP_UP = ("ramp_up_start_rps", "ramp_up_end_rps")


OF_VLLM = {  # flags that `vllm bench serve` or its benchmarks/multi_turn has -> what to do instead
    "--append-result": "each run writes a file of its own, and atom.benchmarks.compare reads folders of them",
    "--custom-skip-chat-template": "leave it out: prompts are put into a template only with --use-chat-template",
    "--disable-shuffle": "prompts of a file are always shuffled, by --seed",
    "--endpoint-type": "this is --backend",
    "--header": "only a bearer token is sent, OPENAI_API_KEY of the environment",
    "--input-file": "write --dataset-name multi-turn, and a trace as its --dataset-path",
    "--input-len": "write --random-input-len or --sonnet-input-len",
    "--insecure": "certificates are checked; SSL_CERT_FILE of the environment names your own",
    "--logprobs": """write --extra-body '{"logprobs": N}'""",
    "--lora-modules": "write the adapter's name as --served-model-name",
    "--max-active-conversations": "write --max-concurrency",
    "--max-turns": "write --multi-turn-turns",
    "--no-oversample": "leave it out: no prompt of a file is sent twice",
    "--num-clients": "write --max-concurrency: a client has one conversation under way",
    "--output-len": "write --random-output-len, --sonnet-output-len, --sharegpt-output-len or --custom-output-len",
    "--plot-dataset-stats": "there is no such plot; --save-detailed keeps the lengths of each request",
    "--plot-timeline": "there is no such plot; --save-detailed keeps the times of each request",
    "--random-batch-size": "a request has one prompt; embeddings are not measured",
    "--skip-chat-template": "leave it out: prompts are put into a template only with --use-chat-template",
    "--skip-tokenizer-init": "leave it out: if no tokenizer is found, random prompts are sent as token ids",
    "--tokenizer-mode": "leave it out: tokenizers are read by transformers",
    "--use-beam-search": "answers of beam search are not streamed",
}


def make_parser() -> FlagParser:
    description = "Sends requests to a server and reports how fast it answers."
    parser = FlagParser("benchmark_serving", description, usage="[--model MODEL] [flags]", elsewhere=OF_VLLM)
    add = parser.add_argument
    add("--backend", default="vllm", choices=sorted(ASYNC_REQUEST_FUNCS), help="the protocol that the server speaks")
    add("--model", help="its name, and where its tokenizer is, unless others are given; by default the server's first")
    add("--served-model-name", help="the name that requests give the model, if it is not --model")
    add("--tokenizer", help="a folder or hub id, if it is not --model's")
    add("--trust-remote-code", action="store_true", help="run a tokenizer's own code")
    add("--base-url", help="http://host:port, in place of --host and --port")
    add("--host", default="127.0.0.1", help="the server's host")
    add("--port", type=positive_int, default=8000, help="the server's port")
    add("--endpoint", help="the path that requests are sent to; by default the backend's own")
    add("--num-prompts", type=positive_int, default=1000, help="requests to send; of multi-turn, conversations")
    add(
        "--request-rate",
        type=positive_float,
        default=math.inf,
        help="requests a second, conversations of multi-turn; inf sends all at once, or by a trace's times",
    )
    add("--burstiness", type=positive_float, default=1.0, help="1: Poisson arrivals; less: in bursts; more: even")
    add("--ramp-up-strategy", choices=("linear", "exponential"), help="let the rate grow from request to request")
    add("--ramp-up-start-rps", type=positive_float, help="requests a second at the start")
    add("--ramp-up-end-rps", type=positive_float, help="requests a second at the end")
    add(
        "--max-concurrency",
        type=positive_int,
        help="requests under way at most, conversations of multi-turn; by default any number",
    )
    add("--num-warmups", type=count_int, default=1, help="requests before those that count")
    add("--ready-check-timeout-sec", type=count_int, default=0, help="seconds to wait for the server to answer")
    add("--request-id-prefix", help="send x-request-id: this text and the request's number, from 0")
    add("--ignore-eos", action="store_true", help="ask for answers of full length")
    add("--seed", type=count_int, default=0, help="of prompts, lengths and arrivals")
    add("--profile", action="store_true", help="POST /start_profile before and /stop_profile after")
    add("--disable-tqdm", action="store_true", help="show no progress bar")

    group = parser.add_argument_group("prompts")
    add = group.add_argument
    add("--dataset-name", default="sharegpt", choices=DATASETS, help="where prompts come from")
    add(
        "--dataset-path",
        help="its file; of hf a hub id, folder or file; of multi-turn a trace in Mooncake's format, or none",
    )
    add("--use-chat-template", action="store_true", help="put prompts into the tokenizer's chat template")
    add("--random-input-len", type=positive_int, default=1024, help="tokens of a prompt")
    add("--random-output-len", type=positive_int, default=128, help="tokens of an answer")
    add(
        "--random-range-ratio",
        type=float,
        default=1.0,
        help="lengths are uniform from this share of them up to them; of multi-turn, too",
    )
    add("--random-prefix-len", type=count_int, default=0, help="tokens before the prompt that all requests share")
    add("--prefix-repetition-prefix-len", type=positive_int, default=256, help="tokens that some prompts share")
    add("--prefix-repetition-suffix-len", type=positive_int, default=256, help="tokens of each prompt's own")
    add("--prefix-repetition-num-prefixes", type=positive_int, default=10, help="prefixes, of equally many prompts")
    add("--prefix-repetition-output-len", type=positive_int, default=128, help="tokens of an answer")
    add("--multi-turn-turns", type=positive_int, default=6, help="turns of a conversation")
    add("--multi-turn-shared-len", type=count_int, default=2000, help="tokens that all conversations begin with")
    add("--multi-turn-new-len", type=positive_int, default=1500, help="tokens that a turn adds to what was said")
    add("--multi-turn-output-len", type=positive_int, default=100, help="tokens of an answer")
    add(
        "--multi-turn-think-time",
        type=nonnegative_float,
        default=0.0,
        help="seconds on average, exponentially distributed, from an answer to the next turn",
    )
    add("--sharegpt-output-len", type=positive_int, help="tokens of an answer, in place of the data set's")
    add("--custom-output-len", type=positive_int, default=256, help="tokens of an answer")
    add("--sonnet-input-len", type=positive_int, default=550, help="tokens of a prompt")
    add("--sonnet-output-len", type=positive_int, default=150, help="tokens of an answer")
    add("--sonnet-prefix-len", type=positive_int, default=200, help="tokens that all prompts share")
    add("--hf-subset", help="subset of the data set")
    add("--hf-split", help="split of the data set; train if none is given")
    add("--hf-output-len", type=positive_int, help="tokens of an answer, in place of the data set's")

    group = parser.add_argument_group("sampling, of backends with OpenAI's fields")
    add = group.add_argument
    add("--temperature", type=float, help="0, which is greedy, if none is given")
    add("--top-p", type=float, help="by default the server's, as are those that follow")
    add("--top-k", type=int, help="number of tokens that are drawn from")
    add("--min-p", type=float, help="share of the likeliest token's probability")
    add("--frequency-penalty", type=float, help="of tokens, by how often the answer has them")
    add("--presence-penalty", type=float, help="of tokens that the answer has")
    add("--repetition-penalty", type=float, help="of tokens that the prompt or the answer has")
    add(
        "--extra-body",
        help='fields of every request as JSON, as in {"chat_template_kwargs": {"enable_thinking": false}}',
    )

    group = parser.add_argument_group("results")
    add = group.add_argument
    add("--percentile-metrics", default="ttft,tpot,itl", help=f"what the table shows, of {','.join(METRICS)}")
    add("--metric-percentiles", default="99", help="as in 25,50,75,99")
    add("--goodput", nargs="+", metavar="KEY:MS", help="objectives, as in ttft:200 tpot:50 e2el:5000 (milliseconds)")
    add("--save-result", action="store_true", help="write a JSON file")
    add("--save-detailed", action="store_true", help=f"add to it, by request: {', '.join(DETAILS)}")
    add("--result-dir", help="its folder; by default the current one")
    add("--result-filename", help="its name; by default made of label, rate, concurrency, model and date")
    add("--label", help="kept in the JSON file; its name begins with it, in place of --backend")
    add("--metadata", nargs="*", metavar="KEY=VALUE", help="kept in the JSON file")
    return parser


def read_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the arguments, and fill in defaults that depend on others. UsageError."""
    args = make_parser().read(argv)
    args.base_url = (args.base_url or f"http://{args.host}:{args.port}").rstrip("/")
    args.endpoint = args.endpoint or ENDPOINTS.get(args.backend, "/v1/completions")
    args.percentile_metrics = [each.strip() for each in args.percentile_metrics.split(",") if each.strip()]
    args.metric_percentiles = parse_percentiles(args.metric_percentiles)
    args.goodput = parse_goodput(args.goodput or [])
    args.extra_body = parse_extra_body(args.extra_body)
    args.metadata = parse_metadata(args.metadata or [])
    refuse_contradictions(args)
    given = {name: getattr(args, name) for name in SAMPLING}
    args.extra_body = {name: value for name, value in given.items() if value is not None} | args.extra_body
    return args


def refuse_contradictions(args: argparse.Namespace) -> None:
    if unknown := ", ".join(sorted(set(args.percentile_metrics) - set(METRICS))):
        raise UsageError(f"--percentile-metrics: there is no {unknown}; there are {', '.join(METRICS)}")
    if not args.base_url.startswith(("http://", "https://")):
        raise UsageError(f"--base-url {args.base_url}: write http://host:port")
    if args.base_url.endswith("/v1") and args.endpoint.startswith("/v1/"):
        raise UsageError(f"--base-url {args.base_url}: leave /v1 out, which is in --endpoint {args.endpoint}")
    if not args.endpoint.startswith("/"):
        raise UsageError(f"--endpoint {args.endpoint}: write a path, as in /v1/completions")
    ending = ENDINGS.get(args.backend, "/completions")
    is_chat = args.endpoint.endswith("/chat/completions")
    if not args.endpoint.endswith(ending) or is_chat != (args.backend == "openai-chat"):
        mend = "use --backend openai-chat" if is_chat else f"its path ends with {ending}"
        raise UsageError(f"--endpoint {args.endpoint} does not speak the protocol of {args.backend}: {mend}")
    if args.ignore_eos and args.backend in NO_IGNORE_EOS:
        raise UsageError(f"--ignore-eos: the protocol of {args.backend} has nothing to ask for it with")
    if args.use_chat_template and args.backend == "openai-chat":
        raise UsageError("--use-chat-template: openai-chat's server applies the template itself; leave the flag out")
    if args.backend == "deepspeed-mii" and args.goodput.keys() & {"ttft", "tpot"}:
        raise UsageError("--goodput: deepspeed-mii answers in one piece, only e2el is known")
    if not 0 < args.random_range_ratio <= 1:
        raise UsageError(
            f"--random-range-ratio {args.random_range_ratio:g}: it is greater than 0 and at most 1, and lengths are "
            "uniform from this share of them up to them; vLLM's 0, all lengths equal, is 1 here"
        )
    if math.isinf(args.burstiness):
        raise UsageError("--burstiness inf: give a number")
    if args.dataset_name not in SYNTHETIC and not args.dataset_path:
        needless = ", ".join(SYNTHETIC)
        raise UsageError(f"--dataset-name {args.dataset_name} needs --dataset-path; these need none: {needless}")
    is_trace = args.dataset_name == "multi-turn" and args.dataset_path
    if (is_trace or args.dataset_name not in (*SYNTHETIC, "hf")) and not Path(args.dataset_path).is_file():
        is_read = f"{args.dataset_name} is read from one on this disk"
        raise UsageError(f"--dataset-path {args.dataset_path}: no such file; {is_read}")
    if args.dataset_name == "multi-turn" and args.use_chat_template:
        raise UsageError("--use-chat-template: a conversation of messages is what --backend openai-chat sends")
    num_prefixes = args.prefix_repetition_num_prefixes
    if args.dataset_name == "prefix_repetition" and num_prefixes > args.num_prompts:
        raise UsageError(f"--prefix-repetition-num-prefixes {num_prefixes}: there are only {args.num_prompts} prompts")
    fields = [name for name in SAMPLING if getattr(args, name) is not None]
    if args.backend in OTHER_FIELDS and (fields or args.extra_body):
        flag = (fields or ["extra_body"])[0].replace("_", "-")
        raise UsageError(f"--{flag}: {args.backend} does not have OpenAI's fields; leave it out")
    refuse_ramp_up(args)
    for flag in ("result_dir", "result_filename", "save_detailed", "label"):
        if getattr(args, flag) and not args.save_result:
            raise UsageError(f"--{flag.replace('_', '-')} is about the result's file: add --save-result")


def refuse_ramp_up(args: argparse.Namespace) -> None:
    given = [name for name in RAMP_UP if getattr(args, name) is not None]
    if args.ramp_up_strategy is None:
        if given:
            raise UsageError(f"--{given[0].replace('_', '-')} needs --ramp-up-strategy, linear or exponential")
        return
    if len(given) < len(RAMP_UP):
        raise UsageError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps")
    if math.inf in (args.ramp_up_start_rps, args.ramp_up_end_rps) or args.ramp_up_start_rps > args.ramp_up_end_rps:
        raise UsageError("--ramp-up-start-rps and --ramp-up-end-rps: give two numbers, the second not less")
    if args.request_rate != math.inf:
        raise UsageError("--request-rate: the rate is that of --ramp-up-strategy; leave one of them out")


def parse_extra_body(text: str | None) -> dict[str, Any]:
    try:
        body = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--extra-body {text}: this is not valid JSON ({error})") from None
    if not isinstance(body, dict):
        raise UsageError(f'--extra-body {text}: write an object, as in {{"seed": 7}}')
    if taken := body.keys() & {"stream", "stream_options"}:
        raise UsageError(f"--extra-body: {min(taken)} is always set, since tokens are timed as they are streamed")
    return body


def parse_percentiles(text: str) -> list[float]:
    try:
        ranks = [float(each) for each in text.split(",") if each.strip()]
    except ValueError:
        raise UsageError(f"--metric-percentiles {text}: write numbers, as in 25,50,99") from None
    if not ranks or not all(0 <= rank <= 100 for rank in ranks):
        raise UsageError(f"--metric-percentiles {text}: percentiles are from 0 to 100")
    return sorted(set(ranks))


def parse_metadata(pairs: Sequence[str]) -> dict[str, str]:
    for pair in pairs:
        if "=" not in pair:
            raise UsageError(f"--metadata {pair}: write KEY=VALUE")
    return {key.strip(): value.strip() for key, _, value in (pair.partition("=") for pair in pairs)}


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """["ttft:100"] -> {"ttft": 100.0}, in milliseconds."""
    objectives = {}
    for pair in pairs:
        name, _, value = pair.partition(":")
        try:
            limit = float(value)
        except ValueError:
            raise UsageError(f"--goodput {pair}: write KEY:MILLISECONDS, as in ttft:200") from None
        if name not in GOODPUT_METRICS:
            raise UsageError(f"--goodput {pair}: there is no {name}; there are {', '.join(GOODPUT_METRICS)}")
        if not limit >= 0:
            raise UsageError(f"--goodput {pair}: milliseconds cannot be less than 0")
        objectives[name] = limit
    return objectives
