"""What atom calls of AITER, held against the recorded signatures, and these against AITER's sources where they are."""

from __future__ import annotations

import ast
import functools
import json
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import pytest
import torch
import torch.nn.functional as F
from kernels.aiter_doubles import (
    CONTRACT,
    DOUBLES,
    NEWER,
    QuantType,
    library,
    quantize,
    read_contract,
    write_sources,
)

from atom.errors import UnsupportedError
from atom.kernels.aiter.functions import (
    FUNCTIONS,
    QUANT_TYPE,
    QUANT_TYPES,
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
# what later sources have, and the wheel has not
LATER = {"latent_decode", "latent_prefill", "expert_matmuls", "expert_tiles", "routing_data"}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sources(tmp_path_factory.mktemp("aiter"), RECORDED)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_recorded_version_takes_what_atom_passes(name: str, recorded: Path):
    place = find_place(FUNCTIONS[name], recorded)
    assert isinstance(place, Refused if name in LATER else Place), place
    assert name in DOUBLES and (name in LATER or place in RECORDED)


def test_newer_sources_have_other_places_and_take_the_same(tmp_path: Path):
    """Fourteen functions and dataclasses, as files of AITER's repository at later commits than the wheel have them."""
    newer = json.loads(NEWER.read_text())["functions"]
    root = write_sources(tmp_path, newer)
    found = {name: find_place(function, root) for name, function in FUNCTIONS.items()}
    assert {*newer} == {place for place in found.values() if isinstance(place, Place)}
    assert all(isinstance(found[name], Place) for name in LATER)


def test_the_contract_names_no_function_that_atom_does_not_call():
    assert {*RECORDED} <= {place for function in FUNCTIONS.values() for place in function.places}


def test_the_sources_have_the_recorded_signatures(sources: Path, request: pytest.FixtureRequest):
    found = {place: read_signature(sources, place) for each in FUNCTIONS.values() for place in each.places}
    there = {place: signature for place, signature in found.items() if signature is not None}
    if request.config.getoption("--update-golden"):
        contract = {
            "source": f"amd-aiter {version_of(sources)}, its wheel",
            "quant_types": read_quant_types(sources),
            "functions": there,
        }
        CONTRACT.write_text(json.dumps(contract, indent=2) + "\n")
    answers = {name: find_place(function, sources) for name, function in FUNCTIONS.items()}
    assert {name for name, answer in answers.items() if isinstance(answer, Refused)} <= LATER, answers
    recorded = read_contract()
    assert there == recorded["functions"] and read_quant_types(sources) in (None, recorded["quant_types"])
    module = ast.parse((sources / "aiter" / "ops" / "enum.py").read_text())
    assert QUANT_TYPE.partition(":")[2] in [
        name.id for each in module.body if isinstance(each, ast.Assign) for name in each.targets
        if isinstance(name, ast.Name)
    ]  # fmt: skip


def test_experts_are_multiplied_as_the_recorded_version_names_it():
    recorded = read_contract()["quant_types"]
    assert {*QUANT_TYPES} <= {*recorded} == {*QuantType.__members__}


def read_quant_types(sources: Path) -> list[str] | None:
    """The members of QuantType's C++ enum; None without C++ sources next to the package."""
    headers = [sources / each / "include" / "aiter_enum.h" for each in ("aiter_meta/csrc", "csrc")]
    for header in headers:
        if header.is_file():
            body = re.search(r"enum class QuantType[^{]*{([^}]*)}", header.read_text())
            assert body is not None
            return re.findall(r"^\s*(\w+)", body[1], re.MULTILINE)
    return None


def version_of(sources: Path) -> str:
    return str(runpy.run_path(str(sources / "aiter" / "_version.py"))["__version__"])


@pytest.mark.parametrize("shape", [(48, 96), (3, 32, 64)], ids=["matrix", "experts"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16], ids=["8_bits", "16_bits"])
def test_aiters_own_shuffle_gives_the_same_bytes(sources: Path, dtype: torch.dtype, shape: tuple[int, ...]):
    shuffle_weight = runpy.run_path(str(sources / "aiter" / "ops" / "shuffle.py"))["shuffle_weight"]
    values = torch.randint(0, 256, shape, dtype=dtype)
    assert torch.equal(shuffle_weight(values.clone(), layout=(16, 16)), shuffle_tiles(values))


def test_the_doubles_choose_as_aiters_own_references(sources: Path):
    logits, correction = torch.randn(20, 32), torch.randn(32) / 4
    references = functions_of(sources / "aiter/ops/topk.py", "biased_grouped_topk_torch", "grouped_topk_torch")
    for name, wanted, own in (
        ("topk_with_correction", references["biased_grouped_topk_torch"](logits, correction, 4, True, 8, 3),
         (8, 3, True)),
        ("topk_of_groups", references["grouped_topk_torch"](logits, 4, False, 4, 2, "softmax"), (4, 2, False)),
        ("topk_of_groups", references["grouped_topk_torch"](logits, 4, True, 4, 2, "sigmoid"), (4, 2, True, False)),
    ):  # fmt: skip
        weights, ids = torch.empty(20, 4), torch.empty(20, 4, dtype=torch.int32)
        given = (logits, correction) if name == "topk_with_correction" else (logits,)
        DOUBLES[name](*given, weights, ids, *own)
        by_expert = torch.zeros(20, 32)
        assert torch.equal(by_expert.scatter(1, ids.long(), 1.0), by_expert.scatter(1, wanted[1].long(), 1.0))
        torch.testing.assert_close(
            by_expert.scatter(1, ids.long(), weights), by_expert.scatter(1, wanted[1].long(), wanted[0])
        )


@pytest.mark.parametrize("quant", QUANT_TYPES)
def test_the_double_of_experts_gives_what_aiters_own_reference_gives(sources: Path, quant: str):
    references = functions_of(
        sources / "aiter/fused_moe.py", "get_inter_dim", "torch_moe_stage1", "torch_moe_stage2",
        aiter=SimpleNamespace(get_torch_act=lambda _: F.silu), ActivationType=SimpleNamespace(Silu=0),
        QuantType=QuantType, quant_remap={}, functools=functools,
    )  # fmt: skip
    x, weights, ids = torch.randn(5, 128), torch.rand(5, 2), torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1], [1, 2]])
    w1, w2 = torch.randn(3, 256, 128).bfloat16(), torch.randn(3, 128, 128).bfloat16()
    scales: list[torch.Tensor | None] = [None, None]
    if quant != "No":
        w1, w2 = w1.to(torch.float8_e4m3fn), w2.to(torch.float8_e4m3fn)
        scales = [torch.rand(3, each.shape[1], 1) if quant == "per_Token" else
                  torch.rand(3, each.shape[1] // 128, 1) for each in (w1, w2)]  # fmt: skip
    rows = x.bfloat16()
    stage1, stage2 = references["torch_moe_stage1"], references["torch_moe_stage2"]
    given = (rows, None) if quant == "No" else quantize(rows, torch.float8_e4m3fn)
    kind = {"quant_type": QuantType[quant]}
    m = stage1(given[0], w1, w2, weights, ids, torch.bfloat16, activation=0, a1_scale=given[1], w1_scale=scales[0],
               **kind)  # fmt: skip
    given = (m, None) if quant == "No" else quantize(m, torch.float8_e4m3fn)
    wanted = stage2(given[0], w1, w2, weights, ids, torch.bfloat16, a2_scale=given[1], w2_scale=scales[1], **kind)
    tiles = [shuffle_tiles(each) for each in (w1, w2)]
    for each in tiles:
        each.is_shuffled = True  # type: ignore[attr-defined]
    found = DOUBLES["experts"](
        rows, *tiles, weights, ids.int(), quant_type=QuantType[quant], w1_scale=scales[0], w2_scale=scales[1]
    )
    torch.testing.assert_close(found.float(), wanted.float(), rtol=0.02, atol=0.02 * float(wanted.abs().max()))


def functions_of(path: Path, *names: str, **scope: Any) -> dict[str, Any]:
    """Functions of a source file that cannot be imported without ROCm. scope: what they need of other modules"""
    found = [
        each for each in ast.parse(path.read_text()).body if isinstance(each, ast.FunctionDef) and each.name in names
    ]
    assert {each.name for each in found} == {*names}
    dtypes = SimpleNamespace(fp32=torch.float32, i32=torch.int32, fp16=torch.float16)
    scope = {"torch": torch, "dtypes": dtypes, "Optional": Optional, **scope}
    exec(compile(ast.Module(found, []), str(path), "exec"), scope)
    return scope


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


def test_fields_of_a_dataclass_are_parameters(tmp_path: Path):
    source = "class Data:\n    size: int = field()\n    rows: Tensor\n    more: Tensor = None\n    def f(self): ...\n"
    (tmp_path / "module.py").write_text(source)
    assert read_signature(tmp_path, "module:Data") == "size, rows, more=None"


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
