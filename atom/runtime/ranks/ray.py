"""Start ranks as Ray tasks, one per rank, in one placement group.

    placement = place_with_ray(config.parallel, num_ranks=4, on_gpus=True)
    channels = placement.join()

Ray only starts processes on hosts that have room. Each task is a supervisor (`remote`), which connects to this process
and proves that it has the key that it was started with. On GPUs each task has one, and sees only that one.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from typing import Any

from atom.config.parallel import bracketed, devices_of
from atom.config.schema import ParallelConfig
from atom.errors import AtomError, ConfigError, EngineDeadError, one_line
from atom.runtime.ranks.links import RANK, RANK_ON_GPU
from atom.runtime.ranks.remote import Placement, find_driver, supervise
from atom.runtime.ranks.secure_connection import NONCE_BYTES

ROOM_SECONDS = 60.0  # to wait until Ray has room for all ranks


def place_with_ray(parallel: ParallelConfig, num_ranks: int, on_gpus: bool) -> Placement:
    """Have a running Ray start the other ranks. ConfigError if none runs, or it has no room.

    on_gpus: each rank, this process too, has a GPU
    """
    ray = import_ray()
    try:
        ray.init(address="auto", log_to_driver=True, configure_logging=False)
    except (ConnectionError, RuntimeError) as error:
        start = "start it with ray start --head, and ray start --address=… on other hosts"
        raise ConfigError(f"parallel.launcher=ray: no Ray runs here ({one_line(error)}); {start}") from None
    try:
        return RayPlacement(ray, parallel, num_ranks, on_gpus)
    except BaseException:
        ray.shutdown()
        raise


def import_ray() -> Any:
    """The package. ConfigError if it is not installed."""
    try:
        import ray
        import ray.util.placement_group
        import ray.util.scheduling_strategies
    except ImportError:
        raise ConfigError("parallel.launcher=ray needs Ray: pip install 'atom-run[ray]'") from None
    return ray


class RayPlacement(Placement):
    """Ranks as tasks, with a bundle of the placement group for this process on its own host."""

    def __init__(self, ray: Any, parallel: ParallelConfig, num_ranks: int, on_gpus: bool) -> None:
        """parallel.address: of this process; None: this host's address in Ray, and any port"""
        self._ray = ray
        own_host = str(ray.util.get_node_ip_address())
        key = secrets.token_bytes(NONCE_BYTES)
        super().__init__(parallel.address or f"tcp://{bracketed(own_host)}:0", key, num_ranks)
        self._group: Any = None
        try:
            self._reserve(own_host, num_ranks, on_gpus)
            if on_gpus:
                self._check_own_gpu(devices_of(parallel)[0])
            self._tasks = [
                self._start(rank, run_rank, self.address, key, rank, on_gpus) for rank in range(1, num_ranks)
            ]
        except BaseException:
            self._release()
            raise

    def _reserve(self, own_host: str, num_ranks: int, on_gpus: bool) -> None:
        """Reserve a bundle for each rank, the first one on this host."""
        cluster = self._ray.cluster_resources()
        self.num_threads = max(int(cluster.get("CPU", 0)) // num_ranks, 1)
        self._each: dict[str, float] = {"CPU": self.num_threads, **({"GPU": 1} if on_gpus else {})}
        if on_gpus and (num_gpus := int(cluster.get("GPU", 0))) < num_ranks:
            raise ConfigError(f"parallel.launcher=ray: {num_ranks} ranks need a GPU each, and Ray has {num_gpus}")
        bundles = [dict(self._each) for _ in range(num_ranks)]
        bundles[0][f"node:{own_host}"] = 0.001
        self._group = self._ray.util.placement_group(bundles, strategy="PACK")
        if not self._group.wait(ROOM_SECONDS):
            room = f"{num_ranks} x {self.num_threads} CPUs{' and a GPU' if on_gpus else ''}"
            raise ConfigError(f"parallel.launcher=ray: Ray has had no room for {room} in {ROOM_SECONDS:.0f} s")

    def _check_own_gpu(self, own: str) -> None:
        """Check that this process uses the GPU that Ray reserves for it, so that no other rank gets it."""
        reserved = self._ray.get(self._start(0, find_gpu))
        if reserved != own:
            fix = f"set CUDA_VISIBLE_DEVICES={reserved}"
            raise ConfigError(f"parallel.launcher=ray: Ray reserves GPU {reserved} for this process, not {own}; {fix}")

    def _start(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        """Start a task in the bundle of a rank."""
        task = self._ray.remote(max_retries=0, num_cpus=self._each["CPU"], num_gpus=self._each.get("GPU", 0))(function)
        place = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=rank
        )
        return task.options(name=f"atom-run rank {rank}", scheduling_strategy=place).remote(*args)

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
        self._release()
        self._ray.shutdown()

    def _release(self) -> None:
        """Stop listening, end the ranks, and release their bundles."""
        super().close()
        if self._group is not None:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.util.remove_placement_group(self._group)


def run_rank(address: str, key: bytes, rank: int, on_gpu: bool) -> int:
    """Be a rank, on a host of Ray's choice, which shows this process only the rank's GPU; the exit code."""
    return supervise(find_driver(address, key, rank), b"", RANK_ON_GPU if on_gpu else RANK)


def find_gpu() -> str:
    """The GPU that Ray gives this task, as written in CUDA_VISIBLE_DEVICES."""
    return str(*import_ray().get_gpu_ids())
