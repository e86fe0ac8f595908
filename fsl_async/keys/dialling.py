"""The client's side of encryption: keys for an address, and reports of failed handshakes.

Unauthenticated peers cause these messages, so a client repeats its own less and less often. Of the
network's data they contain only a key and an IP address, both checked.
"""

from __future__ import annotations

import math
import shlex
from typing import TYPE_CHECKING

from attrs import define

import fsl_transport as tp
from fsl_async.errors import AddressError, KeysError, UsageError, program
from fsl_async.keys.folder import KeysFolder
from fsl_async.roles.phrasing import AGAIN_S
from fsl_transport.zmq.curve import (
    CLOSED,
    MECHANISM,
    UNKNOWN_KEY,
    DialerCurve,
    HandshakeFailed,
    is_key,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fsl_async.config.address import Address

EXPLAINED_S = 15.0
"""A handshake that failed within this time explains why no answer came."""
LONGEST_S = 3600.0


def keys_for_dialling(server: Address, keys: Path | None, *, insecure: bool) -> KeysFolder | None:
    """Return the keys for dialling `server`; None for an address that needs no encryption.

    Raises FslError.
    """
    if server.key:
        folder = KeysFolder() if keys is None else KeysFolder(keys.expanduser())
        curve_for(server, folder)
        return folder
    if keys is not None:
        raise UsageError("--keys: the address has no ?key=..., so there is nothing to encrypt with")
    if not server.is_loopback and not insecure:
        raise AddressError(
            f"{server.fsl} has no key: give the complete address that the parameter server prints,"
            " fsl://...?key=..., or accept an unencrypted connection with --insecure"
        )
    return None


def curve_for(server: Address, keys: KeysFolder) -> DialerCurve:
    """Return the encryption of a link to `server`, an address with a key.

    Raises AddressError and KeysError.
    """
    at = f"{server.host}:{server.port}"
    if not is_key(server.key):
        raise AddressError(
            f"the key in the address of {at} is damaged: copy the complete line that the parameter"
            " server prints, in its quotes"
        )
    if not keys.has_pair():
        raise KeysError(
            f"{at} encrypts, and there is no key of this client in {keys.path}:"
            f" run {keys.command('new')}, then at {at} the line that it prints"
            f" ({program()} keys trust KEY --name SITE)"
        )
    return DialerCurve(keys.pair(), server.key)


def split_curve(server: Address, keys: KeysFolder, *, encrypted: bool) -> DialerCurve | None:
    """Return the encryption of a link to a split server that the parameter server has announced.

    encrypted: the link to the parameter server is. None for an address without a key.
    Raises AddressError and KeysError.
    """
    if encrypted and not server.key and not server.is_loopback:
        raise AddressError(
            "the parameter server encrypts, and names a split server without a key"
            f" ({server.tcp}): its operator gives it split.server=fsl://...?key=..."
        )
    return curve_for(server, keys) if server.key else None


class LessOften:
    """Prints a message at once, and again after 1, 2, 4, ... minutes, at most an hour apart."""

    def __init__(self) -> None:
        self._next: dict[str, tuple[float, float]] = {}  # thing -> (when, wait after that)

    def lets(self, thing: str, now: float) -> bool:
        """Whether to print a message about `thing`, of a few, at `now` (monotonic seconds)."""
        at, wait_s = self._next.get(thing, (now, AGAIN_S))
        if now < at:
            return False
        self._next[thing] = now + wait_s, min(2 * wait_s, LONGEST_S)
        return True


def at_client(
    failed: HandshakeFailed, server: Address, public: str, name: str, *, is_reserved: bool = False
) -> str:
    """Return the client's message; empty for none.

    public: the client's key, "" where it does not encrypt.
    is_reserved: the allow-list has to assign the name to the key.
    """
    at = f"{server.host}:{server.port}"
    if failed.why == UNKNOWN_KEY:
        trust = f"{program()} keys trust {shlex.quote(public)} --name {name}"
        trust += f" --names {name}" if is_reserved else ""
        return (
            f"{at} does not trust this client's key: it is not on the allow-list there. This client"
            f" goes on by itself as soon as the operator there runs: {trust}"
        )
    if failed.why == MECHANISM and public:
        return (
            f"{at} does not encrypt, and this address has a key: is it the right one?"
            " Use the line that is printed there"
        )
    if failed.why == MECHANISM:
        return f"{at} encrypts: give the complete address that it prints, fsl://...?key=..."
    if failed.why == CLOSED and public:
        return (
            f"{at} closed the connection during the handshake: its key is not the one in this"
            " address (use the line that is printed there now), or nothing listens behind it"
        )
    return ""


@define(eq=False, slots=False)
class HandshakeReports:
    """Reports failed handshakes to people and to the client's journal. For the loop's thread.

    note: writes a note to the journal, from its name, the time and fields.
    is_reserved: the allow-list has to assign the name to the key (`keys.access_control`).
    """

    _server: Address
    _public: str
    _name: str
    _scheduler: tp.Scheduler
    _note: Callable[..., int]
    _log: Callable[[str], None]
    _is_reserved: bool = False

    def __attrs_post_init__(self) -> None:
        self._throttle = LessOften()
        self._failed_at = -math.inf

    def beside(
        self, take: Callable[[tp.TransportEvent], None]
    ) -> Callable[[tp.TransportEvent], None]:
        """Make the function for a link's events: `take`, without those that a failed handshake
        explains.

        A node that is refused gets no answer either, and its operator would look at the wrong end.
        """

        def explained(event: tp.TransportEvent) -> None:
            is_known = self._scheduler.time() - self._failed_at <= EXPLAINED_S
            if isinstance(event, tp.Unreachable) and is_known:
                return
            if isinstance(event, tp.PeerUp):
                self._throttle = LessOften()
            take(event)

        return explained

    def __call__(self, failed: HandshakeFailed) -> None:
        """Report one; called by the link."""
        own = self._server, self._public, self._name
        line = at_client(failed, *own, is_reserved=self._is_reserved)
        now = self._scheduler.time()
        if line:
            self._failed_at = now
        if line and self._throttle.lets(failed.why, now):
            self._note("turned_away", now, why=failed.why)
            self._log(f"warning: {line}")
