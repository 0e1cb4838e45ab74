from __future__ import annotations

import json
import re
import struct
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from atom.benchmarks.compare import main


def result(output: float, ttft: float, tpot: float | None, hardware: str | None = "8 × GPU X", **more: Any) -> str:
    numbers = {"output_throughput": output, "median_ttft_ms": ttft, "median_tpot_ms": tpot}
    return json.dumps(numbers | ({"hardware": hardware} if hardware else {}) | more)


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two folders, before and after, with two results in common; it is the current folder."""
    monkeypatch.chdir(tmp_path)
    for folder in ("before", "after"):
        (tmp_path / folder).mkdir()
    (tmp_path / "before" / "old_tp8_isl1024_osl1024_conc16.json").write_text(result(2000.0, 80.0, 10.0))
    (tmp_path / "before" / "old_tp8_isl1024_osl1024_conc4.json").write_text(result(800.0, 50.0, 5.0))
    (tmp_path / "before" / "old_tp4_isl1024_osl1024_conc4.json").write_text(result(1.0, 1.0, 1.0))
    (tmp_path / "after" / "new_er_tp8_isl1024_osl1024_conc16.json").write_text(result(2500.0, 60.0, 8.0))
    (tmp_path / "after" / "new_er_tp8_isl1024_osl1024_conc4.json").write_text(result(800.0, 50.0, 5.0))
    (tmp_path / "after" / "notes.json").write_text('{"author": "me"}')
    return tmp_path


def test_the_table_of_ratios(folders: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["before", "after"]) == 0
    shown = capsys.readouterr()
    head, *rows = [re.split(r"\s{2,}", line) for line in shown.out.splitlines()]
    assert head == ["config", "output tok/s before", "after", "ratio", "median TTFT ms before", "after", "ratio",
                    "median TPOT ms before", "after", "ratio"]  # fmt: skip
    assert rows == [
        ["tp8_isl1024_osl1024_conc4", "800.0", "800.0", "1.000", "50.0", "50.0", "1.000", "5.0", "5.0", "1.000"],
        ["tp8_isl1024_osl1024_conc16", "2000.0", "2500.0", "1.250", "80.0", "60.0", "0.750", "10.0", "8.0", "0.800"],
    ]
    assert "only in before: tp4_isl1024_osl1024_conc4" in shown.err


class Page(HTMLParser):
    """The tags, links and texts of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())


def test_a_png_and_a_page_that_needs_nothing_from_outside(folders: Path):
    assert main(["before", "after", "--output", "plots/both"]) == 0
    png = (folders / "plots" / "both.png").read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", png[16:24])
    assert width > 500 and height > 400
    text = (folders / "plots" / "both.html").read_text()
    page = Page(text)
    assert {"svg", "table"} <= set(page.tags)
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert page.links and all(link.startswith("#") for link in page.links)
    assert not re.findall(r"""url\((?!#|['"]?#)|@import""", text)
    assert {"1.250", "before tp8", "after tp8", "c4", "c16", "input 1024, output 1024"} <= set(page.texts)
    assert "interactivity: tokens/s a user" in page.texts


def test_throughput_is_drawn_by_gpu_against_interactivity(folders: Path, monkeypatch: pytest.MonkeyPatch):
    from atom.benchmarks import compare

    drawn: list[Any] = []
    monkeypatch.setattr(compare, "draw_png", lambda series, path, unit: drawn.extend(series))
    main(["before", "after"])
    assert [(each.panel, each.label, each.points) for each in drawn] == [
        ("input 1024, output 1024", "before tp8", ((200.0, 100.0, "c4"), (100.0, 250.0, "c16"))),  # 1000/tpot, out/8
        ("input 1024, output 1024", "after tp8", ((200.0, 100.0, "c4"), (125.0, 312.5, "c16"))),
    ]


def test_one_set_has_no_ratios_and_a_curve_by_what_was_under_way(folders: Path, capsys: pytest.CaptureFixture[str]):
    for at, tpot in ((16, 10.0), (4, 5.0)):
        turns = {"median_first_turn_ttft_ms": 30.0 * at, "max_concurrency": at}
        (folders / f"vllm-infqps-concurrency{at}-m.json").write_text(result(100.0 * at, 20.0, tpot, **turns))
    assert main([".", "--output", "curve"]) == 0
    head, *rows = [re.split(r"\s{2,}", line) for line in capsys.readouterr().out.splitlines()]
    assert head == ["config", "output tok/s", "median TTFT ms", "median TPOT ms", "first turn TTFT ms"]
    assert rows[0] == ["vllm-infqps-concurrency16-m", "1600.0", "20.0", "10.0", "480.0"]
    texts = Page((folders / "curve.html").read_text()).texts
    assert texts.index("c4") < texts.index("c16"), "in the order of the line"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hardware", "note"),
    [
        (
            "8 × GPU Y",
            "The hardware differs, so the ratios compare machines too: before on 8 × GPU X; after on 8 × GPU Y.",
        ),
        (None, "The results do not all say what hardware they ran on: the ratios may compare machines."),
    ],
)
def test_other_hardware_is_reported(hardware: str | None, note: str, folders: Path, capsys: pytest.CaptureFixture[str]):
    path = folders / "after" / "new_er_tp8_isl1024_osl1024_conc16.json"
    main(["before", "after"])
    assert "hardware" not in capsys.readouterr().out
    for path in (folders / "after").glob("new*.json"):
        path.write_text(result(2500.0, 60.0, 8.0, hardware))
    main(["before", "after"])
    assert capsys.readouterr().out.splitlines()[-1] == note
    assert note in Page((folders / "compare.html").read_text()).texts


def test_cached_prompts_are_reported(folders: Path, capsys: pytest.CaptureFixture[str]):
    path = folders / "after" / "new_er_tp8_isl1024_osl1024_conc16.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "total_cached_tokens": 192}))
    main(["before", "after"])
    note = "Prompt tokens that came from a prefix cache: 192 of after tp8_isl1024_osl1024_conc16."
    assert note in capsys.readouterr().out.splitlines()


def test_failed_requests_are_reported(folders: Path, capsys: pytest.CaptureFixture[str]):
    for folder, prefix, failed in (("before", "old", 3), ("after", "new_er", 0)):
        path = folders / folder / f"{prefix}_tp8_isl1024_osl1024_conc16.json"
        path.write_text(result(2500.0, 60.0, 8.0, failed=failed))
    main(["before", "after"])
    note = "Requests failed, and the numbers leave them out: 3 of before tp8_isl1024_osl1024_conc16."
    assert capsys.readouterr().out.splitlines()[-1] == note
    assert note in Page((folders / "compare.html").read_text()).texts


@pytest.mark.slow
def test_what_is_not_drawn_is_reported(folders: Path, capsys: pytest.CaptureFixture[str]):
    path = folders / "after" / "new_er_tp8_isl1024_osl1024_conc4.json"
    path.write_text(result(800.0, 50.0, None, "GPU Y"))
    main(["before", "after"])
    note = "Not drawn, since they have no median TPOT: after tp8_isl1024_osl1024_conc4."
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2] == note and lines[-1].startswith("The hardware differs")
    assert {note, lines[-1]} <= set(Page((folders / "compare.html").read_text()).texts)


def test_two_files_are_compared_whatever_their_names(folders: Path, capsys: pytest.CaptureFixture[str]):
    (folders / "a.json").write_text(result(100.0, 10.0, None))
    (folders / "b.json").write_text(result(50.0, 10.0, 4.0))
    assert main(["a.json", "b.json"]) == 0
    row, note = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert note[-4:] == ["median", "TPOT:", "a", "a."]
    assert row == ["a", "100.0", "50.0", "0.500", "10.0", "10.0", "1.000", "-", "4.0", "-"]


@pytest.mark.slow
def test_names_that_benchmark_serving_makes_are_matched_without_their_dates(folders: Path, capsys: Any):
    for folder, date, output in (("before", "20261126-224003", 100.0), ("after", "20261127-080000", 150.0)):
        (folders / folder / f"base-4.0qps-concurrency2-m-{date}.json").write_text(result(output, 1.0, 1.0))
    assert main(["before", "after"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["base-4.0qps-concurrency2-m", "100.0", "150.0", "1.500"] in [row[:4] for row in rows]


@pytest.mark.slow
def test_prefixes_in_one_folder_are_kept_apart(folders: Path, capsys: pytest.CaptureFixture[str]):
    for prefix, output in (("x", 100.0), ("y", 300.0)):
        (folders / f"{prefix}_tp1_isl8_osl8_conc2.json").write_text(result(output, 1.0, 1.0))
    assert main(["x", "y"]) == 0
    assert "100.0  300.0  3.000" in capsys.readouterr().out
    assert main([".", "before"]) == 2
    err = capsys.readouterr().err
    assert (
        "compare: x_tp1_isl8_osl8_conc2.json and y_tp1_isl8_osl8_conc2.json are both tp1_isl8_osl8_conc2: name" in err
    )


def test_folders_of_the_same_name_are_kept_apart(folders: Path, capsys: pytest.CaptureFixture[str]):
    (folders / "other").mkdir()
    (folders / "other" / "before").mkdir()
    (folders / "other" / "before" / "z_tp8_isl1024_osl1024_conc4.json").write_text(result(1.0, 1.0, 1.0))
    assert main(["before", "other/before"]) == 0
    assert "output tok/s before  other/before" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["before", "nowhere"], "compare: nowhere: no such file, folder or prefix with results"),
        (["before", "half.json"], "compare: half.json is no JSON file"),
        (["before", "after/notes.json"], "compare: after/notes.json is not a result of benchmark_serving"),
        (["before", "lone"], "compare: before and lone have no result in common"),
        ([], "compare: the following arguments are required: A"),
        (["before", "after", "--nope"], "compare: unrecognized arguments: --nope"),
    ],
)
def test_mistakes_are_one_line(argv: list[str], line: str, folders: Path, capsys: pytest.CaptureFixture[str]):
    (folders / "half.json").write_text('{"output_throughput": 5')
    (folders / "lone").mkdir()
    (folders / "lone" / "z_tp2_isl1_osl1_conc1.json").write_text(result(1.0, 1.0, 1.0))
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith(line) and err.count("\n") == 1
