"""Leases data shards to clients. Pure; the store has the same leases on disk.

A lease is provisional when its client is admitted, and on disk before the client is welcomed: a
parameter server that is killed at that moment must not give the shard to another client. The lease
is permanent once the client has attached the run's model. A client that fails before that (wrong
data path, wrong model) loses it to a client that finds no other shard: at once after a goodbye,
else after RECLAIM_S, because after a loss of the network or of the parameter server the client
still prepares to train on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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
