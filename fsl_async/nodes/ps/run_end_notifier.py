"""The session of a parameter server with a split server of another process: link, machine and endpoint put together. Never imports torch."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import fsl_transport as tp
from fsl_async.config import address as addresses
from fsl_async.config.settings import Config
from fsl_async.config.split_rules import split_rules
from fsl_async.config.transport_settings import transport_settings
from fsl_async.errors import AddressError, KeysError
from fsl_async.keys.dialling import HandshakeReports, split_curve
from fsl_async.keys.folder import KeysFolder
from fsl_async.nodes.ps.run_end_notifier_shell import RunEndNotifierShell
from fsl_async.observe.journal import JournalWriter
from fsl_async.observe.reporter import Reporter
from fsl_async.roles.machine import RunEnded
from fsl_async.roles.split.messages import PS_ROLE
from fsl_async.roles.split.methods import method_of
from fsl_async.roles.split.run_end_notifier import RunEndNotifierMachine
from fsl_transport.zmq.link import ZmqDialer

TELL_S = 5.0
"""How long the end of a parameter server waits for a split server to have heard of it."""


class _Unwritten:
    """The parameter server's journal is about its clients; of this session it gets notes."""

    def event(self, event: Any, now: float, cause: int | None = None) -> int:
        """Not written."""
        return 0

    effect = event


def _once(log: Callable[[str], None]) -> Callable[[str], None]:
    """Let a line through the first time only: whoever may do nothing about it reads it once in a run."""
    seen: set[str] = set()

    def say(line: str) -> None:
        if line not in seen:
            seen.add(line)
            log(line)

    return say


class RunEndNotifier:
    """One parameter server's. Every method on the loop thread. Does nothing where the run has no split server."""

    def __init__(
        self,
        config: Config,
        run: str,
        journal: Reporter,
        writer: JournalWriter,
        *,
        keys: KeysFolder | None,
        log: Callable[[str], None],
        dials: bool,
    ) -> None:
        """Dial, where `dials`. An address that is no good, which the first client would say too, is told and that is all."""
        self._loop = asyncio.get_running_loop()
        self._journal = journal
        self._finished = asyncio.Event()
        self._over = False
        self._shell: RunEndNotifierShell | None = None
        rules = split_rules(config)
        split = config.split
        if not (dials and split.is_on and method_of(rules).has_server and split.server):
            return
        settings = transport_settings(config)
        try:
            # "Every interface" is this machine's: the split server was told so by this configuration.
            place = addresses.seen_from(split.server, "127.0.0.1:1")
            curve = None if keys is None else split_curve(place, keys, encrypted=True)
            public = curve.pair.public if curve is not None else ""
            words = HandshakeReports(
                place,
                public,
                PS_ROLE,
                scheduler=self._loop,
                journal=writer,
                log=_once(log),
                is_reserved=True,
            )
            link = ZmqDialer(place.tcp, PS_ROLE, settings, curve, words)
        except (AddressError, KeysError, tp.LocalError) as error:
            log(f"warning: the split server will not hear of the run's end from here: {error}")
            return
        machine = RunEndNotifierMachine(run, rules.reoffer_s, TELL_S)
        self._shell = shell = RunEndNotifierShell(
            machine,
            scheduler=self._loop,
            journal=_Unwritten(),
            say=journal.say,
            finished=self._finished.set,
        )
        self._endpoint = shell.endpoint = tp.DialerEndpoint(
            link,
            self._loop,
            settings,
            self._seen,
            PS_ROLE,
            incarnation=time.time_ns(),
            role=PS_ROLE,
        )
        shell.dial()

    def _seen(self, event: tp.TransportEvent) -> None:
        assert self._shell is not None
        if isinstance(event, tp.PeerUp | tp.PeerDown):
            here = isinstance(event, tp.PeerUp)
            self._journal.note("split_server_seen", self._loop.time(), here=here)
        self._shell.on_transport(event)

    def run_ended(self, reason: str) -> None:
        """Say so; `wait` until it is said."""
        self._over = True
        if self._shell is None:
            self._finished.set()
        else:
            self._shell.node.feed(RunEnded(reason))

    async def wait(self) -> None:
        """Until the split server has heard, or can not be reached; at once where the run is not over, and nothing is said."""
        if not self._over:
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._finished.wait(), TELL_S + 1.0)

    async def aclose(self) -> None:
        """Leave."""
        if self._shell is not None:
            self._shell.node.close()
            await self._endpoint.aclose()
