from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from atom.benchmarks.benchmark_utils import UsageError
from atom.benchmarks.matrix import main, read_arguments

STUB = f"{sys.executable} {Path(__file__).with_name('stub_command.py')}"
DONE = {
    "failed": 0,
    "output_throughput": 100.0,
    "total_token_throughput": 200.0,
    "mean_ttft_ms": 7.0,
    "median_tpot_ms": 2.5,
}


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    """Of a matrix with a stub server and a model without a tokenizer."""
    model = tmp_path / "tiny"
    model.mkdir()
    return ["--model", str(model), "--result-dir", str(tmp_path / "results"), "--server-command", STUB,
            "--input-len", "16", "--output-len", "4", "--num-prompts-per-concurrency", "2", "--health-timeout", "30",
            "--bench-args", "--disable-tqdm --save-detailed"]  # fmt: skip


def put(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


def test_a_server_for_each_size_and_a_result_for_each_case(
    flags: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    results = tmp_path / "results"
    argv = [*flags, "--tp", "1", "2", "--concurrency", "1", "2", "1"]  # 1 is measured once
    half = put(results, "tiny_tp1_isl16_osl4_conc1.json", '{"output_throughput": 5')  # half written
    put(results, "tiny_tp1_isl16_osl4_conc2.json", '{"completed": 0}')  # no result
    kept = put(results, "tiny_tp2_isl16_osl4_conc2.json", json.dumps(DONE))
    assert main(argv) == 0
    shown = capfd.readouterr()
    assert sorted(each.name for each in results.iterdir()) == [
        "tiny_tp1_isl16_osl4_conc1.json",
        "tiny_tp1_isl16_osl4_conc2.json",
        "tiny_tp1_server.log",
        "tiny_tp2_isl16_osl4_conc1.json",
        "tiny_tp2_isl16_osl4_conc2.json",
        "tiny_tp2_server.log",
    ]
    assert json.loads(kept.read_text()) == DONE
    result = json.loads(half.read_text())
    assert (result["num_prompts"], result["max_concurrency"], result["tensor_parallel_size"]) == (2, 1, "1")
    assert all(12 <= each <= 16 for each in result["input_lens"])  # 16 × 0.8 and up
    result = json.loads((results / "tiny_tp1_isl16_osl4_conc2.json").read_text())
    assert (result["num_prompts"], result["completed"], result["max_concurrency"]) == (4, 4, 2)
    assert all(3 <= each <= 4 for each in result["output_lens"])
    assert (results / "tiny_tp2_server.log").read_text().startswith(f"serving {tmp_path / 'tiny'} at tp 2")
    assert "tiny_tp2_isl16_osl4_conc2: output=100.0 tok/s total=200.0 tok/s ttft=7.0 ms tpot=2.5 ms\n" in shown.out
    assert "tp2: 1 of 2 results are in" in shown.err and shown.err.count("starting ") == 2
    assert shown.err.count("python -m atom.benchmarks.benchmark_serving") == 3
    first, second, other_size = re.findall(r"--seed (\d+)", shown.err)
    assert first == other_size != second, "a server has none of a case's prompts in its prefix cache"

    assert main(argv) == 0
    assert "starting " not in capfd.readouterr().err


def test_conversations_are_measured_by_how_many_are_under_way_and_drawn(
    flags: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    argv = [*flags, "--concurrency", "2", "1", "--dataset-name", "multi-turn", "--plot"]
    more = "--disable-tqdm --save-detailed --multi-turn-turns 3 --multi-turn-shared-len 5"
    assert main([*argv, f"--bench-args={more}"]) == 0
    results, name = tmp_path / "results", "tiny-multi-turn_tp1_isl16_osl4_conc{}.json"
    first, second = (json.loads((results / name.format(at)).read_text()) for at in (1, 2))
    assert (first["num_prompts"], second["num_prompts"], second["completed"]) == (2, 4, 12)
    assert second["turns"] == [0, 1, 2] * 4 and 5 + 13 <= second["input_lens"][0] <= 5 + 16
    assert {"mean_first_turn_ttft_ms", "later_turns_interactivity"} <= second.keys()
    assert (results / "tiny-multi-turn.png").stat().st_size > 1000
    page = (results / "tiny-multi-turn.html").read_text()
    assert all(f">{each}<" in page for each in ("c1", "c2", "tiny-multi-turn tp1", "input 16, output 4"))
    table = capfd.readouterr().out
    assert "first turn TTFT ms" in table and " ratio" not in table


@pytest.mark.slow
def test_a_server_that_dies_is_reported_and_leaves_what_is_done(
    flags: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    argv = [*flags, "--concurrency", "1", "2", "4", "--server-args", "--mode dies"]  # at the second measurement
    assert main(argv) == 1
    assert [each.name for each in (tmp_path / "results").glob("*.json")] == ["tiny_tp1_isl16_osl4_conc1.json"]
    err = capfd.readouterr().err
    assert "tp1: the server ended with 7, 1 measurements were left; see" in err
    assert "tiny_tp1_isl16_osl4_conc2.json: benchmark_serving ended with 1" in err


@pytest.mark.slow
def test_a_measurement_that_fails_does_not_end_the_others(
    flags: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    assert main([*flags, "--concurrency", "1", "2", "--server-args", "--mode fails"]) == 1
    err = capfd.readouterr().err
    assert all(f"tiny_tp1_isl16_osl4_conc{at}.json: benchmark_serving ended with 1" in err for at in (1, 2))
    assert list((tmp_path / "results").glob("*.json")) == []


@pytest.mark.slow
def test_a_result_with_failed_requests_is_reported_and_measured_again(
    flags: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    put(tmp_path / "results", "tiny_tp1_isl16_osl4_conc1.json", json.dumps(DONE))
    name = "tiny_tp1_isl16_osl4_conc2.json"
    before = put(tmp_path / "results", name, json.dumps(DONE | {"failed": 4, "num_prompts": 4}))
    argv = [*flags, "--concurrency", "1", "2"]
    assert main([*argv, "--server-args", "--mode 'fails once'"]) == 1
    shown = capfd.readouterr()
    assert f"{name}: 1 of its requests failed; the next run measures it again" in shown.err
    assert "conc1.json: " not in shown.err.splitlines()[-1] and "failed=1" in shown.out
    assert json.loads(before.read_text())["completed"] == 3

    assert main(argv) == 0
    assert json.loads(before.read_text())["completed"] == 4
    assert "tp1: 1 of 2 results are in" in capfd.readouterr().err


@pytest.mark.slow
def test_a_measurement_that_hangs_is_given_up(flags: list[str], capfd: pytest.CaptureFixture[str]):
    assert main([*flags, "--concurrency", "1", "--server-args", "--mode hangs", "--run-timeout", "2"]) == 1
    assert "tiny_tp1_isl16_osl4_conc1.json: it took longer than 2 s (--run-timeout)" in capfd.readouterr().err


def test_a_server_that_does_not_start_is_reported_with_its_size(flags: list[str], capfd: pytest.CaptureFixture[str]):
    assert main([*flags, "--concurrency", "1", "--tp", "1", "2", "--server-args", "--mode 'dies at once'"]) == 1
    err = capfd.readouterr().err
    assert err.count("the server ended with 1 before it was ready: serving") == 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_stops_the_server_too(flags: list[str], tmp_path: Path, number: int, code: int):
    command = [
        sys.executable,
        "-m",
        "atom.benchmarks.matrix",
        *flags,
        "--concurrency",
        "1",
        "--server-args=--mode hangs",
    ]
    log = tmp_path / "results" / "tiny_tp1_server.log"
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as matrix:
        deadline = time.monotonic() + 120
        while not (log.exists() and log.read_text()) and time.monotonic() < deadline:
            time.sleep(0.02)
        (server,) = [
            int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit() and is_child(each, matrix.pid)
        ]
        matrix.send_signal(number)
        matrix.communicate(timeout=120)
    assert matrix.returncode == code
    assert not Path(f"/proc/{server}").exists()


def is_child(process: Path, parent: int) -> bool:
    try:
        is_stub = b"stub_command.py" in (process / "cmdline").read_bytes()
        return is_stub and int((process / "stat").read_text().rpartition(")")[2].split()[1]) == parent
    except OSError:
        return False


def test_flags_have_the_defaults_of_the_notes():
    args = read_arguments(["--model", "/models/big-1.5", "--tp", "8", "--input_len", "1024", "8192"])
    assert (args.tp, args.input_len, args.output_len, args.concurrency) == ([8], [1024, 8192], [1024], [4, 8, 16, 32])
    assert (args.num_prompts_per_concurrency, args.range_ratio, args.health_timeout, args.run_timeout) == (
        10,
        0.8,
        1200,
        7200,
    )
    assert (args.prefix, args.server_args, args.bench_args) == ("big-1.5", [], [])
    assert args.server_command.endswith(" -m atom.entrypoints.openai_server")


@pytest.mark.parametrize("text", ["--server-args=--level 1 --enforce-eager", "--server_args=--level 1 --enforce-eager"])
def test_flags_of_the_server_are_one_text(text: str):
    wanted = ["--level", "1", "--enforce-eager"]
    assert read_arguments(["--model", "m", text, "--tp", "2"]).server_args == wanted
    assert read_arguments(["--model", "m", *text.split("=", 1), "--tp", "2"]).server_args == wanted
    assert read_arguments(["--model", "m", "--bench-args", "--profile"]).bench_args == ["--profile"]


@pytest.mark.parametrize(
    ("argv", "mistake"),
    [
        (["--nope"], "unrecognized arguments: --nope; see python -m atom.benchmarks.matrix --help"),
        (["--tp", "0"], "argument --tp: 0 is less than 1"),
        (["--prefix", "a/b"], "--prefix a/b: it is part of a file's name"),
        (["--range-ratio", "2"], "--range-ratio 2.0: it is greater than 0 and at most 1"),
        (["--server-args", "'"], "--server-args or --bench-args: No closing quotation"),
    ],
)
def test_mistakes_are_named(argv: list[str], mistake: str):
    with pytest.raises(UsageError) as caught:
        read_arguments(["--model", "m", *argv])
    assert mistake in str(caught.value)


@pytest.mark.slow
def test_a_prefix_names_the_results_and_the_log(flags: list[str], tmp_path: Path):
    assert main([*flags, "--concurrency", "1", "--prefix", "mine"]) == 0
    names = sorted(each.name for each in (tmp_path / "results").iterdir())
    assert names == ["mine_tp1_isl16_osl4_conc1.json", "mine_tp1_server.log"]
