"""The Python API: a model in this process.

from atom import LLMEngine, SamplingParams

engine = LLMEngine(model="/models/qwen3", max_model_len=4096)
for answer in engine.generate(["What is the capital of France?"], SamplingParams(max_tokens=32)):
    print(answer["text"])
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping
from collections.abc import Sequence as List
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from atom import weights
from atom.cache import Cache
from atom.checkpoint import Checkpoint, Progress, SilentProgress, Tokenizer, stop_ids
from atom.compiler import Compiled, compile_model
from atom.config import Config, ModelConfig, SamplingParams, engine_overrides, load
from atom.config.checkpoint import is_here, open_for
from atom.errors import EngineDeadError, RequestError
from atom.gc_utils import no_collection
from atom.graph import Graph, Recipe
from atom.kernels import find_tuner
from atom.runtime import memory
from atom.runtime.device_runner import DeviceRunner
from atom.runtime.engine import Engine
from atom.runtime.kv_cache import KVCache, num_blocks_needed, plan_memory
from atom.runtime.metrics import Metrics
from atom.runtime.profiler import Profiler
from atom.runtime.runner import Runner
from atom.runtime.scheduler import Scheduler
from atom.runtime.tune import tune, use_measured
from atom.runtime.types import CacheKind, Executes, Sequence, StreamCallback

Prompt = str | list[int]


class LLMEngine:
    """Serves one model. The fields are the configuration's: serve's (max_num_seqs, block_size, …) and the plain ones.

    Raises the errors of `atom.errors`; a value that is not built yet is an UnsupportedError.
    """

    def __init__(self, model: str | None = None, *, config_dirs: List[str] = (), **fields: Any) -> None:
        self._open(load(engine_overrides(model, fields), config_dirs=config_dirs), SilentProgress())

    @classmethod
    def from_config(cls, config: Config, progress: Progress | None = None) -> LLMEngine:
        """The engine of a loaded configuration."""
        engine = cls.__new__(cls)
        engine._open(config, progress or SilentProgress())
        return engine

    def _open(self, config: Config, progress: Progress) -> None:
        self.config = config
        self._engine = open_engine(config, progress)
        self._ended: list[Sequence] = []  # ended while generate waited for others

    @property
    def metrics(self) -> Metrics:
        return self._engine.metrics

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The checkpoint's, None where it has none: encode, decode, encode_chat with any value for its template."""
        return self._engine.tokenizer

    def generate(
        self, prompts: List[Prompt], sampling_params: SamplingParams | List[SamplingParams] | None = None
    ) -> list[dict[str, Any]]:
        """Answer every prompt; blocks until all are done.

        A dict for each prompt, or n of them in a row with their `index`: text (None without a tokenizer), token_ids,
        finish_reason, num_tokens_input, num_tokens_output; ttft, tpot and latency in seconds; logprobs and
        prompt_logprobs where asked for. A prompt that fails where others run has finish_reason error and its `error`;
        what fails all that run is raised.
        """
        ids = self.add_request(prompts, sampling_params)
        order = {id: place for place, id in enumerate(ids)}
        mine: list[Sequence] = []
        others: list[Sequence] = []
        waiting = set(ids)
        try:
            while waiting:
                for sequence in self.step():
                    (mine if sequence.request_id in order else others).append(sequence)
                waiting = {id for id in waiting if self._engine.is_running(id)}
        except BaseException:
            for id in waiting:
                self.abort(id)
            others += [sequence for sequence in self._engine.take_ended() if sequence.request_id not in order]
            raise
        finally:
            self._ended += others
        return [answer(sequence) for sequence in sorted(mine, key=lambda s: (order[s.request_id], s.index))]

    def add_request(
        self,
        prompt_or_tokens_list: List[Prompt],
        sampling_params_list: SamplingParams | List[SamplingParams] | None = None,
        stream_callback: StreamCallback | None = None,
    ) -> list[str]:
        """Queue prompts, all or none, and give their ids. RequestError says which one cannot be served.

        Without sampling params those of the configuration count, and so does the checkpoint's generation_config.json.
        The callback gets a `RequestOutput` for every token that completes text and one at the end.
        """
        prompts = prompt_or_tokens_list
        if isinstance(prompts, str | Mapping):
            raise RequestError(f"the prompts are one {type(prompts).__name__}; give a list of prompts")
        prompts = list(prompts)
        params = sampling_params_list
        if params is None:
            params = SamplingParams(**self.config.sampling.values())
        every = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(every) != len(prompts):
            raise RequestError(f"{len(every)} sampling params for {len(prompts)} prompts; give one, or one for each")
        if wrong := [one for one in every if not isinstance(one, SamplingParams)]:
            raise RequestError(f"{wrong[0]!r} is no SamplingParams")
        prepared = []
        for place, (prompt, one) in enumerate(zip(prompts, every, strict=True)):
            try:
                prepared.append(self._engine.prepare(prompt, one))
            except RequestError as error:
                raise RequestError(f"prompt {place}: {error}" if len(prompts) > 1 else str(error)) from None
        return [self._engine.submit(sequences, stream_callback) for sequences in prepared]

    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """The token ids of a conversation in the checkpoint's chat template, up to where the answer begins."""
        return self._engine.encode_chat(messages)

    def step(self) -> list[Sequence]:
        """Run one step: the sequences that ended. What fails for all that it runs is raised, and can be taken again."""
        ended, self._ended = self._ended, []
        return ended + self._engine.step()

    def is_finished(self) -> bool:
        """Whether every request has ended and been returned."""
        return not (self._engine.has_work or self._ended)

    def abort(self, request_id: str) -> None:
        """End a request with finish_reason abort; the next step returns it."""
        self._engine.abort(request_id)

    def start_profile(self) -> None:
        """Trace the steps that follow. ConfigError without serve.torch_profiler_dir, RequestError while one runs."""
        self._engine.start_profile()

    def stop_profile(self) -> Path:
        """Write the trace: its file. RequestError where none runs."""
        return self._engine.stop_profile()

    def print_mtp_statistics(self) -> None:
        """Print how often tokens that were guessed ahead were right."""
        print("No token is guessed ahead: there is no speculative decoding, and no statistics of it.")

    def close(self) -> None:
        """Give the memory back; a closed engine raises EngineDeadError."""
        self._engine = _Closed()  # type: ignore[assignment]
        if self.config.device != "cpu":
            gc.collect()  # the engine's parts name each other
            torch.cuda.empty_cache()


class _Closed:
    def __getattr__(self, name: str) -> Any:
        raise EngineDeadError("the engine is closed")


def answer(sequence: Sequence) -> dict[str, Any]:
    """What `generate` tells of a finished sequence."""
    assert sequence.finished_at is not None, "it is finished"
    first = sequence.first_token_at or sequence.finished_at
    num_output = len(sequence.output)
    told: dict[str, Any] = {
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
        told["error"] = sequence.error
    if sequence.params.n > 1:
        told["index"] = sequence.index
    if sequence.params.logprobs is not None:
        told["logprobs"] = sequence.logprobs
    if sequence.params.prompt_logprobs is not None:
        told["prompt_logprobs"] = sequence.prompt_logprobs
    return told


@no_collection()
def open_engine(config: Config, progress: Progress, compiled: Compiled | None = None) -> Engine:
    """Everything between a configuration, or what was compiled of it, and an engine that waits for requests."""
    with ExitStack() as opened:
        checkpoint = open_checked(config, progress, opened) if is_here(config) else None  # else it is fetched last
        compiled = compiled or compile_with(config, progress, checkpoint)
        graph, kinds = compiled.graph, cache_kinds(compiled.graph)
        if checkpoint is None:
            checkpoint = open_checked(config, progress, opened)
            check_weights(graph, checkpoint, config)
        tokenizer = checkpoint.tokenizer(trust_remote_code=config.trust_remote_code)
        tensors = load_weights(graph, checkpoint, config, progress)
        stops = stop_ids(checkpoint, tokenizer)
    serve = config.serve
    runner: Executes
    if config.device == "cpu":
        num_blocks = plan_kv(kinds, config)
        runner = Runner(graph, tensors, num_blocks, serve.block_size, compiled.code)
    else:
        runner, num_blocks = open_device(compiled, tensors, config, progress)
    cache = KVCache(kinds, num_blocks, serve.block_size, enable_prefix_caching=serve.enable_prefix_caching)
    scheduler = Scheduler(cache, run_ahead=runner.run_ahead, **_limits(config))
    print(f"atom-run: {_describe_pool(kinds, num_blocks, config)}", file=sys.stderr)
    if told := _describe_sampling(config):
        print(f"atom-run: {told}", file=sys.stderr)
    return Engine(
        runner,
        scheduler,
        tokenizer=tokenizer,
        stop_ids=stops,
        vocab_size=config.model.vocab,
        seed=config.seed,
        profiler=Profiler(serve.torch_profiler_dir, is_detailed=serve.profiler_more),
    )


def open_checked(config: Config, progress: Progress, opened: ExitStack) -> Checkpoint:
    """The checkpoint, whose header has been held against the configuration; the stack closes it."""
    checkpoint = open_for(config, progress)
    opened.callback(checkpoint.close)
    if not config.load_dummy:
        weights.check_counts(config.model, checkpoint.tensors)
    stop_ids(checkpoint, None)
    return checkpoint


def compile_with(config: Config, progress: Progress, checkpoint: Checkpoint | None = None) -> Compiled:
    """The compiled model; what it took, and what is wrong with the cache folder, is told on stderr.

    A checkpoint that is on this disk is held against the configuration first.
    """
    assert config.cache is not None, "config.load resolves it"
    cache, opened = Cache(Path(config.cache)), ExitStack()

    def check(graph: Graph) -> None:  # what can be refused before anything is compiled or downloaded
        weights.refuse_packed(graph)
        plan_kv(cache_kinds(graph), config, None if config.device == "cpu" else memory.left_for_kv(graph, config))
        if checkpoint is not None:
            check_weights(graph, checkpoint, config)

    try:
        if checkpoint is None and is_here(config):
            checkpoint = open_checked(config, progress, opened)
        return compile_model(config, progress, cache, check=check)
    finally:
        opened.close()
        for line in cache.warnings:
            print(f"atom-run: {line}", file=sys.stderr)
        cache.close()


def check_weights(graph: Graph, checkpoint: Checkpoint, config: Config) -> None:
    """Hold the checkpoint's tensors against the graph, where they are what it runs with."""
    if not config.load_dummy:
        weights.check(graph, checkpoint.tensors, [*config.model.ignore, *mtp_patterns(config.model)])


def load_weights(
    graph: Graph, checkpoint: Checkpoint, config: Config, progress: Progress
) -> dict[Recipe, weights.Loaded]:
    """The tensors of the graph's recipes, stored or random."""
    if config.load_dummy:
        return weights.load_dummy(graph.recipes(), config.seed, config.device)
    return weights.load(graph.recipes(), checkpoint, progress, config.device)


def mtp_patterns(model: ModelConfig) -> List[str]:
    """The tensors of the layers that predict further tokens, which are stored behind the last one."""
    layers = range(model.layers, model.layers + model.mtp_layers)
    return [model.weights["layer"].replace("{layer}", str(layer)) + ".*" for layer in layers]


def plan_kv(kinds: List[CacheKind], config: Config, left: int | None = None) -> dict[str, int]:
    """Blocks of the KV pool by cache kind. CapacityError or ConfigError where they hold no sequence of max_model_len.

    left: bytes that a GPU has for it; None: what serve.kv_cache_memory says
    """
    serve, limits = config.serve, _limits(config)
    room = "serve.kv_cache_memory has {has}: raise serve.kv_cache_memory to {needs}"
    if left is not None:
        room = f"serve.gpu_memory_utilization={serve.gpu_memory_utilization:g} leaves it {{has}}: raise that"
    return plan_memory(
        kinds,
        serve.block_size,
        memory_bytes=serve.kv_cache_memory if left is None else left,
        num_blocks=serve.num_kvcache_blocks,
        max_model_len=limits["max_model_len"],
        max_num_seqs=limits["max_num_seqs"],
        max_num_batched_tokens=limits["max_num_batched_tokens"],
        room=room,
    )


def open_device(
    compiled: Compiled, tensors: dict[Recipe, weights.Loaded], config: Config, progress: Progress
) -> tuple[DeviceRunner, dict[str, int]]:
    """The runner of a GPU with its graphs captured, and the blocks of a KV pool that takes what is left."""
    serve, kinds = config.serve, cache_kinds(compiled.graph)
    with memory.no_memory_at_start(serve):
        runner = DeviceRunner(
            compiled.graph,
            tensors,
            {kind.name: 2 for kind in kinds},  # blocks to rehearse with
            serve.block_size,
            compiled.code,
            device=config.device,
            max_num_seqs=serve.max_num_seqs,
            max_model_len=_limits(config)["max_model_len"],
        )
        use_parameters(runner, compiled.graph, config, progress)
        sizes = memory.capture_sizes(serve) if compiled.level == 3 else []
        with progress.task("compiling kernels"):
            runner.graphs.compile(sizes, serve.max_num_batched_tokens)
        num_blocks = plan_kv(kinds, config, memory.measure_left(runner, sizes[-1:], serve))
        runner.bind(num_blocks)
        with progress.task("capturing CUDA graphs"):
            # a server is ready when nothing is left to do; a run of some prompts needs but few sizes
            runner.graphs.capture(sizes, is_lazy=config.job.kind == "generate")
    return runner, num_blocks


def use_parameters(runner: DeviceRunner, graph: Graph, config: Config, progress: Progress) -> None:
    """Run with what was measured for linears on this GPU; tune=true measures what nobody has measured first."""
    assert config.cache is not None, "config.load resolves it"
    cache, limits = Path(config.cache), _limits(config)

    def tell(line: str) -> None:
        print(f"atom-run: {line}", file=sys.stderr)

    tuner = find_tuner(config.device, runner.model.device)
    if tuner is not None:
        use_measured(runner.model, tuner, cache, tell)
    if tuner is not None and config.tune:
        max_rows = min(limits["max_num_seqs"], limits["max_num_batched_tokens"])
        tune(runner.model, tuner, graph, cache, max_rows, progress, tell)


def _describe_pool(kinds: List[CacheKind], num_blocks: dict[str, int], config: Config) -> str:
    serve, limits = config.serve, _limits(config)
    length, step = limits["max_model_len"], limits["max_num_batched_tokens"]
    num_tokens = (max(num_blocks.values()) - 1) * serve.block_size
    num_requests = min(
        (num_blocks[kind.name] - 1) // num_blocks_needed(kind, serve.block_size, length, min(step, length))
        for kind in kinds
    )
    return f"KV: {num_tokens} tokens, {num_requests} requests at max_model_len"


def _describe_sampling(config: Config) -> str:
    """The defaults of sampling that the checkpoint brings and that count; nothing where there are none."""
    stated = {name: value for name, value in config.generation.items() if getattr(config.sampling, name) == value}
    told = ", ".join(f"{name} {value:g}" for name, value in stated.items())
    return f"sampling as the checkpoint says: {told}; sampling.defaults=none leaves it out" if told else ""


def _limits(config: Config) -> dict[str, int]:
    serve = config.serve
    assert serve.max_model_len is not None, "config.load resolves it"
    return {
        "max_model_len": serve.max_model_len,
        "max_num_seqs": serve.max_num_seqs,
        "max_num_batched_tokens": serve.max_num_batched_tokens,
    }


def cache_kinds(graph: Graph) -> list[CacheKind]:
    """What the graph's layers keep for each token, by kind."""
    found: dict[str, CacheKind] = {}
    for cache in graph.caches():
        known = found.get(cache.kind)
        size = cache.type.num_bytes + (known.bytes_per_token if known else 0)
        found[cache.kind] = CacheKind(cache.kind, size, cache.window)
    return list(found.values())
