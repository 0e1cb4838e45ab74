"""Tokenize texts and render chats with the tokenizer of a checkpoint.

    tokenizer.decode(tokenizer.encode("Hello"))
    tokenizer.encode_chat([{"role": "user", "content": "Hello"}])

Chats are rendered by the rules of transformers 5 (`apply_chat_template`). Decoded text is not cleaned up, so that it
can be streamed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from atom.checkpoint.bounds import MAX_TOKEN, Bounds
from atom.checkpoint.chat_template import (
    compile_template,
    cut_after_content,
    find_levels,
    find_variables,
    last_text,
    with_arguments,
)
from atom.checkpoint.encoder import EncoderProcess
from atom.checkpoint.message_renderer import MessageRenderer
from atom.checkpoint.message_rewrites import as_parts
from atom.errors import RequestError, UnsupportedError, first_line

if TYPE_CHECKING:
    import jinja2

BREAK = "\ufdd0"  # occurs in no text: a noncharacter of Unicode
MAX_GROWN = 16 << 20  # bytes that a text may become in this process: they take some 2 GB
MAX_SPELLED = 16 << 20  # characters of tokens that are decoded at once
LONG = 4096  # characters or tokens that take longer than other threads should wait


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

    special_tokens: the named ones, which templates may use: {"bos_token": "<s>", ...}.
    templates: by name; "default" is used, and "tool_use", if there is one, for chats with tools.
    render: renders a chat in place of the templates.
    control: matches the special tokens in a text; None asks the backend.
    bounds: of an untrusted backend; texts beyond them are encoded by a process that may be killed.
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
        self._splits_special = bool(getattr(backend, "encode_special_tokens", False))
        self._encoder_process = EncoderProcess(
            lambda: str(getattr(backend, "to_str")()),  # noqa: B009
            split_special_tokens=self._splits_special,
        )
        bos, eos = (backend.token_to_id(special_tokens.get(name, "")) for name in ("bos_token", "eos_token"))
        self.bos_id: int | None = bos
        self.eos_ids: list[int] = [] if eos is None else [eos]
        self.vocab_size: int = backend.get_vocab_size()  # tokens, added ones included
        self.chat_template: str | None = templates.get("default")
        self._renderer = MessageRenderer()

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
        """Whether a text of this many characters can be encoded in this process, in proportional time and memory."""
        bounds = self._bounds
        return bounds is None or (bounds.is_linear and length * bounds.growth <= MAX_GROWN)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if len(ids) * MAX_TOKEN > MAX_SPELLED and sum(len(self.piece(id) or "") for id in ids) > MAX_SPELLED:
            raise RequestError(f"{len(ids)} tokens are more than {MAX_SPELLED} characters; decode fewer at once")
        many = getattr(self._backend, "decode_batch", None) if len(ids) > LONG else None
        if many is not None:  # as in `encode`
            return str(many([ids], skip_special_tokens=skip_special_tokens)[0])
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def decode_many(self, lists: list[list[int]]) -> list[str]:
        """The text of each list of tokens; other threads run meanwhile, if the tokenizer is no code."""
        many = getattr(self._backend, "decode_batch", None)
        return list(many(lists)) if many is not None else list(map(self._backend.decode, lists))

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token in the vocabulary's spelling, which is no shorter than its text."""
        return self._bounds.longest if self._bounds else max(map(len, self._backend.get_vocab()), default=1)

    def piece(self, id: int) -> str | None:
        """A token in the vocabulary's spelling; None if there is none or the tokenizer is code."""
        find = getattr(self._backend, "id_to_token", None)
        return None if find is None else find(id)

    def find_id(self, token: str) -> int | None:
        """The id of a token in the vocabulary's spelling; None if there is none."""
        return self._backend.token_to_id(token)

    def find_difference(self, other: Tokenizer) -> int | None:
        """The first id that is another token of the other tokenizer's vocabulary; None if they agree.

        An id that one of them lacks, or was added to one as a special token, may differ.
        """
        ours, theirs = ({id: token for token, id in each._backend.get_vocab().items()} for each in (self, other))
        added = {id for each in (self, other) for id in each._backend.get_added_tokens_decoder()}
        differing = (id for id in (ours.keys() & theirs.keys()) - added if ours[id] != theirs[id])
        return min(differing, default=None)

    def to_json(self) -> str | None:
        """The text of its tokenizer.json; None if the tokenizer is code."""
        write = getattr(self._backend, "to_str", None)
        return None if write is None else str(write())

    def describe(self) -> dict[str, Any]:
        """The fields of a tokenizer_config.json: special tokens, the chat template, the class of transformers."""
        others = {name: token for name, token in self._special_tokens.items() if not name.endswith("_token")}
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **({"split_special_tokens": True} if self._splits_special else {}),
            **({"extra_special_tokens": others} if others else {}),
            "eos_token": None,
            **{name: token for name, token in self._special_tokens.items() if name not in others},
            "chat_template": self.chat_template,
        }

    def save(self, folder: Path) -> None:
        """Write the files that transformers' AutoTokenizer reads. UnsupportedError for a tokenizer that is code."""
        backend = self.to_json()
        if backend is None:
            raise UnsupportedError("the checkpoint's tokenizer is code, which has no tokenizer.json; use its own files")
        others = {f"additional_chat_templates/{name}.jinja": text for name, text in self._templates.items()}
        others.pop("additional_chat_templates/default.jinja", None)
        config = {name: value for name, value in self.describe().items() if value is not None}
        files = {"tokenizer.json": backend, "tokenizer_config.json": json.dumps(config, indent=2), **others}
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, "utf-8")

    def render_chat(self, messages: list[dict[str, Any]], **template_values: Any) -> str:
        """Render a chat to the prompt for the next answer. RequestError if the template refuses these messages.

        template_values: the template's other variables: tools, documents, add_generation_prompt (default true), ...
        """
        values = {"tools": None, "documents": None, "add_generation_prompt": True, **template_values}
        render = self._render or partial(self._find_template(values["tools"]).render, **self._special_tokens)
        try:
            return render(messages=messages, **values)
        except Exception as error:  # a template is a program and can fail in every way
            raise RequestError(f"the chat template does not take these messages: {first_line(error)}") from error

    def encode_chat(self, messages: list[dict[str, Any]], **template_values: Any) -> list[int]:
        """Render and encode a chat. Only the template has the special tokens: none is added."""
        return self.prepare_chat(messages, **template_values)[1]

    def encode_messages(
        self, messages: list[dict[str, Any]], shown: list[str], *, check: Callable[[int], object] = bool, **values: Any
    ) -> list[int]:
        """As `encode_chat`, but the template gets the messages as they are. RequestError if it leaves out a text.

        shown: the texts that have to be in the prompt
        check: as in `encode`
        """
        broken, variables, texts = map(self._break_special, (messages, values, shown))
        error: RequestError | None = None
        for each in (broken, [message | {"content": as_parts(message["content"])} for message in broken]):
            try:
                prompt = self.render_chat(each, **variables)
            except RequestError as raised:
                error = error or raised
                continue
            if all(text.strip() in prompt for text in texts):
                return self._encode_parts(prompt.split(BREAK), check)
        roles = ", ".join(str(message["role"]) for message in messages)
        raise error or RequestError(f"the chat template does not show the texts of messages of the roles {roles}")

    def prepare_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        prefill: str = "",
        is_continued: bool = False,
        cut: Callable[[str], str] = str,
        check: Callable[[int], object] = bool,
        shown: Callable[[list[dict[str, Any]]], object] = bool,
        **template_values: Any,
    ) -> tuple[str, list[int]]:
        """Render a chat with the beginning of its answer, and encode it.

        A special token that was written into a message, a value, or the beginning of the answer stays text.

        cut: gives the part of the prompt that is used, or raises if it is too long to encode.
        check: as in `encode`.
        shown: gets the messages that were rendered, maybe in another order.
        Otherwise as `render_prompt`.
        """
        prompt = cut(self._render_broken(messages, prefill, template_values, is_continued=is_continued, shown=shown))
        parts = prompt.split(BREAK)
        return "".join(parts), self._encode_parts(parts, check)

    def render_prompt(
        self, messages: list[dict[str, Any]], *, prefill: str = "", is_continued: bool = False, **template_values: Any
    ) -> str:
        """Render a chat with the beginning of its answer.

        Messages that the template refuses, or of which it leaves out a text, are rewritten (`MessageRenderer`).

        is_continued: the prompt ends where the content of the last message does. RequestError if it is not in it.
        """
        return self._render_broken(messages, prefill, template_values, is_continued=is_continued).replace(BREAK, "")

    def _render_broken(
        self,
        messages: list[dict[str, Any]],
        prefill: str,
        template_values: dict[str, Any],
        *,
        is_continued: bool,
        shown: Callable[[list[dict[str, Any]]], object] = bool,
    ) -> str:
        """The prompt of `render_prompt`, with a mark inside each special token that is only text."""
        values = self._break_special(template_values)
        broken = [with_arguments(message) for message in self._break_special(messages)]
        prompt, rendered = self._renderer.render(
            lambda each: self._render_parts(each, values), broken, has_tools=bool(values.get("tools"))
        )
        shown(rendered)
        if is_continued:
            prompt = cut_after_content(prompt, last_text(rendered[-1].get("content")))
        broken_prefill: str = self._break_special(prefill)
        return prompt + broken_prefill

    def _encode_parts(self, parts: list[str], check: Callable[[int], object]) -> list[int]:
        return [id for part in parts for id in self.encode(part, add_special_tokens=False, check=check)]

    def _render_parts(self, messages: list[dict[str, Any]], values: Mapping[str, Any]) -> str:
        """Render a chat, its texts as lists of one part if the template knows only these."""
        if self._takes_parts:
            messages = [message | {"content": as_parts(message.get("content"))} for message in messages]
        return self.render_chat(messages, **values)

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the template shows a text only as a part of a list, as those of models that see do."""

        def shows(content: Any) -> bool:
            try:
                return "mark" in self.render_chat([{"role": "user", "content": content}])
            except RequestError:
                return False

        return not shows("mark") and shows(as_parts("mark"))

    def with_template(self, template: str) -> Tokenizer:
        """The same tokenizer with this chat template in place of all others."""
        return Tokenizer(
            self._backend,
            special_tokens=self._special_tokens,
            templates={"default": template},
            control=self._control,
            bounds=self._bounds,
        )

    def named_template(self, name: str) -> str | None:
        """The text of a chat template; None if there is none of this name."""
        return self._templates.get(name)

    @cached_property
    def template_text(self) -> str:
        """The texts of all chat templates, which show how the model writes calls of tools."""
        return "\n".join(self._templates.values())

    def template_variables(self) -> frozenset[str]:
        """The variables that the default template may read: messages, tools, enable_thinking, ..."""
        return frozenset() if self.chat_template is None else find_variables(self.chat_template)

    def effort_levels(self) -> tuple[str, ...]:
        """The levels of reasoning_effort that the default template lists, ascending."""
        return () if self.chat_template is None else find_levels(self.chat_template)

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


def control_texts(backend: TokenizerBackend) -> re.Pattern[str] | None:
    """A pattern of the backend's special tokens, the longest first; None if it encodes none as such."""
    if getattr(backend, "encode_special_tokens", False):
        return None
    added = backend.get_added_tokens_decoder().values()
    texts = sorted(
        (token.content for token in added if token.special and len(token.content) > 1), key=len, reverse=True
    )
    return re.compile("|".join(map(re.escape, texts))) if texts else None


def is_panic(error: BaseException) -> bool:
    """Whether the error is a panic of the Rust library, which is no Exception."""
    return type(error).__name__ == "PanicException"
