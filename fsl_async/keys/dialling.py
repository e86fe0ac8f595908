"""A client's side of encryption: the key pair for an address, and the messages when a handshake
fails.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsl_async.errors import AddressError, KeysError, UsageError
from fsl_async.keys.folder import KeysFolder
from fsl_async.keys.phrasing import MessageThrottle, at_client
from fsl_async.process.program import program
from fsl_transport.zmq.curve import DialerCurve, HandshakeFailed, is_key

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fsl_async.config.address import Address
    from fsl_async.observe.journal import JournalWriter, TraceHash
    from fsl_transport.link import Scheduler


def keys_for_dialling(server: Address, keys: Path | None, *, insecure: bool) -> KeysFolder | None:
    """The keys of a client of `server`; None where the address has no key and that is right. Raises
    FslError in one line.
    """
    if server.key:
        folder = KeysFolder() if keys is None else KeysFolder(keys.expanduser())
        curve_for(server, folder)
        return folder
    if keys is not None:
        raise UsageError("--keys: the address has no ?key=..., so there is nothing to encrypt with")
    if not server.is_loopback and not insecure:
        raise AddressError(
            f"{server.fsl} has no key: give the whole address that the server prints, "
            "fsl://...?key=...,"
            " or accept an unencrypted connection with --insecure"
        )
    return None


def curve_for(server: Address, keys: KeysFolder) -> DialerCurve:
    """What a link to `server`, an address with a key, encrypts with. Raises AddressError and
    KeysError.
    """
    if not is_key(server.key):
        raise AddressError(
            f"the key in the address of {server.host}:{server.port} is damaged: copy the whole "
            "line that the server prints, in its quotes"
        )
    if not keys.has_pair():
        raise KeysError(
            f"the server encrypts, and there is no key of this client in {keys.path}: run "
            f"{keys.command('new')},"
            f" then at the server the line that it prints ({program()} keys trust KEY --name SITE)"
        )
    return DialerCurve(keys.pair(), server.key)


def split_curve(place: Address, keys: KeysFolder, *, encrypted: bool) -> DialerCurve | None:
    """The same for a split server, whose address the parameter server has told; encrypted: to which
    this client came so. Raises AddressError and KeysError.
    """
    if encrypted and not place.key and not place.is_loopback:
        raise AddressError(
            f"the parameter server encrypts, and names a split server without a key ({place.tcp}): "
            "its operator gives it"
            " split.server=fsl://...?key=..."
        )
    return curve_for(place, keys) if place.key else None


class HandshakeReports:
    """Tells a client's people and its journal of handshakes that failed. Every method on the loop
    thread.
    """

    def __init__(
        self,
        server: Address,
        public: str,
        name: str,
        *,
        scheduler: Scheduler,
        journal: JournalWriter | TraceHash,
        log: Callable[[str], None],
        is_reserved: bool = False,
    ) -> None:
        """is_reserved: the name is one that a list has to give to a key (`keys.door`)."""
        self._is_reserved = is_reserved
        self._server, self._public, self._name = server, public, name
        self._scheduler, self._journal, self._log = scheduler, journal, log
        self._seldom = MessageThrottle()

    def __call__(self, failed: HandshakeFailed) -> None:
        """For the link."""
        who = self._server, self._public, self._name
        line = at_client(failed, *who, is_reserved=self._is_reserved)
        now = self._scheduler.time()
        if line and self._seldom.lets(failed.why, now):
            self._journal.note("turned_away", now, why=failed.why)
            self._log(f"warning: {line}")
