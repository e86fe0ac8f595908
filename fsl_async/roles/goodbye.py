"""The reason in a client's BYE (docs/WIRE.md): a sentence, and whether to launch it again. Pure.

    relaunch 110: EC2 spot (terminate)      exit code 64: launch it again, but not within 110 s,
                                            because its machine is taken away
    Ctrl-C                                  anything else is a sentence only

The reader accepts any text of a peer: sentences are cut and made printable.
"""

from __future__ import annotations

import math
import re

from attrs import frozen

from fsl_transport.text import peer_text

_REPLACED = {
    1: "its training failed; the log at the client has the error",
    2: "it cannot take part; the log at the client has the reason",
}
"""Reasons sent at these exit codes: the client's own reason may quote its data, files and paths."""

_AGAIN = re.compile(r"relaunch ([0-9]{1,4}): (.*)", re.DOTALL)
_LONGEST_S = 9999
_MOST_CHARACTERS = 200


@frozen
class Goodbye:
    """Why a client ends.

    relaunch_in_s: the seconds after which it may be launched again; None: no relaunch is needed.
    """

    reason: str
    relaunch_in_s: float | None = None

    @property
    def text(self) -> str:
        """The text on the wire; seconds are rounded up, and at most 9,999."""
        if self.relaunch_in_s is None:
            return self.reason
        seconds = math.ceil(min(max(self.relaunch_in_s, 0.0), _LONGEST_S))
        return f"relaunch {seconds}: {self.reason}"

    @classmethod
    def read(cls, text: str) -> Goodbye:
        """Read a client's reason. Never raises: any text is a goodbye."""
        found = _AGAIN.fullmatch(text)
        if found is None:
            return cls(peer_text(text, _MOST_CHARACTERS))
        return cls(peer_text(found[2], _MOST_CHARACTERS), float(found[1]))


def reason_for_peers(reason: str, exit_code: int) -> str:
    """The reason to send to peers: at exit codes 1 and 2 a general one."""
    return _REPLACED.get(exit_code, reason)
