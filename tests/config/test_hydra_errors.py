from __future__ import annotations

import re

from omegaconf.errors import ConfigKeyError

from atom.config import Config
from atom.config.hydra_errors import explain, unknown_key
from atom.config.schema_keys import keys
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
    told = str(unknown_key("nope", Config))
    assert "prompts, recipe, cache, model, " in told and "hf" not in told and "overrides" not in told


def test_an_error_whose_causes_go_round_is_told_in_a_line():
    """As one that is kept and raised anew may be its own cause."""
    first, second = ConfigKeyError("one\ntwo"), ConfigKeyError("three")
    first.__cause__, second.__cause__ = second, first
    assert isinstance(error := explain(first, Config), ConfigError) and "\n" not in str(error)
