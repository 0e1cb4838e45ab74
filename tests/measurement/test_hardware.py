from __future__ import annotations

import subprocess
from pathlib import Path

from atom.measurement.hardware import describe_machine, find_commit


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


def test_a_commit_is_dirty_if_more_than_docs_differs(tmp_path: Path):
    assert find_commit(tmp_path) is None, "a folder within no checkout, or within another's"
    git("init", "-q", folder=tmp_path)
    for name in ("docs/page.md", "atom/code.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("1\n")
    git("add", ".", folder=tmp_path)
    git("-c", "user.name=A", "-c", "user.email=a@b.c", "commit", "-qm", "first", folder=tmp_path)
    commit = git("rev-parse", "--short", "HEAD", folder=tmp_path)
    (tmp_path / "docs/page.md").write_text("2\n")
    assert find_commit(tmp_path) == commit
    (tmp_path / "atom/code.py").write_text("2\n")
    assert find_commit(tmp_path) == f"{commit}-dirty"
    assert find_commit(tmp_path / "atom") is None


def git(*words: str, folder: Path) -> str:
    return subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()
