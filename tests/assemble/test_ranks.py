"""What ranks exchange before they run, and what the driver refuses."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from atom.assemble.ranks import RankModel, check_placed, check_same_weights, compare_ranks, config_of, sample_weights
from atom.config.load import load
from atom.errors import CheckpointError, ConfigError, EngineDeadError
from atom.graph import Mesh, Share, Type, W
from atom.runtime.types import StateKind
from atom.state_rules import TokenRule

NORM = W("norm", Type("fp32", (4,)))
ONE, OTHER = b"1", b"2"


def described(weights: bytes, kind: str) -> bytes:
    return msgspec.msgpack.encode(RankModel(weights, [StateKind(kind, TokenRule(), 32, 4)], {}))


def test_the_models_of_stages_are_those_of_their_first_ranks():
    mesh = Mesh(tensor=2, pipeline=2)
    stages = compare_ranks([described(ONE, "full")] * 2 + [described(OTHER, "window_6")] * 2, mesh)
    assert [[kind.name for kind in stage.kinds] for stage in stages] == [["full"], ["window_6"]]


def test_a_rank_with_other_weights_than_the_first_of_its_stage_is_named():
    with pytest.raises(
        CheckpointError, match=r"^rank 3 has other weights than rank 2: each host needs the same files$"
    ):
        compare_ranks([described(ONE, "full")] * 2 + [described(ONE, "full"), described(OTHER, "full")],
                      Mesh(tensor=2, pipeline=2))  # fmt: skip
    check_same_weights([ONE, ONE])


def test_samples_differ_with_whole_weights_and_not_with_a_rank_s_part():
    part = Share(W("up", Type("fp32", (4, 4))), "tensor", 2)
    first = sample_weights({NORM: torch.ones(4), part: torch.zeros(2, 4)})
    assert first == sample_weights({NORM: torch.ones(4), part: torch.ones(2, 4)})
    assert first != sample_weights({NORM: torch.tensor([1.0, 1.0, 1.0, 2.0]), part: torch.zeros(2, 4)})


def test_a_process_that_has_ended_is_not_waited_for():
    alive: Any = SimpleNamespace(has_ended=False)
    ended: Any = SimpleNamespace(has_ended=True)
    check_placed([alive, alive])
    with pytest.raises(EngineDeadError, match=r"^rank 2 has ended$"):
        check_placed([alive, ended])


class Channel:
    """A rank on another host that was started with these overrides."""

    def __init__(self, *overrides: str) -> None:
        config = load([*overrides])
        http = replace(config.serve.http, api_keys=None)
        config = replace(config, overrides=[], serve=replace(config.serve, http=http))
        self.hello, self.refused = msgspec.msgpack.encode(config), list[str]()

    def refuse(self, reason: str) -> None:
        self.refused.append(reason)


SAME = ["device=cpu", "parallel=tp3", "job=explain"]


def test_a_rank_keeps_the_folders_and_the_environment_of_its_own_host():
    own: Any = Channel(*SAME, "cache=/there", "parallel.host=10.0.0.2", "advanced.torchrun.rank=1")
    config = config_of(own, 1, load([*SAME, "cache=/here", "advanced.torchrun.rank=0"]))
    assert (config.cache, config.parallel.host, config.advanced.torchrun.rank) == ("/there", "10.0.0.2", "1")


def test_ranks_of_a_budget_take_the_formats_that_the_driver_has_measured():
    own: Any = Channel(*SAME, "quant=budget")
    driver = load([*SAME, "quant=budget"])
    formats = {"model.layers.0.mlp.down_proj": "int4[1, 128]"}
    settled = replace(driver, quant=replace(driver.quant, fmt="none", formats=formats, max_kl=None))
    assert config_of(own, 1, settled).quant == settled.quant


@pytest.mark.parametrize(
    ("other", "name"),
    [("seed=1", "seed"), ("serve.block_size=32", "serve"), ("advanced.max_values=2000", "advanced")],
)
def test_a_rank_whose_command_line_differs_is_refused_and_is_sent_the_reason(other: str, name: str):
    job = ["job=generate"] if not other.startswith("advanced") else ["job=serve"]
    same = [each for each in SAME if not each.startswith("job=")] + job
    own: Any = Channel(*same, other)
    with pytest.raises(ConfigError, match=f"^rank 1: its command line differs in {name}; give all ranks the same one$"):
        config_of(own, 1, load(same))
    assert own.refused == [f"its command line differs in {name}; give all ranks the same one"]
