"""The parts of a client that both of its threads use. Does not import torch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from attrs import define, field, frozen

from fsl_async.accounting.traffic import CountedLink, Traffic
from fsl_async.config import address as addresses
from fsl_async.config.address import Address
from fsl_async.config.settings import Config
from fsl_async.config.site_policy import SiteChoices, SitePolicy
from fsl_async.keys.dialling import HandshakeReports, curve_for
from fsl_async.keys.folder import KeysFolder
from fsl_async.nodes.capacity import check_client_files
from fsl_async.nodes.client.training_watch import Steps
from fsl_async.nodes.wire import Welcome
from fsl_async.observe.journal import JOURNAL, JournalWriter, TraceHash
from fsl_async.roles.sync.client import ClientMachine
from fsl_async.roles.sync.delta import EVALUATE, ROLL_OUT, TRAIN
from fsl_async.roles.sync.evaluator import EvaluatorMachine, RolloutMachine
from fsl_async.roles.sync.messages import Rollout
from fsl_transport.zmq.link import ZmqDialer

if TYPE_CHECKING:
    import fsl_transport as tp
    from fsl_async.learn.client.exchange import Exchange
    from fsl_async.learn.client.schedule import RunClock
    from fsl_async.process.stopper import Stopper
    from fsl_transport.zmq.curve import DialerCurve


class Meter(Steps, Protocol):
    """Counts what is trained (`fsl_async.learn.client.meter.Meter`)."""

    steps: int
    tokens: int

    @property
    def waited_s(self) -> float:
        """Seconds that training has waited for the network in a run by rounds."""
        ...

    def totals(self) -> dict[str, float]:
        """Counts alone."""

    def report(self) -> dict[str, float]:
        """The totals, and the running mean of each metric."""


class TrainingSide(Protocol):
    """Training as the loop's thread sees it: the thread of this process, or other processes."""

    @property
    def meter(self) -> Meter:
        """Counts of steps and tokens."""

    @property
    def clock(self) -> RunClock:
        """The run's progress."""

    @property
    def stopped(self) -> bool:
        """Whether the run has ended, or this client's part in it."""


MOST_ROLLOUTS = 512
"""Groups of answers that wait for the training thread; older ones give way."""
DELTAS_ONLY = SitePolicy()
_MACHINES = {TRAIN: ClientMachine, EVALUATE: EvaluatorMachine, ROLL_OUT: RolloutMachine}


@frozen
class ClientOptions(SiteChoices):
    """A site's options for its client."""

    server: str
    """Address of the parameter server."""
    name: str
    task: str | None = None
    """None: the built-in task."""
    data: str | None = None
    """Path of the built-in task's data; None: the built-in text, if the run allows it."""
    tokenizer: str | None = None
    """Tokenizer of the built-in pretraining: a path, or a name at the hub; None: bytes."""
    device: str | None = None
    """None: train.device."""
    threads: int | None = None
    """Threads of torch; None: train.threads."""
    run_dir: Path | None = None
    """Folder of the journal; None: no journal."""
    keys: KeysFolder | None = None
    """None: the default folder, if the address has a key."""
    policy: SitePolicy = DELTAS_ONLY
    """The kinds of data that may leave this site."""


@frozen
class Membership:
    """The parameter server's welcome, and its checked configuration."""

    welcome: Welcome
    config: Config


@define(eq=False)
class ClientParts:
    """The parts. Made by the training thread, the only one that uses `training`.

    Raises AddressError, KeysError, and UsageError if too few open files are allowed.
    """

    options: ClientOptions
    training: TrainingSide
    exchange: Exchange
    stop: Stopper
    log: Callable[[str], None]
    address: Address = field(init=False)
    keys: KeysFolder = field(init=False)
    curve: DialerCurve | None = field(init=False)
    """None: connections are not encrypted."""
    machine: ClientMachine = field(init=False)
    journal: JournalWriter | TraceHash = field(init=False)
    traffic: Traffic = field(factory=Traffic, init=False)
    rollouts: deque[Rollout] = field(factory=lambda: deque(maxlen=MOST_ROLLOUTS), init=False)
    """Answers of clients that roll out, for the training thread."""
    welcome: Future[Membership] = field(factory=Future, init=False)
    """Done with the first welcome."""

    def __attrs_post_init__(self) -> None:
        check_client_files()
        options = self.options
        self.address = addresses.parse(options.server)
        self.keys = options.keys or KeysFolder()
        self.curve = curve_for(self.address, self.keys) if self.address.key else None
        kind = _MACHINES[options.duty]
        self.machine = kind(options.name, time.time_ns())
        self.machine.version_sync.refuses_rollback = options.policy.refuses_rollback
        folder = options.run_dir
        self.journal = TraceHash() if folder is None else JournalWriter(folder / JOURNAL)

    def dial(
        self,
        scheduler: tp.Scheduler,
        server: Address,
        curve: DialerCurve | None,
        settings: tp.TransportSettings,
    ) -> tuple[CountedLink, HandshakeReports]:
        """A link to the parameter server or the split server, whose bytes `traffic` counts."""
        reports = HandshakeReports(
            server,
            curve.pair.public if curve is not None else "",
            self.options.name,
            scheduler=scheduler,
            note=self.journal.note,
            log=self.log,
        )
        dialer = ZmqDialer(server.tcp, self.options.name, settings, curve, reports)
        return CountedLink(dialer, self.traffic, at_client=True), reports
