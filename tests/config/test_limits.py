"""What a resolved configuration hands to the runtime: limits of a step, and how tokens are drafted."""

from __future__ import annotations

from pathlib import Path

import pytest

from atom.config import Config
from atom.config.limits import Drafting, EngineLimits, SuffixLimits, acceptance_rates
from atom.config.load import load


def config_of(*overrides: str) -> Config:
    return load(["device=cpu", "dtype=fp32", *overrides])


def test_limits_are_those_of_the_fields_with_the_model_s_length_if_none_is_set():
    assert config_of("serve.max_num_seqs=7", "serve.max_num_batched_tokens=5").limits == EngineLimits(7, 5, 8192, 8)
    assert config_of("serve.max_model_len=64").limits.max_model_len == 64


def test_a_step_has_no_more_decodes_than_tokens():
    assert EngineLimits(7, 5, 100).max_decodes == 5
    assert EngineLimits(5, 7, 100).max_decodes == 5


def test_verified_tokens_are_those_of_the_device_if_none_are_set():
    assert config_of("serve.method=ngram", "serve.max_verified_tokens=33").limits.max_verified_tokens == 33
    assert load(["device=cuda"]).limits.max_verified_tokens == 128


def test_a_slot_keeps_a_state_more_than_the_drafts_of_a_step():
    drafting = config_of("serve.method=ngram", "serve.num_speculative_tokens=5").limits
    assert (drafting.num_drafts, drafting.num_states) == (5, 6)
    assert (config_of().limits.num_drafts, config_of().limits.num_states) == (0, 1)


@pytest.mark.parametrize(
    ("overrides", "drafts", "drafting"),
    [
        ([], None, None),
        (["serve.method=ngram"], Drafting(3, 2, 4), None),
        (["serve.method=ngram", "serve.prompt_lookup_max=1"], Drafting(3, 1, 1), None),
        (["serve.method=ngram", "device=cuda"], Drafting(3, 2, 4), Drafting(3, 2, 4)),
        (["serve.method=suffix"], Drafting(7, 2, 4, suffix=SuffixLimits(24, 10_000, 1.0, 0.1)), None),
        (
            [
                "device=cuda",
                "serve.method=suffix",
                "serve.num_speculative_tokens=5",
                "serve.suffix_decoding_max_tree_depth=9",
                "serve.suffix_decoding_max_cached_requests=0",
                "serve.suffix_decoding_max_spec_factor=1.5",
                "serve.suffix_decoding_min_token_prob=0",
            ],
            Drafting(5, 2, 4, suffix=SuffixLimits(9, 0, 1.5, 0)),
            Drafting(5, 2, 4, suffix=SuffixLimits(9, 0, 1.5, 0)),
        ),
        (
            ["serve.method=ngram", "load_dummy=true", "serve.acceptance_length=2.5"],
            Drafting(3, 2, 4, rates=(1.0, 0.5, 0.0)),
            Drafting(3, 2, 4, rates=(1.0, 0.5, 0.0)),
        ),
    ],
    ids=[
        "none",
        "by the host",
        "one token",
        "by the runner",
        "suffixes",
        "suffixes, verified by the runner",
        "by chance",
    ],
)
def test_the_host_looks_up_tokens_on_a_cpu_and_the_runner_does_all_else(
    overrides: list[str], drafts: Drafting | None, drafting: Drafting | None
):
    config = config_of(*overrides)
    assert (config.drafts, config.drafting) == (drafts, drafting)


def test_a_step_of_a_gpu_costs_as_much_for_longer_drafts_so_that_a_match_allows_more_of_them():
    drafts = load(["serve.method=suffix", "device=cuda"]).drafts
    assert drafts is not None and drafts.suffix == SuffixLimits(24, 10_000, 4.0, 0.1)


@pytest.mark.parametrize(
    ("overrides", "chooses"),
    [
        (["serve.method=ngram"], False),
        (["serve.method=ngram", "device=cuda"], True),
        (["serve.method=ngram", "device=cuda", "serve.max_verified_tokens=8"], False),
    ],
    ids=["the host's", "the runner's", "set"],
)
def test_measured_times_choose_the_runner_s_drafts_unless_a_number_is_set(overrides: list[str], chooses: bool):
    assert config_of(*overrides).chooses_drafts is chooses


def test_stages_overlap_without_drafts():
    assert not config_of().stages_overlap
    assert config_of("parallel.pipeline=2").stages_overlap
    assert not config_of("parallel.pipeline=2", "serve.method=ngram").stages_overlap


@pytest.mark.parametrize(
    ("length", "rates"),
    [(None, ()), (1.0, (0.0, 0.0, 0.0)), (2.5, (1.0, 0.5, 0.0)), (4.0, (1.0, 1.0, 1.0)), (9.0, (1.0, 1.0, 1.0))],
)
def test_rates_of_acceptance_add_up_to_a_step_s_length(length: float | None, rates: tuple[float, ...]):
    assert acceptance_rates(length, 3) == pytest.approx(rates)


def test_the_cache_folder_is_a_path(tmp_path: Path):
    assert config_of(f"cache={tmp_path}").cache_folder == tmp_path
