"""What is streamed is held against what the `tokenizers` package decodes from all tokens at once."""

from collections.abc import Iterator
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from atom.runtime.requests.detokenizer import MARK, MAX_HELD, Detokenizer
from atom.sampling_params import SamplingParams

CORPUS = ["the cat sat on the mat, the end.\n", "hello world! hello there\n\n", "naïve café 你好 你们 😀 👍🏽"]
SPECIAL, OTHER = "<|end|>", "<|call|>"
BROKEN = "\ufffd"


class Codec:
    """What the engine's tokenizer does, over a `tokenizers.Tokenizer`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.num_decoded = 0

    def encode(self, text, *, add_special_tokens=True):
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids, *, skip_special_tokens=True):
        self.num_decoded += len(ids)
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def ids(self, *tokens: str) -> list[int]:
        found = [self.tokenizer.token_to_id(token) for token in tokens]
        assert None not in found
        return found


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = {"initial_alphabet": alphabet, "special_tokens": [SPECIAL, OTHER]}
    trainer = trainers.BpeTrainer(vocab_size=330, show_progress=False, **special)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2 and Mistral have it: a piece starts with ▁ for a space, a rare character is its bytes."""
    pieces = ["▁", *"acdehlnorstw.,!", "he", "th", "▁th", "▁the", "ll", "hell", "▁c", "at", "▁cat", "▁▁", "你", "é"]
    vocab = ["<unk>", SPECIAL, OTHER, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    merges = ["h e", "t h", "▁ th", "▁th e", "l l", "he ll", "▁ c", "a t", "▁c at", "▁ ▁"]
    model = models.BPE(
        {token: id for id, token in enumerate(vocab)},
        [tuple(merge.split()) for merge in merges],
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens([AddedToken(SPECIAL), AddedToken(OTHER)])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def metaspace() -> Tokenizer:
    tokenizer = byte_fallback()
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return tokenizer


@cache
def codec(name: str) -> Codec:
    return Codec({"byte_level": byte_level, "byte_fallback": byte_fallback, "metaspace": metaspace}[name]())


NAMES = ["byte_level", "byte_fallback", "metaspace"]
each_tokenizer = pytest.mark.parametrize("name", NAMES)
words = st.sampled_from(["the", " cat", "hello", " ", "  ", "\n", "你", "好", "😀", "👍🏽", "e\u0301", "é", "\u200d"])
texts = st.lists(words | st.text(max_size=3), max_size=12).map("".join)
prompts = st.sampled_from(["", SPECIAL, "the cat", "hello the ", f"the end{SPECIAL}{SPECIAL}"])


def ids_of(name: str) -> st.SearchStrategy[list[int]]:
    """Tokens of texts, single tokens and bytes in any order."""
    vocabulary = st.integers(0, codec(name).tokenizer.get_vocab_size() - 1).map(lambda id: [id])
    encoded = texts.map(lambda text: codec(name).encode(text))
    return st.lists(encoded | vocabulary, max_size=10).map(lambda parts: [id for part in parts for id in part][:60])


def text_after(name: str, prompt: list[int], ids: list[int]) -> str:
    return codec(name).decode(prompt + ids)[len(codec(name).decode(prompt)) :]


def stream(name: str, prompt: list[int], ids: list[int], **params) -> Iterator[tuple[Detokenizer, list[int], str]]:
    """After each token: the detokenizer, the tokens so far, all that was shown so far."""
    detokenizer, shown = Detokenizer(codec(name), prompt, SamplingParams(**params)), ""
    for count in range(1, len(ids) + 1):
        shown += detokenizer.push(ids[count - 1])
        assert detokenizer.text == shown
        yield detokenizer, ids[:count], shown
        if detokenizer.stopped:
            break
    shown += detokenizer.finish()
    assert detokenizer.text == shown
    assert detokenizer.finish() == ""
    yield detokenizer, ids, shown


@pytest.mark.sampled(3)
@each_tokenizer
@settings(max_examples=50)
@given(data=st.data())
def test_what_is_shown_adds_up_to_all_decoded_at_once(name, data):
    prompt, ids = codec(name).encode(data.draw(prompts)), data.draw(ids_of(name))
    whole = text_after(name, prompt, ids)
    for _, _, shown in stream(name, prompt, ids):
        assert whole.startswith(shown)  # so nothing is taken back, and what is broken here is broken there
    assert shown == whole


@each_tokenizer
@settings(max_examples=50)
@given(data=st.data())
def test_a_token_that_completes_text_shows_it_at_once(name, data):
    prompt, ids = codec(name).encode("the"), codec(name).encode(data.draw(texts))[:60]
    for _, so_far, shown in list(stream(name, prompt, ids))[:-1]:
        text = text_after(name, prompt, so_far)
        if not text.endswith(BROKEN) and not codec(name).tokenizer.id_to_token(so_far[-1]).startswith("<0x"):
            assert shown == text


@pytest.mark.sampled(3)
@each_tokenizer
@settings(max_examples=50)
@given(data=st.data())
def test_the_text_ends_before_the_earliest_stop_string(name, data):
    prompt, ids = codec(name).encode(data.draw(prompts)), data.draw(ids_of(name))
    whole = text_after(name, prompt, ids)
    parts = st.builds(lambda at, size: whole[at : at + size], st.integers(0, len(whole)), st.integers(1, 8))
    stop = (parts | words).filter(lambda text: text and BROKEN not in text)
    stops = data.draw(st.lists(stop, min_size=1, max_size=4))
    detokenizer, shown = Detokenizer(codec(name), prompt, SamplingParams(stop_strings=stops)), ""
    for count, token in enumerate(ids, 1):
        shown += detokenizer.push(token)
        text = text_after(name, prompt, ids[:count])
        starts = [text.find(stop) for stop in stops if stop in text]
        assert detokenizer.stopped == bool(starts)
        if starts:
            assert shown == text[: min(starts)]
            break
    else:
        assert shown + detokenizer.finish() == whole


@each_tokenizer
@settings(max_examples=60)
@given(data=st.data())
def test_a_stop_string_stays_in_the_text_where_it_is_wanted(name, data):
    ids = codec(name).encode(data.draw(texts)[:20])
    stops = data.draw(st.lists(words, min_size=1, max_size=4))
    (*_, (without, _, shown)) = stream(name, [], ids, stop_strings=stops)
    (*_, (with_it, _, longer)) = stream(name, [], ids, stop_strings=stops, include_stop_str_in_output=True)
    assert with_it.stopped == without.stopped
    assert longer.removeprefix(shown) == (with_it.stop or "") and with_it.stop in (*stops, None)
    assert not with_it.stopped or text_after(name, [], ids).startswith(longer)


def test_the_shortest_of_the_stop_strings_that_begin_together_stays_in_the_text():
    stops = {"stop_strings": ["bcd", "bc"], "include_stop_str_in_output": True}
    assert shown_by("byte_level", ["a", "b", "c"], **stops) == ["a", "", "bc", ""]


@pytest.mark.sampled(3)
@each_tokenizer
@settings(max_examples=50)
@given(data=st.data(), visible=st.sampled_from([[], [SPECIAL], [OTHER], [SPECIAL, OTHER, "no token"]]))
def test_special_tokens_have_text_where_they_are_to_be_visible(name, data, visible):
    special = codec(name).ids(SPECIAL, OTHER)
    ids = data.draw(st.lists(ids_of(name) | st.sampled_from(special).map(lambda id: [id]), max_size=6))
    ids = [id for part in ids for id in part]
    (*_, (_, _, shown)) = stream(name, [], ids, visible_tokens=visible)
    hidden = [id for id, text in zip(special, [SPECIAL, OTHER], strict=True) if text not in visible]
    assert shown == codec(name).decode([id for id in ids if id not in hidden], skip_special_tokens=False)
    (*_, (_, _, shown)) = stream(name, [], ids, skip_special_tokens=False, visible_tokens=visible)
    assert shown == codec(name).decode(ids, skip_special_tokens=False)


def test_a_visible_token_is_shown_at_once_and_may_be_a_stop_string():
    tokens = ["a", SPECIAL, OTHER, "b"]
    assert shown_by("byte_level", tokens, visible_tokens=[OTHER]) == ["a", "", OTHER, "b", ""]
    stops = {"stop_strings": [OTHER], "visible_tokens": [OTHER]}
    assert shown_by("byte_level", tokens[:3], **stops) == ["a", "", "", ""]


@settings(max_examples=50)
@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    min_tokens=st.integers(0, 12),
)
def test_no_stop_string_counts_before_min_tokens(text, stops, min_tokens):
    ids = [id for letter in text for id in codec("byte_level").ids(letter)]  # one token a letter
    ends = [end for end in range(max(min_tokens, 1), len(text) + 1) if text[:end].endswith(tuple(stops))]
    expected = text
    if ends:
        expected = text[: ends[0] - max(len(stop) for stop in stops if text[: ends[0]].endswith(stop))]
    steps = list(stream("byte_level", [], ids, stop_strings=stops, min_tokens=min_tokens))
    assert all(expected.startswith(shown) for _, _, shown in steps)
    assert steps[-1][2] == expected
    assert steps[-1][0].stopped == bool(ends)


def shown_by(name: str, tokens: list[str], prompt: str = "", **params) -> list[str]:
    detokenizer = Detokenizer(codec(name), codec(name).encode(prompt), SamplingParams(**params))
    return [*map(detokenizer.push, codec(name).ids(*tokens)), detokenizer.finish()]


def test_a_character_is_held_until_its_last_byte():
    assert shown_by("byte_level", ["a", "ð", "Ł", "ĺ", "Ģ", "b"]) == ["a", "", "", "", "😀", "b", ""]
    assert shown_by("byte_level", ["a", "ð", "Ł"]) == ["a", "", "", BROKEN]
    assert shown_by("byte_level", ["ð", "b"]) == ["", BROKEN + "b", ""]


def test_bytes_of_a_run_are_held_until_no_other_can_spoil_them():
    smile = ["<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]
    assert shown_by("byte_fallback", ["a", *smile, "c"]) == ["a", "", "", "", "", "😀c", ""]
    assert shown_by("byte_fallback", [*smile, "<0xF0>"]) == [""] * 5 + [BROKEN * 5]
    assert shown_by("byte_fallback", [*smile, "<0x0A>"]) == [""] * 5 + ["😀\n"]


@pytest.mark.parametrize("name", ["byte_fallback", "metaspace"])
def test_the_first_space_is_dropped_only_where_the_text_begins(name):
    assert shown_by(name, ["▁the", "▁cat"]) == ["the", " cat", ""]
    assert shown_by(name, ["▁the", "▁cat"], prompt="hello") == [" the", " cat", ""]
    assert shown_by(name, ["▁the", "▁cat"], prompt=SPECIAL) == ["the", " cat", ""]
    assert shown_by(name, ["▁the", SPECIAL, "▁cat"]) == ["the", "", " cat", ""]
    assert shown_by(name, ["▁the", "▁cat"], prompt="hello" + SPECIAL * 20) == [" the", " cat", ""]


def test_a_stop_string_on_a_byte_token_stops_at_that_token():
    assert shown_by("byte_fallback", ["a", "<0x0A>"], stop_strings=["\n"]) == ["a", "", ""]
    detokenizer = Detokenizer(codec("byte_fallback"), [], SamplingParams(stop_strings=["\n"]))
    detokenizer.push(*codec("byte_fallback").ids("<0x0A>"))
    assert detokenizer.stopped


def test_a_possible_stop_string_is_held_and_released():
    assert shown_by("byte_level", ["a", "b", "a", "c"], stop_strings=["abc", "bad"]) == ["", "", "a", "bac", ""]
    assert shown_by("byte_level", ["a", "b", "a"], stop_strings=["abc"]) == ["", "", "ab", "a"]
    assert shown_by("byte_level", ["a", "b", "c"], stop_strings=["abcd", "bc"]) == ["", "", "a", ""]


def test_of_stop_strings_that_end_together_the_one_that_begins_first_ends_the_text():
    for stops in (["bc", "abc"], ["abc", "bc"]):
        assert shown_by("byte_level", ["a", "b", "c"], stop_strings=stops) == ["", "", "", ""]
    assert shown_by("byte_level", ["c", "a", "b", "c"], stop_strings=["bc", "abc"]) == ["c", "", "", "", ""]


def test_a_prompt_that_ends_within_a_character_gives_no_context():
    ids = codec("byte_level").ids("ð", "Ł", "ĺ", "Ģ", "b")
    detokenizer = Detokenizer(codec("byte_level"), ids[:2], SamplingParams())
    assert "".join(map(detokenizer.push, ids[2:])) + detokenizer.finish() == BROKEN * 2 + "b"


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("byte_level", ["the"]),
        ("byte_level", ["ð"]),
        ("byte_level", [SPECIAL]),
        ("byte_fallback", ["<0x41>"]),
        ("byte_fallback", ["<0xF0>", "<0x41>"]),
        ("metaspace", ["▁the"]),
    ],
    ids=str,
)
def test_the_cost_of_a_token_does_not_grow_with_the_text(name, tokens):
    ids = codec(name).ids(*tokens) * (2000 // len(tokens))
    detokenizer = Detokenizer(codec(name), [], SamplingParams(stop_strings=["never", "\n\n"]))
    codec(name).num_decoded = 0
    shown = "".join(map(detokenizer.push, ids)) + detokenizer.finish()
    assert shown == codec(name).tokenizer.decode(ids)
    assert codec(name).num_decoded < 2000 * 4 * MAX_HELD


def test_a_token_of_plain_text_costs_a_few_tokens_of_decoding():
    ids = codec("byte_level").encode(CORPUS[0] * 20)
    detokenizer = Detokenizer(codec("byte_level"), ids, SamplingParams())
    codec("byte_level").num_decoded = 0
    for token in ids:
        detokenizer.push(token)
    assert codec("byte_level").num_decoded <= len(ids) * 3 + 4


def test_a_marked_token_differs_from_its_spelling():
    spelled = [*"<|call|>"]
    shown = shown_by("byte_level", ["a", OTHER, *spelled, SPECIAL], visible_tokens=[OTHER], mark_visible_tokens=True)
    assert "".join(shown) == f"a{MARK}{OTHER}{OTHER}"
    assert shown[1] == MARK + OTHER
    ids = codec("byte_level").encode(f"a{MARK}b")
    (*_, (_, _, text)) = stream("byte_level", [], ids, visible_tokens=[OTHER], mark_visible_tokens=True)
    assert text == f"a{BROKEN}b", "no text has the mark"
