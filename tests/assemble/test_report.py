"""What is printed on stderr of an engine that was opened."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from kinds import full_kind, recurrent_kind

from atom.assemble.report import report_engine, report_unused
from atom.config.load import load
from atom.runtime.types import SwapCosts

KINDS = [full_kind(8, 16)]


def report(capsys: pytest.CaptureFixture[str], *overrides: str, host: Any = None, blocks: int = 17) -> str:
    config = load(["device=cpu", "serve.max_model_len=64", "serve.block_size=16", *overrides])
    report_engine(KINDS, {"full": blocks}, config.limits, host, config)
    return capsys.readouterr().err


def test_the_pool_is_counted_in_tokens_and_in_requests_of_the_max_length(capsys: pytest.CaptureFixture[str]):
    assert "KV: 256 tokens, 4 requests at max_model_len\n" in report(capsys)  # 16 blocks, 4 a request
    assert "KV: 64 tokens, 1 request at max_model_len\n" in report(capsys, blocks=5)


def test_recurrent_state_is_counted_in_sequences_and_copies(capsys: pytest.CaptureFixture[str]):
    config = load(["device=cpu", "serve.max_model_len=64", "serve.block_size=16", "serve.max_num_seqs=8"])
    state = recurrent_kind(3 << 19)
    report_engine([*KINDS, state], {"full": 17, "state": 5}, config.limits, None, config)
    printed = "KV: 256 tokens, 4 requests at max_model_len; recurrent state: 8 sequences of 1.5 MiB, 4 copies\n"
    assert printed in capsys.readouterr().err
    report_engine([state], {"state": 5}, config.limits, None, config)
    assert "atom-run: recurrent state: 8 sequences of 1.5 MiB, 4 copies\n" in capsys.readouterr().err
    report_engine([state], {"state": 5}, replace(config.limits, num_drafts=3), None, config)
    assert "recurrent state: 8 sequences of 4 states in 6 MiB, 4 copies\n" in capsys.readouterr().err


def test_blocks_on_the_host_are_listed_with_what_they_cost(capsys: pytest.CaptureFixture[str]):
    host = SimpleNamespace(num_blocks={"full": 5}, costs=SwapCosts(1e-3, 2e-6, 5e-5))
    assert "KV on the host: 64 tokens, 2 us a token to load, 50 to compute\n" in report(capsys, host=host)


def test_values_of_generation_config_without_an_effect_are_named(capsys: pytest.CaptureFixture[str]):
    report_unused({"num_beams": 4, "temperature": 0.5}, load(["device=cpu"]))
    assert "generation_config.json, though it changes answers in transformers: num_beams 4" in capsys.readouterr().err
    report_unused({"num_beams": 4}, load(["device=cpu", "sampling.defaults=none"]))
    assert capsys.readouterr().err == ""
