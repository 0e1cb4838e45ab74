"""Which device is found, with drivers that a test plays."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from atom import devices

CUDA, HIP = devices.VENDORS


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    devices.find_device.cache_clear()
    yield
    devices.find_device.cache_clear()


def play(
    monkeypatch: pytest.MonkeyPatch, folder: Path, built: str | None, drivers: dict[str, tuple[int, int, int]]
) -> None:
    """A torch that has this library, and drivers by file: what starting and counting return, and the count."""
    (folder / "lib").mkdir()
    if built is not None:
        (folder / "lib" / built).touch()
    spec = ModuleSpec("torch", None, origin=str(folder / "__init__.py"))
    monkeypatch.setattr(devices, "find_spec", lambda name: spec)

    def load(path: str) -> Any:
        if path not in drivers:
            raise OSError(f"{path}: cannot open shared object file")
        started, counted, num = drivers[path]

        def count(pointer: Any) -> int:
            pointer._obj.value = num
            return counted

        return SimpleNamespace(cuInit=lambda flags: started, cuDeviceGetCount=count,
                               hipInit=lambda flags: started, hipGetDeviceCount=count)  # fmt: skip

    monkeypatch.setattr(devices.ctypes, "CDLL", load)


@pytest.mark.parametrize(
    ("built", "drivers", "device"),
    [
        (CUDA, {"libcuda.so.1": (0, 0, 1)}, "cuda"),
        (CUDA, {"libcuda.so.1": (0, 0, 8)}, "cuda"),
        (CUDA, {"libcuda.so.1": (0, 0, 0)}, "cpu"),  # the driver shows this process none
        (CUDA, {"libcuda.so.1": (100, 0, 1)}, "cpu"),  # it does not start: there is no such device
        (CUDA, {"libcuda.so.1": (0, 3, 1)}, "cpu"),
        (CUDA, {}, "cpu"),  # torch is built for a GPU, and there is no driver
        (None, {"libcuda.so.1": (0, 0, 1)}, "cpu"),  # there is a GPU, and torch is not built for it
        (HIP, {"libcuda.so.1": (0, 0, 1)}, "cpu"),  # it is built for another vendor's
        (HIP, {"libamdhip64.so": (0, 0, 1)}, "cuda"),  # as torch calls it
        (HIP, {"lib/libamdhip64.so": (0, 0, 1)}, "cuda"),  # the driver that torch brings along
    ],
)
def test_a_gpu_is_found_where_torch_and_the_driver_have_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, built: str | None, drivers: dict[str, Any], device: str
):
    drivers = {str(tmp_path / path) if "/" in path else path: value for path, value in drivers.items()}
    play(monkeypatch, tmp_path, built, drivers)
    assert devices.find_device() == device


def test_gpus_are_counted_by_the_driver_of_the_vendor_that_torch_is_built_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    play(monkeypatch, tmp_path, HIP, {"libcuda.so.1": (0, 0, 8), "libamdhip64.so": (0, 0, 3)})
    assert devices.count_devices() == 3


def test_without_torch_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(devices, "find_spec", lambda name: None)
    assert devices.find_device() == "cpu"


def test_what_is_found_is_what_torch_finds_without_importing_it():
    program = "import sys; from atom.devices import find_device; print(find_device(), 'torch' in sys.modules)"
    words = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert words == ["cuda" if torch.cuda.is_available() else "cpu", "False"]


@pytest.mark.parametrize(
    ("broken", "calls"), [("", ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]), ("cuInit", ["cuInit"]),
                          ("cuDeviceGet", ["cuInit", "cuDeviceGet"])]
)  # fmt: skip
def test_the_context_is_made_ahead_where_the_driver_can(monkeypatch: pytest.MonkeyPatch, broken: str, calls: list[str]):
    made: list[str] = []

    class Driver:
        def __getattr__(self, name: str) -> Any:
            return lambda *args: made.append(name) or 100 * (name == broken)

    monkeypatch.setattr(devices.ctypes, "CDLL", lambda path: Driver())
    devices.open_early().join()
    assert made == calls


def test_another_vendors_context_is_left_to_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    play(monkeypatch, tmp_path, HIP, {"libamdhip64.so": (0, 0, 1)})
    devices._retain_context()  # here, since an exception in a thread fails no test


def test_rocm_is_refused_where_torch_is_not_built_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(devices, "_torch_folder", lambda: tmp_path)
    assert not devices.is_built_for_amd()
    (tmp_path / "libtorch_hip.so").touch()
    assert devices.is_built_for_amd()
