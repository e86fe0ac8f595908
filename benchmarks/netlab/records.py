"""What is kept on disk about a laboratory, in /run/fsl-netlab/NAME, before anything is made.

So whatever a crash leaves can be found and removed: a laboratory has crashed when the process that
owns it is gone, or when its router VM or one of its namespaces is. Each folder has a lock, held
while a laboratory is made, changed or removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import asdict, evolve, field, frozen

from netlab import host, plan
from netlab.host import LabError
from netlab.profiles import LinkSettings

ROOT = Path("/run/fsl-netlab")
_LOCK_S = 60.0


@frozen
class Process:
    """A process, identified by its id and its start, because ids are reused."""

    pid: int
    start: int

    @property
    def runs(self) -> bool:
        """Whether the process still runs."""
        return host.is_running(self.pid, self.start)


def this_process() -> Process:
    """Return the calling process."""
    return Process(os.getpid(), host.started(os.getpid()))


@frozen
class LinkState:
    """The present settings of a link."""

    left: str
    right: str
    settings: LinkSettings
    profile: str = ""
    cut: bool = False


@frozen
class Record:
    """A laboratory as it is on disk.

    `owner`: it ends with that process; None: it stays until `netlab down`.
    """

    name: str
    backend: str
    sites: tuple[str, ...]
    links: Mapping[str, LinkState]
    congestion: Mapping[str, str] = field(factory=dict)
    owner: Process | None = None
    machine: Process | None = None
    complete: bool = False

    def plan(self) -> plan.Plan:
        """The plan that it was made from."""
        return plan.make(self.name, self.sites, self.pairs)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The two sites of each link."""
        return [(one.left, one.right) for one in self.links.values()]

    def with_link(self, name: str, state: LinkState) -> Record:
        """The same with another state of one link."""
        return evolve(self, links={**self.links, name: state})

    def fault(self) -> str:
        """Why it cannot be used any more; empty when it can."""
        if self.owner is not None and not self.owner.runs:
            return f"the process {self.owner.pid} that made it is gone"
        if not self.complete:
            return "it was never finished"
        if self.machine is not None and not self.machine.runs:
            return "its router VM is gone"
        there = set(host.namespaces())
        lost = [one.name for one in self.plan().sites.values() if one.namespace not in there]
        return f"the namespaces of {', '.join(lost)} are gone" if lost else ""


def folder(name: str) -> Path:
    """Where a laboratory keeps its state.

    Raises UsageError for what is no laboratory's name, such as a path.
    """
    return ROOT / plan.checked(name)


def names() -> list[str]:
    """Laboratories that have a state on disk."""
    found = (one.parent.name for one in ROOT.glob("*/state.json"))
    return sorted(name for name in found if plan.is_name(name))


def read(name: str) -> Record | None:
    """The record of a laboratory, None when there is none; an unreadable one raises LabError."""
    path = folder(name) / "state.json"
    try:
        found = json.loads(path.read_text("utf-8"))
        return Record(
            name=found["name"],
            backend=found["backend"],
            sites=tuple(found["sites"]),
            links={key: _link(value) for key, value in found["links"].items()},
            congestion=found["congestion"],
            owner=_process(found["owner"]),
            machine=_process(found["machine"]),
            complete=found["complete"],
        )
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise LabError(f"{path} cannot be read ({error}); remove {path.parent}") from None


def _link(found: Mapping[str, Any]) -> LinkState:
    return LinkState(**{**found, "settings": LinkSettings(**found["settings"])})


def _process(found: Mapping[str, int] | None) -> Process | None:
    return None if found is None else Process(**found)


def write(record: Record) -> None:
    """Write a record atomically: after a crash there is the new or the old one."""
    path = folder(record.name) / "state.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(record), indent=1), "utf-8")
    partial.rename(path)


def forget(name: str) -> None:
    """Remove all that is kept of a laboratory."""
    shutil.rmtree(folder(name), ignore_errors=True)
    with contextlib.suppress(OSError):
        ROOT.rmdir()


@contextlib.contextmanager
def locked(name: str, *, limit_s: float = _LOCK_S) -> Iterator[None]:
    """Hold the lock of a laboratory; raises LabError when it is not free within `limit_s`."""
    path = folder(name) / "lock"
    deadline = time.monotonic() + limit_s
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # removed between these two lines
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.fstat(file).st_ino == path.stat().st_ino:
                break
        except (BlockingIOError, FileNotFoundError):
            pass
        os.close(file)
        if time.monotonic() >= deadline:
            raise LabError(f"another process is at work on the laboratory {name}; try again")
        time.sleep(0.02)
    try:
        yield
    finally:
        os.close(file)
