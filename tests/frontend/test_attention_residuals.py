"""Kimi-K3 and AliceAI, whose blocks attend over sums of what earlier ones gave, against plain torch."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import kimi
import pytest
import tiny
import torch
from law import assert_same_logits, relative_error
from passes.test_shard import logits_of_ranks
from passes.test_split_stages import logits_of_stages
from probe import assert_logits
from rank_checks import EVENTFUL, assert_tokens_of_groups
from semantic import assert_same_as_transformers
from test_fp8_kv import round_fp8
from thread_ranks import ThreadRanks, thread_ranks
from torch import Tensor

from atom import LLMEngine, SamplingParams
from atom.cli import main
from atom.config.load import load
from atom.errors import AtomError
from atom.graph import Mesh

__all__ = ["thread_ranks"]

MODEL_FILES = Path(__file__).parents[2] / "conf" / "model"
K3_FOLDER: dict[str, Any] = {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "tie_word_embeddings": False,
                              "vision_config": {"model_type": "kimi_k3_vision", "patch_size": 14}}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """Folders as the hub has them, and what computes their logits."""
    folders, k3, alice = tmp_path_factory.mktemp("hub"), kimi.KimiK3(kimi.KIMI_K3), kimi.AliceAI(kimi.ALICE_AI)
    images = {"vision_tower.patch_embed.proj.weight": torch.zeros(4), "mm_projector.proj.0.weight": torch.zeros(4)}
    k3.save(folders / "kimi_k3", {**K3_FOLDER, "text_config": k3.config}, k3.stored() | images)
    alice.save(folders / "alice_ai", alice.config, alice.stored() | {"mtp.norm.weight": torch.zeros(4)})
    return {"kimi_k3": (folders / "kimi_k3", k3), "alice_ai": (folders / "alice_ai", alice)}


NAMES = pytest.mark.parametrize("name", ["kimi_k3", "alice_ai"])


@NAMES
def test_the_text_gives_the_logits_of_the_formulas(name: str, saved: dict[str, tuple[Path, Any]]):
    folder, model = saved[name]
    config = load([f"checkpoint={folder}", "dtype=fp32"])
    assert config.model.name == name
    assert_same_as_transformers(config, model)


@NAMES
def test_two_ranks_give_the_same(name: str, saved: dict[str, tuple[Path, Any]]):
    folder, model = saved[name]
    for mesh in (Mesh(2), Mesh(2, experts=2)):
        tokens = tiny.prompt(33)
        made = logits_of_ranks([f"checkpoint={folder}", "dtype=fp32"], tokens, mesh)
        assert_same_logits(made[0], tiny.logits(model, tokens))
        assert torch.equal(*made)


def test_stages_pass_sums_side_by_side(saved: dict[str, tuple[Path, Any]]):
    folder, model = saved["kimi_k3"]
    tokens = tiny.prompt(33)
    made = logits_of_stages(folder, tokens, Mesh(2, pipeline=2))
    assert_same_logits(made[0], tiny.logits(model, tokens))
    assert all(torch.equal(made[0], other) for other in made[1:])


@pytest.mark.parametrize("name", ["kimi_k3", pytest.param("alice_ai", marks=pytest.mark.slow)])
def test_chunks_batches_hits_and_preemption_change_nothing(name: str, saved: dict[str, tuple[Path, Any]]):
    folder, model = saved[name]
    shared = tiny.prompt(37)
    prompts = [shared, [*shared[:21], *tiny.prompt(9, seed=1)], tiny.prompt(3), tiny.prompt(17, seed=2)]
    counts = []
    for pool, num_tokens in (({"num_kvcache_blocks": 64}, 64), ({"kv_cache_memory": 1 << 22}, 6)):
        engine = LLMEngine(model=str(folder), dtype="fp32", level=1, max_num_batched_tokens=16, block_size=4, **pool)
        assert_logits(engine, tiny.prompt(70), model)
        for asked in (prompts, prompts[:2]):
            answers = engine.generate(asked, SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True))
            for answer, prompt in zip(answers, asked, strict=True):
                tiny.assert_greedy(answer, prompt, model)
        counts.append(engine.metrics.scheduler)
        engine.close()
    assert counts[0].num_preemptions > 0 and counts[1].num_prefix_hit_tokens > 0
    assert all(each.num_chunks > 0 for each in counts)


@pytest.mark.slow
@pytest.mark.parametrize("divided", [{"tensor_parallel_size": 2}, {"parallel.data": 2, "parallel.experts": 2}], ids=str)
def test_ranks_and_groups_give_the_tokens_of_one(
    divided: dict[str, Any], saved: dict[str, tuple[Path, Any]], thread_ranks: list[ThreadRanks]
):
    folder, model = saved["kimi_k3"]
    fields = {"dtype": "fp32", "level": 1, "state_memory": 1 << 16, **EVENTFUL, **divided}
    with closing(LLMEngine(model=str(folder), **fields)) as engine:
        assert_tokens_of_groups(engine, model)
        assert thread_ranks[0].meeting.num_collectives > 2 * engine.metrics.scheduler.num_steps


class RoundsLatents(kimi.KimiK3):
    """Whose latents are those of a cache in fp8."""

    def norm(self, x: Tensor, name: str) -> Tensor:
        made = super().norm(x, name)
        return round_fp8(made, 1.0) if "kv_a_layernorm" in name else made


def test_latents_without_positions_may_be_in_fp8(saved: dict[str, tuple[Path, Any]]):
    folder, _ = saved["kimi_k3"]
    rounding, tokens = RoundsLatents(kimi.KIMI_K3), tiny.prompt(60)
    fields = {"dtype": "fp32", "level": 1, "kv_cache_dtype": "fp8", "num_kvcache_blocks": 32}
    with closing(LLMEngine(model=str(folder), max_num_batched_tokens=32, **fields)) as engine:
        assert_logits(engine, tokens, rounding)
        assert engine.metrics.scheduler.num_chunks > 0
    assert relative_error(tiny.logits(rounding, tokens), tiny.logits(saved["kimi_k3"][1], tokens)) > 1e-3


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # and the same below 0


def test_experts_in_mxfp4_are_read_as_they_are_stored(tmp_path: Path):
    """compressed-tensors: of a byte the first number has the lower bits, a scale is the power of two of 32 numbers."""
    model = kimi.KimiK3(kimi.KIMI_K3)
    tensors, random = model.stored(), torch.Generator().manual_seed(0)
    for stored in [name for name in tensors if ".experts." in name]:
        rows, columns = tensors.pop(stored).shape
        packed = torch.randint(0, 256, (rows, columns // 2), generator=random, dtype=torch.uint8)
        scales = torch.randint(122, 126, (rows, columns // 32), generator=random, dtype=torch.uint8)
        tensors |= {f"{stored}_packed": packed, f"{stored}_scale": scales}
        numbers = torch.tensor([*E2M1, *(-each for each in E2M1)])[
            torch.stack((packed & 15, packed >> 4), -1).flatten(1).long()
        ]
        factors = torch.exp2(scales.float() - 127).repeat_interleave(32, 1)
        model.weights[stored.removeprefix(model.prefix)] = numbers * factors
    quantization = json.loads((MODEL_FILES / "kimi_k3.json").read_text())["text_config"]["quantization_config"]
    model.save(tmp_path, {**K3_FOLDER, "text_config": {**model.config, "quantization_config": quantization}}, tensors)
    assert_same_as_transformers(load([f"checkpoint={tmp_path}", "dtype=fp32"]), model)


@pytest.mark.slow  # 93 layers
def test_kimi_k3_is_explained_by_its_config_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Sizes from its paper: 2.78T parameters, of which 104B are active, in 93 layers.

    Those keep 24 latents of 576 numbers a token, and 69 states of 96 x 128 x 128 numbers and of 3 x 36864 inputs.
    """
    shutil.copy(MODEL_FILES / "kimi_k3.json", tmp_path / "config.json")
    assert main(["job=explain", f"checkpoint={tmp_path}", "parallel=tp8_ep", "device=cuda", "job.gpu=h200"]) == 0
    lines = {line[:17].strip(): line[17:].strip() for line in capsys.readouterr().out.splitlines()}
    assert lines["KV a token"].startswith(f"{24 * 576 * 2:,} bytes")
    state = 69 * (96 * 128 * 128 * 4 + 3 * 3 * 96 * 128 * 2) / (1 << 20)
    assert 428 < state < 430 and lines["recurrent state"].startswith(f"{state / 8:.1f} MiB a sequence")
    assert lines["parameters"].startswith("2,779,") and " 104," in lines["parameters"]
    assert lines["ct_mxfp4"].startswith(f"{92 * 896 * 3 * 3072 * 3584 * 17 / 32 / (1 << 30):,.1f} GiB")


@pytest.mark.parametrize(
    ("name", "override", "message"),
    [
        ("kimi_k3", "model.streams.layers=null", "model.streams.layers=null: kind attention_residuals needs a number"),
        (
            "kimi_k3",
            "passes.taps=[model.layers.0]",
            "passes.taps: blocks of this model read all sums of what earlier ones gave",
        ),
        ("kimi_k3", "model.streams.num=2", "model.streams.num=2: kind attention_residuals is of one stream"),
        ("kimi_k3", "model.streams={kind: one, layers: 2}", "model.streams.layers=2: kind one has none"),
        ("kimi_k3", "model.loops=2", "model.streams.kind=attention_residuals: model.loops=2 is of one stream"),
        (
            "kimi_k3",
            "model.residual=normed",
            "model.streams.kind=attention_residuals: model.residual=normed is of blocks that are added",
        ),
        ("kimi_k3", "model.ngrams.layers=[1]", "model.ngrams: model.streams.kind=attention_residuals has sums"),
        ("kimi_k3", "model.blocks.delta.gated_delta.decay_rows=1", "decay_rows=1 are fewer than value_heads=2"),
        (
            "alice_ai",
            "model.mtp_layers=1",
            "model.streams.kind=attention_residuals: model.mtp_layers=1 is of one stream",
        ),
    ],
)
def test_what_does_not_fit_is_refused(name: str, override: str, message: str, saved: dict[str, tuple[Path, Any]]):
    with pytest.raises(AtomError, match=message):
        load([f"checkpoint={saved[name][0]}", "dtype=fp32", override])
