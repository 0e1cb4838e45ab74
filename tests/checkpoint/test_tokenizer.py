from __future__ import annotations

import base64
import json
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from atom.checkpoint import Tokenizer, open_checkpoint, stop_ids
from atom.errors import CheckpointError, RequestError

CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "def f(x):\n    return x + 1\n",
    "été déjà 中文 👍🏽 123 4567",
]
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
TEXTS = [
    "",
    " ",
    "Hello world",
    "  two  spaces and\ttabs\n\n\nlines ",
    "The fox's 1234567890 dogs don't",
    "def g(y):\n\treturn {y: [1, 2]}  # é",
    "日本語 한국어 العربية 👩‍👩‍👧 \u200b e\u0301",
    "<s>a</s> b<|im_start|>c <|im_end|>\n<think> x </think>",
]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HEADERS = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|im_start|>system\\n\\nToday Date: " + date_string + "\\n\\n" + system_message + "<|im_end|>" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {{- '<|im_start|>' + message['role'] + '\\n\\n' + message['content'] | trim + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n\\n' }}
{%- endif %}
"""
INSTRUCTIONS = """{{ bos_token }}{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% if message['role'] == 'user' %}
        {{ '[INST] ' + message['content'] + ' [/INST]' }}
    {% elif message['role'] == 'assistant' %}
        {% generation %}{{ message['content'] + eos_token }}{% endgeneration %}
    {% endif %}
{% endfor %}"""
QUESTION = [{"role": "user", "content": 'Is 2 < 3 & "so"? <b>é</b>'}]
TALK = [*QUESTION, {"role": "assistant", "content": " Yes. "}, {"role": "user", "content": "Why?\n"}]


def byte_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=350, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    return backend


def sentencepiece() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    special = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    backend.train_from_iterator(
        CORPUS * 3, trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    )
    return backend


BACKENDS = {"byte_level": byte_level(), "sentencepiece": sentencepiece()}


def save(folder: Path, backend: tokenizers.Tokenizer | None = None, **config: Any) -> Path:
    (folder / "config.json").write_text("{}")
    (backend or BACKENDS["byte_level"]).save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def load(folder: Path) -> Tokenizer:
    tokenizer = open_checkpoint(str(folder)).tokenizer()
    assert tokenizer is not None
    return tokenizer


def assert_same_as_transformers(folder: Path) -> None:
    ours, theirs = load(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    assert (ours.bos_id, ours.eos_ids) == (theirs.bos_token_id, [theirs.eos_token_id])
    assert ours.vocab_size == len(theirs)
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special), text
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_bos_token": False, "add_eos_token": None},
        {"bos_token": {"content": "<s>", "__type": "AddedToken"}, "add_bos_token": True},
        {"additional_special_tokens": ["<|im_end|>"], "clean_up_tokenization_spaces": False},
        {"extra_special_tokens": {"image_token": "<|im_start|>"}},
        {"added_tokens_decoder": {"900": {"content": "<think>", "special": False, "normalized": False}}},
    ],
    ids=str,
)
def test_a_folder_encodes_and_decodes_as_in_transformers(tmp_path: Path, kind: str, config: dict[str, Any]) -> None:
    assert_same_as_transformers(save(tmp_path, BACKENDS[kind], **config))


@pytest.mark.parametrize(
    "config", [{}, {"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": False}], ids=str
)
def test_tokens_that_the_file_puts_around_a_text_hold_whatever_the_config_has(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    backend = tokenizers.Tokenizer.from_str(BACKENDS["byte_level"].to_str())
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="$A $B", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    assert_same_as_transformers(save(tmp_path, backend, **config))


def test_truncation_and_padding_baked_into_a_file_are_left_out(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_str(BACKENDS["byte_level"].to_str())
    backend.enable_truncation(2)
    backend.enable_padding(length=64)
    assert (
        load(save(tmp_path, backend)).encode("The quick brown") == BACKENDS["byte_level"].encode("The quick brown").ids
    )


def test_a_named_token_that_the_file_has_as_plain_becomes_special(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_str(BACKENDS["byte_level"].to_str())
    backend.add_tokens([AddedToken("<end>", special=False)])
    tokenizer = load(save(tmp_path, backend, eos_token="<end>"))
    assert tokenizer.decode(tokenizer.encode("The<end>")) == "The"


def test_special_tokens_map_counts_where_the_config_lists_no_added_tokens(tmp_path: Path) -> None:
    save(tmp_path, eos_token=None)
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|im_end|>"}}')
    assert load(tmp_path).eos_ids == [BACKENDS["byte_level"].token_to_id("<|im_end|>")]
    save(tmp_path, eos_token=None, added_tokens_decoder={})
    assert load(tmp_path).eos_ids == []


def test_a_folder_without_tokenizer_config_still_encodes(tmp_path: Path) -> None:
    (save(tmp_path) / "tokenizer_config.json").unlink()
    tokenizer = load(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.chat_template) == (None, [], None)
    assert tokenizer.decode(tokenizer.encode("The lazy dog")) == "The lazy dog"


@pytest.mark.parametrize("content", ["{", "[]", '{"version": "1.0"}'])
def test_a_broken_tokenizer_file_is_one_line(tmp_path: Path, content: str) -> None:
    (save(tmp_path) / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match="cannot read the tokenizer files of") as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_malformed_tokenizer_config_is_one_line(tmp_path: Path) -> None:
    save(tmp_path, added_tokens_decoder={"5": {"text": "?"}})
    with pytest.raises(CheckpointError, match=r"cannot read the tokenizer files of .*KeyError"):
        load(tmp_path)


def test_half_a_surrogate_pair_is_a_request_error(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="not a valid Unicode"):
        load(save(tmp_path)).encode("a\ud83d")


CHATS = [
    pytest.param(CHATML, TALK, {}, id="chatml"),
    pytest.param(CHATML, TALK, {"add_generation_prompt": False}, id="chatml, closed"),
    pytest.param(HEADERS, TALK, {"date_string": "26 Jul 2024"}, id="headers"),
    pytest.param(
        HEADERS, [{"role": "system", "content": " Brief. "}, {"role": "skip"}, *TALK], {}, id="headers, system"
    ),
    pytest.param(HEADERS, QUESTION, {"tools": [{"name": "f", "é": ["<", 1.5, None]}]}, id="headers, tools"),
    pytest.param(INSTRUCTIONS, TALK, {}, id="instructions"),
]


@pytest.mark.parametrize(("template", "messages", "values"), CHATS)
@pytest.mark.parametrize("add_bos_token", [True, False])
def test_chats_render_and_encode_as_in_transformers(
    tmp_path: Path, template: str, messages: list[dict[str, Any]], values: dict[str, Any], add_bos_token: bool
) -> None:
    folder = save(tmp_path, chat_template=template, add_bos_token=add_bos_token)
    ours, theirs = load(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    options = {"add_generation_prompt": True, **values}
    assert ours.render_chat(messages, **values) == theirs.apply_chat_template(messages, tokenize=False, **options)
    ids = ours.encode_chat(messages, **values)
    assert ids == theirs.apply_chat_template(messages, return_dict=False, **options)
    assert ids.count(ours.bos_id) == (0 if template is CHATML else 1)


def test_what_an_answer_begins_with_is_encoded_with_the_prompt_as_text(tmp_path: Path) -> None:
    tokenizer = load(save(tmp_path, chat_template=CHATML))
    text, ids = tokenizer.prepare_chat(QUESTION, prefill="It is <|im_end|>")
    assert text == tokenizer.render_chat(QUESTION) + "It is <|im_end|>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert ids.count(tokenizer.encode("<|im_end|>")[0]) == 1, "the one after the question"


def test_the_variables_of_a_template_are_those_that_it_reads_and_does_not_set(tmp_path: Path) -> None:
    template = "{% set a = a | default(1) %}{% set b = 2 %}{{ b }}{% for m in messages %}{{ m.thinking }}{% endfor %}"
    assert load(save(tmp_path, chat_template=template)).template_variables() == {"a", "messages"}
    assert "date_string" in load(save(tmp_path, chat_template=HEADERS)).template_variables()


def test_the_date_is_todays(tmp_path: Path) -> None:
    text = load(save(tmp_path, chat_template='{{ strftime_now("%Y-%m-%d") }}')).render_chat([])
    assert text == datetime.now().strftime("%Y-%m-%d")


def test_a_template_may_come_in_a_file_or_as_several_by_name(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    folder = save(tmp_path, chat_template=named)
    tokenizer = load(folder)
    assert tokenizer.render_chat(QUESTION) == "plain" and tokenizer.chat_template == "plain"
    assert tokenizer.render_chat(QUESTION, tools=[{"name": "f"}]) == "tools"
    (folder / "chat_template.jinja").write_text("from the file {{ messages[0].role }}")
    assert load(folder).render_chat(QUESTION, tools=[{"name": "f"}]) == "from the file user"


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        ("{{ raise_exception('Roles must alternate') }}", TALK, "not take these messages: Roles must alternate"),
        (CHATML, [{"role": "user"}], "the chat template does not take these messages: .*content"),
        ("{{ 1 / 0 }}", [], "does not take these messages: division by zero"),
        ("{{ messages.__class__.__mro__ }}", [], "does not take these messages: .*unsafe"),
        ("{% set x = messages.append(1) %}", [], "does not take these messages: .*"),
        ("{% for i in range(999999999) %}{% endfor %}", [], "does not take these messages: Range too big"),
        ("", [], "has no chat template; send a plain prompt"),
    ],
)
def test_a_template_that_refuses_is_a_request_error_in_one_line(
    tmp_path: Path, template: str, messages: list[dict[str, Any]], message: str
) -> None:
    tokenizer = load(save(tmp_path, chat_template=template))
    with pytest.raises(RequestError, match=message) as caught:
        tokenizer.encode_chat(messages)
    assert "\n" not in str(caught.value)


def test_a_template_with_a_syntax_error_is_the_checkpoints_fault(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="chat template is not valid jinja"):
        load(save(tmp_path, chat_template="{% if %}")).render_chat(QUESTION)


def test_vocabulary_and_merges_are_read_through_transformers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    BACKENDS["byte_level"].model.save(str(tmp_path))
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": CHATML}))
    tokenizer = load(tmp_path)
    assert tokenizer.encode("The lazy dog's\n") == BACKENDS["byte_level"].encode("The lazy dog's\n").ids
    assert tokenizer.eos_ids == [2] and tokenizer.render_chat(QUESTION).endswith("<|im_start|>assistant\n")


OWN = """
import base64
from pathlib import Path

from transformers import PreTrainedTokenizer

Path("RAN").touch()

class OwnTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "tiktoken.model"}

    def __init__(self, vocab_file, bos_token="[BOS]", eos_token="[EOS]", added_tokens_decoder=None, **kwargs):
        lines = [line.split() for line in Path(vocab_file).read_text().splitlines()]
        self.pieces = {int(rank): base64.b64decode(piece) for piece, rank in lines}
        self.pieces |= {index: token.content.encode() for index, token in added_tokens_decoder.items()}
        self.ranks = {piece: rank for rank, piece in self.pieces.items()}
        super().__init__(bos_token=bos_token, eos_token=eos_token, **kwargs)

    @property
    def vocab_size(self):
        return len(self.pieces)

    def get_vocab(self):
        return {piece.decode("latin-1"): rank for rank, piece in self.pieces.items()}

    def encode(self, text, allow_special_tokens=True, **kwargs):
        if kwargs:
            raise TypeError(f"unexpected {kwargs}")
        rest, ids = text.encode(), []
        while rest:
            piece = next(rest[:size] for size in range(9, 0, -1) if rest[:size] in self.ranks)
            ids.append(self.ranks[piece])
            rest = rest[len(piece):]
        return ids

    def _tokenize(self, text, **kwargs):
        return [self.pieces[rank].decode("latin-1") for rank in self.encode(text)]

    def _convert_token_to_id(self, token):
        return self.ranks[token.encode("latin-1")]

    def _convert_id_to_token(self, index):
        return self.pieces[index].decode("latin-1")

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens).encode("latin-1").decode("utf-8", "replace")
"""
SORTS_TOOLS = """
    def apply_chat_template(self, conversation, tools=None, tokenize=True, add_generation_prompt=False, **kwargs):
        tools = None if tools is None else [dict(sorted(tool.items())) for tool in tools]
        options = {"tokenize": tokenize, "add_generation_prompt": add_generation_prompt, **kwargs}
        return super().apply_chat_template(conversation, tools=tools, **options)
"""
OWN_CHAT = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}{{ message.content }}[EOT]{% endfor %}"
    "{% if add_generation_prompt %}{{ bos_token }}{% endif %}"
)
END = 260  # [EOS]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint whose tokenizer is code of its own over a tiktoken.model, and which has code for the model too."""
    import transformers.dynamic_module_utils as dynamic

    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "own"
    folder.mkdir()
    pieces = [bytes([byte]) for byte in range(256)] + [b"The", b" quick", " brün".encode()]
    lines = [f"{base64.b64encode(piece).decode()} {rank}" for rank, piece in enumerate(pieces)]
    (folder / "tiktoken.model").write_text("\n".join(lines))
    (folder / "tokenization_own.py").write_text(OWN.replace("RAN", str(tmp_path / "ran")))
    for name in ("configuration_own", "modeling_own"):
        (folder / f"{name}.py").write_text("raise AssertionError('the code of the model ran')")
    model = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": model}))
    config = {
        "auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]},
        "tokenizer_class": "OwnTokenizer",
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "chat_template": OWN_CHAT,
        "added_tokens_decoder": {
            str(259 + place): {"content": content, "special": True, "normalized": False}
            for place, content in enumerate(["[BOS]", "[EOS]", "[EOT]"])
        },
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def load_trusted(folder: Path) -> Tokenizer:
    tokenizer = open_checkpoint(str(folder)).tokenizer(trust_remote_code=True)
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("model_type", ["own", "llama", "gpt2", "qwen2", "deepseek_v3"])
@pytest.mark.parametrize("tokenizer_class", ["OwnTokenizer", "GPT2Tokenizer", "PreTrainedTokenizerFast"])
def test_code_of_the_checkpoints_own_does_not_run_untrusted(own: Path, model_type: str, tokenizer_class: str) -> None:
    (own / "config.json").write_text(json.dumps({"model_type": model_type}))
    change_config(own, tokenizer_class=tokenizer_class)
    message = rf"^the tokenizer of {own} is code of the checkpoint's own: read it, then set trust_remote_code=true$"
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(str(own)).tokenizer()
    assert not (own.parent / "ran").exists()
    assert load_trusted(own).encode("The") == [256]
    assert (own.parent / "ran").exists()


def test_trusted_code_encodes_and_decodes(own: Path) -> None:
    tokenizer = load_trusted(own)
    assert tokenizer.encode("The quick brünet\n") == [256, 257, 258, *b"et\n"]
    assert tokenizer.encode("[BOS]The[EOS]é", add_special_tokens=False) == [259, 256, END, *"é".encode()]
    assert tokenizer.decode([259, 256, *"é👍".encode(), END]) == "Theé👍"
    assert tokenizer.decode([259, 256, END], skip_special_tokens=False) == "[BOS]The[EOS]"
    assert tokenizer.decode([*"👍".encode()][:2]) == "\ufffd"
    assert tokenizer.decode([]) == ""
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (259, [END], 262)
    checkpoint = open_checkpoint(str(own))
    assert stop_ids(checkpoint, tokenizer) == {END}


def test_trusted_code_renders_chats_with_its_template(own: Path) -> None:
    tokenizer = load_trusted(own)
    assert tokenizer.render_chat([{"content": "Hi"}]) == "Hi[EOT][BOS]"
    assert tokenizer.encode_chat([{"content": "The"}], add_generation_prompt=False) == [256, 261]
    assert tokenizer.render_chat([], tools=[{"b": 1, "a": 2}]) == '[{"b": 1, "a": 2}][BOS]'
    (own / "chat_template.jinja").write_text("from the file {{ eos_token }}")
    assert load_trusted(own).render_chat([]) == "from the file [EOS]"


def test_code_may_do_more_for_a_chat_than_its_template(own: Path) -> None:
    with (own / "tokenization_own.py").open("a") as file:
        file.write(SORTS_TOOLS)
    tokenizer = load_trusted(own)
    assert tokenizer.render_chat([{"content": "Hi"}]) == "Hi[EOT][BOS]"
    assert tokenizer.render_chat([{"content": "Hi"}], tools=[{"b": 1, "a": 2}]) == '[{"a": 2, "b": 1}]Hi[EOT][BOS]'
    assert tokenizer.encode_chat([{"content": "The"}], add_generation_prompt=False) == [256, 261]
    with pytest.raises(RequestError, match="the chat template does not take these messages: ") as caught:
        tokenizer.render_chat([{"content": "Hi"}], tools=[1])
    assert "\n" not in str(caught.value)


def test_tokens_that_only_the_base_class_has_added_count(own: Path) -> None:
    change_config(own, eos_token="<|end|>")
    tokenizer = load_trusted(own)
    assert (tokenizer.eos_ids, tokenizer.vocab_size) == ([262], 263)
    assert tokenizer.encode("The<|end|>") == [256, 262] and tokenizer.decode([256, 262]) == "The"


def test_the_code_may_be_of_a_fast_tokenizer(own: Path) -> None:
    (own / "tiktoken.model").unlink()
    BACKENDS["byte_level"].save(str(own / "own.json"))
    code = """
import tokenizers
from transformers import PreTrainedTokenizerFast

class OwnTokenizer(PreTrainedTokenizerFast):
    vocab_files_names = {"vocab_file": "own.json"}
    def __init__(self, vocab_file, **kwargs):
        super().__init__(tokenizer_object=tokenizers.Tokenizer.from_file(vocab_file), **kwargs)
    def convert_tokens_to_string(self, tokens):
        return super().convert_tokens_to_string(tokens)
"""
    (own / "tokenization_own.py").write_text(code)
    change_config(
        own,
        auto_map={"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]},
        eos_token="</s>",
        added_tokens_decoder={},
    )
    tokenizer = load_trusted(own)
    assert tokenizer.encode("The lazy dog's\n") == BACKENDS["byte_level"].encode("The lazy dog's\n").ids
    assert tokenizer.decode(tokenizer.encode("The lazy dog</s>")) == "The lazy dog" and tokenizer.eos_ids == [2]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise RuntimeError('first\\nsecond')", "cannot read the tokenizer of .*: first$"),
        ("import surely_not_installed", "requires the following packages .*surely_not_installed"),
        ("class Other: pass", "OwnTokenizer"),
    ],
)
def test_code_that_fails_is_one_line(own: Path, code: str, message: str) -> None:
    (own / "tokenization_own.py").write_text(code)
    with pytest.raises(CheckpointError, match=message):
        load_trusted(own)


def test_trust_is_not_spent_on_the_code_of_the_model(own: Path) -> None:
    (own / "tiktoken.model").unlink()
    BACKENDS["byte_level"].model.save(str(own))
    (own / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>"}')
    assert load_trusted(own).encode("The lazy dog") == BACKENDS["byte_level"].encode("The lazy dog").ids


def test_a_folder_with_code_for_other_things_has_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoProcessor": "processing.Processor"}}')
    assert open_checkpoint(str(tmp_path)).tokenizer() is None


def test_a_long_text_has_the_same_tokens_and_lets_other_threads_run():
    backend = tokenizers.Tokenizer(
        models.BPE({byte: i for i, byte in enumerate(pre_tokenizers.ByteLevel.alphabet())}, [])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = Tokenizer(backend)
    assert tokenizer.longest_token == 1
    text = "Some words, äöü. " * 40_000
    num_turns, is_done = [0], threading.Event()

    def run() -> None:
        while not is_done.is_set():
            time.sleep(0.001)
            num_turns[0] += 1

    other = threading.Thread(target=run)
    other.start()
    before = num_turns[0]
    ids = tokenizer.encode(text)
    after = num_turns[0]
    is_done.set()
    other.join()
    assert ids == backend.encode(text).ids and len(ids) == 40_000 * 20
    assert after - before > 3
