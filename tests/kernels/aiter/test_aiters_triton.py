"""AITER's own Triton kernels, called as on an AMD GPU, against the ops' bodies; they need AITER's sources.

They run in Triton's interpreter, or on this machine's GPU, whichever vendor's. The package itself is not imported, since
that looks for ROCm: of it only these kernels' modules are, and what they ask of the GPU is answered here. Launch options
that Triton has only for AMD's GPUs are left out on others.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from kernels.aiter_doubles import move, mxfp4
from kernels.paged import cached, make_case, make_latent_case
from triton.runtime.jit import JITFunction

from atom.graph import ops
from atom.kernels.aiter import attention, latent, moe
from atom.kernels.aiter.functions import FUNCTIONS, Aiter, Refused, find_place

ANSWERS = {"get_num_sms": 2, "get_num_xcds": 8, "get_arch": "gfx950", "is_fp4_avail": True, "is_tdm_avail": False}
AMDS_OPTIONS = ("waves_per_eu", "matrix_instr_nonkdim", "kpack")


@pytest.fixture(autouse=True)
def without_amds_options(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.version.hip is None:
        run = JITFunction.run

        def run_without(self: Any, *args: Any, **kwargs: Any) -> Any:
            unknown = {*AMDS_OPTIONS} - {*self.arg_names}
            return run(self, *args, **{name: value for name, value in kwargs.items() if name not in unknown})

        monkeypatch.setattr(JITFunction, "run", run_without)


@pytest.fixture
def aiter(sources: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Aiter]:
    for name in loaded():
        monkeypatch.delitem(sys.modules, name)
    utils = "aiter.ops.triton.utils"
    for name in ("aiter", "aiter.ops", "aiter.ops.triton", utils, f"{utils}._triton"):
        package = ModuleType(name)
        package.__path__ = [str(sources.joinpath(*name.split(".")))]
        monkeypatch.setitem(sys.modules, name, package)
    for name in ("device_info", "_triton.arch_info", "arch_info"):  # where versions ask
        module = ModuleType(f"{utils}.{name}")
        module.__dict__.update({key: lambda answer=answer: answer for key, answer in ANSWERS.items()})
        monkeypatch.setitem(sys.modules, module.__name__, module)
        parent, _, last = module.__name__.rpartition(".")
        setattr(sys.modules[parent], last, module)
    yield Aiter(sources)
    for name in loaded():
        del sys.modules[name]


def loaded() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "aiter"]


def need(sources: Path, *functions: str) -> None:
    for name in functions:
        if isinstance(answer := find_place(FUNCTIONS[name], sources), Refused):
            pytest.skip(f"these sources have no {name}: {answer}")


@pytest.mark.parametrize(("window", "softcap", "has_sinks"), [(None, None, False), (5, None, True), (None, 3.0, False)])
@pytest.mark.parametrize("prefills", [[], [(5, 9), (1, 20), (3, 3)]], ids=["decodes", "mixed"])
def test_attention(
    aiter: Aiter, triton_device: str, prefills: list[tuple[int, int]], window: int | None, softcap: float | None,
    has_sinks: bool,
):  # fmt: skip
    shape: dict[str, Any] = {"kv_heads": 2, "heads": 4, "dim": 16, "window": window, "has_sinks": has_sinks}
    if is_compiled := triton_device == "cuda":  # in the dtype that atom calls them with
        shape.update(dtype=torch.bfloat16, dim=128)
    case, clean = (make_case([17, 6], prefills, foreign=foreign, **shape) for foreign in (0.5, 0.0))
    attributes = {"scale": 0.3, "window": window, "softcap": softcap}
    given = attention.paged_attention(aiter, *move(case, triton_device), **attributes).cpu()
    tolerance = 0.03 if is_compiled else 1e-3
    torch.testing.assert_close(given, ops.paged_attention(*clean, **attributes), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("heads", "block_size", "query_len"),
    [(4, 16, 1), (20, 4, 1), (3, 24, 2)],
    ids=["plain", "many_heads", "two_queries"],
)
def test_latent_attention(aiter: Aiter, sources: Path, triton_device: str, heads: int, block_size: int, query_len: int):
    need(sources, "latent_decode", "latent_prefill")
    shape: dict[str, Any] = {
        "heads": heads,
        "block_size": block_size,
        "rank": 32,
        "rotated": 16,
        "plain": 12,
        "value": 10,
    }
    if is_compiled := triton_device == "cuda":
        shape.update(dtype=torch.bfloat16, rank=512, rotated=64, plain=128, value=128)
    decodes, prompts = [150, 0, 6], [(5, 9), (1, 20), (3, 3)]
    if query_len > 1:
        decodes, prompts = [], [*((query_len, length) for length in decodes), *prompts]
    case, clean = (make_latent_case(decodes, prompts, foreign=foreign, **shape) for foreign in (0.5, 0.0))
    batch = case.batch._replace(num_decodes=3, query_len=query_len)
    given = latent.paged_mla_attention(aiter, *move(case._replace(batch=batch), triton_device), scale=0.3).cpu()
    tolerance = 0.03 if is_compiled else 1e-3
    torch.testing.assert_close(given, ops.paged_mla_attention(*clean, scale=0.3), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_and_cache_write(aiter: Aiter, triton_device: str, interleaved: bool):
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(5, heads, 16, generator=random) for heads in (6, 2, 2))
    angles = ops.rotary(torch.tensor([3, 9, 0, 1, 2]), torch.linspace(1, 0.1, 8))
    args = (q, k, v, *angles, None, None, *cached(torch.zeros(3, 4, 2, 2, 16), torch.tensor([7, 2, 0, 11, 9])))
    own = move(args, triton_device)
    given = attention.norm_rope_write(aiter, *own, interleaved=interleaved).cpu()
    torch.testing.assert_close(given, ops.norm_rope_write(*args, interleaved=interleaved), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(own[7].blocks.cpu(), args[7].blocks, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("hidden", "width", "first"), [(96, 64, None), (320, 32, 2)])
def test_experts_in_mxfp4(aiter: Aiter, sources: Path, triton_device: str, hidden: int, width: int, first: int | None):
    need(sources, "expert_matmuls", "expert_tiles", "routing_data")
    bf16, here = torch.bfloat16, () if first is None else (torch.tensor([first]),)
    gate_up, down = mxfp4(3, 2 * width, hidden), mxfp4(3, hidden, width)
    biases = (torch.randn(3, rows).to(bf16) for rows in (2 * width, hidden))
    ids = torch.stack([torch.randperm(5 if here else 3)[:2] for _ in range(9)])
    args = torch.randn(9, hidden).to(bf16), torch.rand(9, 2), ids, gate_up, down, *biases, *here
    gate = {"kind": "swigluoai", "limit": 0.5, "alpha": 1.7}
    given = moe.experts(aiter, *move(args, triton_device), **gate).cpu().float()
    wanted = ops.experts(*args, **gate).float()
    torch.testing.assert_close(given, wanted, rtol=0.03, atol=0.03 * float(wanted.abs().max()))
