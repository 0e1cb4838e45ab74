from __future__ import annotations

from pathlib import Path

import numpy
import pytest
from tokenizers import Tokenizer as Reference

from atom.benchmarks.benchmark_utils import UsageError
from atom.benchmarks.prompts import PromptForm
from atom.benchmarks.random_dataset import (
    draw_lengths,
    find_stable_ids,
    find_vocab_size,
    make_prompt,
    sample_random,
    sample_random_ids,
)
from atom.benchmarks.tokenizer import Tokenizer, load_tokenizer

LENGTHS = [5, 64, 257, 1024]


@pytest.fixture
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return load_tokenizer(str(tokenizer_folder))


def rng() -> numpy.random.Generator:
    return numpy.random.default_rng(0)


def test_lengths_lie_between_the_ratio_and_the_whole():
    lengths = draw_lengths(rng(), 5000, 100, range_ratio=0.8)
    assert (min(lengths), max(lengths)) == (80, 100)
    assert numpy.bincount(lengths)[80:].min() > 5000 / 21 * 0.7  # uniform
    assert draw_lengths(rng(), 3, 100, range_ratio=1.0) == [100] * 3
    assert draw_lengths(rng(), 3, 1, range_ratio=0.1) == [1] * 3


def test_prompts_have_as_many_tokens_as_asked_for(tokenizer: Tokenizer, reference_tokenizer: Reference):
    requests = sample_random(rng(), PromptForm(tokenizer), LENGTHS, [7, 8, 9, 10])
    counted = [len(reference_tokenizer.encode(each.prompt).ids) for each in requests]  # with <s>, as a server counts
    assert counted == LENGTHS == [each.prompt_len for each in requests]
    assert [each.expected_output_len for each in requests] == [7, 8, 9, 10]
    assert len({each.prompt[:20] for each in requests}) == len(requests)


def test_a_prompt_is_mended_until_its_length_is_right(tokenizer: Tokenizer, reference_tokenizer: Reference):
    ids = numpy.arange(2, tokenizer.vocab_size)  # all of them, whatever they do next to each other
    naive = tokenizer.decode(rng().choice(ids, 499).tolist())
    assert len(reference_tokenizer.encode(naive).ids) != 500  # what makes the mending necessary
    text, num_tokens = make_prompt(rng(), PromptForm(tokenizer), ids, "", 500)
    assert num_tokens == 500 == len(reference_tokenizer.encode(text).ids)


@pytest.mark.parametrize("form", [{"use_chat_template": True}, {"is_chat": True}])
def test_the_chat_template_counts(form: dict[str, bool], tokenizer: Tokenizer, reference_tokenizer: Reference):
    (request,) = sample_random(rng(), PromptForm(tokenizer, **form), [100], [1])
    if "is_chat" in form:  # the server puts the text into the template, which has <s> of its own
        prompt = f"<s><user>{request.prompt}<assistant>"
        assert len(reference_tokenizer.encode(prompt, add_special_tokens=False).ids) == 100
    else:  # the server takes it for a text and puts another <s> before it
        assert request.prompt.startswith("<s><user>") and request.prompt.endswith("<assistant>")
        assert len(reference_tokenizer.encode(request.prompt).ids) == 100


def test_the_prefix_is_the_same_and_comes_on_top(tokenizer: Tokenizer, reference_tokenizer: Reference):
    requests = sample_random(rng(), PromptForm(tokenizer), [50] * 4, [1] * 4, prefix_len=30)
    ids = [reference_tokenizer.encode(each.prompt).ids for each in requests]
    assert [len(each) for each in ids] == [80] * 4
    shared = next(at for at in range(80) if len({each[at] for each in ids}) > 1)
    assert 28 <= shared <= 33  # <s>, 30 tokens, the last of which may join the next


def test_prompts_take_turns_with_the_prefixes(tokenizer: Tokenizer, reference_tokenizer: Reference):
    requests = sample_random(rng(), PromptForm(tokenizer), [20] * 6, [1] * 6, prefix_len=30, num_prefixes=3)
    starts = [tuple(reference_tokenizer.encode(each.prompt).ids[:28]) for each in requests]
    assert starts[:3] == starts[3:] and len(set(starts)) == 3
    assert len({each.prompt for each in requests}) == 6


def test_the_same_seed_gives_the_same_prompts(tokenizer: Tokenizer):
    first, second = (sample_random(rng(), PromptForm(tokenizer), [40, 41], [1, 1]) for _ in range(2))
    assert first == second


def test_a_length_that_the_template_itself_exceeds_is_refused(tokenizer: Tokenizer):
    with pytest.raises(UsageError, match="5 tokens are too few for a prompt: the template and the prefix take"):
        sample_random(rng(), PromptForm(tokenizer, use_chat_template=True), [5], [1])


class Pairs(Tokenizer):
    """Counts two tokens for every word: odd lengths cannot be reached."""

    def __init__(self) -> None:
        self.vocab_size, self.added_ids, self.has_template = 10, frozenset(), False

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [int(word) for word in text.split() for _ in range(2)]

    def decode(self, ids) -> str:
        return " ".join(str(each) for each in ids)


def test_the_nearest_length_is_taken_and_reported_where_none_is_exact(capsys: pytest.CaptureFixture[str]):
    first, second = sample_random(rng(), PromptForm(Pairs()), [7, 8], [1, 1])
    assert (first.prompt_len, second.prompt_len) in [(6, 8), (8, 8)]
    assert len(first.prompt.split()) * 2 == first.prompt_len
    assert "1 of 2 prompts are not of the length asked for, by up to 1 tokens" in capsys.readouterr().err


def test_stable_tokens_are_read_back_as_themselves(tokenizer: Tokenizer, reference_tokenizer: Reference):
    ids = find_stable_ids(rng(), tokenizer).tolist()
    assert len(ids) > 100 and not {0, 1, 365} & set(ids)
    texts = [reference_tokenizer.decode([each] * 2) for each in ids]
    assert [reference_tokenizer.encode(text, add_special_tokens=False).ids for text in texts] == [
        [each] * 2 for each in ids
    ]


def test_token_ids_stand_in_for_text_without_a_tokenizer():
    requests = sample_random_ids(rng(), numpy.arange(50), [10, 20], [1, 2], prefix_len=5)
    assert [(len(each.prompt), each.prompt_len, each.expected_output_len) for each in requests] == [
        (15, 15, 1),
        (25, 25, 2),
    ]
    assert requests[0].prompt[:5] == requests[1].prompt[:5]
    assert requests[0].prompt[5:] != requests[1].prompt[5:15]
    assert all(0 <= token < 50 for each in requests for token in each.prompt)
    prefixes = {"prefix_len": 9, "num_prefixes": 2}
    starts = [each.prompt[:9] for each in sample_random_ids(rng(), numpy.arange(50), [5] * 4, [1] * 4, **prefixes)]
    assert starts[:2] == starts[2:] and starts[0] != starts[1]


def test_the_vocabulary_is_that_of_the_config(tmp_path: Path):
    assert find_vocab_size(str(tmp_path)) == 1000
    for config, size in [('{"vocab_size": 77}', 77), ('{"text_config": {"vocab_size": 88}}', 88), ("{}", 1000)]:
        (tmp_path / "config.json").write_text(config)
        assert find_vocab_size(str(tmp_path)) == size
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match="is no JSON file"):
        find_vocab_size(str(tmp_path))
