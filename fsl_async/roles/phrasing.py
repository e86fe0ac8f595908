"""Formats counts and sizes for people. Pure."""

from __future__ import annotations


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
