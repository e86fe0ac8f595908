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

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import evolve

from fsl_async.config.settings_training import SplitConfig
from fsl_async.files.checksummed_json import from_checksummed
from fsl_async.files.memory_files import MemoryFiles
from fsl_async.nodes.client.split_shell import Facts
from fsl_async.nodes.runtime import Journal
from fsl_async.nodes.split_server.shell import SplitServerShell
from fsl_async.nodes.wire import Welcome
from fsl_async.observe.ledger_audit import LEDGER, audit_split, fates_of
from fsl_async.roles.machine import Effect, Event, Finish, Note, Received
from fsl_async.roles.split import effects as split
from fsl_async.roles.split import events as sev
from fsl_async.roles.split import messages as msg
from fsl_async.roles.split.client import RETAIN, SplitClientMachine
from fsl_async.roles.split.messages import UploadKey
from fsl_async.roles.split.methods import method_of
from fsl_async.roles.split.server import SplitServerMachine
from fsl_async.roles.split.server_state import Peer
from fsl_async.roles.sync.ps import ParameterServerMachine
from fsl_async.tools.sim.invariants import Lineage
from fsl_async.tools.sim.settings import STEP_S, SimulationSettings
from fsl_async.tools.sim.split_server import SplitServerSimulation
from fsl_async.tools.sim.split_training import (
    BUFFER_SAMPLES,
    SPLIT_DIR,
    START,
    STEPS,
    CheckedSplitTraining,
    CheckedTraining,
    RoundTraining,
    SplitLineage,
    client_of,
    exchanged,
)
from fsl_async.tools.sim.training import Launch, Trainer

ARCHITECTURE = {"method": "", "cut": "1", "client": "c", "server": "s"}
ROUND_CAP_S = 20 * STEPS * STEP_S


class SplitSimulation(SplitServerSimulation):
    """A simulated run; `violations` and `counts` hold the result."""

    kind = "split"

    def __init__(
        self,
        settings: SimulationSettings,
        split: SplitConfig,
        *,
        keep_journal: Journal | None = None,
    ) -> None:
        config = settings.config(
            f"sync.trigger={method_of(split).trigger}",
            f"sync.round_cap_s={ROUND_CAP_S}",
            f"sync.min_clients={settings.clients if split.lockstep else 1}",
            "outer.optimizer=average",
        )
        super().__init__(settings, keep_journal=keep_journal, config=config)
        # Formats that keep every bit, so that what arrives can be compared with what was sent. A
        # split server without clients waits for them: the simulation ends by its clock.
        split = evolve(split, alone_s=0.0, up="fp32", down="fp32", models="fp32")
        self.add_split_server(evolve(config, split=split), self.world.conditions)
        self.lineage = SplitLineage()
        self.manifest = exchanged(client_of(self.method), self.method).manifest
        self.invariants.lineage = Lineage(config.codec.spec_down, self.manifest)
        self.auxiliary: dict[tuple[str, int], bytes] = {}
        """Client and version -> content of its auxiliary model."""
        self.settled: dict[UploadKey, str] = {}
        """Outcomes of uploads as clients received them."""
        self.done: dict[int, dict[str, int]] = {}
        """Round -> client -> samples that it reported."""
        self.trainings: dict[str, RoundTraining] = {}
        self.architecture = {**ARCHITECTURE, "method": split.method}

    # --- processes ---

    def _split_server(self, files: MemoryFiles) -> tuple[SplitServerMachine, CheckedTraining]:
        machine = SplitServerMachine(self.split_config, self.architecture)
        return machine, CheckedTraining(machine.method, files, self.lineage, self.scheduler.time)

    def _split_launched(self, shell: SplitServerShell) -> None:
        self._check_events(shell.node, self._after_split, shell.machine, shell.training)

    def _split_says(self, note: Note) -> None:
        """A line of a split server, or of a client."""
        if "broke the protocol" in note.text:
            self._split_failed(note.text)

    def _client_says(self, name: str, note: Note) -> None:
        self._split_says(note)

    def _session_finished(self, name: str, finish: Finish) -> None:
        if finish.exit_code:
            self._split_failed(f"{name} gave up: {finish.reason}")

    def _training(self, launch: Launch) -> Trainer:
        on_split = functools.partial(self._run_over, launch.name)
        made = RoundTraining(launch, on_split, self.method, self.lineage)
        self.trainings[launch.name] = made
        return made

    def _welcomed(self, name: str, welcome: Welcome) -> None:
        """Open a client's session with the split server, once."""
        if not self.method.has_server or name in self.split_clients:
            return
        training = self.trainings[name]
        facts = Facts(welcome.run, welcome.shard, self.architecture)
        shell = self._open_session(name, training.incarnation, training.split, facts)
        self._check_events(shell.node, self._after_session, shell.machine, training.split)
        shell.dial()

    # --- checks ---

    def _after_split(
        self,
        machine: SplitServerMachine,
        training: CheckedTraining,
        event: Event,
        effects: list[Effect],
    ) -> None:
        """Check what an event of the split server may have touched."""
        if isinstance(event, sev.SplitRecovered) and event.lost and self.left_in_order:
            self.world.violated("a split server that ended in order lost uploads")
        if isinstance(event, sev.Aligned) and not event.problem:
            made = self.lineage.auxiliary[event.client]
            if self.auxiliary.setdefault((event.client, made[0]), made[1]) != made[1]:
                self.world.violated(f"version {made[0]} of {event.client} has two contents")
        match event:
            case Received(peer, msg.RoundDone(number, samples)):
                done = self.done.setdefault(number, {})
                if done.setdefault(peer, samples) != samples:
                    self.world.violated(f"{peer} reports round {number} with other samples")
        self._bounded(machine, training, machine.peers.get(getattr(event, "peer", "")), effects)
        for effect in effects:
            if isinstance(effect, split.TrainUpload):
                self._averaged_before(machine, effect.key)
            elif isinstance(effect, split.AverageReplicas):
                done = self.done.get(effect.round, {})
                if any(done.get(name) != n for name, n in effect.samples.items()):
                    self.world.violated(f"round {effect.round} averages unreported replicas")

    def _bounded(
        self,
        machine: SplitServerMachine,
        training: CheckedTraining,
        peer: Peer | None,
        effects: list[Effect],
    ) -> None:
        bound = machine.method.in_flight
        if peer is not None:
            counts = Counter(key.incarnation for key in peer.uploads)
            if any(count > bound for count in counts.values()):
                self.world.violated(f"{peer.name} has more than {bound} uploads here")
            if len(peer.answers) > bound:
                self.world.violated(f"more than {bound} answers are kept for {peer.name}")
            if training.buffered(peer.name) > BUFFER_SAMPLES:
                self.world.violated(f"the buffer of {peer.name} is not bounded")
        # The effects are carried out after this; one upload may be trained and not acknowledged
        # yet.
        here = sum(len(each.uploads) for each in machine.peers.values())
        here += sum(isinstance(effect, split.DropUpload) for effect in effects)
        if len(training.uploads) > here:
            self.world.violated("uploads are kept that the machine has forgotten")
        kept = sum(len(each.answers) for each in machine.peers.values())
        kept += sum(isinstance(effect, split.DropAnswer) for effect in effects)
        if len(training.answers) > kept + 1:
            self.world.violated("answers are kept that the machine has forgotten")

    def _averaged_before(self, machine: SplitServerMachine, key: UploadKey) -> None:
        if not machine.method.replicas:
            return
        done = [peer.progress.done_round for peer in machine.peers.values()]
        if any(machine.averaged < number < key.round for number in done):
            self.world.violated(f"{key.text} is trained before the round before it is averaged")

    def _after_session(
        self,
        machine: SplitClientMachine,
        training: CheckedSplitTraining,
        event: Event,
        effects: list[Effect],
    ) -> None:
        """Check what an event of a client's session may have touched."""
        match event:
            case Received(_, msg.Trained(key) | msg.AlreadyTrained(key)) | sev.VectorReceived(
                msg.GradientMeta(key)
            ):
                self.settled[key] = "trained"
            case Received(_, msg.UploadRefused(key, code)) if code not in {"later", "ended"}:
                self.settled[key] = "declined"
        bound = machine.method.in_flight + RETAIN
        if len(machine.sent) > bound:
            self.world.violated(f"{machine.name} keeps more than {bound} uploads")
        # A model that has just been received is installed after this.
        if not isinstance(getattr(event, "meta", None), msg.AuxiliaryMeta):
            version = machine.auxiliary
            made = self.auxiliary.get((machine.name, version), START.tobytes())
            if training.auxiliary != made:
                self.world.violated(f"{machine.name} holds another version {version}")

    def _check_ledger(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Check the ledger at the end: all settled uploads are in it, and all that is trained."""
        for problem in audit_split(lines, []).problems:
            self.world.violated(problem)
        fates = fates_of(lines)
        for key, received in self.settled.items():
            fate = fates.get(key)
            if fate is None or (received == "declined" and fate != "declined"):
                text = f"a client received that {key.text} is {received}; ledger: {fate}"
                self.world.violated(text)
        if {key for key, fate in fates.items() if fate == "trained"} != set(self.lineage.trained):
            self.world.violated("the ledger lists other uploads than the weights were trained on")

    # --- the end ---

    def run(self, progress: Callable[[float], None] | None = None) -> None:
        """See `Simulation.run`. No training thread is left."""
        try:
            super().run(progress)
        finally:
            for training in self.trainings.values():
                training.end()

    def _may_end(self, machine: ParameterServerMachine) -> bool:
        return True

    @property
    def has_ended(self) -> bool:
        """Whether all clients have ended, and the split server."""
        return super().has_ended and self.split_run_over

    def check_end(self) -> None:
        """See `Simulation.check_end`."""
        if self.violations:
            return
        for name in self.names:
            if name not in self._ended:
                self.world.violated(f"{name} did not end with its run")
        if not self.split_run_over:
            self.world.violated("the split server did not end with its run")
        self.invariants.run_ended({}, [])
        self._check_ledger(self._ledger())

    def _ledger(self) -> list[Mapping[str, Any]]:
        """Return the lines of the split server's ledger."""
        path = SPLIT_DIR / LEDGER
        if not self.split_files.exists(path):
            return []
        lines = self.split_disk.file(path).content.splitlines()
        return [members for line in lines if (members := from_checksummed(bytes(line)))]

    def facts(self) -> dict[str, Any]:
        """Events at the split server."""
        fates = Counter(fates_of(self._ledger()).values())
        return {
            "method": self.split_config.split.method,
            "mode": self.split_config.split.mode,
            "uploads": dict(sorted(fates.items())),
            "checkpoints": self.lineage.sealed,
            "bytes_by_category": {
                "_".join(place).replace(" ", "_"): size
                for place, size in sorted(self.server_traffic.payload.items())
            },
        }
