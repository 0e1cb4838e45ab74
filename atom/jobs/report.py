"""Report an expected error in one line, with an exit code.

A standard stream that was closed at the start (`2>&-`) becomes /dev/null: its number would be given to the next socket
or file that is opened, which would then get what is printed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable
from typing import TextIO

from atom.errors import AtomError, one_line
from atom.process.messages import say
from atom.process.openmp import bound_spinning


def report(work: Callable[[], int]) -> int:
    """Run some work; its exit code. A foreseen error is one line on stderr."""
    open_closed_streams()
    bound_spinning()
    try:
        code = work()
        sys.stdout.flush()
        return code
    except AtomError as error:
        return fail(f"{type(error).__name__}: {error}", error.exit_code)
    except KeyboardInterrupt:
        return fail("interrupted", 130)
    except OSError as error:
        return fail("" if isinstance(error, BrokenPipeError) else str(error), 1)
    finally:
        let_go(sys.stderr)


def open_closed_streams() -> None:
    """Open /dev/null in place of the standard streams that are closed, for this process and its children."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            os.dup2(opened, number)
            os.set_inheritable(number, True)  # dup2 to itself changes nothing
            if opened != number:
                os.close(opened)
        if getattr(sys, name) is None:
            stream = open(number, mode, closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def fail(message: str, code: int) -> int:
    log = logging.getLogger("atom")  # a server's
    if message and log.handlers:
        log.error(one_line(message))
    elif message:
        with contextlib.suppress(OSError):
            say(one_line(message))
    let_go(sys.stdout)
    return code


def let_go(stream: TextIO) -> None:
    """Write what a stream holds; if its reader is gone or its disk full, keep Python from trying again at exit."""
    try:
        stream.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
