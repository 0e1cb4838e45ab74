"""Choose the output parser of a chat, by model and tools.

talk = Talk(config, body.tools, body.tool_choice)
params = talk.constrain(params)                  # a forced call constrains the answer
answer = talk.read(text, prompt)                 # content, reasoning, calls
parser = talk.parser(prompt)                     # for a streamed answer; None: all of it is content
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from atom.config import Config
from atom.errors import RequestError
from atom.sampling_params import SamplingParams
from atom.serve.errors import FieldError
from atom.serve.openai.schema import NamedTool, Tool
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
from atom.serve.output.tool_parser import FORMATS, CallReader, new_call_id


class Talk:
    def __init__(
        self,
        config: Config,
        tools: Sequence[Tool] | None,
        choice: str | NamedTool | None,
        *,
        is_parallel: bool = True,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        """FieldError where the model has no tool call format, or a tool is invalid."""
        if choice not in (None, "none") and not tools:
            raise FieldError("tool_choice", "tool_choice needs tools")
        self.tools = None if choice == "none" else tools or None  # the tools in the prompt
        stated = config.serve.http.tool_calls
        self._format = config.model.tool_calls if stated == "auto" else None if stated == "none" else stated
        self._reasoning = (config.model.reasoning[0], config.model.reasoning[1]) if config.model.reasoning else None
        self._is_parallel, self._new_id = is_parallel, new_id
        self._named = choice.function.name if isinstance(choice, NamedTool) else None
        self._plain = [tool.model_dump(exclude_none=True) for tool in self.tools or ()]
        self._schema: dict[str, Any] | None = None
        self._is_constrained = False
        is_forced = bool(self.tools) and (self._named is not None or choice == "required")
        try:
            self._names = tool_names(self._plain) if self.tools else []
            if is_forced:
                forced = choice.model_dump() if isinstance(choice, NamedTool) else "required"
                self._schema = tool_schema(self._plain, forced, self._format, is_parallel=is_parallel)
        except RequestError as error:
            raise FieldError("tool_choice" if str(error).startswith("tool_choice") else "tools", str(error)) from None
        if is_forced:
            self._format = "json"
        elif self.tools and self._format is None:
            fix = "set serve.http.tool_calls, or force a call with tool_choice"
            raise FieldError("tools", f"this model's file names no format of tool calls; {fix}")

    def constrain(self, params: SamplingParams) -> SamplingParams:
        """Add the constraint of a forced call, and the markers to decode; call it before `read` or `parser`."""
        if self._schema is not None:
            if params.structured_outputs is not None:
                raise FieldError("tool_choice", "a forced tool call and response_format both say what the answer is")
            params = replace(params, structured_outputs={"json": self._schema})
        self._is_constrained = params.structured_outputs is not None
        visible = markers(self._format if self.tools else None, self._reasoning_markers)
        return replace(params, visible_tokens=visible) if visible else params

    @property
    def _reasoning_markers(self) -> tuple[str, str] | None:
        """The markers of reasoning; None for a constrained answer, which has none."""
        return None if self._is_constrained else self._reasoning

    def parser(self, prompt: str, *, is_streamed: bool = True) -> OutputParser | None:
        """The parser of an answer to a rendered prompt; None where all of it is content."""
        splitter = reader = None
        if tags := self._reasoning_markers:
            splitter = ReasoningSplitter(tags, is_inside=is_opened(prompt, tags))
        if self.tools:
            call_format = FORMATS[self._format] if self._format and not self._named else None
            reader = CallReader(call_format, self._names, self._new_id, named=self._named, is_streamed=is_streamed)
        return OutputParser(splitter, reader) if splitter or reader else None

    def read(self, text: str, prompt: str) -> Answer:
        """Parse a whole answer."""
        parser = self.parser(prompt, is_streamed=False)
        if parser is None:
            return Answer(text, "", [])
        answer = gather([parser.push(text), parser.finish()])
        return answer if self._is_parallel else answer._replace(calls=answer.calls[:1])

    def next(self, parser: OutputParser, text: str, *, is_last: bool) -> Delta:
        """Parse the next text; the new part of the answer."""
        delta = parser.push(text)
        if is_last:
            rest = parser.finish()
            delta = Delta(delta.content + rest.content, delta.reasoning + rest.reasoning, delta.tools + rest.tools)
        if self._is_parallel:
            return delta
        return delta._replace(tools=[call for call in delta.tools if not call.index])

    def delta(self, parser: OutputParser, text: str, *, is_last: bool) -> dict[str, Any]:
        """Parse the next text; the new part as the delta of a chunk, {} where all of it is held back."""
        content, reasoning, calls = self.next(parser, text, is_last=is_last)
        delta: dict[str, Any] = {}
        if content:
            delta["content"] = content
        if reasoning:
            delta["reasoning_content"] = reasoning
        if calls:
            delta["tool_calls"] = [
                {"index": call.index}
                | ({"id": call.id, "type": "function"} if call.id else {})
                | {"function": ({"name": call.name} if call.name else {}) | {"arguments": call.arguments}}
                for call in calls
            ]
        return delta
