"""A client's part in secure sums: messages to its site, and masks for its deltas.

Importing this module needs the extra `secure`. Raises ConfigError without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from attrs import define
from zmq.utils import z85

from fsl_async.errors import KeysError
from fsl_async.roles.machine import SERVER, Note
from fsl_async.roles.messages import Message
from fsl_async.roles.sync import messages as msg
from fsl_async.secure.site import RefusedError, Site

if TYPE_CHECKING:
    from fsl_async.nodes.client.parts import ClientParts
    from fsl_async.nodes.client.shell import ClientShell
    from fsl_async.roles.sync.delta import Delta
    from fsl_async.secure.masking import Masking


@define(eq=False)
class SecureSide:
    """Answers the parameter server for the site, and decides when a delta can be sent."""

    site: Site
    _masking: Callable[[], Masking | None]
    _send: Callable[[Message], None]
    _say: Callable[[Note], None]

    def takes(self, message: Message) -> bool:
        """Answer a message about a secure sum. Returns whether it was one."""
        if not isinstance(message, msg.OfSum | msg.SecureSet):
            return False
        try:
            answer = self.site.handle(message)
        except RefusedError as error:
            self._say(Note(f"refused for a secure sum: {error}", "warning"))
            answer = error.answer
        if answer is not None:
            self._send(answer)
        return True

    def masks_of(self, delta: Delta) -> int | None:
        """Return the number of a delta's masks, 0 if it gets none; None: not yet known.

        Without masks the parameter server declines it, and the site keeps the work.
        """
        masking = self._masking()
        assert masking is not None, "the welcome has configured the exchange"
        found = masking.bind(delta.key.sequence, lambda: self.site.take_masks(delta.round))
        return 0 if found is None and not self.site.expects(delta.round) else found


def secure_side(
    run: str, parts: ClientParts, shell: ClientShell, say: Callable[[Note], None]
) -> SecureSide:
    """Return the part of a client whose keys are in its folder. KeysError: there is no key."""
    keys = parts.keys

    def known(found: Mapping[str, bytes]) -> None:
        try:
            new = keys.know_sites({name: z85.encode(key).decode() for name, key in found.items()})
        except KeysError as error:
            raise RefusedError(error.message) from None
        if new:
            text = f"keys of {', '.join(new)} are noted in {keys.path}/sites.txt: compare them"
            say(Note(text))

    site = Site(parts.options.name, run, z85.decode(keys.pair().secret), known)
    return SecureSide(
        site,
        lambda: parts.exchange.masking,
        lambda message: shell.endpoint.send(SERVER, msg.to_wire(message)),
        say,
    )
