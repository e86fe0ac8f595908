"""Waiting for what happens when it happens, and what is looked at meanwhile."""

import asyncio
from pathlib import Path


async def until(condition, seconds=30.0):
    """Return once condition() is true; TimeoutError when it is not within `seconds`."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - a test polls for its condition
            await asyncio.sleep(0.005)


def open_files():
    """How many this process has."""
    return len(list(Path("/proc/self/fd").iterdir()))
