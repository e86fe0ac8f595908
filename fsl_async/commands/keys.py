"""`fsl-node keys`: this node's key pair, and the keys that it trusts as a server."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fsl_async.commands.options import WithJson, argument, option, takes
from fsl_async.commands.output import Output
from fsl_async.errors import UsageError

if TYPE_CHECKING:
    from fsl_async.keys.folder import KeysFolder


class KeysOptions(WithJson):
    """The options of each command of `fsl-node keys`."""

    keys: Path | None = option(
        "The keys folder. [default: $FSL_KEYS, else ~/.config/fsl-async]", metavar="DIR"
    )


class TrustOptions(KeysOptions):
    """The options of `fsl-node keys trust`."""

    key: str = argument()
    label: str = option(
        "The site's name in messages.", metavar="LABEL", name="--name", required=True
    )
    names: str | None = option("The only client names that this key may use.", metavar="NAME,NAME")


class RevokeOptions(KeysOptions):
    """The options of `fsl-node keys revoke`."""

    key: str = argument(metavar="KEY|LABEL")


# A public key may begin with a dash, so no option here has a single dash.
_KEY = {"ignore_unknown_options": True}


@click.group("keys")
def command() -> None:
    """Make this node's key, and trust, list and revoke keys of others.

    Each command takes --keys DIR and --json.
    """


@command.command("new")
@takes(KeysOptions)
def new(options: KeysOptions) -> None:
    """Make this node's key pair."""
    folder, output = _opened(options)
    public = folder.make_pair().public
    output.answer(
        {"public": public, "path": str(folder.secret_path)},
        f"made {folder.secret_path}; its public key is",
        f"    {public}",
        "to trust it, run at the parameter server, and at the split server if there is one:",
        f"    {trust_line(public, 'SITE')}",
    )


@command.command("pub")
@takes(KeysOptions)
def pub(options: KeysOptions) -> None:
    """Print this node's public key."""
    folder, output = _opened(options)
    public = folder.pair().public
    output.answer({"public": public}, public)


@command.command("trust", context_settings=_KEY)
@takes(TrustOptions)
def trust(options: TrustOptions) -> None:
    """Trust KEY; for a key that is on the list already, change its line."""
    from fsl_async.keys import allow_list
    from fsl_async.keys.allow_list import Entry

    key, label, names = options.key, options.label, options.names
    entry = Entry(key, label, tuple(names.split(",")) if names else ())
    if allow_list.parse(entry.line(), "this key").entries != {key: entry}:
        # A comment, two lines, or a label that the list would read as an option.
        raise UsageError(f"trust {key[:60]!r} --name {label[:60]!r}: give one key and one label")
    folder, output = _opened(options)
    made = folder.change_allowed(lambda before: before.with_entry(entry))
    output.answer(
        {"path": str(folder.allowed_path), **_facts(made.entries[key])},
        f"{label} is trusted ({folder.allowed_path}); a running server reads the file",
    )


@command.command("list")
@takes(KeysOptions)
def list_(options: KeysOptions) -> None:
    """Show the trusted keys."""
    folder, output = _opened(options)
    found = folder.allowed()
    entries = [] if found is None else list(found.entries.values())
    width = max((len(entry.label) for entry in entries), default=0)
    lines = [] if entries else [f"no key is trusted yet ({folder.allowed_path})"]
    for entry in entries:
        names = f"  names {', '.join(entry.names)}" if entry.names else ""
        lines.append(f"{entry.label:{width}}  {entry.key}{names}")
    facts = {"path": str(folder.allowed_path), "keys": [_facts(one) for one in entries]}
    output.answer(facts, *lines)


@command.command("revoke", context_settings=_KEY)
@takes(RevokeOptions)
def revoke(options: RevokeOptions) -> None:
    """Trust KEY, or the key called LABEL, no longer. A running server ends its sessions."""
    from fsl_async.keys.allow_list import AllowList, Entry

    folder, output = _opened(options)
    key = options.key
    removed: list[Entry] = []

    def without(before: AllowList) -> AllowList:
        entry = before.entries.get(key) or before.labeled(key)
        if entry is None:
            raise UsageError(
                f"{key[:80]} is neither a key nor a label on the list; see {folder.command('list')}"
            )
        removed.append(entry)
        return before.without(entry.key)

    folder.change_allowed(without)
    output.answer(
        {"path": str(folder.allowed_path), "revoked": _facts(removed[0])},
        f"{removed[0].label} is no longer trusted; a running server ends its sessions",
    )


def trust_line(public: str, label: str) -> str:
    """The command that trusts this key; quoted, because keys have characters of the shell."""
    from fsl_async.errors import program

    return f"{program()} keys trust {shlex.quote(public)} --name {label}"


def _opened(options: KeysOptions) -> tuple[KeysFolder, Output]:
    from fsl_async.keys.folder import KeysFolder

    keys = options.keys
    folder = KeysFolder() if keys is None else KeysFolder(keys.expanduser())
    return folder, Output(as_json=options.as_json)


def _facts(entry: Any) -> dict[str, Any]:
    return {"key": entry.key, "label": entry.label, "names": list(entry.names)}
