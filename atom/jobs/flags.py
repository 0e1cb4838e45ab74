"""Parse the flags of `atom-run`: Hydra's, and a config dir more."""

from __future__ import annotations

import argparse
import re
import shlex
from typing import NoReturn

from hydra._internal.utils import get_args_parser

from atom.config.schema import SET_BY_LOAD, Config
from atom.config.schema_keys import keys
from atom.errors import ConfigError

VLLM_FLAGS = {"-tp": "parallel.tensor", "-pp": "parallel.pipeline", "-dp": "parallel.replicas", "-q": "quant.method"}
LLAMA_CPP_FLAGS = {
    "-hf": "checkpoint={}",
    "-c": "serve.max_model_len={}",
    "-n": "sampling.max_tokens={}",
    "-p": "prompts={}",
    "-f": "prompts=@{}",
    "-s": "seed={}",
    "-t": "OMP_NUM_THREADS={} in the environment",
    "-ngl": "device=cuda",
    "-cnv": "job=chat",
}
LONG_FLAGS = {  # of vLLM and llama.cpp, whose field has another name
    "model": "checkpoint",
    "hf_repo": "checkpoint",
    "prompt": "prompts",
    "ctx_size": "serve.max_model_len",
    "temp": "sampling.temperature",
    "predict": "sampling.max_tokens",
    "n_predict": "sampling.max_tokens",
    "repeat_penalty": "sampling.repetition_penalty",
    "gpu_layers": "device",
    "n_gpu_layers": "device",
    "quantization": "quant.method",
    "tensor_parallel_size": "parallel.tensor",
    "pipeline_parallel_size": "parallel.pipeline",
    "data_parallel_size": "parallel.replicas",
}


def parse_flags(argv: list[str]) -> argparse.Namespace:
    """Parse a command line. ConfigError for what is no flag, with the field that may be meant."""

    def refuse(message: str) -> NoReturn:
        flag = re.fullmatch(r"unrecognized arguments: --([\w-]+)(=.*| .*)?", message)
        key = find_key(flag[1].replace("-", "_")) if flag else None
        raise ConfigError(f"{message}{f', write {key}=…' if key else ''}; atom-run --help shows what there is")

    for at, text in enumerate(argv):
        short = re.fullmatch(r"(-[a-z]+)(\d*)", text)
        if short and (key := VLLM_FLAGS.get(short[1])):
            value = short[2] or next(iter(argv[at + 1 :]), "N")
            command = f"python -m atom.entrypoints.openai_server {short[1]} {value}"
            raise ConfigError(f"{short[1]} is a flag of vLLM: write {key}={value}, or {command}")
        if (write := LLAMA_CPP_FLAGS.get(text)) and not is_of_hydra(argv, at):
            value = shlex.quote(argv[at + 1]) if argv[at + 1 :] else "…"
            raise ConfigError(f"{text} is a flag of llama.cpp: write {write.format(value)}")
    parser: argparse.ArgumentParser = get_args_parser()
    own = parser.add_argument_group(conflict_handler="resolve")
    own.add_argument("--config-dir", "-cd", action="append", default=[])  # Hydra's own takes one only
    parser.error = refuse  # type: ignore[method-assign]
    args = parser.parse_intermixed_args(argv)
    if args.config_name or args.config_path or args.experimental_rerun:
        raise ConfigError("--config-name, --config-path, --experimental-rerun: use recipe= or --config-dir instead")
    if sum(map(bool, (args.cfg, args.info, args.multirun, args.run, args.shell_completion))) > 1:
        raise ConfigError("only one of --run, --multirun, --cfg, --info and --shell-completion at a time")
    return args


def find_key(flag: str) -> str | None:
    """The field that corresponds to a flag of another command."""
    if flag in LONG_FLAGS:
        return LONG_FLAGS[flag]
    known = [key for key in keys(Config) if not key.startswith("model.") and key not in SET_BY_LOAD]
    same = [key for key in known if key.rpartition(".")[2] == flag]
    return min(same, key=lambda key: (key.startswith("parallel."), key.count(".")), default=None)


def is_of_hydra(argv: list[str], at: int) -> bool:
    """Whether the short flag at this place is Hydra's, and not llama.cpp's of the same letter."""
    if argv[at] == "-p":  # --package, of what is shown
        return any(re.fullmatch(r"(--cfg|-c|--info|-i)(=.*)?", text) for text in argv)
    return argv[at] == "-c" and argv[at + 1 : at + 2] in (["job"], ["hydra"], ["all"])
