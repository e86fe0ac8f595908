"""`fsl-node keys`: this node's key pair, and the keys that it trusts as a server."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fsl_async.commands.output import Output
from fsl_async.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from fsl_async.keys.folder import KeysFolder


def _options(function: Callable[..., Any]) -> Callable[..., Any]:
    json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
    where = click.option(
        "--keys",
        type=click.Path(path_type=Path),
        metavar="DIR",
        help="The keys folder. [default: $FSL_KEYS, else ~/.config/fsl-async]",
    )
    return where(json(function))


# A public key may begin with a dash, so no option here has a single dash.
_KEY = {"ignore_unknown_options": True}


@click.group("keys")
def command() -> None:
    """Make this node's key, and trust, list and revoke keys of others.

    Each command takes --keys DIR and --json.
    """


@command.command("new")
@_options
def new(*, keys: Path | None, as_json: bool) -> None:
    """Make this node's key pair."""
    folder, output = _folder(keys), Output(as_json=as_json)
    public = folder.make_pair().public
    if as_json:
        output.result({"public": public, "path": str(folder.secret_path)})
        return
    output.say(f"made {folder.secret_path}; its public key is", f"    {public}")
    output.say(
        "to trust it, run at the parameter server, and at the split server if there is one:",
        f"    {trust_line(public, 'SITE')}",
    )


@command.command("pub")
@_options
def pub(*, keys: Path | None, as_json: bool) -> None:
    """Print this node's public key."""
    public = _folder(keys).pair().public
    output = Output(as_json=as_json)
    if as_json:
        output.result({"public": public})
    else:
        output.say(public)


@command.command("trust", context_settings=_KEY)
@click.argument("key")
@click.option(
    "--name", "label", required=True, metavar="LABEL", help="The site's name, for people."
)
@click.option("--names", metavar="NAME,NAME", help="The only client names that this key may use.")
@_options
def trust(*, key: str, label: str, names: str | None, keys: Path | None, as_json: bool) -> None:
    """Trust KEY; for a key that is on the list already, change its line."""
    from fsl_async.keys import allow_list
    from fsl_async.keys.allow_list import Entry

    entry = Entry(key, label, tuple(names.split(",")) if names else ())
    if allow_list.parse(entry.line(), "this key").entries != {key: entry}:
        # A comment, two lines, or a label that the list would read as an option.
        raise UsageError(f"trust {key[:60]!r} --name {label[:60]!r}: give one key and one label")
    folder, output = _folder(keys), Output(as_json=as_json)
    made = folder.change_allowed(lambda before: before.with_entry(entry))
    if as_json:
        output.result({"path": str(folder.allowed_path), **_facts(made.entries[key])})
    else:
        output.say(f"{label} is trusted ({folder.allowed_path}); a running server reads the file")


@command.command("list")
@_options
def list_(*, keys: Path | None, as_json: bool) -> None:
    """Show the trusted keys."""
    folder, output = _folder(keys), Output(as_json=as_json)
    found = folder.allowed()
    entries = [] if found is None else list(found.entries.values())
    if as_json:
        output.result({"path": str(folder.allowed_path), "keys": [_facts(one) for one in entries]})
        return
    if not entries:
        output.say(f"no key is trusted yet ({folder.allowed_path})")
    width = max((len(entry.label) for entry in entries), default=0)
    for entry in entries:
        names = f"  names {', '.join(entry.names)}" if entry.names else ""
        output.say(f"{entry.label:{width}}  {entry.key}{names}")


@command.command("revoke", context_settings=_KEY)
@click.argument("key", metavar="KEY|LABEL")
@_options
def revoke(*, key: str, keys: Path | None, as_json: bool) -> None:
    """Trust KEY, or the key called LABEL, no longer. A running server ends its sessions."""
    from fsl_async.keys.allow_list import AllowList, Entry

    folder, output = _folder(keys), Output(as_json=as_json)
    removed: list[Entry] = []

    def without(before: AllowList) -> AllowList:
        entry = before.find(key) or before.labeled(key)
        if entry is None:
            raise UsageError(
                f"{key[:80]} is neither a key nor a label on the list; see {folder.command('list')}"
            )
        removed.append(entry)
        return before.without(entry.key)

    folder.change_allowed(without)
    if as_json:
        output.result({"path": str(folder.allowed_path), "revoked": _facts(removed[0])})
    else:
        output.say(f"{removed[0].label} is no longer trusted; a running server ends its sessions")


def trust_line(public: str, label: str) -> str:
    """The command that trusts this key; quoted, because keys have characters of the shell."""
    from fsl_async.process.program import program

    return f"{program()} keys trust {shlex.quote(public)} --name {label}"


def _folder(keys: Path | None) -> KeysFolder:
    from fsl_async.keys.folder import KeysFolder

    return KeysFolder() if keys is None else KeysFolder(keys.expanduser())


def _facts(entry: Any) -> dict[str, Any]:
    return {
        "key": entry.key,
        "label": entry.label,
        "names": list(entry.names),
    }
