"""The models of serve.models: what each is loaded from, and what an entry may not say."""

from __future__ import annotations

from pathlib import Path

import pytest

from atom.config.load import load, load_models
from atom.config.several import split_models
from atom.errors import AtomError, ConfigError

NAMED = "demo serve.http.served_model_name=[other]"


def test_an_entry_overrides_what_holds_for_all(tmp_path: Path):
    file = tmp_path / "b.yaml"
    file.write_text("level: 0\nserve: {max_model_len: 128, http: {served_model_name: [b]}}\n")
    given = [f"serve.models=['demo serve.idle_sleep_seconds=null', '{file} serve.max_model_len=256']"]
    first, second = load_models(load([*given, "level=1", "serve.idle_sleep_seconds=60", "serve.http.port=9000"]))
    assert (first.level, second.level) == (1, 0)
    assert (first.serve.idle_sleep_seconds, second.serve.idle_sleep_seconds) == (None, 60)
    assert (first.serve.max_model_len, second.serve.max_model_len) == (8192, 256), "overrides come after their recipe"
    assert first.serve.http.port == second.serve.http.port == 9000
    assert first.job.kind == second.job.kind == "serve", "the recipe demo is of job=generate otherwise"
    assert (first.served_names, second.served_names) == (["smollm2"], ["b"])


def test_models_may_be_listed_in_a_recipe(tmp_path: Path):
    file = tmp_path / "all.yaml"
    file.write_text(f"serve:\n  max_awake: 1\n  models:\n  - demo\n  - {NAMED}\n")
    configs = load_models(load([f"recipe={file}"]))
    assert [each.served_names for each in configs] == [["smollm2"], ["other"]]
    assert all(each.serve.max_awake == 1 for each in configs)


def test_a_folder_or_a_hub_id_is_a_checkpoint_and_any_other_word_a_recipe(tmp_path: Path):
    entries = split_models([f"serve.models=['{tmp_path}', 'Qwen/Qwen3-0.6B level=1', demo]"])
    assert [each.overrides[1] for each in entries[:2]] == [f"checkpoint='{tmp_path}'", "checkpoint='Qwen/Qwen3-0.6B'"]
    assert "job.chat=true" in entries[2].overrides


@pytest.mark.parametrize(
    ("entries", "fault"),
    [
        ("[demo, nowhere.yaml]", "serve.models: nowhere.yaml: recipe=nowhere.yaml: there is no such file"),
        ("[demo, '/no/where']", "serve.models: /no/where: no checkpoint '/no/where'"),
        ("[demo, 'demo serve.max_model_le=1']", "serve.models: demo serve.max_model_le=1: serve.max_model_le: there"),
        ("['demo serve.max_model_len=1000000']", "serve.models: demo serve.max_model_len=1000000: serve.max_model_len"),
        ("[demo, 'demo serve.http.port=1']", "serve.http.port is of the whole server; set it outside of serve.models"),
        ("[demo, 'demo serve.max_awake=1']", "serve.max_awake is of the whole server"),
        ("[demo, 'demo job=chat']", "serve.models: demo job=chat: job is of no model; leave it out"),
        ("[demo, '']", "serve.models: an entry is empty; name a recipe or a checkpoint"),
        ("[demo, 'demo \"']", "No closing quotation; close it"),
        ("[checkpoint=/x level=1, demo]", "quote each entry that has spaces or ="),
        ("[demo, demo]", "serve.models: two models are called smollm2; name one in its entry"),
    ],
)
def test_what_is_wrong_with_an_entry_is_one_line_that_names_it(entries: str, fault: str):
    with pytest.raises(AtomError) as raised:
        load_models(load([f"serve.models={entries}"]))
    assert fault in str(raised.value) and "\n" not in str(raised.value)


def test_another_job_has_no_several_models():
    with pytest.raises(ConfigError, match="job=explain is of one model"):
        load(["job=explain", "serve.models=[demo]"])
    assert load(["job=serve", "serve.models=[demo]"]).job.kind == "serve"


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("serve.max_awake=1", "is of several models; set serve.models"),
        ("serve.spare_engine=true", "is for models that wake up"),
        ("serve.idle_sleep_level=1", "needs serve.enable_sleep_mode=true"),
        ("serve={models: [demo]}", "write serve.models="),
        ("other_models=[[]]", "read from serve.models and cannot be set"),
    ],
)
def test_what_would_have_no_effect_is_refused(override: str, fault: str):
    with pytest.raises(ConfigError, match=fault):
        load([override])
