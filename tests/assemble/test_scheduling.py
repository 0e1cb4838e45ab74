"""The KV caches, the drafter and the schedulers of data groups."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kinds import full_kind

from atom.assemble.scheduling import open_caches, open_drafter, open_kv_files, open_scheduler
from atom.config import ServeConfig
from atom.config.limits import Drafting
from atom.runtime.draft.speculation import NgramDrafter, RunnerDrafter
from atom.runtime.types import Sequence, StepLimits
from atom.sampling_params import SamplingParams

KINDS = [full_kind(8, 16)]
REPEATED = [1, 2, 3, 4, 1, 2]


def sequence() -> Sequence:
    return Sequence("a", REPEATED, SamplingParams())


def test_without_drafts_there_is_no_drafter():
    assert open_drafter(None, by_runner=False) is None


def test_the_host_drafts_what_followed_the_last_tokens():
    drafter = open_drafter(Drafting(2, 1, 2), by_runner=False)
    assert isinstance(drafter, NgramDrafter) and drafter.draft(sequence(), 5) == [3, 4]
    longer = open_drafter(Drafting(2, 3, 4), by_runner=False)
    assert longer is not None and longer.draft(sequence(), 5) == [], "no 3 last tokens stand elsewhere"


def test_of_a_runner_s_drafts_the_scheduler_knows_the_number_only():
    drafter = open_drafter(Drafting(2, 1, 2), by_runner=True)
    assert isinstance(drafter, RunnerDrafter) and drafter.draft(sequence(), 5) == [-1, -1]


def test_each_data_group_has_a_cache_of_its_own():
    first, second = open_caches(KINDS, {"full": 5}, None, b"", ServeConfig(block_size=4), num_groups=2)
    assert first is not second and (first.block_size, second.block_size) == (4, 4)


@pytest.mark.parametrize(("overlap", "num_stages"), [(True, 3), (False, 1)])
def test_schedulers_plan_for_stages_that_overlap(overlap: bool, num_stages: int, monkeypatch: pytest.MonkeyPatch):
    opened: list[Any] = []
    monkeypatch.setattr("atom.assemble.scheduling.Scheduler", lambda *args, **more: opened.append((*args, more)))
    runner: Any = SimpleNamespace(run_ahead=2, model=SimpleNamespace(limits=StepLimits(2, 8, 32)))
    caches: Any = ["first", "second"]
    serve = ServeConfig(scheduler_delay_factor=0.5)
    monkeypatch.setattr("atom.assemble.scheduling.DataParallelScheduler", lambda groups, budget: (groups, budget))
    groups, budget = open_scheduler(caches, runner, None, serve, has_ranks=True, overlap=overlap)  # type: ignore[misc]
    assert len(groups) == 2 and budget is None
    assert [each[0] for each in opened] == caches
    assert {each[4] for each in opened} == {num_stages}
    assert all(each[5] == {"delay_factor": 0.5, "prefill_budget": None, "images": None} for each in opened)


@pytest.mark.parametrize("has_ranks", [True, False])
def test_one_budget_limits_the_prompts_of_all_groups(has_ranks: bool):
    runner: Any = SimpleNamespace(run_ahead=0, model=SimpleNamespace(limits=StepLimits(2, 8, 32)))
    caches = open_caches(KINDS, {"full": 5}, None, b"", ServeConfig(block_size=4), num_groups=1 + has_ranks)
    serve = ServeConfig(max_itl_ms=5, block_size=4)
    scheduler = open_scheduler(caches, runner, None, serve, has_ranks=has_ranks, overlap=False)
    scheduler.add(Sequence("a", [1] * 7, SamplingParams(max_tokens=9)))
    scheduler.schedule()
    scheduler.schedule()
    assert scheduler.stats.max_prompt_tokens == 8, "all of a step, whose decode has not been measured"


def test_kv_is_kept_in_files_if_a_folder_is_named(tmp_path: Path):
    host: Any = SimpleNamespace(num_bytes={"full": 64})
    assert open_kv_files(host, ServeConfig(), pin_memory=False) is None
    files = open_kv_files(host, ServeConfig(kv_cache_dir=str(tmp_path / "kv")), pin_memory=False)
    assert files is not None and (tmp_path / "kv").is_dir()
    files.close()
