"""Pauses: no step runs until the engine is resumed; requests end, are waited for or go on, and their KV is kept or not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import tiny

from atom import AsyncLLMEngine, LLMEngine, SamplingParams
from atom.errors import RequestError
from atom.runtime.types import WeightSpan

Open = Callable[..., LLMEngine]

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [tiny.prompt(length, seed=length) for length in (3, 17, 30)]


def run_some(engine: LLMEngine) -> list[str]:
    """Three requests, of which two run and have some tokens."""
    ids = engine.add_request(PROMPTS, GREEDY)
    for _ in range(4):
        assert engine.step() == []
    assert engine.metrics.num_running == 2 and engine.metrics.num_waiting == 1
    return ids


def finish(engine: LLMEngine) -> dict[str, Any]:
    ended: dict[str, Any] = {}
    while not engine.is_finished():
        ended |= {each.request_id: each for each in engine.step()}
    return ended


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_running_requests_are_ended_or_waited_for_or_go_on(mode: str, open_engine: Open):
    engine = open_engine("llama", max_num_seqs=2)
    expected = [each["token_ids"] for each in engine.generate(PROMPTS, GREEDY)]
    ids = run_some(engine)
    engine.pause_generation(mode, clear_cache=False)
    assert engine.is_paused and engine._engine.scheduler.is_idle
    ended = {each.request_id: each for each in engine.step()}
    assert [ended[id].finish_reason for id in ids if id in ended] == {
        "abort": ["abort"] * 3, "wait": ["max_tokens"] * 2, "keep": [],
    }[mode]  # fmt: skip
    assert engine.metrics.num_running == (2 if mode == "keep" else 0)
    num_steps, num_preemptions = engine.metrics.scheduler.num_steps, engine.metrics.scheduler.num_preemptions
    late = engine.add_request(PROMPTS[:1], GREEDY)
    assert engine.step() == [] and engine.is_finished(), "what comes meanwhile waits"
    assert engine.metrics.num_waiting == (1 if mode == "abort" else 2)
    assert engine.metrics.scheduler.num_steps == num_steps
    with pytest.raises(RequestError, match="the engine is paused; call resume_generation first"):
        engine.generate(PROMPTS, GREEDY)
    engine.resume_generation()
    ended |= finish(engine)
    assert engine.metrics.scheduler.num_preemptions == num_preemptions, "blocks are kept"
    assert ended[late[0]].output == expected[0]
    for id, tokens in zip(ids, expected, strict=True):
        if mode == "abort":
            assert ended[id].output == tokens[: len(ended[id].output)] and len(ended[id].output) < 12
        else:
            assert ended[id].output == tokens
    assert mode != "abort" or [len(ended[id].output) > 0 for id in ids] == [True, True, False]


@pytest.mark.parametrize("mode", ["abort", "keep"])
@pytest.mark.parametrize("clear_cache", [True, False])
def test_kv_is_dropped_or_kept_as_asked(mode: str, clear_cache: bool, open_engine: Open):
    engine = open_engine("llama", max_num_seqs=2, enable_prefix_caching=True, block_size=4)
    expected = [each["token_ids"] for each in engine.generate(PROMPTS, GREEDY)]
    engine.reset_prefix_cache()
    ids, num_used = run_some(engine), engine.metrics.num_blocks_used
    engine.pause_generation(mode, clear_cache=clear_cache)
    assert engine.metrics.scheduler.num_preemptions == (2 if mode == "keep" and clear_cache else 0)
    assert num_used > 0 and engine.metrics.num_blocks_used == (0 if mode == "abort" or clear_cache else num_used)
    engine.resume_generation()
    ended = finish(engine)
    if mode == "keep":
        assert [ended[id].output for id in ids] == expected
    num_hits = engine.metrics.scheduler.num_prefix_hit_tokens
    assert engine.generate([PROMPTS[1]], GREEDY)[0]["token_ids"] == expected[1]
    num_found = engine.metrics.scheduler.num_prefix_hit_tokens - num_hits
    assert num_found == (0 if mode == "abort" and clear_cache else 16)


def test_another_pause_finishes_what_one_has_kept(open_engine: Open):
    engine = open_engine("llama", max_num_seqs=2)
    expected = [each["token_ids"] for each in engine.generate(PROMPTS, GREEDY)]
    ids = run_some(engine)
    engine.pause_generation("keep", clear_cache=False)
    engine.pause_generation("wait")
    ended = {each.request_id: each for each in engine.step()}
    assert engine.is_paused and ended.keys() < {*ids} and len(ended) == 2
    assert [ended[id].output for id in ids if id in ended] == [expected[ids.index(id)] for id in ids if id in ended]
    with pytest.raises(RequestError, match=r"mode=later is not supported \(supported: abort, wait, keep\)"):
        engine.pause_generation("later")
    engine.resume_generation()
    engine.resume_generation()  # it goes on already
    assert len(finish(engine)) == 1


def test_an_aborted_request_gives_its_blocks_back_while_all_is_paused(open_engine: Open):
    engine = open_engine("llama", max_num_seqs=2)
    ids = run_some(engine)
    engine.pause_generation("keep", clear_cache=False)
    assert engine.metrics.num_blocks_used > 0
    for id in ids:
        engine.abort(id)
    assert engine.metrics.num_blocks_used == 0
    assert sorted(len(each.output) > 0 for each in engine.step()) == [False, True, True]
    assert engine.is_paused


def test_an_engine_that_sleeps_meanwhile_stays_paused(open_engine: Open):
    engine = open_engine("llama", max_num_seqs=2, enable_sleep_mode=True)
    expected = [each["token_ids"] for each in engine.generate(PROMPTS, GREEDY)]
    ids = run_some(engine)
    engine.pause_generation("keep")
    engine.sleep(2, "keep")
    engine.wake_up()
    assert engine.is_paused and not engine.is_sleeping
    assert engine.step() == [] and engine.metrics.num_waiting == 3
    engine.sleep(1, "keep")
    engine.resume_generation()
    assert engine.step() == [] and not engine.is_paused, "it sleeps still"
    engine.pause_generation("keep")
    engine.resume_generation()
    engine.wake_up()
    ended = finish(engine)
    assert [ended[id].output for id in ids] == expected


def test_tokens_have_the_version_of_the_weights_that_sampled_them(open_engine: Open):
    engine = open_engine("llama", max_num_seqs=2, enable_sleep_mode=True)
    assert engine.weight_version == "default"
    first, second, third = run_some(engine)
    num_before = [len(engine._engine.scheduler.sequences[f"{id}-0"].output) for id in (first, second)]
    engine.pause_generation("keep")
    for version in ("step-0", "step-1"):  # nothing is sampled in between
        engine.update_weight_version(version)
    engine.abort(second)
    engine.resume_generation()
    ended = finish(engine)
    assert ended[first].weight_versions == [("default", 0, num_before[0]), ("step-1", num_before[0], 12)]
    assert ended[second].weight_versions == [("default", 0, num_before[1])]
    assert ended[third].weight_versions == [WeightSpan("step-1", 0, 12)]
    engine.sleep(1)
    engine.wake_up()
    assert engine.weight_version == "step-1"
    engine.sleep(2)
    engine.wake_up(["weights"])
    assert engine.weight_version == "default", "those of the files are there again"
    engine.wake_up()
    (answer,) = engine.complete([PROMPTS[0]], GREEDY)
    assert answer.weight_versions == [("default", 0, 12)]


def test_a_task_that_comes_while_the_engine_is_paused_waits(checkpoints: Any):
    engine = AsyncLLMEngine(str(checkpoints("llama")), dtype="fp32", level=1, kv_cache_memory=1 << 22)

    async def answer(id: str) -> dict[str, Any]:
        return [each async for each in engine.generate(PROMPTS[0], GREEDY, id)][-1]

    async def run() -> None:
        expected = await answer("first")
        await engine.pause_generation("wait")
        assert await engine.is_paused()
        await engine.update_weight_version("7")
        waiting = [asyncio.create_task(answer(id)) for id in ("kept", "left")]
        while engine._engine.stats().num_waiting < 2:
            await asyncio.sleep(0.01)
        assert not any(each.done() for each in waiting)
        await engine.abort("left")
        left = await waiting[1]
        assert (left["finish_reason"], left["token_ids"]) == ("abort", [])
        await engine.resume_generation()
        kept = await waiting[0]
        assert kept["token_ids"] == expected["token_ids"] and kept["weight_versions"] == [("7", 0, 12)]
        assert await engine.get_weight_version() == "7" and not await engine.is_paused()

    try:
        asyncio.run(run())
    finally:
        engine.shutdown()
