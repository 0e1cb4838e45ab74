"""Wait for the first of several events.

await wait_for_any(0.5, client.ready, client.dead)
"""

from __future__ import annotations

import asyncio


async def wait_for_any(seconds: float | None, *events: asyncio.Event) -> None:
    """Wait for the first of some events, for this many seconds at most; None: without end."""
    tasks = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
