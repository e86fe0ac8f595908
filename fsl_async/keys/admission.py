"""Decides which connections an encrypted listener admits, and under which name. Reads and writes
two small files, on the loop thread.

    the key is                                          then
    not on the list                                     no connection (ZAP); if there was one: no
                                                        message, no session
    this node's own                                     admitted, under its sister's name alone
    a client's, the name is the sister's                refused, code `name`, unless the list gives
                                                        the name to it
    a client's, the list gives the name to it           admitted
    a client's, the list gives the name to another key  refused, code `name`
    a client's, the list gives other names to it        refused, code `name`
    a client's, the name is free in this run            admitted; the name is this key's from now on
    a client's, the name is its own in this run         admitted
    a client's, the name is another key's in this run   refused, code `name`

A name stays its key's after the key was revoked: with `names=` a person hands it over. The list is
read again when its file has changed; a file that cannot be read, or is gone, changes nothing, and
is reported once.
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
    """The list's file has changed. `problem`: why it could not be read, and then nothing else
    has.
    """

    keys: int
    problem: str = ""


class Admission:
    """The list as it is now, and the names of a run. Raises KeysError when the list cannot be read
    at the beginning.
    """

    def __init__(
        self, folder: KeysFolder, holders: NameHolders, sisters: Mapping[str, str] | None = None
    ) -> None:
        """sisters: names of other servers that have this one's own pair, and the key: who holds it
        could be this server anyway.
        """
        self._sisters = {name: key for name, key in (sisters or {}).items() if name}
        self._folder = folder
        self._holders = holders
        self._seen = self._signature()
        self.list = folder.allowed() or AllowList()

    def allows(self, key: str) -> bool:
        """Whether a key may have a connection."""
        return key in self.list.entries or key in self._sisters.values()

    def admit(self, name: str, key: str) -> Refusal | None:
        """Whether a client may say HELLO under `name`: None, or the refusal. Takes hold of a name
        that is free.
        """
        if key and self._sisters.get(name) == key:
            return None
        entry = self.list.find(key)
        if entry is None:
            return KEY_CODE, "the server does not let this key in"
        if name in self._sisters and name not in entry.names:
            text = (
                f"the name {name} is a server's: if this key is that server's, the operator here "
                f"types keys trust KEY --name {entry.label}"
                f" --names {name}; start a client with another --name"
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
                f"the name {name} belongs to another key in this run: start with another --name; "
                "or, if this site has a new key, the server's"
                f" operator hands the name over: keys trust KEY --name {entry.label} --names {name}"
            )
            return NAME_CODE, text
        if self._holders.is_full:
            return NAME_CODE, "the server has written down too many names; use one of before"
        try:
            self._holders.hold(name, key)
        except OSError as error:
            return NAME_CODE, f"the server cannot write the name down ({error.strerror})"
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
        """What changes with the file: by a rename its number, by writing its times and size, by
        chmod its mode.
        """
        try:
            found = self._folder.allowed_path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_mode
