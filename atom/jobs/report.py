"""Report a foreseen error in one line, with an exit code."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable
from typing import TextIO

from atom.errors import AtomError, one_line


def report(work: Callable[[], int]) -> int:
    """Run some work; its exit code. A foreseen error is one line on stderr."""
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


def fail(message: str, code: int) -> int:
    log = logging.getLogger("atom")  # a server's
    if message and log.handlers:
        log.error(one_line(message))
    elif message:
        with contextlib.suppress(OSError):
            print(f"atom-run: {one_line(message)}", file=sys.stderr)
    let_go(sys.stdout)
    return code


def let_go(stream: TextIO) -> None:
    """Write what a stream holds; where its reader is gone or its disk full, keep Python from trying again at exit."""
    try:
        stream.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
