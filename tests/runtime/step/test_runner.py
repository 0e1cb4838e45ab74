"""A runner that the host runs ahead of gives the tokens of one on the CPU, whose steps are waited for.

Without a GPU Triton's kernels, which prepare and sample a step, run under its interpreter, and the model is its
reference bodies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import serving
import tiny
import torch
from conftest import Place, place_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime import interpreter

from atom import LLMEngine, SamplingParams, assemble
from atom.assemble.kv_blocks import plan_kv
from atom.checkpoint import SilentProgress, stop_ids
from atom.compiler import compile_graph
from atom.config.checkpoint import open_for
from atom.config.limits import Drafting
from atom.config.load import engine_overrides, load
from atom.errors import CapacityError, EngineDeadError
from atom.graph import BODY
from atom.kernels import Target
from atom.kernels.triton.attention import shared_prefix
from atom.kernels.triton.step import sampling
from atom.runtime.draft.speculation import RunnerDrafter
from atom.runtime.engine import Engine
from atom.runtime.kv.cache import KVCache
from atom.runtime.requests.vocabulary import Vocabulary
from atom.runtime.schedule.scheduler import Scheduler
from atom.runtime.step import model, prefix_groups
from atom.runtime.step.builder import StepBuilder
from atom.runtime.step.input import PrefixRule, StepInput
from atom.runtime.step.model import Model
from atom.runtime.step.program import Bindings
from atom.runtime.step.runner import Runner
from atom.runtime.types import Sequence, StepLimits

FIELDS = {"dtype": "fp32", "level": 0, "block_size": 4, "num_kvcache_blocks": 60, "max_num_batched_tokens": 16,
          "max_num_seqs": 6, "max_model_len": 64}  # fmt: skip
DEPTHS = (0, 1, 2, 3)
HOPPER = Target("cuda", frozenset({"nvidia", "sm_90"}))
Asked = list[tuple[list[int], SamplingParams]]


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is slow: what of a vocabulary of 101 is looked at together is as little as that."""
    if not torch.cuda.is_available():
        for name, size in {"PART": 64, "MAX_GATHERED": 128, "MAX_PAIRED": 32}.items():
            monkeypatch.setattr(sampling, name, size)


def open_runner(
    folder: Path, place: Place, run_ahead: int, target: Target | None = None, drafting: Drafting | None = None,
    **fields: Any,
) -> Engine:  # fmt: skip
    """The engine of a runner. target: of the text's kernels, where it is not the machine at hand."""
    config = load(engine_overrides(str(folder), {**FIELDS, "device": place.device, **fields}))
    graph, serve, limits = compile_graph(config, target=target), config.serve, StepLimits(*astuple(config.limits))
    kinds = assemble.state_kinds(graph, serve.block_size)
    num_blocks = plan_kv(kinds, serve, limits)
    checkpoint = open_for(config, SilentProgress())
    tokenizer = checkpoint.tokenizer(trust_remote_code=False)
    bindings = Bindings(assemble.load_weights(graph, checkpoint, config, SilentProgress()))
    model = Model(
        graph, bindings, serve.block_size, limits, device=place.device, backend=place.backend, drafting=drafting
    )
    runner = Runner(model, run_ahead)
    runner.bind(num_blocks)
    cache = KVCache(kinds, num_blocks, serve.block_size, enable_prefix_caching=serve.enable_prefix_caching)
    return Engine(
        runner,
        Scheduler(cache, limits, run_ahead, RunnerDrafter(drafting.num_tokens) if drafting else None),
        StepBuilder(runner.capacity),
        Vocabulary(config.model.vocab, stop_ids(checkpoint, tokenizer), tokenizer),
        seed=0,
    )


def on_cpu(folder: Path, **fields: Any) -> LLMEngine:
    return LLMEngine(str(folder), **{**FIELDS, "device": "cpu", **fields})


def generate(engine: Engine, asked: Asked, watch: Callable[[], object] = lambda: None) -> list[Sequence]:
    """The sequences of all requests, in their order, ended; nothing of the pool and no slot is kept."""
    sequences = [engine.prepare(prompt, params) for prompt, params in asked]
    for each in sequences:
        engine.submit(each)
    while engine.has_work:
        engine.step()
        watch()
    scheduler = engine.scheduler
    assert all(pool.num_free == pool.num_blocks - 1 for pool in scheduler.cache.pools)
    assert sorted(scheduler._slots) == list(range(scheduler.num_slots))
    return [sequence for each in sequences for sequence in each]


def expected(engine: LLMEngine, asked: Asked) -> list[dict[str, Any]]:
    return engine.generate([prompt for prompt, _ in asked], [params for _, params in asked])


def assert_same(sequences: list[Sequence], answers: list[dict[str, Any]]) -> None:
    assert [each.output for each in sequences] == [answer["token_ids"] for answer in answers]
    assert [each.finish_reason for each in sequences] == [answer["finish_reason"] for answer in answers]
    assert [each.text for each in sequences] == [answer["text"] for answer in answers]
    for sequence, answer in zip(sequences, answers, strict=True):
        ours = [*sequence.logprobs, *sequence.prompt_logprobs]
        theirs = [*answer.get("logprobs", ()), *answer.get("prompt_logprobs", ())]
        for one, other in zip(ours, theirs, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                assert (one.token, one.rank) == (other.token, other.rank)
                assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
                assert [token for token, _ in one.top] == [token for token, _ in other.top]
                assert [value for _, value in one.top] == pytest.approx([value for _, value in other.top], abs=1e-4)


def greedy(*lengths: int, max_tokens: int = 9, **params: Any) -> Asked:
    return [
        (tiny.prompt(length, seed=length), SamplingParams(temperature=0, max_tokens=max_tokens, **params))
        for length in lengths
    ]


EVERY_WAY: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9},
    {"temperature": 0.9, "top_p": 0.8, "top_k": 20, "min_p": 0.01},
    {"temperature": 0.8, "presence_penalty": 0.5, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"temperature": 0, "repetition_penalty": 1.5},
    {"temperature": 1.0, "logit_bias": {5: 9.0, 100: -100, 7: 8.5}},
    {"temperature": 0, "min_tokens": 3, "stop_token_ids": list(range(0, 101, 2))},
    {"temperature": 0, "logprobs": 3},
    {"temperature": 1.0, "logprobs": 0, "prompt_logprobs": 2},
    {"temperature": 1.0, "n": 2},
]


@pytest.mark.sampled(12, gpu=2)
@pytest.mark.parametrize("depth", DEPTHS)
def test_every_way_to_sample_gives_the_tokens_of_the_cpu(checkpoints: Any, place: Place, depth: int):
    asked = [(tiny.prompt(1 + 2 * at, seed=at), SamplingParams(**{"max_tokens": 4, "seed": 7 + at, **params}))
             for at, params in enumerate(EVERY_WAY)]  # fmt: skip
    engine = open_runner(checkpoints("qwen3"), place, depth)
    assert_same(generate(engine, asked), expected(on_cpu(checkpoints("qwen3")), asked))
    stats = engine.scheduler.stats
    assert stats.num_chunks > 0 and (stats.num_ahead > 0) == (depth > 0)


@pytest.mark.sampled(3, gpu=1)
@pytest.mark.parametrize("depth", [0, 2])
def test_log_probabilities_are_of_the_logits_before_the_host_has_shaped_them(
    checkpoints: Any, policy_place: Place, depth: int
):
    bias = {"temperature": 0, "logit_bias": {5: 9.0}}
    banned = {"temperature": 0, "min_tokens": 3, "stop_token_ids": list(range(0, 101, 2))}
    asked = [(tiny.prompt(4 + at, seed=4), SamplingParams(max_tokens=3, logprobs=3, **params))
             for at, params in enumerate([bias, banned])]  # fmt: skip
    engine = open_runner(checkpoints("qwen3"), policy_place, depth)
    sequences = generate(engine, asked)
    assert_same(sequences, expected(on_cpu(checkpoints("qwen3")), asked))
    assert sequences[0].output == [5, 5, 5]
    assert sequences[0].logprobs[0].rank > 1, "without the bias another is likelier"  # type: ignore[union-attr]


@pytest.mark.sampled(3, gpu=1)
@pytest.mark.parametrize("depth", [0, 2])
def test_tokens_after_a_stop_are_thrown_away_and_none_are_computed_after_max_tokens(
    checkpoints: Any, policy_place: Place, depth: int
):
    cpu, asked = on_cpu(checkpoints("qwen3")), greedy(3, 17, 1, max_tokens=6)
    free = expected(cpu, asked)
    stops = [answer["token_ids"][2] for answer in free]
    engine = open_runner(checkpoints("qwen3"), policy_place, depth)
    assert_same(generate(engine, asked), free)
    assert engine.scheduler.stats.num_overrun == 0
    asked = greedy(3, 17, 1, max_tokens=6, stop_token_ids=stops)
    stopped = generate(engine, asked)
    assert_same(stopped, expected(cpu, asked))
    assert sum(each.finish_reason != "max_tokens" for each in stopped) == 3
    assert (engine.scheduler.stats.num_overrun > 0) == (depth > 0)


@pytest.mark.sampled(2, gpu=1)
@pytest.mark.parametrize("depth", [0, 2])
def test_a_text_of_the_gpu_s_own_kernels_gives_the_same_tokens(checkpoints: Any, place: Place, depth: int):
    target = HOPPER if place == Place("cpu", "triton") else None
    asked = greedy(3, 6, max_tokens=4)
    engine = open_runner(checkpoints("qwen3_window"), place, depth, target, level=1, max_model_len=32)
    assert_same(generate(engine, asked), expected(on_cpu(checkpoints("qwen3_window"), level=1), asked))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lfm2", "qwen3_5", "nemotron_h"])
def test_drafts_over_recurrent_state_in_the_gpu_s_own_kernels_give_the_same_tokens(checkpoints: Any, name: str):
    """Next to a prompt in chunks, and after a copy of the state in an answer."""
    place = place_of("cuda" if torch.cuda.is_available() else "interpreter")
    target = None if torch.cuda.is_available() else HOPPER
    params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, frequency_penalty=-2.0)  # it repeats itself
    asked = [(tiny.prompt(5), params), (tiny.prompt(21, seed=1), params)]
    engine = open_runner(
        checkpoints(name), place, 2, target, Drafting(2, 1, 3), level=1, method="ngram", num_speculative_tokens=2,
        max_verified_tokens=100, enable_prefix_caching=True,
    )  # fmt: skip
    first = generate(engine, asked)
    assert_same(first, expected(on_cpu(checkpoints(name), level=1), asked))
    asked = [([*tiny.prompt(5), *first[0].output, 3], replace(params, max_tokens=3))]
    assert_same(generate(engine, asked), expected(on_cpu(checkpoints(name), level=1), asked))
    stats = engine.scheduler.stats
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert stats.num_prefix_hit_tokens == 16 and stats.num_chunks > 0


@pytest.mark.sampled(8, gpu=2)
@pytest.mark.parametrize(("name", "level"), [("qwen3", 0), ("qwen3", 1), ("qwen3_moe", 0), ("deepseek_v3", 0)])
def test_padding_between_decodes_and_prompts_and_after_them_changes_nothing(
    checkpoints: Any, place: Place, monkeypatch: pytest.MonkeyPatch, name: str, level: int
):
    """As in the steps that are captured, which have room for more decodes, rows and tokens than come."""
    asked = greedy(3, 11, 14, 5, 1, 7, 9, max_tokens=6, prompt_logprobs=2)
    if (name, level) == ("qwen3", 0):  # the ways to sample know no model
        asked += [(tiny.prompt(9), SamplingParams(max_tokens=5, seed=4, **way)) for way in EVERY_WAY]
    target = HOPPER if level and place == Place("cpu", "triton") else None
    engine = open_runner(checkpoints(name), place, 1, target, level=level, max_num_batched_tokens=12)
    runner: Any = engine.runner
    runner.graphs._max_tokens = 12
    shapes = tuple(runner.graphs._find_shapes())
    engine.builder = StepBuilder(msgspec.structs.replace(runner.capacity, mixed_shapes=shapes))
    execute, taken = runner.execute, []

    def watch(step: StepInput) -> Any:
        if not step.is_decode:
            slots, starts, *_ = step.shape.split(np.frombuffer(step.packed, np.int32))
            is_own = slots < runner.model.padding
            num_decodes, num_rows = is_own[: step.shape.num_decodes].sum(), is_own.sum()
            more = step.shape.num_tokens - int(starts[:-1][is_own].max(initial=0))
            taken.append((num_decodes, step.shape.num_decodes, num_rows, more))
        return execute(step)

    monkeypatch.setattr(runner, "execute", watch)
    assert_same(generate(engine, asked), expected(on_cpu(checkpoints(name)), asked))
    assert any(0 < few < most and few < rows and more for few, most, rows, more in taken), "decodes before prompts"


@pytest.mark.sampled(3, gpu=1)
@pytest.mark.parametrize(("max_tokens", "prompts"), [(3, [3, 3, 3]), (100, [100, 100, 16, 32, 64, 100]),
                                                     (700, [700, 700, 16, 32, 64, 128, 256, 384, 512])])  # fmt: skip
def test_what_a_start_walks_through_is_what_can_come_and_changes_nothing(
    checkpoints: Any, policy_place: Place, monkeypatch: pytest.MonkeyPatch, max_tokens: int, prompts: list[int]
):
    asked = greedy(3, 6, max_tokens=4)
    engine = open_runner(checkpoints("qwen3"), policy_place, 2)
    runner: Any = engine.runner
    decode, mix = runner.model.decode, runner.model.mix
    walked: list[tuple[str, int]] = []
    with monkeypatch.context() as watched:
        watched.setattr(runner.model, "decode", lambda *args: walked.append(("decode", len(args[0]))) or decode(*args))
        watched.setattr(runner.model, "mix", lambda *args: walked.append(("mix", args[0].num_tokens)) or mix(*args))
        runner.graphs.compile([1, 2, 7], max_tokens)
    assert walked == [("mix", num) for num in prompts] + [("decode", num) for num in (1, 2, 4, 7)]
    assert_same(generate(engine, asked), expected(on_cpu(checkpoints("qwen3")), asked))


@pytest.mark.sampled(3, gpu=1)
@pytest.mark.parametrize("depth", [0, 2])
def test_a_small_pool_preempts_and_changes_nothing(checkpoints: Any, policy_place: Place, depth: int):
    asked = [
        (tiny.prompt(9), SamplingParams(temperature=0, max_tokens=12)),
        (tiny.prompt(14), SamplingParams(temperature=0.9, seed=4, repetition_penalty=1.4, max_tokens=12)),
        (tiny.prompt(3), SamplingParams(temperature=0, frequency_penalty=1.0, max_tokens=12, logprobs=0)),
    ]
    engine = open_runner(checkpoints("qwen2_window"), policy_place, depth, num_kvcache_blocks=8, max_model_len=32)
    assert_same(generate(engine, asked), expected(on_cpu(checkpoints("qwen2_window")), asked))
    assert engine.scheduler.stats.num_preemptions > 0


@pytest.mark.sampled(3, gpu=1)
@pytest.mark.parametrize("depth", [0, 3])
def test_prefixes_that_are_found_change_nothing(checkpoints: Any, policy_place: Place, depth: int):
    engine = open_runner(checkpoints("qwen3"), policy_place, depth, enable_prefix_caching=True)
    shared = tiny.prompt(13)
    params = SamplingParams(temperature=0, max_tokens=6)
    for asked in ([(shared, params)], [(shared, params), ([*shared[:9], 1, 2], params), (shared + [3] * 9, params)]):
        assert_same(generate(engine, asked), expected(on_cpu(checkpoints("qwen3")), asked))
    assert engine.scheduler.stats.num_prefix_hit_tokens >= 12 + 8 + 12


@pytest.mark.sampled(1, gpu=1)
@pytest.mark.parametrize("num_drafts", [0, 2])
def test_decodes_with_a_common_prefix_are_grouped_and_get_the_same_tokens(
    checkpoints: Any, policy_place: Place, monkeypatch: pytest.MonkeyPatch, num_drafts: int
):
    """Two that go on from the same 32 tokens, later next to a third one's prompt, and one that has others."""
    target = HOPPER if policy_place == Place("cpu", "triton") else None
    fields = {"max_model_len": 64, "num_kvcache_blocks": 100, "max_num_batched_tokens": 64}
    for module, name, value in ((prefix_groups, "PREFIX_MULTIPLE", 32), (shared_prefix, "PREFIX_MULTIPLE", 32),
                                (prefix_groups, "ROW_TOKENS", 1)):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    drafting = Drafting(num_drafts, 1, 3) if num_drafts else None
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "max_verified_tokens": 100} if num_drafts else {}
    engine = open_runner(checkpoints("qwen3"), policy_place, 1, target, drafting, level=1, enable_prefix_caching=True,
                         **fields, **drafts)  # fmt: skip
    runner: Any = engine.runner
    runner.model.prefix_rule = PrefixRule("full", 1, 1)
    engine.builder = StepBuilder(runner.capacity)
    execute, grouped = runner.execute, set[tuple[bool, int]]()

    def watch(step: StepInput) -> Any:
        pending, size = execute(step), step.shape.num_decodes
        if step.prefixes:
            lengths, members, starts = np.split(np.frombuffer(step.prefixes, np.int32), [size, 2 * size])
            packed = np.frombuffer(step.packed, np.int32)
            slots = packed[:size] if step.is_decode else step.shape.split(packed).slots[:size]
            rows = members[starts[0] : starts[1]]
            tables = runner.model.tables[0, slots[rows], : 32 // engine.scheduler.cache.block_size].cpu()
            assert (lengths[rows] == 32).all() and lengths.sum() == 32 * len(rows) and (starts[1:] == len(rows)).all()
            assert len(rows) > 1 and (tables == tables[0]).all()
            grouped.add((step.is_decode, len(rows)))
        return pending

    monkeypatch.setattr(runner, "execute", watch)
    shared, params = tiny.prompt(35), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    asked = [([*shared, 5], params), (shared, replace(params, max_tokens=12)), (tiny.prompt(9, seed=2), params),
             ([*shared[:33], *range(9)], params)]  # fmt: skip
    prepared = [engine.prepare(prompt, how) for prompt, how in asked]
    for each in prepared[:3]:
        engine.submit(each)
    while len(prepared[1][0].output) < 3:
        engine.step()
    engine.submit(prepared[3])
    while engine.has_work:
        engine.step()
    sequences = [sequence for (sequence,) in prepared]
    assert_same(sequences, expected(on_cpu(checkpoints("qwen3"), level=1, **fields), asked))
    assert {(True, 2), (True, 3), (False, 2)} <= grouped


def test_a_sequence_ends_at_max_model_len_without_a_step_too_many(checkpoints: Any, policy_place: Place):
    asked = greedy(20, 5, max_tokens=40, ignore_eos=True)
    engine = open_runner(checkpoints("qwen3"), policy_place, 2, max_model_len=24)
    sequences = generate(engine, asked)
    assert [len(each.output) for each in sequences] == [4, 19]
    assert_same(sequences, expected(on_cpu(checkpoints("qwen3"), max_model_len=24), asked))
    assert engine.scheduler.stats.num_overrun == 0


def test_a_slot_whose_sequence_was_aborted_in_flight_serves_the_next_one(checkpoints: Any, policy_place: Place):
    engine = open_runner(checkpoints("qwen3"), policy_place, 2, max_num_seqs=2)
    asked = greedy(6, 9, 4, max_tokens=8)
    gone = engine.submit(engine.prepare(tiny.prompt(5), SamplingParams(temperature=0.7, top_p=0.5, max_tokens=30)))
    steps = iter(range(99))

    def watch() -> None:
        if next(steps) == 2:
            engine.abort(gone)

    assert_same(generate(engine, asked, watch), expected(on_cpu(checkpoints("qwen3")), asked))
    assert engine.metrics.finish_reasons["abort"] == 1
    assert engine.scheduler.stats.num_overrun > 0


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return serving.save_talker(tmp_path_factory.mktemp("talker") / "talker")


@pytest.mark.sampled(3, gpu=1)
@pytest.mark.parametrize("depth", [0, 2])
def test_a_grammar_waits_for_its_tokens_and_the_others_run_ahead(talker: Path, policy_place: Place, depth: int):
    pytest.importorskip("llguidance")
    asked = [
        ("ab", SamplingParams(temperature=1.0, seed=1, max_tokens=9, structured_outputs={"regex": "[a-c]{3}(xy|z)"})),
        ("abc", SamplingParams(temperature=1.0, seed=2, max_tokens=9, min_tokens=3)),
        ("a", SamplingParams(temperature=1.0, seed=3, max_tokens=9, ignore_eos=True)),
    ]
    engine = open_runner(talker, policy_place, depth)
    sequences = generate(engine, asked)  # type: ignore[arg-type]
    assert_same(sequences, expected(on_cpu(talker), asked))  # type: ignore[arg-type]
    assert sequences[0].finish_reason == "eos" and sequences[0].text[:3].strip("abc") == ""
    if depth:
        assert engine.scheduler.stats.num_ahead >= len(sequences[2].output) - 1


@pytest.mark.sampled(3, gpu=1)
@pytest.mark.parametrize("depth", [0, 2])
def test_a_stop_string_ends_an_answer_and_the_tokens_after_it_do_not_show(
    talker: Path, policy_place: Place, depth: int
):
    cpu = on_cpu(talker)
    free = [("abc", SamplingParams(temperature=0.8, seed=seed, max_tokens=12, ignore_eos=True)) for seed in (1, 2)]
    texts = [answer["text"] for answer in expected(cpu, free)]  # type: ignore[arg-type]
    asked = [(prompt, SamplingParams(temperature=0.8, seed=seed, max_tokens=12, ignore_eos=True, stop_strings=[text[4:6]]))
             for (prompt, _), seed, text in zip(free, (1, 2), texts, strict=True)]  # fmt: skip
    engine = open_runner(talker, policy_place, depth)
    sequences = generate(engine, asked)  # type: ignore[arg-type]
    assert_same(sequences, expected(cpu, asked))  # type: ignore[arg-type]
    assert "stop_sequence" in {each.finish_reason for each in sequences}
    assert (engine.scheduler.stats.num_overrun > 0) == (depth > 0)


class Broken:
    """A grammar that fails at the third token."""

    num_tokens = 0

    def allowed(self, vocab: int) -> np.ndarray:
        if self.num_tokens == 2:
            raise ValueError("a grammar that fails")
        return np.ones(vocab, np.bool_)

    def push(self, token: int) -> bool:
        self.num_tokens += 1
        return False


@pytest.mark.sampled(3, gpu=1)
@pytest.mark.parametrize("depth", [0, 2])
def test_a_row_that_fails_while_steps_run_leaves_the_others_their_tokens(
    checkpoints: Any, policy_place: Place, depth: int
):
    asked = greedy(3, 5, 8, max_tokens=8)
    engine = open_runner(checkpoints("qwen3"), policy_place, depth)
    sequences = [engine.prepare(prompt, params)[0] for prompt, params in asked]
    sequences[1].matcher = Broken()
    for each in sequences:
        engine.submit([each])
    while engine.has_work:
        try:
            engine.step()
        except ValueError:  # the others' last tokens were on their way, and it was the only one
            engine.end_failed()
    wanted = expected(on_cpu(checkpoints("qwen3")), asked)
    assert_same([sequences[0], sequences[2]], [wanted[0], wanted[2]])
    assert (sequences[1].output, sequences[1].error) == (wanted[1]["token_ids"][:2], "ValueError: a grammar that fails")


TORCH_LACKS = torch.OutOfMemoryError("out of memory")
TRITON_LACKS = RuntimeError("Triton Error [CUDA]: out of memory")


@pytest.mark.sampled(6, gpu=2)
@pytest.mark.parametrize(
    ("verb", "error"),
    [
        ("extend_tables", TORCH_LACKS),
        ("decode", TORCH_LACKS),
        ("decode", TRITON_LACKS),
        ("sample", TORCH_LACKS),
        ("send", TORCH_LACKS),
    ],
)
def test_a_step_without_memory_is_taken_again_as_if_it_had_not_been(
    checkpoints: Any, policy_place: Place, monkeypatch: pytest.MonkeyPatch, verb: str, error: Exception
):
    params = SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=6, logprobs=1, seed=3)
    asked = [(tiny.prompt(length, seed=length), params) for length in (3, 4)]
    engine = open_runner(checkpoints("qwen3"), policy_place, 2)
    model = engine.runner.model  # type: ignore[attr-defined]
    real, num_calls = getattr(model, verb), [0]

    def fail(*args: Any, **kwargs: Any) -> Any:
        num_calls[0] += 1
        if num_calls[0] % 5 == 1:  # a step that is sent again in full has three
            raise error
        return real(*args, **kwargs)

    monkeypatch.setattr(model, verb, fail)
    sequences, num_failures = generate_in_spite(engine, asked)
    assert num_failures > 0
    assert_same(sequences, expected(on_cpu(checkpoints("qwen3")), asked))


def test_what_fails_after_a_draw_is_not_drawn_again(
    checkpoints: Any, policy_place: Place, monkeypatch: pytest.MonkeyPatch
):
    engine = open_runner(checkpoints("qwen3"), policy_place, 1)
    drawn, model = [], engine.runner.model  # type: ignore[attr-defined]
    sample = model.sample

    def fail(*args: Any) -> None:
        raise TRITON_LACKS

    monkeypatch.setattr(model, "sample", lambda *args: drawn.append(args) or sample(*args))
    monkeypatch.setattr(model, "score_drawn", fail)
    params = SamplingParams(max_tokens=6, logprobs=1)
    engine.submit(engine.prepare([1, 2, 3], params))
    engine.submit(engine.prepare([4, 5], params))
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="failed after a step's draw: RuntimeError"):
            engine.step()
    assert len(drawn) == 1


class FailingAllocations(TorchDispatchMode):
    """Lets the first allocation fail, the next time the second, and so on."""

    num = num_spared = 0
    is_on = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given, made = (
            {each.untyped_storage().data_ptr() for each in tree_leaves(tree) if isinstance(each, torch.Tensor)}
            for tree in ((args, kwargs), result)
        )
        self.num += self.is_on and not made <= given
        if self.num > self.num_spared:
            self.num, self.num_spared = 0, self.num_spared + 1
            raise torch.OutOfMemoryError("out of memory")
        return result

    def spare(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same, but nothing fails in it."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self.is_on, was_on = False, self.is_on
            try:
                return call(*args, **kwargs)
            finally:
                self.is_on = was_on

        return run


@pytest.mark.sampled(0, gpu=2)
@pytest.mark.parametrize("depth", [0, 2])
def test_whichever_allocation_of_a_step_fails_it_is_taken_again(
    checkpoints: Any, policy_place: Place, monkeypatch: pytest.MonkeyPatch, depth: int
):
    """Each allocation of each step fails once; those of the body, which are many and alike, do not."""
    ways: list[dict[str, Any]] = [
        {"temperature": 0, "logprobs": 2, "prompt_logprobs": 1},
        {"temperature": 0.9, "top_p": 0.9, "frequency_penalty": 0.3, "logprobs": 0},
        {"temperature": 1.0, "logit_bias": {5: 9.0}},
    ]
    if policy_place.backend == "torch":
        depth = 0  # a step has taken place before the next one is planned
        ways = [{"temperature": 0.9, "top_p": 0.9, "presence_penalty": 0.3, "logprobs": 1, "prompt_logprobs": 0}]
    asked = [
        (tiny.prompt(3 + at, seed=at), SamplingParams(max_tokens=2, seed=at, **way)) for at, way in enumerate(ways)
    ]
    engine, mode = open_runner(checkpoints("qwen3"), policy_place, depth), FailingAllocations()
    runner: Any = engine.runner
    execute, num_done = runner._execute, [0]

    def run(plan: Any) -> Any:
        with mode:
            pending = execute(plan)
        num_done.append(mode.num_spared)
        mode.num = mode.num_spared = 0
        return pending

    monkeypatch.setattr(runner, "_execute", run)
    monkeypatch.setitem(runner.model.executables, BODY, mode.spare(runner.model.body))
    if policy_place == Place("cpu", "triton"):  # the interpreter allocates, a launch does not
        monkeypatch.setattr(interpreter.GridExecutor, "__call__", mode.spare(interpreter.GridExecutor.__call__))
    sequences, num_failures = generate_in_spite(engine, asked)
    assert num_failures == sum(num_done) and min(num_done[1:]) > 20
    assert_same(sequences, expected(on_cpu(checkpoints("qwen3")), asked))


def generate_in_spite(engine: Engine, asked: Asked) -> tuple[list[Sequence], int]:
    """The sequences, ended, and how often memory did not suffice."""
    sequences = [engine.prepare(prompt, each)[0] for prompt, each in asked]
    for each in sequences:
        engine.submit([each])
    num_failures = 0
    while engine.has_work:
        try:
            engine.step()
        except CapacityError as error:
            assert "serve.gpu_memory_utilization" in str(error) or "serve.kv_cache_memory" in str(error)
            num_failures += 1
    return sequences, num_failures


@pytest.fixture
def engine(checkpoints: Callable[[str], Path]) -> Iterator[LLMEngine]:
    engine = LLMEngine(model=str(checkpoints("llama")), level=1, kv_cache_memory=1 << 22)
    yield engine
    engine.close()


def allocate_too_much(inputs: Any) -> None:
    torch.empty(10**15)


def lack(error: Exception) -> Callable[[Any], None]:
    def body(inputs: Any) -> None:
        raise error

    return body


@pytest.mark.parametrize(
    "body",
    [
        allocate_too_much,
        lack(MemoryError()),
        lack(torch.OutOfMemoryError("CUDA out of memory")),
        lack(RuntimeError("CUDA error: out of memory")),
        lack(RuntimeError("MemoryError: <EMPTY MESSAGE>\n\nAt:\n  linear.py(33): packed_linear\n")),
    ],
    ids=["cpu", "python", "cuda", "driver", "piece"],
)
def test_a_step_that_memory_does_not_hold_names_the_knobs(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch, body: Callable[[Any], None]
):
    with monkeypatch.context() as patch:
        patch.setitem(engine._engine.runner.model.executables, BODY, body)  # type: ignore[attr-defined]
        with pytest.raises(
            CapacityError, match=r"a step of 30 tokens of 3 sequences .* serve.max_num_batched_tokens \(to 15\)"
        ):
            engine.generate([[1] * 10] * 3)
    (answer,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))
    assert answer["num_tokens_output"] == 2, "and the next request is served"


def test_another_error_is_not_taken_for_a_lack_of_memory(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(model, "score", lambda *_: lack(RuntimeError("size mismatch"))(None))
    with pytest.raises(RuntimeError, match="size mismatch"):
        engine.generate([[1] * 10] * 3)


def test_ctrl_c_within_a_compiled_piece_is_still_ctrl_c(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch):
    text = "KeyboardInterrupt: <EMPTY MESSAGE>\n\nAt:\n  linear.py(33): packed_linear\n"
    monkeypatch.setattr(model, "score", lambda *_: lack(RuntimeError(text))(None))
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[1] * 10] * 3)
    assert engine.is_finished()
