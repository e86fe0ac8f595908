"""Decides which requests are answered. Pure.

The page is read-only and for one person on this machine, but a browser also runs other people's
pages, and every local user can connect to a port of loopback. So:

- `Host` must name loopback and our port: a name that a foreign page points here (DNS rebinding)
  is refused.
- A random token in the printed URL becomes a cookie (HttpOnly, SameSite=Strict), named after the
  port since cookies are shared by all ports of a host. Without it nothing but a refusal is sent.
- GET only. Nothing of the run can be changed.
- No inline script, no foreign source (`HEADERS`).
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping

from attrs import field, frozen

HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self';"
        " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""Of every answer."""


@frozen
class Verdict:
    """status: 200 goes on; 303 sets the cookie and leads to the page; else a refusal."""

    status: int
    text: str = ""


@frozen
class Gate:
    """The rules of one server at `port`."""

    port: int
    token: str = field(factory=lambda: secrets.token_urlsafe(24), repr=False)

    @property
    def cookie(self) -> str:
        """The cookie's name."""
        return f"fsl-control-room-{self.port}"

    @property
    def url(self) -> str:
        """What a person opens."""
        return f"http://127.0.0.1:{self.port}/?token={self.token}"

    def judge(
        self, method: str, host: str, path: str, token: str | None, cookie: str | None
    ) -> Verdict:
        """Decide about a request.

        host: the header. token: of the URL's query. cookie: the value of ours; None where missing.
        """
        if host.lower() not in {f"{name}:{self.port}" for name in ("127.0.0.1", "localhost")}:
            return Verdict(421, "this is no name of the control room")
        if method != "GET":
            return Verdict(405, "the control room is read-only")
        if token is not None and path == "/":
            if _same(token, self.token):
                return Verdict(303)
            return Verdict(403, "wrong token: open the address that fsl-node status has printed")
        if cookie is None or not _same(cookie, self.token):
            return Verdict(403, "no token: open the address that fsl-node status has printed")
        return Verdict(200)


def _same(found: str, expected: str) -> bool:
    return hmac.compare_digest(found.encode(errors="replace"), expected.encode())
