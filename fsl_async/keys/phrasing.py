"""What to say of handshakes that failed, and how often. Pure.

Strangers cause these lines, so they are bounded: the same thing once in `AGAIN_S`, at most `BURST`
new things in that time (what is more is counted, and told with the next line), and nothing that
came over the network is printed but a key and an IP address that were checked.
"""

from __future__ import annotations

import shlex
from collections import OrderedDict

from fsl_async.config.address import Address
from fsl_async.process.program import program
from fsl_transport.zmq.curve import CLOSED, MECHANISM, SERVER_KEY, UNKNOWN_KEY, HandshakeFailed

AGAIN_S = 60.0
BURST = 10


class MessageThrottle:
    """Lets a thing through once in a while."""

    def __init__(self) -> None:
        self._told: OrderedDict[str, float] = OrderedDict()
        self.held_back = 0

    def lets(self, thing: str, now: float) -> bool:
        """Whether to say it at `now` (seconds, any clock that does not go back)."""
        while self._told and next(iter(self._told.values())) <= now - AGAIN_S:
            self._told.popitem(last=False)
        if thing in self._told:
            return False
        if len(self._told) >= BURST:
            self.held_back += 1
            return False
        self._told[thing] = now
        return True

    def rest(self) -> str:
        """What was held back since this was asked last, for the end of a line."""
        count, self.held_back = self.held_back, 0
        return f" (and {count:,} more were not printed)" if count else ""


def at_server(failed: HandshakeFailed, invite: str, keys: str) -> str:
    """The server's line; empty where there is nothing to say. invite: this server's address, with
    its key where it has one. keys: "" or " --keys DIR".
    """
    if failed.why == UNKNOWN_KEY:
        trust = f"{program()} keys trust {shlex.quote(failed.key)} --name SITE{keys}"
        return f"a key that is not on the list came from {failed.address}; this lets it in: {trust}"
    if failed.why == SERVER_KEY:
        return (
            "a client was turned away that wants another server key than this one's: give it "
            f"{shlex.quote(invite)}"
        )
    if failed.why == MECHANISM and "?key=" in invite:
        return (
            "a client was turned away that does not encrypt: give it the whole address, "
            f"{shlex.quote(invite)}"
        )
    if failed.why == MECHANISM:
        return (
            "a client was turned away that encrypts, because this server does not: give it the "
            f"address without a key, {invite}"
        )
    return ""


def at_client(
    failed: HandshakeFailed, server: Address, public: str, name: str, *, is_reserved: bool = False
) -> str:
    """The client's line; empty where there is nothing to say. public: its own key, "" where it does
    not encrypt.

    is_reserved: the name is one that a list has to give to a key.
    """
    place = f"{server.host}:{server.port}"
    if failed.why == UNKNOWN_KEY:
        trust = f"{program()} keys trust {shlex.quote(public)} --name {name}"
        trust += f" --names {name}" if is_reserved else ""
        return (
            f"{place} does not let this client's key in yet; whoever runs the server types: {trust}"
        )
    if failed.why == MECHANISM and public:
        return (
            f"{place} does not encrypt, and this address has a key: is it the right server? "
            "Take the line that it prints"
        )
    if failed.why == MECHANISM:
        return f"{place} encrypts: give the whole address that it prints, fsl://...?key=..."
    if failed.why == CLOSED and public:
        return (
            f"{place} hung up during the handshake: its key is not the one in this address (take "
            "the line that the server prints now),"
            " or nothing listens behind it"
        )
    return ""
