"""Which version a client holds, which is the run's newest, and what of the way from one to the other is asked for or here. Pure.

A new version is fetched as soon as it is announced, from what is held. What fails is asked for again after a pause: a fault that
stays must not move whole models in a tight loop.
"""

from __future__ import annotations

from attrs import field, mutable

from fsl_async.roles.machine import Deadlines, Effect, Send
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.client_state import SERVER, Held


@mutable
class VersionSync:
    """The client's way from version to version. It shares the machine's deadlines; "fetch" is its own."""

    deadlines: Deadlines
    latest: Held = field(factory=Held)
    base: Held = field(factory=Held)
    asked: int | None = None  # a version that was asked for or is on its way
    here: int | None = None  # a version that is here and not applied yet
    publishing: bool = False
    adopted: bool = False  # version 0 is this client's own weights

    def forget_session(self) -> None:
        """Nothing that was asked in a session is answered in the next one."""
        self.publishing = False
        self.asked = None
        self.deadlines.cancel("fetch")

    def later(self, now: float, pause_s: float) -> None:
        """Ask again if something is missing then, but not in a tight loop."""
        self.asked = self.latest.version
        self.deadlines.set("fetch", now + pause_s)

    def fetch(self) -> list[Effect]:
        """Ask for what is missing, unless that was done."""
        missing = self.latest.version >= 0 and self.base != self.latest
        if self.publishing or not missing or self.asked is not None or self.here is not None:
            return []
        self.asked = self.latest.version
        return [Send(SERVER, msg.Fetch(self.base.version, self.base.digest))]

    def fits(self, event: ev.FetchOffered) -> bool:
        """Whether an offered stream leads on from what is held, to something that is missing."""
        follows = event.kind == "full" or event.version == self.base.version + 1
        return follows and self.base != self.latest and self.here is None

    def receive(self, event: ev.FetchOffered) -> list[Effect]:
        """Take an offered stream."""
        self.asked = event.version
        self.deadlines.cancel("fetch")
        return [do.ReceiveVersion(event.stream, event.kind, event.version)]

    def received(self, version: int) -> None:
        """What leads to `version` is here."""
        self.asked, self.here = None, version
        self.deadlines.cancel("fetch")

    def replaced(self, event: ev.BaseReplaced) -> str | None:
        """The base is another. Returns what is wrong with it, or None."""
        self.base = Held(event.version, event.digest)
        if event.version == self.latest.version and event.digest != self.latest.digest:
            return f"version {event.version} has digest {event.digest} here and {self.latest.digest} at the server: fetching it in full"
        return None

    def holding(self) -> Effect:
        """Say what is held."""
        return Send(SERVER, msg.Holding(self.base.version, self.base.digest))
