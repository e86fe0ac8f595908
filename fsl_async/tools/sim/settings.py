"""Settings of simulations: faults, and the surroundings of clients. Pure.

In a fault profile mean times between faults are those of one client (or of one server); times are
exponential, as for independent failures. `storm` is a bad week: every client is killed about every
two hours, connections are reset, links are cut for minutes, messages are lost, duplicated, delayed
and reordered, and the parameter server is killed every few hours.
"""

from collections.abc import Iterable
from typing import Literal

from attrs import evolve, field, frozen

import fsl_transport as tp
from fsl_async.config.load import load
from fsl_async.config.recipes import with_implied
from fsl_async.config.settings import Config
from fsl_async.errors import UsageError
from fsl_async.plan.link import parse_link

HOUR_S = 3600.0
STEP_S = 3.0
"""Mean seconds of a step whose training is simulated, too."""
MOST_RATE = 1e6
Pace = Literal["called", "time", "steps", "speed", "own"]
"""When a client sends: when it is called, or by itself (`roles.sync.pacing`)."""


@frozen
class FaultProfile:
    """Mean seconds between faults (0 = never), seconds of recovery (from, to), probabilities per
    message.
    """

    client_kill_every_s: float = 0.0
    client_return_s: tuple[float, float] = (20.0, 120.0)
    reset_every_s: float = 0.0
    partition_every_s: float = 0.0
    partition_s: tuple[float, float] = (30.0, 600.0)
    server_kill_every_s: float = 0.0
    server_return_s: tuple[float, float] = (5.0, 60.0)
    disk_full_every_s: float = 0.0
    """A parameter server's disk is full: some calls in a row fail."""
    disk_kills: float = 0.0
    """Kills of the parameter server in the middle of a call to its disk."""
    power_cuts: float = 0.0
    """Deaths of the parameter server after which its disk has lost what was not synced."""
    server_pause_every_s: float = 0.0
    """Each group's parameter server is stopped for a while, as by SIGSTOP."""
    server_pause_s: tuple[float, float] = (5.0, 400.0)
    group_cut_every_s: float = 0.0
    """One parameter server is parted from another one, or from all others."""
    reduction_fails: float = 0.0
    """Reductions that end well at some members and with an error at the others."""
    reduction_differs: float = 0.0
    """Reductions that give another result at one member."""
    delay_s: float = 0.03
    jitter_s: float = 0.0
    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0

    @property
    def conditions(self) -> tp.Conditions:
        """The conditions of a link without limits."""
        return tp.Conditions(
            delay_s=self.delay_s,
            jitter_s=self.jitter_s,
            drop=self.drop,
            duplicate=self.duplicate,
            reorder=self.reorder,
        )

    @property
    def longest_s(self) -> float:
        """Seconds after the last fault within which every process and link is back."""
        longest_s = max(self.client_return_s[1], self.partition_s[1], self.server_return_s[1])
        return max(longest_s, self.server_pause_s[1] if self.server_pause_every_s else 0.0) + 60.0


PROFILES = {
    "none": FaultProfile(),
    "mild": FaultProfile(
        client_kill_every_s=12 * HOUR_S,
        reset_every_s=4 * HOUR_S,
        partition_every_s=24 * HOUR_S,
        server_kill_every_s=24 * HOUR_S,
        jitter_s=0.02,
        drop=0.0002,
        reduction_fails=0.02,
    ),
    "storm": FaultProfile(
        client_kill_every_s=2 * HOUR_S,
        reset_every_s=0.5 * HOUR_S,
        partition_every_s=4 * HOUR_S,
        server_kill_every_s=4 * HOUR_S,
        server_pause_every_s=6 * HOUR_S,
        group_cut_every_s=1 * HOUR_S,
        reduction_fails=0.3,
        reduction_differs=0.02,
        disk_full_every_s=2 * HOUR_S,
        disk_kills=0.5,
        power_cuts=0.5,
        jitter_s=0.1,
        drop=0.003,
        duplicate=0.002,
        reorder=0.005,
    ),
}


@frozen
class SimulationSettings:
    """Settings of a simulation. Times in seconds of virtual time."""

    clients: int = 100
    hours: float = 24.0
    seed: int = 0
    faults: str | FaultProfile = "storm"
    every_s: float = 600.0
    keep_versions: int = 3
    pace: Pace = "called"
    latest: bool = False
    """Whether versions use the newest delta of each other client again; with pace "own"."""
    groups: int = 1
    """Parameter servers; `clients` are those of each."""

    @property
    def profile(self) -> FaultProfile:
        """The faults, which may be given by name."""
        return PROFILES[self.faults] if isinstance(self.faults, str) else self.faults

    def config(self, *more: str) -> Config:
        """Return the run's production settings. more: `table.key=value`, as for `--set`."""
        steps = max(1, round(self.every_s / (4 * STEP_S)))
        heartbeat_s = min(60.0, self.every_s / 10)
        pace = {
            "called": [],
            "time": [],
            "steps": [f"sync.local_steps={steps}"],
            "speed": [f"sync.local_steps={steps}", "sync.pace=speed"],
            "own": ["sync.pace=own", "train.task=own"],
        }[self.pace]
        if self.latest:
            pace[1:1] = ["outer.aggregation=latest", "outer.optimizer=average"]
        elif self.pace == "own":
            pace.append("sync.weighting=anarchic")
        if self.pace != "called":
            pace.append("sync.trigger=buffer")
        given = load(
            None,
            [
                f"sync.every_s={self.every_s}",
                f"sync.clients={self.clients}",
                f"store.keep_versions={self.keep_versions}",
                f"session.heartbeat_every_s={heartbeat_s}",
                f"session.expire_after_s={3 * heartbeat_s}",
                "codec.up=fp32",  # so that a delta can be compared with the work of its steps
                *pace,
                *more,
            ],
        )
        return with_implied(given)


@frozen
class Link:
    """A client's link to the parameter server.

    up, down: bytes a second, 0 without a limit. delay_s: one way. loss: share of the messages that
    are lost; a chunk of weights is one message.
    """

    up: float = 0.0
    down: float = 0.0
    delay_s: float | None = None
    """None: that of the fault profile."""
    loss: float = 0.0

    def conditions(self, faults: FaultProfile) -> tuple[tp.Conditions, tp.Conditions]:
        """Return the conditions up and down, those of a fault profile added."""
        both = evolve(
            faults.conditions,
            delay_s=faults.delay_s if self.delay_s is None else self.delay_s,
            drop=1 - (1 - self.loss) * (1 - faults.drop),
        )
        return evolve(both, bytes_per_s=self.up), evolve(both, bytes_per_s=self.down)


def read_link(text: str) -> Link:
    """Read "RATE,DELAY[,LOSS%]" or "UP:DOWN,DELAY[,LOSS%]", like "10mbit:50mbit,30ms,0.1%".

    Raises UsageError.
    """
    rates, *rest = [part.strip() for part in text.split(",")]
    up, colon, down = rates.partition(":")
    delay, loss = (*rest, "", "")[:2]
    after = f",{delay}" if delay else ""
    first = parse_link(f"{up}{after}")
    second = parse_link(f"{down}{after}") if colon else first
    try:
        lost = float(loss.removesuffix("%") or 0) / 100
    except ValueError:
        lost = -1.0
    if len(rest) > 2 or not 0 <= lost < 0.9:
        raise UsageError(
            f"--link {text[:80]!r}: after rate and delay comes the loss, from 0% to less than 90%,"
            " as in 10mbit:50mbit,30ms,0.1%"
        )
    return Link(first.bits_per_s / 8, second.bits_per_s / 8, first.delay_s, lost)


def read_links(given: str | Iterable[str | Link] | None) -> tuple[Link, ...]:
    """Read the links of the first clients; None: links without limits. Raises UsageError."""
    links = [given] if isinstance(given, str) else list(given or ())
    return tuple(read_link(one) if isinstance(one, str) else one for one in links) or (Link(),)


def read_rates(given: str | Iterable[float] | None) -> tuple[float, ...]:
    """Read speeds of clients, like "1,1,0.3"; None: all alike. Raises UsageError."""
    if given is None:
        return (1.0,)
    try:
        rates = tuple(map(float, given.split(",") if isinstance(given, str) else given))
    except ValueError:
        rates = ()
    if not rates or not all(0 < rate <= MOST_RATE for rate in rates):
        raise UsageError("--rates: speeds of clients above 0, with commas between them: 1,1,0.3")
    return rates


@frozen(kw_only=True)
class TaskSettings:
    """The surroundings of the training function. Times in seconds of virtual time.

    rates, links: of the first clients, then of the next ones again.
    """

    clients: int
    faults: str = "none"
    hours: float | None = None
    """None: to the end by run.rounds, run.tokens or run.seconds."""
    step_seconds: float | None = None
    """Seconds of a step at rate 1; None: as long as the step took here."""
    workers: int = 1
    """Processes that compute; with one, clients share the process of the parameter server."""
    resident: int | None = None
    """Clients whose models are in memory at once; None: as many as the memory carries."""
    rates: tuple[float, ...] = field(default=None, converter=read_rates)
    links: tuple[Link, ...] = field(default=None, converter=read_links)

    def __attrs_post_init__(self) -> None:
        """Raise UsageError for a number that is too small."""
        for name in ("clients", "workers", "resident"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UsageError(f"simulate: {name}={value}: at least 1")
        for name in ("hours", "step_seconds"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise UsageError(f"simulate: {name}={value:g}: above 0")

    @property
    def profile(self) -> FaultProfile:
        """The faults by name. Raises UsageError."""
        found = PROFILES.get(self.faults)
        if found is None:
            raise UsageError(f"faults {self.faults!r}: {', '.join(PROFILES)}")
        return found

    def rate_of(self, number: int) -> float:
        """The speed of a client, by its number from 0."""
        return self.rates[number % len(self.rates)]

    def link_of(self, number: int) -> Link:
        """The link of a client, by its number from 0."""
        return self.links[number % len(self.links)]


def check_simulated(config: Config, settings: TaskSettings) -> None:
    """Raise UsageError for a run that cannot be simulated, or that has no end."""
    run = config.run
    if settings.workers > 1 and config.split.has_server:
        raise UsageError(
            "--workers: a split server trains with every client, so one process computes: leave"
            " --workers out"
        )
    if config.groups.servers:
        raise UsageError("groups.roster: sim --task simulates one parameter server, no groups")
    if config.train.decay_at:
        raise UsageError("train.decay_at is a date, and simulated time has none: set run.rounds")
    if settings.workers > 1 and settings.step_seconds is None:
        raise UsageError(
            "--workers: processes that share cores measure wrong times of steps: give"
            " --step-seconds, or leave --workers out"
        )
    if settings.workers > 1 and not all(
        link.conditions(settings.profile)[0].delay_s for link in settings.links
    ):
        raise UsageError(
            "--workers needs links with a delay, within which processes compute on their own: add"
            " one to --link, as in 10mbit,1ms, or leave --workers out"
        )
    if settings.hours is None and not (run.rounds or run.tokens or run.seconds):
        raise UsageError(
            "the simulated run has no end: add --hours H, or --set run.rounds=N (run.tokens,"
            " run.seconds)"
        )


def bytes_of(values: int) -> tuple[int, int]:
    """Return estimates of the memory for a model of fp32 values, in bytes.

    Of a client's exchange, three vectors, and of its training: weights, gradients and two moments
    of an optimizer.
    """
    return 4 * 3 * values, 4 * 4 * values
