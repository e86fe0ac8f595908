"""A relay process: sockets, machine and loop put together. Holds no model, reads no message, needs neither NumPy nor torch."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

import fsl_transport as tp
from fsl_async.errors import AddressError, RunDirError, UsageError, disk_words
from fsl_async.files.private_files import make_folder
from fsl_async.nodes.relay.shell import RelayShell
from fsl_async.observe.journal import JournalWriter, TraceHash
from fsl_async.process.stopper import Stopper
from fsl_async.roles.machine import DrainAsked, Finish, Note
from fsl_async.roles.relay.connection_limits import ConnectionRules
from fsl_async.roles.relay.relay import DoorRules, RelayMachine, RelayRules
from fsl_transport.loop import run as run_loop
from fsl_transport.relay.buffer import PIPE_FILES
from fsl_transport.relay.relay import Switchboard

JOURNAL = "journal.jsonl"
MEMORY_LIMIT_MIB = 2048
LEAST_MEMORY_MIB = 128
_FILES_OF_A_LINE = 2
_OTHER_FILES = 64 + PIPE_FILES
LEAST_LINES = 16
"""A quarter of them may be new, and half of those from one address: with fewer, a client's second one is hung up while its first is new."""
COMFORTABLE_LINES = 1024
"""Below that people are told how many clients fit."""


@frozen
class Door:
    """A port of the relay: where it listens, whom it dials, and whether nothing but sealed traffic may pass."""

    listen: str
    server: str
    sealed: bool


@frozen
class Summary:
    """How a relay ended."""

    connections: int
    bytes_up: int
    bytes_down: int
    dropped: dict[str, int]
    reason: str
    seconds: float


def serve(
    doors: Sequence[Door],
    *,
    run_dir: Path | None,
    memory_mib: int = 0,
    announce: Callable[[list[tuple[str, int]]], None],
    tell: Callable[[Note], None],
    stop: Stopper,
) -> Summary:
    """Forward until `stop` is asked. Blocks; makes its own loop.

    memory_mib: what may wait here on all connections together, in this process and in the kernel; 0: `usual_memory_mib`.
    announce: called with host and port of each door once clients can come. tell: takes what the operator should know.
    Raises AddressError (port in use) and RunDirError, each in one line.
    """
    journal: JournalWriter | TraceHash = TraceHash()
    if run_dir is not None:
        try:
            make_folder(run_dir)
            journal = JournalWriter(run_dir / JOURNAL)
        except OSError as error:
            raise RunDirError(f"cannot write in {run_dir}: {disk_words(error)}") from None
    try:
        rules = RelayRules(
            doors=tuple(DoorRules(name=one.server, sealed=one.sealed) for one in doors),
            memory_bytes=(memory_mib or usual_memory_mib()) << 20,
        )
        return run_loop(
            _serve(rules, doors, journal=journal, announce=announce, tell=tell, stop=stop)
        )
    finally:
        if isinstance(journal, JournalWriter):
            journal.close()


def usual_memory_mib() -> int:
    """A quarter of this machine's memory, 2 GiB at the most."""
    try:
        pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not every system says it
        return MEMORY_LIMIT_MIB
    if pages <= 0 or page_bytes <= 0:  # nor knows it
        return MEMORY_LIMIT_MIB
    return max(LEAST_MEMORY_MIB, min(MEMORY_LIMIT_MIB, pages * page_bytes // (4 << 20)))


def checked_lines() -> int:
    """How many connections a relay can hold here; raises UsageError where there are too few for a single client."""
    found = lines_allowed(ConnectionRules().lines)
    if found < LEAST_LINES:
        needed = LEAST_LINES * _FILES_OF_A_LINE + _OTHER_FILES
        raise UsageError(
            f"too few open files are allowed for a relay: raise the limit to {needed} or more (ulimit -n {needed});"
            " each client takes four or more"
        )
    return found


def lines_words(found: int) -> str:
    """How many clients fit, for people."""
    return (
        f"the limit of open files leaves room for {found:,} connections, so for {found // 2:,} clients"
        " with two each, half of them from one address (ulimit -n raises it)"
    )


def lines_allowed(wanted: int) -> int:
    """How many lines this process can hold: no more than `wanted`, no more than its limit of open files, which is raised as far as it goes."""
    try:
        import resource
    except ImportError:  # Windows
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted * _FILES_OF_A_LINE + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return max(1, min(wanted, (soft - _OTHER_FILES) // _FILES_OF_A_LINE))
    return wanted


async def _serve(
    rules: RelayRules,
    doors: Sequence[Door],
    *,
    journal: JournalWriter | TraceHash,
    announce: Callable[[list[tuple[str, int]]], None],
    tell: Callable[[Note], None],
    stop: Stopper,
) -> Summary:
    loop = asyncio.get_running_loop()
    begun = time.monotonic()
    finished: asyncio.Future[Finish] = loop.create_future()
    newcomers = rules.newcomers.within(lines_allowed(rules.newcomers.lines))
    machine = RelayMachine(evolve(rules, newcomers=newcomers))

    def finish(effect: Finish) -> None:
        if not finished.done():
            finished.set_result(effect)

    def broken(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        # A defect of ours in a callback: better an end with its name than a relay that carries half.
        if not finished.done():
            finished.set_exception(context.get("exception") or RuntimeError(context["message"]))

    loop.set_exception_handler(broken)
    shell = RelayShell(machine, scheduler=loop, journal=journal, say=tell, finished=finish)
    shell.switchboard = switchboard = Switchboard(shell)

    def stop_asked(hard: bool) -> None:
        loop.call_soon_threadsafe(
            (lambda: finish(Finish(stop.reason)))
            if hard
            else (lambda: shell.node.feed(DrainAsked(stop.reason)))
        )

    unsubscribe: Callable[[], None] = lambda: None  # noqa: E731 - until there is one
    try:
        try:
            bound = [switchboard.open_door(one.listen, one.server) for one in doors]
        except tp.LocalError as error:
            raise AddressError(str(error)) from None
        unsubscribe = stop.subscribe(stop_asked)
        shell.weigh()
        journal.note(
            "node_started",
            loop.time(),
            role="relay",
            doors=[f"{one.listen} -> {one.server}" for one in doors],
            pid=os.getpid(),
            host=socket.gethostname(),
            lines=newcomers.lines,
            memory_bytes=rules.memory_bytes,
        )
        announce(bound)
        ended = await finished
        shell.look()
    finally:
        unsubscribe()
        shell.close()
        await switchboard.aclose()
        up, down = machine.carried
        journal.note("node_ended", loop.time(), up=up, down=down)
    return Summary(
        machine.totals.accepted,
        up,
        down,
        dict(machine.totals.dropped),
        ended.reason,
        round(time.monotonic() - begun, 3),
    )
