"""What atom calls of AITER, held against the recorded signatures, and these against AITER's sources where they are."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import torch
from kernels.aiter_doubles import CONTRACT, DOUBLES, library, read_contract, write_sources

from atom.errors import UnsupportedError
from atom.kernels.aiter.functions import (
    FUNCTIONS,
    Aiter,
    Place,
    Refused,
    find_place,
    find_version,
    read_signature,
    refuse_signature,
)
from atom.kernels.aiter.shuffle import shuffle_tiles

RECORDED = read_contract()["functions"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sources(tmp_path_factory.mktemp("aiter"), RECORDED)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_recorded_version_takes_what_atom_passes(name: str, recorded: Path):
    place = find_place(FUNCTIONS[name], recorded)
    assert isinstance(place, Place), place
    assert place in RECORDED and name in DOUBLES


def test_newer_sources_have_other_places_and_take_the_same(tmp_path: Path):
    """Six functions, as files of AITER's repository at later commits than the wheel have them."""
    newer = json.loads(CONTRACT.with_name("newer.json").read_text())["functions"]
    root = write_sources(tmp_path, newer)
    found = {name: find_place(function, root) for name, function in FUNCTIONS.items()}
    assert {*newer} == {place for place in found.values() if isinstance(place, Place)}


def test_the_contract_names_no_function_that_atom_does_not_call():
    assert {*RECORDED} <= {place for function in FUNCTIONS.values() for place in function.places}


def test_the_sources_have_the_recorded_signatures(sources: Path, request: pytest.FixtureRequest):
    found = {place: read_signature(sources, place) for each in FUNCTIONS.values() for place in each.places}
    there = {place: signature for place, signature in found.items() if signature is not None}
    if request.config.getoption("--update-golden"):
        contract = {"source": f"amd-aiter {version_of(sources)}, its wheel", "functions": there}
        CONTRACT.write_text(json.dumps(contract, indent=2) + "\n")
    for name, function in FUNCTIONS.items():
        assert isinstance(find_place(function, sources), Place), f"{name}: {find_place(function, sources)}"
    assert there == read_contract()["functions"]


def version_of(sources: Path) -> str:
    return str(runpy.run_path(str(sources / "aiter" / "_version.py"))["__version__"])


def test_aiters_own_shuffle_gives_the_same_bytes(sources: Path):
    shuffle_weight = runpy.run_path(str(sources / "aiter" / "ops" / "shuffle.py"))["shuffle_weight"]
    values = torch.randint(0, 256, (48, 96), dtype=torch.uint8)
    assert torch.equal(shuffle_weight(values.clone(), layout=(16, 16)), shuffle_tiles(values))


@pytest.mark.parametrize(
    ("signature", "reason"),
    [
        ("input, weight, epsilon, more=0", None),
        ("input, epsilon, weight", "it takes (input, epsilon, weight), not (input, weight, epsilon)"),
        ("out, input, weight, epsilon", "it takes (out, input, weight, epsilon), not (input, weight, epsilon)"),
        ("input, weight", "it takes (input, weight), not (input, weight, epsilon)"),
        ("input, weight, epsilon, mode", "it wants mode too"),
        ("input, weight, epsilon, *, mode", "it wants mode too"),
        ("input, weight, epsilon, /, *, mode=1", None),
    ],
)
def test_a_signature_that_does_not_fit_is_refused(signature: str, reason: str | None):
    assert refuse_signature(FUNCTIONS["rms_norm"], signature) == reason


def test_a_keyword_that_is_not_there_is_refused():
    assert refuse_signature(FUNCTIONS["quantize_tokens"], "x, scale=None") == "it has no parameter quant_dtype"


def test_the_newer_place_is_taken_where_both_are(tmp_path: Path):
    newer, older = FUNCTIONS["attention"].places
    write_sources(tmp_path, {newer: RECORDED[older], older: RECORDED[older]})
    assert find_place(FUNCTIONS["attention"], tmp_path) == newer


def test_a_place_with_another_signature_is_passed_over(tmp_path: Path):
    newer, older = FUNCTIONS["attention"].places
    write_sources(tmp_path, {newer: "q, kv_cache, out", older: RECORDED[older]})
    assert find_place(FUNCTIONS["attention"], tmp_path) == older
    write_sources(tmp_path / "none", {newer: "q, kv_cache, out"})
    answer = find_place(FUNCTIONS["attention"], tmp_path / "none")
    assert isinstance(answer, Refused)
    assert f"{newer}: it takes (q, kv_cache, out)" in answer and f"{older}: there is none" in answer


def test_a_call_of_what_a_version_lacks_is_an_error(tmp_path: Path):
    with pytest.raises(UnsupportedError, match=r"silu_and_mul: .*there is none"):
        Aiter(tmp_path)["silu_and_mul"]


def test_a_call_without_the_package_names_the_extra():
    if find_version() is not None:
        pytest.skip("amd-aiter is installed")
    with pytest.raises(UnsupportedError, match=r"amd-aiter is not installed; .*atom-run\[amd\]"):
        Aiter()["silu_and_mul"]


def test_a_double_takes_no_other_order(recorded: Path):
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'epsilon'"):
        library(recorded, RECORDED)["rms_norm"](torch.ones(1, 8), torch.ones(8))
