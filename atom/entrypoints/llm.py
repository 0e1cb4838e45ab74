"""vLLM's offline class: `LLM`, with its arguments and its outputs.

from atom import LLM, SamplingParams

llm = LLM("Qwen/Qwen3-0.6B", max_model_len="4k", swap_space=4)
for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0, stop=["."])):
    print(output.prompt, output.outputs[0].text, output.outputs[0].finish_reason)

Arguments are flags of `vllm serve`, with the same refusals; a dotted key is a field of the configuration.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn

from atom.checkpoint import Tokenizer
from atom.config.spelling import override
from atom.entrypoints.args import Parser
from atom.entrypoints.refused_flags import refusal_of
from atom.entrypoints.vllm_args import VLLMArgs, spell_flag
from atom.errors import ConfigError, RequestError, UnsupportedError
from atom.images.prompts import show_prompt
from atom.llm import LLMEngine
from atom.prompts import Prompt, encode_conversations, prompt_of, prompts_of
from atom.runtime.types import Logprobs, WeightSpan, openai_reason
from atom.runtime.types import Sequence as EngineSequence
from atom.sampling_params import SamplingParams

REFUSED = {  # method of vLLM's class -> what to use instead
    "beam_search": "there is no beam search; SamplingParams(n=…) draws several answers",
    "collective_rpc": "there is nothing to call in workers; llm_engine is the engine",
    "encode": "write embed",
    "get_metrics": "read llm_engine.metrics",
    "reward": "reward models are not supported; embed returns embeddings",
}


class RefusedMethod(UnsupportedError, AttributeError):
    """A method of vLLM's class that is missing here, so that hasattr is False."""


@dataclass(frozen=True)
class Logprob:
    logprob: float
    rank: int | None  # 1: the most likely token
    decoded_token: str | None


@dataclass(frozen=True)
class CompletionOutput:
    """One answer."""

    index: int
    text: str | None  # None without a tokenizer
    token_ids: list[int]
    cumulative_logprob: float | None = None  # None without logprobs, as the next
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None  # stop | length | repetition | abort | error
    stop_reason: int | str | None = None  # the stop token or stop string; of an error its message; repetition_detected
    weight_versions: list[WeightSpan] = field(default_factory=list)  # the names of the weights that sampled its tokens

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its answers."""

    request_id: str
    prompt: str | None  # None for token ids
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool = True
    num_cached_tokens: int = 0


@dataclass(frozen=True)
class EmbeddingOutput:
    embedding: list[float]


@dataclass(frozen=True)
class EmbeddingRequestOutput:
    outputs: EmbeddingOutput
    finished: bool = True


@dataclass(frozen=True)
class ClassificationOutput:
    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(frozen=True)
class ClassificationRequestOutput:
    outputs: ClassificationOutput
    finished: bool = True


@dataclass(frozen=True)
class ScoringOutput:
    score: float


@dataclass(frozen=True)
class ScoringRequestOutput:
    outputs: ScoringOutput
    finished: bool = True


@dataclass(frozen=True)
class LoRARequest:
    """An adapter, which is loaded when it is first asked for. lora_int_id: without effect, the name counts."""

    lora_name: str
    lora_int_id: int
    lora_path: str


class LLM:
    """A model in this process, under the names of vLLM. Raises the errors of `atom.errors`."""

    def __init__(self, model: str | None = None, **arguments: Any) -> None:
        self.llm_engine = LLMEngine.from_config(read_arguments(model, arguments).load())
        self._adapters = {name: Path(path) for name, path in (self.llm_engine.config.serve.lora_modules or {}).items()}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer every prompt, in order. Without sampling_params, the checkpoint's defaults apply."""
        if not isinstance(prompts, str | Sequence | Mapping):
            prompts = list(prompts)  # of an iterator
        contents = [each.content for each in prompts_of(prompts)]
        texts = [content if isinstance(content, str) else None for content in contents]
        return self._answer(prompts, texts, sampling_params, use_tqdm, lora_request)

    def chat(
        self,
        messages: list[dict[str, Any]] | list[list[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        chat_template: str | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of a list; `prompt` is what the template made of it."""
        encoded = encode_conversations(
            self.get_tokenizer(),
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        texts = [self._decode(prompt_of(each).content) for each in encoded]
        return self._answer(encoded, texts, sampling_params, use_tqdm, lora_request)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of each prompt; RequestError unless the model pools, as with runner="pooling".

        use_tqdm: without effect, no progress is shown
        """
        found = self.llm_engine.embed(prompts, self._load_all(lora_request))
        return [EmbeddingRequestOutput(EmbeddingOutput(each["embedding"])) for each in found]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """The probabilities of each prompt's labels; RequestError unless the model classifies.

        use_tqdm: as in `embed`
        """
        found = self.llm_engine.classify(prompts, self._load_all(lora_request))
        return [ClassificationRequestOutput(ClassificationOutput(each["probs"])) for each in found]

    def score(
        self,
        data_1: Prompt | Sequence[Prompt],
        data_2: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ScoringRequestOutput]:
        """The score of each pair, see `LLMEngine.score`. use_tqdm: as in `embed`"""
        found = self.llm_engine.score(
            data_1, data_2, chat_template=chat_template, chat_template_kwargs=chat_template_kwargs
        )
        return [ScoringRequestOutput(ScoringOutput(each)) for each in found]

    def get_tokenizer(self) -> Tokenizer | None:
        return self.llm_engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling parameters that apply if none are given."""
        return SamplingParams(**self.llm_engine.config.sampling.values())

    def reset_prefix_cache(self) -> bool:
        return self.llm_engine.reset_prefix_cache()

    def sleep(self, level: int = 1) -> None:
        self.llm_engine.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        self.llm_engine.wake_up(tags)

    def init_weight_transfer_engine(self, request: Mapping[str, Any]) -> None:
        """As vLLM's, with a mapping: {"init_info": {…}}."""
        self.llm_engine.init_weight_transfer_engine(request)

    def start_weight_update(self) -> None:
        self.llm_engine.start_weight_update()

    def update_weights(self, request: Mapping[str, Any]) -> None:
        """As vLLM's, with a mapping: {"update_info": {…}}; or tensors by name."""
        self.llm_engine.update_weights(request)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.llm_engine.finish_weight_update(weight_version)

    def start_profile(self) -> None:
        self.llm_engine.start_profile()

    def stop_profile(self) -> Path:
        return self.llm_engine.stop_profile()

    def __getattr__(self, name: str) -> NoReturn:
        if name in REFUSED:
            raise RefusedMethod(f"LLM.{name}: {REFUSED[name]}")
        raise AttributeError(f"'LLM' object has no attribute '{name}'")

    def _answer(
        self,
        prompts: Any,
        texts: list[str | None],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
    ) -> list[RequestOutput]:
        ended = self.llm_engine.complete(prompts, sampling_params, self._load_all(lora_request), use_tqdm)
        requests = [list(group) for _, group in groupby(ended, key=lambda each: each.request_id)]
        return [self._describe(group, text) for group, text in zip(requests, texts, strict=True)]

    def _load_all(self, requests: LoRARequest | Sequence[LoRARequest | None] | None) -> str | list[str | None] | None:
        """The names of the adapters that are asked for, loaded."""
        return [self._load(each) for each in requests] if isinstance(requests, list | tuple) else self._load(requests)

    def _load(self, request: Any) -> str | None:
        """The name of the adapter that a LoRARequest asks for, loaded."""
        if request is None:
            return None
        if not isinstance(request, LoRARequest):
            raise RequestError(f"lora_request={request!r} is no atom.entrypoints.llm.LoRARequest")
        name, path = request.lora_name, Path(request.lora_path)
        if name not in self.llm_engine.lora_adapters:
            self.llm_engine.load_lora_adapter(name, request.lora_path)
            self._adapters[name] = path
        elif (known := self._adapters.get(name, path)) != path:
            raise RequestError(f"the adapter {name} is that of {known}, not of {path}; choose another name")
        return name

    def _describe(self, sequences: list[EngineSequence], text: str | None) -> RequestOutput:
        first = sequences[0]
        prompt_logprobs = None
        if first.params.prompt_logprobs is not None:
            prompt_logprobs = [None if each is None else self._spell(each) for each in first.prompt_logprobs]
        outputs = [self._describe_answer(each) for each in sequences]
        tokens = show_prompt(first.prompt, self.llm_engine.config.model.vision)
        return RequestOutput(
            first.request_id, text, tokens, prompt_logprobs, outputs, num_cached_tokens=first.num_cached
        )

    def _describe_answer(self, sequence: EngineSequence) -> CompletionOutput:
        reason, stop = sequence.finish_reason or "", sequence.error or sequence.stop_string
        stop = "repetition_detected" if reason == "repetition" else stop
        token = re.fullmatch(r"stop_(\d+)", reason)
        logprobs = None if sequence.params.logprobs is None else sequence.logprobs
        return CompletionOutput(
            index=sequence.index,
            text=sequence.text,
            token_ids=sequence.output,
            cumulative_logprob=None if logprobs is None else sum(each.logprob for each in logprobs),
            logprobs=None if logprobs is None else [self._spell(each) for each in logprobs],
            finish_reason=openai_reason(reason),
            stop_reason=int(token[1]) if token else stop,
            weight_versions=sequence.weight_versions,
        )

    def _spell(self, place: Logprobs) -> dict[int, Logprob]:
        """The chosen token, then the most likely ones."""
        ranked = {id: (logprob, rank) for rank, (id, logprob) in enumerate(place.top, 1)}
        each = {place.token: (place.logprob, place.rank)} | ranked
        return {id: Logprob(logprob, rank, self._decode([id])) for id, (logprob, rank) in each.items()}

    def _decode(self, ids: list[int]) -> str | None:
        tokenizer = self.get_tokenizer()
        return None if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=False)


class ArgumentParser(Parser):
    """Raises ConfigError for wrong arguments, under their names in Python."""

    def error(self, message: str) -> NoReturn:
        try:
            super().error(message)
        except ConfigError as error:
            about = str(error).removesuffix(f"; see {self.prog} --help")
            raise ConfigError(f"{about}; docs/from-vllm.md lists them") from None


def read_arguments(model: str | None, arguments: Mapping[str, Any]) -> VLLMArgs:
    """Read arguments as flags. ConfigError and UnsupportedError name them without dashes."""
    if shown := {"help", "version"} & arguments.keys():
        raise UnsupportedError(f"{', '.join(sorted(shown))}: flags of a command, which show something and end it")
    settings = [override(key, value) for key, value in arguments.items() if "." in key]
    named = {"model": model}
    named |= {key: value for key, value in arguments.items() if "." not in key and not asks_nothing(key, value)}
    parser = ArgumentParser("LLM", "vLLM's offline class.")
    VLLMArgs.add_cli_args(parser)
    parser.set_defaults(model_tag=None)
    try:
        words = [word for key, value in named.items() for word in spell_argument(key, value)]
        args = VLLMArgs.from_cli_args(parser.parse(words))
        args.overrides()  # checks the values
    except (ConfigError, UnsupportedError) as error:
        error.args = (name_arguments(str(error)),)
        raise
    args.settings = tuple(settings)
    return args


def asks_nothing(key: str, value: Any) -> bool:
    """Whether an argument turns off a missing feature, or asks for statistics, which `LLMEngine.metrics` always has."""
    is_statistics = key == "disable_log_stats"
    return value is False and (is_statistics or refusal_of(f"--{key.replace('_', '-')}") is not None)


def spell_argument(key: str, value: Any) -> list[str]:
    """An argument as words of a command line; none if it is None."""
    if isinstance(value, str | int | float | bool | list | tuple | Mapping | Path | None):
        plain = list(value) if isinstance(value, tuple) else dict(value) if isinstance(value, Mapping) else value
        return list(spell_flag(key, plain, set()))
    if str(value).startswith("torch."):  # a dtype
        return list(spell_flag(key, str(value).removeprefix("torch."), set()))
    raise RequestError(f"{key}: a value of type {type(value).__name__} is not taken; give a text, number, list or dict")


def name_arguments(text: str) -> str:
    """Write flags in an error's text as arguments: max_num_seqs for --max-num-seqs."""
    text = re.sub(r"(?:with --set, as )?--set ([\w.]+)=([\w.]+)", r'**{"\1": \2}', text).removesuffix(": see --help")
    return re.sub(r"(?<![\w-])--(?:no-)?([a-z][\w-]*)", lambda match: match[1].replace("-", "_"), text)
