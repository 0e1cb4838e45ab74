"""What a signal to a process of ranks on GPUs leaves: nothing, on a GPU either.

Memory in use is that of all processes, so nothing else may run on these GPUs: scripts/test-gpu leaves these tests out.

    python -m pytest -m "gpu and slow" tests/gpu/test_ends.py
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import serving
import torch
from rank_checks import assert_server_ends_by_a_signal, assert_server_outlives_a_stop

NUM_GPUS = torch.cuda.device_count()
MIB = 1 << 20

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.skipif(NUM_GPUS < 2, reason="there is one GPU here")]

FIELDS = {
    "num_kvcache_blocks": 2000,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "cudagraph_capture_sizes": "[4,8]",
}
LAYOUTS = {"tp2": 2, "pp2": 2, "tp4": 4}  # ranks
CASES = [
    pytest.param(layout, rank, marks=pytest.mark.skipif(num > NUM_GPUS, reason=f"there are fewer than {num} GPUs"))
    for layout, num in LAYOUTS.items()
    for rank in (*range(num), None)
]  # fmt: skip


def used_on_each() -> list[int]:
    """The bytes in use on each GPU."""
    found = map(torch.cuda.mem_get_info, range(NUM_GPUS))
    return [total - free for free, total in found]


@pytest.mark.parametrize(("layout", "rank"), CASES)
def test_a_process_that_is_stopped_ends_nothing_and_of_those_of_one_that_dies_nothing_is_left(
    layout: str, rank: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Rank 0 is the process of the engine, and drives; None is that of HTTP, which is not stopped here."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    used_on_each()  # which needs memory itself at first
    before = used_on_each()

    def grown() -> list[int]:
        return [now - then for now, then in zip(used_on_each(), before, strict=True)]

    overrides = ["advanced.heartbeat_seconds=2", *(f"serve.{name}={value}" for name, value in FIELDS.items())]
    talker = serving.save_talker(tmp_path / "talker")
    with serving.started(talker, tmp_path, "device=cuda", "level=3", f"parallel={layout}", *overrides) as server:
        assert all(each > 200 * MIB for each in grown()[: LAYOUTS[layout]]), "there is a CUDA context on each GPU"
        if rank is not None:
            assert_server_outlives_a_stop(server, rank)
        assert_server_ends_by_a_signal(server, rank, signal.SIGKILL, temporary, lambda: max(grown()) < 16 * MIB)
