"""Resolves a server's name without stopping the event loop: one lookup at a time, cached."""

from __future__ import annotations

import asyncio
import math
import os
import socket
from typing import Any, Final

from fsl_transport.zmq.link import split_address

FRESH_S: Final = 10.0
"""An older result is looked up again, and used while the new lookup does not answer."""
LOOKUP_S: Final = 5.0
"""A caller waits at most this for a first result,"""
REFRESH_S: Final = 1.0
"""and at most this where there is an older one."""


class Resolver:
    """Resolves one `host:port`. Raises LocalError if it is not one."""

    def __init__(self, address: str) -> None:
        self._host, self._port = split_address(address, listening=False)
        self._found: list[tuple[int, tuple[Any, ...]]] = []
        self._found_at = -math.inf
        self._lookup: asyncio.Task[None] | None = None
        self._problem = ""

    async def addresses(self) -> list[tuple[int, tuple[Any, ...]]]:
        """Return (family, socket address) pairs, IPv4 first, as libzmq dials.

        Raises OSError if nothing is found and never was.
        """
        if asyncio.get_running_loop().time() > self._found_at + FRESH_S:
            self._lookup = self._lookup or asyncio.create_task(self._look_up())
            await asyncio.wait({self._lookup}, timeout=REFRESH_S if self._found else LOOKUP_S)
        if not self._found:
            raise OSError(self._problem)
        return self._found

    def close(self) -> None:
        """End the lookup that runs."""
        if self._lookup is not None:
            self._lookup.cancel()

    async def _look_up(self) -> None:
        self._problem = f"no name server answers for {self._host}"
        loop = asyncio.get_running_loop()
        try:
            entries = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            entries.sort(key=lambda entry: entry[0] != socket.AF_INET)
            self._found = [(entry[0], _with_zone(entry[4])) for entry in entries]
            self._found_at = loop.time()
            self._problem = "no address"
        except (OSError, UnicodeError) as error:
            self._problem = describe(error)
        finally:
            self._lookup = None


def _with_zone(address: tuple[Any, ...]) -> tuple[Any, ...]:
    """Put the zone of a link-local IPv6 address into its host: event loops look at nothing else."""
    if len(address) == 4 and address[3]:
        return (f"{address[0]}%{address[3]}", *address[1:])
    return address


def describe(error: BaseException) -> str:
    """Return one phrase for an error of a socket or a lookup, the same on every event loop."""
    if isinstance(error, TimeoutError):
        return "no answer"
    number = getattr(error, "errno", None) or 0  # negative where a lookup failed
    text = os.strerror(number) if number > 0 else getattr(error, "strerror", None) or str(error)
    text = text or type(error).__name__
    return text[:1].lower() + text[1:]
