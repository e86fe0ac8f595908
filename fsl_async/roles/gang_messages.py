"""The messages between the ranks of a gang and their node, over a local socket. Pure.

A gang is the ranks of one torchrun, which train one model together; its node is a client of the
parameter server and no rank. A node sends directives, numbered from 1 in each gang and the same
ones to every rank. They are read by the rules of `fsl_async.roles.messages`.

Vectors are in shared memory: a slot is a file descriptor of anonymous memory (memfd_create), which
comes with the `Slots` that names it; the manifest of an `Attached` comes in one as well.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from attrs import field, frozen

from fsl_async.roles.messages import Form, Message, Table
from fsl_async.roles.sync.delta import DIGEST
from fsl_async.roles.sync.progress import RunPosition

Code = Annotated[str, Form("a code", re.compile(r"[a-z][a-z0-9-]{0,63}").fullmatch)]
Fingerprint = Annotated[str, DIGEST]

# --- a rank's ------------------------------------------------------------------------------------


@frozen
class Hello(Message, tag="gang-hello/1"):
    """Rank: I am `rank` of `world`. generation: how often torchrun has started the gang before."""

    rank: int
    world: int
    generation: int


@frozen
class Shape(Message, tag="gang-shape/1"):
    """Rank: my model has a flat vector of so many values; send slots."""

    values: int


@frozen
class Attached(Message, tag="gang-attached/1"):
    """Rank: my ranges of the first weights are in slot 0.

    With a descriptor of {"manifest": Manifest.to_wire(), "frozen": Manifest.frozen_to_wire(),
    "ranges": [[start, stop], ...]} in msgpack; only rank 0's has a manifest and frozen tensors.
    """

    fingerprint: Fingerprint


@frozen
class Done(Message, tag="gang-done/1"):
    """Rank: directive `number` is carried out. Counts are those since the last snapshot."""

    number: int
    tokens: int = 0
    steps: int = 0
    finite: bool = True
    taken: bool = False
    dropped: int = 0
    metrics: dict[str, Any] = field(factory=dict)
    facts: dict[str, Any] = field(factory=dict)


@frozen
class Beat(Message, tag="gang-beat/1"):
    """Rank: what it has done so far, about once a second: the fields of `Meter.report`."""

    report: dict[str, Any]


@frozen
class BaseWanted(Message, tag="gang-base-wanted/1"):
    """Rank: it needs the base, for `fed.at_version`. The answer is `Base`, to all ranks."""


@frozen
class PaceReached(Message, tag="gang-pace-reached/1"):
    """Rank 0: progress is to be sent: the steps of the pace are trained, or the task asks."""


@frozen
class Ended(Message, tag="gang-ended/1"):
    """Rank: its training function has returned, or an error ended it for good.

    error: one line; empty: it returned. code: the exit code of that error.
    """

    error: str
    code: int = 0


# --- the node's ----------------------------------------------------------------------------------


@frozen
class Directive(Message, tag="gang-directive"):
    """Base of what a node sends."""

    number: int


@frozen
class Welcome(Directive, tag="gang-welcome/1"):
    """Node: the run's welcome. context: a map in msgpack, see `fsl_async.learn.gang.link`."""

    context: bytes


@frozen
class Slots(Directive, tag="gang-slots/1"):
    """Node: descriptors of these slots come with this message."""

    slots: list[int]


@frozen
class Snapshot(Directive, tag="gang-snapshot/1"):
    """Node: copy the weights into a slot for delta `sequence`; see `ports.SnapshotOrder`."""

    sequence: int
    slot: int
    hold: bool = False


@frozen
class Round(Directive, tag="gang-round/1"):
    """Node: train round `round`, then copy the weights into a slot; see `ports.RoundOrder`."""

    sequence: int
    slot: int
    round: int


@frozen
class Move(Directive, tag="gang-move/1"):
    """Node: get onto `version`, in slot `base`; how: see `ports.Move`."""

    version: int
    how: str
    base: int
    reference: int


@frozen
class Base(Directive, tag="gang-base/1"):
    """Node: the base is `version` (-1: incomplete) in a slot, and is not written until all are
    done.
    """

    version: int
    slot: int


@frozen
class Resume(Directive, tag="gang-resume/1"):
    """Node: train on after a snapshot that held."""


@frozen
class Stop(Directive, tag="gang-stop/2"):
    """Node: end training at the next agreed step. leaving: because this client was asked to end."""

    leaving: bool = False


@frozen
class Refuse(Directive, tag="gang-refuse/1"):
    """Node: the parameter server does not accept this model, or this client."""

    code: Code
    text: str


@frozen
class Position(Directive, tag="gang-position/1"):
    """Node: the parameter server announced where the run is."""

    position: RunPosition


@frozen
class Pace(Directive, tag="gang-pace/1"):
    """Node: say when so many steps are trained after each snapshot; 0: do not."""

    steps: int


@frozen
class Leave(Directive, tag="gang-leave/1"):
    """Node: the run is over here; the process may end."""


FROM_RANKS = Table(Hello, Shape, Attached, Done, Beat, BaseWanted, PaceReached, Ended)
FROM_NODE = Table(
    Welcome, Slots, Snapshot, Round, Move, Base, Resume, Stop, Refuse, Position, Pace, Leave
)
