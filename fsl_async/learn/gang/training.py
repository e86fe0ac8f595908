"""The training side of one rank: `Training` with its orders and vectors from the node.

A rank copies its ranges into slots and reads its ranges from them; the exchange side, with the
vectors of the whole model, is in the node. Tokens are each rank's own, and the node adds them up.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import msgpack  # type: ignore[import-untyped]
import torch.distributed as dist
from torch import nn

from fsl_async.errors import TaskError
from fsl_async.learn.client.buffers import ModelWeights
from fsl_async.learn.client.ports import Move, Moved, Vector, Work
from fsl_async.learn.client.training import Training
from fsl_async.learn.gang.memory import written
from fsl_async.learn.gang.orders import RankOrders
from fsl_async.learn.models.exchanged import View
from fsl_async.roles import gang_messages as msg
from fsl_async.store.manifest import Manifest

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
