"""Score windows: log probabilities of their tokens, and logits for a comparison.

    logprobs = score(engine, windows, task)                    # of each window's scored tokens
    reference = map_logits(folder, num_tokens, vocab)
    keep_logits(engine, windows, reference, task)
    compared = compare_logits(other, windows, reference, task)

The logits of all scored tokens are held in a file, so that two engines need not be open at once: fp32[tokens, V].
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atom.assemble.divergence import kl_divergence
from atom.checkpoint.progress import Task
from atom.errors import CapacityError, ConfigError
from atom.graph import HEAD
from atom.jobs.compare.trace import Recorder
from atom.jobs.eval.texts import Window
from atom.runtime.engine import Engine
from atom.runtime.ranks.driver import Driver
from atom.runtime.types import Sequence as Request
from atom.sampling_params import SamplingParams

PARAMS = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=1, prompt_logprobs=0)
CHUNK = 256  # rows of logits that are compared at a time


class Compared(NamedTuple):
    """What the scored tokens of windows cost, in nats, and what comparing each with a reference's gives."""

    losses: list[Tensor]  # fp64[scored tokens] of each window
    reference_losses: list[Tensor]
    is_same: list[Tensor]  # 1 if both have the same most likely token
    kl: list[Tensor]  # divergence of the reference's distribution from it


def complete(
    engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], task: Task | None = None
) -> list[Request]:
    """Answer prompts, and return their requests in order. ConfigError if one fails, RequestError if it cannot start.

    task: counts those that have ended
    """
    prepared = [engine.prepare(list(prompt), each) for prompt, each in zip(prompts, params, strict=True)]
    ids = [engine.submit(sequences) for sequences in prepared]
    ended: dict[str, Request] = {}
    while engine.has_work:
        for request in engine.step():
            if request.error is not None:
                raise ConfigError(request.error)
            ended[request.request_id] = request
            if task is not None:
                task.advance(1)
    return [ended[id] for id in ids]


def score(engine: Engine, windows: Sequence[Window], task: Task) -> list[Tensor]:
    """What the scored tokens of each window cost, in nats: fp64[scored tokens]."""
    requests = complete(engine, [window.tokens for window in windows], [PARAMS] * len(windows), task)
    return [losses_of(request, window) for request, window in zip(requests, windows, strict=True)]


def losses_of(request: Request, window: Window) -> Tensor:
    scored = request.prompt_logprobs[-window.num_scored :]
    return torch.tensor([-each.logprob for each in scored if each is not None], dtype=torch.float64)


def map_logits(folder: Path, num_tokens: int, vocab: int) -> Tensor:
    """An empty fp32[tokens, V] in a file, which goes with the tensor. CapacityError if the disk is too small."""
    folder.mkdir(parents=True, exist_ok=True)
    needed, free = 4 * num_tokens * vocab, shutil.disk_usage(folder).free
    if needed > free:
        sizes = f"{needed / 1e9:.1f} GB of logits, and {folder} has {free / 1e9:.1f} GB free"
        raise CapacityError(f"job.reference keeps {sizes}: lower job.num_tokens, or set cache= elsewhere")
    with tempfile.NamedTemporaryFile(dir=folder, prefix="logits-") as file:  # the mapping outlives its name
        return torch.from_file(file.name, shared=True, size=num_tokens * vocab, dtype=torch.float32).view(-1, vocab)


class Watched:
    """An engine whose logits are seen, one window at a time."""

    def __init__(self, engine: Engine, key: str) -> None:
        """key: the field that asks for logits, which errors name"""
        runner: Any = engine.runner
        self._engine, self._key = engine, key
        self._runner = runner.runner if isinstance(runner, Driver) else runner
        self._runner.graphs.clear()  # CUDA graphs show no values
        (result,) = self._runner.model.graph.programs[HEAD].results
        self._name = str(result.name)

    def run(self, window: Window) -> tuple[Tensor, Tensor]:
        """What the scored tokens cost, and the logits fp32[scored tokens, V] that predict them."""
        recorder = Recorder([len(window.tokens)], self._name)
        with recorder.prompt(0), self._runner.model.watched(recorder):
            (request,) = complete(self._engine, [window.tokens], [PARAMS])
        logits = recorder.trace.logits.get((0, 0))
        if logits is None:
            raise ConfigError(f"{self._key} needs all logits in one process: leave out stages and data groups")
        return losses_of(request, window), logits[-window.num_scored - 1 : -1]


def keep_logits(engine: Engine, windows: Sequence[Window], kept: Tensor, task: Task) -> None:
    """Write the logits of all scored tokens to kept [tokens, V]."""
    watched, at = Watched(engine, "job.reference"), 0
    for window in windows:
        _, logits = watched.run(window)
        kept[at : at + window.num_scored] = logits
        at += window.num_scored
        task.advance(1)


@torch.inference_mode()
def keep_reference(model: Any, windows: Sequence[Window], kept: Tensor, task: Task) -> None:
    """The same of a model of transformers."""
    at = 0
    for window in windows:
        logits = model(torch.tensor([window.tokens], device=model.device)).logits[0, -window.num_scored - 1 : -1]
        kept[at : at + window.num_scored] = logits[:, : kept.shape[1]].float().cpu()
        at += window.num_scored
        task.advance(1)


def compare_logits(engine: Engine, windows: Sequence[Window], reference: Tensor, task: Task) -> Compared:
    """Score windows, and compare the distributions with the reference's, whose logits are fp32[tokens, V]."""
    watched, at, compared = Watched(engine, "job.reference"), 0, Compared([], [], [], [])
    for window in windows:
        losses, logits = watched.run(window)
        targets = torch.tensor(window.tokens[-window.num_scored :])
        theirs = reference[at : at + window.num_scored]
        chunks = zip(*(torch.split(each, CHUNK) for each in (logits, theirs, targets)), strict=True)
        parts = [compare_rows(*chunk) for chunk in chunks]
        compared.losses.append(losses)
        for column, values in zip(compared[1:], zip(*parts, strict=True), strict=True):
            column.append(torch.cat(values).double())
        at += window.num_scored
        task.advance(1)
    return compared


def compare_rows(logits: Tensor, theirs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The reference's losses, whether the most likely tokens are the same, and the divergence, of each token.

    logits, theirs: fp32[tokens, V]
    targets: i64[tokens], what comes next in the text
    """
    losses = torch.nn.functional.cross_entropy(theirs, targets, reduction="none")
    return losses, logits.argmax(-1) == theirs.argmax(-1), kl_divergence(logits, theirs.log_softmax(-1))
