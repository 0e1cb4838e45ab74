"""Answers of a tiny random model, which writes nonsense wherever it may, with the embedded default's tokenizer."""

from __future__ import annotations

import itertools
import json
import random
import re
import string
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from atom import LLMEngine, SamplingParams, assemble
from atom.checkpoint import SilentProgress, Tokenizer
from atom.config.checkpoint import open_for
from atom.config.load import load
from atom.errors import RequestError, UnsupportedError
from atom.runtime.requests import grammar as module
from atom.runtime.requests.grammar import GrammarCompiler, Grammars
from atom.runtime.requests.vocabulary import Vocabulary

llguidance = pytest.importorskip("llguidance")

EOS = 2  # <|im_end|>
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "intermediate_size": 16,
          "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 49152,
          "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": True,
          "hidden_act": "silu", "eos_token_id": EOS}  # fmt: skip
COMPACT = {"x-guidance": {"whitespace_flexible": False}}  # of llguidance; what the model likes best is spaces

Open = Callable[..., LLMEngine]


@pytest.fixture(scope="module")
def tokenizer(embedded_gguf: Path) -> Tokenizer:
    found = open_for(load([]), SilentProgress()).tokenizer(trust_remote_code=False)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def open_engine(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Open]:
    folder = tmp_path_factory.mktemp("grammar")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text(str(tokenizer.to_json()))
    opened = []

    def open(**fields: Any) -> LLMEngine:
        fields = {"kv_cache_memory": 1 << 24, "dtype": "fp32", "level": 1, "load_dummy": True, **fields}
        opened.append(LLMEngine(model=str(folder), **fields))
        return opened[-1]

    yield open
    for engine in opened:
        engine.close()


@pytest.fixture(scope="module")
def engine(open_engine: Open) -> LLMEngine:
    return open_engine()


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(Vocabulary(49152, frozenset({EOS}), tokenizer))


def params(seed: int = 0, **wanted: Any) -> SamplingParams:
    more = {name: wanted.pop(name) for name in ("n", "ignore_eos", "min_tokens", "max_tokens") if name in wanted}
    return SamplingParams(temperature=1.0, seed=seed, structured_outputs=wanted, **{"max_tokens": 500, **more})


def random_schema(chance: random.Random, depth: int = 3) -> dict[str, Any]:
    low, high = sorted(chance.sample(range(-300, 5000), 2))
    kinds: dict[str, Any] = {
        "integer": {"type": "integer", "minimum": low, "maximum": high},
        "number": {"type": "number", "exclusiveMinimum": low / 8, "maximum": high / 8},
        "boolean": {"type": "boolean"},
        "null": {"type": "null"},
        "string": {"type": "string", "minLength": chance.randrange(3), "maxLength": 3 + chance.randrange(9)},
        "pattern": {"type": "string", "pattern": chance.choice(["^[a-z]{2,5}[0-9]$", "^(ab|cd)+x?$", '^é{1,3}"$'])},
        "format": {"type": "string", "format": chance.choice(["date", "uuid", "ipv4"])},
        "enum": {"enum": chance.sample([1, "two", None, True, "öl", [1, 2], {"a": "b"}], 3)},
        "const": {"const": chance.choice(["x\ny", 7, False])},
    }
    if depth:
        names = ["".join(chance.choices(string.ascii_letters + ' "é', k=4)) for _ in range(chance.randrange(5))]
        items = random_schema(chance, depth - 1)
        kinds |= {
            "array": {"type": "array", "items": items, "minItems": chance.randrange(2), "maxItems": 3},
            "object": {
                "type": "object",
                "properties": {name: random_schema(chance, depth - 1) for name in names},
                "required": sorted(set(chance.sample(names, len(names) // 2))),
                "additionalProperties": False,
            },
            "anyOf": {"anyOf": [random_schema(chance, depth - 1) for _ in range(2)]},
        }
    return kinds[chance.choice([*kinds, *["array", "object", "object"] * bool(depth)])]


def test_answers_to_50_random_schemas_are_valid(engine: LLMEngine):
    validators = pytest.importorskip("jsonschema_rs")
    chance = random.Random(4)
    schemas = [random_schema(chance) | (COMPACT if seed % 5 else {}) for seed in range(50)]
    answers = engine.generate(["Say:"] * 50, [params(seed, json=schema) for seed, schema in enumerate(schemas)])
    for schema, answer in zip(schemas, answers, strict=True):
        assert answer["finish_reason"] == "eos", (schema, answer["text"])
        validators.validate(schema, json.loads(answer["text"]))
    assert len({answer["text"] for answer in answers}) > 40
    assert sum(answer["text"].startswith(("{", "[")) for answer in answers) > 15


@pytest.mark.parametrize(
    "pattern",
    [r"[a-f]{3}-\d{2,4}(xyz)?", r"(foo|bar)+", r"[^a-z]{4}", "é[中文]{2}👍", r"^\w{1,3}@[a-z]{1,9}\.(com|org)$", "a?"],
)
def test_the_answer_matches_a_regular_expression_as_a_whole(engine: LLMEngine, pattern: str):
    for answer in engine.generate(["x"] * 4, [params(seed, regex=pattern) for seed in range(4)]):
        assert answer["finish_reason"] == "eos"
        assert re.fullmatch(pattern, answer["text"], re.DOTALL)


def test_the_answer_is_one_of_the_choices(engine: LLMEngine):
    choices = ["yes", 'yes, "of course"\n', "no", "/start: x/", "你好", "{"]
    answers = engine.generate(["x"], params(n=40, choice=choices))
    assert {answer["text"] for answer in answers} <= {*choices}
    assert len({answer["text"] for answer in answers}) > 3


def test_the_answer_is_a_sentence_of_the_grammar(engine: LLMEngine):
    sums = 'start: "(" start "+" NUMBER ")" | NUMBER\nNUMBER: /[0-9]{1,3}/\n'
    for answer in engine.generate(["x"], params(n=8, grammar=sums)):
        text = answer["text"]
        while "(" in text:
            text, count = re.subn(r"\((\d{1,3})\+\d{1,3}\)", r"\1", text, count=1)
            assert count == 1
        assert re.fullmatch(r"\d{1,3}", text)


def test_an_answer_of_json_object_is_an_object(engine: LLMEngine):
    for answer in engine.generate(["x"], params(n=8, json_object=True, max_tokens=80)):
        if answer["finish_reason"] == "eos":
            assert isinstance(json.loads(answer["text"]), dict)
        else:
            assert answer["finish_reason"] == "max_tokens" and answer["text"].startswith("{")


def test_spaces_between_parts_come_to_an_end(compiler: GrammarCompiler, tokenizer: Tokenizer):
    matcher = compiler.compile({"json": {"type": "array", "items": {"type": "integer"}}})
    (bracket,), (space,) = (tokenizer.encode(text) for text in ("[", " "))
    matcher.push(bracket)
    count = 0
    while matcher.allowed(49152)[space]:
        assert not matcher.push(space)
        count += 1
    assert 16 <= count <= 64


@pytest.mark.parametrize("more", [{"ignore_eos": True}, {"min_tokens": 30}, {"max_tokens": 3}])
def test_the_end_of_the_grammar_is_the_end_of_the_answer(engine: LLMEngine, more: dict[str, Any]):
    (answer,) = engine.generate(["x"], params(regex="[ab]{3}", **more))
    assert (len(answer["text"]), answer["finish_reason"]) == (3, "eos")
    assert EOS not in answer["token_ids"], "it needs no token to end where nothing else may come"
    (answer,) = engine.generate(["x"], params(regex="[0-9]+x?", **{**more, "max_tokens": 400}))
    assert re.fullmatch("[0-9]+x?", answer["text"]) and answer["finish_reason"] == "eos"


def test_preemption_and_chunks_change_nothing(engine: LLMEngine, open_engine: Open):
    schema = {
        "type": "array",
        "items": {"type": "integer", "minimum": 0, "maximum": 999},
        "minItems": 12,
        "maxItems": 12,
        **COMPACT,
    }
    every = [params(seed, json=schema) for seed in range(3)]
    prompts = [[seed + 5] * 20 for seed in range(3)]
    expected = [engine.generate([prompt], one)[0] for prompt, one in zip(prompts, every, strict=True)]
    assert all(len(json.loads(answer["text"])) == 12 for answer in expected)
    tight = open_engine(num_kvcache_blocks=32, block_size=4, max_model_len=128, max_num_batched_tokens=16)
    answers = tight.generate(prompts, every)
    assert [answer["token_ids"] for answer in answers] == [answer["token_ids"] for answer in expected]
    assert tight.metrics.scheduler.num_preemptions > 0 and tight.metrics.scheduler.num_chunks > 0


def test_siblings_have_a_matcher_each_and_others_in_the_batch_none(engine: LLMEngine):
    free = SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)
    (single,) = engine.generate(["Say:"], free)
    *bound, other = engine.generate(["Say:"] * 2, [params(n=3, regex="[a-z]{8}"), free])
    assert other["token_ids"] == single["token_ids"]
    assert not re.fullmatch("[a-z]*", other["text"])
    assert len({answer["text"] for answer in bound}) == 3
    assert all(re.fullmatch("[a-z]{8}", answer["text"]) for answer in bound)


def test_only_what_turns_out_too_complex_ends(engine: LLMEngine):
    pattern = {"type": "string", "pattern": "^(a{1000}){1000}$"}  # which nobody looks at before the string begins
    parts = {"number": {"type": "boolean"}, "text": pattern}
    schema = {"type": "object", "properties": parts, "required": [*parts], "additionalProperties": False}
    bad, good = engine.generate(["x"] * 2, [params(json={**schema, **COMPACT}), params(regex="[ab]{20}")])
    assert bad["finish_reason"] == "error"
    assert bad["error"].startswith("RequestError: structured_outputs: ")
    assert re.fullmatch("[ab]{20}", good["text"])
    (single,) = engine.generate(["x"], params(json={**schema, **COMPACT}))
    assert single["finish_reason"] == "error", "it is its own fault even if nothing else runs"


# compiling


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"regex": "("}, ""),  # and why, in llguidance's words
        ({"regex": "(?=x)y"}, ""),
        ({"regex": "(a{1000}){1000}"}, ""),
        ({"regex": "a" * 70_000}, "the regular expression has 70000 bytes, more than 65536"),
        ({"grammar": "start: b"}, '"b"'),
        ({"grammar": "{}"}, ""),
        ({"grammar": "root ::= word"}, "'word'"),
        ({"grammar": "root ::= " + "(" * 5000}, "nested too deeply"),
        ({"grammar": 'root ::= "a"' + ' | "b"' * 2000}, "a grammar in GBNF has"),
        ({"json": "{"}, "the JSON schema is no JSON"),
        pytest.param({"json": {"a": object()}}, "the JSON schema is no JSON", id="no JSON at all"),
        ({"json": "5"}, "the JSON schema is not an object"),
        ({"json": {"type": "strin"}}, "#/type: 'strin' is no type"),
        ({"json": {"properties": {"a": {"pattern": "("}}}}, "#/properties/a: "),
        ({"json": {"contains": {}, "type": "array"}}, "#/contains: contains cannot be kept"),
        ({"json": {"const": float("inf")}}, "the JSON schema is no JSON"),
        ({"json": {"$ref": "http://example.com/schema"}}, "http://example.com/schema"),
        ({"json": {"enum": ["x" * (1 << 20)]}}, "the JSON schema has 1048590 bytes, more than 1048576"),
        ({"json": {"properties": {str(i): {} for i in range(3001)}}}, "has 3001 properties, more than 3000"),
        ({"json": "[" * 100_000 + "]" * 100_000}, "nested too deeply"),
        ({"choice": ["x" * (1 << 20)]}, "the choice has 1048578 bytes"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_wrong_is_an_error_of_one_line(
    compiler: GrammarCompiler, wanted: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "COMPILE_SECONDS", 60.0)  # one of these takes a second on an idle machine
    with pytest.raises(RequestError) as error:
        compiler.compile(wanted)
    assert re.match(r"structured_outputs: .*\w", str(error.value))
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert compiler.compile({"regex": "a"}).allowed(49152).any(), "and others can still be compiled"


def test_compiling_has_a_time_limit(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch):
    schema = {"type": "object", "properties": {f"name{i}": {"type": "string"} for i in range(1000)}}
    monkeypatch.setattr(module, "COMPILE_SECONDS", 0.001)
    with pytest.raises(RequestError, match=r"takes more than 0\.001 s to compile; make it simpler"):
        compiler.compile({"json": schema})
    for thread in threading.enumerate():
        if thread.name == "grammar":
            thread.join()


def test_a_grammar_is_compiled_once_and_its_matchers_know_nothing_of_each_other(
    compiler: GrammarCompiler, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
):
    first = compiler.compile({"choice": ["ab", "cd"]})
    a, b, c = (tokenizer.encode(text)[0] for text in "abc")
    first.push(a)
    monkeypatch.setattr(compiler, "_build", lambda grammar: pytest.fail("it was compiled again"))
    second = compiler.compile({"choice": ["ab", "cd"]})
    assert set(first.allowed(49152).nonzero()[0]) == {b}
    assert {a, c} <= set(second.allowed(49152).nonzero()[0]) and b not in second.allowed(49152).nonzero()[0]
    assert first.push(b)
    assert set(first.allowed(49152).nonzero()[0]) == {EOS}, "at the end nothing else"
    second.push(c)
    third = compiler.compile({"choice": ["ab", "cd"]})
    assert {a, c} <= set(third.allowed(49152).nonzero()[0]), "nor of one that was known before"


@pytest.mark.parametrize(
    "wanted",
    [
        {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}}}},
        {"grammar": "start: a\na: a a"},
    ],
)
def test_a_grammar_that_allows_no_text_is_refused(compiler: GrammarCompiler, wanted: dict[str, Any]):
    with pytest.raises(RequestError, match="the grammar allows no text"):
        compiler.compile(wanted)


def test_a_grammar_of_llama_cpp_is_converted(compiler: GrammarCompiler, tokenizer: Tokenizer):
    matcher = compiler.compile({"grammar": 'root ::= color "!"\ncolor ::= "b" [cd] # or\n'})
    for text in "b", "cd", "!":
        allowed = set(matcher.allowed(49152).nonzero()[0])
        expected = {tokenizer.encode(each)[0] for each in text}
        assert expected <= allowed and tokenizer.encode("a")[0] not in allowed
        is_over = matcher.push(tokenizer.encode(text[0])[0])
    assert is_over
    assert set(matcher.allowed(49152).nonzero()[0]) == {EOS}


def test_only_the_latest_grammars_are_kept(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    compiler = GrammarCompiler(Vocabulary(49152, frozenset({EOS}), tokenizer))
    monkeypatch.setattr(module, "NUM_KEPT", 3)
    for text in ["a", "b", "c", "a", "d"]:
        compiler.compile({"regex": text})
    assert [json.loads(known)["grammars"][0]["lark_grammar"] for known in compiler._known] == [
        "start: /c/",
        "start: /a/",
        "start: /d/",
    ]


@pytest.mark.slow
def test_large_grammars_displace_others_and_the_latest_always_stays(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "MAX_KEPT", 1000)
    compiler = GrammarCompiler(Vocabulary(49152, frozenset({EOS}), tokenizer))

    def num_kept(word: str, size: int) -> int:
        compiler.compile({"grammar": f'start: "{word * size}"'})
        return len(compiler._known)

    assert [num_kept("a", 300), num_kept("b", 300), num_kept("c", 300), num_kept("d", 2000)] == [1, 2, 2, 1]
    assert num_kept("e", 300) == 1


def test_a_token_that_the_grammar_does_not_allow_is_refused(compiler: GrammarCompiler, tokenizer: Tokenizer):
    matcher = compiler.compile({"regex": "a"})
    with pytest.raises(RequestError, match="doesn't satisfy the grammar"):
        matcher.push(tokenizer.encode("b")[0])


def test_tokens_beyond_the_tokenizer_are_never_allowed(tokenizer: Tokenizer):
    compiler = GrammarCompiler(Vocabulary(49152 + 100, frozenset({EOS}), tokenizer))
    allowed = compiler.compile({"regex": r"(.|\n)*"}).allowed(49152 + 100)
    assert allowed.sum() > 40_000 and not allowed[49152:].any()
    fewer = compiler.compile({"regex": r"(.|\n)*"}).allowed(1000)
    assert fewer.tolist() == allowed[:1000].tolist()


def test_special_tokens_are_no_text(compiler: GrammarCompiler, tokenizer: Tokenizer):
    allowed = compiler.compile({"regex": r"(.|\n)*"}).allowed(49152)
    special = [tokenizer.encode(text)[0] for text in ("<|im_start|>", "<|endoftext|>")]
    assert not allowed[special].any() and allowed[EOS]


def test_without_llguidance_the_extra_is_named(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UnsupportedError, match=r"needs llguidance: pip install 'atom-run\[structured\]'"):
        GrammarCompiler(Vocabulary(49152, frozenset({EOS}), tokenizer))


def test_a_checkpoint_without_tokenizer_or_end_is_refused(tokenizer: Tokenizer):
    with pytest.raises(RequestError, match="needs a tokenizer that can be read: the checkpoint has none"):
        GrammarCompiler(Vocabulary(100, frozenset({EOS}), None))
    with pytest.raises(RequestError, match="needs a token that ends the answer"):
        GrammarCompiler(Vocabulary(49152, frozenset(), tokenizer))


PIECES = ["▁", *"acdehlnorstw.,!", "he", "th", "▁th", "▁the", "ll", "hell", "▁c", "at", "▁cat", "你", "é"]


def sentencepiece() -> Backend:
    vocab = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    model = models.BPE({token: id for id, token in enumerate(vocab)}, [], unk_token="<unk>", byte_fallback=True)
    backend = Backend(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["</s>"])
    return backend


def test_a_sentencepiece_tokenizer_is_understood():
    backend = sentencepiece()
    size, id_of = backend.get_vocab_size(), backend.token_to_id
    compiler = GrammarCompiler(Vocabulary(size, frozenset({1}), Tokenizer(backend)))
    for pieces in (["th", "e", "▁cat", "!"], ["t", "he", "▁", "c", "at", "<0x21>"]):
        matcher = compiler.compile({"regex": "[a-z ]{7}[!?]"})
        for place, piece in enumerate(pieces, 1):
            assert matcher.allowed(size)[id_of(piece)]
            assert matcher.push(id_of(piece)) == (place == len(pieces))
    smile = compiler.compile({"regex": "你😀"})
    for piece in ("你", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>"):
        assert not smile.allowed(size)[id_of("c")]
        is_complete = smile.push(id_of(piece))
    assert is_complete


@pytest.mark.parametrize("decoder", [decoders.Metaspace(), decoders.WordPiece()])
def test_a_tokenizer_that_llguidance_does_not_know_is_refused(decoder: Any):
    backend = sentencepiece()
    backend.decoder = decoder
    with pytest.raises(RequestError, match=r"cannot be used with the checkpoint's tokenizer .*can't"):
        GrammarCompiler(Vocabulary(backend.get_vocab_size(), frozenset({1}), Tokenizer(backend)))


def test_a_tokenizer_that_llguidance_takes_for_another_is_refused():
    backend = sentencepiece()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    with pytest.raises(RequestError, match=r"tokenizer \(' ' is read as '▁'\)"):
        GrammarCompiler(Vocabulary(backend.get_vocab_size(), frozenset({1}), Tokenizer(backend)))


def forbid(*_args: Any, **_options: Any) -> None:
    raise AssertionError("a request makes what should have been made before")


def test_an_engine_of_a_server_compiles_its_first_grammar_with_what_its_start_has_made(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
):
    config = open_engine().config
    engine = assemble.open_engine(config, SilentProgress(), opens_grammars=True)
    engine.grammars.try_open()  # waits, as `Worker.load` does
    monkeypatch.setattr(llguidance, "LLTokenizer", forbid)
    (sequence,) = engine.prepare([5], params(regex="[0-9]{3}"))
    assert sequence.matcher is not None
    engine.close()


@pytest.mark.slow
def test_a_large_vocabulary_is_read_once_whoever_asks():
    """Of the size of Gemma's: to read it holds the interpreter's lock for seconds."""
    words = map("".join, itertools.product(string.ascii_lowercase, repeat=4))
    texts = ["</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *words][:262_144]
    vocab = {text: id for id, text in enumerate(texts)}
    backend = Backend(models.BPE(vocab, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>"])
    grammars = Grammars(Vocabulary(len(vocab), frozenset({0}), Tokenizer(backend)))
    grammars.open_early()
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: grammars.open(), range(4)))
    assert all(each is made[0] for each in made)
    allowed = made[0].compile({"choice": ["abcd", "bcda"]}).allowed(len(vocab))
    assert len(vocab) == 262_144 and allowed[vocab["bcda"]] and not allowed[vocab["bcdb"]]


def test_what_cannot_be_made_early_is_reported_to_who_needs_it():
    grammars = Grammars(Vocabulary(100, frozenset({EOS}), None))
    grammars.try_open()
    with pytest.raises(RequestError, match="the checkpoint has none"):
        grammars.open()


def spell(matcher: Any, tokenizer: Tokenizer, text: str) -> bool:
    """Push a text's tokens, each of which must be allowed; whether the answer is complete."""
    is_complete = False
    for token in tokenizer.encode(text, add_special_tokens=False):
        assert matcher.allowed(49152)[token], tokenizer.decode([token])
        is_complete = matcher.push(token)
    return is_complete


def allows(matcher: Any, tokenizer: Tokenizer, text: str) -> bool:
    return bool(matcher.allowed(49152)[tokenizer.encode(text, add_special_tokens=False)[0]])


def test_a_grammar_begins_after_reasoning_that_the_prompt_has_opened(compiler: GrammarCompiler, tokenizer: Tokenizer):
    for end in ("<repo_name>", "</think>"):  # one token; several
        matcher = compiler.compile({"regex": "[0-9]{2}"}, {"begin": "", "end": end})
        assert not matcher.allowed(49152)[EOS], "it does not end in its reasoning"
        assert not spell(matcher, tokenizer, f"a {{42}} b{end}")
        assert not allows(matcher, tokenizer, "a")
        assert spell(matcher, tokenizer, "42") or matcher.allowed(49152)[EOS]


def test_a_copy_goes_on_without_its_original(compiler: GrammarCompiler, tokenizer: Tokenizer):
    matcher = compiler.compile({"regex": "[0-9]{2}"}, {"begin": "", "end": "<repo_name>"})
    (end,) = tokenizer.encode("<repo_name>")
    digit, letter = tokenizer.encode("7"), tokenizer.encode("a")
    copied = matcher.copy()
    matcher.push(end)
    assert copied.allowed(49152)[letter].all() and not matcher.allowed(49152)[letter].any()
    copied.push(end)
    copied.push(*digit)
    assert copied.push(*digit) and not matcher.push(*digit)


def test_reasoning_may_be_left_out_where_the_prompt_does_not_open_it(compiler: GrammarCompiler, tokenizer: Tokenizer):
    reasoning = {"begin": "<file_sep>", "end": "<repo_name>"}
    matcher = compiler.compile({"regex": "[0-9]{2}"}, reasoning)
    assert allows(matcher, tokenizer, "4") and not allows(matcher, tokenizer, "a")
    spell(matcher, tokenizer, "<file_sep>a<repo_name>4")
    assert not allows(matcher, tokenizer, "a")
    matcher = compiler.compile({"regex": "[0-9]{2}"}, reasoning)
    spell(matcher, tokenizer, "4")
    assert not allows(matcher, tokenizer, "<file_sep>"), "an answer that has begun does not begin to think"


def test_reasoning_whose_marker_begins_with_a_special_token_may_be_left_out(
    compiler: GrammarCompiler, tokenizer: Tokenizer
):
    reasoning = {"begin": "<file_sep>thought", "end": "<repo_name>"}
    matcher = compiler.compile({"regex": "[0-9]{2}"}, reasoning)
    assert allows(matcher, tokenizer, "4") and not allows(matcher, tokenizer, "a")
    spell(matcher, tokenizer, "<file_sep>thought a<repo_name>4")
    assert not allows(matcher, tokenizer, "a")
    matcher = compiler.compile({"regex": "[0-9]{2}"}, {"begin": "think", "end": "<repo_name>"})
    assert not allows(matcher, tokenizer, "t"), "text that a grammar may allow begins no reasoning"


def test_headers_around_reasoning_are_forced(compiler: GrammarCompiler, tokenizer: Tokenizer):
    reasoning = {"begin": "<file_sep>think<reponame>", "end": "<repo_name>", "then": "<file_sep>final<reponame>"}
    matcher = compiler.compile({"regex": "[0-9]{2}"}, reasoning)
    assert matcher.allowed(49152).sum() == 1
    spell(matcher, tokenizer, "<file_sep>think<reponame>")
    assert matcher.allowed(49152).sum() > 40_000
    spell(matcher, tokenizer, "hm<repo_name>")
    assert matcher.allowed(49152).sum() == 1
    spell(matcher, tokenizer, "<file_sep>final<reponame>4")
    assert not allows(matcher, tokenizer, "a")


def test_an_engine_thinks_before_it_keeps_to_a_grammar(engine: LLMEngine, tokenizer: Tokenizer):
    (end,) = tokenizer.encode("<repo_name>", add_special_tokens=False)
    bias = {
        "logit_bias": {end: 11.0},
        "visible_tokens": ["<repo_name>"],
        "reasoning": {"begin": "", "end": "<repo_name>"},
    }
    asked = SamplingParams(seed=1, n=4, max_tokens=400, structured_outputs={"regex": "[0-9]{2}"}, **bias)
    answers = engine.generate(["x"], asked)
    ended = [answer["text"] for answer in answers if answer["finish_reason"] == "eos"]
    assert ended and all(re.search("<repo_name>[0-9]{2}$", text) for text in ended)


@pytest.mark.parametrize("reasoning", ["x", {}, {"begin": "a"}, {"end": 1}, {"end": "a", "other": "b"}])
def test_what_is_no_reasoning_is_refused(reasoning: Any):
    with pytest.raises(RequestError, match="reasoning="):
        SamplingParams(structured_outputs={"regex": "a"}, reasoning=reasoning)
    with pytest.raises(RequestError, match="give both"):
        SamplingParams(reasoning={"end": "a"})
