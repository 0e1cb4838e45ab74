"""Which blocks a layer has, by its type."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atom.config.load import load
from atom.errors import AtomError

HF = {"architectures": ["OwnForCausalLM"], "hidden_size": 48, "num_hidden_layers": 5, "num_attention_heads": 4,
      "num_key_value_heads": 2, "intermediate_size": 80, "vocab_size": 101, "max_position_embeddings": 256}  # fmt: skip
OWN = "defaults: [decoder, _self_]\narchitectures: [OwnForCausalLM]\n"

Load = Callable[..., Any]


@pytest.fixture
def load_own(tmp_path: Path) -> Load:
    """Loads a model file of these further lines."""

    def load_lines(lines: str, *overrides: str) -> Any:
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "own.yaml").write_text(OWN + lines)
        (tmp_path / "config.json").write_text(json.dumps(HF))
        return load([f"checkpoint={tmp_path}", *overrides], config_dirs=[str(tmp_path)]).model

    return load_lines


BLOCKS = """
layer_pattern: [conv, full_attention, mlp]
branches: {conv: [conv, narrow], mlp: [wide]}
blocks:
  conv: {short_conv: {taps: 4}}
  narrow: {mlp: {kind: plain, width: 20, activation: gelu_new}}
  wide: {mlp: {kind: moe, experts: 6, top_k: 2, width: 24, shared: 1}}
"""


def test_a_pattern_repeats_over_the_layers_and_a_type_without_branches_has_attention_and_mlp(load_own: Load):
    model = load_own(BLOCKS)
    conv, full, mlp = ["conv", "narrow"], ["attention", "mlp"], ["wide"]
    assert [model.branches_of(layer) for layer in range(model.layers)] == [conv, full, mlp, conv, full]
    assert [model.keeps_state(layer) for layer in range(5)] == [True, True, False, True, True]


def test_blocks_are_completed_as_attention_and_mlp_are(load_own: Load):
    model = load_own(
        f"{BLOCKS}  small: {{attention: {{heads: 3, head_dim: 10}}}}\n", "model.blocks.narrow.mlp.width=28"
    )
    narrow, wide, small = model.blocks["narrow"].mlp, model.blocks["wide"].mlp, model.blocks["small"].attention
    assert (narrow.width, narrow.activation) == (28, "gelu_tanh")
    assert (wide.shared_width, wide.router.score) == (24, "softmax")
    assert (small.kv_heads, small.scale, small.rope.dims) == (3, 10**-0.5, 10)
    assert (model.attentions, model.mlps) == ([model.attention], [*model.mlp, narrow, wide]), "no layer has small"
    assert replace(model, branches={"mlp": ["small"]}).attentions == [model.attention, small]


def test_layers_after_the_body_have_no_type_unless_they_are_like_one_of_it(load_own: Load):
    model = load_own(BLOCKS, "model.layer_types=[mlp,mlp,mlp,mlp,conv]", "model.mtp_layers=1")
    assert (model.layer_type(5), model.branches_of(5)) == (None, ["attention", "mlp"])
    assert replace(model, mtp_like=4).layer_type(5) == "conv"


def test_listed_types_come_before_a_pattern(load_own: Load):
    model = load_own(BLOCKS, "model.layer_types=[mlp,mlp,conv,mlp,mlp]")
    assert [len(model.branches_of(layer)) for layer in range(5)] == [1, 1, 2, 1, 1]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("lines", "overrides", "message"),
    [
        ("branches: {conv: [convs, mlp]}", [], "model.branches.conv: there is no block convs (did you mean conv?); blocks: attention, mlp, conv"),
        ("branches: {conv: [conv, mlp, mlp]}", [], "model.branches.conv has 3 blocks; a layer has 2 at most"),
        ("embedding_norm_weight: false", [], "model.embedding_norm_weight is false, and no norm is of the embedding; leave it out"),
        ("embedding_rows: 3", [], "model.embedding_rows=3 are fewer than model.vocab=101"),
        ("branches: {conv: conv}", [], "model.branches.conv is a list; write model.branches.conv=[…]"),
        ("branches: {conv: [conv, mlp]}", ["model.layer_pattern=[convs]"], "model.layer_pattern: layer type convs is not supported (supported: full_attention, sliding_attention, conv)"),
        ("  mlp: {mlp: {width: 8}}", [], "model.blocks.mlp: the block mlp is model.mlp; choose another name"),
        ("  own: {}", [], "model.blocks.own has no kind; it takes one of attention, mlp, short_conv, gated_delta, mamba2, mamba, lightning"),
        ("", ["model.blocks.conv.mlp={width: 8}"], "model.blocks.conv has mlp and short_conv; it takes one of attention, mlp, short_conv, gated_delta, mamba2, mamba, lightning"),
        ("", ["model.blocks.conv.short_conv.taps=1"], "model.blocks.conv.short_conv.taps=1 must be a whole number from 2 to 1024"),
        ("", ["model.blocks.conv.short_conv.tapz=3"], "model.blocks.conv.short_conv.tapz: there is no such field (did you mean taps?); model.blocks.short_conv has: taps, bias"),
        ("", ["model.blocks.conv.long_conv.taps=3"], "model.blocks.conv.long_conv: there is no such field; model.blocks has: attention, mlp, short_conv, gated_delta, mamba2, mamba, lightning"),
        ("  own: {mlp: {width: 8, first: 2}}", [], "model.blocks.own.mlp.first=2: layers have the block if model.branches says so; leave it out"),
        ("  own: {mlp: {width: 8, kind: dense}}", [], "model.blocks.own.mlp.kind=dense: there is no such choice; choices: gated, plain, moe, laurel"),
        ("  own: {mlp: {kind: plain, width: 8, sparsity: [0.5, 0, 0, 0, 0]}}", [], "model.blocks.own.mlp.sparsity is for kind gated, not for kind plain"),
        ("  own: {mlp: {width: 8, sparsity: [0.5, 1.0, 0, 0, 0]}}", [], "model.blocks.own.mlp.sparsity: 1.0 is not a share from 0 to less than 1"),
        ("  own: {mlp: {width: 8, widths: [8, 8]}}", [], "model.blocks.own.mlp.widths names only 2 layers, the model has 5"),
        ("  own: {mlp: {width: 8, widths: [8, 8, 0, 8, 8]}}", [], "model.blocks.own.mlp.widths: 0 is not a number from 1 to 2147483647"),
        ("", ["model.attention.cca_taps=2", "model.attention.qk_norm=per_head"], "model.attention.qk_norm=per_head is not supported with cca_taps=2"),
        ("", ["model.attention.cca_taps=2", "model.attention.kv_heads=1", "model.attention.head_dim=9"], "model.attention: 9 columns of values do not divide into halves with cca_taps=2"),
        ("block_scales: {mlp: {stored: true}}", ["model.residual=parallel"], "model.block_scales.mlp.stored=true: model.residual=parallel adds all blocks at once; leave it out"),
        ("  own: {mlp: {kind: moe, experts: 4, top_k: 1, width: 8, zero_gives: nothing}}", [], "model.blocks.own.mlp.zero_gives=nothing: there are no zero_experts; leave it out"),
        ("  own: {mlp: {kind: moe, experts: 4, top_k: 1, width: 8, router: {carried: true}}}", [], "model.blocks.own.mlp.router.carried=true: the router is a linear; set model.blocks.own.mlp.router.hidden"),
        ("  own: {mlp: {kind: moe, experts: 4, top_k: 1, width: 8, router: {logits_scale: 0.5, bias: true}}}", [], "model.blocks.own.mlp.router.logits_scale is of a router that is a linear without a bias"),
        ("  own: {mlp: {kind: moe, experts: 4, top_k: 1, width: 8, router: {logits_scale: 0.5, hidden: 4}}}", [], "model.blocks.own.mlp.router.logits_scale is of a router that is a linear without a bias"),
        ("", ["model.streams.num=4"], "model.streams.num=4: kind one is of one stream"),
        ("streams: {kind: altup}", [], "model.streams.num=1: kind altup is of several streams"),
        ("streams: {kind: altup, num: 2}", ["model.loops=5"], "model.streams.kind=altup: model.loops=5 is of one stream; leave it out"),
        ("  delta: {gated_delta: {key_heads: 4, value_heads: 6, key_dim: 8, value_dim: 8}}", [], "model.blocks.delta.gated_delta.value_heads=6 is not a multiple of key_heads=4"),
        ("  delta: {gated_delta: {key_heads: 4}}", [], "model.blocks.delta.gated_delta.value_heads=0 must be a whole number from 1 to 2147483647"),
        ("", ["model.attention.gate=query", "model.attention.qkv_chunks=2"], "model.attention.qkv_chunks=2: a query gate is stored with q alone; leave it out"),
        ("", ["model.attention.qkv_chunks=3"], "model.attention.qkv_chunks=3 does not divide heads=4 and kv_heads=2"),
        ("", ["model.attention.gate_act=softplus"], "model.attention.gate_act=softplus: the output has no gate; leave it out"),
        ("", ["model.attention={gate: head, gate_bias: true}"], "model.attention.gate_bias=true is for gate=element, not for gate=head; leave it out"),
        ("", ["model.attention.value_dim=99"], "model.attention.value_dim=99 is more than head_dim=12, the dims of keys; values of fewer dims are supported"),
        ("", ["model.attention={kind: mla, kv_rank: 8, nope_dim: 5, rope_dim: 4, value_dim: 4}", "model.attention.rope.query_growth=0.1"],
         "model.attention.rope.query_growth: nope_dim=5 is odd, queries grow by pairs"),
        ("", ["model.attention={kind: mla, kv_rank: 8, nope_dim: 6, rope_dim: 4, value_dim: 4, q_joined: true}"],
         "model.attention.q_joined=true: queries have no latent; set model.attention.q_rank"),
        ("", ["model.norm.gated=[mlps]", "model.norm.gate_rank=4"], "model.norm.gated: mlps is not attention, mlp or moe"),
        ("", ["model.norm.gated=[mlp]"], "model.norm.gate_rank=0 for 1 gated norms; set both or none"),
        ("branches: {conv: [conv+convs, mlp]}", [], "model.branches.conv: there is no block convs (did you mean conv?); blocks: attention, mlp, conv"),
        ("branches: {conv: [attention>convs>conv, mlp]}", [], "model.branches.conv: there is no block convs (did you mean conv?); blocks: attention, mlp, conv"),
        ("branches: {conv: [attention>conv]}", ["model.residual=parallel"], "model.branches.conv: a block ahead of another is for model.residual=sequential with norms before"),
        ("shared_blocks: 2", [], "model.shared_blocks=2: model.branches has no a>b; leave it out"),
        ("  own: {mlp: {kind: plain, width: 8, adapter_rank: 4}}", [], "model.blocks.own.mlp.adapter_rank=4 is for kind gated, not for kind plain"),
        ("  delta: {gated_delta: {key_heads: 4, value_heads: 4, key_dim: 8, value_dim: 8, decay_floor: 0.0}}", [], "model.blocks.delta.gated_delta.decay_floor=0.0 is not below 0, as logarithms of decays are"),
        ("  delta: {gated_delta: {key_heads: 4, value_heads: 4, key_dim: 8, value_dim: 8, decay_rank: 2, decay_by_dim: true}}", [], "model.blocks.delta.gated_delta.decay_by_dim=true: with decay_rank=2, decays are; leave it out"),
        ("  delta: {mamba2: {heads: 4, head_dim: 8, state: 8, step_min: 0.2, step_max: 0.1}}", [], "model.blocks.delta.mamba2.step_max=0.1 is less than step_min=0.2"),
        ("scales: {gat: 2.0}", [], "model.scales.gat: there is no such name (did you mean gate?)"),
        ("scales: {q_norm: 2.0}", [], "model.scales.q_norm: there is no such name"),
        ("block_scales: {mlp: {kept: 2.0}}", ["model.residual=parallel"], "model.block_scales.mlp.kept=2.0: model.residual=parallel adds all blocks at once; leave it out"),
        ("scales: {gate: 0.0}", [], "model.scales.gate=0.0 is not a number above 0"),
        ("block_scales: {convs: {read: 2.0}}", [], "model.block_scales.convs: there is no such name (did you mean conv?)"),
        ("block_scales: {conv: {read: 0.0}}", [], "model.block_scales.conv.read=0.0 must be a finite number above 0"),
        ("", ["model.attention.heads=0"], "model.attention.heads=0: layers have this attention; set 1 at least"),
        ("  own: {attention: {}}", [], "model.blocks.own.attention.heads=0: layers have this attention; set 1 at least"),
        ("", ["model.blocks.own={mlp: {width: 8}}"], "model.blocks.own: there is no such block; a model file adds one"),
        ("", ["model.attention.full_every=2"], "model.attention.full_every is now model.layer_pattern; set that"),
        ("", ["model.attention.layer_types=[full_attention]"], "model.attention.layer_types is now model.layer_types; set that"),
    ],
)  # fmt: skip
def test_layers_of_blocks_that_cannot_be_are_one_line(load_own: Load, lines: str, overrides: list[str], message: str):
    with pytest.raises(AtomError) as error:
        load_own(f"blocks:\n  conv: {{short_conv: {{taps: 4}}}}\n{lines}\n", *overrides)
    assert str(error.value).endswith(message)
