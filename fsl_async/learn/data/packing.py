"""Packs tokens of texts into windows, from any position on. NumPy only; no clock.

    text | end | text ... text | end | text ...           tokens, endless: epoch after epoch
    |- window 0 -||- window 1 -| ...  |- window 0 -| ...
    |---------- block ------------|   |--- block ...

A window has context + 1 tokens, and shares one with the next, so each token is predicted once. The
windows of a block are drawn in an order of their own, by the seed and the block's position, so that
a batch is not one text. A position is an epoch, the piece that the block begins in, the tokens of
it before the block, and how many windows of the block are drawn. From a position everything goes on
as if it had not stopped; that reads one block again.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self

import attrs
import numpy as np
import numpy.typing as npt

from fsl_async.errors import DataError

if TYPE_CHECKING:
    from fsl_async.learn.data.sources import Piece, Source
    from fsl_async.learn.data.tokenizer import Coder, Tokens

BLOCK_WINDOWS = 256
"""Windows of a block; it is read ahead while the one before is trained on."""
GROUP_PIECES, GROUP_CHARACTERS = 64, 1 << 20
"""Texts that are encoded at once, at most."""

Windows = npt.NDArray[np.int64]


@attrs.frozen(slots=True)
class Position:
    """Where a client is in its part of the data.

    epoch, at, offset: of the block's first token, whose piece is at `at`; drawn: windows of the
    block that are drawn; check: of the data and its division, so that the position of other data is
    not taken for one of these.
    """

    epoch: int = 0
    at: int = 0
    offset: int = 0
    drawn: int = 0
    check: int = 0

    def to_facts(self) -> dict[str, float]:
        """As facts of a delta (`fsl_async.roles.sync.delta.POSITION`)."""
        return {f"data_{name}": float(value) for name, value in attrs.asdict(self).items()}

    @classmethod
    def from_facts(cls, facts: Mapping[str, float]) -> Self | None:
        """Read the output of `to_facts`; None where there is none."""
        names = [field.name for field in attrs.fields(cls)]
        if any(f"data_{name}" not in facts for name in names):
            return None
        return cls(*(int(facts[f"data_{name}"]) for name in names))


def check_of(*parts: object) -> int:
    """A number below 2^48 over `parts`, exact as a float."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:6], "little")


@attrs.frozen(slots=True, eq=False)
class _Block:
    """Tokens of a block and the first of the next; resume: what its first piece had."""

    start: Position
    following: Position
    tokens: Tokens
    resume: Any
    following_resume: Any


class Packer:
    """Endless batches of one client, and the position after the last one.

    seed: of the order within blocks. share: of each batch's windows, this rank's and of how many
    ranks: all ranks read the same.
    Reads ahead in a thread of its own, which ends with the iterator.
    """

    def __init__(
        self,
        source: Source,
        coder: Coder,
        *,
        context: int,
        batch: int,
        seed: str,
        start: Position | None = None,
        resume: Any = None,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        self._source, self._coder = source, coder
        self._context, self._batch, self._seed = context, batch, seed
        self._windows = BLOCK_WINDOWS
        self._share = share
        self.position = start or Position()
        self.resume = resume
        """A state from which the stream goes on at the position; see `Piece`."""
        self._closed = threading.Event()

    def batches(self) -> Iterator[Windows]:
        """int64 (batch, context + 1), from `position` on. Raises DataError."""
        try:
            yield from self._batches()
        finally:
            self._closed.set()

    def _batches(self) -> Iterator[Windows]:
        rank, ranks = self._share
        rows: list[Tokens] = []
        drawn = self.position.drawn
        for block in self._ahead():
            start = block.start
            name = f"{self._seed}/{start.epoch}/{start.at}/{start.offset}"
            rng = np.random.default_rng(list(hashlib.sha256(name.encode()).digest()))
            order = rng.permutation(self._windows)
            for number in range(drawn, self._windows):
                first = int(order[number]) * self._context
                rows.append(block.tokens[first : first + self._context + 1])
                if len(rows) == self._batch * ranks:
                    if number + 1 == self._windows:
                        self.position, self.resume = block.following, block.following_resume
                    else:
                        self.position = attrs.evolve(start, drawn=number + 1)
                        self.resume = block.resume
                    yield np.stack(rows[rank::ranks]).astype(np.int64)
                    rows = []
            drawn = 0

    def _ahead(self) -> Iterator[_Block]:
        """The blocks, each read while the one before is in use."""
        ready: queue.Queue[_Block | BaseException] = queue.Queue(1)

        def put(one: _Block | BaseException) -> bool:
            while not self._closed.is_set():
                try:
                    ready.put(one, timeout=0.2)
                except queue.Full:
                    continue
                return True
            return False

        def read() -> None:
            try:
                for block in self._blocks(self.position, self.resume):
                    if not put(block):
                        return
            except BaseException as error:  # noqa: BLE001 - raised where batches are drawn
                put(error)

        threading.Thread(target=read, name="data", daemon=True).start()
        while True:
            found = ready.get()
            if isinstance(found, BaseException):
                raise found
            yield found

    def _blocks(self, position: Position, resume: Any) -> Iterator[_Block]:
        start, start_resume = attrs.evolve(position, drawn=0), resume
        flow = self._encoded(start, resume)
        length = self._windows * self._context
        chunks: list[Tokens] = []
        # Where pieces begin, and what they are: (index of its first token, epoch, at, resume).
        marks: list[tuple[int, int, int, Any]] = []
        buffered = -start.offset
        while True:
            while buffered < length + 1:
                epoch, piece, tokens = next(flow)
                marks.append((buffered, epoch, piece.at, piece.resume))
                chunks.append(tokens[max(0, -buffered) :])
                buffered += len(tokens)
            flat = np.concatenate(chunks)
            mark = bisect_right([index for index, *_ in marks], length) - 1
            index, epoch, at, after = marks[mark]
            following = attrs.evolve(start, epoch=epoch, at=at, offset=length - index)
            yield _Block(start, following, flat[: length + 1], start_resume, after)
            start, start_resume = following, after
            chunks = [flat[length:]]
            marks = [(index - length, *rest) for index, *rest in marks[mark:]]
            buffered -= length

    def _encoded(self, start: Position, resume: Any) -> Iterator[tuple[int, Piece, Tokens]]:
        """Tokens of each piece that has some, epoch after epoch. Raises DataError."""
        epoch, at = start.epoch, start.at
        while True:
            is_empty = True
            for group in _groups(self._source.read(epoch, at, resume)):
                found = self._coder.encode([piece.text for piece in group])
                for piece, tokens in zip(group, found, strict=True):
                    if piece.ends:
                        tokens = np.append(tokens, np.int32(self._coder.end))  # noqa: PLW2901
                    if len(tokens):
                        is_empty = False
                        yield epoch, piece, tokens
            if is_empty and not at:
                raise DataError(
                    f"data {self._source.name!r} has no text in the part of this client: give more"
                    " text or fewer data.shards"
                )
            epoch, at, resume = epoch + 1, 0, None


def _groups(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Pieces to encode at once; those without text are left out."""
    group: list[Piece] = []
    characters = 0
    for piece in pieces:
        if not piece.text:
            continue
        group.append(piece)
        characters += len(piece.text)
        if len(group) == GROUP_PIECES or characters >= GROUP_CHARACTERS:
            yield group
            group, characters = [], 0
    if group:
        yield group


def held_out_tokens(source: Source, coder: Coder, limit_bytes: int) -> tuple[Tokens, int]:
    """Tokens of held-out texts, with an end before and after each, and the bytes of the texts.

    At most `limit_bytes` of UTF-8, whatever the tokenizer, so that bits per byte can be compared:
    every token but the first is predicted. Raises DataError where nothing is held out.
    """
    chosen: list[str] = []
    left = limit_bytes
    for text in source.held_out():
        if left <= 0:
            break
        data = text.encode(errors="replace")[:left]
        left -= len(data)
        chosen.append(data.decode(errors="ignore"))
    if not any(chosen):
        raise DataError(f"data {source.name!r}: no text is held out (data.holdout)")
    end = np.asarray([coder.end], np.int32)
    tokens = [end]
    for one in coder.encode(chosen):
        tokens += [one, end]
    return np.concatenate(tokens), sum(len(text.encode(errors="replace")) for text in chosen)
