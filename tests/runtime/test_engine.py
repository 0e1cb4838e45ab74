"""The engine over a runner that gives the tokens that a test wrote down, and a tokenizer whose token 65 is an A."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from kinds import full_kind

from atom.errors import CapacityError, ConfigError, RequestError
from atom.runtime.engine import Engine
from atom.runtime.kv.cache import KVCache
from atom.runtime.metrics import EngineStats
from atom.runtime.requests.vocabulary import Vocabulary
from atom.runtime.schedule.scheduler import Scheduler
from atom.runtime.types import Logprobs, Plan, RequestOptions, RequestOutput, Sampled, StepLimits
from atom.runtime.types import Sequence as Running
from atom.sampling_params import SamplingParams

EOS = 0


class Letters:
    """Token 65 is an A; those from 200 on are bytes of characters that never end; 300 cannot be decoded."""

    chat_template = None
    vocab_size = 400

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        assert 300 not in ids, "300 is no letter"
        return "".join(chr(id) if id < 200 else "\ufffd" for id in ids if id != EOS)

    def to_json(self) -> str | None:
        return None


class AsPlanned:
    """A builder whose steps are the plans themselves."""

    can_repeat = True

    def build(self, plan: Plan) -> Plan:
        return plan

    def retract(self, plan: Plan) -> None:
        """Nothing is remembered."""


@dataclass
class Done:
    """A step that has taken place."""

    sampled: Sampled

    def wait(self) -> Sampled:
        return self.sampled


class Script:
    """A runner: each sequence says its text, letter by letter, and fails on demand."""

    run_ahead = 0

    def __init__(self, texts: dict[str, str | list[int]], fail: Callable[[Plan], None] = lambda plan: None) -> None:
        self.texts = texts  # by request id
        self.fail = fail
        self.plans: list[list[str]] = []

    def execute(self, plan: Plan) -> Done:
        assert plan.num_decodes == sum(row.samples and row.num_tokens == 1 for row in plan.rows)
        self.plans.append([row.sequence.id for row in plan.rows])
        self.fail(plan)
        sampling = [row.sequence for row in plan.rows if row.samples]
        tokens = [self.next_token(sequence) for sequence in sampling]
        reports = [
            None if sequence.params.logprobs is None else Logprobs(token, -float(len(sequence.output)), 1, [])
            for sequence, token in zip(sampling, tokens, strict=True)
        ]
        return Done(Sampled(tokens, reports))

    def next_token(self, sequence: Running) -> int:
        text = self.texts[sequence.request_id]
        at = len(sequence.output)
        if at == len(text):
            return EOS
        return text[at] if isinstance(text, list) else ord(text[at])


def make_engine(runner: Script, **limits: Any) -> Engine:
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 100, **limits}
    prefix, num_blocks = sizes.pop("prefix", False), sizes.pop("num_blocks", 100)
    cache = KVCache([full_kind()], {"full": 1 + num_blocks}, 4, enable_prefix_caching=prefix)
    tokenizer: Any = Letters()
    return Engine(
        runner,  # type: ignore[arg-type]
        Scheduler(cache, StepLimits(**sizes)),
        AsPlanned(),  # type: ignore[arg-type]
        Vocabulary(400, frozenset({EOS}), tokenizer),
        seed=0,
    )


def submit(engine: Engine, id: str, prompt: str = "PROMPT", seen: list[RequestOutput] | None = None, **params: Any):
    sequences = engine.prepare(prompt, SamplingParams(**params), request_id=id)
    engine.submit(sequences, None if seen is None else seen.append)
    return sequences[0]


def finish(engine: Engine) -> dict[str, Running]:
    ended = []
    for _ in range(100):
        if not engine.has_work:
            break
        ended += engine.step()
    assert not engine.has_work
    assert engine.scheduler.cache.fullest[0] == 0
    return {sequence.id: sequence for sequence in ended}


# what a callback gets


def test_a_callback_gets_the_logprobs_of_its_tokens_and_the_sequence():
    seen: list[RequestOutput] = []
    engine = make_engine(Script({"a": "xyST"}))
    sequence = submit(engine, "a", seen=seen, logprobs=0, stop_strings=["STOP"])
    finish(engine)
    assert [output.text for output in seen] == ["x", "y", "ST"]  # which might have become STOP
    assert [output.token_ids for output in seen] == [[120], [121], [83, 84, EOS]]
    assert [[each.token for each in output.logprobs] for output in seen] == [[120], [121], [83, 84, EOS]]
    assert [each.logprob for output in seen for each in output.logprobs] == [0.0, -1.0, -2.0, -3.0, -4.0]
    assert all(output.sequence is sequence for output in seen)
    assert (seen[-1].finish_reason, sequence.text) == ("eos", "xyST")


def test_there_are_no_logprobs_where_nobody_asked():
    seen: list[RequestOutput] = []
    engine = make_engine(Script({"a": "xy"}))
    submit(engine, "a", seen=seen)
    finish(engine)
    assert [output.logprobs for output in seen] == [[], [], []]


def test_a_stop_string_or_a_stop_token_is_shown_only_on_demand():
    for keeps, texts in ((False, ["ab", "ab"]), (True, ["abSTOP", "ab!"])):
        engine = make_engine(Script({"a": "abSTOPcd", "b": "ab!cd"}))
        params = {"include_stop_str_in_output": keeps, "stop_strings": ["STOP"], "stop_token_ids": [ord("!")]}
        submit(engine, "a", **params)
        submit(engine, "b", **params)
        ended = finish(engine)
        assert [sequence.text for sequence in ended.values()] == [texts[1], texts[0]]
        assert {id: sequence.finish_reason for id, sequence in ended.items()} == {
            "a-0": "stop_sequence",
            "b-0": "stop_33",
        }


def test_a_sequence_has_the_stop_string_that_ended_it():
    engine = make_engine(Script({"a": "abSTOPcd", "b": "xy"}))
    for name in ("a", "b"):
        submit(engine, name, stop_strings=["nope", "TO", "STOP"])
    assert {id: sequence.stop_string for id, sequence in finish(engine).items()} == {"a-0": "TO", "b-0": None}


def test_a_stop_string_that_begins_in_the_prompt_does_not_count():
    engine = make_engine(Script({"a": "OPxSTOPy"}))
    submit(engine, "a", prompt="STOP ST", stop_strings=["STOP"])
    assert finish(engine)["a-0"].text == "OPx"


# prepare


def test_requests_prepared_in_many_threads_have_ids_and_seeds_of_their_own():
    engine = make_engine(Script({}))
    prepared: list[Running] = []
    gate = threading.Barrier(8)

    def prepare() -> None:
        gate.wait()
        for _ in range(200):
            prepared.extend(engine.prepare("ab", SamplingParams()))

    threads = [threading.Thread(target=prepare) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({sequence.request_id for sequence in prepared}) == len({sequence.seed for sequence in prepared}) == 1600


def test_requests_may_be_prepared_while_others_run():
    engine = make_engine(Script({f"b{i}": "hello" for i in range(50)} | {"a": "z" * 90}))
    submit(engine, "a", max_tokens=90)
    ready: list[list[Running]] = []
    thread = threading.Thread(
        target=lambda: ready.extend(engine.prepare("abc", SamplingParams(), request_id=f"b{i}") for i in range(50))
    )
    thread.start()
    ended = []
    while thread.is_alive() or ready or engine.has_work:
        if ready:
            engine.submit(ready.pop(0))
        ended += engine.step()
    assert sorted(sequence.text for sequence in ended) == ["hello"] * 50 + ["z" * 90]


def test_an_id_is_refused_while_another_request_runs_under_it():
    engine = make_engine(Script({"a": "xy"}))
    again = engine.prepare("PROMPT", SamplingParams(), request_id="a")
    first = submit(engine, "a", n=2)
    with pytest.raises(RequestError, match="the request id a is in use, choose another"):
        engine.submit(again)
    assert len(engine.scheduler.sequences) == 2
    assert finish(engine)["a-0"] is first
    submit(engine, "a")
    assert finish(engine)["a-0"].text == "xy"


def test_an_id_is_free_as_soon_as_its_request_is_aborted():
    engine = make_engine(Script({"a": "xy"}))
    submit(engine, "a")
    engine.step()
    engine.abort("a")
    again = submit(engine, "a")  # ahead of the step that returns the aborted one
    ended = [*engine.step(), *engine.step(), *engine.step()]
    assert [sequence.finish_reason for sequence in ended] == ["abort", "eos"]
    assert ended[1] is again and again.text == "xy"


@pytest.mark.parametrize(
    ("salts", "num_cached"), [([b"", b""], 8), ([b"x", b"x"], 8), ([b"x", b"y"], 0), ([b"", b"y"], 0)]
)
def test_a_prefix_is_shared_only_by_requests_of_one_salt(salts: list[bytes], num_cached: int):
    engine = make_engine(Script({"a": "x", "b": "x"}), prefix=True)
    for id, salt in zip("ab", salts, strict=True):
        engine.submit(engine.prepare("a prompt", SamplingParams(max_tokens=1), RequestOptions(salt), request_id=id))
        (ended,) = finish(engine).values()
    # the last token of a prompt is always computed: of its 8 tokens 1 block of 4 can be found
    assert ended.num_cached == num_cached // 2
    assert engine.stats().scheduler.num_prefix_hit_tokens == num_cached // 2
    assert engine.stats().scheduler.num_prefix_queries == 16


def test_a_request_of_a_lower_priority_number_is_admitted_first():
    engine = make_engine(Script({id: "xy" for id in "abc"}), max_num_seqs=1)
    for id, priority in (("a", 0), ("b", 5), ("c", -1)):
        engine.submit(engine.prepare("hi", SamplingParams(), RequestOptions(priority=priority), request_id=id))
    assert list(finish(engine)) == ["c-0", "a-0", "b-0"]


# stats


def test_stats_count_the_load_and_the_work_done():
    engine = make_engine(Script({id: "xyz" for id in "abc"}), max_num_seqs=2, num_blocks=10)
    assert engine.stats() == EngineStats(num_blocks=10)
    for id in "abc":
        submit(engine, id, prompt="12345", max_tokens=3)
    engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (2, 1)
    assert (stats.num_blocks, stats.num_blocks_used, stats.kv_cache_usage) == (10, 4, 0.4)
    assert (stats.scheduler.num_steps, stats.num_prompt_tokens, stats.num_output_tokens) == (1, 15, 2)
    assert (stats.num_step_tokens, stats.step_sizes) == (12, [0, 0, 1, *[0] * 11]), "two prompts and a token of each"
    before = stats.step_sizes.copy()
    engine.abort("c")
    finish(engine)
    assert stats.step_sizes == before, "what was handed out stays"
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_blocks_used, stats.scheduler.num_steps) == (0, 0, 0, 3)
    assert stats.finish_reasons == {"max_tokens": 2, "abort": 1}
    assert (stats.num_step_tokens, stats.step_sizes) == (16, [0, 2, 1, *[0] * 11]), "two steps of two tokens"


def test_preemptions_are_counted_and_what_was_cached_at_first_is_kept():
    engine = make_engine(Script({id: "x" * 20 for id in "abc"}), num_blocks=9, prefix=True)
    submit(engine, "a", prompt="12345678", max_tokens=1)
    finish(engine)
    sequences = [submit(engine, id, prompt="12345678", max_tokens=16) for id in "bc"]
    engine.step()
    admitted = [sequence.admitted_at for sequence in sequences]
    finish(engine)
    assert engine.stats().scheduler.num_preemptions == sum(each.num_preemptions for each in sequences) > 0
    assert [sequence.num_cached for sequence in sequences] == [4, 4]
    assert engine.stats().scheduler.num_cached_tokens == 8 < engine.stats().scheduler.num_prefix_hit_tokens
    assert [sequence.admitted_at for sequence in sequences] == admitted
    for sequence in sequences:
        assert sequence.arrival <= sequence.admitted_at <= sequence.first_token_at <= sequence.finished_at


# what goes wrong


def failing(*ids: str, error: Exception | None = None) -> Callable[[Plan], None]:
    def fail(plan: Plan) -> None:
        if any(row.sequence.id in ids and row.sequence.output for row in plan.rows):
            raise error or ValueError("its logits are nan")

    return fail


def test_only_the_sequence_that_fails_ends():
    texts = {id: f"{id} says this" for id in "abcde"}
    runner = Script(texts, failing("c-0"))
    engine = make_engine(runner)
    seen: list[RequestOutput] = []
    for id in texts:
        submit(engine, id, seen=seen)
    ended = finish(engine)
    assert {id: sequence.text for id, sequence in ended.items() if id != "c-0"} == {
        f"{id}-0": text for id, text in texts.items() if id != "c"
    }
    assert (ended["c-0"].finish_reason, ended["c-0"].error) == ("error", "ValueError: its logits are nan")
    assert [(out.finish_reason, out.sequence.error) for out in seen if out.request_id == "c"][-1] == (
        "error",
        "ValueError: its logits are nan",
    )
    assert ended["c-0"].text == "c", "what it said before stays"
    # the second step: all, then halves, down to the one that fails
    assert runner.plans[1:6] == [
        ["a-0", "b-0", "c-0", "d-0", "e-0"],
        ["a-0", "b-0"],
        ["c-0", "d-0", "e-0"],
        ["c-0"],
        ["d-0", "e-0"],
    ]
    assert engine.stats().finish_reasons == {"eos": 4, "error": 1}


@pytest.mark.parametrize("place", [0, 1, 2])
def test_those_that_share_a_step_s_prefix_go_on_without_the_one_that_fails(place: int):
    bad, written = f"{'abc'[place]}-0", set[int]()

    def fail(plan: Plan) -> None:
        """A row finds the blocks before it written by steps that took place, or by this one."""
        if any(row.sequence.id == bad for row in plan.rows):
            raise ValueError("its logits are nan")
        for row in plan.rows:
            written.update(row.sequence.blocks["full"][row.start // 4 : -(-(row.start + row.num_tokens) // 4)])
        for row in plan.rows:
            assert {*row.sequence.blocks["full"][: row.start // 4]} <= written

    runner = Script({id: f"{id} says" for id in "abc"}, fail)
    engine = make_engine(runner, prefix=True)
    for id in "abc":
        submit(engine, id, prompt="what all of them begin with: " + id)
    ended = finish(engine)
    assert {id: each.finish_reason for id, each in ended.items() if id != bad} == {
        f"{id}-0": "eos" for id in "abc" if f"{id}-0" != bad
    }
    assert ended[bad].error == "ValueError: its logits are nan"
    assert runner.plans[0] == ["a-0", "b-0", "c-0"]


def test_siblings_and_prompts_of_a_sequence_that_fails_go_on():
    engine = make_engine(Script({"a": "abc", "b": "def"}, failing("a-0", "a-2")), max_num_batched_tokens=8)
    submit(engine, "a", prompt="a prompt", n=3)
    submit(engine, "b", prompt="of several chunks")
    ended = finish(engine)
    assert {id: sequence.finish_reason for id, sequence in ended.items()} == {
        "a-0": "error",
        "a-1": "eos",
        "a-2": "error",
        "b-0": "eos",
    }
    assert (ended["a-1"].text, ended["b-0"].text) == ("abc", "def")
    assert not engine.is_running("a")


def test_a_step_that_fails_for_all_raises_and_can_be_taken_again():
    broken = True

    def fail(plan: Plan) -> None:
        if broken:
            raise ZeroDivisionError("everything")

    engine = make_engine(Script({"a": "xy", "b": "zw"}, fail))
    for id in "ab":
        submit(engine, id)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            engine.step()
    broken = False
    assert {id: sequence.text for id, sequence in finish(engine).items()} == {"a-0": "xy", "b-0": "zw"}


def test_what_was_in_a_step_that_raised_can_be_ended_so_that_others_go_on():
    engine = make_engine(Script({"a": "xy", "b": "zw"}, failing("a-0")), max_num_seqs=1)
    submit(engine, "a")
    submit(engine, "b")
    engine.step()
    with pytest.raises(ValueError, match="its logits are nan"):
        engine.step()
    engine.end_failed()
    ended = finish(engine)
    assert {id: sequence.finish_reason for id, sequence in ended.items()} == {"a-0": "error", "b-0": "eos"}
    assert ended["a-0"].error == "ValueError: its logits are nan"
    engine.end_failed()
    assert not engine.has_work, "and nothing is left to end"


def test_a_request_whose_own_fault_it_is_ends_even_if_it_is_the_only_one():
    engine = make_engine(Script({"a": "xy"}, failing("a-0", error=RequestError("its grammar is too complex"))))
    submit(engine, "a")
    assert finish(engine)["a-0"].error == "RequestError: its grammar is too complex"


def test_a_lack_of_memory_is_no_request_s_fault():
    engine = make_engine(Script({"a": "xy", "b": "zw"}, failing("a-0", error=CapacityError("lower this"))))
    for id in "ab":
        submit(engine, id)
    engine.step()
    with pytest.raises(CapacityError, match="lower this"):
        engine.step()
    assert engine.scheduler.num_running == 2


@pytest.mark.parametrize("interrupted", [1, 3])
def test_an_interrupt_ends_nothing(interrupted: int):
    engine = make_engine(Script({"a": "xy", "b": "zw"}))

    def fail(plan: Plan) -> None:
        if len(engine.runner.plans) == interrupted:
            raise KeyboardInterrupt
        if len(engine.runner.plans) == 2:
            raise ValueError

    engine.runner.fail = fail
    for id in "ab":
        submit(engine, id)
    with pytest.raises(KeyboardInterrupt):
        while True:
            engine.step()
    assert {id: sequence.text for id, sequence in finish(engine).items()} == {"a-0": "xy", "b-0": "zw"}


def test_a_token_that_cannot_be_decoded_ends_only_its_sequence():
    engine = make_engine(Script({"a": [65, 300, 66], "b": "zw", "c": [65, 300]}))
    submit(engine, "a")
    submit(engine, "b")
    submit(engine, "c", max_tokens=2)
    ended = finish(engine)
    assert ended["b-0"].text == "zw"
    for id in ("a-0", "c-0"):
        assert (ended[id].finish_reason, ended[id].text, len(ended[id].output)) == ("error", "A", 2)
        assert ended[id].error.startswith("AssertionError: 300 is no letter")


def test_structured_outputs_need_a_tokenizer_that_can_be_read():
    pytest.importorskip("llguidance")
    with pytest.raises(RequestError, match="structured_outputs needs a tokenizer that can be read"):
        make_engine(Script({})).prepare("x", SamplingParams(structured_outputs={"regex": "a"}))


def test_a_profile_without_a_folder_is_refused_with_what_to_set():
    with pytest.raises(ConfigError, match=r"serve\.torch_profiler_dir or ATOM_TORCH_PROFILER_DIR"):
        make_engine(Script({})).start_profile()
