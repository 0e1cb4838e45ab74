from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.config.load import load
from atom.config.model_files import find_source
from atom.config.overrides import parse, plain, rewrite, write_recipe
from atom.config.recipes import read_recipe
from atom.config.spelling import override
from atom.errors import ConfigError

CONFIGS = Path(__file__).parents[1] / "configs"
TEXT = st.text(st.characters(exclude_categories=["Cs"])) | st.text(alphabet="$\\{}'\"\n =,[]:?ab").map(lambda s: s * 2)
JSON = st.recursive(
    TEXT | st.integers() | st.booleans() | st.none() | st.floats(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b.c", "d-e"]), inner, max_size=2)
    ),
    max_leaves=6,
)


def value_of(*overrides: str) -> object:
    (text,) = rewrite(overrides)
    return plain(parse(text))


@settings(max_examples=120)
@given(JSON)
def test_a_value_of_python_comes_back_from_its_override(value: object):
    assert plain(parse(override("prompts", value))) == value


@settings(max_examples=120)
@given(st.lists(TEXT, min_size=1, max_size=3))
def test_rewriting_leaves_what_override_wrote(prompts: list[str]):
    text = override("prompts", prompts)
    assert rewrite([text]) == [text]
    single = override("prompts", prompts[0])
    assert value_of(single) == prompts[0]


KEYS = st.text(alphabet="ab_ -.:=,()[]{}$*?|/+@%\\\t", min_size=1, max_size=6).map(lambda s: f"k{s}")


@settings(max_examples=120)
@given(st.lists(JSON, max_size=2) | st.dictionaries(KEYS, JSON, max_size=3))
def test_json_that_is_typed_is_its_value(value: object):
    text = json.dumps(value)
    meant = plain(parse(override("x", value)))
    assert meant == value
    is_hydras = isinstance(value, list) and "${" in text  # may be an interpolation
    assert is_hydras or value_of(f"serve.http.chat_template_kwargs={text}") == value


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ('serve.http.chat_template_kwargs={"enable_thinking": false}', {"enable_thinking": False}),
        ('serve.http.chat_template_kwargs={\n  "a": {"b c": [1, null, "x, ${y} \\n"]}\n}', {"a": {"b c": [1, None, "x, ${y} \n"]}}),
        ("serve.http.chat_template_kwargs={enable_thinking: false}", {"enable_thinking": False}),
        ('serve.http.cors=["http://a:1", "b"]', ["http://a:1", "b"]),
        ('model.mlp=[{"kind": "moe"}]', [{"kind": "moe"}]),
        ('sampling.logit_bias={"50256": -100, "7": 1.5}', {50256: -100, 7: 1.5}),
        ('+model.formats={"re:.*gate$": "fp8"}', {"re:.*gate$": "fp8"}),
        ('model.formats={"re:.*gate$": "fp8"}', {"re:.*gate$": "fp8"}),
        ("cache=${oc.decode:'/tmp'}", "/tmp"),
        ("serve.http.cors=[${oc.decode:'x'}]", ["x"]),
    ],
)  # fmt: skip
def test_json_is_read_as_vllm_reads_it(typed: str, meant: object):
    assert value_of(typed) == meant


def test_choices_of_a_sweep_may_be_json():
    texts = rewrite(['serve.http.chat_template_kwargs={"a": false}, {"a": true}'], multirun=True)
    assert texts == ["serve.http.chat_template_kwargs={a:false},{a:true}"]


def test_a_mapping_takes_keys_without_a_plus(tmp_path: Path):
    (tmp_path / "config.json").write_text((CONFIGS / "qwen3_0.6b.json").read_text())
    config = load([f"checkpoint={tmp_path}", 'model.formats={"re:.*gate_proj$": "fp8[1, *]"}'])
    assert config.model.formats == {"re:.*gate_proj$": "fp8[1, *]"}


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ('x={"a": 1', r"'x=\{\"a\": 1' is not an override"),
        ('x={"a": 1} b', r"'x=\{\"a\": 1\} b' is not an override"),
        ('x={"true": 1}', "x: the key 'true' cannot be written as an override"),
        ('x={"größe": 1}', "x: the key 'größe' cannot be written as an override"),
        ('x={"a": ' + "[" * 30_000 + "]" * 30_000 + "}", "x: it is nested deeper than 64$"),
        ('x={"a": [' + "1," * 5000 + "1]}", "x: there are more than 4,096 items$"),
    ],
)
def test_json_that_cannot_be_read_is_refused(typed: str, message: str):
    with pytest.raises(ConfigError, match=f"^{message}"):
        find_source([typed])


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("prompts=What is 2+2?", "What is 2+2?"),
        ("prompts=Hello, world", "Hello, world"),
        ("prompts=it's a=b {c} (d)", "it's a=b {c} (d)"),
        ("prompts=costs ${5}", "costs ${5}"),
        ("prompts=2", "2"),
        ("prompts=true", "true"),
        ("prompts=range(1,3)", "range(1,3)"),
        ("prompts=[INST] hi, you [/INST]", "[INST] hi, you [/INST]"),
        ("prompts=@my file.txt", "@my file.txt"),
        ("prompts='quoted, for Hydra'", "quoted, for Hydra"),
        ('prompts="a\\nb"', "a\nb"),
        ('prompts=["a, b", "c"]', ["a, b", "c"]),
        ('prompts=["costs ${5}", "\\u00e9\\n"]', ["costs ${5}", "é\n"]),
        ("prompts=[Hello, world]", ["Hello", "world"]),
        ("prompts=[[1,2,3],[4]]", [[1, 2, 3], [4]]),
        ("prompts=null", None),
        ("prompts=", ""),
        ("checkpoint=/a b/c=d,e", "/a b/c=d,e"),
        ("checkpoint=~/models/x", "~/models/x"),
        ("revision=0012e5", "0012e5"),
        ("cache=${oc.decode:'/tmp'}/x", "/tmp/x"),
        ("sampling.stop_strings=###", ["###"]),
        ("sampling.stop_strings='a, b'", ["a, b"]),
        ('sampling.stop_strings=["\\n\\n", "END"]', ["\n\n", "END"]),
        ("sampling.stop_strings=null", None),
    ],
)
def test_text_needs_no_quotes(typed: str, meant: object):
    assert value_of(typed) == meant


def test_sizes_may_have_a_unit():
    assert rewrite(["serve.swap_space=64GiB"]) == ["serve.swap_space=68719476736"]
    assert rewrite(["serve.swap_space=2G"]) == ["serve.swap_space=2147483648"]
    assert rewrite(["serve.swap_space=.5GiB"]) == ["serve.swap_space=536870912"]
    assert rewrite(["serve.kv_cache_memory=1.5MB,2MiB"], multirun=True) == ["serve.kv_cache_memory=1500000,2097152"]
    assert rewrite(["serve.kv_cache_dir_bytes=7"]) == ["serve.kv_cache_dir_bytes=7"]
    assert rewrite(["serve.max_num_seqs=2GiB"]) == ["serve.max_num_seqs=2GiB"], "no number of bytes"


def test_in_a_sweep_a_comma_separates_choices():
    assert rewrite(["prompts=a,b", "level=0,1"], multirun=True) == ["prompts=a,b", "level=0,1"]
    assert rewrite(["prompts=a=b,c"], multirun=True) == ["prompts='a=b,c'"]
    assert rewrite(['prompts=["a, b"]'], multirun=True) == ["prompts=['a, b']"]


def test_other_keys_are_left_to_hydra():
    texts = ["serve.max_num_seqs=3", "+model.weights.x=y", "~job", "++seed=1", "hydra/launcher=basic"]
    assert rewrite(texts) == texts


def test_other_spellings_of_a_field_are_taken_and_two_of_one_refused():
    assert rewrite(["serve.kv_cache_block_size=32"]) == ["serve.block_size=32"]
    sizes = ["serve.tensor_parallel_size=2", "serve.pipeline_parallel_size=3", "serve.data_parallel_size=4"]
    assert rewrite(sizes) == ["parallel.tensor=2", "parallel.pipeline=3", "parallel.replicas=4"]
    with pytest.raises(ConfigError, match=r"^parallel\.tensor and serve\.tensor_parallel_size are the same option"):
        rewrite(["parallel.tensor=2", "serve.tensor_parallel_size=2"])


def test_a_parallel_layout_has_any_number_of_ranks():
    assert rewrite(["parallel=tp2"]) == ["parallel=tp2"], "a file"
    assert rewrite(["parallel=tp3"]) == ["parallel.tensor=3"]
    assert rewrite(["parallel=tp6_ep"]) == ["parallel.tensor=6", "parallel.experts=6"]
    assert rewrite(["parallel=dp3_ep"]) == ["parallel.data=3", "parallel.experts=3"]
    assert rewrite(["parallel=dp2_tp3_ep"]) == ["parallel.tensor=3", "parallel.data=2", "parallel.experts=6"]
    assert rewrite(["parallel=dp2_ep"]) == ["parallel=dp2_ep"], "which has a file"
    assert rewrite(["parallel=dp2"]) == ["parallel=dp2"], "so has this"
    assert rewrite(["parallel=dp3"]) == ["parallel.replicas=3"]
    assert rewrite(["parallel=pp2"]) == ["parallel.pipeline=2"]
    stages = ["parallel.tensor=4", "parallel.data=2", "parallel.experts=8", "parallel.pipeline=3"]
    assert rewrite(["parallel=dp2_tp4_pp3_ep"]) == stages
    assert rewrite(["parallel=tp4_ep_pp3_dp2"]) == stages, "in any order"
    assert rewrite(["parallel=dp2_tp3"]) == ["parallel.tensor=3", "parallel.replicas=2"]
    assert rewrite(["parallel=dp1"]) == ["parallel.tensor=1"]
    for name in ("mine", "dp0", "tp2_tp2", "ep_ep", "dp2tp2", "_ep", "ep", "dp2_", "dp"):
        assert rewrite([f"parallel={name}"]) == [f"parallel={name}"]


@pytest.mark.parametrize("text", ["prompts", "=3", "a b=3", ""])
def test_what_is_no_override_is_refused(text: str):
    with pytest.raises(ConfigError, match="is not an override; write key=value"):
        rewrite([text])


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["serve", "Qwen/Qwen3-0.6B"], "'serve' is not an override; write job=serve checkpoint=Qwen/Qwen3-0.6B"),
        (
            ["Qwen/Qwen3-0.6B", "serve.http.port=1"],
            "'Qwen/Qwen3-0.6B' is not an override; write checkpoint=Qwen/Qwen3-0.6B",
        ),
        (["seed=1", "./model.gguf"], "'./model.gguf' is not an override; write checkpoint=./model.gguf"),
        (["explain"], "'explain' is not an override; write job=explain"),
        (["serve", "Qwen3"], "'serve' is not an override; write job=serve checkpoint=Qwen3"),
        (["run", "Qwen3"], "'run' is not an override; write job=chat checkpoint=Qwen3"),
        (
            ["run", "Qwen3", "Why is it so?"],
            "'run' is not an override; write job.chat=true checkpoint=Qwen3 prompts='Why is it so?'",
        ),
        (["serve", "one", "two"], "'serve' is not an override; write key=value; atom-run --help lists the keys"),
        (["help"], "'help' is not an override; write key=value; atom-run --help lists the keys"),
        (["model=~/qwen3"], "model=~/qwen3: model is the name of a file in conf/model; write checkpoint=~/qwen3"),
    ],
)
def test_a_word_that_may_be_a_job_or_a_checkpoint_is_refused_with_both_spellings(words: list[str], hint: str):
    with pytest.raises(ConfigError) as error:
        rewrite(words)
    assert str(error.value) == hint


def test_a_folder_with_a_config_may_be_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"'mine' is not an override; write checkpoint=mine$"):
        rewrite(["mine"])
    with pytest.raises(ConfigError, match=r"'other' is not an override; write key=value; atom-run --help"):
        rewrite(["other"])


def test_in_a_sweep_each_job_opens_the_recipe_unless_the_recipe_is_of_the_sweep(tmp_path: Path):
    (tmp_path / "one.yaml").write_text("overrides: [seed=1]\n")
    (tmp_path / "many.yaml").write_text("overrides: ['seed=1,2']\n")
    (tmp_path / "plugin.yaml").write_text("overrides: [hydra/sweeper=optuna]\n")
    opened = {name: rewrite([f"recipe={tmp_path}/{name}.yaml"], multirun=True) for name in ("one", "many", "plugin")}
    assert opened["one"] == [f"recipe={tmp_path}/one.yaml"]
    assert (opened["many"], opened["plugin"]) == (["seed=1,2"], ["hydra/sweeper=optuna"])


def test_what_cannot_be_written_as_an_override_is_refused():
    with pytest.raises(ConfigError, match="prompts: a value of type object"):
        override("prompts", object())
    for key in ("a#b", "null", "1e5", ".5", "-inf", True):
        with pytest.raises(ConfigError, match=f"the key {key!r}"):
            override("x", {key: 1})


def test_paths_and_numbers_of_other_libraries_are_written_plainly():
    import numpy as np

    assert override("checkpoint", Path("/a b")) == "checkpoint='/a b'"
    assert override("seed", np.int64(3)) == "seed=3"
    assert override("x", {5: np.float32(0.5)}) == "x={5:0.5}"


def test_a_recipe_goes_before_the_users_own(tmp_path: Path):
    (tmp_path / "r.yaml").write_text("about: {what: a test}\noverrides: [seed=1, 'prompts=a, b']\n")
    assert rewrite(["seed=2", f"recipe={tmp_path}/r.yaml"]) == ["seed=1", "prompts='a, b'", "seed=2"]


def test_a_recipe_is_found_by_name(tmp_path: Path):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.yaml").write_text("overrides: [seed=1]\n")
    assert rewrite(["recipe=mine"], config_dirs=[str(tmp_path)]) == ["seed=1"]
    with pytest.raises(
        ConfigError,
        match=r"recipe=mien: .* \(did you mean mine\?\); recipes: deepseek_r1_tp8_mtp, .*, demo, .*, mine, ",
    ):
        rewrite(["recipe=mien"], config_dirs=[str(tmp_path)])


def test_a_recipe_in_a_folder_of_another_name_is_not_found_and_the_error_names_the_folder(tmp_path: Path):
    (tmp_path / "right" / "recipes").mkdir(parents=True)
    (tmp_path / "wrong" / "recipe").mkdir(parents=True)
    (tmp_path / "wrong" / "recipe" / "mine.yaml").write_text("overrides: [seed=1]\n")
    dirs = [str(tmp_path / name) for name in ("right", "wrong")]
    with pytest.raises(ConfigError) as raised:
        rewrite(["recipe=mine"], config_dirs=dirs)
    assert str(raised.value).startswith("recipe=mine: there is no such file and no such recipe; recipes: ")
    assert str(raised.value).endswith(f"; {tmp_path}/wrong/recipe is not read: call it recipes")
    with pytest.raises(ConfigError, match=r"recipe=mine: .*, smollm2_greedy$"):
        rewrite(["recipe=mine"], config_dirs=dirs[:1])


def test_a_recipe_whose_file_ends_in_yml_is_refused_with_the_right_ending(tmp_path: Path):
    with pytest.raises(
        ConfigError, match=r"^recipe=bad\.yml: there is no such file .*; files of recipes end in \.yaml$"
    ):
        rewrite(["recipe=bad.yml"])
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "bad.yml").write_text("overrides: [seed=1]\n")
    for name in ("bad", "bad.yml"):
        with pytest.raises(ConfigError) as raised:
            rewrite([f"recipe={name}"], config_dirs=[str(tmp_path)])
        assert str(raised.value).endswith(f"; {tmp_path}/recipes/bad.yml is not read: call it bad.yaml")


@pytest.mark.parametrize(
    "text",
    [
        "[",
        "a string",
        "overrides: seed=1",
        "overrides: [1]",
        "overrides: []",
        "",
        "{overrides: [a=1], x: 1}",
    ],
)
def test_what_is_no_recipe_is_refused(tmp_path: Path, text: str):
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"r\.yaml"):
        read_recipe(str(tmp_path / "r.yaml"))


def test_a_recipe_names_no_other_recipe(tmp_path: Path):
    (tmp_path / "r.yaml").write_text("overrides: [recipe=r]")
    with pytest.raises(ConfigError, match="cannot name another"):
        read_recipe(str(tmp_path / "r.yaml"))


@settings(max_examples=30)
@given(st.lists(TEXT, min_size=1, max_size=2))
def test_a_written_recipe_gives_the_same_overrides(tmp_path_factory: pytest.TempPathFactory, prompts: list[str]):
    path = tmp_path_factory.mktemp("recipe") / "r.yaml"
    own = rewrite([override("prompts", prompts), "seed=3"])
    write_recipe(str(path), [*own, f"job.save_recipe={path}"], {"model": "x"})
    assert rewrite([f"recipe={path}"]) == own


def test_a_recipe_that_cannot_be_written_is_one_line():
    with pytest.raises(
        ConfigError, match=r"^job.save_recipe=/nope/x.yaml cannot be written: No such file or directory$"
    ):
        write_recipe("/nope/x.yaml", ["seed=3"], {})


@pytest.mark.parametrize(
    "text",
    [
        "serve=null",
        "+job=null",
        "quant@x=NULL",
        "parallel=1",
        "serve=true",
        "hydra/launcher=null",
        "gpu=null",
        "serve=[null]",
        "job=[bench,1]",
        f"quant={'x' * 300}",
    ],
)
def test_what_cannot_be_a_choice_of_a_group_is_refused_with_its_name(text: str):
    key = text.lstrip("+").partition("=")[0]
    with pytest.raises(ConfigError, match=rf"^{key}=\S+: it takes the name of a file; leave it out for its default$"):
        rewrite([text])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"seed={'9' * 4301}", "seed: a number has more digits than any field takes; quote it if it is a text"),
        (f"parallel=tp{'9' * 4301}", "parallel=tp999.*: it takes the name of a file"),
        (f"prompts={'[' * 3000}1{']' * 3000}", "prompts: it is nested deeper than 64$"),
        (f"prompts={'[' * 3000}", "prompts: it is nested deeper than 64$"),
        (f"sampling.logit_bias={'{a: ' * 300}1{'}' * 300}", "sampling.logit_bias: it is nested deeper than 64$"),
        (f"prompts=[{'1,' * 400_000}1]", r"prompts: there are more than 4,096 items; prompts=@FILE takes any number$"),
        ("prompts=[" + "'a, b'," * 400_000 + "'c']", r"prompts: there are more than 4,096 items; prompts=@FILE takes any"),
        (f"sampling.stop_token_ids=[{'1,' * 5000}1]", "sampling.stop_token_ids: there are more than 4,096 items$"),
    ],
)  # fmt: skip
def test_what_hydra_would_not_come_to_the_end_of_is_refused(text: str, message: str):
    with pytest.raises(ConfigError, match=f"^{message}"):
        find_source([text])


def test_commas_and_brackets_of_a_long_text_are_no_items():
    text = ("a, [b, (c " * 10_000).strip()
    assert plain(parse(rewrite([f"prompts={text}"])[0])) == text
    assert plain(parse(rewrite([override("prompts", [text, "x"])])[0])) == [text, "x"]


def test_a_number_of_bytes_has_any_number_of_digits():
    assert rewrite([f"serve.swap_space={'9' * 400}GB"]) == [f"serve.swap_space={'9' * 400}GB"]  # which is no number


@pytest.mark.parametrize("num_prompts", [5000, 400_000])
def test_a_recipe_with_more_prompts_than_hydra_takes_names_their_file(tmp_path: Path, num_prompts: int):
    (tmp_path / "r.yaml").write_text(f"prompts: [{'a,' * num_prompts}]")
    with pytest.raises(ConfigError, match="prompts=@FILE"):
        rewrite([f"recipe={tmp_path / 'r.yaml'}"])
