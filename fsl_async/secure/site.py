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
    """The site does not do what a message of the parameter server asks for; the text says why.

    answer: what it sends instead, if anything.
    """

    def __init__(self, text: str, answer: Message | None = None) -> None:
        super().__init__(text)
        self.answer = answer


@frozen
class Masks:
    """The masks of one site in one attempt. number: of their set."""

    roster: Roster
    number: int
    _streams: crypto.Streams

    def frame(self, numbers: NDArray[np.int32], index: int) -> bytes:
        """Return the masked frame of chunk `index`."""
        words = numbers.astype(word_type(self.roster.width))
        crypto.add_masks(words, self._streams, index)
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
    """Site -> its shares here: of its key, of its seed. Those of others come all at once."""
    is_taken: bool = False
    survivors: list[str] = field(factory=list)
    answer: msg.Unmasked | None = None


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
        """Return the answer to a message of the parameter server; a repeated one gets the same.

        Raises RefusedError.
        """
        match message:
            case msg.SecureCall():
                return self._called(message)
            case msg.SecureSet(roster):
                return self._set(self._of(roster), roster)
            case msg.SecureShares():
                self._shares(self._of(message), dict(message.shares))
                return None
            case msg.Unmask():
                return self._unmask(self._of(message), sorted(message.survivors))
        raise RefusedError(f"{type(message).__name__} is no message to a site")

    def expects(self, number: int) -> bool:
        """Whether masks for this round may still come."""
        found = self._attempt
        return found is not None and found.call.round == number and not found.is_taken

    def take_masks(self, number: int) -> Masks | None:
        """Return the masks of this round's attempt, once; None: they are not, or no more, here."""
        found = self._attempt
        if found is None or found.roster is None or not self.expects(number) or len(found.held) < 2:
            return None
        found.is_taken = True
        roster, context = found.roster, found.context
        others = roster.neighbours(self.name)
        streams = crypto.pair_streams(found.key, roster, context, self.name, others)
        own = crypto.self_key(found.seed, context), 1
        return Masks(roster, roster.number(self.run), [own, *streams])

    def _called(self, call: msg.SecureCall) -> Message:
        found = self._attempt
        if found is None or found.call != call or found.roster is not None:
            keys = self._entropy(KEY_BYTES), self._entropy(KEY_BYTES)
            self._attempt = found = _Attempt(call, *keys)
        public = crypto.public_of(found.key)
        return msg.SecureKey(call.round, call.attempt, crypto.public_of(self._private), public)

    def _set(self, found: _Attempt, roster: Roster) -> Message:
        if found.sealed is not None:
            if found.roster != roster:
                raise RefusedError("the parameter server sent a second set for one attempt")
            return found.sealed
        own = crypto.public_of(self._private), crypto.public_of(found.key)
        if roster.keys.get(self.name) != own:
            raise RefusedError("the parameter server's set has not this site's own keys")
        known = {name: keys[0] for name, keys in roster.keys.items()}
        if len(set(known.values())) < len(known):
            raise RefusedError("the parameter server's set has one site under two names")
        del known[self.name]
        self._known(known)
        found.roster, found.context = roster, roster.context(self.run)
        holders = roster.holders(self.name)
        shares = [
            split(secret, roster.threshold, len(holders), self._entropy)
            for secret in (found.key, found.seed)
        ]
        mine = dict(zip(holders, zip(*shares, strict=True), strict=True))
        found.held[self.name] = mine.pop(self.name)
        sealed = [
            [
                one,
                crypto.seal(b"".join(two), self._secret(found, one), found.context, self.name, one),
            ]
            for one, two in mine.items()
        ]
        found.sealed = msg.SecureShares(roster.round, roster.attempt, sealed)
        return found.sealed

    def _shares(self, found: _Attempt, sealed: Mapping[str, bytes]) -> None:
        if found.roster is None:
            raise RefusedError("the parameter server sent shares before a set")
        if sealed.keys() != set(found.roster.neighbours(self.name)):
            raise RefusedError("the parameter server sent shares of other sites than the set has")
        opened = {
            name: crypto.unseal(text, self._secret(found, name), found.context, name, self.name)
            for name, text in sealed.items()
        }
        wrong = [name for name, both in opened.items() if len(both) != 2 * SHARE_BYTES]
        if wrong:
            raise RefusedError(
                f"the shares of {', '.join(wrong)} are not from the holder of that key for this"
                " set: the parameter server has replaced a key, or told sites of different sets",
                msg.SharesRefused(*found.call.attempted, wrong),
            )
        for name, both in opened.items():
            found.held[name] = both[:SHARE_BYTES], both[SHARE_BYTES:]

    def _unmask(self, found: _Attempt, survivors: list[str]) -> Message:
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
        found.answer = msg.Unmasked(*found.call.attempted, shares)
        return found.answer

    def _of(self, sent: msg.OfSum | Roster) -> _Attempt:
        found = self._attempt
        if found is None or found.call.attempted != (sent.round, sent.attempt):
            raise RefusedError(
                f"attempt {sent.attempt} at round {sent.round} is not this site's present one"
            )
        return found

    def _secret(self, found: _Attempt, other: str) -> bytes:
        """Return the secret with another site, of both pairs of keys."""
        assert found.roster is not None
        site, key = found.roster.keys[other]
        try:
            return crypto.agree(self._private, site) + crypto.agree(found.key, key)
        except ValueError:
            raise RefusedError(f"the key of {other} is none") from None
