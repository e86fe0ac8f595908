"""The command line: `fsl-node --role ps|client|server|relay ...` and `fsl-node COMMAND ...`.

Imports are late, for a fast --help and fast errors: a command's module when it is called, and
torch, ZeroMQ and NumPy in there. Only `main` maps exceptions to exit codes (`fsl_async.errors`).
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from typing import TYPE_CHECKING

import click

from fsl_async.commands import COMMANDS
from fsl_async.commands.node import NODE, ROLES, SECTIONS, node, section_title
from fsl_async.errors import PROGRAM, ExitCode, Report, UsageError, one_line, program, report

if TYPE_CHECKING:
    from collections.abc import Sequence

    from click.shell_completion import CompletionItem

_DEBUG = "--debug"
_JSON = "--json"
_COMPLETE = "_FSL_NODE_COMPLETE"


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
            args = [NODE, *args]
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
        if cmd_name == NODE:
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
        if ctx.resilient_parsing and word not in {*COMMANDS, NODE}:
            return word, click.Command(word, add_help_option=False), []  # nothing may follow
        if word in COMMANDS or (word == NODE and len(args) > 1):
            return super().resolve_command(ctx, args)
        if ":" in word:
            raise UsageError(
                f"to join the run at {word[:200]}: {program()} --role client {word[:200]}"
            )
        if word in ROLES:
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
            with formatter.section(section_title(roles)):
                formatter.write_dl([record for record in shown if record is not None])
        with formatter.section("Options everywhere"):
            formatter.write_dl(everywhere)
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _print_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        click.echo(f"{PROGRAM} {version('fsl-async')}")
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
        shown = path if path and not path.endswith(f" {NODE}") else program()
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
        from fsl_async.commands.output import write_last

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
