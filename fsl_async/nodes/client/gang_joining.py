"""A rank joins the node of its gang: what it does before and after its task or script.

`train_rank` is a process of `fsl-node --role client --ranks N`, `join_ranks` is `fsl_async.join` in
a script under the user's own torchrun.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

import msgpack  # type: ignore[import-untyped]
import torch
from attrs import evolve, frozen

from fsl_async.errors import FslError, TaskError
from fsl_async.learn.client.context import ClientContext
from fsl_async.learn.client.fed import Fed
from fsl_async.learn.client.ports import RunFinishedError
from fsl_async.learn.gang.link import Link, NodeLostError, address_of
from fsl_async.learn.gang.orders import CHECK_S, RankOrders, RankTraining, store_of_ranks
from fsl_async.learn.gang.remote import RemoteLink, RemoteRanks
from fsl_async.nodes.client import gang
from fsl_async.nodes.client.gang import options_to_wire, unpacked
from fsl_async.nodes.client.parts import ClientOptions, Membership
from fsl_async.process.script import leave_at_exit
from fsl_async.roles import gang_messages as msg

CONNECT_S = 60.0
REMOTE_LEAVES_S = 10.0
"""How long rank 0 waits for ranks on other machines to leave."""
REMOTE = "remote"
"""Key in the store: names of rank 0's machine, port and token, in msgpack."""
CHECK = "FSL_GANG_CHECK_S"
"""Environment variable: how often ranks agree, in seconds; for tests."""

_joined: list[Place] = []
"""The place with which this process has joined."""


@frozen
class Place:
    """Which rank this process is, by the variables that torchrun sets.

    generation: how often torchrun has started the ranks again. local: the rank's number on its
    machine, which has `local_world` of them.
    """

    rank: int
    world: int
    generation: int
    local: int
    local_world: int

    @classmethod
    def here(cls, environ: Mapping[str, str] = os.environ) -> Place | None:
        """Return the place of this process; None where it is no rank of several."""
        world = int(environ.get("WORLD_SIZE", "1"))
        if world < 2 or "RANK" not in environ:  # set by other launchers too
            return None
        rank = int(environ["RANK"])
        return cls(
            rank,
            world,
            int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            int(environ.get("LOCAL_RANK", str(rank))),
            int(environ.get("LOCAL_WORLD_SIZE", str(world))),
        )

    @property
    def is_remote(self) -> bool:
        """Whether the node is on another machine, that of rank 0."""
        return self.rank != self.local

    @property
    def spans_machines(self) -> bool:
        """Whether some rank is on another machine than others."""
        return self.local_world != self.world


class RankSession:
    """This rank's connection with its node, and its side of training."""

    def __init__(
        self, link: Link | RemoteLink, place: Place, proxies: RemoteRanks | None = None
    ) -> None:
        self.place = place
        self.link = link
        check_s = float(os.environ.get(CHECK, CHECK_S))
        self.orders = RankOrders(link, place.rank, check_s=check_s)
        if proxies is not None:
            self.orders.passed = proxies.passed
        self.training = RankTraining(self.orders, place.rank, place.generation)
        link.send(msg.Hello(place.rank, place.world, place.generation))

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
        """Tell the node that this gang fails, and would fail again."""
        with contextlib.suppress(OSError):
            self.link.send(msg.Ended(error.message, error.exit_code))


def _silent(_: str) -> None:
    """Rank 0 speaks for all."""


def dial(name: str, *, starts: Callable[[], None] | None = None) -> Link:
    """Connect to the node at a socket's name. Raises NodeLostError.

    starts: called once if there is none.
    """
    deadline = time.monotonic() + CONNECT_S
    while True:
        try:
            return Link.dial(name, msg.FROM_NODE, msg.FROM_RANKS)
        except OSError as error:
            if starts is not None:
                starts()
                starts = None
            elif time.monotonic() > deadline:
                raise NodeLostError(f"this rank's node does not answer: {error}") from error
        time.sleep(0.05)


def reach(
    place: Place, name: str, *, starts: Callable[[], None] | None = None
) -> tuple[Link | RemoteLink, RemoteRanks | None]:
    """Connect this rank with the node of its gang, by the name of its socket on rank 0's machine.

    Returns the connection and, in rank 0, the proxies of ranks on other machines, if there are
    any. Raises NodeLostError and TaskError.
    """
    if not place.spans_machines:
        return dial(name, starts=starts), None
    try:
        store = store_of_ranks(place.generation)
        if place.is_remote:
            hosts, port, token = msgpack.unpackb(store.get(REMOTE))
            return RemoteLink.dial(hosts, port, token), None
    except KeyError as error:
        raise TaskError(f"these ranks are on several machines, and {error} is not set") from None
    except (RuntimeError, OSError) as error:  # no store there, or nothing in it after its timeout
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TaskError(
            "these ranks are on several machines, and rank 0 has not joined yet, or there is no"
            f" store of torchrun ({why}): start them with torchrun, or call"
            " torch.distributed.init_process_group first"
        ) from error
    link = dial(name, starts=starts)
    if place.rank:
        return link, None
    proxies = RemoteRanks(name, place.world - place.local_world, _warn)
    store.set(REMOTE, msgpack.packb([_own_names(), proxies.port, proxies.token]))
    return link, proxies


def _warn(text: str) -> None:
    sys.stderr.write(f"warning: {text}\n")


def _own_names() -> list[str]:
    """Names under which other machines of the cluster may reach this one, the likeliest first."""
    master = os.environ["MASTER_ADDR"]
    names = [socket.gethostname(), master]
    # The address that this machine has on the way to torchrun's store; of no use if that is here.
    with contextlib.suppress(OSError):
        port = int(os.environ["MASTER_PORT"])
        family, kind, _, _, to = socket.getaddrinfo(master, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as way:
            way.connect(to)
            found = str(way.getsockname()[0])
        is_own = found.startswith("127.") or found == "::1"
        names.insert(len(names) if is_own else 0, found)
    return names


class JoinedRank(Fed):
    """What `fsl_async.join` returns in a rank: a Fed, to close or use in a `with`."""

    def __init__(
        self, session: RankSession, context: ClientContext, proxies: RemoteRanks | None
    ) -> None:
        super().__init__(session.training, session.context(context))
        self._rank_session = session
        self._proxies = proxies
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
                self._rank_session.link.close()
                if self._proxies is not None:
                    self._proxies.close(REMOTE_LEAVES_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Leave the run. After an error of the script torchrun starts the ranks again."""
        self._stays()
        if os.getpid() != self._process:
            return
        if error is None or isinstance(error, RunFinishedError):
            self.close()
        elif isinstance(error, FslError) and not isinstance(error, NodeLostError):
            self._rank_session.failed(error)


def join_ranks(
    options: ClientOptions,
    place: Place,
    make_context: Callable[[ClientOptions, Membership, Callable[[str], None]], ClientContext],
    log: Callable[[str], None],
) -> JoinedRank:
    """Join in a rank of the user's torchrun; local rank 0 starts the node if there is none.

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

    def starts() -> None:
        if place.rank == 0:
            gang.start(options_to_wire(options), agent)

    link, proxies = reach(place, address_of(agent), starts=starts)
    session = RankSession(link, place, proxies)
    _, member = session.wait_welcome()
    return JoinedRank(session, make_context(options, member, log), proxies)


def process_group(device: torch.device) -> Any:
    """Make the default process group of the ranks, for collectives on `device`."""
    import torch.distributed as dist

    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    return dist
