"""A relay process: a loop, a journal, and its end. Needs neither NumPy nor torch."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from fsl_async.errors import RunDirError, UsageError, disk_words
from fsl_async.nodes.relay.relay import Relay, Route
from fsl_async.observe.journal import JournalWriter
from fsl_async.process.stopper import Stopper
from fsl_async.roles.machine import Note
from fsl_async.roles.relay.admission import Admission
from fsl_transport.loop import run as run_loop
from fsl_transport.relay.buffer import PIPE_FILES
from fsl_transport.zmq.admission import descriptors

JOURNAL: Final = "journal.jsonl"
MOST_CONNECTIONS: Final = 4096
LEAST_CONNECTIONS: Final = 16
"""One address gets half of them, and a client has two connections, more on a long path."""
COMFORTABLE_CONNECTIONS: Final = 1024
"""With fewer, the start reports how many clients fit."""
_FILES_OF_A_CONNECTION: Final = 2
_OTHER_FILES: Final = 64 + PIPE_FILES


@frozen
class Summary:
    """The result of a relay."""

    connections: int
    bytes_up: int
    bytes_down: int
    dropped: dict[str, int]
    reason: str
    seconds: float


def connections_allowed() -> int:
    """Return how many connections fit into the limit of open files, raised as far as possible."""
    return max(1, min(MOST_CONNECTIONS, (descriptors() - _OTHER_FILES) // _FILES_OF_A_CONNECTION))


def checked_connections() -> int:
    """Return `connections_allowed`; raises UsageError if these are too few for a client."""
    found = connections_allowed()
    if found < LEAST_CONNECTIONS:
        needed = LEAST_CONNECTIONS * _FILES_OF_A_CONNECTION + _OTHER_FILES
        raise UsageError(
            f"too few open files are allowed for a relay: raise the limit to {needed} or more"
            f" (ulimit -n {needed}); each client takes four or more"
        )
    return found


def serve(
    routes: Sequence[Route],
    *,
    run_dir: Path | None,
    announce: Callable[[list[tuple[str, int]]], None],
    tell: Callable[[Note], None],
    stop: Stopper,
) -> Summary:
    """Forward until `stop` is asked. Blocks; makes its own loop.

    announce: called with host and port of each route once clients can connect. tell: takes notes
    for the operator. Raises AddressError (a port in use) and RunDirError, each in one line.
    """
    if run_dir is None:
        return run_loop(_serve(routes, None, announce, tell, stop))
    try:
        journal = JournalWriter(run_dir / JOURNAL)
    except OSError as error:
        raise RunDirError(f"cannot write in {run_dir}: {disk_words(error)}") from None
    try:
        return run_loop(_serve(routes, journal, announce, tell, stop))
    finally:
        journal.close()


async def _serve(
    routes: Sequence[Route],
    journal: JournalWriter | None,
    announce: Callable[[list[tuple[str, int]]], None],
    tell: Callable[[Note], None],
    stop: Stopper,
) -> Summary:
    loop, begun = asyncio.get_running_loop(), time.monotonic()
    asked, ended = asyncio.Event(), asyncio.Event()
    defects: list[BaseException] = []

    def broken(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        # An exception in a callback is a bug: end with it instead of forwarding in part.
        defects.append(context.get("exception") or RuntimeError(context["message"]))
        ended.set()

    def stop_asked(hard: bool) -> None:
        loop.call_soon_threadsafe((ended if hard else asked).set)

    async def drain() -> None:
        await asked.wait()
        relay.note("drain_asked", reason=stop.reason)
        await relay.drain()
        ended.set()

    loop.set_exception_handler(broken)
    relay = Relay(Admission(connections_allowed()), journal, tell)
    relay.start(drain())
    unsubscribe = stop.subscribe(stop_asked)
    try:
        bound = [relay.listen(route) for route in routes]
        relay.note(
            "node_started",
            role="relay",
            routes=[f"{one.listen} -> {one.server}" for one in routes],
            pid=os.getpid(),
            host=socket.gethostname(),
            connections=connections_allowed(),
        )
        announce(bound)
        await ended.wait()
    finally:
        unsubscribe()
        up, down, _ = relay.carried()
        await relay.aclose()
        relay.note("node_ended", up=up, down=down)
    if defects:
        raise defects[0]
    seconds = round(time.monotonic() - begun, 3)
    return Summary(relay.accepted, up, down, dict(relay.dropped), stop.reason, seconds)
