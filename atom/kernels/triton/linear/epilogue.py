"""Linears whose activation is computed in the library's epilogue.

    a = linear_activate(x, weight, bias, kind="gelu_tanh")     # x [T, I], weight [O, I], bias [O] -> [T, O]

cuBLASLt has GELU in the approximation by tanh (CUBLASLT_EPILOGUE_GELU_BIAS), of the sum in float32, which is rounded
once.
"""

import torch
from torch import Tensor


def linear_activate(x: Tensor, weight: Tensor, bias: Tensor, *, kind: str) -> Tensor:
    assert kind == "gelu_tanh", f"no epilogue computes {kind}"
    return torch._addmm_activation(bias, x, weight.t(), use_gelu=True)
