"""The error tree: every error that a user can meet.

The message says what happened, where, and what to do, in one line.

    AtomError
    ├── ConfigError        an override, a key, a value
    ├── CheckpointError    a file of the checkpoint, a tensor in it
    ├── UnsupportedError   a thing that atom does not do (yet), here
    ├── RequestError       one request's prompt or sampling values
    ├── PassError          a pass produced a graph that its level does not allow
    ├── ArtifactError      a compiled artifact
    ├── CapacityError      memory
    ├── WeightsIncompleteError  an update of weights has failed half-way: nothing is served
    └── EngineDeadError    the engine has stopped

The first four are the user's to fix and end a command with 2, the others with 1. A server that cannot load its model
ends with 2 for all but the last: the next start would fail alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager


class AtomError(Exception):
    exit_code = 1


class ConfigError(AtomError):
    exit_code = 2


class CheckpointError(AtomError):
    exit_code = 2


class UnreachableError(CheckpointError):
    """The hub gives no answer, and its cache has none."""


class UnsupportedError(AtomError):
    exit_code = 2


class RequestError(AtomError, ValueError):
    exit_code = 2


class PassError(AtomError):
    pass


class ArtifactError(AtomError):
    pass


class CapacityError(AtomError):
    pass


class WeightsIncompleteError(AtomError):
    """An update of weights has failed half-way, so that they are a mixture; nothing is served until it is repeated."""


class EngineDeadError(AtomError):
    pass


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type's name if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means out of memory: of Python, torch, or a GPU's driver.

    torch's CPU allocator and the driver raise plain RuntimeErrors, and a compiled piece turns the error of a Python
    kernel into one that begins with its name.
    """
    names, text = {each.__name__ for each in type(error).__mro__}, str(error)
    return (
        not names.isdisjoint({"MemoryError", "OutOfMemoryError"})
        or text.startswith(("MemoryError: ", "OutOfMemoryError: "))
        or "DefaultCPUAllocator" in text
        or "out of memory" in text
    )


@contextmanager
def naming_a_lack_of_memory(message: str) -> Iterator[None]:
    """Raise CapacityError with this message if this context runs out of memory."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise CapacityError(message) from error


def one_line(error: BaseException | str) -> str:
    """An error's message without line breaks."""
    return re.sub(r"\s*\n\s*", "; ", str(error).strip())
