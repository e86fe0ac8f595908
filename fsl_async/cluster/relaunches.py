"""Decides when a client is to be launched again. Pure: `now` is an argument; `relauncher` launches.

The parameter server does not see a client's process end, only its sessions. `restarts` decides for
it as for a child process; a session's event becomes one of these:

    a session begins                       Seen
    a session expires                      Exited: Wait, then Launch, once; no further launch until
                                           the client was seen
    a client says goodbye and asks to be   the same, by exit code 64; the wait begins when its place
      launched again                       is taken away from it, if it gave that time
    the process exits, and its launcher    the same at once, by the exit code; later events of its
      is this process's own (local)        session, until the client is seen again, are ignored
    another process takes the name         nothing; nor is the end of the replaced process an exit
    the parameter server starts again      Exited: the wait begins when a session would have
                                           expired; clients that live have said hello by then
    the launcher fails                     Exited: a longer wait, then once more, within the budget

A session that ends for another reason is about to begin anew, or has. A client that says goodbye
without asking for a launch (done, Ctrl-C, its task failed) is not launched; nor is one that comes
back during the wait: what its own site does about exit code 64 comes first. Clients without a rule
in the launch file are left alone.
"""

from __future__ import annotations

from collections.abc import Iterable

from attrs import frozen

from fsl_async.cluster.launch_file import Launching
from fsl_async.cluster.restarts import (
    End,
    Exited,
    Restarts,
    Seen,
    State,
    Wait,
    WaitOver,
)
from fsl_async.errors import ExitCode
from fsl_async.roles.goodbye import Goodbye

LONGEST_AWAY_S = 600.0
"""A place that is taken away is gone by then, whatever a client says: Slurm and spot markets give
minutes.
"""

NOTHING_SAID = Goodbye("")

MOST_MEMBERS = 10_000
"""That are remembered. Strangers' names may be among them where nothing is encrypted."""


@frozen
class Waiting:
    """Its launcher will be asked in `seconds`, unless it comes back by itself. why: what it said
    itself, if anything.
    """

    client: str
    seconds: float
    why: str = ""


@frozen
class GaveUp:
    """It is not launched any more."""

    client: str
    why: str


class Relaunches:
    """Of all clients of a run."""

    def __init__(self, launching: Launching) -> None:
        self._launching = launching
        self._machines: dict[str, Restarts] = {}
        self._due: dict[str, float] = {}
        self._exited: set[str] = set()  # whose exit was seen, and whose next life was not
        self._overtaken: set[str] = set()  # by another process of that name
        self.members: set[str] = set()
        """Whom the run may count on, with a rule or without: who was here, and did not say that it
        is over for it.
        """

    def recovered(
        self, members: Iterable[str], away_s: float, now: float
    ) -> list[Waiting | GaveUp]:
        """The server was away, and these were members. away_s: by then who lives has come back.
        Returns what is to be of each that has a rule.
        """
        said = []
        for client in sorted(members):
            self.seen(client, now)
            machine = self._machines.get(client)
            if machine is not None:
                said.append(self._ended(client, machine, now, after_s=away_s))
        return [one for one in said if one is not None]

    def seen(self, client: str, now: float) -> None:
        """Its session has begun."""
        if len(self.members) < MOST_MEMBERS:
            self.members.add(client)
        if self._launching.rule_of(client) is None:
            return
        machine = self._machines.get(client)
        if machine is None or machine.state is State.ENDED:
            machine = self._machines[client] = Restarts(self._launching.restarts)
        machine.handle(Seen(), now)
        self._due.pop(client, None)
        self._exited.discard(client)

    def left(
        self, client: str, reason: str, now: float, goodbye: Goodbye = NOTHING_SAID
    ) -> Waiting | GaveUp | None:
        """Its session has ended, for `reason` of the transport's; goodbye: what it said where that
        is "bye".
        """
        machine = self._machines.get(client)
        self._overtaken.discard(client)
        if reason == "superseded" and machine is not None:
            self._overtaken.add(client)
        again = reason == "bye" and goodbye.relaunch_in_s is not None
        if reason in {"bye", "revoked"} and not again and client not in self._exited:
            self.members.discard(client)
        if machine is None or machine.state is not State.RUNNING or client in self._exited:
            return None
        if reason == "bye" and goodbye.relaunch_in_s is not None:
            away_s = min(goodbye.relaunch_in_s, LONGEST_AWAY_S)
            return self._ended(
                client, machine, now, ExitCode.RELAUNCH, after_s=away_s, why=goodbye.reason
            )
        if reason in {"bye", "revoked"}:
            self._forget(client)
        return self._ended(client, machine, now) if reason == "expired" else None

    def exited(self, client: str, code: int, now: float) -> Waiting | GaveUp | None:
        """Its process, launched here, is gone. One that said goodbye is launched again when its
        exit code asks for that.
        """
        if code == ExitCode.BAD_INPUT and client in self._overtaken:
            self._overtaken.discard(client)
            return None
        if code == ExitCode.INTERRUPTED:  # by a person, whether its goodbye has come by now or not
            self._forget(client)
            return None
        if code in {ExitCode.DONE, ExitCode.BAD_INPUT}:
            self.members.discard(client)
        machine = self._machines.get(client)
        if machine is None and code == ExitCode.RELAUNCH:
            self.seen(client, now)
            machine = self._machines.get(client)
        if machine is None or machine.state is not State.RUNNING:
            return None
        self._exited.add(client)
        return self._ended(client, machine, now, code)

    def _forget(self, client: str) -> None:
        self.members.discard(client)
        self._machines.pop(client, None)
        self._due.pop(client, None)

    def failed(self, client: str, now: float) -> Waiting | GaveUp | None:
        """Its launcher could not launch it."""
        machine = self._machines.get(client)
        if machine is None or machine.state is not State.RUNNING:
            return None
        return self._ended(client, machine, now)

    def next_due(self) -> float | None:
        """When `take_due` has something to give."""
        return min(self._due.values(), default=None)

    def take_due(self, now: float) -> list[str]:
        """The clients whose launchers are to be asked now, once each."""
        ready = sorted(client for client, when in self._due.items() if when <= now)
        for client in ready:
            del self._due[client]
            self._machines[client].handle(WaitOver(), now)
        return ready

    def _ended(
        self,
        client: str,
        machine: Restarts,
        now: float,
        code: int = ExitCode.BUG,
        *,
        after_s: float = 0.0,
        why: str = "",
    ) -> Waiting | GaveUp | None:
        for effect in machine.handle(Exited(code), now):
            if isinstance(effect, Wait):
                seconds = after_s + effect.seconds
                self._due[client] = now + seconds
                return Waiting(client, seconds, why)
            if isinstance(effect, End):
                return GaveUp(client, effect.why)
        return None
