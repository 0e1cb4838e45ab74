"""The process that decodes images: files in on stdin, patches out on stdout."""

from __future__ import annotations

import io
import resource
import struct
import sys
import warnings
from typing import Any, BinaryIO, NamedTuple

import msgspec
import numpy as np

from atom.errors import RequestError
from atom.images.patches import make_patches
from atom.images.processor import Processor
from atom.images.types import Image

TASK = struct.Struct("=QQ")  # bytes of an Order and of a file, which follow
HEAD = struct.Struct("=?Q")  # whether it is an Image, and the bytes of it or of a fault's text, which follow
BODY = 1 << 20  # bytes that are sent at a time
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
SPARE = 512 << 20  # bytes of memory besides those of pixels
BYTES_A_PIXEL = 24  # of all forms of an image that are in memory at a time
WIDE = ("I;16", "I;16L", "I;16B", "I;16N", "I")  # modes of 16 bits
WHITE = (255, 255, 255, 255)


class Order(NamedTuple):
    """What is to be done with a file."""

    max_pixels: int  # that it may have
    processor: Processor
    limit: int  # pixels of what is made of it, a further limit than the processor's


def main() -> None:
    """Decode until stdin ends."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    limited = 0
    while len(head := source.read(TASK.size)) == TASK.size:
        sizes = TASK.unpack(head)
        order = msgspec.msgpack.decode(source.read(sizes[0]), type=Order)
        data = source.read(sizes[1])
        if order.max_pixels > limited:
            limit_memory(order.max_pixels)
            limited = order.max_pixels
        answer(sink, data, order)


def limit_memory(max_pixels: int) -> None:
    """Limit the address space of this process to what an image of so many pixels may need."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    limit = used + SPARE + BYTES_A_PIXEL * max_pixels
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard < 0 else min(limit, hard), hard))


def answer(sink: BinaryIO, data: bytes, order: Order) -> None:
    """Write the patches of a file, or what is wrong with it."""
    try:
        image = read(data, order)
    except RequestError as error:
        is_image, said = False, str(error).encode()
    else:
        is_image, said = True, msgspec.msgpack.encode(image)
    sink.write(HEAD.pack(is_image, len(said)) + said)
    sink.flush()


def read(data: bytes, order: Order) -> Image:
    """The patches of a file. RequestError says what is wrong with it."""
    try:
        pixels = np.asarray(decode(data, order.max_pixels))
        return make_patches(pixels, order.processor, order.limit)
    except MemoryError:
        raise RequestError("the image takes too much memory") from None


def decode(data: bytes, max_pixels: int) -> Any:
    """The image of a file, as RGB. RequestError says what is wrong with it."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    Image.MAX_IMAGE_PIXELS = None  # ours is checked
    warnings.simplefilter("ignore")  # of metadata
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise RequestError(f"the image is none of {', '.join(FORMATS)}, or is damaged") from None
    except Exception:
        raise RequestError("the image is damaged") from None
    if not 0 < image.width * image.height <= max_pixels:
        raise RequestError(f"the image has {image.width} x {image.height} pixels; {max_pixels} are the most")
    try:
        image.load()
        return as_rgb(ImageOps.exif_transpose(image))
    except MemoryError:
        raise
    except Exception:
        raise RequestError("the image is damaged, or not all of it is there") from None


def as_rgb(image: Any) -> Any:
    """An image of any mode as RGB: the upper of 16 bits, and white where it is transparent."""
    from PIL import Image

    if image.mode in WIDE:
        wide = np.asarray(image).astype(np.int64).clip(0, 65535)
        return Image.fromarray((wide >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        shown = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", shown.size, WHITE), shown).convert("RGB")
    return image.convert("RGB")
