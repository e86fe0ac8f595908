"""Shares of a secret (Shamir, CACM 1979), over the integers modulo 2^521 - 1. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

PRIME = (1 << 521) - 1
SHARE_BYTES = 66
SECRET_BYTES = 32


def split(secret: bytes, least: int, count: int, entropy: Callable[[int], bytes]) -> list[bytes]:
    """Return `count` shares of a secret of 32 bytes, of which any `least` give it back.

    The share at place x - 1 is the value at x of a random polynomial with the secret at 0.
    """
    # 8 bytes more than the prime has make the rest of the division uniform.
    more = [int.from_bytes(entropy(SHARE_BYTES + 8), "big") % PRIME for _ in range(least - 1)]
    made = []
    for x in range(1, count + 1):
        value = 0
        for factor in [*more, int.from_bytes(secret, "big")]:
            value = (value * x + factor) % PRIME
        made.append(value.to_bytes(SHARE_BYTES, "big"))
    return made


def join(shares: Mapping[int, bytes]) -> bytes:
    """Return the secret of shares by their x. Raises ValueError: they are not of one secret."""
    secret = 0
    for x, share in shares.items():
        term = int.from_bytes(share, "big")
        for other in shares.keys() - {x}:
            term = term * other * pow(other - x, -1, PRIME) % PRIME
        secret = (secret + term) % PRIME
    if secret.bit_length() > 8 * SECRET_BYTES:
        raise ValueError("the shares are not of one secret")
    return secret.to_bytes(SECRET_BYTES, "big")
