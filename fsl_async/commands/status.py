"""`fsl-node status RUN_DIR`: what a run does or did, rebuilt from its journals.

RUN_DIR is that of a parameter server, of a split server, of a process that is both, with a folder
for each, or of a client.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fsl_async.commands import status_trackers
from fsl_async.commands.options import RunDir, Whole
from fsl_async.commands.output import Output
from fsl_async.errors import UsageError

if TYPE_CHECKING:
    from fsl_async.commands.status_report import NodeStatus

_POLL_S = 0.5
_CLIENTS_EVERY_S = 10.0


@click.command("status")
@click.argument("run_dir", type=RunDir())
@click.option("--follow", is_flag=True, help="Go on until the run ends, or Ctrl-C.")
@click.option(
    "--web",
    "port",
    type=Whole(0, 65535),
    is_flag=False,
    flag_value=0,
    metavar="[PORT]",
    help="Show it as a page in a browser, on this machine only, until Ctrl-C. PORT: any free one.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@status_trackers.options
def command(
    *,
    run_dir: Path,
    follow: bool,
    port: int | None,
    as_json: bool,
    **trackers: Any,
) -> int:
    """Show a run, running or finished, from RUN_DIR/journal.jsonl and the files beside it.

    Reads only; works while the server runs, after it was killed, and on a copy of the directory.
    """
    from fsl_async.commands.status_report import NodeStatus, facts, lines
    from fsl_async.observe.node_folders import run_dir_of, servers_of

    output, asked = Output(as_json=as_json), status_trackers.Asked(**trackers)
    if port is not None:
        _alone(follow, asked)
        return _web(run_dir_of(run_dir), port, output)
    if asked:
        status_trackers.check(asked)
        status_trackers.wait_for_journal(run_dir, output)
    first, *others = (NodeStatus(folder) for folder in servers_of(run_dir_of(run_dir)))
    with status_trackers.watching([first, *others], asked, output) as poll:
        if follow:
            _follow(first, output, poll)
        elif asked.metrics is not None:
            status_trackers.wait_until_gone(first, poll)
    now = time.time()
    if output.as_json:
        found = facts(first, now)
        for one in others:
            found["split_server"] = facts(one, now)
        output.result(found)
        return 0
    for line in lines(first, now):
        output.say(line)
    for one in others:
        output.say("")
        for line in lines(one, now):
            output.say(line)
    return 0


def _alone(follow: bool, asked: status_trackers.Asked) -> None:
    """Raise UsageError where more than the page is asked for."""
    if follow or asked:
        raise UsageError(
            "--web is a program of its own: start --follow and trackers in another terminal"
        )


def _web(run_dir: Path, port: int, output: Output) -> int:
    """Serve the page until Ctrl-C."""
    from fsl_async.tools.control_room import server

    def announce(url: str) -> None:
        if output.as_json:
            output.record("web", url=url)
        output.say(f"open {url} in a browser on this machine (Ctrl-C ends the page, not the run)")

    server.run(run_dir, port, announce)
    return 0


def _follow(status: NodeStatus, output: Output, poll: Callable[[], None]) -> None:
    """Show what happens until the node is gone for good, or Ctrl-C.

    Where there is no live table, the table of clients is printed at the beginning and after a
    version, at most every `_CLIENTS_EVERY_S`. poll: called after each look at the journal.
    """
    from fsl_async.commands.status_report import table
    from fsl_async.observe.table import LiveTable, open_view

    view, state = open_view(output), status.state
    needs_clients = not output.as_json and not isinstance(view, LiveTable)
    clients_at = -_CLIENTS_EVERY_S
    news = status.news
    try:
        while True:
            view.update(state, news, time.time())
            poll()
            if state.node.ended_at is not None:
                return
            is_due = time.monotonic() >= clients_at + _CLIENTS_EVERY_S
            is_new = clients_at < 0 or any(one.kind == "version" for one in news)
            if needs_clients and state.clients and is_due and is_new:
                clients_at = time.monotonic()
                for line in table(state, time.time()):
                    output.say(line)
            time.sleep(_POLL_S)
            news = status.read()
    except KeyboardInterrupt:
        pass
    finally:
        view.close()
