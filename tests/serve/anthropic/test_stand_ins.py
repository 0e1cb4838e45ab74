from __future__ import annotations

from typing import Any

import pytest
from pydantic_core import PydanticCustomError

from atom.serve.anthropic.stand_ins import readable_text, stand_in


def nested(depth: int) -> Any:
    found: Any = "a"
    for _ in range(depth):
        found = [found]
    return found


def test_a_block_too_deep_for_json_is_refused():
    with pytest.raises(PydanticCustomError, match="deep"):
        stand_in({"type": "search_result", "content": nested(500)})


def test_a_block_that_a_model_reads_stays_as_it_is():
    for block in ({"type": "text", "text": "a"}, {"type": "video"}, "image", None, {"type": ["image"]}):
        assert stand_in(block) is block


def test_what_is_encrypted_or_a_picture_is_not_in_the_text():
    picture = {"type": "image", "source": {"type": "base64", "data": "iVBORw0KGgo="}}
    found = {"pages": [{"encrypted_content": "Eo8C", "title": "é", "shot": picture}], "encrypted_index": 1}
    assert readable_text(found) == '{"pages": [{"title": "é", "shot": "[image: not shown to this model]"}]}'
    assert readable_text([]) == readable_text("") == ""
