from __future__ import annotations

import re

import pytest
from omegaconf.errors import ConfigKeyError

from atom.config import Config
from atom.config.hydra_errors import explain, unknown_key
from atom.config.load import load
from atom.config.schema_keys import keys
from atom.config.spelling import MOVED
from atom.config.transformers_words import HINTS
from atom.errors import ConfigError


def test_an_argument_of_transformers_is_answered_with_what_it_is_here():
    assert str(unknown_key("torch_dtype", Config)) == "torch_dtype as in transformers: write dtype"
    assert "write sampling.max_tokens" in str(unknown_key("sampling.max_new_tokens", Config))
    assert not HINTS.keys() & set(keys(Config)), "these are known"
    fields = re.findall(r"[a-z]+\.[a-z_]+|(?<=write )[a-z]+", " ".join(HINTS.values()))
    assert set(fields) <= set(keys(Config)) and len(fields) > 10


def test_an_unknown_key_is_sought_near_then_everywhere():
    assert "did you mean temperature?" in str(unknown_key("sampling.temprature", Config))
    assert "did you mean serve.max_num_seqs?" in str(unknown_key("max_num_seq", Config))
    assert "did you mean" not in str(unknown_key("nope", Config))


def test_keys_that_users_cannot_set_are_not_named_in_place_of_an_unknown_one():
    message = str(unknown_key("nope", Config))
    assert "prompts, images, recipe, cache, model, " in message and "hf" not in message and "overrides" not in message


def test_an_error_with_circular_causes_is_reported_in_one_line():
    """As one that is kept and raised anew may be its own cause."""
    first, second = ConfigKeyError("one\ntwo"), ConfigKeyError("three")
    first.__cause__, second.__cause__ = second, first
    assert isinstance(error := explain(first, Config), ConfigError) and "\n" not in str(error)


@pytest.mark.parametrize(
    ("override", "error"),
    [
        ("serve.http.read_seconds=3", "serve.http.read_seconds is now advanced.read_seconds; set that"),
        ("+serve.http.listen_fds=1", "serve.http.listen_fds is now advanced.listen_fds; set that"),
        ("serve.http={max_values: 3000}", "serve.http.max_values is now advanced.max_values; set that"),
        ("parallel.torchrun.rank=1", "parallel.torchrun is now advanced.torchrun; set that"),
        ("parallel.torchrun={rank: 1}", "parallel.torchrun is now advanced.torchrun; set that"),
        ("serve={tensor_parallel_size: 2}", "serve.tensor_parallel_size is now parallel.tensor; set that"),
    ],
)
def test_a_former_name_is_refused_with_the_present_one(override: str, error: str):
    with pytest.raises(ConfigError, match=f"^{re.escape(error)}$"):
        load([override])


@pytest.mark.parametrize("former", MOVED)
def test_what_a_former_name_is_now_is_a_field_or_a_block(former: str):
    assert not any(f"{key}.".startswith(f"{former}.") for key in keys(Config))
    assert any(f"{key}.".startswith(f"{MOVED[former]}.") for key in keys(Config))
