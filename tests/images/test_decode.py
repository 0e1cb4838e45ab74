"""Files of images, decoded in a process of its own."""

from __future__ import annotations

import io
import os
import signal
import struct
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from atom.errors import EngineDeadError, RequestError
from atom.images.decode import Decoder
from atom.images.processor import Processor
from atom.process.child_process import start_python

PIL = pytest.importorskip("PIL.Image")


@pytest.fixture(scope="module")
def decoder() -> Iterator[Decoder]:
    with Decoder(max_pixels=1_000_000) as made:
        yield made


PLAIN = Processor(patch=1, frames=1, merge=1, min_pixels=1, max_pixels=1 << 30, token=7)  # patches are pixels


def decode(decoder: Decoder, data: bytes) -> np.ndarray:
    """The pixels u8[height, width, 3] of a file."""
    image = decoder.read(data, PLAIN)
    ((_, height, width),) = image.grids
    return np.frombuffer(image.pixels, np.uint8).reshape(height, width, 3)


def saved(image: object, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)  # type: ignore[attr-defined]
    return file.getvalue()


def draw(*shape: int, dtype: type = np.uint8) -> np.ndarray:
    return np.random.default_rng(len(shape)).integers(0, np.iinfo(dtype).max, shape, dtype, endpoint=True)


def test_formats_without_loss_keep_each_pixel(decoder: Decoder) -> None:
    pixels = draw(17, 31, 3)
    for kind, options in (("PNG", {}), ("WEBP", {"lossless": True, "exact": True})):
        assert (decode(decoder, saved(PIL.fromarray(pixels), kind, **options)) == pixels).all()


def test_jpeg_is_what_pillow_makes_of_it(decoder: Decoder) -> None:
    data = saved(PIL.fromarray(draw(64, 40, 3)), "JPEG", quality=90)
    assert (decode(decoder, data) == np.asarray(PIL.open(io.BytesIO(data)))).all()
    grey = saved(PIL.fromarray(draw(8, 5)), "JPEG")
    assert (decode(decoder, grey) == np.asarray(PIL.open(io.BytesIO(grey)))[..., None]).all()


def test_of_an_animation_the_first_frame_counts(decoder: Decoder) -> None:
    frames = [PIL.new("P", (9, 7), color) for color in (0, 1)]
    for frame in frames:
        frame.putpalette([250, 10, 20, 30, 240, 60])
    data = saved(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert (decode(decoder, data) == (250, 10, 20)).all()


def test_what_is_transparent_is_white(decoder: Decoder) -> None:
    pixels = np.zeros((2, 2, 4), np.uint8)
    pixels[0, 0], pixels[1, 1] = (10, 20, 30, 255), (0, 0, 0, 51)
    expected = [[[10, 20, 30], [255] * 3], [[255] * 3, [204] * 3]]
    assert decode(decoder, saved(PIL.fromarray(pixels), "PNG")).tolist() == expected
    paletted = PIL.new("P", (1, 1), 1)
    paletted.putpalette([1, 2, 3, 4, 5, 6])
    assert decode(decoder, saved(paletted, "PNG", transparency=1)).tolist() == [[[255] * 3]]


def test_sixteen_bits_give_their_upper_eight(decoder: Decoder) -> None:
    wide = draw(5, 6, dtype=np.uint16)
    decoded = decode(decoder, saved(PIL.fromarray(wide), "PNG"))
    assert (decoded == (wide >> 8).astype(np.uint8)[..., None]).all()


def test_an_image_is_turned_as_its_camera_says(decoder: Decoder) -> None:
    pixels = draw(4, 6, 3)
    image = PIL.fromarray(pixels)
    exif = image.getexif()
    exif[0x0112] = 6  # the camera was turned: rows run from right to left, from top to bottom
    decoded = decode(decoder, saved(image, "PNG", exif=exif))
    assert decoded.shape == (6, 4, 3) and (decoded == np.rot90(pixels, -1)).all()


def png_header(width: int, height: int) -> bytes:
    """A PNG that says it has so many pixels, and has none."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def test_faults_are_a_line_and_the_next_image_is_decoded(decoder: Decoder) -> None:
    whole = saved(PIL.fromarray(draw(50, 60, 3)), "PNG")
    faults = {
        b"": "the image is none of PNG, JPEG, WEBP, GIF, or is damaged",
        b"GIF89a": "is none of|is damaged",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>": "is none of",
        saved(PIL.fromarray(draw(9, 9, 3)), "BMP"): "is none of",
        whole[: len(whole) // 2]: "the image is damaged, or not all of it is there",
        png_header(30_000, 30_000): "the image has 30000 x 30000 pixels; 1000000 are the most",
        png_header(1000, 1001): "1000 x 1001",
    }
    for data, message in faults.items():
        with pytest.raises(RequestError, match=message):
            decode(decoder, data)
    assert decode(decoder, whole).shape == (50, 60, 3)


def test_a_process_that_ended_or_hangs_is_replaced() -> None:
    data = saved(PIL.fromarray(draw(3, 4, 3)), "PNG")
    with Decoder(seconds=60, num_processes=1) as decoder:
        decode(decoder, data)
        process = decoder._workers[0].process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        with pytest.raises(RequestError, match="the image cannot be decoded"):
            decode(decoder, data)
        assert decode(decoder, data).shape == (3, 4, 3)
        stopped = decoder._workers[0].process
        assert stopped is not None
        os.kill(stopped.pid, signal.SIGSTOP)
        decoder.seconds = 0.2
        with pytest.raises(RequestError, match=r"takes more than 0\.2 s"):
            decode(decoder, data)
        assert stopped.wait() == -signal.SIGKILL
        decoder.seconds = 60
        assert decode(decoder, data).shape == (3, 4, 3)


def test_closing_ends_the_image_that_is_decoded_and_begins_no_other():
    with ThreadPoolExecutor(1) as threads, Decoder(seconds=60.0, num_processes=1) as decoder:
        decoder._workers[0].process = hangs = start_python(
            "import time; print(flush=True); time.sleep(60)", stderr=None
        )
        assert hangs.stdout is not None
        hangs.stdout.read(1)
        decoding = threads.submit(decode, decoder, b"")
        time.sleep(0.1)
        decoder.close()
        with pytest.raises(EngineDeadError, match="atom ends"):
            decoding.result(5.0)
        with pytest.raises(EngineDeadError, match="atom ends"):
            decode(decoder, b"")
