"""A client process: training, exchange, machine, endpoint and loop.

Training stays in the calling thread; the loop, with the machine and the sockets, runs in a thread
of its own. They communicate through `learn.client.ports` and `learn.client.exchange`. So the same
code serves `fsl-node --role client`, where the thread runs a task, and `fsl_async.join(...)` in a
user's script.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import fsl_transport as tp
from fsl_async.config import address as addresses
from fsl_async.config.site_policy import METRICS
from fsl_async.keys.dialling import split_curve
from fsl_async.learn.client.exchange import Exchange
from fsl_async.learn.client.ports import Orders
from fsl_async.learn.client.probes import EvaluatorExchange
from fsl_async.learn.client.training import Training
from fsl_async.learn.split.remote import SplitTraining
from fsl_async.nodes.client.client_node import LoopSide
from fsl_async.nodes.client.parts import ClientOptions, ClientParts, Membership
from fsl_async.nodes.client.split_shell import Facts, SplitClientShell
from fsl_async.nodes.runtime import Worker
from fsl_async.process.stopper import Stopper
from fsl_async.roles.machine import Event, Finish, Note, TrainingEnded
from fsl_async.roles.split.client import SplitClientMachine
from fsl_async.roles.sync.delta import TRAIN
from fsl_async.roles.sync.events import TaskSays


def split_session(
    parts: ClientParts,
    member: Membership,
    training: SplitTraining,
    architecture: dict[str, str],
    *,
    worker: Worker,
    say: Callable[[Note], None],
    finished: Callable[[Finish], None],
) -> SplitClientShell:
    """Dial the split server. On the loop thread. Raises AddressError and KeysError."""
    loop = asyncio.get_running_loop()
    config, name = member.config, parts.options.name
    settings = config.transport()
    place = addresses.seen_from(config.split.server, parts.address.fsl)
    curve = split_curve(place, parts.keys, encrypted=parts.curve is not None)
    link, reports = parts.dial(loop, place, curve, settings)
    incarnation = parts.machine.incarnation

    def dialer(take: Callable[[tp.TransportEvent], None]) -> tp.DialerEndpoint:
        return tp.DialerEndpoint(
            link,
            loop,
            settings,
            reports.beside(take),
            name,
            incarnation=incarnation,
            role="split-client",
        )

    shell = SplitClientShell(
        SplitClientMachine(config, name, incarnation),
        training,
        dialer,
        facts=Facts(member.welcome.run, member.welcome.shard, architecture),
        worker=worker,
        scheduler=loop,
        journal=parts.journal,
        say=say,
        finished=finished,
        traffic=parts.traffic,
        shares_metrics=parts.options.policy.lets(METRICS),
    )
    shell.dial()
    return shell


class ClientRuntime(LoopSide):
    """The client as seen from the training thread: starts the loop's thread, and waits for it.

    Raises AddressError and KeysError. `wait_welcome` raises RefusedError when the parameter server
    refuses this client, and the stopper's error when asked to stop.
    """

    training: Training

    def __init__(
        self, options: ClientOptions, *, stop: Stopper, log: Callable[[str], None]
    ) -> None:
        orders = Orders()
        kind = Exchange if options.duty == TRAIN else EvaluatorExchange
        exchange = kind(orders, on_event=self._post)
        self.training = Training(orders, exchange)
        parts = ClientParts(options, self.training, exchange, stop, log)
        orders.rollouts, orders.say = parts.rollouts, lambda one: self._post(TaskSays(one))
        super().__init__(parts)
        self._thread.start()

    def open_split(self, training: SplitTraining, architecture: dict[str, str]) -> None:
        """Open the session with the split server. Called once, after the welcome."""
        assert self._node is not None
        node, parts = self._node, self._parts

        def opens(member: Membership, **of_the_loop: Any) -> SplitClientShell:
            return split_session(parts, member, training, architecture, **of_the_loop)

        node.loop.call_soon_threadsafe(node.open_split, opens)

    def post_split(self, event: Event) -> None:
        """Give the session with the split server an event of the training thread."""
        node = self._node
        if node is not None:
            with contextlib.suppress(RuntimeError):  # the loop has closed
                node.loop.call_soon_threadsafe(node.feed_split, event)

    def training_ended(self, error: str | None) -> None:
        """Report the end of training, and wait until the last delta has arrived or is given up."""
        if not (self._thread.is_alive() or self.ended.is_set()):  # forked: it is in the parent
            return
        self.training.meter.step_ended()  # the wait is no step that hangs
        self._post(TrainingEnded(error))
        while not self.ended.is_set():
            try:
                self.training.attend_for(0.5)  # the last weights are still to be copied
            except Exception as failure:  # noqa: BLE001 - no error may keep the process
                self._post(TrainingEnded(f"copying the last weights failed: {failure}"))
        self._thread.join()
        self._parts.journal.close()
