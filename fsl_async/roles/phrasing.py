"""This module formats counts and sizes, and limits lines that peers cause. Pure."""

from collections import Counter, OrderedDict

AGAIN_S = 60.0
BURST = 10

_LOST = {
    "expired": "the parameter server does not answer",
    "reset": "the parameter server restarted",
    "bye": "the parameter server ended the session",
    "protocol": "the parameter server violated the protocol",
    "revoked": "the parameter server no longer accepts this key",
}


class MessageThrottle:
    """Limits messages: one about a thing in `AGAIN_S`, of at most `BURST` things in that time.

    The others are counted; the next message has their number. by_thing: each thing has its own
    count and there is no limit of things, which admitted clients cannot make up.
    """

    def __init__(self, *, by_thing: bool = False) -> None:
        self._by_thing = by_thing
        self._sent: OrderedDict[str, float] = OrderedDict()
        self._held_back: Counter[str] = Counter()

    def lets(self, thing: str, now: float) -> str | None:
        """Return the end of a message at `now` (monotonic seconds); None: it is not printed."""
        counted_as = thing if self._by_thing else ""
        while self._sent and next(iter(self._sent.values())) <= now - AGAIN_S:
            self._sent.popitem(last=False)
        if thing in self._sent or (not self._by_thing and len(self._sent) >= BURST):
            self._held_back[counted_as] += 1
            return None
        self._sent[thing] = now
        count = self._held_back.pop(counted_as, 0)
        return f" (and {count:,} more were not printed)" if count else ""


def counted(count: int, thing: str) -> str:
    """`1 client`, `2 clients`."""
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"


def share_of(count: int, called: int) -> str:
    """`1 of 2 called clients`: of those asked for their deltas in a round."""
    return f"{count:,} of {counted(called, 'called client')}"


def here_of(here: int, needed: int) -> str:
    """`1 client is here, 2 are needed`."""
    return f"{counted(here, 'client')} {_be(here)} here, {needed:,} {_be(needed)} needed"


def megabytes(count: float) -> str:
    """Bytes in powers of ten, as kB, MB, GB or TB."""
    if count >= 1e12:
        return f"{count / 1e12:,.2f} TB"
    if count >= 1e9:
        return f"{count / 1e9:.2f} GB"
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"


def figure(value: float, decimals: int = 3) -> str:
    """A loss or another measure with some decimals; below 0.1 with as many digits that count."""
    is_small = value != 0 and abs(value) < 0.1
    return f"{value:.{decimals}g}" if is_small else f"{value:.{decimals}f}"


def _be(count: int) -> str:
    return "is" if count == 1 else "are"


def gone_words(version: int, held: int, tokens: int) -> str:
    """Describe the loss of the versions after `version`, up to `held`. tokens: 0 if unknown."""
    which = f"versions {version + 1} to {held} are" if version + 1 < held else f"version {held} is"
    return f"{which} gone{f', with about {tokens:,} tokens' if tokens > 0 else ''}"


def lost_words(reason: str) -> str:
    """Say why the session with the parameter server was lost. reason: the transport's."""
    return _LOST.get(reason, f"the parameter server is away ({reason})")
