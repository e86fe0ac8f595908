"""Reads addresses: `host:port`, `tcp://host:port`, `fsl://host:port[?key=...][&split=host:port]`.

Errors give an example to write instead. Pure except for `reachable_host`, which asks the operating
system for its own address.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from urllib.parse import parse_qsl, urlencode

from attrs import evolve, frozen

from fsl_async.errors import AddressError

EXAMPLE = "fsl://ps.example.org:7100?key=..."
_SCHEMES = ("tcp", "fsl")
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?\Z")
_EVERYWHERE = frozenset({"*", "0.0.0.0", "::"})  # noqa: S104 - named in order to recognize them
_MAX_TEXT = 1024


@frozen
class Address:
    """Where a parameter server listens. `host` has no brackets; `key` is empty when none was given.

    split: `host:port` of the split server as seen from here, instead of what the parameter server
        announces; empty when its address is right.
    """

    host: str
    port: int
    key: str = ""
    split: str = ""

    @property
    def tcp(self) -> str:
        """The address for sockets, `tcp://host:port`."""
        return f"tcp://{self._host_in_url}:{self.port}"

    @property
    def fsl(self) -> str:
        """The address for users, `fsl://host:port[?key=...][&split=host:port]`."""
        key = urlencode({"key": self.key}) if self.key else ""
        split = f"split={self.split}" if self.split else ""
        query = "&".join(part for part in (key, split) if part)
        return f"fsl://{self._host_in_url}:{self.port}{'?' if query else ''}{query}"

    @property
    def is_loopback(self) -> bool:
        """Whether only processes of this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def is_everywhere(self) -> bool:
        """Whether a listener at this address accepts connections on every interface."""
        return self.host in _EVERYWHERE

    @property
    def _host_in_url(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host


def parse(text: str) -> Address:
    """Read the address of a parameter server to dial. Raises AddressError."""
    address = _parse(text, EXAMPLE)
    if address.is_everywhere:
        raise AddressError(
            f"{text}: {address.host} means every interface of the listening machine; "
            f"give the host that runs the parameter server, for example {EXAMPLE}"
        )
    if address.port == 0:
        raise AddressError(
            f"{text}: port 0 cannot be dialed; give the port that the parameter server prints"
        )
    return address


def parse_listen(text: str) -> Address:
    """Read an address to listen at: no key, port 0 = any free port. Raises AddressError."""
    address = _parse(text, "tcp://127.0.0.1:7100")
    if address.key:
        raise AddressError(f"{text}: a listen address has no key; remove ?key=...")
    return evolve(address, host="0.0.0.0") if address.host == "*" else address  # noqa: S104


def _parse(text: str, example: str) -> Address:
    shown = text if len(text) <= 120 else text[:120] + "..."
    if not text.strip():
        raise AddressError(f"the address is empty; write one like {example}")
    if len(text) > _MAX_TEXT or not text.isprintable() or text != text.strip():
        raise AddressError(f"{shown!r}: not an address; write one like {example}")
    scheme, separator, rest = text.partition("://")
    if not separator:
        scheme, rest = "tcp", text
    if scheme not in _SCHEMES:
        raise AddressError(f"{shown}: unknown scheme {scheme}://; write one like {example}")
    host_port, _, query = rest.partition("?")
    host, port_text = _split(host_port.removesuffix("/"), shown, example)
    key, split = _parts(query, shown)
    if not port_text:
        raise AddressError(f"{shown}: no port; write one like {example}")
    if not (port_text.isascii() and port_text.isdecimal() and int(port_text[:6]) <= 65535):
        raise AddressError(f"{shown}: port {port_text[:20]!r} is not a number from 0 to 65535")
    return Address(host, int(port_text), key, split)


def _split(host_port: str, shown: str, example: str) -> tuple[str, str]:
    if host_port.startswith("["):
        host, bracket, after = host_port[1:].partition("]")
        try:
            ipaddress.IPv6Address(host.partition("%")[0])
        except ValueError:
            bracket = ""
        if not bracket or (after and not after.startswith(":")):
            raise AddressError(f"{shown}: not an IPv6 address; write one like tcp://[::1]:7100")
        return host, after[1:]
    host, _, port_text = host_port.rpartition(":") if ":" in host_port else (host_port, "", "")
    if ":" in host:
        raise AddressError(f"{shown}: put an IPv6 address in brackets, like tcp://[::1]:7100")
    if host != "*" and not _HOST.match(host):
        problem = f"{host!r} is not a host name" if host else "no host"
        raise AddressError(f"{shown}: {problem}; write one like {example}")
    return host, port_text


def _parts(query: str, shown: str) -> tuple[str, str]:
    """Return the key and the split server's `host:port`."""
    found = {"key": "", "split": ""}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in found:
            raise AddressError(
                f"{shown}: unknown part {name!r} after '?'; only key=... and split=host:port"
                " are known"
            )
        if not value:
            raise AddressError(
                f"{shown}: the {name} after '?' is empty; write ?{name}=... or remove it"
            )
        found[name] = value
    if query and not any(found.values()):
        raise AddressError(f"{shown}: the key after '?' is empty; write ?key=... or remove it")
    if found["split"]:
        found["split"] = parse(found["split"]).tcp.removeprefix("tcp://")
    return found["key"], found["split"]


def parse_announced(text: str) -> Address:
    """Read the address of a split server as the parameter server announces it, with or without key.

    "Every interface" is allowed; `seen_from` resolves it. Raises AddressError.
    """
    return _parse(text, EXAMPLE)


def seen_from(given: str, dialed: str) -> Address:
    """Return the address at which to dial the split server that `dialed` announces as `given`.

    `split=` of `dialed` (a relay or a tunnel) replaces host and port; "every interface" becomes
    the host of `dialed`. The key stays that of `given`. Raises AddressError.
    """
    address, at = parse_announced(given), parse(dialed)
    if at.split:
        forwarded = parse(at.split)
        address = evolve(address, host=forwarded.host, port=forwarded.port)
    elif address.is_everywhere:
        address = evolve(address, host=at.host)
    return parse(address.fsl)


def reachable_host(host: str) -> str:
    """Return the host name or address by which other machines reach a listener bound at `host`.

    That is `host`, unless it means every interface: then the local address that faces the default
    route (connecting a datagram socket sends nothing), or else the host name.
    """
    if host not in _EVERYWHERE:
        return host
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1, RFC 5737: never a real host
            found = str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()
    return socket.gethostname() if found in _EVERYWHERE else found
