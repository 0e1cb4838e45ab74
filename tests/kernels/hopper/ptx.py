"""What few lines of PTX do, on torch's tensors: those by which weights are unpacked.

first, second = run_inline(ASM, "=r,=r,r,r", [tile, scales], dtype=(torch.bfloat16,) * 2, is_pure=True, pack=2)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

BITS = 0xFFFFFFFF


def run_inline(
    asm: str, constraints: str, args: Sequence[Tensor], dtype: Any, is_pure: bool, pack: int
) -> tuple[Tensor, ...] | Tensor:
    """`inline_asm_elementwise`: tensors of one shape, of which so many neighbours are in registers of 32 bits."""
    dtypes, shape = dtype if isinstance(dtype, tuple) else (dtype,), args[0].shape
    num = [pack * each.itemsize // 4 for each in dtypes]
    registers: dict[str, Tensor] = {}
    for each in args:
        words = each.contiguous().view(-1, pack).view(torch.int32) if each.itemsize < 4 else each.reshape(-1, pack)
        for word in (words.view(torch.int32) if words.is_floating_point() else words).unbind(-1):
            registers[f"${sum(num) + len(registers)}"] = word.long() & BITS
    assert constraints.count("r") == sum(num) + len(registers)
    asm = re.sub(r"mov.b32 {(\w+), (\w+)}, (\S+);", r"and.b32 \1, \3, 0xffff; shr.u32 \2, \3, 16;", asm)
    for line in re.sub(r"[{}]", "", asm).strip().split(";"):
        if line.strip() and not line.strip().startswith(".reg"):
            _run(line.strip(), registers)
    made, first = [], 0
    for each, count in zip(dtypes, num, strict=True):
        words = torch.stack([_signed(registers[f"${first + at}"]) for at in range(count)], -1)
        made.append(words.view(each).reshape(shape).as_subclass(type(args[0])))
        first += count
    return tuple(made) if isinstance(dtype, tuple) else made[0]


def _run(line: str, registers: dict[str, Tensor]) -> None:
    name, _, rest = line.partition(" ")
    target, *sources = [each.strip() for each in rest.split(",")]
    like = next(iter(registers.values()))
    given = [
        registers[each] if each in registers else torch.full_like(like, int(each.removeprefix("0f"), 0))
        for each in sources
    ]
    registers[target] = RUN[name](*given) & BITS


def _signed(bits: Tensor) -> Tensor:
    return bits.where(bits < 1 << 31, bits - (1 << 32)).to(torch.int32)


def _pair(bits: Tensor) -> Tensor:
    """The two numbers in bf16 of words, exactly."""
    return _signed(bits)[..., None].contiguous().view(torch.bfloat16).double()


def _bits(numbers: Tensor) -> Tensor:
    """Pairs [..., 2] rounded to bf16 once, since float64 holds what they are rounded from."""
    return numbers.to(torch.bfloat16).contiguous().view(torch.int32).squeeze(-1).long()


def _float(bits: Tensor) -> Tensor:
    return _signed(bits).view(torch.float32).double()


def _take_bytes(a: Tensor, b: Tensor, selector: Tensor) -> Tensor:
    both = torch.stack([each >> shift & 255 for each in (a, b) for shift in (0, 8, 16, 24)], -1)
    picked = [both.gather(-1, (selector >> 4 * at & 7)[..., None])[..., 0] << 8 * at for at in range(4)]
    return sum(picked[1:], picked[0])


def _unpack_fp8(bits: Tensor) -> Tensor:
    """The lower two bytes as e4m3 -> pairs in fp16, exactly."""
    both = torch.stack((bits & 255, bits >> 8 & 255), -1).to(torch.uint8).view(torch.float8_e4m3fn)
    return both.to(torch.float16).view(torch.int32).squeeze(-1).long()


RUN = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "add.u32": lambda a, b: a + b,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "shr.u32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: a << b,
    "shf.l.wrap.b32": lambda a, b, c: b << (c & 31) | a >> (32 - (c & 31)),
    "shf.r.wrap.b32": lambda a, b, c: a >> (c & 31) | b << (32 - (c & 31)),
    "lop3.b32": lambda a, b, c, table: a & b | c,
    "prmt.b32": _take_bytes,
    "sub.rn.bf16x2": lambda a, b: _bits(_pair(a) - _pair(b)),
    "mul.rn.bf16x2": lambda a, b: _bits(_pair(a) * _pair(b)),
    "fma.rn.bf16x2": lambda a, b, c: _bits(_pair(a) * _pair(b) + _pair(c)),
    "fma.rn.f32": lambda a, b, c: (_float(a) * _float(b) + _float(c)).float().view(torch.int32).long(),
    "cvt.rn.f16x2.e4m3x2": lambda a: _unpack_fp8(a),
    "cvt.rn.bf16x2.f32": lambda a, b: _bits(torch.stack((_float(b), _float(a)), -1)),
}
