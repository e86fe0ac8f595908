"""A client process: learner, machine, endpoint and loop put together.

Training keeps the thread that calls; the loop, with the machine and the sockets, runs in a thread of its own. They meet in the
`Learner`. So the same code serves `fsl-node --role client`, where the thread runs a task, and `fsl_async.join(...)` in a user's script.
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
from pathlib import Path
from typing import Any

from attrs import frozen

import fsl_transport as tp
from fsl_async.accounting.categories import Direction
from fsl_async.accounting.traffic import CountedLink, Traffic
from fsl_async.accounting.traffic_notes import TrafficNotes
from fsl_async.config import address as addresses
from fsl_async.config.address import Address
from fsl_async.config.load import from_wire
from fsl_async.config.settings import Config
from fsl_async.config.site_policy import METRICS, SitePolicy, receivers_of
from fsl_async.config.split_rules import split_rules
from fsl_async.config.transport_settings import transport_settings
from fsl_async.errors import (
    AddressError,
    ExitCode,
    KeysError,
    RefusedError,
    TaskError,
)
from fsl_async.keys.dialling import HandshakeReports, curve_for, split_curve
from fsl_async.keys.folder import KeysFolder
from fsl_async.learn.client.learner import Learner, RunFinishedError
from fsl_async.learn.split.remote import SplitTraining
from fsl_async.nodes.client.shell import ClientShell
from fsl_async.nodes.client.split_shell import Facts, SplitClientShell
from fsl_async.nodes.client.training_watch import TrainingWatch
from fsl_async.nodes.ps.node import JOURNAL
from fsl_async.nodes.runtime import ThreadWorker
from fsl_async.nodes.split_server.shell import Formats
from fsl_async.nodes.wire import Welcome
from fsl_async.observe.journal import JournalWriter, TraceHash
from fsl_async.process.lag import LoopLag
from fsl_async.process.memory import MemoryMark
from fsl_async.process.notices import slurm_job
from fsl_async.process.stopper import Stopper
from fsl_async.roles.machine import DrainAsked, Event, Finish, Note, TrainingEnded
from fsl_async.roles.split.client import SplitClientMachine
from fsl_async.roles.sync import events as ev
from fsl_async.roles.sync.client import ClientMachine, ClientRules
from fsl_transport.loop import run as run_loop
from fsl_transport.zmq.curve import DialerCurve
from fsl_transport.zmq.link import ZmqDialer

DELTAS_ONLY = SitePolicy()


@frozen
class Summary:
    """How this client's part ended."""

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
    """Bytes of resident memory at its highest, beyond what the libraries take."""


@frozen
class Membership:
    """What the welcome said."""

    welcome: Welcome
    config: Config


def progress_words(progress: Mapping[str, float]) -> str:
    """Steps, loss and speed for people, from what a heartbeat carries; what is not known yet is left out."""
    parts = [f"step {progress['step']:,.0f}"]
    if "loss" in progress:
        parts.append(f"loss {progress['loss']:.3g} (running mean)")
    if progress["tokens_per_s"]:
        parts.append(f"{progress['tokens_per_s']:,.0f} tokens/s")
    return ", ".join(parts)


class ClientRuntime:
    """The loop thread of a client. Made and used by the training thread.

    Raises from `wait_welcome`: RefusedError when the server will not have this client, the stopper's error when asked to stop.
    """

    def __init__(
        self,
        server: str,
        name: str,
        *,
        journal_dir: Path | None,
        stop: Stopper,
        log: Callable[[str], None],
        keys: KeysFolder | None = None,
        policy: SitePolicy = DELTAS_ONLY,
    ) -> None:
        """keys: this client's; by default those of the default folder, where an address has a key. policy: what may leave this site.

        Raises AddressError and KeysError.
        """
        self.name = name
        self.policy = policy
        self._at = addresses.parse(server)
        self._keys = keys or KeysFolder()
        self._curve = curve_for(self._at, self._keys) if self._at.key else None
        self.learner = Learner()
        self.finish: Finish | None = None
        self._server = self._at.tcp
        self._stop = stop
        self._log = log
        self._begun = time.monotonic()
        self._welcome: concurrent.futures.Future[Membership] = concurrent.futures.Future()
        self._ended = threading.Event()
        self._journal = (
            JournalWriter(journal_dir / JOURNAL) if journal_dir is not None else TraceHash()
        )
        self._machine = ClientMachine(ClientRules(), name, time.time_ns())
        self._loop: asyncio.AbstractEventLoop | None = None
        self._shell: ClientShell | None = None
        self._endpoint: tp.DialerEndpoint
        self.traffic = Traffic()
        self._worker: ThreadWorker
        self._finish_asked: Callable[[Finish], None]
        self._split: SplitClientShell | None = None
        self._split_endpoint: tp.DialerEndpoint
        self._crash: BaseException | None = None
        self._hang_watch: TrainingWatch | None = None
        self._thread = threading.Thread(target=self._run, name="fsl-loop", daemon=True)
        self._thread.start()

    # --- training thread ---

    def wait_welcome(self) -> Membership:
        """Wait until the server has answered.

        Raises RunFinishedError when this client's part ended before it began (refused, asked to stop); why says `raise_failure`
        after `training_ended`.
        """
        while True:
            with contextlib.suppress(concurrent.futures.TimeoutError):
                return self._welcome.result(timeout=0.5)
            if self._ended.is_set():
                self.raise_failure()
                raise RefusedError("ended before the server answered")
            if (
                self.learner.stopped
            ):  # nobody would tell the machine that there is no training to wait for
                raise RunFinishedError("ended before the server welcomed this client")

    def training_ended(self, error: str | None) -> None:
        """Say that the training function is back, then wait until what it trained has arrived or the run is given up."""
        self.learner.meter.step_ended()  # what follows its last step is not one that hangs
        self._post(TrainingEnded(error))
        while not self._ended.is_set():
            try:
                self.learner.attend_for(0.5)  # what was trained last is still to be copied
            except Exception as failure:  # noqa: BLE001 - whatever it is, it must not keep the process
                self._post(TrainingEnded(f"copying the last weights failed: {failure}"))
        self._thread.join()
        self._journal.close()

    def raise_failure(self) -> None:
        """Raise what ended this client, if that was not its good end."""
        if self._crash is not None:
            raise self._crash
        self._raise_end()

    def summary(self) -> Summary:
        """How it ended."""
        return Summary(
            run=self._machine.run,
            name=self.name,
            version=self._machine.model_version,
            steps=self.learner.meter.steps,
            tokens=self.learner.meter.tokens,
            tokens_acknowledged=self._machine.tokens_acknowledged,
            reason=self.finish.reason if self.finish is not None else "",
            seconds=round(time.monotonic() - self._begun, 3),
            traffic=self.traffic.as_dict(),
            memory_grown=MemoryMark.grown(),
        )

    def _raise_end(self) -> None:
        finish = self.finish
        if finish is None or finish.exit_code == 0:
            return
        if finish.exit_code == ExitCode.BAD_INPUT:
            raise RefusedError(finish.reason)
        if self._stop.requested:
            raise self._stop.error(finish.reason)
        raise TaskError(finish.reason)

    def _post(self, event: Event) -> None:
        """Give the machine an event from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has closed: it was over anyway
            if self._loop is not None and self._shell is not None:
                self._loop.call_soon_threadsafe(self._shell.node.feed, event)
                if isinstance(event, TrainingEnded):
                    self._loop.call_soon_threadsafe(self._end_split, event)

    # --- loop thread ---

    def _run(self) -> None:
        try:
            run_loop(self._main())
        except BaseException as error:  # noqa: BLE001 - handed to the training thread, which raises it
            self._crash = error
        finally:
            self.learner.stop()
            self._journal.flush()  # the training thread may never come to close it
            self._ended.set()
            if self.finish is not None and self.finish.exit_code == ExitCode.RELAUNCH:
                self._leave_training_behind()

    def _progress_told(self) -> dict[str, float]:
        """For heartbeats: how training goes, as far as this site lets that out."""
        meter = self.learner.meter
        return meter.progress() if self.policy.lets(METRICS) else meter.totals()

    def _hanging(self) -> dict[str, float]:
        """For heartbeats: for how long training hangs, if it does."""
        return {} if self._hang_watch is None else self._hang_watch.summary()

    def _leave_training_behind(self) -> None:
        """End the process from here where its training thread is still in a step: whoever preempts us does not wait for it."""
        if self._machine.leaving.training:
            self._stop.request(hard=True)

    def _asked_to_end(self, now: float) -> Event:
        """The stopper's wish at `now` of the loop's clock."""
        stop = self._stop
        if stop.deadline is None and stop.exit_code != ExitCode.RELAUNCH:
            return DrainAsked(stop.reason)
        left_s = None if stop.deadline is None else stop.deadline - time.monotonic()
        return ev.Preempting(None if left_s is None else now + left_s, stop.reason)

    def _note_start(self, now: float) -> None:
        job = slurm_job(os.environ)
        slurm = {} if job is None else {"slurm_job": job.job, "requeues": job.restarts}
        here = {"pid": os.getpid(), "host": socket.gethostname()}
        started = {"role": "client", "name": self.name, "server": self._server, **here, **slurm}
        self._journal.note("node_started", now, **started)

    async def _main(self) -> None:
        loop = asyncio.get_running_loop()
        finished: asyncio.Future[Finish] = loop.create_future()
        worker = ThreadWorker(loop, "codec")

        def broken(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            # A defect of ours in a callback: better an end with its name than a client that waits for ever.
            if not finished.done():
                finished.set_exception(context.get("exception") or RuntimeError(context["message"]))

        loop.set_exception_handler(broken)

        def finish(effect: Finish) -> None:
            if not finished.done():
                self.finish = effect
                finished.set_result(effect)

        self._worker, self._finish_asked = worker, finish
        shell = ClientShell(
            self._machine,
            self.learner,
            worker=worker,
            scheduler=loop,
            journal=self._journal,
            say=self._say,
            finished=finish,
            welcomed=self._welcomed,
            end_training=lambda _: self.learner.stop(),
        )
        shell.count = self._count_weights
        shell.shares_metrics = self.policy.lets(METRICS)
        shell.on_end = self._end_split
        self._loop = loop
        settings = tp.TransportSettings()  # until the server says what the run's are
        link = self._dial(self._at, self._curve, settings)
        endpoint = tp.DialerEndpoint(
            link,
            loop,
            settings,
            shell.on_transport,
            self.name,
            incarnation=self._machine.incarnation,
        )
        lag = LoopLag(loop)
        notes = TrafficNotes(loop, self._journal, self.traffic)
        endpoint.set_beat_payload(
            lambda _: {**self._progress_told(), **lag.summary(), **self._hanging()}
        )
        shell.endpoint = self._endpoint = endpoint
        self._shell = shell
        self.learner.on_event = self._post

        def stop_asked(hard: bool) -> None:
            asked: Any = Finish(self._stop.reason, self._stop.exit_code) if hard else None
            loop.call_soon_threadsafe(
                (lambda: shell.finish(asked))
                if asked
                else (lambda: shell.node.feed(self._asked_to_end(loop.time())))
            )

        unsubscribe = self._stop.subscribe(stop_asked)
        self._note_start(loop.time())
        try:
            shell.dial()
            await finished
        finally:
            unsubscribe()
            self._journal.note("node_ended", loop.time(), **lag.summary())
            shell.node.close()
            lag.close()
            if self._split is not None:
                self._split.node.close()
                await self._split_endpoint.aclose()
            notes.close()
            if self._hang_watch is not None:
                self._hang_watch.close()
            await endpoint.aclose()
            worker.close()
            self.learner.pool.close()

    def open_split(self, training: SplitTraining, architecture: dict[str, str]) -> None:
        """Open the session with the split server. Called by the training thread, once."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._open_split, training, architecture)

    def _open_split(self, training: SplitTraining, architecture: dict[str, str]) -> None:
        loop, shell, member = self._loop, self._shell, self._welcome.result()
        assert loop is not None
        assert shell is not None
        config = member.config
        rules = split_rules(config)
        machine = SplitClientMachine(rules, self.name, self._machine.incarnation)
        formats = Formats(
            config.split.up, config.split.down, config.split.models, config.codec.step_log2
        )
        self._split = opened = SplitClientShell(
            machine,
            training,
            Facts(member.welcome.run, member.welcome.shard, architecture),
            formats=formats,
            worker=self._worker,
            scheduler=loop,
            journal=self._journal,
            say=self._say,
            finished=self._split_finished,
            traffic=self.traffic,
            shares_metrics=self.policy.lets(METRICS),
        )
        settings = transport_settings(config)
        try:
            place = addresses.seen_from(config.split.server, self._at.fsl)
            curve = split_curve(place, self._keys, encrypted=self._curve is not None)
            link = self._dial(place, curve, settings)
        except (AddressError, KeysError) as error:
            self._split = None
            self._split_finished(Finish(error.message, int(ExitCode.BAD_INPUT)))
            return
        self._split_endpoint = opened.endpoint = tp.DialerEndpoint(
            link,
            loop,
            settings,
            opened.on_transport,
            self.name,
            incarnation=self._machine.incarnation,
            role="split-client",
        )
        training.post = lambda event: self._post_split(opened, event)
        opened.dial()

    def _dial(
        self, server: Address, curve: DialerCurve | None, settings: tp.TransportSettings
    ) -> CountedLink:
        assert self._loop is not None
        public = curve.pair.public if curve is not None else ""
        told = HandshakeReports(
            server,
            public,
            self.name,
            scheduler=self._loop,
            journal=self._journal,
            log=self._log,
        )
        dialer = ZmqDialer(server.tcp, self.name, settings, curve, told)
        return CountedLink(dialer, self.traffic, at_client=True)

    def _post_split(self, opened: SplitClientShell, event: Event) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed: it was over anyway
            if self._loop is not None:
                self._loop.call_soon_threadsafe(opened.feed, event)

    def _count_weights(self, direction: Direction, index: int, frame: bytes) -> None:
        """Count a chunk of weights."""
        manifest = self.learner.manifest
        if manifest is None or not self._welcome.done():
            return
        method = self._welcome.result().config.split.method
        self.traffic.weights(method, manifest, direction, index, frame)

    def _split_finished(self, effect: Finish) -> None:
        if effect.exit_code:
            self.learner.refuse("split", effect.reason)
            self._finish_asked(effect)

    def _end_split(self, event: Event) -> None:
        """The run is over at the parameter server, or this client's training is."""
        if self._split is not None:
            self._split.node.feed(event)

    def _say(self, note: Note) -> None:
        """Print a note; with how training goes where it is about a version."""
        going = progress_words(self.learner.meter.progress()) if "version" in note.facts else ""
        self._log(f"{note.text}: {going}" if going else note.text)

    def _welcomed(self, welcome: Welcome) -> None:
        config = from_wire(welcome.config)
        self._check_policy(welcome, config)
        self.learner.coder.spec = config.codec.spec_up
        self.learner.coder.feedback = config.codec.feedback_up
        self.learner.coder.whole = config.split.sends_whole
        self.learner.pool.threads = config.codec.threads
        # Before the welcome the server's heartbeat and expiry are not known; from here on both sides have the same.
        self._endpoint.adopt(transport_settings(config))
        self._machine.rules = ClientRules(drain_cap_s=config.transfer.drain_cap_s)
        if not self._welcome.done():
            assert self._loop is not None
            self._hang_watch = TrainingWatch(
                self._loop, self.learner.meter, config.train, self._stop, self._log
            )
            self._welcome.set_result(Membership(welcome, config))

    def _check_policy(self, welcome: Welcome, config: Config) -> None:
        """Raise NotAllowedError where the run needs what this site keeps; say once what leaves. Each welcome may bring another configuration."""
        needed = receivers_of(config, self._server, self._split_place(config))
        self.policy.require(needed, f"run {welcome.run}")
        if self._welcome.done():
            return
        leaving, to = self.policy.leaving(needed), " and ".join(dict.fromkeys(needed.values()))
        stay = "" if METRICS in leaving else "; metrics such as the loss stay here"
        self._log(f"leaves this machine: {', '.join(leaving)}, to {to}{stay}")
        assert self._loop is not None
        facts = {"run": welcome.run, "kinds": list(leaving), "to": to}
        self._journal.note("leaving", self._loop.time(), **facts)

    def _split_place(self, config: Config) -> str:
        """Where such a run has its split server; empty where it has none. Raises AddressError."""
        if config.split.method in {"none", "fedavg"}:
            return ""
        return addresses.seen_from(config.split.server, self._at.fsl).tcp
