"""A network in memory, on any scheduler: with virtual time it simulates days in seconds.

Every pair of endpoints is joined by two paths, one per direction, each with its own
``Conditions``. The lanes of a path do not wait for each other, nor do the stripes of the bulk lane
(one, unless the network is made with more). Without jitter, rate and random faults, a message costs
one scheduler call. Randomness comes from one ``random.Random(seed)``, drawn in the order of the
sends, so the same seed gives the same trace.

Messages of a killed endpoint that are in flight still arrive. A message in flight to a name reaches
the endpoint that holds the name when it arrives.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from attrs import field, frozen

from fsl_transport.errors import LocalError
from fsl_transport.link import Buffer, Lane, Receiver, Scheduler, check_name
from fsl_transport.settings import TransportSettings


@frozen(kw_only=True)
class Conditions:
    """Behavior of one direction between two endpoints. Probabilities are per message."""

    delay_s: float = field(default=0.0)
    jitter_s: float = field(default=0.0)
    """Additional delay, uniform up to this. A lane keeps its order, as with TCP."""
    bytes_per_s: float = field(default=0.0)
    """Rate of each lane and stripe, for which messages queue; 0 means no limit."""
    drop: float = field(default=0.0)
    duplicate: float = field(default=0.0)
    reorder: float = field(default=0.0)
    """A reordered message is late by up to four delays, so that others overtake it."""

    def __attrs_post_init__(self) -> None:
        """Check the ranges."""
        for name in ("drop", "duplicate", "reorder"):
            if not 0 <= getattr(self, name) <= 1:
                raise LocalError(f"{name} is a probability, not {getattr(self, name)!r}")
        if min(self.delay_s, self.jitter_s, self.bytes_per_s) < 0:
            raise LocalError("delay_s, jitter_s and bytes_per_s are not negative")


PERFECT = Conditions()


class _Path:
    """State of one direction between two names."""

    __slots__ = (
        "arrives_at",
        "conditions",
        "cut_stripes",
        "free_at",
        "generation",
        "is_cut",
        "is_plain",
    )

    def __init__(self, conditions: Conditions) -> None:
        self.generation = 0
        self.is_cut = False
        self.free_at = [0.0, 0.0]  # control, then each stripe
        self.arrives_at = [0.0, 0.0]
        self.cut_stripes: set[int] = set()
        self.set(conditions)

    def set(self, conditions: Conditions) -> None:
        self.conditions = conditions
        c = conditions
        self.is_plain = not (c.jitter_s or c.bytes_per_s or c.drop or c.duplicate or c.reorder)


class MemLink:
    """One endpoint's link. Made by ``MemNetwork.listener`` and ``MemNetwork.dialer``."""

    __slots__ = ("_network", "_paths", "_paused", "_receive", "name", "to")

    def __init__(self, network: MemNetwork, name: str, to: str | None) -> None:
        self._network = network
        self._paths: dict[str, _Path] = {}
        self._receive: Receiver | None = None
        self._paused: list[tuple[str, Lane, Sequence[Buffer]]] | None = None
        self.name = name
        self.to = to  # a dialer's listener; None for a listener

    @property
    def address(self) -> str:
        """See ``link.Link``."""
        return f"mem://{self.name if self.to is None else self.to}"

    @property
    def stripes_limit(self) -> int:
        """See ``link.Link``."""
        return self._network.stripes

    def send(
        self,
        peer: str,
        lane: Lane,
        frames: Sequence[Buffer],
        origin: bytes = b"",
        stripe: int = 0,
    ) -> None:
        """See ``link.Link``. There are no connections, so ``origin`` is empty."""
        to = peer if self.to is None else self.to
        path = self._paths.get(to)
        if path is None:
            path = self._paths[to] = self._network.path(self.name, to)
        if stripe in path.cut_stripes and lane is Lane.BULK:
            self._network.counts["cut"] += 1
            return
        self._network.carry(self, to, path, lane + stripe, lane, frames)

    def open_stripes(self, count: int) -> None:
        """See ``link.Link``. No effect: there are no connections."""

    def adopt(self, settings: TransportSettings) -> None:
        """See ``link.Link``. No effect: nothing is queued."""

    def set_receiver(self, receive: Receiver) -> None:
        """See ``link.Link``."""
        self._receive = receive

    def remote_address(self) -> str:
        """See ``link.Link``. There are no addresses."""
        return ""

    def redial(self) -> None:
        """See ``link.Link``. No effect: there are no connections."""

    def close(self) -> None:
        """Leave the network. Messages in flight still arrive."""
        self._network.leave(self)

    async def aclose(self) -> None:
        """See ``close``."""
        self.close()

    def take(self, source: str, lane: Lane, frames: Sequence[Buffer]) -> None:
        """A message arrived."""
        if self._paused is not None:
            self._paused.append((source, lane, frames))
        elif self._receive is not None:
            self._receive(source if self.to is None else "", lane, frames, b"")

    def pause(self) -> None:
        """Keep what arrives, as the sockets of a stopped process do."""
        if self._paused is None:
            self._paused = []

    def go_on(self) -> None:
        """Take what has arrived since `pause`."""
        waiting, self._paused = self._paused or (), None
        for message in waiting:
            self.take(*message)


class MemNetwork:
    """Links by name, paths and faults. ``counts`` has a count of every injected fault."""

    def __init__(
        self,
        scheduler: Scheduler,
        seed: int = 0,
        conditions: Conditions = PERFECT,
        stripes: int = 1,
    ) -> None:
        self.scheduler = scheduler
        self.stripes = stripes
        self.counts = {
            "sent": 0,
            "dropped": 0,
            "duplicated": 0,
            "reordered": 0,
            "cut": 0,
            "reset": 0,
            "absent": 0,
        }
        self._rng = random.Random(seed)  # noqa: S311 - a simulated network, not a secret
        self._conditions = conditions
        self._links: dict[str, MemLink] = {}
        self._paths: dict[tuple[str, str], _Path] = {}

    def listener(self, name: str) -> MemLink:
        """Add a listener; it replaces an endpoint of the same name."""
        return self._add(MemLink(self, check_name(name), None))

    def dialer(self, name: str, to: str | None = None) -> MemLink:
        """Add a dialer of the listener ``to``, by default of the only listener."""
        if to is None:
            listeners = [link.name for link in self._links.values() if link.to is None]
            if len(listeners) != 1:
                raise LocalError(f"say which listener {name!r} dials: there are {listeners}")
            to = listeners[0]
        return self._add(MemLink(self, check_name(name), check_name(to)))

    def set_conditions(self, a: str, b: str, conditions: Conditions) -> None:
        """Set the conditions of both directions between two names."""
        self.path(a, b).set(conditions)
        self.path(b, a).set(conditions)

    def set_direction(self, source: str, target: str, conditions: Conditions) -> None:
        """Set the conditions of one direction."""
        self.path(source, target).set(conditions)

    def cut(self, a: str, b: str) -> None:
        """Partition two names: messages are lost, those in flight too."""
        self.path(a, b).is_cut = True
        self.path(b, a).is_cut = True

    def heal(self, a: str, b: str) -> None:
        """Undo ``cut``."""
        self.path(a, b).is_cut = False
        self.path(b, a).is_cut = False

    def cut_stripe(self, source: str, target: str, stripe: int) -> None:
        """Lose everything sent on one bulk connection, in one direction, for good."""
        self.path(source, target).cut_stripes.add(stripe)

    def reset(self, a: str, b: str) -> None:
        """Lose everything in flight between two names, as when a connection breaks."""
        self.path(a, b).generation += 1
        self.path(b, a).generation += 1

    def kill(self, name: str) -> None:
        """Remove an endpoint without a BYE, as when its process dies."""
        link = self._links.pop(name, None)
        if link is not None:
            link.set_receiver(_ignore)

    def link(self, name: str) -> MemLink | None:
        """Return the endpoint of a name."""
        return self._links.get(name)

    # Called by links.

    def path(self, source: str, target: str) -> _Path:
        """Return one direction between two names."""
        path = self._paths.get((source, target))
        if path is None:
            path = self._paths[source, target] = _Path(self._conditions)
        return path

    def leave(self, link: MemLink) -> None:
        """Remove a link, unless another one has taken its name."""
        link.set_receiver(_ignore)
        if self._links.get(link.name) is link:
            del self._links[link.name]

    def carry(  # noqa: PLR0917 - the hot path passes positions
        self,
        link: MemLink,
        to: str,
        path: _Path,
        channel: int,
        lane: Lane,
        frames: Sequence[Buffer],
    ) -> None:
        """Transmit one message. ``channel`` is 0 for control, 1 + the stripe for bulk."""
        if self._links.get(link.name) is not link:
            return  # a killed process sends nothing
        self.counts["sent"] += 1
        if path.is_cut:
            self.counts["cut"] += 1
            return
        scheduler = self.scheduler
        when = scheduler.time() + path.conditions.delay_s
        if path.is_plain:
            # After worse conditions, messages in flight stay in front.
            when = max(when, path.arrives_at[min(channel, 1)])
            self.plan(when, link.name, to, path, lane, frames)
        else:
            self._carry_badly(link, to, path, channel, lane, frames)

    def _carry_badly(  # noqa: PLR0917
        self,
        link: MemLink,
        to: str,
        path: _Path,
        channel: int,
        lane: Lane,
        frames: Sequence[Buffer],
    ) -> None:
        while channel >= len(path.free_at):
            path.free_at.append(0.0)
            path.arrives_at.append(0.0)
        conditions = path.conditions
        draw = self.chance(link.name, to).random
        now = self.scheduler.time()
        if conditions.bytes_per_s:
            size = sum(len(frame) for frame in frames)
            start = max(now, path.free_at[channel])
            now = path.free_at[channel] = start + size / conditions.bytes_per_s
        if conditions.drop and draw() < conditions.drop:
            self.counts["dropped"] += 1
            return
        copies = 1
        if conditions.duplicate and draw() < conditions.duplicate:
            self.counts["duplicated"] += 1
            copies = 2
        for _ in range(copies):
            when = now + conditions.delay_s
            if conditions.jitter_s:
                when += draw() * conditions.jitter_s
            if conditions.reorder and draw() < conditions.reorder:
                self.counts["reordered"] += 1
                when += draw() * 4 * (conditions.delay_s + conditions.jitter_s)
            else:
                when = path.arrives_at[channel] = max(when, path.arrives_at[channel])
            self.plan(when, link.name, to, path, lane, frames)

    def chance(self, source: str, target: str) -> random.Random:
        """Return the chance of one direction between two names; here one for all."""
        return self._rng

    def plan(  # noqa: PLR0917 - the hot path passes positions
        self, when: float, source: str, to: str, path: _Path, lane: Lane, frames: Sequence[Buffer]
    ) -> None:
        """Have a message arrive at the time `when`."""
        self.scheduler.call_at(when, self.arrive, source, to, path, path.generation, lane, frames)

    def arrive(  # noqa: PLR0917
        self,
        source: str,
        to: str,
        path: _Path,
        generation: int,
        lane: Lane,
        frames: Sequence[Buffer],
    ) -> None:
        """Deliver a message that was sent in a generation of its path."""
        if path.is_cut or generation != path.generation:
            self.counts["cut" if path.is_cut else "reset"] += 1
            return
        link = self._links.get(to)
        if link is None:
            self.counts["absent"] += 1
            return
        link.take(source, lane, frames)

    def _add(self, link: MemLink) -> MemLink:
        self.kill(link.name)
        self._links[link.name] = link
        return link


def _ignore(peer: str, lane: Lane, frames: Sequence[Buffer], origin: bytes) -> None:
    """Receiver of an endpoint that is gone."""
