"""Launches clients again that died: the parameter server's shell around `restarts`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attrs import define, field

from fsl_async.cluster.launch_file import Launching
from fsl_async.cluster.launchers import (
    CommandLauncher,
    Launcher,
    LaunchError,
    LeftAloneError,
    LocalLauncher,
    SlurmLauncher,
)
from fsl_async.cluster.members_file import MembersKeeper
from fsl_async.cluster.restarts import End, Relaunches, Wait
from fsl_async.roles.goodbye import Goodbye

AT_ONCE = 8
"""Launches under way at the same time."""


@define(eq=False, slots=False)
class Relauncher:
    """Takes the beginnings and ends of sessions, and calls launchers. For the loop's thread.

    address: of the parameter server, for `{address}` in commands.
    tell(what, client, text): reports each decision (waiting, launched, left alone, failed, gave up)
        to the journal and to people.
    wanted: whether the run still needs clients.
    log_path: file for the output of local children.
    keeper: stores the run's members when they change.
    """

    _loop: asyncio.AbstractEventLoop
    _launching: Launching
    _address: str
    _tell: Callable[[str, str, str], None]
    _wanted: Callable[[], bool]
    _log_path: Path | None = None
    _launchers: Mapping[str, Launcher] = field(factory=dict)
    _keeper: MembersKeeper | None = None

    def __attrs_post_init__(self) -> None:
        self._machine = Relaunches(self._launching.restarts_of)
        self._launchers = self._launchers or {
            "local": LocalLauncher(self._log_path, self.exited),
            "slurm": SlurmLauncher(),
            "command": CommandLauncher(),
        }
        self._timer: asyncio.TimerHandle | None = None
        self._launches: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._kept: frozenset[str] = frozenset()

    def recovered(self, members: frozenset[str], away_s: float) -> None:
        """Take the run's members at a restart of the parameter server.

        away_s: a member that has not joined within this time counts as dead.
        """
        self._kept = members
        decided = self._machine.recovered(members, away_s, self._loop.time())
        waiting = {name: one for name, one in decided.items() if isinstance(one, Wait)}
        # One line for all: most of them are about to join again.
        if waiting and self._wanted():
            names = ", ".join([*waiting][:8]) + (", ..." if len(waiting) > 8 else "")
            wait_s = next(iter(waiting.values())).seconds
            text = (
                f"clients of the run that do not join again within {wait_s:g} s are launched again:"
                f" {names}"
            )
            self._tell("waiting", "", text)
        self._arm()

    def seen(self, client: str) -> None:
        """Take the beginning of a client's session."""
        self._machine.seen(client, self._loop.time())
        self._arm()

    def left(self, client: str, reason: str, text: str = "") -> None:
        """Take the end of a client's session. reason: the transport's. text: of its goodbye."""
        goodbye = Goodbye.read(text)
        self._report(client, self._machine.left(client, reason, self._loop.time(), goodbye))

    def exited(self, client: str, code: int, error: str = "") -> None:
        """Take the end of a local client process, which comes before the end of its session.

        error: its last error line.
        """
        if self._wanted():
            self._report(client, self._machine.exited(client, code, self._loop.time(), error))

    def _arm(self) -> None:
        if self._machine.members != self._kept:
            self._kept = frozenset(self._machine.members)
            if self._keeper is not None:
                self._keeper.keep(self._kept)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        when = self._machine.next_due()
        if when is not None and not self._closed:
            self._timer = self._loop.call_at(when, self._fire)

    def _fire(self) -> None:
        self._timer = None
        for client in self._machine.take_due(self._loop.time()):
            if self._wanted():
                task = self._loop.create_task(self._launch(client), name=f"launch {client}")
                self._launches.add(task)
                task.add_done_callback(self._launches.discard)
        self._arm()

    async def _launch(self, client: str) -> None:
        rule = self._launching.rule_of(client)
        assert rule is not None
        try:
            words = rule.words(client, self._address)
            async with self._slots:
                started = await self._launchers[rule.kind].launch(client, words)
        except LaunchError as error:
            self._tell("failed", client, f"{client} could not be launched again ({error})")
            self._report(client, self._machine.failed(client, self._loop.time()))
        except LeftAloneError as found:
            self._tell("left alone", client, f"{client} is not launched: {found}")
        else:
            self._tell("launched", client, f"launched {client} again by {rule.kind}: {started}")

    def _report(self, client: str, decided: Wait | End | None) -> None:
        self._arm()
        if self._closed:
            return
        if isinstance(decided, Wait) and self._wanted():
            self._tell("waiting", client, self._waiting_words(client, decided))
        elif isinstance(decided, End):
            self._tell("gave up", client, f"{client} is not launched any more: {decided.why}")

    def _waiting_words(self, client: str, decided: Wait) -> str:
        why = f" ({decided.why})" if decided.why else ""
        rule = self._launching.rule_of(client)
        if rule is not None and rule.kind == "slurm":
            # Slurm may requeue its job: that it is launched is not known yet.
            return (
                f"{client}: unless it comes back by itself, Slurm is asked for its job in"
                f" {decided.seconds:g} s; one is submitted if it has none{why}"
            )
        return (
            f"{client} is launched again in {decided.seconds:g} s, unless it comes back by"
            f" itself{why}"
        )

    async def close(self) -> None:
        """Stop launching and close the launchers, when the run or the parameter server ends.

        Clients that leave from now on, such as local children that are ended, are not launched.
        """
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for task in self._launches:
            task.cancel()
        await asyncio.gather(*self._launches, return_exceptions=True)
        for launcher in self._launchers.values():
            await launcher.close()
        if self._keeper is not None:
            await self._keeper.close()
