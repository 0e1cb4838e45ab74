"""The Python API: a model in this process.

from atom import LLMEngine, SamplingParams

engine = LLMEngine(model="/models/qwen3", max_model_len=4096)
for answer in engine.generate(["What is the capital of France?"], SamplingParams(max_tokens=32)):
    print(answer["text"])
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as List
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import torch

from atom.assemble import open_engine
from atom.checkpoint import Progress, RichProgress, SilentProgress, Tokenizer
from atom.checkpoint.progress import SILENT, Task
from atom.config import Config
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
from atom.errors import EngineDeadError, RequestError, UnsupportedError, one_line
from atom.images.reader import ImageReader
from atom.measurement.phases import PhaseClock
from atom.pair_prompts import PairTemplate, refuse_template
from atom.prompts import (
    Prompt,
    SaltedPrompt,
    adapters_of,
    encode_conversations,
    joined_pairs,
    place_prompt,
    pooled_prompts,
    prompts_of,
    scored_prompts,
)
from atom.runtime.draft.speculation import describe_drafts, draft_statistics
from atom.runtime.metrics import DEFAULT_VERSION, EngineStats
from atom.runtime.ranks.remote import serve_rank
from atom.runtime.requests.taps import GivenSteer, GivenTaps, read_steer, read_taps
from atom.runtime.types import RequestOptions, Sequence, StreamCallback
from atom.sampling_params import SamplingParams


class LLMEngine:
    """Serves one model. Its arguments are the configuration's fields: serve's (max_num_seqs, …) and the plain ones.

    With parallel.launcher=torchrun, a script is run by each rank: in all but the first, this serves as one and exits.

    Raises the errors of `atom.errors`; a value that is not supported is an UnsupportedError.
    """

    def __init__(self, model: str | None = None, *, config_dirs: List[str] = (), **fields: Any) -> None:
        from atom.config.load import engine_overrides, load

        self._open(load(engine_overrides(model, fields), config_dirs=config_dirs), SilentProgress())

    @classmethod
    def from_config(cls, config: Config, clock: PhaseClock | None = None) -> LLMEngine:
        """The engine of a loaded configuration, its progress shown on stderr. clock: has the phases before this one"""
        engine = cls.__new__(cls)
        engine._open(config, RichProgress(), clock)
        return engine

    def _open(self, config: Config, progress: Progress, clock: PhaseClock | None = None) -> None:
        if (num_replicas := config.parallel.replicas) > 1:
            instead = "LLMEngine is one engine; leave it out, or serve with atom-run"
            raise UnsupportedError(f"parallel.replicas={num_replicas}: {instead}")
        if config.serve.models:
            raise UnsupportedError("serve.models lists those of a server: LLMEngine is one engine, of one model")
        if config.rank > 0:
            sys.exit(serve_rank(config))
        self.config = config
        self._process = os.getpid()
        self._engine = open_engine(config, progress, clock=clock)
        self._images = ImageReader(config) if config.reads_images else None
        self._ended: list[Sequence] = []  # ended while generate waited for others

    @property
    def metrics(self) -> EngineStats:
        """The engine's load now, and its counts since the start."""
        return self._engine.stats()

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The checkpoint's tokenizer, None without one: encode, decode, encode_chat with any value for its template."""
        return self._engine.vocabulary.tokenizer

    def generate(
        self,
        prompts: Prompt | List[Prompt],
        sampling_params: SamplingParams | List[SamplingParams] | None = None,
        adapters: str | List[str | None] | None = None,
        use_tqdm: bool = False,
        *,
        taps: GivenTaps = None,
        steer: GivenSteer = None,
    ) -> list[dict[str, Any]]:
        """Answer every prompt, or one text or mapping; blocks until all are done.

        adapters: the name of a loaded LoRA adapter for all prompts, or one for each, None for the plain model.
        use_tqdm: show on stderr how many answers are done.
        taps: layers of passes.taps whose hidden states are wanted, by name: {"model.layers.12": "mean"}, or a list of
          names for the prompt's last token. The answers have them as `taps`: by name fp32[H], or of all [tokens, H].
        steer: vectors of passes.steer that are added to hidden states, with their scales: {"calm": 4.0}.

        A dict for each prompt, or n of them in a row with their `index`: text (None without a tokenizer), token_ids,
        finish_reason, num_tokens_input, num_tokens_output; ttft, tpot and latency in seconds; logprobs and
        prompt_logprobs if asked for, prefix_hit with explain, and weight_versions if weights with a name have sampled
        it. A prompt that fails while others run has finish_reason error and its `error`; what fails all that run is
        raised.
        """
        sequences = self.complete(prompts, sampling_params, adapters, use_tqdm, taps=taps, steer=steer)
        return list(map(answer, sequences))

    def complete(
        self,
        prompts: Prompt | List[Prompt],
        sampling_params: SamplingParams | List[SamplingParams] | None = None,
        adapters: str | List[str | None] | None = None,
        use_tqdm: bool = False,
        *,
        taps: GivenTaps = None,
        steer: GivenSteer = None,
    ) -> list[Sequence]:
        """Answer every prompt, as `generate` does, and return the sequences themselves, those of a prompt in a row."""
        self._need_awake()
        ids = self.add_request(prompts, sampling_params, adapters=adapters, taps=taps, steer=steer)
        return self._finish(ids, RichProgress() if use_tqdm else SILENT)

    def chat(
        self,
        messages: list[dict[str, Any]] | list[list[dict[str, Any]]],
        sampling_params: SamplingParams | List[SamplingParams] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        adapters: str | List[str | None] | None = None,
        use_tqdm: bool = False,
        taps: GivenTaps = None,
        steer: GivenSteer = None,
    ) -> list[dict[str, Any]]:
        """Answer a conversation, or a list of them, by arguments of vLLM's `LLM.chat`; the answers are generate's.

        chat_template: in place of the checkpoint's
        continue_final_message: the answer continues the last message, and add_generation_prompt must be false
        chat_template_kwargs: more variables of the template
        adapters, use_tqdm, taps, steer: as in generate
        """
        encoded = encode_conversations(
            self.tokenizer,
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self.generate(encoded, sampling_params, adapters, use_tqdm, taps=taps, steer=steer)

    def score(
        self,
        data_1: Prompt | List[Prompt],
        data_2: Prompt | List[Prompt],
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[float]:
        """Compare one prompt with each of a list, or the pairs of two equally long lists.

        A classifier of one label scores the two in a row, or in the chat template that the checkpoint has for pairs;
        else it is the cosine similarity of their embeddings, those of serve.pooler_config.pooling_type. RequestError if
        it is not set, or the classifier has more labels.

        chat_template: of pairs, for messages of the roles query and document, in place of the checkpoint's
        chat_template_kwargs: more variables of the template, as `instruction`
        """
        first, second = scored_prompts(data_1, data_2)
        if self.config.classifies:
            check_labels(self.config, 1)
            template = PairTemplate.find(self.config, self.tokenizer, chat_template)
            pairs = joined_pairs(first, second, template, chat_template_kwargs)
            scored = self._pool(pairs, classify=True)
            return [float(probabilities(embedding_of(each), self.config)[0]) for each in scored]
        refuse_template(chat_template, chat_template_kwargs)
        return similarities(list(map(embedding_of, self._pool([*first, *second]))), len(first))

    def embed(
        self, prompts: Prompt | List[Prompt], adapters: str | List[str | None] | None = None
    ) -> list[dict[str, Any]]:
        """The embedding of each prompt, or of one text or mapping, by the name of vLLM's `LLM.embed`.

        Embeddings are those of serve.pooler_config; RequestError if no pooling_type is set. A dict for each prompt:
        embedding (a list of as many numbers as the model is wide) and num_tokens_input.

        adapters: as in generate
        """
        return [describe_embedding(each, self.config) for each in self._pool(pooled_prompts(prompts), adapters)]

    def classify(
        self, prompts: Prompt | List[Prompt], adapters: str | List[str | None] | None = None
    ) -> list[dict[str, Any]]:
        """The label of each prompt, or of one text or mapping, by the name of vLLM's `LLM.classify`.

        A dict for each: label (None without names), probs, num_classes, num_tokens_input. RequestError if the model is
        no classifier.

        adapters: as in generate
        """
        check_labels(self.config)
        pooled = self._pool(pooled_prompts(prompts), adapters, classify=True)
        return [
            describe_labels(embedding_of(each), self.config) | {"num_tokens_input": len(each.prompt)} for each in pooled
        ]

    def _pool(
        self, prompts: List[SaltedPrompt], adapters: str | List[str | None] | None = None, *, classify: bool = False
    ) -> list[Sequence]:
        """Have each prompt embedded, or scored by the classifier."""
        pooling = pooling_of(self.config)
        self._need_awake()
        prepared = []
        for each, name in zip(prompts, adapters_of(adapters, len(prompts)), strict=True):
            options = RequestOptions(salt=each.salt, pooling=pooling, classify=classify, adapter=name)
            prepared.append(self._engine.prepare(each.content, POOLED, options))
        return self._finish([self._engine.submit(each) for each in prepared])

    def __reduce__(self) -> NoReturn:
        raise TypeError("an LLMEngine cannot be pickled or copied; open one in each process, or serve the model")

    def _need_own_process(self) -> None:
        if self._process != os.getpid():  # its threads are not in the fork: a step would wait for them for ever
            where = f"the engine belongs to process {self._process}, from which this one was forked"
            raise EngineDeadError(f"{where}; open one in each process, or serve the model")

    def _need_awake(self) -> None:
        self._need_own_process()
        if self._engine.is_sleeping:
            raise RequestError("the engine sleeps; call wake_up first")
        if self._engine.is_paused:
            raise RequestError("the engine is paused; call resume_generation first")
        if self._engine.is_updating:
            raise RequestError("the weights are being updated; call finish_weight_update first")

    def _finish(self, ids: list[str], progress: Progress = SILENT) -> list[Sequence]:
        """Step until these requests have ended; their sequences in order. What fails all that run is raised."""
        with progress.task("answering", len(ids), in_bytes=False) as task:
            return self._finish_within(ids, task)

    def _finish_within(self, ids: list[str], task: Task) -> list[Sequence]:
        order = {id: place for place, id in enumerate(ids)}
        mine: list[Sequence] = []
        others: list[Sequence] = []
        waiting = set(ids)
        try:
            while waiting:
                for sequence in self.step():
                    (mine if sequence.request_id in order else others).append(sequence)
                running = {id for id in waiting if self._engine.is_running(id)}
                task.advance(len(waiting) - len(running))
                waiting = running
        except BaseException:
            for id in waiting:
                self.abort(id)
            others += [sequence for sequence in self._engine.take_ended() if sequence.request_id not in order]
            raise
        finally:
            self._ended += others
        return sorted(mine, key=lambda s: (order[s.request_id], s.index))

    def add_request(
        self,
        prompt_or_tokens_list: Prompt | List[Prompt],
        sampling_params_list: SamplingParams | List[SamplingParams] | None = None,
        stream_callback: StreamCallback | None = None,
        adapters: str | List[str | None] | None = None,
        *,
        taps: GivenTaps = None,
        steer: GivenSteer = None,
    ) -> list[str]:
        """Queue prompts, all or none, and return their ids. RequestError says which one cannot be served.

        sampling_params_list: None: those of the configuration and of the checkpoint's generation_config.json
        stream_callback: gets a `RequestOutput` for every token that completes text, and one at the end
        adapters, taps, steer: as in generate
        """
        self._need_own_process()
        prompts = prompts_of(prompt_or_tokens_list)
        params = sampling_params_list
        if params is None:
            params = SamplingParams(**self.config.sampling.values())
        is_one = isinstance(params, SamplingParams | Mapping) or not isinstance(params, Iterable)
        every: list[Any] = [params] * len(prompts) if is_one else list(params)  # type: ignore[arg-type]
        if len(every) != len(prompts):
            raise RequestError(f"{len(every)} sampling params for {len(prompts)} prompts; give one, or one for each")
        if wrong := [one for one in every if not isinstance(one, SamplingParams)]:
            raise RequestError(one_line(f"{wrong[0]!r:.200} is no SamplingParams"))
        names, prepared = adapters_of(adapters, len(prompts)), []
        more: dict[str, Any] = {"taps": read_taps(taps), "steer": read_steer(steer)}
        for place, (prompt, one, name) in enumerate(zip(prompts, every, names, strict=True)):
            try:
                content, images = place_prompt(prompt, self._images, self._engine.vocabulary)
                options = RequestOptions(salt=prompt.salt, adapter=name, images=images, **more)
                prepared.append(self._engine.prepare(content, one, options))
            except RequestError as error:
                raise RequestError(f"prompt {place}: {error}" if len(prompts) > 1 else str(error)) from None
        return [self._engine.submit(sequences, stream_callback) for sequences in prepared]

    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """The token ids of a conversation in the checkpoint's chat template, up to where the answer begins."""
        return self._engine.vocabulary.encode_chat(messages)

    def step(self) -> list[Sequence]:
        """Run one step; the sequences that ended. An error of all sequences is raised; the step can be run again."""
        ended, self._ended = self._ended, []
        return ended + self._engine.step()

    def is_finished(self) -> bool:
        """Whether every request has ended and been returned."""
        return not (self._engine.has_work or self._ended)

    def abort(self, request_id: str) -> None:
        """End a request with finish_reason abort; the next step returns it."""
        self._engine.abort(request_id)

    @property
    def lora_adapters(self) -> list[str]:
        """The names of the LoRA adapters that are loaded."""
        return list(self._engine.loras.names)

    def load_lora_adapter(self, name: str, path: str) -> None:
        """Load the LoRA adapter of a folder under a name. CheckpointError if it is not of this model."""
        loras = self._engine.loras
        loras.load(name, loras.read(path))

    def unload_lora_adapter(self, name: str) -> None:
        """Drop a LoRA adapter; requests that hold it go on. RequestError if none has that name."""
        self._engine.loras.unload(name)

    def reset_prefix_cache(self) -> bool:
        """Forget the KV of all prompts, for a measurement, say. Requests that run go on. True, as in vLLM."""
        self._engine.reset_prefix_cache()
        return True

    def pause_generation(self, mode: str = "abort", *, clear_cache: bool = True) -> None:
        """Have `step` compute nothing until `resume_generation`, as vLLM's AsyncLLM; requests that come meanwhile wait.

        mode: abort ends all requests with this finish_reason, wait lets those that run end, keep lets them go on after
          `resume_generation`; the next step returns those that ended
        clear_cache: forget the KV of all prompts; requests that go on compute theirs again
        """
        self._engine.pause(mode, clear_cache=clear_cache)

    def resume_generation(self) -> None:
        """Go on after `pause_generation`."""
        self._engine.resume()

    @property
    def is_paused(self) -> bool:
        return self._engine.is_paused

    @property
    def weight_version(self) -> str:
        """The name of the weights; "default" until they get one."""
        return self._engine.weight_version

    def update_weight_version(self, new_version: str) -> None:
        """Name the weights; answers report those of their tokens as `weight_versions`."""
        self._engine.set_weight_version(new_version)

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give up the memory of weights and KV until `wake_up`; see `atom.runtime.engine.Engine.sleep`.

        RequestError without enable_sleep_mode=True.
        """
        self._engine.sleep(level, mode)

    def wake_up(self, tags: List[str] | None = None) -> None:
        """Take the memory again. tags: only weights or only kv_cache; CapacityError if there is too little."""
        self._engine.wake_up(tags)

    @property
    def is_sleeping(self) -> bool:
        return self._engine.is_sleeping

    def init_weight_transfer_engine(self, request: Mapping[str, Any]) -> None:
        """Prepare for a trainer that sends weights, by the name and with the fields of vLLM's engine.

        request: {"init_info": {…}}, or the inner mapping, of `atom.weights.transfers.InitInfo`; waits for the trainer
          if it has an address for NCCL. RequestError if that does not come
        """
        self._engine.init_weight_transfer(read_init(request))

    def start_weight_update(self) -> None:
        """Begin an update of several parts: no step runs until `finish_weight_update`."""
        self._engine.start_weight_update()

    def update_weights(
        self,
        tensors: Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]],
        *,
        version: str | None = None,
        keep_cache: bool = False,
    ) -> None:
        """Update weights in place, all or some; see `atom.runtime.engine.Engine.update_weights`.

        tensors: by the names that transformers or the checkpoint has them by; or how another process sends them:
          {"update_info": {…}}, or the inner mapping, of `atom.weights.transfers.UpdateInfo`
        version: a name of the weights; None: the number of updates so far
        keep_cache: keep the KV that the old weights have computed
        """
        self._need_own_process()
        self._engine.update_weights(read_update(tensors), version, keep_cache=keep_cache)

    def finish_weight_update(self, version: str | None = None, *, keep_cache: bool = False) -> None:
        """Finish an update of several parts; version and keep_cache as of `update_weights`."""
        self._engine.finish_weight_update(version, keep_cache=keep_cache)

    def start_profile(self) -> None:
        """Trace the following steps. ConfigError without serve.torch_profiler_dir, RequestError while a trace runs."""
        self._engine.start_profile()

    def stop_profile(self) -> Path:
        """End the trace and write it; its file. RequestError if none runs."""
        return self._engine.stop_profile()

    def print_mtp_statistics(self) -> None:
        """Print how many drafted tokens were accepted."""
        print(describe_drafts(self.metrics.scheduler))

    def get_mtp_statistics(self) -> dict[str, Any]:
        """How many drafted tokens were accepted: in all, by number in a step, and tokens a step of a sequence."""
        return draft_statistics(self.metrics.scheduler)

    def close(self) -> None:
        """Free the memory; a closed engine raises EngineDeadError."""
        if not isinstance(self._engine, _Closed):
            self._engine.close()
            if self._images is not None:
                self._images.close()
        self._engine = _Closed()  # type: ignore[assignment]
        if self.config.device != "cpu":
            gc.collect()  # the engine's parts reference each other
            torch.cuda.empty_cache()


def read_init(request: Any) -> Mapping[str, Any]:
    """What `Engine.init_weight_transfer` takes, of a mapping or of vLLM's WeightTransferInitRequest."""
    found = getattr(request, "init_info", request)
    if not isinstance(found, Mapping):
        raise RequestError(f"init_weight_transfer_engine takes init_info, not {type(request).__name__}")
    info: Mapping[str, Any] = found.get("init_info", found)
    return info


def read_update(tensors: Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]]) -> Any:
    """What `Engine.update_weights` takes: pairs of names and tensors, or what tells where they are."""
    tensors = getattr(tensors, "update_info", tensors)  # of vLLM's WeightTransferUpdateRequest
    if not isinstance(tensors, Mapping):
        if not isinstance(tensors, Iterable):
            raise RequestError(f"update_weights takes tensors by name, or where they are, not {type(tensors).__name__}")
        return list(tensors)
    found = tensors.get("update_info", tensors)
    is_info = isinstance(found, Mapping) and "names" in found and not isinstance(found["names"], torch.Tensor)
    return found if is_info else list(found.items())


class _Closed:
    def __getattr__(self, name: str) -> Any:
        raise EngineDeadError("the engine is closed")


def answer(sequence: Sequence) -> dict[str, Any]:
    """The answer dict of a finished sequence, see `generate`."""
    assert sequence.finished_at is not None, "it is finished"
    first = sequence.first_token_at or sequence.finished_at
    num_output = len(sequence.output)
    result: dict[str, Any] = {
        "text": sequence.text,
        "token_ids": sequence.output,
        "finish_reason": sequence.finish_reason,
        "num_tokens_input": len(sequence.prompt),
        "num_tokens_output": num_output,
        "ttft": first - sequence.arrival,
        "tpot": (sequence.finished_at - first) / (num_output - 1) if num_output > 1 else 0.0,
        "latency": sequence.finished_at - sequence.arrival,
    }
    if sequence.error is not None:
        result["error"] = sequence.error
    if any(span.version != DEFAULT_VERSION for span in sequence.weight_versions):
        result["weight_versions"] = sequence.weight_versions
    if sequence.params.n > 1:
        result["index"] = sequence.index
    if sequence.hit is not None:
        result["prefix_hit"] = msgspec.structs.asdict(sequence.hit)
    if sequence.params.logprobs is not None:
        result["logprobs"] = sequence.logprobs
    if sequence.params.prompt_logprobs is not None:
        result["prompt_logprobs"] = sequence.prompt_logprobs
    if sequence.tapped:
        result["taps"] = sequence.taps
    return result
