"""A client's part in secure sums: messages to its site, and masks for its deltas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from attrs import define
from zmq.utils import z85

from fsl_async.errors import KeysError
from fsl_async.roles.machine import SERVER, Note
from fsl_async.roles.messages import Message
from fsl_async.roles.sync import messages as msg
from fsl_async.secure.masks import check_installed
from fsl_async.secure.site import RefusedError, Site

if TYPE_CHECKING:
    from fsl_async.nodes.client.parts import ClientParts
    from fsl_async.nodes.client.shell import ClientShell
    from fsl_async.roles.sync.delta import Delta
    from fsl_async.secure.masking import Masking

_OF_SITES = (msg.SecureCall, msg.SecureSet, msg.SecureShares, msg.Unmask)


@define(eq=False)
class SecureSide:
    """Answers the parameter server for the site, and decides when a delta can be sent."""

    site: Site
    _masking: Callable[[], Masking | None]
    _send: Callable[[Message], None]
    _say: Callable[[Note], None]

    def takes(self, message: Message) -> bool:
        """Answer a message about a secure sum. Returns whether it was one."""
        if not isinstance(message, _OF_SITES):
            return False
        try:
            answer = self.site.handle(message)
        except RefusedError as error:
            self._say(Note(f"refused for a secure sum: {error}", "warning"))
            return True
        if answer is not None:
            self._send(answer)
        return True

    def masks_of(self, delta: Delta) -> int | None:
        """Return the number of a delta's masks, 0 if it gets none; None: not yet known.

        Without masks the parameter server declines it, and the site keeps the work.
        """
        masking, sequence, number = self._masking(), delta.key.sequence, delta.round
        assert masking is not None, "the welcome has configured the exchange"
        if masking.bind(sequence, lambda: self.site.take_masks(number)):
            return masking.number(sequence)
        return None if self.site.expects(number) and not masking.has_begun(sequence) else 0


def secure_side(
    run: str, parts: ClientParts, shell: ClientShell, say: Callable[[Note], None]
) -> SecureSide:
    """Return the part of a client whose keys are in its folder.

    ConfigError: the extra is not installed. KeysError: there is no key.
    """
    check_installed()
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
