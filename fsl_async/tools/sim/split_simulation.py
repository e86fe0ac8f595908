"""`fsl-node sim --split METHOD`.

Parameter server, split server and clients of a method, under a virtual clock.

As `fsl_async.tools.sim.simulation` for pretraining: all is production code but the network, the
clock, the disk and the size of the model (`split_training`). Two networks, one for each server,
with the same faults; the split server is killed like the parameter server, and as often asked to
end while the run goes on. The invariants of pretraining hold for x_c; those of split learning are
checked after every event, values of tensors after every call of the split server's training.

- An upload is trained at most once in the lineage of a split server: uploads in a checkpoint, and
  those trained since.
- Every upload whose outcome a client received is in the ledger: trained, declined, or dropped with
  a dead server.
- Progress and tensors of a checkpoint are of one moment.
- An auxiliary model has one lineage: a version number means one content, and a client holds the
  content that the split server made.
- A split server that is asked to end while the run goes on ends no client's part, and loses nothing
  it trained.
- Replicas are averaged over the clients that reported the round done, before an upload of a later
  one is trained.
- Per client, uploads that are not trained and answers that are kept are at most `in_flight`; the
  buffer is bounded.
- Neither side sends what the other one refuses as a violation of the protocol.
- Bytes by category are the streams' payloads: without faults, both sides count the same.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from attrs import evolve, field, frozen, mutable

import fsl_transport as tp
from fsl_async.accounting.traffic import Traffic
from fsl_async.nodes.client.shell import ClientShell
from fsl_async.nodes.client.split_shell import Facts, SplitClientShell
from fsl_async.nodes.runtime import Journal
from fsl_async.nodes.split_server.shell import SplitServerShell, Workers
from fsl_async.nodes.split_streams import Formats
from fsl_async.nodes.wire import Welcome
from fsl_async.roles.machine import DrainAsked, Effect, Event, Finish, Note, TrainingEnded
from fsl_async.roles.split import effects as split
from fsl_async.roles.split import events as sev
from fsl_async.roles.split.client import SplitClientMachine
from fsl_async.roles.split.events import UploadKey
from fsl_async.roles.split.methods import SplitRules, method_of
from fsl_async.roles.split.peers import Peer
from fsl_async.roles.split.server import SplitServerMachine
from fsl_async.roles.sync.client import ClientMachine, ClientRules
from fsl_async.roles.sync.ps import ParameterServerMachine
from fsl_async.store.memory_files import MemoryDisk, MemoryFiles
from fsl_async.tools.sim.counting import VirtualWorker
from fsl_async.tools.sim.simulation import (
    LONGEST_END_S,
    SERVER_NAME,
    STEP_S,
    TOKENS_PER_STEP,
    Simulation,
    SimulationSettings,
)
from fsl_async.tools.sim.split_training import (
    BUFFER_SAMPLES,
    START,
    STEPS,
    CheckedTraining,
    RoundLearner,
    SplitLineage,
)
from fsl_async.tools.sim.world import CheckedMachine, Process, ProcessClock

SPLIT_NAME = "split"
SPLIT_GOODBYE_S = 0.5
"""Between the last effect of a split server and the end of its process."""
ARCHITECTURE = {"method": "", "cut": "1", "client": "c", "server": "s"}
FORMATS = Formats("fp32", "fp32", "fp32")
"""They keep every bit, so that what arrives can be compared with what was sent."""


@frozen
class SplitSettings:
    """What to simulate beyond `SimulationSettings`."""

    rules: SplitRules = field(factory=SplitRules)
    round_cap_s: float = 20 * STEPS * STEP_S


@mutable
class SplitInvariants:
    """What happened in split learning, and the violations found."""

    rules: SplitRules
    lineage: SplitLineage
    violations: list[str]
    auxiliary: dict[tuple[str, int], bytes] = field(factory=dict)
    settled: dict[UploadKey, str] = field(factory=dict)  # as clients received it
    done: dict[int, dict[str, int]] = field(factory=dict)  # round -> client -> samples

    def violated(self, text: str, now: float) -> None:
        """Record a violation."""
        self.violations.append(f"at {now:.3f} s: {text}")

    def after_server(
        self,
        machine: SplitServerMachine,
        training: CheckedTraining,
        event: Event,
        effects: list[Effect],
        now: float,
    ) -> None:
        """Check what an event of the split server may have touched."""
        if isinstance(event, sev.Aligned) and not event.problem:
            made = self.lineage.auxiliary[event.client]
            if self.auxiliary.setdefault((event.client, made[0]), made[1]) != made[1]:
                self.violated(f"version {made[0]} of {event.client} has two contents", now)
        if isinstance(event, sev.RoundDoneReceived):
            done = self.done.setdefault(event.round, {})
            if done.setdefault(event.peer, event.samples) != event.samples:
                self.violated(f"{event.peer} reports round {event.round} with other samples", now)
        self._bounded(
            machine, training, machine.peers.get(getattr(event, "peer", "")), effects, now
        )
        for effect in effects:
            if isinstance(effect, split.TrainUpload):
                self._averaged_before(machine, effect.key, now)
            elif isinstance(effect, split.AverageReplicas):
                done = self.done.get(effect.round, {})
                if any(done.get(name) != n for name, n in effect.samples.items()):
                    self.violated(f"round {effect.round} averages unreported replicas", now)

    def _bounded(
        self,
        machine: SplitServerMachine,
        training: CheckedTraining,
        peer: Peer | None,
        effects: list[Effect],
        now: float,
    ) -> None:
        bound = machine.method.in_flight
        if peer is not None:
            counts = Counter(key.incarnation for key in peer.uploads)
            if any(count > bound for count in counts.values()):
                self.violated(f"{peer.name} has more than {bound} uploads here", now)
            if len(peer.answers) > bound:
                self.violated(f"more than {bound} answers are kept for {peer.name}", now)
            if training.buffered(peer.name) > BUFFER_SAMPLES:
                self.violated(f"the buffer of {peer.name} is not bounded", now)
        # The effects are carried out after this; one upload may be trained and not acknowledged
        # yet.
        here = sum(len(each.uploads) for each in machine.peers.values())
        here += sum(isinstance(effect, split.DropUpload) for effect in effects)
        if len(training.uploads) > here:
            self.violated("uploads are kept that the machine has forgotten", now)
        kept = sum(len(each.answers) for each in machine.peers.values())
        kept += sum(isinstance(effect, split.DropAnswer) for effect in effects)
        if len(training.answers) > kept + 1:
            self.violated("answers are kept that the machine has forgotten", now)

    def _averaged_before(self, machine: SplitServerMachine, key: UploadKey, now: float) -> None:
        if not machine.method.replicas:
            return
        done = [peer.book.done_round for peer in machine.peers.values()]
        if any(machine.averaged < number < key.round for number in done):
            self.violated(f"{key.text} is trained before the round before it is averaged", now)

    def after_client(
        self, machine: SplitClientMachine, learner: RoundLearner, event: Event, now: float
    ) -> None:
        """Check what an event of a client may have touched."""
        if isinstance(
            event, sev.UploadAcknowledged | sev.UploadAlreadyTrained | sev.AnswerReceived
        ):
            self.settled[event.key] = "trained"
        elif isinstance(event, sev.UploadDeclined) and event.code not in {"later", "ended"}:
            self.settled[event.key] = "declined"
        bound = machine.method.in_flight + machine.rules.retain
        if len(machine.sent) > bound or learner.split.kept > bound:
            self.violated(f"{machine.name} keeps more than {bound} uploads", now)
        # The effects of AuxiliaryReceived are carried out after this.
        if not isinstance(event, sev.AuxiliaryReceived):
            version = machine.auxiliary
            made = self.auxiliary.get((machine.name, version), START.tobytes())
            if learner.split.auxiliary != made:
                self.violated(f"{machine.name} holds another version {version}", now)

    def ended(self, now: float) -> None:
        """Check at the end that the ledger has the outcome of every settled upload."""
        fates = self.lineage.fates
        for key, received in self.settled.items():
            fate = fates.get(key)
            if fate is None or (received == "declined" and fate != "declined"):
                self.violated(
                    f"a client received that {key.text} is {received}; ledger: {fate}", now
                )


@frozen
class _Client:
    """A client's process, as far as its session with the split server needs it."""

    name: str
    incarnation: int
    clock: ProcessClock
    worker: VirtualWorker
    rng: random.Random
    learner: RoundLearner


class SplitSimulation(Simulation):
    """A simulated run; `invariants`, `split_invariants` and `counts` hold the result."""

    def __init__(
        self,
        settings: SimulationSettings,
        split_settings: SplitSettings,
        *,
        keep_journal: Journal | None = None,
    ) -> None:
        super().__init__(settings, keep_journal=keep_journal)
        self.split_settings = split_settings
        self.method = method_of(split_settings.rules)
        first = settings.clients if split_settings.rules.lockstep else 1
        self._rules = evolve(
            self._rules,
            trigger=self.method.trigger,
            round_cap_s=split_settings.round_cap_s,
            min_clients=first,
        )
        self.split_network = tp.MemNetwork(
            self.scheduler, settings.seed + 1, self.network_conditions
        )
        self.split_disk = MemoryDisk()
        self.split_files = MemoryFiles(self.split_disk)
        """The disk as the newest split server sees it."""
        self.lineage = SplitLineage()
        self.split_invariants = SplitInvariants(
            split_settings.rules, self.lineage, self.invariants.violations
        )
        self.client_traffic, self.server_traffic = Traffic(), Traffic()
        self.split_process: tuple[ProcessClock, SplitServerShell] | None = None
        self.split_clients: dict[str, SplitClientShell] = {}
        self.learners: dict[str, RoundLearner] = {}
        self._split_launched = False
        self._left_in_order = False  # the last split server
        self.architecture = {**ARCHITECTURE, "method": split_settings.rules.method}

    # --- processes ---

    def _launch_server(self) -> None:
        super()._launch_server()
        if self.method.has_server and not self._split_launched:
            self._split_launched = True
            self._launch_split()
            self._plan(self.profile.server_kill_every_s, self._kill_split)
            self._plan(self.profile.server_kill_every_s, self._ask_split)

    def _launch_split(self) -> None:
        clock = ProcessClock(self.scheduler)
        incarnation = self._next_incarnation()
        machine = SplitServerMachine(self.split_settings.rules, self.architecture)
        self.split_files = MemoryFiles(self.split_disk)
        training = CheckedTraining(machine.method, self.split_files, self.lineage)

        def check(event: Event, effects: list[Effect], now: float) -> None:
            self.counts.events += 1
            if isinstance(event, sev.SplitRecovered) and event.lost and self._left_in_order:
                self.invariants.violated("a split server that ended in order lost uploads", now)
            self.split_invariants.after_server(machine, training, event, effects, now)

        def listener(take: Callable[[tp.TransportEvent], None]) -> tp.ListenerEndpoint:
            return tp.ListenerEndpoint(
                self.split_network.listener(SPLIT_NAME),
                clock,
                self._transport,
                take,
                SPLIT_NAME,
                incarnation=incarnation,
                rng=random.Random(f"{self.settings.seed}/split/{incarnation}"),  # noqa: S311
            )

        shell = SplitServerShell(
            machine,
            training,
            listener,
            workers=Workers(*(self._worker(clock, name) for name in ("code", "train", "write"))),
            formats=FORMATS,
            traffic=self.server_traffic,
            scheduler=clock,
            journal=self.journal,
            say=self._split_note,
            finished=lambda effect: self._split_left(clock, machine, effect),
        )
        shell.node.machine = CheckedMachine(machine, check)
        self.split_process = (clock, shell)
        shell.start()
        for name, peer in machine.peers.items():
            if peer.incarnation >= 0:
                shell.endpoint.remember(name, peer.incarnation)

    def _split_note(self, note: Note) -> None:
        """A line of a split server, or of a client about one."""
        if "broke the protocol" in note.text:
            self.invariants.violated(note.text, self.scheduler.time())

    def _launch_client(self, name: str) -> None:
        clock = ProcessClock(self.scheduler)
        incarnation = self._next_incarnation()
        machine = ClientMachine(ClientRules(), name, incarnation)
        rng = random.Random(f"{self.settings.seed}/{name}/{incarnation}")  # noqa: S311
        self.split_clients.pop(name, None)

        def feed(event: Event) -> None:
            shell.node.feed(event)
            if isinstance(event, TrainingEnded):
                feed_split(event)

        def feed_split(event: Event) -> None:
            if name in self.split_clients:
                self.split_clients[name].feed(event)

        learner = RoundLearner(
            clock,
            feed,
            feed_split,
            self.method,
            self.lineage,
            name=name,
            incarnation=incarnation,
            step_s=rng.uniform(0.5, 1.5) * STEP_S,
            tokens_per_step=TOKENS_PER_STEP,
            initial=rng.getrandbits(40),
        )
        worker = self._worker(clock, name)

        def check(event: Event, effects: list[Effect], now: float) -> None:
            self.counts.events += 1
            self.invariants.after_client(machine, learner, event, effects, now)

        def dialer(take: Callable[[tp.TransportEvent], None]) -> tp.DialerEndpoint:
            return tp.DialerEndpoint(
                self.network.dialer(name, SERVER_NAME),
                clock,
                self._transport,
                take,
                name,
                incarnation=incarnation,
                rng=rng,
            )

        def welcomed(welcome: Welcome) -> None:
            if self.method.has_server and name not in self.split_clients:
                facts = Facts(welcome.run, welcome.shard, self.architecture)
                self._open_split(_Client(name, incarnation, clock, worker, rng, learner), facts)

        shell = ClientShell(
            machine,
            learner,
            dialer,
            worker=worker,
            scheduler=clock,
            journal=self.journal,
            say=lambda _: None,
            finished=lambda _: self._gone(name),
            welcomed=welcomed,
            end_training=lambda _: learner.stop(),
            on_end=feed_split,
        )
        shell.node.machine = CheckedMachine(machine, check)
        self.processes[name] = Process(clock, shell)
        self.learners[name] = learner
        shell.dial()
        clock.call_at(clock.time() + rng.uniform(2.0, 15.0), learner.attach)

    def _open_split(self, client: _Client, facts: Facts) -> None:
        """A client's session with the split server, once the parameter server has welcomed it."""
        name, learner = client.name, client.learner
        machine = SplitClientMachine(self.split_settings.rules, name, client.incarnation)

        def check(event: Event, _: list[Effect], now: float) -> None:
            self.counts.events += 1
            self.split_invariants.after_client(machine, learner, event, now)

        def dialer(take: Callable[[tp.TransportEvent], None]) -> tp.DialerEndpoint:
            return tp.DialerEndpoint(
                self.split_network.dialer(name, SPLIT_NAME),
                client.clock,
                self._transport,
                take,
                name,
                incarnation=client.incarnation,
                rng=client.rng,
            )

        def finished(effect: Finish) -> None:
            if effect.exit_code:
                self.invariants.violated(f"{name} gave up: {effect.reason}", self.scheduler.time())

        shell = SplitClientShell(
            machine,
            learner.split,
            dialer,
            facts=facts,
            formats=FORMATS,
            worker=client.worker,
            traffic=self.client_traffic,
            scheduler=client.clock,
            journal=self.journal,
            say=self._split_note,
            finished=finished,
        )
        shell.node.machine = CheckedMachine(machine, check)
        self.split_clients[name] = shell
        shell.dial()

    # --- faults and the end ---

    def _kill(self, name: str) -> bool:
        killed = super()._kill(name)
        if killed and name != SERVER_NAME:
            self.split_network.kill(name)
        return killed

    def _kill_split(self) -> None:
        if not self._calm and self.split_process is not None:
            self.counts.fault("split server killed")
            self._end_split_process(self.split_process[0])
            self._left_in_order = False
        self._plan(self.profile.server_kill_every_s, self._kill_split)

    def _ask_split(self) -> None:
        """SIGTERM: it ends in good order, and another process goes on in its folder."""
        if not self._calm and self.split_process is not None:
            self.counts.fault("split server asked to end")
            self.split_process[1].node.feed(DrainAsked("SIGTERM"))
        self._plan(self.profile.server_kill_every_s, self._ask_split)

    def _split_left(self, clock: ProcessClock, machine: SplitServerMachine, effect: Finish) -> None:
        if effect.exit_code:
            text = f"the split server failed: {effect.reason}"
            self.invariants.violated(text, self.scheduler.time())
        if not machine.shutdown.leaves and not self._ending:
            self.invariants.violated("the split server ended before its run", self.scheduler.time())
        elif machine.shutdown.leaves:
            self._at(SPLIT_GOODBYE_S, lambda: self._split_gone(clock))

    def _split_gone(self, clock: ProcessClock) -> None:
        if self.split_process is not None and self.split_process[0] is clock:
            self._end_split_process(clock)
            self._left_in_order = True

    def _end_split_process(self, clock: ProcessClock) -> None:
        clock.alive = False
        self.split_files.die()
        self.split_network.kill(SPLIT_NAME)
        self.split_process = None
        self._at(self._chance.uniform(*self.profile.server_return_s), self._launch_split)

    def _reset(self, name: str) -> None:
        if name in self.processes and not self._calm:
            self.split_network.reset(name, SPLIT_NAME)
        super()._reset(name)

    def _cut(self, name: str) -> None:
        if not self._calm:
            self.split_network.cut(name, SPLIT_NAME)
        super()._cut(name)

    def _heal(self, name: str) -> None:
        self.split_network.heal(name, SPLIT_NAME)
        super()._heal(name)

    def _end(self) -> None:
        """End the run: no new faults; the parameter server ends it, and the split server follows
        its clients.
        """
        self._calm = True
        calm_s = self.scheduler.time() + self.profile.longest_s
        give_up_s = calm_s + LONGEST_END_S
        while not self.invariants.violations and self.scheduler.time() < give_up_s:
            self.scheduler.run_until(self.scheduler.time() + self.settings.heartbeat_every_s)
            server = self.processes.get(SERVER_NAME)
            here = len(self.processes) + len(self._ended) > len(self.names)
            if server is None or not here or self.scheduler.time() <= calm_s:
                continue
            machine = server.shell.machine
            assert isinstance(machine, ParameterServerMachine)
            if not machine.end.asked:
                self._ending = True
                server.shell.node.feed(DrainAsked("the simulated time is over"))
            over = self.split_process is None or self.split_process[1].machine.run_over
            if len(self._ended) == len(self.names) and over:
                break
        now = self.scheduler.time()
        if self.invariants.violations:
            return
        for name in self.names:
            if name not in self._ended:
                self.invariants.violated(f"{name} did not end with its run", now)
        if self.split_process is not None and not self.split_process[1].machine.run_over:
            self.invariants.violated("the split server did not end with its run", now)
        for key in self.disk.pending:
            self.invariants.violated(
                f"acknowledged delta {key.text} is not in the last version", now
            )
        self.split_invariants.ended(now)

    def split_facts(self) -> dict[str, Any]:
        """What happened at the split server."""
        fates = Counter(self.lineage.fates.values())
        return {
            "method": self.split_settings.rules.method,
            "mode": "lockstep" if self.split_settings.rules.lockstep else "free",
            "uploads": dict(sorted(fates.items())),
            "checkpoints": self.lineage.sealed,
            "bytes_by_category": {
                "_".join(place).replace(" ", "_"): size
                for place, size in sorted(self.server_traffic.payload.items())
            },
        }


def simulate(
    settings: SimulationSettings, rules: SplitRules, *, keep_journal: Journal | None = None
) -> SplitSimulation:
    """Make a simulation of a method; `run` it."""
    return SplitSimulation(settings, SplitSettings(rules), keep_journal=keep_journal)


__all__ = ["SplitInvariants", "SplitSettings", "SplitSimulation", "simulate"]
