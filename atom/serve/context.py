"""State of the routes: of each model, and what models share.

engines = Replicas(config)
context = Context(config, engines, Metrics(engines))
context.shared.find(tenant, "qwen")              # the context of one of several models
tokens = await context.work(len(text), lambda: context.encode(text))
params = sampling_params(body, context.config)
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from atom.checkpoint import SILENT, RichProgress, Tokenizer, WatchedProgress
from atom.config import Config
from atom.errors import ConfigError, EngineDeadError, RequestError
from atom.images.decode import count_processes
from atom.images.reader import ImageReader
from atom.pair_prompts import PairTemplate
from atom.sampling_params import SamplingParams
from atom.serve.auth.tenants import Tenant
from atom.serve.engine.client import EngineState, QueueFullError
from atom.serve.engine.models import Models
from atom.serve.engine.replicas import Replicas
from atom.serve.engine.served_model import ServedModel
from atom.serve.http.errors import ContextLengthError, FieldError, ModelNotFoundError, body_of, shown, status_of
from atom.serve.http.tapped import RunningTaps
from atom.serve.openai.response_store import ResponseStore
from atom.serve.ops.metrics import Metrics
from atom.serve.ops.traces import open_traces
from atom.serve.prompt_images import OtherThreadError, begin_thread

LOG = logging.getLogger("atom.serve")
NUM_THREADS = 4  # threads that tokenize and render
NUM_WAITING = 2  # threads of requests with images, besides those that wait for a process that decodes one
TEMPLATE_SECONDS = 10.0  # after which a server refuses a chat
CUT_TOKENS = 64  # spare tokens before the last ones: where a text is cut, its first tokens change
ANY_MODEL = ("default", "dummy", "local-model", "tgi")  # what clients of servers with one model call it
OWN_VARIABLES = {  # of each request, or names that the rendering of chats has itself
    "messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template",
    "prefill", "is_continued", "cut", "check",
}  # fmt: skip
SHORT = 4096  # bytes of a body that are decoded or tokenized faster than a thread wakes up

T = TypeVar("T")


class Shared:
    """What the models of a server share."""

    def __init__(self, config: Config, models: Models | None = None) -> None:
        """ConfigError if traces cannot be sent, or responses not stored.

        models: None: one, that is always awake
        """
        http = config.serve.http
        self.models = models
        self.contexts: list[Context] = []  # of the models
        self.traces = open_traces(http.otlp_traces_endpoint)
        limit = http.response_store_bytes
        self.responses = ResponseStore(config.cache_folder / "responses", limit) if limit else None
        self.are_several = False  # several tenants, who take turns
        self.is_closed = False  # the server ends, and threads take no more work
        self.admit: Callable[[Sequence[Tenant]], None]  # changes who may use the server; the app sets it
        self.threads = ThreadPoolExecutor(NUM_THREADS, "text")
        self.image_threads = ThreadPoolExecutor(count_processes() + NUM_WAITING, "images", begin_thread)
        self.running_taps = RunningTaps()
        self.num_preparing = 0  # requests that are being prepared in a thread
        self.logged: set[str] = set()  # what `log_once` has logged

    def find(self, tenant: Tenant, model: str | None) -> Context:
        """The context of the model that a request names; without a name, of the first that its tenant may use.

        ModelNotFoundError if there is none, and there are several models; else `Context.model_for` decides.
        """
        if len(self.contexts) == 1:
            return self.contexts[0]
        named = {name: each for each in reversed(self.contexts) for name in each.names_for(tenant)}
        if model in named:
            return named[model]
        first = next((each for each in self.contexts if each.names_for(tenant)), None)
        if first is None or (model is not None and model not in ANY_MODEL):
            known = ", ".join(name for each in self.contexts for name in each.names_for(tenant)) or "none"
            raise ModelNotFoundError(f"the model {shown(str(model))!r} is not served here (served: {known})")
        return first

    def named(self, tenant: Tenant, model: str | None) -> list[Context]:
        """The context of the model that a request names; without a name, of all."""
        return self.contexts if model is None else [self.find(tenant, model)]

    @property
    def has_tokenizers(self) -> bool:
        """Whether each model's tokenizer is open, or known to be missing."""
        return all(each.has_tokenizer.is_set() for each in self.contexts)

    async def await_tokenizers(self) -> None:
        for each in self.contexts:
            await each.has_tokenizer.wait()

    async def run(self, threads: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        """Run work in one of these threads. asyncio.CancelledError if the server ends before one has taken it."""
        if self.is_closed:
            raise asyncio.CancelledError
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    def close(self) -> None:
        self.is_closed = True
        self.threads.shutdown(wait=False, cancel_futures=True)
        self.image_threads.shutdown(wait=False, cancel_futures=True)
        for each in self.contexts:
            if each.images is not None:
                each.images.close()
        if self.traces is not None:
            self.traces.close()
        if self.responses is not None:
            self.responses.close()


class Context:
    def __init__(
        self,
        config: Config,
        engines: Replicas,
        metrics: Metrics,
        prepare_seconds: float | None = None,
        *,
        shared: Shared | None = None,
        served: ServedModel | None = None,
    ) -> None:
        """ConfigError of `Shared`.

        prepare_seconds: of a request, the wait for a thread included
        shared: with the other models of the server; None: there is none
        served: the model, if it may sleep
        """
        self.config = config
        self.engines = engines
        self.metrics = metrics
        self.shared = Shared(config) if shared is None else shared
        self.shared.contexts.append(self)
        self.served = served
        self.images = ImageReader(config) if config.reads_images else None  # None: the model reads only text
        self.tokenizer: Tokenizer | None = None  # before `has_tokenizer`, and if the checkpoint has none
        self.has_tokenizer = asyncio.Event()  # set once it is known whether there is one
        # a terminal has one line for progress bars, the engine's
        self.progress = WatchedProgress(SILENT if sys.stderr.isatty() else RichProgress())
        self.token_counts: dict[int, int] = {}  # of beginnings of prompts, by hash; see `prompt_parts`
        self.prepare_seconds = TEMPLATE_SECONDS if prepare_seconds is None else prepare_seconds

    @cached_property
    def pair_template(self) -> PairTemplate | None:
        """What makes one prompt of a query and a document; None: they follow one another."""
        http = self.config.serve.http
        template = self.need_tokenizer().chat_template if http.chat_template is not None else None
        return PairTemplate.find(self.config, self.tokenizer, template, http.chat_template_kwargs)

    @property
    def names(self) -> list[str]:
        """Names by which requests may call the model, and its adapters."""
        return [*self.config.served_names, *self.engines.adapters]

    def adapter(self, model: str) -> str | None:
        """The adapter that a served name is of, None for the model itself."""
        return model if model in self.engines.adapters else None

    @property
    def responses(self) -> ResponseStore | None:
        return self.shared.responses

    @property
    def are_several(self) -> bool:
        """Whether there are several tenants, who take turns."""
        return self.shared.are_several

    @property
    def state(self) -> EngineState:
        """Whether requests may come: a model that sleeps is ready."""
        models = self.shared.models
        state = self.engines.state if models is None else models.accepts
        is_waiting = state is EngineState.READY and not self.has_tokenizer.is_set()
        return EngineState.LOADING if is_waiting else state

    @property
    def doing(self) -> str:
        """The present phase of a start: a step of the engines' start, or a download of this process."""
        is_ready = self.engines.state is EngineState.READY
        engine = "opening the tokenizer" if is_ready else self.engines.doing
        return "; ".join(filter(None, (engine, self.progress.doing)))

    @property
    def max_total_tokens(self) -> int:
        """Max tokens of prompt and answer together."""
        limit = self.config.serve.max_model_len
        assert limit is not None, "config.load resolves it"
        return min(self.config.serve.http.max_total_tokens or limit, limit)

    @property
    def max_input_length(self) -> int:
        """Max tokens of a prompt, which leave one for the answer."""
        total = self.max_total_tokens
        return min(self.config.serve.http.max_input_length or total, total - 1)

    @property
    def length_option(self) -> str:
        """The option that limits prompts, as it was set; empty if none was and the model limits them."""
        serve, model, http = self.config.serve, self.config.model, self.config.serve.http
        assert serve.max_model_len is not None, "config.load resolves it"
        if (http.max_input_length or self.max_total_tokens) < self.max_total_tokens:
            return f"serve.http.max_input_length={http.max_input_length}"
        if self.max_total_tokens < serve.max_model_len:
            return f"serve.http.max_total_tokens={http.max_total_tokens}"
        return f"serve.max_model_len={serve.max_model_len}" if serve.max_model_len < model.max_position else ""

    def too_long(self, field: str, has: str, max_value: str, fix: str = "shorten it") -> ContextLengthError:
        """The error for a long prompt, which begins with OpenAI's words, since clients look for them."""
        option = f" ({self.length_option})" if self.length_option else ""
        limit = f"This model's maximum context length is {self.max_total_tokens} tokens"
        return ContextLengthError(field, f"{limit}. However, {has}, and it may have {max_value}{option}; {fix}")

    def begin(self) -> None:
        """Begin a request. EngineDeadError unless the engine is ready."""
        if self.state is not EngineState.READY:
            raise EngineDeadError(f"the server is {self.state}")

    def names_for(self, tenant: Tenant) -> list[str]:
        """Names by which a tenant's requests may call the model, and the adapters that they may use."""
        return [name for name in self.names if tenant.models is None or name in tenant.models]

    def model_for(self, tenant: Tenant, model: str | None) -> str:
        """The name of the model that a request asks for. ModelNotFoundError if it is not served to this tenant."""
        names = self.names_for(tenant)
        means_any = model in ANY_MODEL and model not in names and not self.engines.adapters
        if names and (model is None or means_any):
            return names[0]
        if model is None or model not in names:
            known = ", ".join(names) or "none"
            raise ModelNotFoundError(f"the model {shown(str(model))!r} is not served here (served: {known})")
        return model

    async def work(self, size: int, work: Callable[[], T]) -> T:
        """Run work whose time grows with `size`: small work here, else in a thread."""
        is_short = size <= SHORT and (self.tokenizer is None or self.tokenizer.encodes_here(size))
        return work() if is_short else await self.in_thread(work)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run slow work in a thread, anew in another one if it reads images.

        RequestError if it takes too long, EngineDeadError if the server ends before a thread has taken it.
        """
        task = asyncio.current_task()
        self.shared.num_preparing += 1
        try:
            async with asyncio.timeout(self.prepare_seconds):
                try:
                    return await self.shared.run(self.shared.threads, work)
                except OtherThreadError:
                    return await self.shared.run(self.shared.image_threads, work)
        except TimeoutError:
            raise RequestError(f"the request took more than {self.prepare_seconds:g} s to prepare") from None
        except asyncio.CancelledError:
            if task is None or task.cancelling():
                raise
            raise EngineDeadError("the server ends before this request has been prepared") from None
        finally:
            self.shared.num_preparing -= 1

    def need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("the checkpoint has no tokenizer; send token ids to /v1/completions")
        return self.tokenizer

    def cut(self, text: str, truncate: int | None = None) -> str:
        """Cut a prompt before it is encoded, to its end if only its last `truncate` tokens are used.

        FieldError if it has more characters than the allowed tokens can have: encoding it would take seconds.
        """
        max_tokens = self.max_input_length
        if len(text) <= max_tokens:
            return text
        size = self.need_tokenizer().longest_token
        if truncate is not None and truncate <= max_tokens:
            return text[-size * (truncate + CUT_TOKENS) :]
        if len(text) > size * max_tokens:
            has = f"the prompt is too long: it has {len(text)} characters"
            raise self.too_long("prompt", has, f"{max_tokens} tokens of at most {size} characters each")
        return text

    def encode(self, text: str, *, add_special_tokens: bool = True, truncate: int | None = None) -> list[int]:
        """Tokenize a prompt. FieldError as in `cut`. truncate: only that many last tokens are used; more may come."""
        text = self.cut(text, truncate)
        return self.need_tokenizer().encode(text, add_special_tokens=add_special_tokens, check=self.check_count)

    def check_count(self, num_tokens: int) -> None:
        """Raise FieldError if a text has more tokens than a body may hold."""
        max_values = self.config.advanced.max_values
        if num_tokens > max_values:
            limit = f"this server takes {max_values} values (advanced.max_values)"
            raise FieldError("prompt", f"the prompt has {num_tokens} tokens; {limit}; shorten it")

    def fit(
        self, prompt: list[int], params: SamplingParams, truncate: int | None = None
    ) -> tuple[list[int], SamplingParams]:
        """Truncate the prompt to its last `truncate` tokens, and max_tokens to the room after it."""
        longest = self.max_input_length
        if truncate is not None:
            prompt = prompt[-truncate:]
        if not prompt:
            raise FieldError("prompt", "the prompt is empty; give at least one token")
        if len(prompt) > longest:
            raise self.too_long("prompt", f"the prompt has {len(prompt)} tokens", str(longest))
        room = min(params.max_tokens, self.max_total_tokens - len(prompt))
        return prompt, replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room))

    def report(self, error: Exception) -> dict[str, Any]:
        """The body of an error; an unforeseen error is logged."""
        if status_of(error) == 500:
            LOG.error("request failed", exc_info=error)
        return body_of(error)

    def count_rejection(self, tenant: Tenant, error: QueueFullError) -> None:
        """Count a request that found the queue full."""
        tenant.refuse(error.limit)
        self.metrics.count_rejection()

    def log_once(self, text: str) -> None:
        """Log what many requests would repeat."""
        if text not in self.shared.logged:
            self.shared.logged.add(text)
            LOG.warning("%s", text)

    def close(self) -> None:
        self.shared.close()


def read_template(config: Config) -> str | None:
    """The text of serve.http.chat_template. ConfigError also if the variables of templates have a name of ours."""
    path, variables = config.serve.http.chat_template, config.serve.http.chat_template_kwargs
    if not isinstance(variables, Mapping | None):
        raise ConfigError(
            f"serve.http.chat_template_kwargs={variables} is not a mapping; write {{enable_thinking: false}}"
        )
    if taken := next((name for name in variables or () if name in OWN_VARIABLES), None):
        raise ConfigError(f"serve.http.chat_template_kwargs: {taken} is set for each request; leave it out")
    if path is None:
        return None
    try:
        return Path(path).expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"serve.http.chat_template={path}: {getattr(error, 'strerror', error)}") from None
