"""The address behind a name: asked for once for all who wait, kept for a while, and kept for longer where nobody answers."""

from __future__ import annotations

import asyncio
import math
import os
import socket
from typing import Any, Final

from fsl_transport.zmq.link import split_address

LOOKED_UP_S: Final = 10.0
"""How long an address is used before it is asked for again."""
ANSWER_S: Final = 5.0
"""How long somebody waits for an answer."""
NEWER_ANSWER_S: Final = 1.0
"""And who has an older one."""


class Lookup:
    """Of one ``host:port``. ``LocalError`` where that is none."""

    def __init__(self, address: str) -> None:
        self._host, self._port = split_address(address, listening=False)
        self._found: list[tuple[int, tuple[Any, ...]]] = []
        self._found_at = -math.inf
        self._asking: asyncio.Task[None] | None = None
        self.problem = ""
        """Why nothing was found."""

    async def places(self) -> list[tuple[int, tuple[Any, ...]]]:
        """``(family, place)`` to connect to, IPv4 first, as ZeroMQ dials. Those of the last time where there is no answer; none, and a ``problem``, where there never was one."""
        if asyncio.get_running_loop().time() > self._found_at + LOOKED_UP_S:
            if self._asking is None:
                self._asking = asyncio.create_task(self._ask())
            await asyncio.wait({self._asking}, timeout=NEWER_ANSWER_S if self._found else ANSWER_S)
        return self._found

    def close(self) -> None:
        """Wait no more."""
        if self._asking is not None:
            self._asking.cancel()

    async def _ask(self) -> None:
        self.problem = f"nobody says where {self._host} is"
        loop = asyncio.get_running_loop()
        try:
            entries = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            self.problem = words(error)
        else:
            entries.sort(key=lambda entry: entry[0] != socket.AF_INET)
            self._found = [(entry[0], _with_zone(entry[4])) for entry in entries]
            self._found_at = loop.time()
            self.problem = "no address"
        finally:
            self._asking = None


def _with_zone(place: tuple[Any, ...]) -> tuple[Any, ...]:
    """A link's own address needs its link, and loops look at host and port only."""
    if len(place) == 4 and place[3]:
        return (f"{place[0]}%{place[3]}", *place[1:])
    return place


def words(error: BaseException) -> str:
    """What an error of a socket or a look-up is called."""
    if isinstance(error, TimeoutError):
        return "no answer"
    number = getattr(error, "errno", None) or 0
    # The loops have words of their own for a connection that is refused; a failed look-up has a negative number.
    text = os.strerror(number) if number > 0 else getattr(error, "strerror", None) or str(error)
    text = text or type(error).__name__
    return text[:1].lower() + text[1:]
