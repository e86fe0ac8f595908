"""What a site answers in a secure sum. Pure but for the randomness that it is given.

The parameter server carries all messages and may send anything. The rules that protect the site:

1. One set of survivors is answered in an attempt: the same again gets the same answer, another one
   is refused. Keys, shares and the record of the answer are in memory only, so a site that is
   started again has nothing left to answer with.
2. Of each site it gives one share, of the seed of its own mask where it survived, else of the key
   of its masks with others: never both.
3. The masks of an attempt are taken once. A new attempt has new keys, and the old ones are gone.
4. A set is taken once in an attempt, of at least three sites whose long-term keys are the known
   ones. Shares open only where their site has the same set, to the last bit.
5. A sum is opened of three or more sites that mask with each other, this one among them, and only
   if it has sent its part.

    message         has to be                                           answer
    SecureCall      any                                                 SecureKey, of new keys
    SecureCall      the same, before its set                            the same
    SecureSet       the attempt's first set, with this site in it       SecureShares
    SecureSet       the same                                            the same
    SecureShares    one of each neighbour, for the attempt's set        none: masks may be taken
    Unmask          of survivors by rule 5, once masks are taken        Unmasked
    Unmask          the same                                            the same
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from attrs import define, field, frozen

from fsl_async.roles.messages import Message
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.roster import KEY_BYTES, Roster
from fsl_async.secure import masks as crypto
from fsl_async.secure.lattice import pack, word_type
from fsl_async.secure.shamir import SHARE_BYTES, split

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class RefusedError(Exception):
    """The site does not answer a message of the parameter server; the text says why."""


@frozen
class Masks:
    """The masks of one site in one attempt.

    number: of their set. streams: key and sign of each.
    """

    roster: Roster
    number: int
    streams: tuple[tuple[bytes, int], ...]

    def frame(self, numbers: NDArray[np.int32], index: int) -> bytes:
        """Return the masked frame of chunk `index`."""
        words = numbers.astype(word_type(self.roster.width))
        for key, sign in self.streams:
            crypto.add_mask(words, key, index, sign)
        return pack(words, self.roster.width)


@define(eq=False)
class _Attempt:
    """Keys of an attempt, and how far it is."""

    call: msg.SecureCall
    key: bytes
    """Private X25519 key of the masks with others."""
    seed: bytes
    """Of the own mask."""
    roster: Roster | None = None
    context: bytes = b""
    sealed: msg.SecureShares | None = None
    held: dict[str, tuple[bytes, bytes]] = field(factory=dict)
    """Site -> its shares here: of its key, of its seed. The own ones are there from the start."""
    is_taken: bool = False
    survivors: list[str] = field(factory=list)
    answer: msg.Unmasked | None = None

    @property
    def is_ready(self) -> bool:
        """Whether all shares are here."""
        return self.roster is not None and len(self.held) == len(
            self.roster.holders(next(iter(self.held)))
        )


@define(eq=False)
class Site:
    """A site of a run. private: its long-term X25519 key.

    known: takes the long-term keys of other sites, by name. Raises RefusedError for one that was
    another before.
    """

    name: str
    run: str
    _private: bytes
    _known: Callable[[Mapping[str, bytes]], None]
    _entropy: Callable[[int], bytes] = os.urandom
    _attempt: _Attempt | None = field(default=None, init=False)

    def handle(self, message: Message) -> Message | None:
        """Return the answer to a message of the parameter server. Raises RefusedError."""
        match message:
            case msg.SecureCall():
                return self._called(message)
            case msg.SecureSet(roster):
                return self._set(roster)
            case msg.SecureShares():
                self._shares(message)
                return None
            case msg.Unmask():
                return self._unmask(message)
        raise RefusedError(f"{type(message).__name__} is no message to a site")

    def expects(self, number: int) -> bool:
        """Whether masks for this round may still come."""
        found = self._attempt
        return found is not None and found.call.round == number and not found.is_taken

    def take_masks(self, number: int) -> Masks | None:
        """Return the masks of this round's attempt, once; None: they are not, or no more, here."""
        found = self._attempt
        if found is None or found.call.round != number or found.is_taken or not found.is_ready:
            return None
        assert found.roster is not None, "it is ready"
        found.is_taken = True
        streams = [(crypto.self_key(found.seed, found.context), 1)]
        for other in found.roster.neighbours(self.name):
            key = crypto.pair_key(found.key, found.roster, found.context, self.name, other)
            streams.append((key, crypto.sign_of(self.name, other)))
        return Masks(found.roster, found.roster.number(self.run), tuple(streams))

    def _called(self, call: msg.SecureCall) -> Message:
        found = self._attempt
        if found is None or found.call != call or found.roster is not None:
            self._attempt = found = _Attempt(
                call, self._entropy(KEY_BYTES), self._entropy(KEY_BYTES)
            )
        public = crypto.public_of(found.key)
        return msg.SecureKey(call.round, call.attempt, crypto.public_of(self._private), public)

    def _set(self, roster: Roster) -> Message:
        found = self._of(roster.round, roster.attempt)
        if found.roster is not None:
            if found.roster != roster or found.sealed is None:
                raise RefusedError("the parameter server sent a second set for one attempt")
            return found.sealed
        own = crypto.public_of(self._private), crypto.public_of(found.key)
        if roster.keys.get(self.name) != own:
            raise RefusedError("the parameter server's set has not this site's own keys")
        others = {name: keys for name, keys in roster.keys.items() if name != self.name}
        if len({keys[0] for keys in roster.keys.values()}) < len(roster.members):
            raise RefusedError("the parameter server's set has one site under two names")
        self._known({name: keys[0] for name, keys in others.items()})
        found.roster, found.context = roster, roster.context(self.run)
        holders = roster.holders(self.name)
        shares = [
            split(secret, roster.threshold, len(holders), self._entropy)
            for secret in (found.key, found.seed)
        ]
        mine = dict(zip(holders, zip(*shares, strict=True), strict=True))
        found.held[self.name] = mine.pop(self.name)
        sealed = [
            [name, crypto.seal(b"".join(two), self._secret(name), found.context, self.name, name)]
            for name, two in mine.items()
        ]
        found.sealed = msg.SecureShares(roster.round, roster.attempt, sealed)
        return found.sealed

    def _shares(self, message: msg.SecureShares) -> None:
        found = self._of(message.round, message.attempt)
        if found.roster is None:
            raise RefusedError("the parameter server sent shares before a set")
        if found.is_ready:
            return
        sealed = dict(message.sealed)
        if sealed.keys() != set(found.roster.neighbours(self.name)):
            raise RefusedError("the parameter server sent shares of other sites than the set has")
        opened = {}
        for name, text in sealed.items():
            secret = self._secret(name)
            try:
                both = crypto.unseal(text, secret, found.context, name, self.name)
            except ValueError:
                both = b""
            if len(both) != 2 * SHARE_BYTES:
                raise RefusedError(
                    f"the shares of {name} are not from the holder of its key for this set: the"
                    " parameter server has replaced a key, or told sites of different sets"
                )
            opened[name] = both[:SHARE_BYTES], both[SHARE_BYTES:]
        found.held |= opened

    def _unmask(self, message: msg.Unmask) -> Message:
        found, survivors = self._of(message.round, message.attempt), sorted(message.survivors)
        if found.answer is not None:
            if survivors != found.survivors:
                raise RefusedError(
                    "the parameter server asked to open two different sums of one round"
                )
            return found.answer
        if found.roster is None or not found.is_taken:
            raise RefusedError("the parameter server asked to open a sum without this site's part")
        objection = found.roster.objection(survivors)
        if objection or self.name not in survivors:
            raise RefusedError(
                f"the parameter server asked to open a sum: {objection or 'not of us'}"
            )
        needed = found.roster.needed(survivors)
        shares = [[name, two[needed[name]]] for name, two in found.held.items() if name in needed]
        found.survivors = survivors
        found.answer = msg.Unmasked(message.round, message.attempt, shares)
        return found.answer

    def _of(self, number: int, attempt: int) -> _Attempt:
        found = self._attempt
        if found is None or (found.call.round, found.call.attempt) != (number, attempt):
            raise RefusedError(
                f"attempt {attempt} at round {number} is not this site's present one"
            )
        return found

    def _secret(self, other: str) -> bytes:
        """Return the secret with another site, of both pairs of keys."""
        found = self._attempt
        assert found is not None
        assert found.roster is not None
        site, key = found.roster.keys[other]
        try:
            return crypto.agree(self._private, site) + crypto.agree(found.key, key)
        except ValueError:
            raise RefusedError(f"the key of {other} is none") from None
