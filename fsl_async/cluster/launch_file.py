"""Reads the parameter server's launch file (TOML, `--launchers FILE`): a launcher by client. Pure.

    first_wait_s = 5              # and longest_wait_s, healthy_after_s, budget; see `restarts`

    [[launcher]]
    clients = "a100-*"            # the first entry whose pattern matches a client's name counts
    kind = "slurm"                # arguments after `sbatch --job-name=fsl-NAME`; the script derives
    command = [                   # the client's name from the job's
        "--export=ALL,FSL_SERVER=fsl://ps.example.org:7100?key=...",
        "bin/fsl-node.sbatch", "--task", "train.py:train",
    ]

    [[launcher]]
    clients = "edge"
    kind = "command"              # succeeds when it exits with 0
    command = ["ssh", "edge", "systemctl", "--user", "restart", "fsl-node@{name}"]

    [[launcher]]
    clients = "*"
    kind = "local"                # a child process of the parameter server; it ends with it
    command = ["bin/fsl-node", "--role", "client", "--name", "{name}", "{address}"]

{address} is the parameter server's listen address: other machines cannot dial it when it is
0.0.0.0. A command is run without a shell, word by word; names of clients have no character that is
special to a shell.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from attrs import field, fields_dict, frozen

from fsl_async.cluster.restarts import RestartRules
from fsl_async.errors import ConfigError

KINDS = ("local", "slurm", "command")
_MOST_RULES = 1000


@frozen
class LaunchRule:
    """The launcher of the clients whose names match the pattern `clients`."""

    clients: str
    kind: str
    command: tuple[str, ...]

    def words(self, name: str, address: str) -> tuple[str, ...]:
        """Return the command for one client."""
        return tuple(
            word.replace("{name}", name).replace("{address}", address) for word in self.command
        )


@frozen
class Launching:
    """The content of a launch file."""

    rules: tuple[LaunchRule, ...] = ()
    restarts: RestartRules = field(factory=lambda: RestartRules(first_wait_s=5.0, budget=5))

    def rule_of(self, name: str) -> LaunchRule | None:
        """Return the first rule that matches a client, or None if it has no launcher."""
        return next((rule for rule in self.rules if fnmatchcase(name, rule.clients)), None)

    def restarts_of(self, name: str) -> RestartRules | None:
        """Return the rules of a client's relaunches, or None if it has no launcher."""
        return None if self.rule_of(name) is None else self.restarts


def read_launching(text: str, where: str) -> Launching:
    """Read the text of a launch file. Raises ConfigError, which begins with `where`."""
    try:
        found = tomllib.loads(text)
    # Numbers of 5,000 digits and deep nesting raise these too.
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not TOML: {error}") from None
    tables = found.pop("launcher", [])
    if not isinstance(tables, list) or not tables or len(tables) > _MOST_RULES:
        raise ConfigError(f"{where}: give at least one [[launcher]] table")
    rules = tuple(_rule(table, f"{where}: launcher {n}") for n, table in enumerate(tables, 1))
    return Launching(rules, _restarts(found, where))


def _rule(table: Any, where: str) -> LaunchRule:
    if not isinstance(table, dict) or set(table) != {"clients", "kind", "command"}:
        raise ConfigError(f"{where}: must have exactly the keys clients, kind and command")
    clients, kind, command = table["clients"], table["kind"], table["command"]
    if not isinstance(clients, str) or not clients:
        raise ConfigError(f'{where}: clients must be a pattern of names, like "a100-*"')
    if kind not in KINDS:
        raise ConfigError(f"{where}: kind must be one of {', '.join(KINDS)}")
    words: Sequence[Any] = command if isinstance(command, list) else ()
    if not words or not all(isinstance(word, str) and word for word in words):
        raise ConfigError(
            f'{where}: command must be an array of words, like ["ssh", "host", "..."]'
        )
    if kind == "slurm" and any(word.startswith(("--job-name", "-J")) for word in words):
        raise ConfigError(
            f"{where}: leave --job-name (-J) out: the job is named after its client, and found"
            " again by that name"
        )
    return LaunchRule(clients, kind, tuple(words))


def _restarts(found: dict[str, Any], where: str) -> RestartRules:
    known = fields_dict(RestartRules)
    for key, value in found.items():
        if key not in known:
            raise ConfigError(f"{where}: {key}: unknown key; known: launcher, {', '.join(known)}")
        kind = int if key == "budget" else int | float
        is_number = isinstance(value, kind) and not isinstance(value, bool)
        if not is_number or not (1 if key == "factor" else 0) <= value <= 1e6:
            raise ConfigError(
                f"{where}: {key}: must be a number from 0 to 1,000,000, factor from 1"
            )
    return RestartRules(**{"first_wait_s": 5.0, "budget": 5, **found})
