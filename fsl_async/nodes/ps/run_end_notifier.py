"""Sends the end of the run to a split server in another process (docs/adr/0088).

Never imports torch.

Clients send RunOver too; this is for a run that ends while no client has a session there.

- The session lasts as long as the parameter server serves. Only the end is sent in it; the session
  itself shows the split server that the run goes on, even without clients.
- The transport dials a split server that is down again. After a temporary refusal (`PASSING`) it is
  dialed after `redial_s`: another process continues in its folder, a session ends there, or a
  person adds the key. Each such refusal is reported once.
- A permanent refusal (of another run) is reported, and ends the dialing: only clients send the end
  then.
- At the end `wait` takes at most WAIT_S: a split server that does not receive the end stops by
  itself (`split.alone_s`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import fsl_transport as tp
from fsl_async.config import address as addresses
from fsl_async.config.settings import Config
from fsl_async.errors import AddressError, KeysError
from fsl_async.keys.dialling import HandshakeReports, split_curve
from fsl_async.keys.folder import KeysFolder
from fsl_async.observe.journal import JournalWriter
from fsl_async.observe.table import Reporter
from fsl_async.roles.machine import SERVER, Note
from fsl_async.roles.messages import Message, MessageError
from fsl_async.roles.split import messages as msg
from fsl_transport.zmq.link import ZmqDialer

WAIT_S = 5.0
PASSING = frozenset({"leaving", "full", "name", "key"})
"""Codes of temporary refusals."""
SILENT = ("leaving", "finished")
"""Codes of refusals that are not reported to people."""


class RunEndNotifier:
    """Notifies one split server. On the loop thread.

    dialer: makes the endpoint from the handler of its events; None: the run has no split server in
    another process.
    """

    def __init__(
        self,
        run: str,
        dialer: Callable[[Callable[[tp.TransportEvent], None]], tp.DialerEndpoint] | None = None,
        *,
        redial_s: float = 5.0,
        scheduler: tp.Scheduler | None = None,
        say: Callable[[Note], None] = lambda _: None,
    ) -> None:
        self._hello = msg.PsHello(run, msg.PS_ROLE)
        self._redial_s = redial_s
        self._scheduler = scheduler
        self._say = say
        self._over = ""  # why the run has ended; empty while it has not
        self._is_up = False
        self._redial: tp.Cancellable | None = None
        self._reported = set(SILENT)
        self._is_hopeless = False  # refused for good
        self._is_unreachable = False
        self._finished = asyncio.Event()
        self.endpoint = None if dialer is None else dialer(self.on_transport)
        self.dial()

    def dial(self) -> None:
        """Dial the split server, and again after every loss."""
        self._redial = None
        if self.endpoint is not None:
            self.endpoint.connect(lambda: msg.to_wire(self._hello))

    def run_ended(self, reason: str) -> None:
        """Send the end of the run, now or in the next session; `wait` until that is done."""
        if self._over:
            return
        self._over = reason or "the run has ended"
        if self.endpoint is None or self._is_hopeless:
            self._finished.set()
        elif self._is_up:
            self._send_end()
        elif self._redial is not None:
            self._redial.cancel()
            self.dial()

    async def wait(self) -> None:
        """If the run is over, wait until the split server has answered or cannot be reached."""
        if self._over:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._finished.wait(), WAIT_S)

    async def aclose(self) -> None:
        """Close the session."""
        self._finished.set()
        if self._redial is not None:
            self._redial.cancel()
        if self.endpoint is not None:
            await self.endpoint.aclose()

    def on_transport(self, event: tp.TransportEvent) -> None:
        """Take one event of the endpoint."""
        if self._finished.is_set():
            return
        match event:
            case tp.PeerUp(_, _, body) if isinstance(_read(body), msg.SplitWelcome):
                self._is_up, self._is_unreachable = True, False
                if self._over:
                    self._send_end()
            case tp.PeerDown() if self._is_up:
                self._is_up = False
                self._gone()
            case tp.Refused(code, text):
                self._refused(code, text)
            case tp.Superseded():
                self._refused("superseded", "another parameter server took over there")
            case tp.Unreachable(address, seconds) if not self._is_unreachable:
                self._is_unreachable = True
                text = f"no answer from the split server at {address} for {seconds:.0f} s"
                self._say(Note(f"{text}; trying again", "warning"))
            case tp.MessageReceived(_, body) if isinstance(_read(body), msg.Ended):
                self._gone()
            case tp.StreamOffered(_, stream) if self.endpoint is not None:
                self.endpoint.decline(SERVER, stream, "not wanted")
            case _:
                pass

    def _send_end(self) -> None:
        assert self.endpoint is not None
        self.endpoint.send(SERVER, msg.to_wire(msg.RunOver(self._over)))

    def _refused(self, code: str, text: str) -> None:
        self._is_up = False
        passes = code in PASSING
        if code not in self._reported:
            self._reported.add(code)
            note = f"the split server has no session for this parameter server: {text}"
            self._say(Note(f"{note}; trying again" if passes else note, "warning"))
        self._is_hopeless = not passes
        if passes and not self._over:
            assert self._scheduler is not None
            at = self._scheduler.time() + self._redial_s
            self._redial = self._scheduler.call_at(at, self.dial)
        self._gone()

    def _gone(self) -> None:
        """Stop if the run is over: there is no session any more."""
        if self._over:
            assert self.endpoint is not None
            self.endpoint.disconnect(SERVER, self._over)
            self._finished.set()


def _read(body: dict[str, Any]) -> Message | None:
    try:
        return msg.from_wire(body)
    except MessageError:
        return None


def _once(log: Callable[[str], None]) -> Callable[[str], None]:
    """Return `log` without repeated lines: the reader may be unable to remove their cause."""
    seen: set[str] = set()

    def logged(line: str) -> None:
        if line not in seen:
            seen.add(line)
            log(line)

    return logged


def notify_split_server(
    config: Config,
    run: str,
    journal: Reporter,
    writer: JournalWriter,
    *,
    keys: KeysFolder | None,
    log: Callable[[str], None],
) -> RunEndNotifier:
    """Open the parameter server's session with its split server, if that has an address.

    A bad address or key, which the first client reports too, is one line in `log`.
    """
    loop, split = asyncio.get_running_loop(), config.split
    if not (split.has_server and split.server):
        return RunEndNotifier(run)
    settings = config.transport()
    try:
        # "Every interface" means this machine: the split server has the same configuration.
        place = addresses.seen_from(split.server, "127.0.0.1:1")
        curve = None if keys is None else split_curve(place, keys, encrypted=True)
        reports = HandshakeReports(
            place,
            curve.pair.public if curve is not None else "",
            msg.PS_ROLE,
            scheduler=loop,
            note=writer.note,
            log=_once(log),
            is_reserved=True,
        )
        link = ZmqDialer(place.tcp, msg.PS_ROLE, settings, curve, reports)
    except (AddressError, KeysError, tp.LocalError) as error:
        log(f"warning: the parameter server cannot send the run's end to the split server: {error}")
        return RunEndNotifier(run)

    def dialer(take: Callable[[tp.TransportEvent], None]) -> tp.DialerEndpoint:
        def seen(event: tp.TransportEvent) -> None:
            if isinstance(event, tp.PeerUp | tp.PeerDown):
                here = isinstance(event, tp.PeerUp)
                journal.note("split_server_seen", loop.time(), here=here)
            take(event)

        return tp.DialerEndpoint(
            link,
            loop,
            settings,
            seen,
            msg.PS_ROLE,
            incarnation=time.time_ns(),
            role=msg.PS_ROLE,
        )

    return RunEndNotifier(
        run, dialer, redial_s=config.session.reoffer_s, scheduler=loop, say=journal.say
    )
