"""Waits for a condition, and the number of open files."""

import asyncio
from pathlib import Path


async def until(condition, seconds=30.0):
    """Return once condition() is true; TimeoutError when it is not within `seconds`."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - a test polls for its condition
            await asyncio.sleep(0.005)


def open_files():
    """Return the number of files that this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))
