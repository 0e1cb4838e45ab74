"""LoRA adapters next to the weights: tokens and logits are those of PEFT's own model, whatever else runs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import adapters
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from test_host_blocks import load_always
from thread_ranks import ThreadRanks, thread_ranks

from atom import LLMEngine, SamplingParams
from atom.config.load import load
from atom.errors import AtomError, CheckpointError, ConfigError, RequestError, UnsupportedError
from atom.graph import PackedWeight, Type
from atom.weights.quantize import quantize

__all__ = ["thread_ranks"]

pytestmark = pytest.mark.early

Open = Callable[..., LLMEngine]
GREEDY = SamplingParams(max_tokens=10, temperature=0)


@pytest.fixture
def fresh(checkpoints: Callable[[str], Path]) -> Callable[[str], Any]:
    """transformers' model of a variant, not shared: PEFT changes the modules of what it is given."""
    return lambda name: tiny.reference(checkpoints(name))


@pytest.mark.sampled(40)
@pytest.mark.parametrize("name, level, fields", [
    ("llama", 0, {}),
    ("llama", 1, {"use_rslora": True, "r": 3, "lora_alpha": 5}),
    ("llama_biases", 1, {"target_modules": ["q_proj", "v_proj"]}),
    ("qwen3", 1, {"rank_pattern": {"q_proj": 2, r".*\.1\.mlp\.down_proj": 7}, "alpha_pattern": {"v_proj": 3}}),
    ("phi3", 1, {}),
    ("phi3", 0, {}),
    ("deepseek_v2", 1, {"target_modules": ["q_proj", "kv_a_proj_with_mqa", "o_proj"]}),
    ("deepseek_v32", 1, {"target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"]}),  # next to an indexer's
    ("mixtral", 1, {"target_modules": ["q_proj", "o_proj"]}),
    ("qwen2_window", 1, {"target_modules": [*adapters.ALL], "layers_to_transform": [0, 2]}),
    pytest.param("qwen3", 2, {}, marks=pytest.mark.slow),
])  # fmt: skip
def test_logits_and_tokens_are_those_of_peft(
    name: str, level: int, fields: dict[str, Any], open_engine: Open, fresh: Callable[[str], Any], tmp_path: Path
):
    folder = adapters.save_with_peft(fresh(name), tmp_path / "sql", **fields)
    model, plain = adapters.load_with_peft(fresh(name), folder), fresh(name)
    engine = open_engine(name, level=level, lora_modules={"sql": str(folder)}, max_lora_rank=8, max_loras=2)
    prompt = tiny.prompt(20)
    first, second = engine.generate([prompt] * 2, GREEDY, adapters=["sql", None])
    tiny.assert_greedy(first, prompt, model)
    tiny.assert_greedy(second, prompt, plain)
    scored = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    (answer,) = engine.generate([prompt], scored, adapters="sql")
    wanted = torch.log_softmax(tiny.logits(model, prompt), -1)
    ours = [each.logprob for each in answer["prompt_logprobs"][1:]]
    assert ours == pytest.approx([wanted[at, token].item() for at, token in enumerate(prompt[1:])], abs=2e-3)
    unadapted = torch.log_softmax(tiny.logits(plain, prompt), -1)
    assert max(abs(unadapted[at, token].item() - ours[at]) for at, token in enumerate(prompt[1:])) > 0.1, "it matters"


def save_three(model: Any, tmp_path: Path) -> dict[str, Path]:
    return {f"a{seed}": adapters.save(model, tmp_path / f"a{seed}", rank=2 + seed, seed=seed) for seed in range(3)}


def test_adapters_share_batches_through_chunks_and_preemptions(open_engine: Open, references: Any, tmp_path: Path):
    model = references("llama")
    folders = save_three(model, tmp_path)
    models = {None: model} | {name: adapters.merge(model, folder) for name, folder in folders.items()}
    engine = open_engine(
        "llama", lora_modules={name: str(folder) for name, folder in folders.items()}, num_kvcache_blocks=16,
        block_size=4, max_num_batched_tokens=12, max_num_seqs=6, max_model_len=48,
    )  # fmt: skip
    names = ["a0", None, "a1", "a2", "a1", None, "a0", "a2"]
    prompts = [tiny.prompt(13 + 3 * seed, seed=seed) for seed in range(8)]
    (first,) = engine.add_request([prompts[0]], GREEDY, adapters="a2")
    engine.add_request([prompts[1]], GREEDY)
    engine.step()
    engine.add_request(prompts[:6], GREEDY, adapters="a1")
    assert (engine.metrics.running_adapters, engine.metrics.waiting_adapters) == (["a2"], ["a1"])
    engine.abort(first)
    answers = engine.generate(prompts, GREEDY, adapters=names)
    assert (engine.metrics.running_adapters, engine.metrics.waiting_adapters) == ([], [])
    assert engine.metrics.scheduler.num_preemptions > 0
    assert max(map(len, prompts)) > 12, "prompts are computed in chunks"
    for prompt, name, answer in zip(prompts, names, answers, strict=True):
        tiny.assert_greedy(answer, prompt, models[name])


def test_a_cached_prefix_is_of_one_adapter(open_engine: Open, references: Any, tmp_path: Path):
    model = references("llama")
    folders = save_three(model, tmp_path)
    engine = open_engine(
        "llama", lora_modules={name: str(folder) for name, folder in folders.items()}, enable_prefix_caching=True,
        block_size=4,
    )  # fmt: skip
    prompt, hits = tiny.prompt(21), []
    for name in ("a0", None, "a1", "a0", None):
        (answer,) = engine.generate([prompt], GREEDY, adapters=name)
        tiny.assert_greedy(answer, prompt, model if name is None else adapters.merge(model, folders[name]))
        hits.append(engine.metrics.scheduler.num_prefix_hit_tokens)
    assert hits == [0, 0, 0, 20, 40]


def test_an_adapter_is_loaded_and_dropped_while_requests_have_it(open_engine: Open, references: Any, tmp_path: Path):
    model = references("llama")
    folders = save_three(model, tmp_path)
    engine = open_engine("llama", enable_lora=True, max_loras=1, enable_prefix_caching=True, block_size=4)
    prompt = tiny.prompt(17)
    with pytest.raises(RequestError, match=r"there is no adapter a0 \(loaded: none\)"):
        engine.add_request([prompt], GREEDY, adapters="a0")
    engine.load_lora_adapter("a0", str(folders["a0"]))
    engine.add_request([prompt], GREEDY, adapters="a0")
    engine.step()
    with pytest.raises(RequestError, match="the adapter a0 is loaded already"):
        engine.load_lora_adapter("a0", str(folders["a0"]))
    engine.unload_lora_adapter("a0")
    with pytest.raises(RequestError, match="there is no adapter a0"):
        engine.add_request([prompt], GREEDY, adapters="a0")
    with pytest.raises(RequestError, match=r"the adapter a1 has no place: there is room for 1 \(serve.max_loras\)"):
        engine.load_lora_adapter("a1", str(folders["a1"]))
    ended = []
    while not engine.is_finished():
        ended += engine.step()
    tiny.assert_greedy({"token_ids": ended[0].output}, prompt, adapters.merge(model, folders["a0"]))
    engine.load_lora_adapter("a0", str(folders["a1"]))  # another one under its name, which finds none of its KV
    (answer,) = engine.generate([prompt], GREEDY, adapters="a0")
    tiny.assert_greedy(answer, prompt, adapters.merge(model, folders["a1"]))
    engine.abort(engine.add_request([prompt], GREEDY, adapters="a0")[0])
    engine.unload_lora_adapter("a0")
    engine.load_lora_adapter("a2", str(folders["a2"]))  # an aborted request holds nothing
    (answer,) = engine.generate([prompt], GREEDY, adapters="a2")
    tiny.assert_greedy(answer, prompt, adapters.merge(model, folders["a2"]))


def change(folder: Path, **fields: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def change_tensor(folder: Path, old: str, new: str | None = None, tensor: torch.Tensor | None = None) -> None:
    """Rename a tensor, or put another in its place; without both it is removed."""
    path, prefix = folder / "adapter_model.safetensors", "base_model.model.model.layers.0."
    tensors = load_file(path)
    held = tensors.pop(prefix + old)
    if new is not None or tensor is not None:
        tensors[new or prefix + old] = held if tensor is None else tensor
    save_file(tensors, path)


Q = "self_attn.q_proj.lora_"
REFUSED: dict[str, tuple[Callable[[Path], object], type[AtomError], str]] = {
    "dora": (lambda f: change(f, use_dora=True), UnsupportedError, "has use_dora: DoRA scales each column"),
    "modules": (lambda f: change(f, modules_to_save=["lm_head"]), UnsupportedError, "has modules_to_save: modules are saved whole"),
    "bias": (lambda f: change(f, bias="all"), UnsupportedError, "has bias=all, which is not supported \\(supported: none\\)"),
    "kind": (lambda f: change(f, peft_type="IA3"), UnsupportedError, "has peft_type=IA3, which is not supported \\(supported: LORA\\)"),
    "alpha": (lambda f: change(f, lora_alpha="much"), CheckpointError, "has lora_alpha='much', which is not a number"),
    "r": (lambda f: change(f, r=5), CheckpointError, r"down_proj.lora_A.weight and .*down_proj.lora_B.weight have ranks 4 and 4, not r=5"),
    "no config": (lambda f: (f / "adapter_config.json").unlink(), CheckpointError, "has no adapter_config.json"),
    "no weights": (lambda f: (f / "adapter_model.safetensors").unlink(), CheckpointError, "has no adapter_model.safetensors"),
    "half": (lambda f: change_tensor(f, Q + "B.weight"), CheckpointError, "q_proj.lora_A.weight stands without its other factor"),
    "stray": (lambda f: change_tensor(f, Q + "A.weight", "base_model.model.lm_head.weight"), UnsupportedError, "lm_head.weight is not a factor"),
    "inputs": (lambda f: change_tensor(f, Q + "A.weight", tensor=torch.ones(4, 47)), CheckpointError, r"q_proj.lora_A.weight is \[4, 47\], the model expects \[4, 48\]"),
    "outputs": (lambda f: change_tensor(f, Q + "B.weight", tensor=torch.ones(47, 4)), CheckpointError, r"q_proj.lora_B.weight is \[47, 4\], the model expects \[48, 4\]"),
    "nan": (lambda f: change_tensor(f, Q + "B.weight", tensor=torch.full((48, 4), math.nan)), CheckpointError, "q_proj.lora_B.weight has values that"),
    "pissa": (lambda f: change(f, init_lora_weights="pissa_niter_4"), UnsupportedError, "has init_lora_weights=pissa_niter_4: its first factors were taken off"),
    "pattern": (lambda f: change(f, rank_pattern={"q_proj(": 4}), CheckpointError, r"has rank_pattern with 'q_proj\(', which is no pattern"),
    "patterns": (lambda f: change(f, alpha_pattern=["q_proj"]), CheckpointError, r"has alpha_pattern=\['q_proj'\], which is no object"),
    "a list": (lambda f: (f / "adapter_config.json").write_text("[]"), CheckpointError, "adapter_config.json"),
    "no rank": (lambda f: [change(f, r=0), change_tensor(f, Q + "A.weight", tensor=torch.ones(0, 48)), change_tensor(f, Q + "B.weight", tensor=torch.ones(48, 0))],
                CheckpointError, "have ranks . and ., not r=0"),
    "alpha nan": (lambda f: change(f, lora_alpha=math.nan), AtomError, "q_proj|down_proj|adapter_config"),
    "cut": (lambda f: (f / "adapter_model.safetensors").write_bytes((f / "adapter_model.safetensors").read_bytes()[:-100]), CheckpointError, "adapter_model.safetensors"),
    "header": (lambda f: (f / "adapter_model.safetensors").write_bytes(b"\xff" * 64), CheckpointError, "adapter_model.safetensors"),
    "empty": (lambda f: (f / "adapter_model.safetensors").write_bytes(b""), CheckpointError, "adapter_model.safetensors"),
    "large": (lambda f: [change(f, rank_pattern={"0.self_attn.q_proj": 1 << 15}), change_tensor(f, Q + "A.weight", tensor=torch.ones(1 << 15, 48)),
                         change_tensor(f, Q + "B.weight", tensor=torch.ones(48, 1 << 15))], ConfigError, "q_proj.lora_A.weight has rank 32768: set serve.max_lora_rank=32768"),
    "a device": (lambda f: [(f / "adapter_model.safetensors").unlink(), (f / "adapter_model.safetensors").symlink_to("/dev/zero")], CheckpointError, "is not a regular file"),
    "dtype": (lambda f: change_tensor(f, Q + "B.weight", tensor=torch.ones(48, 4, dtype=torch.int32)), CheckpointError, r"q_proj.lora_B.weight is i32\[48, 4\], no matrix of floats"),
}  # fmt: skip


@pytest.fixture(scope="module")
def roomy(checkpoints: Callable[[str], Path]) -> LLMEngine:
    return LLMEngine(model=str(checkpoints("llama")), dtype="fp32", level=1, enable_lora=True, kv_cache_memory=1 << 22)


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_served_is_refused_by_name(case: str, roomy: LLMEngine, references: Any, tmp_path: Path):
    spoil, kind, reason = REFUSED[case]
    folder = adapters.save(references("llama"), tmp_path / "sql")
    spoil(folder)
    with pytest.raises(kind, match=reason) as raised:
        roomy.load_lora_adapter("sql", str(folder))
    assert str(folder) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name, targets, module", [
    ("llama", ("q_proj", "lm_head"), "lm_head"), ("deepseek_v2", ("kv_b_proj",), "model.layers.0.self_attn.kv_b_proj"),
])  # fmt: skip
def test_a_module_without_adapters_is_named(
    name: str, targets: tuple[str, ...], module: str, open_engine: Open, references: Any, tmp_path: Path
):
    folder = adapters.save(references(name), tmp_path / "sql", targets=targets)
    with pytest.raises(CheckpointError, match=rf"lora_A.weight is of {module}, which is no linear of a layer here"):
        open_engine(name, lora_modules={"sql": str(folder)})


def test_a_folder_without_an_adapter_is_reported_before_anything_is_compiled(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("atom.assemble.engine.load_model", None)
    with pytest.raises(CheckpointError, match=r"/nowhere has no adapter_config.json"):
        open_engine("llama", lora_modules={"sql": "/nowhere"})


def test_a_rank_beyond_the_room_names_the_option(open_engine: Open, references: Any, tmp_path: Path):
    folder = adapters.save(references("llama"), tmp_path / "sql", rank=9)
    with pytest.raises(ConfigError, match=r"down_proj.lora_A.weight has rank 9: set serve.max_lora_rank=9"):
        open_engine("llama", lora_modules={"sql": str(folder)}, max_lora_rank=8)


@pytest.mark.parametrize("overrides, kind, reason", [
    (["serve.lora_modules={a: /a, b: /b}", "serve.max_loras=1"], ConfigError, "serve.max_loras=1 holds fewer than the 2 of serve.lora_modules; set serve.max_loras=2"),
    (["serve.lora_modules={talker: /a}", "serve.http.served_model_name=[talker]"], ConfigError, "talker is the model's own name"),
    (["serve.lora_modules=sql"], ConfigError, "serve.lora_modules=sql is not a mapping from names to folders"),
])  # fmt: skip
def test_options_that_do_not_fit_are_refused(
    overrides: list[str], kind: type[AtomError], reason: str, checkpoints: Callable[[str], Path]
):
    with pytest.raises(kind, match=reason):
        load([f"checkpoint={checkpoints('llama')}", "device=cpu", *overrides])


def test_a_model_without_room_for_adapters_says_so(open_engine: Open):
    with pytest.raises(RequestError, match=r"there are no adapters here; set serve.enable_lora=true"):
        open_engine("llama").generate([tiny.prompt(5)], GREEDY, adapters="sql")


def test_drafts_of_ngrams_are_verified_with_the_adapter(open_engine: Open, references: Any, tmp_path: Path):
    model = references("llama")
    folder = adapters.save(model, tmp_path / "sql")
    engine = open_engine("llama", lora_modules={"sql": str(folder)}, method="ngram", prompt_lookup_min=1)
    prompt = tiny.prompt(6) * 4
    (answer,) = engine.generate([prompt], SamplingParams(max_tokens=40, temperature=0), adapters="sql")
    tiny.assert_greedy(answer, prompt, adapters.merge(model, folder))
    assert engine.metrics.scheduler.num_draft_tokens > 0


def test_names_of_a_text_model_within_another_and_without_a_head_are_understood(
    open_engine: Open, references: Any, tmp_path: Path
):
    model, prompt = references("llama"), tiny.prompt(17)
    folder = adapters.save(model, tmp_path / "sql")
    tensors = load_file(folder / "adapter_model.safetensors")
    engine = open_engine("llama", enable_lora=True)
    for at, prefix in enumerate(("model.language_model.", "language_model.model.", "")):
        renamed = {
            name.replace("base_model.model.model.", f"base_model.model.{prefix}"): tensor
            for name, tensor in tensors.items()
        }
        assert renamed.keys() != tensors.keys()
        save_file(renamed, folder / "adapter_model.safetensors")
        engine.load_lora_adapter(f"a{at}", str(folder))
        (answer,) = engine.generate([prompt], GREEDY, adapters=f"a{at}")
        tiny.assert_greedy(answer, prompt, adapters.merge(model, adapters.save(model, tmp_path / f"same{at}")))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("fmt", ["int4[1, 32]", "fp8[1, *]"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_adapter_next_to_packed_weights(fmt: str, ranks: int, thread_ranks: list[ThreadRanks], tmp_path: Path):
    model = tiny.save_changed("llama", tmp_path / "model", hidden_size=64, intermediate_size=128)
    folder, prompt = adapters.save(model, tmp_path / "sql"), tiny.prompt(20)
    for name, module in model.named_modules():
        if name.startswith("model.layers.") and isinstance(module, torch.nn.Linear):
            type = Type("fp32", tuple(module.weight.shape), fmt)
            module.weight.data = PackedWeight(type, quantize(fmt, module.weight.data)).unpack()
    engine = LLMEngine(
        str(tmp_path / "model"), dtype="fp32", level=1, kv_cache_memory=1 << 22, lora_modules={"sql": str(folder)},
        tensor_parallel_size=ranks, **{"quant.fmt": fmt},
    )  # fmt: skip
    (answer,) = engine.generate([prompt], GREEDY, adapters="sql")
    engine.close()
    tiny.assert_greedy(answer, prompt, adapters.merge(model, folder))


def test_a_draft_model_drafts_without_the_adapter_and_changes_no_token(
    checkpoints: Callable[[str], Path], open_engine: Open, references: Any, tmp_path: Path
):
    model = references("llama")
    folder = adapters.save(model, tmp_path / "sql", size=0.05)  # so small that the plain model is often right
    engine = open_engine(
        "llama", lora_modules={"sql": str(folder)}, method="draft", draft_model=str(checkpoints("llama")),
        num_speculative_tokens=2,
    )  # fmt: skip
    prompts = [tiny.prompt(9, seed=seed) for seed in range(4)]
    answers = engine.generate(prompts, SamplingParams(max_tokens=20, temperature=0), adapters=["sql", None] * 2)
    merged = adapters.merge(model, folder)
    for prompt, answer, reference in zip(prompts, answers, (merged, model) * 2, strict=True):
        tiny.assert_greedy(answer, prompt, reference)
    stats = engine.metrics.scheduler
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


def test_kv_in_files_is_of_one_adapter(open_engine: Open, references: Any, tmp_path: Path):
    model, prompt = references("llama"), tiny.prompt(33)
    folders = save_three(model, tmp_path)
    fields = {"block_size": 4, "enable_prefix_caching": True, "swap_space": 1 << 20, "kv_cache_dir": str(tmp_path / "kv"),
              "kv_cache_dir_bytes": 1 << 24}  # fmt: skip
    modules = {name: str(folder) for name, folder in folders.items()}
    read = []
    for name in ("a0", "a1", "a0", None):
        engine = load_always(open_engine("llama", lora_modules=modules, **fields))
        (answer,) = engine.generate([prompt], GREEDY, adapters=name)
        tiny.assert_greedy(answer, prompt, model if name is None else adapters.merge(model, folders[name]))
        read.append(engine.metrics.num_read_blocks)
        engine.close()
    assert read[0] == read[1] == read[3] == 0 < read[2]


def test_an_embedding_is_of_the_adapter(open_engine: Open, references: Any, tmp_path: Path):
    model, prompt = references("qwen3"), tiny.prompt(16)
    folder = adapters.save(model, tmp_path / "sql")
    pooling = {"serve.pooler_config.pooling_type": "LAST", "serve.pooler_config.normalize": False}
    engine = open_engine("qwen3", lora_modules={"sql": str(folder)}, **pooling)
    answers = engine.embed([prompt] * 2, adapters=["sql", None])
    for answer, reference in zip(answers, (adapters.merge(model, folder), model), strict=True):
        with torch.inference_mode():
            wanted = reference.model(torch.tensor([prompt])).last_hidden_state[0, -1]
        torch.testing.assert_close(torch.tensor(answer["embedding"]), wanted, atol=1e-4, rtol=1e-4)
    with pytest.raises(RequestError, match="1 adapters for 2 prompts"):
        engine.embed([prompt] * 2, adapters=["sql"])
