"""Engine flags of ROCm/ATOM and vLLM, each an override of the one configuration.

    parser = Parser("python -m my_script", "What it does.")
    EngineArgs.add_cli_args(parser)
    args = EngineArgs.from_cli_args(parser.parse(["--model", "/models/qwen3", "--max_num_seqs=8"]))
    args.overrides()                     # ["checkpoint='/models/qwen3'", "serve.max_num_seqs=8"]
    engine = args.create_engine()

A flag that is not given overrides nothing: defaults, limits and errors are the configuration's, but errors name flags
in place of keys. Flags are written with - or with _, and --no-NAME turns off what --NAME turns on. What is known of
vLLM and ROCm/ATOM and not taken here is refused with a reason (`atom.entrypoints.refused_flags`).
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, get_args, get_origin

import atom
from atom.config import Config
from atom.config.draft_methods import METHODS, WITH_MODEL, find_name
from atom.config.schema_keys import fields_along, keys, types_of
from atom.config.spelling import did_you_mean, override, spelled
from atom.config.typed_json import parse_value, read_object
from atom.entrypoints.online_quant import FIELDS, write_online_quant
from atom.entrypoints.refused_flags import refusal_of
from atom.errors import AtomError, ConfigError, UnsupportedError
from atom.jobs.report import report

if TYPE_CHECKING:
    from typing import Self


VLLM, ROCM = "vLLM", "ROCm/ATOM"
BOTH = (VLLM, ROCM)
Read = Callable[[str], Any]  # a value of the text that was typed; argparse's ArgumentTypeError if it is invalid
Write = Callable[[Any], list[str]]  # the overrides of a value


FIELD = re.compile(r"(--?[\w-]+)\.([\w.-]+)(?:=(.*))?", re.DOTALL)  # of a flag that takes a JSON object


Group = argparse.ArgumentParser | argparse._ArgumentGroup


class Flag(NamedTuple):
    key: str  # the key that it overrides
    about: str
    short: str = ""  # another name
    null: str = "none"  # the meaning of the default null, for --help; if `write` is given, of any default
    accepted: tuple[Any, ...] = ()  # values that override nothing; those of a flag without a key are all that it takes
    of: tuple[str, ...] = BOTH  # whose flag it is
    read: Read | None = None  # None: of the type of its field
    write: Write | None = None  # None: it sets its key


# what the key of a flag begins with, the first counts -> the group of --help that the flag is in
GROUPS = {
    **dict.fromkeys(
        ("checkpoint", "revision", "trust_remote_code", "dtype", "load_dummy", "quant.", "cache", "serve.images"),
        "model",
    ),
    **dict.fromkeys(("model.", "sampling", "serve.pooler_config"), "answers and embeddings"),
    **dict.fromkeys(("parallel.", "serve.enable_expert_parallel", "serve.enable_dp_attention"), "several devices"),
    **dict.fromkeys(("serve.method", "serve.draft_model", "serve.num_speculative", "serve.acceptance"), "drafts"),
    **dict.fromkeys(("serve.http.tool_calls", "serve.http.max_top_n_tokens"), "answers and embeddings"),
    **dict.fromkeys(("serve.http.", "advanced."), "server"),
    **dict.fromkeys(("prompts", "job."), "files"),
    **dict.fromkeys(("serve.", "device", "seed", "level"), "engine"),
}
UNCHANGED = "taken as vLLM has them, with no effect here"
TITLES = ("files", "model", "engine", "several devices", "drafts", "answers and embeddings", "server", UNCHANGED)

# field of vLLM's --speculative-config -> ours
SPECULATIVE = {
    "method": "serve.method",
    "model": "serve.draft_model",
    "num_speculative_tokens": "serve.num_speculative_tokens",
    **{name: f"serve.{name}" for method in METHODS.values() for name in method.options},
    "synthetic_acceptance_length": "serve.acceptance_length",
}


def flag(key: str, about: str, short: str = "", **options: Any) -> Any:
    """A field that `Flag` describes; None means that it was not given."""
    return field(default=None, metadata={"flag": Flag(key, about, short, **options)})


def read_count(text: str) -> int:
    """A number of tokens or bytes as vLLM reads it: 4096, 4k (4000), 4K (4096), 25.6k, 2M, 1G; also 2GiB."""
    match = re.fullmatch(r"(\d+)(\.\d+)?(?:([kmgt])|([KMGT])(?:iB)?)?", text)
    if match is None or (match[2] and not match[3]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number as 4096, 4k, 25.6k or 4K")
    unit = 1000 ** (1 + "kmgt".index(match[3])) if match[3] else 1024 ** (1 + "KMGT".index(match[4])) if match[4] else 1
    return round(float(match[1] + (match[2] or "")) * unit) if match[2] else int(match[1]) * unit


def read_gib(text: str) -> int:
    """A number of GiB, as 4 or 0.5, in bytes."""
    if not re.fullmatch(r"\d+(\.\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of GiB as 4 or 0.5")
    return round(float(text) * (1 << 30))


def read_length(text: str) -> int:
    """A number of tokens, or -1 for auto: the model's own."""
    return -1 if text in ("auto", "-1") else read_count(text)


def json_text(text: str) -> str:
    """The type of a flag that takes a JSON object, whose fields `Parser` takes one by one, too."""
    return text


def set_field(values: dict[str, Any], path: str, text: str) -> None:
    """Set a field of a JSON object, at a.b within the one of a; a text that is no JSON is itself the value."""
    *outer, last = path.split(".")
    for name in outer:
        if not isinstance(values.get(name), dict):
            values[name] = {}
        values = values[name]
    try:
        values[last] = parse_value(path, text)
    except ValueError:
        values[last] = text


def read_speculative(text: str) -> list[str]:
    """The overrides of a --speculative-config, with vLLM's names of methods."""
    fields = read_object(f"--speculative-config={text}", text)
    for name in fields:
        if name not in SPECULATIVE:
            hint = did_you_mean(name, SPECULATIVE)
            known = ", ".join(SPECULATIVE)
            raise ConfigError(f"--speculative-config: there is no such field {name}{hint} (known: {known})")
    if isinstance(fields.get("method"), str):
        fields["method"] = find_name(fields["method"])
    return [override(SPECULATIVE[name], value) for name, value in fields.items()]


@dataclass
class EngineArgs:
    """The values of the flags; None for a flag that was not given."""

    model: str | None = flag("checkpoint", "folder, hub id or .gguf file", null="the embedded model")
    revision: str | None = flag("revision", "of a hub id", null="main", of=(VLLM,))
    trust_remote_code: bool | None = flag("trust_remote_code", "run the code that a checkpoint's tokenizer brings")
    dtype: str | None = flag(
        "dtype", "of weights and activations: bf16, fp16, fp32 or auto, the checkpoint's", of=(VLLM,)
    )
    device: str | None = flag("device", "cpu, cuda (AMD's too) or auto, a GPU if there is one", of=(VLLM,))
    seed: int | None = flag("seed", "of what is drawn", of=(VLLM,))
    tensor_parallel_size: int | None = flag("parallel.tensor", "ranks that a layer is divided among", "-tp")
    pipeline_parallel_size: int | None = flag("parallel.pipeline", "stages that layers are divided into", "-pp")
    data_parallel_size: int | None = flag("parallel.replicas", "engines of one server", "-dp")
    enforce_eager: bool | None = flag("serve.enforce_eager", "capture no CUDA graph")
    enable_prefix_caching: bool | None = flag(
        "serve.enable_prefix_caching",
        "share the KV of prompts that begin alike, as by default; --no-enable-prefix-caching does not",
    )
    port: int | None = flag("serve.port", "of the engine itself, which listens on none", accepted=(8006,), of=(ROCM,))
    kv_cache_dtype: str | None = flag(
        "serve.kv_cache_dtype", "of the KV cache: bf16, fp16, fp32, fp8; auto: the model's"
    )
    block_size: int | None = flag("serve.block_size", "tokens of a KV block")
    max_model_len: int | None = flag(
        "serve.max_model_len",
        "tokens of prompt and answer, also as 4k or 4K; -1: auto",
        null="auto, the model's",
        accepted=(-1,),
        read=read_length,
    )
    max_num_batched_tokens: int | None = flag(
        "serve.max_num_batched_tokens", "tokens in a step, also as 8k or 8K", read=read_count
    )
    max_num_seqs: int | None = flag("serve.max_num_seqs", "sequences in a step")
    gpu_memory_utilization: float | None = flag(
        "serve.gpu_memory_utilization", "share of a GPU's memory; on a CPU --set serve.kv_cache_memory=BYTES"
    )
    scheduler_delay_factor: float | None = flag(
        "serve.scheduler_delay_factor", "wait before new prompts, as many times what the last ones' step took"
    )
    cudagraph_capture_sizes: tuple[str, ...] | None = flag(
        "serve.cudagraph_capture_sizes", "batch sizes of captured CUDA graphs"
    )
    level: int | None = flag(
        "level",
        "0 reference ops, 1 fused ops, 2 compiled pieces, 3 CUDA graphs",
        null="the highest that runs here",
        of=(ROCM,),
    )
    load_dummy: bool | None = flag("load_dummy", "random weights: only config.json is read", of=(ROCM,))
    enable_expert_parallel: bool | None = flag("serve.enable_expert_parallel", "divide experts among ranks", "-ep")
    enable_dp_attention: bool | None = flag(
        "serve.enable_dp_attention", "divide attention by request among devices", of=(ROCM,)
    )
    torch_profiler_dir: str | None = flag(
        "serve.torch_profiler_dir", "folder for profiler traces", null="$ATOM_TORCH_PROFILER_DIR", of=(ROCM,)
    )
    method: str | None = flag(
        "serve.method",
        f"of drafting tokens, which the model verifies: {', '.join(METHODS)}",
        null="none",
        of=(ROCM,),
    )
    draft_model: str | None = flag(
        "serve.draft_model", f"folder or hub id of what {' and '.join(WITH_MODEL)} draft with", of=(ROCM,)
    )
    num_speculative_tokens: int | None = flag(
        "serve.num_speculative_tokens", "tokens that a method drafts", null="3", of=(ROCM,)
    )
    spec_decode_acceptance_length: float | None = flag(
        "serve.acceptance_length",
        "tokens a step, drafts accepted by chance; with --load-dummy",
        null="as drafts are",
        of=(ROCM,),
    )
    speculative_config: str | None = flag(
        "serve.method",
        f"JSON of {', '.join(SPECULATIVE)}",
        "-sc",
        null="none",
        of=(VLLM,),
        read=json_text,
        write=read_speculative,
    )
    online_quant_config: str | None = flag(
        "quant.fmt",
        f"JSON of {', '.join(FIELDS)}: what weights are packed to while they load",
        null="auto, as the checkpoint",
        of=(ROCM,),
        read=json_text,
        write=write_online_quant,
    )
    settings: tuple[str, ...] | None = None  # overrides after those of the flags

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add every flag to the parser, under its name with - and with _, in groups by what it sets."""
        groups = {title: parser.add_argument_group(title) for title in TITLES}
        about = "any fields of the configuration, applied after the flags"
        add_flag(parser, "set", dest="settings", nargs="+", action="extend", metavar="KEY=VALUE", help=about)
        for name, kind, flag in cls.flags():
            options: dict[str, Any] = {"metavar": "N" if kind in (int, float) else "TEXT", "type": flag.read or kind}
            if get_origin(kind) is tuple:
                options |= {"nargs": "+", "action": "extend", "type": flag.read or str}
            elif kind is bool:
                options = {"action": "store_true", "default": None}
                off = {"dest": name, "action": "store_false", "default": None, "help": argparse.SUPPRESS}
                add_flag(parser, f"no-{name.replace('_', '-')}", **off)
            names = filter(None, (name.replace("_", "-"), flag.short))
            add_flag(groups[group_of(flag)], *names, help=describe(flag), **options)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        values = {each.name: getattr(args, each.name) for each in fields(cls)}
        opened: Any = {name: open_lists(value) if isinstance(value, list) else value for name, value in values.items()}
        return cls(**opened)

    @classmethod
    def flags(cls) -> Iterator[tuple[str, Any, Flag]]:
        """The flags: name, type, description."""
        kinds = types_of(cls)
        for each in fields(cls):
            if "flag" in each.metadata:
                (kind,) = (inner for inner in get_args(kinds[each.name]) if inner is not NoneType)
                yield each.name, kind, each.metadata["flag"]

    def overrides(self) -> list[str]:
        """The overrides of the flags that were given."""
        texts: list[str] = []
        for name, _, flag in self.flags():
            value = getattr(self, name)
            if value is None or value in flag.accepted:
                continue
            if not flag.key and flag.write is None:
                raise refuse_value(name, value, flag)
            texts += [override(flag.key, value)] if flag.write is None else flag.write(value)
        every = [*texts, *(self.settings or ())]
        if not any(text.startswith("serve.method=") for text in every):
            every = [text for text in every if text != "serve.num_speculative_tokens=1"]  # ROCm/ATOM's default
        return every

    def load(self) -> Config:
        """Load the configuration of these flags. Hydra is imported for it, which --help does not need."""
        config: Config = importlib.import_module("atom.config.load").load(self.overrides())
        return config

    def create_engine(self) -> atom.LLMEngine:
        """The engine, its progress shown on stderr. Raises the errors of `atom.errors`."""
        return atom.LLMEngine.from_config(self.load())


class Parser(argparse.ArgumentParser):
    """Raises ConfigError for wrong flags; no flag may be abbreviated."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, usage=f"{prog} [flag ...]", description=description, allow_abbrev=False)
        self.add_argument("-v", "--version", action="version", version=f"atom-run {atom.__version__}")

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Parse a command line, by default this process's."""
        texts: list[str] = []
        for text in sys.argv[1:] if argv is None else argv:
            if text.startswith("--help="):
                raise UnsupportedError(f"{text}: write --help, which shows all flags in groups")
            if refusal := refusal_of(text):
                raise UnsupportedError(f"{text.partition('=')[0]}: {refusal}")
            is_known = text in self._option_string_actions
            if re.fullmatch(r"-[^\W\d]", text) and not is_known:  # argparse would take -t for -tp
                self.error(f"unrecognized arguments: {text}")
            attached = re.fullmatch(r"(-[a-z]{2,3})(\d+)", text)  # -tp8, which argparse does not take
            texts += attached.groups() if attached else [text]
        return self.parse_args([*self.join_fields(texts)])

    def join_fields(self, texts: Sequence[str]) -> Iterator[str]:
        """Write fields that are given one by one, as --speculative-config.method ngram, as the JSON of their flag.

        As in vLLM they are added to each other, and to the flag's own JSON.
        """
        found: dict[str, dict[str, Any]] = {}
        fielded = {flag for text in texts if (match := FIELD.fullmatch(text)) and (flag := self.flag_of_json(match[1]))}
        waiting = iter(texts)
        for text in waiting:
            match = FIELD.fullmatch(text) or re.fullmatch(r"(--?[\w-]+)()(?:=(.*))?", text, re.DOTALL)
            flag = self.flag_of_json(match[1]) if match else None
            if match is None or flag is None or flag not in fielded:
                yield text
                continue
            value = next(waiting, None) if match[3] is None else match[3]
            if value is None or (match[3] is None and value.startswith("--")):
                self.error(f"argument {text}: expected one argument")
            values = found.setdefault(flag, {})
            if match[2]:
                set_field(values, match[2], value)
            else:
                values |= read_object(f"{flag}={value}", value)
            yield f"{flag}={json.dumps(values)}"

    def flag_of_json(self, name: str) -> str | None:
        """The first name of a flag that takes a JSON object, by any of its names; None for another word."""
        action = self._option_string_actions.get(name)
        if action is None or action.type is not json_text:
            return None
        return action.option_strings[0].replace("_", "-")

    def locate(self, text: str) -> str:
        """An error's text, with the file that has the flag it names ahead; here flags have no file."""
        return text

    def error(self, message: str) -> NoReturn:
        unknown = re.search(r"unrecognized arguments: --([\w-]+)", message)
        names = re.findall(r"--([\w-]+)", self.format_help())
        name = unknown[1].replace("_", "-") if unknown else ""
        swapped = [each for each in names if sorted(each) == sorted(name)]
        near = difflib.get_close_matches(name, names, 1, 0.85) or swapped
        hint = f" (did you mean --{near[0]}?)" if near else ""
        raise ConfigError(f"{message}{hint}; see {self.prog} --help")


def group_of(flag: Flag) -> str:
    """The title that --help has a flag under."""
    if not flag.key:
        return UNCHANGED
    return next(title for prefix, title in GROUPS.items() if flag.key.startswith(prefix))


def add_flag(parser: Group, name: str, *others: str, **options: Any) -> None:
    """Add a flag under its name with - and, which the help does not show, with _."""
    parser.add_argument(f"--{name}", *others, **options)
    if "-" in name:
        parser.add_argument(f"--{name.replace('-', '_')}", **{**options, "help": argparse.SUPPRESS})


def run_command(
    parser: Parser,
    work: Callable[[argparse.Namespace], int],
    argv: Sequence[str] | None,
    kind: type[EngineArgs] = EngineArgs,
) -> int:
    """Parse a command line and run its work; the exit code. Errors are reported as by `atom-run`.

    kind: has the flags that errors name. A key that --set gave keeps its name.
    """

    def parse_and_work() -> int:
        args = parser.parse(argv)
        typed = {text.partition("=")[0] for text in args.settings or ()}
        known = sorted([*kind.flags()][::-1], key=lambda each: getattr(args, each[0]) is not None)
        # of two with a key, the one given, else the first
        flags = {flag.key: (name, kind) for name, kind, flag in known if flag.key not in typed and flag.write is None}
        try:
            return work(args)
        except AtomError as error:
            error.args = (parser.locate(name_flags(str(error), flags)),)
            raise

    return report(parse_and_work)


def name_flags(text: str, flags: Mapping[str, tuple[str, Any]]) -> str:
    """Replace keys of the configuration by flags in an error's text.

    flags: field of EngineArgs and type, by key. A key of one word may be a word of the sentence: only `level=3` is one.
    """

    def spell(match: re.Match[str]) -> str:
        key, value = match[1], match[2] or ""
        name, kind = flags[key]
        if value in ("=null", "=false") or not (value or "." in key):  # no flag has this meaning
            return match[0]
        return f"--{name.replace('_', '-')}{'' if kind is bool else value}"

    keys = "|".join(map(re.escape, flags))
    return re.sub(rf"(?<![\w./-])({keys})(?!\w|\.\w)(=\w*)?", spell, text)


def refuse_value(name: str, value: Any, flag: Flag) -> UnsupportedError:
    """The error of a value that a flag without a key does not take."""
    name = name.replace("_", "-")
    if isinstance(value, bool):
        return UnsupportedError(f"--{'' if value else 'no-'}{name}: {flag.about}; leave it out")
    taken = ", ".join(map(spelled, flag.accepted))
    return UnsupportedError(f"--{name}={spelled(value)}: {flag.about} (supported: {taken})")


def describe(flag: Flag) -> str:
    """Describe a flag, and the default that is in effect."""
    if not flag.key:
        taken = [spelled(value) for value in flag.accepted if not isinstance(value, bool)]
        return f"{flag.about} ({', '.join(taken)})" if taken else flag.about
    if flag.write is not None:
        return f"{flag.about} (default: {flag.null})"
    if flag.key in keys(Config):
        *_, config_field = fields_along(flag.key)
        default = config_field.default if config_field.default_factory is MISSING else config_field.default_factory()
        is_only = len(config_field.metadata.get("built", ())) == 1
    else:
        (default,), is_only = flag.accepted, True
    if isinstance(default, bool):
        return f"{flag.about} (not supported)" if is_only else flag.about
    words = flag.null if default in (None, [], "") else spelled(default)
    return f"{flag.about} (default: {words}{'; others are not supported' if is_only else ''})"


def open_lists(texts: Sequence[str]) -> tuple[str, ...]:
    """The values of a flag that takes several; each text may be a JSON list: `1 2` or `[1,2]`."""
    values: list[str] = []
    for text in texts:
        try:
            values += map(str, parse_value("a list", text)) if text.startswith("[") else [text]
        except ValueError as error:
            raise ConfigError(f"'{text}' is no JSON list ({error})") from None
    return tuple(values)
