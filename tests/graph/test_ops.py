from __future__ import annotations

import pytest
import torch

from atom.errors import PassError
from atom.graph import KV, TORCH_DTYPES, Graph, Type, ops, parse, verify

T, H, N, K, D = 5, 24, 6, 2, 4
CACHE = KV("0", Type("fp32", (2, K, D)))

# op -> (types of its tensors, attributes)
CALLS = [
    (ops.embedding, ("i64[T]", "fp32[9, 24]"), {}),
    (ops.linear, ("fp32[T, 24]", "fp32[7, 24]"), {}),
    (ops.linear, ("bf16[T, 24]", "bf16[7, 24]", "bf16[7]"), {}),
    (ops.rms_norm, ("bf16[T, 24]", "bf16[24]"), {"eps": 1e-6}),
    (ops.rms_norm, ("fp32[T, 6, 4]", "fp32[4]"), {"eps": 1e-6}),
    (ops.layer_norm, ("bf16[T, 24]", "bf16[24]", "bf16[24]"), {"eps": 1e-6}),
    (ops.layer_norm, ("fp32[T, 24]", "fp32[24]"), {"eps": 1e-6}),
    (ops.add, ("bf16[T, 24]", "bf16[T, 24]"), {}),
    (ops.mul, ("bf16[T, 24]", "bf16[T, 24]"), {}),
    *((ops.activate, ("bf16[T, 24]",), {"kind": kind}) for kind in ops.ACTIVATIONS),
    *((ops.gated_activate, ("bf16[T, 24]",), {"kind": kind}) for kind in ops.ACTIVATIONS),
    (ops.split, ("bf16[T, 24]",), {"sizes": [16, 6, 2]}),
    (ops.split_heads, ("bf16[T, 24]",), {"heads": 6}),
    (ops.merge_heads, ("bf16[T, 6, 4]",), {}),
    (ops.rotary, ("i64[T]", "fp32[2]"), {}),
    (ops.rope, ("bf16[T, 6, 4]", "fp32[T, 1]", "fp32[T, 1]"), {}),
    (ops.add_rms_norm, ("bf16[T, 24]", "bf16[T, 24]", "bf16[24]"), {"eps": 1e-6}),
]


def type_of(text: str) -> Type:
    return parse(f"def f(x: {text}):\n    return x\n").program("f").inputs[0].meta["type"]


def make(of: Type) -> torch.Tensor:
    shape = [T if dim == "T" else dim for dim in of.shape]
    if of.dtype == "i64":
        return torch.randint(0, 9, shape)
    return torch.randn(shape).to(TORCH_DTYPES[of.dtype])


def symbolic(tensor: torch.Tensor) -> Type:
    names = {dtype: name for name, dtype in TORCH_DTYPES.items()}
    return Type(names[tensor.dtype], ("T", *tensor.shape[1:]))


@pytest.mark.parametrize(("op", "texts", "attributes"), CALLS, ids=lambda value: getattr(value, "name", None))
def test_the_shape_rule_says_what_the_body_gives(op: ops.Op, texts: tuple[str, ...], attributes: dict[str, object]):
    types = [type_of(text) for text in texts]
    result = op(*map(make, types), **attributes)
    inferred = op.infer(*types, **attributes)
    if isinstance(result, tuple):
        assert tuple(map(symbolic, result)) == inferred
    else:
        assert symbolic(result) == inferred


def test_every_op_says_its_shapes():
    covered = {op for op, _, _ in CALLS} | {ops.attention, ops.norm_rope_write, ops.paged_attention}
    assert covered == set(ops.OPS.values())
    assert all("[" in (op.body.__doc__ or "") for op in ops.OPS.values())


def random_qkv(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(num_tokens)
    return torch.randn(num_tokens, N, D), torch.randn(num_tokens, K, D), torch.randn(num_tokens, K, D)


@pytest.mark.parametrize("window", [None, 1, 3, 64])
def test_attention_is_that_of_torch(window: int | None):
    q, k, v = random_qkv(T)
    distance = torch.arange(T).unsqueeze(1) - torch.arange(T)
    mask = (distance >= 0) & (distance < (window or T + 1))
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (q, k, v)), attn_mask=mask, scale=0.7, enable_gqa=True
    ).transpose(0, 1)
    torch.testing.assert_close(ops.attention(q, k, v, None, scale=0.7, window=window), expected)


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_paged_attention_over_scattered_blocks_is_attention(block_size: int):
    lengths, chunks = [9, 1, 7], [1, 1, 4]  # the last one's first 3 tokens came in an earlier step
    width = -(-max(lengths) // block_size)
    cache = torch.full((64, block_size, 2, K, D), float("nan"))
    table = (1 + torch.randperm(63)[: 3 * width]).view(3, width).int()
    queries, expected = [], []
    for row, (length, chunk) in enumerate(zip(lengths, chunks, strict=True)):
        q, k, v = random_qkv(length)
        positions = torch.arange(length)
        slots = table[row, positions // block_size].long() * block_size + positions % block_size
        ops.norm_rope_write(q, k, v, None, None, None, None, cache, slots)
        expected.append(ops.attention(q, k, v, None, scale=0.5, window=4)[-chunk:])
        queries.append(q[-chunk:])
    starts = torch.tensor([0, 1, 2, 6], dtype=torch.int32)
    out = ops.paged_attention(
        torch.cat(queries), cache, table, starts, torch.tensor(lengths).int(), 2, scale=0.5, window=4
    )
    torch.testing.assert_close(out, torch.cat(expected))


def test_norm_rope_write_is_norm_then_rope_then_write():
    q, k, v = random_qkv(T)
    cos, sin = ops.rotary(torch.arange(T), torch.tensor([1.0]))
    weight = torch.rand(D)
    cache = torch.zeros(2, 8, 2, K, D)
    slots = torch.tensor([9, 3, 12, 0, 15])
    out = ops.norm_rope_write(q, k, v, cos, sin, weight, weight, cache, slots, eps=1e-6)
    turned = [ops.rope(ops.rms_norm(x, weight, eps=1e-6), cos, sin) for x in (q, k)]
    torch.testing.assert_close(out, turned[0])
    torch.testing.assert_close(cache.view(16, 2, K, D)[slots, 0], turned[1])
    torch.testing.assert_close(cache.view(16, 2, K, D)[slots, 1], v)
    assert cache.count_nonzero() == T * 2 * K * D


def test_a_call_that_does_not_fit_names_its_types():
    graph = Graph()
    body = graph.program("body")
    x = body.input("x", Type("bf16", ("T", 8)))
    with pytest.raises(PassError, match=r"split\(bf16\[T, 8\], sizes=\[3\]\): sizes \[3\] do not add up to 8"):
        body.call(ops.split, x, sizes=[3])
    with pytest.raises(PassError, match="there is no activation 'swish'"):
        body.call(ops.activate, x, kind="swish")


def test_the_verifier_holds_the_level():
    text = 'def f(q: bf16[T, 2, 8], k: bf16[T, 1, 8]):\n    a = attention(q, k, k, KV("0", bf16[2, 1, 8]), scale=1.0)\n    return a\n'
    graph = parse(text)
    verify(graph, ops.SEMANTIC)
    with pytest.raises(PassError, match="f: a attention is not legal in a lowered graph"):
        verify(graph, ops.LOWERED)


def test_the_verifier_sees_a_use_before_its_definition():
    graph = parse("def f(x: bf16[T, 8]):\n    y = add(x, x)\n    z = mul(y, x)\n    return z\n")
    y, z = graph.program("f").nodes
    z.append(y)
    with pytest.raises(PassError, match="f: z uses y before it is set"):
        verify(graph, ops.SEMANTIC)


def test_the_verifier_infers_types_again():
    graph = parse("def f(x: bf16[T, 8]):\n    y = add(x, x)\n    return y\n")
    graph.program("f").nodes[0].meta["type"] = Type("bf16", ("T", 9))
    with pytest.raises(PassError, match=r"f: y is bf16\[T, 8\], but was made as bf16\[T, 9\]"):
        verify(graph, ops.SEMANTIC)


def test_replace_erases_what_nobody_uses_and_keeps_the_name():
    graph = parse(
        "def f(x: bf16[T, 8]):\n    a = add(x, x)\n    b, c = split(a, sizes=[4, 4])\n    d = add(b, c)\n    return d\n"
    )
    (d,) = [node for node in graph.find(ops.add) if node.name == "d"]
    graph.replace({d: graph.insert(d, ops.split, graph.program("f").inputs[0], sizes=[4, 4])[0]})
    assert [node.target.name for node in graph.program("f").nodes] == ["split"]
    assert graph.program("f").results[0].name == "d"
