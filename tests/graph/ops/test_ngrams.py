"""The rows that n-grams are hashed to, against transformers, and in the steps of several sequences."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from graph.ops.checked import Cache, checked
from graph.ops.runs import in_steps
from torch import Tensor
from transformers import Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextNGramEmbedding

from atom.graph import Batch, LatestState, Type, ops

END = 3  # of few tokens, so that many n-grams end
SIZES, STARTS = torch.tensor([31, 37, 41, 43, 47, 53]), torch.tensor([0, 31, 68, 109, 152, 199])
MULTIPLIERS = torch.tensor([(1 << 58) + 7, 12345678901234567, 33, 5])
STATE = LatestState("0", Type("i64", (3,)), part="ngrams")


def rows_of(tokens: Tensor) -> Tensor:
    rows: Tensor = checked(ops.ngrams, tokens, Cache(STATE, torch.zeros(3, dtype=torch.int64)), MULTIPLIERS, SIZES,
                           STARTS, end=END)  # fmt: skip
    return rows


def in_chunks(run: Callable[..., Tensor], sequences: list[Tensor], max_tokens: int, kept: int) -> list[Tensor]:
    """The rows of sequences that take part in steps, by slots with `kept` states each."""
    slots, places = torch.full((len(sequences) + 2, kept, 3), -9), torch.randperm(len(sequences) + 1).int()
    made: list[list[Tensor]] = [[] for _ in sequences]
    for chunks in in_steps([*map(len, sequences)], max_tokens):
        starts = torch.tensor([0, *itertools.accumulate(stop - start for start, stop in chunks)]).int()
        lengths = torch.tensor([stop for _, stop in chunks]).int()
        batch = Batch({}, {}, starts, lengths, 0, slots=places[: len(sequences)])
        values = torch.cat([each[start:stop] for each, (start, stop) in zip(sequences, chunks, strict=True)])
        padded = torch.cat((values, torch.zeros(2, dtype=torch.int64)))
        out = run(padded, slots, batch, MULTIPLIERS, SIZES, STARTS, end=END)
        for each, rows in zip(made, out[: len(values)].split((starts[1:] - starts[:-1]).tolist()), strict=True):
            each.append(rows)
    assert (slots[int(places[-1])] == -9).all(), "the slots of others are left alone"
    return [torch.cat(each) for each in made]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_rows_are_those_of_transformers(size: int):
    config = Qwen4ExpTextConfig(
        vocab_size=11, ngram_size=size, heads_per_ngram=2, ngram_vocab_size_base=29, eos_token_id=END,
        make_ngram_vocab_size_divisible_by=8, ple_layer_ids=[1], ple_embed_dim=2 * (size - 1), num_experts=4,
        num_experts_per_tok=1, num_hidden_layers=1, layer_types=["linear_attention"],
    )  # fmt: skip
    module = Qwen4ExpTextNGramEmbedding(config, config.ple_embed_dim, 0)
    module.ngram_embedding.weight.data[:] = torch.arange(len(module.ngram_embedding.weight)).unsqueeze(1)
    tokens, state = torch.randint(11, (60,)), LatestState("0", Type("i64", (size - 1,)))
    weights = module.layer_multipliers, module.ngram_heads_vocab_sizes, module.ngram_heads_offsets
    rows = checked(ops.ngrams, tokens, Cache(state, torch.zeros(size - 1, dtype=torch.int64)), *weights, end=END)
    with torch.no_grad():
        assert torch.equal(rows, module(tokens[None], None)[0].long())


@pytest.mark.parametrize(("max_tokens", "kept"), [(1, 1), (3, 2), (30, 4)])
def test_sequences_in_chunks_have_the_rows_of_whole_ones(max_tokens: int, kept: int):
    torch.manual_seed(0)
    sequences = [torch.randint(6, (length,)) for length in (37, 2, 50)]
    for rows, tokens in zip(in_chunks(ops.OPS["batched_ngrams"], sequences, max_tokens, kept), sequences, strict=True):
        assert torch.equal(rows, rows_of(tokens))


def test_ngrams_that_do_not_fit_are_refused():
    tokens, numbers, six = Type("i64", ("T",)), Type("i64", (4,)), Type("i64", (6,))
    assert ops.ngrams.infer(tokens, STATE, numbers, six, six, end=0) == Type("i64", ("T", 6))
    for args, message in [
        ((Type("i32", ("T",)), STATE, numbers, six, six), r"tokens are i32\[T\], not i64\[T\]"),
        ((tokens, STATE, Type("i64", (1,)), six, six), "an n-gram has 2 tokens or more"),
        ((tokens, STATE, Type("i64", (3,)), six, six), r"the state is i64\[3\] of the 2 tokens before one"),
        ((tokens, STATE, numbers, six, numbers), r"sizes are i64\[6\], starts i64\[4\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            ops.ngrams.infer(*args, end=0)


def test_a_gate_is_the_sigmoid_of_a_signed_root():
    key, query = torch.tensor([[3.0, 1.0, 0.0, -8.0]]), torch.tensor([[2.0, 0.0, 1.0, 1.0]])
    gate = checked(ops.stream_gate, key, query, streams=2)
    expected = torch.tensor([[(6 / 2**0.5) ** 0.5, -((8 / 2**0.5) ** 0.5)]])
    torch.testing.assert_close(gate, expected.sigmoid())
