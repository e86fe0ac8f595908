"""Launches clients that died again, for a parameter server. `relaunches` decides."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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
from fsl_async.cluster.relaunches import GaveUp, Relaunches, Waiting
from fsl_async.roles.goodbye import Goodbye

AT_ONCE = 8
"""Launchers that are asked at the same time."""


class Relauncher:
    """Used on the loop's thread.

    tell(what, client, text): what is waited for, launched, left alone, failed, given up; for the
    journal and for people. wanted: whether the run still has a use for clients. log_path: what
    local children print. keeper: hears of the run's members when they have changed.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        launching: Launching,
        tell: Callable[[str, str, str], None],
        *,
        wanted: Callable[[], bool],
        log_path: Path | None = None,
        launchers: Mapping[str, Launcher] | None = None,
        keeper: MembersKeeper | None = None,
    ) -> None:
        self.address = ""  # where clients reach the server
        self._loop = loop
        self._launching = launching
        self._tell = tell
        self._wanted = wanted
        self._machine = Relaunches(launching)
        self._launchers = launchers or {
            "local": LocalLauncher(log_path, self.exited),
            "slurm": SlurmLauncher(),
            "command": CommandLauncher(),
        }
        self._timer: asyncio.TimerHandle | None = None
        self._asking: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._room = asyncio.Semaphore(AT_ONCE)
        self._keeper = keeper
        self._kept: frozenset[str] = frozenset()

    def recovered(self, members: frozenset[str], away_s: float) -> None:
        """The server is here again, and these belonged to the run. away_s: who has not come back by
        then is taken for dead.
        """
        self._kept = members
        said = self._machine.recovered(members, away_s, self._loop.time())
        waiting = [one for one in said if isinstance(one, Waiting)]
        if waiting and self._wanted():  # one line, for most of them are about to come back
            names = ", ".join(one.client for one in waiting[:8]) + (", ..." if waiting[8:] else "")
            text = (
                "of those who were in the run before, who does not come back in "
                f"{waiting[0].seconds:g} s is launched again: {names}"
            )
            self._tell("waiting", "", text)
        self._arm()

    def seen(self, client: str) -> None:
        """A client's session has begun."""
        self._machine.seen(client, self._loop.time())
        self._arm()

    def left(self, client: str, reason: str, text: str = "") -> None:
        """A client's session has ended, for `reason` of the transport's. text: what the client
        said.
        """
        goodbye = Goodbye.read(text)
        self._say(self._machine.left(client, reason, self._loop.time(), goodbye))
        self._arm()

    def exited(self, client: str, code: int) -> None:
        """A client's process that was launched here has ended: sooner known than by its session."""
        if self._wanted():
            self._say(self._machine.exited(client, code, self._loop.time()))
            self._arm()

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
                task = self._loop.create_task(self._ask(client), name=f"launch {client}")
                self._asking.add(task)
                task.add_done_callback(self._asking.discard)
        self._arm()

    async def _ask(self, client: str) -> None:
        rule = self._launching.rule_of(client)
        assert rule is not None
        try:
            words = rule.words(client, self.address)
            async with self._room:
                started = await self._launchers[rule.kind].launch(client, words)
        except LaunchError as error:
            self._tell("failed", client, f"{client} could not be launched again ({error})")
            self._say(self._machine.failed(client, self._loop.time()))
            self._arm()
        except LeftAloneError as found:
            self._tell("left alone", client, f"{client} is not launched: {found}")
        else:
            self._tell("launched", client, f"launched {client} again by {rule.kind}: {started}")

    def _say(self, decided: Waiting | GaveUp | None) -> None:
        if self._closed:
            return
        if isinstance(decided, Waiting) and self._wanted():
            why = f" ({decided.why})" if decided.why else ""
            text = (
                f"{decided.client} is launched again in {decided.seconds:g} s, unless it comes "
                f"back by itself{why}"
            )
            self._tell("waiting", decided.client, text)
        elif isinstance(decided, GaveUp):
            text = f"{decided.client} is not launched any more: {decided.why}"
            self._tell("gave up", decided.client, text)

    async def close(self) -> None:
        """The run is over, or its server leaves. Who leaves from now on, local children that are
        ended, is not launched by this server.
        """
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for task in self._asking:
            task.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)
        for launcher in self._launchers.values():
            await launcher.close()
        if self._keeper is not None:
            await self._keeper.close()
