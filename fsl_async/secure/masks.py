"""Keys and masks of secure sums: X25519, HKDF-SHA256, ChaCha20, ChaCha20-Poly1305.

Every key is derived with the context of its set (`Roster.context`): run, round, attempt and all
keys. A mask is the key stream of its own key, with the number of the chunk as the nonce. Shares are
sealed under the sites' long-term keys together with those of the attempt, so that only the other
site can read them and only it can have made them: this is also what shows that both have the same
set, and that the parameter server, which carries all keys, has replaced none.

Importing this module needs the extra `secure`. Raises ConfigError without it.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from fsl_async.errors import ConfigError, to_install
from fsl_async.roles.sync.roster import Roster
from fsl_async.secure.lattice import Words

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
except ImportError as error:
    raise ConfigError(
        f"tune.secure: cryptography cannot be imported ({error}): {to_install('secure')}"
    ) from error

Streams = list[tuple[bytes, int]]
"""Key and sign of each mask."""
_MASK, _SELF, _SEAL = b"fsl-async mask 1", b"fsl-async self 1", b"fsl-async seal 1"
_NONCE = bytes(12)
"""A key seals one text: it is of one attempt, one sender and one receiver."""


def public_of(private: bytes) -> bytes:
    """Return the public X25519 key of a private one."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agree(private: bytes, public: bytes) -> bytes:
    """Return the secret of two X25519 keys. ValueError: the public key is of a small group."""
    key = X25519PrivateKey.from_private_bytes(private)
    return key.exchange(X25519PublicKey.from_public_bytes(public))


def _derive(secret: bytes, what: bytes, context: bytes, *names: str) -> bytes:
    info = b"\n".join([what, context, *(name.encode() for name in names)])
    return HKDF(SHA256(), length=32, salt=None, info=info).derive(secret)


def self_key(seed: bytes, context: bytes) -> bytes:
    """Return the key of a site's own mask."""
    return _derive(seed, _SELF, context)


def pair_streams(
    private: bytes, roster: Roster, context: bytes, own: str, others: Iterable[str]
) -> Streams:
    """Return the masks that a site shares with others, by its private key for this attempt."""
    return [
        (
            _derive(agree(private, roster.keys[one][1]), _MASK, context, *sorted((own, one))),
            1 if own < one else -1,
        )
        for one in others
    ]


def seal(text: bytes, secret: bytes, context: bytes, sender: str, receiver: str) -> bytes:
    """Return a text for one site. secret: of the long-term keys and those of the attempt."""
    key = _derive(secret, _SEAL, context, sender, receiver)
    return ChaCha20Poly1305(key).encrypt(_NONCE, text, context)


def unseal(sealed: bytes, secret: bytes, context: bytes, sender: str, receiver: str) -> bytes:
    """Return the text; empty: the sender has other keys, or another set."""
    key = _derive(secret, _SEAL, context, sender, receiver)
    try:
        return ChaCha20Poly1305(key).decrypt(_NONCE, sealed, context)
    except InvalidTag:
        return b""


def add_masks(words: Words, streams: Streams, index: int) -> None:
    """Add the masks of chunk `index` in place; those with sign -1 are subtracted."""
    nonce = bytes(8) + index.to_bytes(8, "little")
    for key, sign in streams:
        stream = Cipher(ChaCha20(key, nonce), mode=None).encryptor().update(bytes(words.nbytes))
        change = np.add if sign > 0 else np.subtract
        change(words, np.frombuffer(stream, words.dtype), out=words)
