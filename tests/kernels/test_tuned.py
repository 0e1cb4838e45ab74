"""Measured parameters: every file can be used as it stands, and a user's own goes before what comes with atom."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import triton
from kernels.triton.linear.test_tune import STYLES

import atom
from atom.cache.files import Unfit
from atom.kernels import tuned
from atom.kernels.triton.gpu import Gpu
from atom.kernels.triton.linear import shuffled, tiles
from atom.kernels.triton.linear.tiles import Shape
from atom.kernels.triton.linear.tune import candidates

FOLDER = Path(tuned.__file__).parent
H200 = Gpu(132, 227 << 10, (9, 0), "NVIDIA H200")


def test_what_was_measured_goes_before_the_rule_and_a_gpu_nobody_has_measured_has_none():
    measured = json.loads((FOLDER / "nvidia_h200.json").read_text())["linear"]["8 4096 4096 1"]
    assert tiles.find(Shape(5, 4096, 4096), H200) == tiles.Matrix(*measured[1:])
    assert tiles.find(Shape(5, 4096, 4096), H200._replace(name="Other GPU")) == tiles.choose(Shape(5, 4096, 4096), H200)
    assert tiles.find(Shape(1, 4096, 4096, element_size=4), H200) == tiles.choose(
        Shape(1, 4096, 4096, element_size=4), H200
    )  # fp32 was not measured
    assert tuned.parameters("Other GPU", "linear", "1 4096 4096 1") is None
    assert tuned.parameters("NVIDIA H200", "linear", "1 3 3 1") is None


def test_more_than_32_rows_are_the_librarys_where_nobody_has_measured():
    other = H200._replace(name="Other GPU")
    for rows in (33, 64, 65):
        assert isinstance(tiles.find(Shape(rows, 4096, 1024), H200), tiles.Matrix)
        assert tiles.find(Shape(rows, 4096, 1024), other) is None
    assert isinstance(tiles.find(Shape(32, 4096, 1024), other), tiles.Matrix)
    assert tiles.find(Shape(33, 6144, 4096), H200) is None, "measured, and the library was the fastest"
    assert tiles.find(Shape(65, 4096, 4096), H200) is None


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.json")), ids=lambda file: file.stem)
def test_every_entry_is_of_a_product_that_the_kernels_take(file: Path):
    tables = json.loads(file.read_text())
    assert tables and set(tables) <= set(tuned.FITS)
    for table, entries in tables.items():
        assert entries and all(tuned.FITS[table](key, entry) for key, entry in entries.items())
    for key, entry in tables.get("linear", {}).items():
        *sizes, name = [*key.split(" ", 4), ""][:5]
        shape = Shape(*map(int, sizes), encoding=STYLES[name])
        found = tiles.find(shape, H200)
        assert tiles.to_entry(found)[: len(entry)] == entry
        assert not isinstance(found, tiles.Vector) or shape.rows == 1
        if isinstance(found, shuffled.Wgmma):
            ring = found.stages * found.boxes * shuffled.box_bytes(found.block_rows, shape.encoding)
            assert ring <= H200.shared_memory - shuffled.UNUSED_MEMORY
            columns = found.boxes * shuffled.BOX * 8 // shape.encoding.bits
            assert columns % (shape.encoding.columns or 1) == 0, "a stage has whole blocks"


VERSIONS = {"atom": atom.__version__, "triton": triton.__version__}
OWN = {"versions": VERSIONS, "linear": {"8 4096 4096 1": ["matrix", 16, 16, 1, 2], "8 3 3 1": ["library"]}}


def write(cache: Path, content: str, name: str = "nvidia_h200.json") -> Path:
    """A file of a user's own."""
    path = cache / "tuned" / name
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.write_text(content)
    path.chmod(0o600)
    return path


def test_a_user_s_own_file_goes_before_what_comes_with_atom(tmp_path: Path):
    write(tmp_path, json.dumps(OWN))
    packaged = json.loads((FOLDER / "nvidia_h200.json").read_text())["linear"]
    found = tuned.read("NVIDIA H200", tmp_path, pytest.fail)["linear"]
    assert found == {**packaged, **OWN["linear"]} != packaged
    find = tiles.finder(found)
    assert find(Shape(5, 4096, 4096), H200) == tiles.Matrix(16, 16, 1, 2)
    assert find(Shape(5, 3, 3), H200) is None
    assert find(Shape(5, 4096, 4096, element_size=4), H200) == tiles.choose(Shape(5, 4096, 4096, element_size=4), H200)
    assert tuned.read("Other GPU", tmp_path, pytest.fail) == {"linear": {}, "experts": {}, "drafts": {}}


def test_what_is_found_is_added_and_only_the_user_can_read_the_file(tmp_path: Path):
    cache = tmp_path / "not there yet"
    assert tuned.read_own("My GPU", cache, pytest.fail) == {}
    path = tuned.save("My GPU", cache, "linear", {"1 2 3 1": ["library"], "1 4 4 1": ["vector", 2, 4, 2, 1]})
    assert path == cache / "tuned" / "my_gpu.json" and path.stat().st_mode & 0o777 == 0o600
    assert (cache.stat().st_mode | path.parent.stat().st_mode) & 0o777 == 0o700
    tuned.save("My GPU", cache, "linear", {"1 4 4 1": ["library"]})
    assert tuned.read_own("My GPU", cache, pytest.fail) == {"linear": {"1 2 3 1": ["library"], "1 4 4 1": ["library"]}}
    assert json.loads(path.read_text())["versions"] == VERSIONS
    assert '    "1 2 3 1": ["library"],' in path.read_text().splitlines(), "an entry a line"
    assert os.listdir(path.parent) == ["my_gpu.json"]
    assert (cache / "locks").stat().st_mode & 0o777 == 0o700


def test_what_another_machine_found_is_taken_in_where_nobody_has_measured(tmp_path: Path):
    first, second = tmp_path / "first", tmp_path / "second"
    tuned.save("My GPU", first, "linear", {"1 2 3 1": ["library"], "1 4 4 1": ["library"]})
    tuned.save("Other GPU", first, "linear", {"8 2 3 1": ["library"]})
    tuned.save("My GPU", second, "linear", {"1 4 4 1": ["vector", 2, 4, 2, 1]})
    found = tuned.read_all(first, pytest.fail)
    assert found.keys() == {"my_gpu", "other_gpu"} and tuned.read_all(tmp_path / "none", pytest.fail) == {}
    assert tuned.merge(second, found) == {"my_gpu": 1, "other_gpu": 1}
    mine = {"linear": {"1 4 4 1": ["vector", 2, 4, 2, 1], "1 2 3 1": ["library"]}}
    assert tuned.read_all(second, pytest.fail) == {"my_gpu": mine, "other_gpu": found["other_gpu"]}
    assert tuned.merge(second, found) == {}, "twice is once"


@pytest.mark.parametrize(
    "entries",
    [
        {"../../evil": {"linear": {"1 2 3 1": ["library"]}}},
        {"": {"linear": {"1 2 3 1": ["library"]}}},
        {"a" * 300: {"linear": {"1 2 3 1": ["library"]}}},
        {"gpu": {"linear": {"1 2 3 1": ["rm", "-rf"], "nonsense": ["library"]}}},
        {"gpu": {"linear": [1]}},
        {"gpu": {"versions": {"atom": "1"}, "other": {"1 2 3 1": ["library"]}}},
        {"gpu": 7},
    ],
)
def test_what_is_no_measurement_is_not_taken_in(entries: dict[str, object], tmp_path: Path):
    cache = tmp_path / "cache"
    assert tuned.merge(cache, entries) == {}
    assert not cache.exists() and os.listdir(tmp_path) == []


def test_of_what_several_add_at_once_nothing_is_lost(tmp_path: Path):
    keys = [f"1 {out} 3 1" for out in range(1, 33)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: tuned.save("My GPU", tmp_path, "linear", {key: ["library"]}), keys))
    assert sorted(tuned.read_own("My GPU", tmp_path, pytest.fail)["linear"]) == sorted(keys)


def test_what_is_found_is_kept_where_there_can_be_no_locks(tmp_path: Path):
    (tmp_path / "locks").write_text("a file in the way")
    tuned.save("My GPU", tmp_path, "linear", {"1 2 3 1": ["library"]})
    assert tuned.read_own("My GPU", tmp_path, pytest.fail) == {"linear": {"1 2 3 1": ["library"]}}


def make_link(path: Path) -> str:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))
    return f"{path} is no plain file, ignored"


def open_to_others(path: Path) -> str:
    path.chmod(0o622)
    return f"{path} is writable by others (chmod go-w would mend it, if you trust what is there), ignored"


def open_folder(path: Path) -> str:
    path.parent.chmod(0o777)
    return f"{path.parent} is writable by others (chmod go-w would mend it, if you trust what is there), ignored"


@pytest.mark.parametrize("spoil", [make_link, open_to_others, open_folder])
def test_a_file_that_others_can_have_written_is_ignored_with_a_line(spoil: Callable[[Path], str], tmp_path: Path):
    line, lines = spoil(write(tmp_path, json.dumps(OWN))), []
    assert tuned.read("NVIDIA H200", tmp_path, lines.append) == tuned.read("NVIDIA H200", tmp_path / "none")
    assert lines == [line]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[1]",
        "\xff",
        "[" * 100_000,
        '{"linear": []}',
        '{"versions": 7}',
    ],
)
def test_a_damaged_file_is_ignored_with_a_line_and_written_anew(content: str, tmp_path: Path):
    path, lines = write(tmp_path, content), []
    assert tuned.read_own("NVIDIA H200", tmp_path, lines.append) == {}
    assert lines == [f"{path}: it is damaged, ignored"]
    tuned.save("NVIDIA H200", tmp_path, "linear", {"8 3 3 1": ["library"]})
    assert tuned.read_own("NVIDIA H200", tmp_path, pytest.fail) == {"linear": {"8 3 3 1": ["library"]}}


def test_nothing_is_kept_where_others_can_write(tmp_path: Path):
    path = write(tmp_path, json.dumps(OWN))
    path.parent.chmod(0o777)
    with pytest.raises(Unfit, match="is writable by others"):
        tuned.save("NVIDIA H200", tmp_path, "linear", {"8 3 3 1": ["library"]})
    assert json.loads(path.read_text()) == OWN


@pytest.mark.parametrize("versions", [None, {}, {**VERSIONS, "atom": "0.0.1"}, {**VERSIONS, "triton": "2.0.0"}])
def test_what_other_versions_measured_is_ignored_with_a_line_and_written_anew(
    versions: dict[str, str] | None, tmp_path: Path
):
    others = {"linear": OWN["linear"]} if versions is None else {**OWN, "versions": versions}
    path, lines = write(tmp_path, json.dumps(others)), []
    assert tuned.read_own("NVIDIA H200", tmp_path, lines.append) == {}
    assert lines == [f"{path}: it was measured with another atom or Triton (run tune=true again), ignored"]
    tuned.save("NVIDIA H200", tmp_path, "linear", {"8 5 5 1": ["library"]})
    assert tuned.read_own("NVIDIA H200", tmp_path, pytest.fail) == {"linear": {"8 5 5 1": ["library"]}}


GOOD = {"1 2 3 1": ["vector", 2, 4, 2, 1], "8 2 3 2": ["matrix", 16, 16, 1, 2, 1, 1, 0, 8]}


@pytest.mark.parametrize(
    ("key", "entry"),
    [
        ("not a key", ["library"]),
        ("8 2 3", ["library"]),
        ("8 2 3 1 ", ["library"]),
        ("7 2 3 1", ["library"]),
        ("512 2 3 1", ["library"]),
        ("8 0 3 1", ["library"]),
        ("8 2 -3 1", ["library"]),
        ("8 2 3 3", ["library"]),
        ("8 2 4 1", []),
        ("8 2 4 1", 7),
        ("8 2 4 1", "library"),
        ("8 2 4 1", {"library": 3}),
        ("8 2 4 1", [["library"]]),
        ("8 2 4 1", ["other"]),
        ("8 2 4 1", ["library", 1]),
        ("8 2 4 1", ["vector", 8, 8, 3, 1]),
        ("1 2 4 1", ["vector", 8, 8, 3]),
        ("1 2 4 1", ["vector", 3, 8, 3, 1]),
        ("1 2 4 1", ["vector", 8, 3, 3, 1]),
        ("1 2 4 1", ["vector", 8, 8, 300, 1]),
        ("1 2 4 1", ["vector", 8, 8, 3, 0]),
        ("1 2 4 1", ["vector", 8, 8, 3, True]),
        ("1 2 4 1", ["vector", 8, 8, 3.0, 1]),
        ("1 2 4 1", ["vector", 8, 8, 3, 1, 1]),
        ("1 2 4 2", ["vector", 1, 8, 3, 1]),
        ("8 2 4 1", ["matrix", 0, 0, 0, 0]),
        ("8 2 4 1", ["matrix", 48, 64, 4, 3]),
        ("8 2 4 1", ["matrix", 64, 64, 4, 3, 3]),
        ("8 2 4 1", ["matrix", 64, 64, 4, 3, 1, 0]),
        ("8 2 4 1", ["matrix", 64, 64, 4, 3, 1, 1, 3]),
        ("8 2 4 1", ["matrix", 64, 64, 4, 3, 1, 1, 0, 100]),
    ],
)
def test_an_entry_that_no_kernel_takes_is_ignored_by_itself_with_a_line_and_kept(
    key: str, entry: object, tmp_path: Path
):
    content = {"versions": VERSIONS, "attention": {"any": {"form": 1}}, "linear": {key: entry, **GOOD}}
    path, lines = write(tmp_path, json.dumps(content)), []
    assert tuned.read_own("NVIDIA H200", tmp_path, lines.append) == {"linear": GOOD}
    assert lines == [f"{path}: entries that these kernels do not take are ignored: 1"]
    tuned.save("NVIDIA H200", tmp_path, "linear", {"8 5 5 1": ["library"]})
    assert json.loads(path.read_text()) == {**content, "linear": {key: entry, **GOOD, "8 5 5 1": ["library"]}}


@pytest.mark.parametrize("gates", [1, 2])
@pytest.mark.parametrize("rows", tuned.BUCKETS)
def test_whatever_a_search_can_find_is_read_again(rows: int, gates: int, tmp_path: Path):
    for out, inner in ((64, 32), (4096, 16), (6144, 4096), (151936, 1024), (4096, 12288)):
        key = tiles.key_of(Shape(rows, out, inner, gates))
        options = [
            tiles.choose(Shape(rows, out, inner, gates), H200),
            *candidates(Shape(rows, out, inner, gates), H200),
        ]
        for option in set(options):
            entry = tiles.to_entry(option)
            path = write(tmp_path / "each", json.dumps({"versions": VERSIONS, "linear": {key: entry}}))
            assert tuned.read_own("NVIDIA H200", tmp_path / "each", pytest.fail) == {"linear": {key: entry}}
            path.unlink()
