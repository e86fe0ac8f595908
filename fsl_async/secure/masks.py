"""Keys and masks of secure sums: X25519, HKDF-SHA256, ChaCha20, ChaCha20-Poly1305.

Every key is derived with the context of its set (`Roster.context`): run, round, attempt and all
keys. A mask is the key stream of its own key, with the number of the chunk as the nonce. Shares are
sealed under the sites' long-term keys together with those of the attempt, so that only the other
site can read them and only it can have made them: this is also what shows that both have the same
set, and that the parameter server, which carries all keys, has replaced none.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from fsl_async.errors import ConfigError, to_install
from fsl_async.roles.sync.roster import Roster
from fsl_async.secure.lattice import Words

_PRIMITIVES = "cryptography.hazmat.primitives"
_MASK, _SELF, _SEAL = b"fsl-async mask 1", b"fsl-async self 1", b"fsl-async seal 1"


def _of(module: str) -> Any:
    """Import a module of `cryptography`. ConfigError: it is not installed."""
    try:
        return importlib.import_module(f"{_PRIMITIVES}.{module}")
    except ImportError as error:
        raise ConfigError(
            f"tune.secure: cryptography cannot be imported ({error}): {to_install('secure')}"
        ) from error


def check_installed() -> None:
    """Raise ConfigError, in one line, where the extra `secure` is not installed."""
    _of("ciphers")


def public_of(private: bytes) -> bytes:
    """Return the public X25519 key of a private one."""
    key = _of("asymmetric.x25519").X25519PrivateKey.from_private_bytes(private)
    return bytes(key.public_key().public_bytes_raw())


def agree(private: bytes, public: bytes) -> bytes:
    """Return the secret of two X25519 keys. ValueError: the public key is of a small group."""
    x25519 = _of("asymmetric.x25519")
    key = x25519.X25519PrivateKey.from_private_bytes(private)
    return bytes(key.exchange(x25519.X25519PublicKey.from_public_bytes(public)))


def _derive(secret: bytes, what: bytes, context: bytes, *names: str) -> bytes:
    info = b"\n".join([what, context, *(name.encode() for name in names)])
    return bytes(
        _of("kdf.hkdf").HKDF(_of("hashes").SHA256(), length=32, salt=None, info=info).derive(secret)
    )


def self_key(seed: bytes, context: bytes) -> bytes:
    """Return the key of a site's own mask."""
    return _derive(seed, _SELF, context)


def pair_key(private: bytes, roster: Roster, context: bytes, own: str, other: str) -> bytes:
    """Return the key of the mask of two sites, by the private key of either for this attempt."""
    secret = agree(private, roster.keys[other][1])
    return _derive(secret, _MASK, context, *sorted((own, other)))


def sign_of(own: str, other: str) -> int:
    """Return whether a site adds the mask that it shares with another, 1, or subtracts it, -1."""
    return 1 if own < other else -1


def _sealer(secret: bytes, context: bytes, sender: str, receiver: str) -> Any:
    key = _derive(secret, _SEAL, context, sender, receiver)
    return _of("ciphers.aead").ChaCha20Poly1305(key)


_NONCE = bytes(12)
"""A key seals one text: it is of one attempt, one sender and one receiver."""


def seal(text: bytes, secret: bytes, context: bytes, sender: str, receiver: str) -> bytes:
    """Return a text for one site. secret: of the long-term keys and those of the attempt."""
    sealer = _sealer(secret, context, sender, receiver)
    return bytes(sealer.encrypt(_NONCE, text, context))


def unseal(sealed: bytes, secret: bytes, context: bytes, sender: str, receiver: str) -> bytes:
    """Return the text. ValueError: the sender has other keys, or another set."""
    sealer = _sealer(secret, context, sender, receiver)
    try:
        return bytes(sealer.decrypt(_NONCE, sealed, context))
    except importlib.import_module("cryptography.exceptions").InvalidTag:
        raise ValueError("it is not sealed by that site for this set") from None


def add_mask(words: Words, key: bytes, index: int, sign: int) -> None:
    """Add (1) or subtract (-1) the mask of chunk `index` in place."""
    ciphers = _of("ciphers")
    cipher = ciphers.Cipher(
        ciphers.algorithms.ChaCha20(key, bytes(8) + index.to_bytes(8, "little")), mode=None
    )
    stream = cipher.encryptor().update(bytes(words.nbytes))
    change = np.add if sign > 0 else np.subtract
    change(words, np.frombuffer(stream, words.dtype), out=words)
