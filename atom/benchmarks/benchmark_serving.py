"""Measure a server's throughput and latencies: send requests, time streamed tokens.

    python -m atom.benchmarks.benchmark_serving --model org/model --base-url http://localhost:8000 \\
        --dataset-name random --random-input-len 1024 --random-output-len 128 --num-prompts 1000 --ignore-eos
    python -m atom.benchmarks.benchmark_serving --dataset-name multi-turn --num-prompts 32 --ignore-eos

The table goes to stdout, everything else to stderr. Exit code 1 if no request was answered.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy

from atom.benchmarks import datasets, random_dataset
from atom.benchmarks.arguments import DETAILS, RETURN_IDS, SYNTHETIC, TEXT_ONLY, read_arguments
from atom.benchmarks.backend_request_func import RequestFuncInput
from atom.benchmarks.benchmark_utils import (
    BenchmarkError,
    UsageError,
    convert_to_pytorch_benchmark_format,
    report,
    say,
    write_json,
)
from atom.benchmarks.client import Measurement, ask_model, measure, retry, run_loop
from atom.benchmarks.multi_turn import RandomPrompts, sample_multi_turn, sample_trace
from atom.benchmarks.prompts import Conversation, PromptForm, SampleRequest
from atom.benchmarks.tokenizer import Tokenizer, load_tokenizer
from atom.measurement.conversations import read_sharegpt
from atom.measurement.metrics import (
    BenchmarkMetrics,
    RequestFuncOutput,
    calculate_metrics,
    finish_outputs,
    flatten_metrics,
    format_table,
)

ALWAYS = 99.0  # the percentile that every result file has


def main(argv: Sequence[str] | None = None) -> int:
    return report("benchmark_serving", lambda: run(read_arguments(argv)))


def run(args: argparse.Namespace) -> int:
    """Measure, print and save. The exit code; BenchmarkError, UsageError."""
    if args.model is None:
        args = with_served_model(args)
    tokenizer = find_tokenizer(args)
    conversations = make_inputs(args, sample_conversations(args, tokenizer))
    warmups = make_warmups(args, tokenizer, conversations[0][0])
    say(describe_traffic(args, conversations))
    measured = run_loop(measure(args, conversations, warmups))
    count = (lambda text: len(tokenizer.encode(text, add_special_tokens=False))) if tokenizer else None
    report_failures(measured.outputs)
    finish_outputs(measured.outputs, count)
    report_lengths(args, conversations, measured.outputs)
    report_cached(args, measured.outputs)
    percentiles = sorted({*args.metric_percentiles, ALWAYS})
    metrics = calculate_metrics(measured.outputs, measured.seconds, percentiles, args.goodput)
    print(format_table(metrics, args.percentile_metrics, args.metric_percentiles))
    if args.save_result:
        save(args, make_result(args, tokenizer, len(conversations), measured, metrics))
    if measured.trouble:
        raise BenchmarkError(measured.trouble)
    return 0


def with_served_model(args: argparse.Namespace) -> argparse.Namespace:
    """The arguments with the server's first model, whose tokenizer is at its `root`."""
    name, root = run_loop(retry(lambda: ask_model(args.base_url), args.ready_check_timeout_sec))
    say(f"the server has {name}")
    return argparse.Namespace(
        **{**vars(args), "model": root, "served_model_name": args.served_model_name or name},
    )


def find_tokenizer(args: argparse.Namespace) -> Tokenizer | None:
    """Load the tokenizer; None if it is missing and not needed, since random prompts can be token ids."""
    is_file = args.dataset_name not in SYNTHETIC
    is_text = args.backend in TEXT_ONLY or (args.dataset_name == "multi-turn" and args.backend not in RETURN_IDS)
    is_needed = args.tokenizer or is_file or args.use_chat_template or is_text
    try:
        return load_tokenizer(args.tokenizer or args.model, trust_remote_code=args.trust_remote_code)
    except UsageError as error:
        if is_needed:
            raise
        say(f"{error}; random prompts are sent as token ids")
        return None


def sample_conversations(args: argparse.Namespace, tokenizer: Tokenizer | None) -> list[Conversation]:
    """Sample conversations, of one turn unless the data set has more."""
    if args.dataset_name != "multi-turn":
        return [[each] for each in sample_requests(args, tokenizer)]
    rng, seeds = numpy.random.default_rng(args.seed), numpy.ravel(args.seed).tolist()
    if args.backend not in RETURN_IDS:
        assert tokenizer is not None, "find_tokenizer needs one"
        form = PromptForm(tokenizer, is_chat=args.backend == "openai-chat")
        draw = RandomPrompts(rng, random_dataset.find_stable_ids(rng, tokenizer), form, seeds)
    else:
        draw = RandomPrompts(rng, find_ids(args, tokenizer), None, seeds)
    if args.dataset_path:
        keeps_times = args.request_rate == math.inf and not args.ramp_up_strategy
        return sample_trace(draw, args.num_prompts, Path(args.dataset_path), keeps_times=keeps_times)
    return sample_multi_turn(
        draw,
        args.num_prompts,
        num_turns=args.multi_turn_turns,
        shared_len=args.multi_turn_shared_len,
        new_len=args.multi_turn_new_len,
        output_len=args.multi_turn_output_len,
        range_ratio=args.random_range_ratio,
        think_time=args.multi_turn_think_time,
    )


def find_ids(args: argparse.Namespace, tokenizer: Tokenizer | None) -> random_dataset.Ids:
    """The token ids that prompts are drawn from."""
    if tokenizer is not None:
        return random_dataset.find_plain_ids(tokenizer)
    return numpy.arange(random_dataset.find_vocab_size(args.model))


def sample_requests(args: argparse.Namespace, tokenizer: Tokenizer | None) -> list[SampleRequest]:
    """Sample prompts and lengths from the data set of the arguments."""
    rng = numpy.random.default_rng(args.seed)
    if tokenizer is None:
        return sample_synthetic(args, rng, None)
    form = PromptForm(tokenizer, is_chat=args.backend == "openai-chat", use_chat_template=args.use_chat_template)
    if args.use_chat_template and not tokenizer.has_template:
        raise UsageError(f"--use-chat-template: the tokenizer {args.tokenizer or args.model} has no chat template")
    if args.dataset_name in SYNTHETIC:
        return sample_synthetic(args, rng, form)
    if args.dataset_name == "hf":
        names = {"subset": args.hf_subset, "split": args.hf_split, "num": args.num_prompts}
        conversations = datasets.read_hf(args.dataset_path, **names)
        return datasets.sample_sharegpt(rng, form, args.num_prompts, conversations, output_len=args.hf_output_len)
    path = Path(args.dataset_path)
    if args.dataset_name == "burstgpt":
        return datasets.sample_burstgpt(rng, form, args.num_prompts, path)
    if args.dataset_name == "custom":
        return datasets.sample_custom(rng, form, args.num_prompts, path, output_len=args.custom_output_len)
    if args.dataset_name == "sonnet":
        outputs, prefix_len = [args.sonnet_output_len] * args.num_prompts, args.sonnet_prefix_len
        return datasets.sample_sonnet(rng, form, path, outputs, input_len=args.sonnet_input_len, prefix_len=prefix_len)
    try:
        conversations = read_sharegpt(path)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return datasets.sample_sharegpt(rng, form, args.num_prompts, conversations, output_len=args.sharegpt_output_len)


def sample_synthetic(
    args: argparse.Namespace, rng: numpy.random.Generator, form: PromptForm | None
) -> list[SampleRequest]:
    """Make random prompts: text if the tokenizer can write it, else token ids."""
    if args.dataset_name == "random":
        prefix_len, num_prefixes, ratio = args.random_prefix_len, 1, args.random_range_ratio
        inputs = random_dataset.draw_lengths(rng, args.num_prompts, args.random_input_len, range_ratio=ratio)
        outputs = random_dataset.draw_lengths(rng, args.num_prompts, args.random_output_len, range_ratio=ratio)
    else:
        prefix_len, num_prefixes = args.prefix_repetition_prefix_len, args.prefix_repetition_num_prefixes
        num = args.num_prompts // num_prefixes * num_prefixes
        inputs, outputs = [args.prefix_repetition_suffix_len] * num, [args.prefix_repetition_output_len] * num
    prefixes = {"prefix_len": prefix_len, "num_prefixes": num_prefixes}
    if form is None:
        requests = random_dataset.sample_random_ids(rng, find_ids(args, None), inputs, outputs, **prefixes)
    else:
        requests = random_dataset.sample_random(rng, form, inputs, outputs, **prefixes)
    return requests if num_prefixes == 1 else [requests[at] for at in rng.permutation(len(requests))]


def make_inputs(args: argparse.Namespace, samples: Sequence[Conversation]) -> list[list[RequestFuncInput]]:
    url, model = args.base_url + args.endpoint, args.served_model_name or args.model
    numbers = itertools.count()

    def make_input(turn: SampleRequest, *, has_next: bool) -> RequestFuncInput:
        number = next(numbers)
        return RequestFuncInput(
            turn.prompt,
            url,
            turn.prompt_len,
            turn.expected_output_len,
            model,
            ignore_eos=args.ignore_eos,
            extra_body=args.extra_body,
            id="" if args.request_id_prefix is None else f"{args.request_id_prefix}{number}",
            delay=turn.delay,
            return_token_ids=has_next and isinstance(turn.prompt, list),
        )

    return [[make_input(turn, has_next=turn is not turns[-1]) for turn in turns] for turns in samples]


def make_warmups(
    args: argparse.Namespace, tokenizer: Tokenizer | None, first: RequestFuncInput
) -> list[RequestFuncInput]:
    """Make what is sent before the requests that count, one at least: other synthetic prompts, or a file's first one.

    Of conversations, only first turns are sent.
    A server keeps them in its prefix cache, so that a prompt that was sent before would be measured as a faster one.
    """
    num = max(1, args.num_warmups)
    if args.dataset_name not in SYNTHETIC:
        return [replace(first, id="")] * num
    changes = {
        "num_prompts": num,
        "prefix_repetition_num_prefixes": min(num, args.prefix_repetition_num_prefixes),
        "request_id_prefix": None,
        "seed": [args.seed, 1],
        "multi_turn_turns": 1,
    }
    own = argparse.Namespace(**{**vars(args), **changes})
    made = make_inputs(own, sample_conversations(own, tokenizer))
    return [made[at % len(made)][0] for at in range(num)]


def describe_traffic(args: argparse.Namespace, conversations: Sequence[Sequence[RequestFuncInput]]) -> str:
    unit = "conversations" if max(map(len, conversations)) > 1 else "requests"
    limit = f", at most {args.max_concurrency} under way" if args.max_concurrency else ""
    burst = f" a second (burstiness {args.burstiness:g})"
    if args.ramp_up_strategy:
        growth = f"{args.ramp_up_start_rps:g} to {args.ramp_up_end_rps:g} {unit}"
        rate = f"{args.ramp_up_strategy} from {growth}{burst}"
    else:
        last = max(turns[0].delay for turns in conversations)
        at_once = f"over {last:g} s, as in the trace" if last else "all at once"
        rate = at_once if args.request_rate == math.inf else f"{args.request_rate:g} {unit}{burst}"
    prompts = describe_range([turns[0].prompt_len for turns in conversations])
    answers = describe_range([turn.output_len for turns in conversations for turn in turns])
    lengths = f"prompts of {prompts} tokens, answers of {answers}"
    if later := [turn for turns in conversations for turn in turns[1:]]:
        num_turns, added = (
            describe_range([*map(len, conversations)]),
            describe_range([turn.prompt_len for turn in later]),
        )
        unit, lengths = f"{unit} of {num_turns} turns", f"first {lengths}, {added} more in each later turn"
    return f"{len(conversations)} {unit} to {args.base_url}{args.endpoint}: {rate}{limit}; {lengths}"


def describe_range(lengths: Sequence[int]) -> str:
    low, high = min(lengths), max(lengths)
    return str(low) if low == high else f"{low} to {high}"


def report_failures(outputs: Sequence[RequestFuncOutput]) -> None:
    """BenchmarkError if every request failed."""
    errors = [output.error for output in outputs if not output.success]
    if len(errors) == len(outputs):
        raise BenchmarkError(f"all {len(outputs)} requests failed; the first error: {errors[0]}")
    if errors:
        say(f"{len(errors)} of {len(outputs)} requests failed; the first error: {errors[0]}")


def report_lengths(
    args: argparse.Namespace,
    conversations: Sequence[Sequence[RequestFuncInput]],
    outputs: Sequence[RequestFuncOutput],
) -> None:
    """Report prompts or answers of unexpected lengths: such numbers cannot be compared.

    Of conversations, only first prompts: those of later turns have the answers in them.
    """
    requests = itertools.chain.from_iterable(conversations)
    answered = [pair for pair in zip(requests, outputs, strict=True) if pair[1].success]
    firsts = [(asked.prompt_len, got.prompt_len) for asked, got in answered if not got.turn]
    prompts = [(asked_len, got_len) for asked_len, got_len in firsts if asked_len != got_len]
    if prompts:
        asked_len, got_len = prompts[0]
        say(f"{len(prompts)} of {len(firsts)} prompts have another length for the server: {got_len}, not {asked_len}")
    answers = [
        (asked.output_len, got.output_tokens) for asked, got in answered if asked.output_len != got.output_tokens
    ]
    if answers and args.ignore_eos:
        asked_len, num = answers[0]
        say(f"{len(answers)} of {len(answered)} answers have another length than asked for: {num}, not {asked_len}")


def report_cached(args: argparse.Namespace, outputs: Sequence[RequestFuncOutput]) -> None:
    """Report what the server did not compute: latencies of cached prompts are no others' measure."""
    cached, asked = sum(each.cached_tokens for each in outputs), sum(each.prompt_len for each in outputs)
    if cached:
        again = "; prompts of an earlier run are new with another --seed" if args.dataset_name == "random" else ""
        say(f"{cached} of {asked} prompt tokens came from the server's prefix cache{again}")


def make_result(
    args: argparse.Namespace,
    tokenizer: Tokenizer | None,
    num_prompts: int,
    measured: Measurement,
    metrics: BenchmarkMetrics,
) -> dict[str, Any]:
    """Make the content of a result file. Metadata is under its own names too, if these are free."""
    result = {
        **args.metadata,
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": args.backend,
        "label": args.label,
        "model_id": args.model,
        "tokenizer_id": (args.tokenizer or args.model) if tokenizer else None,
        "dataset_name": args.dataset_name,
        "num_prompts": num_prompts,
        "request_rate": args.request_rate,
        "burstiness": args.burstiness,
        "ramp_up_strategy": args.ramp_up_strategy,
        "ramp_up_start_rps": args.ramp_up_start_rps,
        "ramp_up_end_rps": args.ramp_up_end_rps,
        "extra_body": args.extra_body,
        "max_concurrency": args.max_concurrency,
        "metadata": args.metadata,
        "hardware": measured.hardware,
        "hardware_of": measured.hardware_of,
        **flatten_metrics(metrics),
        "total_cached_tokens": sum(each.cached_tokens for each in measured.outputs),
    }
    return result | (detail(measured.outputs) if args.save_detailed else {})


def detail(outputs: Sequence[RequestFuncOutput]) -> dict[str, Any]:
    """Details of each request, in the order in which they were made."""
    values = (
        (
            each.prompt_len,
            each.output_tokens or 0,
            each.started,
            each.ttft,
            each.itl,
            each.generated_text,
            each.error,
            each.turn,
        )
        for each in outputs
    )
    return dict(zip(DETAILS, map(list, zip(*values, strict=True)), strict=True))


def save(args: argparse.Namespace, result: Mapping[str, Any]) -> None:
    """Write the result file and, if the environment asks for them, records for PyTorch's benchmark database."""
    limit = f"-concurrency{args.max_concurrency}" if args.max_concurrency else ""
    model = args.model.rstrip("/").rpartition("/")[2]
    rate = f"{args.request_rate:g}qps"
    if args.ramp_up_strategy:
        rate = f"ramp-up-{args.ramp_up_strategy}-{args.ramp_up_start_rps:g}qps-{args.ramp_up_end_rps:g}qps"
    stem = f"{args.label or args.backend}-{rate}{limit}-{model}-{result['date']}"
    folder = Path(args.result_dir or ".")
    path = folder / args.result_filename if args.result_filename else find_free_path(folder, stem)
    write_json(path, result)
    say(f"wrote {path}")
    names = [name for name, value in result.items() if name.endswith(("_ms", "_throughput")) and value is not None]
    if records := convert_to_pytorch_benchmark_format(args, {name: [result[name]] for name in names}, args.metadata):
        write_json(path.with_suffix(".pytorch.json"), records)


def find_free_path(folder: Path, stem: str) -> Path:
    """The path of a JSON file that is not there yet: runs that end in the same second keep their own."""
    numbered = (f"{stem}-{number}" for number in itertools.count(2))
    paths = (folder / f"{name}.json" for name in itertools.chain([stem], numbered))
    return next(path for path in paths if not path.exists())


if __name__ == "__main__":
    sys.exit(main())
