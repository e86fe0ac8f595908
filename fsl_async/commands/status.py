"""`fsl-node status RUN_DIR`: what a run does or did, rebuilt from its journal.

RUN_DIR is that of a parameter server, of a split server, of a process that is both, with a folder for each, or of a client.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fsl_async.commands import split_status
from fsl_async.commands.output import Output
from fsl_async.errors import RunDirError

if TYPE_CHECKING:
    from fsl_async.observe.journal import JournalReader
    from fsl_async.observe.state import RunState

JOURNAL = "journal.jsonl"
PS, SERVER = "ps", "server"
"""Folders in the run directory of a process that holds both."""
_POLL_S = 0.5
_NEWS = 8
_CLIENTS_EVERY_S = 10.0


@click.command("status")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--follow", is_flag=True, help="Go on until the run ends, or Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(*, run_dir: Path, follow: bool, as_json: bool) -> int:
    """Show a run, running or finished, from RUN_DIR/journal.jsonl and the files beside it.

    Reads only; works while the server runs, after it was killed, and on a copy of the directory.
    """
    from fsl_async.observe.journal import JournalReader
    from fsl_async.observe.state import RunState

    output = Output(as_json=as_json)
    run_dir = _run_dir(run_dir)
    split_dir = split_status.folder_of(run_dir)
    if split_dir == run_dir / SERVER and (run_dir / PS).is_dir():
        run_dir /= PS
    if split_dir is not None and (split_dir == run_dir or not (run_dir / JOURNAL).is_file()):
        return _show_split_server(split_dir, output, follow=follow)
    reader, state = JournalReader(_journal(run_dir)), RunState()
    news = _read(reader, state)
    if state.role == "client":
        if follow:
            raise RunDirError(f"{run_dir} is a client's: --follow goes with a parameter server")
        _show_client(state, output)
        return 0
    if not state.starts and not state.last_t:
        raise RunDirError(f"{reader.path} has no line yet; is the server starting?")
    if follow:
        _follow(reader, state, output, news)
    _show(run_dir, split_dir, state, output)
    return 0


def _show_client(state: RunState, output: Output) -> None:
    """What a client's own journal says of it."""
    from fsl_async.commands import client_status

    now = time.time()
    if output.as_json:
        output.result(client_status.facts(state, now))
        return
    for line in client_status.lines(state, now):
        output.say(line)


def _show(run_dir: Path, split_dir: Path | None, state: RunState, output: Output) -> None:
    now = time.time()
    if output.as_json:
        found = _facts(run_dir, state, now) | state.as_dict(now)
        if split_dir is not None:
            found["split_server"] = split_status.facts(split_dir, now)
        output.result(found)
        return
    parts = _lines(run_dir, state, now)
    if split_dir is not None:
        parts += ["", *split_status.lines(split_dir, now)]
    for line in parts:
        output.say(line)


def _show_split_server(folder: Path, output: Output, *, follow: bool) -> int:
    """One whose parameter server is elsewhere."""
    if follow:
        raise RunDirError(f"{folder} is a split server's: --follow goes with a parameter server")
    now = time.time()
    if output.as_json:
        output.result(split_status.facts(folder, now))
    else:
        for line in split_status.lines(folder, now):
            output.say(line)
    return 0


def _run_dir(path: Path) -> Path:
    """The run directory that `path` is, or the one whose journal it is."""
    if path.is_file():
        if path.name == JOURNAL:
            return path.parent
        raise RunDirError(
            f"{path} is a file: give the run directory that the server named, or the {JOURNAL} in it"
        )
    if not path.exists():
        raise RunDirError(
            f"{path}: no such directory; give the run directory that the server named"
        )
    return path


def _journal(run_dir: Path) -> Path:
    path = run_dir / JOURNAL
    inside = sorted(one.name for one in run_dir.iterdir() if _is_run_dir(one))
    if not path.is_file() and inside:
        raise RunDirError(
            f"{run_dir} has no {JOURNAL}, but run directories in it: give one of {', '.join(inside[:8])}"
        )
    if not path.is_file():
        raise RunDirError(f"{run_dir} has no {JOURNAL}: it is not the run directory of a server")
    return path


def _is_run_dir(path: Path) -> bool:
    """Whether it is that of a server, or of one of each."""
    if (path / "server" / JOURNAL).is_file() or (path / PS / JOURNAL).is_file():
        return True
    return (path / JOURNAL).is_file() and (path / "ledger.jsonl").is_file()


def _read(reader: JournalReader, state: RunState) -> list[Any]:
    news: list[Any] = []
    for line in reader.read():
        news.extend(state.apply(line))
    return news


def _follow(reader: JournalReader, state: RunState, output: Output, news: list[Any]) -> None:
    """Show what happens until the server is gone for good, or somebody presses Ctrl-C.

    Where there is no live table, its lines about the clients are printed at the beginning and after a version, so far as
    `_CLIENTS_EVERY_S` have gone by.
    """
    from fsl_async.observe.table import LiveTable, open_view

    view = open_view(output)
    needs_clients = not output.as_json and not isinstance(view, LiveTable)
    clients_at = -_CLIENTS_EVERY_S
    try:
        while True:
            view.update(state, news, time.time())
            if state.ended_at is not None:
                return
            is_due = time.monotonic() >= clients_at + _CLIENTS_EVERY_S
            is_new = clients_at < 0 or any(one.kind == "version" for one in news)
            if needs_clients and state.clients and is_due and is_new:
                clients_at = time.monotonic()
                for line in _client_lines(state, time.time()):
                    output.say(line)
            time.sleep(_POLL_S)
            news = _read(reader, state)
    except KeyboardInterrupt:
        pass
    finally:
        view.close()


def server_words(state: RunState, now: float) -> str:
    """Whether the parameter server is alive, as far as can be known from here."""
    from_version = f"version {state.version}" if state.version >= 0 else "the beginning"
    return split_status.alive_words(state, now, from_version)


def _client_lines(state: RunState, now: float) -> list[str]:
    """The table of clients, what its losses are, and whose steps came to nothing."""
    from fsl_async.observe.columns import LOSS_LEGEND, fitted

    clients = [state.clients[name] for name in sorted(state.clients)]
    lines = [*fitted(clients, now, _screen_width()), LOSS_LEGEND]
    lines += [f"{one.name} trains badly: {one.trouble}" for one in clients if one.trouble][:_NEWS]
    out = [f"{one.name} {one.left_out:,}" for one in clients if one.left_out]
    if out:
        named = ", ".join(out[:_NEWS]) + (", ..." if len(out) > _NEWS else "")
        lines.append(
            f"steps left out, as no answer came or their one sample cannot be trained on: {named}"
        )
    return lines


def _screen_width() -> int | None:
    """Of the terminal; what is read by other programs may be as wide as it is."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _checkpoints(run_dir: Path) -> list[int]:
    found = run_dir.glob("checkpoints/v*/manifest.json")
    return sorted(int(path.parent.name[1:]) for path in found if path.parent.name[1:].isdecimal())


def _facts(run_dir: Path, state: RunState, now: float) -> dict[str, Any]:
    """What the files beside the journal say."""
    from attrs import asdict

    from fsl_async.observe.ledger_audit import audit_run

    made: dict[str, Any] = {
        "run_dir": str(run_dir),
        "server": server_words(state, now),
        "checkpoints": _checkpoints(run_dir),
        "next_sync_in_s": _next_sync(state, now),
    }
    try:
        made["audit"] = asdict(audit_run(run_dir))
    except (OSError, KeyError, TypeError, ValueError) as error:
        made["audit"] = {"problems": [f"the ledger cannot be read: {error}"]}
    return made


def _next_sync(state: RunState, now: float) -> float | None:
    if state.next_sync_at is None or state.ended_at is not None:
        return None
    return round(max(0.0, state.next_sync_at - now), 1)


def _lines(run_dir: Path, state: RunState, now: float) -> list[str]:
    """The state for people."""
    from fsl_async.accounting.accounts import account_lines
    from fsl_async.observe.client_state import counted, megabytes
    from fsl_async.observe.table import header, news_line

    facts = _facts(run_dir, state, now)
    audit = facts["audit"]
    lines = [header(state, now), f"server: {facts['server']}"]
    if state.encrypted is not None:
        lines.append(f"connections are {split_status.encrypted_words(state.encrypted)}")
    if state.needs:
        lines.append(
            f"clients send: {', '.join(state.needs)}; and metrics, where their sites allow them"
        )
    if facts["next_sync_in_s"] is not None:
        lines.append(f"next sync in {facts['next_sync_in_s']:.0f} s")
    if state.starts > 1:
        lines.append(f"the server was started {state.starts} times")
    kept = facts["checkpoints"]
    named = ", ".join(map(str, kept[-8:])) or "none"
    lines.append(f"checkpoints kept: {named} (in {run_dir / 'checkpoints'})")
    lines.append(
        f"up {megabytes(state.up.raw)} as {megabytes(state.up.sent)}, "
        f"down {megabytes(state.down.raw)} as {megabytes(state.down.sent)}"
    )
    lines += account_lines("parameter server", state.account.as_dict())
    if state.garbage:
        lines.append(
            f"{state.garbage:,} messages from the network were not of this program (ignored)"
        )
    if state.alarms:
        lines.append(f"ALARM ({counted(state.alarms, 'time')}): {state.alarm}")
    if "merged" in audit:
        lines.append(
            f"ledger: {counted(audit['merged'], 'delta')} merged, {audit['pending']} pending, {audit['quarantined']} quarantined, "
            f"{len(audit['lost'])} lost, {len(audit['doubled'])} doubled"
        )
    lines += [f"held back: delta {key}: {why}" for key, why in list(state.held.items())[:_NEWS]]
    lines += [f"problem: {problem}" for problem in audit["problems"]]
    if state.clients:
        lines += ["", *_client_lines(state, now)]
    told = [news_line(state, one) for one in list(state.news)[-_NEWS:]]
    return [*lines, "", *told] if told else lines
