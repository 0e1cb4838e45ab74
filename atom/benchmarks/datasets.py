"""Sample prompts and answer lengths from files, ShareGPT among them, or Hugging Face.

    rng = numpy.random.default_rng(0)
    sample_sharegpt(rng, form, 100, read_sharegpt(Path("ShareGPT.json")), output_len=None)
    sample_sonnet(rng, form, Path("sonnet.txt"), [150] * 100, input_len=550, prefix_len=200)
    sample_burstgpt(rng, form, 100, Path("BurstGPT.csv"))
    sample_sharegpt(rng, form, 100, read_hf("org/conversations", subset=None, split=None), output_len=None)

Each function gives at most as many requests as asked for, and says so if a data set has fewer usable entries.
Prompts that need no data set are in random_dataset.py.
"""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy

from atom.benchmarks.benchmark_utils import BenchmarkError, UsageError, say
from atom.benchmarks.prompts import PromptForm, SampleRequest
from atom.benchmarks.random_dataset import sample_random
from atom.measurement.conversations import NO_ANSWER_LEN, Conversation, is_usable, read_entry

NUM_READ = 5  # entries read for each request, so that enough are usable
SONNET_TASK = "Pick as many lines as you can from these poem lines:\n"


def sample_sharegpt(
    rng: numpy.random.Generator,
    form: PromptForm,
    num: int,
    conversations: Sequence[Conversation],
    *,
    output_len: int | None,
) -> list[SampleRequest]:
    """Sample prompts in random order, without very short and very long ones. output_len: replaces the answers' own."""
    requests: list[SampleRequest] = []
    for at in rng.permutation(len(conversations)):
        prompt, answer = conversations[at]
        wanted = output_len or (len(form.tokenizer.encode(answer, add_special_tokens=False)) if answer else None)
        wanted = NO_ANSWER_LEN if wanted is None else wanted
        prompt_len = form.count(prompt)
        if is_usable(prompt_len, wanted, is_own=output_len is None):
            requests.append(SampleRequest(form.word(prompt), prompt_len, wanted))
        if len(requests) == num:
            return requests
    return enough(requests, num)


def sample_sonnet(
    rng: numpy.random.Generator,
    form: PromptForm,
    path: Path,
    outputs: Sequence[int],
    *,
    input_len: int,
    prefix_len: int,
) -> list[SampleRequest]:
    """Make a prompt of a poem's lines for each answer length, about input_len tokens of which prefix_len are shared."""
    lines = [line + "\n" for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise UsageError(f"{path} has no lines")
    lengths = [len(form.tokenizer.encode(line, add_special_tokens=False)) for line in lines]
    mean, task = sum(lengths) / len(lengths), form.count(SONNET_TASK)
    if input_len <= task or not task <= prefix_len <= input_len:
        raise UsageError(
            f"--sonnet-input-len {input_len} --sonnet-prefix-len {prefix_len}: the task itself takes {task} tokens; "
            "the prefix cannot be shorter, nor longer than the input"
        )
    num_lines, num_shared = round((input_len - task) / mean), round((prefix_len - task) / mean)
    if num_shared > len(lines):
        raise UsageError(f"--sonnet-prefix-len {prefix_len}: {path} has only {sum(lengths)} tokens")
    requests = []
    for output_len in outputs:
        chosen = lines[:num_shared] + [lines[at] for at in rng.integers(0, len(lines), num_lines - num_shared)]
        text = SONNET_TASK + "".join(chosen)
        requests.append(SampleRequest(form.word(text), form.count(text), output_len))
    return requests


def sample_burstgpt(rng: numpy.random.Generator, form: PromptForm, num: int, path: Path) -> list[SampleRequest]:
    """Make random prompts with the lengths of a trace of GPT-4's users."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file)
        names = ("Model", "Request tokens", "Response tokens")
        if missing := [name for name in names if name not in (rows.fieldnames or ())]:
            raise UsageError(f"{path} is no BurstGPT trace: it has no column {', '.join(missing)}")
        lengths = [
            (int(each["Request tokens"]), int(each["Response tokens"]))
            for each in rows
            if each["Model"] == "GPT-4" and int(each["Request tokens"]) > 0 and int(each["Response tokens"]) > 0
        ]
    if not lengths:
        raise UsageError(f"{path} has no answered request of GPT-4")
    chosen = rng.choice(len(lengths), num, replace=num > len(lengths))
    return sample_random(rng, form, [lengths[at][0] for at in chosen], [lengths[at][1] for at in chosen])


def sample_custom(
    rng: numpy.random.Generator, form: PromptForm, num: int, path: Path, *, output_len: int
) -> list[SampleRequest]:
    """Sample the prompts of a file in random order: one `{"prompt": …}` a line, as vLLM's data set `custom` has it."""
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            prompts.append(read_prompt(line, f"{path}, line {number}"))
    chosen = [prompts[at] for at in rng.permutation(len(prompts))[:num]]
    return enough([SampleRequest(form.word(each), form.count(each), output_len) for each in chosen], num)


def read_prompt(line: str, where: str) -> str:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not valid JSON ({error}); write one object a line") from None
    if not isinstance(entry, dict) or not isinstance(prompt := entry.get("prompt"), str) or not prompt:
        raise UsageError(f'{where} has no prompt; write {{"prompt": "…"}}')
    return prompt


def read_hf(name: str, *, subset: str | None, split: str | None, num: int) -> list[Conversation]:
    """Read conversations of a data set on the hub, or of a local folder or file of JSON, CSV or Parquet.

    Only as many entries are read as it takes to find `num` usable ones, with some to choose from.
    """
    return list(itertools.islice(read_hf_entries(name, subset=subset, split=split), NUM_READ * num))


def read_hf_entries(name: str, *, subset: str | None, split: str | None) -> Iterator[Conversation]:
    try:
        import datasets  # type: ignore[import-untyped]
    except ImportError:
        raise BenchmarkError("--dataset-name hf needs the package datasets: pip install 'atom-run[bench]'") from None
    path, kinds = Path(name), {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
    datasets.disable_progress_bars()
    try:
        if path.is_file():
            if path.suffix not in kinds:
                raise UsageError(f"--dataset-path {name}: a file is one of {', '.join(kinds)}")
            found = datasets.load_dataset(kinds[path.suffix], data_files=name, split=split or "train", streaming=True)
        else:
            found = datasets.load_dataset(name, subset, split=split or "train", streaming=True)
        entries: Iterable[Any] = found
        yield from (turns for entry in entries if (turns := read_entry(entry)) is not None)
    except BenchmarkError:
        raise
    except Exception as error:  # whatever its loaders and the network raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(f"cannot read the data set {name} ({reason}); check --hf-subset and --hf-split") from error


def enough(requests: list[SampleRequest], num: int) -> list[SampleRequest]:
    if not requests:
        raise UsageError("the data set has no usable conversation: two turns, of neither very few nor very many tokens")
    if len(requests) < num:
        say(f"the data set has only {len(requests)} usable entries: so many requests are sent, not {num}")
    return requests
