"""atom's model inside vLLM, whose classes a double stands for: logits of transformers, weights, what is refused."""

from __future__ import annotations

import itertools
import shutil
import threading
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import tiny
import torch
from law import assert_same_logits
from plugin import vllm_double as vllm
from safetensors.torch import load_file, save_file
from test_fp8_kv import NAMES, scales_of_layer, with_scales
from test_quantized import LAYOUTS, write
from thread_ranks import Meeting, ThreadCommunicator
from torch import Tensor

from atom.errors import CheckpointError, ConfigError, UnsupportedError
from atom.graph import Mesh
from atom.plugin.vllm import architectures, register_model, register_platform
from atom.plugin.vllm.config import overrides_of


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    with vllm.installed():
        yield


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp() / "atom-cache"


Make = Callable[..., Any]


@pytest.fixture
def make(cache: Path) -> Make:
    """A model of vLLM's configuration, as its loader makes and fills it: under its own defaults of torch."""

    def make(folder: Path, *overrides: str, level: int = 1, device: str = "cpu", **fields: Any) -> Any:
        from atom.plugin.vllm.model import AtomForCausalLM

        given = {name: fields.pop(name) for name in list(fields) if name in vllm.ModelConfig.__annotations__}
        own = {"atom": [f"level={level}", f"cache={cache}", *overrides]}
        config = vllm.VllmConfig(vllm.ModelConfig(str(folder), **given), additional_config=own, **fields)
        vllm.context.config = config
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)  # vLLM sets the model's, which nothing of ours may depend on
        try:
            with torch.device(device):
                model = AtomForCausalLM(vllm_config=config, prefix="")
            if config.load_config.load_format != "dummy":
                model.load_weights(stored(folder))
        finally:
            torch.set_default_dtype(before)
        return model.eval()

    return make


def stored(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint as vLLM's loaders may give them: in one buffer that is used again."""
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            given = tensor.clone()
            yield name, given
            given.view(-1).view(torch.uint8).fill_(0x7F)


@torch.inference_mode()
def logits_of(model: Any, prompts: list[list[int]], chunk: int = 7) -> list[Tensor]:
    """The logits [T, V] of each prompt at every position, of steps that take up to a chunk of each of them at a time."""
    size = vllm.context.config.cache_config.block_size
    places = iter(torch.randperm(vllm.NUM_BLOCKS, generator=torch.Generator().manual_seed(0)).tolist())
    tables = [list(itertools.islice(places, -(-len(prompt) // size))) for prompt in prompts]
    done, parts = [0] * len(prompts), [[] for _ in prompts]
    while any(at < len(prompt) for at, prompt in zip(done, prompts, strict=True)):
        rows = [row for row, prompt in enumerate(prompts) if done[row] < len(prompt)]
        counts = [
            min(chunk if row % 2 == 0 else 1, len(prompts[row]) - done[row]) for row in rows
        ]  # prompts next to decodes
        lengths = [done[row] + count for row, count in zip(rows, counts, strict=True)]
        vllm.context.step = vllm.Step([tables[row] for row in rows], lengths, counts)
        tokens = [
            token for row, length in zip(rows, lengths, strict=True) for token in prompts[row][done[row] : length]
        ]
        positions = [at for row, length in zip(rows, lengths, strict=True) for at in range(done[row], length)]
        hidden = model(input_ids=torch.tensor(tokens, dtype=torch.int32), positions=torch.tensor(positions))
        for row, length, part in zip(rows, lengths, model.compute_logits(hidden).split(counts), strict=True):
            parts[row].append(part)
            done[row] = length
    return [torch.cat(each) for each in parts]


# layers that share KV, and those that attend to what an indexer chooses
REFUSED = ("gemma3n", "gemma4", "deepseek_v32", "deepseek_v4", "dots3_note", "glm_moe_dsa", "hy_v4", "minimax_m3")
PROMPTS = [tiny.prompt(45), tiny.prompt(19, seed=1)]


@pytest.mark.sampled(48)
@pytest.mark.parametrize(
    "name",
    [
        *(name for name in tiny.MODEL_FILES if name not in REFUSED),
        *("gemma4_experts", "mixtral_window_stacked", "deepseek_v3_plain_q_odd", "gpt_oss_odd"),
    ],
)
def test_logits_are_those_of_transformers(name: str, make: Make, checkpoints: Any, references: Any):
    model = make(checkpoints(name))
    for prompt, logits in zip(PROMPTS, logits_of(model, PROMPTS), strict=True):
        assert_same_logits(logits, tiny.logits(references(name), prompt))


@pytest.mark.parametrize("level", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_other_levels_give_the_same(level: int, make: Make, checkpoints: Any, references: Any):
    model = make(checkpoints("qwen3"), level=level)
    for prompt, logits in zip(PROMPTS, logits_of(model, PROMPTS), strict=True):
        assert_same_logits(logits, tiny.logits(references("qwen3"), prompt))


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_the_device_that_vllm_makes_models_on_is_not_ours(load_format: str, make: Make, checkpoints: Any):
    model = make(checkpoints("qwen3"), device="meta", load_config=SimpleNamespace(load_format=load_format))
    assert all(logits.isfinite().all() for logits in logits_of(model, PROMPTS))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "experts"), [("qwen3", False), ("qwen3_moe", True), ("deepseek_v3", False), ("gpt_oss", False)]
)
def test_ranks_of_vllm_divide_the_model(name: str, experts: bool, make: Make, checkpoints: Any, references: Any):
    folder, num_ranks = checkpoints(name), tiny.num_ranks(name)
    meeting, results = Meeting(Mesh(tensor=num_ranks)), {}

    def run(rank: int) -> None:
        vllm.context.rank, vllm.context.config = vllm.Rank(rank, ThreadCommunicator(meeting, rank)), configs[rank]
        results[rank] = logits_of(models[rank], PROMPTS)

    models, configs = {}, {}
    for rank in range(num_ranks):
        vllm.context.rank = vllm.Rank(rank, None)
        parallel = vllm.ParallelConfig(num_ranks, enable_expert_parallel=experts)
        models[rank] = make(folder, parallel_config=parallel, is_moe=experts)
        configs[rank] = vllm.context.config
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert meeting.num_collectives and len(results) == num_ranks
    for rank in range(num_ranks):
        for prompt, logits in zip(PROMPTS, results[rank], strict=True):
            assert_same_logits(logits, tiny.logits(references(name), prompt))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", ["deepseek", "W4A16", "gptq"])
def test_packed_checkpoints_are_read_by_atoms_own_formats(layout: str, make: Make, tmp_path: Path):
    packed, plain = write("qwen3", LAYOUTS[layout], tmp_path)
    for prompt, logits in zip(PROMPTS, logits_of(make(packed), PROMPTS), strict=True):
        assert_same_logits(logits, tiny.logits(tiny.reference(plain), prompt))


def test_weights_come_again_into_the_same_memory(make: Make, checkpoints: Any, tmp_path: Path):
    other = tiny.save_changed("qwen3", tmp_path / "other")
    model = make(checkpoints("qwen3"), level=0)
    places = {recipe: tensor.data_ptr() for recipe, tensor in model._tensors.items()}
    model.load_weights(stored(tmp_path / "other"))
    assert {recipe: tensor.data_ptr() for recipe, tensor in model._tensors.items()} == places and len(places) > 10
    for prompt, logits in zip(PROMPTS, logits_of(model, PROMPTS), strict=True):
        assert_same_logits(logits, tiny.logits(other, prompt))


def test_a_head_that_arrives_with_the_embedding_it_is_tied_to_has_to_equal_it(
    make: Make, checkpoints: Any, tmp_path: Path
):
    """The weights are not on this disk yet when the model is made."""
    folder = checkpoints("llama_tied")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    model = make(tmp_path, load_config=SimpleNamespace(load_format="dummy"))
    model._tensors = {}
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    model.load_weights({**tensors, "lm_head.weight": embedding.clone()}.items())
    with pytest.raises(CheckpointError, match=r"^config.json ties lm_head.weight to .*another head is stored, .*again"):
        model.load_weights({**tensors, "lm_head.weight": embedding + 1}.items())


def test_a_head_that_differs_from_the_embedding_it_is_tied_to_is_loaded(make: Make, checkpoints: Any, tmp_path: Path):
    folder = shutil.copytree(checkpoints("llama_tied"), tmp_path / "other")
    tensors = load_file(folder / "model.safetensors")
    other = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].flip(0).contiguous()}
    save_file(other, folder / "model.safetensors", {"format": "pt"})
    for prompt, logits in zip(PROMPTS, logits_of(make(folder), PROMPTS), strict=True):
        assert_same_logits(logits, tiny.logits(tiny.reference(folder), prompt))


def test_random_weights_need_no_files(make: Make, checkpoints: Any, tmp_path: Path):
    (tmp_path / "config.json").write_text((checkpoints("qwen3_moe") / "config.json").read_text())
    model = make(tmp_path, load_config=SimpleNamespace(load_format="dummy"))
    (logits, _) = logits_of(model, PROMPTS)
    assert logits.shape == (45, 101) and logits.isfinite().all() and logits.std() > 0


def test_sinks_and_windows_are_given_to_the_layers(make: Make, checkpoints: Any):
    make(checkpoints("gpt_oss"))
    file = load_file(checkpoints("gpt_oss") / "model.safetensors")
    layers = vllm.context.config.compilation_config.static_forward_context
    assert list(layers) == [f"model.layers.{number}.attn" for number in range(3)]
    for number, layer in enumerate(layers.values()):
        assert torch.equal(layer.impl_sinks, file[f"model.layers.{number}.self_attn.sinks"])
        assert layer.window == (9 if number % 2 == 0 else None)


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
def test_scales_of_a_cache_in_fp8_are_given_to_layers_that_have_a_place(
    cache_dtype: str, make: Make, checkpoints: Any, tmp_path: Path
):
    folder = with_scales(checkpoints("llama"), tmp_path / "packed", NAMES["compressed-tensors"], [1], torch.float32)
    model = make(folder, cache_config=vllm.CacheConfig(cache_dtype), quant_config=object())
    names = {f"attention.model_layers_{number}.{name}" for number in range(3) for name in ("k_scale", "v_scale")}
    assert model.load_weights(stored(folder)) == names  # all parameters, so that vLLM misses none
    for number, layer in enumerate(vllm.context.config.compilation_config.static_forward_context.values()):
        expected = scales_of_layer(number) if cache_dtype == "fp8" else (-1.0, -1.0)  # as vLLM marks what is not there
        assert (layer.k_scale.item(), layer.v_scale.item()) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model.norm.weight": None}, r"the checkpoint has no tensor model\.norm\.weight; is it whole"),
        ({"model.layers.1.self_attn.k_proj.weight": None}, r"the checkpoint has no tensor .*1\.self_attn\.k_proj\.weight"),
        ({"model.norm.weight": torch.ones(47)}, r"tensor model\.norm\.weight is \[47\], the model expects \[48\]"),
        ({"model.more.weight": torch.ones(4)}, r"the model does not use tensor model\.more\.weight"),
    ],
)  # fmt: skip
def test_a_tensor_that_is_missing_surplus_or_misshapen_is_one_line(
    changed: dict[str, Tensor | None], message: str, make: Make, checkpoints: Any
):
    folder = checkpoints("qwen3")
    model = make(folder, load_config=SimpleNamespace(load_format="dummy"))
    model._tensors = {}
    tensors = {**dict(load_file(folder / "model.safetensors")), **changed}
    with pytest.raises(CheckpointError, match=f"^{message}"):
        model.load_weights((name, tensor) for name, tensor in tensors.items() if tensor is not None)


def test_what_vllm_may_ask_for_and_atom_does_not_have_is_refused(make: Make, checkpoints: Any):
    model = make(checkpoints("qwen3"))
    for given in ({"inputs_embeds": torch.zeros(1, 48)}, {"intermediate_tensors": {}}):
        with pytest.raises(UnsupportedError):
            model(input_ids=torch.zeros(1).int(), positions=torch.zeros(1).long(), **given)
    with pytest.raises(UnsupportedError):
        model.embed_input_ids(torch.zeros(1).int())
    with pytest.raises(UnsupportedError, match=r"^passes.taps and passes.steer: vLLM's"):
        make(checkpoints("qwen3"), "passes.taps=[model.layers.0]")


def test_an_error_says_how_vllms_own_model_runs(make: Make, checkpoints: Any):
    with pytest.raises(
        UnsupportedError, match=r"hf-overrides .*; ATOM_DISABLE_VLLM_PLUGIN=1 has vLLM run its own model"
    ):
        make(checkpoints("qwen3"), hf_overrides={"rope_theta": 1.0})
    model = make(checkpoints("qwen3"))
    with pytest.raises(CheckpointError, match="ATOM_DISABLE_VLLM_PLUGIN=1"):
        model.load_weights([("model.nosuch.weight", torch.zeros(1))])


def config_of(**fields: Any) -> vllm.VllmConfig:
    return vllm.VllmConfig(vllm.ModelConfig("/models/mine", **fields))


def test_flags_of_vllm_are_overrides_of_atom():
    config = config_of(dtype=torch.bfloat16, max_model_len=4096, is_moe=True, quantization="fp8")
    config.cache_config.cache_dtype = "fp8_e4m3"
    config.parallel_config = vllm.ParallelConfig(4, enable_expert_parallel=True)
    config.additional_config = {"atom": ["passes.fuse_qkv=false"]}
    made = overrides_of(config)
    assert made[-1] == "passes.fuse_qkv=false"
    overrides = dict(each.split("=", 1) for each in made)
    assert {key: value.strip("'") for key, value in overrides.items() if not key.startswith("passes")} == {
        "checkpoint": "/models/mine", "revision": "null", "dtype": "bf16", "device": "cpu", "job": "explain",
        "serve.max_model_len": "4096", "serve.kv_cache_dtype": "fp8", "parallel.tensor": "4", "parallel.experts": "4",
        "quant": "fp8",
    }  # fmt: skip


def test_kernels_are_compiled_ahead_for_each_power_of_two_that_a_step_may_have():
    from atom.plugin.vllm.model import shapes_of_steps

    scheduler = SimpleNamespace(max_num_seqs=5, max_num_batched_tokens=40)
    compilation = SimpleNamespace(cudagraph_capture_sizes=[1, 3])
    config: Any = SimpleNamespace(scheduler_config=scheduler, compilation_config=compilation)
    shapes = [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (8, 5), (16, 5), (32, 5), (40, 5)]
    assert shapes_of_steps(config) == shapes


def test_a_checkpoint_that_says_how_it_is_packed_is_read_so():
    packed = SimpleNamespace(quantization_config={"quant_method": "awq"})
    assert not any(each.startswith("quant=") for each in overrides_of(config_of(quantization="awq", hf_config=packed)))


@pytest.mark.parametrize("fields", [{"hf_overrides": {"rope_theta": 1.0}}, {"quantization": "bitsandbytes"}])
def test_what_atom_has_no_word_for_is_refused(fields: dict[str, Any]):
    with pytest.raises(UnsupportedError) as error:
        overrides_of(config_of(**fields))
    assert "\n" not in str(error.value)


def test_each_family_is_registered_but_for_models_that_read_images(monkeypatch: pytest.MonkeyPatch):
    register_model()
    names = vllm.ModelRegistry.models
    assert set(names.values()) == {"atom.plugin.vllm.model:AtomForCausalLM"}
    assert {"Qwen3ForCausalLM", "DeepseekV3ForCausalLM", "KimiK2ForCausalLM", "GptOssForCausalLM"} <= names.keys()
    assert "Gemma3ForConditionalGeneration" not in names
    classes = {tiny.config(name).__class__.__name__.removesuffix("Config") for name in tiny.MODEL_FILES}
    assert {f"{name.removesuffix('Text')}ForCausalLM" for name in classes} <= names.keys()
    vllm.ModelRegistry.models = {}
    monkeypatch.setenv("ATOM_DISABLE_VLLM_PLUGIN", "1")
    register_model()
    assert vllm.ModelRegistry.models == {}


@pytest.mark.parametrize(
    ("version", "is_ours"),
    [("0.25.1", False), ("0.9.0.1", False), ("0.26.0", True), ("1.0+cpu", True), ("0.1.dev7+gabc", True), (None, True)],
)
def test_an_older_vllm_keeps_its_own_models(
    version: str | None, is_ours: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def find(name: str) -> str:
        if version is None:
            raise PackageNotFoundError(name)
        return version

    monkeypatch.setattr("atom.plugin.vllm.version", find)
    monkeypatch.setitem(vllm.MODULES["vllm.platforms"]["builtin_platform_plugins"], "rocm", lambda: "rocm")
    register_model()
    assert bool(vllm.ModelRegistry.models) == bool(register_platform()) == is_ours
    said = capsys.readouterr().err
    line = f"vLLM runs its own models: atom's need vLLM 0.26 or newer, and this is {version}"
    assert said == "" if is_ours else line in said


def test_a_model_file_that_cannot_be_read_does_not_end_vllm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("atom.plugin.vllm.model_files", Mock(side_effect=ConfigError("mine.yaml: no mapping")))
    register_model()
    assert vllm.ModelRegistry.models == {}
    said = capsys.readouterr().err
    assert (
        said.startswith("atom-run: vLLM runs its own models: mine.yaml: no mapping; ATOM_DISABLE")
        and said.count("\n") == 1
    )


def test_the_platform_is_only_for_amds_gpus(monkeypatch: pytest.MonkeyPatch):
    assert register_platform() is None
    plugins = vllm.MODULES["vllm.platforms"]["builtin_platform_plugins"]
    monkeypatch.setitem(plugins, "rocm", lambda: "vllm.platforms.rocm.RocmPlatform")
    assert register_platform() == "atom.plugin.vllm.platform.AtomPlatform"
    monkeypatch.setenv("ATOM_DISABLE_VLLM_PLUGIN", "1")
    assert register_platform() is None


@pytest.mark.parametrize(
    ("architecture", "is_ours"), [("Qwen3ForCausalLM", True), ("WhisperForConditionalGeneration", False)]
)
def test_the_platform_leaves_compiling_to_atom_for_its_models(architecture: str, is_ours: bool):
    from atom.plugin.vllm.platform import AtomPlatform

    config = config_of(architectures=[architecture])
    AtomPlatform.apply_config_platform_defaults(config)
    compilation = config.compilation_config
    assert compilation.static_forward_context == {"rocm": "defaults"}
    assert compilation.mode == (vllm.CompilationMode.NONE if is_ours else None)
    assert compilation.cudagraph_mode == (vllm.CUDAGraphMode.FULL_DECODE_ONLY if is_ours else None)
    assert (architecture in architectures()) == is_ours
