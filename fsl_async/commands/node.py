"""The options of `fsl-node --role ...`, by the roles that take them, and the command of a node."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fsl_async.commands import COMMANDS
from fsl_async.commands.options import (
    Finite,
    Options,
    Setting,
    Whole,
    Words,
    argument,
    option,
    takes,
)
from fsl_async.errors import UsageError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from fsl_async.config.site_policy import Order

ROLES = ("ps", "client", "server", "relay")
NODE = "node"
_ROLE_OPTIONS = "--role ps, client, server or relay"
_FILE = Words(files=True)
_CODE = "FILE.py:FUNCTION"
_ALL = " ".join(ROLES)
_OF_THE_RUN = "is the parameter server's; a client gets the run's configuration from it"
_BUILDS_NOTHING = (
    "is for --role server and --role client: the parameter server stores numbers and builds no"
    " model"
)
_NOT_FORWARDED = "is not a relay's, which forwards what it does not read"


def _check_role(_: click.Context, __: click.Parameter, role: str | None) -> str:
    if role in ROLES:
        return str(role)
    if role is None:
        raise UsageError(
            f"say what this node is, {_ROLE_OPTIONS}, or give a command ({', '.join(COMMANDS)})"
        )
    raise UsageError(f"--role {role[:80]!r} is unknown; use {_ROLE_OPTIONS}")


class NodeOptions(Options):
    """The options of a node, in the order of help. Those of other roles are never given."""

    address: str | None = argument(required=False)

    role: str = option(
        "Be the parameter server, a client that trains, a split server, or a relay on the way.",
        Words(*ROLES), "ps|client|server|relay", roles=_ALL, callback=_check_role,
    )  # fmt: skip
    run_dir: Path | None = option("Where files of the run are kept.", metavar="DIR", roles=_ALL)
    insecure: bool = option("Accept that other machines connect unencrypted.", roles=_ALL)
    dry_run: bool = option("Print what would be run, resolved, and exit.", roles=_ALL)
    as_json: bool = option("Print JSON objects, the result last.", name="--json", roles=_ALL)

    name: str | None = option(
        "client: its name in the run [default: the host's]; others: the run's name.",
        roles="ps client server",
    )
    data: str | None = option(
        "Train on this: text, .jsonl, .parquet, a saved data set, hf://NAME (docs/DATA.md).",
        _FILE, "PATH", roles="ps client server",
    )  # fmt: skip
    keys: Path | None = option(
        "Encrypt, with the keys there (see: fsl-node keys).",
        metavar="DIR", roles="ps client server",
    )  # fmt: skip

    task: str | None = option(
        "Your own training loop; built in if left out.",
        _FILE, _CODE, roles="ps client",
        refused="is a client's: a split server trains its part of the run's model"
        " (--model FILE.py:FUNCTION for your own)",
    )  # fmt: skip
    base: Path | None = option(
        "Fine-tuning: the base model, a Hugging Face folder or a GGUF file that every site has.",
        metavar="MODEL", roles="ps client",
    )  # fmt: skip
    tokenizer: str | None = option(
        "Train on tokens of this tokenizer.json (or name at the hub), not on bytes.",
        _FILE, "PATH", roles="ps client",
    )  # fmt: skip

    config: Path | None = option(
        "The run's TOML file (see: fsl-node init).",
        metavar="FILE", roles="ps server", refused=_OF_THE_RUN,
    )  # fmt: skip
    overrides: tuple[str, ...] = option(
        "Override one setting; repeatable.",
        Setting(), "A.B=C", name="--set", roles="ps server", refused=_OF_THE_RUN,
    )  # fmt: skip
    from_version: int | None = option(
        "Go on from version N.", Whole(min=0), "N", roles="ps server", refused=_OF_THE_RUN
    )

    threads: int | None = option(
        "torch's threads here. [default: the run's setting, else all cores]",
        Whole(1, 4096), "N", roles="client server",
        refused="is a client's; here --set train.threads=N is for every client of the run",
    )  # fmt: skip
    model: str | None = option(
        "Split learning: your own model, function(shape, classes).",
        _FILE, _CODE, roles="client server", refused=_BUILDS_NOTHING,
    )  # fmt: skip
    auxiliary: str | None = option(
        "Split learning: your own auxiliary model, function(shape, outputs).",
        _FILE, _CODE, roles="client server", refused=_BUILDS_NOTHING,
    )  # fmt: skip

    allow: str | None = option(
        "What may leave this machine: deltas, adapters, scalars, sums, activations, labels,"
        " metrics, embeddings, copies."
        " [default: that of site.toml beside the keys, else deltas]",
        metavar="KIND,...", roles="client", refused="is a client's: what may leave its machine",
    )  # fmt: skip
    evaluate: bool = option(
        "Train nothing: be the run's evaluator, which tries each delta on --data.", roles="client"
    )
    rollout: bool = option(
        "Train nothing: draw answers to the prompts of --data, and rate them by --reward"
        " (tune.objective = grpo).",
        roles="client",
    )  # fmt: skip
    accept_rollback: bool = option(
        "Go back with the run, whatever site.toml has.",
        roles="client", refused="is a client's: it goes back with its run",
    )  # fmt: skip
    columns: str | None = option(
        "Fine-tuning: columns of --data by name, like text=BODY,label=KIND (docs/TUNING.md).",
        metavar="NAME=COLUMN,...", roles="client", refused="is a client's: of its records",
    )  # fmt: skip
    reward: str | None = option(
        "tune.objective = grpo: the function reward(prompt, answer), which stays at this site.",
        Words(files=True), "FILE.py[:FUNCTION]", roles="client",
        refused="is a client's: each site rates answers itself",
    )  # fmt: skip
    rank: int | None = option(
        "Rank of its adapters, where the run's rule merges unequal ones.",
        Whole(1, 4096), "R", roles="client",
        refused="is a client's; the run's is --set tune.rank=R",
    )  # fmt: skip
    layers: str | None = option(
        "Train adapters in these blocks only.",
        metavar="0-2,5", roles="client",
    )  # fmt: skip
    order: Order | None = option(
        "Train by gradients, or by losses alone. [default: by tune.method]",
        click.Choice(["first", "zeroth"]), roles="client",
        refused="is a client's; the run's is --set tune.method=zeroth",
    )  # fmt: skip
    ranks: int | None = option(
        "Train in N processes that torchrun starts here, one model together (FSDP2, DDP).",
        Whole(1, 1024), "N", roles="client",
    )  # fmt: skip
    max_restarts: int | None = option(
        "With --ranks: how often torchrun starts them again. [default: 3]",
        Whole(0, 10_000), "N", roles="client",
    )  # fmt: skip
    grace_s: float | None = option(
        "Seconds from SIGTERM or SIGUSR2 to SIGKILL. [default: Slurm's, else unknown]",
        Finite(0, 7 * 86_400), "S", name="--grace", roles="client",
        refused="is a client's: the others have no deadline to meet",
    )  # fmt: skip
    ec2_spot: bool = option(
        "Watch for the end of this EC2 spot instance.",
        roles="client", refused="is a client's: the others leave when they get SIGTERM",
    )  # fmt: skip

    launchers: Path | None = option(
        "How clients that died are launched: local, slurm or any command (TOML).",
        metavar="FILE", roles="ps", refused="goes with --role ps, which launches clients that died",
    )  # fmt: skip
    upstream: str | None = option(
        "Be a summing relay: a client of that server, which sends it the sum of clients' deltas.",
        metavar="ADDRESS", roles="ps",
    )  # fmt: skip
    with_ps: bool = option("Hold the parameter server as well.", roles="server")
    listen: str | None = option(
        "Where it listens for clients.",
        metavar="HOST:PORT", roles="relay",
        refused="goes with --role relay; others listen at LISTEN_ADDRESS",
    )  # fmt: skip
    split: str | None = option(
        "Forward to the run's split server too, at this port.",
        metavar="PORT[=ADDRESS]", roles="relay",
        refused="goes with --role relay; a run's split server is --role server",
    )  # fmt: skip


SECTIONS: dict[str, list[str]] = {}
"""The sections of help: the roles that take the options, and the options."""
for _name, _one in NodeOptions.declared().items():
    if _one.roles:
        SECTIONS.setdefault(_one.roles, []).append(_name)


def section_title(roles: str) -> str:
    """Return the title of a section of help."""
    names = roles.split()
    if len(names) == len(ROLES):
        return "Options of every role"
    return f"Options of {' and '.join([', '.join(names[:-1]), names[-1]]) if names[1:] else roles}"


def _others(role: str) -> list[str]:
    """The options that `role` does not take."""
    return [one for roles, names in SECTIONS.items() if role not in roles.split() for one in names]


class Node(click.Command):
    """The command of a node. A shell completes its options, without those of other roles."""

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """See click.Command."""
        role = ctx.params.get("role")
        others = [] if role is None else _others(role)
        hidden = {option for one in self.params if one.name in others for option in one.opts}
        found = super().shell_complete(ctx, incomplete)
        return [item for item in found if item.value not in hidden]


@click.command(NODE, cls=Node, add_help_option=False)
@takes(NodeOptions)
def node(options: NodeOptions) -> int:
    """Run a node of the run."""
    flags = {one.name: one.opts[0] for one in node.params}
    for name in _others(options.role):
        value = getattr(options, name)
        if value is not None and value is not False and value != ():
            one = NodeOptions.declared()[name]
            usual = f"is for --role {one.roles.replace(' ', ' and --role ')}"
            why = _NOT_FORWARDED if options.role == "relay" else one.refused or usual
            raise UsageError(f"{flags[name]} {why}")
    module = importlib.import_module(f"fsl_async.commands.{options.role}")
    code: int = module.command(options)
    return code
