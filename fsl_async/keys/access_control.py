"""Access control of a listener: its key, its admission, and the timer that reads a changed
allow-list.
"""

from __future__ import annotations

import asyncio
import shlex
from typing import TYPE_CHECKING

import fsl_transport as tp
from fsl_async.config import address as addresses
from fsl_async.errors import ConfigError
from fsl_async.keys.admission import Admission
from fsl_async.keys.folder import KeysFolder, default_directory
from fsl_async.keys.holders import FILE, NameHolders
from fsl_async.keys.phrasing import MessageThrottle, at_server
from fsl_async.process.program import program
from fsl_async.roles.machine import Note
from fsl_async.roles.phrasing import counted
from fsl_transport.zmq.curve import HandshakeFailed, KeyPair, ListenerCurve

if TYPE_CHECKING:
    from pathlib import Path

    from fsl_async.keys.allow_list import Refusal
    from fsl_async.observe.reporter import Reporter

LOOK_EVERY_S = 1.0


def check_guarded(setting: str, address: str, *, insecure: bool, keys: KeysFolder | None) -> None:
    """Raise ConfigError where others reach a listener that does not encrypt, unless that was
    accepted.
    """
    if keys is None and not insecure and not addresses.parse_listen(address).is_loopback:
        raise ConfigError(
            f"{setting}: {address} can be reached by other machines, so it needs a key: run "
            f"{program()} keys new,"
            " or accept an unencrypted listener with --insecure",
            setting,
        )


def keys_for_listening(
    listens: list[tuple[str, str]], keys: Path | None, *, insecure: bool
) -> KeysFolder | None:
    """The keys of a server with these (setting, address), or None for a plain one: a loopback one
    that was not told to, or by `insecure`.

    Raises ConfigError and KeysError in one line.
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
    """One listener's. Without keys it lets everybody in, and tells of those that encrypt."""

    def __init__(self, keys: KeysFolder | None, run_dir: Path, sister: str = "") -> None:
        """Raises KeysError. sister: a name under which another server with this same pair may
        come.
        """
        self._keys = keys
        self._pair: KeyPair | None = None
        self._door: Admission | None = None
        if keys is not None:
            self._pair = keys.pair()
            self._door = Admission(keys, NameHolders(run_dir / FILE), {sister: self._pair.public})
        self._seldom = MessageThrottle()
        self._endpoint: tp.ListenerEndpoint | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def curve(self) -> ListenerCurve | None:
        """For the listener."""
        if self._pair is None or self._door is None:
            return None
        return ListenerCurve(self._pair, self._door.allows)

    def reached_at(self, bound: str) -> str:
        """The address to hand out, for one that sockets take: with the key where there is one."""
        address = addresses.parse_listen(bound)
        if self._pair is None:
            return address.tcp
        return addresses.Address(address.host, address.port, self._pair.public).fsl

    def admit(self, name: str, key: str) -> Refusal | None:
        """For the endpoint."""
        if self._door is None:
            return None
        refused = self._door.admit(name, key)
        if refused is not None:
            code, text = refused
            self._tell(f"refused {name} {key}", f"{name} is refused: {text} (its key: {key})", code)
        return refused

    def handshake_failed(self, failed: HandshakeFailed) -> None:
        """For the listener."""
        if self._endpoint is None:
            return
        bound = addresses.parse_listen(self._endpoint.address)
        host = addresses.reachable_host(bound.host)
        public = self._pair.public if self._pair is not None else ""
        invite = addresses.Address(host, bound.port, public)
        line = at_server(failed, invite.fsl if public else invite.tcp, self._elsewhere())
        if line:
            self._tell(f"{failed.why} {failed.key}", line, failed.why, failed)

    def open(
        self,
        loop: asyncio.AbstractEventLoop,
        endpoint: tp.ListenerEndpoint,
        journal: Reporter,
        heartbeat_s: float,
    ) -> None:
        """Begin to look at the list, several times a heartbeat, and say who is let in where nobody
        is.
        """
        self._loop, self._endpoint, self._journal = loop, endpoint, journal
        self._every_s = min(LOOK_EVERY_S, heartbeat_s / 4)
        if self._door is None or self._keys is None:
            return
        if not self._door.list.entries:
            text = (
                f"nobody is let in yet: {program()} keys trust KEY --name "
                f"SITE{self._elsewhere()}, with the key that keys new prints at the site"
            )
            journal.say(Note(text, "warning"))
        self._timer = loop.call_later(self._every_s, self._look)

    def close(self) -> None:
        """Stop looking."""
        self._endpoint = None
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        assert self._endpoint is not None
        assert self._door is not None
        looked = self._door.look()
        if looked is not None and looked.problem:
            self._journal.note("keys_kept", self._loop.time(), problem=looked.problem)
            text = (
                f"the list of keys stays as it was, {counted(looked.keys, 'key')}: {looked.problem}"
            )
            self._journal.say(Note(text, "warning"))
        elif looked is not None:
            gone = self._endpoint.evict(self._door.allows)
            self._journal.note("keys_read", self._loop.time(), keys=looked.keys, ended=gone[:64])
            ended = f"; ended the sessions of {', '.join(gone[:8])}" if gone else ""
            text = f"read the list of keys again: {counted(looked.keys, 'key')}{ended}"
            self._journal.say(Note(text, "info"))
        self._timer = self._loop.call_later(self._every_s, self._look)

    def _tell(self, thing: str, line: str, why: str, failed: HandshakeFailed | None = None) -> None:
        if self._endpoint is None or not self._seldom.lets(thing, self._loop.time()):
            return
        key, address = (failed.key, failed.address) if failed is not None else ("", "")
        self._journal.note("turned_away", self._loop.time(), why=why, peer_key=key, address=address)
        self._journal.say(Note(line + self._seldom.rest(), "warning"))

    def _elsewhere(self) -> str:
        if self._keys is None or self._keys.path == default_directory():
            return ""
        return f" --keys {shlex.quote(str(self._keys.path))}"
