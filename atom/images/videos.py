"""Make images of the frames of a video, and put them into tokenized prompts.

    own = frame_processor(processor, form, len(frames))
    video = pair_frames([prepare(frame, own) for frame in frames], own, form, fps=2.0)
    tokens = place_videos(tokens, [video], form, tokenizer.encode)  # 151656 -> "<0.2 seconds>", -17, -18, …
    placed = find_images(tokens, [video])

A patch has two frames, one after the other, so they are one image. A text ahead of it says when they are, as Qwen3-VL
reads videos, or its rows have positions in time (Qwen2-VL, Qwen2.5-VL). Sizes are those of `Qwen3VLVideoProcessor` or
`Qwen2VLVideoProcessor` for frames that are all taken; Pillow resizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from atom.config import VideoConfig
from atom.errors import RequestError
from atom.images.patches import with_digest
from atom.images.processor import Processor
from atom.images.types import Image, PlacedImage, placeholder, placeholders_of

MAX_TIME = 1 << 24  # positions: float32 has all whole numbers up to this
FPS = 2.0  # of frames of which nothing says it: how many Qwen's own processors take


class Video(NamedTuple):
    """The frames of a video, as images of as many frames as a patch has."""

    images: tuple[Image, ...]
    seconds: tuple[float, ...]  # of each image, halfway between its first and its last frame


def frame_processor(processor: Processor, form: VideoConfig, num_frames: int) -> Processor:
    """The processor of each frame of a video. RequestError for one that has too few."""
    if num_frames < processor.frames:
        raise RequestError(f"a video has too few frames ({num_frames}); give {processor.frames} or more, or an image")
    limited = processor._replace(min_pixels=form.min_pixels, max_pixels=form.max_pixels)
    if form.pixels_of == "frame":
        return limited
    return limited._replace(min_edge=processor.side, num_frames=num_frames)


def pair_frames(frames: Sequence[Image], processor: Processor, form: VideoConfig, fps: float = FPS) -> Video:
    """Make a video of frames that were made images each. RequestError for unequal sizes, or times too far apart.

    processor: of the frames
    fps: frames a second
    """
    if len({frame.grids for frame in frames}) > 1:
        raise RequestError("the frames of a video differ in size; give all of one")
    if not fps > 0:
        raise RequestError(f"fps={fps} is not above 0")
    own, times = list(frames), [number / fps for number in range(len(frames))]
    num_spare = -len(frames) % processor.frames
    own, times = own + own[-1:] * num_spare, times + times[-1:] * num_spare
    parts = [slice(first, first + processor.frames) for first in range(0, len(own), processor.frames)]
    places = places_in_time(len(parts), processor.frames / fps, form)
    images = tuple(join_frames(own[part], processor, place) for part, place in zip(parts, places, strict=True))
    return Video(images, tuple((times[part][0] + times[part][-1]) / 2 for part in parts))


def places_in_time(num_images: int, seconds: float, form: VideoConfig) -> list[tuple[int, int]]:
    """`Image.in_video` of each image of a video. RequestError if they are over MAX_TIME positions apart.

    seconds: from one image to the next; times are rounded down, in float32 as in the models' code
    """
    if form.time == "text":
        return [(0, 0)] * num_images
    if form.time == "index":
        return [(number, number) for number in range(num_images)]
    with np.errstate(over="ignore", invalid="ignore"):
        times = np.arange(num_images, dtype=np.float32) * np.float32(seconds) * np.float32(form.tokens_per_second)
    if num_images > 1 and not times[-1] <= MAX_TIME:
        raise RequestError(f"a video has an image each {seconds:g} seconds, too far apart for the model; raise fps")
    return [(number, int(time)) for number, time in enumerate(times)]


def join_frames(frames: Sequence[Image], processor: Processor, in_video: tuple[int, int]) -> Image:
    """One image of as many frames as a patch has, of which each was taken for a still one."""
    first, *_ = frames

    def pixels_of(frame: Image) -> npt.NDArray[np.uint8]:  # [P, C, pixels of a patch]
        repeated = np.frombuffer(frame.pixels, np.uint8)
        return repeated.reshape(frame.num_patches, 3, processor.frames, -1)[:, :, 0]

    pixels = np.stack([pixels_of(frame) for frame in frames], axis=2).tobytes()
    joined = msgspec.structs.replace(first, pixels=pixels, in_video=in_video)
    return with_digest(joined, processor, is_of_video=True)


def place_videos(
    tokens: Sequence[int], videos: Sequence[Video], form: VideoConfig, encode: Callable[[str], list[int]]
) -> list[int]:
    """A prompt's tokens with texts and placeholders in place of each video token and the marks around it.

    Marks are the tokens next to the rows in `form.text`, which the prompt may leave out. RequestError if it has more or
    fewer video tokens than videos.
    """
    starts = [at for at, each in enumerate(tokens) if each == form.token]
    if len(starts) != len(videos):
        given = f"the prompt has {len(starts)} video tokens (id {form.token}) and {len(videos)} videos"
        raise RequestError(f"{given}; give one for each")
    made, last = list[int](), 0
    for start, video in zip(starts, videos, strict=True):
        texts = (form.text.format(rows="\0", seconds=seconds).split("\0") for seconds in video.seconds)
        around = [(encode(before), encode(after)) for before, after in texts]
        opening, closing = around[0]
        begin = start - (start > last and [tokens[start - 1]] == opening[-1:])
        made += tokens[last:begin]
        last = start + 1 + (start + 1 < len(tokens) and [tokens[start + 1]] == closing[:1])
        for image, (before, after) in zip(video.images, around, strict=True):
            made += [*before, *placeholders_of(image), *after]
    return [*made, *tokens[last:]]


def find_images(tokens: Sequence[int], videos: Sequence[Video]) -> tuple[PlacedImage, ...]:
    """Where the images of videos are in a prompt's tokens."""
    placed, at = list[PlacedImage](), 0
    for image in (image for video in videos for image in video.images):
        start = tokens.index(placeholder(image.digest, 0), at)
        at = start + image.num_rows
        placed.append(PlacedImage(image, start, at))
    return tuple(placed)
