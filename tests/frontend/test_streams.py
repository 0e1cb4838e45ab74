"""Hyper-connections as other families have them, and what does not fit them."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from semantic import assert_same_as_transformers
from transformers import HYV4Config
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextHyperHead
from transformers.models.hy_v4.modeling_hy_v4 import HYV4HyperConnection

from atom import LLMEngine
from atom.config.load import load
from atom.errors import AtomError, CheckpointError

EPS, WRITE_SCALE = 0.02, 1.5


def unmixed(connection: Any, hidden: int) -> Any:
    """A connection of DeepSeek-V4 as HY4's, which has the first rows of its weights and leaves streams as they are."""
    num, streams = 2 * connection.hc_mult, connection.hc_mult
    made = HYV4HyperConnection(
        HYV4Config(hidden_size=hidden, hc_mult=streams, hc_magnitude=WRITE_SCALE, hc_eps=EPS, rms_norm_eps=1e-6)
    )
    made.load_state_dict(
        {"fn": connection.fn[:num].float(), "base": connection.base[:num], "scale": connection.scale[:2]}
    )

    def forward(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        post, read = made(x)
        return post, torch.eye(streams).expand(*x.shape[:2], -1, -1), read

    connection.forward = types.MethodType(forward, connection)
    return connection


def test_streams_that_are_not_mixed_and_whose_mean_is_the_result(tmp_path: Path):
    folder = tmp_path / "model"
    model = tiny.save_changed("deepseek_v4", folder).eval()
    for layer in model.model.layers:
        unmixed(layer.attn_hc, model.config.hidden_size)
        unmixed(layer.ffn_hc, model.config.hidden_size)
    model.model.hc_head = Glm5NextTextHyperHead()
    rows = {"_fn": 2 * model.config.hc_mult, "_base": 2 * model.config.hc_mult, "_scale": 2}
    stored = {
        name: tensor[: next((rows[end] for end in rows if ".hc_" in name and name.endswith(end)), len(tensor))].clone()
        for name, tensor in load_file(folder / "model.safetensors").items()
        if "hc_head" not in name
    }
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    fields = {"rounds": 0, "eps": EPS, "write_scale": WRITE_SCALE, "write_eps": EPS, "merge": "mean"}
    overrides = [f"model.streams.{name}={value}" for name, value in fields.items()]
    assert_same_as_transformers(load([f"checkpoint={folder}", "dtype=fp32", *overrides]), model)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.streams.num=1"], r"model.streams.num=1: kind hyper is of several streams"),
        (["model.streams.kind=altup"], r"model.streams.rounds=5 is for kind hyper, not for kind altup"),
        (["model.residual=parallel"], r"model.streams.kind=hyper: model.residual=parallel is of blocks that are added"),
        (["model.block_scales={mlp:{kept:0.5}}"], r"model.block_scales.\*.kept is of blocks that are added"),
        (["model.attention.o_groups=3"], r"model.attention.heads=8 is not a multiple of o_groups=3"),
        (["model.attention.o_rank=null"], r"model.attention.o_rank has no value; kind mqa needs it"),
        (["model.attention.kv_heads=2"], r"model.attention.kv_heads=2: kind mqa has one key for all heads"),
        (["model.attention.qk_norm=whole"], r"model.attention.qk_norm=whole is not supported for kind mqa"),
        (["model.mlp.1.router.bias=true"], r"model.mlp.1.router.bias=true is not supported for method by_token"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_line(overrides: list[str], message: str, checkpoints: Any):
    with pytest.raises(AtomError, match=message):
        load([f"checkpoint={checkpoints('deepseek_v4')}", *overrides])


def test_missing_and_misshapen_tensors_are_one_line(tmp_path: Path):
    folder = tmp_path / "model"
    model = tiny.save_changed("deepseek_v4", folder).eval()
    stored = load_file(folder / "model.safetensors")
    for change, message in (
        (lambda name: None, r"no tensor layers.0.ffn.gate.tid2eid"),
        (lambda name: stored[name][:, :1].clone(), r"tensor layers.0.ffn.gate.tid2eid is \[101, 1\]"),
    ):
        name = "model.layers.0.ffn.gate.tid2eid"
        tensor = change(name)
        own = {key: each for key, each in stored.items() if key != name} | ({} if tensor is None else {name: tensor})
        save_file(own, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(AtomError, match=message):
            assert_same_as_transformers(load([f"checkpoint={folder}", "dtype=fp32"]), model)


@pytest.mark.parametrize(("shift", "wrong"), [(1, 6), (-1, -1)])
def test_a_table_that_lists_an_expert_the_layer_does_not_have_is_one_line(shift: int, wrong: int, tmp_path: Path):
    """On a GPU it would be read from outside the experts' weights."""
    tiny.save_changed("deepseek_v4", tmp_path)
    stored, name = load_file(tmp_path / "model.safetensors"), "layers.0.ffn.gate.tid2eid"
    stored[f"model.{name}"] += shift
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"^tensor {name} lists expert {wrong}; the layer has 0 to 5$"):
        LLMEngine(model=str(tmp_path), dtype="fp32", level=0, kv_cache_memory=1 << 22)
