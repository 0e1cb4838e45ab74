from __future__ import annotations

from typing import Any

import pytest

from atom.serve.content import without_images

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa"}}
TEXT = {"type": "text", "text": "one"}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ([TEXT, IMAGE, IMAGE], [TEXT] + [{"type": "text", "text": "[image: not shown to this model]"}] * 2),
        ([{"type": "image"}, "image_url", 1], [{"type": "image"}, "image_url", 1]),
        ("image_url", "image_url"),
        (None, None),
        ({"type": "image_url"}, {"type": "image_url"}),
    ],
    ids=["images", "other parts", "text", "nothing", "no list"],
)
def test_a_text_stands_in_place_of_each_image_and_the_rest_stays(content: Any, expected: Any):
    assert without_images(content, "image_url", "text") == expected
