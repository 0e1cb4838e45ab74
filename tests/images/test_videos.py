"""Frames of videos against transformers' Qwen2-VL and Qwen3-VL: sizes, patches, times, what a prompt has of them."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from atom.config import VideoConfig
from atom.errors import RequestError
from atom.images.patches import prepare
from atom.images.processor import NO_LIMIT, Processor
from atom.images.prompts import show_placeholders
from atom.images.types import placeholder
from atom.images.videos import FPS, Video, find_images, frame_processor, pair_frames, place_videos

PIL = pytest.importorskip("PIL.Image")
PROCESSOR = Processor(patch=16, frames=2, merge=2, min_pixels=65536, max_pixels=16777216, token=9)
FORM = VideoConfig(8, "<{seconds:.1f} seconds>S{rows}E", min_pixels=4 * 64 * 64, max_pixels=6 * 160 * 160)
BY_FRAME = VideoConfig(8, min_pixels=2 * 64 * 64, max_pixels=160 * 160, pixels_of="frame", time="index")
QWEN2, QWEN3 = "transformers.models.qwen2_vl", "transformers.models.qwen3_vl"


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of transformers' video processors, without torchvision, which only resizes."""
    importlib.import_module("transformers")  # which sees that torchvision is not there
    inner = SimpleNamespace(functional=SimpleNamespace())
    stubs = {"": SimpleNamespace(transforms=SimpleNamespace(v2=inner)), ".transforms.v2": inner}
    for name, stub in (stubs | {".transforms.v2.functional": inner.functional}).items():
        monkeypatch.setitem(sys.modules, f"torchvision{name}", stub)
    return [importlib.import_module(f"{each}.video_processing_{each.rpartition('.')[2]}") for each in (QWEN2, QWEN3)]


def draw(num_frames: int, height: int, width: int) -> list[np.ndarray]:
    random = np.random.default_rng(num_frames * 100 + height)
    return list(random.integers(0, 256, (num_frames, height, width, 3), np.uint8))


def prepare_video(
    frames: list[np.ndarray], fps: float = FPS, max_pixels: int = NO_LIMIT, form: VideoConfig = FORM
) -> Video:
    own = frame_processor(PROCESSOR, form, len(frames))
    return pair_frames([prepare(frame, own, max_pixels=max_pixels) for frame in frames], own, form, fps)


def encode(text: str) -> list[int]:
    return [ord(each) for each in text]


@pytest.mark.parametrize(
    ("num_frames", "height", "width"), [(2, 64, 96), (4, 20, 90), (5, 300, 200), (6, 160, 160), (7, 41, 33)]
)
def test_patches_are_those_of_transformers(num_frames: int, height: int, width: int, theirs: Any) -> None:
    frames, (qwen2, qwen3) = draw(num_frames, height, width), theirs
    cases = (
        (qwen2, qwen2.Qwen2VLVideoProcessor, BY_FRAME, ()),
        (qwen3, qwen3.Qwen3VLVideoProcessor, FORM, (num_frames,)),
    )
    for module, processor, form, counted in cases:
        limits = {"min_pixels": form.min_pixels, "max_pixels": form.max_pixels}
        rows, columns = module.smart_resize(*counted, height, width, factor=32, **limits)
        resized = [PIL.fromarray(each).resize((columns, rows), PIL.Resampling.BICUBIC) for each in frames]
        stacked = torch.from_numpy(np.stack([np.asarray(each) for each in resized])).permute(0, 3, 1, 2)
        expected, *grid = processor.patchify(None, stacked[None], 16, 2, 2)
        video = prepare_video(frames, form=form)
        assert [each.grids for each in video.images] == [((1, *grid[1:]),)] * grid[0]
        made = b"".join(each.pixels for each in video.images)
        assert torch.equal(torch.frombuffer(bytearray(made), dtype=torch.uint8).view(expected[0].shape), expected[0])


@pytest.mark.parametrize(("num_frames", "fps"), [(4, 2.0), (5, 3.0), (2, 0.1)])
def test_a_prompt_has_the_text_of_transformers(num_frames: int, fps: float) -> None:
    processing = importlib.import_module(f"{QWEN3}.processing_qwen3_vl").Qwen3VLProcessor
    video = prepare_video(draw(num_frames, 64, 64), fps)
    (_, height, width), (first, *_) = video.images[0].grids[0], video.images
    own = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2), video_token="V", vision_start_token="S",
        vision_end_token="E", _calculate_timestamps=lambda *args: processing._calculate_timestamps(None, *args),
    )  # fmt: skip
    given = {
        "video_grid_thw": np.array([[len(video.images), height, width]]),
        "video_metadata": [SimpleNamespace(fps=fps, frames_indices=list(range(num_frames)))],
    }
    expected = processing.replace_video_token(own, given, 0)
    tokens = place_videos([1, ord("S"), 8, ord("E"), 2], [video], FORM, encode)
    assert (tokens[0], tokens[-1]) == (1, 2), "the marks around the video token are left out"
    assert "".join("V" if each < 0 else chr(each) for each in tokens[1:-1]) == expected
    placed = find_images(tokens, [video])
    assert [each.image for each in placed] == list(video.images)
    still = placeholder(prepare(draw(1, 64, 64)[0], PROCESSOR).digest, 0)
    shown = show_placeholders([still, *tokens], token=9, video_token=8)
    assert shown == [9, *(8 if each < 0 else each for each in tokens)]
    assert tokens[placed[0].start : placed[0].stop] == [placeholder(first.digest, row) for row in range(first.num_rows)]


def test_a_video_token_without_marks_leaves_its_neighbours() -> None:
    video, start, end = prepare_video(draw(2, 64, 64)), ord("S"), ord("E")
    whole = place_videos([start, 8, end], [video], FORM, encode)
    assert place_videos([8], [video], FORM, encode) == whole
    assert place_videos([1, 8, 2], [video], FORM, encode) == [1, *whole, 2]
    assert place_videos([start, 8, 8, end, 2], [video, video], FORM, encode) == [*whole, *whole, 2]


@pytest.mark.parametrize(("fps", "rate"), [(2.0, 4.0), (1.0, 2.0), (3.0, 2.0), (30.0, 2.0), (0.01, 25.0), (7.0, 5.0)])
def test_times_are_positions_of_the_first_code(fps: float, rate: float) -> None:
    form = VideoConfig(8, pixels_of="frame", time="seconds", tokens_per_second=rate)
    video = prepare_video(draw(12, 64, 64), fps, form=form)
    expected = (torch.arange(6) * (2 / fps) * rate).long().tolist()  # as vLLM's get_mrope_input_positions
    assert [each.in_video for each in video.images] == list(enumerate(expected))
    tokens = place_videos([5, 8, 6], [video], form, encode)
    assert (tokens[0], tokens[-1], len(tokens)) == (5, 6, 2 + 6 * video.images[0].num_rows), "the marks stay"


def test_equal_frames_at_other_times_are_other_images() -> None:
    (frame,) = draw(1, 64, 64)
    form = VideoConfig(8, pixels_of="frame", time="seconds", tokens_per_second=2.0)
    first, other = (prepare_video([frame] * 4, fps, form=form) for fps in (1.0, 2.0))
    assert first.images[0] == other.images[0] and first.images[1].pixels == other.images[1].pixels
    assert len({each.digest for each in (*first.images, *other.images)}) == 3
    for fps in (1e-7, 1e-300, 5e-324):
        with pytest.raises(RequestError, match="seconds, too far apart for the model; raise fps"):
            prepare_video([frame] * 4, fps, form=form)


def test_equal_videos_are_found_one_after_the_other() -> None:
    (frame,) = draw(1, 64, 64)
    video = prepare_video([frame] * 4)
    still = prepare(frame, frame_processor(PROCESSOR, FORM, 4))
    assert video.images[0] == video.images[1] and video.images[0].pixels == still.pixels
    assert video.images[0].digest != still.digest, "else its placeholders may be those of a still image ahead"
    placed = find_images(place_videos([5, 8, 6, 5, 8, 6], [video, video], FORM, encode), [video, video])
    assert len({each.start for each in placed}) == 4 and sorted(placed, key=lambda each: each.start) == list(placed)


@pytest.mark.parametrize(
    ("frames", "fps", "says"),
    [
        (draw(1, 64, 64), 2.0, r"a video has too few frames \(1\); give 2 or more, or an image"),
        ([*draw(1, 64, 64), *draw(1, 64, 128)], 2.0, "the frames of a video differ in size"),
        (draw(2, 64, 64), 0.0, r"fps=0\.0 is not above 0"),
        (draw(2, 1, 300), 2.0, "no side may be over 200 times the other"),
    ],
)
def test_frames_that_are_no_video_are_refused(frames: Any, fps: float, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        prepare_video(frames, fps)


def test_each_video_has_a_token() -> None:
    video = prepare_video(draw(2, 64, 64))
    for tokens, videos in (([1, 8, 2], []), ([1, 2], [video])):
        with pytest.raises(RequestError, match=r"video tokens \(id 8\) and [01] videos; give one for each"):
            place_videos(tokens, videos, FORM, lambda _: [])


def test_a_step_encodes_a_pair_of_frames() -> None:
    video = prepare_video(draw(4, 500, 500), max_pixels=64 * 64)
    assert {each.num_patches for each in video.images} == {16}
