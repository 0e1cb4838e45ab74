"""`job=explain`: sizes against formulas over published configs (tests/configs), and what a user sees of them."""

from __future__ import annotations

import functools
import html
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import transformers

from atom.assemble import digest_of, state_kinds
from atom.assemble.kv_blocks import plan_kv
from atom.cache import Cache
from atom.checkpoint import SilentProgress
from atom.cli import main
from atom.compiler import compile_graph
from atom.config.checkpoint import open_for
from atom.config.load import load, load_gpu
from atom.errors import CapacityError
from atom.kernels import tuned
from atom.runtime.step.model import Model
from atom.runtime.step.program import Bindings
from atom.runtime.types import StepLimits

pytestmark = pytest.mark.early

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Exit code, stdout and stderr of `job=explain` with these overrides."""

    def run(*argv: str) -> tuple[int, str, str]:
        code = main(["job=explain", *argv])
        return (code, *capsys.readouterr())

    return run


@pytest.fixture
def explain(run: Any) -> Callable[..., dict[str, Any]]:
    """The JSON object of `job=explain`."""

    def explain(*argv: str) -> dict[str, Any]:
        code, out, err = run(*argv, "job.output=json")
        assert code == 0, err
        return json.loads(out)

    return explain


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The override that names a folder with nothing but a published config.json."""
    folder = tmp_path_factory.mktemp("published")

    def make(name: str) -> str:
        (folder / name).mkdir(exist_ok=True)
        shutil.copy(CONFIGS / f"{name}.json", folder / name / "config.json")
        return f"checkpoint={folder / name}"

    return make


@pytest.fixture(scope="module")
def sizes(published: Any) -> Callable[..., dict[str, Any]]:
    """The JSON object of `job=explain` for a published config with sequences of 4,096 tokens, made once."""

    @functools.cache
    def make(name: str, *fields: str) -> dict[str, Any]:
        out = io.StringIO()
        with redirect_stdout(out):
            assert main(["job=explain", published(name), "serve.max_model_len=4096", "job.output=json", *fields]) == 0
        return json.loads(out.getvalue())

    return make


# the passes


def test_passes_and_sizes_are_shown(run: Any, checkpoints: Any, references: Any):
    code, out, _ = run(f"checkpoint={checkpoints('qwen3')}")
    assert code == 0
    for name in ("fuse_qkv", "fuse_gate_up", "lower_attention"):
        assert re.search(rf"^{name}: 3 changes, [\d.]+ ms$", out, re.MULTILINE)
    assert "  -    gate = linear(h_1, " in out and "  +    gate_up = linear(h_1, cat([" in out
    assert re.search(r"… and \d+ lines like these", out)
    num_parameters = sum(p.numel() for p in references("qwen3").parameters())
    assert re.search(
        rf"^parameters  {num_parameters:,} in all, {num_parameters - 101 * 48:,} active$", out, re.MULTILINE
    )


def test_a_stage_is_a_text_and_no_json(run: Any):
    code, out, err = run("job.stage=semantic", "job.output=json")
    assert (code, out) == (2, "")
    assert err == "atom-run: ConfigError: job.stage=semantic prints a text: leave out job.output=json\n"


@pytest.mark.slow
def test_the_tokenizer_of_a_gguf_file_is_written_as_transformers_reads_it(
    run: Any, embedded_gguf: Path, tmp_path: Path
):
    argv = [f"checkpoint={embedded_gguf}", f"job.save_tokenizer={tmp_path}/own"]
    assert run(*argv) == (0, "", f"atom-run: {tmp_path}/own has the tokenizer\n")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "own")
    ours = open_for(load([argv[0]]), SilentProgress(), weights=False).tokenizer()
    assert ours is not None
    for text in ("Hello world!", "  naïve <|im_end|>\n\n1234", "日本語"):
        assert theirs.encode(text) == ours.encode(text)
    messages = [{"role": "user", "content": "Why?"}]
    assert theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"] == ours.encode_chat(messages)
    assert (theirs.eos_token, theirs.bos_token) == ("<|im_end|>", "<|im_start|>")
    code, _, err = run(*argv, "job.output=json")
    message = "job.save_tokenizer explains nothing: leave out job.stage and job.output"
    assert (code, err) == (2, f"atom-run: ConfigError: {message}\n")


def test_no_weights_are_needed_and_an_unknown_stage_names_the_known(run: Any, checkpoints: Any, tmp_path: Path):
    (tmp_path / "config.json").write_bytes((checkpoints("llama") / "config.json").read_bytes())
    code, out, _ = run(f"checkpoint={tmp_path}", "job.stage=semantic")
    assert code == 0 and out.startswith("# job.stage=semantic\ndef body(tokens: i64[T], positions: i64[T]):\n")
    code, _, err = run(f"checkpoint={tmp_path}", "job.stage=nope")
    stages = "semantic, split_stages, shard, sink_into_head, fuse_qkv, fuse_gate_up, add_lora, fuse_shared_experts, fuse_norm_residual, lower_moe, lower_attention, quantize, offload_tables, fuse_lora, fuse_sibling_linears"
    assert (
        code == 2
        and f"stages: {stages}, fuse_linear_gate, fuse_linear_activate, fuse_norm_linear, fuse_norm_router, fuse_norm_rope_attention, fuse_gated_delta, select"
        in err
    )


def test_a_table_on_the_host_is_told_apart(run: Any, explain: Any, checkpoints: Any):
    model = f"checkpoint={checkpoints('gemma4')}", "device=cuda", "dtype=bf16", "job.gpu=h200"
    more = "serve.cpu_offload_params=[embed_tokens_per_layer]"
    table = 107 * 4 * 8 * 2  # rows, layers, inputs of a layer, bytes
    plain, offloaded = explain(*model), explain(*model, more)
    assert "host_weights_bytes" not in plain and offloaded["host_weights_bytes"] == table
    assert plain["weights_bytes"] - offloaded["weights_bytes"] == table
    assert plain["parameters"] == offloaded["parameters"] and plain["formats"] == offloaded["formats"]
    _, out, _ = run(*model, more)
    assert re.search(r"^  on the host +6\.7 KiB, of which a token reads rows$", out, re.MULTILINE)
    assert "host(W(" in run(*model, more, "job.stage=offload_tables")[1]


# pieces


def test_pieces_are_listed_as_cached_only_where_they_are_trusted(
    run: Any, explain: Any, checkpoints: Any, tmp_path: Path
):
    overrides = (f"checkpoint={checkpoints('llama')}", f"cache={tmp_path}")
    keys = [piece["key"] for piece in explain(*overrides)["distinct_pieces"]]
    cache, long_ago = Cache(tmp_path), time.time() - 40 * 86400
    folders = [cache.publish("pieces", key, {"piece.so": b"code"}, {}) for key in keys[:2]]
    for folder in folders:
        os.utime(folder / "manifest.json", (long_ago, long_ago))
    (folders[1] / "piece.so").write_bytes(b"evil")
    fault = "the checksum of piece.so is wrong"
    result = explain(*overrides)
    states = [(piece["times"], piece["cached"], piece["fault"]) for piece in result["distinct_pieces"]]
    assert states == [(1, True, None), (2, False, fault), (1, False, None)]
    code, out, err = run(*overrides)
    assert (code, err) == (0, "")
    (total,) = re.findall(r"^pieces +(.*)$", out, re.MULTILINE)
    assert total == "4, 3 distinct, 1 in the cache"
    lines = re.findall(r"^  [0-9a-f]{8} +.* calls, (.*)$", out, re.MULTILINE)
    assert lines == ["in the cache", f"in the cache and not used: {fault}", "not in the cache"]
    assert [(folder / "manifest.json").stat().st_atime for folder in folders] == pytest.approx([long_ago] * 2), (
        "it is no use"
    )
    (tmp_path / "pieces").chmod(0o777)
    assert not any(piece["cached"] for piece in explain(*overrides)["distinct_pieces"])


def test_a_piece_that_was_found_wrong_is_listed_as_not_used(run: Any, explain: Any, checkpoints: Any, tmp_path: Path):
    overrides = (f"checkpoint={checkpoints('llama')}", f"cache={tmp_path}")
    keys = [piece["key"] for piece in explain(*overrides)["distinct_pieces"]]
    Cache(tmp_path).publish("failures", keys[1], {}, {"reason": "it is nan off"})
    result = explain(*overrides)["distinct_pieces"]
    assert [(piece["cached"], piece["fault"]) for piece in result] == [
        (False, None),
        (False, "it is nan off"),
        (False, None),
    ]
    lines = re.findall(r"^  [0-9a-f]{8} +.* calls, (.*)$", run(*overrides)[1], re.MULTILINE)
    assert lines == ["not in the cache", "in the cache and not used: it is nan off", "not in the cache"]


# published sizes


class Part(NamedTuple):
    """Tensors [rows, columns] of a model."""

    rows: int
    columns: int = 1
    count: int = 1
    active: int | None = None  # how many of them a token is multiplied with; None: all
    is_packed: bool = False  # in the checkpoint's format, where it has one
    num_bytes: int = 2  # an element, where it is plain
    is_absorbed: bool = False  # by latent attention, which multiplies by parts of it
    block_rows: int = 128  # as it is held: of what is joined, the greatest common divisor

    @property
    def num_active(self) -> int:
        return self.count if self.active is None else self.active


def latent_attention(c: dict[str, Any]) -> list[Part]:
    hidden, heads, rank, turned = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"], c["qk_rope_head_dim"]
    plain, value, q_rank = c["qk_nope_head_dim"], c["v_head_dim"], c["q_lora_rank"]
    return [
        *(Part(rows, columns, is_packed=True) for rows, columns in (
            (heads * (plain + turned), q_rank), (hidden, heads * value),
        )),
        *(Part(rows, hidden, is_packed=True, block_rows=64) for rows in (q_rank, rank + turned)),
        Part(heads * (plain + value), rank, is_packed=True, is_absorbed=True), Part(q_rank), Part(rank),
    ]  # fmt: skip


def grouped_attention(c: dict[str, Any]) -> list[Part]:
    hidden, dim = c["hidden_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
    biases = [Part(q + 2 * kv), Part(hidden)] if c["attention_bias"] else []
    return [Part(q + 2 * kv, hidden), Part(hidden, q), *biases]


def mixture(c: dict[str, Any], experts: int, width: int, has_bias: bool = False) -> list[Part]:
    hidden, top_k = c["hidden_size"], c["num_experts_per_tok"]
    sizes = [(width, hidden), (width, hidden), (hidden, width)]
    parts = [Part(rows, columns, experts, top_k, is_packed=True) for rows, columns in sizes]
    biases = [Part(rows, 1, experts, top_k) for rows, _ in sizes] + [Part(experts)] if has_bias else []
    return [*parts, Part(experts, hidden), *biases]


def deepseek(c: dict[str, Any]) -> list[Part]:
    hidden, layers, dense = c["hidden_size"], c["num_hidden_layers"], c["first_k_dense_replace"]
    shared, wide = c["moe_intermediate_size"] * c["n_shared_experts"], c["intermediate_size"]
    gated = {
        width: [Part(width, hidden, is_packed=True)] * 2 + [Part(hidden, width, is_packed=True)]
        for width in (shared, wide)
    }
    moe = [*mixture(c, c["n_routed_experts"], c["moe_intermediate_size"]), *gated[shared]]
    moe.append(Part(c["n_routed_experts"], num_bytes=4))  # the correction of the choice
    whole = (latent_attention(c) + [Part(hidden)] * 2) * layers + gated[wide] * dense + moe * (layers - dense)
    return whole + indexer(c) * c.get("indexer_types", ["full"] * layers).count("full") if "index_topk" in c else whole


def indexer(c: dict[str, Any]) -> list[Part]:
    heads, dim, hidden = c["index_n_heads"], c["index_head_dim"], c["hidden_size"]
    return [Part(heads * dim, c["q_lora_rank"]), Part(dim, hidden), Part(heads, hidden), Part(dim), Part(dim)]


def gpt_oss(c: dict[str, Any]) -> list[Part]:
    moe = mixture(c, c["num_local_experts"], c["intermediate_size"], has_bias=True)
    sinks = [Part(c["num_attention_heads"])]
    return (grouped_attention(c) + sinks + moe + [Part(c["hidden_size"])] * 2) * c["num_hidden_layers"]


def qwen3_moe(c: dict[str, Any]) -> list[Part]:
    moe = mixture(c, c["num_experts"], c["moe_intermediate_size"])
    norms = [Part(c["hidden_size"])] * 2 + [Part(c["head_dim"])] * 2
    return (grouped_attention(c) + moe + norms) * c["num_hidden_layers"]


def nemotron_h(c: dict[str, Any]) -> list[Part]:
    hidden, heads, width = c["hidden_size"], c["mamba_num_heads"], c["intermediate_size"]
    inner, shared = heads * c["mamba_head_dim"], 2 * c["n_groups"] * c["ssm_state_size"]
    mamba = [Part(2 * inner + shared + heads, hidden), Part(hidden, inner), *[Part(heads, num_bytes=4)] * 3]
    mamba += [Part(inner + shared, c["conv_kernel"]), Part(inner + shared), Part(inner)]
    kinds = {"M": mamba, "*": grouped_attention(c), "-": [Part(width, hidden), Part(hidden, width)]}
    return [part for kind in c["hybrid_override_pattern"] for part in (*kinds[kind], Part(hidden))]


class Published(NamedTuple):
    layers: Callable[[dict[str, Any]], list[Part]]
    parameters: float
    active: float
    counts_embedding: bool = False  # among the active ones


PUBLISHED = {
    "deepseek_v3": Published(deepseek, 671e9, 37e9),
    "deepseek_v3_2": Published(deepseek, 671e9, 37e9),
    "glm_5_2": Published(deepseek, 744e9, 40e9),
    "kimi_k2": Published(deepseek, 1.0e12, 32e9),
    "gpt_oss_20b": Published(gpt_oss, 20.9e9, 3.6e9),
    "qwen3_30b_a3b": Published(qwen3_moe, 30.5e9, 3.3e9, counts_embedding=True),
    "nemotron_nano_9b_v2": Published(nemotron_h, 8.89e9, 8.89e9, counts_embedding=True),
}


def fp8_bytes(part: Part) -> int:
    return part.rows * part.columns + 4 * -(-part.rows // 128) * -(-part.columns // 128)


def mxfp4_bytes(part: Part) -> int:
    return part.rows * part.columns // 32 * 17


def plain_bytes(part: Part) -> int:
    return part.rows * part.columns * part.num_bytes


def parts_of(name: str, **changes: Any) -> tuple[dict[str, Any], list[Part]]:
    """A published config with these changes, and every tensor of that model."""
    c = json.loads((CONFIGS / f"{name}.json").read_text()) | changes
    ends = [
        Part(c["vocab_size"], c["hidden_size"], active=0),
        Part(c["vocab_size"], c["hidden_size"]),
        Part(c["hidden_size"]),
    ]
    return c, PUBLISHED[name].layers(c) + ends


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("gpt_oss_20b", "qwen3_30b_a3b") else pytest.mark.slow)
        for name in PUBLISHED
    ],
)
def test_parameters_are_the_published_ones(name: str, sizes: Any):
    c, parts = parts_of(name)
    result = sizes(name)
    assert result["parameters"] == sum(part.rows * part.columns * part.count for part in parts)
    assert result["active_parameters"] == sum(part.rows * part.columns * part.num_active for part in parts)
    published = PUBLISHED[name]
    embedding = c["vocab_size"] * c["hidden_size"] if published.counts_embedding else 0
    assert result["parameters"] == pytest.approx(published.parameters, rel=0.03)
    assert result["active_parameters"] + embedding == pytest.approx(published.active, rel=0.03)


@pytest.mark.parametrize(
    ("name", "fmt", "packed_bytes"),
    [
        pytest.param("deepseek_v3", "fp8[128, 128]", fp8_bytes, marks=pytest.mark.slow),
        pytest.param("kimi_k2", "fp8[128, 128]", fp8_bytes, marks=pytest.mark.slow),
        ("gpt_oss_20b", "mxfp4", mxfp4_bytes),
        ("qwen3_30b_a3b", None, plain_bytes),
    ],
)
def test_bytes_are_those_of_the_stored_formats(name: str, fmt: str | None, packed_bytes: Any, sizes: Any):
    def held_bytes(part: Part) -> int:
        is_kept = part.is_packed and fmt and not part.is_absorbed
        more = 4 * (-(-part.rows // part.block_rows) + -part.rows // 128) * -(-part.columns // 128)  # scales of blocks
        held: int = packed_bytes(part) + more if is_kept else plain_bytes(part)
        return held

    c, parts = parts_of(name)
    result = sizes(name)
    freqs = 4 * c.get("qk_rope_head_dim", c.get("head_dim")) // 2
    packed = [part for part in parts if part.is_packed and fmt]
    plain = [part for part in parts if not (part.is_packed and fmt)]
    held = [(part, held_bytes(part)) for part in parts]
    assert result["weights_bytes"] == sum(size * part.count for part, size in held) + freqs
    assert result["active_weights_bytes"] == sum(size * part.num_active for part, size in held) + freqs
    expected = {fmt: sum(packed_bytes(part) * part.count for part in packed)} if fmt else {}
    for dtype, size in (("bf16", 2), ("fp32", 4)):
        if total := sum(plain_bytes(part) * part.count for part in plain if part.num_bytes == size):
            expected[dtype] = total
    assert {name: size["stored_bytes"] for name, size in result["formats"].items()} == expected
    if fmt:
        assert result["formats"][fmt]["held_bytes"] == sum(held_bytes(part) * part.count for part in packed)


SUMMARY = """\
pieces           178, 6 distinct, 0 in the cache
parameters       671,026,419,200 in all, 36,625,618,432 active
weights          627.9 GiB in all, 36.0 GiB active
  fp8[128, 128]  623.3 GiB, 624.2 GiB in memory
  bf16           3.7 GiB
  fp32           58.0 KiB
left out         model.layers.61.*, stored after the last layer to predict further tokens
KV a token       70,272 bytes (full)

GPU              h200: 139.8 GiB of memory, 4.47 TB/s
  weights        do not fit: they need at least 5 such GPUs
  decode         at most 115 tokens/s for one request of 1,024 tokens, 327 for 32: its bandwidth over weights and KV
  of 1           weights 99.8%, KV 0.2% of 36.1 GiB that a step moves
  of 32          weights 99.5%, KV 0.5% of 407.7 GiB that a step moves
  prefill        at most 20,606 tokens/s: its rate over the layers' GEMMs, without attention
  prompt         at most 13,066 tokens/s for one of 8,192 tokens: GEMMs 63.4%, attention 36.6% of 627.0 ms
"""


@pytest.mark.slow
def test_a_large_model_is_explained_from_its_config_only(published: Any):
    command = [sys.executable, "-m", "atom.cli", "job=explain", published("deepseek_v3"), "job.gpu=h200"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    piece_lines = re.findall(r"^  [0-9a-f]{8} +(\d+) times .* calls, not in the cache$", ended.stdout, re.MULTILINE)
    assert (len(piece_lines), sum(map(int, piece_lines))) == (6, 178)
    shown = re.sub(r"^  ([0-9a-f]{8}|[td]p\d+(_ep)?) .*\n", "", ended.stdout, flags=re.MULTILINE)
    assert shown.startswith(f"{SUMMARY}\n"), "the passes follow"
    listed = ["tp2", "tp4", "tp8", "tp8_ep", "dp8_ep"]
    assert re.findall(r"^  ([td]p\S+) ", ended.stdout, re.MULTILINE) == listed
    assert (
        'W("model.layers.3.mlp.experts.{expert}.gate_proj.weight", bf16[2048, 7168], fmt="fp8[128, 128]")'
        in ended.stdout
    )


@pytest.mark.parametrize(
    ("name", "layers", "indexers"), [pytest.param("deepseek_v3_2", 61, 61, marks=pytest.mark.slow), ("glm_5_2", 78, 21)]
)
def test_an_indexer_keeps_a_key_of_each_token_and_shared_ones_none(name: str, layers: int, indexers: int, sizes: Any):
    in_bf16, in_fp8 = (sizes(name, *fields)["kv_bytes_per_token"]["full"] for fields in ((), ("quant.kv=fp8",)))
    assert in_bf16 == layers * (512 + 64) * 2 + indexers * 128 * 2
    assert in_fp8 == layers * (512 + 64 * 2) + indexers * (128 + 4), "a scale in float32 with each key"


# active parameters


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "name", ["llama", "llama_tied", "phi3", "gpt_oss", "mixtral_odd", "qwen3_moe_dense_list", "deepseek_v2"]
)
@pytest.mark.parametrize("level", [0, 1])
def test_every_parameter_is_counted_once(name: str, level: int, explain: Any, checkpoints: Any, references: Any):
    result = explain(f"checkpoint={checkpoints(name)}", f"level={level}")
    model = references(name)
    assert result["parameters"] == sum(p.numel() for p in model.parameters())
    embedding = 0 if model.config.tie_word_embeddings else model.model.embed_tokens.weight.numel()
    of_experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    num_experts = getattr(model.config, "n_routed_experts", None) or getattr(model.config, "num_local_experts", 1)
    chosen = of_experts * getattr(model.config, "num_experts_per_tok", 1) // num_experts
    assert result["active_parameters"] == result["parameters"] - embedding - of_experts + chosen


def test_a_token_is_multiplied_with_the_experts_of_the_text(explain: Any, run: Any, published: Any, tmp_path: Path):
    """Of a text in which the router chooses half as many."""
    model = (published("qwen3_30b_a3b"), "model.layers=6")
    (tmp_path / "half.py").write_text(run(*model, "job.stage=semantic")[1].replace("top_k=8", "top_k=4"))
    c, parts = parts_of("qwen3_30b_a3b", num_hidden_layers=6)
    result = [explain(*model, *given) for given in ((), (f"job.graph={tmp_path}/half.py",))]
    one_expert = 3 * c["moe_intermediate_size"] * c["hidden_size"] * c["num_hidden_layers"]
    assert result[0]["active_parameters"] - result[1]["active_parameters"] == 4 * one_expert
    assert result[0]["active_weights_bytes"] - result[1]["active_weights_bytes"] == 2 * 4 * one_expert
    assert (
        result[0]["parameters"]
        == result[1]["parameters"]
        == sum(part.rows * part.columns * part.count for part in parts)
    )


# the KV pool


KV_BYTES = {
    "deepseek_v3": {"full": 61 * (512 + 64) * 2},
    "kimi_k2": {"full": 61 * (512 + 64) * 2},
    "gpt_oss_20b": {"window_128": 12 * 2 * 8 * 64 * 2, "full": 12 * 2 * 8 * 64 * 2},
    "qwen3_30b_a3b": {"full": 48 * 2 * 4 * 128 * 2},
}


def test_with_drafts_a_sequence_has_a_state_of_each_position_that_may_be_next(run: Any, checkpoints: Any):
    model = f"checkpoint={checkpoints('lfm2')}", "device=cpu", "dtype=fp32", "level=0", "serve.kv_cache_memory=32000"
    _, plain, _ = run(*model, "serve.max_num_seqs=8")
    _, drafting, _ = run(*model, "serve.max_num_seqs=8", "serve.method=ngram", "serve.num_speculative_tokens=2")
    size = 2 * (3 - 1) * 48 * 4  # of two layers, each with the inputs before a token
    assert f"recurrent state  {size} bytes a sequence, room for 8 sequences and " in plain
    assert f"recurrent state  {size * 3 / 1024:.1f} KiB a sequence (3 states), room for 4 sequences and " in drafting


def test_limits_of_a_hybrid_are_shown_by_kind(run: Any, explain: Any, published: Any):
    """Three layers with the gated delta rule and one with attention, by hand."""
    model = published("qwen3_next_80b_a3b"), "model.layers=4", "job.gpu=h200"
    gpu = explain(*model)["gpu"]
    state, inputs = 32 * 128 * 128, 3 * 8192  # numbers of a layer: a state, and what the convolution read before
    for requests, limit in zip((1, 32), gpu["decode"], strict=True):
        moved = limit["step_bytes"]
        assert moved["states"] == requests * 3 * 2 * (4 * state + 2 * inputs), "read and written"
        assert moved["KV"] == requests * 1024 * 2 * 2 * 256 * 2
        seconds = sum(moved.values()) / load_gpu("h200").bandwidth
        assert limit["tokens_per_second"] == pytest.approx(requests / seconds, rel=1e-6)
    seconds, num = gpu["prompt"]["seconds"], 8192
    assert gpu["prompt"]["tokens"] == num
    assert seconds["matrix"] == pytest.approx(num / gpu["prefill_tokens_per_second"])
    assert seconds["attention"] == pytest.approx(num * (num + 1) / 2 * 4 * 16 * 256 / 804e12)
    assert seconds["recurrent"] == pytest.approx(num * 3 * (6 * state + 2 * inputs) / 804e12)
    assert gpu["prompt"]["tokens_per_second"] == pytest.approx(num / sum(seconds.values()))
    out = run(*model)[1]
    found = re.search(r"\n  of 32 +weights (.*)%, KV (.*)%, states (.*)% of ", out)
    assert found is not None
    shares = [size / sum(moved.values()) for size in moved.values()]
    assert found.groups() == tuple(f"{100 * share:.1f}" for share in shares)
    assert re.search(
        r"\n  prompt +at most [\d,]+ tokens/s for one of 8,192 tokens: GEMMs .*, recurrent \d\.\d% of ", out
    )


def test_a_gpu_reads_and_writes_the_states_of_requests(run: Any, explain: Any, checkpoints: Any):
    model = f"checkpoint={checkpoints('lfm2')}", "device=cpu", "dtype=bf16", "level=0", "job.gpu=h200"
    _, text, _ = run(*model)
    assert "its bandwidth over weights, KV and states" in text
    gpu = explain(*model)["gpu"]
    one, many = (each["requests"] / each["tokens_per_second"] for each in gpu["decode"])
    kv = 2 * 2 * 12 * 2 * 1024  # keys and values of one layer, of contexts of 1,024 tokens
    states = 2 * (3 - 1) * 48 * 2 * 2  # of two layers, read and written
    assert many - one == pytest.approx(31 * (kv + states) / gpu["bandwidth"], rel=1e-6)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", KV_BYTES)
def test_kv_bytes_a_token_are_those_that_the_pool_allocates(name: str, sizes: Any, explain: Any, published: Any):
    assert sizes(name)["kv_bytes_per_token"] == KV_BYTES[name]
    layers = json.loads((CONFIGS / f"{name}.json").read_text())["num_hidden_layers"]
    kv_bytes = {kind: total * 4 // layers for kind, total in KV_BYTES[name].items()}
    shallow = (published(name), "serve.max_model_len=4096", "model.layers=4")
    result, config = explain(*shallow), load(shallow)
    assert result["kv_bytes_per_token"] == kv_bytes
    graph, block_size = compile_graph(config), config.serve.block_size
    num_blocks = plan_kv(state_kinds(graph, block_size), config.serve, config.limits)
    model = Model(graph, Bindings(defaultdict(lambda: None)), block_size, StepLimits(1, 4096, 4096), device="cpu")
    model.bind(num_blocks)
    allocated = dict.fromkeys(num_blocks, 0)
    for cache, tensor in model.caches.items():
        allocated[cache.kind] += tensor.nbytes
    assert sum(allocated.values()) == result["kv_pool_bytes"] <= config.serve.kv_cache_memory
    for kind, num in num_blocks.items():
        assert allocated[kind] == num * block_size * kv_bytes[kind]
        assert result["kv_tokens"][kind] == (num - 1) * block_size, "block 0 is nobody's"


def test_latents_in_fp8_keep_their_rotated_keys(explain: Any, published: Any):
    """512 bytes, and 64 numbers in bf16."""
    result = explain(published("deepseek_v3"), "quant.kv=fp8", "model.layers=5")
    assert result["kv_bytes_per_token"] == {"full": 5 * (512 + 64 * 2)}
    assert result["kv_pool_bytes"] // (5 * 640) == result["kv_tokens"]["full"] + 16, "block 0 is nobody's"


def test_kv_bytes_by_kind_of_a_model_with_a_window(explain: Any, checkpoints: Any):
    result = explain(f"checkpoint={checkpoints('qwen3_window')}", "dtype=bf16")
    assert result["kv_bytes_per_token"] == {"full": 2 * 2 * 24 * 2, "window_7": 2 * 24 * 2}, (
        "layers x (k and v) x dim x bytes"
    )
    assert explain(f"checkpoint={checkpoints('qwen3_window')}", "serve.kv_cache_dtype=fp32")["kv_bytes_per_token"] == {
        "full": 2 * 2 * 24 * 4,
        "window_7": 2 * 24 * 4,
    }


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss_20b"])
def test_a_pool_that_is_too_small_is_shown_with_the_longest_sequence_it_holds(
    name: str, explain: Any, run: Any, published: Any
):
    overrides = [published(name), "model.layers=6", f"serve.kv_cache_memory={1 << 26}"]
    result = explain(*overrides)
    longest = result["kv_longest_sequence"]
    assert result["kv_pool_bytes"] <= 1 << 26 and min(result["kv_tokens"].values()) > 0
    config = load([*overrides, f"serve.max_model_len={longest}"])
    kinds = state_kinds(compile_graph(config), config.serve.block_size)
    assert max(result["kv_tokens"].values()) >= longest
    plan_kv(kinds, config.serve, config.limits)
    longer = load([*overrides, f"serve.max_model_len={longest + 1}"])
    with pytest.raises(CapacityError, match=f"lower serve.max_model_len to {longest}"):
        plan_kv(kinds, longer.serve, longer.limits)
    _, out, _ = run(*overrides)
    assert re.search(r"^KV pool .*: too few for one sequence of max_model_len=1\d\d,\d\d\d$", out, re.MULTILINE)


def test_a_pool_may_hold_nothing_or_be_counted_in_blocks(explain: Any, published: Any):
    model = (published("qwen3_30b_a3b"), "model.layers=4")
    result = explain(*model, "serve.kv_cache_memory=1")
    assert (result["kv_longest_sequence"], result["kv_tokens"], result["kv_pool_bytes"]) == (0, {"full": 0}, 0)
    result = explain(*model, "serve.num_kvcache_blocks=10")
    assert (result["kv_longest_sequence"], result["kv_tokens"]) == (160, {"full": 160})
    result = explain(*model, "serve.max_model_len=100")
    assert result["kv_longest_sequence"] == 100


# GPUs

SMALL_POOL = f"serve.kv_cache_memory={1 << 26}"


@pytest.mark.slow
def test_a_gpu_that_holds_the_model(explain: Any, run: Any, published: Any):
    model, gpu, layers = (published("qwen3_30b_a3b"), "model.layers=8"), load_gpu("h200"), 8
    kv_bytes = KV_BYTES["qwen3_30b_a3b"]["full"] * layers // 48
    result = explain(*model, "job.gpu=h200")
    fit, free = result["gpu"], gpu.memory - result["weights_bytes"]
    assert (fit["name"], fit["memory_bytes"], fit["weights_fit"], fit["fits"]) == ("h200", gpu.memory, True, True)
    assert (fit["gpus_for_weights"], fit["kv_longest_sequence"]) == (1, 40960)
    blocks = free // (16 * kv_bytes)
    assert fit["kv_tokens"] == {"full": (blocks - 1) * 16}
    read = result["active_weights_bytes"] + 1024 * kv_bytes
    one, many = fit["decode"]
    assert one == {
        "requests": 1, "tokens_per_second": pytest.approx(gpu.bandwidth / read), "collective_seconds": 0,
        "step_bytes": {"weights": result["active_weights_bytes"], "KV": 1024 * kv_bytes},
    }  # fmt: skip
    assert many["requests"] == 32 and 32 * 0.05 < many["tokens_per_second"] / one["tokens_per_second"] < 32 * 0.2
    # what follows the last attention is computed for sampled rows only
    qkv, rest = (4096 + 2 * 512) * 2048, 2048 * 4096 + 128 * 2048 + 8 * 3 * 768 * 2048
    assert fit["prefill_tokens_per_second"] == pytest.approx(804e12 / 2 / (layers * qkv + (layers - 1) * rest))
    _, out, _ = run(*model, "job.gpu=h200")
    share = result["weights_bytes"] / gpu.memory
    assert f"\n  weights   fit: {share:.1%} of its memory\n" in out
    assert (
        f"\n  KV        one sequence of max_model_len=40,960 fits: after the weights there is room for {(blocks - 1) * 16:,} tokens (full)\n"
        in out
    )
    rates = f"{one['tokens_per_second']:,.0f} tokens/s for one request of 1,024 tokens, {many['tokens_per_second']:,.0f} for 32: "
    assert f"\n  decode    at most {rates}" in out


@pytest.mark.slow
def test_the_pool_of_a_gpu_is_what_its_memory_leaves_unless_it_is_set(run: Any, published: Any):
    """The default of 4 GiB is for a CPU."""
    model = (published("deepseek_v3"), "model.layers=6")
    default, on_gpu, set_to = (run(*model, *more)[1] for more in ((), ("job.gpu=h200",), ("job.gpu=h200", SMALL_POOL)))
    assert [out.count("\nKV pool ") for out in (default, on_gpu, set_to)] == [1, 0, 1]
    assert "too few" not in on_gpu and "of max_model_len=163,840 fits: after the weights there is room for" in on_gpu
    assert re.search(r"\nKV pool  +6[34]\.\d MiB .*: too few for one sequence of max_model_len=163,840\n", set_to)


@pytest.mark.slow
def test_prompts_of_matmuls_in_fp8_are_limited_by_its_rate(explain: Any, published: Any):
    given = (published("qwen3_8b"), "job.gpu=h200", "device=cuda", "model.layers=2")
    qkv, rest = (4096 + 2 * 1024) * 4096, 4096 * 4096 + 3 * 12288 * 4096
    for quant, rate in (("fp8", 1411e12), ("int4", 804e12), ("none", 804e12)):
        fit = explain(*given, f"quant={quant}")["gpu"]
        assert fit["prefill_tokens_per_second"] == pytest.approx(rate / 2 / (2 * qkv + rest))


@pytest.mark.slow
def test_a_gpu_that_does_not(explain: Any, published: Any):
    result = explain(published("deepseek_v3"), "model.layers=7", "job.gpu=rtx_4090")
    fit = result["gpu"]
    assert (fit["weights_fit"], fit["fits"], fit["kv_tokens"], fit["kv_longest_sequence"]) == (
        False,
        False,
        {"full": 0},
        0,
    )
    memory = load_gpu("rtx_4090").memory
    assert (fit["gpus_for_weights"] - 1) * memory < result["weights_bytes"] <= fit["gpus_for_weights"] * memory


def test_a_gpu_fits_to_the_byte(explain: Any, run: Any, published: Any, tmp_path: Path):
    model = (published("qwen3_30b_a3b"), "model.layers=4")
    one = (40960 // 16 + 1) * 16 * KV_BYTES["qwen3_30b_a3b"]["full"] * 4 // 48
    needed = explain(*model)["weights_bytes"] + one

    def gpu_of(memory: int) -> str:
        (tmp_path / "mine.yaml").write_text(f"memory: {memory}\nbandwidth: 1e12\n")
        return f"job.gpu={tmp_path}/mine.yaml"

    @functools.cache
    def on(memory: int) -> dict[str, Any]:
        return explain(*model, gpu_of(memory))["gpu"]

    assert (on(needed)["fits"], on(needed)["kv_tokens"]) == (True, {"full": 40960})
    assert (on(needed)["kv_sequences"], on(needed + one)["kv_sequences"], on(needed - 1)["kv_sequences"]) == (1, 2, 0)
    less = on(needed - 1)
    assert (less["weights_fit"], less["fits"], less["kv_longest_sequence"]) == (True, False, 40960 - 16)
    assert (on(needed - one)["weights_fit"], on(needed - one - 1)["weights_fit"]) == (True, False)
    assert (on(needed - one)["gpus_for_weights"], on(needed - one - 1)["gpus_for_weights"]) == (1, 2)
    _, out, _ = run(*model, gpu_of(needed - 1))
    assert (
        "one sequence of max_model_len=40,960 does not fit: after the weights there is room for 40,944 tokens (full)"
        in out
    )


def test_sequences_past_their_prompts_keep_only_a_window(explain: Any, published: Any):
    fit = explain(published("gpt_oss_20b"), "model.layers=2", "serve.max_model_len=1280", "job.gpu=h200")["gpu"]
    blocks = fit["kv_tokens"]["window_128"] // 16
    # the prompts of a step have 1,280 tokens; 128 tokens are in 9 blocks at most, and one is kept for siblings
    assert fit["kv_sequences"] == 1 + (blocks - 1280 // 16) // 10 > 512, "as many as serve.max_num_seqs"


def test_the_text_for_a_gpu_that_is_not_here(run: Any, explain: Any, published: Any, monkeypatch: pytest.MonkeyPatch):
    """Its sizes are those of the CPU's text; what its pieces are called in the cache nobody knows."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for module in ("jobs.explain.job", "config.load"):
        monkeypatch.setattr(f"atom.{module}.find_device", lambda: "cpu")
    monkeypatch.setitem(sys.modules, "triton", None)  # which a machine without a GPU need not have
    name = (published("qwen3_0.6b"), "model.layers=3")
    code, out, err = run(*name, "device=cuda", "job.gpu=h200", "job.stage=split_pieces")
    assert (code, err) == (0, "") and "= triton.linear(" in out and "torch.linear(" not in out
    message = "atom-run: there is no GPU here, so this is about h200; job.gpu=NAME takes another\n"
    assert run(*name, "device=cuda", "job.stage=split_pieces") == (0, out, message)
    result, here = (explain(*name, "job.gpu=h200", f"device={device}") for device in ("cuda", "cpu"))
    assert "pieces" in here and "pieces" not in result
    assert all(result[size] == here[size] for size in ("gpu", "parameters", "weights_bytes", "kv_tokens"))
    out = run(*name, "device=cuda")[1]
    assert re.match(r"parameters .*^GPU +h200: .*^fuse_qkv: ", out, re.MULTILINE | re.DOTALL), "sizes come first"


def test_an_unknown_gpu_is_one_line(run: Any, published: Any):
    code, out, err = run(published("qwen3_30b_a3b"), "job.gpu=h20")
    assert (code, out) == (2, "")
    assert (
        err.startswith("atom-run: ConfigError: job.gpu=h20: ") and "did you mean h200?" in err and err.count("\n") == 1
    )


# what cannot run


SMALL = ["model.layers=2", "model.mlp.0.first=1", "model.mlp.0.experts=16", "model.vocab=64", "serve.max_model_len=64"]


def test_running_weights_in_a_stored_format_is_refused(run: Any, published: Any):
    given = [published("deepseek_v3"), "model.fmt=int4z", *SMALL]
    code, out, err = run(*given, "job=generate", "load_dummy=true", "prompts=[1,2,3]")
    assert (code, out) == (2, "")
    assert err == (
        "atom-run: UnsupportedError: model.layers.0.self_attn.q_a_proj.weight is stored as int4z: "
        "a format without parts cannot be run, job=explain counts its bytes\n"
    )


def test_a_format_that_nobody_knows_is_one_line(run: Any, published: Any, tmp_path: Path):
    config = json.loads((CONFIGS / "qwen3_30b_a3b.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 3, "group_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, _, err = run(f"checkpoint={tmp_path}")
    assert code == 2
    assert err.startswith("atom-run: UnsupportedError: quantization_config.bits=3 is not supported")


def test_layers_that_predict_further_tokens_are_left_out(explain: Any, sizes: Any, published: Any):
    assert sizes("deepseek_v3")["left_out"] == ["model.layers.61.*"]
    assert explain(published("deepseek_v3"), "model.mtp_layers=2", "model.layers=4")["left_out"] == [
        "model.layers.4.*",
        "model.layers.5.*",
    ]
    assert sizes("kimi_k2")["left_out"] == []


@pytest.mark.slow
def test_each_of_several_ranks_is_explained(explain: Any, run: Any, published: Any):
    config, parts = parts_of("qwen3_30b_a3b", num_hidden_layers=6)
    layers, hidden, vocab = (config[key] for key in ("num_hidden_layers", "hidden_size", "vocab_size"))
    model = (published("qwen3_30b_a3b"), "load_dummy=true", "model.layers=6")
    one, four = (explain(*model, f"parallel={each}") for each in ("tp1", "tp4_ep"))
    assert "ranks" not in one and four["ranks"] == {"tensor": 4, "experts": 4, "data": 1, "pipeline": 1}
    assert four["collectives"] == {
        "all_reduce": {"times": 2 * layers, "bytes_per_token": 2 * layers * hidden * 2},
        "all_gather": {"times": 1, "bytes_per_token": vocab // 4 * 2},
    }
    assert four["parameters"] == one["parameters"]
    assert four["kv_bytes_per_token"]["full"] * 4 == one["kv_bytes_per_token"]["full"]
    whole = 2 * hidden * (vocab + layers * (2 + config["num_experts"]) + 1) + 2 * 2 * layers * config["head_dim"]
    whole += config["head_dim"] // 2 * 4  # frequencies
    assert 4 * (four["weights_bytes"] - whole - 8) == one["weights_bytes"] - whole, (
        "embedding, norms and routers are whole; a rank has an offset"
    )
    code, out, _ = run(*model, "parallel=tp4_ep", "job.gpu=h200")
    assert code == 0 and "all_reduce: 2 changes" not in out and "  all_reduce" in out and "  tp2 " not in out
    stored = sum(plain_bytes(part) * part.count for part in parts) / 2**30
    assert re.search(rf"^  bf16 +{stored:.1f} GiB, of which [0-9.]+ GiB stay so on a rank$", out, re.MULTILINE)


def test_both_ways_of_sending_tokens_to_their_experts_are_explained(explain: Any, run: Any, published: Any):
    """Rows of bf16 there and back, 12 bytes for each expert that a token chose, to 7 other ranks."""
    config = json.loads((CONFIGS / "qwen3_30b_a3b.json").read_text())
    top_k, row = config["num_experts_per_tok"], 2 * config["hidden_size"]
    model = (published("qwen3_30b_a3b"), "load_dummy=true", "model.layers=2", "parallel=dp8_ep", "job.network=1e9")
    missed = math.prod((112 - each) / (128 - each) for each in range(top_k))  # none of the 16 experts of a rank
    rows = {"gather": 2 * row, "dispatch": 2 * row * (1 - missed)}
    for way, op in (("gather", "gather_tokens"), ("dispatch", "dispatch")):
        result = explain(*model, f"parallel.dispatch={way}")
        assert op in result["collectives"]
        for name, each in result["exchanges"].items():
            assert each["bytes_per_token"] == pytest.approx(2 * 7 * (rows[name] + 12 * top_k), abs=7)
            assert each["seconds_per_token"] == each["bytes_per_token"] / 1e9
    code, out, _ = run(*model, "parallel.dispatch=dispatch")
    assert code == 0 and re.search(r"^  by gather +116,032 bytes a token .*, 116\.0 us at 1 GB/s$", out, re.MULTILINE)
    assert re.search(r"^  by dispatch .* at 1 GB/s; as this text does$", out, re.MULTILINE)
    assert "exchanges" not in explain(*model, "parallel.experts=1")


def test_each_stage_of_a_pipeline_is_explained(explain: Any, run: Any, published: Any):
    """A model whose embedding is its head, in two stages that hold it each, and one layer more on the first."""
    config = json.loads((CONFIGS / "qwen3_0.6b.json").read_text())
    hidden, vocab, one = config["hidden_size"], config["vocab_size"], (published("qwen3_0.6b"), "model.layers=3")
    whole = explain(*one, "job.gpu=h200")
    first, last = (explain(*one, "parallel=pp2", f"job.pipeline_rank={stage}", "job.gpu=h200") for stage in range(2))
    assert first["stages"] == last["stages"] and [each["layers"] for each in first["stages"]] == [2, 1]
    assert [each["weights_bytes"] for each in first["stages"]] == [first["weights_bytes"], last["weights_bytes"]]
    frequencies, table, norm = config["head_dim"] // 2 * 4, 2 * vocab * hidden, 2 * hidden
    layer = (whole["weights_bytes"] - table - norm - frequencies) // 3
    assert first["weights_bytes"] == table + 2 * layer + frequencies
    assert last["weights_bytes"] == table + layer + norm + frequencies
    row, logits = 2 * hidden, 2 * vocab
    assert first["collectives"]["send"] == last["collectives"]["receive"] == {"times": 1, "bytes_per_token": row}
    assert last["collectives"]["send"] == first["collectives"]["receive"] == {"times": 1, "bytes_per_token": logits}
    assert first["gpu"] == last["gpu"] and first["kv_tokens"] == last["kv_tokens"]
    slower, single = (each["gpu"]["decode"][0]["tokens_per_second"] for each in (first, whole))
    assert 0.9 * single < slower < single, "a step passes all stages"
    code, out, _ = run(*one, "parallel=pp2", "job.gpu=h200")
    assert code == 0 and re.search(r"^  stage 0 +2 layers, .* a token; the one that is shown$", out, re.MULTILINE)
    code, _, err = run(*one, "parallel=pp2", "job.pipeline_rank=2")
    assert (code, err) == (
        2,
        "atom-run: ConfigError: job.pipeline_rank=2: parallel.pipeline=2 has no such stage; set less\n",
    )


def test_drafts_are_explained_by_the_stage_that_has_them(run: Any, published: Any):
    """Only the last stage reads weights to draft; both send and get what is drafted."""
    model = (published("deepseek_v3"), "model.layers=4", "model.mtp_layers=1", "serve.method=mtp", "parallel=tp2_pp2")
    texts = {}
    for stage in range(2):
        code, texts[stage], err = run(*model, f"job.pipeline_rank={stage}", "job.gpu=h200", "level=0")
        assert code == 0, err
        assert re.search(r"^  stage 0 +2 layers, .*\n  stage 1 +3 layers, ", texts[stage], re.MULTILINE), "one drafts"
        assert re.search(r"^drafted +3 up to", texts[stage], re.MULTILINE)
        assert re.search(r"^left out +model\.layers\.\d+\.embed_tokens", texts[stage], re.MULTILINE)
    assert "weights are read for a token of a sequence" not in texts[0]
    assert re.search(r"^drafts +[\d.]+ [MG]iB of weights are read for a token of a sequence", texts[1], re.MULTILINE)
    decodes = [re.findall(r"^  (?:decode|prefill) .*", text, re.MULTILINE) for text in texts.values()]
    assert decodes[0] == decodes[1], "a step passes all stages"


@pytest.mark.slow
def test_layouts_of_several_gpus_are_those_that_they_would_be_explained_with(explain: Any, published: Any):
    """Of a mixture whose weights do not fit two of these GPUs, nor its heads 16."""
    model = (published("qwen3_30b_a3b"), "load_dummy=true", "job.gpu=rtx_4090", "level=1")
    listed = explain(*model)["gpu"]["layouts"]
    assert [each["name"] for each in listed] == ["tp2", "tp4", "tp4_ep", "dp4_ep", "tp8", "tp8_ep", "dp8_ep"]
    assert [each["weights_fit"] for each in listed] == [False, *[True] * 6]
    for layout in listed[2:4]:
        asked = explain(*model, f"parallel={layout.pop('name')}")
        assert layout.pop("weights_bytes") == asked["weights_bytes"]
        assert layout == {key: asked["gpu"][key] for key in layout}


def test_a_layout_that_cannot_be_is_listed_with_its_reason(explain: Any, run: Any, published: Any):
    listed = explain(published("gpt_oss_20b"), "load_dummy=true", "job.gpu=rtx_4090", "model.attention.heads=6",
                     "model.attention.kv_heads=2", "model.layers=2")["gpu"]["layouts"]  # fmt: skip
    refused = {each["name"]: each["refused"] for each in listed if "refused" in each}
    assert refused == {
        name: f"its heads cannot be divided among {name[2]}" for name in ("tp4", "tp4_ep", "tp8", "tp8_ep")
    }


def test_the_limits_of_a_decode_are_those_of_a_rank_and_of_what_ranks_exchange(explain: Any, published: Any):
    """A dense model on two GPUs, by hand: bytes that each reads, and all sums at their measured times."""
    gpu, config = load_gpu("h200"), json.loads((CONFIGS / "qwen3_8b.json").read_text())
    result = explain(published("qwen3_8b"), "load_dummy=true", "job.gpu=h200", "parallel=tp2")
    hidden, layers, vocab = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
    kv = layers * 2 * config["num_key_value_heads"] // 2 * config["head_dim"] * 2
    for limit, sums, logits in zip(result["gpu"]["decode"], (2.2e-6, 4.0e-6), (2 * vocab, 32 * 2 * vocab), strict=True):
        num = limit["requests"]
        assert num * hidden * 2 in (8192, 262144), "measured sizes"
        low, high = (262144, 1048576) if num == 1 else (8388608, 16777216)
        at = gpu.all_reduce[2]
        gather = at[low] + (at[high] - at[low]) * (logits - low) / (high - low)
        assert limit["collective_seconds"] == pytest.approx(2 * layers * sums + gather)
        read = result["active_weights_bytes"] + num * 1024 * kv
        seconds = read / gpu.bandwidth + limit["collective_seconds"]
        assert limit["tokens_per_second"] == pytest.approx(num / seconds, rel=0.002)


@pytest.mark.slow
def test_it_says_how_many_tokens_are_drafted_and_what_was_measured(
    explain: Any, run: Any, checkpoints: Any, tmp_path: Path
):
    texts = [f"checkpoint={checkpoints('qwen3')}", "device=cpu", "serve.method=ngram", f"cache={tmp_path}"]
    assert explain(*texts)["draft_counts"] == {"2": 3, "4": 1}
    text = digest_of(compile_graph(load(texts)))[:16]
    tuned.save("Some GPU", tmp_path, tuned.DRAFTS, {f"8 {text}": [1000.0, 1250.0], f"1 {'0' * 16}": [1.0, 2.0]})
    _, out, _ = run(*texts)
    assert "3 up to 2 sequences, 1 up to 4 sequences, above none" in out
    assert "1.000, 1.250 ms a step of 8 sequences with 0, 1, … drafts of each" in out and out.count("ms a step") == 1
    explicit = explain(*texts, "serve.max_verified_tokens=6")
    assert explicit["draft_counts"] == {"1": 3, "2": 2, "3": 1} and "draft_times" not in explicit


# the page


def test_the_page_has_passes_sizes_kernels_and_their_reasons(run: Any, published: Any):
    given = (published("qwen3_30b_a3b"), "model.layers=6", "job.gpu=h200", "device=cuda")
    _, parts = parts_of("qwen3_30b_a3b", num_hidden_layers=6)
    total = sum(part.rows * part.columns * part.count for part in parts)
    active = sum(part.rows * part.columns * part.num_active for part in parts)
    code, out, err = run(*given, "job.output=html")
    assert code == 0, err
    _, text, _ = run(*given)
    page = html.unescape(re.sub(r"<[^>]+>", "\n", out))
    for line in (f"{total:,} in all, {active:,} active", "fits: after the weights there is room for"):
        assert line in text and line in page
    steps = dict(re.findall(r'id="pass-(\w+)"><label for="pass-\1">\1<b>(\d+)</b>', out))
    assert steps["sink_into_head"] == "1" and ": 1 change," in out
    assert steps["fuse_qkv"] == "6" and "split_pieces" not in steps
    assert re.search(r'id="pass-split_pieces" disabled><label[^>]*>split_pieces</label><div class="panel"></div>', out)
    assert re.search(r"<ins><mark>qkv</mark> = linear\(h, <mark>cat\(\[</mark>W", out)
    assert re.search(r'<th scope="rowgroup">experts</th><td>hopper</td><td>6</td>', out)
    assert "at most 1,363,118 tokens/s" in page and "The line is where the GPU's memory ends: 139.80 GiB." in page


def test_the_page_of_a_cpu_has_its_pieces_and_why_kernels_refused(run: Any, checkpoints: Any, tmp_path: Path):
    code, out, err = run(f"checkpoint={checkpoints('qwen3')}", f"cache={tmp_path}", "level=2", "job.output=html")
    assert code == 0, err
    memory = out[out.index("<h2>Memory</h2>") : out.index("<h2>Passes</h2>")]
    assert "all weights" in memory and " MiB<" in memory and "0.00 GiB" not in memory
    assert re.search(r"<h2>Pieces</h2>.*<td>not cached</td>", out, re.DOTALL)
    kernels = out[out.index("<h2>Kernels</h2>") : out.index("<h2>Pieces</h2>")]
    assert re.search(r'<tr class="quiet"><td colspan="3">[^<]*: [^<]+</td></tr>', kernels), "a reason of a backend"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("argv", [["job=compile"], ["job=generate"], ["-m", "job=explain"]])
def test_what_has_no_page_says_so(argv: list[str], checkpoints: Any, capsys: Any):
    assert main([*argv, f"checkpoint={checkpoints('qwen3')}", "job.output=html"]) != 0
    assert "job.output=html: " in capsys.readouterr().err


@pytest.mark.slow
def test_amds_gpus_get_a_text_of_aiter_without_one_here(run: Any, published: Any):
    here = (published("qwen3_0.6b"), "device=rocm", "level=1", "job.stage=select_kernels")
    for gpu in ("mi300x", "mi355x"):
        code, out, err = run(*here, f"job.gpu={gpu}")
        assert code == 0, err
        assert "= aiter.add_norm_linear(" in out and "= aiter.norm_rope_attention(" in out
    code, out, err = run(*here, "job.gpu=h200")
    assert code == 0 and "aiter" not in out, err


def test_amds_gpus_are_no_h200(run: Any, published: Any):
    code, out, err = run(published("qwen3_0.6b"), "device=rocm")
    message = "device=rocm: there is no such GPU here; name the one to explain, as in job.gpu=mi300x"
    assert (code, out, err) == (2, "", f"atom-run: ConfigError: {message}\n")


def test_rocm_is_refused_to_run_where_torch_is_for_others(capsys: pytest.CaptureFixture[str], checkpoints: Any):
    assert main(["job=compile", f"checkpoint={checkpoints('llama')}", "device=rocm"]) != 0
    assert "device=rocm: the torch that is installed here is not built for AMD's GPUs" in capsys.readouterr().err
