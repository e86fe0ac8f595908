"""The form of names, and the tags of messages, events and effects. Pure."""

import re
from typing import ClassVar, Final

NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""Names of runs, clients, parameter servers, files. "." and ".." match: refuse them for files."""

MAX_DIGITS: Final = 19
"""Digits of a number in a key of a delta or an upload: 63 bits."""


class Tagged:
    """Has a tag that does not depend on the class's name: `class Fetch(Message, tag="fetch/1")`.

    The tag of a message is its kind on the wire, that of an event or effect its type in the
    journal. A class may be renamed without changing either. Tags of messages have a version
    (`fetch/2` when fields or their meaning change); an event or effect whose meaning changes gets
    another tag.
    """

    __slots__ = ()
    tag: ClassVar[str]

    def __init_subclass__(cls, *, tag: str | None = None) -> None:
        """Set the tag. Raises TypeError if there is none: a tag is never inherited."""
        super().__init_subclass__()
        if tag is not None:
            cls.tag = tag
        elif "tag" not in cls.__dict__:  # attrs makes a class a second time, from its members
            raise TypeError(f"{cls.__name__} needs a tag")
