"""Streams of payloads that cross the cut: coded as the link has room, decoded when complete.

Payload and coded bytes are counted by category and direction where a chunk is coded and where it
arrives.
"""

from collections.abc import Callable

from attrs import define, field, frozen

import fsl_transport as tp
from fsl_async.accounting.sizes import FORMATS, Category, Direction
from fsl_async.accounting.traffic import Traffic
from fsl_async.learn.split.payload import (
    Payload,
    Values,
    chunks_of,
    coding_loss,
    decode_chunks,
    encode_chunk,
    size_of,
    spec_for,
)
from fsl_async.nodes.runtime import Worker
from fsl_async.roles.split.messages import AuxiliaryMeta, GradientMeta, SmashedMeta
from fsl_async.store.model.manifest import CHUNK_VALUES
from fsl_codecs import CodecError, info

_FRAME_HEAD_BYTES = 256


@frozen
class Flow:
    """Category, direction and number format of a stream."""

    category: Category
    direction: Direction
    number_format: str

    def count(self, traffic: Traffic, values: int, size: int) -> None:
        """Count a frame of so many values and bytes."""
        traffic.values(self.category, self.direction, self.number_format, values, size)


def values_of_frame(values: int, index: int) -> int:
    """Values in frame number `index` of a flat vector."""
    return min(CHUNK_VALUES, values - index * CHUNK_VALUES)


@define(eq=False)
class Outgoing:
    """A vector, and labels behind it, coded by the worker as the link has room.

    give: the payload, or None once it was dropped.
    """

    give: Callable[[], Payload | None]
    flow: Flow
    step_log2: int
    worker: Worker
    traffic: Traffic
    chunks: int = field(init=False)
    _measured: set[int] = field(factory=set, init=False)
    _losses: dict[int, tuple[float, float]] = field(factory=dict, init=False)  # not counted yet

    def __attrs_post_init__(self) -> None:
        payload = self.give()
        assert payload is not None, "a stream needs a payload"
        self.chunks = chunks_of(payload.values.size) + bool(payload.labels)

    @property
    def size(self) -> int:
        """Upper bound of the coded bytes: how many may be sent before the offer is accepted."""
        payload = self.give()
        if payload is None:
            return 0
        coded = FORMATS[self.flow.number_format].payload(payload.values.size)
        return coded + len(payload.labels) + coded // 32 + self.chunks * _FRAME_HEAD_BYTES

    def read(self, index: int, deliver: Callable[[tp.Buffer | None], None]) -> None:
        """Code a chunk."""
        self.worker.submit(
            lambda: self._frame(index),
            lambda frame: self._counted(index, frame, deliver),
            lambda _: deliver(None),
        )

    def _frame(self, index: int) -> bytes | None:
        payload = self.give()
        if payload is None:
            return None
        if index >= chunks_of(payload.values.size):
            return payload.labels
        # A chunk requested again is coded again, which is rare: kept frames would take memory for
        # each client.
        spec = spec_for(self.flow.number_format, payload.shape[-1], self.step_log2)
        frame = encode_chunk(payload.values, index, spec)
        if index not in self._measured:
            self._measured.add(index)
            self._losses[index] = coding_loss(payload.values, index, frame)
        return frame

    def _counted(
        self, index: int, frame: bytes | None, deliver: Callable[[tp.Buffer | None], None]
    ) -> None:
        payload, flow = self.give(), self.flow
        if frame is not None and payload is not None:
            if index < chunks_of(payload.values.size):
                flow.count(self.traffic, values_of_frame(payload.values.size, index), len(frame))
                loss = self._losses.pop(index, None)
                if loss is not None:
                    self.traffic.lost(flow.category, flow.direction, *loss)
            else:
                self.traffic.plain(Category.LABELS, flow.direction, len(frame))
        deliver(frame)


@define(eq=False)
class IncomingUpload:
    """An upload on its way to the split server: its metadata, and the chunks that have arrived."""

    meta: SmashedMeta
    flow: Flow
    traffic: Traffic
    chunks: dict[int, bytes] = field(factory=dict)

    def write(self, index: int, data: tp.Buffer, done: Callable[[bool], None]) -> None:
        """Take a chunk."""
        found, values = bytes(data), size_of(self.meta.shape)
        frames, labels = chunks_of(values), self.meta.label_bytes
        if 0 <= index < frames:
            self.flow.count(self.traffic, values_of_frame(values, index), len(found))
        elif labels and index == frames and len(found) == labels:
            self.traffic.plain(Category.LABELS, self.flow.direction, labels)
        else:
            done(False)
            return
        self.chunks[index] = found
        done(True)

    def decoded(self) -> Payload:
        """The complete payload. Raises PayloadError."""
        shape = tuple(self.meta.shape)
        frames = [self.chunks.get(index, b"") for index in range(chunks_of(size_of(shape)))]
        labels = self.chunks.get(len(frames), b"")
        return Payload(
            decode_chunks(frames, size_of(shape)), shape, labels, tuple(self.meta.lengths)
        )


@define(eq=False)
class IncomingVector:
    """An answer or an auxiliary model on its way to a client. Its frames state how large it is."""

    meta: GradientMeta | AuxiliaryMeta
    flow: Flow
    traffic: Traffic
    chunks: dict[int, bytes] = field(factory=dict)

    def write(self, index: int, data: tp.Buffer, done: Callable[[bool], None]) -> None:
        """Take a chunk."""
        self.chunks[index] = found = bytes(data)
        try:
            values = info(found).values
        except CodecError:
            values = CHUNK_VALUES + 1
        if values <= CHUNK_VALUES:
            self.flow.count(self.traffic, values, len(found))
        done(values <= CHUNK_VALUES)

    def decoded(self) -> Values:
        """The complete vector. Raises PayloadError and CodecError."""
        frames = [self.chunks[index] for index in sorted(self.chunks)]
        return decode_chunks(frames, sum(info(frame).values for frame in frames))
