"""The words that `tc qdisc replace dev DEVICE root` takes for a link's settings. Pure.

See tc-netem(8). Every word is given each time, because `change` keeps what is left out. A rate is
always given: with one, netem lets no packet overtake another, so that jitter alone does not reorder
(a packet that would arrive before the one ahead of it arrives right behind it).
"""

from __future__ import annotations

import math

from netlab.profiles import LinkSettings

PACKET_BYTES = 1514
"""The largest packet on a link: 1500 and the Ethernet header, which netem counts for a rate."""

UNLIMITED_MBIT = 100_000.0
_COUNTED_MBIT = 10_000.0
_LEAST_PACKETS = 20


def limit_packets(settings: LinkSettings) -> int:
    """How many packets a netem queue must hold: on their way, and before the bottleneck.

        limit = rate x (delay + jitter + buffer) / size of a packet

    netem keeps both in one queue and drops what does not fit, so its default of 1,000 throttles a
    link with a large product of rate and delay (200 Mbit/s x 45 ms are 743 packets on their way
    alone), and lets a slow one queue for seconds (10 Mbit/s: 1.2 s). The buffer is `queue_ms`, by
    default one round trip (the rule of thumb for one long TCP flow; Appenzeller et al., SIGCOMM
    2004, section 1), at least 100 ms. A link without a rate counts as 10 Gbit/s. Of a thin one at
    least 20 packets fit: 100 would be 8 s at 160 kbit/s, and they leave at that rate also when the
    link has become fast again.
    """
    rate_bits_s = (settings.rate_mbit or _COUNTED_MBIT) * 1e6
    seconds = (settings.delay_ms + settings.jitter_ms + settings.buffer_ms) / 1e3
    return max(_LEAST_PACKETS, math.ceil(rate_bits_s * seconds / (8 * PACKET_BYTES)))


def arguments(settings: LinkSettings, *, cut: bool = False) -> tuple[str, ...]:
    """The words after `root`.

    A cut link loses all that is sent from then on; what is on its way still arrives.
    """
    words = [
        "netem",
        "limit",
        str(limit_packets(settings)),
        "delay",
        _milliseconds(settings.delay_ms),
    ]
    if settings.jitter_ms:
        words.append(_milliseconds(settings.jitter_ms))
    words += ["loss", "100%"] if cut else _loss(settings)
    if settings.duplicate_percent:
        words += ["duplicate", _percent(settings.duplicate_percent)]
    if settings.reorder_percent:
        words += ["reorder", _percent(settings.reorder_percent)]
    rate_kbit = (settings.rate_mbit or UNLIMITED_MBIT) * 1e3
    return (*words, "rate", f"{rate_kbit:.0f}kbit")


def gilbert(loss_percent: float, burst_packets: float) -> tuple[float, float]:
    """Chances in percent to begin and to end a burst of lost packets (Gilbert, 1960).

    A burst of b packets on average ends with rng r = 1 / b; the share of lost packets
    p / (p + r) is what was asked for.
    """
    share = loss_percent / 100
    end = 1 / burst_packets
    return 100 * share * end / (1 - share), 100 * end


def _loss(settings: LinkSettings) -> list[str]:
    if settings.burst_packets <= 1 or not settings.loss_percent:
        return ["loss", _percent(settings.loss_percent)]
    begin, end = gilbert(settings.loss_percent, settings.burst_packets)
    return ["loss", "gemodel", _percent(begin), _percent(end)]


def _milliseconds(value: float) -> str:
    return f"{value:.3f}ms"


def _percent(value: float) -> str:
    return f"{value:.6g}%"
