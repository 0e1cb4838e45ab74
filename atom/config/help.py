"""Write the text of `atom-run --help`; docs/configuration.md has its fields too."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from typing import Any, NamedTuple

from atom.config.folders import CONF
from atom.config.schema import SET_BY_LOAD, Config
from atom.config.schema_keys import block_of, blocks, jobs_of, types_of
from atom.config.spelling import spelled

OTHERS = ("model.", "passes.", "advanced.")  # blocks that the page leaves out
HELP = """\
atom-run: from a Hugging Face checkpoint to tokens, with every step in between to read and change.

usage: atom-run [group=choice] [field=value] ...   one run
       atom-run -m field=a,b ...                   a run for each choice
       atom-run --cfg job ...                      shows the configuration (--resolve: with the checkpoint's values)
       atom-run --version | --hydra-help | --info | --shell-completion install=bash

Groups
{groups}
  job.gpu is one of {gpus}, or a YAML file

Fields
{fields}
  Other fields, which hardly anyone sets: atom-run --cfg job -p advanced, and -p passes; a model file's: -p model

Examples
  atom-run prompts="What is 2+2?" job.chat=true
  atom-run job=chat checkpoint=Qwen/Qwen3-0.6B
  atom-run checkpoint=Qwen/Qwen3-0.6B prompts='["Once upon a time", "The capital of France is"]' sampling.temperature=0
  atom-run checkpoint=/models/llama prompts=@questions.txt job.output=json sampling.max_tokens=200
  atom-run prompts=@batch.jsonl job.output_file=results.jsonl checkpoint=/models/llama
  atom-run job=explain job.stage=fuse_qkv checkpoint=/models/llama
  atom-run -m job=bench level=1,2 job.num_prompts=1,16 job.input_len=100-1024"""

# a field of a dataclass, in one line or over several, and the comment at its end
FIELD = r"^    (\w+): (?:[^\n]|\n        |\n    \))*?  # (?!type: )(.*)$"


class FieldHelp(NamedTuple):
    """A field that users can set: its key, the schema's field, and in words its default, choices and meaning."""

    key: str
    field: Field[Any]
    default: str
    choices: str  # separated by |; empty: any value of its type
    meaning: str


def help_text() -> str:
    """The groups, the fields, and examples."""
    files = sorted(CONF.glob("*/*.yaml"))
    groups = {file.parent.name: [each.stem for each in files if each.parent == file.parent] for file in files}
    gpus = groups.pop("gpu")  # not a Hydra group: job.gpu names one
    groups.pop("tool_calls")  # serve.http.tool_calls names one
    lines = [f"  {group}: {', '.join(names)}" for group, names in groups.items()]
    shown = [textwrap.fill(line, 120, subsequent_indent="    ") for line in lines]
    return HELP.format(groups="\n".join(shown), gpus=", ".join(gpus), fields=describe_fields())


def describe_fields() -> str:
    """The fields that users set by hand, with default, jobs, choices and comment."""
    lines: list[str] = []
    for at, block in blocks(Config):
        if at.startswith(OTHERS):
            continue
        if whole := jobs_of(at.rstrip(".")):
            lines.append(f"  for job={', '.join(whole.names)}:")
        for each in describe_block(at, block):
            jobs = ", ".join(each.field.metadata["jobs"].names) if "jobs" in each.field.metadata else ""
            words = ": ".join(filter(None, (jobs, "; ".join(filter(None, (each.choices, each.meaning))))))
            lines.append(f"  {f'{each.key}={each.default}':35} {words}")
        lines.append("")
    return "\n".join(lines)


def describe_block(at: str, block: Any) -> Iterator[FieldHelp]:
    """The fields of a block that users can set; `at` is the beginning of their keys."""
    source = "".join(inspect.getsource(each) for each in reversed(block.__mro__[:-1]))
    comments = dict(re.findall(FIELD, source, re.MULTILINE))
    types = types_of(block)
    for each in fields(block):
        key = f"{at}{each.name}"
        if key in SET_BY_LOAD or block_of(types[each.name]) is not None:
            continue
        default = each.default if each.default_factory is MISSING else each.default_factory()
        built = each.metadata.get("built", ())
        choices = " | ".join(map(spelled, built)) if len(built) > 1 else ""
        yield FieldHelp(key, each, spelled(default), choices, comments.get(each.name, ""))
