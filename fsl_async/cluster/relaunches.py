"""Decides when the parameter server launches a client again. Pure: `now` is an argument.

The exit of a remote client cannot be observed, so its session's events go to the machine of child
processes (`restarts`) instead:

    event                                  -> event of `restarts`
    its session begins                     Seen
    its session expires                    Exited: Wait, then Launch once; the next launch needs a
                                             session first
    it leaves with a request to be         Exited(64); the wait begins at the end of its machine, if
      launched again                         the goodbye has that time
    its process exits (kind "local")       Exited(code) at once; the end of its session counts for
                                             the old process
    another process takes its name         none; the end of the old process, which is refused, is
                                             not the end of the new one
    the parameter server restarts          Exited; the wait begins when a session would have expired
    its launcher fails                     Exited: a longer wait, as long as the budget lasts

A session that ends for another reason begins again at once. A client that leaves without such a
request (done, Ctrl-C, its task failed) is not launched. Nor is one that joins again during the
wait: its own site may act on exit code 64 first. A client without a rule in the launch file is
never launched.
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
"""Longest time to its machine's end that a goodbye may state; Slurm and EC2 give minutes."""

NO_GOODBYE = Goodbye("")

MOST_MEMBERS = 10_000
"""Limit of members. Without encryption, unauthenticated peers may add names."""


@frozen
class Waiting:
    """The client is launched in `seconds`, unless it joins first.

    why: of its goodbye, or the error with which it ends again and again; or empty.
    """

    client: str
    seconds: float
    why: str = ""


@frozen
class GaveUp:
    """The client is not launched any more."""

    client: str
    why: str


class Relaunches:
    """Decides for all clients of a run; see the table above."""

    def __init__(self, launching: Launching) -> None:
        self._launching = launching
        self._machines: dict[str, Restarts] = {}
        self._due: dict[str, float] = {}
        # Clients whose process exited, until their next session.
        self._exited: set[str] = set()
        # Clients whose name another process took.
        self._overtaken: set[str] = set()
        self.members: set[str] = set()
        """Clients that joined and have not left for good, with a rule or without."""

    def recovered(
        self, members: Iterable[str], away_s: float, now: float
    ) -> list[Waiting | GaveUp]:
        """Take the members at a restart of the parameter server; returns the decisions.

        away_s: clients that run join within it.
        """
        decided = []
        for client in sorted(members):
            self.seen(client, now)
            machine = self._machines.get(client)
            if machine is not None:
                decided.append(self._ended(client, machine, now, after_s=away_s))
        return [one for one in decided if one is not None]

    def seen(self, client: str, now: float) -> None:
        """Take the beginning of a client's session."""
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
        self, client: str, reason: str, now: float, goodbye: Goodbye = NO_GOODBYE
    ) -> Waiting | GaveUp | None:
        """Take the end of its session. reason: the transport's. goodbye: where that is "bye"."""
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

    def exited(
        self, client: str, code: int, now: float, error: str = ""
    ) -> Waiting | GaveUp | None:
        """Take the exit of its process, which was launched locally. error: its last error line.

        After a goodbye, too, the exit code decides whether it is launched again.
        """
        if code == ExitCode.BAD_INPUT and client in self._overtaken:
            self._overtaken.discard(client)
            return None
        # A person ended it, whether its goodbye has arrived or not.
        if code == ExitCode.INTERRUPTED:
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
        # Preemptions are no failures, even if they are told in the same words.
        error = "" if code == ExitCode.RELAUNCH else error
        return self._ended(client, machine, now, code, error=error)

    def _forget(self, client: str) -> None:
        self.members.discard(client)
        self._machines.pop(client, None)
        self._due.pop(client, None)

    def failed(self, client: str, now: float) -> Waiting | GaveUp | None:
        """Take the failure of its launcher."""
        machine = self._machines.get(client)
        if machine is None or machine.state is not State.RUNNING:
            return None
        return self._ended(client, machine, now)

    def next_due(self) -> float | None:
        """Return the time of the next launch, or None."""
        return min(self._due.values(), default=None)

    def take_due(self, now: float) -> list[str]:
        """Return the clients to launch now, once each."""
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
        error: str = "",
    ) -> Waiting | GaveUp | None:
        for effect in machine.handle(Exited(code, error), now):
            if isinstance(effect, Wait):
                seconds = after_s + effect.seconds
                self._due[client] = now + seconds
                return Waiting(client, seconds, why or effect.why)
            if isinstance(effect, End):
                return GaveUp(client, effect.why)
        return None
