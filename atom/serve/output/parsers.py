"""Choose the output parser of a chat, by model and tools.

parsers = ChatParsers(config, body.tools, body.tool_choice, tokenizer)
params = parsers.constrain(params, prompt)          # a forced call constrains the answer, after its reasoning
answer = parsers.read(text, prompt)                 # content, reasoning, calls
parser = parsers.parser(prompt)                     # for a streamed answer; None: all of it is content
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from atom.checkpoint import Tokenizer
from atom.checkpoint.chat_template import compile_template
from atom.config import Config
from atom.config.tool_formats import choose_format, find_channels, marker_of, openers, read_format
from atom.errors import CheckpointError, RequestError
from atom.runtime.requests.detokenizer import MARK
from atom.sampling_params import SamplingParams
from atom.serve.http.errors import FieldError, shown
from atom.serve.openai.schema import AllowedChoice, NamedTool, Tool
from atom.serve.output.call_deltas import new_call_id
from atom.serve.output.call_grammar import call_grammar
from atom.serve.output.channel_parser import ChannelReader, ChannelSplitter
from atom.serve.output.output_parser import (
    Answer,
    Delta,
    OutputParser,
    gather,
    is_opened,
    markers,
    tool_names,
    tool_schema,
)
from atom.serve.output.reasoning_parser import ReasoningSplitter
from atom.serve.output.tool_parser import CallReader

LOG = logging.getLogger("atom.serve")


def prepare_chats(config: Config, tokenizer: Tokenizer) -> None:
    """Read the formats and compile the template ahead of the first chat.

    A format that is set is warned of if the template never shows the model what tools there are.
    """
    ChatParsers(config, None, None, tokenizer)
    if tokenizer.chat_template is not None:
        with contextlib.suppress(CheckpointError):  # each chat has this error
            compile_template(tokenizer.chat_template)
    given = config.serve.http.tool_calls
    if given not in ("auto", "none", None) and not shows_tools(tokenizer):
        shown = "the chat template shows the model no tools: only forced calls work"
        LOG.warning("serve.http.tool_calls=%s: %s", given, shown)


def shows_tools(tokenizer: Tokenizer) -> bool:
    """Whether a chat with a tool is rendered otherwise than one without; true if neither can be rendered."""
    chat = [{"role": "user", "content": "Hello"}]
    schema = {"type": "object", "properties": {"city": {"type": "string", "description": "its name"}}}
    function = {"name": "get_weather", "description": "Tells the weather.", "parameters": schema}
    try:
        plain = tokenizer.render_chat(chat)
        return plain != tokenizer.render_chat(chat, tools=[{"type": "function", "function": function}])
    except RequestError:  # each chat has this error, or those with tools
        return True


@lru_cache(maxsize=64)
def is_token(tokenizer: Tokenizer, text: str) -> bool:
    return len(tokenizer.encode(text, add_special_tokens=False)) == 1


class ChatParsers:
    def __init__(
        self,
        config: Config,
        tools: Sequence[Tool] | None,
        choice: str | NamedTool | AllowedChoice | None,
        tokenizer: Tokenizer | None = None,
        *,
        is_parallel: bool = True,
        has_called: bool = False,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        """FieldError if the model has no tool call format, or a tool is invalid.

        has_called: the messages have calls or results. Without a format they are of a forced call, after which the
        model answers in words.
        """
        if choice not in (None, "none", "auto") and not tools:
            raise FieldError("tool_choice", "tool_choice needs tools")
        if isinstance(choice, AllowedChoice):
            tools, choice = allowed_tools(tools or (), choice), choice.allowed_tools.mode
        name = choose_format(config, template := tokenizer.template_text if tokenizer else "")
        self._format = self._plain_format = read_format(name) if name not in (None, "none") else None
        if choice in (None, "auto") and self._format is None and has_called:
            choice = "none"
        self.tools = None if choice == "none" else tools or None  # the tools in the prompt
        self._channels = self._format if self._format and self._format.channels else find_channels(config, template)
        self._reasoning = (config.model.reasoning[0], config.model.reasoning[1]) if config.model.reasoning else None
        self._is_parallel, self._new_id, self._tokenizer = is_parallel, new_id, tokenizer
        self._named = choice.function.name if isinstance(choice, NamedTool) else None
        self._plain = [tool.model_dump(exclude_none=True) for tool in self.tools or ()]
        self._schema: dict[str, Any] | None = None
        is_forced = bool(self.tools) and (self._named is not None or choice == "required")
        try:
            self._names = tool_names(self._plain) if self.tools else []
            if is_forced:
                forced = choice.model_dump() if isinstance(choice, NamedTool) else "required"
                self._schema = tool_schema(self._plain, forced, name, is_parallel=is_parallel)
        except RequestError as error:
            raise FieldError("tool_choice" if str(error).startswith("tool_choice") else "tools", str(error)) from None
        if is_forced:
            self._format = read_format("json")
        elif self.tools and self._format is None:
            raise FieldError("tools", why_no_format(config))
        if not self.tools and not (self._format and self._format.content):
            self._format = None  # all that is not reasoning is content as it is
        self._schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in self._plain}
        self._mark_tokens(tokenizer)

    def _mark_tokens(self, tokenizer: Tokenizer | None) -> None:
        """Put a mark before markers that are tokens of the checkpoint, if a format counts only tokens as markers."""
        formats = [each for each in (self._channels, self._format) if each]
        seen = markers(self._format, None if self._channels else self._reasoning)
        self._visible = list(dict.fromkeys([*markers(self._channels, None), *seen]))
        self._is_marked = tokenizer is not None and any(each.tokens for each in formats)
        if tokenizer is None or not self._is_marked:
            return
        known = {text for text in self._visible if is_token(tokenizer, text)}
        self._channels = self._channels and self._channels.mark(MARK, known.__contains__)
        self._format = self._format and self._format.mark(MARK, known.__contains__)
        if self._reasoning:
            first, last = map(marker_of(MARK, known), self._reasoning)
            self._reasoning = first, last

    @property
    def has_reasoning(self) -> bool:
        """Whether the model says what it thinks before it answers."""
        return bool(self._channels or self._reasoning)

    def constrain(self, params: SamplingParams, prompt: str) -> SamplingParams:
        """Add the constraint of a forced call, after reasoning, and the markers to decode."""
        constraint = params.structured_outputs
        if self._schema is not None:
            if constraint is not None and not {"json", "json_object"} & set(constraint):
                raise FieldError("tool_choice", "a forced tool call and a constraint both say what the answer is")
            params = replace(params, structured_outputs={"json": self._schema})
        elif self.tools and constraint is not None:
            params = replace(params, tool_calls=self._call_grammar())
        if params.structured_outputs is not None:
            params = replace(params, reasoning=self._reasoning_before(prompt))
        if not self._visible:
            return params
        return replace(params, visible_tokens=self._visible, mark_visible_tokens=self._is_marked)

    def _reasoning_before(self, prompt: str) -> dict[str, str] | None:
        """The reasoning before a constrained answer; None if it begins with the answer."""
        if self._channels and (each := self._channels.channels):
            header = f"{each.channel}{{}}{each.body}"
            parts = {"begin": header.format(each.reasoning), "end": each.end[0]}
            has_calls = self._schema is None and self.tools and self._format and self._format.channels
            parts["then"] = each.prompt if has_calls else each.prompt + header.format(each.content)
            return {name: text.replace(MARK, "") for name, text in parts.items()}
        if not self._reasoning:
            return None
        first, last = (text.replace(MARK, "") for text in self._reasoning)
        contents = self._plain_format.content[:1] if self._plain_format else ()
        if prompt.rstrip().endswith((last, *contents)):
            return None
        return {"begin": "" if is_opened(prompt, (first, last)) else first, "end": last}

    def _call_grammar(self) -> str:
        """The grammar of an answer that calls tools or is what a constraint says."""
        assert self._plain_format is not None, "calls that are not forced have a format"
        return call_grammar(self._plain_format, self._schemas, self._token_id, is_parallel=self._is_parallel)

    def _token_id(self, text: str) -> int | None:
        """The token that is this text, if there is one."""
        ids = self._tokenizer.encode(text, add_special_tokens=False) if self._tokenizer else []
        return ids[0] if len(ids) == 1 else None

    def parser(self, prompt: str) -> OutputParser | None:
        """The parser of an answer to a rendered prompt, streamed or whole; None if all of it is content."""
        splitter: ReasoningSplitter | ChannelSplitter | None = None
        reader: CallReader | None = None
        if self._channels:
            if self._is_marked:
                prompt = self._mark_prompt(prompt)
            tools = self._schemas if self._format and self._format.channels else {}
            channels = ChannelReader(self._channels, tools, self._new_id, prompt=prompt)
            if tools:
                return OutputParser(None, channels, is_marked=self._is_marked, is_parallel=self._is_parallel)
            splitter = ChannelSplitter(channels)
        elif tags := self._reasoning:
            plain = tags[0].replace(MARK, ""), tags[1]
            ends = [each for each in openers(self._format) if MARK in each] if self.tools and self._format else []
            splitter = ReasoningSplitter(tags, is_inside=is_opened(prompt, plain), ends=ends)
        if self._format or self._named:
            reader = CallReader(
                self._format if not self._named else None,
                self._schemas,
                self._new_id,
                named=self._named,
                is_forced=self._schema is not None,
            )
        if not splitter and not reader:
            return None
        return OutputParser(splitter, reader, is_marked=self._is_marked, is_parallel=self._is_parallel)

    def _mark_prompt(self, prompt: str) -> str:
        """The end of a prompt, if the template has opened a message, with marks."""
        assert self._channels is not None and self._channels.channels is not None, "there are channels"
        each = self._channels.channels
        start, body = (text.replace(MARK, "") for text in (each.start, each.body))
        opened = prompt[max(0, prompt.rfind(start)) :]
        channel = each.channel.replace(MARK, "")
        for plain, marked in ((start, each.start), (channel, each.channel), (body, each.body)):
            opened = opened.replace(plain, marked, 1)
        return opened

    def read(self, text: str, prompt: str) -> Answer:
        """Parse a whole answer."""
        parser = self.parser(prompt)
        if parser is None:
            return Answer(text, "", [])
        answer = gather([parser.push(text), parser.finish()])
        calls = [call._replace(is_whole=is_whole) for call, is_whole in zip(answer.calls, parser.whole, strict=True)]
        return answer._replace(calls=calls, has_whole_calls=parser.has_whole_calls)

    def next(self, parser: OutputParser | None, text: str, *, is_last: bool) -> Delta:
        """Parse the next text; the new part of the answer. parser: None if all of it is content"""
        if parser is None:
            return Delta(text, "", [])
        delta = parser.push(text)
        if is_last:
            delta = delta.join(parser.finish())
        return delta

    def delta(self, parser: OutputParser, text: str, *, is_last: bool) -> dict[str, Any]:
        """Parse the next text; the new part as the delta of a chunk, {} if all of it is held back."""
        content, reasoning, calls, _ = self.next(parser, text, is_last=is_last)
        delta: dict[str, Any] = {}
        if content:
            delta["content"] = content
        if reasoning:
            delta["reasoning_content"] = delta["reasoning"] = reasoning
        if calls:
            delta["tool_calls"] = [
                {"index": call.index}
                | ({"id": call.id, "type": "function"} if call.id else {})
                | {"function": ({"name": call.name} if call.name else {}) | {"arguments": call.arguments}}
                for call in calls
            ]
        return delta


def allowed_tools(tools: Sequence[Tool], choice: AllowedChoice) -> list[Tool]:
    """The tools that a choice allows. FieldError if it names one that does not exist."""
    known, names = (
        [tool.function.name for tool in tools],
        {each.function.name for each in choice.allowed_tools.tools if isinstance(each, NamedTool)},
    )
    if lacking := names - set(known):
        fault = f"tool_choice: there is no function {shown(min(lacking))} in tools (known: {', '.join(known)})"
        raise FieldError("tool_choice", fault)
    return [tool for tool in tools if tool.function.name in names]


def why_no_format(config: Config) -> str:
    """Why free calls of tools are refused, and what to do."""
    if config.serve.http.tool_calls == "none":
        return "calls of tools are not read here (serve.http.tool_calls=none); force one with tool_choice"
    reason = "neither its file nor its chat template has a format of calls"
    return (
        f"this model was not trained for tools: {reason}; force a call with tool_choice, or set serve.http.tool_calls"
    )
