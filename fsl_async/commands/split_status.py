"""What `fsl-node status` says of a split server: its journal, its ledger, its checkpoints."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from fsl_async.observe.split_state import SplitState

JOURNAL = "journal.jsonl"
SERVER = "server"
SILENT_S = 60.0


class Alive(Protocol):
    """What a journal says of its process."""

    pid: int
    host: str
    last_t: float
    ended_at: float | None
    ending: str


def folder_of(run_dir: Path) -> Path | None:
    """Where the split server's files are, if `run_dir` is that of one, or has one in it."""
    if (run_dir / SERVER / JOURNAL).is_file():
        return run_dir / SERVER
    is_one = (run_dir / JOURNAL).is_file() and (run_dir / "checkpoints").is_dir()
    named = run_dir.name == SERVER and not (run_dir / "spool").exists()
    return run_dir if is_one and named else None


def alive_words(state: Alive, now: float, goes_on_from: str) -> str:
    """Whether the process is alive, as far as can be known from here."""
    age = max(0.0, now - state.last_t)
    if state.ended_at is not None:
        ended = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(state.ended_at))
        return f"ended at {ended}: {state.ending}"
    here = state.host == socket.gethostname() and state.pid > 0
    if here and not _exists(state.pid):
        return f"gone without a last word (process {state.pid} was killed?); start it again, it goes on from {goes_on_from}"
    who = f"process {state.pid} on {'this machine' if here else state.host}" if state.pid else "it"
    if here or age < SILENT_S:
        return f"running, {who}, last line of the journal {age:.0f} s ago"
    return f"silent for {age:.0f} s ({who}): look there whether it still runs"


def encrypted_words(encrypted: bool) -> str:
    """Of the connections to a server."""
    if encrypted:
        return "encrypted, with an allow-list of keys"
    return "not encrypted: whoever reaches the port may join"


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def facts(folder: Path, now: float) -> dict[str, Any]:
    """Plain values for --json."""
    state = _state(folder)
    return {
        "role": SERVER,
        "method": state.method,
        "address": state.address,
        "encrypted": state.encrypted,
        "server": alive_words(state, now, _goes_on_from(folder)),
        "starts": state.starts,
        "round": state.round,
        "loss": state.loss,
        "clients_here": sorted(name for name, here in state.here.items() if here),
        "checkpoints": _checkpoints(folder),
        "traffic": state.traffic(),
        "uploads": _audit(folder),
    }


def lines(folder: Path, now: float) -> list[str]:
    """The same for people."""
    from fsl_async.accounting.accounts import account_lines
    from fsl_async.observe.client_state import counted

    found = facts(folder, now)
    uploads = found["uploads"]
    made = [f"split server ({found['method']}): {found['server']}"]
    if found["encrypted"] is not None:
        made.append(f"connections to the split server are {encrypted_words(found['encrypted'])}")
    if found["starts"] > 1:
        made.append(f"the split server was started {found['starts']} times")
    if "trained" in uploads:
        made.append(
            f"uploads: {uploads['trained']:,} trained ({uploads['came_back']:,} of them again, after a server that died), "
            f"{uploads['declined']:,} declined, {uploads['dropped']:,} dropped; newest round {found['round']}"
        )
        kept = [f"{name} {version}" for name, version in uploads["auxiliary"].items()]
        if kept:
            made.append(f"versions of auxiliary models: {', '.join(kept[:8])}")
    here = found["clients_here"]
    made.append(f"{counted(len(here), 'client')} connected: {', '.join(here[:8]) or 'none'}")
    made += account_lines("split server", found["traffic"])
    return [*made, *(f"problem: {problem}" for problem in uploads["problems"])]


def _state(folder: Path) -> SplitState:
    from fsl_async.observe.journal import JournalReader
    from fsl_async.observe.split_state import SplitState

    state = SplitState()
    for line in JournalReader(folder / JOURNAL).read():
        state.apply(line)
    return state


def _audit(folder: Path) -> dict[str, Any]:
    from attrs import asdict

    from fsl_async.observe.split_audit import audit_split_dir

    try:
        return asdict(audit_split_dir(folder))
    except (OSError, KeyError, TypeError, ValueError) as error:
        return {"problems": [f"the split server's ledger cannot be read: {error}"]}


def _checkpoints(folder: Path) -> list[int]:
    found = folder.glob("checkpoints/c*/manifest.json")
    return sorted(int(path.parent.name[1:]) for path in found if path.parent.name[1:].isdecimal())


def _goes_on_from(folder: Path) -> str:
    kept = _checkpoints(folder)
    return f"checkpoint {kept[-1]}" if kept else "the beginning"
