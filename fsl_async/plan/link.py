"""Links: from "100mbit,20ms" to seconds. Pure.

The rate is that of one client's link, the same both ways, in bits per second with decimal prefixes.
The delay is one way, as in `tc netem`; a round trip takes twice that.
"""

import re

from attrs import frozen

from fsl_async.errors import UsageError

_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([KkMmGg]?)(?:[Bb]its?(?:/s)?|BIT|b/s|bps)")
"""A lone b is a bit only where it is small: MB/s and MBps are bytes."""
_DELAY = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s)", re.IGNORECASE)
_BITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


MOST_BITS_PER_S, MOST_DELAY_S = 1e15, 86_400.0
"""Above any link, and small enough that times stay finite."""


@frozen
class LinkSpec:
    """A client's link: bits per second, and the one-way delay in seconds."""

    bits_per_s: float
    delay_s: float = 0.0

    def seconds(self, size: int, waits: float) -> float:
        """Seconds for `size` bytes plus `waits` one-way delays."""
        return 8 * size / self.bits_per_s + waits * self.delay_s


def parse_link(text: str) -> LinkSpec:
    """Read "RATE" or "RATE,DELAY", like "100mbit,20ms", "100Mbps" or "1 Gbit/s". Raises
    UsageError.
    """
    rate, _, delay = (part.strip() for part in text.partition(","))
    found = _RATE.fullmatch(rate)
    waited = _DELAY.fullmatch(delay or "0s")
    if found is None or waited is None:
        raise UsageError(
            f"--link {text[:80]!r}: write rate and one-way delay like 100mbit,20ms (bit kbit mbit"
            " gbit, or Mbit/s, Mbps; us ms s); 1 MB/s is 8mbit"
        )
    bits = float(found[1]) * _BITS[found[2].lower()]
    seconds = float(waited[1]) * _SECONDS[waited[2].lower()]
    if not (1 <= bits <= MOST_BITS_PER_S and seconds <= MOST_DELAY_S):
        raise UsageError(
            f"--link {text[:80]!r}: the rate is from 1 bit to 1,000,000 gbit per second,"
            " the delay at most a day"
        )
    return LinkSpec(bits, seconds)
