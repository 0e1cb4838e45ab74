"""Folders whose tokenizer files disagree, against transformers' AutoTokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer

from atom.checkpoint import Tokenizer, open_checkpoint
from atom.checkpoint.encoder import EncoderProcess
from atom.runtime.requests.detokenizer import Detokenizer
from atom.sampling_params import SamplingParams

TEXTS = ("<s>a <plain>  b</s>", "a <special> b <new> c<plain>d", "<image>x <plain><special>", "[unk]")
QUESTION = [{"role": "user", "content": "a"}]
TEMPLATE = "{{ bos_token }}{{ image_token }}{{ boi }}{{ messages[0].content }}<plain>{{ eos_token }}"
NEW, LSTRIP = {"content": "<new>", "special": True}, {"content": "<plain>", "lstrip": True, "special": False}
SPACED = {"content": "<special>", "lstrip": True, "rstrip": True, "normalized": False, "special": True}


def backend() -> tokenizers.Tokenizer:
    """One token a byte; <plain> is added as a plain token, <special> as a special one, [unk] is a word like others."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: id for id, token in enumerate([*alphabet, "[unk]"])}
    made = tokenizers.Tokenizer(models.BPE(vocab, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>", "<special>"])
    made.add_tokens([AddedToken("<plain>", normalized=False)])
    begin = made.token_to_id("<s>")
    made.post_processor = processors.TemplateProcessing(single="<s> $A", pair="$A $B", special_tokens=[("<s>", begin)])
    return made


def save(folder: Path, config: dict[str, Any], **files: dict[str, Any]) -> Path:
    backend().save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **config}
    for name, content in {"config": {}, "tokenizer_config": config, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def load(folder: Path) -> Tokenizer:
    tokenizer = open_checkpoint(str(folder)).tokenizer()
    assert tokenizer is not None
    return tokenizer


def describe_ours(folder: Path) -> dict[str, Any]:
    ours = load(folder)
    found: dict[str, Any] = {"bos": ours.bos_id, "eos": ours.eos_ids, "size": ours.vocab_size}
    for text in TEXTS:
        for special in (True, False):
            ids = found[f"{text} {special}"] = ours.encode(text, add_special_tokens=special)
            found |= {f"{text} {special} {skip}": ours.decode(ids, skip_special_tokens=skip) for skip in (True, False)}
    found["chat"] = ours.render_chat(QUESTION)
    found["chat ids"] = ours.encode_chat(QUESTION)
    return found


def describe_theirs(folder: Path) -> dict[str, Any]:
    theirs = AutoTokenizer.from_pretrained(folder)
    eos = [] if theirs.eos_token_id is None else [theirs.eos_token_id]
    found: dict[str, Any] = {"bos": theirs.bos_token_id, "eos": eos, "size": len(theirs)}
    for text in TEXTS:
        for special in (True, False):
            ids = found[f"{text} {special}"] = theirs.encode(text, add_special_tokens=special)
            options = {"clean_up_tokenization_spaces": False}  # ours is streamed, and never cleaned up
            found |= {
                f"{text} {special} {skip}": theirs.decode(ids, skip_special_tokens=skip, **options)
                for skip in (True, False)
            }
    found["chat"] = theirs.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    found["chat ids"] = theirs.apply_chat_template(QUESTION, return_dict=False, add_generation_prompt=True)
    return found


CASES: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "nothing disagrees": ({}, {}),
    "flags": ({"added_tokens_decoder": {"259": SPACED, "260": LSTRIP}}, {}),
    "a plain token that the config has as special": (
        {"added_tokens_decoder": {"260": {**LSTRIP, "special": True}}}, {}
    ),
    "a special token that the config has as plain": (
        {"added_tokens_decoder": {"259": {**SPACED, "special": False}}}, {}
    ),
    "a single word": ({"added_tokens_decoder": {"260": {"content": "<plain>", "single_word": True}}}, {}),
    "a token that only the config lists": ({"added_tokens_decoder": {"900": NEW}}, {}),
    "a list next to a map that is then ignored": (
        {"added_tokens_decoder": {"900": NEW}}, {"special_tokens_map": {"eos_token": "<special>"}}
    ),
    "a map": ({}, {"special_tokens_map": {"eos_token": {"content": "<new>", "lstrip": True, "rstrip": False}}}),
    "a map with a list": ({}, {"special_tokens_map": {"additional_special_tokens": ["<new>", "<plain>"]}}),
    "lists in both": (
        {"extra_special_tokens": ["<new>"]}, {"special_tokens_map": {"additional_special_tokens": ["<image>"]}}
    ),
    "added_tokens.json": ({"additional_special_tokens": ["<new>"]}, {"added_tokens": {"<new>": 261, "<image>": 262}}),
    "added_tokens.json next to a list": (
        {"added_tokens_decoder": {"900": NEW}}, {"added_tokens": {"<image>": 262}}
    ),
    "a list of special tokens": ({"additional_special_tokens": ["<new>", "<plain>"]}, {}),
    "two lists of special tokens": (
        {"additional_special_tokens": ["<new>"], "extra_special_tokens": ["<image>"]}, {}
    ),
    "special tokens by name": ({"extra_special_tokens": {"image_token": "<image>", "boi": "<special>"}}, {}),
    "a name of its own": ({"image_token": "<image>", "extra_special_tokens": {}}, {}),
    "a named token of the vocabulary": ({"unk_token": "[unk]"}, {}),
    "a named token that is plain": ({"eos_token": "<plain>"}, {}),
    "a named token that nothing else has": ({"eos_token": "<new>", "pad_token": "<image>"}, {}),
    "a named token with flags": (
        {"eos_token": {"__type": "AddedToken", "content": "<new>", "lstrip": True, "normalized": False}}, {}
    ),
    "special tokens are split": ({"split_special_tokens": True, "additional_special_tokens": ["<new>"]}, {}),
    "tokens around a text": ({"add_bos_token": False, "add_eos_token": True}, {}),
    "a prefix space": ({"add_prefix_space": True, "legacy": True}, {}),
    "cleaning up": ({"clean_up_tokenization_spaces": True}, {}),
}  # fmt: skip


@pytest.mark.parametrize(("config", "files"), CASES.values(), ids=CASES)
def test_files_that_disagree_make_the_tokenizer_that_transformers_makes(
    tmp_path: Path, config: dict[str, Any], files: dict[str, dict[str, Any]]
) -> None:
    folder = save(tmp_path, {"chat_template": TEMPLATE, **config}, **files)
    assert describe_ours(folder) == describe_theirs(folder)


def test_an_empty_list_leaves_the_other_one(tmp_path: Path) -> None:
    """As in transformers 5.24; in 5.17 it counts."""
    folder = save(tmp_path, {"additional_special_tokens": ["<new>"], "extra_special_tokens": []})
    assert load(folder).encode("<new>", add_special_tokens=False) == [261]


def test_a_saved_tokenizer_keeps_what_its_files_decided(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "config.json").write_text("{}")
    names = {"image_token": "<image>", "boi": "<special>"}
    flags = {"added_tokens_decoder": {"260": {**LSTRIP, "special": True}}}
    config = {"chat_template": TEMPLATE, "extra_special_tokens": names, "split_special_tokens": True, **flags}
    folder = save(tmp_path, config)
    load(folder).save(saved)
    assert describe_ours(saved) == describe_theirs(saved) == describe_theirs(folder)


def test_a_token_that_the_config_makes_special_is_text_in_a_message_and_not_shown(tmp_path: Path) -> None:
    config = {"chat_template": "{{ messages[0].content }}<plain>"}
    listed = {"260": {"content": "<plain>", "special": True, "normalized": False}}
    tokenizer = load(save(tmp_path, {**config, "added_tokens_decoder": listed}))
    ids = tokenizer.encode_chat([{"role": "user", "content": "<plain>"}])
    assert ids.count(260) == 1 and ids[-1] == 260
    detokenizer = Detokenizer(tokenizer, [], SamplingParams(stop_strings=["<plain>"]))
    shown = "".join(map(detokenizer.push, [*tokenizer.encode("ab", add_special_tokens=False), 260, 260]))
    assert shown + detokenizer.finish() == "ab" and not detokenizer.stopped
    plain = load(save(tmp_path, config))
    assert Detokenizer(plain, [], SamplingParams()).push(260) == "<plain>"


def test_the_process_that_encodes_long_texts_splits_special_tokens_too() -> None:
    made = backend()
    ids = EncoderProcess(made.to_str, split_special_tokens=True).encode("<special>", False)
    assert ids == [made.token_to_id(letter) for letter in "<special>"]
    assert EncoderProcess(made.to_str).encode("<special>", False) == [259]
