from __future__ import annotations

import pytest


@pytest.fixture
def quick_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits of the machine are measured in a moment, and less well."""
    from atom.jobs.bench import roofline

    monkeypatch.setattr(roofline, "READ_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr(roofline, "MATMUL_SIZES", [64])
    monkeypatch.setattr(roofline, "BATCH_SECONDS", 1e-4)
