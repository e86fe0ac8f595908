"""The allow-list: the keys that a listener admits, as a text file to edit by hand. Pure.

    # our sites; a line that begins with # and a space is a comment
    KEY  LABEL  [names=NAME,NAME]

KEY is a public key, 40 characters. LABEL is a unique name, shown in messages. `names` are client
names that belong to this key, which may then use no others. Relays have no line,
because they have no key. Any other text is refused, so that no line seems to do more than it does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from attrs import field, frozen

from fsl_async.errors import KeysError
from fsl_async.roles.names import NAME
from fsl_transport.zmq.curve import is_key

MAX_BYTES = 1 << 22
HEADER = """\
# Keys that this node lets in when it is a server. One a line:
#   KEY  LABEL  [names=NAME,NAME]
# A running server reads this file again when it changes.
"""

Refusal: TypeAlias = tuple[str, str]
"""Code and text of a REFUSE."""


@frozen
class Entry:
    """A trusted key. names: the client names that it may use; empty: any that is free."""

    key: str
    label: str
    names: tuple[str, ...] = ()

    def line(self) -> str:
        """Return the line of the file."""
        words = [self.key, self.label]
        if self.names:
            words.append(f"names={','.join(self.names)}")
        return "  ".join(words)


@frozen
class AllowList:
    """A list. `entries`: by key; `lines`: those of the file, entries and comments."""

    entries: Mapping[str, Entry] = field(factory=dict)
    lines: tuple[str, ...] = ()

    def owner(self, name: str) -> Entry | None:
        """Return the entry to which the list assigns a client name, or None."""
        return next((entry for entry in self.entries.values() if name in entry.names), None)

    def labeled(self, label: str) -> Entry | None:
        """Return the entry with this label, or None."""
        return next((entry for entry in self.entries.values() if entry.label == label), None)

    def with_entry(self, entry: Entry) -> AllowList:
        """Return the list with this entry, which replaces that of the same key or is appended.

        Raises KeysError as `parse` does.
        """
        lines = [entry.line() if _key_of(line) == entry.key else line for line in self.lines]
        if entry.key not in self.entries:
            lines.append(entry.line())
        return parse("\n".join(lines), "the new list")

    def without(self, key: str) -> AllowList:
        """Return the list without that key, with all comments."""
        return parse("\n".join(line for line in self.lines if _key_of(line) != key), "the new list")

    def text(self) -> str:
        """Return the text of the file."""
        return "".join(f"{line}\n" for line in self.lines)


def parse(text: str, source: str) -> AllowList:
    """Read a list. Raises KeysError with `source` and line."""
    if len(text) > MAX_BYTES:
        raise KeysError(f"{source}: longer than {MAX_BYTES:,} bytes")
    entries: dict[str, Entry] = {}
    labels: dict[str, int] = {}
    names: dict[str, int] = {}
    lines = text.split("\n")
    while lines and not lines[-1].strip():
        lines.pop()
    for number, line in enumerate(lines, 1):
        where = f"{source} line {number}"
        entry = _entry(line.removesuffix("\r"), where)
        if entry is None:
            continue
        if entry.key in entries:
            raise KeysError(f"{where}: this key is there already, as {entries[entry.key].label}")
        if entry.label in labels:
            raise KeysError(
                f"{where}: line {labels[entry.label]} has the label {entry.label} already;"
                " use another one"
            )
        for name in entry.names:
            if name in names:
                raise KeysError(
                    f"{where}: the name {name} belongs to the key of line {names[name]} already"
                )
        entries[entry.key] = entry
        labels[entry.label] = number
        names |= dict.fromkeys(entry.names, number)
    return AllowList(entries, tuple(line.removesuffix("\r") for line in lines))


def _is_comment(line: str) -> bool:
    return not line.strip() or line == "#" or line.startswith(("# ", "#\t"))


def _key_of(line: str) -> str:
    return "" if _is_comment(line) else line.split(maxsplit=1)[0]


def _entry(line: str, where: str) -> Entry | None:
    if _is_comment(line):
        return None
    if not line.replace("\t", " ").isprintable():
        raise KeysError(f"{where}: has characters that cannot be printed; write the line anew")
    words = line.split()
    key, *rest = words
    if not is_key(key):
        hint = "; a comment begins with # and a space" if key.startswith("#") else ""
        raise KeysError(
            f"{where}: {key[:60]!r} is no public key (40 characters, by fsl-node keys pub){hint}"
        )
    if not rest or "=" in rest[0]:
        raise KeysError(f"{where}: no label behind the key; write one, like site-a")
    label, *options = rest
    if not NAME.fullmatch(label):
        raise KeysError(
            f"{where}: the label {label[:80]!r} must be 1 to 64 letters, digits, dots, dashes or"
            " underscores"
        )
    return Entry(key, label, _names(options, where))


def _names(options: Iterable[str], where: str) -> tuple[str, ...]:
    names: tuple[str, ...] = ()
    for option in options:
        word, equals, value = option.partition("=")
        if word != "names" or not equals:
            raise KeysError(
                f"{where}: {option[:60]!r} is not understood; behind the label there may be names="
            )
        if names:
            raise KeysError(f"{where}: names= twice")
        names = tuple(value.split(","))
        for name in names:
            if not NAME.fullmatch(name) or name in {".", ".."}:
                raise KeysError(f"{where}: {name[:80]!r} in names= is no client's name")
        if len(set(names)) < len(names):
            raise KeysError(f"{where}: a name twice in names=")
    return names
