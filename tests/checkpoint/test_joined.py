"""Two checkpoints as one, distinguished by a prefix."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from atom.checkpoint import JoinedCheckpoint, open_checkpoint
from atom.errors import CheckpointError


def test_names_with_the_prefix_are_those_of_the_other(tmp_path: Path):
    tensors = [torch.arange(3.0), torch.arange(4.0) + 10]
    for name, tensor in zip(("one", "two"), tensors, strict=True):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(f'{{"model_type": "{name}"}}')
        save_file({"norm.weight": tensor}, tmp_path / name / "model.safetensors")
    one, two = (open_checkpoint(str(tmp_path / name)) for name in ("one", "two"))
    joined = JoinedCheckpoint(one, two, "draft:")
    assert joined.config["model_type"] == "one" and joined.location == one.location
    assert {name: each.shape for name, each in joined.tensors.items()} == {
        "norm.weight": (3,),
        "draft:norm.weight": (4,),
    }
    for name, tensor in zip(("norm.weight", "draft:norm.weight"), tensors, strict=True):
        content = tensor.numpy().tobytes()
        assert joined.read(name) == content and joined.read_part(name, 1, len(tensor)) == content[4:8]
        place = joined.locate(name)
        assert place is not None and place.path.read_bytes()[place.start :][: place.size] == content
    assert [path.parent.name for path in joined.files()] == ["one", "two"]
    one.files = lambda: [Path("one.gguf")]  # type: ignore[method-assign]  # which locates no tensor
    assert [path.name for path in joined.files()] == ["model.safetensors", "one.gguf"]
    joined.close()
    with pytest.raises(CheckpointError, match=r"two has no tensor norm.weight"):
        joined.read("draft:norm.weight")
