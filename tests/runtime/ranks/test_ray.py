"""Ranks that Ray places: on a stand-in of the functions that are used, and slowly on a Ray of this host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import serving

from atom import LLMEngine, SamplingParams
from atom.config.schema import ParallelConfig
from atom.errors import ConfigError, EngineDeadError
from atom.runtime.ranks import ray as ray_ranks
from atom.runtime.ranks.links import Ranks
from atom.runtime.ranks.ray import place_with_ray
from atom.runtime.ranks.remote import find_driver
from atom.runtime.ranks.secure_connection import Connection

RAY = ParallelConfig(tensor=3, launcher="ray")


class FakeRay:
    """A Ray of one host with 7 CPUs, whose tasks join the driver as threads."""

    class exceptions:
        class RayError(Exception): ...

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.connections: list[Connection] = []  # which stay open
        self.has_room, self.error = True, None
        self.num_gpus, self.reserved = 0, ""  # of the cluster; the one for the driver
        self.util = types.SimpleNamespace(
            get_node_ip_address=lambda: "127.0.0.1",
            placement_group=self.placement_group,
            remove_placement_group=lambda group: self.calls.append("remove"),
            scheduling_strategies=types.SimpleNamespace(
                PlacementGroupSchedulingStrategy=lambda group, placement_group_bundle_index: (
                    placement_group_bundle_index
                )
            ),
        )

    def init(self, **options: Any) -> None:
        self.calls.append(("init", options["address"]))

    def shutdown(self) -> None:
        self.calls.append("shutdown")

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 7.0, "memory": 1e9, **({"GPU": self.num_gpus} if self.num_gpus else {})}

    def placement_group(self, bundles: list[dict[str, float]], strategy: str) -> Any:
        self.calls.append((bundles, strategy))
        return types.SimpleNamespace(wait=lambda seconds: self.has_room)

    def remote(self, **options: Any) -> Any:
        assert options == {"max_retries": 0, "num_cpus": 2, "num_gpus": 1 if self.num_gpus else 0}
        return lambda function: types.SimpleNamespace(options=lambda **placed: self.task(function, placed))

    def task(self, function: Any, placed: dict[str, Any]) -> Any:
        if function is ray_ranks.find_gpu:
            assert placed["scheduling_strategy"] == 0
            return types.SimpleNamespace(remote=lambda: self.reserved)

        def start(address: str, key: bytes, rank: int, on_gpu: bool) -> int:
            assert function is ray_ranks.run_rank and placed["scheduling_strategy"] == rank and len(key) == 32
            assert on_gpu == bool(self.num_gpus)
            if self.error is None:
                threading.Thread(target=self.join, args=(address, key, rank), daemon=True).start()
            return rank

        return types.SimpleNamespace(remote=start)

    def join(self, address: str, key: bytes, rank: int) -> None:
        connection = find_driver(address, key, rank)
        self.connections.append(connection)
        connection.send(b"")

    def wait(self, tasks: list[int], num_returns: int, timeout: float) -> tuple[list[int], list[int]]:
        assert (num_returns, timeout) == (1, 0)
        return ([], tasks) if self.error is None else (tasks[:1], tasks[1:])

    def get(self, task: Any) -> Any:
        if isinstance(self.error, Exception):
            raise self.error
        return task


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    made = FakeRay()
    monkeypatch.setattr(ray_ranks, "import_ray", lambda: made)
    return made


def test_each_rank_is_a_task_of_a_group_that_begins_on_the_driver_s_host(ray: FakeRay):
    with closing(place_with_ray(RAY, 3, on_gpus=False)) as placement:
        joined = placement.join()
        assert [channel.hello for channel in joined] == [b"", b""] and not joined[0].has_ended
        assert (placement.num_threads, placement.host, placement.is_one_host) == (2, "127.0.0.1", False)
    assert all(channel.has_ended for channel in joined)
    bundles = [{"CPU": 2, "node:127.0.0.1": 0.001}, {"CPU": 2}, {"CPU": 2}]
    assert ray.calls == [("init", "auto"), (bundles, "PACK"), "remove", "shutdown"]


def test_each_rank_on_gpus_has_one_and_the_driver_uses_the_one_reserved_for_it(ray: FakeRay):
    ray.num_gpus, ray.reserved = 3, "2"
    with closing(place_with_ray(replace(RAY, visible_devices="2,0"), 3, on_gpus=True)) as placement:
        assert len(placement.join()) == 2
    bundles = [{"CPU": 2, "GPU": 1, "node:127.0.0.1": 0.001}, {"CPU": 2, "GPU": 1}, {"CPU": 2, "GPU": 1}]
    assert (bundles, "PACK") in ray.calls


def test_a_driver_with_another_gpu_than_ray_reserves_is_refused_with_the_right_one(ray: FakeRay):
    ray.num_gpus, ray.reserved = 3, "1"
    with pytest.raises(ConfigError, match=r"reserves GPU 1 for this process, not 0; set CUDA_VISIBLE_DEVICES=1$"):
        place_with_ray(RAY, 3, on_gpus=True)
    assert ray.calls[-2:] == ["remove", "shutdown"] and not ray.connections


def test_a_ray_with_fewer_gpus_than_ranks_is_left_at_once(ray: FakeRay):
    ray.num_gpus = 2
    with pytest.raises(ConfigError, match=r"3 ranks need a GPU each, and Ray has 2$"):
        place_with_ray(RAY, 3, on_gpus=True)
    assert ray.calls == [("init", "auto"), "shutdown"]


def test_a_ray_without_room_is_left(ray: FakeRay):
    ray.has_room = False
    with pytest.raises(ConfigError, match="Ray has had no room for 3 x 2 CPUs in 60 s"):
        place_with_ray(RAY, 3, on_gpus=False)
    assert ray.calls[-1] == "shutdown"


@pytest.mark.parametrize(
    ("error", "kind", "reason"),
    [
        (FakeRay.exceptions.RayError("No module named 'atom'"), EngineDeadError, "Ray cannot run a rank: No module named"),
        (ConfigError("another key"), ConfigError, "another key"),
        ("it returned", EngineDeadError, "a rank that Ray has started has ended"),
    ],
)  # fmt: skip
def test_a_task_that_ends_before_it_joins_is_the_reason(error: Any, kind: type[Exception], reason: str, ray: FakeRay):
    ray.error = error
    with closing(place_with_ray(RAY, 3, on_gpus=False)) as placement, pytest.raises(kind, match=reason):
        placement.join()


def test_without_the_package_its_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"needs Ray: pip install 'atom-run\[ray\]'"):
        place_with_ray(RAY, 3, on_gpus=False)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[None]:
    """A Ray on this host of three CPUs, and of three GPUs that it only counts."""
    pytest.importorskip("ray")
    code = "import sys; from ray.scripts.scripts import main; sys.exit(main())"
    options = ["--num-cpus=3", "--num-gpus=3", "--port=0", "--include-dashboard=false", "--disable-usage-stats"]
    command = [sys.executable, "-c", code, "start", "--head", *options, "--block"]
    log, env = tmp_path / "ray.log", os.environ | {"RAY_worker_niceness": "0"}
    with (
        log.open("wb") as out,
        subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True) as started,
    ):
        while "Ray runtime started" not in log.read_text():
            assert started.poll() is None, log.read_text()
            threading.Event().wait(0.1)
        yield
        started.terminate()  # which ends what it has started
        started.wait(30)


def report_gpu(address: str, key: bytes, rank: int, on_gpu: bool) -> int:
    """A rank that only reports which GPU it sees. (By value: Ray's processes do not find this module.)"""
    from atom.runtime.ranks import ray as ray_ranks

    code = "import os; link.answer(os.environ['CUDA_VISIBLE_DEVICES'].encode())"
    connection = ray_ranks.find_driver(address, key, rank)
    return ray_ranks.supervise(connection, b"", code if on_gpu else "")


@pytest.mark.slow
def test_a_local_ray_gives_each_rank_a_gpu_of_its_own(cluster: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(report_gpu, "__module__", "__main__")
    monkeypatch.setattr(ray_ranks, "run_rank", report_gpu)
    with closing(place_with_ray(RAY, 3, on_gpus=True)) as placement:
        ranks = Ranks(placement.join(), [b"", b""])
        assert sorted(ranks.receive(rank) for rank in (1, 2)) == [b"1", b"2"]
        ranks.close()


@pytest.mark.slow
def test_a_local_ray_starts_a_rank(cluster: None, tmp_path: Path):
    talker = serving.save_talker(tmp_path / "talker")
    command = [
        sys.executable,
        "-m",
        "atom.cli",
        "dtype=fp32",
        "level=1",
        "serve.kv_cache_memory=16777216",
        "parallel=tp2",
    ]
    command += [
        f"checkpoint={talker}",
        f"cache={tmp_path}",
        "prompts=Hello",
        "sampling.temperature=0",
        "job.output=json",
    ]
    ended = subprocess.run([*command, "parallel.launcher=ray"], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    engine = LLMEngine(str(talker), dtype="fp32", level=1, kv_cache_memory=1 << 24)
    (answer,) = engine.generate(["Hello"], SamplingParams(temperature=0))
    assert json.loads(ended.stdout)["text"] == answer["text"]
