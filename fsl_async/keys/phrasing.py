"""Messages about failed handshakes. Pure.

Unauthenticated peers cause these messages, so they are limited, at a listener by a
`MessageThrottle`. A client repeats its own less and less often. Of the network's data they contain
only a key and an IP address, both checked.
"""

import shlex

from fsl_async.config.address import Address
from fsl_async.keys.folder import KeysFolder
from fsl_async.process.program import program
from fsl_async.roles.phrasing import AGAIN_S
from fsl_transport.zmq.curve import CLOSED, MECHANISM, SERVER_KEY, UNKNOWN_KEY, HandshakeFailed

LONGEST_S = 3600.0
TO_TRUST = "; to trust it: "
"""Before the command in the server's message."""


class LessOften:
    """Prints a message at once, and again after 1, 2, 4, ... minutes, at most an hour apart."""

    def __init__(self) -> None:
        self._next: dict[str, tuple[float, float]] = {}  # thing -> (when, wait after that)

    def lets(self, thing: str, now: float) -> bool:
        """Whether to print a message about `thing`, of a few, at `now` (monotonic seconds)."""
        at, wait_s = self._next.get(thing, (now, AGAIN_S))
        if now < at:
            return False
        self._next[thing] = now + wait_s, min(2 * wait_s, LONGEST_S)
        return True


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


def at_client(
    failed: HandshakeFailed, server: Address, public: str, name: str, *, is_reserved: bool = False
) -> str:
    """Return the client's message; empty for none.

    public: the client's key, "" where it does not encrypt.
    is_reserved: the allow-list has to assign the name to the key.
    """
    at = f"{server.host}:{server.port}"
    if failed.why == UNKNOWN_KEY:
        trust = f"{program()} keys trust {shlex.quote(public)} --name {name}"
        trust += f" --names {name}" if is_reserved else ""
        return (
            f"{at} does not trust this client's key: it is not on the allow-list there. This client"
            f" goes on by itself as soon as the operator there runs: {trust}"
        )
    if failed.why == MECHANISM and public:
        return (
            f"{at} does not encrypt, and this address has a key: is it the right one?"
            " Use the line that is printed there"
        )
    if failed.why == MECHANISM:
        return f"{at} encrypts: give the complete address that it prints, fsl://...?key=..."
    if failed.why == CLOSED and public:
        return (
            f"{at} closed the connection during the handshake: its key is not the one in this"
            " address (use the line that is printed there now), or nothing listens behind it"
        )
    return ""
