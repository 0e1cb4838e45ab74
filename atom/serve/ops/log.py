"""The server's log on stderr, as lines of JSON or text.

    log.configure("json", "info")
    logging.getLogger("atom.access").info("request", extra={"fields": {"status": 200}})
    with log.capture(): ...               # what is printed to stderr is logged too

A line has the time, the level, the message, and the caller's `extra={"fields": {…}}`. `relay` logs the lines that the
engine process prints, so that a JSON log has only lines of JSON. No caller waits for stderr: a thread writes the lines
(`atom.serve.ops.log_writer`). A line that cannot be written, since the disk is full, the pipe closed, or too many lines
wait for a reader, is lost; no request fails for it.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec

from atom.process.messages import PREFIX
from atom.serve.ops.log_writer import LogWriter

LOG = logging.getLogger("atom.process")
STDERR = 2  # its file descriptor
FLUSH_SECONDS = 2.0  # for the last lines to be written
MAX_WAITING = 4 << 20  # bytes of lines that are not written yet
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


class _Handler(logging.Handler):
    """Passes lines to a thread that writes them. logging flushes it when the process ends."""

    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.writer = LogWriter(STDERR, self._describe_dropped, MAX_WAITING)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.writer.put(record.getMessage() if hasattr(record, "is_line") else self.format(record))
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        self.writer.flush(FLUSH_SECONDS)

    def _describe_dropped(self, count: int) -> str:
        return self.format(_record(logging.WARNING, f"{count} lines were dropped: stderr was not read"))


def is_captured(kind: str) -> bool:
    """Whether what is printed to stderr goes through the log: everywhere but on a terminal with a log of text."""
    return is_json(kind) or not sys.stderr.isatty()


def is_json(kind: str) -> bool:
    """Whether a log of this kind (serve.http.log) is JSON; auto: unless stderr is a terminal."""
    return kind == "json" or (kind == "auto" and not sys.stderr.isatty())


def configure(kind: str, level: str) -> None:
    """Send the loggers of atom, and the warnings of all others, to stderr, from a level on."""
    handler = _Handler(JSONLines() if is_json(kind) else TextLines())
    from_level = logging.getLevelNamesMapping()[level.upper()]
    for name, min_level in (("atom", logging.INFO), (None, logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(max(min_level, from_level))
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
    """The level of a line that was printed: ours report what is done."""
    return logging.INFO if line.startswith(PREFIX) else logging.WARNING


def write(line: str) -> None:
    """Write a line as it is, of any level."""
    LOG.handle(_record(logging.INFO, line.rstrip(), is_line=True))


def _record(level: int, message: str, **attributes: object) -> logging.LogRecord:
    attributes |= {"name": LOG.name, "levelno": level, "levelname": logging.getLevelName(level), "msg": message}
    return logging.makeLogRecord(attributes)


def flush() -> None:
    """Wait until the lines are written, before this process is killed; `FLUSH_SECONDS` at most."""
    for handler in logging.getLogger("atom").handlers:
        handler.flush()


def num_dropped() -> int:
    """Lines of this process's log that were dropped."""
    return sum(each.writer.num_dropped for each in logging.getLogger("atom").handlers if isinstance(each, _Handler))


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
