from __future__ import annotations

import numpy as np

from atom.config import VisionConfig
from atom.images.encoder_inputs import encoder_inputs, find_places
from atom.images.types import Image


def test_patches_that_become_a_row_come_together() -> None:
    places = find_places((1, 2, 4), merge=2)
    assert places[:, :2].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]
    assert places[:, 2:].tolist() == [[2, 4]] * 8


def test_segments_of_all_images_follow_one_another() -> None:
    vision = VisionConfig(channels=1, patch=2)
    images = [Image(1, bytes(range(8)), ((1, 1, 2),), 2), Image(2, bytes(range(8, 20)), ((1, 1, 1), (2, 1, 1)), 3)]
    inputs, order = encoder_inputs(images, vision)
    assert inputs["patches"].tolist() == np.arange(20).reshape(5, 4).tolist()
    assert inputs["starts"].tolist() == [0, 2, 3, 4, 5]
    assert order.tolist() == [0, 1, 2, 3, 4]


def test_each_segment_begins_with_a_class_token() -> None:
    vision = VisionConfig(channels=1, patch=1, class_token=True)
    inputs, order = encoder_inputs(
        [Image(1, bytes([5, 6]), ((1, 1, 2),), 2), Image(2, bytes([7]), ((1, 1, 1),), 1)], vision
    )
    assert inputs["starts"].tolist() == [0, 3, 5]
    assert inputs["class_rows"].tolist() == [0, -1, -1, 0, -1]
    assert inputs["patch_rows"].tolist() == [1, 2, 4]
    assert inputs["patches"][inputs["patch_rows"]].tolist() == [[5], [6], [7]]
    assert inputs["places"][inputs["patch_rows"]].tolist() == [[0, 0, 1, 2], [0, 1, 1, 2], [0, 0, 1, 1]]
    assert order.tolist() == [0, 1, 2]
