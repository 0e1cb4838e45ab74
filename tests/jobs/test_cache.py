"""`job=cache` as a user runs it: the table, the JSON, what goes and what stays, and what is refused."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atom.cache import Cache, key_of
from atom.cli import main
from atom.compiler.artifact import machine_ingredients, recipe_of
from atom.config.load import load
from atom.kernels import find_target, tuned
from atom.pieces import identity

ONE, TWO, MODEL = "ab" * 32, "cd" * 32, "012345" + "ab" * 29  # a key that is all digits at first stays a text


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    """Two pieces of 1 MiB and an artifact made of them."""
    cache = Cache(tmp_path / "cache")
    for key in (ONE, TWO):
        cache.publish("pieces", key, {"piece.so": bytes([key.encode()[0]]) * (1 << 20)}, {"name": f"piece {key[:2]}"})
    about = {"name": "llama [bold] on a CPU", "pieces": [ONE, TWO], "versions": {"torch": "2.11"}, "note": "a\x1b[31mb"}
    cache.publish("artifacts", MODEL, {"graph.py": b"def body(): ...\n"}, about)
    return cache


@pytest.fixture
def run(cache: Cache, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Exit code, stdout and stderr of `job=cache` with these overrides."""

    def run(*argv: str) -> tuple[int, str, str]:
        code = main(["job=cache", f"cache={cache.folder}", *argv])
        return (code, *capsys.readouterr())

    return run


def last_used(cache: Cache, key: str, days: float) -> None:
    (manifest,) = cache.folder.glob(f"*/{key}/manifest.json")
    os.utime(manifest, (time.time() - days * 86400,) * 2)


@pytest.fixture
def carry(tmp_path: Path, run: Any) -> Callable[..., Path]:
    """The bundle of a model and two pieces, made of what this machine is but for these changes of ingredients."""

    def carry(changes: dict[str, str] | None = None, **about: Any) -> Path:
        cache = Cache(tmp_path / "theirs")
        pieces = []
        for text in ("def piece(x0: fp32[A, 64]): ...", "def piece(x0: fp32[A, 32]): ..."):
            made_of = {name: (changes or {}).get(name, value) for name, value in identity(text).items()}
            pieces.append(key_of(made_of))
            described = {"name": f"piece {len(pieces)}", "text": text, "ingredients": made_of}
            cache.publish("pieces", pieces[-1], {"piece.so": bytes([len(pieces)]) * (1 << 20)}, described)
        made_of = {"model": "llama", "dtype": "fp32", **machine_ingredients(find_target("cpu")), **(changes or {})}
        about = {"name": "llama\x1b[31m", "ingredients": made_of, "recipe": ["dtype='fp32'"], "pieces": pieces, **about}
        files = {"graph.py": b"def body(): ...\n", "recipe.yaml": b"overrides: []\n"}
        cache.publish("artifacts", key_of(about["ingredients"]), files, about)
        code, out, err = run(f"cache={cache.folder}", f"job.export={tmp_path}/model.tar")
        assert (code, err) == (0, "") and out.splitlines()[-1] == f"exported 3 entries, 2.0 MiB to {tmp_path}/model.tar"
        return tmp_path / "model.tar"

    return carry


def keys(cache: Cache) -> set[str]:
    return {entry.key for entry in cache.entries()}


def test_the_table_has_a_line_for_each_entry_and_a_total(run: Any, cache: Cache):
    code, out, err = run()
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].split() == ["kind", "key", "what", "size", "age", "unused"]
    assert [line.split()[:2] for line in lines[1:4]] == [
        ["pieces", ONE[:12]],
        ["pieces", TWO[:12]],
        ["artifacts", MODEL[:12]],
    ]
    assert lines[1].split()[2:6] == ["piece", "ab", "1.0", "MiB"] and "llama [bold] on a CPU" in lines[3]
    assert lines[4] == f"3 entries, 2.0 MiB in {cache.folder}"


def test_an_empty_cache(run: Any, tmp_path: Path):
    code, out, err = run(f"cache={tmp_path}/none")
    assert (code, out, err) == (0, f"0 entries, 0 B in {tmp_path}/none\n", "")
    assert not (tmp_path / "none").exists()


def test_json_is_an_object_a_line(run: Any):
    _, out, _ = run("job.output=json")
    listed = [json.loads(line) for line in out.splitlines()]
    assert [each["key"] for each in listed] == [ONE, TWO, MODEL]
    assert listed[0]["files"] == {"piece.so": 1 << 20} and listed[2]["about"]["pieces"] == [ONE, TWO]
    assert set(listed[0]) == {"kind", "key", "about", "files", "size", "created", "used", "built_by", "fault"}


def test_a_damaged_entry_is_in_the_list(run: Any, cache: Cache):
    os.truncate(cache.folder / "pieces" / ONE / "piece.so", 5)
    code, out, _ = run()
    assert code == 0 and "not used: piece.so has 5 bytes instead of 1,048,576" in out


def test_an_entry_is_explained(run: Any):
    code, out, err = run("job.entry=012345")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == f"artifacts/{MODEL}"
    assert lines[1].startswith("built by ") and "@" in lines[1]
    assert lines[2:] == [
        "made of",
        "  name: llama [bold] on a CPU",
        "  pieces:",
        f"    - {ONE}",
        f"    - {TWO}",
        "  versions:",
        "    torch: 2.11",
        "  note: a\N{REPLACEMENT CHARACTER}[31mb",
        "1 file, " + lines[-2].partition(", ")[2],
        "  graph.py  16 B",
    ]
    assert json.loads(run(f"job.entry=pieces/{ONE}", "job.output=json")[1])["key"] == ONE


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["job.entry=ff"], "holds no such entry; job=cache lists all entries"),
        (
            ["job.entry=pieces"],
            "job.entry=pieces may be 2 entries (pieces/abababababab, pieces/cdcdcdcdcdcd): write more",
        ),
        (["job.prune=30"], "job.prune=30 is neither an age, as 30d, nor a size, as 2GiB; units: m, h, d, w for"),
        (["job.prune=30y"], "job.prune=30y is neither an age"),
        (["job.prune=-1d"], "job.prune=-1d is neither an age"),
        (["job.prune=1e9d"], "is neither an age"),
        (["job.prune=9999999999d"], "nothing is as old as that"),
        (["job.prune=30d", "job.verify=true"], "job.prune and job.verify are two jobs: do one after the other"),
        (["job.prune=30d", "job.entry=ab"], "job.prune takes no job.entry"),
        (["job.trust=true"], "job.trust is for job.import"),
        (["job.import=nope.tar"], "job.import=nope.tar: there is no such file"),
        (["job.export=x.tar", "job.entry=ab"], "holds no such entry"),
        (["job.export="], "job.export= names no file; write job.export=FILE"),
        (["job.import="], "job.import=: there is no such file"),
        (["job.prune="], "job.prune= is neither an age"),
    ],
)
def test_what_makes_no_sense_is_one_line(overrides: list[str], message: str, run: Any, cache: Cache):
    code, out, err = run(*overrides)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert err.startswith("atom-run: ConfigError: ") and message in err
    assert keys(cache) == {ONE, TWO, MODEL}


# upkeep


def test_prune_by_age_removes_what_was_unused_for_longer(run: Any, cache: Cache):
    last_used(cache, ONE, days=31)
    last_used(cache, TWO, days=29)
    code, out, err = run("job.prune=30d")
    assert (code, err) == (0, "")
    assert ONE[:12] in out and TWO[:12] not in out
    assert out.splitlines()[-1] == f"removed 1 entry, 1.0 MiB in {cache.folder}"
    assert keys(cache) == {TWO, MODEL}
    assert os.listdir(cache.folder / "pieces") == [TWO]
    assert run("job.prune=4w", "job.output=json")[1].count("\n") == 2 and keys(cache) == set(), (
        "both of its pieces went"
    )
    assert run("job.prune=0.5h")[1] == f"removed 0 entries, 0 B in {cache.folder}\n"


def test_prune_by_size_removes_the_least_recently_used_until_the_rest_fits(run: Any, cache: Cache):
    for key, days in ((MODEL, 4), (TWO, 3), (ONE, 2)):
        last_used(cache, key, days)
    assert run("job.prune=3MiB")[0] == 0 and keys(cache) == {ONE, TWO, MODEL}
    assert TWO[:12] in run("job.prune=2MiB")[1] and keys(cache) == {ONE, MODEL}
    run("job.prune=0.5MiB")
    assert keys(cache) == set(), "an artifact goes with the last of its pieces"


def test_prune_leaves_the_model_that_was_launched_last_whole(run: Any, tmp_path: Path):
    """A launch reads its artifact first, then the pieces; the older launch shares one of them."""
    cache, hour = Cache(tmp_path / "launched"), 1 / 24
    pieces, old, new = [f"{number:02}" * 16 for number in range(5)], "aa" * 16, "bb" * 16
    for key in pieces:
        cache.publish("pieces", key, {"piece.so": bytes(1 << 20)}, {"name": "piece"})
    for key, used in ((old, pieces[:3]), (new, pieces[2:])):
        cache.publish("artifacts", key, {"graph.py": b""}, {"name": "model", "pieces": used})
    for days, key, used in ((2, old, pieces[:3]), (1, new, pieces[2:])):
        for place, each in enumerate((key, *used)):
            last_used(cache, each, days - place * hour)
    run(f"cache={cache.folder}", "job.prune=3.5MiB")
    assert keys(cache) == {old, new, *pieces[2:]}, "its shared piece is of the last launch"
    run(f"cache={cache.folder}", "job.prune=3MiB")
    assert keys(cache) == {new, *pieces[3:]}, "and the older artifact, of which no piece was left"


def test_prune_by_age_takes_an_artifact_for_as_recent_as_its_pieces(run: Any, cache: Cache):
    for key, days in ((MODEL, 40), (ONE, 40), (TWO, 1)):
        last_used(cache, key, days)
    run("job.prune=30d")
    assert keys(cache) == {TWO, MODEL}


def test_a_hit_saves_an_entry_from_pruning_where_reads_are_noted(run: Any, cache: Cache):
    """relatime, the default of Linux: the first read after a day is noted."""
    last_used(cache, ONE, days=31)
    before = (cache.folder / "pieces" / ONE / "manifest.json").stat().st_atime
    run()
    assert (cache.folder / "pieces" / ONE / "manifest.json").stat().st_atime == before, "looking is no use"
    cache.find("pieces", ONE)
    if (cache.folder / "pieces" / ONE / "manifest.json").stat().st_atime == before:
        pytest.skip("this file system notes no reads")
    run("job.prune=30d")
    assert keys(cache) == {ONE, TWO, MODEL}


def test_what_cannot_be_removed_stops_nothing(run: Any, cache: Cache, monkeypatch: pytest.MonkeyPatch):
    """os.rename refuses one entry: root, who may run this, is stopped by no mode."""
    rename = os.rename

    def refuse(source: Any, target: Any) -> None:
        if ONE in str(source):
            raise PermissionError(13, "Permission denied", str(source))
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    code, out, err = run("job.prune=0d")
    assert code == 1 and out.splitlines()[-1].startswith("removed 2 entries")
    assert err == f"atom-run: ArtifactError: {cache.folder}/pieces/{ONE} cannot be removed: Permission denied\n"
    assert keys(cache) == {ONE}


def test_verify_names_what_is_damaged_and_deletes_nothing(run: Any, cache: Cache):
    assert run("job.verify=true") == (0, f"all 3 entries in {cache.folder} are whole, and nobody else's\n", "")
    file = cache.folder / "pieces" / ONE / "piece.so"
    file.write_bytes(b"b" + file.read_bytes()[1:])
    code, out, err = run("job.verify=true")
    assert (code, out) == (1, f"pieces/{ONE[:12]}: the checksum of piece.so is wrong\n")
    assert err == f"atom-run: ArtifactError: 1 of 3 entries in {cache.folder} are damaged or not to be trusted\n"
    (cache.folder / "artifacts" / MODEL / "graph.py").chmod(0o666)
    code, out, _ = run("job.verify=true", "job.output=json")
    listed = {each["key"]: each["fault"] for each in map(json.loads, out.splitlines())}
    assert code == 1 and listed[TWO] is None and "graph.py is writable by others" in listed[MODEL]
    assert keys(cache) == {ONE, TWO, MODEL}


# bundles


def test_an_import_without_trust_shows_what_it_is_and_takes_nothing(run: Any, carry: Any, tmp_path: Path):
    bundle = carry()
    code, out, err = run(f"job.import={bundle}", f"cache={tmp_path}/target")
    assert code == 2 and "\x1b" not in out
    lines = out.splitlines()
    assert lines[0].startswith("artifacts/") and lines[1].startswith("built by ")
    assert lines[2:4] == ["made of", "  name: llama\N{REPLACEMENT CHARACTER}[31m"] and "    - dtype='fp32'" in lines
    builder = lines[1]
    assert [line.partition(" ")[2].partition(" at ")[0] for line in lines[-2:]] == [builder.partition(" at ")[0]] * 2
    assert [line.rpartition(": ")[2] for line in lines[-2:]] == ["piece 1", "piece 2"]
    assert err == (
        f"atom-run: ConfigError: job.import={bundle}: it is code that will run as you, and what is above is only what "
        "its maker says; job.trust=true imports it\n"
    )
    assert not (tmp_path / "target").exists()


def test_a_trusted_import_is_found_with_its_maker_and_its_recipe(run: Any, carry: Any, tmp_path: Path):
    bundle = carry()
    code, out, err = run(f"job.import={bundle}", f"cache={tmp_path}/target", "job.trust=true")
    assert (code, err) == (0, "")
    source, target = Cache(tmp_path / "theirs"), Cache(tmp_path / "target")
    total, recipe = out.splitlines()[-2:]
    assert total == f"imported 3 entries, 2.0 MiB in {target.folder}"
    assert recipe == f"recipe={target.folder}/artifacts/{target.entries()[-1].key}/recipe.yaml starts it"
    for before, after in zip(source.entries(), target.entries(), strict=True):
        assert target.find(after.kind, after.key) and (before.about, before.files) == (after.about, after.files)
        assert (before.built_by, before.created) == (after.built_by, after.created)
    assert run(f"job.import={bundle}", f"cache={tmp_path}/target", "job.trust=true")[0] == 0, "twice is no error"


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_what_was_measured_goes_with_an_artifact_of_a_gpu(
    device: str, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    theirs, target, file = Cache(tmp_path / "theirs"), tmp_path / "target", tmp_path / "model.tar"
    ingredients = {"model": "llama", "device": device}
    theirs.publish("artifacts", key_of(ingredients), {"graph.py": b""}, {"ingredients": ingredients, "pieces": []})
    tuned.save("Their GPU", theirs.folder, "linear", {"8 3 3 1": ["library"], "8 4 4 1": ["library"]})
    tuned.save("Their GPU", target, "linear", {"8 3 3 1": ["matrix", 16, 16, 1, 2]})
    monkeypatch.setattr("atom.compiler.artifact.differences_here", lambda entries: [])
    code, out, err = run(f"cache={theirs.folder}", f"job.export={file}")
    said = [line for line in out.splitlines() if "tune=true" in line]
    assert (code, err, said) == (0, "", ["with what tune=true found on their_gpu: 2 entries"] * (device == "cuda"))
    code, out, err = run(f"cache={target}", f"job.import={file}", "job.trust=true")
    said = [line for line in out.splitlines() if "tune=true" in line]
    assert (code, err, said) == (0, "", ["with what tune=true found on their_gpu: 1 entry"] * (device == "cuda"))
    new = {"8 4 4 1": ["library"]} if device == "cuda" else {}
    assert tuned.read_own("Their GPU", target, pytest.fail) == {"linear": {"8 3 3 1": ["matrix", 16, 16, 1, 2]} | new}


@pytest.mark.parametrize("trust", ["true", "false"])
def test_an_import_as_json_is_an_object_a_line_for_all_that_it_holds(trust: str, run: Any, carry: Any, tmp_path: Path):
    bundle = carry()
    _, out, _ = run(f"job.import={bundle}", f"cache={tmp_path}/target", f"job.trust={trust}", "job.output=json")
    listed = [json.loads(line) for line in out.splitlines()]
    assert [each["kind"] for each in listed] == ["pieces", "pieces", "artifacts"]
    assert [each["key"] for each in listed[:2]] == listed[2]["about"]["pieces"] and listed[2]["about"]["recipe"]


@pytest.mark.parametrize(
    ("changes", "differences"),
    [
        ({"torch": "1.0"}, ["torch (1.0, here "]),
        ({"instruction set": "AVX1024 avx1024f"}, ["instruction set"]),
        ({"sources of the passes": "0" * 32}, ["sources of the passes"]),
        ({"sources": "0" * 32}, ["sources"]),
        ({"features": "none", "torch": "1.0"}, ["torch (1.0, here ", "features"]),
    ],
)
def test_a_bundle_that_can_never_be_used_here_is_refused_by_name(
    changes: dict[str, str], differences: list[str], run: Any, carry: Any, tmp_path: Path
):
    bundle = carry(changes)
    code, _, err = run(f"job.import={bundle}", f"cache={tmp_path}/target", "job.trust=true")
    start = f"atom-run: ConfigError: job.import={bundle}: it is of another machine or version, and would never be used here: "
    assert code == 2 and err.startswith(f"{start}other ") and err.count("\n") == 1
    assert all(each in err.removeprefix(start) for each in differences)
    assert err.removeprefix(start).count(",") - err.count(", here") == len(differences) - 1, "nothing else"
    assert not (tmp_path / "target").exists()


def test_a_bundle_whose_keys_are_not_of_its_ingredients_is_refused(run: Any, cache: Cache, carry: Any, tmp_path: Path):
    carry()
    theirs = Cache(tmp_path / "theirs")
    first, second, artifact = theirs.entries()
    for lying, about in (
        (artifact, {"ingredients": artifact.about["ingredients"] | {"torch": "forged"}}),
        (artifact, {"ingredients": 7}),
        (first, {"text": "def piece(): ..."}),
        (second, {"ingredients": first.about["ingredients"]}),
    ):
        forged = Cache(tmp_path / f"forged-{lying.key[:4]}-{len(str(about))}")
        for each in (first, second, artifact):
            described = each.about | (about if each is lying else {})
            forged.publish(each.kind, each.key, {"a": b""}, described)
        run(f"cache={forged.folder}", f"job.export={tmp_path}/forged.tar")
        code, _, err = run(f"job.import={tmp_path}/forged.tar", f"cache={tmp_path}/target", "job.trust=true")
        what = f"{lying.kind}/{lying.key[:12]} is not the key of what it says that it is made of"
        whole = f"{tmp_path}/forged.tar is not a bundle that job.export wrote: {what}"
        assert (code, err) == (1, f"atom-run: ArtifactError: {whole}\n")
        assert not (tmp_path / "target").exists()


def test_a_recipe_keeps_the_overrides_of_the_model_and_no_secret(checkpoints: Any):
    checkpoint = checkpoints("llama")
    said = ["model.layers=2", "+model.weights.more=x", "serve.http.api_keys=secret", "seed=3", "prompts=hello"]
    config = load([f"checkpoint={checkpoint}", *said, "cache=/elsewhere", "serve.max_model_len=64"])
    assert "parallel.tensor=2" in recipe_of(load([f"checkpoint={checkpoint}", "device=cpu", "parallel=tp2"]))
    assert recipe_of(config) == [
        f"checkpoint='{checkpoint}'",
        "model.layers=2",
        "+model.weights.more=x",
        "model='llama'",
        "dtype='fp32'",
        "device='cpu'",
        "level=2",
        "serve.kv_cache_dtype='fp32'",
        "serve.max_model_len=64",
    ]


def test_a_damaged_bundle_is_one_line_and_imports_nothing(run: Any, carry: Any, tmp_path: Path):
    bundle = carry()
    raw = bundle.read_bytes()
    flipped = raw[: 1 << 20] + bytes([raw[1 << 20] ^ 1]) + raw[(1 << 20) + 1 :]
    for damaged in (raw[: len(raw) // 2], flipped, b"", b"not a tar" * 1000, raw[512:]):
        bundle.write_bytes(damaged)
        code, out, err = run(f"job.import={bundle}", f"cache={tmp_path}/target", "job.trust=true")
        assert (code, out) == (1, "") and err.count("\n") == 1
        assert err.startswith(f"atom-run: ArtifactError: {bundle} is not a whole bundle: ")
        assert not (tmp_path / "target").exists()


def test_an_import_that_cannot_be_written_is_an_error(run: Any, carry: Any, tmp_path: Path):
    bundle = carry()
    (tmp_path / "file").write_bytes(b"")
    code, _, err = run(f"job.import={bundle}", f"cache={tmp_path}/file", "job.trust=true")
    assert code == 1 and "is not imported: File exists" in err


def test_one_of_several_artifacts_is_chosen_by_its_key(run: Any, cache: Cache, tmp_path: Path):
    cache.publish("artifacts", "99" * 32, {"graph.py": b""}, {"name": "no pieces"})
    code, out, err = run(f"job.export={tmp_path}/model.tar")
    assert (code, out) == (2, "") and "holds 2 artifacts; choose one with job.entry=KEY" in err
    assert run(f"job.export={tmp_path}/model.tar", "job.entry=99")[1].splitlines()[-1].startswith("exported 1 entry")
    assert not (tmp_path / "model.tar.part").exists()
