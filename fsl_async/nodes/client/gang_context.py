"""What a node passes on to its ranks: the welcome and the site's options. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]
from cattrs.preconf.json import make_converter

from fsl_async.config.load import from_wire
from fsl_async.errors import UsageError
from fsl_async.nodes.client.parts import ClientOptions, Membership
from fsl_async.nodes.wire import Welcome

_converter = make_converter()
# The oldest cattrs that is supported has no paths.
_converter.register_unstructure_hook(Path, str)
_converter.register_structure_hook(Path, lambda path, _: Path(path))


def options_to_wire(options: ClientOptions) -> dict[str, Any]:
    """A site's options as plain values, for a process of the same site."""
    wire: dict[str, Any] = _converter.unstructure(options)
    return wire


def options_from_wire(wire: dict[str, Any]) -> ClientOptions:
    """What `options_to_wire` made."""
    return _converter.structure(wire, ClientOptions)


def packed(options: ClientOptions, member: Membership) -> bytes:
    """The context of a gang's welcome."""
    body = {"options": options_to_wire(options), "welcome": member.welcome.to_wire()}
    context: bytes = msgpack.packb(body)
    return context


def unpacked(context: bytes) -> tuple[ClientOptions, Membership]:
    """What `packed` made."""
    body = msgpack.unpackb(context)
    welcome = Welcome.from_wire(body["welcome"])
    return options_from_wire(body["options"]), Membership(welcome, from_wire(welcome.config))


def checked(options: ClientOptions, member: Membership) -> None:
    """Raise UsageError for a run whose clients are one process each."""
    if member.config.split.is_on:
        raise UsageError("this run is of split learning, whose clients are one process each")
    if options.tuning.is_zeroth(member.config.tune):
        raise UsageError("steps of zeroth order are made by a client of one process")
