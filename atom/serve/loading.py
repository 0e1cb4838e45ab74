"""Load the tokenizer, and report why engines could not load.

open_tokenizer(context, template=None, fail=print)
await context.has_tokenizer.wait()
raise load_error(engines, "exit code 1")
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial

from atom.checkpoint import Tokenizer
from atom.config.checkpoint import open_for
from atom.errors import (
    ArtifactError,
    AtomError,
    CapacityError,
    CheckpointError,
    ConfigError,
    EngineDeadError,
    PassError,
    UnsupportedError,
)
from atom.serve.context import Context
from atom.serve.engine.replicas import Replicas
from atom.serve.output.parsers import prepare_chats

KNOWN = (ConfigError, CheckpointError, UnsupportedError, CapacityError, PassError, ArtifactError)
ERRORS = {each.__name__: each for each in KNOWN}
CANNOT_LOAD = 2  # the exit code if the next start would fail in the same way


def open_tokenizer(context: Context, template: str | None, fail: Callable[[Exception], object]) -> None:
    """Open the tokenizer and prepare chats in a thread, while the engines load the weights.

    template: a text that replaces the checkpoint's chat template
    fail: is called in the event loop with the error if that fails
    """
    loop = asyncio.get_running_loop()

    def set_tokenizer(tokenizer: Tokenizer | None) -> None:
        context.tokenizer = tokenizer
        context.has_tokenizer.set()

    def work() -> None:
        report: Callable[[], object]
        try:
            report = partial(set_tokenizer, read_tokenizer(context, template))
        except Exception as error:
            report = partial(fail, error)
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            loop.call_soon_threadsafe(report)

    # a daemon thread: it may be downloading when the process ends
    threading.Thread(target=work, name="tokenizer", daemon=True).start()


def read_tokenizer(context: Context, template: str | None) -> Tokenizer | None:
    """The tokenizer with what chats need of it; None if the checkpoint has none."""
    config = context.config
    checkpoint = open_for(config, context.progress, weights=False)
    try:
        tokenizer = checkpoint.tokenizer(trust_remote_code=config.trust_remote_code)
    finally:
        checkpoint.close()
    if tokenizer is not None and template is not None:
        tokenizer = tokenizer.with_template(template)
    if tokenizer is not None:
        prepare_chats(config, tokenizer)
    return tokenizer


def load_error(engines: Replicas, engine_end: str) -> AtomError:
    """Why no engine has loaded. engine_end: how their processes have ended"""
    failed = next((each.client.error for each in engines if each.client.error is not None), None)
    if failed is None:
        return EngineDeadError(f"{engines.reason} while it loaded ({engine_end})")
    if failed.kind not in ERRORS:
        return AtomError(f"{failed.kind}: {failed.error}")
    error = ERRORS[failed.kind](failed.error)
    error.exit_code = CANNOT_LOAD
    return error
