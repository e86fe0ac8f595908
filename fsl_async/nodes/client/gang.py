"""The node of a gang: a client whose training is in the ranks of a torchrun. Imports no torch.

A gang is the ranks of one client. The node is no rank: an abort of NCCL, which ends its process, or
a rank that is killed leaves the control loop, the run's weights and whole deltas as they are.
torchrun starts the ranks again, and they go on from the base that the node has in memory.

    fsl-node --role client --ranks N    the node starts torchrun (`run_gang`)
    torchrun script.py                  `fsl_async.join` in local rank 0 starts the node (`main`)

The node watches torchrun's process: once that has ended, nothing starts ranks again.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]
from attrs import evolve
from cattrs.preconf.json import make_converter

from fsl_async.config import address as addresses
from fsl_async.config.load import from_wire
from fsl_async.errors import FslError, TaskError, UsageError
from fsl_async.learn.client.exchange import Exchange
from fsl_async.learn.gang.link import ADDRESS, ERRORS, address_of, listener
from fsl_async.nodes.client.client_node import LoopSide, Summary
from fsl_async.nodes.client.gang_shell import GangShell
from fsl_async.nodes.client.parts import ClientOptions, ClientParts, Membership
from fsl_async.nodes.wire import Welcome
from fsl_async.process.memory import MemoryMark
from fsl_async.process.stopper import Stopper
from fsl_async.roles.machine import TrainingEnded

_converter = make_converter()
# The oldest cattrs that is supported has no paths.
_converter.register_unstructure_hook(Path, str)
_converter.register_structure_hook(Path, lambda path, _: Path(path))


def options_to_wire(options: ClientOptions) -> dict[str, Any]:
    """A site's options as plain values, for a process of the same site."""
    wire: dict[str, Any] = _converter.unstructure(options)
    return wire


def options_from_wire(wire: dict[str, Any]) -> ClientOptions:
    """Read options that `options_to_wire` wrote."""
    return _converter.structure(wire, ClientOptions)


def packed(options: ClientOptions, member: Membership) -> bytes:
    """The context of a gang's welcome."""
    body = {"options": options_to_wire(options), "welcome": member.welcome.to_wire()}
    context: bytes = msgpack.packb(body)
    return context


def unpacked(context: bytes) -> tuple[ClientOptions, Membership]:
    """Read a context that `packed` wrote."""
    body = msgpack.unpackb(context)
    welcome = Welcome.from_wire(body["welcome"])
    return options_from_wire(body["options"]), Membership(welcome, from_wire(welcome.config))


def checked(options: ClientOptions, member: Membership) -> None:
    """Raise UsageError for a run whose clients are one process each."""
    if member.config.split.is_on:
        raise UsageError("this run is of split learning, whose clients are one process each")
    if options.is_zeroth(member.config.tune):
        raise UsageError("steps of zeroth order are made by a client of one process")


RELEASE_S = 10.0
"""How long ranks have to end once the run has."""
AGENT_S = 10.0
"""How long torchrun has to end its ranks before both are killed."""
RESTARTS = 3
RANK = "fsl_async.nodes.client.gang_rank"
"""The module that torchrun runs; with arguments it is torchrun."""
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Has torchrun open a new store at each start of its ranks. In one that all starts share, a rank
may find the address of a dead one, and gloo is then refused a connection."""


class GangRuntime(LoopSide):
    """The client as seen from the node's main thread. Raises AddressError and KeysError.

    errors: the file of `ERRORS`.
    """

    training: GangShell

    def __init__(
        self,
        options: ClientOptions,
        listening: socket.socket,
        *,
        stop: Stopper,
        log: Callable[[str], None],
        errors: int | None = None,
    ) -> None:
        self._errors = errors
        self.training = shell = GangShell(log)
        shell.is_leaving = lambda: stop.requested
        exchange = Exchange(shell, on_event=self._post, allocate=shell.slots.allocate)
        super().__init__(ClientParts(options, shell, exchange, stop, log))
        shell.connect(exchange, listening, self.ended.is_set, self._parts.journal)
        self._parts.welcome.add_done_callback(lambda found: self._welcomed(found.result()))

    def serve(self, agent: int) -> None:
        """Serve the ranks until this client's part in the run is over.

        agent: torchrun's process id. Raises FslError as `join_run` does.
        """
        shell = self.training
        watched = os.pidfd_open(agent)
        shell.watch(watched, self._agent_has_ended)
        MemoryMark.take()
        self._thread.start()
        is_told = False
        try:
            while not self.ended.is_set():
                if shell.has_work:
                    shell.carry_out()
                else:
                    shell.turn()
                if not is_told and (shell.all_ended or shell.failure is not None):
                    is_told = True
                    # No error even after a failure: deltas that are whole are still sent.
                    self._post(TrainingEnded(None))
            shell.release(0.0 if shell.failure or self._parts.stop.hard else RELEASE_S)
        finally:
            if not self.ended.is_set():
                self._parts.stop.request(hard=True)
            self._thread.join()
            self._parts.journal.close()
            shell.close()
            os.close(watched)
        self.raise_failure()
        if shell.failure is not None:
            text, code = shell.failure
            raise TaskError(text, code)

    def _welcomed(self, member: Membership) -> None:
        try:
            checked(self.options, member)
        except FslError as error:
            self.training.fail(error.message, error.exit_code)
            return
        self.training.welcomed(packed(self.options, member))
        # Ranks that start again go on after the last delta, which the node has.
        self.training.on_position = lambda position: packed(
            self.options, evolve(member, welcome=evolve(member.welcome, position=position))
        )

    def _agent_has_ended(self) -> None:
        if not self.training.all_ended and not self.ended.is_set():
            kept = b"" if self._errors is None else os.pread(self._errors, 1 << 20, 0)
            found = (
                last_error(kept.decode(errors="replace"))
                or "the log above has the error of its ranks"
            )
            self.training.fail(
                f"torchrun has ended before the training function returned; {found}", 1
            )


def last_error(kept: str) -> str:
    """The error of the rank that died first in the last start, or ""; kept: lines of `ERRORS`."""
    lines = [line.partition(" ") for line in kept.splitlines()]
    return next((text for start, _, text in lines if start == lines[-1][0]), "")


def run_gang(
    options: ClientOptions,
    ranks: int,
    restarts: int,
    *,
    stop: Stopper,
    log: Callable[[str], None],
    as_json: bool = False,
) -> Summary:
    """Join a run with a gang of ranks that torchrun starts here. Blocks.

    restarts: torchrun's --max-restarts. as_json: standard output is JSON, and not for ranks.
    Raises FslError in one line, as `joining.join_run` does.
    """
    name = address_of(os.getpid())
    with (
        contextlib.closing(listener(name)) as listening,
        os.fdopen(os.memfd_create("errors of ranks"), "rb") as errors,
    ):
        kept = errors.fileno()
        runtime = GangRuntime(options, listening, stop=stop, log=log, errors=kept)
        agent = subprocess.Popen(  # noqa: S603 - this program's own arguments
            [
                *(sys.executable, "-P", "-m", RANK, "--standalone"),
                *("--nproc-per-node", str(ranks), "--max-restarts", str(restarts)),
                *("-m", RANK),
            ],
            env=_environment(ranks)
            | {ADDRESS: name, ERRORS: f"/proc/{os.getpid()}/fd/{kept}"}
            | {"PYTHONUNBUFFERED": "1", OWN_STORE: "1"},
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr if as_json else None,
            start_new_session=True,  # Ctrl-C is the node's, which ends the ranks in good order
        )
        waits_s = 0.0
        try:
            runtime.serve(agent.pid)
            waits_s = AGENT_S
        finally:
            _end(agent, waits_s)
    return runtime.summary()


def _environment(ranks: int) -> dict[str, str]:
    """Return the ranks' environment. torchrun would give each one thread, and warn that it does."""
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    return {"OMP_NUM_THREADS": str(threads), **os.environ}


def _end(agent: subprocess.Popen[bytes], waits_s: float) -> None:
    """End torchrun, which ends its ranks. waits_s: for it to end by itself, as after a run."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        agent.wait(waits_s)
    for number in (signal.SIGTERM, signal.SIGKILL):
        if agent.poll() is not None:
            return
        agent.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            agent.wait(AGENT_S)


def start(options: dict[str, Any], agent: int) -> None:
    """Start the node of the ranks of a torchrun, as a process of a session of its own.

    torchrun ends its ranks with all processes of their session (killpg), and the node must stay.
    """
    node = subprocess.Popen(
        [sys.executable, "-P", "-m", "fsl_async.nodes.client.gang"],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    assert node.stdin is not None
    with node.stdin:
        node.stdin.write(json.dumps({"options": options, "agent": agent}).encode())


def main() -> int:
    """Run the node that `start` started; its standard input has the options."""
    from fsl_async.cluster.name_slot import claim_name
    from fsl_async.errors import report
    from fsl_async.process.memory import keep_freed_blocks
    from fsl_async.process.script import print_line
    from fsl_async.process.stopper import stop_on_signals

    given = json.load(sys.stdin)
    options, agent = options_from_wire(given["options"]), int(given["agent"])
    stopper = Stopper()
    keep_freed_blocks()
    try:
        with contextlib.ExitStack() as held:
            listening = held.enter_context(contextlib.closing(listener(address_of(agent))))
            held.enter_context(stop_on_signals(stopper, at_once=True))
            if not options.name:
                slot = claim_name(addresses.parse(options.server).tcp)
                held.enter_context(contextlib.closing(slot))
                options = evolve(options, name=slot.name)
            runtime = GangRuntime(options, listening, stop=stopper, log=print_line)
            runtime.serve(agent)
    except BaseException as error:  # noqa: BLE001 - the top of a program
        return report(error, as_json=False, debug=False, out=sys.stdout, err=sys.stderr)
    return stopper.exit_code


if __name__ == "__main__":
    sys.exit(main())
