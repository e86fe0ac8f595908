"""The messages between the parameter servers of a roster. Pure.

They travel on the control lane of a session between a member and the coordinator, and are read by
the rules of `fsl_async.roles.messages`. Global weights travel as a stream in the same session; the
metadata of its offer is `GlobalMeta`.

A *round* has the number of the global weights that it begins with: it leads from G_k to G_(k+1).
An *attempt* is one reduction; its number is larger than that of every attempt before it.
"""

from __future__ import annotations

from typing import Annotated, Any

from attrs import field, frozen

from fsl_async.roles.groups.events import Decision
from fsl_async.roles.messages import Form, Greeting, Message, MessageError, Meta, Table
from fsl_async.roles.names import NAME
from fsl_async.roles.sync.delta import DIGEST, OptionalDigest

Digest = Annotated[str, DIGEST]
Name = Annotated[str, Form("the name of a parameter server", NAME.fullmatch)]

MAX_MEMBERS = 1024
MAX_TOKENS = 10**15
MAX_PIECE_VALUES = 1 << 28
PIECE_VALUES = 1 << 24
LEAST_PIECE_VALUES = 1 << 14
"""Smaller pieces take long for nothing: each is one exchange of all members."""
MAX_BLOB = 4096
"""Bytes of an address as gloo gives it; it is about 175."""


@frozen
class GroupHello(Greeting, tag="group_hello/1"):
    """Member: this session is that of a parameter server of the roster."""


@frozen
class GroupWelcome(Greeting, tag="group_welcome/1"):
    """Coordinator: the session is open."""


@frozen
class AskGlobal(Message, tag="ask_global/1"):
    """Member: I hold G_`round` with `digest` (-1: none) of `run`; answer with the newest."""

    round: int
    digest: OptionalDigest
    run: OptionalDigest = ""


@frozen
class Decided(Message, tag="decided/1"):
    """Coordinator: the newest global weights are G_`round`, the result of `attempt`.

    counted: the receiver's cut of the round that it is in was among the contributors. run: drawn
    when the run's first weights became G_0, so that no two runs are taken for one.
    """

    round: int
    attempt: int
    digest: Digest
    counted: bool
    run: Digest

    @property
    def decision(self) -> Decision:
        """The decision that it passes on."""
        return Decision(self.round, self.attempt, self.digest, self.run)


@frozen
class VersionMade(Message, tag="version_made/1"):
    """Member: my group made this version of deltas. Rounds are due by the fastest group."""

    version: int


@frozen
class Ending(Message, tag="ending/1"):
    """Member: my group's run ends. gained: it merged what is in no decided round."""

    gained: bool


@frozen
class AllEnded(Message, tag="all_ended/1"):
    """Coordinator: all groups end, hold the newest global weights, and have nothing besides."""


@frozen
class Poll(Message, tag="poll/1"):
    """Coordinator: offer a cut for `round`; the same one again, if there is one."""

    round: int


@frozen
class Promise(Message, tag="promise/1"):
    """Member: this cut for `round` is durable, and stays until the round is decided.

    tokens: merged by the group since its last cut that counted, from `begin` to `end` of its total.
    behind: global rounds that were decided without them. piece_values: the most that this member
    reduces in one call, by its own limit of the rate.
    """

    round: int
    version: int
    digest: Digest
    begin: int
    end: int
    behind: int
    piece_values: int

    def __attrs_post_init__(self) -> None:
        if not LEAST_PIECE_VALUES <= self.piece_values <= MAX_PIECE_VALUES:
            raise MessageError(f"pieces of {self.piece_values} values")
        if not 0 <= self.begin <= self.end <= MAX_TOKENS:
            raise MessageError(f"tokens from {self.begin} to {self.end} are no range")
        if not 0 <= self.behind <= self.round:
            raise MessageError(f"{self.behind} rounds behind in round {self.round}")

    @property
    def tokens(self) -> int:
        """How many tokens the cut stands for."""
        return self.end - self.begin


@frozen
class Share(Message, tag="share/1"):
    """One member of a view: its cut's digest, and the weight of what its group gained."""

    name: Name
    digest: Digest
    weight: float

    def __attrs_post_init__(self) -> None:
        if not 0.0 <= self.weight <= 1.0:
            raise MessageError(f"{self.name} has the weight {self.weight}")


@frozen
class View(Message, tag="view/1"):
    """Coordinator: reduce now, in this order of members.

    shares: of each member in the order of ranks, as (name, digest, weight). piece_values: reduced
    in one call; it changes the order of additions, so it belongs to the agreement. codec: how the
    result is coded for clients (the members of a CodecSpec), which it is made of.
    """

    round: int
    attempt: int
    shares: list[Any]
    piece_values: int
    codec: dict[str, Any] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        if (
            not 2 <= len(self.shares) <= MAX_MEMBERS
            or not 1 <= self.piece_values <= MAX_PIECE_VALUES
        ):
            raise MessageError(f"{len(self.shares)} members, pieces of {self.piece_values} values")
        names = [share.name for share in self.members]
        if len(set(names)) != len(names):
            raise MessageError("a view names a member twice", "wrong-form")

    @property
    def members(self) -> list[Share]:
        """The shares, checked. Raises MessageError."""
        return [_share(entry) for entry in self.shares]


def _share(entry: Any) -> Share:
    if not isinstance(entry, list | tuple) or len(entry) != len(("name", "digest", "weight")):
        raise MessageError("a share is a name, a digest and a weight", "wrong-form")
    name, digest, weight = entry
    share = TABLE.from_wire({"m": Share.tag, "name": name, "digest": digest, "weight": weight})
    assert isinstance(share, Share)
    return share


@frozen
class Address(Message, tag="groups_address/1"):
    """Member, passed on by the coordinator: where a rank of an attempt listens (`blob` of gloo)."""

    attempt: int
    key: str
    blob: bytes

    def __attrs_post_init__(self) -> None:
        if len(self.blob) > MAX_BLOB or len(self.key) > MAX_BLOB:
            raise MessageError("an address is too long", "too-long")


@frozen
class Reported(Message, tag="reported/1"):
    """Member: the result of `attempt` has this digest, and is durable here."""

    round: int
    attempt: int
    digest: Digest


@frozen
class Failed(Message, tag="failed/1"):
    """Member: `attempt` failed here."""

    round: int
    attempt: int
    reason: str


@frozen
class Dropped(Message, tag="dropped/1"):
    """Coordinator: `attempt` will not be decided; end its reduction. Another one may follow."""

    round: int
    attempt: int
    reason: str


@frozen
class FetchGlobal(Message, tag="fetch_global/1"):
    """Member: send G_`round`; with the model, if I have none."""

    round: int
    model: bool = False


@frozen
class GlobalModel(Message, tag="global_model/2"):
    """Coordinator: the run's model (`Manifest.to_wire()`), and its `frozen` tensors."""

    manifest: list[Any]
    frozen: list[Any]


@frozen
class GlobalMeta(Meta, tag="global_meta/1"):
    """Stream of global weights: fp32 frames, one per chunk."""

    round: int
    digest: Digest


TABLE = Table(
    GroupHello, GroupWelcome, AskGlobal, Decided, VersionMade, Ending, AllEnded, Poll, Promise,
    Share, View, Address, Reported, Failed, Dropped, FetchGlobal, GlobalModel, GlobalMeta,
)  # fmt: skip
to_wire = TABLE.to_wire
from_wire = TABLE.from_wire
