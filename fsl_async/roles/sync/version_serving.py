"""Which version is told, and sent, to whom. Pure.

Clients pull: a version is announced, and streamed to whoever asks, as the coded update when the client holds the version before (checked
by digest), else in full. Where rounds are trained as such, whoever holds the version before stands still until it has the new one: it is sent with
its announcement, and the question that comes all the same is not answered a second time (docs/adr/0072). All who hold a version must hold the same bits:
one that computed another digest gets the version in full, and the operator an alarm. When that happens to a version again, the server
reads its own files of it: that tells on which side the damage is.
"""

from __future__ import annotations

from attrs import field, mutable

from fsl_async.roles.machine import Effect, Note, Send
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.deltas import DeltaBook
from fsl_async.roles.sync.ps_state import Member

READ_AT = 2
"""Digests that differ, for one version, after which the server reads its own files."""
REMEMBERED_ALARMS = 8
"""Versions for which differing digests are counted."""


@mutable
class Serving:
    """The way of the versions to the clients. It shares the server's members and deltas."""

    members: dict[str, Member]
    deltas: DeltaBook
    chains: bool = True  # whoever is far behind gets update after update, else the version whole
    pushes: bool = False  # a version is sent with its announcement
    _pushed: dict[str, tuple[int, int]] = field(factory=dict)
    """Peer -> the version that is on its way unasked, and the one that it held when that was sent."""
    _differing: dict[int, dict[str, int]] = field(factory=dict)
    """Version -> peer -> how often it computed another digest for it."""

    @property
    def version(self) -> int:
        """The newest durable version, -1 before there is one."""
        return self.deltas.version

    @property
    def digest(self) -> str:
        """Its digest."""
        return self.deltas.digests.get(self.deltas.version, "")

    def announcement(self, peer: str) -> Effect:
        """Tell one client."""
        return Send(peer, msg.Announce(self.version, self.digest))

    def tell(self, peer: str) -> list[Effect]:
        """Tell one client, and send the version along where it waits for it."""
        told = [self.announcement(peer)]
        held = self.members[peer].version
        oldest = self.version - 1 if self.chains else 0
        if not self.pushes or not max(0, oldest) <= held < self.version:
            return told  # without a version, its own first weights may be this one
        self._pushed[peer] = self.version, held
        return [*told, do.SendVersion(peer, "update" if self.chains else "full", self.version)]

    def announce(self) -> list[Effect]:
        """Tell all."""
        attached = [name for name, member in self.members.items() if member.attached]
        return [effect for name in attached for effect in self.tell(name)]

    def forget(self, peer: str) -> None:
        """What was sent unasked is not under way any more."""
        self._pushed.pop(peer, None)

    def fetch(self, event: ev.FetchAsked, now: float) -> list[Effect]:
        """Send what leads on from what a client holds."""
        if event.peer not in self.members or self.version < 0:
            return []
        if event.version == self.version and event.digest == self.digest:
            return [self.announcement(event.peer)]
        known = self.deltas.digests.get(event.version, event.digest) == event.digest
        if self._pushed.pop(event.peer, None) == (self.version, event.version) and known:
            return []  # it is on its way
        near = event.version == self.version - 1 or (self.chains and event.version < self.version)
        if near and self.deltas.digests.get(event.version) == event.digest:
            # However far behind: over a slow link a whole version would be old again when it is there. The shell
            # sends it whole all the same where the update is not kept any more.
            return [do.SendVersion(event.peer, "update", event.version + 1)]
        return [do.SendVersion(event.peer, "full", self.version)]

    def held(self, event: ev.VersionHeld) -> list[Effect]:
        """Note what a client holds; what it computed must be what everybody has."""
        member = self.members.get(event.peer)
        if member is None:
            return []
        expected = self.deltas.digests.get(event.version)
        if expected is not None and expected != event.digest:
            text = (
                f"{event.peer} computed digest {event.digest} for version {event.version}, which has {expected};"
                " it gets the version in full"
            )
            alarm = Note(text, "warning", {"alarm": "digest", "client": event.peer})
            again = do.SendVersion(event.peer, "full", self.version)
            return [alarm, again, *self._differs(event.version, event.peer)]
        member.version = event.version
        self.forget(event.peer)
        return []

    def _differs(self, version: int, peer: str) -> list[Effect]:
        """Count it; the second time, by whichever client, the files here are read."""
        for old in [one for one in self._differing if one < self.version - REMEMBERED_ALARMS]:
            del self._differing[old]
        peers = self._differing.setdefault(version, {})
        peers[peer] = peers.get(peer, 0) + 1
        return [do.VerifyVersion(version)] if sum(peers.values()) == READ_AT else []

    def verified(self, event: ev.VersionVerified, now: float) -> list[Effect]:
        """Say on which side the damage is."""
        names = ", ".join(sorted(self._differing.get(event.version, ())))
        if event.intact:
            text = (
                f"version {event.version} is intact at this server, byte by byte, so the damage is at {names}:"
                " check memory and disk there, and that it runs the same release"
            )
        else:
            text = f"version {event.version} was damaged at this server, not at {names}; see the line above"
        return [Note(text, "warning", {"alarm": "verdict"})]

    def behind(self) -> set[str]:
        """Those who have attached a model and do not hold the newest version."""
        return {
            name
            for name, member in self.members.items()
            if member.attached and member.version != self.version
        }
