"""The Python API for asyncio: a model in a thread of this process.

    from atom import AsyncLLMEngine, SamplingParams

    engine = AsyncLLMEngine(model="/models/qwen3")
    async for output in engine.generate("Once upon a time", SamplingParams(max_tokens=32), request_id="1"):
        print(output["text"])                        # all of it so far
    engine.shutdown()

Requests of all tasks run in the same steps. One thread opens the model, runs steps and submits; a task awaits the
outputs of its request, and leaving its loop aborts the request.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from collections.abc import Sequence as List
from concurrent.futures import Future
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial
from typing import Any

from torch import Tensor

from atom.assemble import open_engine
from atom.checkpoint import SilentProgress, Tokenizer
from atom.config.load import engine_overrides, load
from atom.embeddings import (
    POOLED,
    check_labels,
    describe_embedding,
    describe_labels,
    embedding_of,
    pooling_of,
    probabilities,
    similarities,
)
from atom.errors import EngineDeadError, RequestError, UnsupportedError
from atom.images.reader import ImageReader
from atom.llm import answer, read_init, read_update
from atom.pair_prompts import PairTemplate, refuse_template
from atom.prompts import (
    Prompt,
    SaltedPrompt,
    adapters_of,
    encode_conversations,
    joined_pairs,
    place_prompt,
    pooled_prompts,
    prompt_of,
    scored_prompts,
)
from atom.runtime.engine import Engine
from atom.runtime.requests.inbox import Inbox, Urgent, Work
from atom.runtime.requests.taps import GivenSteer, GivenTaps, read_steer, read_taps
from atom.runtime.step.guard import StepGuard
from atom.runtime.types import RequestOptions, RequestOutput, Sequence
from atom.sampling_params import SamplingParams

CLOSED = "the engine is closed"


class AsyncLLMEngine:
    """Serves one model to the tasks of an event loop. Its arguments are those of `LLMEngine`.

    Raises the errors of `atom.errors`; the constructor returns once the model is loaded.
    """

    def __init__(self, model: str | None = None, *, config_dirs: List[str] = (), **fields: Any) -> None:
        self.config = config = load(engine_overrides(model, fields), config_dirs=config_dirs)
        if config.parallel.replicas > 1 or config.rank > 0:
            raise UnsupportedError("AsyncLLMEngine is one engine, without parallel.replicas and torchrun")
        self._images = ImageReader(config) if config.reads_images else None
        self._inbox = Inbox()
        self._requests: dict[str, _Request] = {}  # of the event loop's side
        self._asked: set[Future[None]] = set()  # what tasks wait for besides these
        self._numbers = itertools.count()
        self._fault: EngineDeadError | None = None
        opened: Future[Engine] = Future()
        self._thread = threading.Thread(target=self._run, args=(opened,), name="engine", daemon=True)
        self._thread.start()
        self._engine = opened.result()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        adapter: str | None = None,
        taps: GivenTaps = None,
        steer: GivenSteer = None,
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Answer a prompt: a dict with each new part of an answer, n of them distinguished by `index`.

        adapter: the name of a LoRA adapter of serve.lora_modules.
        taps, steer: as in `LLMEngine.generate`.

        text and token_ids are all so far, finish_reason is None until the end; the last dict of an answer is that of
        `LLMEngine.generate`. RequestError for what cannot be served, EngineDeadError if the engine has ended.
        """
        params = SamplingParams(**self.config.sampling.values()) if sampling_params is None else sampling_params
        found = prompt_of(prompt)
        place = partial(place_prompt, found, self._images, self._engine.vocabulary)
        content, images = await asyncio.to_thread(place) if found.has_images else (found.content, ())
        asked: dict[str, Any] = {"taps": read_taps(taps), "steer": read_steer(steer)}
        options = RequestOptions(salt=found.salt, priority=priority, adapter=adapter, images=images, **asked)
        async with self._request(content, params, options, request_id) as request:
            async for output in request.outputs():
                yield request.describe(output)

    async def chat(
        self,
        messages: list[dict[str, Any]],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: int = 0,
        adapter: str | None = None,
        taps: GivenTaps = None,
        steer: GivenSteer = None,
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Answer a conversation; the arguments are those of `LLMEngine.chat`, the dicts those of `generate`."""
        encode = partial(
            encode_conversations,
            self._engine.vocabulary.tokenizer,
            [messages],
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        (prompt,) = await asyncio.to_thread(encode)
        asked: dict[str, Any] = {"priority": priority, "adapter": adapter, "taps": taps, "steer": steer}
        outputs = self.generate(prompt, sampling_params, request_id, **asked)
        async with aclosing(outputs):
            async for output in outputs:
                yield output

    async def embed(
        self, prompts: Prompt | List[Prompt], adapters: str | List[str | None] | None = None
    ) -> list[dict[str, Any]]:
        """The embedding of each prompt; see `LLMEngine.embed`."""
        return [describe_embedding(each, self.config) for each in await self._pool(pooled_prompts(prompts), adapters)]

    async def classify(
        self, prompts: Prompt | List[Prompt], adapters: str | List[str | None] | None = None
    ) -> list[dict[str, Any]]:
        """The label of each prompt; see `LLMEngine.classify`."""
        check_labels(self.config)
        pooled = await self._pool(pooled_prompts(prompts), adapters, classify=True)
        return [
            describe_labels(embedding_of(each), self.config) | {"num_tokens_input": len(each.prompt)} for each in pooled
        ]

    async def score(
        self,
        data_1: Prompt | List[Prompt],
        data_2: Prompt | List[Prompt],
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[float]:
        """The scores of pairs; see `LLMEngine.score`."""
        first, second = scored_prompts(data_1, data_2)
        if self.config.classifies:
            check_labels(self.config, 1)
            template = PairTemplate.find(self.config, self._engine.vocabulary.tokenizer, chat_template)
            pairs = joined_pairs(first, second, template, chat_template_kwargs)
            scored = await self._pool(pairs, classify=True)
            return [float(probabilities(embedding_of(each), self.config)[0]) for each in scored]
        refuse_template(chat_template, chat_template_kwargs)
        return similarities(list(map(embedding_of, await self._pool([*first, *second]))), len(first))

    async def load_lora_adapter(self, name: str, path: str) -> None:
        """Load the LoRA adapter of a folder under a name. CheckpointError if it is not of this model."""
        loras = self._engine.loras
        files = await asyncio.to_thread(loras.read, path)
        await self._do(lambda: loras.load(name, files))

    async def unload_lora_adapter(self, name: str) -> None:
        """Drop a LoRA adapter; requests that hold it go on. RequestError if none has that name."""
        await self._do(lambda: self._engine.loras.unload(name))

    async def abort(self, request_id: str) -> None:
        """End a request with finish_reason abort; one that has ended is no error."""
        self._inbox.put(Urgent(lambda: self._engine.abort(request_id)))

    async def reset_prefix_cache(self) -> bool:
        """Forget the KV of all prompts; see `LLMEngine.reset_prefix_cache`."""
        await self._do(lambda: self._engine.reset_prefix_cache(self._inbox.do_urgent))
        return True

    async def pause_generation(self, mode: str = "abort", *, clear_cache: bool = True) -> None:
        """Start no step until `resume_generation`; see `LLMEngine.pause_generation`. Requests wait meanwhile."""
        await self._do(lambda: self._engine.pause(mode, clear_cache=clear_cache, on_step=self._inbox.do_urgent))

    async def resume_generation(self) -> None:
        """Go on after `pause_generation`."""
        await self._do(self._engine.resume)

    async def is_paused(self) -> bool:
        return self._engine.is_paused

    async def get_weight_version(self) -> str:
        """The name of the weights; "default" until they get one."""
        return self._engine.weight_version

    async def update_weight_version(self, new_version: str) -> None:
        """Name the weights; answers report those of their tokens as `weight_versions`."""
        await self._do(lambda: self._engine.set_weight_version(new_version, self._inbox.do_urgent))

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give up the memory of weights and KV until `wake_up`; see `LLMEngine.sleep`. Requests wait meanwhile."""
        await self._do(lambda: self._engine.sleep(level, mode, self._inbox.do_urgent))

    async def wake_up(self, tags: List[str] | None = None) -> None:
        """Take the memory again; see `LLMEngine.wake_up`."""
        await self._do(lambda: self._engine.wake_up(tags))

    async def is_sleeping(self) -> bool:
        return self._engine.is_sleeping

    async def init_weight_transfer_engine(self, request: Mapping[str, Any]) -> None:
        """Prepare for a trainer that sends weights; see `LLMEngine.init_weight_transfer_engine`."""
        await self._do(lambda: self._engine.init_weight_transfer(read_init(request)))

    async def start_weight_update(self) -> None:
        """Begin an update of several parts; requests wait until `finish_weight_update`."""
        await self._do(lambda: self._engine.start_weight_update(self._inbox.do_urgent))

    async def update_weights(
        self,
        tensors: Mapping[str, Any] | Iterable[tuple[str, Tensor]],
        *,
        version: str | None = None,
        keep_cache: bool = False,
    ) -> None:
        """Update weights in place, between two steps; see `LLMEngine.update_weights`."""
        update, engine, on_step = read_update(tensors), self._engine, self._inbox.do_urgent
        await self._do(lambda: engine.update_weights(update, version, keep_cache=keep_cache, on_step=on_step))

    async def finish_weight_update(self, version: str | None = None, *, keep_cache: bool = False) -> None:
        """Finish an update of several parts; see `LLMEngine.finish_weight_update`."""
        await self._do(lambda: self._engine.finish_weight_update(version, keep_cache=keep_cache))

    async def get_tokenizer(self) -> Tokenizer | None:
        """The checkpoint's tokenizer, None without one."""
        return self._engine.vocabulary.tokenizer

    def check_health(self) -> None:
        """EngineDeadError if the engine has ended."""
        if self._fault is not None:
            raise self._fault

    def shutdown(self) -> None:
        """End the engine and all requests."""
        self._inbox.put(None)
        self._thread.join()
        if self._images is not None:
            self._images.close()

    @asynccontextmanager
    async def _request(
        self, prompt: Any, params: SamplingParams, options: RequestOptions, request_id: str | None = None
    ) -> AsyncIterator[_Request]:
        """Submit a request, which ends with the context. prompt: a text or token ids"""
        self.check_health()
        id = f"generate-{next(self._numbers)}" if request_id is None else request_id
        if id in self._requests:
            raise RequestError(f"the request id {id} is in use, choose another")
        request = self._requests[id] = _Request(asyncio.get_running_loop(), params.n)
        try:
            prepare = partial(self._engine.prepare, prompt, params, options, request_id=id)
            sequences = await asyncio.to_thread(prepare)
            self._inbox.put(lambda: self._submit(sequences, request))
            self.check_health()  # it may have ended since
            yield request
        finally:
            del self._requests[id]
            if request.num_running:
                self._inbox.put(Urgent(lambda: self._engine.abort(id)))

    async def _pool(
        self, prompts: List[SaltedPrompt], adapters: str | List[str | None] | None = None, *, classify: bool = False
    ) -> list[Sequence]:
        """Have each prompt embedded, or scored by the classifier."""
        pooling = pooling_of(self.config)

        async def pool(prompt: SaltedPrompt, adapter: str | None) -> Sequence:
            options = RequestOptions(salt=prompt.salt, pooling=pooling, classify=classify, adapter=adapter)
            async with self._request(prompt.content, POOLED, options) as request:
                return [output.sequence async for output in request.outputs()][-1]

        names = adapters_of(adapters, len(prompts))
        tasks = [asyncio.create_task(pool(*each)) for each in zip(prompts, names, strict=True)]
        try:
            return await asyncio.gather(*tasks)
        finally:  # if one has failed, or nobody waits any more
            for task in tasks:
                task.cancel()

    async def _do(self, work: Work) -> None:
        """Have the engine's thread do something between two steps."""
        self.check_health()
        done: Future[None] = Future()
        self._asked.add(done)
        done.add_done_callback(self._asked.discard)

        def do() -> None:
            if not done.set_running_or_notify_cancel():
                return  # nobody waits for it any more
            try:
                work()
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        self._inbox.put(do)
        self.check_health()  # it may have ended since
        await asyncio.wrap_future(done)

    def _submit(self, sequences: list[Sequence], request: _Request) -> None:
        try:
            self._engine.submit(sequences, request.push)
        except RequestError as error:
            request.fail(error)

    def _run(self, opened: Future[Engine]) -> None:
        """Open the engine and run it to its end."""
        try:
            engine = open_engine(self.config, SilentProgress())
        except BaseException as error:
            opened.set_exception(error)
            return
        opened.set_result(engine)
        reason = CLOSED
        try:
            self._run_steps(engine)
        except Exception as error:
            reason = f"the engine has failed: {error}"
        finally:
            self._fault = EngineDeadError(reason)
            for request in list(self._requests.values()):
                request.fail(self._fault)
            for done in list(self._asked):
                if done.set_running_or_notify_cancel():
                    done.set_exception(self._fault)
            engine.close()

    def _run_steps(self, engine: Engine) -> None:
        """Run steps until the end, or until two in a row have raised."""
        guard = StepGuard(engine)
        while True:
            while not engine.has_work or not self._inbox.empty():
                work = self._inbox.get()
                if work is None:
                    return
                work()
            guard.step()


class _Request:
    """The outputs of a request on their way from the engine's thread to a task."""

    def __init__(self, loop: asyncio.AbstractEventLoop, num_sequences: int) -> None:
        self.num_running = num_sequences  # answers that have not ended
        self._loop = loop
        self._new = asyncio.Event()
        self._outputs: deque[RequestOutput] = deque()
        self._fault: Exception | None = None
        self._texts = [""] * num_sequences
        self._tokens: list[list[int]] = [[] for _ in range(num_sequences)]

    def push(self, output: RequestOutput) -> None:
        """Take an output; of any thread."""
        self._outputs.append(output)
        self._wake()

    def fail(self, error: Exception) -> None:
        """End with an error; of any thread."""
        self._fault = error
        self._wake()

    def _wake(self) -> None:
        with suppress(RuntimeError):  # the event loop is closed, so that nobody waits
            self._loop.call_soon_threadsafe(self._new.set)

    async def outputs(self) -> AsyncIterator[RequestOutput]:
        while self.num_running:
            await self._new.wait()
            self._new.clear()
            while self._outputs:
                output = self._outputs.popleft()
                self.num_running -= output.finished
                yield output
            if self._fault is not None and self.num_running:
                self.num_running = 0
                raise self._fault

    def describe(self, output: RequestOutput) -> dict[str, Any]:
        """The dict of an output, see `AsyncLLMEngine.generate`; of each in order."""
        if output.finished:
            return {"index": output.index} | answer(output.sequence)
        at = output.index
        self._texts[at] += output.text or ""
        self._tokens[at] += output.token_ids
        return {
            "index": at,
            "text": None if output.text is None else self._texts[at],
            "token_ids": list(self._tokens[at]),
            "finish_reason": None,
        }
