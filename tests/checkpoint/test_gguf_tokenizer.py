from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import regex
import tokenizers
import transformers
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from atom.checkpoint import GGUFFacts, Tokenizer, open_checkpoint
from atom.checkpoint.gguf_tokenizer import build_tokenizer
from atom.errors import CheckpointError, UnsupportedError

CONF = Path(__file__).parents[2] / "conf" / "model"
SPLIT: dict[str, str] = yaml.safe_load((CONF / "decoder.yaml").read_text())["gguf"]["split"]
WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CORPUS = [
    "The quick brown fox jumps over 13 lazy dogs.",
    "def f(x):\n    return x + 1\n",
    "été déjà 中文 👍🏽 123 4567",
]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
texts = st.text(st.sampled_from("aeT fox's 'll\n\t 　12９½Ⅷé中👍🏽_(){}.,!\u200b\u0301▁"), max_size=30) | st.text(
    max_size=12
)


def metadata(kind: str, tokens: list[str], types: list[int], **more: Any) -> dict[str, Any]:
    own = {"model": kind, "tokens": tokens, "token_type": np.array(types), "bos_token_id": 1, "eos_token_id": 2, **more}
    return {f"tokenizer.ggml.{key}": value for key, value in own.items() if value is not None}


# byte-level BPE


def train() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(WORDS), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    backend.add_tokens(["<think>"])
    return backend


TRAINED = train()


def byte_level_metadata(**more: Any) -> dict[str, Any]:
    vocab = TRAINED.get_vocab()
    tokens = sorted(vocab, key=lambda token: vocab[token])
    types = [CONTROL] * 3 + [NORMAL] * (len(tokens) - 4) + [USER_DEFINED]
    merges = [" ".join(pair) for pair in json.loads(TRAINED.to_str())["model"]["merges"]]
    return metadata("gpt2", tokens, types, merges=merges, pre="words", **more)


def build(values: dict[str, Any], **options: Any) -> Tokenizer:
    tokenizer = build_tokenizer(values, "tiny.gguf", split={"words": WORDS}, **options)
    assert tokenizer is not None
    return tokenizer


BYTE_LEVEL = build(byte_level_metadata())


@settings(max_examples=200)
@given(texts)
def test_byte_level_text_encodes_as_where_it_was_trained(text: str) -> None:
    ids = BYTE_LEVEL.encode(text)
    assert ids == TRAINED.encode(text).ids
    assert BYTE_LEVEL.decode(ids) == TRAINED.decode(ids)


def test_control_tokens_are_special_and_user_defined_ones_only_whole() -> None:
    ids = BYTE_LEVEL.encode("<think>The</s>")
    assert ids == TRAINED.encode("<think>The</s>").ids and ids[0] == BYTE_LEVEL.vocab_size - 1
    assert BYTE_LEVEL.decode(ids) == "<think>The"
    assert BYTE_LEVEL.decode(ids, skip_special_tokens=False) == "<think>The</s>"


@pytest.mark.parametrize(
    ("flags", "ignore_merges", "first", "last"),
    [
        ({}, (), [], []),
        ({}, ("words",), [1], []),
        ({"add_bos_token": False}, ("words",), [], []),
        ({"add_bos_token": True}, (), [1], []),
        ({"add_bos_token": True, "add_eos_token": True}, (), [1], [2]),
    ],
)
def test_bos_and_eos_are_added_where_the_file_asks_for_them(
    flags: dict[str, Any], ignore_merges: tuple[str, ...], first: list[int], last: list[int]
) -> None:
    tokenizer = build(byte_level_metadata(**flags), ignore_merges=ignore_merges)
    assert tokenizer.encode("The") == [*first, *TRAINED.encode("The").ids, *last]
    assert tokenizer.encode("The", add_special_tokens=False) == TRAINED.encode("The").ids
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, [2])


def test_words_of_the_vocabulary_come_whole_where_merges_are_ignored() -> None:
    values = metadata("gpt2", ["<unk>", "<s>", "</s>", "a", "b", "c", "ab", "bc", "abc"], [CONTROL] * 3 + [NORMAL] * 6)
    values |= {"tokenizer.ggml.merges": ["a b", "b c"], "tokenizer.ggml.pre": "words"}
    assert build(values).encode("abc") == [6, 5]
    assert build(values, ignore_merges=["words"]).encode("abc", add_special_tokens=False) == [8]


def test_an_unknown_pre_tokenizer_is_named_with_the_way_to_add_it() -> None:
    with pytest.raises(
        UnsupportedError, match=r"tiny\.gguf: unknown pre-tokenizer 'words'; gguf\.split of a model file"
    ):
        build_tokenizer(byte_level_metadata(), "tiny.gguf")


@settings(max_examples=300)
@given(texts)
def test_the_digits_of_the_default_models_words_are_split(text: str) -> None:
    """As in its tokenizer.json: every digit by itself, then the words of ByteLevel between them."""
    ours = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT["smollm"]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    theirs = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text)


# sentencepiece


PIECES = ["▁", "t", "h", "e", "a", "n", "▁t", "he", "▁the", "th", "an", "▁an", "▁a", "the", "▁▁", "en", "then", "▁then"]


def sentencepiece_metadata(**more: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    scores = np.array([0.0] * 259 + [-1000.0] * 6 + [-float(rank) for rank in range(len(PIECES) - 6)], np.float32)
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(PIECES)
    return metadata("llama", tokens, types, scores=scores, unknown_token_id=0, **more)


def merge_by_score(text: str) -> list[str]:
    """Sentencepiece's BPE in its plainest form: the best pair of neighbours first, the leftmost of equals."""
    scores = {
        token: score for token, score in zip(PIECES, [0] * 6 + list(range(12, 0, -1)), strict=True) if len(token) > 1
    }
    parts = list(text.replace(" ", "▁"))
    while True:
        pairs = [
            (scores[left + right], -i) for i, (left, right) in enumerate(pairwise(parts)) if left + right in scores
        ]
        if not pairs:
            return parts
        i = -max(pairs)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@settings(max_examples=200)
@given(st.text(st.sampled_from("  thean\né"), max_size=20))
def test_sentencepiece_merges_the_best_pair_first_and_falls_back_to_bytes(text: str) -> None:
    values = sentencepiece_metadata()
    tokens = values["tokenizer.ggml.tokens"]
    expected = [1]
    for part in merge_by_score(" " + text) if text else []:
        expected += (
            [tokens.index(part)] if part in PIECES else [tokens.index(f"<0x{byte:02X}>") for byte in part.encode()]
        )
    tokenizer = build(values)
    assert tokenizer.encode(text) == expected
    assert tokenizer.decode(expected) == text


def test_the_space_in_front_is_left_out_where_the_file_asks_for_it() -> None:
    tokenizer = build(sentencepiece_metadata(add_space_prefix=False, add_bos_token=False))
    tokens = sentencepiece_metadata()["tokenizer.ggml.tokens"]
    assert tokenizer.encode("the") == [tokens.index("the")]
    assert tokenizer.decode(tokenizer.encode(" the")) == " the"


MERGES = ["t h", "th e", "▁ the", "a n", "▁ an", "\n \n"]


@settings(max_examples=200)
@given(st.text(st.sampled_from("  thean\né▁"), max_size=20))
def test_merges_of_gemma_4_are_those_of_transformers(text: str) -> None:
    """Its tokenizer there is made of vocabulary and merges only."""
    values = sentencepiece_metadata()
    tokens = values["tokenizer.ggml.tokens"] = [*values["tokenizer.ggml.tokens"], "\n", "\n\n"]
    values |= {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.merges": MERGES, "tokenizer.ggml.add_bos_token": False}
    values["tokenizer.ggml.token_type"] = np.append(values["tokenizer.ggml.token_type"], [NORMAL] * 2)
    vocab, merges = {token: at for at, token in enumerate(tokens)}, [tuple(merge.split(" ")) for merge in MERGES]
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<unk>", "mask_token": "<unk>"}
    theirs = transformers.GemmaTokenizer(vocab=vocab, merges=merges, **special)
    tokenizer, expected = build(values), theirs.encode(text, add_special_tokens=False)
    assert tokenizer.encode(text) == [1, *expected], "the file says that no BOS comes first; llama.cpp adds it"
    assert tokenizer.decode(expected) == text.replace("▁", " ")


# the rest


@pytest.mark.parametrize("values", [{}, {"tokenizer.ggml.model": "none"}, {"tokenizer.ggml.model": "no_vocab"}])
def test_a_file_without_a_vocabulary_has_no_tokenizer(values: dict[str, Any]) -> None:
    assert build_tokenizer(values, "tiny.gguf") is None


def test_another_kind_of_tokenizer_is_named() -> None:
    with pytest.raises(UnsupportedError, match=r"tiny\.gguf: tokenizer\.ggml\.model 'bert' is not supported"):
        build_tokenizer(metadata("bert", ["a"], [1]), "tiny.gguf")


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": []},
        {"tokens": None},
        {"tokens": ["a"], "merges": ["x y"]},
        {"tokens": ["a"], "merges": "a b"},
        {"tokens": ["a" * 5000]},
        {"token_type": 3},
    ],
    ids=str,
)
def test_a_vocabulary_that_makes_no_sense_is_one_line(changes: dict[str, Any]) -> None:
    values = byte_level_metadata() | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    with pytest.raises(CheckpointError, match=r"tiny\.gguf: its vocabulary makes no tokenizer") as caught:
        build(values)
    assert "\n" not in str(caught.value)


def test_a_special_id_outside_the_vocabulary_means_none() -> None:
    tokenizer = build(byte_level_metadata() | {"tokenizer.ggml.bos_token_id": 2**32 - 1})
    assert tokenizer.bos_id is None


def test_chat_templates_come_by_name() -> None:
    values = byte_level_metadata() | {
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template": "{{ bos_token }}plain",
        "tokenizer.chat_template.tool_use": "tools",
    }
    tokenizer = build(values)
    assert (tokenizer.render_chat([]), tokenizer.render_chat([], tools=[{}])) == ("<s>plain", "tools")
    assert tokenizer.encode_chat([])[0] == 1


TEXTS = [
    "",
    "Hello, world! It's the fox's; we'll  see...\n\n\tdone ",
    "日本語 한국어 العربية 👩‍👩‍👧 \u200b e\u0301",
    "def f(x):\n    return {x: [y for y in x]}  # été\r\n",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|>",
]


@pytest.mark.slow
def test_the_embedded_tokenizer_agrees_with_transformers(embedded_gguf: Path) -> None:
    from transformers import AutoTokenizer

    ours = open_checkpoint(str(embedded_gguf), gguf=GGUFFacts(split=SPLIT)).tokenizer()
    theirs = AutoTokenizer.from_pretrained(embedded_gguf.parent, gguf_file=embedded_gguf.name)
    assert ours is not None
    end = theirs.convert_tokens_to_ids("<|im_end|>")  # transformers 5.17 takes bos for eos
    assert (ours.bos_id, ours.eos_ids, ours.vocab_size) == (theirs.bos_token_id, [end], len(theirs))
    # it does not know this file's pre-tokenizer, which sets digits apart
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in [*TEXTS, "In 1969, 3.14 and ½ of 10000 x 2²", Path(__file__).read_text()]:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special_tokens=False) == text
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2+2?"}]
    for messages in (chat, chat[1:]):
        options = {"add_generation_prompt": True, "return_dict": False}
        assert ours.encode_chat(messages) == theirs.apply_chat_template(messages, **options)


def test_sentencepiece_files_agree_with_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    values = sentencepiece_metadata(add_space_prefix=True)
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(values["tokenizer.ggml.tokens"])
    writer.add_token_scores(values["tokenizer.ggml.scores"].tolist())
    writer.add_token_types(values["tokenizer.ggml.token_type"].tolist())
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours = open_checkpoint(str(tmp_path / "tiny.gguf")).tokenizer()
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    assert ours is not None
    for text in ["then", "the  hen\nate", "an 👍 é", "then the then\tan ", "athenéthe"]:
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ours.encode(text)) == text


# what the tokenizer.json of DeepSeek-V3 and R1 splits by, one after another
DEEPSEEK_V3 = [
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
]


@settings(max_examples=300)
@given(st.text(st.sampled_from("aBé \n\t19½中ひヶ゛ー가.,!'\"_$€+\u0301\u200b‘"), max_size=24))
def test_one_expression_splits_as_the_three_of_deepseek(text: str) -> None:

    ours = pre_tokenizers.Split(Regex(SPLIT["deepseek-v3"]), behavior="isolated")
    theirs = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(each), behavior="isolated") for each in DEEPSEEK_V3])
    assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text)


KIMI = "|".join([  # tokenization_kimi.py of moonshotai/Kimi-K2-Instruct: TikTokenTokenizer.pat_str
    r"""[\p{Han}]+""",
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
    r"""\p{N}{1,3}""",
    r""" ?[^\s\p{L}\p{N}]+[\r\n]*""",
    r"""\s*[\r\n]+""",
    r"""\s+(?!\S)""",
    r"""\s+""",
])  # fmt: skip


@settings(max_examples=300)
@given(st.text(st.sampled_from("aBǅé \n\t19½中文ひ々゛ー가'sT.,!_$\u0301\u200b’ "), max_size=24))
def test_chinese_is_split_from_other_letters_as_in_the_tokenizer_of_kimi(text: str) -> None:
    """The intersections of classes mean the same to another engine."""
    split = pre_tokenizers.Split(Regex(SPLIT["kimi-k2"]), behavior="isolated")
    assert [part for part, _ in split.pre_tokenize_str(text)] == regex.findall(KIMI, text, regex.VERSION1)
