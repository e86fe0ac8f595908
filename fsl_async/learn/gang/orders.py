"""Directives of a gang's node, carried out by the gang, all ranks of the client, at the same steps.

The node speaks to rank 0 alone. About once a second all ranks agree: in one collective
(`group.RankGroup`) rank 0 passes on the directives that have come, and the run's progress, and the
ranks report what they have done. All of them apply the same directives there. So whatever `fed`
shows (that the run goes on, how far it is) changes at the same step in all ranks, and no rank
leaves the loop while another one waits for it in a collective. Where training waits anyway (at
attach, held after a snapshot, between rounds), ranks agree as soon as a directive is there.

`RankTraining` is the training side of one rank, with its orders and vectors from the node. A rank
copies its ranges into slots and reads its ranges from them; the exchange side, with the vectors of
the whole model, is in the node. Once all ranks have carried out an order, rank 0 reports it.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from fsl_async.errors import TaskError
from fsl_async.learn.client.buffers import ModelWeights
from fsl_async.learn.client.ports import (
    NO_VERSION,
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
from fsl_async.learn.gang.group import DOWN, UP, Range, RankGroup, check_parts, joined
from fsl_async.learn.gang.link import Link, NodeLostError, shared_vector, sparse_vector
from fsl_async.learn.models.adapters import View
from fsl_async.roles.sync.progress import RunPosition
from fsl_async.store.model.manifest import Manifest

CHECK_S = 1.0
"""How often ranks look whether something is asked of them."""
TRANSFER_CHECK_S = 0.02
"""The same while they wait for parts of a vector on their way to another machine."""
MOST_STEPS = 1000
STEP, WAIT, END = "fed.step", "waiting for the node", "the end of training"
"""Points at which ranks agree, by what they do there."""
SUMS = ("tokens", "tokens_per_s", "left_out")
"""Counts that are added up; all ranks have made the same steps."""


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

    link: of rank 0, with the node. check_s: how often ranks agree. report: what this rank has done,
    for the node.
    """

    def __init__(self, group: RankGroup, link: Link | None, *, check_s: float = CHECK_S) -> None:
        super().__init__()
        self.group = group
        self.is_leaving = False
        """Whether it was stopped because its client was asked to end."""
        self.released = False
        """Whether the node has said that this process may end."""
        self.context: bytes | None = None
        """The welcome of the run, see `fsl_async.nodes.client.gang`."""
        self.base: tuple[int, int] | None = None
        """Version and slot of the base that this rank asked for; -1: incomplete."""
        self.current: tuple[Any, ...] = ()
        """The directive of the order that was taken last."""
        self.values = 0
        """Length of the flat vector; known from `attach` on."""
        self.vectors: dict[int, Vector] = {}
        self.own_slot = -1
        """The first slot of all, for the weights at attach."""
        self.reads: list[list[Range]] = []
        """The ranges of the vector that each rank reads."""
        self.clock = AgreedClock()
        self.report: Callable[[], dict[str, float]] = dict
        self._link = link
        self._check_s = check_s
        self._waiting: deque[tuple[list[Any], int]] = deque()
        """Directives, and the number of the transfer that each needs first; 0: none."""
        self._transfers = 0
        self._arrived = 0
        """Transfers that have begun, and those that this rank has."""
        self._orders_taken: deque[tuple[Any, ...]] = deque()  # directives of the orders
        self._steps = 0  # since the ranks agreed last
        self._every = 1
        self._agreed_at = time.monotonic()
        self._handlers: dict[str, Callable[..., None]] = {
            "welcome": self._welcomed,
            "slots": self._take_slots,
            "snapshot": self._order_snapshot,
            "round": self._order_round,
            "move": self._order_move,
            "base": self._give_base,
            "resume": self.resume,
            "stop": self._stop,
            "refuse": self.refuse,
            "position": self._position,
            "pace": self.count_steps,
            "leave": self._leave,
        }

    def tell(self, name: str, *values: object) -> None:
        """Send the node a message, once for all ranks. Raises NodeLostError."""
        if self._link is not None:
            try:
                self._link.send(name, *values)
            except OSError as error:
                raise _lost(error) from error

    # --- what `Training` and `Fed` call ---

    def asked(self) -> bool:
        """Count a step; at an agreed one, see what is asked. Whether there is something."""
        self._steps += 1
        if self._steps >= self._every:
            self.agree(STEP)
        return self.attention

    def _wait_for(self, holds: Callable[[], bool], seconds: float | None = None) -> None:
        while not holds():
            self.agree(WAIT)

    def _next_order(self) -> Order:
        self.current = self._orders_taken.popleft()
        return super()._next_order()

    # --- agreement ---

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Apply directives until something holds. Raises RefusedError and RunFinishedError."""
        while not holds():
            self.check_goes_on()
            self.agree(WAIT)

    def agree(self, where: str) -> None:
        """Apply the directives that rank 0 has. All ranks call it at the same step.

        Raises NodeLostError.
        """
        mine = {"arrived": self._arrived, "report": self.report() if where == STEP else {}}
        if self.group.leads:
            now = time.monotonic()
            every = self._every
            if where == STEP:
                step_s = (now - self._agreed_at) / max(1, self._steps)
                every = min(MOST_STEPS, max(1, round(self._check_s / max(step_s, 1e-9))))
            mine |= {"directives": self._received(waits=where == WAIT)}
            mine |= {"clock": self.clock.own, "every": every}
        found = self.group.gathered(where, mine)
        for directive in found[0]["directives"]:
            if directive[0] == "slots":  # the transfer of a directive behind it needs them
                self._take_slots(*directive[1:])
            else:
                self._waiting.append((directive, self._transfer(directive)))
        arrived = min(one["arrived"] for one in found)
        while self._waiting and self._waiting[0][1] <= arrived:
            name, *values = self._waiting.popleft()[0]
            self._handlers[name](*values)
        self.clock.agree(*found[0]["clock"])
        self._every, self._steps, self._agreed_at = found[0]["every"], 0, time.monotonic()
        if where == STEP and self.group.leads:
            self.tell("beat", joined([one["report"] for one in found], SUMS))

    def _received(self, *, waits: bool) -> list[list[Any]]:
        """Return the directives that have come; waits: wait for one until the next agreement."""
        assert self._link is not None
        left = (TRANSFER_CHECK_S if self._waiting else self._check_s) if waits else 0.0
        found: list[list[Any]] = []
        try:
            while (message := self._link.receive(left)) is not None:
                found.append(message)
                left = 0.0
                if message[0] == "leave":  # the node closes the connection then
                    break
        except (EOFError, OSError) as error:
            raise _lost(error) from error
        return found

    def _transfer(self, directive: list[Any]) -> int:
        """Begin to move what ranks on other machines read for a directive.

        Returns the number of the transfer; 0: none is needed.
        """
        match directive:
            case ["move", _, how, base, reference]:
                slots = [base] if how != "move" or base == reference else [base, reference]
            case ["base", version, slot] if version != NO_VERSION:
                slots = [slot]
            case _:
                return 0
        group, rank = self.group, self.group.place.rank
        if not group.remote:
            return 0
        self._transfers += 1
        vectors = [self.vectors[slot] for slot in slots]
        if rank in group.remote:
            parts = [
                part
                for vector in vectors
                for part in group.receive(vector, self.reads[rank], 0, DOWN)
            ]
            group.when_done(parts, self._has_arrived)
            return self._transfers
        self._arrived += 1
        if group.leads:
            parts = [
                part
                for to in group.remote
                for vector in vectors
                for part in group.send(vector, self.reads[to], to, DOWN)
            ]
            group.when_done(parts)
        return self._transfers

    def _has_arrived(self) -> None:
        self._arrived += 1

    # --- directives ---

    def _welcomed(self, context: bytes) -> None:
        self.context = context

    def _take_slots(self, slots: list[int], paths: list[str]) -> None:
        for slot, path in zip(slots, paths, strict=True):
            is_remote = self.group.place.is_remote
            self.vectors[slot] = (
                sparse_vector(self.values) if is_remote else shared_vector(path, self.values)
            )
        self.own_slot = slots[0] if self.own_slot < 0 else self.own_slot

    def _order_snapshot(self, sequence: int, slot: int, hold: bool) -> None:
        self._add(SnapshotOrder(sequence, hold), slot)

    def _order_round(self, sequence: int, slot: int, number: int) -> None:
        self._add(RoundOrder(sequence, number), slot)

    def _order_move(self, version: int, how: str, base: int, reference: int) -> None:
        self._add(RebaseOrder(how == "take"), version, how, base, reference)

    def _add(self, order: Order, *directive: Any) -> None:
        self._orders.append(order)
        self._orders_taken.append(directive)
        self.attention = True

    def _give_base(self, version: int, slot: int) -> None:
        self.base = version, slot

    def _stop(self, leaving: bool) -> None:
        # Of the first one: all ranks must evaluate, or none.
        self.is_leaving = self.is_leaving if self.stopped else leaving
        self.stop()

    def _position(self, position: dict[str, Any]) -> None:
        self.clock.announced(RunPosition(**position))

    def _leave(self) -> None:
        self.released = True
        self.stop()


def _lost(error: BaseException) -> NodeLostError:
    return NodeLostError(f"this client's node has ended ({error or 'closed'})")


class RankExchange:
    """The `ExchangePort` of a rank: passes on to the node what concerns the vectors."""

    def __init__(self, orders: RankOrders) -> None:
        self._orders = orders
        self._group = orders.group
        self._writes: list[list[Range]] = []
        """The ranges of the vector that each rank copies out."""
        self.weights: ModelWeights | None = None
        """The attached model's weights. Of replicas, each rank copies all in, and fewer out."""

    def free_vector(self, values: int) -> Vector:
        """The vector to copy into: at attach the first slot, later that of the order."""
        orders = self._orders
        if orders.values:
            return orders.vectors[orders.current[0]]
        sizes = self._group.gathered("fed.attach", values)
        if len(set(sizes)) > 1:
            shown = ", ".join(f"{one:,}" for one in sorted(set(sizes)))
            raise TaskError(f"the ranks have models of different sizes: {shown} values")
        orders.values = values
        orders.tell("shape", values)
        orders.wait_until(lambda: orders.own_slot >= 0)
        return orders.vectors[orders.own_slot]

    def attach(self, manifest: Manifest, own: Vector) -> None:
        """Tell the node that the first weights are copied, and of which model."""
        weights = self.weights
        assert weights is not None
        mine = (manifest.fingerprint, weights.ranges(), weights.ranges(copied_out=False))
        found = self._group.gathered("fed.attach", mine)
        self._writes = [writes for _, writes, _ in found]
        self._orders.reads = [reads for _, _, reads in found]
        check_parts(manifest.values, [fingerprint for fingerprint, _, _ in found], self._writes)
        self._tell_with(own, "attached", manifest.to_wire(), manifest.frozen_to_wire())

    def put_snapshot(self, sequence: int, snapshot: Vector | None, work: Work) -> None:
        """The ranges of a snapshot are copied. Raises TaskError for scalars of zeroth order."""
        if snapshot is None:
            raise TaskError("--ranks: steps of zeroth order are made by a client of one process")
        found = self._group.gathered(
            "a snapshot", (work.steps, work.tokens, work.finite, work.metrics)
        )
        steps = [one[0] for one in found]
        if len(set(steps)) > 1:
            raise TaskError(
                f"the ranks have made different numbers of steps ({', '.join(map(str, steps))}):"
                " every rank must call fed.step after each of its steps"
            )
        done = {
            "tokens": sum(one[1] for one in found),
            "steps": work.steps,
            "finite": all(one[2] for one in found),
            "metrics": joined([one[3] for one in found]),
            "facts": dict(work.facts),
        }
        self._tell_with(snapshot, "snapshot", done)

    def _tell_with(self, vector: Vector, name: str, *values: object) -> None:
        """Send the node a message once all ranks' parts of a vector are there."""
        group, rank = self._group, self._group.place.rank
        if group.leads and group.remote:
            parts = [
                part
                for origin in group.remote
                for part in group.receive(vector, self._writes[origin], origin, UP)
            ]
            group.when_done(parts, lambda: self._orders.tell(name, *values))
        elif group.leads:
            self._orders.tell(name, *values)
        elif rank in group.remote:
            group.when_done(group.send(vector, self._writes[rank], 0, UP))

    def reach_pace(self) -> None:
        """Report it to the node, once for all ranks, which reach it at the same step."""
        self._orders.tell("pace_reached")

    def rebase(self, move: Callable[[Move], Moved], *, discard: bool) -> None:
        """Call `move` with the vectors of the order."""
        vectors = self._orders.vectors
        version, how, base, reference = self._orders.current
        moved = move(Move(version, how, vectors[base], vectors[reference]))
        found = self._group.gathered("a rebase", (moved.taken, moved.dropped_tokens))
        self._orders.tell("moved", any(one[0] for one in found), sum(one[1] for one in found))

    def read_base(self, read: Callable[[Vector], None]) -> int:
        """Call `read` with the base; returns its version. All ranks call it at the same point."""
        orders = self._orders
        self._group.all_here("fed.at_version")
        orders.tell("want_base")
        while orders.base is None:
            orders.agree(WAIT)
        (version, slot), orders.base = orders.base, None
        if version != NO_VERSION:
            read(orders.vectors[slot])
        self._group.gathered("fed.at_version")
        orders.tell("base_read")
        return version


class RankTraining(Training):
    """The training side of a rank, whose node rank 0 speaks to."""

    orders: RankOrders

    def __init__(self, orders: RankOrders) -> None:
        self._ranks_exchange = RankExchange(orders)
        super().__init__(orders, self._ranks_exchange)
        self.clock = orders.clock
        orders.report = self.meter.report

    def attach(self, module: nn.Module, exchange: Sequence[str] | View | None = None) -> None:
        """Take the model, of which this rank may hold a part; see `Training.attach`.

        Raises TaskError also where the ranks do not belong to one process group.
        """
        if not dist.is_initialized():
            raise TaskError(
                "fed.attach: the ranks of this torchrun have no process group: call"
                " torch.distributed.init_process_group first"
            )
        super().attach(module, exchange)

    def _weights_of(self, module: nn.Module, exchange: Sequence[str] | View | None) -> ModelWeights:
        weights = ModelWeights(
            module,
            exchange,
            buffers=self.buffers,
            checks_frozen=self.checks_frozen,
            copies_plain=self.orders.group.leads,
        )
        self._ranks_exchange.weights = weights
        return weights

    def _is_finite(self, weights: ModelWeights) -> bool:
        """Whether no weight of any rank is NaN or infinite."""
        return all(self.orders.group.gathered("a rebase", weights.is_finite()))

    def serve(self) -> None:
        """Carry out orders after the training function has returned, until the node is done."""
        orders = self.orders
        orders.group.all_here(END)
        orders.tell("ended")
        orders.by_rounds = False
        if self._round is not None:  # half of a round is no use
            self.meter.forget()
            self.end_round()
        while not orders.released:
            orders.agree(WAIT)
            if self._weights is not None:
                self.attend()
        with contextlib.suppress(NodeLostError):  # none ends before all have been released
            orders.group.gathered(END)
        orders.group.close()
