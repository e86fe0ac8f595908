"""The plan of one method, model, workload and link. Pure.

`make_plan` makes a `Plan`; `as_dict` is the object of --json, `as_text` the printed table.

Seconds are those of the links alone. Each client has its own link, and the links of the parameter
server and the split server are never the narrowest. Computing is added on top; transfers that
overlap with it cost less. Bytes on the links are the estimated coded ones (the published accounting
has no coding).
"""

from typing import Any

from attrs import asdict, frozen

from fsl_async.accounting.sizes import (
    FORMATS,
    Accounting,
    Category,
    Direction,
    ModelShapes,
    OurAccounting,
    PublishedAccounting,
    Size,
)
from fsl_async.errors import UsageError
from fsl_async.plan.link import LinkSpec
from fsl_async.plan.methods import (
    ALL_METHODS,
    PRETRAIN,
    TUNED,
    Flow,
    Memory,
    PlannedMethod,
    Workload,
    trained,
)
from fsl_async.roles.phrasing import counted, megabytes

GIB = 1 << 30
"""The published figures are in it."""


@frozen
class Plan:
    """Bytes, seconds and memory of a run."""

    method: PlannedMethod
    shapes: ModelShapes
    work: Workload
    link: LinkSpec
    format: str
    as_published: bool
    flows: tuple[Flow, ...]
    first: tuple[Flow, ...]
    """Downloads of each client before the first round; not part of any round.

    The client that publishes these weights uploads them instead.
    """
    uses: int = 0
    """Uses of a radio channel a round, in real values, whatever the number of clients; 0: none."""

    def total(self, rounds: int) -> dict[tuple[Category, Direction], Size]:
        """Sizes of all clients over the first `rounds` rounds, by category and direction.

        A run's ledger has the same payloads.
        """
        sums: dict[tuple[Category, Direction], Size] = {}
        for flow in self.flows:
            key = flow.category, flow.direction
            sent = flow.total(rounds).times(self.work.clients)
            sums[key] = sums.get(key, Size()) + sent
        return sums

    def total_size(self, rounds: int) -> Size:
        """The sum over clients, categories and directions."""
        return sum(self.total(rounds).values(), Size())

    @property
    def first_size(self) -> Size:
        """The first downloads of all clients."""
        return sum((flow.size for flow in self.first), Size()).times(self.work.clients)

    @property
    def last_size(self) -> Size:
        """Return the downloads of all clients after the last round.

        Only sequential methods have some: for all clients but the one that trained last.
        """
        if not self.method.sequential:
            return Size()
        return sum((flow.size for flow in self.first), Size()).times(self.work.clients - 1)

    def mean_coded(self, direction: Direction) -> float:
        """Coded bytes per client and round in one direction, on average over rounds."""
        return sum(f.size.coded / f.every for f in self.flows if f.direction is direction)

    @property
    def seconds_per_round(self) -> float:
        """Seconds on the link, on average over rounds; sequential: all clients' turns."""
        size = sum(self.mean_coded(direction) for direction in Direction)
        one = self.link.seconds(round(size), self.method.waits(self.work))
        return one * self.work.clients if self.method.sequential else one

    @property
    def memory(self) -> Memory:
        """Memory of a client."""
        return self.method.memory(self.shapes, self.work.batch)

    @property
    def whole_memory(self) -> Memory:
        """Memory of training the whole model."""
        return trained(self.shapes.whole, self.work.batch)


def make_plan(
    *,
    method: str | PlannedMethod,
    shapes: ModelShapes,
    work: Workload,
    link: LinkSpec,
    number_format: str = "",
    as_published: bool = False,
    uses: int = 0,
) -> Plan:
    """Make a plan. An empty format means the default: bf16 for split learning, else uniform.

    method: by name, or as `fsl_async.plan.methods` makes it for adapters.

    Raises UsageError for an unknown method or format, and with `as_published` for a method
    that has no published figures.
    """
    if isinstance(method, PlannedMethod):
        found = method
    elif method in ALL_METHODS:
        found = ALL_METHODS[method]
    else:
        known = ", ".join([*ALL_METHODS, *TUNED])
        raise UsageError(f"--method {method[:80]!r} is unknown; known: {known}")
    count: Accounting
    if as_published:
        if not found.published:
            known = ", ".join(one.name for one in ALL_METHODS.values() if one.published)
            raise UsageError(
                f"--as-published: no figures of {found.name} were published; use {known}"
            )
        if number_format not in {"", "fp32"}:
            raise UsageError("--as-published counts in fp32: leave --format out")
        number_format, count = "fp32", PublishedAccounting()
    else:
        is_delta = found.name in {PRETRAIN.name, *TUNED}
        number_format = number_format or ("uniform" if is_delta else "bf16")
        if number_format not in FORMATS:
            raise UsageError(f"--format {number_format[:80]!r}: use one of {', '.join(FORMATS)}")
        count = OurAccounting(FORMATS[number_format])
    first = tuple(
        Flow(category, Direction.DOWN, count.initial(part))
        for category, part in found.first(shapes).items()
    )
    return Plan(
        method=found,
        shapes=shapes,
        work=work,
        link=link,
        format=number_format,
        as_published=as_published,
        flows=tuple(found.flows(shapes, work, count)),
        first=first,
        uses=uses,
    )


def as_dict(plan: Plan, rounds: int) -> dict[str, Any]:
    """The object that `plan --json` prints. Sizes in bytes; means over rounds are floats."""
    total, memory, whole = plan.total_size(rounds), plan.memory, plan.whole_memory
    return {
        "method": plan.method.name,
        "model": plan.shapes.name,
        "cut": plan.shapes.cut,
        "format": plan.format,
        "accounting": "published" if plan.as_published else "ours",
        **asdict(plan.work),
        "steps_per_round": plan.work.steps,
        "per_client_and_round": [_row(flow) for flow in plan.flows],
        "first_download_per_client": [_row(flow) for flow in plan.first],
        "up_bytes_per_client_and_round": plan.mean_coded(Direction.UP),
        "down_bytes_per_client_and_round": plan.mean_coded(Direction.DOWN),
        "channel_uses_per_round": plan.uses,
        "seconds_per_round": plan.seconds_per_round,
        "client_memory_bytes": {**asdict(memory), "total": memory.total},
        "whole_model_memory_bytes": {**asdict(whole), "total": whole.total},
        "rounds": rounds,
        "first_download_bytes": plan.first_size.coded,
        "last_download_bytes": plan.last_size.coded,
        "total_payload_bytes": total.payload,
        "total_bytes": total.coded,
        "total_gib": total.coded / GIB,
        "total_seconds": plan.seconds_per_round * rounds,
    }


def _row(flow: Flow) -> dict[str, Any]:
    return {
        "category": str(flow.category),
        "direction": str(flow.direction),
        "payload_bytes": flow.size.payload,
        "coded_bytes": flow.size.coded,
        "every_rounds": flow.every,
    }


def as_text(plan: Plan, rounds: int) -> list[str]:
    """Return the table as lines of text."""
    work, memory, whole = plan.work, plan.memory, plan.whole_memory
    total = plan.total_size(rounds)
    kept = "as published" if plan.as_published else f"{plan.format}; coded sizes are estimates"
    where = f" cut at {plan.shapes.cut}" if plan.method.is_cut else ""
    share = f"{memory.total / whole.total:.0%}"
    lines = [
        (
            f"{plan.method.name}, {plan.shapes.name}{where}, {counted(work.clients, 'client')};"
            f" each {work.samples:,} samples in batches of {work.batch}"
        ),
        f"{plan.shapes.name}: {plan.shapes.whole.parameters:,} parameters",
        f"({kept})",
        "",
        f"{'each client and round':24}{'direction':>10}{'payload':>13}{'coded':>13}",
    ]
    lines += [_line(flow) for flow in plan.flows]
    up, down = (plan.mean_coded(direction) for direction in Direction)
    lines += [
        f"{'sum, on average':24}{'up':>10}{'':13}{megabytes(up):>13}",
        f"{'':24}{'down':>10}{'':13}{megabytes(down):>13}",
        "",
        *[f"{'over the air':24}{plan.uses:>10,}  channel uses a round"] * bool(plan.uses),
        *(_line(flow, "first: ") for flow in plan.first),
        "",
        (
            f"{'seconds a round':24}{plan.seconds_per_round:>10,.2f}  on the link;"
            " computing comes on top"
        ),
        (
            f"{'client memory':24}{megabytes(memory.total):>10}  {share} of the whole model's"
            f" {megabytes(whole.total)}:"
        ),
        *(
            f"{'  ' + name:24}{megabytes(size):>10}  {megabytes(asdict(whole)[name]):>10}"
            for name, size in asdict(memory).items()
            if size or name != "activations"
        ),
        *([] if memory.activations else ["  activations come on top"]),
    ]
    if rounds:
        lines += [
            "",
            (
                f"{'total of all clients':24}{megabytes(total.coded):>12} in {rounds:,} rounds;"
                f" {megabytes(total.payload)} before coding"
            ),
            *([f"{'':24}{total.coded / GIB:>8,.2f} GiB"] if plan.as_published else []),
            f"{'':24}{megabytes(plan.first_size.coded):>12} before the first round",
            *(
                [f"{'':24}{megabytes(plan.last_size.coded):>12} after the last"]
                if plan.method.sequential
                else []
            ),
            f"{'':24}{plan.seconds_per_round * rounds / 3600:>10,.2f} h on the link",
        ]
    return lines


def _line(flow: Flow, before: str = "") -> str:
    often = f"  every {flow.every} rounds" if flow.every > 1 else ""
    sizes = f"{megabytes(flow.size.payload):>13}{megabytes(flow.size.coded):>13}"
    return f"{before + flow.category:24}{flow.direction:>10}{sizes}{often}"
