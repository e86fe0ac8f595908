"""The settings of groups: parameter servers that average what their groups gained. Pure."""

from __future__ import annotations

import ipaddress
from typing import Any, Literal

from attrs import frozen

from fsl_async.config.address import Address, parse
from fsl_async.config.rules import SettingError, must_be_name, setting, span
from fsl_async.errors import AddressError

EXAMPLE = "north=fsl://10.0.0.1:7100?key=..., south=fsl://10.0.0.2:7100?key=..."


def roster_of(text: str) -> dict[str, Address]:
    """Read a roster: name -> address, in order. SettingError: it is none."""
    found: dict[str, Address] = {}
    for entry in text.split(",") if text.strip() else ():
        name, separator, address = entry.strip().partition("=")
        if not separator or must_be_name(name):
            raise SettingError("ring.roster", f"must be like {EXAMPLE}, got {entry.strip()[:80]!r}")
        if name in found:
            raise SettingError("ring.roster", f"names {name} twice")
        try:
            found[name] = parse(address)
        except AddressError as error:
            raise SettingError("ring.roster", f"{name}: {error.message}") from None
    if len(found) == 1:
        raise SettingError("ring.roster", "must have two parameter servers or more, or be empty")
    return found


def must_be_ip(value: Any) -> str | None:
    """Check an address of this machine, or nothing."""
    try:
        is_one = not value or not ipaddress.ip_address(value).is_unspecified
    except ValueError:
        is_one = False
    return None if is_one else "must be an IP address of this machine, like 10.0.0.1"


@frozen(kw_only=True)
class RingConfig:
    """Groups: parameter servers that average what their groups gained, now and then."""

    roster: str = setting(
        "",
        "parameter servers as NAME=ADDRESS, separated by commas, the same text at each; run.name is"
        " the one that this is, and the first one coordinates; empty: this one alone",
    )
    every: int = setting(
        6,
        "versions of the fastest group from one global round to the next; 0: by every_s",
        span(least=0),
    )
    every_s: float = setting(0.0, "... or seconds; 0: by every", span(least=0))
    bind: str = setting(
        "",
        "IP address at which the reduction listens, on free ports; empty: that of listen.address",
        must_be_ip,
    )
    insecure: bool = setting(
        False, "reduce over a public address, without encryption; a VPN is better"
    )
    momentum: Literal["keep", "reset"] = setting(
        "keep", "the group's outer momentum after a global round: keep | reset"
    )
    hold_s: float = setting(
        120.0,
        "wait with merges at most this long for a global round under way",
        span(above=0, most=86_400),
    )
    grace_s: float = setting(
        10.0, "wait this long for the cuts of other groups", span(above=0, most=3600)
    )
    timeout_s: float = setting(
        20.0,
        "a reduction fails after this long without a byte of a member",
        span(least=1, most=3600),
    )
    bytes_per_s: float = setting(0.0, "limit of a reduction's rate; 0: none", span(least=0))

    @property
    def servers(self) -> dict[str, Address]:
        """The roster, in order."""
        return roster_of(self.roster)

    @property
    def is_on(self) -> bool:
        """Whether there are other parameter servers."""
        return bool(self.roster.strip())

    def __attrs_post_init__(self) -> None:
        roster_of(self.roster)
        if not self.every and not self.every_s:
            raise SettingError("ring.every", "must not be 0 where ring.every_s is 0")
