"""Every command in README and docs/ is run: really where that is cheap, else as far as the start of its job.

A checkpoint that a page names is a tiny one here, and files that it names are there. What is stubbed is the work of a
server, a compiler, a benchmark; the arguments go the way that they go at a user's.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tokenize
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import save_file
from sweeping import run_jobs_here
from tokenizers import decoders, models, pre_tokenizers
from torch.distributed.run import get_args_parser

from atom import cli
from atom.benchmarks import benchmark_serving, compare, matrix
from atom.cache import Cache, key_of
from atom.compiler import compile_graph
from atom.compiler.artifact import machine_ingredients
from atom.config import Config
from atom.config.load import load
from atom.config.schema_keys import keys
from atom.config.spelling import ALIASES
from atom.entrypoints.args import EngineArgs
from atom.examples import grpo
from atom.graph.ops import OPS
from atom.jobs import FOLDERS, generate
from atom.jobs.bench import job as bench
from atom.jobs.bench.workload import open_workload
from atom.jobs.plan import job as plan
from atom.kernels import find_target

pytestmark = pytest.mark.early

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LAB = sorted((ROOT / "docs" / "lab").glob("*.md"))  # whose commands are those of their day
# pages whose commands take the longest
LONG = {"architecture", "benchmarks", "checkpoints", "explain", "generate", "parallel", "quantization", "recipes"}
LONG |= {"speculation", "sweeps"}
COMMAND = re.compile(r"(?:\S*/)?(atom-run|python -m atom\.\w|scripts/[a-z]|torchrun|srun .* torchrun)")
GROUPS = {"model", "job", "serve"}
MODULES = {"my_passes": ("clipped_silu",), "my_states": ("smooth", "batched_smooth")}  # of extend.md, and their ops
STAND_INS = {  # for names in capitals, for plugins, which are not installed, and for what is only the part of a command
    "job.stage=NAME": ["job.stage=semantic"],
    "job.graph=FILE": ["job.graph=saved.py"],
    "model=NAME": ["model=llama"],
    "$SLURM_NODEID": ["0"],
    "passes.extra=[clip_gates@shard]": ["passes.extra=[my_passes:clip_gates@shard]"],
    "passes.taps=[model.layers.14]": ["passes.taps=[model.layers.1]"],
    "job.taps={model.layers.14: mean}": ["job.taps={model.layers.1: mean}"],
    "serve.http.tool_calls=weather": ["serve.http.tool_calls=weather.yaml"],
    "hydra/sweeper=optuna": ["hydra/sweeper=basic"],
    "hydra/launcher=submitit_slurm": ["hydra/launcher=basic"],
    "hydra/launcher=joblib": ["hydra/launcher=basic"],
    "job.gpu=NAME": ["job.gpu=h200"],
    "job.entry=3f2a": ["job.entry=artifacts/"],
    "job.objective=NAME": ["-m", "prompts=hi", "job.objective=tokens"],
    "job.objective=phases.decode.share_of_limit": ["-m", "job=bench", "job.objective=phases.decode.share_of_limit"],
}
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 300,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}


class Started(Exception):
    """A command has come as far as its work."""


def commands(page: str) -> list[str]:
    """The command lines of a page: in blocks of code, in code within lines, and overrides that stand there by themselves."""
    found: list[str] = []
    fence, language = False, ""
    blocks: list[str] = []
    text: list[str] = []
    for line in page.splitlines():
        if line.startswith("```"):
            fence, language = not fence, line[3:]
        elif fence or line.startswith("    "):
            blocks += [line.strip()] if language in ("", "sh", "bash") else []
        else:
            text.append(line)
    for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
        if COMMAND.match(line) or re.search(r"\| *atom-run ", line):
            found.append(line)
    for span in re.findall(r"`([^`]+)`", "\n".join(text)):
        words = span.replace("\n", " ")
        if (COMMAND.match(words) and " " in words) or re.fullmatch(r"scripts/[\w-]+", words):
            found.append(words)
        elif is_overrides(words):
            found.append(f"atom-run {words}")
    return found


def is_overrides(text: str) -> bool:
    """Whether all words set fields, which have values."""
    known = {*keys(Config), *GROUPS, *ALIASES}
    parts = [re.fullmatch(r"([a-z_.]+)=(.+)", word) for word in text.partition(" > ")[0].split(" ")]
    return all(part is not None and part[1] in known for part in parts)


def save_talker(folder: Path, architecture: str, **changes: Any) -> None:
    """A checkpoint without weights: config, a tokenizer of bytes, a chat template."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(sorted(pre_tokenizers.ByteLevel.alphabet()))
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    (folder / "config.json").write_text(json.dumps({**TINY, "architectures": [architecture], **changes}))


def save_artifact(cache: Cache) -> None:
    """An artifact of this machine, without pieces."""
    made_of = {"model": "llama", **machine_ingredients(find_target("cpu"))}
    files = {"graph.py": b"def body(): ...\n", "recipe.yaml": b"overrides: [seed=1]\n"}
    about = {"name": "llama", "ingredients": made_of, "recipe": ["seed=1"], "pieces": []}
    cache.publish("artifacts", key_of(made_of), files, about)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that commands run in, with what the pages speak of in it and next to it; costly jobs only start."""
    save_talker(tmp_path / "llama", "LlamaForCausalLM")
    save_talker(tmp_path / "wide", "LlamaForCausalLM", num_attention_heads=16, num_key_value_heads=8, head_dim=16)
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    save_talker(tmp_path / "mixture", "Qwen3MoeForCausalLM", **experts)
    latent = {
        "model_type": "deepseek_v3",
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    }
    experts |= {"n_routed_experts": 8, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1}
    save_talker(tmp_path / "latent", "DeepseekV3ForCausalLM", **latent, **experts)
    eagle3 = {"num_hidden_layers": 1, "draft_vocab_size": 200, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    save_talker(tmp_path / "eagle3", "LlamaForCausalLMEagle3", **eagle3)
    aria = {"model_type": "aria_text", "moe_num_experts": 8, "moe_topk": 2, "moe_num_shared_experts": 2}
    save_talker(tmp_path / "aria", "AriaForConditionalGeneration", **aria)
    here = tmp_path / "here"
    (here / "my_conf" / "model").mkdir(parents=True)
    (yaml,) = re.findall(r"```yaml\n# aria.yaml\n(.*?)```", (ROOT / "docs/add-a-model.md").read_text(), re.DOTALL)
    (here / "my_conf" / "model" / "aria.yaml").write_text(yaml)
    (here / "my_conf" / "quant").mkdir()
    (here / "my_conf" / "quant" / "mine.yaml").write_text('fmt: none\nformats: {"re:.*down_proj$": int8}\n')
    (own_format,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/tool-calls.md").read_text(), re.DOTALL)
    (here / "weather.yaml").write_text(own_format)
    for name in MODULES:
        (module,) = re.findall(rf"```python\n# {name}.py\n(.*?)```", (ROOT / "docs/extend.md").read_text(), re.DOTALL)
        (here / f"{name}.py").write_text(module)
    save_file({"model.layers.1": torch.zeros(64)}, here / "joy.safetensors")
    (here / "questions.txt").write_text("Why?\nHow?\n")
    (here / "questions.jsonl").write_text('{"id": 7, "prompt": "Why?"}\n')
    (here / "batch.jsonl").write_text('{"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": {}}\n')
    (here / "keys.txt").write_text("sesame\n")
    (here / "key").write_text("0123456789abcdef\n")
    (here / "key").chmod(0o600)
    turns = [{"value": "What is it, and why is it so?"}, {"value": "It is what it is, and nobody knows."}]
    (here / "ShareGPT.json").write_text(json.dumps([{"conversations": turns}] * 200))
    (here / "toolagent_trace.jsonl").write_text('{"input_length": 9, "output_length": 4}\n')
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("ATOM_CACHE", str(tmp_path / "cache"))
    for name in ("serve", "batch", "chat", "compile", *(f"{each}.job" for each in FOLDERS if each != "explain")):
        stub: Any = types.ModuleType(f"atom.jobs.{name}")
        stub.run, stub.OBJECTIVES = start, bench.OBJECTIVES
        monkeypatch.setitem(sys.modules, stub.__name__, stub)
    monkeypatch.setattr(plan, "run", lambda config, **_: start(config))
    really = generate.run
    monkeypatch.setattr(generate, "run", lambda config, *rest: really(made_small(config, tmp_path), *rest))
    save_artifact(Cache(tmp_path / "cache"))
    (here / "mine.yaml").write_text("seed: 1\n")
    monkeypatch.setattr("atom.config.recipes.fetch_file", lambda *_, **__: here / "mine.yaml")
    run_jobs_here(monkeypatch)
    monkeypatch.setattr(EngineArgs, "create_engine", lambda args: load(args.overrides()) and stop())
    monkeypatch.setattr(grpo, "train", lambda args: None)
    for module in (benchmark_serving, matrix, compare):
        monkeypatch.setattr(module, "run", lambda args: 0)
    yield here
    for name, own in MODULES.items():
        sys.modules.pop(name, None)
        for each in own:
            OPS.pop(each, None)


def start(
    config: Config, report: Callable[[dict[str, float]], None] = lambda numbers: None, *, measures: bool = False
) -> int:
    """The cheap part of a job, and a line where it prints any."""
    report(dict.fromkeys(bench.OBJECTIVES, 1.0))
    if config.job.graph is not None:
        compile_graph(config)
    if config.job.kind in ("bench", "profile"):
        open_workload(config)
    if config.job.kind != "serve":
        print("{}")
    return 0


def stop(*_: Any, **__: Any) -> None:
    raise Started


def made_small(config: Config, folder: Path) -> Config:
    """The same with random weights, a small pool and short answers; the embedded model is a tiny one of its kind."""
    if config.checkpoint is None:
        config = load([*config.overrides, f"checkpoint={folder}/llama"])
    if config.quant.fmt == "budget":  # random weights have nothing to measure
        config = replace(config, quant=replace(config.quant, fmt="int8[1, *]", max_kl=None))
    serve, sampling = replace(config.serve, kv_cache_memory=1 << 23), replace(config.sampling, max_tokens=4)
    return replace(config, load_dummy=True, level=config.level or 0, serve=serve, sampling=sampling)


def run_line(line: str, here: Path) -> None:
    """Run a command line; AssertionError if it fails, or writes nothing into the file that it is to write."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|>")
    lexer.whitespace_split = True
    *before, command = split_list(list(lexer), "|")[:2]
    words, *target = split_list(command, ">") if ">" in command else split_list(command, ">>")
    if words == ["atom-run", "job.resume=true"]:
        words += ["-m", "job=bench"]
    words = [each for word in words for each in STAND_INS.get(word, [stand_in(word, here.parent)])]
    if "recipe=qwen3_30b_a3b_fp8" in words or "+recipe=laptop" in words:  # their checkpoints are on the hub
        words += [f"checkpoint={here.parent}/mixture", "device=cpu", "serve.max_model_len=4096"]
    words = [word for word in words if not word.startswith(("hydra.sweeper.", "hydra.launcher."))]
    if "-m" in words:  # of many choices for the first field the first and the last
        words = [re.sub(r"^([\w.]+=[^,({\[]+),.*,([^,)}\]]+)$", r"\1,\2", word) for word in words]
        words = [re.sub(r"^([\w.]+)=range\((\d+),.*\)$", r"\1=\2", word) for word in words]
        _, *further = [word for word in words if re.match(r"[\w.]+=[^,({\[]+,", word)] or [""]
        words = [word.partition(",")[0] if word in further else word for word in words]  # of further fields the first
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setattr(sys, "stdin", io.StringIO(" ".join(before[0][1:]) if before else "Hello!"))
        patch.setattr("atom.config.resolve.find_device", lambda: "cuda" if "tune=true" in words else "cpu")
        out = stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        err = stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        code = run_words(words, patch)
    assert code == 0, f"{line}: exit code {code}: {err.getvalue()}"
    for (name,) in target:
        assert out.getvalue(), f"{line}: nothing to write into {name}"
        Path(name).write_text(out.getvalue())


def run_words(words: list[str], patch: pytest.MonkeyPatch) -> int:
    if words[0].endswith("atom-run"):
        patch.setattr("atom.jobs.run.serve_rank", lambda config: 0)
        return cli.main(words[1:])
    if "torchrun" in words:
        return run_words(read_torchrun(words[words.index("torchrun") + 1 :], patch), patch)
    if words[0] == "python":
        return run_module(words[2], words[3:])
    return run_script(words[0], words[1:], patch)


def read_torchrun(words: list[str], patch: pytest.MonkeyPatch) -> list[str]:
    """The command that torchrun starts, in the environment of the first process on its host."""
    args = get_args_parser().parse_args(words)
    num_hosts, num_local = int(args.nnodes.split(":")[-1]), int(args.nproc_per_node)
    assert args.no_python and args.node_rank < num_hosts
    ranks = {"RANK": args.node_rank * num_local, "WORLD_SIZE": num_hosts * num_local, "LOCAL_WORLD_SIZE": num_local}
    for name, value in (ranks | {"MASTER_ADDR": args.master_addr, "MASTER_PORT": args.master_port or 29500}).items():
        patch.setenv(name, str(value))
    return [args.training_script, *args.training_script_args]


def run_module(name: str, argv: list[str]) -> int:
    main = importlib.import_module(name).main
    if name == benchmark_serving.__name__ and "--model" not in argv:  # part of a command, in a sentence
        argv = ["--model", "x", "--dataset-name", "random", *argv]
    try:
        return int(main(argv))
    except Started:
        return 0


def run_script(path: str, argv: list[str], patch: pytest.MonkeyPatch) -> int:
    """scripts/demo as far as its atom-run, which is run; others as far as their arguments."""
    script, program = ROOT / path, ROOT / f"{path.replace('-', '_')}.py"
    assert script.is_file() and os.access(script, os.X_OK), f"there is no {path}"
    if script.name == "demo":
        return cli.main(arguments_of_demo(argv))
    if not program.is_file():
        of_sources = ["--aiter-source", "/src/aiter", "-k", "aiters_triton"]
        of_a_model = ["tests/frontend/test_decoder.py", "-m", "", "-k", "NAME"]  # tests/test_add_a_model.py collects it
        known = ([], ["--update-golden"], ["-k", "aiter"], of_sources, ["2.11.0", "2.14.1"], ["--upgrade"], of_a_model)
        assert argv in known, f"{path} {argv}: arguments that nobody has looked at"
        return 0
    patch.setattr(sys, "argv", [path, *argv])
    parse = argparse.ArgumentParser.parse_args
    patch.setattr(argparse.ArgumentParser, "parse_args", lambda parser, *given: parse(parser) and stop())
    spec = importlib.util.spec_from_file_location("script", program)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    patch.setitem(sys.modules, "script", module)
    spec.loader.exec_module(module)
    try:
        module.main()
    except Started:
        return 0
    except SystemExit as end:
        return int(end.code or 0)
    raise AssertionError(f"{path} looks at no arguments")


def arguments_of_demo(argv: list[str]) -> list[str]:
    """What scripts/demo gives atom-run, in a folder where nothing is to be installed."""
    for name in ("scripts", ".venv/bin"):
        Path("demo", name).mkdir(parents=True, exist_ok=True)
    Path("demo/scripts/setup").write_text("")
    Path("demo/.venv/bin/atom-run").write_text("#!/bin/bash\nprintf '%s\\0' \"$@\"\n")
    Path("demo/.venv/bin/atom-run").chmod(0o755)
    script = shutil.copy(ROOT / "scripts" / "demo", "demo/scripts/demo")
    ended = subprocess.run(["bash", Path(script).absolute(), *argv], cwd="demo", capture_output=True, check=True)
    return ended.stdout.decode().split("\0")[:-1]


def split_list(words: list[str], mark: str) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for word in words:
        parts.append([]) if word == mark else parts[-1].append(word)
    return parts


def stand_in(word: str, folder: Path) -> str:
    """The word with a tiny checkpoint for one that is not here."""
    ends = {"ria": "aria", "ext": "aria", "A3B": "mixture", "32B": "wide", "-R1": "latent", "le3": "eagle3"}
    name, owners = ends.get(word[-3:], "llama"), "Qwen|deepseek-ai|AngelSlim"
    hub = rf"(?:https://huggingface\.co/)?(?:{owners})/[\w./:-]+"
    pattern = rf"^(checkpoint=|serve.draft_model=|)(/models/\w+|{hub})$"
    return re.sub(pattern, rf"\1{folder}/{name}", word)


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.slow if page.stem in LONG else (), id=page.name) for page in PAGES],
)
def test_every_command_of_a_page_runs(page: Path, here: Path):
    main_text = main_of(["job.stage=semantic", f"checkpoint={here.parent}/llama"])
    (here / "saved.py").write_text(main_text)
    found = commands(page.read_text())
    assert found or page.name not in ("README.md", "serving.md", "benchmarks.md", "add-a-model.md")
    failed = []
    for line in dict.fromkeys(found):
        try:
            run_line(line, here)
        except (Exception, SystemExit) as error:
            failed.append(f"{line}\n    {type(error).__name__}: {error}")
    assert not failed, "\n".join(failed)


def main_of(argv: list[str]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert cli.main(argv) == 0
    return out.getvalue()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_no_command_of_a_page_is_passed_over(page: Path):
    said = re.findall(r"atom-run [a-z-]|python -m atom\.\w", page.read_text().replace("`atom-run`", ""))
    assert len(re.findall(r"atom-run [a-z-]|python -m atom\.\w", "\n".join(commands(page.read_text())))) >= len(said)


@pytest.mark.parametrize("page", [*PAGES, *LAB], ids=lambda path: path.name)
def test_what_a_page_links_to_is_there(page: Path):
    linked = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    missing = []
    for link in (each for each in linked if not each.startswith("http")):
        name, _, anchor = link.partition("#")
        file = page.parent / name if name else page
        if not file.exists() or (anchor and anchor not in anchors(file.read_text())):
            missing.append(link)
    assert missing == []


def anchors(page: str) -> set[str]:
    """The anchors that GitHub gives the headings of a page: an equal heading's is numbered from 1."""
    text = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    headings = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", each) for each in re.findall(r"^#+ +(.+)$", text, re.MULTILINE)]
    plain = [re.sub(r"[^\w -]", "", each.strip().lower()).replace(" ", "-") for each in headings]
    return {each if not plain[:at].count(each) else f"{each}-{plain[:at].count(each)}" for at, each in enumerate(plain)}


def test_headings_have_the_anchors_of_github():
    page = "# Tool calls\n\n## In `C++`, no. 2: what's new\n```sh\n# a comment\n```\n## [A link](x.md) & max_tokens\n### Tool calls\n"
    assert anchors(page) == {"tool-calls", "in-c-no-2-whats-new", "a-link--max_tokens", "tool-calls-1"}


@pytest.mark.parametrize("page", [*PAGES, *LAB], ids=lambda path: path.name)
def test_every_file_of_the_repo_that_a_page_names_is_there(page: Path):
    spans = re.findall(r"`((?:atom|conf|docs|tests|scripts|recipes|deploy|findings)/[\w./-]+)`", page.read_text())
    missing = [span for span in spans if "NAME" not in span and not (ROOT / span).exists()]
    assert [span for span in missing if span != "conf/model/aria.yaml"] == []  # which the reader writes


def test_every_path_and_name_of_the_architecture_is_there():
    page = (ROOT / "docs" / "architecture.md").read_text()
    paths = list(paths_of(page))
    assert len(paths) > 250
    assert [path for path, file, names in paths if not is_there(file, names)] == []


@pytest.mark.parametrize(
    "line",
    [
        "| a path | `runtime/nowhere.py` |",
        "| a folder | `runtime/nowhere/` |",
        "| a name | `runtime/kv/plan.py: plan_nothing` |",
        "| the last of several names | `runtime/kv/cache.py: KVCache.take_nothing` |",
        "| a bare name, of another folder | `runtime/kv/plan.py`, `scheduler.py` |",
        "| a glob | `kernels/*/prepare_nothing.py` |",
        "    a path in a drawing    kernels/nowhere.py",
    ],
)
def test_a_path_that_is_stale_would_be_noticed(line: str):
    assert not all(is_there(file, names) for _, file, names in paths_of(f"# A page\n{line}\n"))


def paths_of(page: str) -> Iterator[tuple[str, Path | None, list[str]]]:
    """The paths of docs/architecture.md as they stand there, the file that each means, and the names in that file.

    A path is relative to atom/, to a folder in the heading above it, or to the repo; a bare file name is in the folder
    of the path before it in its row, item or paragraph, or in that of the heading.
    """
    above: list[Path] = []
    before: Path | None = None
    for line in page.splitlines():
        if line.startswith("#"):
            above = [ROOT / folder for folder in re.findall(r"`([\w/]+/)`", line)]
        if re.match(r"#|\||\s*$| *(-|\d+\.) ", line):  # a row, an item or a paragraph begins
            before = None
        is_drawing = before is None and line.startswith("    ")
        for span in re.findall(r"\w[\w/]+/\w+\.py\b" if is_drawing else r"`([\w.][\w./*-]*(?:: [\w., ]+)?)`", line):
            path, _, names = span.partition(": ")
            if not re.search(r"^scripts/|/$|\.(py|js|yaml)$", path):
                continue
            folders = [*above, ROOT / "atom", ROOT] if "/" in path else [*above, before or ROOT / "atom"]
            file = next((file for folder in folders for file in folder.glob(path.rstrip("/"))), None)
            yield span, file, names.split(", ") if names else []
            before = before if file is None else file if file.is_dir() else file.parent


def is_there(file: Path | None, names: list[str]) -> bool:
    """Whether the file is there and defines all of these, `Class.method` by each part."""
    defined = [rf"^ *(?:(?:async def|def|class) {part}\b|{part} *[:=])" for name in names for part in name.split(".")]
    text = file.read_text() if file is not None and names else ""
    return file is not None and all(re.search(each, text, re.MULTILINE) for each in defined)


def test_the_map_of_the_docs_has_every_page():
    assert linked_pages(ROOT / "docs" / "index.md") == {*PAGES, ROOT / "docs" / "lab" / "index.md"}
    assert linked_pages(ROOT / "docs" / "lab" / "index.md") == {*LAB, ROOT / "docs" / "performance.md"}


def linked_pages(index: Path) -> set[Path]:
    """The pages that an index links to, and the index."""
    return {index} | {(index.parent / link).resolve() for link in re.findall(r"\]\(([^)]+)\)", index.read_text())}


def test_readme_has_the_commands_that_people_begin_with():
    found = commands((ROOT / "README.md").read_text())
    assert "atom-run job.stage=select_kernels > mine.py" in found and "atom-run job.graph=mine.py" in found
    assert len(found) >= 30


@pytest.mark.parametrize(
    "line",
    [
        "atom-run job=serve > mine.py",
        "atom-run job=explian",
        "atom-run job=cache prompts=hi",
        "atom-run checkpoint=/nowhere/llama",
        "atom-run --config-dir other_conf job=explain checkpoint=/models/aria",
        "atom-run job.graph=nowhere.py",
        "atom-run job=bench job.input_len=many",
        "torchrun --nnodes 2 --nproc-per-node 2 --no-python atom-run parallel=tp3 parallel.launcher=torchrun",
        "python -m atom.entrypoints.openai_server --modle Qwen/Qwen3-0.6B",
        "python -m atom.examples.simple_inference --temprature 0",
        "python -m atom.benchmarks.benchmark_serving --model x --num-prompt many",
        "scripts/bench-gpu --rnus 2",
        "scripts/bench-tpu",
        "scripts/demo jbo=explain",
    ],
)
def test_a_command_that_is_wrong_would_be_noticed(line: str, here: Path):
    with pytest.raises((AssertionError, SystemExit)):
        run_line(line, here)


def test_every_name_in_the_glossary_is_one_of_the_sources():
    names = {
        token.string
        for path in (ROOT / "atom").rglob("*.py")
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
        if token.type == tokenize.NAME
    }
    spans = re.findall(r"`([^`]+)`", (ROOT / "docs/glossary.md").read_text())
    assert len(spans) > 100
    for span in spans:
        if "/" in span or span.endswith(".py"):
            assert (ROOT / span).exists() or (ROOT / "atom" / span).exists(), f"there is no file {span}"
        else:
            assert set(re.findall(r"[^\W\d]\w*", span)) <= names, f"nothing is called {span}"
