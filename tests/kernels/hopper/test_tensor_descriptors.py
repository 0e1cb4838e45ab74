"""A descriptor is made once for the same memory, and keeps no tensor alive."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch


@pytest.fixture
def descriptors() -> Any:
    gl = pytest.importorskip("triton.experimental.gluon.language")
    from atom.kernels.hopper.tensor_descriptors import TensorDescriptors

    return lambda *shape: TensorDescriptors(shape, gl.NVMMASharedLayout(128, 16, 2))


def test_a_tensor_where_one_was_has_its_descriptor(descriptors: Any):
    made, x = descriptors(64, 64), torch.zeros(128, 64, dtype=torch.bfloat16)
    first = made.find(x, (128, 64), x.stride())
    assert made.find(x[:128], (128, 64), (64, 1)) is first
    others = [
        made.find(x[64:], (64, 64), (64, 1)),
        made.find(x, (64, 64), (64, 1)),
        made.find(x, (128, 64), (128, 1)),
        made.find(x.half(), (128, 64), (64, 1)),
    ]
    assert len({id(each) for each in (first, *others)}) == 5
    assert (others[1].shape, others[2].strides, first.block_shape) == ([64, 64], [128, 1], [64, 64])


def test_it_keeps_no_tensor_alive(descriptors: Any):
    made, x = descriptors(64, 64), torch.zeros(128, 64, dtype=torch.bfloat16)
    found, seen = made.find(x, (128, 64), (64, 1)), weakref.ref(x)
    assert (found.base.data_ptr(), found.base.dtype) == (x.data_ptr(), x.dtype)
    del x
    assert seen() is None
