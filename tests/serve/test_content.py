from __future__ import annotations

from typing import Any

import pytest

from atom.serve.content import stand_in, stand_ins

IMAGE = {"type": "image_url", "image_url": {"file": "a"}}  # without a URL
SEEN = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa"}}
TEXT = {"type": "text", "text": "one"}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ([TEXT, IMAGE, IMAGE], [TEXT] + [{"type": "text", "text": "[image: not shown to this model]"}] * 2),
        ([{"type": "input_image"}], [{"type": "input_text", "text": "[image: not shown to this model]"}]),
        ([{"type": "image"}], [{"type": "text", "text": "[image: not shown to this model]"}]),
        ([{"type": "file"}], [{"type": "text", "text": "[document: not shown to this model]"}]),
        ([{"type": "sound"}, "file", 1, {"type": ["image"]}], [{"type": "sound"}, "file", 1, {"type": ["image"]}]),
        ([SEEN], [SEEN]),
        ("image_url", "image_url"),
        (None, None),
        ({"type": "image_url"}, {"type": "image_url"}),
    ],
    ids=[
        "images",
        "of responses",
        "of messages",
        "files",
        "other parts",
        "an image with its URL",
        "text",
        "nothing",
        "no list",
    ],
)
def test_a_text_stands_in_place_of_each_image_and_the_rest_stays(content: Any, expected: Any):
    assert stand_ins(content, stand_in) == expected
