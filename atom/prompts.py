"""Prompts of the Python engines, in the forms that vLLM takes.

prompts_of("Hello")                                              # [SaltedPrompt("Hello")]
prompts_of([{"prompt_token_ids": [1, 2], "cache_salt": "me"}])   # [SaltedPrompt([1, 2], b"me")]
prompts_of({"prompt": "<image>What is it?", "multi_modal_data": {"image": "photo.jpg"}})
prompts_of({"prompt": "<video>What happens?", "multi_modal_data": {"video": (["0.jpg", "1.jpg"], {"fps": 2})}})
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as List
from typing import Any, NamedTuple

from atom.checkpoint import Tokenizer
from atom.errors import RequestError
from atom.images.reader import ImageReader
from atom.images.types import PlacedImage
from atom.images.videos import FPS, Video
from atom.pair_prompts import PairTemplate
from atom.runtime.requests.vocabulary import Vocabulary

Prompt = str | list[int] | Mapping[str, Any]  # a mapping has one of PROMPT_KEYS, and maybe SALT_KEY, as in vLLM
PROMPT_KEYS = ("prompt", "prompt_token_ids")
SALT_KEY = "cache_salt"  # a text: prompts of different salts share no cached prefix
IMAGES_KEY = "multi_modal_data"  # {"image": one or a list}: of Pillow, an array u8[h, w, 3], a path, or a URL
VIDEO_KEY = "video"  # in it, one or a list: a list of images, an array u8[frames, h, w, 3], or a pair with FPS_KEY
FPS_KEY = "fps"  # in a pair's {"fps": 2.0}: frames a second
KEYS = (*PROMPT_KEYS, SALT_KEY, IMAGES_KEY)
IMAGE_PARTS = ("image_url", "image_pil", "image")  # types of parts, and of the field that has the image
VIDEO_PART = "video"  # type of a part, and of the field that has the frames


class GivenVideo(NamedTuple):
    """A video of a prompt."""

    frames: List[Any]  # as images are given
    fps: float | None  # frames a second; None: nothing says it


class SaltedPrompt(NamedTuple):
    """A prompt, read from any of its forms."""

    content: Any  # a text or token ids, checked by the engine
    salt: bytes = b""  # of prefix caches
    images: tuple[Any, ...] = ()  # as they were given
    videos: tuple[GivenVideo, ...] = ()

    @property
    def has_images(self) -> bool:
        return bool(self.images or self.videos)


def is_message(given: Any) -> bool:
    return isinstance(given, Mapping) and "role" in given


def encode_conversations(
    tokenizer: Tokenizer | None,
    messages: Any,
    *,
    chat_template: str | None,
    add_generation_prompt: bool,
    continue_final_message: bool,
    tools: list[dict[str, Any]] | None,
    chat_template_kwargs: Mapping[str, Any] | None,
) -> list[Prompt]:
    """The prompt of a conversation, or of each of a list; the arguments are those of `LLMEngine.chat`.

    It is its token ids, with images a mapping that has them and the images.
    """
    if continue_final_message and add_generation_prompt:
        raise RequestError("continue_final_message=True needs add_generation_prompt=False")
    if tokenizer is None:
        raise RequestError("the checkpoint has no tokenizer; chat needs one")
    if chat_template is not None:
        tokenizer = tokenizer.with_template(chat_template)
    if not messages:
        raise RequestError("messages is empty; give at least one message")
    conversations: list[Any] = (
        [messages] if isinstance(messages, str | Mapping) or is_message(messages[0]) else messages
    )
    for each in conversations:
        if not isinstance(each, list | tuple) or not each or not all(map(is_message, each)):
            raise RequestError(f'{each!r:.200} is no conversation; give [{{"role": "user", "content": …}}]')
    values = {**(chat_template_kwargs or {}), "tools": tools, "add_generation_prompt": add_generation_prompt}
    return [encode_conversation(tokenizer, each, continue_final_message, values) for each in conversations]


def encode_conversation(
    tokenizer: Tokenizer, messages: Any, is_continued: bool = False, values: Mapping[str, Any] | None = None
) -> Prompt:
    """The prompt of one conversation; the template gets {"type": "image"} for each of its images, and so of videos.

    values: variables of the template
    """
    images, videos, shown, plain = list[Any](), list[Any](), list[dict[str, Any]](), list[Any]()
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            message = message | {"content": [take_video(take_image(part, images), videos) for part in content]}
        plain.append(message)
    _, tokens = tokenizer.prepare_chat(plain, is_continued=is_continued, shown=shown.extend, **(values or {}))
    if not (images or videos):
        return tokens
    contents = [message["content"] for message in shown if isinstance(message.get("content"), list)]
    parts = [part for content in contents for part in content]
    given = {
        kind: [found[part["place"]] for part in parts if part.get("type") == kind]
        for kind, found in (("image", images), (VIDEO_KEY, videos))
    }
    return {"prompt_token_ids": tokens, IMAGES_KEY: given}


def take_image(part: Any, images: list[Any]) -> Any:
    """The part of a template's content in place of one with an image, which is added to the list; others unchanged."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in IMAGE_PARTS:
        return part
    given = next((part[name] for name in (kind, "image", "url", "path") if part.get(name) is not None), None)
    images.append(given["url"] if isinstance(given, Mapping) and "url" in given else given)
    return {"type": "image", "place": len(images) - 1}


def take_video(part: Any, videos: list[Any]) -> Any:
    """As `take_image`, of a video, whose part may have FPS_KEY."""
    if not isinstance(part, Mapping) or part.get("type") != VIDEO_PART:
        return part
    rate = {} if part.get(FPS_KEY) is None else {FPS_KEY: part[FPS_KEY]}
    videos.append((part.get(VIDEO_PART), rate))
    return {"type": "video", "place": len(videos) - 1}


def place_prompt(
    prompt: SaltedPrompt, reader: ImageReader | None, vocabulary: Vocabulary
) -> tuple[Any, tuple[PlacedImage, ...]]:
    """What an engine takes of a prompt: its content, and its images. RequestError if they cannot be read.

    reader: of the model; None: it reads no images
    vocabulary: which tokenizes the prompt, and what stands around images
    """
    if not prompt.has_images:
        return prompt.content, ()
    if reader is None:
        raise RequestError("multi_modal_data: this model reads no images; a model with a tower needs serve.images=true")
    images = [reader.read_local(each) for each in prompt.images]
    videos = [read_video(reader, each) for each in prompt.videos]
    return reader.place(vocabulary.tokenize(prompt.content), images, vocabulary.tokenizer, videos)


def read_video(reader: ImageReader, video: GivenVideo) -> Video:
    frames = [reader.read_local_frame(each, len(video.frames)) for each in video.frames]
    return reader.make_video(frames, FPS if video.fps is None else video.fps)


def scored_prompts(
    data_1: Prompt | List[Prompt], data_2: Prompt | List[Prompt]
) -> tuple[list[SaltedPrompt], list[SaltedPrompt]]:
    """The prompts of `LLMEngine.score`. RequestError if they make no pairs, or have images."""
    first, second = pooled_prompts(data_1), pooled_prompts(data_2)
    if not second or len(first) not in (1, len(second)):
        raise RequestError(f"data_1 has {len(first)} prompts and data_2 {len(second)}; give 1 or as many, and not none")
    return first, second


def joined_pairs(
    first: List[SaltedPrompt],
    second: List[SaltedPrompt],
    template: PairTemplate | None,
    values: Mapping[str, Any] | None = None,
) -> list[SaltedPrompt]:
    """The prompts that a classifier scores pairs by. RequestError for a text with token ids.

    first: one, or one for each of second
    template: of texts; None: both in a row
    values: variables of the template
    """
    if template is None and values:
        raise RequestError("chat_template_kwargs: no template makes one prompt of a pair; give chat_template")
    pairs = zip(list(first) * len(second) if len(first) == 1 else first, second, strict=True)
    made = []
    for one, other in pairs:
        kinds = {type(one.content), type(other.content)}
        if kinds not in ({str}, {list}):
            raise RequestError("a pair is two texts, or two lists of token ids")
        if template is not None and isinstance(one.content, str):
            made.append(SaltedPrompt(template.encode(one.content, other.content, values), one.salt))
        else:
            made.append(SaltedPrompt(one.content + other.content, one.salt))
    return made


def adapters_of(adapters: str | List[str | None] | None, num_prompts: int) -> list[str | None]:
    """The adapter of each prompt. RequestError if they are not as many."""
    names = [adapters] * num_prompts if isinstance(adapters, str | None) else list(adapters)
    if len(names) != num_prompts:
        raise RequestError(f"{len(names)} adapters for {num_prompts} prompts; give one, or one for each")
    return names


def prompts_of(given: Prompt | List[Prompt]) -> list[SaltedPrompt]:
    """The prompts of one text or mapping, or of a list. RequestError names a wrong key."""
    many: Any = [given] if isinstance(given, str | Mapping) else given
    return [prompt_of(each) for each in many]


def pooled_prompts(given: Prompt | List[Prompt]) -> list[SaltedPrompt]:
    """The prompts of embeddings, labels and scores. RequestError as `prompts_of`, and for images."""
    prompts = prompts_of(given)
    if any(each.has_images for each in prompts):
        raise RequestError(f"{IMAGES_KEY}: embeddings, labels and scores are of text only; leave it out")
    return prompts


def prompt_of(given: Any) -> SaltedPrompt:
    """Read a prompt in one of vLLM's forms."""
    if not isinstance(given, Mapping):
        return SaltedPrompt(given)
    contents = [given[key] for key in PROMPT_KEYS if key in given]
    if "input_ids" in given:  # what a tokenizer of transformers returns
        raise RequestError(
            "'input_ids' is not a key of a prompt; give only the input_ids, a list of token ids a prompt"
        )
    if wrong := [key for key in given if key not in KEYS]:
        raise RequestError(f"{wrong[0]!r} is not a key of a prompt (supported: {', '.join(KEYS)})")
    if len(contents) != 1:
        raise RequestError(f"a prompt has {len(contents)} of the keys {', '.join(PROMPT_KEYS)}; give one")
    salt = given.get(SALT_KEY)
    if not (salt is None or (isinstance(salt, str) and salt)):
        raise RequestError(f"{SALT_KEY} is {salt!r}; give a text that is not empty, or leave it out")
    return SaltedPrompt(contents[0], (salt or "").encode(), *images_of(given.get(IMAGES_KEY)))


def images_of(given: Any) -> tuple[tuple[Any, ...], tuple[GivenVideo, ...]]:
    """The images and videos of multi_modal_data. RequestError if it has anything else."""
    if given is None:
        return (), ()
    if not isinstance(given, Mapping) or (wrong := [key for key in given if key not in ("image", VIDEO_KEY)]):
        found = repr(wrong[0]) if isinstance(given, Mapping) else repr(given)
        raise RequestError(f"{IMAGES_KEY} has {found:.100}; give {{'image': one or a list}}")
    found = given.get("image", ())
    images = tuple(found) if isinstance(found, list | tuple) else (found,)
    return images, videos_of(given.get(VIDEO_KEY, ()))


def videos_of(given: Any) -> tuple[GivenVideo, ...]:
    """Read a video, or a list of some. RequestError if frames are none."""
    is_one = not isinstance(given, list | tuple) or (given and not is_frames(given[0])) or is_pair(given)
    return tuple(map(video_of, [given] if is_one else given))


def video_of(given: Any) -> GivenVideo:
    frames, more = given if is_pair(given) else (given, {})
    if not is_frames(frames):
        kind = type(frames).__name__
        raise RequestError(f"a video is a list of images, an array u8[frames, h, w, 3], or a pair, not {kind}")
    if wrong := [key for key in more if key != FPS_KEY]:
        raise RequestError(f"a video has {wrong[0]!r:.100}; only {FPS_KEY} is known")
    if not isinstance(fps := more.get(FPS_KEY), int | float | None):
        raise RequestError(f"{FPS_KEY}={fps!r:.100} of a video; give a number")
    return GivenVideo(list(frames), fps)


def is_frames(given: Any) -> bool:
    """Whether it is several frames: a list, or an array of four dims."""
    return isinstance(given, list | tuple) or getattr(given, "ndim", 0) == 4


def is_pair(given: Any) -> bool:
    return isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping)
