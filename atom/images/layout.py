"""Lay out an image in a prompt: placeholders and the text around them.

    ids = lay_out(image, vision.text, encode)       # [<img>, -17, -18, …, </img>]
    join([5, 107], [108, 7], encode, decode)        # [5, 109, 7], where 107 to 109 are one to three newlines

The text is data of the model file (`ImageTextConfig`); text that follows other text is encoded together with it, as in
the prompts that transformers' processors write.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from atom.config import ImageTextConfig
from atom.images.types import Image, placeholders_of

Encode = Callable[[str], list[int]]  # a tokenizer's, without what it has around every text


def lay_out(image: Image, text: ImageTextConfig, encode: Encode) -> list[int]:
    """The ids that an image takes in a prompt."""
    placeholders, (*heads, tail) = placeholders_of(image), texts_around(image, text)
    patches_a_row = image.num_patches // image.num_rows
    ids, at = list[int](), 0
    for head, (frames, height, width) in zip(heads, image.grids, strict=True):
        num_rows = frames * height * width // patches_a_row
        size = width // math.isqrt(patches_a_row) if text.line else num_rows
        for line in range(num_rows // size):
            ids += encode(text.line if line else head)
            ids += placeholders[at : at + size]
            at += size
    return ids + encode(tail)


def texts_around(image: Image, text: ImageTextConfig) -> list[str]:
    """The text ahead of each grid of an image, and after the last one."""
    lines, columns = image.tiles
    if lines * columns == 1:
        return [text.start + text.whole, text.end]
    texts = [text.start]
    for line in range(1, lines + 1):
        for column in range(1, columns + 1):
            texts[-1] += text.tile.replace("{row}", str(line)).replace("{column}", str(column))
            texts.append("")
        texts[-1] += text.tile_line
    if len(image.grids) > lines * columns:
        texts[-1] += text.thumbnail
        texts.append("")
    texts[-1] += text.end
    return texts


def join(before: list[int], after: Sequence[int], encode: Encode, decode: Callable[[list[int]], str]) -> list[int]:
    """The ids of texts next to each other; if they meet in a run of one white space, its ids are those of all of it.

    So a tokenizer that has tokens for several newlines gives what it gives for the whole text.
    """

    def run_of(ids: Iterable[int]) -> tuple[set[str], int]:
        kind, count = set[str](), 0
        for each in ids:
            letters = set(decode([each])) if each >= 0 else set[str]()
            if len(letters) != 1 or not letters <= {*" \t\n"} or (kind and letters != kind):
                break
            kind, count = letters, count + 1
        return kind, count

    (kind, num_before), (other, num_after) = run_of(reversed(before)), run_of(after)
    if not kind or kind != other:
        return [*before, *after]
    first = len(before) - num_before
    run = decode(before[first:]) + decode(list(after[:num_after]))
    return [*before[:first], *encode(run), *after[num_after:]]
