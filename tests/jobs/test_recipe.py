"""Recipes: those that are shipped hold, `job=recipe` compares them, and a saved one says what it ran on."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from atom.cli import main
from atom.config import recipes as recipe_files
from atom.config.load import load, load_settings
from atom.config.overrides import rewrite
from atom.config.recipes import list_recipes, read_recipe
from atom.errors import ConfigError
from atom.jobs.run import run

ROOT = Path(__file__).parents[2]
SHIPPED = sorted(path.stem for path in list_recipes())
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FREQ = [0] * 3 + [1] * 57
MINIMAX_M3 = {
    "architectures": ["MiniMaxM3SparseForCausalLM"], "model_type": "minimax_m3_vl_text", "hidden_size": 6144, "intermediate_size": 3072,
    "dense_intermediate_size": 12288, "shared_intermediate_size": 3072, "num_hidden_layers": 60, "max_position_embeddings": 1048576, "vocab_size": 200064,
    "num_local_experts": 128, "num_experts_per_tok": 4, "rotary_dim": 64, "moe_layer_freq": FREQ,
    "sparse_attention_config": {"sparse_topk_blocks": 16, "sparse_block_size": 128, "sparse_attention_freq": FREQ},
}  # fmt: skip
# recipe -> a published config, what differs from it in the recipe's model, and that one's published parameters
PUBLISHED: dict[str, tuple[str, dict[str, Any], float]] = {
    "qwen3_235b_tp8_ep": ("qwen3_235b_a22b", {"quantization_config": FP8}, 235e9),
    "qwen3_30b_a3b_fp8": ("qwen3_30b_a3b", {"quantization_config": FP8}, 30.5e9),
    "gpt_oss_120b": (
        "gpt_oss_20b",
        {"num_hidden_layers": 36, "num_local_experts": 128, "layer_types": ["sliding_attention", "full_attention"] * 18},
        117e9,
    ),
    "deepseek_r1_tp8_mtp": ("deepseek_v3", {}, 671e9 + 11.5e9),  # with the layer that drafts
    "minimax_m3": ("qwen3_235b_a22b", MINIMAX_M3, 427e9),
    "kimi_k2_thinking_tp4": ("kimi_k2", {}, 1.03e12),
    "glm_5_2": ("glm_5_2", {}, 744e9),
    "deepseek_v4_flash": ("deepseek_v4_flash", {}, 284e9),
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_recipe_composes_and_is_about_something(name: str):
    load_settings([f"recipe={name}"])
    about = read_recipe(name).about
    assert about["what"] and about["model"] and about["hardware"]
    measured = about["measured"]
    if isinstance(measured, str):
        assert measured.startswith("not measured; no machine with "), "why nobody has measured it"
        assert not re.search(r"tok/s", measured)
        return
    *_, origin, page = about["measured_on"].split("; ")
    text = (ROOT / page).read_text()
    dates, commits = re.findall(r"20\d\d-\d\d-\d\d", origin), re.findall(r"\b[0-9a-f]{7,8}\b", origin)
    assert dates and (len(commits) == len(dates) or "commit not recorded" in origin)
    assert all(each in text + page for each in (*dates, *commits))
    for figure in measured.values():
        lines = [line for line in text.splitlines() if re.search(rf"(?<![\d.,]){figure:,}(?![\d.,]*\d)", line)]
        assert lines, "a figure that nobody has measured"
        if page == "docs/performance.md":
            assert any(
                f"{date}, {commit}" in line for line in lines for date, commit in zip(dates, commits, strict=True)
            )


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_laptop_explains_a_recipe_of_large_gpus(name: str, tmp_path: Path, capsys: Any):
    base, changes, parameters = PUBLISHED[name]
    config = json.loads((ROOT / "tests" / "configs" / f"{base}.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    argv = [f"recipe={name}", f"checkpoint={tmp_path}", "job=explain", "job.gpu=h200", "job.output=json"]
    assert main(argv) == 0, capsys.readouterr().err
    explained = json.loads(capsys.readouterr().out)
    assert explained["parameters"] == pytest.approx(parameters, rel=0.01)
    layout = re.search(r"/parallel: tp(\d)", (ROOT / "recipes" / f"{name}.yaml").read_text())
    assert explained.get("ranks", {}).get("tensor", 1) == int(layout[1] if layout else 1)
    assert explained["gpu"]["gpus_for_weights"] == (2 if name.startswith("kimi") else 1), "GPUs that hold a rank"


def test_recipes_are_compared(capsys: Any):
    assert main(["job=recipe"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["recipe", "layout", "quant"]
    assert [row.split()[0] for row in rows if not row.startswith(" ")] == SHIPPED
    assert max(map(len, rows)) <= 100, "also where stdout is no terminal"
    text = " ".join(" ".join(rows).split())
    assert all(f"what for: {read_recipe(name).about['what']} model: " in text for name in SHIPPED), "nothing is cut"
    assert main(["job=recipe", "job.recipes=[qwen3_235b_tp8_ep,smollm2_greedy]", "job.output=json"]) == 0
    large, small = map(json.loads, capsys.readouterr().out.splitlines())
    assert (large["layout"], large["quant"]) == ("tp8_ep", "as stored, fp8_e4m3 KV")
    assert large["measured"].startswith("not measured; no machine with 8 GPUs of 80 GB was at hand")
    assert small["measured"] == "tok/s of 1 request, 64 in / 128 out: 235; tok/s of 16 requests, 64 in / 128 out: 945"
    assert small["on"].endswith("; docs/lab/2026-11-27-smollm2-cpu.md")


ONE = """
about:
  what: a small model
  hardware: 1 x NVIDIA H200
  versions: {torch: 2.11.0, numpy: 2.0.0}
  commit: 1971904d
  measured: {output_throughput: 400.0, median_tpot_ms: 2.5}
checkpoint: a/small
quant: {kv: fp8}
serve: {max_num_seqs: 8}
"""
OTHER = """
about:
  what: a small model
  hardware: 2 x AMD EPYC
  versions: {torch: 2.13.0, numpy: 2.0.0}
  measured: {output_throughput: 500.0, tokens_per_second: 70.0}
defaults: [override /parallel: tp2]
checkpoint: a/small
model: {layers: 4}
serve: {max_num_seqs: 16, max_model_len: 4096}
sampling: {temperature: 0}
"""
DIFFERENCE = """\
                      {one}  {two}

hardware              1 x NVIDIA H200  2 x AMD EPYC
versions.torch        2.11.0           2.13.0
commit                1971904d         -

quant.kv              fp8              auto
parallel.tensor       1                2
serve.kv_cache_dtype  fp8_e4m3         auto
serve.max_model_len   null             4096
serve.max_num_seqs    8                16
sampling.temperature  1.0              0.0
model.layers          -                4

output_throughput     400              500 (×1.25)
median_tpot_ms        2.5              -
tokens_per_second     -                70

These were measured on different machines: 1 x NVIDIA H200, 2 x AMD EPYC.
"""


def test_two_recipes_differ_in_these_fields_and_figures(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.yaml").write_text(ONE)
    (tmp_path / "two.yaml").write_text(OTHER)
    assert main(["job=recipe", "job.recipes=[one.yaml,two.yaml]", "job.diff=true"]) == 0
    assert capsys.readouterr().out == DIFFERENCE.format(one="one.yaml       ", two="two.yaml")
    assert main(["job=recipe", "job.recipes=[one.yaml,two.yaml]", "job.diff=true", "job.output=json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fields"]["serve.max_num_seqs"] == ["8", "16"] and "checkpoint" not in found["fields"]
    assert found["measured"]["output_throughput"] == [400.0, 500.0]
    assert main(["job=recipe", "job.recipes=[one.yaml,one.yaml]", "job.diff=true"]) == 0
    assert capsys.readouterr().out.split() == ["one.yaml", "one.yaml", "output_throughput", "400", "400", "(×1.00)", "median_tpot_ms", "2.5", "2.5", "(×1.00)"]  # fmt: skip


def test_keys_are_not_shown(tmp_path: Path, capsys: Any):
    (tmp_path / "r.yaml").write_text("serve: {http: {api_keys: sk-very-secret}}")
    assert main(["job=recipe", f"job.recipes=[demo,{tmp_path}/r.yaml]", "job.diff=true"]) == 0
    out = capsys.readouterr().out
    assert "serve.http.api_keys" in out and "sk-very-secret" not in out


def test_a_difference_is_of_two_recipes(capsys: Any):
    for given in ([], ["job.recipes=[demo]"], ["job.recipes=[demo,laptop,smollm2_greedy]"]):
        assert main(["job=recipe", *given, "job.diff=true"]) == 2
        assert "job.diff=true compares two recipes: write job.recipes=[A,B]" in capsys.readouterr().err


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("overrides", "layout"),
    [
        (["parallel=tp4"], "tp4"),
        (["parallel=dp4_ep"], "dp4_ep"),
        (["parallel=dp2_tp4_ep"], "dp2_tp4_ep"),
        (["parallel=dp2"], "dp2"),
        (["parallel=dp2_tp4"], "dp2_tp4"),
        (["serve.tensor_parallel_size=2", "serve.enable_expert_parallel=true"], "tp2_ep"),
    ],
)
def test_a_layout_has_the_name_that_chooses_it(overrides: list[str], layout: str, tmp_path: Path, capsys: Any):
    (tmp_path / "r.yaml").write_text(yaml.safe_dump({"overrides": overrides}))
    assert main(["job=recipe", f"job.recipes=[{tmp_path}/r.yaml]", "job.output=json"]) == 0
    assert json.loads(capsys.readouterr().out)["layout"] == layout


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("content", "key"),
    [
        ("serve: {max_num_sequences: 4}", "serve.max_num_sequences: there is no such field"),
        ("serve: {max_num_seqs: many}", "serve.max_num_seqs=many is"),
        ("serve: {max_num_seqs: 0}", "serve.max_num_seqs=0 must be"),
        ("serve: {method: guess}", "serve.method=guess: there is no such choice"),
        ("dtype: fp12", "dtype=fp12: there is no such choice"),
        ("model: {attention: {haeds: 3}}", "model.attention.haeds: there is no such field"),
        ("defaults: [override /quant: fp9]", "quant=fp9: there is no such choice"),
        ("overrides: [nope=1]", "nope: there is no such field"),
    ],
)
def test_a_recipe_that_does_not_compose_is_refused_naming_the_key(content: str, key: str, tmp_path: Path, capsys: Any):
    path = tmp_path / "r.yaml"
    path.write_text(content)
    assert main(["job=recipe", f"job.recipes=[{path},demo]"]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"atom-run: {path}: {key}") and err.count("\n") == 1
    assert out.splitlines()[1].startswith("demo ")


def test_what_a_recipe_sets_wrongly_is_named_with_its_file_by_any_job(tmp_path: Path, capsys: Any):
    path = tmp_path / "r.yaml"
    path.write_text("serve: {max_num_sequences: 4}")
    for given in ([f"recipe={path}"], ["+recipe=demo", f"+recipe={path}"]):
        assert main(["job=explain", *given]) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"atom-run: ConfigError: recipe {path}: serve.max_num_sequences: there is no such field")
        assert err.count("\n") == 1
    path.write_text("serve: {method: guess}")
    with pytest.raises(ConfigError, match=rf"^recipe {path}: serve.method=guess: there is no such choice"):
        load(["seed=1", f"recipe={path}"])
    path.write_text("seed: 2")
    with pytest.raises(ConfigError, match=r"^serve.method=guess: there is no such choice"):  # is not the recipe's
        load([f"recipe={path}", "serve.method=guess"])


@pytest.mark.slow
def test_a_recipe_of_a_config_dir_is_named_too(tmp_path: Path):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "own.yaml").write_text("dtype: fp12")
    with pytest.raises(ConfigError, match=r"^recipe own: dtype=fp12: there is no such choice"):
        load(["recipe=own"], config_dirs=[str(tmp_path)])


def test_an_experiment_file_sets_choices_then_fields(tmp_path: Path):
    (tmp_path / "r.yaml").write_text(
        "# @package _global_\n"
        "about: {what: a test}\n"
        "defaults: [override /parallel: tp2, override job: bench, _self_]\n"
        "seed: 3\n"
        "prompts: ['a, b']\n"
        "serve: {http: {port: 9000}, cudagraph_capture_sizes: [1, 2]}\n"
        "sampling: {logit_bias: {5: 1.5}}\n"
        "cache: ${oc.env:HOME}/x\n"
    )
    recipe = read_recipe(str(tmp_path / "r.yaml"))
    assert recipe.about == {"what": "a test"}
    assert recipe.overrides == [
        "parallel=tp2",
        "job=bench",
        "seed=3",
        "prompts=['a, b']",
        "serve.http.port=9000",
        "serve.cudagraph_capture_sizes=[1,2]",
        "sampling.logit_bias={5:1.5}",
        "cache='${oc.env:HOME}/x'",
    ]
    config = load_settings([f"recipe={tmp_path}/r.yaml"])
    assert (config.parallel.tensor, config.job.kind, config.serve.http.port) == (2, "bench", 9000)
    assert config.cache is not None and config.cache == f"{Path.home()}/x"


def test_recipes_compose_with_others_and_with_what_is_typed(tmp_path: Path):
    (tmp_path / "a.yaml").write_text("seed: 1\nsampling: {temperature: 0.5, top_k: 7}\n")
    (tmp_path / "b.yaml").write_text("defaults: [override /quant: int8]\nsampling: {temperature: 0.6}\n")
    config = load([f"+recipe={tmp_path}/a.yaml", f"+recipe={tmp_path}/b.yaml", "seed=2"])
    assert (config.seed, config.sampling.temperature, config.sampling.top_k) == (2, 0.6, 7)
    assert config.quant.fmt == "int8[1, *]"
    assert load([f"recipe={tmp_path}/b.yaml", "quant=none"]).quant.fmt == "none"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("about: {what: x}", "it takes about:, and defaults: and fields, or overrides:"),
        ("about: text\nseed: 1", "about: takes names and values"),
        ("defaults: [quant: fp8]", "defaults: takes choices, as in 'override /parallel: tp8', not {'quant': 'fp8'}"),
        ("defaults: [mine]", "defaults: takes choices"),
        ("defaults: mine", "defaults: takes choices"),
        ("overrides: [seed=1]\nseed: 2", "it takes overrides: or fields; write seed as an override too"),
        ("recipe: demo", "a recipe cannot name another one"),
    ],
)
def test_what_is_no_experiment_is_refused(content: str, message: str, tmp_path: Path):
    (tmp_path / "r.yaml").write_text(content)
    with pytest.raises(ConfigError, match=re.escape(f"r.yaml: {message}")):
        read_recipe(str(tmp_path / "r.yaml"))


def test_a_page_is_no_recipe():
    with pytest.raises(ConfigError, match=r"it is one name; write \+recipe=demo \+recipe=laptop$"):
        rewrite(["recipe=[demo,laptop]"])
    with pytest.raises(ConfigError, match=r"^recipe=https://x.org/r.yaml: nothing says whose a page is"):
        read_recipe("https://x.org/r.yaml")


@pytest.fixture
def on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a recipe on the hub; the arguments of its downloads."""
    asked: list[tuple[Any, ...]] = []

    def fetch(name: str, path: str, *, revision: str | None) -> Path:
        asked.append((name, path, revision))
        return tmp_path / "r.yaml"

    monkeypatch.setattr(recipe_files, "fetch_file", fetch)

    def put(content: str) -> list[tuple[Any, ...]]:
        (tmp_path / "r.yaml").write_text(content)
        return asked

    return put


def test_a_recipe_from_the_hub_says_how_a_model_runs(on_the_hub: Any):
    asked = on_the_hub(
        "defaults: [override /parallel: tp4]\ncheckpoint: a/b\nserve: {max_num_seqs: 8}\nquant: {kv: fp8}"
    )
    overrides = ["parallel=tp4", "checkpoint='a/b'", "serve.max_num_seqs=8", "quant.kv='fp8'"]
    assert read_recipe("org/repo:recipes/fast.yaml").overrides == overrides
    assert read_recipe("org/re.po@v1:fast.yml").overrides == overrides
    assert asked == [("org/repo", "recipes/fast.yaml", None), ("org/re.po", "fast.yml", "v1")]


@pytest.mark.parametrize(
    "content",
    [
        "trust_remote_code: true",
        "cache: /tmp/theirs",
        "prompts: '@/etc/passwd'",
        "job: {graph: theirs.py}",
        "job: {save_recipe: /home/me/.profile}",
        "serve: {http: {host: 0.0.0.0}}",
        "serve: {torch_profiler_dir: /home/me}",
        "parallel: {launcher: ray}",
        "overrides: ['serve={http: {host: 0.0.0.0}}']",
        "overrides: ['job={save_recipe: x}']",
        "overrides: ['+trust_remote_code=true']",
        "overrides: ['hydra.searchpath=[file:///tmp]']",
        "overrides: [hydra/launcher=joblib]",
        "defaults: [override /hydra/sweeper: optuna]",
        "checkpoint: org/${oc.env:HF_TOKEN}",
    ],
)
def test_a_recipe_from_the_hub_that_sets_more_is_refused(content: str, on_the_hub: Any):
    on_the_hub(content)
    with pytest.raises(
        ConfigError, match=r"^recipe=org/repo:r.yaml(:| sets) .*; save it, read it, (and )?give recipe=FILE$"
    ):
        read_recipe("org/repo:r.yaml")


def test_a_saved_recipe_says_what_it_ran_on_and_what_it_measured(checkpoints: Any, tmp_path: Path, capsys: Any):
    argv = [f"checkpoint={checkpoints('qwen3')}", "level=0", "serve.kv_cache_memory=4194304", "prompts=[[1,2]]"]
    argv += ["sampling.max_tokens=3", f"job.save_recipe={tmp_path}/r.yaml"]
    assert main(argv) == 0
    about = yaml.safe_load((tmp_path / "r.yaml").read_text())["about"]
    assert (about["model"], about["job"], about["device"], about["level"]) == ("qwen3", "generate", "cpu", 0)
    assert about["versions"]["torch"] == importlib.metadata.version("torch")
    assert re.match(r"\d+ x ", about["hardware"]) and "artifact" not in about, "level 0 has none"
    assert about["measured"].keys() == {"tokens_per_second", "first_token_seconds"}
    assert about["measured"]["tokens_per_second"] > 0
    assert main(["job=recipe", f"job.recipes=[{tmp_path}/r.yaml]", "job.output=json"]) == 0
    shown = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "tokens_per_second: " in shown["measured"] and shown["on"].startswith(about["hardware"])
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    if head and (ROOT / ".git").exists():
        assert head.startswith(about["commit"].removesuffix("-dirty")) and about["commit"] in shown["on"]


@pytest.mark.slow
def test_a_saved_recipe_has_the_key_of_the_artifact_that_job_compile_makes(
    checkpoints: Any, tmp_path: Path, capsys: Any
):
    given = [f"checkpoint={checkpoints('qwen3')}", f"cache={tmp_path}/cache", "level=2"]
    assert main(["job=compile", *given, "job.output=json", f"job.save_recipe={tmp_path}/r.yaml"]) == 0
    key = json.loads(capsys.readouterr().out)["key"]
    assert yaml.safe_load((tmp_path / "r.yaml").read_text())["about"]["artifact"] == key


def test_a_recipe_is_looked_at_by_its_name_in_job_recipes():
    with pytest.raises(ConfigError, match=r"job=recipe job.recipes=\[NAME\] looks at it$"):
        run(["job=recipe", "recipe=demo"])
