"""Which client trains which part of the data. Pure; the store has the same on disk.

A shard is leased provisionally when its client is admitted, on disk before the client is told: a parameter server that is
killed at that moment must not give it to another. It is the client's own for good once the client has attached a model that
fits. A client that fails before that (wrong data path, wrong model) loses it to one that finds no other: at once when it
said goodbye, else after RECLAIM_S, because a site whose network is away, or whose parameter server was killed, is still
preparing to train on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

RECLAIM_S = 60.0


class ShardLeases:
    """Leases by client. Times in seconds of the caller's clock."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._leases: dict[str, int] = {}
        self._provisional: set[str] = set()
        self._free_from: dict[str, float] = {}  # of clients that are away, with a provisional lease

    def recovered(self, leases: Mapping[str, int], loans: Iterable[str], now: float) -> None:
        """Take what the disk has."""
        self._leases, self._provisional = dict(leases), set(loans)
        self._free_from = dict.fromkeys(self._provisional, now + RECLAIM_S)

    @property
    def holders(self) -> list[str]:
        """All clients that have one, by name."""
        return sorted(self._leases)

    def is_own(self, client: str, shard: int) -> bool:
        """Whether it is that client's for good."""
        return self._leases.get(client) == shard and client not in self._provisional

    def is_provisional(self, client: str) -> bool:
        """Whether it has one that is not its own for good."""
        return client in self._provisional

    def left(self, client: str, reason: str, now: float) -> None:
        """Its session ended."""
        if client in self._provisional:
            at_once = reason in {"bye", "revoked"}
            self._free_from[client] = now if at_once else now + RECLAIM_S

    def pick(self, client: str, trains: int, now: float) -> int | None:
        """The shard that a client has or can have: an unused one, else one of a client that is gone. None: there is none.

        trains: the shard that it trains on already; -1: none.
        """
        self._free_from.pop(client, None)
        held = self._leases.get(client)
        if held is not None and held < self.count:
            return held
        unused = set(range(self.count)) - set(self._leases.values())
        gone = {self._leases[other] for other, at in self._free_from.items() if now >= at}
        if trains >= 0:  # anything else would be data that another client trains on
            return trains if trains in unused | gone else None
        return min(unused or {shard for shard in gone if shard < self.count}, default=None)

    def lend(self, client: str, shard: int) -> None:
        """Give it a shard provisionally, from now on, and to no other client."""
        for other in [other for other in self._provisional if self._leases[other] == shard]:
            self.take_back(other)
        self._leases[client] = shard
        self._provisional.add(client)

    def keep(self, client: str) -> None:
        """Its shard is its own for good."""
        self._provisional.discard(client)

    def take_back(self, client: str) -> None:
        """It could not be written down, or another client has it now."""
        self._leases.pop(client, None)
        self._provisional.discard(client)
        self._free_from.pop(client, None)
