"""The Huffman tables in a frame, for tests of an encoder's choices."""

from fsl_codecs.frame import CODED, Limits, frame_bytes_view, iterate_chunks, parse_header
from fsl_codecs.planes import OWN, read_plan
from fsl_codecs.reader import Reader


def plans_of(frame):
    """Return the plans of the frame's coded chunks, in order."""
    data = frame_bytes_view(frame)
    header = parse_header(data, Limits(1 << 64, max(data.size, 1)))
    return [
        read_plan(Reader(chunk.payload), header.number_format)
        for chunk in iterate_chunks(data, header)
        if chunk.mode == CODED
    ]


def tables_of(frame):
    """Return the tables of all planes that have their own, chunk by chunk."""
    planes = [plane for plan in plans_of(frame) for plane in plan.planes]
    return [plane.table for plane in planes if plane.kind == OWN]
