"""Short rounds of scripts/soak-cpu, with seeds of their own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import Start

from atom import LLMEngine
from atom.runtime.types import Sequence
from scripts import soak_cpu

pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def engine(talker: Path) -> Iterator[LLMEngine]:
    engine = LLMEngine(str(talker), **soak_cpu.FIELDS)
    yield engine
    engine.close()


@pytest.mark.slow
def test_an_engine_under_random_load_loses_nothing_and_changes_no_token(engine: LLMEngine):
    assert soak_cpu.soak_engine(engine, random.Random(7), 30) == []
    stats = engine.metrics.scheduler
    assert stats.num_preemptions and stats.num_chunks and stats.num_prefix_hit_tokens
    assert engine.metrics.finish_reasons["abort"] > 0


def test_what_is_lost_or_changed_would_be_found(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch):
    scheduler = engine._engine.scheduler
    (pool,) = scheduler.cache.pools
    slot, block = scheduler._slots.pop(), pool.take()
    commit = scheduler.commit

    def commit_other(*args: Any) -> list[Sequence]:
        ended: list[Sequence] = commit(*args)
        for sequence in ended:
            sequence.output[-1] ^= scheduler.num_running > 0  # if others run too
        return ended

    monkeypatch.setattr(scheduler, "commit", commit_other)
    faults = soak_cpu.soak_engine(engine, random.Random(7), 10)
    scheduler._slots.append(slot)
    pool.release(block)
    assert any("1 blocks of full" in fault for fault in faults) and any("1 slots" in fault for fault in faults)
    assert any("by itself" in fault for fault in faults)


def test_a_server_whose_clients_leave_at_random_holds_nothing_afterwards(
    start_server: Start, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # other work would have threads wait for each other
    server = start_server(*soak_cpu.OVERRIDES)
    assert soak_cpu.soak_server(server.url, server.process.pid, random.Random(7), 24, 12) == []
    assert "traceback" not in server.log.read_text()
