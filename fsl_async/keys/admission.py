"""Decides which keys an encrypted listener admits, and under which names.

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
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from fsl_async.errors import KeysError
from fsl_async.keys.allow_list import AllowList, Refusal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fsl_async.keys.folder import KeysFolder
    from fsl_async.keys.holders import NameHolders

NAME_CODE, KEY_CODE = "name", "key"


@frozen
class Looked:
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
        entry = self.list.find(key)
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
        held = self._holders.get(name)
        if held == key:
            return None
        if held and owner is None:
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

    def look(self) -> Looked | None:
        """Read the list again if its file has changed since the last look."""
        found = self._signature()
        if found == self._seen:
            return None
        self._seen = found
        try:
            fresh = self._folder.allowed()
        except KeysError as error:
            return Looked(len(self.list.entries), error.message)
        if fresh is None:
            return Looked(len(self.list.entries), f"{self._folder.allowed_path} is gone")
        self.list = fresh
        return Looked(len(fresh.entries))

    def _signature(self) -> tuple[int, ...] | None:
        """Return what changes with the file: inode (rename), times, size (write), mode (chmod)."""
        try:
            found = self._folder.allowed_path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_mode
