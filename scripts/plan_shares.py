"""Derive the shares of limits in conf/gpu from docs/results.

`job=plan` estimates by them. A file of conf/gpu ends in those of the machine that it names:

    path = CONF / "h200.yaml"
    path.write_text(replace_shares(path.read_text()))
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

import yaml

from scripts.bench_results import RESULTS, ROOT, Result, read
from scripts.bench_rows import ROWS, Row

CONF, CONFIGS = ROOT / "conf" / "gpu", ROOT / "tests" / "configs"
BEGIN = re.compile(r"^# of rows of docs/results/gpu/(\w+\.json)", re.MULTILINE)
ABOUT = """\
# of rows of docs/results/gpu/{} with one GPU: the share of the limit, how long a layer would take at the limit,
# a step of decodes with its part of the prompts, bits of a weight, and whether the model is a mixture
# and has recurrent layers
"""
PROMPTS = "prompt_shares:  # of prompts without decodes; a layer takes a prompt\n"
Kind = tuple[int, int, int]  # bits of most weights, and whether it is a mixture and has recurrent layers


def replace_shares(text: str, kinds: Mapping[str, Kind] | None = None) -> str:
    """A file of conf/gpu with the shares of the results that it names; as it is if it names none.

    kinds: of rows, which need not be found out; None: those of the text
    """
    if (begin := BEGIN.search(text)) is None:
        return text
    if kinds is None:
        old = yaml.safe_load(text)
        rows = old["shares"] | old["prompt_shares"]
        kinds = {name: (row["bits"], row["mixture"], row["recurrent"]) for name, row in rows.items()}
    measured = read(RESULTS / "gpu" / begin[1])["rows"]
    own = {name: row for name, row in ROWS.items() if "share_of_limit" in measured.get(name, {}) and is_plain(row)}
    found = {row.engine: kinds[name] for name, row in own.items() if name in kinds}
    found |= {row.engine: find_kind(row) for row in own.values() if row.engine not in found}
    lines: dict[str, list[str]] = {"output": [], "input": []}
    for name, row in sorted(own.items(), key=lambda item: found[item[1].engine][0]):
        lines[row.counted].append(describe_row(name, row, measured[name], found[row.engine]))
    shares, prompts = ("".join(each) for each in lines.values())
    return f"{text[: begin.start()]}{ABOUT.format(begin[1])}shares:\n{shares}{PROMPTS}{prompts}"


def is_plain(row: Row) -> bool:
    """Whether a row is of one GPU, of requests of equal lengths, and without drafts, images or `quant.act`."""
    others = any(each.startswith(("serve.", "quant.act=")) for each in row.setup)
    return row.num_gpus == 1 and row.input_len.isdecimal() and not others


def describe_row(name: str, row: Row, measured: Result, kind: Kind) -> str:
    """A line of YAML. In a step each request gets a token; of prompts only, a layer takes one of them."""
    share = measured["share_of_limit"]
    tokens = int(row.input_len) if row.counted == "input" else row.num_prompts
    seconds = tokens / (measured["value"] / share) / num_layers(row)
    kinds = ", ".join(f"{name}: {value}" for name, value in zip(("bits", "mixture", "recurrent"), kind, strict=True))
    values = f"{kinds}, layer_seconds: {seconds * 1e6:.1f}e-6, share: {share:.3f}"
    return f"  {name}: {{{values}}}\n"


def num_layers(row: Row) -> int:
    cut = [int(each.partition("=")[2]) for each in row.setup if each.startswith("model.layers=")]
    return int(cut[0] if cut else json.loads((CONFIGS / f"{row.model}.json").read_text())["num_hidden_layers"])


def find_kind(row: Row) -> Kind:
    """Compile the model as a plan does. Takes seconds."""
    from atom.compiler.artifact import semantic_graph
    from atom.config.load import load
    from atom.config.schema import ParallelConfig
    from atom.jobs.plan.candidates import Format, compile_candidate
    from atom.kernels import Target

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text((CONFIGS / f"{row.model}.json").read_text())
        config = load([f"checkpoint={folder}", "job=explain", "job.gpu=h200", "device=cuda", *row.setup])
        target = Target("cuda", frozenset(yaml.safe_load((CONF / "h200.yaml").read_text())["features"]))
        fmt = Format("", config.serve.kv_cache_dtype, config, [], semantic_graph(config))
        candidate = compile_candidate(fmt, ParallelConfig(), target)
    return candidate.bits, int(candidate.is_mixture), int(candidate.is_recurrent)
