"""docs/configuration.md has the fields of the schema; `scripts/test --update-golden` writes them anew."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from generated import DOCS, check_block

from atom.config import Config
from atom.config.help import FieldHelp, describe_block
from atom.config.schema_keys import blocks, jobs_of, keys
from atom.sampling_params import describe_limits

BAR = r"\|"  # within a cell
CONF = Path(__file__).parents[2] / "conf"
SET_BY_LOAD = {"job.kind", "hf", "generation", "overrides", "config_dirs", "draft", "other_models"}


def reference() -> str:
    """A table for each block, those of model files last; a class that two blocks share has one table."""
    parts: list[str] = []
    shown: dict[Any, str] = {}
    for at, block in sorted(blocks(Config), key=lambda each: each[0].startswith("model.")):
        name = at.rstrip(".")
        parts.append(f"## `{name}`\n" if name else "## Top level\n")
        if first := shown.get(block):
            parts.append(f"The fields of [`{first}`](#{first.replace('.', '')}).\n")
            continue
        shown[block] = name
        rows = [row(each) for each in describe_block(at, block)]
        parts.append("\n".join(["| field | type | default | jobs | meaning |", "|---|---|---|---|---|", *rows]) + "\n")
    return "\n" + "\n".join(parts) + "\n"


def row(each: FieldHelp) -> str:
    """The row of a field; its type is its choices, or in YAML's words, with its limits."""
    kind = each.choices or str(each.field.type).replace("None", "null").replace("Any", "any")
    limits = f" {describe_limits(each.field.metadata)}" if "low" in each.field.metadata else ""
    default = f"`{each.default}`" if each.default else ""
    jobs = jobs_of(each.key)
    cells = (
        f"`{each.key}`",
        f"`{kind}`{limits}".rstrip(),
        default,
        ", ".join(jobs.names) if jobs else "",
        each.meaning,
    )
    return f"| {' | '.join(cell.replace('|', BAR) for cell in cells)} |"


def test_the_reference_has_the_fields_of_the_schema(request: pytest.FixtureRequest):
    check_block("configuration.md", "fields", reference(), request)


def test_the_reference_lists_every_field_that_users_can_set():
    page = (DOCS / "configuration.md").read_text().partition("<!-- fields")[2]
    listed = set(re.findall(r"^\| `([\w.]+)` \|", page, re.MULTILINE))
    blocks_again = ("model.attention.window_rope.", "model.blocks.NAME.attention.", "model.blocks.NAME.mlp.")
    same = {key for key in keys(Config) if key.startswith(blocks_again)}
    assert listed == set(keys(Config)) - SET_BY_LOAD - same


def test_every_field_has_a_meaning():
    described = [each for at, block in blocks(Config) for each in describe_block(at, block)]
    assert [each.key for each in described if not each.meaning] == []


def test_the_reference_names_every_environment_variable_that_conf_reads():
    read = {name for path in CONF.rglob("*.yaml") for name in re.findall(r"oc\.env:(\w+)", path.read_text())}
    page = (DOCS / "configuration.md").read_text()
    assert read and read <= set(re.findall("[A-Z_]+", page))
