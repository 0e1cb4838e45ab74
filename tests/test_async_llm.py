from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import adapters
import pytest
import serving
import tiny
import transformers

from atom import AsyncLLMEngine, LLMEngine, SamplingParams
from atom.errors import CheckpointError, EngineDeadError, RequestError, UnsupportedError

PROMPTS = ["Hello", "The capital of France is", [65, 66, 67]]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
FIELDS: dict[str, Any] = {"level": 0, "dtype": "fp32", "kv_cache_memory": 1 << 24, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return serving.save_talker(tmp_path_factory.mktemp("checkpoints") / "talker")


@pytest.fixture
def engine(talker: Path) -> Iterator[AsyncLLMEngine]:
    opened = AsyncLLMEngine(str(talker), **FIELDS)
    yield opened
    opened.shutdown()


async def collect(
    engine: AsyncLLMEngine, prompt: Any, params: SamplingParams | None = GREEDY, **more: Any
) -> list[dict[str, Any]]:
    return [output async for output in engine.generate(prompt, params, **more)]


def test_tasks_share_steps_and_get_what_one_engine_gives(engine: AsyncLLMEngine, talker: Path):
    async def run() -> list[list[dict[str, Any]]]:
        return await asyncio.gather(
            *(collect(engine, prompt, request_id=f"r{at}") for at, prompt in enumerate(PROMPTS))
        )

    found = asyncio.run(run())
    plain = LLMEngine(str(talker), **FIELDS)
    expected = plain.generate(PROMPTS, GREEDY)
    plain.close()
    assert [each[-1]["token_ids"] for each in found] == [each["token_ids"] for each in expected]
    assert [each[-1]["text"] for each in found] == [each["text"] for each in expected]
    assert engine._engine.stats().scheduler.num_steps < 3 * 24, "steps are shared"
    for outputs in found:
        assert len(outputs) > 1 and [each["finish_reason"] for each in outputs] == [None] * (len(outputs) - 1) + [
            "max_tokens"
        ]
        for before, after in pairwise(outputs):
            assert (
                after["text"].startswith(before["text"])
                and after["token_ids"][: len(before["token_ids"])] == before["token_ids"]
            )
        assert outputs[-1]["num_tokens_output"] == 24


def test_n_answers_have_an_index(engine: AsyncLLMEngine):
    outputs = asyncio.run(collect(engine, "Hello", SamplingParams(n=3, max_tokens=6, seed=1, ignore_eos=True)))
    ends = [each for each in outputs if each["finish_reason"] is not None]
    assert sorted(each["index"] for each in ends) == [0, 1, 2] and {len(each["token_ids"]) for each in ends} == {6}
    assert len({tuple(each["token_ids"]) for each in ends}) == 3


def test_who_leaves_or_aborts_ends_the_request(engine: AsyncLLMEngine):
    endless = SamplingParams(max_tokens=8000, ignore_eos=True)

    async def run() -> dict[str, Any]:
        last: dict[str, Any] = {}
        async for _ in (left := engine.generate("Hello", endless)):
            break
        await left.aclose()
        async for last in engine.generate("Hello", endless, "mine"):  # noqa: B007
            with pytest.raises(RequestError, match="the request id mine is in use"):
                await collect(engine, "Hello", request_id="mine")
            await engine.abort("mine")
        while engine._engine.has_work:
            await asyncio.sleep(0.01)
        await engine.abort("mine")  # it has ended
        assert len((await collect(engine, "Hello", request_id="mine"))[-1]["token_ids"]) == 24
        return last

    assert asyncio.run(asyncio.wait_for(run(), 60))["finish_reason"] == "abort"
    stats = engine._engine.stats()
    assert stats.num_running == stats.num_waiting == stats.num_blocks_used == 0
    assert stats.finish_reasons["abort"] == 2 and not engine._requests


def test_chats_embeddings_and_scores_are_those_of_one_engine(talker: Path):
    chat = [{"role": "user", "content": "Hi"}]
    texts, fields = ["Paris is.", "Bread is good.", "Hi"], FIELDS | {"serve.pooler_config.pooling_type": "MEAN"}
    engine = AsyncLLMEngine(str(talker), **fields)

    async def run() -> tuple[Any, ...]:
        outputs = [each async for each in engine.chat(chat, GREEDY, chat_template_kwargs={"enable_thinking": False})]
        left = engine.chat(chat, SamplingParams(max_tokens=8000, ignore_eos=True), "left")
        await anext(left)
        await left.aclose()
        for wrong, reason in (([], "is no conversation"), ([chat], "is no conversation"), ("Hi", "is no conversation")):
            with pytest.raises(RequestError, match=reason):
                await anext(engine.chat(wrong))  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="give 1 or as many"):
            await engine.score(texts, texts[:2])
        with pytest.raises(RequestError, match="the prompt is empty"):
            await engine.embed(["Hi", []])
        return outputs[-1], await engine.embed(texts), await engine.score("France", texts)

    answer, embedded, scores = asyncio.run(run())
    assert not engine._requests
    while engine._engine.has_work:  # a step of the request that was left may be running
        time.sleep(0.01)
    engine.shutdown()
    plain = LLMEngine(str(talker), **fields)
    (expected,) = plain.chat(chat, GREEDY, chat_template_kwargs={"enable_thinking": False})
    assert (answer["text"], answer["token_ids"]) == (expected["text"], expected["token_ids"])
    for found, one in zip(embedded, plain.embed(texts), strict=True):
        assert found["num_tokens_input"] == one["num_tokens_input"]
        assert found["embedding"] == pytest.approx(one["embedding"], abs=1e-5)
    assert scores == pytest.approx(plain.score("France", texts), abs=1e-5)
    plain.close()


def test_without_a_pooling_type_nothing_is_embedded(engine: AsyncLLMEngine):
    with pytest.raises(RequestError, match=r"set serve\.pooler_config\.pooling_type"):
        asyncio.run(engine.score("a", "b"))


def test_an_adapter_is_loaded_and_dropped_while_others_run(talker: Path, tmp_path: Path):
    model = transformers.AutoModelForCausalLM.from_pretrained(talker, dtype="float32").eval()
    folder = adapters.save(model, tmp_path / "adapter")
    engine = AsyncLLMEngine(str(talker), **FIELDS, enable_lora=True)
    prompt = [*b"The capital of France is"]

    async def run() -> dict[str, Any]:
        other = engine.generate("Hello", SamplingParams(max_tokens=8000, ignore_eos=True))
        await anext(other)
        with pytest.raises(RequestError, match="there is no adapter sql"):
            await collect(engine, prompt, adapter="sql")
        with pytest.raises(CheckpointError):
            await engine.load_lora_adapter("sql", str(tmp_path / "nowhere"))
        await engine.load_lora_adapter("sql", str(folder))
        answer = (await collect(engine, prompt, adapter="sql"))[-1]
        await engine.unload_lora_adapter("sql")
        with pytest.raises(RequestError, match="there is no adapter sql"):
            await engine.unload_lora_adapter("sql")
        await other.aclose()
        return answer

    answer = asyncio.run(run())
    engine.shutdown()
    assert len(answer["token_ids"]) == 24
    tiny.assert_greedy(answer, prompt, adapters.merge(model, folder))


def test_an_engine_outlives_the_event_loop_of_a_request(engine: AsyncLLMEngine):
    loop, endless = asyncio.new_event_loop(), SamplingParams(max_tokens=8000, ignore_eos=True)
    left = [engine.generate(prompt, endless) for prompt in PROMPTS]
    for each in left:
        loop.run_until_complete(anext(each))
    loop.close()

    async def run() -> list[dict[str, Any]]:
        outputs = await collect(engine, "Hello")
        for each in left:
            await each.aclose()
        return outputs

    assert len(asyncio.run(run())[-1]["token_ids"]) == 24


def test_what_cannot_be_served_is_raised_and_others_go_on(engine: AsyncLLMEngine):
    async def run() -> None:
        for prompt, message in (
            ([], "empty"),
            ([0] * 9000, "max_model_len"),
            ({"tokens": [1]}, "not a key of a prompt"),
        ):
            with pytest.raises(RequestError, match=message):
                await collect(engine, prompt)
        assert (await collect(engine, "Hello", None))[-1]["finish_reason"] is not None
        assert (await engine.get_tokenizer()) is not None

    asyncio.run(run())


def test_a_step_that_raises_ends_its_requests_and_two_in_a_row_the_engine(
    engine: AsyncLLMEngine, monkeypatch: pytest.MonkeyPatch
):
    real, faults = engine._engine.scheduler.schedule, [ArithmeticError("a fault")]

    def schedule() -> Any:
        if faults:
            raise faults.pop()
        return real()

    monkeypatch.setattr(engine._engine.scheduler, "schedule", schedule)

    async def run() -> None:
        assert len((await collect(engine, "Hello"))[-1]["token_ids"]) == 24, "the step is run again"
        faults.extend([ArithmeticError("a fault"), ArithmeticError("a fault")])
        with pytest.raises(EngineDeadError, match="the engine has failed: a fault"):
            await collect(engine, "Hello")
        with pytest.raises(EngineDeadError):
            engine.check_health()
        with pytest.raises(EngineDeadError):
            await collect(engine, "Hello")

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_shutdown_ends_what_runs(talker: Path):
    opened = AsyncLLMEngine(str(talker), **FIELDS)

    async def run() -> None:
        with pytest.raises(EngineDeadError, match="the engine is closed"):
            async for _ in opened.generate("Hello", SamplingParams(max_tokens=8000, ignore_eos=True)):
                await asyncio.to_thread(opened.shutdown)

    asyncio.run(asyncio.wait_for(run(), 60))
    assert not opened._thread.is_alive()
    opened.shutdown()


def test_who_leaves_is_not_waited_for_by_a_sleep(talker: Path):
    opened = AsyncLLMEngine(str(talker), **FIELDS, enable_sleep_mode=True)

    async def run() -> dict[str, Any]:
        outputs = opened.generate("Hello", SamplingParams(max_tokens=8000, ignore_eos=True), "mine")
        last = await anext(outputs)
        asleep = asyncio.create_task(opened.sleep(mode="wait"))
        await asyncio.sleep(0)  # it has asked by now
        await opened.abort("mine")
        async for last in outputs:  # noqa: B007
            pass
        await asleep
        return last

    try:
        assert asyncio.run(asyncio.wait_for(run(), 60))["finish_reason"] == "abort"
        assert asyncio.run(opened.is_sleeping())
    finally:
        opened.shutdown()


def test_an_engine_that_cannot_open_says_why(tmp_path: Path):
    with pytest.raises(CheckpointError, match="no such folder"):
        AsyncLLMEngine(str(tmp_path / "none"))
    with pytest.raises(UnsupportedError, match="without parallel"):
        AsyncLLMEngine(**{"parallel.replicas": 2})
