"""What a step costs at the least, against arithmetic over published configs and limits that others worked out for them."""

from __future__ import annotations

import functools
import json
import random
import shutil
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kinds import full_kind

from atom.assemble import state_kinds
from atom.compiler import compile_graph
from atom.config.load import load
from atom.jobs.bench.roofline import (
    Attention,
    Costs,
    Limits,
    Matmul,
    Work,
    acts_of,
    measure_limits,
    min_seconds,
    read_costs,
    share_read,
    step_work,
    total,
    visible_pairs,
)
from atom.jobs.bench.workload import Step, recording
from atom.kernels import Target
from atom.runtime.kv.cache import KVCache
from atom.runtime.schedule.data_parallel import DataParallelScheduler, split
from atom.runtime.schedule.scheduler import Scheduler, finish_reason
from atom.runtime.types import Sampled, Sequence, StepLimits
from atom.sampling_params import SamplingParams
from atom.state_rules import TokenRule, WindowRule

CONFIGS = Path(__file__).parents[2] / "configs"
SIZES = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151936,
         "max_position_embeddings": 40960, "torch_dtype": "bfloat16"}  # fmt: skip
QWEN3_8B = {**SIZES, "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 12288,
            "tie_word_embeddings": False}  # fmt: skip
QWEN3_06B = {**SIZES, "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 3072,
             "tie_word_embeddings": True}  # fmt: skip
QWEN3_5_2B = {**SIZES, "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 2048,
              "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
              "intermediate_size": 6144, "full_attention_interval": 4, "linear_num_key_heads": 16,
              "linear_num_value_heads": 32, "tie_word_embeddings": True}  # fmt: skip
DEEPSEEK_V4 = {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "hidden_size": 4096, "num_hidden_layers": 3,
               "compress_ratios": [4, 128, 0], "num_hash_layers": 1, "vocab_size": 129280, "torch_dtype": "bfloat16",
               "max_position_embeddings": 1048576, "num_attention_heads": 64, "num_key_value_heads": 1}  # fmt: skip
H200 = Limits(4.47e12, 804e12)


@pytest.fixture(scope="module")
def costs_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Costs]]:
    """The costs of a config.json: a dict, or a name in tests/configs."""

    @functools.cache
    def read(text: str, *overrides: str) -> dict[str, Costs]:
        folder = tmp_path_factory.mktemp("model")
        (folder / "config.json").write_text(text)
        return read_costs(compile_graph(load([f"checkpoint={folder}", "level=1", "device=cpu", *overrides])))

    def costs_of(config: Any, *overrides: str) -> dict[str, Costs]:
        text = (CONFIGS / f"{config}.json").read_text() if isinstance(config, str) else json.dumps(config)
        return read(text, *overrides)

    return costs_of


def decode(*contexts: int) -> Step:
    return Step(0.0, array("q", contexts), [], len(contexts))


def test_the_bytes_and_operations_of_a_decode_by_hand(costs_of: Any):
    costs = costs_of(QWEN3_8B)
    attention = 4096 * 4096 * 2 + 2 * 4096 * 1024
    matrices = 36 * (attention + 3 * 4096 * 12288) + 151936 * 4096
    vectors = 36 * (2 * 4096 + 2 * 128) + 4096
    work = step_work(costs, decode(300, 7))
    assert work["matrix"] == Work((matrices + vectors) * 2 + 64 * 4, 2 * 2 * matrices), "64 rope frequencies in fp32"
    assert work["attention"] == Work(307 * 36 * 2 * 8 * 128 * 2, 307 * 36 * 4 * 32 * 128)


def test_the_states_of_recurrent_layers_are_read_and_written(costs_of: Any):
    costs = costs_of(QWEN3_5_2B)  # one of four layers has attention
    state = 32 * 128 * 128  # a value head's keys and values
    inputs = 3 * (2 * 16 * 128 + 32 * 128)  # what the convolution read before
    entry = state * 4 + inputs * 2
    token = state * 6 + inputs * 2
    assert step_work(costs, decode(300, 7))["recurrent"] == Work(3 * 2 * 2 * entry, 3 * 2 * token)
    drafting = Step(0.0, array("q", [300]), [], 3, (1, 1))
    assert step_work(costs, drafting)["recurrent"] == Work(3 * (1 + 3) * entry, 3 * 3 * token), (
        "one is read, three written"
    )
    first = Step(0.0, array("q"), [(0, 100)], 1)
    assert step_work(costs, first)["recurrent"] == Work(3 * entry, 3 * 100 * token), "nothing is read at the start"
    assert step_work(costs_of(QWEN3_06B), decode(300, 7))["recurrent"] == Work()


def test_each_of_two_ranks_has_half_of_the_states_and_no_less_than_a_kv_head(costs_of: Any):
    one, two, four = (
        step_work(costs_of(QWEN3_5_2B, *ranks), decode(300, 7)) for ranks in ([], ["parallel=tp2"], ["parallel=tp4"])
    )
    assert two["recurrent"] == Work(one["recurrent"].bytes / 2, one["recurrent"].flops / 2)
    assert four["recurrent"].bytes == one["recurrent"].bytes / 4
    assert one["attention"].bytes == 307 * 2 * 2 * 256 * 2
    assert two["attention"].bytes == four["attention"].bytes == one["attention"].bytes / 2, "there are 2 KV heads"
    assert four["attention"].flops == one["attention"].flops / 4


def test_drafts_are_computed_one_after_the_other(costs_of: Any):
    costs = costs_of(QWEN3_5_2B, "model.mtp_layers=1", "serve.method=mtp", "serve.num_speculative_tokens=2")
    none, one, two = (
        step_work(costs, Step(0.0, array("q", [300, 7]), [], 2 + sum(drafted), drafted))
        for drafted in ((), (2,), (2, 1))
    )
    to_kv = 2048 * 2 * 2048 + (8 + 2 + 2) * 256 * 2048  # of embedding and hidden state; q, k and v
    rest = 2 * 8 * 256 * 2048 + 3 * 2048 * 6144 + 151936 * 2048  # after the attention: its gate and output, mlp, head
    vectors = 3 * 2048 + 2 * 256 + 32, 2 * 2048  # norms in fp32, and frequencies
    assert one["matrix"].bytes - none["matrix"].bytes == 2 * rest + 4 * vectors[1]
    assert two["matrix"].bytes - one["matrix"].bytes == 2 * (to_kv + rest) + 4 * sum(vectors)
    assert one["attention"].bytes == none["attention"].bytes
    assert two["attention"].bytes - one["attention"].bytes == 7 * 2 * 2 * 256 * 2, "of the one that has a second draft"


def test_a_head_is_read_where_a_row_samples_and_a_tied_one_like_any_other(costs_of: Any):
    costs = costs_of(QWEN3_06B)
    inside, last = (step_work(costs, Step(0.0, array("q"), [(0, 100)], sampled)) for sampled in (0, 1))
    matrices = 1024 * 2048 + 3 * 1024 * 3072 + 151936 * 1024  # after the last attention
    vectors = 2 * 1024
    assert last["matrix"].bytes - inside["matrix"].bytes == 2 * (matrices + vectors)
    assert last["matrix"].flops - inside["matrix"].flops == 2 * matrices
    assert last["attention"] == inside["attention"]


def steps_of(lengths: list[tuple[int, int]]) -> list[Step]:
    """The steps in which the engine's own scheduler answers all requests, without a model."""
    scheduler = Scheduler(
        KVCache([full_kind(1, 16)], {"full": 1 << 15}, 16, enable_prefix_caching=False),
        StepLimits(512, 16384, 40960),
    )
    for index, (num_in, num_out) in enumerate(lengths):
        scheduler.add(Sequence(str(index), [0] * num_in, SamplingParams(max_tokens=num_out, ignore_eos=True)))
    with recording(SimpleNamespace(scheduler=scheduler)) as record:  # type: ignore[arg-type]
        while scheduler.has_work:
            plan = scheduler.schedule()
            num_sampled = sum(row.samples for row in plan.rows)
            sampled = Sampled([0] * num_sampled, [None] * num_sampled)
            scheduler.commit(plan, sampled, lambda sequence: finish_reason(sequence, 40960))
    assert [len(times) for times in record.times().values()] == [num_out for _, num_out in lengths]
    return record.steps


def uniform(num: int) -> list[tuple[int, int]]:
    draw = random.Random(0)
    return [(draw.randint(100, 1024), draw.randint(100, 1024)) for _ in range(num)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("model", "lengths", "what", "published", "tolerance"),
    [
        (QWEN3_8B, [(128, 256)], "output", 295, 0.01),
        (QWEN3_8B, [(1024, 256)] * 32, "output", 4676, 0.01),
        (QWEN3_8B, [(1024, 256)] * 128, "output", 7500, 0.02),
        (QWEN3_8B, [(8192, 1)] * 8, "input", 49300 * 1.021, 0.01),  # of 36 layers the last one's mlp for few tokens
        (QWEN3_06B, [(128, 512)], "output", 3660, 0.02),
        (QWEN3_06B, uniform(256), "output", 38000, 0.05),  # by other lengths of the same distribution
    ],
)
def test_the_limits_of_one_h200(
    model: Any, lengths: list[tuple[int, int]], what: str, published: float, tolerance: float, costs_of: Any
):
    costs, steps = costs_of(model), steps_of(lengths)
    seconds = sum(H200.seconds(total(step_work(costs, step).values())) for step in steps)
    num_tokens = sum(num_in if what == "input" else num_out for num_in, num_out in lengths)
    assert num_tokens / seconds == pytest.approx(published, rel=tolerance)


def test_rows_past_the_end_of_their_sequence_are_no_work():
    cache = KVCache([full_kind(1, 16)], {"full": 64}, 16, enable_prefix_caching=False)
    scheduler = Scheduler(cache, StepLimits(4, 64, 64))
    sequences = [Sequence(id, [0] * 5, SamplingParams(max_tokens=9, ignore_eos=True)) for id in "ab"]
    for sequence in sequences:
        scheduler.add(sequence)
    with recording(SimpleNamespace(scheduler=scheduler)) as record:  # type: ignore[arg-type]
        for _ in range(2):
            plan = scheduler.schedule()
            if record.steps:
                scheduler.abort("a")
            scheduler.commit(plan, Sampled([0, 0], [None, None]), lambda sequence: None)
    assert [(list(step.decodes), step.chunks, step.num_sampled) for step in record.steps] == [
        ([], [(0, 5), (0, 5)], 2),
        ([6], [], 1),
    ]
    assert [len(times) for times in record.times().values()] == [1, 2]


def test_groups_compute_at_the_same_time_and_the_fullest_takes_longest(costs_of: Any):
    caches = [KVCache([full_kind(1, 16)], {"full": 64}, 16, enable_prefix_caching=False) for _ in range(2)]
    scheduler = DataParallelScheduler([Scheduler(cache, StepLimits(4, 64, 64)) for cache in caches])
    for id, length in (("a", 30), ("b", 10), ("c", 9)):
        scheduler.add(Sequence(id, [0] * length, SamplingParams(max_tokens=3, ignore_eos=True)))
    with recording(SimpleNamespace(scheduler=scheduler)) as record:  # type: ignore[arg-type]
        for _ in range(2):
            plan = scheduler.schedule()
            counts = [len(part.rows) for part in split(plan, 2)]
            first, second = (Sampled([0] * count, [None] * count) for count in counts)
            scheduler.commit(plan, replace(first, others=[second]), lambda sequence: None)
    assert [len(times) for times in record.times().values()] == [2, 2, 2]
    costs = costs_of(QWEN3_06B)
    for step, parts in zip(record.steps, ([[30], [10, 9]], [[31], [11, 10]]), strict=True):
        found = [sorted([*group.decodes, *(length for _, length in group.chunks)]) for group in step.groups]
        assert sorted(found) == sorted(map(sorted, parts)) and step.num_tokens == sum(g.num_tokens for g in step.groups)
        each = [H200.seconds(total(step_work(costs, group).values())) for group in step.groups]
        assert min_seconds(costs, step, H200) == max(each) > min(each)


def test_experts_are_read_as_far_as_rows_are_expected_to_choose_them(costs_of: Any):
    costs = costs_of("qwen3_30b_a3b")
    dense, routers = 48 * (2 * 2048 * 4096 + 2 * 2048 * 512) + 151936 * 2048, 48 * 128 * 2048
    vectors = 48 * (2 * 2048 + 2 * 128) + 2048
    expert = 48 * 3 * 768 * 2048
    for num_rows, num_read in [(1, 8.0), (2, 8 + 8 * 120 / 128), (4096, 128.0)]:
        found = step_work(costs, decode(*[1] * num_rows))
        assert found["routing"] == Work(2 * routers, 2 * num_rows * routers)
        work = found["matrix"]
        assert work.bytes == pytest.approx(2 * (dense + vectors + expert * num_read) + 64 * 4, rel=1e-12)
        assert work.flops == pytest.approx(2 * num_rows * (dense + 8 * expert), rel=1e-12)


@pytest.mark.parametrize(
    ("num_experts", "top_k", "parts", "num_rows", "expected"),
    [
        (2, 1, 2, 1, 1.0),
        (4, 2, 2, 1, 2 / 3),  # both in one part: 2 of the 6 pairs
        (128, 8, 1, 1, 8 / 128),
        (128, 8, 2, 1, 5.05 * 2 / 128),  # means of the largest of hypergeometric counts
        (128, 8, 4, 1, 3.49 * 4 / 128),
        (128, 8, 8, 1, 2.54 * 8 / 128),
        (128, 8, 4, 1000, 1.0),
    ],
)
def test_of_experts_in_parts_the_busiest_counts(
    num_experts: int, top_k: int, parts: int, num_rows: int, expected: float
):
    assert share_read(top_k / num_experts, num_experts, parts, num_rows) == pytest.approx(expected, rel=0.04)


@pytest.mark.slow
def test_a_layer_with_shared_and_chosen_experts_has_both(costs_of: Any):
    matmuls = [each for costs in costs_of("deepseek_v3").values() for each in costs.matmuls]
    chosen = [each for each in matmuls if each.share < 1]
    assert Counter((each.shape, each.share) for each in chosen) == {
        ((256, 4096, 7168), 8 / 256): 58,
        ((256, 7168, 2048), 8 / 256): 58,
    }, "of all layers but the first three"
    assert Counter(each.shape for each in matmuls if each.share == 1)[(4096, 7168)] == 58, "the shared one"


def test_latents_are_seen_absorbed_by_decodes_and_expanded_by_prompts(costs_of: Any):
    ((attention, num_layers),) = Counter(costs_of("deepseek_v3")["body"].attention).items()
    assert num_layers == 61
    assert attention.states == ((TokenRule(), (512 + 64) * 2),)
    assert attention.decode_flops == 2 * 128 * ((512 + 64) + 512)
    assert attention.prefill_flops == 2 * 128 * ((128 + 64) + 128)


def test_of_latents_only_those_that_an_indexer_chose_are_read_and_all_of_its_keys(costs_of: Any):
    (attention, num_layers), (index, num_indexers) = sorted(
        Counter(costs_of("glm_5_2")["body"].attention).items(), key=lambda item: item[0].weight is None
    )
    assert (num_layers, num_indexers) == (78, 21)
    assert index.states == ((TokenRule(), 128 * 2),)
    assert index.decode_flops == index.prefill_flops == 2 * 32 * 128
    weight = attention.weight.work(2)
    read = attention.work(decode(65_536, 1000))
    assert read.bytes - weight.bytes == (2048 + 1000) * 1152
    assert read.flops - weight.flops == (2048 + 1000) * attention.decode_flops
    assert index.work(decode(65_536, 1000)) == Work((65_536 + 1000) * 256, (65_536 + 1000) * index.decode_flops)
    prompt = Step(0.0, array("q"), [(2000, 100)], 1)
    assert index.work(prompt) == Work(2100 * 256, sum(range(2001, 2101)) * index.prefill_flops)
    chosen = attention.work(prompt).flops - attention.weight.work(100).flops
    assert chosen == sum(min(seen, 2048) for seen in range(2001, 2101)) * attention.prefill_flops


def test_runs_are_read_besides_a_windows_tokens_and_only_of_them_an_indexer_chooses(costs_of: Any):
    body = costs_of(DEEPSEEK_V4)["body"]
    costs = {(each.every, each.window): each for each in body.attention}
    assert costs.keys() == {(1, 128), (4, None), (4, 512), (128, None)}
    flops = 4 * 64 * 512  # of a query and an entry, by 64 heads of 512 dims
    step = Step(0.0, array("q", [1000, 100, 3]), [(4000, 10)], 4)
    assert costs[1, 128].work(step) == Work((128 + 100 + 3 + 137) * 1024, (128 + 100 + 3 + 10 * 128) * flops)
    seen = sum(context // 4 for context in range(4001, 4011))
    assert costs[4, None].work(step) == Work((250 + 25 + 1002) * 256, (250 + 25 + seen) * 2 * 64 * 128), (
        "of the indexer"
    )
    assert costs[4, 512].work(step) == Work((250 + 25 + 514) * 1024, (250 + 25 + 10 * 512) * flops)
    assert costs[128, None].work(step) == Work((7 + 31) * 1024, (7 + 10 * 31) * flops)


def test_groups_of_heads_and_mixers_of_streams_are_matmuls_and_a_table_of_experts_is_none(costs_of: Any):
    body = costs_of(DEEPSEEK_V4)["body"]
    groups, mixers = (
        next(each for each in body.matmuls if each.shape == shape) for shape in ((8192, 4096), (24, 16384))
    )
    assert groups.work(3) == Work(8192 * 4096 * 2, 2.0 * 3 * 8192 * 4096)
    assert mixers.work(3).flops == 2.0 * 3 * 24 * 16384
    by_token, chosen = body.routing
    assert (by_token.num_bytes, chosen.num_bytes) == (2 * 256 * 4096, 2 * 256 * 4096 + 4 * 256), "with a correction"


@pytest.mark.slow
def test_latents_in_fp8_are_fewer_bytes_and_as_many_operations(costs_of: Any):
    plain, packed = (costs_of("deepseek_v3", *way)["body"].attention[0] for way in ([], ["quant.kv=fp8"]))
    assert packed.states == ((TokenRule(), 512 + 64 * 2),)
    assert (packed.decode_flops, packed.prefill_flops) == (plain.decode_flops, plain.prefill_flops)


def test_the_matmuls_of_a_layer_are_in_the_order_of_the_text(costs_of: Any):
    costs = costs_of(QWEN3_8B)
    layer = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)]
    assert [each.shape for each in costs["body"].matmuls] == layer * 35 + layer[:1]
    assert [each.shape for each in costs["head"].matmuls] == [*layer[1:], (151936, 4096)]


def test_what_latents_are_multiplied_with_is_read_once_a_layer(costs_of: Any):
    attention, num_kv_b = costs_of("deepseek_v3")["body"].attention[0], 128 * (128 + 128) * 512
    one, two = attention.work(decode(9)), attention.work(decode(9, 9))
    assert one.bytes == 9 * 1152 + 2 * num_kv_b, "unpacked to bf16"
    assert two.bytes - one.bytes == 9 * 1152
    assert one.flops == 9 * attention.decode_flops + 2 * num_kv_b


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_8b", "gpt_oss_20b", "deepseek_v3"])
def test_the_work_is_the_same_by_a_gpus_text(name: str, tmp_path: Path):
    """Which has other ops, since some are several in one."""
    shutil.copy(CONFIGS / f"{name}.json", tmp_path / "config.json")
    config = load([f"checkpoint={tmp_path}", "level=1", "device=cpu"])
    gpu = Target("cuda", frozenset({"nvidia", "sm_90"}))
    graphs = compile_graph(config), compile_graph(config, target=gpu)
    called = [{node.target for node in graph.programs["body"].nodes} for graph in graphs]
    assert called[0] != called[1]
    step = Step(0.0, array("q", [300, 7]), [(0, 100), (16, 5)], 3)
    first, second = (step_work(read_costs(graph), step) for graph in graphs)
    assert first["attention"].bytes > 0 and first["attention"] == second["attention"]
    one, two = (total((work["matrix"], work["routing"])) for work in (first, second))  # a router may have a norm
    assert one.bytes == two.bytes
    assert one.flops == two.flops + two.fp8, "which a CPU multiplies unpacked"


def test_experts_that_a_gpu_keeps_packed_are_read_packed(tmp_path: Path):
    shutil.copy(CONFIGS / "gpt_oss_20b.json", tmp_path / "config.json")
    graph = compile_graph(load([f"checkpoint={tmp_path}"]), target=Target("cuda", frozenset({"nvidia", "sm_90"})))
    matmuls = [matmul for each in read_costs(graph).values() for matmul in each.matmuls]
    up, down = ([each for each in matmuls if each.shape == (32, rows, 2880)] for rows in (5760, 2880))
    assert len(up) == len(down) == 24
    for each, rows in ((up[0], 5760), (down[0], 2880)):
        num_bytes = 32 * rows * (2880 // 2 + 2880 // 32 + 2)  # values, scales, a bias in bf16
        assert each.num_bytes == num_bytes
        assert each.work(1).bytes == pytest.approx(num_bytes * 4 / 32)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("quant", "act"), [("fp8", "fp8"), ("fp8_block", "fp8"), ("int8", "int8"), ("int4", "flops")])
def test_operations_count_as_those_of_the_numbers_that_are_multiplied(quant: str, act: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    asked = ["quant.act=int8"] if act == "int8" else []
    target = Target("cuda", frozenset({"nvidia", "sm_90"}))
    costs = read_costs(compile_graph(load([f"checkpoint={tmp_path}", f"quant={quant}", *asked]), target=target))
    assert acts_of(costs) == {act} - {"flops"}
    work = total(each.work(10) for each in costs.values())
    layers = 36 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 12288)
    head = 4096 * 151936  # in bf16
    counted = Counter({act: 2 * 10 * layers}) + Counter(flops=2 * 10 * head)
    assert work._replace(bytes=0) == Work(**counted)


def test_a_window_bounds_what_is_read_and_seen(costs_of: Any):
    assert [each.window for each in costs_of("gpt_oss_20b")["body"].attention] == [128, None] * 12
    attention = Attention(window=10, states=((WindowRule(10), 3),), decode_flops=5, prefill_flops=7)
    assert attention.work(decode(4, 10, 25)) == Work((4 + 10 + 10) * 3, (4 + 10 + 10) * 5)
    step = Step(0.0, array("q"), [(0, 6), (20, 4)], 0)
    assert attention.work(step) == Work((6 + 13) * 3, (21 + 40) * 7), "four queries see 13 tokens together"


@pytest.mark.parametrize("window", [1, 2, 7, 16, 1000])
@pytest.mark.parametrize(("start", "num_tokens"), [(0, 1), (0, 17), (3, 4), (5, 30), (6, 1), (7, 9), (100, 3)])
def test_visible_pairs_are_those_of_each_query(start: int, num_tokens: int, window: int):
    counted = sum(min(position + 1, window) for position in range(start, start + num_tokens))
    assert visible_pairs(start, num_tokens, window) == counted
    of_runs = sum(min((position + 1) // 3, window) for position in range(start, start + num_tokens))
    assert visible_pairs(start, num_tokens, window, every=3) == of_runs


def test_reading_and_computing_overlap():
    limits = Limits(bandwidth=10.0, flops=100.0)
    assert limits.seconds(Work(50.0, 100.0)) == 5.0
    assert limits.seconds(Work(10.0, 300.0)) == 3.0
    assert limits.seconds(Work(10.0, 300.0, fp8=100.0, int8=100.0)) == 5.0, "at the rate of others: not measured"
    assert Limits(10.0, 100.0, fp8=400.0).seconds(Work(10.0, 300.0, fp8=400.0)) == 4.0
    assert Limits(10.0, 100.0, fp8=400.0).of_each(2) == Limits(5.0, 50.0, 200.0)


def test_a_program_without_rows_costs_nothing():
    costs = Costs(num_bytes=10, matmuls=[Matmul((5, 10), 100, 50), Matmul((4, 2, 5), 80, 40, share=1 / 4)])
    assert costs.work(0) == Work(0, 0)
    assert costs.work(1) == Work(10 + 100 + 20, 2 * (50 + 10))
    assert total([]) == Work(0, 0)
    assert total([Work(1, 2), Work(3, 4)]) == Work(4, 6)


@pytest.mark.usefixtures("quick_limits")
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_this_machine_has_limits(dtype: str):
    limits = measure_limits("cpu", dtype, ["fp8", "int8"])
    assert limits.measured().keys() == {"bandwidth", "flops", "fp8", "int8"}
    assert limits.flops <= min(limits.fp8 or 0.0, limits.int8 or 0.0) < 1e15
    assert 1e8 < limits.bandwidth < 1e13
    assert 1e6 < limits.flops < 1e15


@pytest.mark.usefixtures("quick_limits")
@pytest.mark.parametrize(("dtype", "flops"), [("bf16", 5.0), ("fp32", 5.0), ("fp16", 7.0)])
def test_a_cpu_that_is_slow_with_16_bits_multiplies_in_float32(
    dtype: str, flops: float, monkeypatch: pytest.MonkeyPatch
):
    rates = {torch.bfloat16: 1.0, torch.float32: 5.0, torch.float16: 7.0}
    monkeypatch.setattr("atom.jobs.bench.roofline.measure_matmuls", lambda device, dtype, multiply: rates[dtype])
    assert measure_limits("cpu", dtype).flops == flops


@pytest.mark.parametrize("name", ["gpt_oss_20b", "deepseek_v3"])
def test_kv_bytes_are_those_of_the_pool(name: str, tmp_path: Path):
    shutil.copy(CONFIGS / f"{name}.json", tmp_path / "config.json")
    graph = compile_graph(load([f"checkpoint={tmp_path}", "level=0"]))
    attention = read_costs(graph)["body"].attention
    kinds = state_kinds(graph, 16)
    read = sum(size for each in attention for _, size in each.states)
    assert read * 16 == sum(kind.block_bytes for kind in kinds)
