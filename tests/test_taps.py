"""Taps against transformers' hidden states, and steering against its models with forward hooks, in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mtp
import numpy as np
import pytest
import tiny
import torch
from hooked import FIRST, LAST, SECOND, Vectors, pooled, states_of, steered
from safetensors.torch import save_file
from test_runner_drafts import drafting
from thread_ranks import ThreadRanks, thread_ranks

from atom import LLMEngine, SamplingParams
from atom.assemble.engine import describe_weights
from atom.checkpoint import SILENT
from atom.config.checkpoint import open_with_draft
from atom.config.load import load
from atom.errors import CheckpointError, ConfigError, RequestError
from atom.runtime.step.cuda_graphs import Graphs

__all__ = ["drafting", "thread_ranks"]

Open = Callable[..., LLMEngine]
PROMPTS = [tiny.prompt(size, seed=size) for size in (1, 5, 16, 40)]
GREEDY = SamplingParams(max_tokens=6, temperature=0)


@pytest.fixture
def vectors(tmp_path: Path) -> Callable[..., tuple[str, Vectors]]:
    """Writes a file of steering vectors for some layers; its path, and the vectors."""

    def write(name: str, *layers: str, hidden: int = 48) -> tuple[str, Vectors]:
        made = {layer: torch.randn(hidden, generator=torch.Generator().manual_seed(len(name))) for layer in layers}
        save_file(made, tmp_path / f"{name}.safetensors")
        return str(tmp_path / f"{name}.safetensors"), made

    return write


def assert_taps(answer: dict[str, Any], taps: dict[str, str], model: Any, prompt: list[int]) -> None:
    assert answer["taps"].keys() == taps.keys()
    for layer, pool in taps.items():
        states = states_of(model, layer, [*prompt, *answer["token_ids"][:-1]])
        found, expected = answer["taps"][layer], pooled(states, pool, len(prompt))
        assert found.shape == expected.shape and found.dtype == np.float32
        np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "level"), [
    ("qwen3", 0), ("qwen3", 1), ("mistral_window", 1), ("qwen3_moe", 1), ("gemma2", 1),
    pytest.param("qwen3", 2, marks=pytest.mark.slow),
])  # fmt: skip
def test_taps_and_steering_are_the_references(
    name: str, level: int, open_engine: Open, references: Callable[[str], Any], vectors: Callable[..., Any]
):
    path, added = vectors("calm", SECOND)
    fields = {"passes.taps": [FIRST, SECOND, LAST], "passes.steer": {"calm": path}, "max_num_batched_tokens": 16}
    engine, model = open_engine(name, level=level, **fields), references(name)
    for taps in ({SECOND: "last"}, {LAST: "mean", FIRST: "last"}, {SECOND: "all", LAST: "all"}):
        for prompt, answer in zip(PROMPTS, engine.generate(PROMPTS, GREEDY, taps=taps), strict=True):
            tiny.assert_greedy(answer, prompt, model)
            assert_taps(answer, taps, model, prompt)
    taps = {SECOND: "all"}
    with steered(model, added, 3.0):
        for prompt, answer in zip(
            PROMPTS, engine.generate(PROMPTS, GREEDY, taps=taps, steer={"calm": 3.0}), strict=True
        ):
            tiny.assert_greedy(answer, prompt, model)
            assert_taps(answer, taps, model, prompt)
    (plain,) = engine.generate([PROMPTS[3]], GREEDY)
    assert "taps" not in plain
    tiny.assert_greedy(plain, PROMPTS[3], model)


@pytest.mark.slow
def test_each_run_of_a_loop_is_a_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two L modules run three times, and an H module, all of it twice, in layers of two."""
    monkeypatch.setitem(tiny.VARIANTS, "loops", tiny.COMBINED["hrm_text"])
    folder = tiny.save("loops", tmp_path / "model")
    model, runs = tiny.reference(folder), list[torch.Tensor]()
    for stack in ("L_module", "H_module"):
        for layer in model.model.get_submodule(stack).layers:
            layer.register_forward_hook(lambda *call: runs.append(call[2][0]))
    names = [
        [f"model.{stack}.layers.{number}" for number in range(num)]
        for stack, num in (("L_module", 12), ("H_module", 4))
    ]
    order = [*names[0][:6], *names[1][:2], *names[0][6:], *names[1][2:]]
    fields: dict[str, Any] = {"dtype": "fp32", "level": 1, "kv_cache_memory": 1 << 22, "passes.taps": order}
    engine = LLMEngine(model=str(folder), **fields)
    (answer,) = engine.generate([PROMPTS[1]], SamplingParams(max_tokens=1), taps=dict.fromkeys(order, "all"))
    engine.close()
    with torch.inference_mode():
        model(torch.tensor([PROMPTS[1]]), use_cache=False)
    assert len(runs) == len(order)
    for name, run in zip(order, runs, strict=True):
        np.testing.assert_allclose(answer["taps"][name], run.numpy(), atol=1e-4 * float(run.abs().max()))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "level"), [
    ("deepseek_v4", 1), ("gemma3n", 1), ("qwen4_exp", 1), ("hy_v4", 0), pytest.param("hy_v4", 2, marks=pytest.mark.slow),
])  # fmt: skip
def test_streams_are_tapped_and_steered_together_and_each(
    name: str, level: int, open_engine: Open, references: Callable[[str], Any], tmp_path: Path
):
    model = references(name)
    num_streams, hidden = states_of(model, FIRST, PROMPTS[0]).shape[1:]
    assert num_streams > 1
    shapes = {"all": (hidden,), "each": (num_streams, hidden)}
    made = {
        steer: 0.1 * torch.randn(shape, generator=torch.Generator().manual_seed(7)) for steer, shape in shapes.items()
    }
    for steer, vector in made.items():
        save_file({SECOND: vector}, tmp_path / steer)
    fields = {"passes.taps": [FIRST, SECOND], "passes.steer": {steer: str(tmp_path / steer) for steer in made}}
    engine = open_engine(name, level=level, max_num_batched_tokens=16, **fields)
    for taps in ({SECOND: "last", FIRST: "mean"}, {FIRST: "all", SECOND: "all"}):
        for prompt, answer in zip(PROMPTS, engine.generate(PROMPTS, GREEDY, taps=taps), strict=True):
            assert_taps(answer, taps, model, prompt)
    for steer, vector in made.items():
        with steered(model, {SECOND: vector}, 2.0):
            for prompt, answer in zip(
                PROMPTS, engine.generate(PROMPTS, GREEDY, taps={SECOND: "all"}, steer={steer: 2.0}), strict=True
            ):
                tiny.assert_greedy(answer, prompt, model)
                assert_taps(answer, {SECOND: "all"}, model, prompt)


def test_a_batch_mixes_requests_of_all_kinds(
    open_engine: Open, references: Callable[[str], Any], vectors: Callable[..., Any]
):
    (calm, first), (wild, second) = vectors("calm", FIRST, SECOND), vectors("wild!", SECOND)
    fields = {"passes.taps": [SECOND], "passes.steer": {"calm": calm, "wild": wild}}
    engine, model = open_engine("qwen3", enable_prefix_caching=True, **fields), references("qwen3")
    prompt = tiny.prompt(40, seed=1)
    steers: list[dict[str, float]] = [{}, {"calm": 2.0}, {"wild": -3.0}, {"calm": 0.5, "wild": 1.5}, {"calm": 0.0}]
    for _ in range(2):  # the second time with prefixes of the first
        ids = [engine.add_request([prompt], GREEDY, taps={SECOND: "last"}, steer=each)[0] for each in steers]
        ended = {sequence.request_id: sequence for sequence in engine._finish(ids)}
        for id, steer in zip(ids, steers, strict=True):
            sequence, scales = ended[id], {"calm": 0.0, "wild": 0.0} | steer
            with steered(model, first, scales["calm"]), steered(model, second, scales["wild"]):
                answer = {"token_ids": sequence.output, "taps": sequence.taps}
                tiny.assert_greedy(answer, prompt, model)
                assert_taps(answer, {SECOND: "last"}, model, prompt)
    assert engine.metrics.scheduler.num_prefix_hit_tokens > 0
    assert len({tuple(sequence.output) for sequence in ended.values()}) == 4, "equal ones are those of no scale"


@pytest.mark.parametrize("pool", ["last", "mean", "all"])
def test_prefix_hits_and_preemption_change_nothing(
    pool: str, open_engine: Open, references: Callable[[str], Any], vectors: Callable[..., Any]
):
    path, added = vectors("calm", FIRST)
    fields = {"passes.taps": [SECOND], "passes.steer": {"calm": path}, "max_num_batched_tokens": 16}
    engine, model = open_engine("qwen3", enable_prefix_caching=True, **fields), references("qwen3")
    prompt, taps = tiny.prompt(48, seed=9), {SECOND: pool}
    scheduler = engine._engine.scheduler
    for steps in (2, 5, None):  # preempted within the prompt, within the answer; not at all, after the others
        hits = scheduler.stats.num_prefix_hit_tokens
        with steered(model, added, 2.0):
            (id,) = engine.add_request([prompt], GREEDY, taps=taps, steer={"calm": 2.0})
            for _ in range(steps or 0):
                engine.step()
            if steps is not None:
                (running,) = scheduler.running
                assert bool(running.output) == (steps == 5)
                scheduler._preempt(running)
            (sequence,) = engine._finish([id])
            assert_taps({"token_ids": sequence.output, "taps": sequence.taps}, taps, model, prompt)
    assert (scheduler.stats.num_prefix_hit_tokens > hits) == (pool == "last"), "others need the whole prompt"


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_only_accepted_drafts_are_tapped(
    run_ahead: int,
    open_engine: Open,
    references: Callable[[str], Any],
    drafting: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
):
    drafting(run_ahead)
    if run_ahead:  # steps are padded, as a CUDA graph pads them
        monkeypatch.setattr(Graphs, "draft_sizes", ((2, 3), (7, 3)))
    fields = {"method": "ngram", "num_speculative_tokens": 3, "passes.taps": [SECOND]}
    engine, model = open_engine("qwen3", **fields), references("qwen3")
    prompts = [[*tiny.prompt(9, seed=seed)] * 3 for seed in range(3)]  # which repeat themselves
    params = SamplingParams(max_tokens=24, temperature=0)
    for prompt, answer in zip(prompts, engine.generate(prompts, params, taps={SECOND: "all"}), strict=True):
        assert_taps(answer, {SECOND: "all"}, model, prompt)
    stats = engine.metrics.scheduler
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


def test_drafts_of_the_host_are_tapped_too(open_engine: Open, references: Callable[[str], Any]):
    fields = {"method": "ngram", "num_speculative_tokens": 3, "passes.taps": [SECOND]}
    engine, model = open_engine("qwen3", **fields), references("qwen3")
    prompt = [*tiny.prompt(9, seed=1)] * 3
    (answer,) = engine.generate([prompt], SamplingParams(max_tokens=24, temperature=0), taps={SECOND: "all"})
    assert_taps(answer, {SECOND: "all"}, model, prompt)
    assert engine.metrics.scheduler.num_accepted_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_a_model_that_drafts_is_tapped(name: str, tmp_path: Path):
    folder = mtp.save(name, tmp_path / "model")
    engine = LLMEngine(
        model=str(folder), dtype="fp32", level=1, kv_cache_memory=1 << 22, method="mtp", num_speculative_tokens=2,
        **{"passes.taps": [SECOND]},
    )  # fmt: skip
    model, prompt = tiny.reference(folder, num_hidden_layers=mtp.NUM_LAYERS), tiny.prompt(20)
    (answer,) = engine.generate([prompt], SamplingParams(max_tokens=16, temperature=0), taps={SECOND: "all"})
    engine.close()
    assert_taps(answer, {SECOND: "all"}, model, prompt)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("divided", [{"tensor_parallel_size": 2}, {"parallel.tensor": 2, "parallel.data": 2}])
def test_ranks_give_what_the_reference_gives(
    divided: dict[str, Any],
    open_engine: Open,
    references: Callable[[str], Any],
    vectors: Callable[..., Any],
    thread_ranks: list[ThreadRanks],
):
    path, added = vectors("calm", FIRST)
    fields = {"passes.taps": [SECOND], "passes.steer": {"calm": path}, "max_num_batched_tokens": 16}
    engine, taps = open_engine("qwen3_moe", **fields, **divided), {SECOND: "all"}
    with steered(references("qwen3_moe"), added, 2.0) as model:
        for prompt, answer in zip(
            PROMPTS, engine.generate(PROMPTS, GREEDY, taps=taps, steer={"calm": 2.0}), strict=True
        ):
            assert_taps(answer, taps, model, prompt)
    assert len(thread_ranks) == 1


@pytest.mark.parametrize(("name", "divided", "layers"), [
    ("llama", {"parallel.pipeline": 3}, [LAST, FIRST, SECOND]),
    pytest.param(
        "qwen3_moe", {"parallel.pipeline": 2, "parallel.data": 2}, [LAST, FIRST, SECOND], marks=pytest.mark.slow
    ),
    pytest.param("qwen3_moe", {"parallel.pipeline": 2, "parallel.tensor": 2}, [LAST, FIRST], marks=pytest.mark.slow),
    pytest.param("deepseek_v4", {"parallel.pipeline": 2, "parallel.tensor": 2}, [LAST, FIRST], marks=pytest.mark.slow),
])  # fmt: skip
def test_each_stage_returns_the_states_of_its_layers(
    name: str,
    divided: dict[str, Any],
    layers: list[str],
    open_engine: Open,
    references: Callable[[str], Any],
    vectors: Callable[..., Any],
    thread_ranks: list[ThreadRanks],
):
    path, added = vectors("calm", FIRST, layers[0])
    fields = {"passes.taps": layers, "passes.steer": {"calm": path}, "max_num_batched_tokens": 16}
    engine = open_engine(name, **fields, **divided)
    taps = dict(zip(layers, ("all", "last", "mean"), strict=False))
    with steered(references(name), added, 2.0) as model:
        answers = engine.generate(PROMPTS, GREEDY, taps=taps, steer={"calm": 2.0})
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            tiny.assert_greedy(answer, prompt, model)
            assert_taps(answer, taps, model, prompt)
    (ranks,) = thread_ranks
    num_groups = divided.get("parallel.data", 1)
    assert len(ranks.answers) == num_groups * divided["parallel.pipeline"], "the first rank of each group and stage"


def test_another_vector_leaves_packed_weights_and_drops_kept_kv(
    checkpoints: Callable[[str], Path], vectors: Callable[..., Any]
):
    """Keys of packed weights have the files of the checkpoint, those of KV the vectors' too."""
    files = [vectors(name, FIRST)[0] for name in ("calm", "wild!")]
    configs = [load([f"checkpoint={checkpoints('llama')}", f"passes.steer={{it: '{file}'}}"]) for file in files]
    opened = [open_with_draft(config, SILENT) for config in configs]
    assert opened[0].files() == opened[1].files() == [checkpoints("llama") / "model.safetensors"]
    first, second = map(describe_weights, configs, opened)
    assert first[:-1] == second[:-1] and first[-1].startswith("calm.safetensors ") and first != second


def test_what_is_not_registered_is_refused_in_one_line(open_engine: Open, vectors: Callable[..., Any], tmp_path: Path):
    path, _ = vectors("calm", FIRST)
    engine = open_engine("llama", **{"passes.taps": [FIRST], "passes.steer": {"calm": path}})
    for asked, message in (
        ({"taps": [SECOND]}, "taps: 'model.layers.1' is not registered (registered: model.layers.0)"),
        ({"taps": {FIRST: "first"}}, "taps: model.layers.0: 'first' is not one of last, mean, all"),
        ({"steer": ["wild"]}, "steer: 'wild' is not registered (registered: calm)"),
        ({"steer": {"calm": float("nan")}}, "steer: calm: the scale is not finite in fp32"),
        ({"steer": {"calm": 1e39}}, "steer: calm: the scale is not finite in fp32"),
        ({"steer": {"calm": 10**400}}, "steer: calm: the scale is not finite in fp32"),
    ):
        with pytest.raises(RequestError) as refused:
            engine.generate([PROMPTS[1]], GREEDY, **asked)
        assert str(refused.value) == message
    with pytest.raises(
        RequestError, match=r"taps: 'model.layers.1' is not registered \(none is: start with passes.taps"
    ):
        open_engine("llama").generate([PROMPTS[1]], GREEDY, taps=[SECOND])
    short, _ = vectors("short", FIRST, hidden=47)
    other, _ = vectors("other", "model.layers.3")
    save_file({FIRST: torch.full((48,), torch.inf)}, tmp_path / "infinite")
    for fields, kind, message in (
        ({"passes.taps": ["model.layers.3"]}, ConfigError, r"model.layers.3 is no layer of this model \(layers: model"),
        ({"passes.taps": [FIRST, FIRST]}, ConfigError, "passes.taps names model.layers.0 twice"),
        ({"passes.steer": {"it": other}}, ConfigError, "passes.steer.it: model.layers.3 is no layer"),
        ({"passes.steer": {"it": short}}, CheckpointError, r"steer:it:model.layers.0.*47"),
        ({"passes.steer": {"it": str(tmp_path / "none")}}, CheckpointError, "none"),
        ({"passes.steer": {"it": str(tmp_path / "infinite")}}, CheckpointError, "numbers that are not finite"),
        ({"passes.steer": "it"}, ConfigError, "passes.steer=it is not a mapping"),
    ):
        with pytest.raises(kind, match=message):
            open_engine("llama", **fields)
