"""docs/extend.md is true: its examples run, and what they change is part of the keys."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from probe import assert_logits

from atom import LLMEngine, SamplingParams, plugins
from atom.compiler import compile_graph
from atom.compiler.artifact import launch_ingredients, recipe_of
from atom.config import PassesConfig
from atom.config.load import load
from atom.config.tool_formats import detect_format, format_files, known_templates, read_format
from atom.errors import ConfigError, PassError
from atom.graph import Graph, ops, show
from atom.graph.ops import OPS
from atom.kernels import find_backend, find_target
from atom.passes.pipeline import steps_of

DOC = Path(__file__).parents[1] / "docs" / "extend.md"
(PROJECT,) = re.findall(r"```toml\n(.*?)```", DOC.read_text(), re.DOTALL)
EXTRA = "passes.extra=[my_passes:clip_gates@shard]"


class Clipped(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(x).clamp(max=0.1)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """my_passes.py of the page, in the current folder."""
    (text,) = re.findall(r"```python\n# my_passes.py\n(.*?)```", DOC.read_text(), re.DOTALL)
    (tmp_path / "my_passes.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path / "my_passes.py"
    sys.modules.pop("my_passes", None)
    OPS.pop("clipped_silu", None)


class Smoothed(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = torch.nn.functional.pad(x, (0, 0, 2, 0))
        return torch.nn.functional.silu((before[:, :-2] + before[:, 1:-1] + x) / 3)


@pytest.fixture
def states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """my_states.py of the page, in the current folder."""
    (text,) = re.findall(r"```python\n# my_states.py\n(.*?)```", DOC.read_text(), re.DOTALL)
    (tmp_path / "my_states.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path / "my_states.py"
    sys.modules.pop("my_states", None)
    for name in ("smooth", "batched_smooth"):
        OPS.pop(name, None)


def ingredients(*overrides: str, folder: Path) -> dict[str, str]:
    return launch_ingredients(load([f"checkpoint={folder}", "device=cpu", *overrides]), find_target("cpu"))


@pytest.mark.parametrize("level", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_pass_of_a_user_runs_with_an_op_of_its_own(
    module: Path, checkpoints: Callable[[str], Path], tmp_path: Path, level: int
) -> None:
    folder = checkpoints("llama")
    engine = LLMEngine(
        model=str(folder), level=level, dtype="fp32", kv_cache_memory=1 << 22, cache=str(tmp_path / "cache"),
        **{"passes.extra": ["my_passes:clip_gates@shard"]},
    )  # fmt: skip
    model, tokens = tiny.reference(folder), tiny.prompt(20)
    plain = tiny.logits(model, tokens)
    for layer in model.model.layers:
        layer.mlp.act_fn = Clipped()
    assert_logits(engine, tokens, model)
    assert not torch.allclose(plain, tiny.logits(model, tokens), rtol=1e-2)
    engine.close()


@pytest.mark.parametrize("level", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_op_of_a_user_keeps_a_state_of_each_sequence(
    states: Path, checkpoints: Callable[[str], Path], tmp_path: Path, level: int
) -> None:
    folder = checkpoints("llama")
    engine = LLMEngine(
        model=str(folder), level=level, dtype="fp32", kv_cache_memory=1 << 22, block_size=4, max_num_batched_tokens=9,
        cache=str(tmp_path / "cache"), **{"passes.extra": ["my_states:smooth_gates@shard"]},
    )  # fmt: skip
    model, tokens = tiny.reference(folder), tiny.prompt(30)
    for layer in model.model.layers:
        layer.mlp.act_fn = Smoothed()
    assert_logits(engine, tokens, model)
    prompts = [tokens, [*tokens[:21], 5, 6, 7], tokens]
    for prompt in prompts:
        (answer,) = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
        tiny.assert_greedy(answer, prompt, model)
    assert engine.metrics.scheduler.num_prefix_hit_tokens > 0
    engine.close()


def test_a_changed_module_or_one_that_it_imports_is_another_key(module: Path, checkpoints: Any) -> None:
    folder = checkpoints("llama")
    (module.parent / "limits.py").write_text("LIMIT = 0.1\n")
    module.write_text("from limits import LIMIT\n" + module.read_text())
    plain, first = ingredients(folder=folder), ingredients(EXTRA, folder=folder)
    assert first == ingredients(EXTRA, folder=folder)
    assert plain["model"] == first["model"] and plain != first
    (module.parent / "limits.py").write_text("LIMIT = 0.2\n")
    second = ingredients(EXTRA, folder=folder)
    assert {key for key in first if first[key] != second[key]} == {"sources of plug-ins"}
    sys.modules.pop("limits")


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which pip has installed the page's package, with a model and a format of tool calls."""
    sources, target = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("installed")
    files = {"pyproject.toml": PROJECT, "my_package/__init__.py": ""}
    for name in ("my_passes", "my_backend"):
        (text,) = re.findall(rf"```python\n# {name}.py\n(.*?)```", DOC.read_text(), re.DOTALL)
        files[f"my_package/{name}.py"] = text
    files["my_package/conf/model/mine.yaml"] = "defaults: [llama, _self_]\nauto: false\ntool_calls: weather\n"
    (weather,) = re.findall(r"```yaml\n(.*?)```", (DOC.parent / "tool-calls.md").read_text(), re.DOTALL)
    files["my_package/conf/tool_calls/weather.yaml"] = f"template: [<tools>]\n{weather}"
    for name, text in files.items():
        (sources / name).parent.mkdir(parents=True, exist_ok=True)
        (sources / name).write_text(text)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--target", str(target), str(sources)], check=True)
    return target


@pytest.fixture
def install(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Path]]:
    """Put a copy of the installed package where Python finds it; returns its folder."""
    caches = (plugins.named, plugins.find_folder, format_files, read_format, known_templates)

    def forget() -> None:
        for each in caches:
            each.cache_clear()
        importlib.invalidate_caches()

    def install() -> Path:
        target = shutil.copytree(package, tmp_path / "installed")
        monkeypatch.syspath_prepend(str(target))
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        forget()
        return target / "my_package"

    yield install
    forget()
    OPS.pop("clipped_silu", None)
    for each in [each for each in sys.modules if each.startswith("my_package")]:
        del sys.modules[each]


def test_an_installed_package_names_its_passes_models_and_formats(
    install: Callable[[], Path], checkpoints: Any
) -> None:
    installed = install()
    overrides = [f"checkpoint={checkpoints('llama')}", "model=mine", "passes.extra=[clip_gates@shard]", "device=cpu"]
    config = load(overrides)
    assert config.model.name == "mine" and "passes.extra=[clip_gates@shard]" in recipe_of(config)
    assert read_format(config.model.tool_calls or "").parameter == "<set {key}>{value}</set>"
    assert detect_format("Write <tools>.") == "weather"
    first = launch_ingredients(config, find_target("cpu"))
    (installed / "other.py").write_text("")
    assert launch_ingredients(config, find_target("cpu")) != first


@pytest.mark.parametrize(
    ("left", "message"),
    [((), "there is no such package"), (("conf/README",), "it has no YAML files in model/ or tool_calls/")],
)
def test_a_package_without_the_files_that_it_names_is_refused_by_name(
    install: Callable[[], Path], checkpoints: Any, left: tuple[str, ...], message: str
) -> None:
    installed = install()
    shutil.rmtree(installed / "conf")
    for name in left:
        (installed / name).parent.mkdir()
        (installed / name).touch()
    with pytest.raises(
        ConfigError, match=rf"^atom\.conf: mine = my_package\.conf: {message}; do its YAML files belong"
    ):
        load([f"checkpoint={checkpoints('llama')}", "device=cpu"])


def test_a_pass_that_finds_nothing_says_so(module: Path, checkpoints: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for place, said in (("", True), ("@shard", False)):
        given = [f"checkpoint={checkpoints('llama')}", "device=cpu", f"passes.extra=[my_passes:clip_gates{place}]"]
        compile_graph(load([*given, "level=1"]))
        assert ("passes.extra: clip_gates changed nothing" in capsys.readouterr().err) == said


@pytest.mark.parametrize("level", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_backend_of_a_package_comes_ahead_of_ours(
    install: Callable[[], Path], checkpoints: Callable[[str], Path], tmp_path: Path, level: int
) -> None:
    file = install() / "my_backend.py"
    asked = file.read_text().replace("    gate, up =", "    open('asked', 'w').close()\n    gate, up =")
    file.write_text(asked.replace("'asked'", repr(str(tmp_path / "asked"))))
    folder = checkpoints("llama")
    engine = LLMEngine(
        model=str(folder), level=level, dtype="fp32", kv_cache_memory=1 << 22, cache=str(tmp_path / "cache")
    )
    tokens = tiny.prompt(20)
    assert_logits(engine, tokens, tiny.reference(folder))
    assert (tmp_path / "asked").exists()
    engine.close()


def test_a_backend_is_named_in_the_text_says_why_it_refuses_and_is_part_of_the_key(
    install: Callable[[], Path], checkpoints: Any
) -> None:
    def compiled(name: str, level: int) -> Graph:
        return compile_graph(load([f"checkpoint={checkpoints(name)}", "device=cpu", f"level={level}"]))

    folder = checkpoints("llama")
    without = ingredients("level=1", folder=folder)
    file = install() / "my_backend.py"
    assert 'm = mine.gated_activate(gate_up, kind="silu")' in show(compiled("llama", 1))
    assert "mine." not in show(compiled("llama", 0))
    gate = next(
        node for node in compiled("llama_gelu_tanh", 1).programs["body"].nodes if node.target is ops.gated_activate
    )
    assert gate.meta["kernel"] == "reference" and gate.meta["notes"] == ["mine: has no gelu_tanh"]
    first = ingredients("level=1", folder=folder)
    assert first.keys() - without.keys() == {"sources of mine"}
    file.write_text(file.read_text() + "# changed\n")
    assert ingredients("level=1", folder=folder)["sources of mine"] != first["sources of mine"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("BACKEND = ", "OTHER = ", "mine = my_package.my_backend:BACKEND: there is no such module:NAME"),
        ('"mine", (Kernel', '"other", (Kernel', "it is no Backend whose name is mine"),
        ("import torch\n", "import nowhere\n", r"cannot import my_package.my_backend \(ModuleNotFoundError"),
    ],
)
def test_a_backend_that_is_none_is_named(install: Callable[[], Path], old: str, new: str, message: str) -> None:
    file = install() / "my_backend.py"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(ConfigError, match=message):
        find_backend("mine")


@pytest.mark.slow
def test_ranks_find_the_pass_and_the_op_of_a_user(module: Path, checkpoints: Callable[[str], Path]) -> None:
    folder = checkpoints("llama")
    engine = LLMEngine(
        model=str(folder), level=0, dtype="fp32", kv_cache_memory=1 << 22,
        **{"passes.extra": ["my_passes:clip_gates@sink_into_head"], "parallel.tensor": 2},
    )  # fmt: skip
    model, tokens = tiny.reference(folder), tiny.prompt(20)
    for layer in model.model.layers:
        layer.mlp.act_fn = Clipped()
    (answer,) = engine.generate([tokens], SamplingParams(temperature=0, max_tokens=6))
    tiny.assert_greedy(answer, tokens, model)
    engine.close()


def test_what_a_module_imports_follows_from_its_text(tmp_path: Path) -> None:
    texts = {"a": "def f():\n    import b, json", "b": "import a\nfrom d import X", "d": "X = 1", "e": ""}
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    assert {file.stem for file in plugins.with_imports(tmp_path / "a.py")} == {"a", "b", "d"}


def test_a_saved_text_is_not_rewritten_again_by_passes_before_its_stage(module: Path) -> None:
    named = PassesConfig(extra=["my_passes:clip_gates@fuse_qkv"], fuse_gate_up=False)
    names = [
        [step.__name__ for step, _, _ in steps_of(named, *first)] for first in ((), ("fuse_qkv",), ("fuse_gate_up",))
    ]
    assert names[0][2:5] == ["sink_into_head", "clip_gates", "fuse_qkv"]
    assert names[1] == names[0][3:] and names[2] == names[0][5:]


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("fuse_qkv", "qkv = "),
        ("fuse_gate_up", "gate_up = "),
        ("fuse_norm_residual", "add_rms_norm("),
    ],
)
def test_a_pass_that_is_left_out_changes_nothing(name: str, call: str, checkpoints: Any) -> None:
    off = f"passes.{name}=false"
    others = [f"passes.{other}=false" for other in ("fuse_norm_linear", "fuse_sibling_linears")]  # which fuse the same
    rest = [f"checkpoint={checkpoints('llama')}", "device=cpu", "level=1", *others]
    with_it, without = (show(compile_graph(load([*rest, *more]))) for more in ([], [off]))
    assert call in with_it and call not in without
    target = find_target("cpu")
    assert launch_ingredients(load(rest), target) != launch_ingredients(load([*rest, off]), target)


def test_the_numbers_are_the_same_without_any_fusion(checkpoints: Any) -> None:
    names = load(["passes.extra=[]"]).passes.__dataclass_fields__.keys() - {"extra", "taps", "steer"}
    off = {f"passes.{name}": False for name in names}
    folder = checkpoints("qwen3")
    engine = LLMEngine(model=str(folder), level=1, dtype="fp32", kv_cache_memory=1 << 22, **off)
    assert_logits(engine, tiny.prompt(20), tiny.reference(folder))
    engine.close()


@pytest.mark.parametrize(
    ("extra", "error", "message"),
    [
        (
            "nowhere:f",
            ConfigError,
            "^passes.extra: nowhere:f: there is no module nowhere; install it, or start in the folder that has nowhere.py$",
        ),
        ("my_passes:nope", ConfigError, "^passes.extra: my_passes:nope: my_passes has no function nope$"),
        (
            "breaks:f",
            ConfigError,
            r"^passes.extra: breaks:f: cannot import breaks \(ZeroDivisionError: division by zero\)$",
        ),
        (":f", ConfigError, "^passes.extra: :f: :f is not an entry point"),
        ("clip", ConfigError, r"clip is not an entry point of atom\.passes .*; or write module:function"),
        ("my_passes:clip_gates@fuse_qvk", ConfigError, r"there is no pass fuse_qvk \(did you mean fuse_qkv"),
        ("my_passes:gone", PassError, "gone returned NoneType, not the graph"),
        ("my_passes:falls", PassError, r"falls: ZeroDivisionError: division by zero \(.*my_passes\.py, line \d+\)"),
        ("my_passes:fuse_qkv", ConfigError, "there is a pass fuse_qkv already; rename it"),
    ],
)
def test_a_pass_that_cannot_be_run_is_named(
    module: Path, checkpoints: Any, extra: str, error: type[Exception], message: str
) -> None:
    with module.open("a") as file:
        file.write("\ndef gone(graph): pass\ndef falls(graph): 1 / 0\ndef fuse_qkv(graph): return graph\n")
    (module.parent / "breaks.py").write_text("1 / 0\n")
    with pytest.raises(error, match=message):
        compile_graph(load([f"checkpoint={checkpoints('llama')}", "device=cpu", "level=0", f"passes.extra=[{extra}]"]))


@pytest.mark.parametrize(
    ("returned", "shown"),
    [
        ("x[:, :3]", r"bf16\[T, 3\]"),
        ("x.float()", r"fp32\[T, 80\]"),
        ("x.repeat(2, 1)", r"bf16\[2\*T, 80\]"),
        ("(x, x)", r"bf16\[T, 80\], bf16\[T, 80\]"),
        ("None", "NoneType"),
    ],
)
def test_an_op_whose_body_breaks_its_rule_is_named(module: Path, checkpoints: Any, returned: str, shown: str) -> None:
    text = module.read_text()
    body = "return torch.nn.functional.silu(x).clamp(max=limit)"
    assert body in text
    module.write_text(text.replace(body, f"return {returned}"))
    config = load([f"checkpoint={checkpoints('llama')}", "device=cpu", "level=0", "dtype=bf16", EXTRA])
    with pytest.raises(PassError, match=rf"^clip_gates: clipped_silu returned {shown}, its rule says bf16\[T, 80\]$"):
        compile_graph(config)


def test_a_body_that_needs_values_is_not_compared_with_its_rule(module: Path, checkpoints: Any) -> None:
    text = module.read_text()
    module.write_text(text.replace(".clamp(max=limit)", ".clamp(max=x.max().item())"))
    compile_graph(load([f"checkpoint={checkpoints('llama')}", "device=cpu", "level=0", EXTRA]))
