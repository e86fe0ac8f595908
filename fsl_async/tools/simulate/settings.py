"""Settings of a simulated run of a user's training function. Pure."""

from collections.abc import Iterable

from attrs import field, frozen

import fsl_transport as tp
from fsl_async.config.settings import Config
from fsl_async.errors import UsageError
from fsl_async.plan.link import parse_link
from fsl_async.tools.sim.world import PROFILES, FaultProfile

MOST_RATE = 1e6


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
        up, down = (
            tp.Conditions(
                delay_s=faults.delay_s if self.delay_s is None else self.delay_s,
                jitter_s=faults.jitter_s,
                bytes_per_s=rate,
                drop=1 - (1 - self.loss) * (1 - faults.drop),
                duplicate=faults.duplicate,
                reorder=faults.reorder,
            )
            for rate in (self.up, self.down)
        )
        return up, down


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
class SimulateSettings:
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


def check_simulated(config: Config, settings: SimulateSettings) -> None:
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
