from __future__ import annotations

import json
import mmap
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from atom.checkpoint import StoredTensor, open_checkpoint
from atom.errors import CheckpointError, UnsupportedError

TENSORS = {
    "model.embed_tokens.weight": torch.arange(48, dtype=torch.bfloat16).reshape(12, 4),
    "model.norm.weight": torch.tensor([1.5, -2.0, 0.25, 8.0]),
    "half": torch.ones(3, 2, dtype=torch.float16),
    "ids": torch.tensor([1 << 40, -1]),
    "scaled": torch.tensor([[0.5, 448.0]]).to(torch.float8_e4m3fn),
    "scalar": torch.tensor(3.0),
    "empty": torch.zeros(0, 4),
}


def make_folder(folder: Path, config: dict[str, Any] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config if config is not None else {"hidden_size": 4}))
    return folder


def write_safetensors(path: Path, header: Any, body: bytes = b"", *, size: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if size is None else size) + text + body)


def save_shards(folder: Path) -> None:
    names = list(TENSORS)
    shards = {"model-00001-of-00002.safetensors": names[:3], "model-00002-of-00002.safetensors": names[3:]}
    for file, inside in shards.items():
        save_file({name: TENSORS[name] for name in inside}, folder / file)
    where = {name: file for file, inside in shards.items() for name in inside}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


@pytest.mark.parametrize("sharded", [False, True])
def test_tensors_are_those_that_the_safetensors_library_reads(tmp_path: Path, sharded: bool) -> None:
    folder = make_folder(tmp_path)
    if sharded:
        save_shards(folder)
    else:
        save_file(TENSORS, folder / "model.safetensors", metadata={"format": "pt"})
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.tensors.keys() == TENSORS.keys()
    for path in folder.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            assert checkpoint.tensors[name].shape == tuple(tensor.shape)
            assert bytes(checkpoint.read(name)) == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    assert checkpoint.tensors["scaled"] == StoredTensor("fp8_e4m3", (1, 2))
    assert [checkpoint.tensors[name].dtype for name in ("half", "ids", "scalar")] == ["fp16", "i64", "fp32"]


def test_read_copies_nothing_and_outlives_close(tmp_path: Path) -> None:
    save_file(TENSORS, make_folder(tmp_path) / "model.safetensors")
    checkpoint = open_checkpoint(str(tmp_path))
    view = checkpoint.read("model.norm.weight")
    checkpoint.close()
    assert isinstance(view.obj, mmap.mmap)
    assert struct.unpack("<4f", view) == (1.5, -2.0, 0.25, 8.0)
    with pytest.raises(CheckpointError, match=r"has no tensor model\.norm\.weight"):
        checkpoint.read("model.norm.weight")


@pytest.mark.parametrize("sharded", [False, True])
def test_a_tensor_is_located_where_its_bytes_lie(tmp_path: Path, sharded: bool) -> None:
    folder = make_folder(tmp_path)
    if sharded:
        save_shards(folder)
    else:
        save_file(TENSORS, folder / "model.safetensors")
    checkpoint = open_checkpoint(str(folder))
    places = {name: checkpoint.locate(name) for name in TENSORS}
    assert len({place.path for place in places.values() if place}) == 1 + sharded
    for name, place in places.items():
        assert place is not None
        data = place.path.read_bytes()[place.start : place.start + place.size]
        assert data == TENSORS[name].reshape(-1).view(torch.uint8).numpy().tobytes()
    checkpoint.close()
    with pytest.raises(CheckpointError, match="has no tensor half"):
        checkpoint.locate("half")


def test_a_folder_with_only_a_config_opens_without_tensors(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(make_folder(tmp_path)))
    assert dict(checkpoint.tensors) == {} and checkpoint.generation_config == {} and checkpoint.tokenizer() is None
    assert checkpoint.config["hidden_size"] == 4


def test_without_weights_no_weight_file_is_looked_at(tmp_path: Path) -> None:
    (make_folder(tmp_path) / "model.safetensors").write_bytes(b"broken")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    checkpoint = open_checkpoint(str(tmp_path), weights=False)
    assert dict(checkpoint.tensors) == {} and checkpoint.generation_config == {"eos_token_id": [1, 2]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no config.json"),
        (b"{", "config.json is not valid JSON"),
        (b"[1]", "config.json holds no JSON object"),
        (b"\xff\xfe\x00", "config.json is not valid JSON"),
        (b"[" * 100_000, "config.json is not valid JSON"),
        (b'{"rope_scaling": "yarn"}', "rope_parameters in config.json is 'yarn', not an object"),
    ],
)
def test_a_bad_config_is_one_line(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"adapter_config.json": '{"base_model_name_or_path": "org/base"}'}, "an adapter; checkpoint=org/base serve.lora"),
        ({"snapshots/abc/config.json": "{}"}, "the hub's cache of checkpoint=org/my-model"),
        ({"sft/config.json": "{}"}, "a checkpoint needs one, as .*/sft has"),
        ({}, "a checkpoint needs one$"),
    ],
)  # fmt: skip
def test_a_folder_that_is_no_checkpoint_says_what_to_name(tmp_path: Path, files: dict[str, str], message: str) -> None:
    folder = tmp_path / "models--org--my-model"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    with pytest.raises(CheckpointError, match=f"has no config.json: .*{message}"):
        open_checkpoint(str(folder))


def test_half_a_checkpoint_names_the_first_missing_file_and_counts(tmp_path: Path) -> None:
    save_shards(make_folder(tmp_path))
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    message = r"half a checkpoint: 2 of its 2 weight files are not there, first model-00001-of-00002\.safetensors"
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(str(tmp_path))


def test_shards_without_an_index_are_half_a_checkpoint(tmp_path: Path) -> None:
    save_shards(make_folder(tmp_path))
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"but no model\.safetensors\.index\.json: half a checkpoint"):
        open_checkpoint(str(tmp_path))


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    save_shards(make_folder(tmp_path))
    save_file(
        {"half": TENSORS["half"], **dict(list(TENSORS.items())[3:])}, tmp_path / "model-00002-of-00002.safetensors"
    )
    with pytest.raises(CheckpointError, match=r"tensor half twice, in model-00001\S+ and model-00002"):
        open_checkpoint(str(tmp_path))


def test_a_tensor_that_only_the_index_has_is_named(tmp_path: Path) -> None:
    save_shards(make_folder(tmp_path))
    save_file({"ids": TENSORS["ids"]}, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors lacks the tensor scaled"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("file", ["../outside.safetensors", "/etc/passwd", "sub/model.safetensors"])
def test_an_index_cannot_name_files_outside_its_folder(tmp_path: Path, file: str) -> None:
    index = make_folder(tmp_path) / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": file}}))
    with pytest.raises(CheckpointError, match="which is not a file of this folder"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("weight_map", [None, [], {"w": 3}])
def test_an_index_without_a_weight_map_is_refused(tmp_path: Path, weight_map: Any) -> None:
    index = make_folder(tmp_path) / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match="has no weight_map"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt", "weights.pth"])
def test_pickle_is_refused_with_how_to_convert(tmp_path: Path, name: str) -> None:
    (make_folder(tmp_path) / name).write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError, match=rf"only as pickle \({re.escape(name)}\).*save_pretrained"):
        open_checkpoint(str(tmp_path))


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"", "malformed header"),
        (b"{", "malformed header"),
        (b"[" * 100_000, "malformed header"),
        ([], "malformed header"),
        ({"w": 1}, "malformed header"),
        ({"w": {"dtype": "F32"}}, "malformed header"),
        ({"w": entry(shape=[-1], offsets=[0, 8])}, "malformed header"),
        ({"w": entry(shape=["2"])}, "malformed header"),
        ({"w": entry(shape=[2.0])}, "malformed header"),
        ({"w": entry(shape=[1] * 1000)}, "malformed header"),
        ({"w": entry(offsets=[0, 4, 8])}, "malformed header"),
        ({"w": entry(offsets=[0, True])}, "malformed header"),
        ({"w": entry(offsets=[8, 0])}, "tensor w, F32.* does not fit its bytes 8 to 0"),
        ({"w": entry(shape=[3])}, r"tensor w, F32\[3\], does not fit its bytes 0 to 8"),
        ({"w": entry(shape=[1 << 62, 1 << 62])}, "does not fit its bytes"),
        (
            {"w": entry(shape=[1 << 60], offsets=[0, 1 << 62])},
            "cut short: tensor w ends at byte 4611686018427387904 of 8",
        ),
        ({"w": entry(), "v": entry()}, "tensor w, .* does not fit its bytes 0 to 8"),
        ({"w": entry(shape=[1], offsets=[4, 8])}, "does not fit its bytes 4 to 8"),
        ({"w": entry(shape=[1], offsets=[0, 4])}, "4 bytes that no tensor names"),
    ],
)
def test_a_malicious_header_is_refused(tmp_path: Path, header: Any, message: str) -> None:
    write_safetensors(make_folder(tmp_path) / "model.safetensors", header, bytes(8))
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(str(tmp_path))
    assert "model.safetensors" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", ["F128", ["F32"]])
def test_an_unknown_dtype_names_file_and_tensor(tmp_path: Path, dtype: Any) -> None:
    write_safetensors(make_folder(tmp_path) / "model.safetensors", {"w": entry(dtype)}, bytes(8))
    with pytest.raises(UnsupportedError, match=r"model\.safetensors: tensor w has the unknown dtype"):
        open_checkpoint(str(tmp_path))


def test_a_header_of_impossible_size_is_refused(tmp_path: Path) -> None:
    write_safetensors(make_folder(tmp_path) / "model.safetensors", {}, size=(1 << 64) - 1)
    with pytest.raises(CheckpointError, match="cut short in its header"):
        open_checkpoint(str(tmp_path))


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = make_folder(tmp_path) / "model.safetensors"
    save_file(TENSORS, path)
    whole = path.read_bytes()
    for length in (0, 7, 8, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"model\.safetensors (is cut short|has a malformed header)"):
            open_checkpoint(str(tmp_path))


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 600), byte=st.integers(0, 255))
def test_a_flipped_header_byte_never_reads_outside_the_file(tmp_path: Path, position: int, byte: int) -> None:
    path = make_folder(tmp_path) / "model.safetensors"
    save_file(TENSORS, path)
    damaged = bytearray(path.read_bytes())
    damaged[min(position, len(damaged) - 1)] = byte
    path.write_bytes(damaged)
    try:
        checkpoint = open_checkpoint(str(tmp_path))
    except (CheckpointError, UnsupportedError):
        return
    assert sum(len(checkpoint.read(name)) for name in checkpoint.tensors) <= len(damaged)
