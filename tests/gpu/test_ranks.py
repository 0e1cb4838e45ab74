"""Ranks on two GPUs: collectives, the tokens of one rank, whatever happens, and what becomes of a rank that dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from gpu.collectives import SHAPES, SIZES, inputs_of, of, two_ranks
from gpu.steps import GREEDY, ON_GPU

from atom import LLMEngine, SamplingParams
from atom.errors import EngineDeadError

pytestmark = [*ON_GPU, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU here")]

Open = Callable[..., LLMEngine]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EVENTFUL = {"num_kvcache_blocks": 30, "block_size": 4, "max_model_len": 106, "max_num_batched_tokens": 16,
            "enable_prefix_caching": True}  # fmt: skip
DIVIDED = [
    ("llama", {"tensor_parallel_size": 2}),
    ("qwen3_moe", {"tensor_parallel_size": 2}),
    ("qwen3_moe", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
    ("qwen3_moe", {"parallel.data": 2, "parallel.experts": 2}),
    ("deepseek_v3", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
    ("llama_tied", {"pipeline_parallel_size": 2}),
]


def test_collectives_equal_those_in_float64_and_have_the_same_bits_on_each_rank():
    with two_ranks() as (_, _, run):
        ours, theirs = run("ops")
    cases = [(dtype, shape) for dtype in DTYPES for shape in SHAPES]
    for (dtype, shape), our, their in zip(cases, ours, theirs, strict=True):
        x, rows, weights, ids = (
            [inputs_of(rank, shape, dtype)[name] for rank in range(2)] for name in ("x", "rows", "weights", "ids")
        )
        eps = 4 * torch.finfo(dtype).eps
        total, _, part, *_ = our
        assert torch.equal(total, their[0]) and total.dtype == dtype
        assert torch.allclose(total.double(), x[0].double() + x[1].double(), rtol=eps, atol=eps)
        for each in (our, their):
            assert torch.equal(each[1], torch.hstack(x)[:, : 2 * shape[1] - 1]) and each[1].is_contiguous()
            assert all(torch.equal(a, torch.cat(b)) for a, b in zip(each[3:], (x, weights, ids), strict=True))
        both = (rows[0].double() + rows[1].double()).chunk(2)
        assert torch.allclose(part.double(), both[0], rtol=eps, atol=eps)
        assert torch.allclose(their[2].double(), both[1], rtol=eps, atol=eps)


def test_graphs_of_collectives_are_replayed_in_any_order_with_a_rank_that_is_late():
    with two_ranks() as (_, _, run):
        ours, theirs = run("replays")
    for seed, (size, our, their) in enumerate(zip(SIZES, ours, theirs, strict=True)):
        x = [of(rank, size, torch.bfloat16, seed) for rank in range(2)]
        total = (x[0].double() + x[1].double()).to(torch.bfloat16)
        for each in (our, their):
            assert torch.equal(each[0], total) and torch.equal(each[1], total * 2)
            assert torch.equal(each[2], torch.hstack(x))


def test_a_collective_that_waits_for_a_rank_which_is_gone_is_ended():
    with two_ranks() as (communicator, ranks, _):
        communicator.all_reduce(torch.ones(64, 64, device="cuda"), axis="tensor")
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        time.sleep(0.2)
        assert not event.query(), "it waits"
        ranks.fail(EngineDeadError("enough"))
        end = time.monotonic() + 3
        while not event.query():
            assert time.monotonic() < end
            time.sleep(0.01)
        with pytest.raises(EngineDeadError, match="the ranks have ended"):
            communicator.all_reduce(torch.ones(1, 1, device="cuda"), axis="tensor")


@pytest.mark.parametrize("level", [0, 3])
@pytest.mark.parametrize(("name", "fields"), DIVIDED)
def test_ranks_generate_the_tokens_of_the_reference(
    name: str, fields: dict[str, Any], level: int, open_engine: Open, references: Any
):
    engine = open_engine(name, level=level, **EVENTFUL, **fields)
    shared = tiny.prompt(30)
    prompts = [shared, tiny.prompt(25, seed=1), shared[:17] + tiny.prompt(24, seed=2)]
    prompts += [tiny.prompt(1 + 9 * seed, seed=seed + 3) for seed in range(4)] if "parallel.data" in fields else []
    for batch in (prompts, prompts[::-1], prompts[:1]):  # the last leaves a group empty
        for answer, prompt in zip(engine.generate(batch, GREEDY), batch, strict=True):
            tiny.assert_greedy(answer, prompt, references(name))
    metrics = engine.metrics.scheduler
    assert metrics.num_chunks > 0 and metrics.num_prefix_hit_tokens > 0 and metrics.num_preemptions > 0
    assert metrics.num_ahead > 0


PARAMS = [
    SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=32, ignore_eos=True, n=2),
    SamplingParams(temperature=0.8, top_k=20, min_p=0.02, seed=3, max_tokens=32, ignore_eos=True),
    SamplingParams(temperature=0.7, presence_penalty=0.4, repetition_penalty=1.2, seed=5, max_tokens=32),
    SamplingParams(temperature=0, max_tokens=5, logprobs=3, prompt_logprobs=2, logit_bias={3: 2.0}, min_tokens=3),
]


@pytest.mark.parametrize(("name", "fields"), [DIVIDED[0], DIVIDED[2], DIVIDED[3]])
def test_ranks_sample_what_one_samples(name: str, fields: dict[str, Any], open_engine: Open):
    prompts = [tiny.prompt(length, seed=length) for length in (9, 30, 1, 17)]
    alone = open_engine(name, level=3).generate(prompts, PARAMS)
    engine = open_engine(name, level=3, **fields)
    (aborted,) = engine.add_request([tiny.prompt(50, seed=9)], GREEDY)
    engine.step()
    engine.abort(aborted)
    answers = engine.generate(prompts, PARAMS)
    assert [each["token_ids"] for each in answers] == [each["token_ids"] for each in alone]
    ours, theirs = (each[-1]["prompt_logprobs"][1:] for each in (answers, alone))
    assert [each.logprob for each in ours] == pytest.approx([each.logprob for each in theirs], abs=1e-4)


def rank_processes() -> list[int]:
    """The processes of ranks that this one has started."""
    shown = subprocess.run(
        ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(os.getpid())], capture_output=True, text=True
    )
    return [int(line.split()[0]) for line in shown.stdout.splitlines() if "RankLink" in line]


@pytest.mark.parametrize("fields", [DIVIDED[0][1], DIVIDED[5][1]])
@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGKILL, "rank 1 has ended"), (signal.SIGSTOP, "rank 1 has been silent")]
)
def test_a_rank_that_dies_or_stops_under_load_ends_the_engine(
    number: signal.Signals, reason: str, fields: dict[str, Any], open_engine: Open
):
    engine = open_engine("llama", level=3, **fields)
    engine.generate([tiny.prompt(9)], GREEDY)
    (pid,) = rank_processes()
    engine.add_request(
        [tiny.prompt(9), tiny.prompt(12)], SamplingParams(temperature=0, max_tokens=220, ignore_eos=True)
    )
    for _ in range(20):
        engine.step()
    os.kill(pid, number)
    since = time.monotonic()
    with pytest.raises(EngineDeadError, match=reason):
        while True:
            engine.step()
    assert time.monotonic() - since < 5.5
    with pytest.raises(EngineDeadError, match=reason):
        engine.generate([[1]], GREEDY)
    engine.close()
    assert time.monotonic() - since < 6 and rank_processes() == []
    torch.cuda.synchronize()  # nothing waits on the GPU


def test_ranks_end_with_the_process_that_drives_them(checkpoints: Callable[[str], Path], gpu_cache: Path):
    code = f"""if True:
        from atom import LLMEngine, SamplingParams
        engine = LLMEngine({str(checkpoints("llama"))!r}, dtype="fp32", device="cuda", level=3, tensor_parallel_size=2,
                           num_kvcache_blocks=64, cudagraph_capture_sizes=[1], max_num_seqs=1, max_num_batched_tokens=64,
                           cache={str(gpu_cache)!r})
        engine.add_request([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
        engine.step()
        print("runs", flush=True)
        while True:
            engine.step()
    """
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None and driver.stdout.readline() == "runs\n"
        children = Path(f"/proc/{driver.pid}/task/{driver.pid}/children").read_text().split()
        driver.kill()
    end = time.monotonic() + 5
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < end, "a rank is left"
        time.sleep(0.05)
    assert children


def test_a_second_start_compiles_nothing(open_engine: Open, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    fields = {"level": 3, "cache": str(tmp_path), "tensor_parallel_size": 2, "cudagraph_capture_sizes": [1, 4]}
    first = open_engine("llama", **fields)
    expected = first.generate([tiny.prompt(20)], GREEDY)[0]["token_ids"]
    first.close()
    binaries = {path.name for path in (tmp_path / "binaries").iterdir()}
    capfd.readouterr()
    second = open_engine("llama", **fields)
    assert second.generate([tiny.prompt(20)], GREEDY)[0]["token_ids"] == expected
    assert "has compiled" not in capfd.readouterr().err
    assert binaries == {path.name for path in (tmp_path / "binaries").iterdir()} and binaries
