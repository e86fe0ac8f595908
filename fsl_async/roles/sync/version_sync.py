"""Fetches the run's newest version, starting from the one that the client holds. Pure.

A new version is fetched as soon as it is announced. A failed fetch is repeated after a pause: a
persistent fault must not move full models in a tight loop.
"""

from __future__ import annotations

from attrs import field, frozen, mutable

from fsl_async.roles.machine import SERVER, Deadlines, Effect, Send
from fsl_async.roles.phrasing import gone_words
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync import messages as msg


@frozen
class Held:
    """A version and the digest of its weights."""

    version: int = -1
    digest: str = ""


@mutable
class VersionSync:
    """The versions of a client. It shares the machine's deadlines; "fetch" is its own."""

    deadlines: Deadlines
    latest: Held = field(factory=Held)
    base: Held = field(factory=Held)
    asked: int | None = None  # a version that was asked for or is being received
    here: int | None = None  # a version that has arrived and is not applied yet
    publishing: bool = False
    adopted: bool = False  # version 0 is this client's own weights
    by_scalars: bool = False  # versions come as scalars, with their announcement
    global_digest: str = ""  # of the global weights kept, from which a coded update may lead
    replaying: str = ""  # scalars that the worker replays, for which nothing else is taken
    tokens: int = 0  # merged by the run, as announced last
    over: bool = False  # the newest version is the last one, by the run's limits
    refuses_rollback: bool = False  # by the site's policy

    def announced(self, newest: msg.Announce | msg.Scalars) -> str:
        """Record the newest version. Returns a line if the run went back behind the last one."""
        last, before, self.latest = self.latest, self.tokens, Held(newest.version, newest.digest)
        tokens = newest.position.tokens
        self.tokens = tokens or before
        self.over = newest.position.is_planned and newest.position.progress >= 1.0
        if last.version < newest.version or last in (Held(), self.latest):
            return ""
        words = gone_words(newest.version, last.version, before - tokens)
        return f"the run has gone back behind version {last.version}: {words}"

    def forget_session(self) -> None:
        """Forget open requests: they are valid in one session only."""
        self.publishing = False
        self.asked = None
        self.deadlines.cancel("fetch")

    def later(self, now: float, pause_s: float) -> None:
        """Fetch after a pause, if the newest version is still missing then."""
        self.asked = self.latest.version
        self.deadlines.set("fetch", now + pause_s)

    def fetch(self) -> list[Effect]:
        """Ask for the newest version if it is missing and not asked for yet."""
        missing = self.latest.version >= 0 and self.base != self.latest
        if self.publishing or not missing or self.asked is not None or self.here is not None:
            return []
        self.asked = self.latest.version
        return [Send(SERVER, msg.Fetch(self.base.version, self.base.digest, self.global_digest))]

    def fits(self, meta: msg.VersionMeta) -> bool:
        """Whether an offered stream applies to the base, and a version is missing."""
        kind, version = meta.kind, meta.version
        follows = kind in {"full", "global_full"} or version == self.base.version + 1
        follows = follows or (kind == "global" and bool(self.global_digest))
        follows = follows or (kind == "seeds" and 0 <= self.base.version < version)
        is_free = self.here is None and not self.replaying
        return follows and self.base != self.latest and is_free

    def receive(self, stream: str, meta: msg.VersionMeta, *, here: bool) -> list[Effect]:
        """Accept an offered stream. here: it is no stream, but scalars that came in a message."""
        self.asked = meta.version
        self.deadlines.cancel("fetch")
        self.replaying = stream if here else ""
        return [do.ReceiveVersion(stream, meta.kind, meta.version)]

    def received(self, version: int) -> None:
        """Record that the frames of `version` have arrived."""
        self.asked, self.here, self.replaying = None, version, ""
        self.deadlines.cancel("fetch")

    def replaced(self, event: ev.BaseReplaced) -> str | None:
        """Record the new base. Returns the problem with its digest, or None."""
        self.base = Held(event.version, event.digest)
        self.global_digest = event.global_digest
        if event.version == self.latest.version and event.digest != self.latest.digest:
            return (
                f"version {event.version} has digest {event.digest} here and"
                f" {self.latest.digest} at the parameter server: fetching it in full"
            )
        return None

    def lost(self) -> None:
        """Forget the base, and the global weights from which it may have been made."""
        self.base, self.global_digest = Held(), ""

    def holding(self) -> Effect:
        """Report the version that is held."""
        return Send(SERVER, msg.Holding(self.base.version, self.base.digest))
