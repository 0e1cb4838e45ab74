"""Run the jobs of sweeps in the process of the test, where stubs and fixtures count."""

from __future__ import annotations

import pytest

from atom.jobs.sweep import job as sweep_job


def run_jobs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_job, "run_process", lambda task, *_: sweep_job.run_task(task))
