"""Who trains which part of the data, as the parameter server's shell knows it. The store has the same on disk.

A shard is lent when its client is welcomed, and on the disk before the client hears of it: a server that is killed right then must not
give it to another. It is the client's own for good once it has attached a model that fits. Who fails before that (wrong data path, wrong
model) leaves it to whoever finds no other: at once when it said goodbye, else after `RECLAIM_S`, because a site whose
network is away, or whose server was killed, is still preparing to train on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

RECLAIM_S = 60.0


class Shards:
    """Leases by name. Times in seconds of the caller's clock."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._leases: dict[str, int] = {}
        self._loans: set[str] = set()
        self._away: dict[str, float] = {}  # borrower -> from when on it may be passed over
        self._wanted: dict[str, int] = {}

    def recovered(self, leases: Mapping[str, int], loans: Iterable[str], now: float) -> None:
        """What the disk has."""
        self._leases, self._loans = dict(leases), set(loans)
        self._away = dict.fromkeys(self._loans, now + RECLAIM_S)

    @property
    def holders(self) -> list[str]:
        """All who have one, by name."""
        return sorted(self._leases)

    def of(self, name: str) -> int | None:
        """The shard of a client."""
        return self._leases.get(name)

    def is_lent(self, name: str) -> bool:
        """Whether it has one that is not its own for good."""
        return name in self._loans

    def wants(self, name: str, shard: int) -> None:
        """A client says on which shard it trains already; -1: on none."""
        self._wanted[name] = shard

    def left(self, name: str, reason: str, now: float) -> None:
        """Its session is over."""
        if name in self._loans:
            self._away[name] = now if reason in {"bye", "revoked"} else now + RECLAIM_S

    def pick(self, name: str, now: float) -> int | None:
        """The shard that a client has or can have: one that nobody has, else one that is lent to somebody who is gone."""
        self._away.pop(name, None)
        held = self._leases.get(name)
        if held is not None and held < self.count:
            return held
        unused = set(range(self.count)) - set(self._leases.values())
        gone = {self._leases[other] for other, until in self._away.items() if now >= until}
        wanted = self._wanted.get(name, -1)
        if wanted >= 0:  # anything else would be data that another client trains on
            return wanted if wanted in unused | gone else None
        return min(unused or {shard for shard in gone if shard < self.count}, default=None)

    def lend(self, name: str, shard: int) -> None:
        """Give it a shard, from now on, and to nobody else."""
        for other in [other for other in self._loans if self._leases[other] == shard]:
            self.take_back(other)
        self._leases[name] = shard
        self._loans.add(name)

    def keep(self, name: str) -> None:
        """It is its own for good."""
        self._loans.discard(name)

    def take_back(self, name: str) -> None:
        """It could not be written down, or somebody else has it now."""
        self._leases.pop(name, None)
        self._loans.discard(name)
        self._away.pop(name, None)
