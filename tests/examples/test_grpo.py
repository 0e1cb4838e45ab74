"""The GRPO loop: a trainer and a server that share HTTP and a file, and the reward rises."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from atom.examples.grpo import main, serve


@pytest.mark.slow
def test_the_reward_rises_by_the_weights_that_the_server_is_given(capsys: pytest.CaptureFixture[str]):
    assert main(["--steps", "12", "--seed", "0"]) == 0
    lines = re.findall(r"step +(\d+): reward ([\d.]+) by (\S+), (\S+) apart", capsys.readouterr().out)
    steps, rewards, versions, apart = zip(*lines, strict=True)
    assert list(map(int, steps)) == list(range(13))
    assert list(versions) == ["default", *(f"step-{step}" for step in range(1, 13))]
    assert all(float(each) < 1e-4 for each in apart), (
        "the server's log probabilities are those of the trainer's weights"
    )
    assert 0.4 < float(rewards[0]) < 0.6, "half of the tokens are even"
    assert sum(map(float, rewards[-3:])) / 3 > 0.8


def test_a_server_that_ends_at_its_start_is_an_error(tmp_path: Path):
    with pytest.raises(RuntimeError, match="has ended with exit code 2"), serve(str(tmp_path / "nothing")):
        raise AssertionError("it serves")
