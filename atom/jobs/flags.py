"""Parse the flags of `atom-run`: Hydra's, and --config-dir."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Container
from typing import NoReturn

from hydra._internal.utils import get_args_parser

from atom.config.schema import SET_BY_LOAD, Config
from atom.config.schema_keys import keys
from atom.config.shorthand import as_overrides, may_be_checkpoint
from atom.errors import ConfigError

LLAMA_CPP = {  # flags that mean the same -> what to write: {} is the value; an environment variable; nothing at all
    "-m": "checkpoint={}",  # unless it is Hydra's
    "-hf --hf-repo": "checkpoint={}",
    "-mm --mmproj": "mmproj={}",
    "--no-mmproj": "serve.images=false",
    "--image": "images=[{}]",
    "-c --ctx-size": "serve.max_model_len={}",
    "-t --threads": "OMP_NUM_THREADS={}",
    "-p --prompt": "prompts={}",
    "-f --file": "prompts=@{}",
    "-n --predict --n-predict": "sampling.max_tokens={}",
    "-s": "seed={}",
    "--temp": "sampling.temperature={}",
    "--repeat-penalty": "sampling.repetition_penalty={}",
    "-cnv --conversation": "job=chat",
    "-sys --system-prompt": "job.system_prompt={}",  # of `vllm chat` too
    "-ngl --gpu-layers --n-gpu-layers": "device=cuda",
    "-a --alias": "serve.http.served_model_name=[{}]",
    "-np --parallel": "serve.max_num_seqs={}",
    "-ub --ubatch-size": "serve.max_num_batched_tokens={}",
    "-md --model-draft": "serve.method=draft serve.draft_model={}",
    "--draft-max --draft": "serve.num_speculative_tokens={}",
    "-ctk -ctv --cache-type-k --cache-type-v": "quant.kv=fp8",
    "--api-key-file": "serve.http.api_keys=@{}",
    "--ssl-key-file": "serve.http.ssl_keyfile={}",
    "--ssl-cert-file": "serve.http.ssl_certfile={}",
    "--models-max": "serve.max_awake={}",
    "--sleep-idle-seconds": "serve.idle_sleep_seconds={}",
    "--embedding --embeddings": "serve.pooler_config.pooling_type=LAST",
    "-fa --flash-attn -cb --cont-batching --jinja --mlock --no-mmap --no-warmup --metrics -b --batch-size": "",
}
LLAMA_CPP_FLAGS = {flag: write for flags, write in LLAMA_CPP.items() for flag in flags.split()}
OTHER_FLAGS = {  # of vLLM only or of several programs, if the field has another name
    "-tp": "parallel.tensor={}",
    "-pp": "parallel.pipeline={}",
    "-dp": "parallel.replicas={}",
    "-q": "quant.method={}",
    "--tensor-parallel-size": "parallel.tensor={}",
    "--pipeline-parallel-size": "parallel.pipeline={}",
    "--data-parallel-size": "parallel.replicas={}",
    "--quantization": "quant.method={}",
    "--default-chat-template-kwargs": "serve.http.chat_template_kwargs={}",
    "--model": "checkpoint={}",
    "--api-key": "serve.http.api_keys=…",  # which is not shown
}

BENCH_FLAGS = {  # of `vllm bench latency` and `vllm bench throughput`, if the field has another name
    "--batch-size": "job.num_prompts={}",
    "--num-iters-warmup": "job.num_warmups={}",
    "--output-json": "job.output=json",
}


def parse_flags(argv: list[str]) -> argparse.Namespace:
    """Parse a command line. ConfigError for what is no flag, with the field that may be meant."""

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"{message}; see atom-run --help")

    parser: argparse.ArgumentParser = get_args_parser()
    own = parser.add_argument_group(conflict_handler="resolve")
    own.add_argument("--config-dir", "-cd", action="append", default=[])  # Hydra's own takes one only
    parser.error = refuse  # type: ignore[method-assign]
    refuse_others(argv, parser._option_string_actions)
    args = parser.parse_intermixed_args(argv)
    if args.config_name or args.config_path or args.experimental_rerun:
        raise ConfigError("--config-name, --config-path, --experimental-rerun: use recipe= or --config-dir instead")
    if sum(map(bool, (args.cfg, args.info, args.multirun, args.run, args.shell_completion))) > 1:
        raise ConfigError("only one of --run, --multirun, --cfg, --info and --shell-completion at a time")
    return args


def refuse_others(argv: list[str], own: Container[str]) -> None:
    """Raise ConfigError for flags of llama.cpp and vLLM: what to write for all of them, and which have nothing here.

    own: the flags of atom-run
    """
    is_bench = argv[:2] in (["bench", "latency"], ["bench", "throughput"])
    if argv[:2] == ["bench", "serve"]:
        raise ConfigError("bench serve as in vLLM: start python -m atom.benchmarks.benchmark_serving, with its flags")
    if is_bench:
        argv = argv[:1] + argv[2:]
    found: dict[str, str] = {}
    unknown: list[str] = []
    taken: set[int] = set()
    for at, text in enumerate(argv):
        match = re.fullmatch(r"(-[a-z]+|--[\w-]+)=?(.*)", text)
        if match is None or (match[1] in own and not is_of_llama_cpp(argv, at)):
            continue
        tables = [BENCH_FLAGS, OTHER_FLAGS] if is_bench else [LLAMA_CPP_FLAGS, OTHER_FLAGS]
        write = next((table[match[1]] for table in tables if match[1] in table), None)
        if write is None and (key := find_key(match[1].lstrip("-").replace("-", "_"))):
            write = f"{key}={{}}"
        value = match[2] or next(iter(argv[at + 1 :]), "-")
        is_value = re.fullmatch(r"-\d.*|[^-].*", value, re.DOTALL) is not None and "=" not in value
        if write is None:
            unknown.append(match[1])
        else:
            found[match[1]] = write.format(shlex.quote(value) if is_value else "…")
        taken |= {at, at + 1} if is_value and not match[2] and write != "job=chat" else {at}
    if not found:
        return
    words = [text for at, text in enumerate(argv) if at not in taken and text[0] != "-" and "=" not in text]
    meant = list(dict.fromkeys([*as_overrides(words), *filter(None, found.values())]))
    if "job=chat" in meant:
        meant = [each for each in meant if not each.startswith("prompts=")]  # a chat begins with what its user types
    environment = [each for each in meant if each[0].isupper()]
    if environment:
        meant = [*environment, "atom-run", *(each for each in meant if each not in environment)]
    is_llama_cpp = not is_bench and not found.keys().isdisjoint(LLAMA_CPP_FLAGS)
    other = "" if is_llama_cpp or is_bench else ", or start python -m atom.entrypoints.openai_server, which takes them"
    instead = f"write {' '.join(meant)}{other}" if meant else "nothing is needed for that"
    left_out = f"; leave out what is not here: {', '.join(unknown)}" if unknown and (is_llama_cpp or is_bench) else ""
    raise ConfigError(f"{', '.join(found)} as in {'llama.cpp' if is_llama_cpp else 'vLLM'}: {instead}{left_out}")


def find_key(flag: str) -> str | None:
    """The field that has the name of a flag of another command."""
    known = [key for key in keys(Config) if not key.startswith("model.") and key not in SET_BY_LOAD]
    same = [key for key in known if key.rpartition(".")[2] == flag]
    return min(same, key=lambda key: (key.startswith("parallel."), key.count(".")), default=None)


def is_of_llama_cpp(argv: list[str], at: int) -> bool:
    """Whether the flag at this place is meant as llama.cpp's, though Hydra has it too."""
    match argv[at]:
        case "-p":  # --package, of what is shown
            return not any(re.fullmatch(r"(--cfg|-c|--info|-i)(=.*)?", text) for text in argv)
        case "-c":
            return argv[at + 1 : at + 2] not in (["job"], ["hydra"], ["all"])
        case "-m":
            return argv[at + 1 : at + 2] != [] and may_be_checkpoint(argv[at + 1])
    return False
