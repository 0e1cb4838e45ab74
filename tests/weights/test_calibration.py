"""What linears multiply, against hooks on transformers' models; rounding by it, against a search of all scales and a
plain GPTQ."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.nn.functional as F
from test_kv_scales import add_tokenizer
from torch import Tensor, nn

from atom import LLMEngine, SamplingParams, weights
from atom.assemble import calibration as planning
from atom.assemble import load_weights
from atom.assemble.calibration import plain_graph
from atom.cache import Cache
from atom.checkpoint import SILENT, open_checkpoint
from atom.compiler import compile_graph, semantic_graph
from atom.config.load import load
from atom.errors import ArtifactError, CapacityError, ConfigError
from atom.graph import PackedWeight, Quantize, Recipe, Type
from atom.graph.recipe_ranges import narrow
from atom.graph.recipes import leaves
from atom.jobs.explain import job as explain
from atom.weights import calibration
from atom.weights.calibration import PRIOR_ROWS, Calibration, measure_moments, units_of
from atom.weights.evaluate import tensors_in
from atom.weights.gptq import MIN_SHARE, plan_order
from atom.weights.quantize import quantize

pytestmark = pytest.mark.early

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def make_weight(columns: int) -> tuple[Tensor, Tensor]:
    """A weight of 12 rows, and the importance of its columns, of which few have most."""
    random = torch.Generator().manual_seed(columns)
    importance = torch.randn(1, columns, generator=random).mul(2).exp()
    return torch.randn(12, columns, generator=random), importance


def weighted_error(fmt: str, weight: Tensor, importance: Tensor | None, by: Tensor) -> Tensor:
    """Of each row; `by` has the weights of columns."""
    rounded = PackedWeight(Type("fp32", tuple(weight.shape), fmt), quantize(fmt, weight, importance)).unpack()
    return ((rounded - weight) ** 2 * by).sum(1)


def min_error(row: Tensor, by: Tensor) -> float:
    """The least that any scale gives 4-bit integers, of 4000 up to that of a range twice as large as the numbers."""
    top = float(row.abs().max())
    scales = torch.linspace(-2 * top / 8, 2 * top / 8, 4001)
    scales = scales[scales != 0].unsqueeze(1)
    rounded = (row / scales).round().clamp(-8, 7) * scales
    return float(((rounded - row) ** 2 * by).sum(1).min())


@pytest.mark.parametrize("columns", [32, 128])
def test_integers_are_nearly_as_near_as_any_scale_brings_them(columns: int):
    weight, importance = make_weight(columns)
    by = importance + MIN_SHARE * importance.mean()
    fmt = f"int4[1, {columns}]"
    ours, plain = weighted_error(fmt, weight, importance, by), weighted_error(fmt, weight, None, by)
    best = torch.tensor([min_error(row, by) for row in weight])
    assert (ours >= best * 0.98).all(), "what is less than the least is no error"
    assert ours.sum() < 1.15 * best.sum()
    assert ours.sum() < 0.75 * plain.sum()


def test_four_bit_floats_take_the_best_of_three_exponents():
    weight, importance = make_weight(32)
    by = importance[0] + MIN_SHARE * importance.mean()
    parts = quantize("mxfp4", weight, importance)
    values = torch.tensor([*FP4, *(-each for each in FP4)])
    for row, exponent in zip(weight, parts["scales"][:, 0].int() - 127, strict=True):
        first = int(torch.floor(torch.log2(row.abs().max()))) - 2
        errors = {}
        for tried in (first - 1, first, first + 1):
            nearest = (row[:, None] - values * 2.0**tried).abs().argmin(1)
            errors[tried] = float(((values[nearest] * 2.0**tried - row) ** 2 * by).sum())
        assert errors[int(exponent)] == pytest.approx(min(errors.values()), rel=1e-5)


@pytest.mark.parametrize("fmt", ["int4[1, 16]", "mxfp4"])
def test_each_expert_is_rounded_by_its_own_columns(fmt: str):
    random = torch.Generator().manual_seed(5)
    weight, importance = torch.randn(3, 8, 64, generator=random), torch.rand(3, 1, 64, generator=random) ** 4
    stacked = quantize(fmt, weight, importance)
    for expert in range(3):
        single = quantize(fmt, weight[expert], importance[expert])
        assert all(torch.equal(stacked[name][expert], part) for name, part in single.items())
    assert not torch.equal(quantize(fmt, weight)["values"], stacked["values"])


@pytest.mark.parametrize("fmt", ["int4[1, 16]", "mxfp4"])
@pytest.mark.parametrize("importance", [torch.zeros(1, 64), torch.full((1, 64), float("nan"))])
def test_no_importance_gives_numbers_all_the_same(fmt: str, importance: Tensor):
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(6))
    rounded = PackedWeight(Type("fp32", (8, 64), fmt), quantize(fmt, weight, importance)).unpack()
    assert float((rounded - weight).norm() / weight.norm()) < 0.2


def gptq(weight: Tensor, scales: Tensor, moment: Tensor, kept: float) -> Tensor:
    """Frantar et al.'s algorithm 1 without blocks, of 4-bit integers in float64: the column that matters most first, and
    the inverse of what is left anew at each."""
    weight, size = weight.double().clone(), weight.shape[1] // scales.shape[1]
    diagonal = moment.diagonal() + MIN_SHARE * moment.diagonal().mean()
    hessian = (kept * moment).double()
    hessian.diagonal().copy_(diagonal)
    order = diagonal.argsort(descending=True).tolist()
    for place, column in enumerate(order):
        rest = order[place:]
        inverse = torch.linalg.inv(hessian[rest][:, rest])
        scale = scales[:, column // size].double()
        rounded = (weight[:, column] / scale).round().clamp(-8, 7) * scale
        error = weight[:, column] - rounded
        weight[:, rest] -= error[:, None] * inverse[0] / inverse[0, 0]
        weight[:, column] = rounded
    return weight


@pytest.mark.parametrize(("num_tokens", "kept"), [(4096, 0.65), (64, 0.4)])
def test_errors_are_made_up_for_as_gptq_does(num_tokens: int, kept: float):
    random = torch.Generator().manual_seed(7)
    weight = torch.randn(16, 96, generator=random)
    x = torch.randn(200, 24, generator=random) @ torch.randn(24, 96, generator=random)
    x += torch.randn(200, 96, generator=random) / 4
    moment = x.T @ x / len(x)
    parts = quantize("int4[1, 32]", weight, plan_order(moment, num_tokens))
    rounded = PackedWeight(Type("fp32", (16, 96), "int4[1, 32]"), parts).unpack()
    expected = gptq(weight, parts["scales"].float(), moment, kept)
    assert ((rounded - expected).abs() < 1e-4).float().mean() > 0.97, "a number between two may fall to the other"
    error = ((x @ (rounded - weight).T) ** 2).sum()
    by_importance = quantize("int4[1, 32]", weight, moment.diagonal()[None])
    plain = PackedWeight(Type("fp32", (16, 96), "int4[1, 32]"), by_importance).unpack()
    assert error < 0.5 * ((x @ (plain - weight).T) ** 2).sum()


@pytest.mark.parametrize(
    ("fmt", "max_error"), [("mxfp4", 0.3), ("fp8[1, *]", 0.3), ("fp8[8, 32]", 0.3), ("int8[1, *]", 0.3)]
)
def test_other_formats_take_turns_too_and_a_moment_without_numbers_gives_none(fmt: str, max_error: float):
    random = torch.Generator().manual_seed(8)
    weight, x = torch.randn(16, 64, generator=random), torch.randn(100, 8, generator=random)
    x = x @ torch.randn(8, 64, generator=random)
    moment, type = x.T @ x / len(x), Type("fp32", (16, 64), fmt)
    errors = [
        float((x @ (PackedWeight(type, quantize(fmt, weight, by)).unpack() - weight).T).square().sum())
        for by in (moment.diagonal()[None], plan_order(moment, 4096))
    ]
    assert errors[1] < max_error * errors[0]
    assert plan_order(moment * float("nan"), 4096) is None
    assert plan_order(torch.zeros(64, 64), 4096) is not None


def measure(folder: Path, tokens: list[int], *overrides: str) -> dict[str, Tensor]:
    """The moments of stored tensors, by name."""
    config = load([f"checkpoint={folder}", "device=cpu", "dtype=fp32", "level=0", *overrides])
    graph, found = plain_graph(config), dict[str, Tensor]()
    tensors = load_weights(graph, open_checkpoint(str(folder)), config, SILENT)

    def visit(recipe: Recipe, moment: Tensor, tensor: Tensor) -> None:
        for name, unit, of_unit, own in units_of(recipe, moment, tensor):
            assert own is None or torch.equal(own, weights.load([unit], open_checkpoint(str(folder)), SILENT)[unit])
            found[name] = of_unit

    measure_moments(graph, tokens, tensors.__getitem__, visit)  # type: ignore[arg-type]  # all are plain
    return found


def hooked(folder: Path, sequences: list[list[int]], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The moments of the inputs of each of the model's linears, by its weight, or of experts' columns."""
    model, inputs, experts = (
        tiny.reference(folder, dtype),
        defaultdict[str, list[Tensor]](list),
        defaultdict[str, list[Any]](list),
    )
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda _, args, name=name: inputs[name].append(args[0].flatten(0, -2)))
        elif name.endswith(".experts"):
            module.register_forward_pre_hook(lambda _, args, name=name: experts[name].append(args))
    for each in sequences:
        tiny.logits(model, each)
    found = {}
    for name, every in inputs.items():
        x = torch.cat(every).double()
        found[f"{name}.weight"] = torch.einsum("ti,tj->ij", x, x).div(len(x)).float()
    for name, calls in experts.items():
        x, ids = (torch.cat([call[place].flatten(0, -2) for call in calls]) for place in range(2))
        found |= of_experts(model.get_submodule(name), name, x, ids)
    return found


def of_experts(module: nn.Module, name: str, x: Tensor, ids: Tensor) -> dict[str, Tensor]:
    """Of gated experts [E, 2 W, H] and [E, H, W]: mean squares, of which the shared mean counts as PRIOR_ROWS rows."""
    gate_up: Tensor = module.gate_up_proj  # type: ignore[assignment]
    rows, wide = [], []
    for expert, weight in enumerate(gate_up):
        chosen = x[(ids == expert).any(-1)]
        gate, up = F.linear(chosen, weight).chunk(2, -1)
        rows.append(chosen.square())
        wide.append((F.silu(gate) * up).square())
    found = {}
    for names, squares in ((("gate_proj", "up_proj"), rows), (("down_proj",), wide)):
        mean = torch.cat(squares).mean(0)
        for expert, own in enumerate(squares):
            moment = (own.sum(0) + PRIOR_ROWS * mean) / (len(own) + PRIOR_ROWS)
            found |= {f"{name}.{expert}.{each}.weight": moment[None] for each in names}
    return found


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe", "olmoe", "deepseek_v2"])
def test_moments_are_those_of_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(calibration, "MAX_LENGTH", 16)
    folder, tokens = tiny.save(name, tmp_path), tiny.prompt(24)
    ours, theirs = measure(folder, tokens, "quant.head=int4[1, *]"), hooked(folder, [tokens[:16], tokens[16:]])
    is_known = {each for each in theirs if not each.endswith(("kv_b_proj.weight", ".gate.weight"))}
    assert ours.keys() == is_known, "each linear, but routers and what latent attention absorbs"
    for each in is_known:
        torch.testing.assert_close(ours[each], theirs[each], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_a_tied_head_is_measured_as_the_embedding_s_tensor(tmp_path: Path):
    folder, tokens = tiny.save("qwen3_moe_dense_list", tmp_path), tiny.prompt(24)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    theirs = hooked(folder, [tokens])["lm_head.weight"]
    ours = measure(folder, tokens, "quant.head=int4[1, *]")["model.embed_tokens.weight"]
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
    assert "model.embed_tokens.weight" not in measure(folder, tokens), "a plain head is not run"


def test_wide_linears_have_only_mean_squares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, tokens = tiny.save("llama", tmp_path), tiny.prompt(24)
    whole = measure(folder, tokens)
    monkeypatch.setattr(calibration, "MAX_COLUMNS", 70)
    for name, moment in measure(folder, tokens).items():
        wide = whole[name].shape[1] > 70
        torch.testing.assert_close(moment, whole[name].diagonal()[None] if wide else whole[name])
    assert any(len(moment) > 70 for moment in whole.values())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "phi3"])
def test_every_range_of_a_stored_tensor_is_rounded_by_what_it_is_multiplied_with(name: str, tmp_path: Path):
    """Experts one by one, experts stored with inputs first and gate and up interleaved, and q, k and v in one."""
    folder, tokens = tiny.save(name, tmp_path), tiny.prompt(24)
    config = load([f"checkpoint={folder}", "device=cpu", "dtype=fp32", "level=0", "quant.fmt='int4[1, 8]'"])
    checkpoint, moments = open_checkpoint(str(folder)), dict[Recipe, Tensor]()
    packed = [recipe for recipe in semantic_graph(config).recipes() if isinstance(recipe, Quantize)]
    plain = weights.load([recipe.part for recipe in packed], checkpoint, SILENT)
    load_plain = lambda recipe: weights.load([recipe], checkpoint, SILENT)[recipe]  # noqa: E731
    measure_moments(plain_graph(config), tokens, load_plain, lambda recipe, moment, _: moments.update({recipe: moment}))
    formats = {leaf.name: recipe.fmt for recipe in packed for leaf in leaves(recipe.part)}
    made = Calibration(plain_graph(config), formats, tokens, checkpoint, Cache(tmp_path / "cache"))
    ranges = [narrow(recipe, 0, 16, len(recipe.type.shape) - 2) for recipe in packed]
    loaded = weights.load([*packed, *ranges], checkpoint, SILENT, calibration=made)
    for recipe, part in zip(packed, ranges, strict=True):
        moment = moments[recipe.part]
        by = plan_order(moment, len(tokens)) if moment.dim() == 2 else moment
        expected = quantize(recipe.fmt, plain[recipe.part], by)
        values, scales = loaded[recipe].parts["values"], loaded[recipe].parts["scales"]
        assert torch.equal(scales, expected["scales"])
        assert (values == expected["values"]).float().mean() > 0.99
        assert not torch.equal(values, quantize(recipe.fmt, plain[recipe.part])["values"])
        assert torch.equal(loaded[part].parts["values"], values[..., :16, :, :])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A random model, with a tokenizer of bytes."""
    monkeypatch.setitem(tiny.VARIANTS, "bytes", ("LlamaConfig", {"vocab_size": 301}))
    monkeypatch.setattr(planning, "MAX_TOKENS", 128)
    made = tiny.save("bytes", tmp_path / "checkpoint")
    add_tokenizer(made)
    return made


def loaded(folder: Path, *overrides: str, rank: int = 0) -> dict[str, Tensor]:
    """Every tensor that is loaded, by its recipe."""
    common = [f"checkpoint={folder}", "device=cpu", "dtype=fp32", f"cache={folder}.cache", "quant.fmt='int4[1, 16]'"]
    config = load([*common, "level=1", *overrides])
    tensors = load_weights(compile_graph(config), open_checkpoint(str(folder)), config, SILENT, rank)
    return {
        f"{recipe} {place}": tensor
        for recipe, made in tensors.items()
        for place, tensor in enumerate(map(to_dense, tensors_in(made)))
    }


def to_dense(tensor: Tensor) -> Tensor:
    """Of oneDNN's own layout too, which has no torch.equal."""
    return tensor.to_dense() if tensor.is_mkldnn else tensor


def are_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def wait_for_entries(folder: Path, count: int) -> list[str]:
    """The names of what is kept; packed weights are published by a thread."""
    cache, deadline = Cache(Path(f"{folder}.cache")), time.monotonic() + 120
    while len(entries := cache.entries("weights")) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(entries) == count
    return sorted(entry.about["name"] for entry in entries)


def refuse_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "measure_moments", lambda *_: pytest.fail("it is measured"))


def test_the_next_start_rounds_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    first = loaded(folder)
    assert "atom-run: calibrated 21 weights on 128 tokens" in capfd.readouterr().err
    kept = wait_for_entries(folder, 2)
    assert kept[0].startswith("calibrated int4[1, 16] of") and kept[1].startswith("int4[1, 16] of")
    with monkeypatch.context() as patch:
        refuse_to_measure(patch)
        assert are_same(loaded(folder, "level=0"), loaded(folder, "level=0")), "which keeps no panels"
        patch.setattr(Calibration, "open", lambda *_: pytest.fail("rounded weights are read, though panels are kept"))
        assert are_same(first, loaded(folder))
    assert not are_same(first, loaded(folder, "quant.fmt='int4[1, 8]'"))


@pytest.mark.slow
def test_calibrated_and_plain_weights_are_kept_apart(folder: Path, tmp_path: Path):
    calibrated, plain = loaded(folder), loaded(folder, "quant.calibration=none")
    assert calibrated.keys() == plain.keys() and not are_same(calibrated, plain)
    (tmp_path / "text.txt").write_text("0123456789 " * 200)
    other = loaded(folder, f"quant.calibration={tmp_path / 'text.txt'}")
    assert not are_same(other, calibrated) and not are_same(other, plain)
    wait_for_entries(folder, 5)  # three of panels, two of rounded weights
    assert are_same(loaded(folder), calibrated) and are_same(loaded(folder, "quant.calibration=none"), plain)


@pytest.mark.slow
def test_changed_files_are_measured_anew(folder: Path, capfd: pytest.CaptureFixture[str]):
    loaded(folder)
    os.utime(folder / "model.safetensors", (2, 2))
    loaded(folder)
    assert capfd.readouterr().err.count("atom-run: calibrated ") == 2


@pytest.mark.slow
def test_a_damaged_file_is_made_anew(folder: Path, capfd: pytest.CaptureFixture[str]):
    first = loaded(folder, "level=0")
    (file,) = Path(f"{folder}.cache").glob("weights/*/model.safetensors")
    file.write_bytes(b"\0")
    assert are_same(first, loaded(folder, "level=0"))
    assert capfd.readouterr().err.count("atom-run: calibrated ") == 2


def test_with_a_cache_that_takes_nothing_weights_are_rounded_to_the_nearest_unless_a_text_is_named(
    folder: Path, capfd: pytest.CaptureFixture[str]
):
    nearest = loaded(folder, "level=0", "quant.calibration=none")
    shutil.rmtree(f"{folder}.cache", ignore_errors=True)
    Path(f"{folder}.cache").write_text("a file")
    assert are_same(loaded(folder, "level=0"), nearest)
    assert "calibrated weights cannot be kept: " in capfd.readouterr().err
    with pytest.raises(
        ArtifactError, match=r"^calibrated weights cannot be kept in .*; set cache= to .* or quant\.cal"
    ):
        loaded(folder, "level=0", "quant.calibration=prompt")


def test_a_lack_of_memory_is_one_line_and_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def take_too_much(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(calibration, "measure_moments", take_too_much)
    with pytest.raises(
        CapacityError, match=r"^device=cpu has no room to calibrate in, .*: set quant.calibration=none$"
    ):
        loaded(folder)
    assert not Cache(Path(f"{folder}.cache")).entries("weights")
    assert not [*Path(f"{folder}.cache").glob("weights/*")]


def test_formats_that_gain_nothing_measure_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch):
    refuse_to_measure(monkeypatch)
    for fmt in ("fp8", "int8"):
        assert loaded(folder, f"quant.fmt={fmt}")


@pytest.mark.slow
def test_8_bits_are_calibrated_where_a_text_is_named(folder: Path):
    plain = loaded(folder, "quant.fmt=fp8")
    assert not are_same(loaded(folder, "quant.fmt=fp8", "quant.calibration=prompt"), plain)
    assert are_same(loaded(folder, "quant.fmt=fp8"), plain)


@pytest.mark.slow
def test_weights_that_no_kernel_takes_are_rounded_the_same(folder: Path):
    """At level 0 they are unpacked while they load."""
    config = [f"checkpoint={folder}", "device=cpu", "dtype=fp32", f"cache={folder}.cache", "quant.fmt='int4[1, 16]'"]
    found = []
    for level in (0, 1):
        engine = LLMEngine.from_config(load([*config, f"level={level}"]))
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        found.append(engine.generate([tiny.prompt(20)], params)[0]["token_ids"])
        engine.close()
    assert found[0] == found[1]


@pytest.mark.slow
def test_the_parts_of_ranks_are_those_of_one(folder: Path):
    common = "level=0", "quant.head='int4[1, 16]'"
    whole = loaded(folder, *common)
    ranks = [loaded(folder, *common, "parallel.tensor=2", rank=rank) for rank in range(2)]

    def of(tensors: dict[str, Tensor], role: str) -> Tensor:
        (found,) = (tensor for recipe, tensor in tensors.items() if role in recipe)
        return found

    for role, dim in (("layers.0.self_attn.q_proj", 0), ("layers.1.mlp.up_proj", 0), ("layers.1.self_attn.o_proj", 1)):
        halves = [of(tensors, role) for tensors in ranks]
        assert halves[0].shape[dim] * 2 == of(whole, role).shape[dim], role
        assert torch.equal(torch.cat(halves, dim), of(whole, role)), role
    head = torch.cat([of(tensors, "lm_head") for tensors in ranks])
    assert len(head) == 302 and torch.equal(head[:301], of(whole, "lm_head")) and not head[301].any()


def test_a_checkpoint_without_a_tokenizer_is_rounded_to_the_nearest(folder: Path, capfd: pytest.CaptureFixture[str]):
    plain = loaded(folder, "quant.calibration=none")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    capfd.readouterr()
    assert are_same(loaded(folder), plain)
    line = "atom-run: int4[1, 16]: the checkpoint has no tokenizer to calibrate with"
    assert capfd.readouterr().err.startswith(line)
    (folder.parent / "text.txt").write_text("some text")
    with pytest.raises(ConfigError, match=r"quant.calibration=.*text.txt: the checkpoint has no tokenizer"):
        loaded(folder, f"quant.calibration={folder.parent / 'text.txt'}")


def test_texts_that_cannot_be_used_are_refused(folder: Path):
    with pytest.raises(ConfigError, match=r"quant.calibration=nosuch.txt: .*No such file.*; set it to a text file"):
        loaded(folder, "quant.calibration=nosuch.txt")
    (folder.parent / "empty.txt").write_text("\n")
    with pytest.raises(ConfigError, match=r"empty.txt: the file is empty"):
        loaded(folder, f"quant.calibration={folder.parent / 'empty.txt'}")
    with pytest.raises(ConfigError, match=r"quant.calibration=some.txt: no weight is packed while it loads"):
        loaded(folder, "quant.fmt=none", "quant.calibration=some.txt")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("calibration", "line"),
    [("auto", "on the built-in text, if there is a tokenizer"), ("none", "nearest: quant.calibration=none")],
)
def test_explain_says_how_weights_are_rounded(
    calibration: str, line: str, folder: Path, capsys: pytest.CaptureFixture[str]
):
    common = [f"checkpoint={folder}", "device=cpu", "level=1", f"quant.calibration={calibration}"]
    explain.run(load([*common, "quant.fmt='int4[1, 16]'"]))
    (said,) = [each for each in capsys.readouterr().out.splitlines() if each.startswith("rounding")]
    assert said.endswith(line)
    explain.run(load([*common, "quant=fp8"]))
    assert "rounding" not in capsys.readouterr().out
