"""The process that decodes images: files in on stdin, pixels out on stdout."""

from __future__ import annotations

import io
import resource
import struct
import sys
import warnings
from typing import Any, BinaryIO

TASK = struct.Struct("=QQ")  # bytes of the file, max pixels; the file follows
HEAD = struct.Struct("=BQQ")  # kind, height, width of PIXELS; kind, bytes, 1 of a FAULT, whose text follows
PIXELS, FAULT = 0, 1
BODY = 1 << 20  # bytes that are sent at a time
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
SPARE = 512 << 20  # bytes of memory besides those of pixels
BYTES_A_PIXEL = 24  # of all forms of an image that are in memory at a time
WIDE = ("I;16", "I;16L", "I;16B", "I;16N", "I")  # modes of 16 bits
WHITE = (255, 255, 255, 255)


def main() -> None:
    """Decode until stdin ends."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    limited = 0
    while len(head := source.read(TASK.size)) == TASK.size:
        size, max_pixels = TASK.unpack(head)
        data = source.read(size)
        if max_pixels > limited:
            limit_memory(max_pixels)
            limited = max_pixels
        answer(sink, data, max_pixels)


def limit_memory(max_pixels: int) -> None:
    """Limit the address space of this process to what an image of so many pixels may need."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    limit = used + SPARE + BYTES_A_PIXEL * max_pixels
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard < 0 else min(limit, hard), hard))


def answer(sink: BinaryIO, data: bytes, max_pixels: int) -> None:
    """Write the pixels of a file, or what is wrong with it."""
    try:
        image = decode(data, max_pixels)
    except ValueError as error:
        said = str(error).encode()
        sink.write(HEAD.pack(FAULT, len(said), 1) + said)
    else:
        sink.write(HEAD.pack(PIXELS, image.height, image.width))
        sink.write(image.tobytes())
    sink.flush()


def decode(data: bytes, max_pixels: int) -> Any:
    """The image of a file, as RGB. ValueError says what is wrong with it."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    Image.MAX_IMAGE_PIXELS = None  # ours is checked
    warnings.simplefilter("ignore")  # of metadata
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise ValueError(f"the image is none of {', '.join(FORMATS)}, or is damaged") from None
    except Exception:
        raise ValueError("the image is damaged") from None
    if not 0 < image.width * image.height <= max_pixels:
        raise ValueError(f"the image has {image.width} x {image.height} pixels; {max_pixels} are the most")
    try:
        image.load()
        return as_rgb(ImageOps.exif_transpose(image))
    except MemoryError:
        raise ValueError("the image takes too much memory") from None
    except Exception:
        raise ValueError("the image is damaged, or not all of it is there") from None


def as_rgb(image: Any) -> Any:
    """An image of any mode as RGB: the upper of 16 bits, and white where it is transparent."""
    from PIL import Image

    if image.mode in WIDE:
        import numpy as np

        wide = np.asarray(image).astype(np.int64).clip(0, 65535)
        return Image.fromarray((wide >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        shown = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", shown.size, WHITE), shown).convert("RGB")
    return image.convert("RGB")
