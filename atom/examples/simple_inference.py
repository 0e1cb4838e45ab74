"""Check that a model loads and talks: four prompts, answered together.

python -m atom.examples.simple_inference --model /models/qwen3 --temperature 0.6
python -m atom.examples.simple_inference --max-num-seqs 4 --level 1      # the embedded model
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from atom import SamplingParams
from atom.entrypoints.args import EngineArgs, Parser, run_command

if TYPE_CHECKING:
    from atom import LLMEngine

PROMPTS = (
    "Introduce yourself in two sentences.",
    "Which prime numbers are below 50?",
    "用三句话介绍一下长城。",
    "一周有七天,三周零两天一共有多少天?",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the answers; the exit code."""
    parser = Parser("python -m atom.examples.simple_inference", "Answers four prompts, English and Chinese.")
    EngineArgs.add_cli_args(parser)
    parser.add_argument("--temperature", type=float, default=0.6, metavar="N", help="0: greedy (default: 0.6)")
    return run_command(parser, answer_prompts, argv)


def answer_prompts(args: argparse.Namespace) -> int:
    """Warm up with a short generation, then answer the whole batch."""
    warm_up, params = (SamplingParams(temperature=args.temperature, max_tokens=number) for number in (4, 256))
    llm = EngineArgs.from_cli_args(args).create_engine()
    prompts = [as_chat(llm, prompt) for prompt in PROMPTS]
    llm.generate(prompts, warm_up)
    for prompt, answer in zip(PROMPTS, llm.generate(prompts, params, use_tqdm=True), strict=True):
        print(f"Prompt: {prompt}\nCompletion: {answer['text']}\n")
    llm.print_mtp_statistics()
    return 0


def as_chat(llm: LLMEngine, prompt: str) -> str | list[int]:
    """The prompt in the checkpoint's chat template; as it is without one."""
    if llm.tokenizer is None or llm.tokenizer.chat_template is None:
        return prompt
    return llm.tokenizer.encode_chat([{"role": "user", "content": prompt}], enable_thinking=True)


if __name__ == "__main__":
    sys.exit(main())
