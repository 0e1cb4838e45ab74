"""mmproj files next to GGUF files: which is found, what it says, and its tensors."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import gguf_files
import huggingface_hub
import numpy as np
import pytest
import vision
from safetensors.numpy import load_file

from atom.checkpoint import GGUFFacts, open_checkpoint
from atom.checkpoint.address import order_mmproj
from atom.checkpoint.mmproj import MmprojCheckpoint
from atom.config import Config
from atom.config.load import load
from atom.errors import CheckpointError, ConfigError

NAME = "Qwen3VL"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint, and its two GGUF files in a folder of their own."""
    folder = tmp_path_factory.mktemp("mmproj")
    vision.save(NAME, folder / "hub")
    (folder / "gguf").mkdir()
    gguf_files.convert(folder / "hub", folder / "gguf" / "tiny.gguf")
    gguf_files.convert_tower(folder / "hub", folder / "gguf" / "mmproj-tiny.gguf")
    return folder


def configure(path: Path, *overrides: str) -> Config:
    return load([f"checkpoint={path}", "device=cpu", *overrides])


def test_a_config_is_that_of_the_same_model_in_a_folder(model: Path) -> None:
    files, folder = (configure(path) for path in (model / "gguf" / "tiny.gguf", model / "hub"))
    ours, hub = files.model.vision, folder.model.vision
    assert ours is not None and hub is not None
    differing = {"weights", "std"}
    assert {name: each for name, each in vars(ours).items() if name not in differing} == {
        name: each for name, each in vars(hub).items() if name not in differing
    }
    assert ours.std == pytest.approx(hub.std) and ours.token == vision.IMAGE
    assert files.model.attention.rope == folder.model.attention.rope
    assert files.model.name == folder.model.name == "qwen3_vl"


def test_of_several_files_the_one_in_the_dtype_of_the_hub_is_read() -> None:
    files = ["mmproj-F32.gguf", "tiny-mmproj-f16.gguf", "a/tiny.mmproj-BF16.gguf", "mmproj-Q8_0.gguf", "tiny.gguf"]
    assert order_mmproj([*files, "mmproj/tiny.gguf"]) == [files[2], files[1], files[0], files[3]]


def test_a_file_elsewhere_is_given(model: Path, tmp_path: Path) -> None:
    path, tower = tmp_path / "tiny.gguf", model / "gguf" / "mmproj-tiny.gguf"
    shutil.copy(model / "gguf" / "tiny.gguf", path)
    assert configure(path).model.vision is None
    assert configure(path, f"mmproj={tower}").model.vision is not None
    with pytest.raises(CheckpointError, match=r"hub is none; leave it out"):
        configure(model / "hub", f"mmproj={tower}")
    with pytest.raises(CheckpointError, match=r"tiny\.gguf has no tower whose rows fit the hidden states"):
        configure(path, f"mmproj={path}")


def test_a_given_file_that_is_not_read_is_refused(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, known = model / "gguf" / "tiny.gguf", model / "gguf" / "mmproj-tiny.gguf"
    monkeypatch.setitem(gguf_files.PROJECTORS, f"{NAME}ForConditionalGeneration", "glm4v")
    other = gguf_files.convert_tower(model / "hub", tmp_path / "mmproj.gguf")
    with pytest.raises(ConfigError, match=r"has a tower of glm4v; model=qwen3_vl reads those of qwen3vl_merger"):
        configure(path, f"mmproj={other}")
    with pytest.raises(ConfigError, match=r"has a tower of qwen3vl_merger; model=llama reads no mmproj files"):
        configure(path, f"mmproj={known}", "model=llama")
    with pytest.raises(ConfigError, match=r"serve\.images=false does not read mmproj=.*; leave one of both out"):
        configure(path, f"mmproj={known}", "serve.images=false")
    with pytest.raises(ConfigError, match=r"is of a checkpoint that is a \.gguf file; name that, too"):
        load([f"mmproj={known}", "device=cpu"])


def test_the_tower_of_another_model_is_not_read(model: Path, tmp_path: Path) -> None:
    path, other = tmp_path / "tiny.gguf", tmp_path / "mmproj-bf16.gguf"  # which is the first by its name
    shutil.copy(model / "gguf" / "tiny.gguf", path)
    vision.save(NAME, tmp_path / "hub", hidden_size=36)
    gguf_files.convert_tower(tmp_path / "hub", other)
    assert configure(path).model.vision is None
    shutil.copy(model / "gguf" / "mmproj-tiny.gguf", tmp_path)
    assert configure(path).model.vision is not None


def test_an_unknown_tower_leaves_the_text(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(model / "gguf" / "tiny.gguf", tmp_path)
    monkeypatch.setitem(gguf_files.PROJECTORS, f"{NAME}ForConditionalGeneration", "glm4v")
    gguf_files.convert_tower(model / "hub", tmp_path / "mmproj.gguf")
    config = configure(tmp_path / "tiny.gguf")
    assert config.model.vision is None and config.hf["vision_config"]["projector_type"] == "glm4v"
    with pytest.raises(ConfigError, match=r"serve\.images=true: .* model=qwen3_vl has no encoder of them"):
        configure(tmp_path / "tiny.gguf", "serve.images=true")


def test_a_model_of_the_hub_brings_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, asked = [SimpleNamespace(rfilename=path.name) for path in (model / "gguf").iterdir()], list[str]()

    def fetch(name: str, path: str, **_: Any) -> str:
        asked.append(path)
        return str(model / "gguf" / path)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
    monkeypatch.setattr(huggingface_hub, "model_info", lambda *_, **__: SimpleNamespace(siblings=files))
    location = Path("org/tiny-GGUF")
    assert configure(location).model.vision is not None and asked == ["tiny.gguf", "mmproj-tiny.gguf"]
    asked.clear()
    assert configure(location, "serve.images=false").model.vision is None and asked == ["tiny.gguf"]


def test_only_what_images_need_is_read_of_it(model: Path) -> None:
    path = str(model / "gguf" / "tiny.gguf")
    assert not any(name.startswith(("v.", "mm.")) for name in open_checkpoint(path).tensors)
    both = open_checkpoint(path, towers={"v", "mm"})
    assert {"v.post_ln.bias", "lm_head.weight"} <= both.tensors.keys()
    assert [file.name for file in both.files()] == ["mmproj-tiny.gguf", "tiny.gguf"]


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ((4, 12), r"v\.patch_embd\.weight is \[4, 12\], not a convolution"),
        ((4, 3, 2, 2), "image_size is None, not a whole"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(shape: tuple[int, ...], says: str, tmp_path: Path) -> None:
    path = write_tower(tmp_path / "mmproj.gguf", {"v.patch_embd.weight": np.zeros(shape, np.float32)}, side=2)
    with pytest.raises(CheckpointError, match=says):
        MmprojCheckpoint(path)


def write_tower(path: Path, tensors: dict[str, np.ndarray], side: int = 0) -> Path:
    """A file of a few tensors. side: of the square of patches that become a row; 0: it does not say"""
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_vision_embedding_length(4)
    if side:
        writer.add_vision_projector_scale_factor(side)
    for name, array in ({"v.patch_embd.weight": np.zeros((4, 3, 2, 2), np.float32)} | tensors).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_tensors_are_in_one_form(model: Path, tmp_path: Path) -> None:
    stored = load_file(model / "hub" / "model.safetensors")
    stored = {name.removeprefix("model.visual."): each for name, each in stored.items()}
    tower = MmprojCheckpoint(gguf_files.convert_tower(model / "hub", tmp_path / "a.gguf", kind="Q8_0", is_old=True))

    def numbers(name: str) -> np.ndarray:
        return np.frombuffer(tower.read(name), np.float32).reshape(tower.tensors[name].shape)

    def rounded(array: np.ndarray) -> np.ndarray:
        kind = gguf.GGMLQuantizationType.Q8_0
        return gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind)

    assert np.array_equal(numbers("v.patch_embd.weight"), stored["patch_embed.proj.weight"])
    whole = rounded(stored["blocks.3.attn.qkv.weight"])
    for part, expected in zip("qkv", np.split(whole, 3), strict=True):
        assert np.array_equal(numbers(f"v.blk.3.attn_{part}.weight"), expected)
    assert np.array_equal(numbers("v.blk.0.attn_k.bias"), np.split(stored["blocks.0.attn.qkv.bias"], 3)[1])
    assert np.array_equal(numbers("v.blk.1.ffn_up.weight"), rounded(stored["blocks.1.mlp.linear_fc1.weight"]))
    assert np.array_equal(numbers("v.blk.1.ffn_down.bias"), stored["blocks.1.mlp.linear_fc2.bias"])
    assert np.array_equal(numbers("v.deepstack.1.fc2.bias"), stored["deepstack_merger_list.1.linear_fc2.bias"])


def test_pairs_of_rows_by_axis_come_back_in_turns(tmp_path: Path) -> None:
    rows = np.arange(24, dtype=np.float32)  # of two heads, of each three pairs of columns, then three of rows
    path = write_tower(tmp_path / "mmproj.gguf", {"v.blk.0.attn_q.bias": rows, "v.blk.0.attn_v.bias": rows})
    tower = MmprojCheckpoint(path, GGUFFacts(by_axis={"attn_q": 2, "attn_k": 2}))
    found = np.frombuffer(tower.read("v.blk.0.attn_q.bias"), np.float32)
    one = [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]
    assert found.tolist() == [*one, *(12 + each for each in one)]
    assert np.array_equal(np.frombuffer(tower.read("v.blk.0.attn_v.bias"), np.float32), rows)
    with pytest.raises(
        CheckpointError, match=r"the 24 rows of v\.blk\.0\.attn_q\.bias are no pairs of two axes in 4 heads"
    ):
        MmprojCheckpoint(path, GGUFFacts(by_axis={"attn_q": 4}))


def test_what_a_file_does_not_say_shows_in_its_tensors(tmp_path: Path) -> None:
    one = np.ones(1, np.float32)
    plain = MmprojCheckpoint(write_tower(tmp_path / "a.gguf", {"v.blk.0.ln1.weight": one, "v.blk.0.ln1.bias": one}))
    given = {"v.blk.0.ln1.weight": one, "v.blk.0.attn_q.input_max": one, "v.blk.0.attn_q.bias": one, "v.std_scale": one}
    other = MmprojCheckpoint(write_tower(tmp_path / "b.gguf", {**given, "v.blk.0.attn_q_norm.weight": one}))
    names = ("norm_type", "attention_bias", "use_qk_norm", "use_clipped_linears", "standardize")
    assert [plain.config["vision_config"][name] for name in names] == ["layer_norm", False, False, False, False]
    assert [other.config["vision_config"][name] for name in names] == ["rms_norm", True, True, True, True]
    assert other.tensors["v.blk.0.attn_q.input_max"].shape == () and other.tensors["v.std_scale"].shape == (1,)
