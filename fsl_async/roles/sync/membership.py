"""Decides which clients take part: each has its own shard, and all have the run's model. Pure.

Admission. A client that opens a session gets a shard (`shards`). Its incarnation and its lease are
on disk before it is welcomed: Admit, then Admitted, then Welcome. If both are on disk already, it
is welcomed at once. If no shard is left, it is refused, with the names of the clients that have
one.

Model. Before version 0 the model of the first client is the run's, while that client or another
with the same model is connected; afterwards a new client may bring another model (UseModel). Once
the initial weights have arrived the run's model is fixed. A client with another model is rejected.
For one with the run's model the lease becomes permanent: KeepShard, then ShardKept.

    ClientHello             Welcome | Admit | Refuse and a Note
    Admitted                Welcome, or EndSession if it could not be written: the client reconnects
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

REFUSALS_SHOWN = Rate(0.2, 10.0)
"""Limit of refusals that become a line in the log, which a peer must not be able to fill."""
SHOWN_HOLDERS = 8


@mutable
class Membership:
    """The members of a run. It shares the machine's dict of them."""

    members: dict[str, Member]
    shards: ShardLeases
    incarnations: dict[str, int] = field(factory=dict)
    """Client -> its newest incarnation on disk."""
    model: str = ""
    """Fingerprint of the run's model; empty until a client has attached one since the start."""
    _shown: TokenBucket = field(factory=lambda: TokenBucket(REFUSALS_SHOWN, 0.0))

    def recovered(self, event: ev.Recovered, now: float) -> None:
        """Restore the state on disk."""
        self.shards.recovered(event.leases, event.provisional, now)
        self.incarnations = dict(event.incarnations)

    def enter(self, event: ev.ClientHello, now: float) -> bool:
        """Make a client a member, in this incarnation. False: there is no shard for it."""
        shard = self.shards.pick(event.peer, event.shard, now)
        if shard is None:
            self.members.pop(event.peer, None)
            return False
        self.members[event.peer] = Member(event.incarnation, shard=shard)
        return True

    def admit(self, peer: str) -> list[Effect]:
        """Welcome a member as soon as its incarnation and its lease are on disk."""
        member = self.members[peer]
        is_permanent = self.shards.is_permanent(peer, member.shard)
        if is_permanent and self.incarnations.get(peer, -1) >= member.incarnation:
            return [do.Welcome(peer, member.shard)]
        if not is_permanent:
            # At once, so that no other client gets the same shard meanwhile.
            self.shards.lease_provisionally(peer, member.shard)
        return [do.Admit(peer, member.incarnation, None if is_permanent else member.shard)]

    def begin_again(self) -> list[Effect]:
        """End sessions from before version 0: their models were compared with no run's model."""
        return [
            EndSession(name, "the run has a model now: attach again")
            for name, member in self.members.items()
            if member.attached or member.agrees
        ]

    def refuse(self, peer: str, now: float) -> list[Effect]:
        """Refuse a client for which there is no shard."""
        holders = ", ".join(self.shards.holders[:SHOWN_HOLDERS])
        text = (
            f"all {self.shards.count} data shards are taken (by {holders}): start this client again"
            " under one of these names, or set data.shards (or sync.clients) higher at the"
            " parameter server"
        )
        refusal = Refuse(peer, "shards", text)
        note = Note(f"{peer} is refused: {text}", "warning")
        return [note, refusal] if self._shown.take(now) else [refusal]

    def admitted(self, event: ev.Admitted) -> list[Effect]:
        """Welcome a client whose admission is on disk; if that failed, end its session."""
        peer = event.peer
        if event.problem is not None:
            if self.shards.is_provisional(peer):
                self.shards.revoke(peer)
            return [EndSession(peer, event.problem)]
        self.incarnations[peer] = max(event.incarnation, self.incarnations.get(peer, -1))
        member = self.members.get(peer)
        if member is None or member.incarnation != event.incarnation:
            return []  # it left meanwhile, or is replaced by another process
        return [do.Welcome(peer, member.shard)]

    def attached(self, event: ev.ModelAttached, *, is_fixed: bool) -> tuple[bool, list[Effect]]:
        """Return whether a member's model is the run's, and the effects of that.

        is_fixed: the run has initial weights, so its model cannot change.
        """
        peer, member = event.peer, self.members[event.peer]
        effects: list[Effect] = []
        is_open = not is_fixed and not any(one.agrees for one in self.members.values())
        if is_open and event.fingerprint != self.model:
            self.model = event.fingerprint
            effects.append(do.UseModel(peer, event.values))
        elif event.difference is not None:
            # Of frozen tensors the sentence says itself what to do.
            is_frozen = event.difference.startswith("frozen tensor ")
            advice = "" if is_frozen else "; use the same model configuration at every client"
            text = f"the model of {peer} is not the run's: {event.difference}{advice}"
            del self.members[peer]
            return False, [Send(peer, msg.Reject("model", text)), Note(text, "warning")]
        member.agrees = True
        if self.shards.is_provisional(peer):
            effects.append(do.KeepShard(peer, member.incarnation))
        return True, effects

    def kept(self, event: ev.ShardKept) -> list[Effect]:
        """Make a lease permanent that is so on disk; end the session if it could not be written."""
        if event.problem is not None:
            return [EndSession(event.peer, event.problem)]
        self.shards.keep(event.peer)
        return []
