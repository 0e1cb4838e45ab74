"""Request bodies of Anthropic's Messages API.

Any other field is refused by name.

    MessagesRequest.model_validate({"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "Hello"}]})

Labels and hints are in what Anthropic's clients send, and say nothing here. All prompts are cached, unless
serve.enable_prefix_caching is off; cache_control keeps the prompt up to its block from eviction. Of context_management,
what would change the prompt is refused. Tools that Anthropic defines or runs are left out.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, LiteralString

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from atom.serve.anthropic.message_schema import CacheControl, Messages, ToolName, Words
from atom.serve.openai.schema import (
    EXPLAIN,
    LABEL,
    STEER,
    TAPS,
    Body,
    CacheRetention,
    Count,
    JSONObject,
    List,
    Positive,
    Steer,
    Taps,
    Text,
    Word,
    of_types,
)
from atom.serve.refused_fields import REFUSED

HOSTED = re.compile(r"(\w+)_20\d{6}|(mcp_toolset|tool_search_tool_regex|tool_search_tool_bm25)")  # Anthropic's tools
FAMILIES = (  # their types, without the dates
    *("advisor", "bash", "browser_toolset", "code_execution", "computer", "computer_toolset", "mcp_toolset", "memory"),
    *("text_editor", "tool_search_tool_bm25", "tool_search_tool_regex", "web_fetch", "web_search"),
)


def must_be_empty(fault: LiteralString) -> BeforeValidator:
    """Refuse whatever a field has, with what to do instead; a list or an object that holds nothing is null."""

    def check(value: object) -> None:
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
        if any(each not in (None, [], {}) for each in parts):
            raise PydanticCustomError("must_be_empty", fault)

    return BeforeValidator(check)


def is_object_schema(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type") != "object":
        raise PydanticCustomError("schema", 'this is no JSON schema of {"type": "object"}')
    return schema


class MessageTool(Body):
    type: Literal["custom"] | None = None
    name: ToolName
    description: Text | None = None
    input_schema: Annotated[JSONObject, AfterValidator(is_object_schema)]
    cache_control: CacheControl | None = None
    input_examples: List[JSONObject] | None = Field(None, description="the model reads them as the schema's examples")
    strict: bool | None = Field(None, description="a label: a forced call keeps to its schema, a free one may not")
    eager_input_streaming: bool | None = Field(None, description="a hint: a call comes in pieces as it is made")
    defer_loading: bool | None = Field(None, description="a hint: the model reads all tools")
    allowed_callers: List[Word] | None = Field(None, description="a label: only the model calls a tool")


class HostedTool(Body):
    """A tool that Anthropic defines or runs; it is left out, unless tool_choice forces it."""

    model_config = ConfigDict(extra="ignore")

    type: Annotated[str, Field(max_length=64)]
    name: Word | None = None

    @property
    def family(self) -> str:
        """The type without its date; unknown for one that is not in the SDK, so that there are not many."""
        found = HOSTED.fullmatch(self.type)
        name = (found and (found[1] or found[2])) or ""
        return name if name in FAMILIES else "unknown"


def tool_tag(tool: object) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return "a-hosted-tool" if isinstance(kind, str) and HOSTED.fullmatch(kind) else "a-tool"


ClientTool = Annotated[
    MessageTool,
    of_types("custom", fault="{given} tools are not supported here; give a name and an input_schema, without a type"),
]
AnyTool = Annotated[
    Annotated[ClientTool, Tag("a-tool")] | Annotated[HostedTool, Tag("a-hosted-tool")], Discriminator(tool_tag)
]


class FreeChoice(Body):
    type: Literal["auto", "any"]
    disable_parallel_tool_use: bool | None = Field(None, description="true: at most one call")


class OneTool(Body):
    type: Literal["tool"]
    name: ToolName
    disable_parallel_tool_use: bool | None = Field(None, description="one call comes, whatever it says")


class NoTool(Body):
    type: Literal["none"]


class Thinking(Body):
    """Sets what the model's template calls enable_thinking or thinking; without it the template decides."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Count | None = Field(
        None, description="with enabled: tokens of thinking, after which it is ended; else a hint"
    )
    display: Literal["summarized", "omitted", "updates"] | None = Field(
        None, description="omitted: blocks of thinking are empty; else it comes whole"
    )
    block_binding: JSONObject | None = Field(None, description="a label: blocks of thinking are not checked")


class JSONFormat(Body):
    type: Literal["json_schema"]
    schema_: JSONObject = Field(alias="schema")


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="goes as reasoning_effort to a chat template that reads it, a hint to others"
    )
    format: JSONFormat | None = Field(None, description="the schema that the answer follows, after its thinking")
    task_budget: JSONObject | None = Field(None, description="a hint: only max_tokens limits an answer")


class ClearThinking(Body):
    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | JSONObject | None = Field(
        None, description="a hint: the chat template decides which thoughts of earlier turns the model reads"
    )


Edit = Annotated[
    ClearThinking,
    of_types(
        "clear_thinking_20251015",
        fault="{given} is not done here: the model reads all messages; leave out those that it need not read",
    ),
]


class ContextManagement(Body):
    edits: List[Edit] | None = Field(None, max_length=16)


class Metadata(Body):
    user_id: str | None = Field(None, max_length=1024, description="goes to the log")


def one_speed(speed: object) -> object:
    if speed == "fast":
        raise PydanticCustomError("speed", "fast is not served: all requests have one speed here; leave it out")
    return speed


class CountRequest(Body):
    """The fields that make up a prompt."""

    model: str
    messages: Messages
    system: Words | None = None
    tools: List[AnyTool] | None = Field(None, max_length=512)
    tool_choice: Annotated[FreeChoice | OneTool | NoTool, Discriminator("type")] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    cache_control: CacheControl | None = None
    speed: Annotated[Literal["standard"], BeforeValidator(one_speed)] | None = Field(None, description=LABEL)
    mcp_servers: Annotated[None, must_be_empty(REFUSED["mcp_servers"])] = None
    billing_policy: JSONObject | None = Field(None, description=LABEL)
    betas: List[Word] | None = Field(None, description="a label: what a beta brings is in fields of its own")


class MessagesRequest(CountRequest):
    max_tokens: Positive
    stop_sequences: List[Annotated[Text, Field(min_length=1)]] | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=100, description="0: greedy")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: Count | None = Field(None, description="0: all")
    metadata: Metadata | None = None
    cache_retention: CacheRetention | None = None
    taps: Taps | None = Field(None, description=TAPS)
    steer: Steer | None = Field(None, description=STEER)
    explain: bool | None = Field(None, description=EXPLAIN)
    service_tier: Word | None = Field(None, description=LABEL)
    inference_geo: Word | None = Field(None, description="a label: answers are made where the server is")
    container: Annotated[None, must_be_empty(REFUSED["container"])] = None
    thread: JSONObject | None = Field(
        None, description="refused, so that the SDK sends all messages: none are kept here"
    )
    diagnostics: JSONObject | None = Field(None, description=LABEL)
    fallbacks: Literal["default"] | List[JSONObject] | None = Field(
        None, description="a hint: no answer is declined here, so no other model is asked"
    )
    fallback_credit_token: Text | JSONObject | None = Field(None, description=LABEL)
