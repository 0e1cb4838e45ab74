"""What linears multiply, against hooks on transformers' models; rounding by it, against a search of all scales."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
import torch.nn.functional as F
from test_kv_scales import add_tokenizer
from torch import Tensor, nn

from atom import LLMEngine, SamplingParams
from atom.build import load_weights
from atom.build.calibration import plain_graph
from atom.cache import Cache
from atom.checkpoint import SILENT, open_checkpoint
from atom.compiler import compile_graph
from atom.config.load import load
from atom.errors import ConfigError
from atom.graph import Cat, Full, PackedWeight, Recipe, Slice, Stack, Transpose, Type, W
from atom.jobs import explain
from atom.weights import calibration
from atom.weights.calibration import PRIOR_ROWS, importance_of, measure_moments
from atom.weights.evaluate import tensors_in
from atom.weights.quantize import MIN_SHARE, quantize

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


def least_error(row: Tensor, by: Tensor) -> float:
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
    best = torch.tensor([least_error(row, by) for row in weight])
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
        alone = quantize(fmt, weight[expert], importance[expert])
        assert all(torch.equal(stacked[name][expert], part) for name, part in alone.items())
    assert not torch.equal(quantize(fmt, weight)["values"], stacked["values"])


@pytest.mark.parametrize("fmt", ["int4[1, 16]", "mxfp4"])
@pytest.mark.parametrize("importance", [torch.zeros(1, 64), torch.full((1, 64), float("nan"))])
def test_no_importance_gives_numbers_all_the_same(fmt: str, importance: Tensor):
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(6))
    rounded = PackedWeight(Type("fp32", (8, 64), fmt), quantize(fmt, weight, importance)).unpack()
    assert float((rounded - weight).norm() / weight.norm()) < 0.2


def test_a_recipe_s_importance_follows_its_columns():
    rows, moments = torch.arange(6.0), {}
    moments |= {"a": rows[None], "b": rows[None] + 10, "e.0": rows[None], "e.1": rows[None] + 1, "t": rows[:, None]}
    a, b, t = W("a", Type("bf16", (4, 6))), W("b", Type("bf16", (4, 6))), W("t", Type("bf16", (6, 4)))
    experts = Stack(W("e.{expert}", Type("bf16", (4, 6))), 0, 2)
    zeros = Full(0, Type("bf16", (4, 2)))

    def of(recipe: Recipe) -> list[float] | None:
        found = importance_of(recipe, moments)
        return None if found is None else found.flatten().tolist()

    assert of(a) == of(Cat((a, a))) == of(Slice(a, 1, 3)) == [0, 1, 2, 3, 4, 5]
    assert of(Slice(a, 2, 4, dim=1)) == [2, 3]
    assert of(Slice(a, 1, 6, dim=1, step=2)) == [1, 3, 5]
    assert of(Cat((a, b), dim=1)) == [0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15]
    assert of(Cat((Slice(a, 4, 6, dim=1), zeros), dim=1)) == [4, 5, 0, 0]
    assert of(Transpose(t)) == [0, 1, 2, 3, 4, 5]
    assert of(Transpose(Slice(t, 1, 3))) == [1, 2]
    assert of(experts) == [0, 1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 6]
    assert of(Slice(experts, 1, 2)) == [1, 2, 3, 4, 5, 6]
    assert of(Cat((Stack(experts.part, 0, 1), Stack(experts.part, 1, 2)))) == of(experts)
    assert of(Slice(experts, 2, 4, dim=2)) == [2, 3, 3, 4]
    assert of(W("unknown", Type("bf16", (4, 6)))) is None
    assert of(Cat((a, W("unknown", Type("bf16", (4, 6)))), dim=1)) is None


def measure(folder: Path, tokens: list[int], *overrides: str) -> dict[str, Tensor]:
    config = load([f"checkpoint={folder}", "device=cpu", "dtype=fp32", "level=0", *overrides])
    graph = plain_graph(config)
    tensors = load_weights(graph, open_checkpoint(str(folder)), config, SILENT)
    return measure_moments(graph, tokens, tensors.__getitem__)  # type: ignore[arg-type]  # all are plain


def hooked(folder: Path, tokens: list[int]) -> dict[str, Tensor]:
    """The mean squares of the inputs of each of the model's linears, by its weight."""
    model, found = tiny.reference(folder), {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            hook: Callable[..., None] = lambda _, args, name=name: found.update(  # noqa: E731
                {f"{name}.weight": args[0].flatten(0, -2).float().square().mean(0)}
            )
            module.register_forward_pre_hook(hook)
        elif name.endswith(".experts"):
            module.register_forward_pre_hook(lambda each, args, name=name: found.update(of_experts(each, name, *args)))
    tiny.logits(model, tokens)
    return found


def of_experts(module: nn.Module, name: str, x: Tensor, ids: Tensor, *_: Tensor) -> dict[str, Tensor]:
    """The same of gated experts [E, 2 W, H] and [E, H, W], of which the shared mean counts as PRIOR_ROWS rows."""
    gate_up: Tensor = module.gate_up_proj  # type: ignore[assignment]
    x, rows, wide = x.flatten(0, -2), [], []
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
            found |= {f"{name}.{expert}.{each}.weight": moment for each in names}
    return found


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe", "olmoe", "deepseek_v2"])
def test_moments_are_those_of_transformers(name: str, tmp_path: Path):
    folder, tokens = tiny.save(name, tmp_path), tiny.prompt(24)
    ours, theirs = measure(folder, tokens, "quant.head=int4[1, *]"), hooked(folder, tokens)
    is_known = {each for each in theirs if not each.endswith(("kv_b_proj.weight", ".gate.weight"))}
    assert ours.keys() == is_known, "each linear, but routers and what latent attention absorbs"
    for each in is_known:
        torch.testing.assert_close(ours[each].flatten(), theirs[each], rtol=1e-3, atol=1e-6)


def test_a_tied_head_is_measured_as_the_embedding_s_tensor(tmp_path: Path):
    folder, tokens = tiny.save("qwen3_moe_dense_list", tmp_path), tiny.prompt(24)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    theirs = hooked(folder, tokens)["lm_head.weight"]
    ours = measure(folder, tokens, "quant.head=int4[1, *]")["model.embed_tokens.weight"]
    torch.testing.assert_close(ours.flatten(), theirs, rtol=1e-3, atol=1e-6)
    assert "model.embed_tokens.weight" not in measure(folder, tokens), "a plain head is not run"


def test_experts_stored_with_inputs_first_are_measured_so(tmp_path: Path):
    folder = tiny.save("gpt_oss", tmp_path)
    tensors, moments = open_checkpoint(str(folder)).tensors, measure(folder, tiny.prompt(24))
    down = next(name for name in tensors if name.endswith("layers.0.mlp.experts.down_proj"))
    experts, width, _ = tensors[down].shape
    assert moments[down].shape == (experts, width, 1)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A random model, with a tokenizer of bytes."""
    monkeypatch.setitem(tiny.VARIANTS, "bytes", ("LlamaConfig", {"vocab_size": 300}))
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
    cache, deadline = Cache(Path(f"{folder}.cache")), time.monotonic() + 30
    while len(entries := cache.entries("weights")) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(entries) == count
    return sorted(entry.about["name"] for entry in entries)


def test_the_next_start_measures_nothing_and_another_format_neither(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    first = loaded(folder)
    assert "weights on 512 tokens" in capfd.readouterr().err
    kept = wait_for_entries(folder, 2)
    assert kept[0].startswith("inputs of linears of") and kept[1].startswith("int4[1, 16] of")
    monkeypatch.setattr(calibration, "measure_moments", lambda *_: pytest.fail("it is measured again"))
    reading = calibration.read_moments
    monkeypatch.setattr(
        calibration, "read_moments", lambda *_: pytest.fail("moments are read, though weights are kept")
    )
    assert are_same(first, loaded(folder))
    monkeypatch.setattr(calibration, "read_moments", reading)
    assert not are_same(first, loaded(folder, "quant.fmt='int4[1, 8]'"))


def test_calibrated_and_plain_weights_are_kept_apart(folder: Path, tmp_path: Path):
    calibrated, plain = loaded(folder), loaded(folder, "quant.calibration=none")
    assert calibrated.keys() == plain.keys() and not are_same(calibrated, plain)
    (tmp_path / "text.txt").write_text("0123456789 " * 200)
    other = loaded(folder, f"quant.calibration={tmp_path / 'text.txt'}")
    assert not are_same(other, calibrated) and not are_same(other, plain)
    wait_for_entries(folder, 5)  # three of weights, two of moments
    assert are_same(loaded(folder), calibrated) and are_same(loaded(folder, "quant.calibration=none"), plain)


def test_changed_files_are_measured_anew(folder: Path, capfd: pytest.CaptureFixture[str]):
    loaded(folder)
    os.utime(folder / "model.safetensors", (2, 2))
    loaded(folder)
    assert capfd.readouterr().err.count("atom-run: calibrated ") == 2


def test_damaged_moments_are_measured_anew(folder: Path, capfd: pytest.CaptureFixture[str]):
    first = loaded(folder, "level=0")
    cache = Path(f"{folder}.cache")
    (moments,) = cache.glob(f"weights/*/{calibration.FILE}")
    assert calibration.read_moments(moments)
    moments.chmod(0o600)
    moments.write_bytes(b"\0" * moments.stat().st_size)
    assert are_same(first, loaded(folder, "level=0"))
    assert capfd.readouterr().err.count("atom-run: calibrated ") == 2


def test_formats_that_gain_nothing_measure_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(calibration, "measure_moments", lambda *_: pytest.fail("it is measured"))
    for fmt in ("fp8", "int8"):
        assert loaded(folder, f"quant.fmt={fmt}")


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


def test_the_parts_of_ranks_are_those_of_one(folder: Path):
    whole = loaded(folder, "level=0")
    ranks = [loaded(folder, "level=0", "parallel.tensor=2", rank=rank) for rank in range(2)]

    def of(tensors: dict[str, Tensor], role: str) -> Tensor:
        (found,) = (tensor for recipe, tensor in tensors.items() if role in recipe)
        return found

    for role, dim in (("layers.0.self_attn.q_proj", 0), ("layers.1.mlp.up_proj", 0), ("layers.1.self_attn.o_proj", 1)):
        halves = [of(tensors, role) for tensors in ranks]
        assert halves[0].shape[dim] * 2 == of(whole, role).shape[dim], role
        assert torch.equal(torch.cat(halves, dim), of(whole, role)), role


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
    with pytest.raises(ConfigError, match=r"quant.calibration=some.txt: no weight is packed to 4 bits"):
        loaded(folder, "quant.fmt=fp8", "quant.calibration=some.txt")


@pytest.mark.parametrize(
    ("calibration", "line"),
    [("auto", "on the built-in prompt, if there is a tokenizer"), ("none", "nearest: quant.calibration=none")],
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
