"""Simulated runs with secure sums: production machines, store and exchange, with audited sites."""

# ruff: noqa: D102 - methods of the classes that they extend

import random

import numpy as np
from attrs import field, mutable
from secure_audit import Audit, audited

from fsl_async.learn.client.exchange import Exchange
from fsl_async.nodes.client.secure_side import SecureSide
from fsl_async.roles.machine import SERVER, Send
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.events import Recovered
from fsl_async.roles.sync.secure import Stage
from fsl_async.secure import masks
from fsl_async.secure.masking import Masking
from fsl_async.secure.site import RefusedError
from fsl_async.tools.sim import tune_simulation as sim
from fsl_async.tools.sim.training import WatchedExchange

SECURE = ["tune.secure=true", "sync.weighting=uniform"]
sim.SETTINGS |= {
    "secure": ["tune.method=lora", "tune.rule=fedit", "tune.rank=2", "codec.down=fp32", *SECURE],
    "secure zeroth": ["tune.method=zeroth", "tune.zo_history=8", *SECURE],
}


class RecordedMasking(Masking):
    """Keeps what each delta has sent, also after it is dropped."""

    def __init__(self):
        super().__init__()
        self.values = {}

    def encode(self, sequence, index, values):
        frame, lost = super().encode(sequence, index, values)
        if frame:
            self.values.setdefault(sequence, {})[index] = values - lost
        return frame, lost


class MaskedExchange(WatchedExchange):
    """Adds up what is sent under masks."""

    def configure(self, *given, **named):
        super().configure(*given, **named)
        if type(self.masking) is Masking:
            self.masking = RecordedMasking()

    def put_snapshot(self, sequence, snapshot, work):
        if not work.finite:  # the site finds it, and sends nothing
            self._training.sent_steps -= work.steps
        super().put_snapshot(sequence, snapshot, work)

    def drop_delta(self, sequence):
        delta = self._deltas.get(sequence)
        if delta is not None and delta.missing and self.masking.has_masks(sequence):
            self._sent.unsent = np.zeros(0)
        Exchange.drop_delta(self, sequence)

    def _coded(self, sequence, index):
        delta, sent = self._deltas.get(sequence), self._sent
        is_new = delta is not None and delta.coded[index] is None
        frame = Exchange._coded(self, sequence, index)
        counts = sequence >= sent.first and len(sent.unsent) and not self.only_scalars
        if frame and is_new and counts:
            values = self.masking.values[sequence][index]
            sent.unsent[slice(*self.manifest.chunk_range(index))] -= values
        return frame


class SecureTraining(sim.AdapterTraining):
    """As of adapters."""

    exchange_type = MaskedExchange


class SecureScalars(sim.ScalarTraining):
    """As of zeroth order."""

    exchange_type = MaskedExchange


@mutable
class SecureLineage(sim.RoundLineage):
    """Versions that are the mean of what their sites have sent under masks."""

    masked: dict = field(factory=dict)
    """Client and incarnation -> its masking."""

    def sent(self, key):
        found = self.masked[key.client, key.incarnation].values.get(key.sequence)
        return None if found is None else np.concatenate([found[at] for at in sorted(found)])

    def _check(self, record, held):
        wrong, sums = [], {}
        for one in record.merged:
            values = self.sent(one.key)
            if one.key in self.merged:
                self.doubled += 1
                wrong.append(f"delta {one.key.text} is merged twice")
            if values is None or not one.weight or one.key.base != record.version - 1:
                return [*wrong, f"delta {one.key.text} does not belong there"]
            sums[one.key] = values
        if len(sums) < 3:
            wrong.append(f"version {record.version} is of {len(sums)} deltas")
        return wrong + self._compare(record, sums, held)

    def _compare(self, record, values, held):
        made = self.weights[-1] - np.mean(list(values.values()), axis=0)
        if np.allclose(made, held, atol=1e-5):
            return []
        return [f"version {record.version} is not the mean of its sites"]


@mutable
class SecureScalarLineage(SecureLineage):
    """The same of scalars."""

    directions: object = field(kw_only=True)

    def _compare(self, record, values, held):
        mean = np.mean(list(values.values()), axis=0)
        wanted = self.directions.step(record.version - 1, mean).scalars
        if np.allclose(record.seeds.scalars, wanted, rtol=1e-5, atol=1e-9):
            return []
        return [f"the steps to version {record.version} are not the mean of its sites"]


class SecureSites:
    """The clients of a simulated run as audited sites. A mixin of `Simulation`."""

    is_zeroth, liar, fails = False, "", 0.0

    def watch_sites(self):
        """Audit what sites give away, and check versions against what they sent."""
        self.audit, self.lines = Audit(), []
        self.asked_again = 0
        """Sums that a restarted parameter server asked for again."""
        codec = self.config.codec.spec_down
        self.lineage = SecureLineage(codec, sim.ADAPTERS)
        if self.is_zeroth:
            directions = sim.directions_of(self.config)
            self.lineage = SecureScalarLineage(codec, sim.LARGE, directions=directions)
        self.invariants.lineage = self.lineage

    def _training(self, launch):
        kind = SecureScalars if self.is_zeroth else SecureTraining
        made = kind(
            launch.clock,
            launch.feed,
            step_s=launch.step_s(),
            chance=random.Random(launch.chance.getrandbits(64)),
            fails=self.fails,
        )
        self._newest = launch.name, launch.incarnation, made
        return made

    def _launch_client(self, name):
        super()._launch_client(name)
        _, incarnation, training = self._newest
        shell, chance = self.processes[name].shell, self._rng(name, incarnation, "keys")
        exchange = training.exchange
        self.lineage.masked[name, incarnation] = exchange.masking
        secret = self._rng(name, "long-term").randbytes(32)

        def known(found):
            for other, key in found.items():
                if key != masks.public_of(self._rng(other, "long-term").randbytes(32)):
                    raise RefusedError(f"{other} has another key")

        site = audited(self.audit, name, self.run_name, secret, known, chance.randbytes)

        def send(message):
            for one in self.lies(message, chance) if name == self.liar else [message]:
                shell.endpoint.send(SERVER, msg.to_wire(one))

        shell.secure = SecureSide(site, lambda: exchange.masking, send, self.lines.append)

    def lies(self, message, chance):
        """What a site that lies sends instead: other keys, shares of other sites, wrong ones."""
        names = [*self.names, "nobody"]
        rows = [[one, chance.randbytes(66)] for one in chance.sample(names, 4)]
        at = chance.choice([message.attempt, 1])
        lies = [
            msg.SecureKey(message.round, at, bytes(32), chance.randbytes(32)),
            msg.SecureShares(message.round, at, rows),
            msg.Unmasked(message.round, at, rows),
            message,
        ]
        return chance.sample(lies, 3)

    def _after_server(self, machine, event, effects):
        super()._after_server(machine, event, effects)
        answers = [one.message for one in effects if isinstance(one, Send)]
        for one in answers:
            if isinstance(one, msg.Accepted) and one.key not in self.lineage.merged:
                self.world.violated(f"{one.key.text} is accepted, and in no version")
        if isinstance(event, Recovered) and machine.secure.stage is Stage.ASKING:
            self.asked_again += 1

    def _server_says(self, note):
        super()._server_says(note)
        self.lines.append(note)


class SecureSimulation(SecureSites, sim.TuneSimulation):
    """A run whose sites are audited."""

    stuck_s = 600.0
    """A round that is void, because sites or the server died while a sum was opened, is lost."""

    def __init__(self, settings, mode, *, liar=""):
        super().__init__(settings, mode)
        self.liar, self.is_zeroth = liar, mode == "secure zeroth"
        self.fails = sim.CLIENT_FAILS if self._has_faults else 0.0
        self.watch_sites()
