"""A demo's settings, its run's configuration and its command lines. Pure, except for paths."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Self

from attrs import evolve, field, frozen

from fsl_async.cluster.supervisor import Child
from fsl_async.process.stopper import INTERRUPTED_BY

if TYPE_CHECKING:
    from netlab.laboratory import Laboratory

SERVER = "server"

HEARTBEAT_EVERY_S = 0.5
EXPIRE_AFTER_S = 3.0

SHORT_TRIP_S = 0.1
"""The round trip that the default times of a demo allow for."""

TRAINING: dict[str, str | float] = {
    "train.batch": 8,
    "train.threads": 1,
    "train.device": "cpu",
}


LOOPBACK = "127.0.0.1"

# Processes share the cores, and waiting threads would cost more than they gain.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def lengths(late_s: float) -> tuple[float, float]:
    """Seconds of a demo, and of a sync's period, for round trips of `SHORT_TRIP_S` plus `late_s`.

    By satellite (0.6 s) the first weights arrive after 10 to 20 s, because TCP's slow start counts
    in round trips, and a sync takes 5 to 8.
    """
    return 40.0 + 60.0 * late_s, 5.0 + 10.0 * late_s


@frozen
class Places:
    """Where the nodes run.

    host: address of the parameter server.
    enter: by node, the command prefix that runs it in its site; none: on this machine.
    """

    host: str = LOOPBACK
    enter: Mapping[str, tuple[str, ...]] = field(factory=dict)

    @property
    def options(self) -> list[str]:
        """Further options of every node: plain traffic is safe inside a laboratory."""
        return [] if self.host == LOOPBACK else ["--insecure"]

    def child(self, name: str, arguments: list[str]) -> Child:
        """A node as a child process, in its site."""
        made = node_child(name, [*arguments, *self.options])
        return evolve(made, argv=(*self.enter.get(name, ()), *made.argv))


HERE = Places()
NO_KEYS = Path(__file__).parent / "no-keys"
"""A folder that does not exist, because nodes of a demo have no keys."""


def places_in(lab: Laboratory) -> Places:
    """Each node in the laboratory's site of the same name."""
    return Places(lab.address(SERVER), {name: lab.command(name, ()) for name in lab.sites})


@frozen(kw_only=True)
class DemoNodes:
    """What the demos of a parameter server and its clients have in common. Times in seconds."""

    seconds: float
    """When to call the last round, if nothing else ends the demo."""
    clients: int
    format: str
    seed: int
    run_dir: Path
    places: Places = HERE
    links: bool = False
    """Whether each client dials a proxy that `fsl-node chaos` can cut."""
    late_s: float = 0.0
    """A round trip's time beyond `SHORT_TRIP_S`."""

    def at(self, run_dir: Path) -> Self:
        """The same in another run directory."""
        return evolve(self, run_dir=run_dir)

    @property
    def kill_after_s(self) -> float:
        """Seconds from the demo's start until a client is killed."""
        return self.seconds / 3

    @property
    def names(self) -> list[str]:
        """The clients' names."""
        return [f"client-{number}" for number in range(1, self.clients + 1)]

    @property
    def victim(self) -> str:
        """The client that is killed: not the first, which often publishes the first weights."""
        return self.names[min(1, self.clients - 1)]

    def server(self) -> Child:
        """The parameter server, on a free port."""
        raise NotImplementedError

    def client(self, name: str, address: str) -> Child:
        """One client of the parameter server at `address`."""
        raise NotImplementedError


@frozen(kw_only=True)
class DemoSettings(DemoNodes):
    """The user's choices. data: empty for the standard library's source. Times in seconds."""

    data: str
    every_s: float
    preset: str
    ranks: int = 1
    """Processes of each client, which train one model together."""

    def overrides(self) -> list[str]:
        """The run's configuration, in the form of --set."""
        chosen: dict[str, str | float | int] = {
            "run.name": "demo",
            "run.seed": self.seed,
            "sync.every_s": self.every_s,
            "sync.clients": self.clients,
            "sync.grace_min_s": 0.3,
            "sync.first_grace_s": 2.0,
            "codec.up": self.format,
            "codec.down": self.format,
            "session.heartbeat_every_s": HEARTBEAT_EVERY_S,
            "session.expire_after_s": EXPIRE_AFTER_S + 4 * self.late_s,
            "data.shards": self.clients,
            "data.source": "site" if self.data else "built-in",
            "data.path": self.data,
            "model.preset": self.preset,
            **TRAINING,
        }
        return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in chosen.items()]

    def server(self) -> Child:
        """The parameter server, on a free port."""
        sets = [part for override in self.overrides() for part in ("--set", override)]
        listen = f"tcp://{self.places.host}:0"
        arguments = ["--role", "ps", listen, "--run-dir", str(self.run_dir), "--json"]
        return self.places.child(SERVER, [*arguments, *sets])

    def client(self, name: str, address: str) -> Child:
        """One client of the parameter server at `address`."""
        run_dir = self.run_dir / "clients" / name
        arguments = ["--role", "client", address, "--name", name, "--run-dir", str(run_dir)]
        arguments += ["--allow", "deltas,metrics"]
        if self.ranks > 1:
            arguments += ["--ranks", str(self.ranks)]
        return self.places.child(name, [*arguments, *(["--data", self.data] if self.data else [])])


def node_child(name: str, arguments: list[str]) -> Child:
    """A node of this program as a child process."""
    # -P: files of the current directory must not be imported instead of ours.
    argv = (sys.executable, "-P", "-m", "fsl_async.cli", *arguments)
    # A user's site policy (site.toml in the keys folder) does not apply to nodes of a demo.
    env = {**ONE_THREAD, "FSL_KEYS": str(NO_KEYS), INTERRUPTED_BY: "the demo is over"}
    return Child(name, argv, env=env)
