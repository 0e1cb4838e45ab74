"""Several ranks on a CPU, end to end: the tokens of one rank, whatever happens; what becomes of a rank that dies."""

from __future__ import annotations

import argparse
import contextlib
import gc
import gzip
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import gguf_files
import msgspec
import numpy as np
import pytest
import tiny
import torch
import transformers
from rank_checks import (
    EVENTFUL,
    GREEDY,
    answer_during_an_abort,
    assert_ends_by_a_signal,
    assert_goes_on_after_a_stop,
    assert_ranks_end_with_their_driver,
    assert_same_answers,
    assert_same_texts_of_a_grammar,
    assert_tokens_of_groups,
    eventful_prompts,
    rank_processes,
    save_with_texts,
)
from serving import free_port
from thread_ranks import ThreadRanks, thread_ranks

from atom import LLMEngine, SamplingParams, assemble
from atom.assemble.kv_blocks import plan_kv, state_kinds
from atom.assemble.rank_process import find_running
from atom.assemble.ranks import check_same_weights, config_of, sample_weights, start_processes
from atom.checkpoint import Progress, SilentProgress
from atom.compiler import compile, compile_graph, compile_model
from atom.config.load import load
from atom.entrypoints.args import EngineArgs
from atom.errors import (
    AtomError,
    CapacityError,
    CheckpointError,
    ConfigError,
    EngineDeadError,
    RequestError,
    UnsupportedError,
)
from atom.graph import W, show
from atom.kernels.gloo import COUNTED_BYTES
from atom.pieces import compile_pieces
from atom.runtime.ranks.links import RankProcess, Ranks
from atom.runtime.ranks.remote import without_secrets
from atom.runtime.step.runner import Pending, wait_for

__all__ = ["thread_ranks"]

pytestmark = pytest.mark.early

Open = Callable[..., LLMEngine]


@pytest.mark.sampled(60)
@pytest.mark.parametrize(
    "name", [*tiny.MODEL_FILES, "llama_biases", "llama_odd_heads", "gpt_oss_odd", "minimax_m2_stacked", "axk2"]
)
def test_ranks_generate_the_tokens_of_the_reference(
    name: str, thread_ranks: list[ThreadRanks], open_engine: Open, references: Any
):
    experts = {"enable_expert_parallel": True} if tiny.is_mixture(name) else {}
    engine = open_engine(name, tensor_parallel_size=tiny.num_ranks(name), **EVENTFUL, **experts)
    prompts = eventful_prompts()
    for batch in (prompts, prompts[::-1]):
        for answer, prompt in zip(engine.generate(batch, GREEDY), batch, strict=True):
            tiny.assert_greedy(answer, prompt, references(name))
    metrics = engine.metrics.scheduler
    assert metrics.num_chunks > 0 and metrics.num_prefix_hit_tokens > 0
    has_only_windows = all(not pool.keeps_all for pool in engine._engine.scheduler.groups[0].cache.pools)
    assert metrics.num_preemptions > 0 or has_only_windows
    assert thread_ranks[0].meeting.num_collectives > 2 * metrics.num_steps


EVEN_MAMBA = {"n_groups": 2}  # of nemotron_h, whose groups two ranks divide


@pytest.mark.parametrize(
    ("name", "ranks", "changes"),
    [
        ("qwen3_5", 2, {}),
        ("nemotron_h", 2, EVEN_MAMBA),
        pytest.param("lfm2", 2, {}, marks=pytest.mark.slow),
        pytest.param("qwen3_5", 4, {"linear_num_value_heads": 4}, marks=pytest.mark.slow),
        pytest.param("nemotron_h", 4, {"n_groups": 2, "mamba_num_heads": 8}, marks=pytest.mark.slow),
        pytest.param("falcon_h1", 2, {}, marks=pytest.mark.slow),
        pytest.param("kimi_linear", 2, {"linear_num_heads": 4}, marks=pytest.mark.slow),
        *(
            pytest.param(
                name, 3, {"num_attention_heads": 3, "num_key_value_heads": 3, **changes}, marks=pytest.mark.slow
            )
            for name, changes in (("lfm2_moe", {}), ("qwen3_5", {"linear_num_key_heads": 3}), ("nemotron_h", {}))
        ),
    ],
    ids=str,
)
def test_each_rank_has_its_heads_of_recurrent_state(
    name: str, ranks: int, changes: dict[str, Any], thread_ranks: list[ThreadRanks], tmp_path: Path
):
    model, prompts, held = tiny.save_changed(name, tmp_path / name, **changes).eval(), eventful_prompts(), []
    for divided in (1, ranks):
        options = {"dtype": "fp32", "level": 1, "tensor_parallel_size": divided, "state_memory": 1 << 16, **EVENTFUL}
        with closing(LLMEngine(str(tmp_path / name), **options)) as engine:
            for batch in (prompts, prompts[::-1]):
                for answer, prompt in zip(engine.generate(batch, GREEDY), batch, strict=True):
                    tiny.assert_greedy(answer, prompt, model)
            metrics, scheduler = engine.metrics.scheduler, engine._engine.scheduler
            pools = (scheduler if divided == 1 else scheduler.groups[0]).cache.pools
            held += [pool.kind.block_bytes for pool in pools if pool.kind.rule.in_slot]
            assert metrics.num_chunks > 0 and metrics.num_prefix_hit_tokens > 0 and metrics.num_preemptions > 0
    one, own = held
    assert own * ranks == one or (ranks == 4 and own * 2 < one), "each key head is on two of four ranks"
    assert thread_ranks[0].meeting.num_collectives > 2 * metrics.num_steps


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("lfm2", {}),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("qwen3_5", {}), ("nemotron_h", EVEN_MAMBA))),
    ],
)
def test_processes_with_recurrent_state_give_what_one_gives(name: str, changes: dict[str, Any], tmp_path: Path):
    """Two of them draft, one does not."""
    tiny.save_changed(name, tmp_path / name, **changes)
    prompts, params, found = eventful_prompts(), [GREEDY, SEEDED, SCORED], []
    drafts = {"method": "ngram", "prompt_lookup_min": 1, "max_verified_tokens": 100}
    for ranks, own in ((1, {}), (2, drafts)):
        options = {"dtype": "fp32", "level": 1, "tensor_parallel_size": ranks, "state_memory": 1 << 16, **EVENTFUL}
        with closing(LLMEngine(str(tmp_path / name), **options, **own)) as engine:
            assert len(rank_processes()) == ranks - 1
            found.append(answer_during_an_abort(engine, prompts, params))
            stats = engine.metrics.scheduler
    assert_same_answers(*found)
    assert stats.num_draft_tokens > stats.num_accepted_tokens


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("qwen3_moe", {"parallel.data": 2, "parallel.experts": 2}),
        pytest.param(
            "qwen3_moe",
            {
                "parallel.data": 2,
                "tensor_parallel_size": 2,
                "enable_expert_parallel": True,
                "parallel.dispatch": "dispatch",
            },
            marks=pytest.mark.slow,
        ),
        ("deepseek_v3", {"parallel.data": 3}),
        ("glm_moe_dsa", {"parallel.data": 2, "parallel.experts": 2}),
        ("qwen3_next", {"parallel.data": 2, "parallel.experts": 2, "state_memory": 1 << 16}),
        pytest.param("lfm2_moe", {"parallel.data": 2, "state_memory": 1 << 15}, marks=pytest.mark.slow),
        pytest.param("gpt_oss", {"parallel.data": 2, "parallel.experts": 2}, marks=pytest.mark.slow),
        *(
            pytest.param(name, {"parallel.data": 2, "parallel.experts": 2}, marks=pytest.mark.slow)
            for name in ("deepseek_v32", "axk2", "hy_v4", "dots3_note", "minimax_m3", "deepseek_v4")
        ),
        *(
            pytest.param(name, {"parallel.data": 2, "state_memory": 1 << 16, **divided}, marks=pytest.mark.slow)
            for name, divided in (
                ("kimi_linear", {"parallel.experts": 2}),
                ("qwen4_exp", {"parallel.experts": 2}),
                ("qwen4_exp", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
            )
        ),
    ],
)
def test_groups_generate_the_tokens_of_the_reference(
    name: str, fields: dict[str, Any], thread_ranks: list[ThreadRanks], open_engine: Open, references: Any
):
    engine = open_engine(name, **EVENTFUL, **fields)
    assert_tokens_of_groups(engine, references(name))
    assert thread_ranks[0].meeting.num_collectives > 2 * engine.metrics.scheduler.num_steps


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        *(
            (name, {"pipeline_parallel_size": 2})
            for name in ("llama_tied", "deepseek_v3", "gemma3", "glm_moe_dsa", "gpt_oss")
        ),
        ("gemma4_shared", {"pipeline_parallel_size": 2}),
        ("deepseek_v4", {"pipeline_parallel_size": 2}),
        ("qwen3_moe", {"parallel.pipeline": 3, "tensor_parallel_size": 2, "enable_expert_parallel": True}),
        ("llama_tied", {"pipeline_parallel_size": 2, "method": "ngram", "num_speculative_tokens": 3}),
        ("gpt_oss", {"parallel.pipeline": 2, "parallel.data": 2, "parallel.experts": 2}),
        ("qwen3_5", {"pipeline_parallel_size": 3, "state_memory": 1 << 16}),
        pytest.param("lfm2", {"pipeline_parallel_size": 2, "state_memory": 1 << 16}, marks=pytest.mark.slow),
        pytest.param("nemotron_h", {"pipeline_parallel_size": 2, "state_memory": 1 << 16}, marks=pytest.mark.slow),
    ],
)
def test_stages_generate_the_tokens_of_the_reference(
    name: str, fields: dict[str, Any], thread_ranks: list[ThreadRanks], open_engine: Open, references: Any
):
    engine = open_engine(name, **EVENTFUL, **fields)
    prompts = eventful_prompts()
    for batch in (prompts, prompts[::-1]):
        for answer, prompt in zip(engine.generate(batch, GREEDY), batch, strict=True):
            tiny.assert_greedy(answer, prompt, references(name))
    metrics = engine.metrics.scheduler
    assert metrics.num_chunks > 0 and metrics.num_prefix_hit_tokens > 0
    assert thread_ranks[0].meeting.num_collectives > metrics.num_steps


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("llama", {"tensor_parallel_size": 2}),
        ("llama", {"pipeline_parallel_size": 2}),
        ("qwen3_moe", {"parallel.data": 2, "parallel.experts": 2}),
        ("deepseek_v3", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
        ("gpt_oss", {"parallel.data": 2, "parallel.experts": 2}),
    ],
)
def test_ranks_write_what_a_grammar_allows_as_one_does(
    name: str, fields: dict[str, Any], thread_ranks: list[ThreadRanks], tmp_path: Path
):
    pytest.importorskip("llguidance")
    common = {"dtype": "fp32", "level": 1, "kv_cache_memory": 1 << 22}
    assert_same_texts_of_a_grammar(save_with_texts(name, tmp_path), common, fields)
    assert len(thread_ranks) == 1


SEEDED = SamplingParams(temperature=1.0, top_p=0.9, min_p=0.02, seed=7, max_tokens=16, n=2, frequency_penalty=0.5)
SCORED = SamplingParams(temperature=0, max_tokens=5, logprobs=3, prompt_logprobs=2, logit_bias={3: 2.0}, min_tokens=3)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "divided",
    [
        {"tensor_parallel_size": 2, "enable_expert_parallel": True},
        {"parallel.data": 2},
        {"pipeline_parallel_size": 2},
    ],
)
def test_processes_of_ranks_give_what_one_gives(divided: dict[str, Any], open_engine: Open):
    prompts, params = [tiny.prompt(20), tiny.prompt(33, seed=1), tiny.prompt(9, seed=2)], [GREEDY, SEEDED, SCORED]
    expected = open_engine("qwen3_moe").generate(prompts, params)
    engine = open_engine("qwen3_moe", enable_prefix_caching=True, **divided)
    assert len(rank_processes()) == 1
    answers = answer_during_an_abort(engine, prompts, params)
    assert_same_answers(answers, expected)
    engine.close()
    assert rank_processes() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [*((name, tiny.num_ranks(name)) for name in tiny.MODEL_FILES), ("llama_three_groups", 3), ("llama", 4)],
)
def test_processes_of_each_family_give_what_one_gives_whatever_happens(name: str, num_ranks: int, open_engine: Open):
    experts = {"enable_expert_parallel": True} if tiny.is_mixture(name) else {}
    prompts, params = eventful_prompts(), [GREEDY, SEEDED, SCORED]
    fields = {**EVENTFUL, "num_kvcache_blocks": 20}
    expected = open_engine(name, **fields).generate(prompts, params)
    engine = open_engine(name, tensor_parallel_size=num_ranks, **fields, **experts)
    assert len(rank_processes()) == num_ranks - 1
    assert_same_answers(answer_during_an_abort(engine, prompts, params), expected)
    assert_same_answers(engine.generate(prompts, params), expected)
    metrics = engine.metrics.scheduler
    assert metrics.num_chunks > 0 and metrics.num_prefix_hit_tokens > 0
    has_only_windows = all(not pool.keeps_all for pool in engine._engine.scheduler.groups[0].cache.pools)
    assert metrics.num_preemptions > 0 or has_only_windows


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["traces", "none"])
def test_each_rank_writes_a_trace_of_its_own(
    folder: str, open_engine: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    where = tmp_path / "traces"
    where.mkdir()
    if folder == "none":  # as on another host, whose folder takes no files
        (where / "rank_1").write_text("")
    engine = open_engine("llama", tensor_parallel_size=2, torch_profiler_dir=str(where))
    engine.generate([[1, 2, 3]], GREEDY)
    with pytest.raises(RequestError, match="the profiler does not run"):
        engine.stop_profile()
    engine.start_profile()
    with pytest.raises(RequestError, match="the profiler runs already"):
        engine.start_profile()
    engine.generate([[1, 2, 3]], GREEDY)
    first = engine.stop_profile()
    engine.generate([[1, 2, 3]], GREEDY)  # which the other rank takes once it has written
    engine.close()
    assert list((where / "rank_0").iterdir()) == [first]
    if folder == "none":
        assert capfd.readouterr().err.count("a rank has no trace: ") == 2
        return
    (second,) = (where / "rank_1").iterdir()
    for trace in (first, second):
        names = [event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]]
        assert names.count("atom::norm_rope_write") >= 3 * GREEDY.max_tokens, "of each layer and step"


LAYOUTS = [
    ("llama", {"tensor_parallel_size": 2}, 0),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("llama", {"pipeline_parallel_size": 2}, 0),
            ("llama_three_groups", {"tensor_parallel_size": 3}, 0),
            ("llama_three_groups", {"tensor_parallel_size": 3}, 1),
        )
    ),
]


@pytest.mark.parametrize(("name", "divided", "place"), LAYOUTS)
def test_a_rank_that_dies_ends_the_engine(name: str, divided: dict[str, int], place: int, open_engine: Open):
    engine = open_engine(name, **divided)
    engine.generate([[1, 2, 3]], GREEDY)
    assert_ends_by_a_signal(engine, signal.SIGKILL, "has ended", place)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "divided", "place"), LAYOUTS)
def test_a_rank_that_is_stopped_ends_nothing_and_goes_on(
    name: str, divided: dict[str, int], place: int, open_engine: Open
):
    assert_goes_on_after_a_stop(open_engine(name, **divided), place)


HELD = """
import ctypes, sys, time
seconds = float(link.receive())
if seconds < 0:
    ctypes.PyDLL(None).sleep(1000)
end = time.monotonic() + seconds
sys.setswitchinterval(1000)
while time.monotonic() < end: pass
sys.setswitchinterval(0.005)
link.answer(b"done")
link.receive()
"""


def test_a_rank_that_neither_beats_nor_uses_the_cpu_ends_the_engine():
    with closing(Ranks([RankProcess(HELD)], [b"-1"])) as ranks:
        ranks.limit_silence(1.0)
        assert str(ranks.await_fault(60)) == "rank 1 has neither answered nor used the CPU for 1 s"


@pytest.mark.slow
def test_a_rank_that_computes_with_the_lock_held_is_waited_for():
    with closing(Ranks([RankProcess(HELD)], [b"3.5"])) as ranks:
        ranks.limit_silence(2.0)
        assert ranks.receive(1) == b"done" and ranks.await_fault(0) is None


def test_a_rank_that_was_killed_has_ended_though_its_children_keep_its_pipe():
    code = "import os, subprocess; child = subprocess.Popen(['sleep', '60'], stdout=link._out); link.receive()"
    code += "; link.answer(str(child.pid).encode()); os.kill(os.getpid(), 9)"
    with closing(Ranks([RankProcess(code)], [b"a"])) as ranks:
        child = int(ranks.receive(1))
        assert str(ranks.await_fault(30)) == "rank 1 has ended"
        os.kill(child, signal.SIGKILL)


class KillingProgress(SilentProgress):
    """Kills the ranks as soon as the driver has loaded a part of its weights, and lets it hear of that."""

    total, done = 0, 0

    @contextlib.contextmanager
    def task(self, description: str, total: int | None = None, *, in_bytes: bool = True) -> Iterator[Any]:
        if description != "loading weights":
            with super().task(description, total, in_bytes=in_bytes) as task:
                yield task
            return
        assert total is not None, "the driver counts bytes"
        self.total = total
        yield self

    def advance(self, amount: int, /) -> None:
        self.done += amount
        for pid in rank_processes():
            with contextlib.suppress(ProcessLookupError):  # it has ended since, by an earlier kill
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)


def test_a_driver_whose_rank_dies_does_not_load_the_rest_of_its_weights(checkpoints: Callable[[str], Path]):
    fields = ["dtype=fp32", "level=0", "parallel=tp2", "serve.kv_cache_memory=4194304"]
    progress = KillingProgress()
    with pytest.raises(EngineDeadError, match="rank 1 has ended"):
        assemble.open_engine(load([f"checkpoint={checkpoints('llama')}", *fields]), progress)
    assert 0 < progress.done < progress.total / 2


def test_a_driver_whose_rank_dies_does_not_compile_the_rest(
    checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
):
    def compile_slowly(config: object, progress: Progress, checkpoint: object) -> None:
        (rank,) = rank_processes()
        os.kill(rank, signal.SIGKILL)
        with progress.task("compiling 2 pieces", 2, in_bytes=False) as task:
            time.sleep(0.5)
            task.advance(1)
        pytest.fail("it has compiled the rest")

    monkeypatch.setattr("atom.assemble.engine.compile_with", compile_slowly)
    fields = ["dtype=fp32", "level=0", "parallel=tp2", "serve.kv_cache_memory=4194304"]
    with pytest.raises(EngineDeadError, match="rank 1 has ended"):
        assemble.open_engine(load([f"checkpoint={checkpoints('llama')}", *fields]), SilentProgress())
    assert not rank_processes()


def test_ranks_end_with_the_process_that_drives_them(checkpoints: Callable[[str], Path]):
    assert_ranks_end_with_their_driver(checkpoints("llama"), dtype="fp32", level=0, kv_cache_memory=1 << 22)


def test_the_error_of_a_rank_is_that_of_the_engine():
    code = "from atom.errors import CapacityError; link.fail(CapacityError(link.receive().decode()))"
    ranks = Ranks([RankProcess(code)], [b"small"])
    with pytest.raises(CapacityError, match="rank 1: small"):
        ranks.wait()
    with pytest.raises(CapacityError, match="rank 1: small"):
        ranks.send([b"on"])
    ranks.close()


def test_each_rank_gets_its_own_message_and_answers():
    code = "0\nwhile True: link.answer(link.receive() + b'!')"
    with closing(Ranks([RankProcess(code), RankProcess(code)], [b"a", b"b"])) as ranks:
        assert [ranks.receive(rank) for rank in (2, 1)] == [b"b!", b"a!"]
        for number in range(3):
            ranks.send([b"%d" % number, b"x" * 100_000])
        assert [ranks.receive(1) for _ in range(3)] == [b"0!", b"1!", b"2!"]
        assert all(ranks.receive(2) == b"x" * 100_000 + b"!" for _ in range(3))
        ranks.fail(EngineDeadError("enough"))
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="enough"):
                ranks.receive(1)


def test_a_rank_that_cannot_read_its_messages_ends_and_says_why():
    channel = RankProcess("link.receive(); link.done(); link.receive()")
    with closing(Ranks([channel], [b"a"])) as ranks:
        ranks.wait()
        channel.send(b"\xc1")  # no msgpack
        assert "rank 1: DecodeError: " in str(ranks.await_fault(60))


def test_a_rank_of_which_nothing_can_be_read_ends_all():
    channel = Mock(look=Mock(return_value=None), receive=Mock(side_effect=LookupError("what is this?")))
    with closing(Ranks([channel], [b"a"])) as ranks:
        assert str(ranks.await_fault(60)) == "rank 1 has ended: what is this?"


@pytest.mark.parametrize("wait", [lambda ranks: ranks.receive(1), lambda ranks: ranks.wait()], ids=["receive", "wait"])
def test_who_waits_for_a_rank_when_all_are_closed_gets_an_error(wait: Callable[[Ranks], object]):
    ranks, errors = Ranks([RankProcess("link.receive(); link.receive()")], [b"a"]), queue.SimpleQueue[str]()

    def await_rank() -> None:
        try:
            wait(ranks)
        except EngineDeadError as error:
            errors.put(str(error))

    threading.Thread(target=await_rank, daemon=True).start()
    with pytest.raises(queue.Empty):
        errors.get(timeout=0.2)
    ranks.close()
    assert errors.get(timeout=60) == "the ranks are closed"


def test_a_rank_on_a_gpu_sees_only_that_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("atom.config.check_parallel.count_devices", lambda: 6)
    monkeypatch.setattr(
        "atom.assemble.ranks.RANK_ON_GPU", "import os; link.answer(os.environ['CUDA_VISIBLE_DEVICES'].encode())"
    )
    fields = ["parallel=dp2_tp3", "device=cuda"]
    for visible, replica, expected in ((None, 0, [b"1", b"2"]), ("7,GPU-8f3, 5,4,3,1", 1, [b"3", b"1"])):
        given = [] if visible is None else [f"parallel.visible_devices='{visible}'"]
        with contextlib.ExitStack() as started:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
            ranks = Ranks(start_processes(load([*fields, *given]), replica, started), [b"", b""])
            assert [ranks.receive(rank) for rank in (1, 2)] == expected
            ranks.close()


def test_memory_that_is_too_little_is_refused_with_what_all_ranks_need(checkpoints: Callable[[str], Path]):
    fields = [f"checkpoint={checkpoints('llama')}", "parallel=tp2", "dtype=fp32", "level=0", "device=cpu"]
    config = load(fields)
    kinds = state_kinds(compile_graph(config), config.serve.block_size)

    def plan(num_bytes: int) -> dict[str, int]:
        config = load([*fields, f"serve.kv_cache_memory={num_bytes}"])
        return plan_kv(kinds, config.serve, config.limits, config.parallel.num_ranks)

    with pytest.raises(
        CapacityError, match=r"has 500 for each of 2 ranks: raise serve\.kv_cache_memory to \d+"
    ) as short:
        plan(1000)
    hint = re.search(r"raise serve\.kv_cache_memory to (\d+)", str(short.value))
    assert hint is not None and plan(int(hint[1]))
    with pytest.raises(CapacityError):
        plan(int(hint[1]) - 2)


def test_a_rank_holds_steps_until_its_device_is_through_with_them():
    """A kernel writes into memory of the host that they own, which would be taken for the next step's numbers."""

    def step(is_over: bool | None) -> Pending:
        taken: Any = None
        event: Any = None if is_over is None else SimpleNamespace(query=lambda: is_over)
        return Pending(taken, np.zeros(1, np.int64), [], None, event)

    first, second, third, fourth = (step(is_over) for is_over in (True, False, None, False))
    assert find_running([first, second, third, fourth]) == [second, fourth]


def test_a_device_that_waits_for_a_rank_which_is_gone_is_not_waited_for():
    class Event:
        def __init__(self, looks: int) -> None:
            self.looks = looks

        def query(self) -> bool:
            self.looks -= 1
            return self.looks < 0

    checked: list[int] = []
    wait_for(Event(3), lambda: checked.append(1))  # type: ignore[arg-type]
    assert len(checked) == 4, "once more behind the event: collectives that were ended have computed nothing"

    def check() -> None:
        raise EngineDeadError("rank 1 has ended")

    for looks in (0, 1 << 60):
        with pytest.raises(EngineDeadError, match="rank 1 has ended"):
            wait_for(Event(looks), check)  # type: ignore[arg-type]


def test_ranks_answer_in_turn_and_get_all_messages():
    code = "total = 0\nwhile True:\n    total += len(link.receive()); link.done() if total >= {} else None"
    with closing(Ranks([RankProcess(code.format(3 + 100_000)) for _ in range(2)], [b"abc"] * 2)) as ranks:
        ranks.send([b"x" * 100_000] * 2)
        ranks.wait()
        ranks.send([b""] * 2)
        ranks.wait()
        found: list[AtomError] = []
        ranks.watch(found.append)
        ranks.fail(EngineDeadError("enough"))
        assert [str(each) for each in found] == ["enough"]
        ranks.watch(found.append)
        assert len(found) == 2
        with pytest.raises(EngineDeadError, match="enough"):
            ranks.wait()


@pytest.mark.parametrize(
    ("name", "fields", "error", "reason"),
    [
        ("llama", {"tensor_parallel_size": 3}, UnsupportedError, r"parallel.tensor=3 does not divide 4 heads with 2 of keys and values \(supported: 1, 2, 4"),
        ("qwen3_next_stacked", {"tensor_parallel_size": 2}, UnsupportedError, r"parallel.tensor=2 does not divide 3 value heads with 3 of keys \(supported: 1, 3\)$"),
        ("nemotron_h", {"tensor_parallel_size": 2}, UnsupportedError, r"parallel.tensor=2 does not divide 6 heads in groups of 2 \(supported: 1, 3, 6\)$"),
        ("llama", {"tensor_parallel_size": 2, "parallel.tensor": 4}, ConfigError, "tensor_parallel_size and parallel.tensor are the same option; give one"),
        ("llama", {"pipeline_parallel_size": 2, "parallel.pipeline": 3}, ConfigError, "pipeline_parallel_size and parallel.pipeline are the same option"),
        ("llama", {"pipeline_parallel_size": 4}, ConfigError, "parallel.pipeline=4: the model has 3 layers; set parallel.pipeline to as many at most"),
        ("llama", {"pipeline_parallel_size": 2, "method": "eagle3"}, UnsupportedError, "parallel.pipeline=2 with serve.method=eagle3: it reads hidden states of several stages; set serve.method to mtp, draft, ngram or suffix, or divide each layer with parallel.tensor"),
        ("llama", {"tensor_parallel_size": 2, "enable_expert_parallel": True}, ConfigError, "the model has no experts"),
        ("llama", {"parallel.data": 2}, ConfigError, "parallel.data=2: the model has no experts that groups could share"),
        ("qwen3_moe", {"parallel.data": 2, "parallel.experts": 3}, ConfigError, r"parallel.experts=3 must divide the 2 ranks of parallel.tensor \* parallel.data \(supported: 1, 2\)$"),
        ("qwen3_moe", {"parallel.tensor": 4, "parallel.experts": 3}, ConfigError, r"parallel.experts=3 must divide the 4 ranks of parallel.tensor \(supported: 1, 2, 4\)$"),
    ],
)  # fmt: skip
def test_what_does_not_divide_is_refused_with_what_does(
    name: str, fields: dict[str, Any], error: type[Exception], reason: str, checkpoints: Callable[[str], Path]
):
    with pytest.raises(error, match=reason):
        LLMEngine(str(checkpoints(name)), **fields)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("-tp 2 --enable-expert-parallel --enable-dp-attention -dp 2", (1, 2, 2)),
        ("-tp 4 --enable-expert-parallel --enable-dp-attention -dp 2", (2, 2, 4)),
        ("-tp 4 --enable-dp-attention", (1, 4, 1)),
        ("-dp 2 --enable-dp-attention", (1, 2, 1)),
    ],
)
def test_attention_by_request_divides_the_ranks_into_groups(
    flags: str, expected: tuple[int, int, int], checkpoints: Callable[[str], Path]
):
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    args = EngineArgs.from_cli_args(parser.parse_args(["--model", str(checkpoints("qwen3_moe")), *flags.split()]))
    config = load(args.overrides())
    parallel = config.parallel
    assert (parallel.tensor, parallel.data, parallel.experts, parallel.replicas) == (*expected, 1)


def test_groups_must_divide_the_ranks(checkpoints: Callable[[str], Path]):
    fix = r"set parallel\.tensor \(-tp\) to a multiple of 3"
    with pytest.raises(ConfigError, match=rf"3 groups \(parallel.replicas, -dp\) do not divide the 4 ranks; {fix}"):
        LLMEngine(str(checkpoints("qwen3_moe")), tensor_parallel_size=4, data_parallel_size=3, enable_dp_attention=True)


@pytest.fixture(scope="module")
def even_mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense layer and one of experts, whose columns are multiples of 64."""
    config = transformers.Qwen3MoeConfig(
        **{**tiny.SIZES, **tiny.EXPERTS, "hidden_size": 128, "num_hidden_layers": 2, "head_dim": 32,
           "intermediate_size": 192, "moe_intermediate_size": 192, "num_experts": 4, "mlp_only_layers": [0]}
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for tensor in model.parameters():
        tensor.data += torch.randn_like(tensor) * 0.1
    folder = tmp_path_factory.mktemp("even")
    model.save_pretrained(folder, save_original_format=True)
    return folder


@pytest.mark.sampled(30)
@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize(
    "fields", [{"tensor_parallel_size": 2, "enable_expert_parallel": True}, {"tensor_parallel_size": 4}]
)
@pytest.mark.parametrize("fmt", ["fp8", "fp8_block", "int8", "int4", "mxfp4"])
def test_ranks_multiply_by_the_packed_numbers_of_one(
    fmt: str, fields: dict[str, Any], level: int, thread_ranks: list[ThreadRanks], even_mixture: Path
):
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    options = {"dtype": "fp32", "level": level, "kv_cache_memory": 1 << 22, "quant": fmt, "quant.head": "int8"}
    found = []
    for each in ({}, fields):
        engine = LLMEngine(str(even_mixture), **options, **each)
        (answer,) = engine.generate([tiny.prompt(30)], scored)
        found.append([logprob.logprob for logprob in answer["prompt_logprobs"][1:]])
        engine.close()
    assert found[1] == pytest.approx(found[0], abs=1e-4) and len(thread_ranks) == 1


# of heads that are whole blocks
WIDE = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
WIDE_HEADS = {
    "lfm2": {"hidden_size": 128, "intermediate_size": 192, "block_auto_adjust_ff_dim": False},
    "qwen3_5": {**WIDE, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32},
    "nemotron_h": {**WIDE, "n_groups": 2, "ssm_state_size": 32, "mamba_head_dim": 32, "mamba_num_heads": 4},
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", WIDE_HEADS)
@pytest.mark.parametrize("fmt", ["fp8", "fp8_block", "int8", "int4", "mxfp4"])
def test_ranks_divide_packed_weights_of_recurrent_layers(
    fmt: str, name: str, thread_ranks: list[ThreadRanks], tmp_path: Path
):
    tiny.save_changed(name, tmp_path / name, **WIDE_HEADS[name])
    scored, found = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0), []
    for ranks in (1, 2):
        options = {"dtype": "fp32", "level": 1, "kv_cache_memory": 1 << 22, "quant": fmt}
        with closing(LLMEngine(str(tmp_path / name), **options, tensor_parallel_size=ranks)) as engine:
            (answer,) = engine.generate([tiny.prompt(30)], scored)
            found.append([logprob.logprob for logprob in answer["prompt_logprobs"][1:]])
    assert found[1] == pytest.approx(found[0], abs=1e-4) and len(thread_ranks) == 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_ranks_multiply_by_the_blocks_of_a_gguf_file(kind: str, thread_ranks: list[ThreadRanks], tmp_path: Path):
    widths = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 16, "num_hidden_layers": 2}
    tiny.save_changed("smollm3", tmp_path / "checkpoint", **widths)
    path = gguf_files.convert(tmp_path / "checkpoint", tmp_path / "tiny.gguf", rounded=kind, packed=True)
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found = []
    for ranks in (1, 2):
        engine = LLMEngine(str(path), dtype="fp32", level=1, kv_cache_memory=1 << 22, tensor_parallel_size=ranks)
        (answer,) = engine.generate([tiny.prompt(30)], scored)
        found.append([logprob.logprob for logprob in answer["prompt_logprobs"][1:]])
        engine.close()
    assert found[1] == pytest.approx(found[0], abs=1e-4) and len(thread_ranks) == 1


@pytest.mark.slow
def test_the_ranks_of_a_compiled_model_compile_nothing(
    thread_ranks: list[ThreadRanks], tmp_path: Path, one_compiler: None, monkeypatch: pytest.MonkeyPatch
):
    model = tmp_path / "model"  # of one layer, which has the fewest pieces
    tiny.save_changed("llama", model, num_hidden_layers=1)
    compiled: list[int] = []

    def compile_and_count(texts: list[str], device: str) -> Any:
        compiled.append(len(texts))
        return compile_pieces(texts, device)

    monkeypatch.setattr(compile, "compile_pieces", compile_and_count)
    prompts = [tiny.prompt(20), tiny.prompt(5, seed=1)]
    tokens = []
    for ranks in (2, 2):
        engine = LLMEngine(str(model), dtype="fp32", level=2, kv_cache_memory=1 << 22,
                           cache=str(tmp_path), tensor_parallel_size=ranks)  # fmt: skip
        tokens.append([answer["token_ids"] for answer in engine.generate(prompts, GREEDY)])
        engine.close()
    assert len(compiled) == 1 and tokens[0] == tokens[1]
    fields = [
        f"checkpoint={model}",
        "dtype=fp32",
        "level=2",
        f"cache={tmp_path}",
        "device=cpu",
        "parallel=tp2",
    ]
    config = load([*fields, "serve.kv_cache_memory=4194304"])
    of_cache = compile_model(config)
    assert of_cache.report.hit and show(of_cache.graph) != show(compile_graph(config)), "comments are not kept"
    assert assemble.digest_of(of_cache.graph) == assemble.digest_of(compile_graph(config)), (
        "by which ranks are compared"
    )
    single = LLMEngine(str(model), dtype="fp32", level=1, kv_cache_memory=1 << 22)
    assert tokens[0] == [answer["token_ids"] for answer in single.generate(prompts, GREEDY)]


@pytest.mark.slow
def test_ranks_run_where_their_driver_does(checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch):
    folder = checkpoints("llama")
    monkeypatch.chdir(folder.parent)
    engine = LLMEngine(f"./{folder.name}", dtype="fp32", level=0, tensor_parallel_size=2, kv_cache_memory=1 << 22)
    (answer,) = engine.generate([tiny.prompt(9)], GREEDY)
    engine.close()
    single = LLMEngine(str(folder), dtype="fp32", level=0, kv_cache_memory=1 << 22)
    assert answer["token_ids"] == single.generate([tiny.prompt(9)], GREEDY)[0]["token_ids"]


@pytest.mark.slow
def test_an_engine_that_nobody_holds_leaves_no_rank_and_the_threads_of_before(checkpoints: Callable[[str], Path]):
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    engine = LLMEngine(
        str(checkpoints("llama")), dtype="fp32", level=0, tensor_parallel_size=2, kv_cache_memory=1 << 22
    )
    assert torch.get_num_threads() == 2 and len(rank_processes()) == 1
    del engine
    gc.collect()
    assert torch.get_num_threads() == 4 and rank_processes() == []
    torch.set_num_threads(before)


@pytest.mark.slow
def test_an_interrupt_within_a_step_is_one_and_ends_the_ranks(open_engine: Open, monkeypatch: pytest.MonkeyPatch):
    engine = open_engine("llama", tensor_parallel_size=2)

    def interrupt(step: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine._engine.runner.runner, "execute", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[1]], GREEDY)
    with pytest.raises(EngineDeadError, match="KeyboardInterrupt"):
        engine.generate([[1]], GREEDY)
    engine.close()
    assert rank_processes() == []


def save_hosts(folder: Path, rank: int) -> list[str]:
    """The fields of a rank of two on two hosts."""
    key = folder / "key"
    key.write_text("0123456789abcdef")
    key.chmod(0o600)
    fields = ["parallel=tp2", "parallel.launcher=torchrun", f"parallel.key_file={key}", f"cache={folder / str(rank)}"]
    return [
        *fields,
        "parallel.address=tcp://127.0.0.1:9",
        "advanced.torchrun.world_size=2",
        f"advanced.torchrun.rank={rank}",
    ]


class Joined:
    """A rank that has said hello."""

    def __init__(self, hello: bytes) -> None:
        self.hello, self.refused = hello, ""

    def refuse(self, reason: str) -> None:
        self.refused = reason


def test_a_rank_has_the_folders_of_its_host_and_else_the_driver_s_command_line(
    checkpoints: Callable[[str], Path], tmp_path: Path
):
    model, copied = checkpoints("llama"), tmp_path / "copied"
    shutil.copytree(model, copied)
    fields = ["dtype=fp32", "sampling.logit_bias={3: 2.5}"]
    ours = load([*save_hosts(tmp_path, 0), f"checkpoint={model}", *fields])
    same: Any = Joined(
        msgspec.msgpack.encode(without_secrets(load([*save_hosts(tmp_path, 1), f"checkpoint={copied}", *fields])))
    )
    own = config_of(same, 1, ours)
    assert (own.checkpoint, own.cache, own.dtype) == (str(copied), str(tmp_path / "1"), "fp32")
    keyed = load([*save_hosts(tmp_path, 0), f"checkpoint={model}", *fields, "serve.http.api_keys=sesame"])
    sent = config_of(Joined(b""), 1, keyed)  # type: ignore[arg-type]
    assert sent == without_secrets(ours) and b"sesame" not in msgspec.msgpack.encode(sent)
    for change, name in (("seed=1", "seed"), ("serve.block_size=8", "serve")):
        said = msgspec.msgpack.encode(
            without_secrets(load([*save_hosts(tmp_path, 1), f"checkpoint={model}", *fields, change]))
        )
        other: Any = Joined(said)
        with pytest.raises(
            ConfigError, match=f"rank 1: its command line differs in {name}; give all ranks the same one"
        ):
            config_of(other, 1, ours)
        assert f"differs in {name}" in other.refused


@pytest.mark.slow
def test_groups_on_two_hosts_send_tokens_to_their_experts(
    open_engine: Open, checkpoints: Callable[[str], Path], references: Any, tmp_path: Path
):
    """Hosts are addresses of the loopback."""
    said = dict(text.split("=", 1) for text in save_hosts(tmp_path, 1)[1:] if not text.startswith("cache="))
    said |= {"parallel.address": f"tcp://127.0.0.1:{free_port()}", "parallel.dispatch": "dispatch"}
    said |= {"parallel.data": "2", "parallel.experts": "2"}
    fields = {"dtype": "fp32", "level": 1, "kv_cache_memory": 1 << 22}
    second = {"model": str(checkpoints("qwen3_moe")), "parallel.host": "127.0.0.2", **fields, **said}
    code, env = f"from atom import LLMEngine; LLMEngine(**{second})", {**os.environ, "OMP_NUM_THREADS": "1"}
    other = subprocess.Popen([sys.executable, "-c", code], env=env)
    try:
        engine = open_engine("qwen3_moe", **fields, **{**said, "advanced.torchrun.rank": "0"})
        prompts = [tiny.prompt(200), tiny.prompt(33, seed=1), tiny.prompt(1, seed=2)]
        rows = 2 * 200 * int(engine.config.hf["hidden_size"]) * torch.float32.itemsize
        assert rows > COUNTED_BYTES, "those of the longest prompt are counted"
        for batch in (prompts, prompts[:1]):  # the last leaves a group empty
            answers = engine.generate(batch, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
            for answer, prompt in zip(answers, batch, strict=True):
                tiny.assert_greedy(answer, prompt, references("qwen3_moe"))
        engine.close()
        assert other.wait(60) == 0
    finally:
        other.kill()
        other.wait()


def test_a_script_of_a_rank_that_does_not_drive_ends_with_its_engine(
    checkpoints: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    served: list[int] = []
    monkeypatch.setattr("atom.llm.serve_rank", lambda config: served.append(config.rank) or 3)
    fields = dict(text.split("=", 1) for text in save_hosts(tmp_path, 1) if not text.startswith("parallel=tp2"))
    with pytest.raises(SystemExit) as ended:
        LLMEngine(str(checkpoints("llama")), tensor_parallel_size=2, **fields)
    assert (served, ended.value.code) == ([1], 3)


def test_ranks_compare_a_sample_of_the_weights_that_all_have_whole(checkpoints: Callable[[str], Path]):
    config = load([f"checkpoint={checkpoints('qwen3_moe')}", "parallel=tp2", "level=0", "dtype=fp32"])
    graph = compile_graph(config)
    with contextlib.ExitStack() as opened:
        checkpoint = assemble.open_checked(config, SilentProgress(), opened)
        loaded = [assemble.load_weights(graph, checkpoint, config, SilentProgress(), rank) for rank in range(2)]
    samples = [sample_weights(tensors) for tensors in loaded]
    check_same_weights(samples)
    changed = next(tensor for recipe, tensor in loaded[1].items() if isinstance(recipe, W) and "norm" in recipe.name)
    assert isinstance(changed, torch.Tensor)
    other = {recipe: tensor + 1e-3 if tensor is changed else tensor for recipe, tensor in loaded[1].items()}
    with pytest.raises(CheckpointError, match="rank 1 has other weights than rank 0: each host needs the same files"):
        check_same_weights([samples[0], sample_weights(other)])
