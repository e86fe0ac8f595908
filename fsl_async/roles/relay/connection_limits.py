"""Who may come to a relay: places of connections, by the address that they come from. Pure.

A connection is a stranger's at first. Its owner says when it is known. No rule looks at one connection alone, because whoever is to be kept out opens another.

  * So many lines in all, and half of them from one address.
  * So many strangers in all, and a quarter of them from one address.
  * An address begins no more than `dials_per_s` towards the server, and `dials_burst` at once: the server counts all that a relay dials as one address, and hangs up what
    is too much.
  * Twice as many strangers and dials where some of the address are known: behind it may be a site's router, or another relay.
  * An address whose strangers filled the memory gets no new connection for `shun_s`, or a few where some of it are known.
"""

from __future__ import annotations

import math

from attrs import evolve, frozen, mutable


@frozen(kw_only=True)
class ConnectionRules:
    """Numbers of connections, and of those begun a second; times in seconds."""

    lines: int = 4096
    lines_of_one: int = 2048
    strangers: int = 1024
    strangers_of_one: int = 256
    dials_per_s: float = 32.0
    dials_burst: float = 1024.0
    """A server takes 128 a second and 2,048 at once of one address."""
    shun_s: float = 5.0
    let_in_shunned: int = 8
    places: int = 4096
    """Addresses without a connection that are remembered."""

    def within(self, lines: int) -> ConnectionRules:
        """The same where there are no more than so many lines."""
        strangers = max(1, min(self.strangers, lines // 4))
        one_client = min(64, max(1, strangers // 2))  # on a long line it has that many connections
        return evolve(
            self,
            lines=min(self.lines, lines),
            lines_of_one=max(1, min(self.lines_of_one, lines // 2)),
            strangers=strangers,
            strangers_of_one=max(one_client, min(self.strangers_of_one, strangers // 4)),
        )


@frozen
class Refusal:
    """Why somebody gets no place: a sentence, and a word to count it under."""

    text: str
    word: str


@mutable
class _Place:
    """What is known of one address."""

    strangers: int = 0
    known: int = 0
    shunned_until: float = -math.inf
    came_shunned: int = 0
    dials: float = math.inf
    """Left of the burst, at `dials_at`; infinite when it is whole."""
    dials_at: float = 0.0

    @property
    def lines(self) -> int:
        return self.strangers + self.known

    @property
    def share(self) -> int:
        return 2 if self.known else 1


class ConnectionLimits:
    """See the module."""

    def __init__(self, rules: ConnectionRules) -> None:
        self.rules = rules
        self.strangers = 0
        self.lines = 0
        self._places: dict[str, _Place] = {}

    def __len__(self) -> int:
        return len(self._places)

    def came(self, address: str, now: float) -> Refusal | None:
        """A connection came from there, and counts until it is `gone`, also where it is refused."""
        rules = self.rules
        if address not in self._places:
            self._forget(now)
        place = self._places.setdefault(address, _Place())
        place.strangers += 1
        self.strangers += 1
        self.lines += 1
        if self.lines > rules.lines:
            return Refusal(f"{rules.lines} connections already", "full")
        if self.strangers > rules.strangers:
            return Refusal(f"{rules.strangers} new connections already", "full")
        if place.lines > rules.lines_of_one:
            return Refusal(f"{rules.lines_of_one} connections of {address} already", "full")
        most = place.share * rules.strangers_of_one
        if place.strangers > most:
            return Refusal(f"{most} new connections of {address} already", "full")
        if place.shunned_until > now:
            place.came_shunned += 1
            if not place.known or place.came_shunned > rules.let_in_shunned:
                return Refusal(f"what {address} left here was too much", "kept away")
        return None

    def dials(self, address: str, now: float) -> Refusal | None:
        """A connection from there is to get its twin."""
        place = self._places[address]
        per_s = place.share * self.rules.dials_per_s
        burst = place.share * self.rules.dials_burst
        left = min(burst, place.dials + (now - place.dials_at) * per_s)
        place.dials, place.dials_at = left, now
        if left < 1:
            return Refusal(f"{address} connects more than {per_s:g} times a second", "too fast")
        place.dials -= 1
        return None

    def known(self, address: str) -> None:
        """One of its strangers is none any more."""
        place = self._places[address]
        place.strangers -= 1
        place.known += 1
        self.strangers -= 1

    def gone(self, address: str, *, is_stranger: bool) -> None:
        """One of its connections is over."""
        place = self._places[address]
        self.lines -= 1
        if is_stranger:
            place.strangers -= 1
            self.strangers -= 1
        else:
            place.known -= 1

    def shun(self, address: str, now: float) -> None:
        """It has left here what was too much."""
        place = self._places[address]
        place.shunned_until = now + self.rules.shun_s
        place.came_shunned = 0

    def _forget(self, now: float) -> None:
        """Forget who has no connection, when there are many: first of whom there is nothing to remember, then the longest there."""
        if len(self._places) < self.rules.places + self.lines:
            return
        rules = self.rules
        full_s = rules.dials_burst / rules.dials_per_s
        for address, place in list(self._places.items()):
            is_old = place.dials_at + full_s <= now or math.isinf(place.dials)
            if not place.lines and place.shunned_until <= now and is_old:
                del self._places[address]
        empty = [address for address, place in self._places.items() if not place.lines]
        for address in empty[: max(0, len(empty) - rules.places // 2)]:
            del self._places[address]
