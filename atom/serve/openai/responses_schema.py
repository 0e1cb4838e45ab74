"""Request body of OpenAI's Responses API.

Any other field is refused by name.

    ResponsesRequest.model_validate({"input": "Hello"})

Items of an answer may be sent back as they came. Without serve.http.response_store_bytes nothing is stored: `store`
changes nothing, and previous_response_id is refused. conversation, background and item references always are.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, ClassVar, Literal, LiteralString

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from atom.serve.content import read_results
from atom.serve.openai.schema import (
    CHOICES,
    DETAIL,
    HINT,
    LABEL,
    LEFT_OUT,
    TOOLS,
    Body,
    Budget,
    Count,
    Detail,
    Effort,
    JSONObject,
    JSONSchema,
    List,
    OtherTool,
    Picture,
    Positive,
    RefusalPart,
    Sampling,
    TemplateKwargs,
    Text,
    Word,
    must_be_null,
    of_types,
    tag_of,
    tool_type,
    type_of,
)

Id = Annotated[str, Field(max_length=256)]
Status = Literal["in_progress", "completed", "incomplete"]
FORMATS: LiteralString = "{given} formats are not supported here (supported: {known})"
LOGPROBS = "message.output_text.logprobs"  # what `include` calls log probabilities


class InputText(Body):
    type: Literal["input_text", "output_text", "reasoning_text"]
    text: Text
    annotations: List[JSONObject] | None = Field(None, description=LABEL)
    logprobs: List[JSONObject] | None = Field(None, description=LABEL)
    parsed: JSONObject | None = Field(None, description=LABEL)
    prompt_cache_breakpoint: JSONObject | None = Field(None, description=HINT)


TEXTS = ("input_text", "output_text", "reasoning_text")


class InputImage(Picture):
    known: ClassVar[str] = ", ".join(TEXTS)

    type: Literal["input_image"]
    image_url: Text = Field(description="data:, or http(s) of a server that serve.image_domains lists")
    detail: Detail | None = Field(None, description=DETAIL)
    file_id: Annotated[None, must_be_null("no file is stored here; send image_url with a data: URL")] = None
    prompt_cache_breakpoint: JSONObject | None = Field(None, description=HINT)

    @property
    def given(self) -> tuple[str, str | None]:
        return self.image_url, self.detail


TextContent = Annotated[
    InputText | RefusalPart | InputImage,
    Discriminator("type"),
    of_types(*TEXTS, image="input_image", also=("refusal",)),
]
Content = Annotated[Annotated[Text, Tag("a-text")] | Annotated[List[TextContent], Tag("a-list")], Discriminator(tag_of)]


class Message(Body):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: Id | None = Field(None, description=LABEL)
    status: Status | None = Field(None, description=LABEL)
    phase: Word | None = Field(None, description=LABEL)


class FunctionCall(Body):
    type: Literal["function_call"]
    call_id: Id
    name: str = Field(max_length=256)
    arguments: Text
    parsed_arguments: JSONObject | None = Field(None, description=LABEL)
    namespace: Id | None = Field(None, description="the model reads it before the name")
    caller: JSONObject | None = Field(None, description=LABEL)
    id: Id | None = Field(None, description=LABEL)
    status: Status | None = Field(None, description=LABEL)


class CustomCall(Body):
    type: Literal["custom_tool_call"]
    call_id: Id
    name: str = Field(max_length=256)
    input: Text = Field(description="the model reads it as the argument of that name")
    namespace: Id | None = Field(None, description="the model reads it before the name")
    caller: JSONObject | None = Field(None, description=LABEL)
    id: Id | None = Field(None, description=LABEL)
    status: Status | None = Field(None, description=LABEL)


class CallOutput(Body):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Id
    output: Content = Field(description="a text stands in place of an image that is not read")
    name: Id | None = Field(None, description=LABEL)
    caller: JSONObject | None = Field(None, description=LABEL)
    id: Id | None = Field(None, description=LABEL)
    status: Status | None = Field(None, description=LABEL)


class Reasoning(Body):
    type: Literal["reasoning"]
    content: List[InputText] | None = None
    summary: List[JSONObject] | None = Field(None, description=LABEL)
    encrypted_content: Text | None = Field(None, description="a label: no other server's reasoning is read")
    id: Id | None = Field(None, description=LABEL)
    status: Status | None = Field(None, description=LABEL)


OUTPUTS = ("function_call_output", "custom_tool_call_output")


def item_type(item: Any) -> str:
    """The type of an input item; a message need not say it."""
    kind = str(item.get("type", "message")) if isinstance(item, dict) else "message"
    return "an-output" if kind in OUTPUTS else kind


def refuse_reference(item: Any) -> Any:
    if isinstance(item, dict) and (item.get("type") == "item_reference" or item.keys() == {"id"}):
        raise PydanticCustomError(
            "reference", "no item is stored here to be referred to; send the items themselves, and store: false"
        )
    return item


Item = Annotated[
    Annotated[Message, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[CustomCall, Tag("custom_tool_call")]
    | Annotated[CallOutput, Tag("an-output")]
    | Annotated[Reasoning, Tag("reasoning")],
    Discriminator(item_type),
    of_types("message", "function_call", "custom_tool_call", *OUTPUTS, "reasoning"),
    BeforeValidator(refuse_reference),
]
Items = Annotated[
    List[Item],
    Field(min_length=1),
    BeforeValidator(partial(read_results, is_result=lambda item: item.get("type") in OUTPUTS)),
]


NOT_STORED: LiteralString = "nothing is stored here; send the whole conversation as input"
Stored = Annotated[None, must_be_null(NOT_STORED)]


def refuse_auto(truncation: Any) -> Any:
    if truncation == "auto":
        raise PydanticCustomError("auto", "nothing is left out of a conversation here; send disabled, and fewer items")
    return truncation


def refuse_background(background: Any) -> Any:
    if background is True:
        raise PydanticCustomError("background", "nothing is stored here to be fetched later; send false, and wait")
    return background


class FunctionTool(Body):
    type: Literal["function"]
    name: str = Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$")
    description: Text | None = None
    parameters: JSONObject | None = None
    strict: bool | None = Field(None, description="a label: a forced call keeps to its schema, a free one may not")


FlatTool = Annotated[
    Annotated[FunctionTool, Tag("a-function")] | Annotated[OtherTool, Tag("a-label")],
    Discriminator(tool_type),
    of_types("function", also=LEFT_OUT, fault=TOOLS),
]


class NamespaceTool(Body):
    """Functions that share a namespace; the model reads each as NAMESPACE__NAME."""

    type: Literal["namespace"]
    name: str = Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$")
    description: Text | None = Field(None, description="the model reads it before that of the first function")
    tools: List[FlatTool] = Field(max_length=512)


def namespace_or_tool(tool: object) -> str:
    return "a-namespace" if type_of(tool) == "namespace" else tool_type(tool)


AnyTool = Annotated[
    Annotated[NamespaceTool, Tag("a-namespace")]
    | Annotated[FunctionTool, Tag("a-function")]
    | Annotated[OtherTool, Tag("a-label")],
    Discriminator(namespace_or_tool),
    of_types("function", also=LEFT_OUT, fault=TOOLS),
]


class FunctionChoice(Body):
    type: Literal["function"]
    name: str = Field(max_length=64)


class NamespaceChoice(Body):
    type: Literal["namespace"]
    name: str = Field(max_length=64)


AnyNamed = Annotated[
    Annotated[NamespaceChoice, Tag("a-namespace")]
    | Annotated[FunctionChoice, Tag("a-function")]
    | Annotated[OtherTool, Tag("a-label")],
    Discriminator(namespace_or_tool),
]


class AllowedFunctions(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: List[AnyNamed] = Field(min_length=1, max_length=512, description="those of the tools that the model reads")


class PlainFormat(Body):
    type: Literal["text", "json_object"]


class SchemaFormat(JSONSchema):
    type: Literal["json_schema"]


class TextOptions(Body):
    format: Annotated[
        Annotated[PlainFormat | SchemaFormat, Discriminator("type")] | None,
        of_types("text", "json_object", "json_schema", fault=FORMATS),
    ] = None
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description=HINT)


class ReasoningOptions(Body):
    effort: Effort | None = Field(None, description="goes to a chat template that reads it, a hint to others")
    max_tokens: Budget | None = Field(None, description="another name of thinking_token_budget")
    context: Word | None = Field(None, description="a hint: the chat template decides which reasoning the model reads")
    summary: Word | None = Field(None, description="a hint: reasoning comes whole, and no summary of it")
    generate_summary: Word | None = Field(None, description=HINT)


class ResponseStreamOptions(Body):
    include_obfuscation: bool | None = Field(None, description=HINT)


class ResponsesRequest(Sampling):
    input: Annotated[
        Annotated[Text, Tag("a-text")] | Annotated[Items, Tag("a-list")],
        Discriminator(tag_of),
    ]
    instructions: Text | None = Field(None, description="a system message in front")
    max_output_tokens: Positive | None = Field(None, description="what remains of the context where nobody says it")
    tools: List[AnyTool] | None = Field(None, max_length=512)
    tool_choice: Annotated[
        Literal["none", "auto", "required"]
        | Annotated[FunctionChoice | AllowedFunctions, Discriminator("type")]
        | None,
        of_types("function", "allowed_tools", fault=CHOICES),
    ] = None
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call")
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    stream_options: ResponseStreamOptions | None = None
    previous_response_id: Id | None = Field(
        None, description="of a stored response, which the input continues; needs serve.http.response_store_bytes"
    )
    conversation: Stored = Field(None, description="is refused: send the whole conversation as input")
    prompt: Annotated[None, must_be_null("no prompt is stored here; send instructions and input")] = None
    background: Annotated[Literal[False] | None, BeforeValidator(refuse_background)] = None
    max_tool_calls: Positive | None = Field(None, description="a label: it counts built-in tools, and none is run here")
    truncation: Annotated[Literal["disabled"] | None, BeforeValidator(refuse_auto)] = None
    include: List[Word] | None = Field(
        None, max_length=16, description=f"{LOGPROBS}; others are hints: an answer has all that there is of them"
    )
    top_logprobs: Count | None = Field(None, description=f"with {LOGPROBS} in include")
