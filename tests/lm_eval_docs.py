"""Documents of tasks of lm_eval that tests write."""

from __future__ import annotations

from typing import Any

DOCS: list[dict[str, Any]] = [
    {"question": "The sky is", "choices": ["blue", "a fish", "7"], "answer": 0},
    {"question": "Two and two are", "choices": ["four", "five", "green"], "answer": 0},
    {"question": "A cat is an", "choices": ["animal", "x", "number"], "answer": 2},
]
