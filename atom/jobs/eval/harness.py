"""Run tasks of lm_eval (EleutherAI's lm-evaluation-harness) on an engine.

from lm_eval import simple_evaluate
from atom import LLMEngine
from atom.jobs.eval.harness import AtomLM

engine = LLMEngine(model="/models/qwen3")
simple_evaluate(AtomLM(engine.complete, engine.tokenizer, engine.config.limits.max_model_len), tasks=["hellaswag"])

Texts become tokens as in lm_eval's own model of transformers: with the special tokens that the tokenizer adds, and an
empty context is BOS, or else EOS. This file imports lm_eval, which is not installed with atom.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from atom.checkpoint import Tokenizer
from atom.config import Config
from atom.errors import ConfigError
from atom.runtime.types import Sequence as Request
from atom.sampling_params import SamplingParams

Complete = Callable[[list[list[int]], list[SamplingParams]], Sequence[Request]]
Pair = tuple[Any, list[int], list[int]]  # the texts, a context's tokens, those that go on
MAX_GEN_TOKS = 256  # of an answer, unless a task sets another number, as in lm_eval's own models
LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # names of that number in tasks
PASSED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")  # of a task's generation_kwargs


class AtomLM(TemplateLM):  # type: ignore[misc]  # lm_eval has no types
    """An engine as a model of lm_eval."""

    def __init__(self, complete: Complete, tokenizer: Tokenizer | None, max_model_len: int) -> None:
        """
        complete: answers prompts, as `LLMEngine.complete` does
        tokenizer: the engine's; ConfigError for None
        max_model_len: tokens of a sequence
        """
        super().__init__()
        if tokenizer is None:
            raise ConfigError("tasks of lm_eval are texts, and the checkpoint has no tokenizer")
        self.tokenizer = tokenizer
        self.max_length = max_model_len - 2  # inputs: the last scored token is one more, and one is generated
        self._complete, self._max_model_len = complete, max_model_len

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_ids[0] if self.tokenizer.eos_ids else self.prefix_token_id

    @property
    def prefix_token_id(self) -> int:
        known = [each for each in (self.tokenizer.bos_id, *self.tokenizer.eos_ids) if each is not None]
        if not known:
            raise ConfigError("a text without a context needs a token before it, and the tokenizer has no BOS or EOS")
        return known[0]

    @property
    def tokenizer_name(self) -> str:
        return "atom"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        bos = None if self.tokenizer.bos_id is None else self.tokenizer.piece(self.tokenizer.bos_id)
        if add_special_tokens is None:
            add_special_tokens = not (bos and string.startswith(bos))
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def apply_chat_template(self, chat_history: list[dict[str, Any]], add_generation_prompt: bool = True) -> str:
        continues = {} if add_generation_prompt else {"continue_final_message": True}
        return self.tokenizer.render_chat(chat_history, add_generation_prompt=add_generation_prompt, **continues)

    def _loglikelihood_tokens(self, requests: Sequence[Pair], **options: Any) -> list[tuple[float, bool]]:
        """The log probability of the tokens that go on, and whether they are the most likely ones."""
        prompts = [(context + following)[-(self.max_length + 1) :] for _, context, following in requests]
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        answered = self._complete(prompts, [params] * len(prompts))
        results = []
        for request, (_, _, following) in zip(answered, requests, strict=True):
            known = [each for each in request.prompt_logprobs if each is not None]
            scored = known[max(len(known) - len(following), 0) :]
            results.append((sum(each.logprob for each in scored), all(each.rank == 1 for each in scored)))
        return results

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log probability of each whole text, in windows that score each token once."""
        windows: list[Pair] = []
        owners = list[int]()
        for owner, request in enumerate(requests):
            found = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            windows += [(None, *make_disjoint_window(pair)) for pair in found]
            owners += [owner] * (len(windows) - len(owners))
        totals = [0.0] * len(requests)
        for owner, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += logprob
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The answer to each prompt, up to the first of its stop strings."""
        prompts, params = list[list[int]](), list[SamplingParams]()
        for request in requests:
            context, asked = request.args
            params.append(params_of(asked))
            room = self._max_model_len - params[-1].max_tokens
            if room < 1:
                raise ConfigError(f"a task asks for {params[-1].max_tokens} tokens: raise serve.max_model_len")
            prompts.append(self.tok_encode(context)[-room:])
        return [request.text or "" for request in self._complete(prompts, params)]


def params_of(asked: Mapping[str, Any]) -> SamplingParams:
    """The sampling parameters of a task's generation_kwargs. ConfigError names one that is not supported."""
    given = {name: value for name, value in asked.items() if value is not None}
    limits = [given.pop(name) for name in LIMITS if name in given]
    until = given.pop("until", [])
    values = {name: given.pop(name) for name in PASSED if name in given}
    is_greedy = not given.pop("do_sample", values.get("temperature", 0.0) > 0)
    if given:
        raise ConfigError(f"generation_kwargs of a task: {', '.join(map(str, given))} is not supported here")
    values["temperature"] = 0.0 if is_greedy else values.get("temperature", 1.0)
    stops = [until] if isinstance(until, str) else list(until)
    return SamplingParams(
        **values, max_tokens=int(limits[0]) if limits else MAX_GEN_TOKS, stop_strings=[each for each in stops if each]
    )


def run_tasks(lm: AtomLM, config: Config) -> dict[str, dict[str, float]]:
    """The numbers of each task and group of `job.tasks` by metric, their standard errors as METRIC_error.

    ConfigError for a task that lm_eval does not have.
    """
    names = list(map(name_of, config.job.tasks or ()))
    folders = {str(path.parent) for path in map(Path, config.job.tasks or ()) if path.suffix == ".yaml"}
    manager = TaskManager(include_path=sorted(folders) or None)
    for name in names:
        if not manager.match_tasks([name]):
            raise ConfigError(f"job.tasks: lm_eval has no task {name}; `lm_eval ls tasks` lists them")
    found = simple_evaluate(
        lm,
        tasks=manager.match_tasks(names),
        num_fewshot=config.job.num_fewshot,
        limit=config.job.limit,
        apply_chat_template=config.job.chat,
        task_manager=manager,
        log_samples=False,
    )
    return {name: dict(numbers_of(values)) for name, values in (found or {"results": {}})["results"].items()}


def name_of(task: str) -> str:
    """The name of a task, of a YAML file the one that it gives."""
    if not task.endswith(".yaml"):
        return task
    try:
        match = re.search(r"^(?:task|group):\s*['\"]?([^\s'\"#]+)", Path(task).read_text("utf-8"), re.MULTILINE)
    except OSError as error:
        raise ConfigError(f"job.tasks: {task}: {error.strerror}") from None
    if match is None:
        raise ConfigError(f"job.tasks: {task} names no task")
    return match[1]


def numbers_of(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Metrics as `acc` and `acc_error`, of a filter other than none as `acc.FILTER`."""
    for key, value in values.items():
        metric, has_filter, chosen = key.partition(",")
        if not has_filter or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        own = metric.removesuffix("_stderr")
        name = own if chosen == "none" else f"{own}.{chosen}"
        yield (f"{name}_error" if metric.endswith("_stderr") else name), float(value)
