"""The server's log on stderr, as lines of JSON or text.

    log.configure("json", "info")
    logging.getLogger("atom.access").info("request", extra={"fields": {"status": 200}})
    with log.capture(): ...               # what is printed to stderr is logged too

A line has the time, the level, the message, and the caller's `extra={"fields": {…}}`. `relay` logs the lines that the
engine process prints, so that a JSON log has only lines of JSON. A line that cannot be written, since the disk is full
or the pipe closed, is lost; no request fails for it.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, TextIO

import msgspec

from atom.messages import PREFIX

LOG = logging.getLogger("atom.process")
MAX_LINE = 1000  # characters of a line that is not ours, or of a traceback


class JSONLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {"time": time_of(record), "level": record.levelname.lower(), "message": record.getMessage()}
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()

    def formatException(self, error: Any) -> str:
        """The traceback, cut, since its message may quote a client."""
        return "\n".join(line[:MAX_LINE] for line in super().formatException(error).splitlines())


class TextLines(JSONLines):
    """The same as text: `TIME LEVEL message name=value …`, and a traceback below."""

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        encoded = [f"{name}={msgspec.json.encode(value, enc_hook=str).decode()}" for name, value in fields.items()]
        line = " ".join([time_of(record), record.levelname.lower(), record.getMessage(), *encoded])
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def time_of(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


class _Handler(logging.StreamHandler[TextIO]):
    def handleError(self, record: logging.LogRecord) -> None:
        """Lose a line that cannot be written; to say so on stderr would log that too."""
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


def is_captured(kind: str) -> bool:
    """Whether what is printed to stderr goes through the log: everywhere but on a terminal with a log of text."""
    return is_json(kind) or not sys.stderr.isatty()


def is_json(kind: str) -> bool:
    """Whether a log of this kind (serve.http.log) is JSON; auto: unless stderr is a terminal."""
    return kind == "json" or (kind == "auto" and not sys.stderr.isatty())


def configure(kind: str, level: str) -> None:
    """Send the loggers of atom, and the warnings of all others, to stderr, from a level on."""
    handler = _Handler(sys.stderr)
    handler.setFormatter(JSONLines() if is_json(kind) else TextLines())
    from_level = logging.getLevelNamesMapping()[level.upper()]
    for name, least in (("atom", logging.INFO), (None, logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(max(least, from_level))
    LOG.setLevel(min(from_level, logging.WARNING))  # what is no entry may say why a process has ended
    logging.captureWarnings(True)


def relay(line: str, process: str = "engine") -> None:
    """Log a line that a process has printed: its own log lines unchanged, any other as a message."""
    line = line.rstrip()
    if is_entry(line):
        write(line)
    elif line:
        LOG.log(level_of(line), "%s", line.removeprefix(PREFIX)[:MAX_LINE], extra={"fields": {"process": process}})


def pass_on(line: str) -> None:
    """Write a line that a process with a log of text has printed, unless it is of ours and their level is left out."""
    if LOG.isEnabledFor(level_of(line)):
        write(line)


def level_of(line: str) -> int:
    """The level of a line that was printed: ours tell what is done."""
    return logging.INFO if line.startswith(PREFIX) else logging.WARNING


def write(line: str) -> None:
    """Write a line to the real stderr as it is, at once with its end: other threads write lines too."""
    if (stderr := sys.__stderr__) is not None:
        with contextlib.suppress(OSError):
            stderr.write(f"{line.rstrip()}\n")
            stderr.flush()


def is_entry(line: str) -> bool:
    """Whether this is a complete line of JSONLines."""
    try:
        return line.startswith('{"time":') and isinstance(msgspec.json.decode(line), dict)
    except msgspec.DecodeError:
        return False


@contextlib.contextmanager
def capture() -> Iterator[None]:
    """Log what is printed to sys.stderr; the log goes to the real stderr as before."""
    with contextlib.redirect_stderr(_LoggedStderr()):
        yield


class _LoggedStderr(io.TextIOBase):
    def __init__(self) -> None:
        self._partial = ""  # the last line, which has no end yet

    def write(self, text: str) -> int:
        *lines, self._partial = (self._partial + text).split("\n")
        for line in lines:
            relay(line, "server")
        return len(text)
