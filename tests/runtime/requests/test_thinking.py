"""Budgets of reasoning: where it begins and ends, and which token is forced."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_sources import tree

from atom.checkpoint import SilentProgress, Tokenizer
from atom.config.checkpoint import open_for
from atom.config.load import load
from atom.runtime.requests.thinking import ANY_NUMBER, Marker, ReasoningMarkers, ThinkingBudget

THINK, END, STOP = 7, 8, 9  # tokens that are whole markers


def markers(*ends: list[int], begin: list[int] | None = None) -> ReasoningMarkers:
    def decode(tokens: object) -> str:
        return ""

    return ReasoningMarkers(Marker("<", begin or [THINK]), [Marker(">", end) for end in ends or ([END],)], decode)


def forced_after(budget: ThinkingBudget, *tokens: int) -> int | None:
    for token in tokens:
        budget.push(token)
    return budget.forced


@pytest.mark.parametrize(("num_tokens", "thought"), [(0, []), (1, [1]), (3, [1, 2, 3])])
def test_the_end_is_forced_after_as_many_tokens(num_tokens: int, thought: list[int]):
    budget = ThinkingBudget(markers(), num_tokens, [1, 2])
    assert (budget.forced, budget.num_free) == (None, ANY_NUMBER), "no reasoning has begun"
    budget.push(THINK)
    for at, token in enumerate(thought):
        assert (budget.forced, budget.num_free) == (None, num_tokens - at)
        budget.push(token)
    assert (budget.forced, budget.num_free) == (END, 0)
    assert forced_after(budget, END) is None and budget.num_free == ANY_NUMBER


@pytest.mark.parametrize(
    ("prompt", "left"),
    [
        ([1, 2], None),
        ([1, THINK], 3),
        ([1, THINK, 5], 2),  # as a template's line end: vLLM counts it too
        ([THINK, 5, 5, 5, 5], 0),
        ([THINK, 5, END], None),
        ([THINK, 5, END, THINK, 5], 2),
        ([THINK, 5, THINK], 3),  # its last one counts, as in vLLM
    ],
)
def test_reasoning_that_the_prompt_leaves_open_is_counted(prompt: list[int], left: int | None):
    budget = ThinkingBudget(markers(), 3, prompt)
    assert budget.num_free == (ANY_NUMBER if left is None else left)
    assert budget.forced == (END if left == 0 else None)


def test_a_further_block_has_what_the_first_one_left():
    budget = ThinkingBudget(markers(), 4, [THINK])
    assert forced_after(budget, 1, 1, END, 2, 2, 2, THINK) is None and budget.num_free == 2
    assert forced_after(budget, 1, 1) == END
    assert forced_after(budget, END, 2, THINK) == END, "and the third one nothing"


def test_every_token_of_a_marker_is_forced_and_a_part_that_is_there_is_not_repeated():
    end = [4, 4, 5]
    budget = ThinkingBudget(markers(end), 2, [THINK])
    assert [forced_after(budget, token) for token in (1, 1, 4, 4, 5)] == [None, 4, 4, 5, None]
    budget = ThinkingBudget(markers(end), 2, [THINK])
    assert [forced_after(budget, token) for token in (1, 4, 4, 5)] == [None, 4, 5, None]
    assert ThinkingBudget(markers(end), 1, [THINK, 1, 4]).forced == 4, "of a prompt, too"
    assert ThinkingBudget(markers([THINK, 5]), 0, [THINK]).forced == THINK, "the beginning is no part of it"


def test_the_tokens_of_a_natural_end_are_no_reasoning():
    budget = ThinkingBudget(markers([4, 5]), 3, [THINK])
    assert forced_after(budget, 1, 4, 5, THINK) is None and budget.num_free == 2


def test_any_of_several_ends_ends_it_and_the_first_one_is_forced():
    several = markers([END], [STOP], begin=[1, 2, 3])
    budget = ThinkingBudget(several, 2, [0])
    assert forced_after(budget, 1, 2, 3, 6, STOP) is None and budget.num_free == ANY_NUMBER
    assert forced_after(budget, 1, 2, 3, 6) == END


def test_copies_count_by_themselves():
    first = ThinkingBudget(markers(), 1, [THINK])
    second = first.copy()
    assert (forced_after(first, 1), second.forced) == (END, None)


@pytest.fixture(scope="module")
def tokenizer(embedded_gguf: Path) -> Tokenizer:
    found = open_for(load([]), SilentProgress()).tokenizer(trust_remote_code=False)
    assert found is not None
    return found


def test_markers_are_found_however_they_are_tokenized(tokenizer: Tokenizer):
    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    found = ReasoningMarkers.encode("<think>", ["</think>"], tokenizer)
    end = found.ends[0].tokens
    joined = encode("so</think>.\n\nYes")
    places = range(len(joined) - len(end) + 1)
    assert len(end) > 2 and not any(joined[at : at + len(end)] == end for at in places), "it is of other tokens here"
    assert ThinkingBudget(found, 50, encode("Hi\n<think>\n")).num_free == 49
    spelled = encode("Hi <think>")
    assert found.find_open(spelled) == len(spelled) and found.begin.tokens[0] not in spelled
    budget = ThinkingBudget(found, 50, spelled)
    assert budget.num_free == 50
    assert forced_after(budget, *joined) is None and budget.num_free == ANY_NUMBER
    budget = ThinkingBudget(found, 0, encode("Hi"))
    assert forced_after(budget, *encode(" <think>, well")) == end[0]


class TheirBudget:
    """vLLM's own: `ThinkingBudgetStateHolder` of its sources, for one sequence."""

    def __init__(self, begin: list[int], end: list[int], num_tokens: int, prompt: list[int]) -> None:
        file = tree("v1/sample/thinking_budget_state.py")
        (found,) = (node for node in file.body if isinstance(node, ast.ClassDef))
        future = ast.parse("from __future__ import annotations").body
        platform = SimpleNamespace(is_rocm=lambda: False)
        scope: dict[str, Any] = {
            "torch": torch,
            "Any": Any,
            "async_tensor_h2d": as_tensor,
            "current_platform": platform,
        }
        exec(compile(ast.Module([*future, found], []), "vLLM", "exec"), scope)
        config = SimpleNamespace(reasoning_start_token_ids=begin, reasoning_end_token_ids=end)
        self._holder = scope[found.name](config, 1, 0, torch.device("cpu"), False)
        self._output: list[int] = []
        added = [(0, SimpleNamespace(thinking_token_budget=num_tokens), prompt, self._output)]
        self._holder.sync_batch(SimpleNamespace(removed=[], added=added, moved=[]))

    def forced_after(self, *tokens: int) -> int | None:
        self._output += tokens
        self._holder.update_state([self._output], None)
        logits = self._holder.apply_to_logits(torch.zeros(1, 16), False, None)
        return int(logits.argmax()) if logits.any() else None


def as_tensor(values: list[int], dtype: torch.dtype, device: torch.device, **_: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


@pytest.mark.parametrize("end", [[END], [END, STOP]], ids=["one", "two"])
@pytest.mark.parametrize("opened", [[], [THINK], [THINK, 5], [THINK, 5, 5, 5]])
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 4])
def test_one_block_is_counted_as_vllm_counts_it(end: list[int], opened: list[int], num_tokens: int):
    prompt = [1, 2, *opened]
    budget, theirs = ThinkingBudget(markers(end), num_tokens, prompt), TheirBudget([THINK], end, num_tokens, prompt)
    token, written = 3 if opened else THINK, list[int]()
    expected = theirs.forced_after()
    for _ in range(8):
        assert budget.forced == expected
        token, written = (token if expected is None else expected), [*written, token if expected is None else expected]
        budget.push(token)
        expected, token = theirs.forced_after(token), 3
    assert written[-1] == 3 and end[-1] in written, "it has ended, and nothing is forced any more"
