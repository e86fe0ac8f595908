"""What a client says of itself in the reason of its BYE (docs/WIRE.md): a sentence, and whether its process wants to be launched again. Pure.

    relaunch 110: EC2 spot (terminate)      exit code 64; what runs it now is taken away within 110 s: before that there is no use in it
    Ctrl-C                                  anything else is a sentence only

The server reads what a peer wrote: any other text is a sentence, and sentences are cut and made printable.
"""

from __future__ import annotations

import math
import re

from attrs import frozen

from fsl_transport.text import peer_text

_UNTOLD = {
    1: "its training failed; the log at the client has the error",
    2: "it cannot take part; the log at the client says why",
}
"""Reasons sent to servers at these exit codes: the client's own reason may quote its data, its files and its paths."""

_AGAIN = re.compile(r"relaunch ([0-9]{1,4}): (.*)", re.DOTALL)
_LONGEST_S = 9999
_MOST_CHARACTERS = 200


@frozen
class Goodbye:
    """Why a client ends. relaunch_in_s: the seconds after which it may be launched again; None: it is not to be, as far as it knows."""

    reason: str
    relaunch_in_s: float | None = None

    @property
    def text(self) -> str:
        """For the wire; whole seconds, rounded up, 9,999 at the most."""
        if self.relaunch_in_s is None:
            return self.reason
        seconds = math.ceil(min(max(self.relaunch_in_s, 0.0), _LONGEST_S))
        return f"relaunch {seconds}: {self.reason}"

    @classmethod
    def read(cls, text: str) -> Goodbye:
        """Read what a client said. Never raises: any text is a goodbye."""
        found = _AGAIN.fullmatch(text)
        if found is None:
            return cls(peer_text(text, _MOST_CHARACTERS))
        return cls(peer_text(found[2], _MOST_CHARACTERS), float(found[1]))


def reason_for_peers(reason: str, exit_code: int) -> str:
    """Why a client ends, as others are told it: at exit codes 1 and 2 without the reason's own words."""
    return _UNTOLD.get(exit_code, reason)
