"""Computes how many clients fit into a process's limit of open files, raised as far as possible.

Each connection of a client takes one descriptor at each listener. A client has two connections
(control and one for bulk), and on long or lossy paths opens up to `transfer.stripes_limit` for
bulk. If the limit is low, clients get a lower `stripes_limit`: otherwise the first clients would
take the connections that later ones need.
"""

from collections.abc import Callable
from typing import ParamSpec

from attrs import evolve, frozen

from fsl_async.config.settings import Config
from fsl_async.errors import ConfigError, UsageError
from fsl_transport import TransportSettings
from fsl_transport.zmq.admission import connections_within, descriptors, files_for, in_use

P = ParamSpec("P")

LISTENER_FILES = 24
"""Descriptors that a second listener in the process takes by itself."""

MOST_CONNECTIONS = TransportSettings().max_connections

LEAST = 2
"""Connections of a client: one for control, and one for bulk."""

TORCH_FILES = 64
"""Descriptors of a process that trains: PyTorch's, and those of a GPU's driver."""

CLIENT_FILES = 48
"""22 for a client's loop and link, 12 for a link to a split server, the rest for its task. libzmq
aborts the process where it gets none."""


@frozen
class Capacity:
    """The capacity of one listener."""

    files: int
    """The limit of open files of the process."""
    connections: int
    """Connections that the listener accepts."""
    clients: int
    """Planned clients of the run (`sync.clients`)."""
    most: int
    """Most connections of a client."""
    bound: bool
    """Whether the limit of open files decides, instead of `max_connections`."""
    files_needed: int
    """The lowest limit at which all planned clients have `LEAST`."""

    @property
    def fits(self) -> int:
        """How many clients fit."""
        return max(0, self.connections // LEAST)

    @property
    def is_enough(self) -> bool:
        """Whether all planned clients fit, as far as open files decide."""
        return not self.bound or self.fits >= self.clients

    @property
    def is_ample(self) -> bool:
        """Whether all planned clients can open all connections that they may."""
        return not self.bound or self.connections >= self.clients * self.most

    @property
    def facts(self) -> dict[str, int]:
        """The fields of the journal's note."""
        return {"open_files": self.files, "connections": self.connections, "clients_fit": self.fits}

    @property
    def each(self) -> int:
        """Connections that each planned client may open."""
        if self.is_ample:
            return self.most
        return max(LEAST, min(self.most, self.connections // self.clients))

    @property
    def text(self) -> str:
        """Return the line that is printed at the start."""
        return (
            f"{self.files:,} open files are allowed: room for {self.connections:,} connections,"
            f" so for {self.fits:,} clients; each of sync.clients = {self.clients:,} gets up to"
            f" {self.each} instead of {self.most}"
        )

    @property
    def refusal(self) -> str:
        """Why the process does not start."""
        return (
            f"{self.files:,} open files are allowed, which is room for {self.fits:,} of"
            f" sync.clients = {self.clients:,}: raise the limit to {self.files_needed:,}"
            f" (ulimit -n {self.files_needed}) or plan with fewer clients"
        )


def within(config: Config, capacity: Capacity) -> Config:
    """The configuration with a `stripes_limit` that fits the capacity."""
    most = min(config.transfer.stripes_limit, capacity.each - 1)
    return evolve(config, transfer=evolve(config.transfer, stripes_limit=most))


def capacity_of(
    config: Config,
    files: int | None = None,
    held: int | None = None,
    max_connections: int = MOST_CONNECTIONS,
    *,
    trains: bool = False,
    listeners: int = 1,
) -> Capacity:
    """The capacity of one of `listeners` in a process.

    files: its limit of descriptors; None: that of this process. held: those open now, likewise.
    trains: whether it uses PyTorch.
    """
    files, held = files or descriptors(), in_use() if held is None else held
    held += (TORCH_FILES if trains else 0) + LISTENER_FILES * (listeners - 1)
    fits = max(0, connections_within(files, held) // listeners)
    clients = config.sync.clients
    return Capacity(
        files=files,
        connections=min(fits, max_connections),
        clients=clients,
        most=1 + config.transfer.stripes_limit,
        bound=fits < max_connections,
        files_needed=files_for(clients * LEAST * listeners, held),
    )


def check_client_files() -> None:
    """Raise UsageError, with the limit needed, if a client does not fit."""
    files, needed = descriptors(), in_use() + CLIENT_FILES
    if files < needed:
        raise UsageError(
            f"{files} open files are allowed, too few for a client: raise the limit to {needed}"
            f" (ulimit -n {needed}) or more"
        )


def check_open_files(config: Config, *, trains: bool = False, listeners: int = 1) -> Capacity:
    """Return the capacity of this process; raise ConfigError if the planned clients do not fit."""
    found = capacity_of(config, trains=trains, listeners=listeners)
    if not found.is_enough:
        raise ConfigError(found.refusal, "sync.clients")
    return found


def and_capacity(
    announce: Callable[P, None],
    capacity: Capacity,
    log: Callable[[str], None],
    record: Callable[..., None] | None,
) -> Callable[P, None]:
    """Return `announce`, followed by a record of how many clients fit.

    If planned clients get fewer connections than they may open, people are told, unless programs
    read `record`.
    """

    def announced(*arguments: P.args, **named: P.kwargs) -> None:
        announce(*arguments, **named)
        if record is not None:
            record("capacity", **capacity.facts)
        elif not capacity.is_ample:
            log(capacity.text)

    return announced
