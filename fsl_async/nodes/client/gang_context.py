"""What a node passes on to its ranks: the welcome and the site's options. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]
from attrs import asdict

from fsl_async.config.load import from_wire
from fsl_async.config.site_code import SiteCode
from fsl_async.config.site_policy import SitePolicy
from fsl_async.config.site_tuning import SiteTuning
from fsl_async.errors import UsageError
from fsl_async.keys.folder import KeysFolder
from fsl_async.nodes.client.parts import ClientOptions, Membership
from fsl_async.nodes.wire import Welcome

_TEXTS = ("task", "data", "tokenizer", "device", "threads")


def options_to_wire(options: ClientOptions) -> dict[str, Any]:
    """A site's options as plain values, for a process of the same site."""
    return {
        "server": options.server,
        "name": options.name,
        **{name: getattr(options, name) for name in _TEXTS},
        "code": asdict(options.code),
        "tuning": asdict(options.tuning),
        "run_dir": None if options.run_dir is None else str(options.run_dir),
        "keys": None if options.keys is None else str(options.keys.path),
        "allowed": sorted(options.policy.allowed),
        "refuses_rollback": options.policy.refuses_rollback,
    }


def options_from_wire(wire: dict[str, Any]) -> ClientOptions:
    """What `options_to_wire` made."""
    run_dir, keys = wire["run_dir"], wire["keys"]
    return ClientOptions(
        wire["server"],
        wire["name"],
        **{name: wire[name] for name in _TEXTS},
        code=SiteCode(**wire["code"]),
        tuning=SiteTuning(**wire["tuning"]),
        run_dir=None if run_dir is None else Path(run_dir),
        keys=None if keys is None else KeysFolder(Path(keys)),
        policy=SitePolicy(frozenset(wire["allowed"]), refuses_rollback=wire["refuses_rollback"]),
    )


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
