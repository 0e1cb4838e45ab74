"""Request bodies of Anthropic's Messages API.

Any other field is refused by name.

    MessagesRequest.model_validate({"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "Hello"}]})

Fields that can only be null are in Anthropic's own answers, which clients send back unchanged. cache_control changes
nothing: all prompts are cached, unless serve.enable_prefix_caching is off; `usage` has the cached tokens. Of
context_management, what would change the prompt is refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from atom.serve.openai.schema import (
    LABEL,
    Body,
    Count,
    Int32,
    JSONObject,
    List,
    Positive,
    Text,
    Word,
    of_types,
    tag_of,
)

Id = Annotated[str, Field(min_length=1, max_length=256)]
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


def is_object_schema(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type") != "object":
        raise PydanticCustomError("schema", 'this is no JSON schema of {"type": "object"}')
    return schema


class CacheControl(Body):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = Field(None, description="a hint: what is cached stays as long as there is room")


class TextBlock(Body):
    type: Literal["text"]
    text: Text
    cache_control: CacheControl | None = None
    citations: None = None


class ThinkingBlock(Body):
    type: Literal["thinking"]
    thinking: Text
    signature: Text = Field("", description="is not checked: what a model thought here bears none")


class ToolUseBlock(Body):
    type: Literal["tool_use"]
    id: Id
    name: ToolName
    input: JSONObject
    cache_control: CacheControl | None = None
    caller: None = None
    toolset_name: None = None


TextBlocks = Annotated[List[Annotated[TextBlock, of_types("text")]], Field(min_length=1)]
Words = Annotated[Annotated[Text, Tag("a-text")] | Annotated[TextBlocks, Tag("a-list")], Discriminator(tag_of)]


class ToolResultBlock(Body):
    type: Literal["tool_result"]
    tool_use_id: Id
    content: Words | None = None
    is_error: bool | None = Field(None, description="the model reads Error: before the content")
    cache_control: CacheControl | None = None
    toolset_name: None = None


Block = Annotated[
    TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock,
    Discriminator("type"),
    of_types("text", "thinking", "tool_use", "tool_result"),
]
Blocks = Annotated[List[Block], Field(min_length=1)]
Content = Annotated[Annotated[Text, Tag("a-text")] | Annotated[Blocks, Tag("a-list")], Discriminator(tag_of)]


class Message(Body):
    role: Literal["user", "assistant", "system"]
    content: Content


class MessageTool(Body):
    type: Literal["custom"] | None = None
    name: ToolName
    description: Text | None = None
    input_schema: Annotated[JSONObject, AfterValidator(is_object_schema)]
    cache_control: CacheControl | None = None
    input_examples: List[JSONObject] | None = Field(None, description="the model reads them as the schema's examples")
    strict: bool | None = Field(None, description="a label: a forced call keeps to its schema, a free one may not")
    eager_input_streaming: bool | None = Field(None, description="a hint: a call comes in pieces as it is made")


AnyTool = Annotated[
    MessageTool,
    of_types(
        "custom",
        fault="{stated} is a tool of Anthropic's own, and server tools are not run here; "
        "leave it out, or give a tool with an input_schema that the client runs",
    ),
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
    budget_tokens: Int32 | None = Field(None, description="a hint: max_tokens alone limits an answer")
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="omitted: blocks of thinking are empty; else it comes whole"
    )


class JSONFormat(Body):
    type: Literal["json_schema"]
    schema_: JSONObject = Field(alias="schema")


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="goes as reasoning_effort to a chat template that reads it, a hint to others"
    )
    format: JSONFormat | None = Field(None, description="the schema that the answer keeps to, behind its thinking")


class ClearThinking(Body):
    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | JSONObject | None = Field(
        None, description="a hint: the chat template decides which thoughts of earlier turns the model reads"
    )


Edit = Annotated[
    ClearThinking,
    of_types(
        "clear_thinking_20251015",
        fault="{stated} is not done here: the model reads all messages; leave out those that it need not read",
    ),
]


class ContextManagement(Body):
    edits: List[Edit] | None = Field(None, max_length=16)


class Metadata(Body):
    user_id: str | None = Field(None, max_length=1024, description="goes to the log")


class CountRequest(Body):
    """The fields that make up a prompt."""

    model: str
    messages: List[Message] = Field(min_length=1)
    system: Words | None = None
    tools: List[AnyTool] | None = Field(None, max_length=512)
    tool_choice: Annotated[FreeChoice | OneTool | NoTool, Discriminator("type")] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    cache_control: CacheControl | None = None


class MessagesRequest(CountRequest):
    max_tokens: Positive
    stop_sequences: List[Annotated[Text, Field(min_length=1)]] | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=100, description="0: greedy")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: Count | None = Field(None, description="0: all")
    metadata: Metadata | None = None
    service_tier: Word | None = Field(None, description=LABEL)
    inference_geo: Word | None = Field(None, description="a label: answers are made where the server is")
