"""Controls access to a listener: its key, the admission of names, and the reloads of the list."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import fsl_transport as tp
from fsl_async.config import address as addresses
from fsl_async.errors import ConfigError
from fsl_async.keys.admission import Admission
from fsl_async.keys.folder import KeysFolder
from fsl_async.keys.holders import FILE, NameHolders
from fsl_async.keys.phrasing import TO_TRUST, at_server
from fsl_async.process.program import program
from fsl_async.roles.machine import Note
from fsl_async.roles.phrasing import MessageThrottle, counted
from fsl_transport.zmq.curve import HandshakeFailed, KeyPair, ListenerCurve

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from fsl_async.keys.allow_list import Refusal
    from fsl_async.observe.reporter import Reporter

LOOK_EVERY_S = 1.0


def check_guarded(setting: str, address: str, *, insecure: bool, keys: KeysFolder | None) -> None:
    """Raise ConfigError for an unencrypted listener that other machines can reach.

    Except with `insecure`.
    """
    if keys is None and not insecure and not addresses.parse_listen(address).is_loopback:
        raise ConfigError(
            f"{setting}: {address} can be reached by other machines, so it needs a key:"
            f" run {program()} keys new, or accept an unencrypted listener with --insecure",
            setting,
        )


def keys_for_listening(
    listens: list[tuple[str, str]], keys: Path | None, *, insecure: bool
) -> KeysFolder | None:
    """Return the keys of a node with these (setting, address) listeners; None for no encryption.

    Without `keys` that is the case with `insecure`, or if all addresses are loopback ones.
    Raises ConfigError and KeysError.
    """
    if keys is None and (
        insecure or all(addresses.parse_listen(text).is_loopback for _, text in listens)
    ):
        return None
    folder = KeysFolder() if keys is None else KeysFolder(keys.expanduser())
    if keys is None and not folder.has_pair():
        for setting, address in listens:
            check_guarded(setting, address, insecure=insecure, keys=None)
    folder.pair()
    return folder


class AccessControl:
    """Controls access to one listener. Without keys it admits all, and reports encrypted ones."""

    def __init__(
        self,
        keys: KeysFolder | None,
        run_dir: Path,
        reserved_name: str = "",
        servers: Mapping[str, str] | None = None,
    ) -> None:
        """Raises KeysError.

        reserved_name: for another node that joins with this same pair. servers: other parameter
        servers, name -> public key.
        """
        self._keys = keys
        self._pair: KeyPair | None = None
        self._admission: Admission | None = None
        if keys is not None:
            self._pair = keys.pair()
            holders = NameHolders(run_dir / FILE)
            reserved = {reserved_name: self._pair.public, **(servers or {})}
            self._admission = Admission(keys, holders, reserved)
        self._throttle = MessageThrottle()
        self._endpoint: tp.ListenerEndpoint | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def curve(self) -> ListenerCurve | None:
        """The listener's encryption; None without keys."""
        if self._pair is None or self._admission is None:
            return None
        return ListenerCurve(self._pair, self._admission.allows)

    def reached_at(self, bound: str) -> str:
        """Return the address for clients, with the key if there is one. bound: the socket's."""
        address = addresses.parse_listen(bound)
        if self._pair is None:
            return address.tcp
        return addresses.Address(address.host, address.port, self._pair.public).fsl

    def admit(self, name: str, key: str) -> Refusal | None:
        """Return None, or why a HELLO is refused; called by the endpoint."""
        if self._admission is None:
            return None
        refused = self._admission.admit(name, key)
        if refused is not None:
            code, text = refused
            line = f"{name} is refused: {text} (its key: {key})"
            self._report(f"refused {name} {key}", line, code)
        return refused

    def handshake_failed(self, failed: HandshakeFailed) -> None:
        """Report a failed handshake; called by the listener."""
        if self._endpoint is None:
            return
        keys = self._keys or KeysFolder()
        bound = addresses.parse_listen(self._endpoint.address)
        host = addresses.reachable_host(bound.host)
        public = self._pair.public if self._pair is not None else ""
        invite = addresses.Address(host, bound.port, public)
        line = at_server(failed, invite.fsl if public else invite.tcp, keys)
        if line:
            self._report(f"{failed.why} {failed.key}", line, failed.why, failed)

    def open(
        self,
        loop: asyncio.AbstractEventLoop,
        endpoint: tp.ListenerEndpoint,
        journal: Reporter,
        heartbeat_s: float,
    ) -> None:
        """Begin to check the list for changes, at least four times a heartbeat.

        An empty list causes a warning with the command that adds a key.
        """
        self._loop, self._endpoint, self._journal = loop, endpoint, journal
        self._every_s = min(LOOK_EVERY_S, heartbeat_s / 4)
        if self._admission is None or self._keys is None:
            return
        if not self._admission.list.entries:
            trust = self._keys.command("trust KEY --name SITE")
            text = f"no key is trusted yet: {trust}, with the key that keys new prints at the site"
            journal.say(Note(text, "warning"))
        self._timer = loop.call_later(self._every_s, self._look)

    def close(self) -> None:
        """Stop the checks."""
        self._endpoint = None
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        assert self._endpoint is not None
        assert self._admission is not None
        looked = self._admission.look()
        if looked is not None and looked.problem:
            self._journal.note("keys_kept", self._loop.time(), problem=looked.problem)
            text = (
                f"the list of keys stays as it was, {counted(looked.keys, 'key')}: {looked.problem}"
            )
            self._journal.say(Note(text, "warning"))
        elif looked is not None:
            gone = self._endpoint.evict(self._admission.allows)
            self._journal.note("keys_read", self._loop.time(), keys=looked.keys, ended=gone[:64])
            ended = f"; ended the sessions of {', '.join(gone[:8])}" if gone else ""
            text = f"read the list of keys again: {counted(looked.keys, 'key')}{ended}"
            self._journal.say(Note(text, "info"))
        self._timer = self._loop.call_later(self._every_s, self._look)

    def _report(
        self, thing: str, line: str, why: str, failed: HandshakeFailed | None = None
    ) -> None:
        more = None if self._endpoint is None else self._throttle.lets(thing, self._loop.time())
        if more is None:
            return
        key, address = (failed.key, failed.address) if failed is not None else ("", "")
        self._journal.note("turned_away", self._loop.time(), why=why, peer_key=key, address=address)
        # A command stays last: people copy the rest of the line.
        what, to_do, command = line.partition(TO_TRUST)
        self._journal.say(Note(f"{what}{more}{to_do}{command}", "warning"))
