"""Read pickles of other processes, in which only listed names are looked up.

    handles = read_pickle(content, lambda module, name: getattr(torch, name) if module == "torch" else None)
    content = write_pickle(handles)

So nothing is run that is not listed. torch and vLLM send pickles; nothing of ours is stored as one.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

Find = Callable[[str, str], Any]  # what a module's name stands for; None: nothing that may be here


class ForbiddenNameError(ValueError):
    """A pickle names what may not be in it."""


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, find: Find) -> None:
        super().__init__(io.BytesIO(content))
        self._find = find

    def find_class(self, module: str, name: str) -> Any:
        if (found := self._find(module, name)) is None:
            raise ForbiddenNameError(f"it names {module}.{name}")
        return found


def read_pickle(content: bytes, find: Find) -> Any:
    """The object in a pickle. ValueError if it is damaged, or names anything that `find` does not give."""
    try:
        return _Unpickler(content, find).load()
    except ForbiddenNameError:
        raise
    except Exception as error:  # a pickle fails in many ways
        raise ValueError(f"{type(error).__name__}: {error}") from None


def write_pickle(value: Any) -> bytes:
    return pickle.dumps(value)
