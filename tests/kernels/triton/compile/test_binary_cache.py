"""Triton's binaries in the cache folder: found again wherever it lies, and trusted only while they are whole and ours.

Triton compiles for GPUs that need not be there, in a process where its interpreter has not been at work; unlike a
launch, `compile` asks the cache each time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.build import compile_module_from_src
from triton.runtime.cache import FileCacheManager, get_cache_manager

from atom.cache import Cache
from atom.kernels.triton.compile import binary_cache
from atom.kernels.triton.compile.binary_cache import BinaryCache, compile_kept, keep_in, kept

ROOT = Path(__file__).parents[4]

KERNEL = """
import triton.language as tl

from atom.kernels.triton.compile.jit import jit

@jit
def double(x, y):
    place = tl.arange(0, 64)
    tl.store(y + place, tl.load(x + place) * 2)
"""

MODULE = """
#include <Python.h>
static PyObject* answer(PyObject* self, PyObject* args) { return PyLong_FromLong(42); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "answers", NULL, -1, methods};
PyMODINIT_FUNC PyInit_answers(void) { return PyModule_Create(&module); }
"""

PROGRAM = """
import json, sys
sys.path.insert(0, "tests")
from kernels.triton.compile.test_binary_cache import build
for line in sys.stdin:
    try:
        outcome = build(*json.loads(line))
    except Exception as error:
        outcome = {"error": repr(error)}
    print(json.dumps(outcome), flush=True)
"""

PTXAS = """\
#!/bin/sh
case $* in *--version*) exec {} --version; esac
exit 1
"""


def build(folder: str, source: str, site: str = "") -> dict[str, Any]:
    """Have Triton compile a kernel for two GPUs, and a module: what came of it. `site`: where it is as if installed."""
    cache = Cache(Path(folder))
    with contextlib.closing(cache), pytest.MonkeyPatch.context() as patch:
        if site:
            patch.setattr(triton, "__file__", f"{site}/triton/__init__.py")
        binaries = keep_in(cache)
        spec = spec_from_file_location("kernel", source)
        assert spec is not None and spec.loader is not None
        kernel = module_from_spec(spec)
        spec.loader.exec_module(kernel)
        signature = {"x": "*fp32", "y": "*fp32"}
        with kept():
            made = [
                compile_kept(triton.compile, ASTSource(kernel.double, signature), target=target, options={})
                for target in (GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64))
            ]
            for _ in range(2):  # a launcher is asked for by every kernel that has its signature
                module = compile_module_from_src(MODULE, "answers", include_dirs=[], libraries=[])
        return {
            "binaries": [hashlib.sha256(each.kernel).hexdigest() for each in made],
            "names": [each.metadata.name for each in made],
            "answer": module.answer(),
            "module": module.__file__,
            "compiled": binaries.num_compiled,
            "used": binaries.used(),
            "warnings": cache.warnings,
        }


Build = Callable[..., dict[str, Any]]


@contextlib.contextmanager
def builder(files: Path, **variables: str) -> Iterator[Build]:
    """`build` in a process of its own, whose temporary files are in a folder, where it leaves none."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(files / "triton"), "TMPDIR": str(files)} | variables
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-B", "-c", PROGRAM]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes) as process:
        assert process.stdin is not None and process.stdout is not None

        def run(*args: Path) -> dict[str, Any]:
            print(json.dumps(list(map(str, args))), file=process.stdin, flush=True)
            lines = iter(process.stdout.readline, "")  # Triton prints what ptxas has complained of
            outcome: dict[str, Any] = json.loads(next(line for line in lines if line.startswith('{"')))
            return outcome

        yield run
        process.stdin.close()
        assert process.wait(60) == 0
        assert not [path for path in files.iterdir() if path.suffix != ".ptx"], "Triton leaves what ptxas refuses"


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Build]:
    with builder(tmp_path_factory.mktemp("files")) as run:
        yield run


@pytest.fixture(scope="module")
def built(process: Build, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Any]]:
    """A folder that has it all, the source, and what came of filling it."""
    folder = tmp_path_factory.mktemp("built")
    (folder / "kernel.py").write_text(KERNEL)
    return folder / "cache", folder / "kernel.py", process(folder / "cache", folder / "kernel.py")


@pytest.fixture
def copy(built: tuple[Path, Path, dict[str, Any]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(built[0], tmp_path / "copy"))


def test_the_first_process_compiles_and_the_second_finds(built: Any, copy: Path, process: Build):
    _, source, first = built
    assert first["compiled"] == len(set(first["used"])) == 3 and first["warnings"] == []
    again = process(copy, source)
    assert again["compiled"] == 0 and Path(again["module"]).is_relative_to(copy)
    for same in ("binaries", "names", "answer", "used", "warnings"):
        assert again[same] == first[same]


@pytest.mark.slow
def test_processes_that_start_at_the_same_time_compile_each_entry_once(built: Any, tmp_path: Path):
    """As ranks do: what one makes, the others wait for."""
    _, source, first = built
    with contextlib.ExitStack() as started, ThreadPoolExecutor(2) as pool:
        folders = [tmp_path / str(number) for number in range(2)]
        for folder in folders:
            folder.mkdir()
        runs = [started.enter_context(builder(folder)) for folder in folders]
        list(pool.map(lambda run: run(tmp_path / "other", source), runs))  # what they import and read takes time
        outcome = list(pool.map(lambda run: run(tmp_path / "cache", source), runs))
    assert sum(each["compiled"] for each in outcome) == 3
    for each in outcome:
        assert each["binaries"] == first["binaries"] and each["used"] == first["used"] and each["answer"] == 42


@pytest.mark.slow
def test_a_folder_that_was_copied_needs_no_compiler(built: Any, copy: Path, tmp_path: Path):
    """In a process whose ptxas only reports its version, which is part of Triton's key, and which has no C compiler."""
    _, source, first = built
    (tmp_path / "files").mkdir()
    tool = tmp_path / "ptxas"
    tool.write_text(PTXAS.format(knobs.nvidia.ptxas.path))
    tool.chmod(0o755)
    with builder(tmp_path / "files", TRITON_PTXAS_PATH=str(tool), CC="/bin/false") as run:
        outcome = run(copy, source)
        assert (outcome["binaries"], outcome["compiled"], outcome["warnings"]) == (first["binaries"], 0, [])
        assert run(tmp_path / "empty", source)["error"], "without its entries it does not get by"


def test_an_entry_holds_what_a_launch_reads_and_no_path(built: Any):
    folder, _, outcome = built
    entries = Cache(folder).entries("binaries")
    assert sorted(entry.key for entry in entries) == sorted(outcome["used"])
    files = sorted(re.sub(r"\..*\.", ".", name) for entry in entries for name in entry.files)
    assert files == ["answers.so", "double.cubin", "double.hsaco", "double.json", "double.json"]
    assert sorted(entry.about["name"].partition(".")[0] for entry in entries) == ["answers", "double", "double"]
    for entry in entries:
        described = json.dumps(entry.about["ingredients"], sort_keys=True)
        assert entry.key == hashlib.sha256(described.encode()).hexdigest()[:32]
    for path in folder.glob("binaries/*/*.json"):
        assert str(folder) not in path.read_text()


@pytest.mark.parametrize("file", ["double.cubin", "double.json", "answers.*.so"])
@pytest.mark.parametrize("harm", ["a byte", "a mode"])
def test_an_entry_that_is_not_to_be_trusted_is_built_anew(built: Any, copy: Path, process: Build, file: str, harm: str):
    _, source, first = built
    path = next(copy.glob(f"binaries/*/{file}"))
    whole = path.read_bytes()
    if harm == "a byte":
        path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    else:
        path.chmod(0o666)
    outcome = process(copy, source)
    assert outcome["compiled"] == 1
    assert (outcome["binaries"], outcome["answer"]) == (first["binaries"], 42)
    (warning,) = outcome["warnings"]
    assert str(path.parent) in warning
    assert ("checksum" if harm == "a byte" else "writable by others") in warning
    assert [process(copy, source)[outcome] for outcome in ("compiled", "warnings")] == [0, []]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_an_entry_of_another_user_is_not_used(built: Any, copy: Path, process: Build):
    path = next(copy.glob("binaries/*/double.cubin"))
    os.chown(path, 65534, 65534)
    outcome = process(copy, built[1])
    assert outcome["compiled"] == 1 and "is owned by" in outcome["warnings"][0]


def test_a_folder_that_takes_nothing_stops_no_run(built: Any, process: Build, tmp_path: Path):
    (tmp_path / "cache").write_text("this is no folder")
    outcome = process(tmp_path / "cache", built[1])
    assert (outcome["answer"], outcome["compiled"]) == (42, 3)
    assert outcome["warnings"] and all(
        "what is built is not kept for the next run" in line for line in outcome["warnings"]
    )
    assert (tmp_path / "cache").read_text() == "this is no folder"


def test_warnings_are_printed_once_after_those_of_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    cache = Cache(tmp_path)
    binaries = BinaryCache(cache)
    for name in ("one", "two"):
        (harmed,) = binaries.publish({"file": name}, {f"{name}.so": b"code"}).values()
        Path(harmed).write_bytes(b"evil")
    assert binaries.find({"file": "one"}) == {}
    assert len(cache.warnings) == 1 and capsys.readouterr().err == "", "who started it reports this"
    binaries.print_warnings()
    assert [binaries.find({"file": name}) for name in ("one", "two", "two")] == [{}, {}, {}]
    folder = Path(harmed).parent
    assert capsys.readouterr().err == f"atom-run: {folder}: the checksum of two.so is wrong, built anew\n"
    shutil.rmtree(tmp_path / "binaries")
    (tmp_path / "binaries").write_text("")
    for name in ("three", "four"):
        binaries.publish({"file": name}, {f"{name}.so": b"code"})
    why = "takes no entries (File exists): what is built is not kept for the next run"
    assert capsys.readouterr().err == f"atom-run: {tmp_path} {why}\n"


def test_who_else_has_set_triton_s_cache_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Theirs(FileCacheManager):  # type: ignore[misc]
        pass

    def find() -> type:
        return type(get_cache_manager("00"))

    monkeypatch.setattr(BinaryCache, "current", BinaryCache(Cache(tmp_path)))
    with knobs.cache.scope(), ThreadPoolExecutor(1) as other_thread:
        knobs.cache.dir = str(tmp_path / "theirs")
        knobs.cache.manager_class = Theirs
        with kept(), kept():
            assert find() is not Theirs and other_thread.submit(find).result() is Theirs
        assert knobs.cache.manager_class is find() is Theirs
        with kept():
            knobs.cache.manager_class = FileCacheManager
        assert knobs.cache.manager_class is FileCacheManager, "which they have set meanwhile"


def test_a_thread_gets_its_own_launcher_although_another_loads_one_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    lock, has_come = threading.RLock(), threading.Event()  # as far as it comes while the first thread has the lock

    class Lock:
        def __enter__(self) -> None:
            if threading.current_thread() is not threading.main_thread():
                has_come.set()
            lock.acquire()

        def __exit__(self, *error: object) -> None:
            lock.release()

    monkeypatch.setattr(binary_cache, "_loading", Lock())
    monkeypatch.setattr(BinaryCache, "current", BinaryCache(Cache(tmp_path)))
    first, second = (MODULE.replace("42", answer) for answer in ("1", "2"))

    def load(source: str, meanwhile: Callable[[], object] = lambda: None) -> int:
        with kept():
            module = compile_module_from_src(source, "answers")
            meanwhile()
            answer: int = module.answer()
        return answer

    assert load(first) == 1
    with ThreadPoolExecutor(1) as other_thread:
        loads = list[Future[int]]()

        def load_first_again() -> None:
            loads.append(other_thread.submit(load, first, has_come.set))
            has_come.wait()  # to the lock, or, if nothing holds it back, to the loaded module

        assert load(second, load_first_again) == 2
        assert loads[0].result() == 1


def test_another_kernel_is_another_entry(built: Any, copy: Path, process: Build, tmp_path: Path):
    _, _, first = built
    (tmp_path / "kernel.py").write_text(KERNEL.replace("* 2", "* 3"))
    second = process(copy, tmp_path / "kernel.py")
    assert second["compiled"] == 2 and len({*first["used"], *second["used"]}) == 5


@pytest.mark.slow
def test_another_triton_has_other_entries_whether_or_not_its_files_were_listed(
    built: Any, copy: Path, process: Build, tmp_path: Path
):
    _, source, first = built
    record = tmp_path / "site" / "triton-9.9.dist-info" / "RECORD"
    used = [first["used"]]
    record.parent.mkdir(parents=True)
    for listed in ("", "triton/_C/libtriton.so,sha256=one,1\n", "triton/_C/libtriton.so,sha256=another,1\n"):
        record.write_text(listed)
        outcome = process(copy, source, tmp_path / "site")
        assert outcome["compiled"] == 2, "all but the module, which Triton has no part in"
        assert process(copy, source, tmp_path / "site")["compiled"] == 0
        used.append(outcome["used"])
    assert len({key for keys in used for key in keys}) == 1 + 2 * len(used)
