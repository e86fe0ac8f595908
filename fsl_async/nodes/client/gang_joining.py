"""A rank joins the node of its gang, the ranks of one client: before and after its task or script.

`gang_rank` is a process of `fsl-node --role client --ranks N`, `join_ranks` is `fsl_async.join` in
a script under the user's own torchrun.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from typing import Self

import torch
from attrs import evolve

from fsl_async.errors import FslError, TaskError
from fsl_async.learn.client.context import ClientContext
from fsl_async.learn.client.fed import Fed
from fsl_async.learn.client.ports import RunFinishedError
from fsl_async.learn.gang.group import APART_S, RankGroup
from fsl_async.learn.gang.link import Link, NodeLostError, Place, address_of
from fsl_async.learn.gang.orders import CHECK_S, RankOrders, RankTraining
from fsl_async.nodes.client import gang
from fsl_async.nodes.client.gang import options_to_wire, unpacked
from fsl_async.nodes.client.parts import ClientOptions, Membership
from fsl_async.process.script import leave_at_exit

CONNECT_S = 60.0
CHECK = "FSL_GANG_CHECK_S"
"""Environment variable: how often ranks agree, in seconds; for tests."""

_joined: list[Place] = []
"""The place with which this process has joined."""


class RankSession:
    """This rank's side of training, and its connection with the node at a socket's name.

    Ranks on the node's machine have one, so that the node finds at once that a rank has ended;
    rank 0 has the orders from its own. starts: called in rank 0 if there is no node. Raises
    NodeLostError and TaskError.
    """

    def __init__(
        self, place: Place, name: str, *, starts: Callable[[], None] | None = None
    ) -> None:
        self.place = place
        self._link = _dial(name, starts) if place.rank == 0 else None  # before the others
        self._group = group = RankGroup(place)
        if not place.is_remote:
            self._link = self._link or _dial(name)
            with contextlib.suppress(OSError):  # it is found to have ended soon enough
                self._link.send("hello", place.rank, place.world, place.generation)
        group.on_apart = self._apart
        check_s = float(os.environ.get(CHECK, CHECK_S))
        self.orders = RankOrders(group, self._link if group.leads else None, check_s=check_s)
        self.training = RankTraining(self.orders)

    def wait_welcome(self) -> tuple[ClientOptions, Membership]:
        """Wait for the run's welcome, which the node passes on.

        Raises RefusedError, RunFinishedError and NodeLostError.
        """
        self.orders.wait_until(lambda: self.orders.context is not None)
        assert self.orders.context is not None
        return unpacked(self.orders.context)

    def context(self, context: ClientContext) -> ClientContext:
        """The client's context, for this rank of it."""
        device = context.device
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", self.place.local)
        log = context.log if self.place.rank == 0 else _silent
        return evolve(
            context,
            rank=self.place.rank,
            ranks=self.place.world,
            device=device,
            log=log,
            is_leaving=lambda: self.orders.is_leaving,
        )

    def failed(self, error: FslError) -> None:
        """Tell the node that this gang fails, and would fail again.

        A rank on another machine has rank 0 tell it, which finds that this one has ended.
        """
        text, code = error.message, int(error.exit_code)
        if isinstance(error, NodeLostError):
            found = self._group.failure() if self.place.rank == 0 else None
            if found is None:
                return
            text, code = found
        if self._link is None:
            self._group.failed(text, code)
            return
        with contextlib.suppress(OSError):
            self._link.send("failed", text, code)

    def close(self) -> None:
        """Close the connection with the node."""
        if self._link is not None:
            self._link.close()

    def _apart(self, where: str) -> None:
        text = (
            f"rank {self.place.rank} has waited {APART_S:g} s for other ranks in {where}: unless"
            " they save or evaluate, every rank must get there after the same step"
        )
        sys.stderr.write(f"warning: {text}\n")


def _silent(_: str) -> None:
    """Rank 0 speaks for all."""


def _dial(name: str, starts: Callable[[], None] | None = None) -> Link:
    """Connect to the node at a socket's name. Raises NodeLostError.

    starts: called once if there is none.
    """
    deadline = time.monotonic() + CONNECT_S
    while True:
        try:
            return Link.dial(name)
        except OSError as error:
            if starts is not None:
                starts()
                starts = None
            elif time.monotonic() > deadline:
                raise NodeLostError(f"this rank's node does not answer: {error}") from error
        time.sleep(0.05)


class JoinedRank(Fed):
    """The result of `fsl_async.join` in a rank: a Fed, to close or use in a `with`."""

    def __init__(self, session: RankSession, context: ClientContext) -> None:
        super().__init__(session.training, session.context(context))
        self._rank_session = session
        self._closed = False
        self._stays = leave_at_exit(lambda error: self.__exit__(None, error, None))

    def close(self) -> None:
        """Leave the run: wait for the last delta, then end the session. Harmless twice."""
        self._stays()
        if not self._closed and os.getpid() == self._process:
            self._closed = True
            try:
                self._rank_session.training.serve()
            finally:
                self._rank_session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Leave the run. After an error of the script torchrun starts the ranks again."""
        self._stays()
        if os.getpid() != self._process:
            return
        if error is None or isinstance(error, RunFinishedError):
            self.close()
        elif isinstance(error, FslError):
            self._rank_session.failed(error)


def join_ranks(
    options: ClientOptions,
    place: Place,
    make_context: Callable[[ClientOptions, Membership, Callable[[str], None]], ClientContext],
    log: Callable[[str], None],
) -> JoinedRank:
    """Join in a rank of the user's torchrun; rank 0 starts the node if there is none.

    Raises TaskError at the second call of a process: the node of the first one may still be there,
    on its way out, or not, and the ranks need not see the same.
    """
    if _joined:
        raise TaskError(
            "fsl_async.join: these ranks have joined a run before, and a torchrun is one client of"
            " one run: start another torchrun"
        )
    _joined.append(place)
    agent = os.getppid()
    session = RankSession(
        place, address_of(agent), starts=lambda: gang.start(options_to_wire(options), agent)
    )
    _, member = session.wait_welcome()
    return JoinedRank(session, make_context(options, member, log))
