"""Which clients take part: each with its own shard of the data, and all with the run's model. Pure.

Admission. A client that says hello gets a shard (`shards`). Its incarnation and the lease are on disk before it is welcomed:
Admit, then Admitted, then Welcome. A client of which both are on disk is welcomed at once. Where no shard is left, it is
refused, with the names of those that have one.

Model. Before version 0 the model of the first client counts, as its weights will, while that client or another one with
the same model is here; after that a new one may bring another (UseModel). From version 0 on the run's model counts. A
client with another model is rejected. With the right one its shard becomes its own: KeepShard, then ShardKept.

    ClientHello             Welcome | Admit | Refuse and a Note
    Admitted                Welcome, or EndSession where it could not be written: it says hello again
    ModelAttached           UseModel, KeepShard; Reject
    ShardKept               the client is attached, or EndSession
"""

from __future__ import annotations

from attrs import field, mutable

from fsl_async.roles.machine import Effect, EndSession, Note, Refuse, Send
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.ps_state import Member
from fsl_async.roles.sync.shards import ShardLeases
from fsl_transport.rate_limit import Rate, TokenBucket

REFUSALS_TOLD = Rate(0.2, 10.0)
"""Of refusals, those that become a line for people: an unauthenticated peer must not write the log."""
SHOWN_HOLDERS = 8


@mutable
class Membership:
    """It shares the machine's members."""

    members: dict[str, Member]
    shards: ShardLeases
    incarnations: dict[str, int] = field(factory=dict)
    """The newest of each client, as the disk has it."""
    model: str = ""
    """Fingerprint of the model that counts, as far as a client has brought one since the start."""
    _told: TokenBucket = field(factory=lambda: TokenBucket(REFUSALS_TOLD, 0.0))

    def recovered(self, event: ev.Recovered, now: float) -> None:
        """Take what the disk has."""
        self.shards.recovered(event.leases, event.loans, now)
        self.incarnations = dict(event.incarnations)

    def enter(self, event: ev.ClientHello, now: float) -> bool:
        """A client is here, in this incarnation. False: there is no shard for it, and it is no member."""
        shard = self.shards.pick(event.peer, event.shard, now)
        if shard is None:
            self.members.pop(event.peer, None)
            return False
        self.members[event.peer] = Member(event.incarnation, shard=shard)
        return True

    def admit(self, peer: str) -> list[Effect]:
        """Welcome a member, once what the next parameter server must know of it is on disk."""
        member = self.members[peer]
        is_own = self.shards.is_own(peer, member.shard)
        if is_own and self.incarnations.get(peer, -1) >= member.incarnation:
            return [do.Welcome(peer, member.shard)]
        if not is_own:
            self.shards.lend(
                peer, member.shard
            )  # at once, so that no other client is told the same
        return [do.Admit(peer, member.incarnation, None if is_own else member.shard)]

    def refuse(self, peer: str, now: float) -> list[Effect]:
        """There is no shard for it."""
        holders = ", ".join(self.shards.holders[:SHOWN_HOLDERS])
        text = (
            f"all {self.shards.count} data shards are taken (by {holders}): start this client again under one of"
            " these names, or set data.shards (or sync.clients) higher at the server"
        )
        refusal = Refuse(peer, "shards", text)
        told = Note(f"{peer} is refused: {text}", "warning")
        return [told, refusal] if self._told.take(now) else [refusal]

    def admitted(self, event: ev.Admitted) -> list[Effect]:
        """It is on disk, or could not be written."""
        peer = event.peer
        if event.problem is not None:
            if self.shards.is_provisional(peer):
                self.shards.take_back(peer)
            return [EndSession(peer, event.problem)]
        self.incarnations[peer] = max(event.incarnation, self.incarnations.get(peer, -1))
        member = self.members.get(peer)
        if member is None or member.incarnation != event.incarnation:
            return []  # it left, or came back as another process, meanwhile
        return [do.Welcome(peer, member.shard)]

    def attached(self, event: ev.ModelAttached, version: int) -> tuple[bool, list[Effect]]:
        """Whether a member's model is the run's, and what follows from it."""
        peer, member = event.peer, self.members[event.peer]
        effects: list[Effect] = []
        is_open = version < 0 and not any(one.agrees for one in self.members.values())
        if is_open and event.fingerprint != self.model:
            self.model = event.fingerprint
            effects.append(do.UseModel(peer, event.values))
        elif event.difference is not None:
            text = (
                f"the model of {peer} is not the run's: {event.difference};"
                " use the same model configuration at every client"
            )
            del self.members[peer]
            return False, [Send(peer, msg.Reject("model", text)), Note(text, "warning")]
        member.agrees = True
        if self.shards.is_provisional(peer):
            effects.append(do.KeepShard(peer, member.incarnation))
        return True, effects

    def kept(self, event: ev.ShardKept) -> list[Effect]:
        """A shard is its client's own on disk, or could not be written."""
        if event.problem is not None:
            return [EndSession(event.peer, event.problem)]
        self.shards.keep(event.peer)
        return []
