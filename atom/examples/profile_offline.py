"""Trace one batch, for TensorBoard or Chrome's tracing page.

python -m atom.examples.profile_offline --model /models/qwen3 --input-length 128 --output-length 32 --bs 4
python -m atom.examples.profile_offline --model /models/qwen3 --load_dummy --random-input --torch-profiler-dir traces
tensorboard --logdir profiler_traces

ATOM_PROFILER_MORE=1 adds shapes, stacks and memory to the trace.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from atom import RequestError, SamplingParams
from atom.entrypoints.args import EngineArgs, Parser, add_flag, run_command

if TYPE_CHECKING:
    from atom import LLMEngine

FOLDER = "./profiler_traces"
TEXT = "A language model reads the words that came before and says which one is likely to be the next. "


def main(argv: Sequence[str] | None = None) -> int:
    """Write the trace and say where it is; the exit code."""
    parser = Parser("python -m atom.examples.profile_offline", f"Profiles one batch; traces go to {FOLDER} by default.")
    EngineArgs.add_cli_args(parser)
    for name, default, about in (
        ("input-length", 128, "tokens of each prompt"),
        ("output-length", 32, "tokens of each answer"),
        ("bs", 1, "requests in the batch"),
    ):
        add_flag(parser, name, type=count, default=default, metavar="N", help=f"{about} (default: {default})")
    add_flag(parser, "random-input", action="store_true", help="prompts of random tokens, not of text")
    return run_command(parser, profile, argv)


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1")
    return int(text)


def profile(args: argparse.Namespace) -> int:
    """Run the batch once to warm up and once in the profiler."""
    engine_args = EngineArgs.from_cli_args(args)
    if engine_args.load().serve.torch_profiler_dir is None:  # neither flag nor environment set it
        engine_args = replace(engine_args, torch_profiler_dir=FOLDER)
    llm = engine_args.create_engine()
    prompts = make_prompts(llm, args)
    params = SamplingParams(temperature=0, max_tokens=args.output_length, ignore_eos=True)
    llm.generate(prompts, params)
    llm.start_profile()
    started = time.perf_counter()
    answers = llm.generate(prompts, params)
    seconds = time.perf_counter() - started
    trace = llm.stop_profile()
    num_input, num_output = (sum(answer[f"num_tokens_{way}"] for answer in answers) for way in ("input", "output"))
    rate = f"{num_output / seconds:.1f} tokens/s with the profiler on"
    print(f"trace: {trace}\n{num_input} tokens in, {num_output} out, {seconds:.2f} s: {rate}")
    return 0


def make_prompts(llm: LLMEngine, args: argparse.Namespace) -> list[list[int]]:
    """`bs` prompts of `input_length` tokens, no two alike."""
    if args.random_input:
        draw = random.Random(llm.config.seed)
        return [draw.choices(range(llm.config.model.vocab), k=args.input_length) for _ in range(args.bs)]
    if llm.tokenizer is None:
        raise RequestError("the checkpoint has no tokenizer; add --random-input")
    texts = (f"{place}. {TEXT * args.input_length}" for place in range(args.bs))  # each repetition is at least a token
    return [llm.tokenizer.encode(text)[: args.input_length] for text in texts]


if __name__ == "__main__":
    sys.exit(main())
