"""All ops of the text, by name.

An op is a reference body in plain torch, a shape rule in plain Python, and a docstring.

    ops.rms_norm(x, weight, eps=1e-6)                      # the reference body
    ops.rms_norm.infer(Type("bf16", ("T", 576)), …)        # its result's type
    OPS["rms_norm"]                                        # by the name that the text uses

Tensors are positional, attributes keyword-only. A `state` op writes a cache, so it is never dead. Shapes by letter:
T tokens, R rows, S sequences, H hidden, V vocabulary, N query heads, K key/value heads, D head dim, M blocks of the
longest sequence.
"""

from atom.graph.ops.attention import (
    attend,
    attention,
    causal_mask,
    merge_heads,
    norm_rope,
    norm_rope_write,
    paged_attention,
    rope,
    rotary,
    scale_by_position,
    split_heads,
)  # fmt: skip
from atom.graph.ops.base import LOWERED, OPS, SEMANTIC, Op
from atom.graph.ops.block_sparse import index_blocks, paged_index_blocks
from atom.graph.ops.collective import (
    MEETING_AXES,
    STAGES,
    all_gather,
    all_reduce,
    collect,
    dispatch,
    gather_tokens,
    local_tokens,
    mask_rows,
    receive,
    reduce_scatter,
    row_shape,
    scale_by_rms,
    send,
    sum_moments,
    sum_squares,
)  # fmt: skip
from atom.graph.ops.compressed import compress, paged_compress
from atom.graph.ops.dense import (
    ACTIVATIONS,
    activate,
    add,
    add_rms_norm,
    affine,
    attend_residuals,
    clamp,
    clip,
    deviations_of,
    embedding,
    gated_activate,
    gaussian_topk,
    gumbel_argmax,
    join,
    layer_norm,
    linear,
    linear_by_head,
    match_rms,
    mix_streams,
    mul,
    pad,
    rms_norm,
    scale,
    softcap,
    split,
    steer,
    xielu,
)  # fmt: skip
from atom.graph.ops.fused import add_norm_linear, gated_linear, linear_activate, norm_linear, norm_rope_attention
from atom.graph.ops.latent import (
    attend_latent,
    mla_attention,
    norm_rope_write_latent,
    paged_mla_attention,
)  # fmt: skip
from atom.graph.ops.linear_attention import gated_delta, gated_delta_net, lightning
from atom.graph.ops.lora import ends_of_experts, expand_lora, grouped_lora, lora, pair_adapters
from atom.graph.ops.moe import (
    add_norm_router,
    combine,
    experts,
    group,
    grouped_linear,
    identity_share,
    plain_experts,
    router,
    scale_by_expert,
    sparse_mixer,
    token_router,
    weigh_inputs,
)
from atom.graph.ops.mqa import mqa_attention, paged_mqa_attention, write_mqa
from atom.graph.ops.ngrams import ngrams, stream_gate
from atom.graph.ops.recurrent import causal_conv, recurrent, run_batch
from atom.graph.ops.sparse import index_topk, paged_index_topk, run_tokens, write_index
from atom.graph.ops.state_space import group_rms_norm, selective_scan, ssd, ssm_decay, time_step
from atom.graph.ops.streams import sinkhorn, stream_logits
from atom.graph.ops.vision import (
    axis_tables,
    fold_rows,
    interpolate_table,
    mean_rows,
    normalize_pixels,
    place_rows,
    resample_table,
    rotary_sections,
    segment_attention,
    take_rows,
)

VIEWS = (split, split_heads, merge_heads)  # ops that move no data

__all__ = [
    "ACTIVATIONS", "LOWERED", "MEETING_AXES", "OPS", "SEMANTIC", "STAGES", "VIEWS", "Op", "activate", "add",
    "add_norm_linear", "add_norm_router", "add_rms_norm", "affine", "all_gather", "all_reduce", "attend",
    "attend_latent", "attend_residuals", "attention", "axis_tables", "causal_conv", "causal_mask", "clamp", "clip",
    "collect", "combine", "compress", "deviations_of", "dispatch", "embedding", "ends_of_experts", "expand_lora",
    "experts", "fold_rows", "gated_activate", "gated_delta", "gated_delta_net", "gated_linear", "gather_tokens",
    "gaussian_topk", "group", "group_rms_norm", "grouped_linear", "grouped_lora", "gumbel_argmax", "identity_share",
    "index_blocks", "index_topk", "interpolate_table", "join", "layer_norm", "lightning", "linear", "linear_activate",
    "linear_by_head", "local_tokens", "lora", "mask_rows", "match_rms", "mean_rows", "merge_heads", "mix_streams",
    "mla_attention", "mqa_attention", "mul", "ngrams", "norm_linear", "norm_rope", "norm_rope_attention",
    "norm_rope_write", "norm_rope_write_latent", "normalize_pixels", "pad", "paged_attention", "paged_compress",
    "paged_index_blocks", "paged_index_topk", "paged_mla_attention", "paged_mqa_attention", "pair_adapters",
    "place_rows", "plain_experts", "receive", "recurrent", "reduce_scatter", "resample_table", "rms_norm", "rope",
    "rotary", "rotary_sections", "router", "row_shape", "run_batch", "run_tokens", "scale", "scale_by_expert",
    "scale_by_position", "scale_by_rms", "segment_attention", "selective_scan", "send", "sinkhorn", "softcap",
    "sparse_mixer", "split", "split_heads", "ssd", "ssm_decay", "steer", "stream_gate", "stream_logits", "sum_moments",
    "sum_squares", "take_rows", "time_step", "token_router", "weigh_inputs", "write_index", "write_mqa", "xielu",
]  # fmt: skip
