"""The command line: `fsl-node --role ps|client|server|relay ...` and `fsl-node COMMAND ...`.

Imports are late, for a fast --help and fast errors: a command's module when it is called, and
torch, ZeroMQ and NumPy in there. Only `main` maps exceptions to exit codes (`fsl_async.errors`).
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fsl_async.commands import COMMANDS
from fsl_async.commands.options import Finite, Setting, Whole, Words
from fsl_async.errors import ExitCode, Report, UsageError, one_line, report
from fsl_async.process.program import NAME, program

if TYPE_CHECKING:
    from collections.abc import Sequence

    from click.shell_completion import CompletionItem

_DEBUG = "--debug"
_JSON = "--json"
_ROLES = ("ps", "client", "server", "relay")
_ROLE_OPTIONS = "--role ps, client, server or relay"
_NODE = "node"
_COMPLETE = "_FSL_NODE_COMPLETE"

_PATH = click.Path(path_type=Path)
_FILE = Words(files=True)


class Node(click.Command):
    """The command of a node. A shell completes its options, without those of other roles."""

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """See click.Command."""
        role = ctx.params.get("role")
        others = {
            option
            for one in self.params
            if role is not None and role not in _OF_ROLES.get(one.name or "", (role, ""))[0].split()
            for option in one.opts
        }
        found = super().shell_complete(ctx, incomplete)
        return [item for item in found if item.value not in others]


def _check_role(_: click.Context, __: click.Parameter, role: str | None) -> str:
    if role in _ROLES:
        return str(role)
    if role is None:
        raise UsageError(
            f"say what this node is, {_ROLE_OPTIONS}, or give a command ({', '.join(COMMANDS)})"
        )
    raise UsageError(f"--role {role[:80]!r} is unknown; use {_ROLE_OPTIONS}")


@click.command(_NODE, cls=Node, add_help_option=False)
@click.option(
    "--role",
    type=Words(*_ROLES),
    metavar="ps|client|server|relay",
    callback=_check_role,
    help="Be the parameter server, a client that trains, a split server, or a relay on the way.",
)
@click.option("--with-ps", is_flag=True, help="Hold the parameter server as well.")
@click.option(
    "--config", type=_PATH, metavar="FILE", help="The run's TOML file (see: fsl-node init)."
)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    type=Setting(),
    metavar="A.B=C",
    help="Override one setting; repeatable.",
)
@click.option(
    "--name", help="client: its name in the run [default: the host's]; others: the run's name."
)
@click.option(
    "--data",
    type=_FILE,
    metavar="PATH",
    help="Train on this: text, .jsonl, .parquet, a saved data set, hf://NAME (docs/DATA.md).",
)
@click.option(
    "--columns",
    metavar="NAME=COLUMN,...",
    help="Fine-tuning: columns of --data by name, like text=BODY,label=KIND (docs/TUNING.md).",
)
@click.option(
    "--tokenizer",
    type=_FILE,
    metavar="PATH",
    help="Train on tokens of this tokenizer.json (or name at the hub), not on bytes.",
)
@click.option(
    "--allow",
    metavar="KIND,...",
    help="What may leave this machine: deltas, adapters, scalars, activations, labels, metrics."
    " [default: that of site.toml beside the keys, else deltas]",
)
@click.option(
    "--task",
    type=_FILE,
    metavar="FILE.py:FUNCTION",
    help="Your own training loop; built in if left out.",
)
@click.option(
    "--model",
    type=_FILE,
    metavar="FILE.py:FUNCTION",
    help="Split learning: your own model, function(shape, classes).",
)
@click.option(
    "--auxiliary",
    type=_FILE,
    metavar="FILE.py:FUNCTION",
    help="Split learning: your own auxiliary model, function(shape, outputs).",
)
@click.option(
    "--base",
    type=_PATH,
    metavar="MODEL",
    help="Fine-tuning: the base model, a Hugging Face folder or a GGUF file that every site has.",
)
@click.option(
    "--rank",
    type=Whole(1, 4096),
    metavar="R",
    help="Rank of its adapters, where the run's rule merges unequal ones.",
)
@click.option("--layers", metavar="0-2,5", help="Train adapters in these blocks only.")
@click.option(
    "--order",
    type=Words("first", "zeroth"),
    metavar="first|zeroth",
    help="Train by gradients, or by losses alone. [default: by tune.method]",
)
@click.option("--run-dir", type=_PATH, metavar="DIR", help="Where files of the run are kept.")
@click.option("--from-version", type=Whole(min=0), metavar="N", help="Go on from version N.")
@click.option(
    "--threads",
    type=Whole(1, 4096),
    metavar="N",
    help="torch's threads here. [default: the run's setting, else all cores]",
)
@click.option(
    "--ranks",
    type=Whole(1, 1024),
    metavar="N",
    help="Train in N processes that torchrun starts here, one model together (FSDP2, DDP).",
)
@click.option(
    "--max-restarts",
    type=Whole(0, 10_000),
    metavar="N",
    help="With --ranks: how often torchrun starts them again. [default: 3]",
)
@click.option(
    "--launchers",
    type=_PATH,
    metavar="FILE",
    help="How clients that died are launched: local, slurm or any command (TOML).",
)
@click.option(
    "--grace",
    "grace_s",
    type=Finite(0, 7 * 86_400),
    metavar="S",
    help="Seconds from SIGTERM or SIGUSR2 to SIGKILL. [default: Slurm's, else unknown]",
)
@click.option(
    "--accept-rollback", is_flag=True, help="Go back with the run, whatever site.toml has."
)
@click.option("--ec2-spot", is_flag=True, help="Watch for the end of this EC2 spot instance.")
@click.option("--listen", metavar="HOST:PORT", help="Where it listens for clients.")
@click.option(
    "--split",
    metavar="PORT[=ADDRESS]",
    help="Forward to the run's split server too, at this port.",
)
@click.option("--insecure", is_flag=True, help="Accept that other machines connect unencrypted.")
@click.option(
    "--keys", type=_PATH, metavar="DIR", help="Encrypt, with the keys there (see: fsl-node keys)."
)
@click.option("--dry-run", is_flag=True, help="Print what would be run, resolved, and exit.")
@click.option(_JSON, "as_json", is_flag=True, help="Print JSON objects, the result last.")
@click.argument("address", required=False)
def node(role: str, **options: Any) -> int:
    """Run a node of the run."""
    _remove_others(role, options)
    module = importlib.import_module(f"fsl_async.commands.{role}")
    code: int = module.command(**options)
    return code


# Options of some roles only: the roles, and the message for others.
_BUILDS_NOTHING = "the parameter server stores numbers and builds no model"
_OF_ROLES: dict[str, tuple[str, str]] = {
    "listen": ("relay", "--listen goes with --role relay; others listen at LISTEN_ADDRESS"),
    "split": ("relay", "--split goes with --role relay; a run's split server is --role server"),
    "grace_s": ("client", "--grace is a client's: the others have no deadline to meet"),
    "allow": ("client", "--allow is a client's: what may leave its machine"),
    "accept_rollback": ("client", "--accept-rollback is a client's: it goes back with its run"),
    "ec2_spot": ("client", "--ec2-spot is a client's: the others leave when they get SIGTERM"),
    "launchers": ("ps", "--launchers goes with --role ps, which launches clients that died"),
    "with_ps": ("server", "--with-ps goes with --role server"),
    "base": ("ps client", "--base is for --role ps and --role client"),
    "tokenizer": ("ps client", "--tokenizer is for --role ps and --role client: of pretraining"),
    "rank": ("client", "--rank is a client's; the run's is --set tune.rank=R"),
    "layers": ("client", "--layers is a client's"),
    "columns": ("client", "--columns is a client's: of its records"),
    "ranks": ("client", "--ranks is a client's"),
    "max_restarts": ("client", "--max-restarts is a client's"),
    "order": ("client", "--order is a client's; the run's is --set tune.method=zeroth"),
    "model": (
        "client server",
        f"--model is for --role server and --role client: {_BUILDS_NOTHING}",
    ),
    "auxiliary": (
        "client server",
        f"--auxiliary is for --role server and --role client: {_BUILDS_NOTHING}",
    ),
}


# The sections of help: the roles that take the options, and the options.
SECTIONS: dict[str, tuple[str, ...]] = {
    "ps client server relay": ("role", "run_dir", "insecure", "dry_run", "as_json"),
    "ps client server": ("name", "data", "keys"),
    "ps client": ("task", "base", "tokenizer"),
    "ps server": ("config", "overrides", "from_version"),
    "client server": ("threads", "model", "auxiliary"),
    "client": (
        "allow", "accept_rollback", "columns", "rank", "layers", "order", "ranks", "max_restarts",
        "grace_s", "ec2_spot",
    ),
    "ps": ("launchers",),
    "server": ("with_ps",),
    "relay": ("listen", "split"),
}  # fmt: skip


def _title(roles: str) -> str:
    names = roles.split()
    if len(names) == len(_ROLES):
        return "Options of every role"
    return f"Options of {' and '.join([', '.join(names[:-1]), names[-1]]) if names[1:] else roles}"


def _remove_others(role: str, options: dict[str, Any]) -> None:
    """Remove the options of other roles. Raises UsageError where one was given."""
    for name, (roles, text) in _OF_ROLES.items():
        if role not in roles.split() and options.pop(name) not in {None, False, ()}:
            raise UsageError(text)


class Root(click.Group):
    """Chooses a node or a command, and imports only that one.

    The first argument decides: an option means a node (`fsl-node --role ps`), a word a command. A
    node's options may follow its address, because users append them to the line that the parameter
    server prints.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert the node command before options without a command."""
        is_text = any(arg in {"--help", "--version"} for arg in args)
        if args and args[0].startswith("-") and not is_text:
            args = [_NODE, *args]
        elif args and args[0].startswith("-"):
            args = ["--version" if "--version" in args else "--help"]
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Offer the commands, without importing them, and a node's options, which may be first."""
        from click.shell_completion import CompletionItem

        found = {name: text for name, text in COMMANDS.items() if name.startswith(incomplete)}
        items = [CompletionItem(name, help=text) for name, text in found.items()]
        return [*items, *node.shell_complete(ctx, incomplete)]

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands, without importing them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command."""
        if cmd_name == _NODE:
            return node
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"fsl_async.commands.{cmd_name}")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command. Raises UsageError with the most similar one."""
        word = args[0]
        if ctx.resilient_parsing and word not in {*COMMANDS, _NODE}:
            return word, click.Command(word, add_help_option=False), []  # nothing may follow
        if word in COMMANDS or (word == _NODE and len(args) > 1):
            return super().resolve_command(ctx, args)
        if ":" in word:
            raise UsageError(
                f"to join the run at {word[:200]}: {program()} --role client {word[:200]}"
            )
        if word in _ROLES:
            raise UsageError(f"a role is an option: {program()} --role {word}")
        import difflib

        close = difflib.get_close_matches(word, COMMANDS, n=1)
        meant = f"did you mean {close[0]}?" if close else f"commands: {', '.join(COMMANDS)}"
        raise UsageError(f"no command {word[:80]!r}; {meant}")

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the forms of the command line."""
        formatter.write_usage(program(), "--role ps [OPTIONS] [LISTEN_ADDRESS]")
        formatter.write_usage(program(), "--role client [OPTIONS] ADDRESS", " " * 7)
        formatter.write_usage(program(), "--role server [OPTIONS] [LISTEN_ADDRESS]", " " * 7)
        formatter.write_usage(program(), "--role relay [OPTIONS] SERVER_ADDRESS", " " * 7)
        formatter.write_usage(program(), "COMMAND [OPTIONS]", " " * 7)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a node's options, by the roles that take them, and the list of commands."""
        options = {one.name: one for one in node.params if isinstance(one, click.Option)}
        everywhere = [
            (_DEBUG, "Show tracebacks."),
            ("--version", "Print the version and exit."),
            ("--help", "Print this, or a command's own help, and exit."),
        ]
        for roles, names in SECTIONS.items():
            shown = [options[name].get_help_record(ctx) for name in names]
            with formatter.section(_title(roles)):
                formatter.write_dl([record for record in shown if record is not None])
        with formatter.section("Options everywhere"):
            formatter.write_dl(everywhere)
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _print_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        click.echo(f"{NAME} {version('fsl-async')}")
        ctx.exit(ExitCode.DONE)


@click.group(
    cls=Root,
    epilog="Addresses: host:port, tcp://host:port, fsl://host:port. Exit codes: 0 done, 1 a bug,"
    " 2 bad input or environment, 64 preempted (launch again), 130 interrupted.",
)
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version)
def root() -> None:
    """Train one large model across sites that come and go.

    A parameter server merges the deltas of clients and sends them the new weights; clients only
    dial out. The first Ctrl-C ends a node in good order, the second at once.
    """


def _translate(error: BaseException) -> Report | None:
    """Map click's exceptions to reports; None for others."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        return Report("UsageError", f"nothing to do (see {program()} --help)", ExitCode.BAD_INPUT)
    if isinstance(error, click.ClickException):
        text = one_line(error.format_message()).removesuffix(".")
        path = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else ""
        shown = path if path and not path.endswith(f" {_NODE}") else program()
        message = f"{text[:1].lower()}{text[1:]} (see {shown} --help)"
        return Report(type(error).__name__, message, ExitCode.BAD_INPUT)
    if type(error).__name__ == "CodecUsageError" and str(error).startswith("FSL_CODECS_PATH"):
        return Report("UsageError", str(error), ExitCode.BAD_INPUT)
    if isinstance(error, click.Abort):
        return Report("InterruptedByUserError", "interrupted", ExitCode.INTERRUPTED)
    return None


def _wants_json(args: Sequence[str]) -> bool:
    """Whether standard output is JSON. With `compare` it is not: its --json takes a file's name."""
    return _JSON in args and args[0] != "compare"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code; never raises."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = _DEBUG in given
    args = [arg for arg in given if arg != _DEBUG]
    try:
        if _COMPLETE in os.environ:  # set by the script of `fsl-node completion`
            importlib.import_module("fsl_async.commands.completion")
        code = root.main(
            args or ["--help"],
            prog_name=program(),
            complete_var=_COMPLETE,
            standalone_mode=False,
        )
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of standard output has ended (`| head`).
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(ExitCode.BAD_INPUT)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - the top of the program
        from fsl_async.commands.line_stream import write_last

        out, err = io.StringIO(), io.StringIO()
        exit_code = report(
            error, as_json=_wants_json(args), debug=debug, out=out, err=err, translate=_translate
        )
        write_last(sys.stderr, err.getvalue())
        write_last(sys.stdout, out.getvalue())
        return exit_code
    return int(code or ExitCode.DONE)


if __name__ == "__main__":
    sys.exit(main())
