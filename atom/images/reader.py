"""Read the images of prompts: URLs, files or Pillow's objects.

    reader = ImageReader(config)
    image = reader.read_url("data:image/png;base64,…", detail="low")        # of a request
    image = reader.read_local("photo.jpg")                                  # of who runs atom
    tokens, placed = reader.place(tokens, [image], tokenizer)
    video = reader.make_video([reader.read_frame(url, len(urls)) for url in urls], fps=2.0)
    tokens, placed = reader.place(tokens, [image], tokenizer, [video])
    reader.close()

Each read takes milliseconds to seconds, so do it in a thread.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from atom.checkpoint import Tokenizer
from atom.config import Config
from atom.errors import RequestError
from atom.images.decode import Decoder
from atom.images.decode_process import as_rgb
from atom.images.layout import join, lay_out
from atom.images.patches import import_pillow, prepare
from atom.images.processor import Processor, processor_of
from atom.images.prompts import place_images, show_prompt
from atom.images.sources import SourceLimits, read_file, read_source
from atom.images.types import Image, PlacedImage
from atom.images.videos import FPS, Video, find_images, frame_processor, pair_frames, place_videos

LOW_PIXELS = 512 * 512  # of an image whose detail is low, as in OpenAI's API
SPECIAL = re.compile(r"<[^<>{}]+>|\[[^\[\]{}]+\]")  # how special tokens are spelled
URLS = ("data:", "http://", "https://")  # how they begin


class ImageReader:
    def __init__(self, config: Config) -> None:
        """ConfigError without Pillow. config: of a model that reads images"""
        self._vision, self._max_patches = config.model.vision, config.serve.max_patches
        self._video = None if self._vision is None else self._vision.video
        self._decoder = Decoder(config.serve.max_image_pixels)
        self._limits = SourceLimits(tuple(config.serve.image_domains))

    @property
    def processor(self) -> Processor:
        """RequestError if nothing in a prompt stands for an image."""
        assert self._vision is not None, "the model reads images"
        return processor_of(self._vision)

    def read_url(self, url: str, detail: str | None = None) -> Image:
        """The image of a data: URL, or of a server on the list. RequestError says what is wrong with it.

        detail: low makes it small, anything else leaves the size to the model's processor
        """
        return self._read(read_source(url, self._limits), self.processor, detail)

    def read_local(self, image: Any) -> Image:
        """An image of Pillow, an array u8[h, w, 3], the path of a file, or a URL. RequestError as `read_url`."""
        return self._read_local(image, self.processor)

    @property
    def takes_videos(self) -> bool:
        return self._video is not None and self._video.token is not None

    def read_frame(self, url: str, num_frames: int) -> Image:
        """A frame of a video of so many, by a URL as `read_url`."""
        return self._read(read_source(url, self._limits), self._frame_processor(num_frames))

    def read_local_frame(self, image: Any, num_frames: int) -> Image:
        """A frame of a video of so many, in a form of `read_local`."""
        return self._read_local(image, self._frame_processor(num_frames))

    def make_video(self, frames: Sequence[Image], fps: float = FPS) -> Video:
        """The video of frames that were read. RequestError as `pair_frames`."""
        own = self._frame_processor(len(frames))
        assert self._video is not None, "it has a processor of frames"
        return pair_frames(frames, own, self._video, fps)

    def _frame_processor(self, num_frames: int) -> Processor:
        if self._video is None or not self.takes_videos:
            raise RequestError("the model takes no videos")
        return frame_processor(self.processor, self._video, num_frames)

    def _read_local(self, image: Any, processor: Processor) -> Image:
        if isinstance(image, str) and image.startswith(URLS):
            return self._read(read_source(image, self._limits), processor)
        if isinstance(image, str | Path):
            return self._read(read_file(image, self._limits), processor)
        pillow = import_pillow()
        if isinstance(image, pillow.Image):
            return prepare(np.asarray(as_rgb(image)), processor, max_pixels=self._limit(processor))
        if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3:
            return prepare(image, processor, max_pixels=self._limit(processor))
        kind = type(image).__name__
        raise RequestError(f"an image is one of Pillow, an array u8[h, w, 3], a path or a URL, not {kind}")

    def place(
        self,
        tokens: Sequence[int],
        images: Sequence[Image],
        tokenizer: Tokenizer | None,
        videos: Sequence[Video] = (),
    ) -> tuple[list[int], tuple[PlacedImage, ...]]:
        """A prompt's tokens with the placeholders of its images and videos. RequestError if they are more or fewer.

        tokenizer: the checkpoint's, None without one. RequestError if images need a token that it has not
        """

        def decode(ids: list[int]) -> str:
            return tokenizer.decode(ids, skip_special_tokens=False) if tokenizer is not None else ""

        assert self._vision is not None, "the model reads images"
        encode = functools.partial(encode_around, tokenizer=tokenizer)
        expand = functools.partial(lay_out, text=self._vision.text, encode=encode)
        joined, processor = functools.partial(join, encode=encode, decode=decode), self.processor
        if videos and self._video is not None:
            spell = functools.partial(encode_around, tokenizer=tokenizer, template=self._video.text)
            tokens = place_videos(tokens, videos, self._video, spell)
        row_token = processor.row_token
        made, placed = place_images(tokens, images, processor.token, expand, row_token=row_token, join=joined)
        return made, tuple(sorted((*placed, *find_images(made, videos)), key=lambda each: each.start))

    def show(self, tokens: Sequence[int]) -> list[int]:
        """A prompt's tokens with the image token, or that of a video, in place of each placeholder."""
        return show_prompt(tokens, self._vision)

    def close(self) -> None:
        """End the processes that decode."""
        self._decoder.close()

    def _read(self, data: bytes, processor: Processor, detail: str | None = None) -> Image:
        return self._decoder.read(data, processor, self._limit(processor, detail))

    def _limit(self, processor: Processor, detail: str | None = None) -> int:
        """The pixels of the largest image, which a step encodes."""
        encoded = self._max_patches * processor.patch**2
        return min(encoded, LOW_PIXELS) if detail == "low" else encoded


def encode_around(text: str, tokenizer: Tokenizer | None, template: str | None = None) -> list[int]:
    """The ids of text around the rows of an image. RequestError as `check_special`.

    template: of the text, whose special tokens are looked for; None: the text
    """
    known = text if template is None else template
    return check_special(known, tokenizer).encode(text, add_special_tokens=False) if text else []


def check_special(text: str, tokenizer: Tokenizer | None) -> Tokenizer:
    """The tokenizer. RequestError if it has not one of the special tokens of a text."""
    if tokenizer is None:
        raise RequestError("the checkpoint has no tokenizer, which images of this model need")
    missing = next((token for token in SPECIAL.findall(text) if tokenizer.find_id(token) is None), None)
    if missing is not None:
        raise RequestError(f"the checkpoint's tokenizer has no token {missing}, which images of this model need")
    return tokenizer
