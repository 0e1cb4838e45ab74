from __future__ import annotations

import queue

import pytest

from atom.errors import EngineDeadError
from atom.runtime.requests.inbox import Inbox, Urgent


def test_work_is_done_in_its_order_and_what_is_urgent_within_other_work_too():
    inbox, done = Inbox(), []
    inbox.put(inbox.do_urgent)
    inbox.put(lambda: done.append("submit a"))
    inbox.put(Urgent(lambda: done.append("abort a")))
    inbox.put(lambda: done.append("submit b"))
    while not inbox.empty():
        inbox.get()()
    assert done == ["abort a", "submit a", "abort a", "submit b"]
    with pytest.raises(queue.Empty):
        inbox.get(block=False)


def test_a_waiting_thread_gets_the_end_after_all_earlier_work():
    inbox, done = Inbox(), []
    for work in (lambda: done.append("first"), Urgent(lambda: done.append("abort")), None):
        inbox.put(work)
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="the engine is to end"):
            inbox.do_urgent()
    assert done == ["abort"]
    while (work := inbox.get()) is not None:
        work()
    assert done == ["abort", "first", "abort"] and inbox.empty()
