"""Decides which versions are announced and sent to which clients. Pure.

Clients pull: a version is announced, and streamed to each client that asks: the coded update if it
holds the version before (checked by digest), else the full version. In a run of zeroth order a
version is scalars: a client that is behind gets those of all versions that it missed in one stream,
up to `history` of them, even where the digest of its version is forgotten: it compares that of the
result. Where clients train in rounds, a client that holds the version before waits for the new one:
it is sent with its announcement, and the client's Fetch, which crosses it, is not answered again
(docs/adr/0002). With scalars no Fetch crosses it: each is answered.

A version of the weights of all groups does not follow the version before. It has a coded update
from the global weights before (`global_base`), which a client that kept those applies whatever
version it holds; any other client gets it, or the newest one, in full.

All clients that hold a version must hold the same bits. One that computed another digest gets the
full version, and the operator an alarm. When that happens to a version again, the parameter server
verifies its own files of it, which shows on which side the damage is.

A parameter server may be started from an older copy of its run directory, or its operator may go
back (--from-version), while clients hold later versions. They go back with it, which is an alarm
unless the ledger has a rollback that made just that version, with that digest, void.
"""

from __future__ import annotations

from attrs import field, mutable

from fsl_async.roles.machine import Done, Effect, Note, Received, Send
from fsl_async.roles.phrasing import MessageThrottle, gone_words
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.deltas import Deltas
from fsl_async.roles.sync.progress import RunPosition, RunProgress
from fsl_async.roles.sync.ps_state import Member
from fsl_async.roles.sync.triggers import Trigger

READ_AT = 2
"""Number of differing digests of one version at which the parameter server verifies its files."""
SHOWN = 0.02
"""Difference of two positions that is worth 100 bytes."""
LONGEST_CHAIN = 6
"""Updates that are about as many bytes as a full version. A client moves onto one version in a
step, so where versions follow each other as fast as steps, only a full one lets it catch up."""
REMEMBERED_ALARMS = 8
"""Versions for which differing digests are counted."""


@mutable
class Serving:
    """Announces and sends versions. It shares the machine's members and deltas."""

    members: dict[str, Member]
    deltas: Deltas
    progress: RunProgress
    trigger: Trigger
    history: int = 0  # versions whose scalars a client replays at most; 0: versions are no scalars
    global_version: int = -1  # the newest one made of global weights
    global_base: str = ""  # the digest from which its coded update leads; empty: there is none
    is_exact: bool = True  # whether that version is global weights, to the bit
    void: dict[int, str] = field(factory=dict)  # digests of versions that rollbacks made void
    _undone: set[str | int] = field(factory=set)
    """Clients that held a version that is not in the run, and these versions."""
    _pushed: dict[str, tuple[int, int]] = field(factory=dict)
    """Peer -> the version pushed to it, and the one that it held then."""
    _differing: dict[int, dict[str, int]] = field(factory=dict)
    """Version -> peer -> how often it computed a differing digest."""
    _astray: dict[str, int] = field(factory=dict)  # peer -> version that it holds with other digest
    _throttle: MessageThrottle = field(factory=lambda: MessageThrottle(by_thing=True))

    @property
    def chains(self) -> bool:
        """Whether a client far behind gets update after update, instead of the full version."""
        return self.trigger.selection.announces_to_all

    @property
    def longest_chain(self) -> int:
        """Versions that a client catches up by updates; 0: any number."""
        return LONGEST_CHAIN if self.trigger.clients_lead else 0

    @property
    def version(self) -> int:
        """The newest durable version, -1 before there is one."""
        return self.deltas.version

    @property
    def digest(self) -> str:
        """The digest of the newest durable version; empty before there is one."""
        return self.deltas.digests.get(self.deltas.version, "")

    def announcement(self, peer: str, now: float) -> Effect:
        """Announce the newest version, and where the run is, to one client."""
        position = self.progress.position(now)
        return Send(peer, msg.Announce(self.version, self.digest, position))

    def lineage(self, peer: str) -> list[Effect]:
        """Announce this run's version of a number that a client holds with another digest."""
        held = self._astray.pop(peer, -1)
        digest = self.deltas.digests.get(held)
        return [Send(peer, msg.Announce(held, digest))] if digest else []

    def announce_to(self, peer: str, now: float) -> list[Effect]:
        """Announce the newest version to one client, and push it if the client waits for it."""
        announced = [self.announcement(peer, now)]
        held = self.members[peer].version
        if self.history:
            # What is on its way arrives first; a client that cannot apply it asks again.
            held = max(held, self.members[peer].sent)
            oldest = self.version - self.history
        else:
            oldest = self.version - 1 if self.chains else 0
        if not self.trigger.trains or not max(0, oldest) <= held < self.version:
            return announced  # a client without a version may have published this one
        if self.history:
            return [self._scalars(peer, held, now)]
        self._pushed[peer] = self.version, held
        kind = "update" if self.chains else "full"
        return [*announced, do.SendVersion(peer, kind, self.version)]

    def _scalars(self, peer: str, since: int, now: float) -> Effect:
        """Send the scalars since a version, with the announcement of the newest one."""
        position, member = self.progress.position(now), self.members[peer]
        member.sent = self.version
        if member.position is not None and is_near(position, member.position):
            position = RunPosition()
        else:
            member.position = position
        return do.SendVersion(peer, "seeds", self.version, since, self.digest, position)

    def _full(self, peer: str) -> Effect:
        """Send the newest version in full; no scalars follow, and no round, until it is held."""
        if self.history:
            member = self.members[peer]
            member.version = member.sent = -1
        return do.SendVersion(peer, self._full_kind, self.version)

    @property
    def _full_kind(self) -> str:
        is_global = self.version == self.global_version and self.is_exact
        return "global_full" if is_global else "full"

    def take_global(self, event: ev.VersionCommitted) -> None:
        """Note a version of the weights of all groups; the first one is version 0."""
        self.global_version, self.global_base = event.version, event.global_base
        self.is_exact = event.made_of != "late"

    def announce(self, now: float) -> list[Effect]:
        """Announce the newest version to all clients that attached a model."""
        return [effect for name in self._attached() for effect in self.announce_to(name, now)]

    def announce_position(self, now: float) -> list[Effect]:
        """Announce to all clients where the run is, with the version that they know."""
        return [self.announcement(name, now) for name in self._attached()]

    def _attached(self) -> list[str]:
        return [name for name, member in self.members.items() if member.attached]

    def forget(self, peer: str) -> None:
        """Forget a push that has ended."""
        self._pushed.pop(peer, None)

    def check_lineage(self, event: ev.ClientHello) -> list[Effect]:
        """Report a client that holds a version that is not in the run: a line for each of both."""
        peer, held, newest = event.peer, event.version, self.version
        is_known = held <= newest and self.deltas.digests.get(held, event.digest) == event.digest
        if not is_known and held in self.deltas.digests:
            self._astray[peer] = held
        if held < 0 or is_known or {peer, held} & self._undone:
            return []
        self._undone |= {peer, held}
        gone = max(1, held - newest)
        words = gone_words(newest, held, gone * self.progress.tokens // max(1, newest))
        text = f"{peer} holds a version that this run lacks: {words}"
        if self.void.get(held) == event.digest:
            return [Note(f"{text}; the rollback with --from-version is on record")]
        text += "; the parameter server was started from an older copy of its run directory"
        return [Note(text, "warning", {"alarm": "rollback", "gone": gone, "client": peer})]

    def fetch(self, event: Received[msg.Fetch], now: float) -> list[Effect]:
        """Send the next version after the one that a client holds."""
        peer, asked = event.peer, event.message
        if peer not in self.members or self.version < 0:
            return []
        if asked.version == self.version and asked.digest == self.digest:
            return [self.announcement(peer, now)]
        known = self.deltas.digests.get(asked.version, asked.digest) == asked.digest
        if self._pushed.pop(peer, None) == (self.version, asked.version) and known:
            return []  # it was pushed already
        if self.history:
            # A client asks only for scalars that it did not get, or could not use.
            replays = known and 0 < self.version - asked.version <= self.history
            if replays and asked.version >= 0:
                return [self._scalars(peer, asked.version, now)]
            return [self._full(peer)]
        if asked.version < self.global_version:
            steps = self.version - self.global_version
            is_short = not self.longest_chain or steps < self.longest_chain
            if self.global_base and asked.global_digest == self.global_base and is_short:
                return [do.SendVersion(peer, "global", self.global_version)]
            return [do.SendVersion(peer, self._full_kind, self.version)]
        near = asked.version == self.version - 1 or (self.chains and asked.version < self.version)
        if self.longest_chain and self.version - asked.version > self.longest_chain:
            near = False
        if near and self.deltas.digests.get(asked.version) == asked.digest:
            # However far the client is behind: on a slow path a full version would be outdated on
            # arrival. The shell sends the full version if the update is not kept any more.
            return [do.SendVersion(peer, "update", asked.version + 1)]
        return [do.SendVersion(peer, self._full_kind, self.version)]

    def held(self, event: Received[msg.Holding], now: float) -> list[Effect]:
        """Record the version that a client holds, and check its digest."""
        peer, held = event.peer, event.message
        member = self.members.get(peer)
        if member is None:
            return []
        expected = self.deltas.digests.get(held.version)
        if expected is not None and expected != held.digest:
            text = (
                f"{peer} computed digest {held.digest} for version {held.version},"
                f" which has {expected}; it gets the version in full"
            )
            more = self._throttle.lets(peer, now)
            alarm = Note(f"{text}{more}", "warning", {"alarm": "digest", "client": peer})
            full = [self._full(peer), *self._differs(held.version, peer)]
            return full if more is None else [alarm, *full]
        member.version = held.version
        self.forget(peer)
        return []

    def _differs(self, version: int, peer: str) -> list[Effect]:
        """Count a differing digest; at the second one, of any client, verify the files here."""
        for old in [one for one in self._differing if one < self.version - REMEMBERED_ALARMS]:
            del self._differing[old]
        peers = self._differing.setdefault(version, {})
        peers[peer] = peers.get(peer, 0) + 1
        return [do.VerifyVersion(version)] if sum(peers.values()) == READ_AT else []

    def verified(self, event: Done[do.VerifyVersion], now: float) -> list[Effect]:
        """Report on which side the damage is."""
        version = event.of.version
        names = ", ".join(sorted(self._differing.get(version, ())))
        if not event.problem:
            text = (
                f"version {version} is intact at the parameter server, byte by byte, so the"
                f" damage is at {names}: check memory and disk there, and that it runs the same"
                " release"
            )
        else:
            text = (
                f"version {version} was damaged at the parameter server, not at {names};"
                " see the line above"
            )
        return [Note(text, "warning", {"alarm": "verdict"})]

    def behind(self) -> set[str]:
        """The clients that attached a model and do not hold the newest version."""
        return {
            name
            for name, member in self.members.items()
            if member.attached and member.version != self.version and member.trains
        }


def is_near(position: RunPosition, other: RunPosition) -> bool:
    """Whether a later position differs by less than SHOWN: in progress, or in tokens without it."""
    if (position.is_planned, position.decays_from) != (other.is_planned, other.decays_from):
        return False
    if position.is_planned:
        return abs(position.progress - other.progress) < SHOWN
    return position.tokens - other.tokens < SHOWN * other.tokens
