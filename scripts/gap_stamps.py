"""Name the places of a step at which ranks read their clocks."""

from enum import IntEnum


class Stamp(IntEnum):
    """What a step is about to do, or has done, when the clock is read."""

    DECODES = 0  # prepares its inputs, those of only decodes
    PROMPTS = 1  # prepares its inputs, prompts among them
    TABLES = 2  # copies entries of block tables, ahead of its inputs
    COPIED = 3  # has copied them
    DRAWN = 4  # has drawn its tokens
