"""A request waits neither for another's grammar nor, for long, for another tenant's."""

from __future__ import annotations

import queue
import socket
import threading
from typing import Any

import pytest
from serve.stub_engine import Options, StubEngine

from atom.errors import RequestError
from atom.runtime.types import RequestOptions, Sequence
from atom.sampling_params import SamplingParams
from atom.serve.engine.frames import encode
from atom.serve.engine.grammar_queue import GrammarQueue
from atom.serve.engine.link import Link
from atom.serve.engine.protocol import Abort, Output, Outputs, Refused, Submit, from_engine
from atom.serve.engine.worker import Worker

GRAMMAR = SamplingParams(max_tokens=2, n=3, structured_outputs={"regex": "a+"})


def test_tenants_are_served_in_turn_and_what_is_dropped_is_not_prepared():
    taken: queue.Queue[str] = queue.Queue()
    waiting = GrammarQueue(lambda message: taken.put(message.id))
    for id in ("a1", "a2", "a3", "a4", "b1", "b2", "c1"):
        waiting.add(Submit(id, [1], GRAMMAR, RequestOptions(tenant=id[0])))
    for id in ("a3", "c1", "unknown"):
        waiting.drop(id)
    threading.Thread(target=waiting.run, daemon=True).start()
    assert [taken.get(timeout=60) for _ in range(5)] == ["a1", "b1", "a2", "b2", "a4"]
    waiting.add(Submit("d1", [1], GRAMMAR, RequestOptions(tenant="d")))
    assert taken.get(timeout=60) == "d1"


class Compiling(StubEngine):
    """An engine whose grammars take until they are let go."""

    let_go = threading.Semaphore(0)

    @property
    def num_waiting(self) -> dict[str, int]:
        return {"bob": len(self.waiting)} if self.waiting else {}

    def prepare(self, prompt: list[int], params: SamplingParams, *rest: Any, **more: Any) -> list[Sequence]:
        if params.structured_outputs is not None:
            assert self.let_go.acquire(timeout=60)
        if prompt == [9]:
            raise RequestError("no such grammar")
        return super().prepare(prompt, params, *rest, **more)


@pytest.mark.slow
def test_others_are_answered_while_a_grammar_is_compiled_and_a_client_may_leave_before_it_is(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(Worker, "_limit_end", lambda *_: None)  # it would end this process
    ours, theirs = socket.socketpair()
    engine = Compiling(Options(step_seconds=0))
    worker, frames = Worker(Link(ours)), from_engine()
    messages: list[Any] = []

    def await_message(is_wanted: Any) -> Any:
        while not (found := [each for each in messages if is_wanted(each)]):
            messages.extend(frames.feed(theirs.recv(1 << 16)))
        return found[-1]

    def ended(id: str) -> Any:
        return lambda each: isinstance(each, Outputs) and any(made.id == id and made.finish for made in each.outputs)

    def is_state(num_seen: int, num_waiting: dict[str, int]) -> Any:
        return lambda each: isinstance(each, Outputs) and (each.num_seen, each.num_waiting) == (num_seen, num_waiting)

    with ours, theirs:
        theirs.settimeout(60)
        worker.load(lambda: engine)  # type: ignore[arg-type, return-value]
        threading.Thread(target=worker.receive, daemon=True).start()
        running = threading.Thread(target=worker.run, daemon=True)
        running.start()
        for message in (
            Submit("left", [1], GRAMMAR, RequestOptions(tenant="alice")),
            Submit("stays", [2], GRAMMAR, RequestOptions(tenant="alice")),
            Submit("wrong", [9], GRAMMAR, RequestOptions(tenant="alice")),
            Submit("plain", [7], SamplingParams(max_tokens=2), RequestOptions(tenant="bob")),
        ):
            theirs.sendall(encode(message))
        await_message(ended("plain"))
        theirs.sendall(encode(Abort("left")))
        await_message(is_state(4, {"alice": 6}))  # what waits for its grammar is counted, by tenant
        for _ in range(3):
            engine.let_go.release()
        await_message(ended("stays"))
        refused = await_message(lambda each: isinstance(each, Refused))
        assert (refused.id, refused.error) == ("wrong", "no such grammar")
        outputs: list[Output] = [output for each in messages if isinstance(each, Outputs) for output in each.outputs]
        assert {output.id for output in outputs} == {"plain", "stays"}
        await_message(is_state(4, {}))
        theirs.close()
        running.join(60)
        assert not running.is_alive()
