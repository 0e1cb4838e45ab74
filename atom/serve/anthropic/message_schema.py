"""Messages of Anthropic's API: their roles, and the blocks of their contents.

    Message.model_validate({"role": "user", "content": [{"type": "text", "text": "Hello"}]})

What only Anthropic's servers make and read is taken too, since clients send back whole histories: see docs/serving.md.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal, LiteralString, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
)
from pydantic_core import PydanticCustomError

from atom.serve.anthropic.stand_ins import stand_in
from atom.serve.content import read_results, stand_ins
from atom.serve.openai.schema import (
    BLOCKS,
    HINT,
    LABEL,
    Body,
    JSONObject,
    List,
    Text,
    Word,
    of_types,
    offer,
    plain_json,
    tag_of,
)

Id = Annotated[str, Field(min_length=1, max_length=256)]
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
SOURCES: LiteralString = "{given} sources of images are not supported here (supported: {known})"
SHOWN_BLOCKS = ("text", "thinking", "tool_use", "tool_result")  # that a refusal names
SilentType = Literal["redacted_thinking", "fallback", "mcp_tool_listing"]  # blocks of answers that no model reads
ServerCallType = Literal["server_tool_use", "mcp_tool_use"]
ServerResultType = Literal[
    "web_search_tool_result",
    "web_fetch_tool_result",
    "code_execution_tool_result",
    "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result",
    "tool_search_tool_result",
    "advisor_tool_result",
    "mcp_tool_result",
]
KNOWN_BLOCKS = (*SHOWN_BLOCKS, "image", *get_args(SilentType), *get_args(ServerCallType), *get_args(ServerResultType))


class CacheControl(Body):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = Field(
        None, description="how long the prompt up to here is kept from eviction, within the share of its key; null: 5m"
    )
    scope: Word | None = Field(None, description=HINT)


class TextBlock(Body):
    type: Literal["text"]
    text: Text
    cache_control: CacheControl | None = None
    citations: Annotated[List[JSONObject] | None, Field(description="a label: what is cited is in the text")] = None


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
    caller: JSONObject | None = Field(None, description=LABEL)
    toolset_name: Word | None = Field(None, description=LABEL)


class Base64Source(Body):
    type: Literal["base64"]
    media_type: Word = Field(description="image/png, image/jpeg, image/webp or image/gif: the data decides")
    data: Text


class URLSource(Body):
    type: Literal["url"]
    url: Text = Field(description="data:, or http(s) of a server that serve.image_domains lists")


class ImageBlock(Body):
    type: Literal["image"]
    source: Annotated[Base64Source | URLSource, Discriminator("type"), of_types("base64", "url", fault=SOURCES)]
    cache_control: CacheControl | None = None
    _name: str = PrivateAttr("messages")  # the path to it in the body

    @property
    def url(self) -> str:
        source = self.source
        return source.url if isinstance(source, URLSource) else f"data:{source.media_type};base64,{source.data}"


TextBlocks = List[Annotated[TextBlock, of_types("text")]]
ResultBlocks = List[Annotated[TextBlock | ImageBlock, Discriminator("type"), of_types("text", image="image")]]
Words = Annotated[Annotated[Text, Tag("a-text")] | Annotated[TextBlocks, Tag("a-list")], Discriminator(tag_of)]
Result = Annotated[Annotated[Text, Tag("a-text")] | Annotated[ResultBlocks, Tag("a-list")], Discriminator(tag_of)]


class ToolResultBlock(Body):
    type: Literal["tool_result"]
    tool_use_id: Id
    content: Annotated[Result, BeforeValidator(partial(stand_ins, stand_in=stand_in))] | None = Field(
        None, description="a text stands in place of a PDF, and of an image that is not read"
    )
    is_error: bool | None = Field(None, description="the model reads Error: before the content")
    cache_control: CacheControl | None = None
    toolset_name: Word | None = Field(None, description=LABEL)


class SilentBlock(Body):
    """What only Anthropic's servers read of their answers; it is left out."""

    model_config = ConfigDict(extra="ignore")

    type: SilentType


class ServerCallBlock(Body):
    """A call of a tool that Anthropic's servers ran; the model reads it as a call of its own."""

    type: ServerCallType
    id: Id
    name: ToolName
    input: JSONObject
    server_name: Word | None = Field(None, description=LABEL)
    cache_control: CacheControl | None = None
    caller: JSONObject | None = Field(None, description=LABEL)


class ServerResultBlock(Body):
    """Its result, as JSON if it is not text."""

    type: ServerResultType
    tool_use_id: Id
    content: Annotated[Any, AfterValidator(plain_json)] = Field(None, description="without what is encrypted")
    is_error: bool | None = Field(None, description="the model reads Error: before the content")
    cache_control: CacheControl | None = None
    caller: JSONObject | None = Field(None, description=LABEL)


def of_blocks(block: object) -> object:
    """Refuse blocks of types that are not known; the refusal names those that a client makes."""
    kind = block.get("type") if isinstance(block, dict) else None
    if isinstance(kind, str) and kind not in KNOWN_BLOCKS:
        raise PydanticCustomError("type", BLOCKS, {"given": kind[:64], "known": offer(SHOWN_BLOCKS, "image")})
    return block


Block = Annotated[
    TextBlock
    | ImageBlock
    | ThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | SilentBlock
    | ServerCallBlock
    | ServerResultBlock,
    Discriminator("type"),
    BeforeValidator(of_blocks),
]
Content = Annotated[Annotated[Text, Tag("a-text")] | Annotated[List[Block], Tag("a-list")], Discriminator(tag_of)]


class MessageConfig(Body):
    effort: Word | None = Field(None, description=f"{HINT}; that of the request counts")


class Message(Body):
    role: Literal["user", "assistant", "system"]
    content: Content
    clear_at: Literal["next_user_message", "never"] | None = Field(
        None, description="next_user_message: the model does not read it once a message of the user follows"
    )
    output_config: MessageConfig | None = None


def has_result(message: dict[str, Any]) -> bool:
    """Whether a message has a tool's result. Images and documents next to one are of it: Claude Code sends PDFs so."""
    blocks = message.get("content")
    return isinstance(blocks, list) and any(isinstance(b, dict) and b.get("type") == "tool_result" for b in blocks)


Messages = Annotated[
    List[Message],
    Field(min_length=1),
    BeforeValidator(partial(read_results, is_result=has_result, stand_in=stand_in)),
]
