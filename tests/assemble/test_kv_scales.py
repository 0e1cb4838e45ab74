"""Where the scales of an fp8 cache come from that the checkpoint does not have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from atom.assemble.kv_scales import gather_kv_scales, keep_kv_scales, plan_kv_scales, set_kv_scales
from atom.errors import ArtifactError, RequestError
from atom.graph import Mesh
from atom.runtime.kv.scales import ScalePlan


class Store:
    def __init__(self, names: list[str], kept: dict[str, float] | None = None) -> None:
        self.names, self.kept = names, kept
        self.cache = SimpleNamespace(warnings=list[str](), close=lambda: None)

    def read(self) -> dict[str, float] | None:
        return self.kept

    def write(self, values: dict[str, float]) -> None:
        raise ArtifactError("no room")


def vocabulary(tokens: list[int] | None) -> Any:
    def tokenize(text: str) -> list[int]:
        if tokens is None:
            raise RequestError("too slow")
        return tokens

    return SimpleNamespace(tokenizer=object(), tokenize=tokenize)


def plan(store: Store, tokens: list[int] | None = [1, 2], is_random: bool = False) -> ScalePlan:  # noqa: B006
    of: Any = store
    return plan_kv_scales(of, vocabulary(tokens), is_random=is_random)


def test_scales_are_kept_ones_or_measured_over_a_prompt():
    assert plan(Store([])) == ScalePlan(), "the checkpoint has all"
    assert plan(Store(["k"], {"k": 0.5})) == ScalePlan({"k": 0.5})
    assert plan(Store(["k"])) == ScalePlan(tokens=[1, 2])


@pytest.mark.parametrize(
    ("tokens", "is_random", "why"),
    [([1], True, "weights are random"), (None, False, "its tokenizer cannot be used to measure them: too slow")],
)
def test_without_a_prompt_scales_are_1_and_the_reason_is_printed(
    tokens: list[int] | None, is_random: bool, why: str, capsys: pytest.CaptureFixture[str]
):
    assert plan(Store(["k"], {"k": 0.5} if is_random else None), tokens, is_random) == ScalePlan()
    assert f"{why}; 1.0 is used" in capsys.readouterr().err


def test_known_scales_are_set_and_only_others_are_measured():
    used: list[dict[str, float]] = []
    scales: Any = SimpleNamespace(use=used.append)
    assert set_kv_scales(scales, ScalePlan({"k": 0.5}), Mesh()) is None and used == [{"k": 0.5}]
    assert set_kv_scales(scales, ScalePlan(tokens=[1]), Mesh()) is not None and len(used) == 1


def test_scales_of_all_stages_are_put_together():
    scales: Any = SimpleNamespace(values=lambda: {"layers.0.k": 0.5})
    other = msgspec.msgpack.encode({"layers.1.k": 2.0})
    assert gather_kv_scales(scales, lambda own: [own, other]) == {"layers.0.k": 0.5, "layers.1.k": 2.0}


def test_scales_that_cannot_be_kept_are_measured_again(capsys: pytest.CaptureFixture[str]):
    store: Any = Store(["k"])
    keep_kv_scales(store, {"k": 0.5}, 7)
    err = capsys.readouterr().err
    assert "the next start measures them again: no room" in err and "measured over 7 tokens" in err
