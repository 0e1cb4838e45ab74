"""Load the tokenizer while the engines load.

open_tokenizer(context, template=None, fail=print)
await context.has_tokenizer.wait()
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial

from atom.checkpoint import Tokenizer
from atom.config.checkpoint import open_for
from atom.serve.context import Context
from atom.serve.output.parsers import prepare_chats


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
