"""Read the images of a conversation while it becomes messages of a chat template.

    images = PromptImages(context.images, num_given, max_images, context.prepare_seconds)
    part = images.read(GivenImage("data:image/png;base64,…", None, "messages", "messages.0.content.1", "image", "text"))
    images.found, images.videos                      # in the order of their reading

Reading takes threads of their own, which `begin_thread` marks: in any other it raises OtherThreadError, and the request
is prepared again in one of them (`Context.in_thread`). So texts do not wait until others' images are decoded.

A template gets {"type": "image"} in place of an image, {"type": "video"} of a video, and writes the token that stands
for it. For a model that reads none, those of tools' results and of answers are a text that says so, and others are
refused.
"""

from __future__ import annotations

import math
import threading
import time
from typing import Any, NamedTuple

from atom.errors import RequestError
from atom.images.reader import ImageReader
from atom.images.types import Image
from atom.images.videos import FPS, Video
from atom.serve.content import IMAGE, VIDEO
from atom.serve.http.errors import FieldError, shown

_thread = threading.local()
NO_FRAMES = "a video has no frames: give their URLs, or data:video/jpeg;base64,FRAME,FRAME,…; files are not read"
PLACE = "place"  # field of a template's part: which image of the conversation it is


class OtherThreadError(Exception):
    """An image is to be read in another thread."""


def begin_thread() -> None:
    """Mark this thread as one that reads images."""
    _thread.reads_images = True


class GivenImage(NamedTuple):
    """An image as a body has it."""

    url: str
    detail: str | None
    field: str  # of the body that has it
    name: str  # of its part, as a path of the body: messages.0.content.1
    type: str  # of the part, in its API
    known: str  # types of parts that the API reads without images
    stays: bool = False  # a client keeps it in its history: in a tool's result, or after one, or in an answer


class GivenVideo(NamedTuple):
    """A video as a body has it."""

    frames: list[str]  # the URL of each
    fps: float | None
    field: str  # and further fields as of `GivenImage`
    name: str
    type: str
    known: str
    stays: bool = False


class PromptImages:
    def __init__(
        self, reader: ImageReader | None = None, num_given: int = 0, limit: int = 0, seconds: float = math.inf
    ) -> None:
        """RequestError if they are too many, with none read.

        reader: of the model; None: it reads no images
        seconds: after which no other image is read, since nobody waits for it
        """
        if reader is not None and num_given > limit:
            raise RequestError(f"a request may have {limit} images (serve.max_images), and this has {num_given}")
        self._reader, self._deadline = reader, time.monotonic() + seconds
        self.found: list[Image] = []
        self.videos: list[Video] = []

    def read(self, given: GivenImage) -> dict[str, Any]:
        """The part of a template's content for an image. FieldError if it cannot be read, OtherThreadError as above.

        One that stays in a client's history, and cannot be read, is a text: the client could not take it out.
        """
        if self._reader is None:
            return stand_in(given, IMAGE)
        self._check_thread()
        try:
            self.found.append(self._reader.read_url(given.url, given.detail))
        except RequestError as error:
            return stand_in(given, IMAGE, error)
        return {"type": "image", PLACE: len(self.found) - 1}

    def read_video(self, given: GivenVideo) -> dict[str, Any]:
        """The part of a template's content for a video, as `read`."""
        if self._reader is None:
            return stand_in(given, VIDEO)
        if not self._reader.takes_videos:
            return stand_in(given._replace(known=f"{given.known}, image_url"), VIDEO)
        if not given.frames:
            return stand_in(given, VIDEO, RequestError(NO_FRAMES))
        frames = []
        for url in given.frames:
            self._check_thread()
            try:
                frames.append(self._reader.read_frame(url, len(given.frames)))
            except RequestError as error:
                return stand_in(given, VIDEO, error)
        try:
            self.videos.append(self._reader.make_video(frames, FPS if given.fps is None else given.fps))
        except RequestError as error:
            return stand_in(given, VIDEO, error)
        return {"type": "video", PLACE: len(self.videos) - 1}

    def _check_thread(self) -> None:
        """OtherThreadError as above; RequestError once nobody waits."""
        if not getattr(_thread, "reads_images", False):
            raise OtherThreadError
        if time.monotonic() > self._deadline:
            raise RequestError("the images of the request take too long")


def stand_in(given: GivenImage | GivenVideo, text: str, error: RequestError | None = None) -> dict[str, Any]:
    """The text for what stays in a client's history, and cannot be read. FieldError for others.

    error: why; None: the model does not read it
    """
    if given.stays:
        return {"type": "text", "text": text}
    unread = f"{given.type} blocks are not supported here (supported: {given.known})"
    raise FieldError(given.field, f"{given.name}: {unread if error is None else shown(str(error))}")


def join_parts(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """A template's content of parts: a text if there is no image, with newlines between neighboring texts."""
    joined: list[dict[str, Any]] = []
    for part in parts:
        if part["type"] == "text" and joined and joined[-1]["type"] == "text":
            joined[-1] = {"type": "text", "text": f"{joined[-1]['text']}\n{part['text']}"}
        else:
            joined.append(part)
    if not joined:
        return ""
    return joined if len(joined) > 1 or joined[0]["type"] != "text" else joined[0]["text"]


def places_of(messages: list[dict[str, Any]], kind: str = "image") -> list[int]:
    """Which images, or videos, the messages of a template have, in their order."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [part[PLACE] for part in parts if part.get("type") == kind]
