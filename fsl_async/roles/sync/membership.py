"""Decides which clients take part: each has its own shard, and all have the run's model. Pure.

Admission. A client that opens a session gets a shard. Its incarnation and its lease are
on disk before it is welcomed: Admit, then Welcome. If both are on disk already, it
is welcomed at once. If no shard is left, it is refused, with the names of the clients that have
one.

Model. Before version 0 the model of the first client is the run's, while that client or another
with the same model is connected; afterwards a new client may bring another model (UseModel). Once
the initial weights have arrived the run's model is fixed. A client with another model is rejected.
For one with the run's model the lease becomes permanent: KeepShard.

A lease is provisional when its client is admitted, and on disk before the client is welcomed: a
parameter server that is killed at that moment must not give the shard to another client. A client
that fails before it has attached the run's model (wrong data path, wrong model) loses the lease to
a client that finds no other shard: at once after a goodbye, else after RECLAIM_S, because after a
loss of the network or of the parameter server the client still prepares to train on it.

Version 0 is published by the first client that attached a model, and by the next one when that
fails (`Publishing`).

    ClientHello             Welcome | Admit | Refuse and a Note
    Admit is done           Welcome, or EndSession if it could not be written: the client reconnects
    ModelAttached           UseModel, KeepShard; Reject
    KeepShard is done       the client is attached, or EndSession
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attrs import field, mutable

from fsl_async.roles.machine import Deadlines, Done, Effect, EndSession, Note, Refuse, Send
from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.delta import TRAIN
from fsl_async.roles.sync.ps_state import Member
from fsl_transport.rate_limit import Rate, TokenBucket

REFUSALS_SHOWN = Rate(0.2, 10.0)
"""Limit of refusals that become a line in the log, which a peer must not be able to fill."""
SHOWN_HOLDERS = 8
RECLAIM_S = 60.0
MOST_SHARDS = 100_000
"""Limit of clients where data is not divided."""


class ShardLeases:
    """Leases by client. Times in seconds of the caller's clock."""

    def __init__(self, count: int) -> None:
        """count: of shards; 0 where the data is not divided: each client gets one."""
        self.count = count or MOST_SHARDS
        self._leases: dict[str, int] = {}
        self._provisional: set[str] = set()
        self._free_from: dict[str, float] = {}  # of clients that are away, with a provisional lease

    def recovered(self, leases: Mapping[str, int], provisional: Iterable[str], now: float) -> None:
        """Restore the leases on disk. provisional: the clients whose lease is provisional."""
        self._leases, self._provisional = dict(leases), set(provisional)
        self._free_from = dict.fromkeys(self._provisional, now + RECLAIM_S)

    @property
    def holders(self) -> list[str]:
        """All clients that have a lease, by name."""
        return sorted(self._leases)

    def is_permanent(self, client: str, shard: int) -> bool:
        """Whether the client has a permanent lease of that shard."""
        return self._leases.get(client) == shard and client not in self._provisional

    def is_provisional(self, client: str) -> bool:
        """Whether the client's lease is provisional."""
        return client in self._provisional

    def left(self, client: str, reason: str, now: float) -> None:
        """Start the time after which the provisional lease of a lost session is free."""
        if client in self._provisional:
            at_once = reason in {"bye", "revoked"}
            self._free_from[client] = now if at_once else now + RECLAIM_S

    def pick(self, client: str, trains: int, now: float) -> int | None:
        """The shard that a client has or may have; None: there is none.

        An unused one comes before one of a lost client. trains: the shard that the client trains on
        already; -1: none.
        """
        self._free_from.pop(client, None)
        held = self._leases.get(client)
        if held is not None and held < self.count:
            return held
        taken = set(self._leases.values())
        gone = {self._leases[other] for other, at in self._free_from.items() if now >= at}
        if trains >= 0:  # it may not move to data that another client trains on
            is_free = trains < self.count and trains not in taken
            return trains if is_free or trains in gone else None
        unused = next((shard for shard in range(self.count) if shard not in taken), None)
        free = {shard for shard in gone if shard < self.count}
        return min(free, default=None) if unused is None else unused

    def lease_provisionally(self, client: str, shard: int) -> None:
        """Lease a shard provisionally; another client loses its provisional lease of it."""
        for other in [other for other in self._provisional if self._leases[other] == shard]:
            self.revoke(other)
        self._leases[client] = shard
        self._provisional.add(client)

    def keep(self, client: str) -> None:
        """Make a lease permanent."""
        self._provisional.discard(client)

    def revoke(self, client: str) -> None:
        """Remove a lease that could not be written, or that another client gets."""
        self._leases.pop(client, None)
        self._provisional.discard(client)
        self._free_from.pop(client, None)


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
        if event.duty != TRAIN:
            self.members[event.peer] = Member(event.incarnation, shard=0, duty=event.duty)
            return True
        shard = self.shards.pick(event.peer, event.shard, now)
        if shard is None:
            self.members.pop(event.peer, None)
            return False
        self.members[event.peer] = Member(event.incarnation, shard=shard)
        return True

    def admit(self, peer: str) -> list[Effect]:
        """Welcome a member as soon as its incarnation and its lease are on disk."""
        member = self.members[peer]
        is_permanent = not member.trains or self.shards.is_permanent(peer, member.shard)
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

    def admitted(self, event: Done[do.Admit]) -> list[Effect]:
        """Welcome a client whose admission is on disk; if that failed, end its session."""
        peer, incarnation = event.of.peer, event.of.incarnation
        if event.problem:
            if self.shards.is_provisional(peer):
                self.shards.revoke(peer)
            return [EndSession(peer, event.problem)]
        self.incarnations[peer] = max(incarnation, self.incarnations.get(peer, -1))
        member = self.members.get(peer)
        if member is None or member.incarnation != incarnation:
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

    def kept(self, event: Done[do.KeepShard]) -> list[Effect]:
        """Make a lease permanent that is so on disk; end the session if it could not be written."""
        if event.problem:
            return [EndSession(event.of.peer, event.problem)]
        self.shards.keep(event.of.peer)
        return []


@mutable
class Publishing:
    """The choice of the publisher. It shares the machine's members and deadlines.

    "publish" is its own deadline.
    """

    members: dict[str, Member]
    deadlines: Deadlines
    retry_s: float
    name: str | None = None
    received: bool = False  # all initial weights arrived; version 0 is being written
    over: bool = False  # version 0 is durable

    def choose(self) -> list[Effect]:
        """Ask the first attached client, unless one is asked already or a failure is too recent."""
        if self.over or self.received or self.name is not None:
            return []
        if self.deadlines.when("publish") is not None:
            return []
        for name, member in self.members.items():
            if member.attached:
                self.name = name
                text = f"{name} is first and publishes the initial weights"
                return [Note(text), Send(name, msg.Publish())]
        return []

    def left(self, peer: str) -> list[Effect]:
        """Ask the next client if the publisher's session ended before its weights arrived."""
        if self.name != peer or self.received:
            return []
        self.name = None
        text = f"{peer} left before its initial weights arrived"
        return [Note(text, "warning"), *self.choose()]

    def failed(self, reason: str, now: float) -> list[Effect]:
        """Ask again after a pause, because a disk stays full for a while; prefer another client."""
        if self.over:
            return []
        self.received = False
        peer, self.name = self.name, None
        if peer is not None and peer in self.members:
            self.members[peer] = self.members.pop(peer)
        self.deadlines.set("publish", now + self.retry_s)
        return [Note(f"{reason}; next try in {self.retry_s:g} s", "warning")]

    def done(self) -> None:
        """Stop: version 0 is durable."""
        self.over, self.name = True, None
        self.deadlines.cancel("publish")
