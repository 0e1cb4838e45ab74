"""Ranks that Ray places: a task a rank, of a placement group of all.

    placement = place_with_ray(config.parallel, num_ranks=4)
    channels = placement.join()

Ray does nothing but start processes where there is room: each task is a supervisor (`remote_ranks`), which connects to
this process and shows the key that it was started with.
"""

from __future__ import annotations

import contextlib
import secrets
from typing import Any

from atom.config.parallel import bracketed
from atom.config.schema import ParallelConfig
from atom.errors import AtomError, ConfigError, EngineDeadError, one_line
from atom.runtime.remote_ranks import Placement, find_driver, supervise
from atom.runtime.secure_connection import NONCE_BYTES

ROOM_SECONDS = 60.0  # for Ray to have room for all ranks


def place_with_ray(parallel: ParallelConfig, num_ranks: int) -> Placement:
    """Have a running Ray start the other ranks. ConfigError where there is none, or it has no room."""
    ray = import_ray()
    try:
        ray.init(address="auto", log_to_driver=True, configure_logging=False)
    except (ConnectionError, RuntimeError) as error:
        start = "start it with ray start --head, and ray start --address=… on other hosts"
        raise ConfigError(f"parallel.launcher=ray: no Ray runs here ({one_line(error)}); {start}") from None
    try:
        return RayPlacement(ray, parallel.address, num_ranks)
    except BaseException:
        ray.shutdown()
        raise


def import_ray() -> Any:
    """The package. ConfigError where it is not installed."""
    try:
        import ray
        import ray.util.placement_group
        import ray.util.scheduling_strategies
    except ImportError:
        raise ConfigError("parallel.launcher=ray needs Ray: pip install 'atom-run[ray]'") from None
    return ray


class RayPlacement(Placement):
    """Ranks as tasks, and a place of the group for this process on its own host."""

    def __init__(self, ray: Any, address: str | None, num_ranks: int) -> None:
        """address: of this process; None: that by which Ray knows this host, and any port"""
        self._ray = ray
        own_host = str(ray.util.get_node_ip_address())
        key = secrets.token_bytes(NONCE_BYTES)
        super().__init__(address or f"tcp://{bracketed(own_host)}:0", key, num_ranks)
        self.num_threads = max(int(ray.cluster_resources().get("CPU", 0)) // num_ranks, 1)
        bundles: list[dict[str, float]] = [{"CPU": self.num_threads} for _ in range(num_ranks)]
        bundles[0][f"node:{own_host}"] = 0.001  # this process's
        self._group = ray.util.placement_group(bundles, strategy="PACK")
        if not self._group.wait(ROOM_SECONDS):
            self.close()
            room = f"{num_ranks} x {self.num_threads} CPUs"
            raise ConfigError(f"parallel.launcher=ray: Ray has had no room for {room} in {ROOM_SECONDS:.0f} s")
        task = ray.remote(max_retries=0, num_cpus=self.num_threads)(run_rank)
        self._tasks = [
            task.options(
                name=f"atom-run rank {rank}",
                scheduling_strategy=ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=rank
                ),
            ).remote(self.address, key, rank)
            for rank in range(1, num_ranks)
        ]

    def check(self) -> None:
        ended, _ = self._ray.wait(self._tasks, num_returns=1, timeout=0)
        for task in ended:
            try:
                self._ray.get(task)
            except AtomError:
                raise
            except self._ray.exceptions.RayError as error:
                raise EngineDeadError(f"Ray cannot run a rank: {one_line(error)}") from None
            raise EngineDeadError("a rank that Ray has started has ended")

    def close(self) -> None:
        super().close()
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.util.remove_placement_group(self._group)
        self._ray.shutdown()


def run_rank(address: str, key: bytes, rank: int) -> int:
    """Be a rank; the exit code. Ray runs it on one of its hosts."""
    return supervise(find_driver(address, key, rank), b"")
