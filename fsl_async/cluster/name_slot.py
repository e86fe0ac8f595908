"""A client's default name: the host's, and the same again after a relaunch.

The parameter server identifies a client by its name: the name holds a data shard for the whole run,
and a second process with the same name replaces the first. So the name must be stable over
relaunches and different between two clients of one host. The first client of a host that joins a
parameter server is `host`, the second `host-2`, and so on: each holds a lock file of its number
until it ends, and a relaunched one takes the lowest free number. The system releases the lock of a
killed process. Such locks do not exclude each other within one process, so a process also keeps a
list of the names that it holds.

Machines that get a new host name at each start (containers, cloud instances) should be given
--name.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import socket
import threading
from pathlib import Path

from fsl_async.errors import FslError, UsageError
from fsl_async.roles.names import NAME

_MOST_SLOTS = 256
_HELD: set[Path] = set()
"""By this process. It must not even open such a file: closing it would release the lock
(fcntl(2)).
"""

_ONE_AT_A_TIME = threading.Lock()


class NameSlot:
    """A name, held until `close` or the end of the process."""

    def __init__(self, name: str, path: Path, file: int) -> None:
        self.name = name
        self._path = path
        self._file = file

    def close(self) -> None:
        """Give the name back; harmless when that is done."""
        with _ONE_AT_A_TIME:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1
                _HELD.discard(self._path)


def check_name(name: str) -> str:
    """Return `name` if it may be a client's; raises UsageError."""
    if not NAME.fullmatch(name) or name in {".", ".."}:
        raise UsageError(
            f"--name {name[:80]!r}: must be 1 to 64 letters, digits, dots, dashes or underscores"
        )
    return name


def default_directory() -> Path:
    """Where lock files are, by the XDG base directory specification."""
    home = os.environ.get("XDG_STATE_HOME", "")
    base = Path(home) if Path(home).is_absolute() else Path.home() / ".local" / "state"
    return base / "fsl-async" / "names"


def claim_name(server: str, *, directory: Path | None = None, host: str | None = None) -> NameSlot:
    """Take the lowest free name of this host at `server`; raises FslError when lock files cannot be
    kept.
    """
    host = re.sub(r"[^A-Za-z0-9._-]+", "-", host or socket.gethostname())[:56].strip("-") or "host"
    directory = default_directory() if directory is None else directory
    run = hashlib.sha256(server.encode()).hexdigest()[:12]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _ONE_AT_A_TIME:
            for number in range(1, _MOST_SLOTS + 1):
                path = directory.absolute() / f"{host}.{run}.{number}.lock"
                file = None if path in _HELD else _lock(path)
                if file is not None:
                    _HELD.add(path)
                    return NameSlot(host if number == 1 else f"{host}-{number}", path, file)
    except OSError as error:
        raise FslError(
            f"cannot keep a lock file in {directory} ({error.strerror}); give this client a --name"
        ) from None
    raise FslError(f"all {_MOST_SLOTS} names of host {host} are taken; give this client a --name")


def _lock(path: Path) -> int | None:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # A record lock: unlike flock it is not inherited by forked data loaders, which may outlive
        # a killed client.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        os.close(file)
        return None
    except OSError:
        os.close(file)
        raise
    return file
