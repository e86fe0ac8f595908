"""Controls access to a listener: its key, the admission of names, and the reloads of the list.

An encrypted listener admits these keys, under these names:

    key                                            decision
    not on the list                                no connection (ZAP); an open one is closed
    this listener's own                            admitted, under its reserved name only
    listed, the name is reserved                   refused, code `name`, unless the list assigns the
                                                   name to it
    listed, the list assigns the name to it        admitted
    listed, the list assigns the name to another   refused, code `name`
    listed, the list assigns other names to it     refused, code `name`
    listed, the name is free in this run           admitted; the name is the key's in this run
    listed, the name is its own in this run        admitted
    listed, the name is another key's in this run  refused, code `name`

A name remains its key's after the key was revoked; `names=` of the list assigns it to another key.
The list is read again when its file has changed. A list that cannot be read, or is missing, changes
nothing and is reported once. Reads and writes two small files on the loop's thread.

`names.txt` in the run directory has the key of each client name. A line is `NAME KEY CRC`; the last
one of a name counts. CRC is the CRC-32 (zlib) of all lines up to its own,
so that a line that was altered, lost or moved does not match. A
line is on disk before a client is admitted under the name. A line that a crash has torn is cut off
at the next start.
"""

from __future__ import annotations

import asyncio
import shlex
import zlib
from typing import TYPE_CHECKING

from attrs import frozen

import fsl_transport as tp
from fsl_async.config import address as addresses
from fsl_async.errors import ConfigError, KeysError, program
from fsl_async.files.files import Files
from fsl_async.keys.allow_list import AllowList, Refusal
from fsl_async.keys.folder import KeysFolder
from fsl_async.roles.machine import Note
from fsl_async.roles.names import NAME
from fsl_async.roles.phrasing import MessageThrottle, counted
from fsl_transport.zmq.curve import (
    MECHANISM,
    SERVER_KEY,
    UNKNOWN_KEY,
    HandshakeFailed,
    KeyPair,
    ListenerCurve,
    is_key,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path


FILE = "names.txt"
MOST_NAMES = 1 << 16
_MAX_BYTES = MOST_NAMES * 128
TO_TRUST = "; to trust it: "
"""Before the command in the message about a key that is not on the list."""


def chained(body: bytes, before: int = 0) -> tuple[bytes, int]:
    """Return the line for `body`, with its newline, and the checksum up to it.

    body: without newline. before: the checksum of the lines before it.
    """
    checksum = zlib.crc32(body, before)
    return body + f" {checksum:08x}\n".encode(), checksum


def unchained(line: bytes, before: int = 0) -> tuple[bytes, int] | None:
    """Return the body of a line and the checksum up to it; None when it does not match.

    line: without its newline. before: the checksum of the lines before it.
    """
    body, _, written = line.rpartition(b" ")
    checksum = zlib.crc32(body, before)
    return (body, checksum) if written == f"{checksum:08x}".encode() else None


def at_server(failed: HandshakeFailed, invite: str, keys: KeysFolder) -> str:
    """Return the listener's message; empty for none.

    invite: the listener's address, with its key if it has one. keys: of the listener.
    """
    if failed.why == UNKNOWN_KEY:
        trust = keys.command(f"trust {shlex.quote(failed.key)} --name SITE")
        return f"a key that is not on the list came from {failed.address}{TO_TRUST}{trust}"
    if failed.why == SERVER_KEY:
        return (
            f"refused a client that expects another key of this node: give it {shlex.quote(invite)}"
        )
    if failed.why == MECHANISM and "?key=" in invite:
        return (
            "refused a client that does not encrypt: give it the complete address,"
            f" {shlex.quote(invite)}"
        )
    if failed.why == MECHANISM:
        return (
            "refused a client that encrypts, because this node does not: give it the address"
            f" without a key, {invite}"
        )
    return ""


class NameHolders:
    """The names of one run. Raises KeysError where the file is damaged."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._keys: dict[str, str] = {}
        self._size = 0
        self._checksum = 0
        try:
            data = path.read_bytes() if path.exists() else b""
        except OSError as error:
            raise KeysError(f"{path}: {error.strerror}") from None
        complete, _, _ = data.rpartition(b"\n")
        lines = complete.split(b"\n") if complete else []
        if len(data) > _MAX_BYTES:
            raise KeysError(f"{path}: longer than {_MAX_BYTES:,} bytes")
        for number, line in enumerate(lines, 1):
            found = unchained(line, self._checksum)
            body, self._checksum = found or (b"", 0)
            name, _, key = body.decode("utf-8", "replace").partition(" ")
            if not NAME.fullmatch(name) or not is_key(key):
                raise KeysError(
                    f"{path} line {number}: damaged; restore it, or remove the file and every name"
                    " is free again"
                )
            self._keys[name] = key
        self._size = len(complete) + 1 if lines else 0
        tail = data[self._size :]
        # A crash tears a line before its end, and no client was admitted by it. A complete line
        # without its newline is damage, and so are zeros without a line before them.
        if unchained(tail[:-1], self._checksum) or (not lines and b"\0" in tail):
            raise KeysError(
                f"{path}: damaged at its end; restore it, or remove the file and every name is free"
                " again"
            )

    def get(self, name: str) -> str:
        """Return the key that uses the name; empty where none does."""
        return self._keys.get(name, "")

    @property
    def is_full(self) -> bool:
        """Whether the limit of names is reached."""
        return len(self._keys) >= MOST_NAMES or self._size >= _MAX_BYTES - 128

    def hold(self, name: str, key: str) -> None:
        """Assign the name to the key, durably. Blocks for a sync of the disk.

        Raises OSError, and changes nothing then.
        """
        line, checksum = chained(f"{name} {key}".encode(), self._checksum)
        files, is_there = Files(), self._path.exists()
        opened = files.opened(self._path, writable=True) if is_there else files.created(self._path)
        with opened as descriptor:
            # A crash or a full disk may have left a part of a line.
            files.truncate(descriptor, self._size)
            files.write(descriptor, line, self._size)
            files.sync(descriptor)
        if not is_there:
            files.sync_directory(self._path.parent)
        self._size += len(line)
        self._checksum = checksum
        self._keys[name] = key


NAME_CODE, KEY_CODE = "name", "key"


@frozen
class Reread:
    """The list's file has changed.

    keys: on the list in use. problem: why the file could not be read, so that the old list remains.
    """

    keys: int
    problem: str = ""


class Admission:
    """The list in use, and the names of a run. Raises KeysError when the list cannot be read."""

    def __init__(
        self, folder: KeysFolder, holders: NameHolders, reserved: Mapping[str, str] | None = None
    ) -> None:
        """reserved: names of other nodes that use this listener's own pair, and its public key."""
        self._reserved = {name: key for name, key in (reserved or {}).items() if name}
        self._folder = folder
        self._holders = holders
        self._seen = self._signature()
        self.list = folder.allowed() or AllowList()

    def allows(self, key: str) -> bool:
        """Whether a key may have a connection."""
        return key in self.list.entries or key in self._reserved.values()

    def admit(self, name: str, key: str) -> Refusal | None:
        """Return None or the refusal of a HELLO with `name`. Reserves a free name for the key."""
        if key and self._reserved.get(name) == key:
            return None
        entry = self.list.entries.get(key)
        if entry is None:
            return KEY_CODE, "this key is not on the allow-list"
        if name in self._reserved and name not in entry.names:
            text = (
                f"the name {name} is reserved: if this key is that node's, the operator here runs"
                f" keys trust KEY --name {entry.label} --names {name};"
                " start a client with another --name"
            )
            return NAME_CODE, text
        owner = self.list.owner(name)
        if owner is not None and owner.key != key:
            return NAME_CODE, f"the name {name} belongs to another key; start with another --name"
        if owner is None and entry.names:
            named = ", ".join(entry.names[:8])
            return NAME_CODE, f"this key may use the name {named} and not {name}; give that --name"
        holder = self._holders.get(name)
        if holder == key:
            return None
        if holder and owner is None:
            text = (
                f"the name {name} belongs to another key in this run: start with another --name;"
                " or, if this site has a new key, the operator here assigns it the name:"
                f" keys trust KEY --name {entry.label} --names {name}"
            )
            return NAME_CODE, text
        if self._holders.is_full:
            return NAME_CODE, "this run has too many names; use one that it has"
        try:
            self._holders.hold(name, key)
        except OSError as error:
            return NAME_CODE, f"the name cannot be stored ({error.strerror})"
        return None

    def reread(self) -> Reread | None:
        """Read the list again if its file has changed since the last look."""
        signature = self._signature()
        if signature == self._seen:
            return None
        self._seen = signature
        try:
            found = self._folder.allowed()
        except KeysError as error:
            return Reread(len(self.list.entries), error.message)
        if found is None:
            return Reread(len(self.list.entries), f"{self._folder.allowed_path} is gone")
        self.list = found
        return Reread(len(found.entries))

    def _signature(self) -> tuple[int, ...] | None:
        """Return what changes with the file: inode (rename), times, size (write), mode (chmod)."""
        try:
            found = self._folder.allowed_path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_mode


REREAD_EVERY_S = 1.0


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
        note: Callable[..., int],
        say: Callable[[Note], None],
        *,
        heartbeat_s: float,
    ) -> None:
        """Begin to check the list for changes, at least four times a heartbeat.

        note: writes a note to the journal, from its name, the time and fields. say: takes lines for
        the operator.
        An empty list causes a warning with the command that adds a key.
        """
        self._loop, self._endpoint, self._note, self._say = loop, endpoint, note, say
        self._every_s = min(REREAD_EVERY_S, heartbeat_s / 4)
        if self._admission is None or self._keys is None:
            return
        if not self._admission.list.entries:
            trust = self._keys.command("trust KEY --name SITE")
            text = f"no key is trusted yet: {trust}, with the key that keys new prints at the site"
            say(Note(text, "warning"))
        self._timer = loop.call_later(self._every_s, self._reread)

    def close(self) -> None:
        """Stop the checks."""
        self._endpoint = None
        if self._timer is not None:
            self._timer.cancel()

    def _reread(self) -> None:
        assert self._endpoint is not None
        assert self._admission is not None
        reread = self._admission.reread()
        if reread is not None and reread.problem:
            self._note("keys_kept", self._loop.time(), problem=reread.problem)
            text = (
                f"the list of keys stays as it was, {counted(reread.keys, 'key')}: {reread.problem}"
            )
            self._say(Note(text, "warning"))
        elif reread is not None:
            gone = self._endpoint.evict(self._admission.allows)
            self._note("keys_read", self._loop.time(), keys=reread.keys, ended=gone[:64])
            ended = f"; ended the sessions of {', '.join(gone[:8])}" if gone else ""
            text = f"read the list of keys again: {counted(reread.keys, 'key')}{ended}"
            self._say(Note(text, "info"))
        self._timer = self._loop.call_later(self._every_s, self._reread)

    def _report(
        self, thing: str, line: str, why: str, failed: HandshakeFailed | None = None
    ) -> None:
        more = None if self._endpoint is None else self._throttle.lets(thing, self._loop.time())
        if more is None:
            return
        key, address = (failed.key, failed.address) if failed is not None else ("", "")
        self._note("turned_away", self._loop.time(), why=why, peer_key=key, address=address)
        # A command stays last: people copy the rest of the line.
        what, to_do, command = line.partition(TO_TRUST)
        self._say(Note(f"{what}{more}{to_do}{command}", "warning"))
