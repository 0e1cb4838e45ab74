from __future__ import annotations

from pathlib import Path

from atom.measurement.hardware import describe_machine


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_gpus_are_named_and_counted(tmp_path: Path):
    for at in range(2):
        write(tmp_path, f"proc/driver/nvidia/gpus/0000:0{at}:00.0/information", "Model: \t\t NVIDIA H200\nIRQ: 5\n")
    write(tmp_path, "sys/class/drm/card3/device/product_name", "AMD Instinct MI300X\n")
    write(tmp_path, "proc/cpuinfo", "model name\t: Some CPU\n")
    assert describe_machine(tmp_path) == "2 x NVIDIA H200 + 1 x AMD Instinct MI300X"


def test_a_machine_without_gpus_is_its_cpus(tmp_path: Path):
    write(tmp_path, "proc/cpuinfo", "processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\n\n" * 3)
    assert describe_machine(tmp_path) == "3 x Some CPU @ 2 GHz"


def test_no_host_is_named():
    assert Path("/proc/sys/kernel/hostname").read_text().strip() not in describe_machine()
