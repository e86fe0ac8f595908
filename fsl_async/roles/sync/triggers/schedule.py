"""Decides when a round opens, and how long it waits for answers. Pure. Times in seconds."""

from __future__ import annotations

from typing import Protocol

from attrs import frozen

PAUSE_S = 1.0
"""Pause after a round without a version, so that idle clients are not called in a loop."""


class Schedule(Protocol):
    """A rule of times.

    cap_s: how long a round waits for an answer. again_s: how long a round that is open beyond its
    cap waits before it is evaluated again.
    """

    @property
    def cap_s(self) -> float: ...  # noqa: D102
    @property
    def again_s(self) -> float: ...  # noqa: D102

    def after_version(self, called_at: float | None, now: float) -> float:
        """When to open a round after a version. called_at: of the last round; None at version 0."""
        ...

    def after_close(self, called_at: float, now: float) -> float:
        """When to open a round after one that made no version."""
        ...

    def after_start(self, since_version_s: float, now: float) -> float:
        """When to open a round in a parameter server that continues a run."""
        ...

    def when_short(self, now: float) -> float | None:
        """When to try again while too few clients are here; None: as soon as another one is."""
        ...


@frozen
class Periodic:
    """A round every `every_s`. drain_s: for clients to reconnect after a restart."""

    every_s: float
    drain_s: float

    @property
    def cap_s(self) -> float:
        """A little less than a period, so that a round is over before the next one."""
        return 0.95 * self.every_s

    @property
    def again_s(self) -> float:
        """A period."""
        return self.every_s

    def after_version(self, called_at: float | None, now: float) -> float:
        """A period after the last call, and at least a tenth of one for clients to rebase."""
        if called_at is None:
            return now + self.every_s
        return max(called_at + self.every_s, now + 0.1 * self.every_s)

    def after_close(self, called_at: float, now: float) -> float:
        """A period after the last call."""
        return max(called_at + self.every_s, now)

    def after_start(self, since_version_s: float, now: float) -> float:
        """A period after the last version, as without the restart.

        So a parameter server that is often killed still makes versions. The clients get `drain_s`
        to reconnect, and a wrong wall clock costs at most a period.
        """
        left_s = max(self.every_s - since_version_s, self.drain_s)
        return now + min(left_s, self.every_s)

    def when_short(self, now: float) -> float | None:
        """A period later."""
        return now + self.every_s


@frozen
class Continuous:
    """A version may be made `least_s` after the one before. drain_s: as for `Periodic`.

    every_s: a round that calls all clients, the last one of a run, waits this long for them.
    """

    every_s: float
    least_s: float
    drain_s: float

    @property
    def cap_s(self) -> float:
        """As for `Periodic`."""
        return 0.95 * self.every_s

    @property
    def again_s(self) -> float:
        """A period."""
        return self.every_s

    def after_version(self, called_at: float | None, now: float) -> float:
        """After the least time, in which a version's files are written."""
        return now + self.least_s

    def after_close(self, called_at: float, now: float) -> float:
        """After a pause."""
        return now + max(self.least_s, PAUSE_S, 0.1 * self.every_s)

    def after_start(self, since_version_s: float, now: float) -> float:
        """After the time for clients to reconnect."""
        return now + self.drain_s

    def when_short(self, now: float) -> float | None:
        """As soon as another client is here."""
        return None


@frozen
class BackToBack:
    """A round as soon as there is a version. drain_s: for clients to reconnect after a restart."""

    cap_s: float
    drain_s: float

    @property
    def again_s(self) -> float:
        """One more cap."""
        return self.cap_s

    def after_version(self, called_at: float | None, now: float) -> float:
        """At once."""
        return now

    def after_close(self, called_at: float, now: float) -> float:
        """After a pause."""
        return now + PAUSE_S

    def after_start(self, since_version_s: float, now: float) -> float:
        """After the time for clients to reconnect."""
        return now + self.drain_s

    def when_short(self, now: float) -> float | None:
        """As soon as another client is here."""
        return None
