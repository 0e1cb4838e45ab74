"""The objects of draft methods, and that nothing else asks for a method by name."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path

import pytest

from atom.config.draft_methods import METHODS, WITH_MODEL, find_name
from atom.config.limits import SuffixLimits
from atom.config.schema import ServeConfig
from atom.frontend.drafts import WRITERS

ATOM = Path(__file__).parents[2] / "atom"


def named(path: Path) -> set[str]:
    """The methods that a module has a string of."""
    text, names = path.read_text(), {"ngram", "mtp", "eagle3"}
    if not any(name in text for name in names):  # parsing all modules takes 3 s
        return set()
    return names & {node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)}


def test_only_the_object_of_a_method_and_its_programs_name_it():
    found = {str(path.relative_to(ATOM)): names for path in ATOM.rglob("*.py") if (names := named(path))}
    assert found == {
        "config/draft_methods.py": {"ngram", "mtp", "eagle3"},
        "frontend/drafts.py": {"mtp", "eagle3"},
        # the block of a model file that describes a draft
        "config/model_files.py": {"eagle3"},
        "jobs/port/fields.py": {"eagle3"},
        "jobs/port/known.py": {"eagle3"},
    }


def test_methods_with_programs_have_a_writer():
    assert [*METHODS] == ["ngram", "suffix", "mtp", "eagle3", "draft"]
    programs = {name for name, method in METHODS.items() if method.has_programs}
    assert set(WRITERS) == programs == {*METHODS} - {"ngram", "suffix"}


def test_the_methods_that_read_a_draft_model():
    assert WITH_MODEL == ["eagle3", "draft"]
    assert all(METHODS[name].check_config for name in WITH_MODEL)


def test_options_of_one_method_are_fields_that_are_null_by_default():
    options = {name for method in METHODS.values() for name in method.options}
    suffix = {"max_tree_depth", "max_cached_requests", "max_spec_factor", "min_token_prob"}
    assert options == {"prompt_lookup_min", "prompt_lookup_max"} | {f"suffix_decoding_{name}" for name in suffix}
    assert {*SuffixLimits._fields} == suffix
    assert {each.name: each.default for each in fields(ServeConfig) if each.name in options} == dict.fromkeys(options)


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("draft_model", "draft"),
        ("deepseek_mtp", "mtp"),
        ("mtp", "mtp"),
        ("ngram", "ngram"),
        ("suffix", "suffix"),
        ("medusa", "medusa"),
    ],
)
def test_vllm_names_of_methods(name: str, ours: str):
    assert find_name(name) == ours
