"""Put the placeholders of images into tokenized prompts.

tokens, placed = place_images([1, 9, 2], [image], token=9)      # [1, -17, -18, …, 2], (PlacedImage(image, 1, 1 + n),)
show_placeholders(tokens, token=9, video_token=8)               # [1, 9, 9, …, 2]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from atom.config import VisionConfig
from atom.errors import RequestError
from atom.images.types import Image, PlacedImage, is_of_video, placeholders_of


def show_placeholders(tokens: Sequence[int], token: int, video_token: int | None = None) -> list[int]:
    """A prompt's tokens with the image token in place of each placeholder, or the video token of a video's.

    video_token: None: videos have none
    """
    of_video = token if video_token is None else video_token
    return [each if each >= 0 else of_video if is_of_video(each) else token for each in tokens]


def show_prompt(tokens: Sequence[int], vision: VisionConfig | None) -> list[int]:
    """A prompt's tokens without placeholders. vision: of the model; None: it reads no images"""
    token = None if vision is None else vision.token if vision.row_token is None else vision.row_token
    if vision is None or token is None:
        return list(tokens)
    return show_placeholders(tokens, token, None if vision.video is None else vision.video.token)


def place_images(
    tokens: Sequence[int],
    images: Sequence[Image],
    token: int,
    expand: Callable[[Image], list[int]] = placeholders_of,
    *,
    row_token: int | None = None,
    join: Callable[[list[int], Sequence[int]], list[int]] = lambda before, after: [*before, *after],
) -> tuple[list[int], tuple[PlacedImage, ...]]:
    """A prompt's tokens with placeholders for each image in place of one image token, in order.

    A prompt that has what transformers' processors write of the images gets the placeholders in place of its image
    tokens. RequestError if the prompt has more or fewer of them than images.

    token: the id of the image token
    expand: gives the ids that an image takes, as of `layout.py`
    row_token: the id that processors write for each row; None: token
    join: joins an image's ids, and what comes after, to the prompt before them
    """
    num_rows = sum(image.num_rows for image in images)
    if row_token not in (None, token) and sum(each == row_token for each in tokens) == num_rows > 0:
        token, expand = row_token, placeholders_of  # the text around them is there
    count = sum(each == token for each in tokens)
    if count not in (len(images), num_rows):
        raise RequestError(
            f"the prompt has {count} image tokens (id {token}) and {len(images)} images; give one for each"
        )
    made: list[int] = []
    placed: list[PlacedImage] = []
    at = 0
    for image in images:
        first, ids = tokens.index(token, at), expand(image)
        start = max(first - next(place for place, each in enumerate(ids) if each < 0), at)
        stop = start + len(ids)
        is_expanded = count == num_rows and list(tokens[start:stop]) == show_placeholders(ids, token)
        if not is_expanded and count != len(images):
            raise RequestError(f"image {len(placed)} takes {len(ids)} tokens; the prompt has others for it")
        if is_expanded:
            made = [*made, *tokens[at:start], *ids]
        else:
            made, stop = join(join(made, tokens[at:first]), ids), first + 1
        placed.append(PlacedImage(image, max(len(made) - len(ids), placed[-1].stop if placed else 0), len(made)))
        at = stop
    return join(made, tokens[at:]), tuple(placed)
