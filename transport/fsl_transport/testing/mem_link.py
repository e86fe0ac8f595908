"""A network in memory, on any scheduler: with virtual time it simulates days in seconds.

Every pair of endpoints is joined by two paths, one per direction, each with its own
``Conditions``. The lanes of a path do not wait for each other, nor do the stripes of the bulk lane, of which there is one where
the network is not made with more. Without jitter, rate and chance a
message costs one scheduler call. Chance comes from one ``random.Random(seed)``, drawn in the
order of the sends, so the same seed gives the same trace.

A killed endpoint's messages still arrive (its ghost speaks); messages on their way to a name reach
whoever has the name when they arrive.
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
    """How one direction between two endpoints behaves."""

    delay_s: float = field(default=0.0)
    jitter_s: float = field(default=0.0)
    """Up to this much more, uniformly; the order of a lane is kept, as TCP would."""
    bytes_per_s: float = field(default=0.0)
    """Rate of each lane and stripe, messages queue for it; 0 = without limit."""
    drop: float = field(default=0.0)
    duplicate: float = field(default=0.0)
    reorder: float = field(default=0.0)
    """Probabilities per message. A reordered one is late by up to four delays, and is overtaken."""

    def __attrs_post_init__(self) -> None:
        """Check the ranges."""
        for name in ("drop", "duplicate", "reorder"):
            if not 0 <= getattr(self, name) <= 1:
                raise LocalError(f"{name} is a probability, not {getattr(self, name)!r}")
        if min(self.delay_s, self.jitter_s, self.bytes_per_s) < 0:
            raise LocalError("delay_s, jitter_s and bytes_per_s are not negative")


PERFECT = Conditions()


class _Path:
    """One direction between two names."""

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
    """One endpoint's link; made by ``MemNetwork.listener`` and ``MemNetwork.dialer``."""

    __slots__ = ("_network", "_paths", "_receive", "name", "to")

    def __init__(self, network: MemNetwork, name: str, to: str | None) -> None:
        self._network = network
        self._paths: dict[str, _Path] = {}
        self._receive: Receiver | None = None
        self.name = name
        self.to = to  # a dialer's listener; None for a listener

    @property
    def address(self) -> str:
        """A name for messages to people."""
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
        """See ``link.Link``. Nothing to do: there are no connections."""

    def adopt(self, settings: TransportSettings) -> None:
        """See ``link.Link``. Nothing to do: nothing is kept."""

    def set_receiver(self, receive: Receiver) -> None:
        """See ``link.Link``."""
        self._receive = receive

    def address_of(self) -> str:
        """See ``link.Link``. There are no addresses."""
        return ""

    def redial(self) -> None:
        """See ``link.Link``. Nothing to do: there are no connections."""

    def close(self) -> None:
        """Leave the network; what was sent still arrives."""
        self._network.leave(self)

    async def aclose(self) -> None:
        """See ``close``."""
        self.close()

    def take(self, source: str, lane: Lane, frames: Sequence[Buffer]) -> None:
        """One message arrives."""
        if self._receive is not None:
            self._receive(source if self.to is None else "", lane, frames, b"")


class MemNetwork:
    """Names, paths and their faults. Every injected fault is counted in ``counts``."""

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
        self._chance = random.Random(seed)  # noqa: S311 - a simulated network, not a secret
        self._conditions = conditions
        self._links: dict[str, MemLink] = {}
        self._paths: dict[tuple[str, str], _Path] = {}

    def listener(self, name: str) -> MemLink:
        """Add a listener, in place of an endpoint of the same name."""
        return self._add(MemLink(self, check_name(name), None))

    def dialer(self, name: str, to: str | None = None) -> MemLink:
        """Add a dialer to the listener ``to``; by default to the only listener there is."""
        if to is None:
            listeners = [link.name for link in self._links.values() if link.to is None]
            if len(listeners) != 1:
                raise LocalError(f"say which listener {name!r} dials: there are {listeners}")
            to = listeners[0]
        return self._add(MemLink(self, check_name(name), check_name(to)))

    def set_conditions(self, a: str, b: str, conditions: Conditions) -> None:
        """Both directions between two names from now on."""
        self.path(a, b).set(conditions)
        self.path(b, a).set(conditions)

    def set_direction(self, source: str, target: str, conditions: Conditions) -> None:
        """One direction from now on."""
        self.path(source, target).set(conditions)

    def cut(self, a: str, b: str) -> None:
        """Nothing passes between two names, nor arrives that is on its way."""
        self.path(a, b).is_cut = True
        self.path(b, a).is_cut = True

    def heal(self, a: str, b: str) -> None:
        """Undo ``cut``."""
        self.path(a, b).is_cut = False
        self.path(b, a).is_cut = False

    def cut_stripe(self, source: str, target: str, stripe: int) -> None:
        """Nothing that is sent on one bulk connection from now on arrives, in one direction; for good."""
        self.path(source, target).cut_stripes.add(stripe)

    def reset(self, a: str, b: str) -> None:
        """Lose everything on its way between two names, as when a connection breaks."""
        self.path(a, b).generation += 1
        self.path(b, a).generation += 1

    def kill(self, name: str) -> None:
        """Remove an endpoint without a goodbye, as when its process dies."""
        link = self._links.pop(name, None)
        if link is not None:
            link.set_receiver(_ignore)

    # What links call.

    def path(self, source: str, target: str) -> _Path:
        """One direction between two names."""
        path = self._paths.get((source, target))
        if path is None:
            path = self._paths[source, target] = _Path(self._conditions)
        return path

    def leave(self, link: MemLink) -> None:
        """Remove a link, unless another one has its name by now."""
        link.set_receiver(_ignore)
        if self._links.get(link.name) is link:
            del self._links[link.name]

    def carry(  # noqa: PLR0917 - the hot path passes positions
        self,
        link: MemLink,
        to: str,
        path: _Path,
        context: int,
        lane: Lane,
        frames: Sequence[Buffer],
    ) -> None:
        """Take one message on its way; ``road`` is the lane, or a stripe's place after it."""
        if self._links.get(link.name) is not link:
            return  # a killed process says nothing new
        self.counts["sent"] += 1
        if path.is_cut:
            self.counts["cut"] += 1
            return
        scheduler = self.scheduler
        when = scheduler.time() + path.conditions.delay_s
        if path.is_plain:
            # Conditions may have been worse a moment ago: what is on its way stays in front.
            when = max(when, path.arrives_at[context if context < 2 else 1])
            self._plan(when, link, to, path, lane, frames)
        else:
            self._carry_badly(link, to, path, context, lane, frames)

    def _carry_badly(  # noqa: PLR0917
        self,
        link: MemLink,
        to: str,
        path: _Path,
        context: int,
        lane: Lane,
        frames: Sequence[Buffer],
    ) -> None:
        while context >= len(path.free_at):
            path.free_at.append(0.0)
            path.arrives_at.append(0.0)
        conditions = path.conditions
        chance = self._chance.random
        now = self.scheduler.time()
        if conditions.bytes_per_s:
            size = sum(len(frame) for frame in frames)
            start = max(now, path.free_at[context])
            now = path.free_at[context] = start + size / conditions.bytes_per_s
        if conditions.drop and chance() < conditions.drop:
            self.counts["dropped"] += 1
            return
        copies = 1
        if conditions.duplicate and chance() < conditions.duplicate:
            self.counts["duplicated"] += 1
            copies = 2
        for _ in range(copies):
            when = now + conditions.delay_s
            if conditions.jitter_s:
                when += chance() * conditions.jitter_s
            if conditions.reorder and chance() < conditions.reorder:
                self.counts["reordered"] += 1
                when += chance() * 4 * (conditions.delay_s + conditions.jitter_s)
            else:
                when = path.arrives_at[context] = max(when, path.arrives_at[context])
            self._plan(when, link, to, path, lane, frames)

    def _plan(  # noqa: PLR0917 - the hot path passes positions
        self,
        when: float,
        link: MemLink,
        to: str,
        path: _Path,
        lane: Lane,
        frames: Sequence[Buffer],
    ) -> None:
        self.scheduler.call_at(
            when, self._arrive, link.name, to, path, path.generation, lane, frames
        )

    def _arrive(  # noqa: PLR0917
        self,
        source: str,
        to: str,
        path: _Path,
        generation: int,
        lane: Lane,
        frames: Sequence[Buffer],
    ) -> None:
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
    """Receive for an endpoint that is gone."""
