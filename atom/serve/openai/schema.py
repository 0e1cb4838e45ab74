"""Request bodies of the OpenAI routes.

Any other field is refused by name.

    ChatRequest.model_validate({"messages": [{"role": "user", "content": "Hello"}]})

A field that is null counts as left out. Types are strict: a number in quotes is no number. `atom.serve.openai.params`
checks the limits of the configuration.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, LiteralString, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from atom.serve.content import read_results

MAX_TEXT = 1 << 25  # characters of a text; the body has its own limit
MAX_DEPTH = 100  # of JSON in a body, since later readers recurse
MAX_FIELDS = 100  # of an object with fields of any name
MAX_TOKENS = 1024  # in logit_bias or stop_token_ids of a request
BLOCKS: LiteralString = "{given} blocks are not supported here (supported: {known})"
TOOLS: LiteralString = "{given} tools are not supported here; send tools of the type {known}, which the client runs"
PAIRS = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items"))  # of /score
LEFT_OUT = (  # tools of OpenAI's API that no model here is shown: its servers run them, or a call is no function's
    "apply_patch", "code_interpreter", "computer", "computer_use_preview", "custom", "file_search", "image_generation",
    "local_shell", "mcp", "namespace", "programmatic_tool_calling", "shell", "tool_search", "web_search",
    "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11",
)  # fmt: skip
CHOICES: LiteralString = "{given} choices are not supported here (supported: none, auto, required, {known})"
INT_LIMITS = (-(1 << 63), 1 << 64)  # integers that a message to the engine can hold
Text = Annotated[str, Field(max_length=MAX_TEXT)]
Int32 = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]
Count = Annotated[int, Field(ge=0, lt=1 << 31)]
Positive = Annotated[int, Field(ge=1, lt=1 << 31)]
TokenId = Count
Penalty = Annotated[float, Field(ge=-2, le=2)]
T = TypeVar("T")
List = Annotated[list[T], Field(fail_fast=True)]  # only the first wrong item is reported, not a million
Stop = Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]
Word = Annotated[str, Field(max_length=1024)]


def at_most(most: int) -> BeforeValidator:
    """Refuse an object with more fields at once; pydantic would first check each of them."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            sizes = {"count": len(value), "most": most}
            raise PydanticCustomError("fields", "this has {count} fields; it takes at most {most}", sizes)
        return value

    return BeforeValidator(check)


Number = Annotated[float, Field(ge=-(1 << 31), lt=1 << 31)]
Biases = Annotated[dict[Word, Annotated[float, Field(ge=-100, le=100)]], at_most(MAX_TOKENS)]
LABEL = "a label: the answer does not depend on it"
HINT = "a hint: the answer does not depend on it"
BREAKPOINT = "Anthropic's: the prompt up to here is kept from eviction; forms that Anthropic does not have are hints"
EXPLAIN = "prefix_hit of the answer says where the prompt's hit in the prefix cache ended, and why"
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Budget = Annotated[int, Field(ge=-1, lt=1 << 31)]
TAPS = "layers of passes.taps, with last, mean or all; of a list last: the answer has their hidden states"
STEER = "vectors of passes.steer that are added to hidden states, with their scales; of a list 1"
THINKING = "tokens of reasoning, after which it is ended; -1: any number"

Taps = Annotated[dict[Word, Literal["last", "mean", "all"]], at_most(MAX_FIELDS)] | List[Word]
Steer = Annotated[dict[Word, Number], at_most(MAX_FIELDS)] | List[Word]

# fields of generation and embedding requests
ModelName = Annotated[str | None, Field(description="one of the served names; default: the first")]
RequestId = Annotated[
    str | None, Field(max_length=128, pattern=r"^[!-~]+$", description="the answer's id, after its prefix")
]
CacheSalt = Annotated[
    str | None, Field(min_length=1, max_length=1024, description="shares cached prefixes only with its equals")
]
Priority = Annotated[Int32 | None, Field(description="lower ones go first")]
User = Annotated[str | None, Field(max_length=1024, description="goes to the log")]


def plain_json(value: Any) -> Any:
    if fault := find_fault(value):
        raise PydanticCustomError("json", "{fault}", {"fault": fault})
    return value


def find_fault(value: Any) -> str | None:
    """Why a JSON value cannot be written again, or is too deep for the recursion of later readers."""
    level = [value]
    for _ in range(MAX_DEPTH):
        for item in level:
            if isinstance(item, str) and not is_unicode(item):
                return "this holds half a surrogate pair, which is not text"
            if isinstance(item, float) and not math.isfinite(item):
                return "this holds a number that is not finite"
            if isinstance(item, int) and not INT_LIMITS[0] <= item < INT_LIMITS[1]:
                return "this holds a number of more than 64 bits"
        level = [item for each in level for item in parts(each)]
        if not level:
            return None
    return f"this is nested deeper than {MAX_DEPTH} levels"


def parts(value: Any) -> list[Any]:
    return [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []


def is_unicode(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def of_types(
    *known: str, image: str = "", also: tuple[str, ...] = (), fault: LiteralString = BLOCKS
) -> BeforeValidator:
    """Refuse objects of other types by name: documents, sound, and what only the servers of others run.

    image: the type of an image, which some models read
    also: types that pass, but are not offered
    """

    def check(block: object) -> object:
        given = block.get("type") if isinstance(block, dict) else None
        if isinstance(given, str) and given not in (*known, image, *also):
            raise PydanticCustomError("type", fault, {"given": given[:64], "known": offer(known, image)})
        return block

    return BeforeValidator(check)


def offer(known: Sequence[str], image: str) -> str:
    """The types that a refusal names; of images before it is known whether the model reads any."""
    return ", ".join(known) + (f"; {image}, if the model reads images" if image else "")


def must_be_null(fault: LiteralString) -> BeforeValidator:
    """Refuse whatever a field has, with what to do instead; null is left out before."""

    def refuse(value: object) -> None:
        if value is not None:
            raise PydanticCustomError("must_be_null", fault)

    return BeforeValidator(refuse)


def tag_of(content: object) -> str:
    """The form of a content, text or blocks, so that an error is about that form only."""
    return "a-text" if isinstance(content, str) else "a-list"


def type_of(value: object) -> object:
    """The type that an object of a body says, also one that is read."""
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


JSONObject = Annotated[dict[str, Any], AfterValidator(plain_json)]
JSONList = Annotated[list[Any], AfterValidator(plain_json)]
TemplateKwargs = Annotated[dict[Word, bool | Int32 | Number | Word | JSONList | JSONObject], at_most(MAX_FIELDS)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    may_be_left_out: ClassVar[bool] = False  # as if it were `{}`

    @model_validator(mode="before")
    @classmethod
    def read_fields(cls, value: Any) -> Any:
        """Refuse many unknown fields, since each is reported by name, and leave out those that are null."""
        if not isinstance(value, dict):
            return value
        if len(value) > MAX_FIELDS:
            sizes = {"count": len(value), "most": MAX_FIELDS}
            raise PydanticCustomError("fields", "this has {count} fields; no object here takes more than {most}", sizes)
        names = {field.alias or name for name, field in cls.model_fields.items()}
        return {name: given for name, given in value.items() if given is not None or name in names}


class StreamOptions(Body):
    include_usage: bool | None = Field(None, description="a last event with the usage, and usage: null in the others")
    continuous_usage_stats: bool | None = Field(None, description="with include_usage: the usage so far in each event")
    include_obfuscation: bool | None = Field(None, description=HINT)


class JSONSchema(Body):
    name: str = Field(max_length=64, description=LABEL)
    description: Text | None = Field(None, description=LABEL)
    schema_: JSONObject = Field(alias="schema")
    strict: bool | None = Field(None, description="a label: an answer always keeps to its schema")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None


class StructuredOutputs(Body):
    """The constraint of the answer: exactly one of these, under vLLM's names."""

    json_: JSONObject | Text | None = Field(None, alias="json")
    json_object: Literal[True] | None = None
    regex: Text | None = None
    choice: List[Text] | None = None
    grammar: Text | None = None


class RepetitionDetection(Body):
    """A pattern of tokens that ends the answer once it is there so many times in a row, under vLLM's names."""

    max_pattern_size: Count | None = Field(None, description="tokens; 0: none")
    min_pattern_size: Count | None = Field(None, description="tokens; 0: 1")
    min_count: Count | None = Field(None, description="times, 2 or more")


class CacheRetention(Body):
    """How long the KV of the prompt is kept from eviction, as far as the share of its key goes."""

    seconds: float | None = Field(None, gt=0, le=86400, description="after the answer; 300 if it is left out")
    priority: Annotated[int, Field(ge=0, le=100)] | None = Field(
        None, description="those of a lower one are given up first; 50 if it is left out"
    )


class Sampling(Body):
    """How an answer is sampled and scheduled: the fields that chats, completions and responses share."""

    model: ModelName = None
    temperature: float | None = Field(None, ge=0, le=100, description="0: greedy")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=1 << 31, description="0 or -1: all")
    min_p: float | None = Field(None, ge=0, le=1)
    min_tokens: Count | None = Field(None, description="no end before as many")
    stop: Stop | List[Stop] | None = None
    include_stop_str_in_output: bool | None = None
    stop_token_ids: List[TokenId] | None = Field(None, max_length=MAX_TOKENS)
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = Field(None, description="false shows special tokens in the text")
    stream: bool | None = None
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    logit_bias: Biases | None = None
    allowed_token_ids: List[TokenId] | None = Field(None, min_length=1, description="the only tokens of an answer")
    bad_words: List[Stop] | None = Field(None, max_length=MAX_TOKENS, description="texts that an answer may not have")
    request_id: RequestId = None
    cache_salt: CacheSalt = None
    priority: Priority = None
    user: User = None
    structured_outputs: StructuredOutputs | None = None
    thinking_token_budget: Budget | None = Field(None, description=THINKING)
    thinking_budget: Budget | None = Field(None, description="another name of thinking_token_budget")
    repetition_detection: RepetitionDetection | None = None
    cache_retention: CacheRetention | None = None
    taps: Taps | None = Field(None, description=TAPS)
    steer: Steer | None = Field(None, description=STEER)
    explain: bool | None = Field(None, description=EXPLAIN)
    store: bool | None = Field(None, description="a label: nothing is stored")
    metadata: dict[Word, Word] | None = Field(None, max_length=16, description=LABEL)
    client_metadata: JSONObject | None = Field(None, description=LABEL)
    safety_identifier: Word | None = Field(None, description=LABEL)
    service_tier: Word | None = Field(None, description=LABEL)
    prompt_cache_key: Word | None = Field(None, description=f"{HINT}, and only cache_salt separates caches")
    prompt_cache_retention: Word | None = Field(None, description=HINT)
    prompt_cache_options: JSONObject | None = Field(None, description=HINT)


VERSIONS = "weight_versions of a choice: the names of the weights that have sampled its tokens"


class Generation(Sampling):
    """The fields that completions and chats share."""

    stream_options: StreamOptions | None = None
    n: Positive | None = None
    best_of: Positive | None = Field(None, description="answers made, of which the n most likely are returned")
    prompt_logprobs: Count | None = None
    return_token_ids: bool | None = Field(None, description="prompt_token_ids and token_ids next to the texts")
    return_tokens_as_token_ids: bool | None = Field(None, description='logprobs name tokens by number, "token_id:7"')
    return_weight_versions: bool | None = Field(None, description=VERSIONS)
    truncate_prompt_tokens: Positive | None = Field(None, description="the last tokens of the prompt that count")
    response_format: ResponseFormat | None = None
    regex: Text | None = Field(None, description="structured_outputs.regex")
    grammar: Text | None = Field(None, description="structured_outputs.grammar")


class CompletionRequest(Generation):
    prompt: Text | List[Text] | List[TokenId] | List[List[TokenId]] = Field(
        description="all that the model reads: where a text spells a special token, it is that token"
    )
    max_tokens: Count | None = Field(None, description="16 where the server says nothing; 0 is for echo")
    logprobs: Count | None = Field(None, description="most likely tokens to report at each place")
    echo: bool | None = Field(None, description="the text begins with the prompt")
    add_special_tokens: bool | None = Field(None, description="false: a text has only those that it spells")
    suffix: Annotated[None, must_be_null("nothing is written in front of a given text here; leave it out")] = None


class TextPart(Body):
    type: Literal["text"]
    text: Text
    cache_control: JSONObject | None = Field(None, description=BREAKPOINT)
    prompt_cache_breakpoint: JSONObject | None = Field(None, description=HINT)


class RefusalPart(Body):
    type: Literal["refusal"]
    refusal: Text = Field(description="a text as others")

    @property
    def text(self) -> str:
        return self.refusal


Detail = Literal["auto", "low", "high", "original"]
DETAIL = "low makes an image small; others leave its size to the model"


class MediaPart(Body):
    """A part of a content that is no text, in any API."""

    type: str
    known: ClassVar[str] = "text"  # types of parts that its API reads without images
    _place: tuple[str, str] | None = PrivateAttr(None)  # field of the body, and path to the part, if not as in a chat


class Picture(MediaPart):
    """An image."""

    @property
    def given(self) -> tuple[str, str | None]:
        """Its URL, and its detail."""
        raise NotImplementedError


class ImageURL(Body):
    url: Text = Field(description="data:, or http(s) of a server that serve.image_domains lists")
    detail: Detail | None = Field(None, description=DETAIL)


def url_tag(value: object) -> str:
    return "a-text" if isinstance(value, str) else "an-object"


class ImagePart(Picture):
    type: Literal["image_url"]
    image_url: Annotated[Annotated[Text, Tag("a-text")] | Annotated[ImageURL, Tag("an-object")], Discriminator(url_tag)]
    cache_control: JSONObject | None = Field(None, description=BREAKPOINT)
    prompt_cache_breakpoint: JSONObject | None = Field(None, description=HINT)
    uuid: Word | None = Field(None, description=LABEL)  # as vLLM names an image

    @property
    def given(self) -> tuple[str, str | None]:
        found = self.image_url
        return (found, None) if isinstance(found, str) else (found.url, found.detail)


class Clip(MediaPart):
    """A video, as its frames."""

    @property
    def frames(self) -> list[str]:
        """The URL of each; none of a video that is a file."""
        raise NotImplementedError

    @property
    def rate(self) -> float | None:
        """Frames a second."""
        raise NotImplementedError


FrameRate = Annotated[float, Field(gt=0, le=1000)]
RATE = "frames a second (default: 2)"


class VideoPart(Clip):
    type: Literal["video"]
    video: List[Text] = Field(description="the URL of each frame, as image_url has it")
    fps: FrameRate | None = Field(None, description=RATE)

    @property
    def frames(self) -> list[str]:
        return self.video

    @property
    def rate(self) -> float | None:
        return self.fps


class VideoURL(Body):
    url: Text = Field(description="data:video/jpeg;base64,FRAME,FRAME,…: JPEG files, as vLLM takes them")
    fps: FrameRate | None = Field(None, description=RATE)


class VideoURLPart(Clip):
    type: Literal["video_url"]
    video_url: VideoURL

    @property
    def frames(self) -> list[str]:
        head, *frames = self.video_url.url.split(",")
        if head != "data:video/jpeg;base64":
            return []
        return [f"data:image/jpeg;base64,{frame}" for frame in frames]

    @property
    def rate(self) -> float | None:
        return self.video_url.fps


Parts = List[
    Annotated[
        TextPart | RefusalPart | ImagePart | VideoPart | VideoURLPart,
        Discriminator("type"),
        of_types("text", image="image_url", also=("refusal", "video", "video_url")),
    ]
]
Content = Annotated[Annotated[Text, Tag("a-text")] | Annotated[Parts, Tag("a-list")], Discriminator(tag_of)]


class FunctionCall(Body):
    name: str = Field(max_length=256)
    arguments: Text
    parsed_arguments: JSONObject | None = Field(
        None, description=LABEL
    )  # as OpenAI's SDK sends back what it has parsed


class ToolCallMessage(Body):
    id: str = Field(max_length=256)
    type: Literal["function"] = "function"
    function: FunctionCall
    index: Int32 | None = Field(None, description="the place among the message's calls")


class CustomCall(Body):
    name: str = Field(max_length=256)
    input: Text = Field(description="the model reads it as the argument of that name")


class CustomCallMessage(Body):
    id: str = Field(max_length=256)
    type: Literal["custom"]
    custom: CustomCall
    index: Int32 | None = Field(None, description="the place among the message's calls")

    @property
    def function(self) -> FunctionCall:
        return function_call(self.custom.name, self.custom.input)


def function_call(name: str, input: str) -> FunctionCall:
    """A call of a custom tool, whose input is a text, as that of a function."""
    return FunctionCall.model_construct(name=name, arguments=json.dumps({"input": input}))


def call_type(call: object) -> str:
    return "a-custom" if type_of(call) == "custom" else "a-function"


AnyCall = Annotated[
    Annotated[ToolCallMessage, Tag("a-function")] | Annotated[CustomCallMessage, Tag("a-custom")],
    Discriminator(call_type),
]


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = Field(None, max_length=256)
    tool_calls: List[AnyCall] | None = None
    tool_call_id: str | None = Field(None, max_length=256)
    reasoning_content: Text | None = None
    reasoning: Text | None = Field(None, description="the same, as newer versions of vLLM name it")
    provider_specific_fields: JSONObject | None = Field(None, description="a label, which litellm sets")
    type: Literal["text", "message"] | None = Field(None, description="a label, which lm_eval sets")
    id: Word | None = Field(None, description=LABEL)
    cache_control: JSONObject | None = Field(None, description=BREAKPOINT)
    annotations: List[JSONObject] | None = Field(None, description=LABEL)  # of an answer of OpenAI's, sent back
    parsed: JSONObject | None = Field(None, description=LABEL)  # of an answer that OpenAI's SDK has parsed
    refusal: Text | None = Field(None, description="the content if it has no other")
    audio: Annotated[None, must_be_null("sound is not read here; leave it out")] = None  # of such an answer, too
    function_call: Annotated[None, must_be_null("send tool_calls")] = None  # the same


ChatMessages = Annotated[
    List[ChatMessage],
    Field(min_length=1),
    BeforeValidator(partial(read_results, is_result=lambda message: message.get("role") == "tool")),
]


class Function(Body):
    name: str = Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$")
    description: Text | None = None
    parameters: JSONObject | None = None
    strict: bool | None = Field(None, description="a label: a forced call keeps to its schema, a free one may not")


class Tool(Body):
    type: Literal["function"]
    function: Function
    cache_control: JSONObject | None = Field(None, description=BREAKPOINT)


class OtherTool(BaseModel):
    """A tool that no model here is shown, whatever it has besides its type."""

    type: Literal[LEFT_OUT]  # type: ignore[valid-type]


def tool_type(tool: object) -> str:
    return "a-label" if type_of(tool) in LEFT_OUT else "a-function"


AnyTool = Annotated[
    Annotated[Tool, Tag("a-function")] | Annotated[OtherTool, Tag("a-label")],
    Discriminator(tool_type),
    of_types("function", also=LEFT_OUT, fault=TOOLS),
]


class NamedFunction(Body):
    name: str = Field(max_length=64)


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


AnyNamed = Annotated[
    Annotated[NamedTool, Tag("a-function")] | Annotated[OtherTool, Tag("a-label")], Discriminator(tool_type)
]


class AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: List[AnyNamed] = Field(min_length=1, max_length=512, description="those of the tools that the model reads")


class AllowedChoice(Body):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class Prediction(Body):
    type: Literal["content"]
    content: Text | List[TextPart] = Field(description=HINT)


def refuse_audio(modalities: Any) -> Any:
    if isinstance(modalities, list) and "audio" in modalities:
        raise PydanticCustomError("audio", 'answers are only text here; send ["text"], or leave it out')
    return modalities


class ReasoningLimit(Body):
    """OpenRouter's object."""

    effort: Effort | None = Field(None, description="another name of reasoning_effort")
    max_tokens: Budget | None = Field(None, description="another name of thinking_token_budget")


class ChatRequest(Generation):
    messages: ChatMessages | None = None
    prompt: ChatMessages | None = Field(None, description="another name of messages")
    max_tokens: Positive | None = Field(None, description="what remains of the context where the server says nothing")
    max_completion_tokens: Positive | None = Field(None, description="counts before max_tokens")
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    tools: List[AnyTool] | None = Field(None, max_length=512)
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | Annotated[NamedTool | AllowedChoice, Discriminator("type")] | None,
        of_types("function", "allowed_tools", fault=CHOICES),
    ] = None
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call")
    chat_template_kwargs: TemplateKwargs | None = None
    add_generation_prompt: bool | None = Field(None, description="false: no turn of the assistant is opened")
    continue_final_message: bool | None = Field(
        None, description="the answer goes on where the last message ends; with add_generation_prompt=false"
    )
    add_special_tokens: Literal[False] | None = Field(None, description="a template brings its own")
    reasoning_effort: Effort | None = Field(None, description="goes to a chat template that reads it, a hint to others")
    reasoning: ReasoningLimit | None = None
    modalities: Annotated[List[Literal["text"]], BeforeValidator(refuse_audio)] | None = Field(
        None, min_length=1, max_length=1
    )
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description=HINT)
    prediction: Prediction | None = Field(None, description=HINT)


class PooledRequest(Body):
    """The fields of all requests for embeddings, or for what is computed of them."""

    model: ModelName = None
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, lt=1 << 31, description="the first tokens of an input that count; -1: as many as the server takes"
    )
    request_id: RequestId = None
    cache_salt: CacheSalt = None
    priority: Priority = None
    user: User = None


class EmbeddingRequest(PooledRequest):
    input: Text | List[Text] | List[TokenId] | List[List[TokenId]] = Field(
        description="a text or token ids, or several of these; where a text spells a special token, it is that token"
    )
    encoding_format: Literal["float", "base64"] | None = Field(None, description="base64: float32, little-endian")
    dimensions: Positive | None = Field(None, description="only the first numbers, then normalized")
    normalize: bool | None = Field(None, description="the server's serve.pooler_config.normalize where it is left out")
    use_activation: bool | None = Field(None, description="another name of normalize")
    add_special_tokens: bool | None = Field(None, description="false: a text has only those that it spells")


class PoolingRequest(EmbeddingRequest):
    task: Literal["embed", "classify"] | None = Field(None, description="null: classify if the model has labels")


class ClassifyRequest(PooledRequest):
    input: Text | List[Text] | List[TokenId] | List[List[TokenId]] = Field(
        description="a text or token ids, or several of these; where a text spells a special token, it is that token"
    )
    add_special_tokens: bool | None = Field(None, description="false: a text has only those that it spells")


class ComparisonRequest(PooledRequest):
    max_tokens_per_query: Count | None = Field(None, description="the first tokens of a query that count; 0: all")
    max_tokens_per_doc: Count | None = Field(None, description="the first tokens of a document that count; 0: all")
    instruction: Text | None = Field(None, description="of a reranker's template: what to look for")
    chat_template_kwargs: TemplateKwargs | None = Field(None, description="variables of a reranker's template")


class ScoreRequest(ComparisonRequest):
    """Two fields with a text or a list each, by one of the pairs of names."""

    text_1: Text | List[Text] | None = Field(None, description="a text, or as many as text_2 has")
    text_2: Text | List[Text] | None = None
    data_1: Text | List[Text] | None = Field(None, description="the same under other names")
    data_2: Text | List[Text] | None = None
    queries: Text | List[Text] | None = Field(None, description="the same under other names")
    documents: Text | List[Text] | None = None
    items: Text | List[Text] | None = Field(None, description="another name of documents")

    @property
    def compared(self) -> dict[str, str | list[str]]:
        """The fields that are there, in the order of `PAIRS`."""
        values = {name: getattr(self, name) for name in dict.fromkeys(name for pair in PAIRS for name in pair)}
        return {name: value for name, value in values.items() if value is not None}

    @model_validator(mode="after")
    def check_pair(self) -> ScoreRequest:
        if tuple(self.compared) not in PAIRS:
            raise PydanticCustomError("pair", "give text_1 and text_2, or queries and documents, and no other texts")
        return self


class RerankText(Body):
    """A document of Jina's and Cohere's older API."""

    text: Text


class RerankRequest(ComparisonRequest):
    query: Text
    documents: List[Text | RerankText]
    top_n: Count | None = Field(None, description="only the documents with the highest scores; 0: all")
    return_documents: bool | None = Field(None, description="false: results have no document, only its index")


class TokenizeRequest(Body):
    model: str | None = None
    prompt: Text | None = Field(None, description="where it spells a special token, it is that token")
    messages: ChatMessages | None = None
    tools: List[AnyTool] | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    add_generation_prompt: bool | None = Field(None, description="as in a chat")
    continue_final_message: bool | None = Field(None, description="as in a chat")
    add_special_tokens: bool | None = Field(None, description="of a prompt; a template brings its own")
    return_token_strs: bool | None = Field(None, description="token_strs next to the ids, as in the vocabulary")


class LoadAdapterRequest(Body):
    lora_name: Word = Field(min_length=1, description="what requests call it as their model")
    lora_path: Text = Field(min_length=1, description="its folder on the server")


class UnloadAdapterRequest(Body):
    lora_name: Word = Field(min_length=1)
    lora_int_id: int | None = Field(None, description="ignored: the name counts")


class AbortRequest(Body):
    request_ids: List[Word] | None = Field(None, description="the `id` of each answer; all requests without any")


class VersionRequest(Body):
    new_version: Word = Field(description="the name of the weights")


class TransferRequest(Body):
    init_info: JSONObject = Field(description="as vLLM's weight transfer engines take it")


class UpdateRequest(Body):
    update_info: JSONObject = Field(description="as vLLM's weight transfer engines take it, or with shared_memory")


class FinishRequest(Body):
    may_be_left_out: ClassVar[bool] = True

    weight_version: Word | None = Field(None, description="the name of the weights; else the number of updates so far")


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: List[TokenId]


class ModelRequest(Body):
    model: Text = Field(min_length=1)
