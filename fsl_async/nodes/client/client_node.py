"""The client's part on the loop's thread: machine, endpoint and shell. Does not import torch.

What trains is behind `TrainingSide`: the training thread of this process (`node`), or the ranks of
a torchrun (`gang`).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from attrs import frozen

import fsl_transport as tp
from fsl_async.accounting.sizes import Direction
from fsl_async.accounting.traffic import TrafficNotes
from fsl_async.config import address as addresses
from fsl_async.config.load import from_wire
from fsl_async.config.recipes import keeps_error
from fsl_async.config.settings import Config
from fsl_async.config.site_policy import ANSWERS, METRICS, receivers_of
from fsl_async.errors import AddressError, ExitCode, FslError, KeysError, RefusedError, one_line
from fsl_async.learn.client.exchange import Exchange
from fsl_async.learn.client.ports import RunFinishedError
from fsl_async.nodes.client.parts import ClientParts, Membership, TrainingSide
from fsl_async.nodes.client.shell import ClientShell
from fsl_async.nodes.client.training_watch import ProgressLines, TrainingWatch
from fsl_async.nodes.runtime import LoopLag, ThreadWorker
from fsl_async.nodes.wire import Welcome, count_weights
from fsl_async.process.memory import MemoryMark
from fsl_async.process.notices import slurm_job
from fsl_async.roles.machine import DrainAsked, Event, Finish, Note, TrainingEnded
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync.delta import ROLL_OUT, TRAIN
from fsl_async.store.deltas.seed_step import directions_of
from fsl_transport.loop import run as run_loop

if TYPE_CHECKING:
    from fsl_async.learn.client.exchange import Exchange
    from fsl_async.nodes.client.split_shell import SplitClientShell


@frozen
class Summary:
    """The result of a client's part in a run."""

    run: str
    name: str
    version: int
    steps: int
    tokens: int
    tokens_acknowledged: int
    reason: str
    seconds: float
    traffic: dict[str, Any]
    memory_grown: int
    """Peak of resident memory in bytes, without the libraries."""


def progress_words(progress: Mapping[str, float], counts: str = "tokens") -> str:
    """Return steps, loss and speed in words, from the fields of a heartbeat, as far as known.

    counts: what its tokens are; in split learning they are samples.
    """
    parts = [f"step {progress['step']:,.0f}"]
    if "loss" in progress:
        parts.append(f"loss {progress['loss']:.3g} (running mean)")
    if progress["tokens_per_s"]:
        parts.append(f"{progress['tokens_per_s']:,.0f} {counts}/s")
    return ", ".join(parts)


def configure_exchange(exchange: Exchange, config: Config) -> None:
    """Have a client code its deltas, and decode versions, as its run does."""
    exchange.configure(
        config.codec.spec_up,
        keeps_error=keeps_error(config),
        whole=config.split.sends_whole,
        threads=config.codec.threads,
        directions=directions_of(config),
        only_scalars=config.tune.method == "zeroth",
        is_secure=config.tune.secure,
    )


class LoopSide:
    """The client as seen from the thread that made it: the loop's thread, and its end.

    Raises AddressError and KeysError. `wait_welcome` raises RefusedError when the parameter server
    refuses this client, and the stopper's error when asked to stop.
    """

    training: TrainingSide

    def __init__(self, parts: ClientParts) -> None:
        self.options = parts.options
        self.finish: Finish | None = None
        self.ended = threading.Event()
        """Set once the loop's thread has ended."""
        self._parts = parts
        self._begun = time.monotonic()
        self._crash: BaseException | None = None
        self._node: ClientNode | None = None  # while there is a loop
        self._thread = threading.Thread(target=self._run, name="fsl-loop", daemon=True)

    # --- the thread that made it ---

    def wait_welcome(self) -> Membership:
        """Wait for the parameter server's welcome.

        Raises RunFinishedError if this client ended before that (refused, asked to stop);
        `raise_failure` after `training_ended` raises the reason.
        """
        while True:
            with contextlib.suppress(concurrent.futures.TimeoutError):
                return self._parts.welcome.result(timeout=0.5)
            if self.ended.is_set():
                self.raise_failure()
                raise RefusedError("ended before the parameter server answered")
            # Without training, no TrainingEnded would ever reach the machine.
            if self.training.stopped:
                raise RunFinishedError("ended before the parameter server welcomed this client")

    def raise_failure(self) -> None:
        """Raise the error that ended this client, if there was one."""
        crash = self._crash
        if isinstance(crash, tp.LocalError):  # a bug, and no line of the user's script is to blame
            text = one_line(f"{type(crash).__name__}: {crash} (this is a bug in fsl-async)")
            raise FslError(text, ExitCode.BUG) from crash
        if crash is not None:
            raise crash
        finish, stop = self.finish, self._parts.stop
        if finish is None or finish.exit_code == 0:
            return
        if finish.exit_code == ExitCode.BAD_INPUT:
            raise RefusedError(finish.reason)
        if stop.requested:
            raise stop.error(finish.reason)
        raise FslError(finish.reason, finish.exit_code)

    def summary(self) -> Summary:
        """The result."""
        machine, meter = self._parts.machine, self.training.meter
        return Summary(
            run=machine.run,
            name=self.options.name,
            version=machine.model_version,
            steps=meter.steps,
            tokens=meter.tokens,
            tokens_acknowledged=machine.tokens_acknowledged,
            reason=self.finish.reason if self.finish is not None else "",
            seconds=round(time.monotonic() - self._begun, 3),
            traffic=self._parts.traffic.as_dict(),
            memory_grown=MemoryMark.grown(),
        )

    # --- any thread ---

    def _post(self, event: Event) -> None:
        """Give the machine an event."""
        node = self._node
        if node is not None:
            with contextlib.suppress(RuntimeError):  # the loop has closed
                node.loop.call_soon_threadsafe(node.feed, event)

    # --- loop thread ---

    def _run(self) -> None:
        parts = self._parts
        try:
            run_loop(self._main())
        except BaseException as error:  # noqa: BLE001 - the training thread raises it
            self._crash = error
        finally:
            parts.exchange.stop()
            parts.journal.flush()  # the training thread may never close it
            self.ended.set()
            leaves = self.finish is not None and self.finish.exit_code == ExitCode.RELAUNCH
            if leaves and parts.machine.shutdown.training:
                # A preempted process cannot wait for the training thread's step.
                parts.stop.request(hard=True)

    async def _main(self) -> None:
        self._node = node = ClientNode(self._parts, self._set_finish)
        await node.run()

    def _set_finish(self, effect: Finish) -> None:
        self.finish = effect


class ClientNode:
    """The client's part on the loop's thread. ended: called with the first Finish."""

    def __init__(self, parts: ClientParts, ended: Callable[[Finish], None]) -> None:
        self.loop = loop = asyncio.get_running_loop()
        self._parts = parts
        self._ended = ended
        self._finished: asyncio.Future[Finish] = loop.create_future()
        self._worker = ThreadWorker(loop, "codec")
        self._lag = LoopLag(loop)
        self._traffic_notes = TrafficNotes(loop, parts.journal, parts.traffic)
        self._watch: TrainingWatch | None = None
        self._lines: ProgressLines | None = None
        self._split: SplitClientShell | None = None
        self._endpoint: tp.DialerEndpoint
        self._shares_metrics = parts.options.policy.lets(METRICS)
        loop.set_exception_handler(self._broken)
        self._shell = ClientShell(
            parts.machine,
            parts.exchange,
            self._dialer,
            worker=self._worker,
            scheduler=loop,
            journal=parts.journal,
            say=self._say,
            finished=self._finish,
            welcomed=self._welcomed,
            end_training=lambda _: parts.exchange.stop(),
            count=self._count_weights,
            on_end=self.feed_split,
            announced=parts.training.clock.announced,
            shares_metrics=self._shares_metrics,
            rollouts=parts.rollouts,
        )

    async def run(self) -> None:
        """Take part in the run until this client's Finish."""
        parts, loop = self._parts, self.loop

        def stop_asked(hard: bool) -> None:
            loop.call_soon_threadsafe(self._stop_asked, hard)

        unsubscribe = parts.stop.subscribe(stop_asked)
        self._note_start()
        try:
            self._shell.dial()
            await self._finished
        finally:
            unsubscribe()
            parts.journal.note("node_ended", loop.time(), **self._lag.summary())
            self._shell.node.close()
            self._lag.close()
            if self._split is not None:
                self._split.node.close()
                await self._split.endpoint.aclose()
            self._traffic_notes.close()
            if self._watch is not None:
                self._watch.close()
            if self._lines is not None:
                self._lines.close()
            await self._endpoint.aclose()
            self._worker.close()
            parts.exchange.pool.close()

    def feed(self, event: Event) -> None:
        """Give the machine an event; the split server's session gets the end of training too.

        A version that training has moved onto is preceded by a note of the costs up to it.
        """
        if isinstance(event, ev.Rebased):
            waited_s = round(self._parts.training.meter.waited_s, 6)
            self._traffic_notes.write(version=event.version, waited_s=waited_s)
        self._shell.node.feed(event)
        if isinstance(event, TrainingEnded):
            self.feed_split(event)

    def open_split(self, opens: Callable[..., SplitClientShell]) -> None:
        """Open the session with the split server; if it cannot be dialed, end this client."""
        try:
            self._split = opens(
                self._parts.welcome.result(),
                worker=self._worker,
                say=self._say,
                finished=self._split_finished,
            )
        except (AddressError, KeysError) as error:
            self._split_finished(Finish(error.message, int(ExitCode.BAD_INPUT)))

    def feed_split(self, event: Event) -> None:
        """Give the session with the split server an event of training, or the end of the run."""
        if self._split is not None:
            self._split.node.feed(event)

    def _dialer(self, take: Callable[[tp.TransportEvent], None]) -> tp.DialerEndpoint:
        parts = self._parts
        settings = tp.TransportSettings()  # until the welcome brings the run's
        link, reports = parts.dial(self.loop, parts.address, parts.curve, settings)
        self._endpoint = endpoint = tp.DialerEndpoint(
            link,
            self.loop,
            settings,
            reports.beside(take),
            parts.options.name,
            incarnation=parts.machine.incarnation,
            beat_payload=lambda _: self._beat(),
        )
        return endpoint

    def _beat(self) -> dict[str, float]:
        """The heartbeat's payload: training's progress, metrics if the site allows, and hangs."""
        meter = self._parts.training.meter
        going = meter.report() if self._shares_metrics else meter.totals()
        hung = {} if self._watch is None else self._watch.summary()
        return {**going, **self._lag.summary(), **hung}

    def _note_start(self) -> None:
        job = slurm_job(os.environ)
        slurm = {} if job is None else {"slurm_job": job.job, "requeues": job.restarts}
        here = {"pid": os.getpid(), "host": socket.gethostname()}
        name, server = self._parts.options.name, self._parts.address.tcp
        started = {"role": "client", "name": name, "server": server, **here, **slurm}
        self._parts.journal.note("node_started", self.loop.time(), **started)

    # --- the end ---

    def _broken(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        # An exception in a callback is a bug: end with it instead of hanging.
        if not self._finished.done():
            error = context.get("exception") or RuntimeError(context["message"])
            self._finished.set_exception(error)

    def _finish(self, effect: Finish) -> None:
        if not self._finished.done():
            self._ended(effect)
            self._finished.set_result(effect)

    def _stop_asked(self, hard: bool) -> None:
        stop, now = self._parts.stop, self.loop.time()
        if hard:
            self._shell.finish(Finish(stop.reason, stop.exit_code))
        elif stop.deadline is None and stop.exit_code != ExitCode.RELAUNCH:
            self._shell.node.feed(DrainAsked(stop.reason))
        else:
            left_s = None if stop.deadline is None else stop.deadline - time.monotonic()
            deadline = None if left_s is None else now + left_s
            self._shell.node.feed(ev.Preempting(deadline, stop.reason))

    def _split_finished(self, effect: Finish) -> None:
        if effect.exit_code:
            self._parts.exchange.refuse("split", effect.reason)
            self._finish(effect)

    # --- during the run ---

    def _say(self, note: Note) -> None:
        """Print a note; to a note about a version, add the progress of training."""
        going = ""
        if "version" in note.facts:
            report = self._parts.training.meter.report()
            going = self._progress_words(report)
            if self._lines is not None:
                self._lines.printed(report["step"])
        self._parts.log(f"{note.text}: {going}" if going else note.text)

    def _progress_words(self, report: Mapping[str, float]) -> str:
        welcome = self._parts.welcome
        is_split = welcome.done() and welcome.result().config.split.is_on
        return progress_words(report, "samples" if is_split else "tokens")

    def _count_weights(self, direction: Direction, index: int, frame: bytes) -> None:
        """Count a chunk of weights."""
        parts = self._parts
        manifest = parts.exchange.manifest
        if manifest is not None and parts.welcome.done():
            config = parts.welcome.result().config
            count_weights(parts.traffic, manifest, direction, index, frame, config=config)

    # --- the welcome; each may bring another configuration ---

    def _welcomed(self, welcome: Welcome) -> None:
        parts = self._parts
        config = from_wire(welcome.config)
        self._check_policy(welcome, config)
        if config.tune.secure and self._shell.secure is None:
            from fsl_async.nodes.client.secure_side import secure_side  # needs an extra

            self._shell.secure = secure_side(welcome.run, parts, self._shell, self._say)
        configure_exchange(parts.exchange, config)
        # From here on both sides use the run's heartbeat and expiry.
        self._endpoint.adopt(config.transport())
        if not parts.welcome.done():
            meter = parts.training.meter
            self._watch = TrainingWatch(self.loop, meter, config.train, parts.stop, parts.log)
            self._lines = ProgressLines(self.loop, meter.report, self._progress_words, parts.log)
            parts.welcome.set_result(Membership(welcome, config))

    def _check_policy(self, welcome: Welcome, config: Config) -> None:
        """Raise NotAllowedError if the run needs data that the policy keeps here.

        The first time, print what leaves this machine.
        """
        parts, policy = self._parts, self._parts.options.policy
        if parts.options.duty != TRAIN:
            what = "losses on its records, to"
            if parts.options.duty == ROLL_OUT:
                to = "the parameter server and clients that train"
                policy.require({ANSWERS: to}, "--rollout")
                what = "prompts with all columns of their records, answers and rewards, to clients"
                what += " that train, through"
            if not parts.welcome.done():
                parts.log(
                    f"leaves this machine: {what} the parameter server at {parts.address.tcp}"
                )
            return
        zeroth = config.tune.is_on and parts.options.is_zeroth(config.tune)
        needed = receivers_of(
            config, parts.address.tcp, self._split_place(config), is_zeroth=zeroth
        )
        policy.require(needed, f"run {welcome.run}", masked=config.tune.secure)
        if parts.welcome.done():
            return
        leaving, to = policy.leaving(needed), " and ".join(dict.fromkeys(needed.values()))
        stay = "" if METRICS in leaving else "; metrics such as the loss stay here"
        masked = " (masked: only sums of 3 or more sites are read)" if config.tune.secure else ""
        parts.log(f"leaves this machine: {', '.join(leaving)}, to {to}{masked}{stay}")
        facts = {"run": welcome.run, "kinds": list(leaving), "to": to}
        parts.journal.note("leaving", self.loop.time(), **facts)

    def _split_place(self, config: Config) -> str:
        """Address of the run's split server; empty if it has none. Raises AddressError."""
        if not config.split.has_server:
            return ""
        return addresses.seen_from(config.split.server, self._parts.address.fsl).tcp
