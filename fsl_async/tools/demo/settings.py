"""What a demo is made of: its settings, the configuration of its run, and the command lines of its processes. Pure but for paths."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import evolve, field, frozen

from fsl_async.cluster.supervisor import Child

if TYPE_CHECKING:
    from fsl_async.tools.netlab.laboratory import Laboratory

SERVER = "server"

HEARTBEAT_EVERY_S = 0.5
EXPIRE_AFTER_S = 3.0

SHORT_TRIP_S = 0.1
"""A round trip that the times of a demo allow for."""

# One short run is not the paper's setting: with a handful of rounds the outer momentum has no time to settle, and plain averaging
# (FedAvg, arXiv:1602.05629) gets further: held-out loss 2.41 against 2.61 nats/byte with Nesterov 0.7 / 0.9, after 160 steps by each
# of three clients and a sync every 40 (one seed); learning rate 8e-3 instead of 4e-3 gave 2.51.
TRAINING: dict[str, str | float] = {
    "outer.optimizer": "average",
    "train.learning_rate": 4e-3,
    "train.warmup_steps": 10,
    "train.batch": 8,
    "train.threads": 1,
    "train.device": "cpu",
}


LOOPBACK = "127.0.0.1"


def lengths(late_s: float) -> tuple[float, float]:
    """Seconds that a demo lasts, and from one sync to the next, where round trips take `late_s` more than `SHORT_TRIP_S`.

    Over a satellite (0.6 s) the first weights are there after 10 to 20 s, because TCP's slow start counts in round trips, and a sync takes 5 to 8.
    """
    return 40.0 + 60.0 * late_s, 5.0 + 10.0 * late_s


@frozen
class Places:
    """Where the nodes run: the server's address, and the words that put a node's command into its site (none: on this machine)."""

    host: str = LOOPBACK
    enter: Mapping[str, tuple[str, ...]] = field(factory=dict)

    @property
    def words(self) -> list[str]:
        """What a node is told besides: a laboratory's addresses are not loopback, and its traffic goes nowhere else."""
        return [] if self.host == LOOPBACK else ["--insecure"]

    def child(self, name: str, arguments: list[str]) -> Child:
        """A node as a child process, where it belongs."""
        made = node_child(name, [*arguments, *self.words])
        return evolve(made, argv=(*self.enter.get(name, ()), *made.argv))


HERE = Places()
NO_KEYS = Path(__file__).parent / "no-keys"
"""A folder that does not exist: nodes of a demo have no keys."""


def places_in(lab: Laboratory) -> Places:
    """Every node in the site of a network laboratory that has its name."""
    return Places(lab.address(SERVER), {name: lab.command(name, ()) for name in lab.sites})


@frozen(kw_only=True)
class DemoSettings:
    """What the user chose. `data`: empty for the standard library's source. Times in seconds."""

    data: str
    seconds: float
    clients: int
    format: str
    every_s: float
    seed: int
    preset: str
    run_dir: Path
    places: Places = HERE
    links: bool = False
    """Each client behind a proxy that `fsl-node chaos` can cut."""
    late_s: float = 0.0
    """What a round trip takes beyond `SHORT_TRIP_S`."""

    def at(self, run_dir: Path) -> DemoSettings:
        """The same in another run directory."""
        return evolve(self, run_dir=run_dir)

    @property
    def kill_after_s(self) -> float:
        """When a client is killed, after the demo's start."""
        return self.seconds / 3

    @property
    def names(self) -> list[str]:
        """The clients' names."""
        return [f"client-{number}" for number in range(1, self.clients + 1)]

    @property
    def victim(self) -> str:
        """The client that is killed: not the first, which is often the one that publishes the first weights."""
        return self.names[min(1, self.clients - 1)]

    def overrides(self) -> list[str]:
        """The run's configuration, as --set takes it."""
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
        """One client of the server at `address`."""
        run_dir = self.run_dir / "clients" / name
        arguments = ["--role", "client", address, "--name", name, "--run-dir", str(run_dir)]
        arguments += ["--allow", "deltas,metrics"]
        return self.places.child(name, [*arguments, *(["--data", self.data] if self.data else [])])


def node_child(name: str, arguments: list[str]) -> Child:
    """A node of this program as a child process."""
    # -P: a file called like one of ours in the current directory must not be imported in its place.
    argv = (sys.executable, "-P", "-m", "fsl_async.cli", *arguments)
    # One thread each: the clients share the cores, and threads that wait for each other cost more than they bring.
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    # What a site lets out (site.toml beside its keys) is not meant for nodes that are all on this machine.
    return Child(name, argv, env={**threads, "FSL_KEYS": str(NO_KEYS)})
