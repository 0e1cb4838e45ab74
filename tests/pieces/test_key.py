"""Every ingredient of a piece's identity is read off what it names, and another one is another key."""

from __future__ import annotations

import importlib
import json
import platform
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from atom.cache import key_of
from atom.kernels import Target
from atom.kernels.inductor import piece_compiler as inductor
from atom.kernels.inductor.piece_compiler import instruction_set, libraries
from atom.pieces import identity as of
from atom.pieces.key import PACKAGE, sources_of

TEXT = "def piece(x0: fp32[A, 8]):\n    y = inductor.add(x0, x0)\n    return y\n"
MODULE = importlib.import_module("atom.pieces.key")  # the package has a function of this name
INGREDIENTS = ["text", "torch", "instruction set", "libraries", "strides", "compiler options", "sources"]


def clear() -> None:
    for ask in (sources_of, instruction_set, libraries):
        ask.cache_clear()


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """What a process asks for once is asked for anew in each test, and after the last."""
    clear()
    yield
    clear()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the package that the digests are taken of."""
    copy = shutil.copytree(PACKAGE, tmp_path / "atom", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(MODULE, "PACKAGE", copy)
    return copy


def edit(file: Path, generator: random.Random) -> None:
    """Another letter for one of them, wherever it is."""
    text = file.read_text()
    place = generator.choice([place for place, letter in enumerate(text) if letter.isalpha()])
    file.write_text(f"{text[:place]}{'x' if text[place] != 'x' else 'y'}{text[place + 1 :]}")


def differing(before: dict[str, str]) -> list[str]:
    """The ingredients that are others now; the key has to be another one too."""
    clear()
    now = of(TEXT)
    assert (key_of(now) != key_of(before)) == (now != before)
    return [name for name in INGREDIENTS if now[name] != before[name]]


def test_the_ingredients_are_these():
    assert list(of(TEXT)) == INGREDIENTS
    assert of(TEXT)["torch"] == torch.__version__ and of(TEXT)["strides"] == "contiguous"


@pytest.mark.parametrize("name", INGREDIENTS)
def test_another_ingredient_is_another_key_and_their_order_is_none(name: str):
    ingredients = of(TEXT)
    assert key_of(ingredients | {name: ingredients[name] + "."}) != key_of(ingredients)
    assert key_of(dict(reversed(ingredients.items()))) == key_of(ingredients)


def test_another_text_is_another_piece():
    assert differing(of(TEXT.replace("8", "9"))) == ["text"]


def test_20_edits_of_one_letter_of_a_source_are_other_pieces(package: Path):
    sources = [file for part in ("graph/ops", "kernels", "pieces") for file in sorted((package / part).rglob("*.py"))]
    generator = random.Random(0)
    for _ in range(20):
        before = of(TEXT)
        edit(generator.choice(sources), generator)
        assert differing(before) == ["sources"]


def test_a_source_that_is_new_gone_or_renamed_is_another_piece(package: Path):
    first, second = package / "kernels" / "new.py", package / "kernels" / "newer.py"
    for change in (lambda: first.write_text(""), lambda: first.rename(second), second.unlink):
        before = of(TEXT)
        change()
        assert differing(before) == ["sources"]


def test_what_no_piece_is_made_of_does_not_matter(package: Path):
    before = of(TEXT)
    edit(package / "passes" / "pipeline.py", random.Random(0))
    edit(package / "compiler" / "compile.py", random.Random(0))
    (package / "kernels" / "notes.md").write_text("these")
    assert differing(before) == []


def test_a_digest_may_be_of_one_file(package: Path):
    before = sources_of("compiler/compile.py")
    edit(package / "passes" / "pipeline.py", random.Random(0))
    sources_of.cache_clear()
    assert sources_of("compiler/compile.py") == before
    edit(package / "compiler" / "compile.py", random.Random(0))
    sources_of.cache_clear()
    assert sources_of("compiler/compile.py") != before


def read_instead(files: dict[str, str]) -> Callable[..., str]:
    """Path.read_text, with other contents for some files of the system."""
    read = Path.read_text
    return lambda path, *args, **named: files[str(path)] if str(path) in files else read(path, *args, **named)


@pytest.mark.parametrize(
    ("path", "texts", "name"),
    [
        ("/proc/cpuinfo", ("flags\t\t: fpu avx2 fma\n", "flags\t\t: fpu avx2 fma amx_tile\n"), "instruction set"),
        ("/proc/self/maps", ("7f-8f r-xp 0 08:01 9 /opt/libstdc++.so.6.0.30\n",
                             "7f-8f r-xp 0 08:01 9 /opt/libstdc++.so.6.0.33\n"), "libraries"),
    ],
)  # fmt: skip
def test_another_machine_has_other_pieces(path: str, texts: Any, name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Path, "read_text", read_instead({path: texts[0]}))
    before = of(TEXT)
    monkeypatch.setattr(Path, "read_text", read_instead({path: texts[1]}))
    assert differing(before) == [name]


def test_flags_that_no_compiler_uses_do_not_matter(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Path, "read_text", read_instead({"/proc/cpuinfo": "flags : fpu avx2 fma\n"}))
    before = of(TEXT)
    assert before["instruction set"].split()[1:] == ["avx2", "fma"]
    monkeypatch.setattr(Path, "read_text", read_instead({"/proc/cpuinfo": "flags : fma avx2 ibrs\n"}))
    assert differing(before) == []


@pytest.mark.parametrize(
    ("owner", "attribute", "value", "name"),
    [
        (torch, "__version__", "9.9.9", "torch"),
        (torch.backends.cpu, "get_cpu_capability", lambda: "SVE256", "instruction set"),
        (platform, "libc_ver", lambda: ("glibc", "9.9"), "libraries"),
        (inductor, "OPTIONS", {"cpp.dynamic_threads": False}, "compiler options"),
    ],
)
def test_another_torch_libc_or_option_is_another_piece(
    owner: Any, attribute: str, value: Any, name: str, monkeypatch: pytest.MonkeyPatch
):
    before = of(TEXT)
    monkeypatch.setattr(owner, attribute, value)
    assert differing(before) == [name]


def test_libraries_are_those_of_this_process():
    libc, version, *others = libraries().split()
    assert (libc, version) == platform.libc_ver()
    assert [name.partition(".")[0] for name in others] == ["libstdc++"], "torch has loaded one"
    assert json.loads(of(TEXT)["compiler options"])["aot_inductor.precompile_headers"] is False


GPU = Target("cuda", frozenset({"nvidia", "sm_90"}))


def test_of_a_gpu_it_is_the_architecture_that_counts_and_not_the_processor(monkeypatch: pytest.MonkeyPatch):
    ingredients = of(TEXT, GPU)
    assert list(ingredients) == ["text", "torch", "triton", "device", "features", "sources"]
    assert (ingredients["triton"], ingredients["device"]) == (triton.__version__, "cuda")
    assert ingredients["features"] == "nvidia sm_90"
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "SVE256")
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "9.9"))
    clear()
    assert of(TEXT, GPU) == ingredients
    assert of(TEXT, Target("cuda", frozenset({"nvidia", "sm_100"}))) != ingredients
    monkeypatch.setattr(triton, "__version__", "9.9.9")
    assert of(TEXT, GPU) != ingredients
