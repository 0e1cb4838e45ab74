"""tune=true on a device that is the CPU, under Triton's interpreter, with a clock that the test makes up."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch

from atom import LLMEngine, SamplingParams, weights
from atom.assemble.runner import use_parameters
from atom.checkpoint import SilentProgress
from atom.compiler import compile_graph
from atom.config.load import engine_overrides, load
from atom.errors import CapacityError
from atom.graph import Graph, ops
from atom.kernels import Target, tuned
from atom.kernels.triton import search
from atom.kernels.triton.experts import grouped_tiles, grouped_tune
from atom.kernels.triton.experts.grouped_tiles import Tiles
from atom.kernels.triton.gpu import Gpu
from atom.kernels.triton.linear import linear, matrix, tiles
from atom.kernels.triton.linear import tune as linear_tune
from atom.kernels.triton.linear.tiles import Matrix, Parameters
from atom.kernels.triton.linear.weight_encoding import PLAIN
from atom.runtime import tune as tuning
from atom.runtime.step.cuda_graphs import Graphs
from atom.runtime.step.model import Model
from atom.runtime.step.program import Bindings
from atom.runtime.types import StepLimits

GPU = Gpu(2, 227 << 10, (0, 0), "Test GPU")
SLOW, FAST, WRONG, UNFIT = (Matrix(64, 128, 1, stages) for stages in (2, 3, 4, 5))
FIELDS = {"dtype": "fp16", "level": 1, "device": "cuda", "max_num_seqs": 8, "max_model_len": 32, "block_size": 4}


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes one thread; two ways to try, one that gives another result, and one that cannot be run."""
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here, not interpreted")
    multiply = matrix.multiply_matrix

    def multiply_somehow(x: Any, weight: Any, bias: Any, kind: Any, counters: Any, parameters: Matrix) -> torch.Tensor:
        if parameters == UNFIT:
            raise tiles.TileError("it does not fit")
        y = multiply(x, weight, bias, kind, counters, parameters)
        return y + 1 if parameters == WRONG else y

    monkeypatch.setattr(linear, "multiply_matrix", multiply_somehow)
    monkeypatch.setattr(linear, "find_gpu", lambda device: GPU)
    monkeypatch.setattr(search, "find_gpu", lambda device: GPU)
    monkeypatch.setattr(linear_tune.LinearTuner, "candidates", lambda *_: [None, SLOW, FAST, WRONG, UNFIT])
    monkeypatch.setattr(tuning.os, "sched_getaffinity", lambda pid: {0})


@pytest.fixture
def opened(checkpoints: Callable[[str], Path]) -> tuple[Model, Graph]:
    return open_model(checkpoints("qwen3"))


def open_model(checkpoint: Path, **more: Any) -> tuple[Model, Graph]:
    config = load(engine_overrides(str(checkpoint), {**FIELDS, "model.layers": 1, **more}))
    graph = compile_graph(config, target=Target("cuda", frozenset({"nvidia", "sm_90"})))
    tensors = weights.load_dummy(graph.recipes(), seed=0)
    model = Model(graph, Bindings(tensors), 4, StepLimits(8, 64, 32), device="cpu", backend="triton")
    model.bind(dict.fromkeys(model.kinds, 2))
    return model, graph


def tune(model: Model, graph: Graph, cache: Path, max_rows: int, *args: Any) -> None:
    model.graph, model.limits = graph, StepLimits(8, max_rows, 32)
    tuning.tune(model, linear_tune.LinearTuner(model.device), cache, *args)


def used(model: Model, graph: Graph, rows: int) -> Parameters:
    """The parameters of the text's first matmul, for so many rows."""
    find = model._bindings.kernels[ops.linear, "triton"].__self__._parameters
    return find(linear_tune.matmuls_of(graph)[0].shape(rows), GPU)


def use_measured(model: Model, *args: Any) -> None:
    tuning.use_measured(model, [linear_tune.LinearTuner(model.device)], *args)


class Steps:
    """A step of 1 ms, of which each matmul that is FAST takes 10% off, and one that is SLOW adds 10%."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.num_captured = 0

    def capture(self, run: Callable[[], object]) -> Callable[[], float]:
        if not self.num_captured:  # the interpreter is slow
            run()
        self.num_captured += 1
        trial = self.model._bindings.kernels[ops.linear, "triton"].__self__._parameters  # type: ignore[attr-defined]
        chosen: list[Parameters] = [*trial.chosen.values()]
        seconds = 1e-3 * 0.9 ** chosen.count(FAST) * 1.1 ** chosen.count(SLOW)
        return lambda: seconds


class Shown:
    """The progress that a user sees."""

    def __init__(self) -> None:
        self.tasks: dict[str, list[int | None]] = {}  # title -> total, how many were counted

    @contextmanager
    def task(self, description: str, total: int | None = None, *, in_bytes: bool = True) -> Iterator[Any]:
        counted = self.tasks[description] = [total, 0]

        class Task:
            def advance(self, amount: int, /) -> None:
                counted[1] += amount  # type: ignore[operator]

        assert not in_bytes
        yield Task()


def test_ranks_take_what_is_right_on_all_and_what_the_first_one_knows(opened: Any, tmp_path: Path):
    model, graph = opened
    asked: list[Any] = []

    def exchange(own: bytes) -> list[bytes]:
        """Of two ranks, on the second of which FAST is wrong; this is the first one."""
        asked.append(msgspec.msgpack.decode(own))
        if isinstance(asked[-1], dict):
            return [own, msgspec.msgpack.encode({"1 1 1 1": ["library"]})]
        fits, right = asked[-1]
        return [own, msgspec.msgpack.encode([fits, [*right[:2], False, *right[3:]]])]

    lines: list[str] = []
    tune(model, graph, tmp_path, 1, Shown(), lines.append, Steps(model).capture, exchange)
    assert asked == [{}] + [[[True, True, True, True, False], [True, True, True, False, False]]] * 5
    written = json.loads((tmp_path / "tuned" / "test_gpu.json").read_text())["linear"]
    assert len(written) == 5 and all(entry[4:5] != [3] for entry in written.values()), "FAST has 3 stages"
    assert sum(f"{FAST} of " in line for line in lines) == sum(f"{WRONG} of " in line for line in lines) == 5

    known = msgspec.msgpack.encode(written)
    tune(model, graph, tmp_path / "other", 1, Shown(), lines.append, None, lambda own: [known, own])
    assert lines[-1] == "tune=true knows all 5 linears of this model on Test GPU: nothing is measured"


@pytest.mark.slow
def test_a_model_with_an_fp8_cache_is_measured(checkpoints: Callable[[str], Path], tmp_path: Path):
    model, graph = open_model(checkpoints("qwen3"), **{"quant.kv": "fp8"})
    assert {cache.dtype for cache in model.caches.values()} == {torch.float8_e4m3fn}
    tune(model, graph, tmp_path, 1, Shown(), [].append, Steps(model).capture)
    assert len(json.loads((tmp_path / "tuned" / "test_gpu.json").read_text())["linear"]) == 5


def test_the_matmuls_of_a_step_are_measured_kept_and_known_the_next_time(opened: Any, tmp_path: Path):
    model, graph = opened
    steps, shown, lines = Steps(model), Shown(), []
    tune(model, graph, tmp_path, 8, shown, lines.append, steps.capture)
    matmuls = linear_tune.matmuls_of(graph)
    shapes = [f"{out} {inner} {gates}" for out, inner, gates, *_ in matmuls]
    file = tmp_path / "tuned" / "test_gpu.json"
    written = json.loads(file.read_text())
    assert written["linear"] == {f"{size} {shape}": ["matrix", 64, 128, 1, 3, 1, 1, 0, 128]
                                 for size in (1, 8) for shape in shapes}  # fmt: skip
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in file.parent.iterdir()] == ["test_gpu.json"]
    assert len(shapes) == 5, "qkv, o, gate_up, down, head"
    titles = [f"tuning {rows} rows of {inner} → {out}, {at + 1} of 5"
              for rows in (1, 8) for at, (out, inner, *_) in enumerate(matmuls)]  # fmt: skip
    assert list(shown.tasks) == titles
    assert all(total == counted for total, counted in shown.tasks.values())
    reported = [line for line in lines if "differs" not in line]
    assert reported == [
        "tune=true: a step of 1 decodes takes 0.590 ms in place of 1.000, 41.0% less",
        "tune=true: a step of 8 decodes takes 0.349 ms in place of 0.590, 41.0% less",
    ]
    assert sum(f"{WRONG} of " in line for line in lines) == 10 and len(lines) == 12

    model.bind({name: 2 for name in model.kinds})
    num_captured = steps.num_captured
    tune(model, graph, tmp_path, 8, shown, lines.append, steps.capture)
    assert lines[12:] == ["tune=true knows all 5 linears of this model on Test GPU: nothing is measured"]
    assert steps.num_captured == num_captured


@pytest.mark.slow
def test_the_model_is_as_it_was_and_gives_what_it_gave(opened: Any, tmp_path: Path):
    model, graph = opened
    rows = torch.tensor([0, 1], dtype=torch.int32)
    with torch.inference_mode():
        expected = model.decode(rows).logits.clone()
    tune(model, graph, tmp_path, 2, SilentProgress(), lambda line: None, Steps(model).capture)
    assert model.state.lengths.tolist() == [1] * 9 and not model.state.tokens.any() and not model.tables.any()
    assert all(len(cache) == 2 and not cache.any() for cache in model.caches.values())
    assert used(model, graph, 2) == FAST
    with torch.inference_mode():
        again = model.decode(rows).logits
    assert (again - expected).norm() <= 1e-2 * expected.norm()


@pytest.mark.slow
def test_what_fewer_rows_than_parameters_hold_for_found_is_used_and_not_kept(opened: Any, tmp_path: Path):
    model, graph = opened
    lines: list[str] = []
    tune(model, graph, tmp_path, 2, SilentProgress(), lines.append, Steps(model).capture)
    assert {key.split()[0] for key in tuned.read("Test GPU", tmp_path)["linear"]} == {"1"}
    assert used(model, graph, 2) == FAST
    assert "0.349 ms in place of 0.590, 41.0% less; not kept, as it would be for up to 8" in lines[-1]
    shown = Shown()
    tune(model, graph, tmp_path, 8, shown, lines.append, Steps(model).capture)
    assert len(shown.tasks) == 5 and all(title.startswith("tuning 8 rows of ") for title in shown.tasks)
    assert {key.split()[0] for key in tuned.read("Test GPU", tmp_path)["linear"]} == {"1", "8"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("error", [AssertionError, RuntimeError])
def test_what_is_no_lack_of_room_for_an_option_is_not_hidden(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
):
    def fail(*_: Any) -> None:
        raise error("an illegal memory access")

    model, graph = opened
    monkeypatch.setattr(linear_tune.LinearTuner, "candidates", lambda *_: [None, SLOW])
    monkeypatch.setattr(linear, "multiply_matrix", fail)
    with pytest.raises(error, match="an illegal memory access"):
        tune(model, graph, tmp_path, 1, SilentProgress(), lambda line: None, Steps(model).capture)
    assert tuned.read("Test GPU", tmp_path)["linear"] == {}


@pytest.mark.slow
def test_an_option_that_memory_does_not_suffice_for_is_skipped(opened: Any, tmp_path: Path):
    model, graph = opened
    steps = Steps(model)

    def capture(run: Callable[[], object]) -> Callable[[], float]:
        trial = model._bindings.kernels[ops.linear, "triton"].__self__._parameters
        if FAST in trial.chosen.values():
            raise torch.OutOfMemoryError
        return steps.capture(run)

    tune(model, graph, tmp_path, 1, SilentProgress(), lambda line: None, capture)
    entries = tuned.read("Test GPU", tmp_path)["linear"].values()
    assert len(entries) == 5 and tiles.to_entry(FAST) not in entries


def test_steps_that_run_out_of_memory_are_logged_with_the_field_that_sets_their_size(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model, graph = opened
    advice = r"steps of 8 decodes ran out of memory: lower serve\.max_num_seqs \(to 4\), or leave tune=true out"

    def capture(run: Callable[[], object]) -> Callable[[], float]:
        raise torch.OutOfMemoryError

    def bind(num_blocks: dict[str, int]) -> None:
        raise CapacityError("lower serve.gpu_memory_utilization")

    with pytest.raises(CapacityError, match=advice):
        tune(model, graph, tmp_path, 8, SilentProgress(), lambda line: None, capture)
    monkeypatch.setattr(model, "bind", bind)
    with pytest.raises(CapacityError, match=advice):
        tune(model, graph, tmp_path, 8, SilentProgress(), lambda line: None, Steps(model).capture)


@pytest.mark.slow
def test_buckets_wholly_above_the_rows_of_a_step_are_left_out(opened: Any, tmp_path: Path):
    model, graph = opened
    tune(model, graph, tmp_path, 1, SilentProgress(), lambda line: None, Steps(model).capture)
    assert {key.split()[0] for key in tuned.read("Test GPU", tmp_path)["linear"]} == {"1"}


@pytest.mark.slow
def test_what_was_found_before_an_interruption_is_kept(opened: Any, tmp_path: Path):
    model, graph = opened
    steps = Steps(model)

    def capture(run: Callable[[], object]) -> Callable[[], float]:
        if steps.num_captured == 7:  # one at the start, three for each matmul
            raise KeyboardInterrupt
        return steps.capture(run)

    with pytest.raises(KeyboardInterrupt):
        tune(model, graph, tmp_path, 2, SilentProgress(), lambda line: None, capture)
    first = linear_tune.matmuls_of(graph)[0]
    assert next(iter(tuned.read("Test GPU", tmp_path)["linear"])) == f"1 {first.out} {first.inner} {first.gates}"
    known = len(tuned.read("Test GPU", tmp_path)["linear"])
    shown = Shown()
    tune(model, graph, tmp_path, 1, shown, lambda line: None, Steps(model).capture)
    assert len(shown.tasks) == 5 - known < 5, "only those that are left"


@pytest.mark.slow
def test_a_folder_that_takes_nothing_is_logged_once_and_what_was_found_is_used(opened: Any, tmp_path: Path):
    model, graph = opened
    (tmp_path / "tuned").write_text("a file in the way")
    lines: list[str] = []
    tune(model, graph, tmp_path, 1, SilentProgress(), lines.append, Steps(model).capture)
    assert sum("takes no file" in line for line in lines) == 1
    assert used(model, graph, 1) == FAST


def test_a_start_uses_what_was_found_here_and_nothing_else_where_nothing_was(opened: Any, tmp_path: Path):
    model, graph = opened
    out, inner, gates, *_ = linear_tune.matmuls_of(graph)[0]
    use_measured(model, tmp_path, pytest.fail)
    assert model._bindings.kernels == {}
    tuned.save("Test GPU", tmp_path, "linear", {f"8 {out} {inner} {gates}": ["matrix", 64, 128, 1, 2]})
    use_measured(model, tmp_path, pytest.fail)
    assert used(model, graph, 2) == SLOW
    launched: list[Matrix] = []
    multiply = matrix.multiply_matrix
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(linear, "multiply_matrix", lambda *args: launched.append(args[-1]) or multiply(*args))
        model.decode(torch.tensor([0, 1], dtype=torch.int32))
    assert launched.count(SLOW) == 1, "the matmul that was measured"


def test_a_model_without_such_gemms_is_logged(opened: Any, tmp_path: Path):
    model, _ = opened
    lines: list[str] = []
    tune(model, Graph(), tmp_path, 2, SilentProgress(), lines.append, Steps(model).capture)
    assert lines == ["tune=true finds no linears to tune in this model on Test GPU: nothing is measured"]


@pytest.mark.slow
def test_gemms_of_experts_are_measured_besides_linears(
    checkpoints: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    given = {**FIELDS, "model.layers": 1, "dtype": "fp16"}
    graph = compile_graph(
        load(engine_overrides(str(checkpoints("mixtral")), given)),
        target=Target("cuda", frozenset({"nvidia", "sm_90"})),
    )
    bindings = Bindings(weights.load_dummy(graph.recipes(), seed=0))
    model = Model(graph, bindings, 4, StepLimits(8, 64, 32), device="cpu", backend="triton")
    model.bind(dict.fromkeys(model.kinds, 2))
    slow, fast = Tiles(16, 32, 32, 4, 1), Tiles(32, 32, 32, 4, 1)
    monkeypatch.setattr(grouped_tune.ExpertsTuner, "candidates", lambda *_: [slow, fast])
    tuners = [linear_tune.LinearTuner(model.device), grouped_tune.ExpertsTuner(model.device)]
    model.limits = StepLimits(8, 8, 32)

    def capture(run: Callable[[], object]) -> Callable[[], float]:
        trial = model.kernels[ops.experts, "triton"].__self__._parameters  # type: ignore[attr-defined]
        chosen = [*trial.chosen.values()]
        return lambda: 1e-3 * 0.9 ** chosen.count(fast) * 1.1 ** chosen.count(slow)

    lines: list[str] = []
    tuning.use_measured(model, tuners, tmp_path, lines.append)
    linears = tuners[0].kernels(tiles.find)
    model.use(linears)
    tuning.tune(model, tuners[1], tmp_path, SilentProgress(), lines.append, capture)
    written = json.loads((tmp_path / "tuned" / f"{GPU.name.lower().replace(' ', '_')}.json").read_text())["experts"]
    assert set(written) == {f"{rows} 8x{shape}" for rows in (2, 16) for shape in ("160 48 2", "48 80 1")}
    assert written["16 8x160 48 2"] == written["16 8x48 80 1"] == ["tiles", *fast]
    assert all(model.kernels[key] is kernel for key, kernel in linears.items()), "linears keep their parameters"
    find = model.kernels[ops.experts, "triton"].__self__._parameters  # type: ignore[attr-defined]
    assert find(grouped_tiles.Shape(11, 8, 160, 48, 2, 2, PLAIN), GPU) == fast
    tuning.tune(model, tuners[1], tmp_path, SilentProgress(), lines.append, capture)
    assert lines[-1] == "tune=true knows all 2 matmuls of experts of this model on Test GPU: nothing is measured"


def test_a_start_reads_the_cache_folder_and_measures_where_it_is_asked_to(
    opened: Any, checkpoints: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    model, _ = opened
    asked: list[Path] = []
    monkeypatch.setattr("atom.assemble.runner.tune", lambda model, tuner, cache, *_, **__: asked.append(cache))

    def start(**fields: Any) -> str:
        given = {**FIELDS, "level": 2, "cache": str(tmp_path), **fields}
        config = load(engine_overrides(str(checkpoints("qwen3")), given))
        use_parameters(model, config, SilentProgress(), tuning.single_rank)
        return capsys.readouterr().err

    assert start() == "" and model._bindings.kernels == {} and asked == []
    assert start(tune=True) == "" and asked == [tmp_path]
    file = tuned.save("Test GPU", tmp_path, "linear", {"1 2 3 1": ["library"]})
    assert start() == "" and model._bindings.kernels
    file.write_text("{")
    assert start() == f"atom-run: {file}: it is damaged, ignored\n"


def test_steps_with_drafts_are_measured_kept_and_known_the_next_time(
    checkpoints: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A step of 1 ms with 0.1 ms more for each draft and sequence, which is taken as it is on a GPU."""
    folder = checkpoints("qwen3")
    fields = {"dtype": "fp32", "device": "cpu", "level": 1, "max_num_seqs": 12, "max_model_len": 64}
    engine = LLMEngine(str(folder), method="draft", draft_model=str(folder), num_speculative_tokens=2, **fields)
    model, tuner, lines, taken = engine._engine.runner.model, Mock(gpu="Test GPU"), list[str](), list[tuple[int, int]]()
    prompts, params = [[1, 2, 3, 4], [5, 6]], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    expected = [answer["token_ids"] for answer in engine.generate(prompts, params)]
    before = {kv.kind: len(cache) for kv, cache in model.caches.items()}

    def capture(run: Any) -> Callable[[], float]:
        for _ in range(2):
            run()
        taken.append((len(run.args[1]), run.args[2]))
        return lambda: 1e-3 + 1e-4 * taken[-1][0] * taken[-1][1]

    table = tuning.tune_drafts(model, tuner, tmp_path, "ab" * 32, lines.append, capture)
    assert taken == [(size, count) for size in (1, 8, 12) for count in (0, 1, 2)], "12 rows in place of 16"
    assert table.times == {1: [1000, 1100, 1200], 8: [1000, 1800, 2600], 16: [1000, 2200, 3400]}
    assert lines == ["drafts of a sequence, at most, by sequences of a step, as measured: 2 up to 1, 2 up to 8, "
                     "0 up to 16; above none"]  # fmt: skip
    written = json.loads((tmp_path / "tuned" / "test_gpu.json").read_text())
    assert written["drafts"] == {f"{size} {'ab' * 8}": table.times[size] for size in (1, 8)}
    assert model.state.lengths.tolist() == [1] * 13 and not model.tables.any()
    assert {kv.kind: len(cache) for kv, cache in model.caches.items()} == before
    assert [answer["token_ids"] for answer in engine.generate(prompts, params)] == expected
    tuning.tune_drafts(model, tuner, tmp_path, "ab" * 32, lines.append, capture)
    assert taken[9:] == [(12, 0), (12, 1), (12, 2)], "what was not kept"
    assert tuning.use_measured_drafts(model, tuner, tmp_path, "ab" * 32, lines.append) is None
    model.limits = StepLimits(8, 64, 64)
    known = tuning.use_measured_drafts(model, tuner, tmp_path, "ab" * 32, lines.append)
    assert known is not None and known.times == {size: table.times[size] for size in (1, 8)}
    assert tuning.use_measured_drafts(model, tuner, tmp_path, "cd" * 32, lines.append) is None
    graphs = Graphs(model)
    graphs._sizes = [1, 4, 8]
    model.limits = StepLimits(8, 64, 64, draft_table=known)
    assert graphs._find_draft_sizes() == [(size, count) for size in (1, 4, 8) for count in (1, 2)]
    engine.close()
