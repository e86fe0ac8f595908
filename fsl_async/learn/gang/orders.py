"""Directives of a rank's node, carried out at steps that all ranks agree on.

All ranks get the same numbered directives. Rank 0 looks at its socket about once a second; one
all-reduce of four numbers tells the others how many directives it has, and all of them apply
exactly these. So whatever `fed` shows (that the run goes on, how far it is) changes at the same
step in all ranks, and no rank leaves the loop while another one waits for it in a collective.

Where training waits anyway (at attach, held after a snapshot, between rounds), every rank waits on
its own socket and applies one directive after the other: the same ones, so all of them go on after
the same one.

`RankTraining` is the training side of one rank, with its orders and vectors from the node. A rank
copies its ranges into slots and reads its ranges from them; the exchange side, with the vectors of
the whole model, is in the node. Tokens are each rank's own, and the node adds them up.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgpack  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
from torch import nn

from fsl_async.errors import TaskError
from fsl_async.learn.client.buffers import ModelWeights
from fsl_async.learn.client.ports import (
    Move,
    Moved,
    Order,
    Orders,
    RebaseOrder,
    RoundOrder,
    SnapshotOrder,
    Vector,
    Work,
)
from fsl_async.learn.client.schedule import RunClock
from fsl_async.learn.client.training import Training
from fsl_async.learn.gang.link import NodeLostError, mapped, written
from fsl_async.learn.models.adapters import View
from fsl_async.roles import gang_messages as msg
from fsl_async.store.model.manifest import Manifest

if TYPE_CHECKING:
    from fsl_async.learn.gang.link import Link
    from fsl_async.learn.gang.remote import RemoteLink
    from fsl_async.roles.messages import Message


CHECK_S = 1.0
"""How often ranks look whether something is asked of them."""
MOST_STEPS = 1000
_UNKNOWN = -1.0


class AgreedClock(RunClock):
    """The run's progress, which changes at agreed steps only: learning rates follow it."""

    def __init__(self) -> None:
        super().__init__()
        self._agreed: tuple[float | None, float] | None = None

    @property
    def own(self) -> tuple[float | None, float]:
        """Progress and `decays_from` by this rank's clock."""
        return super().progress, super().decays_from

    def agree(self, progress: float | None, decays_from: float) -> None:
        """All ranks have these from now on."""
        self._agreed = progress, decays_from

    @property
    def progress(self) -> float | None:
        """Share of the run that is done; None where no end is planned."""
        return None if self._agreed is None else self._agreed[0]

    @property
    def decays_from(self) -> float:
        """Progress at which the decay of "wsd" begins."""
        return super().decays_from if self._agreed is None else self._agreed[1]


class RankOrders(Orders):
    """The queue of a rank's training thread, filled by its node. For that thread alone.

    check_s: how often ranks agree. on_check: called then, with nothing asked of it.
    """

    def __init__(self, link: Link | RemoteLink, rank: int, *, check_s: float = CHECK_S) -> None:
        super().__init__()
        self.is_leaving = False
        """Whether it was stopped because its client was asked to end."""
        self.released = False
        """Whether the node has said that this process may end."""
        self.context: bytes | None = None
        self.base: msg.Base | None = None
        """The answer to BaseWanted."""
        self.current: msg.Snapshot | msg.Round | msg.Move | None = None
        """Of the order that was taken last."""
        self.vectors: dict[int, Vector] = {}
        self.own_slot = -1
        """The first slot of all, for the weights at attach."""
        self.values = 0
        self.clock = AgreedClock()
        self.link = link
        self.on_check: Callable[[], None] = lambda: None
        self.passed: Callable[[int], int] = lambda number: number
        """Of rank 0: how many of so many directives the ranks on other machines have."""
        self._rank = rank
        self._check_s = check_s
        self._group: dist.ProcessGroupGloo | None = None
        self._received: deque[tuple[Message, list[int]]] = deque()
        self._applied = 0
        self._directives: deque[msg.Snapshot | msg.Round | msg.Move] = deque()  # of the orders
        self._left = 1  # steps until the next agreement
        self._every = 1
        self._agreed_at = time.monotonic()

    # --- what `Training` and `Fed` call ---

    def asked(self) -> bool:
        """Count a step; at an agreed one, see what is asked. Whether there is something."""
        if self._group is not None:
            self._left -= 1
            if self._left <= 0:
                self.agree()
        return self.attention

    def _wait_for(self, holds: Callable[[], bool], seconds: float | None = None) -> None:
        while not holds():
            self.wait_one()

    def _next_order(self) -> Order:
        self.current = self._directives.popleft()
        return super()._next_order()

    # --- agreement ---

    def begin(self, group: dist.ProcessGroupGloo) -> None:
        """Agree by collectives of this gloo group of all ranks."""
        self._group = group

    def agree(self) -> None:
        """Apply the directives that rank 0 has. All ranks call it at the same step."""
        now = time.monotonic()
        mine = [-math.inf] * 4
        if self._rank == 0:
            self._receive_ready()
            progress, decays_from = self.clock.own
            # What is still on its way to another machine waits for the next time, not all ranks.
            number = max(self._applied, self.passed(self._applied + len(self._received)))
            shown = _UNKNOWN if progress is None else progress
            mine = [float(number), shown, decays_from, float(self._next_every(now))]
        found = torch.tensor(mine, dtype=torch.float64)
        self._all_reduce(found, dist.ReduceOp.MAX)
        number, progress, decays_from, every = found.tolist()
        while self._applied < int(number):
            self.wait_one()
        self.clock.agree(None if progress == _UNKNOWN else progress, decays_from)
        self._left = self._every = int(every)
        self._agreed_at = time.monotonic()
        self.on_check()

    def all_true(self, mine: bool) -> bool:
        """Whether it is true at all ranks, which call it at the same point."""
        found = torch.tensor([int(mine)])
        self._all_reduce(found, dist.ReduceOp.MIN)
        return bool(found.item())

    def _all_reduce(self, found: torch.Tensor, by: Any) -> None:
        assert self._group is not None
        options = dist.AllreduceOptions()
        options.reduceOp = by
        self._group.allreduce([found], options).wait()  # type: ignore[attr-defined]

    def _next_every(self, now: float) -> int:
        step_s = (now - self._agreed_at) / self._every
        return min(MOST_STEPS, max(1, round(self._check_s / max(step_s, 1e-9))))

    # --- directives ---

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Apply directives until something holds. Raises RefusedError and RunFinishedError."""
        while not holds():
            self.check_goes_on()
            self.wait_one()

    def wait_one(self) -> None:
        """Wait for the next directive, and apply it. Raises NodeLostError."""
        message, files = self._received.popleft() if self._received else self._next()
        self._apply(message, files)

    def _receive_ready(self) -> None:
        try:
            while (found := self.link.receive(waits=False)) is not None:
                self._received.append(found)
        except (EOFError, OSError) as error:
            raise _lost(error) from error

    def _next(self) -> tuple[Message, list[int]]:
        try:
            found = self.link.receive()
        except (EOFError, OSError) as error:
            raise _lost(error) from error
        assert found is not None
        return found

    def _apply(self, message: Message, files: list[int]) -> None:  # noqa: C901 - a table
        assert isinstance(message, msg.Directive)
        self._applied += 1
        if message.number != self._applied:
            raise TaskError(
                f"the node sent directive {message.number}, and {self._applied} was expected"
            )
        match message:
            case msg.Welcome(context=context):
                self.context = context
            case msg.Slots(slots=slots):
                self.vectors |= {
                    slot: mapped(file, self.values) for slot, file in zip(slots, files, strict=True)
                }
                self.own_slot = slots[0] if self.own_slot < 0 else self.own_slot
            case msg.Snapshot():
                self._add(SnapshotOrder(message.sequence, message.hold), message)
            case msg.Round():
                self._add(RoundOrder(message.sequence, message.round), message)
            case msg.Move():
                self._add(RebaseOrder(message.how == "take"), message)
            case msg.Base():
                self.base = message
            case msg.Resume():
                self.resume()
            case msg.Stop(leaving=leaving):
                # Of the first one: all ranks must evaluate, or none.
                self.is_leaving = self.is_leaving if self.stopped else leaving
                self.stop()
            case msg.Refuse():
                self.refuse(message.code, message.text)
            case msg.Position():
                self.clock.announced(message.position)
            case msg.Pace(steps=steps):
                self.count_steps(steps)
            case msg.Leave():
                self.released = True
                self.stop()

    def _add(self, order: Order, directive: msg.Snapshot | msg.Round | msg.Move) -> None:
        self._orders.append(order)
        self._directives.append(directive)
        self.attention = True


def _lost(error: BaseException) -> NodeLostError:
    return NodeLostError(f"this rank's node has ended ({error or 'closed'})")


AGREEMENT_TIMEOUT = timedelta(minutes=30)
"""One rank may evaluate or compile alone, but not for longer than that."""


def agreement_group(rank: int, generation: int) -> dist.ProcessGroupGloo:
    """A gloo group of all ranks, beside the task's own groups, of whatever backend they are.

    Not dist.new_group: torchrun may keep one store for all starts of its ranks, and there a rank
    could find the address of a dead one.
    """
    store = store_of_ranks(generation)
    return dist.ProcessGroupGloo(store, rank, dist.get_world_size(), AGREEMENT_TIMEOUT)


def store_of_ranks(generation: int) -> Any:
    """The part of torchrun's store that this start of its ranks has for itself.

    Raises RuntimeError where there is none: not under torchrun, and before init_process_group.
    """
    store = dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        int(os.environ["WORLD_SIZE"]),
        is_master=False,
    )
    return dist.PrefixStore(  # type: ignore[attr-defined]
        f"fsl-gang/{generation}", store
    )


class RankExchange:
    """The `ExchangePort` of a rank: passes on to the node what concerns the vectors."""

    def __init__(self, orders: RankOrders, rank: int) -> None:
        self._orders = orders
        self._rank = rank
        self.weights: ModelWeights | None = None
        """The attached model's weights. Of replicas, each rank copies all in, and fewer out."""

    def free_vector(self, values: int) -> Vector:
        """The vector to copy into: at attach the first slot, later that of the order."""
        orders = self._orders
        if not orders.values:
            orders.values = values
            orders.link.send(msg.Shape(values))
            orders.wait_until(lambda: orders.own_slot >= 0)
            return orders.vectors[orders.own_slot]
        current = orders.current
        assert isinstance(current, msg.Snapshot | msg.Round)
        return orders.vectors[current.slot]

    def attach(self, manifest: Manifest, own: Vector) -> None:
        """Tell the node that the first weights are copied, and of which model."""
        weights = self.weights
        assert weights is not None
        body = {
            "manifest": manifest.to_wire() if self._rank == 0 else [],
            "frozen": manifest.frozen_to_wire() if self._rank == 0 else [],
            "ranges": weights.ranges(),
            "reads": weights.ranges(copied_out=False),
        }
        file = written(msgpack.packb(body))
        try:
            self._orders.link.send(msg.Attached(manifest.fingerprint), [file])
        finally:
            os.close(file)

    def put_snapshot(self, sequence: int, snapshot: Vector | None, work: Work) -> None:
        """The ranges of a snapshot are copied. Raises TaskError for scalars of zeroth order."""
        if snapshot is None:
            raise TaskError("--ranks: steps of zeroth order are made by a client of one process")
        self._done(
            tokens=work.tokens,
            steps=work.steps,
            finite=work.finite,
            metrics=work.metrics,
            facts=work.facts,
        )

    def reach_pace(self) -> None:
        """Report it to the node, once for all ranks, which reach it at the same step."""
        if self._rank == 0:
            self._orders.link.send(msg.PaceReached())

    def rebase(self, move: Callable[[Move], Moved], *, discard: bool) -> None:
        """Call `move` with the vectors of the order."""
        orders, current = self._orders, self._orders.current
        assert isinstance(current, msg.Move)
        base, reference = orders.vectors[current.base], orders.vectors[current.reference]
        moved = move(Move(current.version, current.how, base, reference))  # type: ignore[arg-type]
        self._done(taken=moved.taken, dropped=moved.dropped_tokens)

    def read_base(self, read: Callable[[Vector], None]) -> int:
        """Call `read` with the base; returns its version. All ranks call it at the same point."""
        orders = self._orders
        orders.link.send(msg.BaseWanted())
        while orders.base is None:
            orders.wait_one()
        given, orders.base = orders.base, None
        if given.version >= 0:
            read(orders.vectors[given.slot])
        orders.link.send(msg.Done(given.number))
        return given.version

    def _done(self, **values: object) -> None:
        assert self._orders.current is not None
        self._orders.link.send(msg.Done(self._orders.current.number, **values))  # type: ignore[arg-type]


class RankTraining(Training):
    """The training side of rank `rank`, whose node is at the other end of the orders' link."""

    orders: RankOrders

    def __init__(self, orders: RankOrders, rank: int, generation: int = 0) -> None:
        self._generation = generation
        self._ranks_exchange = RankExchange(orders, rank)
        super().__init__(orders, self._ranks_exchange)
        self.clock = orders.clock
        self._rank = rank
        orders.on_check = self._beat

    def attach(self, module: nn.Module, exchange: Sequence[str] | View | None = None) -> None:
        """Take the model, of which this rank may hold a part; see `Training.attach`.

        Raises TaskError also where the ranks do not belong to one process group.
        """
        if not dist.is_initialized():
            raise TaskError(
                "fed.attach: the ranks of this torchrun have no process group: call"
                " torch.distributed.init_process_group first"
            )
        if self._weights is None:
            self.orders.begin(agreement_group(self._rank, self._generation))
        super().attach(module, exchange)
        self.orders.agree()

    def _weights_of(self, module: nn.Module, exchange: Sequence[str] | View | None) -> ModelWeights:
        weights = ModelWeights(
            module,
            exchange,
            buffers=self.buffers,
            checks_frozen=self.checks_frozen,
            copies_plain=self._rank == 0,
        )
        self._ranks_exchange.weights = weights
        return weights

    def _is_finite(self, weights: ModelWeights) -> bool:
        """Whether no weight of any rank is NaN or infinite."""
        return self.orders.all_true(weights.is_finite())

    def serve(self) -> None:
        """Carry out orders after the training function has returned, until the node is done."""
        orders = self.orders
        orders.link.send(msg.Ended(""))
        orders.by_rounds = False
        if self._round is not None:  # half of a round is no use
            self.meter.forget()
            self.end_round()
        while not orders.released:
            orders.wait_one()
            if self._weights is not None:
                self.attend()

    def _beat(self) -> None:
        self.orders.link.send(msg.Beat(self.meter.report()))
