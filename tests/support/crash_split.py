"""Simulated runs of split learning that are killed at chosen effects.

A configuration of `fsl_async.tools.sim.split_simulation`.
"""

from __future__ import annotations

from attrs import evolve
from crash_point import Killed, Point, Points, Scheduler, WatchedWorker

from fsl_async.config.settings_training import SplitConfig
from fsl_async.roles.machine import DeclineStream, DrainAsked, Refuse
from fsl_async.roles.split import effects as split
from fsl_async.roles.split import events as ev
from fsl_async.roles.split import messages as msg
from fsl_async.roles.split.messages import UploadKey
from fsl_async.tools.sim.settings import FaultProfile, SimulationSettings
from fsl_async.tools.sim.simulation import SERVER_NAME
from fsl_async.tools.sim.split_server import SPLIT_NAME
from fsl_async.tools.sim.split_simulation import SplitSimulation
from fsl_async.tools.sim.world import SilentJournal

_RULES = SplitConfig(upload_every=3, align_every=2)
KINDS = {
    "sl": evolve(_RULES, method="sl"),
    "splitfed-v1": evolve(_RULES, method="splitfed-v1"),
    "u-shape": evolve(_RULES, method="splitfed-v2", labels_at_home=True),
    "fsl-sage": evolve(_RULES, method="fsl-sage"),
    "lockstep": evolve(_RULES, method="fsl-sage", mode="lockstep"),
}
HOURS = 0.04
RETURN_S = 3.0
ASKED_S = 70.0
LOSSY = FaultProfile(
    client_return_s=(1.0, 2.0),
    server_return_s=(1.0, 2.0),
    partition_s=(1.0, 2.0),
    reset_every_s=15.0,
    delay_s=0.3,
    jitter_s=0.3,
    drop=0.02,
    duplicate=0.02,
    reorder=0.05,
)
"""Messages are lost, duplicated and late, and connections break; processes die only at the
point.
"""


WAITS = "the split server did not end with its run"
"""Not counted: no client had a session with it when the run ended, so none sent it the end, and in
the simulation the parameter server does not (docs/FAULTS.md).
"""


class CrashSplit(SplitSimulation):
    """A simulation with crash points around its effects."""

    def __init__(self, kind, point=None):
        settings = SimulationSettings(3, HOURS, 6, LOSSY, every_s=30.0)
        super().__init__(settings, KINDS[kind], keep_journal=SilentJournal())
        self.scheduler.__class__ = Scheduler
        self.points = Points(point)
        self.rare = set()
        self.is_last = False

    def _split_server(self, files):
        machine, training = super()._split_server(files)
        machine.checkpoints.every = 6
        return machine, training

    def run(self, progress=None):
        """Run, and ask the split server to end in the middle: another one goes on in its folder."""
        self._at(ASKED_S, self._ask_split)
        super().run(progress)

    def die(self, name):
        """Kill a process as kill -9 does; a few seconds later it is launched again."""
        if name == SPLIT_NAME:
            # The next one would wait for clients that never come: it is not started again.
            self.is_last = self.split_run_over
            self._end_split(in_order=False)
        elif self._kill(name):
            again = (
                self._launch_server if name == SERVER_NAME else lambda: self._launch_client(name)
            )
            self._at(RETURN_S, again)

    def _worker(self, clock, name):
        made = super()._worker(clock, name)
        owner = SPLIT_NAME if name in {"code", "train", "write"} else name
        role = {SERVER_NAME: "ps", SPLIT_NAME: "split"}.get(owner, "client")
        return WatchedWorker(clock, made.cost_s, self.points, role, lambda: self.die(owner))

    def _launch_server(self):
        try:
            super()._launch_server()
        except Killed:
            return
        node = self.processes[SERVER_NAME].shell.node
        self.points.watch(node, "ps", lambda: self.die(SERVER_NAME))
        feed = node.feed

        def later(event, cause=None):
            """Schedule the request for the end: outside the scheduler nothing catches `Killed`."""
            if isinstance(event, DrainAsked):
                self.scheduler.call_at(self.scheduler.time(), feed, event)
            else:
                feed(event, cause)

        node.feed = later

    def _launch_split(self):
        if self.is_last:
            return
        super()._launch_split()
        shell = self.split_shell
        self.points.watch(shell.node, "split", lambda: self.die(SPLIT_NAME))
        self._rare_effects(shell)

    def _rare_effects(self, shell):
        """Cause, once each: a failed alignment, a hello during shutdown, and rare effects."""
        training = shell.training
        align, handle = training.align, shell.node.machine.handle

        def failing(effect):
            first = effect.client not in training.lineage.auxiliary
            if first or effect.client in self.rare:
                return align(effect)
            self.rare.add(effect.client)
            return ev.Aligned(effect.client, effect.version, "its weights became infinite")

        def more(event, now):
            if event.topic is msg.SplitHello and "hello" not in self.rare:
                self.rare.add("hello")
                return [Refuse(event.peer, "leaving", "about to end")]
            effects = handle(event, now)
            if isinstance(event, ev.UploadTrained) and "effects" not in self.rare:
                self.rare.add("effects")
                effects += [
                    Refuse("nobody", "run", "another run"),
                    DeclineStream("nobody", "stream", "not yours"),
                    split.DropUpload(UploadKey("nobody", 1, 0, 0)),
                    split.ForgetSteps("nobody"),
                ]
            return effects

        training.align, shell.node.machine.handle = failing, more

    def _launch_client(self, name):
        super()._launch_client(name)
        self.points.watch(self.processes[name].shell.node, "client", lambda: self.die(name))

    def _welcomed(self, name, welcome):
        before = self.split_clients.get(name)
        super()._welcomed(name, welcome)
        opened = self.split_clients.get(name)
        if opened is not before:
            self.points.watch(opened.node, "client", lambda: self.die(name))


def passed(kind):
    """Run without a crash, which must find no violation; returns all points passed."""
    simulation = CrashSplit(kind)
    simulation.run()
    assert simulation.violations == [], simulation.violations
    return simulation.points.all()


def attempt(kind, point: Point):
    """Crash at this point; returns the violations."""
    simulation = CrashSplit(kind, point)
    simulation.run()
    fired = [] if simulation.points.fired else [f"{point} was not reached"]
    return fired + [one for one in simulation.violations if not one.endswith(WAITS)]


def spread(points, most):
    """Return at most `most` points of each place, evenly over the run."""
    places = {}
    for point in points:
        places.setdefault((point.role, point.name, point.stage), []).append(point)
    return [one for found in places.values() for one in found[:: -(-len(found) // most)]]
