"""What a link does to packets, and the named profiles.

Pure, but that the profiles are read from a file of this package.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import cache, reduce
from importlib import resources

from attrs import evolve, fields, frozen

from fsl_async.errors import UsageError

_UNITS = {
    "ms": {"": 1.0, "ms": 1.0, "s": 1e3, "us": 1e-3},
    "mbit": {"": 1.0, "mbit": 1.0, "kbit": 1e-3, "gbit": 1e3},
    "percent": {"": 1.0, "%": 1.0},
    "packets": {"": 1.0},
}
_MOST = {
    "delay_ms": 60_000.0,
    "jitter_ms": 60_000.0,
    "queue_ms": 60_000.0,
    "rate_mbit": 100_000.0,
    "up_mbit": 100_000.0,
    "down_mbit": 100_000.0,
    "loss_percent": 90.0,
    "duplicate_percent": 100.0,
    "reorder_percent": 100.0,
    "burst_packets": 1000.0,
}
_QUANTITY = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-z%]*)\Z")


@frozen(kw_only=True)
class LinkSettings:
    """A link; both directions have the same, but for their rates.

    delay_ms            one way, added to every packet
    jitter_ms           the delay is uniform in delay_ms +- jitter_ms; packets keep their order
    loss_percent        share of packets that are lost
    burst_packets       mean number of packets that are lost in a row; 1: each by itself
    rate_mbit           10^6 bits a second, Ethernet headers included; 0: no limit
    up_mbit, down_mbit  rates toward the first site of a link (a star's middle) and from it; 0:
                        rate_mbit
    duplicate_percent   share of packets that arrive twice
    reorder_percent     share of packets that overtake those in the delay line
    queue_ms            how long a packet may wait before the bottleneck; 0: one round trip, at
                        least 100 ms
    """

    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    loss_percent: float = 0.0
    burst_packets: float = 1.0
    rate_mbit: float = 0.0
    up_mbit: float = 0.0
    down_mbit: float = 0.0
    duplicate_percent: float = 0.0
    reorder_percent: float = 0.0
    queue_ms: float = 0.0

    def __attrs_post_init__(self) -> None:
        for name, most in _MOST.items():
            value = getattr(self, name)
            least = 1.0 if name == "burst_packets" else 0.0
            if not least <= value <= most:
                raise UsageError(f"{_short(name)}={value:g} is not from {least:g} to {most:g}")
        if self.jitter_ms > self.delay_ms:
            raise UsageError(
                f"jitter={self.jitter_ms:g} ms is more than delay={self.delay_ms:g} ms; a packet"
                " cannot arrive before it is sent"
            )
        most = 100 * self.burst_packets / (1 + self.burst_packets)
        if self.burst_packets > 1 and self.loss_percent > most:
            raise UsageError(
                f"bursts of {self.burst_packets:g} with at least one packet between them lose"
                f" {most:.0f} % at most"
            )
        if self.reorder_percent and not self.delay_ms:
            raise UsageError("reorder needs a delay: without one there is nothing to overtake")

    @property
    def up(self) -> LinkSettings:
        """The direction toward the first site."""
        return evolve(self, rate_mbit=self.up_mbit or self.rate_mbit, up_mbit=0.0, down_mbit=0.0)

    @property
    def down(self) -> LinkSettings:
        """The direction from the first site."""
        return evolve(self, rate_mbit=self.down_mbit or self.rate_mbit, up_mbit=0.0, down_mbit=0.0)

    @property
    def keeps_packets(self) -> bool:
        """Whether packets neither vanish nor change places, so that many may travel as one."""
        return not (self.loss_percent or self.duplicate_percent or self.reorder_percent)

    @property
    def buffer_ms(self) -> float:
        """How long a packet may wait before the bottleneck."""
        return self.queue_ms or max(2 * self.delay_ms, 100.0)


def _short(name: str) -> str:
    return name.partition("_")[0]


NAMES = {_short(field.name): field.name for field in fields(LinkSettings)}
"""delay -> delay_ms and so on: the words of `netlab set`."""


@cache
def profiles() -> Mapping[str, LinkSettings]:
    """All named profiles, from profiles.toml."""
    text = resources.files(__package__).joinpath("profiles.toml").read_text("utf-8")
    return {name: LinkSettings(**table) for name, table in tomllib.loads(text).items()}


def profile(text: str) -> LinkSettings:
    """Read PROFILE[:KEY=VALUE...]; raises UsageError, for a name with those that there are."""
    name, *changes = text.split(":")
    found = profiles().get(name)
    if found is None:
        raise UsageError(f"no profile {name[:80]!r}; profiles: {', '.join(profiles())}")
    return reduce(changed, changes, found)


def changed(settings: LinkSettings, word: str) -> LinkSettings:
    """Settings after one word of `netlab set`: PROFILE[:KEY=VALUE...], or KEY=VALUE.

    Values with or without a unit. Raises UsageError.
    """
    key, equals, value = word.partition("=")
    if not equals or ":" in word:
        return profile(word)
    name = NAMES.get(key, key if key in _MOST else "")
    if not name:
        raise UsageError(f"no setting {key[:80]!r}; settings: {', '.join(NAMES)}")
    found = _QUANTITY.match(value.strip().lower())
    known = _UNITS[name.rpartition("_")[2]]
    unit = known.get(found[2]) if found else None
    if found is None or unit is None:
        units = " or ".join(one for one in known if one) or "no unit"
        raise UsageError(f"{word[:80]}: {key} takes a number with {units}")
    if name == "rate_mbit":  # of both directions
        settings = evolve(settings, up_mbit=0.0, down_mbit=0.0)
    return evolve(settings, **{name: float(found[1]) * unit})


def words(settings: LinkSettings) -> str:
    """Settings for people: what differs from a perfect link."""
    parts = []
    up, down = settings.up.rate_mbit, settings.down.rate_mbit
    if up != down:
        rates = (f"{rate:g} Mbit/s" if rate else "no limit" for rate in (up, down))
        parts.append("{} up, {} down".format(*rates))
    elif settings.rate_mbit:
        parts.append(f"{settings.rate_mbit:g} Mbit/s")
    if settings.delay_ms:
        jitter = f" +- {settings.jitter_ms:g}" if settings.jitter_ms else ""
        parts.append(f"{settings.delay_ms:g}{jitter} ms each way")
    if settings.loss_percent:
        burst = settings.burst_packets
        parts.append(
            f"{settings.loss_percent:g} % loss" + (f" in bursts of {burst:g}" if burst > 1 else "")
        )
    if settings.duplicate_percent:
        parts.append(f"{settings.duplicate_percent:g} % twice")
    if settings.reorder_percent:
        parts.append(f"{settings.reorder_percent:g} % overtake")
    return ", ".join(parts) or "no limits"
