"""Tokenize texts and render chats, from the tokenizer files of a checkpoint.

    tokenizer = load_tokenizer(Path("/models/tiny"))
    tokenizer.decode(tokenizer.encode("Hello"))
    tokenizer.encode_chat([{"role": "user", "content": "Hello"}])

tokenizer.json is read by `tokenizers`, the template rendered by jinja2 in its sandbox, both by the rules of
transformers 5 (`TokenizersBackend`, `apply_chat_template`). Decoded text is not cleaned up, so that it can be streamed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import tokenizers
from tokenizers import AddedToken

from atom.checkpoint.base import read_json
from atom.checkpoint.bounds import MAX_TOKEN, Bounds, check_decoder, measure
from atom.checkpoint.encoder import EncoderProcess
from atom.checkpoint.files import MAX_DESCRIPTION, MAX_TOKENIZER, open_file, read_file
from atom.errors import CheckpointError, RequestError, first_line

if TYPE_CHECKING:
    import jinja2

BREAK = "\ufdd0"  # occurs in no text: a noncharacter of Unicode
MAX_GROWN = 16 << 20  # bytes that a text may become in this process: they take some 2 GB
MAX_SPELLED = 16 << 20  # characters of tokens that are decoded at once
LONG = 4096  # characters or tokens that take longer than other threads should wait
OTHER_FORMATS = ("tokenizer.model", "vocab.json", "tiktoken.model", "tekken.json")  # read by transformers alone


class Arguments(dict[str, Any]):
    """The arguments of a call: an object, and its JSON where a template joins it to other texts, as DeepSeek's do."""

    def __add__(self, other: Any) -> Any:
        return self._text() + other

    def __radd__(self, other: Any) -> Any:
        return other + self._text()

    def _text(self) -> str:
        return json.dumps(self, ensure_ascii=False)


class TokenizerBackend(Protocol):
    """The methods of `tokenizers.Tokenizer` that are used."""

    def encode(self, sequence: str, *, add_special_tokens: bool = True) -> Any: ...
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...
    def token_to_id(self, token: str) -> int | None: ...
    def get_vocab(self) -> Mapping[str, int]: ...
    def get_vocab_size(self) -> int: ...
    def get_added_tokens_decoder(self) -> Mapping[int, Any]: ...


class Tokenizer:
    """Encodes, decodes and renders chats.

    special_tokens: the named ones, which templates may use: {"bos_token": "<s>", ...}. templates: by name; "default" is
    used, and "tool_use", if there is one, for chats with tools. render: renders a chat in place of the templates.
    control: matches the special tokens in a text; None asks the backend. bounds: of an untrusted backend; texts beyond
    them are encoded by a process that may be killed.
    """

    def __init__(
        self,
        backend: TokenizerBackend,
        *,
        special_tokens: Mapping[str, str] = {},
        templates: Mapping[str, str] = {},
        render: Callable[..., str] | None = None,
        control: re.Pattern[str] | None = None,
        bounds: Bounds | None = None,
    ) -> None:
        self._backend, self._special_tokens, self._templates = backend, special_tokens, templates
        self._render = render
        self._control = control or control_texts(backend)
        self._bounds = bounds
        self._encoder_process = EncoderProcess(lambda: str(getattr(backend, "to_str")()))  # noqa: B009
        bos, eos = (backend.token_to_id(special_tokens.get(name, "")) for name in ("bos_token", "eos_token"))
        self.bos_id: int | None = bos
        self.eos_ids: list[int] = [] if eos is None else [eos]
        self.vocab_size: int = backend.get_vocab_size()  # tokens, added ones included
        self.chat_template: str | None = templates.get("default")

    def encode(self, text: str, *, add_special_tokens: bool = True, check: Callable[[int], object] = bool) -> list[int]:
        """Encode a text to token ids; with add_special_tokens also those around every text (mostly BOS).

        check: called with their number before they become a list, which blocks other threads; it may raise.
        """
        many = getattr(self._backend, "encode_batch_fast", None) if len(text) > LONG else None
        try:
            if not self.encodes_here(len(text)):
                return self._encoder_process.encode(text, add_special_tokens)
            if many is not None:  # this releases the interpreter's lock, `encode` does not
                encoding = many([text], add_special_tokens=add_special_tokens)[0]
                check(len(encoding))
                return list(encoding.ids)
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeEncodeError):  # the Rust library raises TypeError for half a surrogate pair
            raise RequestError("the text to encode is not a valid Unicode string (half a surrogate pair?)") from None
        except BaseException as error:
            if not is_panic(error):
                raise
            raise RequestError(f"the checkpoint's tokenizer fails on this text: {first_line(error)}") from None
        return ids

    def encodes_here(self, length: int) -> bool:
        """Whether a text of so many characters can be encoded in this process, in proportional time and memory."""
        bounds = self._bounds
        return bounds is None or (bounds.is_linear and length * bounds.growth <= MAX_GROWN)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if len(ids) * MAX_TOKEN > MAX_SPELLED and sum(len(self.piece(id) or "") for id in ids) > MAX_SPELLED:
            raise RequestError(f"{len(ids)} tokens are more than {MAX_SPELLED} characters; decode fewer at once")
        many = getattr(self._backend, "decode_batch", None) if len(ids) > LONG else None
        if many is not None:  # as in `encode`
            return str(many([ids], skip_special_tokens=skip_special_tokens)[0])
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token in the vocabulary's spelling, which is no shorter than its text."""
        return self._bounds.longest if self._bounds else max(map(len, self._backend.get_vocab()), default=1)

    def piece(self, id: int) -> str | None:
        """A token in the vocabulary's spelling; None where there is none or the tokenizer is code."""
        find = getattr(self._backend, "id_to_token", None)
        return None if find is None else find(id)

    def find_difference(self, other: Tokenizer) -> int | None:
        """The first id that is another token of the other tokenizer's vocabulary; None where they agree.

        An id that one of them lacks, or was added to one as a special token, may differ.
        """
        ours, theirs = ({id: token for token, id in each._backend.get_vocab().items()} for each in (self, other))
        added = {id for each in (self, other) for id in each._backend.get_added_tokens_decoder()}
        differing = (id for id in (ours.keys() & theirs.keys()) - added if ours[id] != theirs[id])
        return min(differing, default=None)

    def to_json(self) -> str | None:
        """The text of its tokenizer.json; None where the tokenizer is code."""
        write = getattr(self._backend, "to_str", None)
        return None if write is None else str(write())

    def render_chat(self, messages: list[dict[str, Any]], **template_values: Any) -> str:
        """Render a chat to the prompt for the next answer. RequestError where the template refuses these messages.

        template_values: the template's other variables: tools, documents, add_generation_prompt (default true), ...
        """
        values = {"tools": None, "documents": None, "add_generation_prompt": True, **template_values}
        render = self._render or partial(self._find_template(values["tools"]).render, **self._special_tokens)
        try:
            return render(messages=messages, **values)
        except Exception as error:  # a template is a program and can fail in every way
            raise RequestError(f"the chat template does not take these messages: {first_line(error)}") from error

    def encode_chat(self, messages: list[dict[str, Any]], **template_values: Any) -> list[int]:
        """Render and encode a chat. The template alone has the special tokens: none is added."""
        return self.prepare_chat(messages, **template_values)[1]

    def prepare_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        prefill: str = "",
        is_continued: bool = False,
        cut: Callable[[str], str] = str,
        check: Callable[[int], object] = bool,
        **template_values: Any,
    ) -> tuple[str, list[int]]:
        """Render a chat with the beginning of its answer, and encode it.

        is_continued: the prompt ends where the content of the last message does. RequestError where it is not in it.
        cut: gives the part of the prompt that is used, or raises where it is too long to encode. check: as in `encode`.
        A special token that was written into a message, a value, or the beginning of the answer stays text.
        """
        values = self._break_special(template_values)
        broken = [with_arguments(message) for message in self._break_special(messages)]
        prompt = self.render_chat(broken, **values)
        if is_continued:
            prompt = end_behind(prompt, broken[-1].get("content") or "")
        prompt = cut(prompt + self._break_special(prefill))
        parts = prompt.split(BREAK)
        return "".join(parts), [id for part in parts for id in self.encode(part, add_special_tokens=False, check=check)]

    def with_template(self, template: str) -> Tokenizer:
        """The same tokenizer with this chat template in place of all others."""
        return Tokenizer(
            self._backend,
            special_tokens=self._special_tokens,
            templates={"default": template},
            control=self._control,
            bounds=self._bounds,
        )

    @cached_property
    def template_text(self) -> str:
        """The texts of all chat templates, which show how the model writes calls of tools."""
        return "\n".join(self._templates.values())

    def template_variables(self) -> frozenset[str]:
        """The variables that the default template may read: messages, tools, enable_thinking, ..."""
        return frozenset() if self.chat_template is None else find_variables(self.chat_template)

    def _break_special(self, value: Any) -> Any:
        """Put a mark inside every special token in the value's texts, which are then encoded in two parts."""
        if isinstance(value, str):
            return (
                self._control.sub(lambda match: match[0][0] + BREAK + match[0][1:], value) if self._control else value
            )
        if isinstance(value, dict):
            return {key: self._break_special(item) for key, item in value.items()}
        return [self._break_special(item) for item in value] if isinstance(value, list | tuple) else value

    def _find_template(self, tools: Any) -> jinja2.Template:
        source = self._templates["tool_use"] if tools and "tool_use" in self._templates else self.chat_template
        if source is None:
            known = f" named default (it has {', '.join(sorted(self._templates))})" if self._templates else ""
            raise RequestError(f"this checkpoint has no chat template{known}; send a plain prompt instead")
        return compile_template(source)


def with_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose calls have `Arguments`."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    whole = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), dict):
            call = call | {"function": function | {"arguments": Arguments(function["arguments"])}}
        whole.append(call)
    return message | {"tool_calls": whole}


def end_behind(prompt: str, content: str) -> str:
    """A rendered chat up to the end of its last message, as transformers' continue_final_message cuts it."""
    start, found = content.lstrip(), prompt.rfind(content.strip())
    if found < 0:
        raise RequestError("the chat template changes the last message, which cannot be continued then")
    is_kept = prompt.startswith(start, found)  # with the spaces at its end, which many templates strip
    return prompt[: found + len(start if is_kept else content.strip())]


def control_texts(backend: TokenizerBackend) -> re.Pattern[str] | None:
    """A pattern of the backend's special tokens, the longest first; None where it has none."""
    added = backend.get_added_tokens_decoder().values()
    texts = sorted(
        (token.content for token in added if token.special and len(token.content) > 1), key=len, reverse=True
    )
    return re.compile("|".join(map(re.escape, texts))) if texts else None


@lru_cache(maxsize=16)
def compile_template(source: str) -> jinja2.Template:
    """Compile a chat template in transformers' environment: trimmed blocks, loop controls, functions, `generation`."""
    import jinja2
    from jinja2 import ext, nodes, sandbox
    from jinja2.parser import Parser

    class GenerationTag(ext.Extension):  # marks an answer's text for training; here it is just its text
        tags = {"generation"}  # noqa: RUF012 (jinja2 declares it as an instance variable)

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:  # jinja's own escapes HTML
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise CheckpointError(f"the checkpoint's chat template is not valid jinja: {first_line(error)}") from None


@lru_cache(maxsize=16)
def find_variables(source: str) -> frozenset[str]:
    """The variables that a chat template reads, without those that it has set before."""
    from jinja2 import meta

    return frozenset(meta.find_undeclared_variables(compile_template(source).environment.parse(source)))


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Tokenizer | None:
    """Load the tokenizer of a folder; None where it has none.

    Without a tokenizer.json this needs transformers, and `trust_remote_code` for a tokenizer that is code.
    """
    path = folder / "tokenizer_config.json"
    config = read_json(path) if path.exists() else {}
    if not (folder / "tokenizer.json").exists():
        code = find_code(config)
        if code is None and not any((folder / name).exists() for name in OTHER_FORMATS):
            return None
        if code is not None and not trust_remote_code:
            raise CheckpointError(
                f"the tokenizer of {folder} is code of the checkpoint's own: read it, then set trust_remote_code=true"
            )
        return load_with_transformers(folder, code)

    if "added_tokens_decoder" not in config and (folder / "special_tokens_map.json").exists():
        config |= read_json(folder / "special_tokens_map.json")
    special_tokens = {key: text for key, value in config.items() if key.endswith("_token") and (text := content(value))}
    try:
        backend = read_backend(folder / "tokenizer.json", config, special_tokens)
        templates = read_templates(folder, config)
        return Tokenizer(
            backend, special_tokens=special_tokens, templates=templates, bounds=find_bounds(backend, folder)
        )
    except CheckpointError:
        raise
    except (
        BaseException
    ) as error:  # the Rust library raises plain Exception, a malformed tokenizer_config.json much else
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise CheckpointError(f"cannot read the tokenizer files of {folder} ({reason}); download them again") from error


def find_bounds(backend: Any, folder: Path) -> Bounds:
    """Measure the backend's bounds. CheckpointError, with the folder, where it is refused."""
    try:
        check_decoder(backend)
        return measure(backend)
    except CheckpointError as error:
        raise CheckpointError(f"the tokenizer of {folder}: {error}") from None


def read_backend(path: Path, config: Mapping[str, Any], special_tokens: Mapping[str, str]) -> tokenizers.Tokenizer:
    """Read a tokenizer.json, which alone decides the tokens around a text: the config's add_bos_token is ignored."""
    backend = tokenizers.Tokenizer.from_buffer(read_file(path, MAX_TOKENIZER))
    backend.no_truncation()
    backend.no_padding()
    add_tokens(backend, config, special_tokens)
    return backend


def read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Read chat templates by name: from their own files, else from tokenizer_config.json."""
    files = {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    if (folder / "chat_template.jinja").exists():
        files["default"] = folder / "chat_template.jinja"
    if files:
        return {name: read_file(path, MAX_DESCRIPTION).decode() for name, path in files.items()}
    return named_templates(config.get("chat_template"))


def add_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, str]) -> None:
    """Add the tokens that only tokenizer_config.json has, and make the named ones special."""
    added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    for _, entry in sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])):
        if entry["content"] not in added:
            backend.add_tokens([AddedToken(entry["content"], **{flag: entry[flag] for flag in flags if flag in entry})])
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    extra = extra.values() if isinstance(extra, dict) else extra
    for token in (*special_tokens.values(), *filter(None, map(content, extra))):
        if backend.token_to_id(token) is not None and not (token in added and added[token].special):
            backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])


def find_code(config: Mapping[str, Any]) -> str | None:
    """The class "module.Name" of a tokenizer in tokenizer_config.json: the fast one, else the other."""
    named = config.get("auto_map")
    classes = named.get("AutoTokenizer") if isinstance(named, dict) else named
    names = classes if isinstance(classes, list) else [classes]
    return next((name for name in reversed(names) if isinstance(name, str)), None)


def load_with_transformers(folder: Path, code: str | None) -> Tokenizer:
    """Load a tokenizer in a format that only transformers reads, or of the class `code` in the checkpoint's own file.

    No other code of the checkpoint is run: AutoTokenizer would also run that of config.json.
    """
    for path in folder.iterdir():
        if path.exists() and not path.is_dir():
            open_file(path).close()  # transformers would block on a pipe
    try:
        if code is None:
            from transformers import AutoTokenizer

            theirs = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        else:
            from transformers.dynamic_module_utils import get_class_from_dynamic_module

            own = get_class_from_dynamic_module(code, str(folder), local_files_only=True)
            theirs = own.from_pretrained(folder, trust_remote_code=True, local_files_only=True)
        backend: TokenizerBackend = (
            theirs.backend_tokenizer if theirs.is_fast and not code else TransformersBackend(theirs)
        )
        templates = named_templates(theirs.chat_template)
        render = find_render(theirs) if code else None
        bounds = None if isinstance(backend, TransformersBackend) else find_bounds(backend, folder)
        special_tokens = theirs.special_tokens_map
        return Tokenizer(backend, special_tokens=special_tokens, templates=templates, render=render, bounds=bounds)
    except CheckpointError:
        raise
    except Exception as error:  # the checkpoint's own code may raise anything
        raise CheckpointError(f"transformers cannot read the tokenizer of {folder}: {first_line(error)}") from error


def find_render(theirs: Any) -> Callable[..., str] | None:
    """The function that renders chats, where a tokenizer's code overrides its template."""
    from transformers import PreTrainedTokenizerBase

    if type(theirs).apply_chat_template is PreTrainedTokenizerBase.apply_chat_template:
        return None
    return lambda messages, **values: str(theirs.apply_chat_template(messages, tokenize=False, **values))


class TransformersBackend:
    """Adapts a tokenizer of transformers, which may be written in Python, to the methods of `tokenizers`."""

    def __init__(self, theirs: Any) -> None:
        self._theirs = theirs
        self._ids: dict[str, int] = {
            **theirs.get_vocab(),
            **theirs.added_tokens_encoder,
        }  # a class may leave out what was added

    def encode(self, sequence: str, *, add_special_tokens: bool = True) -> Any:
        return SimpleNamespace(ids=self._theirs(sequence, add_special_tokens=add_special_tokens)["input_ids"])

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        return str(self._theirs.decode(list(ids), **options))

    def token_to_id(self, token: str) -> int | None:
        return self._ids.get(token)

    def get_vocab(self) -> Mapping[str, int]:
        return self._ids

    def get_vocab_size(self) -> int:
        return len(self._ids)

    def get_added_tokens_decoder(self) -> Mapping[int, Any]:
        return dict(self._theirs.added_tokens_decoder)


def named_templates(templates: Any) -> dict[str, str]:
    """Chat templates by name, from any stored form: text, {name: text}, [{name, template}]."""
    if isinstance(templates, list):
        return {entry["name"]: entry["template"] for entry in templates}
    return templates if isinstance(templates, dict) else {"default": templates} if templates else {}


def content(token: Any) -> str | None:
    """The text of a token that is stored as text or as an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def is_panic(error: BaseException) -> bool:
    """Whether the error is a panic of the Rust library, which is no Exception."""
    return type(error).__name__ == "PanicException"
