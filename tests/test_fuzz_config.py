"""A config.json or a command line with a value of any kind in any place: it is taken, or refused in one line."""

from __future__ import annotations

import copy
import io
import json
import re
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atom.checkpoint import open_checkpoint, stop_ids
from atom.config import Config
from atom.config.folders import CONF
from atom.config.load import load
from atom.config.schema_keys import keys
from atom.errors import AtomError
from atom.jobs.explain import job as explain
from atom.jobs.start import choose_job, load_job

VALUES = [
    {},
    [],
    [[1]],
    [{}],
    [None],
    {"a": [1]},
    "x",
    "1",
    -1,
    0,
    1,
    2**63,
    10**30,
    0.5,
    1e308,
    float("nan"),
    None,
    True,
]
FAMILIES = ["llama", "qwen3_moe", "deepseek_v3", "gemma3", "gpt_oss", "phi3_longrope", "minimax_m2", "smollm3"]
ASKED = sorted(  # what the model files ask of a config.json
    {
        key
        for file in (CONF / "model").glob("*.yaml")
        for key in re.findall(r"\$\{(?:hf|stated):([\w.]+)", file.read_text())
    }
    | {"architectures", "model_type", "eos_token_id", "torch_dtype", "rope_scaling", "quantization_config"}
)


STATED = ["null", "", "[]", "{}", "x", "-1", "0", "1.5", "true", "1" + "0" * 25, "9" * 4301, "1e400", "nan", "???", "${nope}",
          "${oc.env:NOPE}", "${hf:x}", "[[[1]]]", "{a: {b: 1}}", "'x", "@x", "a,b", "\x00", "[" * 3000, "[null]", "[{}]"]  # fmt: skip
GROUPS = ["serve", "model", "quant", "job", "parallel", "gpu", "hydra/launcher", "model.mlp.width", "serve.http"]
KEYS = sorted({key.replace(".0.", ".1.") for key in keys(Config)} | set(keys(Config)) | set(GROUPS))


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*at, key))


def changed(config: dict[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    config = copy.deepcopy(config)
    inside: Any = config
    for key in place[:-1]:
        if isinstance(inside, dict):
            inside = inside.setdefault(key, {})
        elif isinstance(inside, list) and inside and isinstance(key, int):
            inside = inside[0]
    if isinstance(inside, dict) or (isinstance(inside, list) and inside and isinstance(place[-1], int)):
        inside[place[-1]] = value  # else another change has taken its place
    return config


def check(folder: Path, draw: Callable[[st.SearchStrategy[Any]], Any], configs: dict[str, dict[str, Any]]) -> None:
    config = configs[draw(st.sampled_from(sorted(configs)))]
    known = [place for place in places(config) if place]
    asked = [tuple(key.split(".")) for key in ASKED]
    for _ in range(draw(st.integers(1, 2))):
        config = changed(config, draw(st.sampled_from([*known, *asked])), draw(st.sampled_from(VALUES)))
    (folder / "config.json").write_text(json.dumps(config))
    try:
        loaded = load(
            [f"checkpoint={folder}", "job=explain", "device=cpu", "level=0", "serve.kv_cache_memory=100000000"]
        )
        stop_ids(open_checkpoint(str(folder)), None)
        with redirect_stdout(io.StringIO()):
            explain.run(loaded)
    except AtomError as error:
        assert "\n" not in str(error)


@pytest.fixture(scope="module")
def configs(checkpoints: Callable[[str], Path]) -> dict[str, dict[str, Any]]:
    return {name: json.loads((checkpoints(name) / "config.json").read_text()) for name in FAMILIES}


fuzz = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@given(st.data())
@settings(fuzz, max_examples=20)
def test_a_value_of_any_kind_in_any_place_is_taken_or_named(tmp_path: Path, configs: Any, data: st.DataObject) -> None:
    check(tmp_path, data.draw, configs)


def check_override(sign: str, key: str, value: str) -> None:
    try:
        load_job(choose_job([f"{sign}{key}={value}", *([] if key == "job" else ["job=explain"])]))
    except AtomError as error:
        assert "\n" not in str(error) and error.exit_code == 2


@given(st.sampled_from(["", "+", "++"]), st.sampled_from(KEYS), st.sampled_from(STATED))
@settings(fuzz, max_examples=20)
def test_an_override_of_any_key_and_value_is_taken_or_named(sign: str, key: str, value: str) -> None:
    check_override(sign, key, value)


@pytest.mark.slow
@given(st.sampled_from(["", "+", "++"]), st.sampled_from(KEYS), st.sampled_from(STATED))
@settings(fuzz, max_examples=3000)
def test_many_overrides_of_any_key_and_value_are_taken_or_named(sign: str, key: str, value: str) -> None:
    check_override(sign, key, value)


@pytest.mark.slow
@given(st.data())
@settings(fuzz, max_examples=2000)
def test_many_values_of_any_kind_in_any_place_are_taken_or_named(
    tmp_path: Path, configs: Any, data: st.DataObject
) -> None:
    check(tmp_path, data.draw, configs)
