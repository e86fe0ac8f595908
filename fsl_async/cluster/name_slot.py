"""Chooses a client's default name: the host's, and the same one after a relaunch.

The parameter server identifies a client by its name: the name has a data shard for the whole run,
and a second process of the same name replaces the first. So the name must stay the same over
relaunches, and clients of one host must differ. The first client of a host at a given parameter
server is `host`, the second `host-2`, and so on. Each one holds the lock file of its number until
it ends, and a relaunched one takes the lowest free number. The system releases the lock of a killed
process. Such locks do not exclude each other within one process, which lists its own names.

Machines that get a new host name at each start (containers, cloud instances) should use --name.
"""

import fcntl
import hashlib
import os
import re
import socket
import threading
from pathlib import Path

from fsl_async.config.rules import must_be_name
from fsl_async.errors import FslError, UsageError

_MOST_SLOTS = 256
_HELD: set[Path] = set()
"""Lock files of this process, which must not open one again: closing it unlocks it (fcntl(2))."""

_HELD_LOCK = threading.Lock()


class NameSlot:
    """A name that is reserved until `close` or the end of the process."""

    def __init__(self, name: str, path: Path, file: int) -> None:
        self.name = name
        self._path = path
        self._file = file

    def close(self) -> None:
        """Release the name. May be called again."""
        with _HELD_LOCK:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1
                _HELD.discard(self._path)


def check_name(name: str) -> str:
    """Return `name` if it is valid for a client. Raises UsageError."""
    if problem := must_be_name(name):
        raise UsageError(f"--name {name[:80]!r}: {problem}")
    return name


def default_directory() -> Path:
    """Return the folder of lock files, by the XDG base directory specification."""
    home = os.environ.get("XDG_STATE_HOME", "")
    base = Path(home) if Path(home).is_absolute() else Path.home() / ".local" / "state"
    return base / "fsl-async" / "names"


def claim_name(server: str, *, directory: Path | None = None, host: str | None = None) -> NameSlot:
    """Reserve the lowest free name of this host at `server`.

    Raises FslError when lock files cannot be created, or all names are in use.
    """
    host = re.sub(r"[^A-Za-z0-9._-]+", "-", host or socket.gethostname())[:56].strip("-") or "host"
    directory = default_directory() if directory is None else directory
    run = hashlib.sha256(server.encode()).hexdigest()[:12]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _HELD_LOCK:
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
        # A record lock, because forked data loaders, which may outlive a killed client, inherit
        # flock's.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        os.close(file)
        return None
    except OSError:
        os.close(file)
        raise
    return file
