"""Sleep mode: memory is given up and taken again; requests wait meanwhile, and tokens stay what they are."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import adapters
import pytest
import stable
import tiny
import torch

from atom import AsyncLLMEngine, LLMEngine, SamplingParams
from atom.config.load import load
from atom.errors import CapacityError, CheckpointError, EngineDeadError, RequestError, UnsupportedError
from atom.graph.recipes import Measured
from atom.kernels.stable_memory import StableMemory
from atom.runtime import sleep
from atom.weights.evaluate import tensors_in

Open = Callable[..., LLMEngine]

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [tiny.prompt(length, seed=length) for length in (3, 17, 30)]


def tokens_of(engine: LLMEngine) -> list[list[int]]:
    return [each["token_ids"] for each in engine.generate(PROMPTS, GREEDY)]


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("name", "fields"), [("llama", {}), ("qwen3_moe", {}), ("llama", {"quant": "int8"}), ("llama", {"method": "ngram"})]
)
@pytest.mark.parametrize("level", [1, 2])
def test_tokens_after_a_sleep_are_those_before(level: int, name: str, fields: dict[str, Any], open_engine: Open):
    engine = open_engine(name, enable_sleep_mode=True, enable_prefix_caching=True, block_size=4, **fields)
    expected, model = tokens_of(engine), engine._engine.runner.model
    num_weights = len(model._bindings.weights)
    engine.sleep(level)
    assert engine.is_sleeping and engine.is_finished()
    assert not model.caches and not model.executables
    assert len(model._bindings.weights) == (num_weights if level == 1 else 0)
    engine.wake_up()
    assert not engine.is_sleeping and len(model._bindings.weights) == num_weights
    num_hits = engine.metrics.scheduler.num_prefix_hit_tokens
    assert tokens_of(engine) == expected
    assert engine.metrics.scheduler.num_prefix_hit_tokens == num_hits, "prefixes are forgotten"


def test_level_2_reads_what_the_files_have_by_then(checkpoints: Any, tmp_path: Path):
    folder, other = shutil.copytree(checkpoints("llama"), tmp_path / "model"), tiny.reference(checkpoints("llama"))
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in other.parameters():
            weight.normal_(0.0, 0.3)
    engine = LLMEngine(str(folder), dtype="fp32", level=1, kv_cache_memory=1 << 22, enable_sleep_mode=True)
    before = tokens_of(engine)
    engine.sleep(2)
    other.save_pretrained(folder)
    engine.wake_up()
    after = engine.generate(PROMPTS, GREEDY)
    assert [each["token_ids"] for each in after] != before
    for answer, prompt in zip(after, PROMPTS, strict=True):
        tiny.assert_greedy(answer, prompt, other)
    engine.sleep(2)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError):
        engine.wake_up()
    assert engine.is_sleeping
    other.save_pretrained(folder)
    engine.wake_up()
    assert tokens_of(engine) == [each["token_ids"] for each in after]
    engine.close()


def test_scales_that_were_measured_are_kept(open_engine: Open):
    engine = open_engine("llama", enable_sleep_mode=True, kv_cache_dtype="fp8")
    weights: Any = engine._engine.runner.model._bindings.weights
    scales = {recipe: tensor for recipe, tensor in weights.items() if isinstance(recipe, Measured)}
    assert len(scales) == 6
    with torch.inference_mode():
        for number, tensor in enumerate(scales.values()):
            tensor.fill_(2.0 ** (number % 3))
    expected = tokens_of(engine)
    engine.sleep(2)
    engine.wake_up()
    assert tokens_of(engine) == expected
    assert [weights[recipe].item() for recipe in scales] == [1, 2, 4, 1, 2, 4]


def run_some(engine: LLMEngine) -> list[str]:
    """Three requests, of which two run and have some tokens."""
    ids = engine.add_request(PROMPTS, GREEDY)
    for _ in range(4):
        assert engine.step() == []
    assert engine.metrics.num_running == 2 and engine.metrics.num_waiting == 1
    return ids


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_running_requests_are_ended_or_waited_for_or_go_on(mode: str, open_engine: Open):
    fields = {"enable_sleep_mode": True, "max_num_seqs": 2}
    expected = tokens_of(open_engine("llama", **fields))
    engine = open_engine("llama", **fields)
    ids, done = run_some(engine), {}

    def step() -> None:
        given = engine.step()
        ended = {each.request_id: each for each in given}
        assert len(ended) == len(given) and ended.keys().isdisjoint(done), "each is given once"
        done.update(ended)

    engine.sleep(1, mode)
    step()
    num_ended = {"abort": 3, "wait": 2, "keep": 0}[mode]
    assert len(done) == num_ended and engine.metrics.num_running == 0
    if mode == "abort":
        assert [done[id].finish_reason for id in ids] == ["abort"] * 3
        assert [len(done[id].output) > 0 for id in ids] == [True, True, False]
        ids = engine.add_request(PROMPTS, GREEDY)
    for _ in range(3):
        step()
    assert engine.metrics.num_waiting == 3 if mode != "wait" else 1, "what comes meanwhile waits"
    num_steps = engine.metrics.scheduler.num_steps
    engine.wake_up()
    while not engine.is_finished():
        step()
    assert engine.metrics.scheduler.num_steps > num_steps
    assert [done[id].output for id in ids] == expected


def test_a_part_may_be_woken_up_first(open_engine: Open):
    engine = open_engine("llama", enable_sleep_mode=True)
    expected = tokens_of(engine)
    for tags in (["weights"], ["kv_cache"]):
        engine.sleep(2)
        engine.wake_up(tags)
        assert engine.is_sleeping
        engine.sleep(1)  # again
        engine.wake_up(tags)
        engine.wake_up()
        assert not engine.is_sleeping
        engine.wake_up()  # it is awake
        assert tokens_of(engine) == expected


def test_kv_that_finds_no_memory_is_asked_for_again(open_engine: Open, monkeypatch: pytest.MonkeyPatch):
    engine = open_engine("llama", enable_sleep_mode=True)
    expected, runner = tokens_of(engine), engine._engine.runner
    engine.sleep(2)
    with monkeypatch.context() as patched:
        patched.setattr(runner, "bind", Mock(side_effect=CapacityError("no memory")))
        with pytest.raises(CapacityError, match="no memory"):
            engine.wake_up()
    assert engine.is_sleeping
    engine.wake_up()
    assert tokens_of(engine) == expected


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_that_fails_half_way_is_one(level: int, open_engine: Open, monkeypatch: pytest.MonkeyPatch):
    engine = open_engine("llama", enable_sleep_mode=True)
    expected = tokens_of(engine)
    unbind = Mock(side_effect=[engine._engine.runner.model.unbind(), RuntimeError("no more")])
    with monkeypatch.context() as patched:  # the weights are given up, KV is not
        patched.setattr(engine._engine.runner.model, "unbind", unbind)
        with pytest.raises(RuntimeError, match="no more"):
            engine.sleep(level)
    assert engine.is_sleeping
    with pytest.raises(RequestError, match="the engine sleeps"):
        engine.generate(PROMPTS, GREEDY)
    ids = engine.add_request(PROMPTS, GREEDY)
    assert engine.step() == [] and engine.metrics.num_waiting == 3
    engine.wake_up()
    ended = []
    while not engine.is_finished():
        ended += engine.step()
    assert sorted((ids.index(each.request_id), each.output) for each in ended) == list(enumerate(expected))


def test_an_adapter_is_loaded_once_the_engine_is_awake(open_engine: Open, references: Any, tmp_path: Path):
    path = str(adapters.save(references("llama"), tmp_path / "sql"))
    engine = open_engine("llama", enable_sleep_mode=True, enable_lora=True)
    engine.sleep()
    for _ in range(2):
        with pytest.raises(RequestError, match="the engine sleeps; wake it up first"):
            engine.load_lora_adapter("sql", path)
        engine.wake_up(["weights"])
    engine.wake_up()
    engine.load_lora_adapter("sql", path)
    assert engine.lora_adapters == ["sql"]


def test_what_cannot_be_is_said(open_engine: Open, checkpoints: Any):
    engine = open_engine("llama")
    for call in (engine.sleep, engine.wake_up):
        with pytest.raises(RequestError, match=r"set serve\.enable_sleep_mode=true"):
            call()
    assert not engine.is_sleeping
    engine = open_engine("llama", enable_sleep_mode=True)
    for wrong, message in (((3,), "levels are 1 and 2"), ((1, "later"), "modes abort, wait, keep")):
        with pytest.raises(RequestError, match=message):
            engine.sleep(*wrong)
    with pytest.raises(RequestError, match=r"tags=graphs is not supported \(supported: weights, kv_cache\)"):
        engine.wake_up(["graphs"])
    engine.sleep()
    with pytest.raises(RequestError, match="the engine sleeps"):
        engine.generate(PROMPTS, GREEDY)
    assert engine.metrics.num_waiting == 0 and engine.step() == []
    lora = open_engine("llama", enable_sleep_mode=True, enable_lora=True)
    with pytest.raises(RequestError, match="sleep with level=1"):
        lora.sleep(2)
    where = [f"checkpoint={checkpoints('llama')}", "serve.enable_sleep_mode=true"]
    for field, reason in (
        ("parallel.tensor=2", "with 2 ranks is not supported"),
        ("serve.swap_space=1000000", "drops KV"),
    ):
        with pytest.raises(UnsupportedError, match=rf"serve\.enable_sleep_mode=true {reason}"):
            load([*where, "serve.enable_prefix_caching=true", field])


def test_a_task_that_comes_while_the_engine_sleeps_waits(checkpoints: Any):
    engine = AsyncLLMEngine(
        str(checkpoints("llama")), dtype="fp32", level=1, kv_cache_memory=1 << 22, enable_sleep_mode=True
    )

    async def answer() -> list[int]:
        return [each async for each in engine.generate(PROMPTS[0], GREEDY)][-1]["token_ids"]

    async def run() -> None:
        expected = await answer()
        with pytest.raises(RequestError, match="levels"):
            await engine.sleep(5)
        await engine.sleep(2)
        assert await engine.is_sleeping()
        waiting = asyncio.create_task(answer())
        done, _ = await asyncio.wait([waiting], timeout=0.3)
        assert not done
        await engine.wake_up()
        assert await waiting == expected and not await engine.is_sleeping()
        left = asyncio.ensure_future(engine.sleep())
        await asyncio.sleep(0)  # it has asked by now
        left.cancel()
        await engine.wake_up()
        assert await answer() == expected, "a task that has left ends no engine"
        engine._inbox.put(None)
        with pytest.raises(EngineDeadError, match="closed"):  # whether the thread has ended by now or ends ahead of it
            await asyncio.wait_for(engine.sleep(), 60)

    try:
        asyncio.run(run())
    finally:
        engine.shutdown()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "fields",
    [{}, {"quant": "int8"}, {"cpu_offload_params": ["embed_tokens"]}],
    ids=["plain", "packed", "table on the host"],
)
def test_a_gpus_weights_and_kv_come_back_to_where_they_were(
    fields: dict[str, Any], open_engine: Open, monkeypatch: pytest.MonkeyPatch
):
    """With a driver that is played."""
    driver = stable.play(monkeypatch)
    pinned: list[int] = []
    monkeypatch.setattr(sleep, "pin", lambda tensor, instead: pinned.append(tensor.data_ptr()))
    monkeypatch.setattr(sleep, "unpin", pinned.remove)
    monkeypatch.setattr(
        "atom.assemble.engine.stable_memories", lambda config: (StableMemory(1 << 24), StableMemory(1 << 24))
    )
    monkeypatch.setattr("atom.config.resolve.check_offload", lambda config, device: None)
    monkeypatch.setattr("atom.weights.sources.NUM_READERS", 1)  # as a GPU has one thread that places weights
    engine = open_engine("llama", enable_sleep_mode=True, level=0, **fields)
    expected, model = tokens_of(engine), engine._engine.runner.model
    num_there, tensors = driver.num_there, [*model.caches.values()]
    tensors += [tensor for each in model._bindings.weights.values() for tensor in tensors_in(each)]
    addresses = [tensor.data_ptr() for tensor in tensors]
    for level in (1, 2, 1):
        engine.sleep(level)
        assert driver.num_there == 0 and len(pinned) == (level == 1)
        engine.wake_up(["weights"])
        assert 0 < driver.num_there < num_there and not pinned
        engine.wake_up()
        assert driver.num_there == num_there
        assert all(cache.view(torch.uint8).max() == 0 for cache in model.caches.values()), "no NaN of others"
        assert tokens_of(engine) == expected
    assert [tensor.data_ptr() for tensor in tensors] == addresses
    with monkeypatch.context() as patched:
        patched.setattr(sleep, "pin", Mock(side_effect=CapacityError("sleep with level=2")))
        with pytest.raises(CapacityError, match="level=2"):
            engine.sleep(1)
    assert not engine.is_sleeping
    engine.sleep(2)
    engine.wake_up()
    assert tokens_of(engine) == expected, "weights are read, and not those that could not be pinned"
    for level in (1, 2):
        with monkeypatch.context() as patched:  # weights and KV are given up by then
            patched.setattr(torch.cuda, "empty_cache", Mock(side_effect=RuntimeError("no more")))
            with pytest.raises(RuntimeError, match="no more"):
                engine.sleep(level)
        assert engine.is_sleeping and driver.num_there == 0
        engine.wake_up()
        assert tokens_of(engine) == expected and not pinned
    engine.sleep()
    driver.max_bytes = num_there - 1
    with pytest.raises(CapacityError, match="end what uses it"):
        engine.wake_up()
    assert engine.is_sleeping
    driver.max_bytes = num_there
    engine.wake_up()
    assert tokens_of(engine) == expected
